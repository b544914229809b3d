"""Files of ready tokens as Megatron's preprocessing leaves them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

__all__ = ["CODES", "write_megatron"]

CODES = {"u1": 1, "i4": 4, "i8": 5, "u2": 8}


def write_megatron(prefix: Path, documents: list[list[list[int]]], dtype: str = "u2") -> None:
    """Documents of sequences of ids, as preprocessing for Megatron leaves them."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = np.array([i for sequence in sequences for i in sequence], dtype=dtype)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    sizes = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    pointers = (np.cumsum(sizes) - sizes).astype("<i8") * tokens.itemsize
    borders = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sizes), len(borders))
    body = sizes.tobytes() + pointers.astype("<i8").tobytes() + borders.tobytes()
    prefix.with_suffix(".idx").write_bytes(head + body)
