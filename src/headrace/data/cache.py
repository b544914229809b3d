"""Tokens on disk, so that a corpus is tokenized once.

A folder per key: ``documents.npy [documents, 3]`` (array, first token, tokens), ``tokens.bin``
unless the tokens lie elsewhere already, and ``meta.json``. It is written aside and renamed, under
a lock, so that several processes that open the same corpus build it once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.corpus import Skipped
from headrace.errors import DataError

__all__ = ["Damaged", "Stored", "build", "locked", "read", "write_table"]

FORMAT = 1


class Damaged(Exception):
    """A cache folder is not what its meta.json says; never leaves this package."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """What a cache folder holds; ``tokens`` is None when they lie elsewhere."""

    fingerprint: str
    tokens: NDArray[Any] | None
    table: NDArray[np.int64]
    lengths: NDArray[np.int64]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]


def read(folder: Path) -> Stored | None:
    """What a folder holds, None when there is no such folder; raises Damaged."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise Damaged("of another version")
        table = np.lib.format.open_memmap(folder / "documents.npy", mode="r")  # takes no pickle
        if table.shape != (meta["documents"], 3) or table.dtype != np.int64:
            raise Damaged("documents.npy is of another shape")
        lengths = np.ascontiguousarray(table[:, 2])
        if int(lengths.sum()) != meta["tokens"]:
            raise Damaged("the lengths do not add up")
        return Stored(
            fingerprint=str(meta["fingerprint"]),
            tokens=_tokens(folder / "tokens.bin", meta) if meta["dtype"] else None,
            table=table,
            lengths=lengths,
            skipped=tuple(Skipped(**item) for item in meta["skipped"]),
            notes=tuple(meta["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise Damaged(f"{type(error).__name__}: {error}")


def _tokens(path: Path, meta: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(str(meta["dtype"]))
    if path.stat().st_size != meta["tokens"] * dtype.itemsize:
        raise Damaged("tokens.bin is of another size")
    return np.memmap(path, dtype=dtype, mode="r")


def write_table(
    folder: Path,
    table: NDArray[np.int64],
    *,
    fingerprint: str,
    dtype: str | None,
    skipped: tuple[Skipped, ...],
    notes: tuple[str, ...],
) -> None:
    """Write ``documents.npy`` and ``meta.json``; the tokens are there when ``dtype`` is given."""
    with open(folder / "documents.npy", "wb") as stream:
        np.save(stream, table, allow_pickle=False)
        os.fsync(stream.fileno())
    meta = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "documents": len(table),
        "tokens": int(table[:, 2].sum()),
        "dtype": dtype,
        "skipped": [item.to_json() for item in skipped],
        "notes": list(notes),
    }
    with open(folder / "meta.json", "w", encoding="utf-8") as stream:
        json.dump(meta, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def build(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new folder aside, then put it in the place of the old one, if any; under the lock.

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
    """Keep others from building the same folder; the lock goes with the process that holds it."""
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
