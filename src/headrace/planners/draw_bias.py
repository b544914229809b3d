"""How far iterations that choose their own samples are from random batches.

A sampler that fills devices first may bring short samples early in an epoch and long ones late, or
have each iteration hold few kinds of lengths. Both are measured by buckets of like lengths: where
in the epoch a bucket's samples come, and how far each iteration's lengths are from the data's,
beside what random batches of the same sizes show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError
from headrace.planners.drawn_iterations import bucket_numbers
from headrace.spec import Lengths

__all__ = ["BucketPlace", "DrawBias", "draw_bias"]

_RANDOM = 8
"""Random orders of which the mean distance is taken, as one alone is off by a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlace:
    """Where in an epoch the samples of a bucket come.

    Attributes:
        longest: Tokens of its longest sample.
        samples: Its samples.
        position: Their mean place in the epoch, 0 at its beginning and 1 at its end; 0.5 without
            bias.
        error: The standard error of ``position`` if each sample came at random.
    """

    longest: int
    samples: int
    position: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawBias:
    """How far the iterations of an epoch are from random batches.

    Attributes:
        buckets: Where the samples of each bucket come, the shortest first.
        distance: Half the sum, over the buckets, of the difference between an iteration's share of
            tokens and the epoch's, as a mean over iterations: 0 where all are alike, 1 where they
            have nothing in common.
        random_distance: The same of random batches of as many samples each.
        tokens: The fewest and the most tokens of an iteration.
        tokens_deviation: The standard deviation of an iteration's tokens over their mean.
    """

    buckets: tuple[BucketPlace, ...]
    distance: float
    random_distance: float
    tokens: tuple[int, int]
    tokens_deviation: float


def draw_bias(iterations: Sequence[Lengths], *, ratio: float = 2.0, seed: int = 0) -> DrawBias:
    """Measure the iterations of an epoch.

    Args:
        iterations: The samples of each, in order.
        ratio: The longest over the shortest length of a bucket.
        seed: Of the random batches that they are compared with.

    Returns:
        Places, distances and the spread of tokens.

    Raises:
        DataError: For no iterations.
    """
    if not iterations:
        raise DataError("iterations", got="none", wanted="those of an epoch")
    lengths = np.concatenate([np.array(one.tokens, dtype=np.int64) for one in iterations])
    counts = np.array([len(one) for one in iterations])
    _, numbers = np.unique(bucket_numbers(lengths, ratio), return_inverse=True)
    owner = np.repeat(np.arange(len(counts)), counts)
    before = counts.cumsum() - counts
    places = ((before + counts / 2) / len(lengths))[owner]
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(lengths)) for _ in range(_RANDOM)]
    totals = np.bincount(owner, weights=lengths)
    return DrawBias(
        buckets=tuple(
            _place(lengths[numbers == n], places[numbers == n]) for n in range(numbers.max() + 1)
        ),
        distance=_distance(owner, numbers, lengths),
        random_distance=float(
            np.mean([_distance(owner, numbers[order], lengths[order]) for order in orders])
        ),
        tokens=(int(totals.min()), int(totals.max())),
        tokens_deviation=float(totals.std() / totals.mean()),
    )


def _place(lengths: NDArray[np.int64], places: NDArray[np.float64]) -> BucketPlace:
    """The mean place of the samples of a bucket; at random they are uniform on [0, 1], with a
    standard deviation of 1 / sqrt(12)."""
    return BucketPlace(
        longest=int(lengths.max()),
        samples=len(lengths),
        position=float(places.mean()),
        error=float(1 / np.sqrt(12 * len(lengths))),
    )


def _distance(
    owner: NDArray[np.int64], numbers: NDArray[np.int64], lengths: NDArray[np.int64]
) -> float:
    """The mean distance of iterations from the epoch, by shares of tokens, given the iteration
    ``owner`` and the bucket of each sample."""
    shape = int(owner.max()) + 1, int(numbers.max()) + 1
    tokens = np.zeros(shape)
    np.add.at(tokens, (owner, numbers), lengths)
    shares = tokens / tokens.sum(axis=1, keepdims=True)
    whole = tokens.sum(axis=0) / tokens.sum()
    return float((np.abs(shares - whole).sum(axis=1) / 2).mean())
