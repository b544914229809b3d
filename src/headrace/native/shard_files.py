"""The safetensors files of a checkpoint: written in one pass, checked, read by rows.

The format is written here because the package's own writer makes no checksum on the way, takes
all tensors at once (a device's whole state would have to lie in host memory), and refuses tensors
that share memory. Reading goes through the package.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError, SpecError, did_you_mean

__all__ = [
    "DTYPES",
    "FileInfo",
    "FilePiece",
    "INDEX",
    "Index",
    "Interval",
    "StoredShard",
    "TensorInfo",
    "check_file",
    "check_header",
    "fsync_folder",
    "join_tables",
    "read_pieces",
    "require_json",
    "require_plain",
    "table_of",
    "write_shards",
    "write_text",
]

# The names that safetensors gives to element types.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Global shape and element type (a key of DTYPES) of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the tensor."""
        return prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        """Type and shape, for errors."""
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Rows [first_row, first_row + rows) of the tensor ``name`` in one file."""

    name: str
    first_row: int
    rows: int

    @property
    def stop(self) -> int:
        """The first row behind the interval."""
        return self.first_row + self.rows

    @property
    def key(self) -> str:
        """The tensor's name in the file: one file may hold several intervals of a tensor."""
        return f"{self.name}@{self.first_row}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One safetensors file: its name, size, checksum (zlib.crc32 of all of it) and intervals."""

    file: str
    bytes: int
    crc32: int
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """Rows [first_row, stop) of a tensor, counted in the whole tensor, which are to be read from an
    ``interval`` of a file that has them."""

    file: FileInfo
    interval: Interval
    first_row: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """One rank's rows of a tensor: rows [first_row, first_row + len(tensor)) of the tensor ``name``
    of global ``shape``.

    ``tensor`` [rows, *shape[1:]] may have no rows, and lie on any device. Raises SpecError when
    the rows do not lie within the shape, or when no file can hold the element type.
    """

    name: str
    first_row: int
    tensor: torch.Tensor
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise SpecError for rows that are not within the whole tensor, and for a type that files
        do not hold."""
        shape, wanted = tuple(self.tensor.shape), tuple(self.shape)
        if not wanted or len(shape) != len(wanted) or shape[1:] != wanted[1:]:
            raise SpecError(f"shard of {self.name}", got=shape, wanted=f"rows of {wanted}")
        if not 0 <= self.first_row <= self.interval.stop <= wanted[0]:
            rows = f"rows [{self.first_row}, {self.interval.stop})"
            raise SpecError(f"shard of {self.name}", got=rows, wanted=f"within {wanted[0]} rows")
        if self.tensor.dtype not in _NAMES:
            types = ", ".join(str(dtype) for dtype in _NAMES)
            raise SpecError(
                f"shard of {self.name}", got=self.tensor.dtype, wanted=f"one of {types}"
            )

    @property
    def info(self) -> TensorInfo:
        """Shape and type of the whole tensor, as in the index."""
        return TensorInfo(shape=tuple(self.shape), dtype=_NAMES[self.tensor.dtype])

    @property
    def interval(self) -> Interval:
        """These rows, as in the index."""
        return Interval(name=self.name, first_row=self.first_row, rows=self.tensor.shape[0])


def require_plain(path: Path, *, most: int) -> int:
    """The size of a file in bytes. Raises CheckpointError for a pipe, a device or a folder, and for
    more than ``most`` bytes; OSError where there is no file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(str(path), got="a pipe, device or folder", wanted="a plain file")
    if status.st_size > most:
        raise CheckpointError(
            str(path), got=f"{status.st_size} bytes", wanted=f"{most}", hint="the file is too long"
        )
    return status.st_size


# Small enough that what was summed is still in the processor's cache when it is written.
_CHUNK_BYTES = 2**20


def write_shards(path: Path, shards: Sequence[StoredShard]) -> FileInfo:
    """Write the rows of ``shards`` to a new file and wait until the disk has them.

    Shards without rows are left out. Tensors are copied to the host one at a time. Raises OSError
    where the file cannot be written, CheckpointError when two shards begin at the same row of one
    tensor.
    """
    # Larger elements first, so that each tensor begins at a multiple of its element size.
    kept = sorted((s for s in shards if s.interval.rows), key=lambda s: -s.tensor.element_size())
    head = _header(kept)
    size, crc32 = len(head), zlib.crc32(head)
    with path.open("wb") as file:
        file.write(head)
        for shard in kept:
            rows = _bytes_of(shard.tensor)
            size += len(rows)
            for at in range(0, len(rows), _CHUNK_BYTES):
                chunk = rows[at : at + _CHUNK_BYTES]
                # the checksum is taken on the way, instead of by reading the file again
                crc32 = zlib.crc32(chunk, crc32)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    intervals = tuple(shard.interval for shard in kept)
    return FileInfo(file=path.name, bytes=size, crc32=crc32, intervals=intervals)


