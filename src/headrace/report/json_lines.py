"""Reading JSON files that a killed run may have left half written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from headrace.errors import DataError, did_you_mean

__all__ = ["Fields", "read_lines", "read_object"]

_LARGEST = 10**18
"""No count, size or time of a run comes near; sums of what is smaller stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of one JSON object; ``place`` names it in errors."""

    values: Mapping[str, Any]
    place: str

    def _get(self, key: str, kinds: tuple[type, ...], wanted: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is not None:
                return default
            hint = did_you_mean(key, self.values)
            raise DataError(f"{self.place}, {key}", got="nothing", wanted=wanted, hint=hint)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise DataError(f"{self.place}, {key}", got=repr(value)[:60], wanted=wanted)
        return value

    def number(self, key: str, default: float | None = nan, *, signed: bool = False) -> float:
        """A number, at least zero unless ``signed``, NaN for infinities; ``default`` when absent
        or null, DataError when that is None."""
        value = self._get(key, (int, float), "a number", default)
        if value < 0 and not signed:
            raise DataError(f"{self.place}, {key}", got=value, wanted=">= 0")
        return _finite(value)

    def positive(self, key: str) -> float:
        """A number above zero. Raises DataError for anything else."""
        value = self.number(key, None)
        if not value > 0:
            raise DataError(f"{self.place}, {key}", got=self.values[key], wanted="above 0")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number of at least ``least``; ``default`` when absent or null, DataError when
        that is None."""
        value = int(self._get(key, (int,), "a whole number", default))
        if not least <= value < _LARGEST:
            raise DataError(f"{self.place}, {key}", got=value, wanted=f">= {least}")
        return value

    def text(self, key: str, default: str | None = "unknown") -> str:
        """A text; ``default`` when absent or null."""
        return str(self._get(key, (str,), "a text", default))

    def array(self, key: str) -> list[Any]:
        """A list, empty when absent or null."""
        return list(self._get(key, (list,), "a list", []))

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers (null becomes NaN), empty when absent or null."""
        values = self.array(key)
        if any(isinstance(v, bool) or not isinstance(v, int | float | None) for v in values):
            raise DataError(f"{self.place}, {key}", got=repr(values)[:60], wanted="numbers")
        return tuple(_finite(value) for value in values)

    def object(self, key: str) -> Fields:
        """A nested object, empty when absent or null."""
        values = self._get(key, (dict,), "an object", {})
        return Fields(values=values, place=f"{self.place}, {key}")

    def objects(self, key: str) -> tuple[Fields, ...]:
        """A list of nested objects, empty when absent or null."""
        place = f"{self.place}, {key}"
        values = self.array(key)
        if not all(isinstance(value, dict) for value in values):
            raise DataError(place, got=repr(values)[:60], wanted="a list of objects")
        return tuple(Fields(values=value, place=place) for value in values)


def _finite(value: float | None) -> float:
    return float(value) if value is not None and abs(value) < _LARGEST else nan


def read_object(path: Path) -> Fields:
    """The one JSON object of a file. Raises DataError when it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(str(path), got=str(error), wanted="a JSON object")
    if not isinstance(value, dict):
        raise DataError(str(path), got=type(value).__name__, wanted="a JSON object")
    return Fields(values=value, place=path.name)


def read_lines(path: Path, notes: list[str]) -> Iterator[Fields]:
    """The JSON objects of a file, one per line.

    A line that is no JSON object (a killed run leaves half a line) is skipped and noted in
    ``notes``. Raises DataError when the file cannot be opened.
    """
    skipped: list[int] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                value = _parsed(line)
                if value is None:
                    skipped.append(number)
                else:
                    yield Fields(values=value, place=f"{path.name} line {number}")
    except OSError as error:
        raise DataError(str(path), got=str(error), wanted="a readable file")
    if skipped:
        shown = ", ".join(map(str, skipped[:5])) + (", ..." if len(skipped) > 5 else "")
        plural = "lines" if len(skipped) > 1 else "line"
        notes.append(f"{path.name}: {plural} {shown} cut short or damaged, skipped")


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
