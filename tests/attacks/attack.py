"""What an attack is: something that may go wrong, drawn at random, case by case."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.errors import HeadraceError

__all__ = ["NO_START", "Attack", "Case", "Outcome", "case_rng", "refusal_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a case ended: a ``verdict`` of one or two words, which tables count; whether the library
    ``survived``; the relative ``error``, where one was measured; and what happened, in words."""

    verdict: str
    survived: bool = True
    error: float | None = None
    words: str = ""


NO_START = "no start"
"""The verdict where an attack could not begin."""

Case = Callable[[np.random.Generator], Outcome]
"""Draws a case and runs it. What it raises has not survived, but is an ordinary outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """An attack by its ``name``.

    ``begin(folder)`` prepares in an empty folder what all cases share and gives the function that
    runs them; it does so in a process of its own. A case that takes longer than ``limit_s`` seconds
    has not survived. Of an hour every attack gets its ``weight``; the ordinary tests run half of
    ``few`` cases of it, the slow ones all.
    """

    name: str
    about: str
    begin: Callable[[Path], AbstractContextManager[Case]]
    limit_s: float
    few: int
    weight: float = 1.0


def case_rng(seed: int, attack: str, number: int) -> np.random.Generator:
    """Where the draws of a case come from: the same for the same seed, attack and number."""
    return np.random.default_rng((seed, zlib.crc32(attack.encode()), number))


def refusal_of(error: BaseException) -> Outcome:
    """The outcome of an error that was raised: one of the library's own is a refusal, as it is
    meant to be; any other would have been a traceback."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, HeadraceError):
        return Outcome(verdict="refused", words=words)
    return Outcome(verdict="traceback", survived=False, words=words)
