"""How many numbers steer the search for plans."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import headrace.planning

ROOM = Path(headrace.planning.__file__).parent
OF_ARITHMETIC = {"ROUNDING", "NEVER", "_ROUNDING_BYTES", "_FORWARD"}
"""Numbers that steer nothing: what rounding is, what stands for infinite, a share of work."""
MOST = 50


def values_in(node: ast.expr | None) -> list[float]:
    """The numbers in an expression, or none where it is a table of something else."""
    if node is None or isinstance(node, ast.Dict):
        return []
    found = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return [value for value in found if isinstance(value, (int, float)) and value is not True]


def numbers_of(path: Path) -> Iterator[str]:
    """Names of the numbers of a file: constants, and fields of classes that have one by default."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            targets = node.targets[0]
            names = targets.elts if isinstance(targets, ast.Tuple) else [targets]
            if values_in(node.value):
                yield from (ast.unparse(name) for name in names if ast.unparse(name).isupper())
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            # 0 and 1 are the absence of something.
            if isinstance(field, ast.AnnAssign) and set(values_in(field.value)) - {0, 1}:
                yield f"{node.name}.{ast.unparse(field.target)}"


def test_numbers_that_steer_the_search_are_few() -> None:
    """Catches one more constant that nobody weighed: what cannot be forgotten cannot be made
    simpler. ``benchmarks/worlds.py --ablate`` says what a number gains."""
    files = sorted(ROOM.glob("*.py"))
    found = [f"{path.stem}.{name}" for path in files for name in numbers_of(path)]
    kept = [name for name in found if name.split(".")[-1] not in OF_ARITHMETIC]
    assert "waves._HEADS" in kept
    assert "improvement.Improvement.packed" in kept
    assert len(kept) <= MOST, kept
