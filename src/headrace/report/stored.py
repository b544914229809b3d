"""JSON that a killed run may have left half written, as values of typed fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import nan
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from headrace.errors import DataError, HeadraceError

__all__ = ["Amount", "Count", "Number", "Object", "Ranks", "read_lines", "read_object"]

_LARGEST = 10**18
"""Above every count, size and time of a run; sums of smaller numbers stay finite."""

_Value = TypeVar("_Value")


def _amount(value: float) -> float:
    """The value; raises ValueError for a negative one. NaN passes."""
    if value < 0:
        raise ValueError(">= 0")
    return value


Number = Annotated[
    float,
    BeforeValidator(lambda value: nan if value is None else value),
    AfterValidator(lambda value: value if abs(value) < _LARGEST else nan),
]
"""A number; NaN for null and what is not finite."""

Amount = Annotated[Number, AfterValidator(_amount)]
"""A number of at least zero, or NaN."""

Count = Annotated[int, Field(ge=0, lt=_LARGEST)]
Ranks = Annotated[int, Field(ge=1, lt=_LARGEST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """A JSON object; ``place`` names it in errors."""

    values: dict[str, Any]
    place: str

    def read(self, kind: type[_Value], **more: object) -> _Value:
        """The dataclass ``kind``, its fields read by their annotations from this object and
        ``more``; keys that no field asks for are passed over. Raises DataError that names what is
        malformed."""
        return self.checked(lambda: _adapter(kind).validate_python(self.values | more))

    def checked(self, make: Callable[[], _Value]) -> _Value:
        """The result of ``make``, a function that reads this object. Its errors become DataErrors
        that name the place."""
        try:
            return make()
        except ValidationError as error:  # of pydantic: the first of its errors is told
            first = error.errors(include_url=False)[0]
            absent = first["type"] == "missing"
            got = "nothing" if absent else repr(first["input"])[:60]
            wanted = "a value" if absent else first["msg"].removeprefix("Input should be ")
            wanted = wanted.removeprefix("Value error, ")
            what = ", ".join(map(str, [self.place, *first["loc"]]))
            raise DataError(what, got=got, wanted=wanted)
        except HeadraceError as error:
            raise DataError(f"{self.place}, {error}")
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(self.place, got=str(error), wanted="the JSON form of a value")


@cache
def _adapter(kind: type[_Value]) -> TypeAdapter[_Value]:
    """The validator of a dataclass, made once, as that takes long."""
    return TypeAdapter(kind)


def read_object(path: Path) -> Object:
    """The one JSON object of a file. Raises DataError when it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(str(path), got=str(error), wanted="a JSON object")
    if not isinstance(value, dict):
        raise DataError(str(path), got=type(value).__name__, wanted="a JSON object")
    return Object(values=value, place=path.name)


def read_lines(path: Path, notes: list[str]) -> Iterator[Object]:
    """The JSON objects of a file, one per line.

    A line that is no JSON object (a killed run leaves half a line) is skipped and noted in
    ``notes``. Raises DataError when the file cannot be opened.
    """
    skipped: list[int] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                value = _parse(line)
                if value is not None:
                    yield Object(values=value, place=f"{path.name} line {number}")
                elif line.strip():
                    skipped.append(number)
    except OSError as error:
        raise DataError(str(path), got=str(error), wanted="a readable file")
    if skipped:
        shown = ", ".join(map(str, skipped[:5])) + (", ..." if len(skipped) > 5 else "")
        plural = "lines" if len(skipped) > 1 else "line"
        notes.append(f"{path.name}: {plural} {shown} cut short or damaged, skipped")


def _parse(text: str) -> dict[str, Any] | None:
    """The JSON object in a text, None when it is not JSON or not an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
