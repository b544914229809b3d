"""Initial weights: a function of the seed and the weight's name, whatever the number of ranks."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.layouts.partition import Rows
from headrace.spec.architecture import Architecture, WeightSpec

__all__ = ["initial_rows"]

_AT_ONCE = 1 << 18
"""Numbers that a thread draws at once: what it computes with stays in a core's cache."""


def initial_rows(
    weight: WeightSpec, rows: Rows, architecture: Architecture, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """The initial values of ``rows`` of a weight, [len(rows), ...].

    Norm weights are one and biases zero. Matrices are normal with standard deviation 0.02; as in
    GPT-2 it is 0.02 / sqrt(2 L) for the last matrix of each branch of the L layers, whose output is
    added to the residual stream, unless a norm follows the sum (BERT). Each row is drawn from its
    own place in a Philox stream, so that every rank draws the same values for a row.
    """
    shape = (len(rows), *weight.shape[1:])
    if weight.name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(weight.shape) == 1:
        return torch.ones(shape, dtype=dtype)
    module = weight.name.split(".")[-2]
    ends_branch = architecture.norm_first and module in ("proj", "out")
    deviation = 0.02 / (2 * architecture.layers) ** 0.5 if ends_branch else 0.02
    key = [seed & (2**64 - 1), zlib.crc32(weight.name.encode())]
    columns = weight.row_elements
    values = torch.empty((len(rows), columns), dtype=dtype)
    at_once = max(1, _AT_ONCE // columns)

    def fill(first: int) -> None:
        """Draw the next ``at_once`` rows of ``values``, from row ``first`` on."""
        count = min(at_once, len(rows) - first)
        drawn = _normal(key, rows.start + first, count, columns)
        values[first : first + count] = torch.from_numpy(drawn * deviation)

    starts = range(0, len(rows), at_once)
    if len(starts) < 2:
        for first in starts:
            fill(first)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, starts))
    return values.view(shape)


def _normal(key: list[int], first: int, count: int, columns: int) -> NDArray[np.float64]:
    """Standard normal numbers [count, columns] for ``count`` rows from row ``first`` on, by a
    Philox generator with ``key``. The Box-Muller transform makes two of them from the two halves of
    each 64-bit random word. So every row takes the same number of words, and its numbers do not
    depend on the row at which drawing begins."""
    # Philox makes blocks of four words, eight numbers; a row has this many, rounded up.
    blocks = -(-columns // 8)
    words = np.random.Philox(key=key, counter=[first * blocks, 0, 1, 0]).random_raw(
        count * blocks * 4
    )
    halves = words.view(np.uint32).reshape(-1, 2) * 2.0**-32  # two uniform numbers of each word
    # Half a step is added, as the logarithm of 0 is infinite.
    radius = np.sqrt(-2 * np.log(halves[:, 0] + 2.0**-33))
    angle = halves[:, 1] * (2 * np.pi)
    pairs = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1)
    return pairs.reshape(count, blocks * 8)[:, :columns]
