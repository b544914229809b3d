"""Names in the source: a method is named in its facts alone, a public class is defined once."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import headrace
from headrace.spec.known_methods import FACTS

SOURCE = Path(headrace.__file__).parent

FACTS_FILE = "spec/known_methods.py"


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())


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
