"""Tokenizers by a text: bytes, k-mers of a genome, ready ids, and Hugging Face's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.data.hf_tokens import load_cached, load_file, sizes_of_file
from headrace.errors import DataError

__all__ = ["Bytes", "Kmers", "ReadyIds", "Tokenizer", "make_tokenizer", "tokenizer_sizes"]

WANTED = (
    "'bytes', 'kmer:K', 'ids:VOCABULARY[:END]', a tokenizer.json, a folder that holds one, "
    "or the name of a model in the local Hugging Face cache"
)


class Tokenizer(Protocol):
    """Turns text into ids; ends each document with ``end_id`` when there is one."""

    @property
    def name(self) -> str:
        """The name of the tokenizer in messages and reports."""
        ...

    @property
    def fingerprint(self) -> str:
        """A text that differs between any two tokenizers that give some text different ids."""
        ...

    @property
    def vocabulary(self) -> int:
        """The number of ids: all are below it."""
        ...

    @property
    def end_id(self) -> int | None:
        """The id that ends a document, None when the tokenizer has none."""
        ...

    @property
    def mask_id(self) -> int | None:
        """The id that stands for a hidden token, None when the tokenizer has none."""
        ...

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """Ids of each text; safe to call from several threads."""
        ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """The UTF-8 bytes of the text; id 256 ends a document."""

    name: str = "bytes"
    fingerprint: str = "bytes 1"
    vocabulary: int = 257
    end_id: int = 256
    mask_id: None = None

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """Ids of each text, ``[bytes + 1]``."""
        return [self._encode(text.encode()) for text in texts]

    def _encode(self, raw: bytes) -> NDArray[np.int32]:
        """The values of the bytes, then the end id."""
        ids = np.full(len(raw) + 1, self.end_id, dtype=np.int32)
        ids[:-1] = np.frombuffer(raw, dtype=np.uint8)
        return ids


@dataclass(frozen=True, slots=True)
class Kmers:
    """Letters A, C, G, T taken ``k`` at a time without overlap, in either case.

    A k-mer is a number in base 4; one with any other letter is the unknown id ``4^k``, and
    ``4^k + 1`` ends a document. Fewer than k letters left at the end are dropped.
    """

    k: int

    @property
    def name(self) -> str:
        """What the tokenizer is called, such as ``kmer:3``."""
        return f"kmer:{self.k}"

    @property
    def fingerprint(self) -> str:
        """The name and a version: the ids depend on nothing else."""
        return f"{self.name} 1"

    @property
    def vocabulary(self) -> int:
        """All k-mers, the unknown one and the end."""
        return 4**self.k + 2

    @property
    def end_id(self) -> int:
        """The id that ends a document, the last one."""
        return 4**self.k + 1

    @property
    def mask_id(self) -> None:
        """None, as there is no id for masked tokens."""
        return

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """Ids of each text, ``[letters // k + 1]``."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> NDArray[np.int32]:
        """An id for every k letters: digits 0 to 3 for A, C, G, T in base 4, and 4^k where another
        letter is among them; then the end."""
        letters = np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)
        table = np.full(256, 4, dtype=np.uint8)  # the digit of each byte, 4 for other letters
        for digit, letter in enumerate(b"ACGT"):
            table[letter] = table[letter + 32] = digit  # 32 further on is the small letter
        digits = table[letters[: len(letters) // self.k * self.k]].reshape(-1, self.k)
        ids = np.full(len(digits) + 1, self.end_id, dtype=np.int32)
        ids[:-1] = 0
        for column in digits.T:  # column by column, to save memory: a chromosome is large
            ids[:-1] = 4 * ids[:-1] + column
        ids[:-1][(digits > 3).any(axis=1)] = 4**self.k
        return ids


@dataclass(frozen=True, slots=True)
class ReadyIds:
    """Stands for the tokenizer of data that is tokens already: knows the vocabulary only."""

    vocabulary: int
    end_id: int | None = None
    mask_id: None = None

    @property
    def name(self) -> str:
        """What it is called, such as ``ids:50257`` or, with the end's id, ``ids:50257:50256``."""
        return f"ids:{self.vocabulary}" + ("" if self.end_id is None else f":{self.end_id}")

    @property
    def fingerprint(self) -> str:
        """The name and a version: nothing else can differ."""
        return f"{self.name} 1"

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """Raise DataError, as this tokenizer cannot encode text."""
        raise DataError(
            "tokenizer",
            got=f"{self.name!r} and documents of text",
            wanted="documents of token ids",
            hint="name the tokenizer that shall read the text",
        )


def _kmers(spec: str) -> Kmers:
    """The tokenizer of text ``kmer:K``; raises DataError for other text."""
    _, _, k = spec.partition(":")
    if not k.isdecimal() or not 1 <= int(k) <= 8:
        raise DataError("tokenizer", got=repr(spec), wanted="'kmer:K' with K from 1 to 8")
    return Kmers(int(k))


def _ready(spec: str) -> ReadyIds:
    """The tokenizer of text ``ids:VOCABULARY[:END]``, for documents that are ids already; raises
    DataError for other text."""
    words = spec.split(":")[1:]
    if all(word.isdecimal() for word in words) and len(words) in (1, 2):
        vocabulary, end_id = int(words[0]), int(words[1]) if len(words) == 2 else None
        if (end_id or 0) < vocabulary:
            return ReadyIds(vocabulary, end_id)
    raise DataError(
        "tokenizer", got=repr(spec), wanted="'ids:VOCABULARY' or 'ids:VOCABULARY:END', END below"
    )


def _file(spec: str) -> Path | None:
    """The tokenizer.json that a text names by its path or its folder's, None where no such file
    exists."""
    path = Path(os.path.expanduser(spec))
    if os.path.isdir(path):
        path /= "tokenizer.json"
    return path if os.path.isfile(path) else None


def tokenizer_sizes(spec: str) -> tuple[int, int | None]:
    """(vocabulary, mask id or None) of the tokenizer that :func:`make_tokenizer` makes of a text.
    Those of a tokenizer.json are read without the library that would run it."""
    path = None if spec == "bytes" or spec.startswith(("kmer:", "ids:")) else _file(spec)
    if path is not None:
        return sizes_of_file(path)
    tokenizer = make_tokenizer(spec)
    return tokenizer.vocabulary, tokenizer.mask_id


def make_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer a text names.

    ``bytes``; ``kmer:3``; ``ids:VOCABULARY[:END]`` for data that is tokens already; the path of a
    Hugging Face ``tokenizer.json`` or of a folder that holds one; the name of a model whose
    tokenizer is in the local Hugging Face cache (nothing is downloaded). Raises DataError for
    anything else and MissingExtra when a library is absent.
    """
    if spec == "bytes":
        return Bytes()
    if spec.startswith("kmer:"):
        return _kmers(spec)
    if spec.startswith("ids:"):
        return _ready(spec)
    path = _file(spec)
    if path is not None:
        return load_file(path)
    if not spec or spec.startswith((".", "/", "~")) or spec.endswith(".json"):
        raise DataError("tokenizer", got=f"{spec!r}, no such file", wanted=WANTED)
    return load_cached(spec, wanted=WANTED)
