"""Hugging Face tokenizers: a tokenizer.json, or a model's from the local cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.text_borders import borders
from headrace.errors import DataError, MissingExtra

__all__ = ["HfTokenizer", "load_cached", "load_file", "sizes_of_file"]

END_TOKENS = ("<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
"""Special tokens known to end a document, looked for when nothing beside the file names one."""

MASK_TOKENS = ("[MASK]", "<mask>")
"""Tokens known to stand for a hidden one: BERT's, and those of RoBERTa and its kind."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HfTokenizer:
    """A tokenizer of the library ``tokenizers``.

    No special token is added but the one that ends the document, and special tokens that occur
    in a text are read as text: a file that talks about ``<|end|>`` does not end there.
    """

    name: str
    fingerprint: str
    vocabulary: int
    end_id: int | None
    mask_id: int | None
    library: Any
    piece: int = 1 << 18
    """Characters that the library is given at once of a longer text: it takes some 120 bytes for
    each while it works."""

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """Ids of each text, with the end id when there is one. Short texts are encoded together,
        long ones piece by piece."""
        end = np.array([] if self.end_id is None else [self.end_id], dtype=np.int32)
        short = [text for text in texts if len(text) <= self.piece]
        encoded = iter(self._ids(short) if short else [])
        pieces = [[next(encoded)] if len(t) <= self.piece else self._long(t) for t in texts]
        return [np.concatenate([*pieces_of_text, end]) for pieces_of_text in pieces]

    def _ids(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """The library's ids of each text, without special tokens."""
        encoded = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(item.ids, dtype=np.int32) for item in encoded]

    def _long(self, text: str) -> Iterator[NDArray[np.int32]]:
        """The ids of a long text, piece by piece. Joined they are the ids of the whole text, as it
        is cut only where that does not change them."""
        start = 0
        for border in borders(text, self.piece, self._can_cut):
            yield self._ids([text[start:border]])[0]
            start = border
        yield self._ids([text[start:]])[0]

    def _can_cut(self, left: str, right: str) -> bool:
        """Whether two neighbouring texts can be encoded apart: their ids, joined, are the ids of
        the joined text."""
        joined, left_ids, right_ids = self._ids([left + right, left, right])
        return np.array_equal(joined, np.concatenate([left_ids, right_ids]))


def _wrap(library: Any, *, name: str, end_token: str | None) -> HfTokenizer:
    """A tokenizer of the library, set to encode whole documents as plain text. Documents end in
    ``end_token``; where that is None, in the first of END_TOKENS that it knows."""
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    content = hashlib.sha256(library.to_str().encode())
    special = {item.content: i for i, item in library.get_added_tokens_decoder().items()}

    def first_id(tokens: tuple[str, ...]) -> int | None:
        """The id of the first of these tokens that the tokenizer knows, None when it knows none."""
        ids = [special.get(token, library.token_to_id(token)) for token in tokens]
        return next((i for i in ids if i is not None), None)

    end_id = first_id(END_TOKENS if end_token is None else (end_token,))
    content.update(f"end {end_id}".encode())
    return HfTokenizer(
        name=name,
        fingerprint=content.hexdigest(),
        vocabulary=max(library.get_vocab(with_added_tokens=True).values()) + 1,
        end_id=end_id,
        mask_id=first_id(MASK_TOKENS),
        library=library,
    )


def _named_end(config: Path) -> str | None:
    """The ``eos_token`` of a tokenizer_config.json, None when there is no such file or entry."""
    try:
        entry = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else None


def load_file(path: Path) -> HfTokenizer:
    """The tokenizer of a ``tokenizer.json``.

    The end of a document is the ``eos_token`` of a ``tokenizer_config.json`` beside it, else the
    first of END_TOKENS that it knows. Raises DataError when the file cannot be read as one.
    """
    try:
        from tokenizers import Tokenizer as Library
    except ModuleNotFoundError:
        raise MissingExtra("tokenizers", extra="train", needed_for=f"the tokenizer {path}")
    try:
        library = Library.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any malformed file
        hint = f"the library says: {error}"
        raise DataError("tokenizer", got=str(path), wanted="a tokenizer.json", hint=hint)
    named = _named_end(path.with_name("tokenizer_config.json"))
    return _wrap(library, name=str(path), end_token=named)


def sizes_of_file(path: Path) -> tuple[int, int | None]:
    """Vocabulary and mask id of a ``tokenizer.json``, as :func:`load_file` finds them, without the
    library: enough for a model's shape. Raises DataError when the file cannot be read as one."""
    try:
        value = json.loads(path.read_bytes())
        vocabulary = value["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of text and score
            vocabulary = {text: i for i, (text, _) in enumerate(vocabulary)}
        ids = vocabulary | {item["content"]: item["id"] for item in value["added_tokens"]}
        mask_ids = [int(ids[token]) for token in MASK_TOKENS if token in ids]
        return max(int(i) for i in ids.values()) + 1, mask_ids[0] if mask_ids else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        hint = f"{type(error).__name__}: {error}"
        raise DataError("tokenizer", got=str(path), wanted="a tokenizer.json", hint=hint)


def load_cached(name: str, *, wanted: str) -> HfTokenizer:
    """The tokenizer of a model in the local Hugging Face cache; nothing is downloaded.

    Raises DataError when transformers is absent, does not know the model locally, or has only a
    slow tokenizer for it.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        hint = "a model's name needs pip install 'headrace[hf]'"
        raise DataError("tokenizer", got=repr(name), wanted=wanted, hint=hint)
    try:
        model: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = f"not in the local Hugging Face cache: {str(error).partition(chr(10))[0]}"
        raise DataError("tokenizer", got=repr(name), wanted=wanted, hint=hint)
    library = getattr(model, "backend_tokenizer", None)
    if library is None:
        raise DataError(
            "tokenizer", got=f"{name!r}, a slow one", wanted="one with a tokenizer.json"
        )
    return _wrap(library, name=name, end_token=model.eos_token)
