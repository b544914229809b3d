"""The safetensors files of a checkpoint: written in one pass, checked, read by rows.

The format is written here because the package's own writer makes no checksum on the way, takes
all tensors at once (a device's whole state would have to lie in host memory), and refuses tensors
that share memory. Reading goes through the package.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.runtime.plain_files import require_plain
from headrace.runtime.shards import FileInfo, FilePiece, Interval, StoredShard, TensorInfo

__all__ = [
    "check_file",
    "check_header",
    "fsync_folder",
    "read_pieces",
    "write_shards",
    "write_text",
]

# Small enough that what was summed is still in the processor's cache when it is written.
_CHUNK_BYTES = 2**20


def write_shards(path: Path, shards: Sequence[StoredShard]) -> FileInfo:
    """Write the rows of ``shards`` to a new file and wait until the disk has them.

    Tensors are copied to the host one at a time. Raises OSError as the disk does, CheckpointError
    when two shards begin at the same row of one tensor.
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
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for shard in shards:
        interval, info = shard.interval, shard.info
        if interval.key in entries:
            raise CheckpointError(f"shards of {shard.name}", got=f"two at row {shard.first_row}")
        end = at + interval.rows * info.row_bytes
        shape = [interval.rows, *info.shape[1:]]
        entries[interval.key] = {"dtype": info.dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def check_file(folder: Path, file: FileInfo, *, checksum: bool) -> None:
    """Raise CheckpointError, naming the file, when it is missing, of another size or (where
    ``checksum``) not what was written."""
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
    crc32, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return crc32


def read_pieces(path: Path, wanted: Sequence[tuple[StoredShard, FilePiece]]) -> None:
    """Copy each piece from one file into its shard's tensor.

    Raises CheckpointError when the file does not hold what the index says.
    """
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for shard, piece in wanted:
                interval, held = piece.interval, _held(path, file, piece.interval, shard.info)
                rows = held[piece.first_row - interval.first_row : piece.stop - interval.first_row]
                at = piece.first_row - shard.first_row
                shard.tensor[at : at + len(rows)].copy_(rows)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(path), got=f"{error}", wanted="the tensors of the index")


def check_header(folder: Path, file: FileInfo, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError when a file does not hold the rows that the index says."""
    path = folder / file.file
    try:
        with safe_open(path, framework="pt") as opened:
            for interval in file.intervals:
                _held(path, opened, interval, tensors[interval.name])
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(path), got=f"{error}", wanted="the tensors of the index")


def _held(path: Path, file: Any, interval: Interval, info: TensorInfo) -> Any:
    """The rows of an interval in an open file; raises CheckpointError when they are others."""
    held = file.get_slice(interval.key)
    shape = [interval.rows, *info.shape[1:]]
    if (held.get_dtype(), held.get_shape()) != (info.dtype, shape):
        got = f"{held.get_dtype()} {held.get_shape()}"
        raise CheckpointError(f"{path}: {interval.key}", got=got, wanted=f"{info.dtype} {shape}")
    return held


def fsync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
