"""The table of a checkpoint: which rows of which tensor lie in which file.

    index.json = {"crc32": of all the rest, "format": 1, "step": 120,
                  "tensors": {name: {"shape": [...], "dtype": "F32"}},
                  "files": [{"file": "rank00000.safetensors", "bytes": 8406044, "crc32": ...,
                             "rows": [[name, first row, rows], ...]}],
                  "extra": any JSON object}

Nothing that comes from disk is believed: every name and number is checked before it is used.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError, did_you_mean
from headrace.runtime.plain_files import require_plain
from headrace.runtime.shards import DTYPES, FileInfo, FilePiece, Interval, StoredShard, TensorInfo

__all__ = ["INDEX", "Index", "join_tables", "require_json", "table_of"]

INDEX = "index.json"

_FORMAT = 1
_MOST_BYTES = 2**31  # of a table of some ten million rows
_FILE = re.compile(r"rank[0-9]{5,9}\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All tensors and files of a checkpoint. Raises CheckpointError when they contradict."""

    step: int
    tensors: Mapping[str, TensorInfo]
    files: tuple[FileInfo, ...]
    extra: Mapping[str, Any]

    def __post_init__(self) -> None:
        if len({file.file for file in self.files}) != len(self.files):
            raise _malformed("a file named twice")
        for file in self.files:
            size = 0
            for interval in file.intervals:
                info = self.tensors.get(interval.name)
                if info is None or interval.stop > info.shape[0]:
                    raise _malformed(f"{file.file} with rows {interval.key[:60]} of no tensor")
                size += interval.rows * info.row_bytes
            # With this no index can make a reader ask for more memory than there is on disk.
            if size > file.bytes:
                raise _malformed(f"{file.file} of {file.bytes} bytes with {size} bytes of rows")

    def info(self, name: str) -> TensorInfo:
        """Shape and type of a tensor; raises CheckpointError with a did-you-mean."""
        if name not in self.tensors:
            hint = did_you_mean(name, self.tensors) or "the checkpoint is of another model"
            raise CheckpointError(f"no tensor {name!r} in the checkpoint", hint=hint)
        return self.tensors[name]

    def pieces(self, wanted: Sequence[Interval]) -> list[list[FilePiece]]:
        """For each wanted interval the disjoint pieces that it is put together from, in order.

        Raises CheckpointError when a row lies in no file.
        """
        held: dict[str, list[tuple[FileInfo, Interval]]] = defaultdict(list)
        for file in self.files:
            for interval in file.intervals:
                held[interval.name].append((file, interval))
        for pairs in held.values():
            pairs.sort(key=lambda pair: pair[1].first_row)
        return [_cover(interval, held[interval.name]) for interval in wanted]

    def check_whole(self, names: Iterable[str]) -> None:
        """Raise CheckpointError when a row of one of these tensors lies in no file."""
        rows = {name: self.tensors[name].shape[0] for name in names}
        self.pieces([Interval(name=name, first_row=0, rows=n) for name, n in rows.items()])

    def to_text(self) -> str:
        """The text of ``index.json``; raises CheckpointError when ``extra`` is not JSON."""
        body = {
            "format": _FORMAT,
            "step": self.step,
            "tensors": {name: _tensor_to_json(info) for name, info in self.tensors.items()},
            "files": [_file_to_json(file) for file in self.files],
            "extra": self.extra,
        }
        require_json(self.extra)
        body = json.loads(json.dumps(body))  # keys become text here, before the checksum
        return json.dumps({"crc32": _checksum(body), **body})

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of a checkpoint; raises CheckpointError when it is missing or malformed."""
        path = folder / INDEX
        try:
            require_plain(path, most=_MOST_BYTES)
            return _from_json(json.loads(path.read_bytes(), parse_constant=_no_number))
        except CheckpointError as error:
            raise CheckpointError(str(path), got=error.got, wanted=error.wanted)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"checkpoint {folder}", got=f"no {INDEX}", wanted="a whole one")
        except OSError as error:
            raise CheckpointError(str(path), got=error.strerror, wanted="a readable file")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(str(path), got=f"{error}", wanted="JSON")


def require_json(extra: Mapping[str, Any]) -> None:
    """Raise CheckpointError when this could be no ``extra`` of a checkpoint."""
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError("extra of a checkpoint", got=error, wanted="a JSON object")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _cover(wanted: Interval, held: Sequence[tuple[FileInfo, Interval]]) -> list[FilePiece]:
    pieces: list[FilePiece] = []
    at = wanted.first_row
    for file, interval in held:
        if interval.first_row <= at < min(interval.stop, wanted.stop):
            stop = min(interval.stop, wanted.stop)
            pieces.append(FilePiece(file=file, interval=interval, first_row=at, stop=stop))
            at = stop
    if at < wanted.stop:
        raise CheckpointError(
            f"rows of {wanted.name}",
            got=f"none for row {at}",
            wanted=f"rows [{wanted.first_row}, {wanted.stop})",
        )
    return pieces


def table_of(shards: Sequence[StoredShard], file: FileInfo) -> dict[str, Any]:
    """What one rank tells of its file and of its tensors, those without rows too, as JSON."""
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        _add(tensors, shard.name, shard.info)
    told = {name: _tensor_to_json(info) for name, info in tensors.items()}
    return {"tensors": told, "file": _file_to_json(file)}


def join_tables(tables: Sequence[Any], *, step: int, extra: Mapping[str, Any]) -> Index:
    """The index of what all ranks tell (:func:`table_of`), in rank order.

    Raises CheckpointError when ranks contradict each other or rows are missing.
    """
    tensors: dict[str, TensorInfo] = {}
    for table in tables:
        for name, told in table["tensors"].items():
            _add(tensors, name, _tensor(told))
    files = tuple(_file(table["file"]) for table in tables)
    index = Index(step=step, tensors=tensors, files=files, extra=extra)
    index.check_whole(tensors)
    return index


def _add(tensors: dict[str, TensorInfo], name: str, info: TensorInfo) -> None:
    if tensors.setdefault(name, info) != info:
        raise CheckpointError(
            f"shards of {name}", got=f"{tensors[name]} and {info}", wanted="one type and shape"
        )


def _tensor_to_json(info: TensorInfo) -> dict[str, Any]:
    return {"shape": list(info.shape), "dtype": info.dtype}


def _file_to_json(file: FileInfo) -> dict[str, Any]:
    rows = [[i.name, i.first_row, i.rows] for i in file.intervals]
    return {"file": file.file, "bytes": file.bytes, "crc32": file.crc32, "rows": rows}


def _file(value: Any) -> FileInfo:
    name = _get(value, "file", str)
    # Nothing else is ever opened, whatever the index says: no other folder, no "..".
    if not _FILE.fullmatch(name):
        raise _malformed(
            f"the file name {_short(name)}", wanted="one such as rank00000.safetensors"
        )
    return FileInfo(
        file=name,
        bytes=_count(_get(value, "bytes", int), "bytes"),
        crc32=_count(_get(value, "crc32", int), "crc32"),
        intervals=tuple(_interval(row) for row in _get(value, "rows", list)),
    )


def _interval(row: Any) -> Interval:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str):
        raise _malformed(f"the rows {_short(row)}", wanted="[name, first row, rows]")
    first_row, rows = _count(row[1], "first row"), _count(row[2], "rows")
    return Interval(name=row[0], first_row=first_row, rows=rows)


def _tensor(value: Any) -> TensorInfo:
    shape = tuple(_count(n, "a shape of") for n in _get(value, "shape", list))
    dtype = _get(value, "dtype", str)
    if dtype not in DTYPES:
        raise _malformed(f"the type {_short(dtype)}", wanted=f"one of {', '.join(DTYPES)}")
    if not shape or prod(max(n, 1) for n in shape) * DTYPES[dtype].itemsize >= 2**63:
        raise _malformed(f"the shape {_short(shape)}", wanted="one that fits a machine")
    return TensorInfo(shape=shape, dtype=dtype)


def _from_json(value: Any) -> Index:
    version = _get(value, "format", int)
    if version != _FORMAT:
        raise _malformed(f"format {version}", wanted=f"format {_FORMAT}")
    body = {name: part for name, part in value.items() if name != "crc32"}
    if _checksum(body) != _get(value, "crc32", int):
        raise _malformed("a checksum that differs", wanted="the index as it was written")
    tensors = _get(value, "tensors", dict)
    return Index(
        step=_count(_get(value, "step", int), "step"),
        tensors={name: _tensor(info) for name, info in tensors.items()},
        files=tuple(_file(file) for file in _get(value, "files", list)),
        extra=_get(value, "extra", dict),
    )


def _checksum(body: Mapping[str, Any]) -> int:
    # What json reads it writes again in the same text, so the text need not be kept.
    return zlib.crc32(json.dumps(body).encode())


def _malformed(got: str, *, wanted: str = "a well-formed index") -> CheckpointError:
    return CheckpointError(INDEX, got=got, wanted=wanted)


def _get(value: Any, key: str, kind: type) -> Any:
    part = value.get(key) if isinstance(value, dict) else None
    if not isinstance(part, kind) or isinstance(part, bool):
        raise _malformed(f"{key} = {_short(part)}", wanted=f"a {kind.__name__}")
    return part


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _malformed(f"{what} {_short(value)}", wanted="whole numbers >= 0")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
