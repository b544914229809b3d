"""Token ids in a file, read piece by piece, with checksums where there are any.

Files are read, not mapped: one that shrinks under a mapping ends the process with a signal that
nothing can catch. Checksums are zlib.crc32 of every BLOCK_BYTES, checked when a block is first
read.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError

__all__ = ["BLOCK_BYTES", "BlockSums", "TokenFile", "Tokens"]

BLOCK_BYTES = 1 << 16
"""A sample is read with the rest of its blocks the first time, so they are small."""


@dataclass(slots=True)
class BlockSums:
    """CRC-32 checksums of all blocks of BLOCK_BYTES of a stream, whose bytes come in pieces of any
    size."""

    sums: list[int] = field(default_factory=list)
    _room: int = 0  # bytes that the last block can still take

    def update(self, data: bytes | memoryview) -> None:
        """Continue the checksums with the next bytes of the stream."""
        rest = memoryview(data).cast("B")
        while len(rest):
            if not self._room:
                self.sums.append(0)
                self._room = BLOCK_BYTES
            part, rest = rest[: self._room], rest[self._room :]
            self.sums[-1] = zlib.crc32(part, self.sums[-1])
            self._room -= len(part)

    def array(self) -> NDArray[np.uint32]:
        """The checksums as an array [blocks]."""
        return np.array(self.sums, dtype="<u4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """The ids of a file, ``[tokens]`` of ``dtype`` from byte ``offset`` on; a slice reads them.

    ``stream`` is the file held open, so that it may be deleted; without it each slice opens
    ``path``. With ``sums`` each block is checked when it is first read. A slice raises DataError
    when the file has shrunk, cannot be read, or is not what was written. Where a checksum differs,
    the file ``mark`` is deleted too: without it the next process to open the cache builds it anew.
    """

    path: Path
    dtype: np.dtype[Any]
    tokens: int
    offset: int = 0
    stream: IO[bytes] | None = None
    sums: NDArray[np.uint32] | None = None
    mark: Path | None = None
    _right: NDArray[np.bool_] = field(init=False)  # [blocks], whether its checksum was compared

    def __post_init__(self) -> None:
        """Note that no block has been checked; ``object.__setattr__`` as the class is frozen."""
        blocks = 0 if self.sums is None else len(self.sums)
        object.__setattr__(self, "_right", np.zeros(blocks, dtype=bool))

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """The ids from the start to the stop of a slice without a step."""
        start, stop, _ = part.indices(self.tokens)
        first, end = start * self.dtype.itemsize, max(start, stop) * self.dtype.itemsize
        return np.frombuffer(self._read(first, end), self.dtype)

    def _read(self, first: int, end: int) -> bytes | memoryview:
        """Bytes ``first`` to ``end`` (excluded) of the ids. When a block is read for the first time
        it is read whole and its checksum compared; raises DataError where that differs."""
        blocks = range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        if self.sums is None or self._right[blocks.start : blocks.stop].all():
            return self._bytes(first, end)
        begin = blocks.start * BLOCK_BYTES
        stop = min(blocks.stop * BLOCK_BYTES, self.tokens * self.dtype.itemsize)
        read = memoryview(self._bytes(begin, stop))
        for block in blocks:
            at = block * BLOCK_BYTES - begin
            if zlib.crc32(read[at : at + BLOCK_BYTES]) != self.sums[block]:
                raise self._damage_error(block)
            self._right[block] = True
        return read[first - begin : end - begin]

    def _bytes(self, first: int, end: int) -> bytes:
        """Bytes ``first`` to ``end`` (excluded) of the ids without comparing checksums. Raises
        DataError where the file cannot be read."""
        try:
            if self.stream is not None:
                return self._pread(self.stream, first, end)
            with open(self.path, "rb", buffering=0) as stream:
                return self._pread(stream, first, end)
        except OSError as error:
            raise DataError(str(self.path), got=error.strerror, wanted="a file that can be read")

    def _pread(self, stream: IO[bytes], first: int, end: int) -> bytes:
        """Bytes ``first`` to ``end`` (excluded) of the ids from the open file. Raises DataError
        where the file has become shorter."""
        parts, at = list[bytes](), first
        while at < end:  # the system reads at most 2 GiB at once
            parts.append(os.pread(stream.fileno(), end - at, self.offset + at))
            at += len(parts[-1])
            if not parts[-1]:
                raise DataError(
                    str(self.path),
                    got=f"{self.offset + at:,} bytes",
                    wanted=f"{self.offset + end:,} or more",
                    hint="the file has shrunk meanwhile",
                )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _damage_error(self, block: int) -> DataError:
        """The error for a block whose checksum differs. The file ``mark`` is deleted, so that the
        next process builds the cache anew."""
        hint = f"the disk or the memory is at fault; delete the folder {self.path.parent}"
        if self.mark is not None:
            try:
                self.mark.unlink(missing_ok=True)
                hint = "start again: the cache is then built anew"
            except OSError:  # a read-only cache: the hint above says what to do
                pass
        return DataError(
            f"{self.path}, bytes from {block * BLOCK_BYTES:,} on",
            got="a checksum that differs",
            wanted="the tokens that were written",
            hint=hint,
        )


Tokens = NDArray[Any] | TokenFile
"""Flat ids, ``[tokens]``, in memory or in a file: both are sliced."""
