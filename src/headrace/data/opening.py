"""From a source to a corpus: find the files, tokenize them once, read the tokens."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.data import cache as store
from headrace.data.corpus import StoredCorpus, fingerprint_of
from headrace.data.files import Found, FoundFile, find_files
from headrace.data.indexing import Progress, index_documents
from headrace.data.source import Source
from headrace.data.token_files import flat_table, is_megatron, megatron_table, token_file
from headrace.data.token_reading import TokenFile
from headrace.data.tokens import Tokenizer
from headrace.errors import DataError

__all__ = ["Progress", "open_corpus"]

_HELD_OPEN = 256
"""The most files that are held open, as systems let a process open about a thousand."""


def open_corpus(
    source: Source, tokenizer: Tokenizer, *, cache: Path, progress: Progress | None = None
) -> StoredCorpus:
    """Open a corpus, tokenizing it when the folder ``cache`` does not hold it yet.

    ``progress(what, done_bytes, total_bytes)`` is called on the way. Several processes may open
    the same corpus at once: one tokenizes, the others wait for it. Raises DataError when a path
    names nothing, when no document is left, or when tokens do not fit the vocabulary, and
    MissingExtra when a library is absent.
    """
    tell = progress or _silent
    found = find_files(source)
    folder = Path(cache).expanduser() / _key(source, tokenizer, found)
    stored, damage = _read(folder)
    if stored is None:
        with store.locked(folder, partial(tell, "waiting for another process", 0, 0)):
            stored, damage = _read(folder)  # another process may have built it meanwhile
            if stored is None:
                store.build(folder, partial(_fill, source, tokenizer, found, tell))
                stored, _ = _read(folder)
    if stored is None:
        raise DataError(f"cache {folder}", got="files that vanish", wanted="a folder of its own")
    rebuilt = (f"the cache was damaged ({damage}) and built again",) if damage else ()
    if stored.tokens is not None:
        arrays = (stored.tokens,)
    else:
        arrays = _token_files(source, found)
    return StoredCorpus(
        name=source.name,
        fingerprint=stored.fingerprint,
        vocabulary=tokenizer.vocabulary,
        arrays=arrays,
        table=stored.table,
        lengths=stored.lengths,
        skipped=stored.skipped,
        notes=(*stored.notes, *rebuilt),
        masks=stored.masks,
    )


def _silent(what: str, done: int, total: int) -> None:
    """Take progress and show nothing of it."""


def _token_files(source: Source, found: Found) -> tuple[TokenFile, ...]:
    """The ids in each file of ready tokens. Where the files are few they are held open, so that
    they may be deleted meanwhile."""
    hold = len(found.files) <= _HELD_OPEN
    return tuple(token_file(file, source.dtype, hold=hold) for file in found.files)


def _key(source: Source, tokenizer: Tokenizer, found: Found) -> str:
    """The cache folder's name: a hash over the files, their sizes and times, the tokenizer and the
    source's options."""
    # Paths and patterns do not count, only the files that they lead to.
    options = {**source.to_json(), "paths": None, "patterns": None, "tokens": tokenizer.fingerprint}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for file in found.files:
        times = [file.mtime_ns]
        index = file.path.with_suffix(".idx")
        if source.kind == "memmap" and index.exists():
            times += [index.stat().st_mtime_ns, index.stat().st_size]
        digest.update(json.dumps([file.label, file.size, *times]).encode())
    return digest.hexdigest()[:24]


def _read(folder: Path) -> tuple[store.Stored | None, str | None]:
    """(what the cache folder holds or None, what is damaged in it or None); both None when there is
    no folder of this version."""
    try:
        return store.read(folder), None
    except store.Damaged as error:
        return None, str(error)


def _fill(source: Source, tokenizer: Tokenizer, found: Found, tell: Progress, folder: Path) -> None:
    """Write the files of the cache ``folder``: a table of documents and, where the source's files
    are not tokens already, the tokens."""
    if source.kind == "memmap":
        _fill_table(source, tokenizer, found, tell, folder)
    else:
        index_documents(source, tokenizer, found, tell, folder)


def _fill_table(
    source: Source, tokenizer: Tokenizer, found: Found, tell: Progress, folder: Path
) -> None:
    """Find the documents in files of ready tokens and write their table."""
    total, done = sum(file.size for file in found.files), 0
    arrays = _token_files(source, found)
    tables: list[NDArray[np.int64]] = []
    notes = list(found.notes)
    for number, (file, ids) in enumerate(zip(found.files, arrays, strict=True)):
        if is_megatron(file):
            table = megatron_table(file)
        else:
            end_id = _end_id(source, tokenizer, file)
            table = flat_table(
                ids,
                end_id=end_id,
                vocabulary=tokenizer.vocabulary,
                label=str(file.path),
                progress=partial(_tell_scan, tell, done, total, ids.dtype.itemsize),
            )
            if len(table) == 1:
                notes.append(f"{file.label} is one document: no end {end_id} inside")
        done += file.size
        tables.append(np.insert(table, 0, number, axis=1))  # the file's number is the first column
    merged = np.concatenate(tables) if tables else np.empty((0, 3), dtype=np.int64)
    if not len(merged):
        raise DataError(f"corpus {source.name}", got="no documents", wanted="at least one")
    store.write_table(
        folder,
        merged,
        fingerprint=fingerprint_of(arrays, merged, tokenizer.vocabulary),
        skipped=tuple(found.skipped),
        notes=tuple(notes),
    )


def _tell_scan(tell: Progress, before: int, total: int, itemsize: int, tokens: int) -> None:
    """Tell the progress, in bytes of all files, after ``tokens`` tokens of ``itemsize`` bytes of
    one that comes after ``before`` bytes of others."""
    tell("looking for the ends of documents", before + tokens * itemsize, total)


def _end_id(source: Source, tokenizer: Tokenizer, file: FoundFile) -> int:
    """The id after which a document of ``file`` ends; raises DataError where neither source nor
    tokenizer says it."""
    end_id = tokenizer.end_id if source.end_id is None else source.end_id
    if end_id is None:
        raise DataError(
            f"{file.path}, which has no .idx",
            wanted="the id that ends a document",
            hint="give the source an end_id, or name the tokenizer 'ids:VOCABULARY:END'",
        )
    return end_id
