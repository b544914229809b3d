"""Docstrings that a stranger understands: arguments and results of public names are explained."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import headrace as hr
from headrace.adopt.axis_model import AxisModel
from headrace.adopt.spread_model import BatchPart, SpreadModel
from headrace.adopt.token_model import TokenModel
from headrace.config.section import Section
from headrace.engine.attach import Attached
from headrace.engine.loop_runner import LoopMicroBatch
from headrace.engine.step_engine import RunningStep

SOURCE = Path(hr.__file__).parent

ROOMS = (
    "adopt",
    "cli",
    "comm",
    "config",
    "costs",
    "data",
    "engine",
    "errors.py",
    "layouts",
    "lengths.py",
    "methods",
    "models",
    "native",
    "ops",
    "planning",
    "profiling",
    "report",
    "simulator",
    "spec",
    "units.py",
)
"""Rooms all of whose docstrings are sentences."""

LEAST_WORDS = 5

GIVEN = (Attached, LoopMicroBatch, RunningStep, TokenModel)
"""Classes that users are given and never make: their constructors need no words."""

RETURNED = (*GIVEN, AxisModel, BatchPart, SpreadModel)
"""Classes that ``hr.attach``, ``hr.compile`` and ``hr.adapt`` return."""


def _public() -> Iterator[tuple[str, Any]]:
    """Public functions, classes and methods by their names."""
    named: dict[str, Any] = {name: getattr(hr, name) for name in hr.__all__}
    named |= {kind.__name__: kind for kind in RETURNED}
    for module in [name for name, value in named.items() if isinstance(value, ModuleType)]:
        parts = named.pop(module)
        named |= {f"{module}.{part}": getattr(parts, part) for part in parts.__all__}
    for name, value in named.items():
        if inspect.isclass(value):
            yield name, value
            for method, held in vars(value).items():
                plain = getattr(held, "__func__", held)
                if inspect.isfunction(plain) and not method.startswith("_"):
                    yield f"{name}.{method}", plain
        elif inspect.isfunction(value):
            yield name, value


PUBLIC = dict(_public())


def _text(name: str) -> str:
    """The docstring of a public name, and what a method that it implements says of it."""
    owner, _, method = name.partition(".")
    told = getattr(SpreadModel, method, None) if owner in ("TokenModel", "AxisModel") else None
    return "\n".join(inspect.getdoc(one) or "" for one in (PUBLIC[name], told) if one is not None)


def _named(text: str) -> set[str]:
    """What is named in the sections Args and Attributes."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n?)+)", text, re.MULTILINE)
    return {name for held in sections for name in re.findall(r"^    (\w+):", held, re.MULTILINE)}


def _wanted(name: str) -> list[str]:
    """The parameters of a public name that its docstring should name."""
    value = PUBLIC[name]
    if value in GIVEN or (inspect.isclass(value) and issubclass(value, Section)):
        return []
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    makes = vars(value).get("__init__") if inspect.isclass(value) else value
    if makes is None or getattr(value, "_is_protocol", False):
        return []
    return [part for part in inspect.signature(makes).parameters if part not in ("self", "cls")]


@pytest.mark.parametrize("name", PUBLIC)
def test_arguments_and_results_are_explained(name: str) -> None:
    """Catches a public name whose docstring lost its Args or Returns, and a parameter that came
    or was renamed without a word about it."""
    value, text = PUBLIC[name], _text(name)
    lacking = [part for part in _wanted(name) if part not in _named(text)]
    assert lacking == []
    gives = None if inspect.isclass(value) else inspect.signature(value).return_annotation
    if gives not in (None, "None", "NoReturn", inspect.Signature.empty):
        assert re.search(r"^(Returns|Yields):$", text, re.MULTILINE)


def test_a_lost_section_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a reader of docstrings that is content with anything."""
    for lost in ("Args:", "Returns:", "seed:"):
        assert lost in str(hr.plan.__doc__)
        with monkeypatch.context() as patch:
            patch.setattr(hr.plan, "__doc__", str(hr.plan.__doc__).replace(lost, ""))
            with pytest.raises(AssertionError):
                test_arguments_and_results_are_explained("plan")
    test_arguments_and_results_are_explained("plan")


@pytest.mark.parametrize(
    "kind", [value for value in PUBLIC.values() if value in (hr.Config, hr.PlannerConfig)]
)
def test_keys_are_explained(kind: type[Section]) -> None:
    """Catches a key of a configuration without a docstring, of which no page can tell."""
    for name, field in kind.model_fields.items():
        section = field.annotation
        if inspect.isclass(section) and issubclass(section, Section):
            assert section.__doc__, name
            test_keys_are_explained(section)
        else:
            assert field.description, name


def _with_results() -> dict[str, list[doctest.Example]]:
    """The examples of public docstrings that show a result."""
    found = {name: doctest.DocTestParser().get_examples(_text(name)) for name in PUBLIC}
    return {name: some for name, some in found.items() if any(one.want for one in some)}


@pytest.mark.parametrize("name", _with_results())
def test_examples_are_true(name: str) -> None:
    """Catches an example whose result has changed since it was written."""
    examples = _with_results()[name]
    test = doctest.DocTest(examples, {"hr": hr}, name, None, None, None)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def _documented(room: str) -> Iterator[tuple[str, str]]:
    """Public functions, classes and methods of a room, and their docstrings."""
    for path in [SOURCE / room] if room.endswith(".py") else sorted((SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            text = ast.get_docstring(node)
            if text is not None and not node.name.startswith("_"):
                yield f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}", text


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_are_sentences(room: str) -> None:
    """Catches a docstring of a word or two, which only its writer understands."""
    found = dict(_documented(room))
    assert found
    assert [f"{at}: {text}" for at, text in found.items() if len(text.split()) < LEAST_WORDS] == []
