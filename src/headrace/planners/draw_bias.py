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
    lengths = np.concatenate(
        [np.array(iteration.tokens, dtype=np.int64) for iteration in iterations]
    )
    counts = np.array([len(iteration) for iteration in iterations])
    _, bucket_of = np.unique(bucket_numbers(lengths, ratio), return_inverse=True)
    iteration_of = np.repeat(np.arange(len(counts)), counts)
    # Each sample's place in the epoch, 0 to 1, is the middle of its iteration.
    before = counts.cumsum() - counts
    places = ((before + counts / 2) / len(lengths))[iteration_of]
    random = np.random.default_rng(seed)
    orders = [random.permutation(len(lengths)) for _ in range(_RANDOM)]
    totals = np.bincount(iteration_of, weights=lengths)
    return DrawBias(
        buckets=tuple(
            _place(lengths[bucket_of == bucket], places[bucket_of == bucket])
            for bucket in range(bucket_of.max() + 1)
        ),
        distance=_distance(iteration_of, bucket_of, lengths),
        random_distance=float(
            np.mean([_distance(iteration_of, bucket_of[order], lengths[order]) for order in orders])
        ),
        tokens=(int(totals.min()), int(totals.max())),
        tokens_deviation=float(totals.std() / totals.mean()),
    )


def _place(lengths: NDArray[np.int64], places: NDArray[np.float64]) -> BucketPlace:
    """Where in the epoch the samples of a bucket come, given their lengths and places. Random
    places are uniform on [0, 1], with a standard deviation of 1 / sqrt(12), of which the error
    follows."""
    return BucketPlace(
        longest=int(lengths.max()),
        samples=len(lengths),
        position=float(places.mean()),
        error=float(1 / np.sqrt(12 * len(lengths))),
    )


def _distance(
    iteration_of: NDArray[np.int64], bucket_of: NDArray[np.int64], lengths: NDArray[np.int64]
) -> float:
    """The mean distance of iterations from the epoch, half the summed differences of the buckets'
    shares of tokens, given the iteration, bucket and length of each sample [samples]."""
    shape = int(iteration_of.max()) + 1, int(bucket_of.max()) + 1
    tokens = np.zeros(shape)  # [iterations, buckets]
    np.add.at(tokens, (iteration_of, bucket_of), lengths)
    shares = tokens / tokens.sum(axis=1, keepdims=True)
    epoch_shares = tokens.sum(axis=0) / tokens.sum()
    return float((np.abs(shares - epoch_shares).sum(axis=1) / 2).mean())
