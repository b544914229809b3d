"""Seconds of packed launches on groups of ranks, in the plain form that planners of others use.

One launch of the sequences S on p ranks of a data-parallel world takes

    T(S, p) = (sum_i (a l_i^2 + b l_i) + kappa_p sum_i l_i) / p + c

seconds and holds at most ``cap`` tokens on every rank. a l^2 + b l is the work of a sequence, which
p ranks share; kappa_p what communication inside a group of p costs per token; c what a launch
costs whatever it holds. Groups exist for the sizes that have a kappa, powers of two or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from headrace.costs.saving import load_costs
from headrace.errors import CostError, did_you_mean

__all__ = ["GroupCosts"]

_NUMBERS = ("a_s", "b_s", "c_s")
_WORDS = ("name", "model", "device", "source", "meaning")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCosts:
    """The costs of groups: JSON kind ``groups``.

    ``a_s`` seconds per squared token, ``b_s`` per token, ``c_s`` per launch, ``cap_tokens`` tokens
    of a launch per rank, ``kappa_s[p]`` seconds per token on p ranks; ``words`` are remarks for
    people (name, model, device, source, meaning). Raises CostError, naming the entry, when one is
    negative, not finite or of the wrong kind.
    """

    a_s: float
    b_s: float
    c_s: float
    cap_tokens: int
    kappa_s: Mapping[int, float]
    words: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check all numbers and sort ``kappa_s`` by group size; raises CostError for any out of
        range."""
        for name in _NUMBERS:
            object.__setattr__(self, name, _seconds(name, getattr(self, name)))
        if not _whole(self.cap_tokens) or self.cap_tokens < 1:
            raise CostError("cap_tokens", got=repr(self.cap_tokens), wanted="a whole number >= 1")
        if not isinstance(self.kappa_s, Mapping) or not self.kappa_s:
            raise CostError("kappa_s", got=repr(self.kappa_s), wanted="at least one group size")
        for p in self.kappa_s:
            if not _whole(p) or p < 1:
                raise CostError("kappa_s, group size", got=repr(p), wanted="a whole number >= 1")
        rows = {p: _seconds(f"kappa_s of {p}", self.kappa_s[p]) for p in sorted(self.kappa_s)}
        object.__setattr__(self, "kappa_s", rows)
        object.__setattr__(self, "words", dict(self.words))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The group sizes that have a cost, smallest first."""
        return tuple(self.kappa_s)

    def most_tokens(self, devices: int) -> int:
        """Tokens of the longest sequence that fits on the largest group of at most ``devices``
        ranks; 0 where there is no such group."""
        return self.cap_tokens * max((p for p in self.sizes if p <= devices), default=0)

    def seconds(self, lengths: Iterable[int], p: int) -> float:
        """What one launch of sequences of ``lengths`` tokens takes on ``p`` ranks. Raises CostError
        for a size without costs."""
        if p not in self.kappa_s:
            raise CostError("group size", got=p, wanted=f"one of {', '.join(map(str, self.sizes))}")
        tokens = tuple(lengths)
        work = sum(self.a_s * length * length + self.b_s * length for length in tokens)
        return (work + self.kappa_s[p] * sum(tokens)) / p + self.c_s

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "kind": "groups",
            **self.words,
            **{name: getattr(self, name) for name in _NUMBERS},
            "cap_tokens": self.cap_tokens,
            "kappa_s": {str(p): kappa for p, kappa in self.kappa_s.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> GroupCosts:
        """The inverse of :meth:`to_json`. Raises CostError when the value is malformed."""
        if not isinstance(value, Mapping) or value.get("kind") != "groups":
            got = repr(value.get("kind")) if isinstance(value, Mapping) else type(value).__name__
            raise CostError("kind of costs", got=got, wanted="'groups'")
        needed = (*_NUMBERS, "cap_tokens", "kappa_s")
        for name in value:
            if name not in ("kind", *_WORDS, *needed):
                raise CostError(
                    f"costs, {name}",
                    got="an unknown entry",
                    hint=did_you_mean(str(name), (*_WORDS, *needed)),
                )
        for name in needed:
            if name not in value:
                raise CostError("costs", got=f"no {name}", wanted=f"{name} of kind 'groups'")
        rows = value["kappa_s"]
        if not isinstance(rows, Mapping):
            raise CostError("kappa_s", got=type(rows).__name__, wanted="seconds by group size")
        return cls(
            **{name: value[name] for name in (*_NUMBERS, "cap_tokens")},
            kappa_s={_size(p): kappa for p, kappa in rows.items()},
            words={name: str(value[name]) for name in _WORDS if name in value},
        )

    @classmethod
    def load(cls, path: str | Path) -> GroupCosts:
        """Read a file of kind ``groups``. Raises CostError, naming the file, when it cannot be read
        or its value is malformed."""
        return load_costs(path, cls.from_json)


def _whole(value: object) -> bool:
    """Whether a value is an int but not a bool, which is an int in Python."""
    return isinstance(value, int) and not isinstance(value, bool)


def _seconds(name: str, value: object) -> float:
    """A value as seconds. Raises CostError, with the entry's name, unless it is a finite number
    that is not negative."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not isfinite(value) or value < 0:
        raise CostError(name, got=repr(value), wanted="a finite number >= 0")
    return float(value)


def _size(text: object) -> int:
    """A group size from the text of a JSON key. Raises CostError for what is none."""
    if isinstance(text, str) and text.isdecimal():
        return int(text)
    raise CostError("kappa_s, group size", got=repr(text), wanted="a whole number >= 1")
