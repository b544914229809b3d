"""What callers give, checked where it comes in: numbers, values of a class, files of JSON."""

from __future__ import annotations

import json
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import HeadraceError, SpecError, shortened

__all__ = [
    "MOST_WHOLE",
    "number",
    "of_kind",
    "parse_json",
    "path_of",
    "read_json",
    "require_place",
    "shown",
    "whole",
]

Kind = TypeVar("Kind")

MOST_WHOLE = 2**63 - 1
"""The largest whole number that arrays of 64 bits hold."""

_MOST_DIGITS = 300  # of a whole number in JSON: a float holds its size
_SHOWN_BITS = 256  # of a whole number; Python refuses to write very long ones


def whole(
    what: str,
    value: object,
    *,
    least: int = 0,
    most: int = MOST_WHOLE,
    error: type[HeadraceError] = SpecError,
) -> int:
    """A whole number of any kind, such as one of numpy's, as an int. Raises ``error``, about
    ``what``, for anything else, for a fraction and a text among them, and for one that is less than
    ``least`` or more than ``most``."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        found = int(value)
        if least <= found <= most:
            return found
    limits = f">= {least:,} of 64 bits" if most == MOST_WHOLE else f"from {least:,} to {most:,}"
    raise error(what, got=shown(value), wanted=f"a whole number {limits}")


def number(
    what: str,
    value: object,
    *,
    least: float = -inf,
    most: float = inf,
    error: type[HeadraceError] = SpecError,
) -> float:
    """A finite number of any kind as a float. Raises ``error``, about ``what``, for anything else,
    and for one that is less than ``least`` or more than ``most``."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:  # a whole number beyond all floats
            found = inf
        if least <= found <= most and abs(found) < inf:
            return found
    limits = [f">= {least:g}"] * (least > -inf) + [f"<= {most:g}"] * (most < inf)
    raise error(what, got=shown(value), wanted=" ".join(["a finite number", *limits]))


def of_kind(
    what: str,
    value: object,
    kind: type[Kind] | tuple[type[Kind], ...],
    *,
    hint: str | None = None,
    error: type[HeadraceError] = SpecError,
) -> Kind:
    """The value, which is of the class ``kind`` or one of several. Raises ``error``, about
    ``what``, for another."""
    if isinstance(value, kind):
        return value
    names = [each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,))]
    wanted = f"{'an' if names[0][0] in 'AEIOU' else 'a'} {' or '.join(names)}"
    raise error(what, got=shown(value), wanted=wanted, hint=hint)


def read_json(
    path: str | Path,
    what: str,
    *,
    hint: str | None = None,
    error: type[HeadraceError] = SpecError,
) -> Any:
    """The value in a file of JSON. Raises ``error``, about ``what``, where it cannot be read or is
    no JSON."""
    try:
        content = path_of(what, path, error=error).read_bytes()
    except OSError as wrong:
        raise error(what, got=wrong.strerror, wanted="a readable file", hint=hint)
    try:
        return parse_json(content)
    except ValueError as wrong:
        raise error(what, got=f"no JSON ({wrong})", hint=hint)


def parse_json(text: str | bytes) -> Any:
    """The value that a text of JSON stands for. Raises ValueError for other text, for one that is
    nested too deep, and for a whole number that no float is as large as."""
    try:
        return json.loads(text, parse_int=_whole_of)
    except RecursionError:
        raise ValueError("nested too deep")


def _whole_of(digits: str) -> int:
    """The whole number of digits in JSON; raises ValueError for one beyond all floats."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def path_of(what: str, value: object, *, error: type[HeadraceError] = SpecError) -> Path:
    """The path of a text, or a path as it is. Raises ``error``, about ``what``, for anything else,
    and for a path that no file system knows."""
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise error(what, got=f"the path {shown(value)}", wanted="a path without NUL")
    return Path(value)


def require_place(what: str, path: Path, *, error: type[HeadraceError] = SpecError) -> None:
    """Raise ``error``, about ``what``, for a path at which no file can be made: one of a folder, or
    in a folder that is not there. For files that are written when long work is done."""
    if path.is_dir() or not path.parent.is_dir():
        got = "a folder" if path.is_dir() else "no such folder"
        raise error(what, got=got, wanted="a file in a folder that is there")


def shown(value: object) -> str:
    """A value as errors show it."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a number of {value.bit_length():,} bits"
    return shortened(repr(value))
