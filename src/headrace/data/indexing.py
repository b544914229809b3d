"""Tokenizing: documents in, one flat file of ids and a table of documents out."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.data.cache import write_table
from headrace.data.documents import Document, Skips, check_ids, no_memory
from headrace.data.files import Found
from headrace.data.loss_masks import MaskFile
from headrace.data.readers import Reading, read_documents
from headrace.data.source import Source
from headrace.data.token_reading import BlockSums
from headrace.data.tokens import Tokenizer
from headrace.errors import DataError

__all__ = ["Progress", "index_documents", "tokenize"]

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``, in bytes of the files; a total of 0 is one not known."""

GROUP_DOCUMENTS, GROUP_CHARACTERS = 256, 1 << 20  # a group is full when it has as many of either
THREADS, WAITING = 2, 4  # groups that wait or are encoded at most

Encoded = tuple[list[tuple[str, NDArray[np.int32], NDArray[np.bool_] | None]], int]
"""(label, ids [n], which tokens have a loss [n] or None) of each document of a group, and the bytes
of its file that were read by its end."""


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in order, in groups that are large enough to be worth a call of the tokenizer
    in a thread."""
    group: list[Document] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document.content)
        if len(group) == GROUP_DOCUMENTS or characters >= GROUP_CHARACTERS:
            yield group
            group = []
            characters = 0
    if group:
        yield group


def _encode(group: list[Document], tokenizer: Tokenizer) -> Encoded:
    """Label, ids and loss mask of each document of a group, and the bytes read by its end."""
    texts = [item.content for item in group if isinstance(item.content, str)]
    try:
        encoded = iter(tokenizer.encode_batch(texts) if texts else [])
    except MemoryError:
        raise no_memory(max(group, key=lambda item: len(item.content)).label)
    ids = list[tuple[str, NDArray[np.int32], NDArray[np.bool_] | None]]()
    for item in group:
        if isinstance(item.content, str):
            ids.append((item.label, next(encoded), None))
        else:
            check_ids(item.content, label=item.label, vocabulary=tokenizer.vocabulary)
            ids.append((item.label, item.content.astype(np.int32), item.learned))
    return ids, group[-1].read_bytes


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encode documents in a few threads. Groups come out in the order of the documents; at most
    WAITING of them are read before they are asked for, so that memory stays small."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize") as pool:
        waiting: deque[Future[Encoded]] = deque()
        try:
            for group in _groups(documents):
                waiting.append(pool.submit(_encode, group, tokenizer))
                if len(waiting) == WAITING:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def index_documents(
    source: Source, tokenizer: Tokenizer, found: Found, progress: Progress, folder: Path
) -> None:
    """Tokenize all documents of the found files into a cache folder.

    The fingerprint is over the tokens themselves, so it is the same wherever the files came from.
    Raises DataError when no document is left.
    """
    dtype = np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    digest = hashlib.sha256(f"headrace tokens 1 {tokenizer.vocabulary} {dtype.name}".encode())
    skips, blocks, masks = Skips(), BlockSums(), MaskFile(folder / "learned.bin")
    lengths: list[int] = []
    skips.items.extend(found.skipped)
    total = sum(file.size for file in found.files)
    progress("tokenizing", 0, total)
    reading = Reading(source, skips, folder)
    documents = read_documents(found.files, reading)
    with open(folder / "tokens.bin", "wb") as stream:
        for group, done in tokenize(documents, tokenizer):
            full = [np.empty(0, np.int32)]  # ids of documents that are kept; there may be none
            for label, ids, mask in group:
                if reason := _empty(ids, mask):
                    skips.add(label, reason)
                    continue
                full.append(ids)
                lengths.append(len(ids))
                masks.add(len(ids), mask)
                if mask is not None:
                    digest.update(mask.data)
            packed = np.concatenate(full).astype(dtype)
            digest.update(packed.data)
            blocks.update(packed.data)
            stream.write(packed.data)
            progress("tokenizing", done, total)
        stream.flush()
        os.fsync(stream.fileno())
    progress("tokenizing", total, total)
    skipped = skips.all()
    if not lengths:
        raise _no_documents(source, skipped)
    counts = np.array(lengths, dtype=np.int64)
    table = np.stack([np.zeros_like(counts), np.cumsum(counts) - counts, counts], axis=1)
    digest.update(counts.data)
    fingerprint = digest.hexdigest()
    (folder / "records.fai").unlink(missing_ok=True)  # the last index that reading FASTA has made
    mask_blocks = masks.close()
    notes = (*found.notes, *reading.notes, *masks.note)
    write_table(
        folder,
        table,
        fingerprint=fingerprint,
        blocks=blocks.array(),
        mask_blocks=mask_blocks,
        dtype=dtype.str,
        skipped=skipped,
        notes=notes,
    )


def _empty(ids: NDArray[np.int32], mask: NDArray[np.bool_] | None) -> str:
    """The reason why no token of a document has a loss; an empty text where one has."""
    if not len(ids):
        return "no tokens"
    # The first token is never predicted, so its mask does not count.
    return "" if mask is None or mask[1:].any() else "no token with a loss"


def _no_documents(source: Source, skipped: tuple[object, ...]) -> DataError:
    """The error for a source without documents, with the reasons for the first that were
    skipped."""
    reasons = "; ".join(str(item) for item in skipped[:3])
    return DataError(
        f"corpus {source.name}",
        got=f"no documents, {len(skipped):,} skipped" if skipped else "no documents",
        wanted=f"at least one of kind {source.kind}",
        hint=reasons or None,
    )
