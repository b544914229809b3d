"""Tokens on disk, so that a corpus is tokenized once.

A folder per key: ``documents.npy [documents, 3]`` (array, first token, tokens), ``tokens.bin``
with the checksums of its blocks in ``blocks.npy``, unless the tokens lie elsewhere already,
``learned.bin`` and ``mask_blocks.npy`` likewise where some tokens have no loss, and ``meta.json``
with the checksums of all but the tokens. It is written aside and renamed, under a lock, so that
several processes that open the same corpus build it once. Tables are checked when the folder is
opened, tokens when they are first read.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.corpus import Skipped
from headrace.data.token_reading import BLOCK_BYTES, TokenFile
from headrace.errors import DataError

__all__ = ["Damaged", "Stored", "build", "locked", "read", "write_table"]

FORMAT = 2


class Damaged(Exception):
    """A cache folder is not what its meta.json says; never leaves this package."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """What a cache folder holds: ``table`` [documents, 3] (array, first token, tokens), ``lengths``
    [documents] in tokens, the ``tokens`` (None when they are elsewhere), ``masks`` with a 1 for
    each token that has a loss (None where all have), what was skipped, and notes for people."""

    fingerprint: str
    tokens: TokenFile | None
    table: NDArray[np.int64]
    lengths: NDArray[np.int64]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    masks: TokenFile | None = None


def read(folder: Path) -> Stored | None:
    """Open a cache folder. None when there is none, or one of another version; raises Damaged when
    it is not what its checksums say."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta["format"] != FORMAT:
            return None
        _check("meta.json", _meta_sum(meta), meta["crc32"])
        table = _array(folder, "documents.npy", meta)
        lengths = np.ascontiguousarray(table[:, 2])
        return Stored(
            fingerprint=meta["fingerprint"],
            tokens=_tokens(folder, meta) if meta["dtype"] else None,
            table=table,
            lengths=lengths,
            skipped=tuple(Skipped(**item) for item in meta["skipped"]),
            notes=tuple(meta["notes"]),
            masks=_masks(folder, meta) if meta.get("masked") else None,
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
        raise Damaged(f"{type(error).__name__}: {error}")


def _array(folder: Path, name: str, meta: dict[str, Any]) -> NDArray[Any]:
    """Read the array in the file ``name``, whose checksum in ``meta`` is compared before it is
    parsed. Raises Damaged when it differs."""
    raw = (folder / name).read_bytes()
    _check(name, zlib.crc32(raw), meta["sums"][name])
    return np.load(io.BytesIO(raw), allow_pickle=False)


def _check(name: str, found: int, wanted: int) -> None:
    """Raise Damaged, naming the file ``name``, where its checksum is another one."""
    if found != wanted:
        raise Damaged(f"{name}: its checksum differs")


def _meta_sum(meta: dict[str, Any]) -> int:
    """CRC-32 of the JSON text of ``meta`` without its own checksum. JSON that was read is written
    as the same text again, so the checksum can be compared after reading."""
    return zlib.crc32(json.dumps({k: v for k, v in meta.items() if k != "crc32"}).encode())


def _tokens(folder: Path, meta: dict[str, Any]) -> TokenFile:
    """Open the ids of all tokens."""
    return _open_values(folder, meta, "tokens.bin", "blocks.npy", np.dtype(meta["dtype"]))


def _masks(folder: Path, meta: dict[str, Any]) -> TokenFile:
    """Open the mask of the loss: a byte for each token, 1 where it has a loss."""
    return _open_values(folder, meta, "learned.bin", "mask_blocks.npy", np.dtype(np.uint8))


def _open_values(
    folder: Path, meta: dict[str, Any], name: str, blocks: str, dtype: np.dtype[Any]
) -> TokenFile:
    """Open the file ``name``, which has a value of ``dtype`` for each token; the file ``blocks``
    has the checksums of its blocks. It stays open. Raises Damaged for another size than ``meta``
    says."""
    stream = open(folder / name, "rb", buffering=0)  # noqa: SIM115 (held while tokens are)
    size, sums = os.fstat(stream.fileno()).st_size, _array(folder, blocks, meta)
    if size != meta["tokens"] * dtype.itemsize or len(sums) != -(-size // BLOCK_BYTES):
        stream.close()
        raise Damaged(f"{name} is of another size")
    return TokenFile(
        path=folder / name,
        dtype=dtype,
        tokens=meta["tokens"],
        stream=stream,
        sums=sums,
        mark=folder / "meta.json",
    )


def write_table(
    folder: Path,
    table: NDArray[np.int64],
    *,
    fingerprint: str,
    blocks: NDArray[np.uint32] | None = None,
    mask_blocks: NDArray[np.uint32] | None = None,
    dtype: str | None = None,
    skipped: tuple[Skipped, ...],
    notes: tuple[str, ...],
) -> None:
    """Write ``documents.npy`` and ``meta.json`` into a cache folder. ``dtype`` and ``blocks`` (the
    checksums of blocks of tokens) are given where the folder has the tokens, ``mask_blocks`` where
    it has masks of the loss."""
    arrays: dict[str, NDArray[Any]] = {"documents.npy": table}
    if blocks is not None:
        arrays["blocks.npy"] = blocks
    if mask_blocks is not None:
        arrays["mask_blocks.npy"] = mask_blocks
    sums = {name: _write_array(folder / name, array) for name, array in arrays.items()}
    meta = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "documents": len(table),
        "tokens": int(table[:, 2].sum()),
        "dtype": dtype,
        "masked": mask_blocks is not None,
        "sums": sums,
        "skipped": [item.to_json() for item in skipped],
        "notes": list(notes),
    }
    with open(folder / "meta.json", "w", encoding="utf-8") as stream:
        json.dump({"crc32": _meta_sum(meta), **meta}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _write_array(path: Path, array: NDArray[Any]) -> int:
    """Write an array to a file, down to the disk. Returns the CRC-32 of the file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    with open(path, "wb") as stream:
        stream.write(buffer.getbuffer())
        os.fsync(stream.fileno())
    return zlib.crc32(buffer.getbuffer())


def build(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a new folder beside ``folder``, then put it in the place of the old one,
    if there is one. The caller holds the lock.

    Raises DataError when the disk does not take it; nothing is left behind then.
    """
    for left in folder.parent.glob(f".{folder.name}-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(aside)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(aside, folder)
    except OSError as error:
        raise DataError(f"cache {folder}", got=str(error), wanted="room to write the tokens")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Generator[None, None, None]:
    """Hold the lock of a cache folder, so that no other process builds it meanwhile. ``waiting`` is
    called once if another process has it. The lock is released when its holder ends, too. Raises
    DataError where the lock's file cannot be made."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stream = open(folder.with_suffix(".lock"), "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        hint = "name another folder for the cache"
        raise DataError(f"cache {folder.parent}", got=str(error), wanted="a folder", hint=hint)
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
