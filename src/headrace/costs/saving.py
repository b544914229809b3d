"""Files of costs: written whole or left as they were; those kept between runs have a checksum."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import CostError
from headrace.spec.given import parse_json, path_of, read_json

__all__ = ["load_costs", "named_costs", "save_whole", "sealed", "unsealed"]

Costs = TypeVar("Costs")

_SEAL = "crc32"  # the key of the checksum in the JSON object


def sealed(value: Mapping[str, Any]) -> str:
    """The text of a JSON object with its checksum: without it a digit that flips on the disk would
    go unnoticed."""
    return json.dumps({_SEAL: _checksum(value), **value}) + "\n"


def unsealed(text: str) -> dict[str, Any]:
    """The object in a text of :func:`sealed`, without its checksum. Raises ValueError when the text
    is damaged."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    if value.pop(_SEAL, None) != _checksum(value):
        raise ValueError("its checksum differs")
    return value


def _checksum(value: Mapping[str, Any]) -> int:
    """CRC-32 of the JSON text of ``value``. A value that was read from JSON is written as the same
    text again, so the checksum can be compared after reading."""
    return zlib.crc32(json.dumps(value).encode())


def load_costs(path: str | Path, make: Callable[[Any], Costs], hint: str | None = None) -> Costs:
    """The costs that ``make`` reads from the JSON of a file. Raises CostError, naming the file,
    where it cannot be read, with a ``hint``, and where ``make`` raises one."""
    what = f"costs {path}"
    return named_costs(what, make, read_json(path, what, hint=hint, error=CostError))


def named_costs(what: str, make: Callable[[Any], Costs], value: Any) -> Costs:
    """The costs that ``make`` reads from the JSON ``value`` of the file that ``what`` names.
    Raises CostError, naming it, where ``make`` raises one."""
    try:
        return make(value)
    except CostError as error:
        raise CostError(
            f"{what}: {error.what}", got=error.got, wanted=error.wanted, hint=error.hint
        )


def save_whole(path: str | Path, text: str, what: str) -> None:
    """Write a text file in one step: to a temporary name beside it, which is then renamed. Makes
    its folder when there is none. Raises CostError, naming ``what``, when it cannot be written;
    an older file is then as it was."""
    path = path_of(what, path, error=CostError)
    part = path.parent / f"{path.name}.{os.getpid()}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise CostError(f"{what} {path}", got=error.strerror, wanted="a writable file")
