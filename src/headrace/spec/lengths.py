"""The lengths of the sequences of one batch: all that a planner sees of the data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from numbers import Integral
from typing import Any

from headrace.errors import SpecError
from headrace.spec.given import MOST_WHOLE, of_kind, shown

__all__ = ["MOST_SEQUENCES", "Lengths"]

MOST_SEQUENCES = 2_000_000
"""The most sequences that a text stands for: a digit too many would take all memory."""

_WORD = re.compile(r"(\d{1,30})(?:x(\d{1,30}))?")
"""A length, or a length and a count; longer ones are no numbers of 64 bits."""


def _no_length(i: int, got: object) -> SpecError:
    """The error for what is given as the length of sequence ``i`` and is none."""
    return SpecError(f"length of sequence {i}", got=shown(got), wanted="an int >= 1 of 64 bits")


def _elements(tokens: Any) -> Iterator[Any]:
    """What is given as the tokens of each sequence, one by one. Raises SpecError for a text, whose
    elements are digits, and for what has no elements."""
    try:
        if not isinstance(tokens, str | bytes):
            return iter(tokens)
    except TypeError:  # one number, also as an array
        pass
    raise SpecError(
        "lengths of a batch",
        got=shown(tokens),
        wanted="a list of the tokens of each sequence",
        hint="hr.Lengths.parse reads a text" if isinstance(tokens, str) else None,
    )


def _whole(i: int, count: Any) -> int:
    """The length of sequence ``i`` as an int, from a whole number of any kind, such as 2000.0 or an
    element of an array or tensor. Raises SpecError for other values."""
    if isinstance(count, Integral) and not isinstance(count, bool):
        return int(count)
    kind = str(getattr(count, "dtype", type(count).__name__))
    try:
        whole = int(count)
        if "bool" in kind or isinstance(count, str | bytes) or whole != count:
            raise _no_length(i, count)
    except (TypeError, ValueError, OverflowError):  # a list, NaN, infinity
        raise _no_length(i, count)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of the sequences of one batch.

    Attributes:
        tokens: Tokens of each sequence.
        ids: The number of each sequence in the corpus; 0, 1, ... when left out.

    Raises:
        SpecError: For an empty batch, a length below one, or another number of ids than of lengths.

    Example:
        >>> hr.Lengths.parse("512x3 1024").total
        2560
    """

    tokens: tuple[int, ...]
    ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Number the sequences from 0 where no ids are given; raises SpecError for no sequences,
        lengths below 1 or another number of ids."""
        if not self.tokens:
            raise SpecError("lengths of a batch", got="none", wanted="at least one sequence")
        for i, count in enumerate(self.tokens):
            if type(count) is not int or not 1 <= count <= MOST_WHOLE:
                raise _no_length(i, count)
        if not self.ids:
            object.__setattr__(self, "ids", tuple(range(len(self.tokens))))
        if len(self.ids) != len(self.tokens):
            raise SpecError("ids of a batch", got=len(self.ids), wanted=len(self.tokens))
        for i, number in enumerate(self.ids):
            if type(number) is not int or abs(number) > MOST_WHOLE:
                wanted = "a whole number of 64 bits"
                raise SpecError(f"id of sequence {i}", got=shown(number), wanted=wanted)

    @classmethod
    def of(cls, tokens: Iterable[int], ids: Iterable[int] = ()) -> Lengths:
        """Make lengths of any iterables of whole numbers, those of arrays and tensors too.

        Args:
            tokens: Tokens of each sequence.
            ids: The number of each sequence in the corpus; 0, 1, ... when empty.

        Returns:
            The lengths.

        Raises:
            SpecError: As for the class; for tokens that are no iterable of whole numbers, too.
        """
        counts = tuple(_whole(i, count) for i, count in enumerate(_elements(tokens)))
        return cls(tokens=counts, ids=tuple(int(i) for i in ids))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens of the whole batch."""
        return sum(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.tokens)

    @property
    def predicted(self) -> int:
        """Tokens that carry a next-token loss, every token but the last of each sequence."""
        return self.total - len(self.tokens)

    def __str__(self) -> str:
        runs = ((tokens, len(list(run))) for tokens, run in groupby(self.tokens))
        return " ".join(str(tokens) if n == 1 else f"{tokens}x{n}" for tokens, n in runs)

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read lengths from a text.

        Args:
            text: Lengths with blanks between, ``LENGTHxCOUNT`` for several equal ones: ``"512x3
                1024"`` is three sequences of 512 tokens and one of 1024.

        Returns:
            The lengths.

        Raises:
            SpecError: For a word that is no length, and for none at all.
        """
        tokens: list[int] = []
        for word in of_kind("lengths", text, str).split():
            found = _WORD.fullmatch(word)
            length, count = (int(found[1]), int(found[2] or "1")) if found else (0, 0)
            if count < 1:
                raise SpecError("lengths", got=repr(word), wanted="a length or LENGTHxCOUNT")
            if len(tokens) + count > MOST_SEQUENCES:
                wanted = f"at most {MOST_SEQUENCES:,} sequences"
                raise SpecError("lengths", got=repr(word), wanted=wanted)
            tokens += [length] * count
        return cls(tokens=tuple(tokens))

    def to_json(self) -> dict[str, list[int]]:
        """The lengths as JSON.

        Returns:
            An object that :meth:`from_json` reads back.
        """
        return {"tokens": list(self.tokens), "ids": list(self.ids)}

    @classmethod
    def from_json(cls, value: dict[str, list[int]]) -> Lengths:
        """Read what :meth:`to_json` gave.

        Args:
            value: The JSON object.

        Returns:
            The lengths.

        Raises:
            SpecError: For lengths that a batch cannot have.
        """
        return cls(tokens=tuple(value["tokens"]), ids=tuple(value["ids"]))
