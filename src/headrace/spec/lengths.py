"""The lengths of the sequences of one batch: all that a planner sees of the data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from headrace.errors import SpecError

__all__ = ["Lengths"]


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
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise SpecError(f"length of sequence {i}", got=repr(count), wanted="an int >= 1")
        if not self.ids:
            object.__setattr__(self, "ids", tuple(range(len(self.tokens))))
        if len(self.ids) != len(self.tokens):
            raise SpecError("ids of a batch", got=len(self.ids), wanted=len(self.tokens))

    @classmethod
    def of(cls, tokens: Iterable[int], ids: Iterable[int] = ()) -> Lengths:
        """Make lengths of any iterables of integers, numpy's too.

        Args:
            tokens: Tokens of each sequence.
            ids: The number of each sequence in the corpus; 0, 1, ... when empty.

        Returns:
            The lengths.

        Raises:
            SpecError: As for the class.
        """
        return cls(tokens=tuple(int(t) for t in tokens), ids=tuple(int(i) for i in ids))

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
        for word in text.split():
            length, times, repeat = word.partition("x")
            repeat = repeat if times else "1"
            if not length.isdecimal() or not repeat.isdecimal() or int(repeat) < 1:
                raise SpecError("lengths", got=repr(word), wanted="a length or LENGTHxCOUNT")
            tokens += [int(length)] * int(repeat)
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
