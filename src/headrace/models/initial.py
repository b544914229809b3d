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
    """The first values of ``rows`` of a weight, [len(rows), ...].

    Norm weights are one, biases zero, matrices normal with deviation 0.02, and 0.02 / sqrt(2 L)
    for the two that write to the residual stream (GPT-2) unless norms follow its sums (BERT).
    Each row has its own words of a Philox stream, so any rank draws any rows alike.
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
    """Standard normal numbers [count, columns] of ``count`` rows from row ``first`` on: two by Box
    and Muller from the two halves of each 64-bit random word. So each row takes as many words, and
    its numbers do not depend on where drawing begins."""
    blocks = -(-columns // 8)  # of a row: Philox makes four words at a time
    words = np.random.Philox(key=key, counter=[first * blocks, 0, 1, 0]).random_raw(
        count * blocks * 4
    )
    halves = words.view(np.uint32).reshape(-1, 2) * 2.0**-32  # two uniform numbers of each word
    radius = np.sqrt(-2 * np.log(halves[:, 0] + 2.0**-33))
    angle = halves[:, 1] * (2 * np.pi)
    pairs = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1)
    return pairs.reshape(count, blocks * 8)[:, :columns]
