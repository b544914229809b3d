"""Whether the second pass over samples gives the values that the first one gave.

The gradients that ``run.backward`` gets are those of a loss of the values that ``run.map`` gave.
With dropout, or with weights that were changed in between, the second pass has other values, to
which these gradients do not belong. So a few values of each sample are kept, and travel beside the
sample to the ranks that compute them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.adopt.spread_model import Item
from headrace.engine.loop_runner import LoopMicroBatch
from headrace.engine.sample_order import LoopBatch, fingerprint_of
from headrace.errors import ModelError

__all__ = ["FormerValues", "repeated_error"]

_MAPS = 8
"""The last maps whose values are kept."""
_TOKENS, _FEATURES = 32, 8
"""The first tokens of a sample whose values are kept, and of each the first features."""
_FORMER = "former"
"""The field beside a sample that holds what it had in maps."""
_TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-6, torch.float32: 2e-3}
"""Differences, relative to 1 and to the largest value, that passes by other plans may have; 5 % in
half types."""


class _Map(NamedTuple):
    """The function and the further arguments of a map, and a few values of each sample by the
    fingerprint of the sample."""

    fn: Any
    more: Any
    values: dict[str, torch.Tensor]


class FormerValues:
    """A few values that the last maps gave of each sample."""

    def __init__(self) -> None:
        """No map has run yet."""
        self._maps = deque[_Map](maxlen=_MAPS)

    def keep(
        self, fn: Any, more: Any, samples: Sequence[Item], values: Sequence[torch.Tensor]
    ) -> None:
        """Keep a few of the ``values`` that a map by ``fn`` gave of samples, in their order, with
        the further arguments that ``more`` makes."""
        by_sample = {
            fingerprint_of([sample]): _first(value).detach().clone()
            for sample, value in zip(samples, values, strict=True)
        }
        self._maps.append(_Map(fn, more, by_sample))

    def beside(self, fn: Any, more: Any, sample: Item) -> Item:
        """What goes beside a sample to a second pass with these functions: its values in each map
        with the same ones, [k, ...]; nothing where there was none."""
        key = fingerprint_of([sample])
        found = [
            one.values[key]
            for one in self._maps
            if one.fn is fn and one.more is more and key in one.values
        ]
        return {_FORMER: torch.stack(found)} if found else {}


def repeated_error(
    values: torch.Tensor, micro: LoopMicroBatch, batch: LoopBatch, like: torch.dtype
) -> ModelError | None:
    """The error where samples of a micro-batch have no longer the values of any map.

    Args:
        values: Those of the second pass, as for :func:`headrace.engine.forward_pass.weighted`.
        micro: The micro-batch.
        batch: Has the values of maps beside its samples.
        like: The type in which the model computes.

    Returns:
        The error; None where values are the same, but for rounding, or no map is known. Waits for
        the device.
    """
    tolerance = max(_TOLERANCES.get(dtype, 5e-2) for dtype in (like, values.dtype))
    errors = list[torch.Tensor]()  # of each sample, relative to 1 and to its largest value
    for now, former in _pairs(values.detach(), micro, batch):
        if now.shape == former.shape[1:] and now.numel():
            differences = (former.double() - now.double()).abs().reshape(len(former), -1)
            errors.append(differences.amax(1).min() / (1 + former.abs().max()))
    error = float(torch.stack(errors).max()) if errors else 0.0
    if not error > tolerance:  # NaN: the step says so itself
        return None
    return ModelError(
        "values of run.backward",
        got=f"others than run.map gave of the same samples, by {error:.2g} of them",
        wanted="the same ones, to which the gradients belong",
        hint="dropout draws anew, and weights must not change between the two: set dropout to 0, "
        "and call run.map once more after a step",
    )


def _pairs(
    values: torch.Tensor, micro: LoopMicroBatch, batch: LoopBatch
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for each sample with values of maps those of this pass and those, [k, ...], of the
    tokens on this rank."""
    places, first = micro.local_index, 0  # places count from the first token of the micro-batch
    for at, sample in enumerate(micro.sequences):
        former = batch.beside(sample).get(_FORMER)
        after = first + batch.tokens[sample]
        if former is not None and values.dim() == 1:
            yield values[at], former.to(values.device)
        elif former is not None and former.dim() == 3:
            here = np.flatnonzero((places >= first) & (places < min(after, first + _TOKENS)))
            now = values[0, torch.from_numpy(here).to(values.device)]
            of_tokens = torch.from_numpy(places[here] - first).to(values.device)
            yield _first(now), former.to(values.device)[:, of_tokens]
        first = after


def _first(value: torch.Tensor) -> torch.Tensor:
    """The first features of the first tokens, [m, f], of the values [n, ...] of a sample; a value
    [] of the whole sample as it is."""
    if not value.dim():
        return value
    by_token = value.flatten(1) if value.dim() > 1 else value[:, None]
    return by_token[:_TOKENS, :_FEATURES]