def write_text(path: Path, text: str) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _header(shards: Sequence[StoredShard]) -> bytes:
    """The header of a safetensors file of these shards, in order: its length in 8 bytes, then JSON,
    padded with spaces. Raises CheckpointError for two shards at the same row of a tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0  # of the shard's bytes, counted from the end of the header
    for shard in shards:
        interval, info = shard.interval, shard.info
        if interval.key in entries:
            raise CheckpointError(f"shards of {shard.name}", got=f"two at row {shard.first_row}")
        end = begin + interval.rows * info.row_bytes
        shape = [interval.rows, *info.shape[1:]]
        entries[interval.key] = {"dtype": info.dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries).encode()
    # padded to a multiple of 8, so that data begins aligned
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor, in host memory, row after row."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def check_file(folder: Path, file: FileInfo, *, checksum: bool) -> None:
    """Raise CheckpointError, naming the file, when it is missing, has another size than in the
    index or, where ``checksum`` asks for it, another CRC-32."""
    path = folder / file.file
    try:
        size = require_plain(path, most=file.bytes)
        if size < file.bytes:
            raise CheckpointError(
                str(path), got=f"{size} bytes", wanted=f"{file.bytes}", hint="the file is truncated"
            )
        if checksum and _crc32(path) != file.crc32:
            raise CheckpointError(f"{path}: checksum differs", hint="the file is damaged")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing")
    except OSError as error:
        raise CheckpointError(str(path), got=error.strerror, wanted="a readable file")


def _crc32(path: Path) -> int:
    """The CRC-32 of a file, read a chunk at a time."""
    crc32, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return crc32


def read_pieces(path: Path, wanted: Sequence[tuple[StoredShard, FilePiece]]) -> None:
    """Copy each piece of the file at ``path`` into the tensor of the shard that it is paired with.

    Raises CheckpointError when the file does not hold what the index says.
    """
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for shard, piece in wanted:
                held_rows = _rows_in(path, file, piece.interval, shard.info)
                # A piece's rows are counted in the whole tensor: subtract the first row of the
                # file's interval, and that of the shard.
                first_held = piece.interval.first_row
                rows = held_rows[piece.first_row - first_held : piece.stop - first_held]
                target_row = piece.first_row - shard.first_row
                shard.tensor[target_row : target_row + len(rows)].copy_(rows)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(path), got=f"{error}", wanted="the tensors of the index")


def check_header(folder: Path, file: FileInfo, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError when the header of a ``file`` does not have the intervals, shapes and
    types that the index says. No rows are read."""
    path = folder / file.file
    try:
        with safe_open(path, framework="pt") as opened:
            for interval in file.intervals:
                _rows_in(path, opened, interval, tensors[interval.name])
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(path), got=f"{error}", wanted="the tensors of the index")


def _rows_in(path: Path, file: Any, interval: Interval, info: TensorInfo) -> Any:
    """The rows of an ``interval`` in the open safetensors ``file`` at ``path``, as a lazy slice,
    which reads what it is indexed by. Raises CheckpointError where their type or shape in the file
    is not that of the index, in which the whole tensor is ``info``."""
    held = file.get_slice(interval.key)
    shape = [interval.rows, *info.shape[1:]]
    if (held.get_dtype(), held.get_shape()) != (info.dtype, shape):
        got = f"{held.get_dtype()} {held.get_shape()}"
        raise CheckpointError(f"{path}: {interval.key}", got=got, wanted=f"{info.dtype} {shape}")
    return held


