"""A batch: which pieces of which documents are trained in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.spec.lengths import Lengths

__all__ = ["Batch", "Sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """``length`` tokens of a document from token ``start`` on."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one optimizer step, in the order of ``lengths``.

    ``lengths.ids`` are the samples' numbers in the sampler's table. ``state_after`` is the state
    of the sampler once this batch is trained: what a checkpoint keeps, however far ahead batches
    were drawn. ``tokens[i] [length]`` int32 are the ids, empty until a reader has read them.
    """

    step: int
    epoch: int
    lengths: Lengths
    samples: tuple[Sample, ...]
    state_after: dict[str, Any] = field(repr=False)
    tokens: tuple[NDArray[np.int32], ...] = field(default=(), repr=False, compare=False)
