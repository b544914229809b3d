"""Rows of tensors, in memory and in the files of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from headrace.errors import SpecError

__all__ = ["DTYPES", "FileInfo", "Interval", "FilePiece", "StoredShard", "TensorInfo"]

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
        """Bytes of one row."""
        return prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Rows [first_row, first_row + rows) of the tensor ``name`` in one file."""

    name: str
    first_row: int
    rows: int

    @property
    def stop(self) -> int:
        """The row after the last."""
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
    """Rows [first_row, stop) of a tensor, to be read from an interval of a file."""

    file: FileInfo
    interval: Interval
    first_row: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """Rows [first_row, first_row + len(tensor)) of the tensor ``name`` of global ``shape``.

    ``tensor`` [rows, *shape[1:]] may have no rows, and lie on any device. Raises SpecError when
    the rows do not lie within the shape, or when no file can hold the element type.
    """

    name: str
    first_row: int
    tensor: torch.Tensor
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
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
        """What the index says of the whole tensor."""
        return TensorInfo(shape=tuple(self.shape), dtype=_NAMES[self.tensor.dtype])

    @property
    def interval(self) -> Interval:
        """What the index says of these rows."""
        return Interval(name=self.name, first_row=self.first_row, rows=self.tensor.shape[0])