def fsync_folder(folder: Path) -> None:
    """Wait until the disk has the entries of a folder: the names of new or renamed files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


INDEX = "index.json"

_FORMAT = 1  # version of the index
_MOST_BYTES = 2**31  # of an index; one of some ten million intervals has as many
_FILE = re.compile(r"rank[0-9]{5,9}\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All tensors and files of a checkpoint, as ``index.json`` has them. Raises CheckpointError
    when they contradict each other."""

    step: int
    tensors: Mapping[str, TensorInfo]
    files: tuple[FileInfo, ...]
    extra: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raise CheckpointError for an index in which a file comes twice, a file has rows that no
        tensor has, or its rows need more bytes than it has."""
        if len({file.file for file in self.files}) != len(self.files):
            raise _index_error("a file named twice")
        for file in self.files:
            size = 0
            for interval in file.intervals:
                info = self.tensors.get(interval.name)
                if info is None or interval.stop > info.shape[0]:
                    raise _index_error(f"{file.file} with rows {interval.key[:60]} of no tensor")
                size += interval.rows * info.row_bytes
            # With this no index can make a reader ask for more memory than there is on disk.
            if size > file.bytes:
                raise _index_error(f"{file.file} of {file.bytes} bytes with {size} bytes of rows")

    def info(self, name: str) -> TensorInfo:
        """Shape and type of a tensor. Raises CheckpointError for an unknown name, with a hint at a
        similar one."""
        if name not in self.tensors:
            hint = did_you_mean(name, self.tensors) or "the checkpoint is of another model"
            raise CheckpointError(f"no tensor {name!r} in the checkpoint", hint=hint)
        return self.tensors[name]

    def pieces(self, wanted: Sequence[Interval]) -> list[list[FilePiece]]:
        """For each wanted interval, the disjoint pieces of files that together have its rows, in
        order.

        Raises CheckpointError when a row lies in no file.
        """
        intervals_of: dict[str, list[tuple[FileInfo, Interval]]] = defaultdict(list)
        for file in self.files:
            for interval in file.intervals:
                intervals_of[interval.name].append((file, interval))
        for pairs in intervals_of.values():
            pairs.sort(key=lambda pair: pair[1].first_row)
        return [_cover(interval, intervals_of[interval.name]) for interval in wanted]

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
            return _index_from_json(json.loads(path.read_bytes(), parse_constant=_no_number))
        except CheckpointError as error:
            raise CheckpointError(str(path), got=error.got, wanted=error.wanted)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"checkpoint {folder}", got=f"no {INDEX}", wanted="a whole one")
        except OSError as error:
            raise CheckpointError(str(path), got=error.strerror, wanted="a readable file")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(str(path), got=f"{error}", wanted="JSON")


def require_json(extra: Mapping[str, Any]) -> None:
    """Raise CheckpointError where ``extra``, the values beside tensors, cannot be written as
    JSON."""
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError("extra of a checkpoint", got=error, wanted="a JSON object")


def _no_number(text: str) -> None:
    """Raise ValueError for the ``text`` NaN or Infinity, which Python's json reads though they are
    not JSON; json calls it where it meets one."""
    raise ValueError(f"{text} is no JSON")


def _cover(wanted: Interval, held: Sequence[tuple[FileInfo, Interval]]) -> list[FilePiece]:
    """The pieces of files that give the rows of ``wanted`` in order. ``held`` are the intervals of
    its tensor in all files, sorted by first row. Raises CheckpointError for a row that no file
    has."""
    pieces: list[FilePiece] = []
    next_row = wanted.first_row  # the first row that no piece has yet
    for file, interval in held:
        if interval.first_row <= next_row < min(interval.stop, wanted.stop):
            stop = min(interval.stop, wanted.stop)
            pieces.append(FilePiece(file=file, interval=interval, first_row=next_row, stop=stop))
            next_row = stop
    if next_row < wanted.stop:
        raise CheckpointError(
            f"rows of {wanted.name}",
            got=f"none for row {next_row}",
            wanted=f"rows [{wanted.first_row}, {wanted.stop})",
        )
    return pieces


def table_of(shards: Sequence[StoredShard], file: FileInfo) -> dict[str, Any]:
    """One rank's part of the index, for :func:`join_tables`: its tensors, also those of which it
    has no rows, and the ``file`` that its rows were written to, as JSON."""
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        _add_tensor(tensors, shard.name, shard.info)
    tensors_json = {name: _tensor_to_json(info) for name, info in tensors.items()}
    return {"tensors": tensors_json, "file": _file_to_json(file)}


def join_tables(tables: Sequence[Any], *, step: int, extra: Mapping[str, Any]) -> Index:
    """The index of a checkpoint, joined from the tables of all ranks (:func:`table_of`) in order.

    Raises CheckpointError when ranks contradict each other or rows are missing.
    """
    tensors: dict[str, TensorInfo] = {}
    for table in tables:
        for name, tensor_json in table["tensors"].items():
            _add_tensor(tensors, name, _tensor_from_json(tensor_json))
    files = tuple(_file_from_json(table["file"]) for table in tables)
    index = Index(step=step, tensors=tensors, files=files, extra=extra)
    index.check_whole(tensors)
    return index


def _add_tensor(tensors: dict[str, TensorInfo], name: str, info: TensorInfo) -> None:
    """Add the shape and type of a tensor to ``tensors``; raises CheckpointError where it is there
    already, with another shape or type."""
    if tensors.setdefault(name, info) != info:
        raise CheckpointError(
            f"shards of {name}", got=f"{tensors[name]} and {info}", wanted="one type and shape"
        )


def _tensor_to_json(info: TensorInfo) -> dict[str, Any]:
    """The entry of a tensor in the index, as JSON."""
    return {"shape": list(info.shape), "dtype": info.dtype}


def _file_to_json(file: FileInfo) -> dict[str, Any]:
    """The entry of a file in the index, as JSON; rows are [name, first row, number of rows]."""
    rows = [[i.name, i.first_row, i.rows] for i in file.intervals]
    return {"file": file.file, "bytes": file.bytes, "crc32": file.crc32, "rows": rows}


def _file_from_json(value: Any) -> FileInfo:
    """One file of an index from JSON: name, bytes, checksum and its intervals of rows. Raises
    CheckpointError where it is malformed."""
    name = _get(value, "file", str)
    # Nothing else is ever opened, whatever the index says: no other folder, no "..".
    if not _FILE.fullmatch(name):
        raise _index_error(
            f"the file name {_short(name)}", wanted="one such as rank00000.safetensors"
        )
    return FileInfo(
        file=name,
        bytes=_count(_get(value, "bytes", int), "bytes"),
        crc32=_count(_get(value, "crc32", int), "crc32"),
        intervals=tuple(_interval_from_json(row) for row in _get(value, "rows", list)),
    )


def _interval_from_json(row: Any) -> Interval:
    """An interval from JSON ``[name, first row, rows]``. Raises CheckpointError where it is
    malformed."""
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str):
        raise _index_error(f"the rows {_short(row)}", wanted="[name, first row, rows]")
    first_row, rows = _count(row[1], "first row"), _count(row[2], "rows")
    return Interval(name=row[0], first_row=first_row, rows=rows)


def _tensor_from_json(value: Any) -> TensorInfo:
    """A tensor's shape and type from its entry in the index. Raises CheckpointError where it is
    malformed."""
    shape = tuple(_count(n, "a shape of") for n in _get(value, "shape", list))
    dtype = _get(value, "dtype", str)
    if dtype not in DTYPES:
        raise _index_error(f"the type {_short(dtype)}", wanted=f"one of {', '.join(DTYPES)}")
    # The size is that with empty dims taken as 1: they must not hide dims that are far too large.
    if not shape or prod(max(n, 1) for n in shape) * DTYPES[dtype].itemsize >= 2**63:
        raise _index_error(f"the shape {_short(shape)}", wanted="one that fits a machine")
    return TensorInfo(shape=shape, dtype=dtype)


def _index_from_json(value: Any) -> Index:
    """An index from JSON. Raises CheckpointError where it is malformed, of another version, or
    differs from its own checksum."""
    version = _get(value, "format", int)
    if version != _FORMAT:
        raise _index_error(f"format {version}", wanted=f"format {_FORMAT}")
    body = {name: part for name, part in value.items() if name != "crc32"}
    if _checksum(body) != _get(value, "crc32", int):
        raise _index_error("a checksum that differs", wanted="the index as it was written")
    tensors = _get(value, "tensors", dict)
    return Index(
        step=_count(_get(value, "step", int), "step"),
        tensors={name: _tensor_from_json(info) for name, info in tensors.items()},
        files=tuple(_file_from_json(file) for file in _get(value, "files", list)),
        extra=_get(value, "extra", dict),
    )


def _checksum(body: Mapping[str, Any]) -> int:
    """The CRC-32 of the JSON text of ``body``, an index without its checksum."""
    # json writes what it has read as the same text again, so the text of the file is not needed.
    return zlib.crc32(json.dumps(body).encode())


def _index_error(got: str, *, wanted: str = "a well-formed index") -> CheckpointError:
    """The error for an index that is malformed: ``got`` says how."""
    return CheckpointError(INDEX, got=got, wanted=wanted)


def _get(value: Any, key: str, kind: type) -> Any:
    """The value under ``key`` of an object in the index; raises CheckpointError where it is missing
    or not of type ``kind``."""
    part = value.get(key) if isinstance(value, dict) else None
    # True is an int for Python, but no number here
    if not isinstance(part, kind) or isinstance(part, bool):
        raise _index_error(f"{key} = {_short(part)}", wanted=f"a {kind.__name__}")
    return part


def _count(value: Any, what: str) -> int:
    """Return the value, a whole number of at least 0; raises CheckpointError, which calls it
    ``what``, for any other."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _index_error(f"{what} {_short(value)}", wanted="whole numbers >= 0")
    return value


def _short(value: object) -> str:
    """A value for an error message, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
