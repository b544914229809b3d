"""Documents on their way from a file to a tokenizer, and what is left out on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.corpus import FOREIGN_IDS, Skipped
from headrace.errors import DataError

__all__ = ["Document", "Skips", "check_ids", "no_memory", "usable"]


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A document: its ``content`` is text, or token ids. ``read_bytes`` are the bytes of its file
    that have been read up to its end. ``learned`` [ids] says which ids have a loss, None for
    all."""

    label: str
    content: str | NDArray[np.int64]
    read_bytes: int
    learned: NDArray[np.bool_] | None = None


@dataclass(slots=True)
class Skips:
    """Documents and files that were left out, with reasons: the first ``listed`` are ``items``, the
    others are only counted, in ``more``."""

    listed: int = 1000
    items: list[Skipped] = field(default_factory=list)
    more: int = 0

    def add(self, path: str, reason: str) -> None:
        """Note that what is at ``path`` was left out, and why."""
        if len(self.items) < self.listed:
            self.items.append(Skipped(path=path, reason=reason))
        else:
            self.more += 1

    def all(self) -> tuple[Skipped, ...]:
        """Everything left out; items beyond ``listed`` are one entry with their number."""
        tail = Skipped(path="and more", reason=f"{self.more:,} others", count=self.more)
        return (*self.items, *((tail,) if self.more else ()))


def usable(document: Document, skips: Skips) -> str | NDArray[np.int64] | None:
    """The content of a document: its text, or an array of its ids. None, with the reason in
    ``skips``, when it is empty or neither of the two."""
    content: Any = document.content
    if isinstance(content, str) and content:
        if _encodes(content):
            return content
        reason = "not Unicode"
    elif isinstance(content, list) and content:
        try:
            return _ids(content)
        except (TypeError, OverflowError):
            reason = "a list of other things than token ids"
    elif content in ("", []):
        reason = "empty"
    else:
        reason = f"a {type(content).__name__}, neither text nor a list of token ids"
    skips.add(document.label, reason)
    return None


def _ids(numbers: list[Any]) -> NDArray[np.int64]:
    """An array of ids; raises TypeError or OverflowError for what is no 64-bit integer."""
    # ``type``, as a bool of JSON is an instance of int too.
    if any(type(number) is not int for number in numbers):
        raise TypeError
    return np.array(numbers, dtype=np.int64)


def _encodes(text: str) -> bool:
    """Whether the text can be encoded in UTF-8. JSON may hold half a surrogate pair, which cannot,
    and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def no_memory(label: str) -> DataError:
    """The error for a file or document that is too large to be held."""
    return DataError(
        label,
        got="more than the memory holds",
        wanted="documents that fit into it",
        hint="cut the file into several, or its lines into documents (data.kind = 'jsonl')",
    )


def check_ids(ids: NDArray[Any], *, label: str, vocabulary: int) -> None:
    """Raise DataError, about ``label``, when an id is below 0 or not below ``vocabulary``."""
    if ids.min() < 0 or ids.max() >= vocabulary:
        worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise DataError(
            label,
            got=f"token id {worst}",
            wanted=f"ids from 0 to {vocabulary - 1}",
            hint=FOREIGN_IDS,
        )
