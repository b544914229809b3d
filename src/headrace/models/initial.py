"""Initial weights: a function of the seed and the weight's name, whatever the number of ranks."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from headrace.layouts.partition import Rows
from headrace.spec.architecture import Architecture, WeightSpec

__all__ = ["initial_rows"]


def initial_rows(
    weight: WeightSpec, rows: Rows, architecture: Architecture, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """The first values of ``rows`` of a weight, [len(rows), ...].

    Norm weights are one, biases zero, matrices normal with deviation 0.02, and 0.02 / sqrt(2 L)
    for the two that write to the residual stream (GPT-2) unless norms follow its sums (BERT).
    Each row draws from its own Philox stream, so any rank draws any rows alike.
    """
    shape = (len(rows), *weight.shape[1:])
    if weight.name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(weight.shape) == 1:
        return torch.ones(shape, dtype=dtype)
    name = weight.name.split(".")[-2]
    adds = architecture.norm_first and name in ("proj", "out")
    deviation = 0.02 / (2 * architecture.layers) ** 0.5 if adds else 0.02
    key = [seed & (2**64 - 1), zlib.crc32(weight.name.encode())]
    columns = weight.row_elements
    # Philox counts in blocks of four 64-bit words: a row starts at a block of its own.
    stride = columns + 4
    values = np.empty((len(rows), columns))
    for i, row in enumerate(range(rows.start, rows.stop)):
        stream = np.random.Generator(np.random.Philox(key=key, counter=[row * stride, 0, 1, 0]))
        values[i] = stream.standard_normal(columns)
    return torch.from_numpy(values * deviation).to(dtype).view(shape)
