"""Files that are tokens already: Megatron's .bin with .idx, and flat .bin files.

A flat file is ids of two or four bytes with nothing between them (nanoGPT's), or the same after
a header of 256 four-byte numbers: 20240520, 1, tokens (llm.c's). Its documents end in an id.

An .idx is, little-endian: the nine bytes ``MMIDIDX\\0\\0``; version 1 (8 bytes); the code of
the dtype of the .bin (1 byte); the numbers s of sequences and d of document borders (8 bytes
each); s lengths in tokens (4 bytes each); s byte offsets into the .bin (8 bytes each); d borders
(8 bytes each), document i being the sequences from border i up to border i + 1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.documents import check_ids
from headrace.data.files import FoundFile
from headrace.data.token_reading import TokenFile, Tokens
from headrace.errors import DataError

__all__ = ["flat_table", "is_megatron", "megatron_table", "token_file"]

IDX_MAGIC = b"MMIDIDX\x00\x00"
IDX_HEADER = struct.Struct("<9sQBQQ")
IDX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLAT_MAGIC, FLAT_HEADER_BYTES = 20240520, 1024
CHUNK_TOKENS = 1 << 24  # tokens that are read at once


def is_megatron(file: FoundFile) -> bool:
    """Whether an .idx is beside the file, as it is beside a .bin of Megatron."""
    return file.path.with_suffix(".idx").exists()


def token_file(file: FoundFile, dtype: str, *, hold: bool) -> TokenFile:
    """The ids of a file, ``[tokens]``. ``dtype`` is that of a flat file; the .idx of Megatron says
    it itself. With ``hold`` the file stays open.

    Raises DataError when the file cannot be read or its size is no number of ids.
    """
    try:
        stored, offset = _layout(file, dtype)
        stream = open(file.path, "rb", buffering=0) if hold else None  # noqa: SIM115 (held while tokens are)
    except OSError as error:
        raise DataError(str(file.path), got=str(error), wanted="a file that can be read")
    tokens = (file.size - offset) // stored.itemsize
    return TokenFile(path=file.path, dtype=stored, tokens=tokens, offset=offset, stream=stream)


def _layout(file: FoundFile, dtype: str) -> tuple[np.dtype[Any], int]:
    """(type of the ids, byte of the file where they begin). Raises DataError where the size of a
    flat file is no number of ids."""
    if is_megatron(file):
        return _read_header(file.path.with_suffix(".idx"))[0], 0
    offset = FLAT_HEADER_BYTES if _has_header(file.path) else 0
    item = np.dtype(dtype).newbyteorder("<")
    size = file.size - offset
    if size % item.itemsize or size <= 0:
        wanted = f"a number of {dtype} ids"
        raise DataError(str(file.path), got=f"{size} bytes of tokens", wanted=wanted)
    return item, offset


def _has_header(path: Path) -> bool:
    """Whether a flat file begins with the header of llm.c."""
    with open(path, "rb") as stream:
        head = stream.read(FLAT_HEADER_BYTES)
    return len(head) == FLAT_HEADER_BYTES and struct.unpack("<2i", head[:8]) == (FLAT_MAGIC, 1)


def _chunks(ids: Tokens) -> Iterator[tuple[int, NDArray[Any]]]:
    """Pairs (first token, ids) of parts that fit in memory."""
    for start in range(0, len(ids), CHUNK_TOKENS):
        yield start, ids[start : start + CHUNK_TOKENS]


def flat_table(
    ids: Tokens, *, end_id: int, vocabulary: int, label: str, progress: Callable[[int], None]
) -> NDArray[np.int64]:
    """The index of the first token and the number of tokens of each document of a flat file, as
    columns ``[documents, 2]``.

    A document holds its end id; what follows the last one is a document too. ``progress`` is told
    the tokens looked at. Raises DataError when an id is outside the vocabulary.
    """
    ends = []
    for start, chunk in _chunks(ids):
        check_ids(chunk, label=label, vocabulary=vocabulary)
        ends.append(np.flatnonzero(chunk == end_id) + (start + 1))
        progress(start + len(chunk))
    borders = np.unique(np.concatenate([[0], *ends, [len(ids)]])).astype(np.int64)
    return np.stack([borders[:-1], np.diff(borders)], axis=1)


def megatron_table(file: FoundFile) -> NDArray[np.int64]:
    """The index of the first token and the number of tokens of each document of a Megatron .bin,
    as columns ``[documents, 2]``.

    Documents without a token are left out. Raises DataError when the .idx beside it is damaged or
    does not belong to it.
    """
    index = file.path.with_suffix(".idx")
    dtype, sizes, pointers, borders = _read_index(index)
    if (
        len(borders) < 2
        or borders[0]
        or borders[-1] != len(sizes)
        or borders.min() < 0
        or (borders[1:] < borders[:-1]).any()
    ):
        raise _damage_error(index, "borders of documents that do not fit the sequences")
    if (pointers % dtype.itemsize).any() or (sizes < 0).any() or (pointers < 0).any():
        raise _damage_error(index, "a sequence that starts inside a token")
    ends = pointers + sizes * dtype.itemsize  # the byte after each sequence
    if len(ends) and max(pointers.max(), ends.max()) > file.size:  # a sum past 2^63 is negative
        got, wanted = f"{file.size:,} bytes", f"{max(pointers.max(), ends.max()):,} or more"
        raise DataError(str(file.path), got=got, wanted=f"{wanted}, says its .idx")
    inner = np.ones(len(sizes), dtype=bool)  # sequences that continue a document
    inner[borders[:-1][borders[:-1] < len(sizes)]] = False
    if (pointers[1:] != ends[:-1])[inner[1:]].any():
        raise _damage_error(index, "a document whose sequences do not follow each other")
    full = np.flatnonzero(np.diff(borders))  # documents with a sequence
    first = borders[:-1][full]  # the first sequence of each
    totals = np.concatenate([[0], np.cumsum(sizes)])  # tokens before each sequence
    counts = totals[borders[1:][full]] - totals[first]
    table = np.stack([pointers[first] // dtype.itemsize, counts], axis=1)
    return table[counts > 0]


def _read_index(
    path: Path,
) -> tuple[np.dtype[Any], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(dtype of the ids, tokens of each sequence, byte offset of each sequence in the .bin, borders
    of documents in sequences). Raises DataError for a damaged .idx."""
    dtype, sequences, documents = _read_header(path)
    raw = path.read_bytes()
    size = IDX_HEADER.size + 12 * sequences + 8 * documents
    if len(raw) < size:  # longer is fine: mixed media add a byte per sequence
        raise _damage_error(path, f"{len(raw):,} bytes where {size:,} belong")
    at = IDX_HEADER.size
    sizes = np.frombuffer(raw, "<i4", sequences, at).astype(np.int64)
    pointers = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences).astype(np.int64)
    borders = np.frombuffer(raw, "<i8", documents, at + 12 * sequences).astype(np.int64)
    return dtype, sizes, pointers, borders


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """(dtype of the ids, number of sequences, number of borders of documents) from the header of
    an .idx. Raises DataError where it is none."""
    with open(path, "rb") as stream:
        raw = stream.read(IDX_HEADER.size)
    if len(raw) < IDX_HEADER.size:
        raise _damage_error(path, f"{len(raw)} bytes")
    magic, version, code, sequences, documents = IDX_HEADER.unpack(raw)
    if magic != IDX_MAGIC or version != 1 or code not in IDX_DTYPES:
        raise _damage_error(path, f"magic {magic!r}, version {version}, dtype {code}")
    return np.dtype(IDX_DTYPES[code]), sequences, documents


def _damage_error(path: Path, got: str) -> DataError:
    """The error for a damaged .idx, in which ``got`` was found."""
    return DataError(str(path), got=got, wanted="a Megatron index", hint="the .idx is damaged")
