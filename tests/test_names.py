"""Names in the source: a method is named in its facts alone, a public class is defined once, and no
table of the tests has the name of another."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import headrace
from headrace.spec.known_methods import FACTS

SOURCE, TESTS = Path(headrace.__file__).parent, Path(__file__).parent

FACTS_FILE = "spec/known_methods.py"


def _modules(folder: Path = SOURCE) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), ast.parse(path.read_text())


def test_no_method_is_named_outside_its_facts() -> None:
    """Would catch a planner, a cost or a command that treats one method apart: what is special
    about it belongs in its facts."""
    named = {
        f"{name}:{node.lineno} {node.value}"
        for name, tree in _modules()
        if name != FACTS_FILE
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in FACTS
    }
    assert named == set()


def test_a_public_class_is_defined_once() -> None:
    """Would catch one noun with two meanings."""
    defined = Counter(
        node.name
        for _, tree in _modules()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in defined.items() if count > 1} == set()


def _bound(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives values to, as often as it does."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_a_name_of_a_module_has_one_value() -> None:
    """Would catch a second table of the same name, which functions above it find in place of
    theirs: linters see it of functions alone, and types are checked in the source alone."""
    found = {
        (name, bound)
        for name, tree in _modules(TESTS)
        for bound, count in Counter(_bound(tree)).items()
        if count > 1
    }
    assert found == set()
