"""Lengths without data: what a planner needs to be tried on a corpus that is not at hand."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.spec.given import shown

__all__ = ["Bins", "Counted", "Distribution", "LogNormal", "Mixture", "Resampled"]


def _text(number: float) -> str:
    """The number as text: without a point when it is whole, otherwise all digits that are needed to
    read the same float back."""
    return str(int(number)) if number == int(number) else repr(float(number))


_MOST_TOKENS = 2**53
"""Most tokens of a length, as lengths are drawn as floats: these hold no larger whole numbers
exactly."""

_MOST_SPREAD = 1000.0
"""Largest sigma, and 1 / alpha, of a log-normal law: larger ones overflow when lengths are drawn,
and draw little else than its least and its longest length."""


def _check_finite(kind: str, law: object, *names: str, most: float = np.inf) -> None:
    """Raise ConfigError where a field of a distribution, the sum of its entries or an entry is NaN,
    infinite or more than ``most``."""
    for name in names:
        numbers = np.asarray(getattr(law, name), dtype=object).ravel()
        with np.errstate(over="ignore"):
            wrong = [n for n in numbers.tolist() if not n <= most or not abs(n) < np.inf]
            finite = wrong or np.isfinite(numbers.astype(np.float64).sum())
        if wrong or not finite:
            got = f"{name} with {shown(wrong[0])}" if wrong else f"{name} whose sum is infinite"
            limit = f" of at most {most:,}" if most < np.inf else ""
            raise ConfigError(kind, got=got, wanted=f"finite numbers{limit}")


class Distribution(Protocol):
    """Lengths in tokens, drawn independently of each other."""

    @property
    def longest(self) -> int:
        """The most tokens that a drawn length can have."""
        ...

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Draw ``count`` lengths in tokens, an array [count], each >= 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """``exp(log(median) + sigma * normal)``, cut off at ``min`` and ``max`` as a loader would.

    The longest share ``tail`` is drawn from a Pareto law of index ``alpha`` instead, which begins
    where the share begins: corpora have heavier tails than the bodies of log-normal laws.
    """

    median: float
    sigma: float
    min: int = 1
    max: int = 1 << 20
    tail: float = 0.0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError for lengths and shape parameters out of range."""
        _check_finite("lognormal", self, "median", "sigma", "tail", "alpha")
        _check_finite("lognormal", self, "min", "max", most=_MOST_TOKENS)
        if not 1 <= self.min <= self.max:
            raise ConfigError(
                "lognormal", got=f"min {self.min}, max {self.max}", wanted="min <= max"
            )
        if self.median < 1 or self.sigma < 0 or self.alpha <= 0 or not 0 <= self.tail < 1:
            raise ConfigError(
                "lognormal", got=str(self), wanted="median >= 1, sigma >= 0, alpha > 0, tail < 1"
            )
        if max(self.sigma, 1 / self.alpha) > _MOST_SPREAD:
            wanted = f"sigma <= {_MOST_SPREAD:g}, alpha >= {1 / _MOST_SPREAD:g}"
            raise ConfigError("lognormal", got=str(self), wanted=wanted)

    @property
    def longest(self) -> int:
        """The longest length in tokens that can be drawn, ``max``."""
        return self.max

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Draw ``count`` lengths in tokens, an array [count]."""
        logs = np.log(self.median) + self.sigma * generator.standard_normal(count)
        if 1 - self.tail < 1:  # a smaller share is never drawn
            # A Pareto law is exponential in the logarithm, so lengths beyond the quantile where the
            # tail begins are replaced by that quantile plus an exponential.
            begin = np.log(self.median) + self.sigma * NormalDist().inv_cdf(1 - self.tail)
            beyond = begin + generator.standard_exponential(count) / self.alpha
            logs = np.where(logs > begin, beyond, logs)
        limits = np.log([self.min, self.max])
        return np.round(np.exp(np.clip(logs, *limits))).astype(np.int64)

    def __str__(self) -> str:
        text = f"lognormal:median={_text(self.median)},sigma={_text(self.sigma)}"
        text += f",min={self.min},max={self.max}"
        return text + (f",tail={self.tail!r},alpha={_text(self.alpha)}" if self.tail else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """A histogram: ``shares[i]`` of the lengths lie in ``[edges[i], edges[i + 1])``.

    Inside a bin the logarithm of the length is uniform. Shares need not add up to one.
    """

    edges: tuple[int, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ConfigError unless edges rise and there is a share for each bin between them."""
        _check_finite("bins", self, "edges", most=_MOST_TOKENS)
        _check_finite("bins", self, "shares")
        rising = all(a < b for a, b in zip(self.edges, self.edges[1:], strict=False))
        if len(self.edges) != len(self.shares) + 1 or not rising or self.edges[0] < 1:
            wanted = "rising edges >= 1, one more than shares"
            raise ConfigError("bins", got=str(self), wanted=wanted)
        if min(self.shares) < 0 or sum(self.shares) <= 0:
            raise ConfigError("bins", got=str(self), wanted="shares >= 0, not all zero")

    @property
    def longest(self) -> int:
        """The last edge, which itself does not occur."""
        return self.edges[-1] - 1

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Draw ``count`` lengths in tokens, an array [count]."""
        # Inverse transform sampling: the cumulative shares at the edges, inverted linearly.
        borders = np.cumsum([0.0, *self.shares]) / sum(self.shares)
        logs = np.interp(generator.random(count), borders, np.log(self.edges))
        return np.clip(np.exp(logs).astype(np.int64), self.edges[0], self.longest)

    def __str__(self) -> str:
        edges, shares = ("/".join(_text(x) for x in row) for row in (self.edges, self.shares))
        return f"bins:edges={edges},shares={shares}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampled:
    """Lengths drawn with replacement from a list of real ones, or of one for a fixed length."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ConfigError for no lengths, and for one that is not a finite number >= 1."""
        _check_finite("list of lengths", self, "lengths", most=_MOST_TOKENS)
        if not self.lengths or min(self.lengths) < 1:
            raise ConfigError("list of lengths", got=self.lengths[:8], wanted="lengths >= 1")

    @property
    def longest(self) -> int:
        """The most tokens of a listed length."""
        return max(self.lengths)

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Draw ``count`` lengths in tokens, an array [count]."""
        return np.array(self.lengths)[generator.integers(len(self.lengths), size=count)]

    def __str__(self) -> str:
        if len(self.lengths) == 1:
            return f"fixed:{self.lengths[0]}"
        return "list:" + "/".join(str(length) for length in self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """``counts[i]`` of the lengths are ``lengths[i]``. Counts may be shares."""

    lengths: tuple[int, ...]
    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ConfigError unless there is a count for each length, and one is above zero."""
        _check_finite("counted", self, "lengths", most=_MOST_TOKENS)
        _check_finite("counted", self, "counts")
        if len(self.lengths) != len(self.counts) or not self.lengths or min(self.lengths) < 1:
            raise ConfigError("counted", got=str(self), wanted="a count for each length >= 1")
        if min(self.counts) < 0 or sum(self.counts) <= 0:
            raise ConfigError("counted", got=str(self), wanted="counts >= 0, not all zero")

    @property
    def longest(self) -> int:
        """The most tokens of a length that occurs."""
        pairs = zip(self.lengths, self.counts, strict=True)
        return max(length for length, count in pairs if count > 0)

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Draw ``count`` lengths in tokens, an array [count]."""
        borders = np.cumsum(self.counts)  # length i is drawn between borders i - 1 and i
        which = np.searchsorted(borders, generator.random(count) * borders[-1], side="right")
        return np.array(self.lengths)[which]

    def __str__(self) -> str:
        lengths, counts = ("/".join(_text(x) for x in row) for row in (self.lengths, self.counts))
        return f"counted:lengths={lengths},counts={counts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Each length is drawn from one of the parts, chosen by its weight."""

    weights: tuple[float, ...]
    parts: tuple[Distribution, ...]

    def __post_init__(self) -> None:
        """Raise ConfigError unless there is a finite weight above zero for each part."""
        _check_finite("mixture", self, "weights")
        if len(self.weights) != len(self.parts) or not self.parts or min(self.weights) <= 0:
            raise ConfigError("mixture", got=str(self.weights), wanted="a weight > 0 for each part")

    @property
    def longest(self) -> int:
        """The most tokens that a length of any part can have."""
        return max(part.longest for part in self.parts)

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Draw ``count`` lengths in tokens, an array [count]."""
        shares = np.array(self.weights) / sum(self.weights)
        which = np.searchsorted(np.cumsum(shares)[:-1], generator.random(count), side="right")
        drawn = np.stack([part.draw(count, generator) for part in self.parts])  # [parts, count]
        return drawn[which, np.arange(count)]

    def __str__(self) -> str:
        pairs = zip(self.weights, self.parts, strict=True)
        return " + ".join(f"{_text(weight)}*{part}" for weight, part in pairs)
