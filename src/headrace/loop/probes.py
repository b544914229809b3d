"""Probes of a user's model: two of its layers as it calls them, and the model without them.

The first layer warms up (DCP, section 3.5). A layer gets the inputs that the model itself makes for
the pack (rotary places, masks it declares), so nothing of the model is known here. A model without
layers that are seen as such is measured whole, as one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headrace.comm.mesh import Groups
from headrace.loop.layers import LayerCall, Layers
from headrace.loop.samples import packed
from headrace.passes.adopted import Adopted
from headrace.passes.placement import Exchange
from headrace.passes.probe import logits_of, loss_of
from headrace.passes.recompute import BlockLevels
from headrace.passes.shard import LocalBatch
from headrace.profiling.probe import ChainProbe, Passed, Probe
from headrace.spec.method import Recompute

__all__ = ["ModelProbes"]

_PROBED = 2
"""Layers that are run."""


@dataclass(slots=True, kw_only=True, eq=False)
class ModelProbes:
    """Makes probes of an adopted model, whose ``layers`` are None where it is measured whole.

    ``sample`` is one of the data set, whose tokens are repeated to make documents of at most
    ``document`` tokens: models may know no more places.
    """

    adopted: Adopted
    layers: Layers | None
    levels: BlockLevels | None
    sample: dict[str, torch.Tensor]
    document: int
    device: str

    def whole(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: Exchange
    ) -> Probe:
        """The model for a pack of documents on ``ranks``, without its layers where it has some."""
        return _WholeProbe(probes=self, shard=self.shard(groups, ranks, lengths, exchange))

    def complete(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: Exchange
    ) -> Probe:
        """The model with all its layers."""
        shard = self.shard(groups, ranks, lengths, exchange)
        return _WholeProbe(probes=self, shard=shard, complete=True)

    def layer(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...],
        exchange: Exchange, level: Recompute,
    ) -> Probe:  # fmt: skip
        """Two of the layers, for a pack of documents on ``ranks``."""
        layers = self.layers
        if layers is None:
            return self.whole(groups, ranks, lengths, exchange)
        shard = self.shard(groups, ranks, lengths, exchange)
        calls = self.calls(shard)

        def entry() -> torch.Tensor:
            self.adopted.take(shard)
            self.choose([level] * _PROBED)
            return torch.randn_like(calls[0].x)

        def layer(index: int, x: torch.Tensor) -> torch.Tensor:
            return layers.call(index, x, calls[index])

        return ChainProbe(entry, [partial(layer, index) for index in range(_PROBED)])

    def calls(self, shard: LocalBatch) -> Sequence[LayerCall]:
        """How the model calls its layers for a shard."""
        assert self.layers is not None, "there are layers"
        self.adopted.take(shard)
        self.choose([])
        with self.layers.left_out() as called, torch.no_grad():
            self.adopted.inner(**shard.inputs)
        return called

    def documents(self, lengths: Sequence[int]) -> list[int]:
        """The documents of a pack of such ``lengths``, none longer than the model may know."""
        return [n for length in lengths for n in _cut(length, self.document)]

    def choose(self, first: Sequence[Recompute]) -> None:
        """What the first layers compute again; the others nothing."""
        if self.levels is not None and self.layers is not None:
            rest: list[Recompute] = ["none"] * (len(self.layers) - len(first))
            self.levels.choose([*first, *rest])

    def shard(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: Exchange
    ) -> LocalBatch:
        """A pack of documents on ``ranks``."""
        parts = self.documents(lengths)
        rows = [{k: _repeated(v, n) for k, v in self.sample.items()} for n in parts]
        row = {k: v.to(self.device) for k, v in packed(rows).items()}
        return self.adopted.place(
            row, ranks, targets=sum(lengths), exchange=exchange, groups=groups
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _WholeProbe:
    probes: ModelProbes
    shard: LocalBatch
    complete: bool = False
    segments: int = 1
    _loss: torch.Tensor | None = field(default=None, init=False)

    def forward(self, passed: Passed) -> None:
        """The model up to a loss."""
        probes = self.probes
        probes.adopted.take(self.shard)
        probes.choose([])
        passed()
        if probes.layers is None or self.complete:
            outputs = self._outputs()
        else:
            with probes.layers.left_out():
                outputs = self._outputs()
        self._loss = loss_of(outputs)
        if self._loss is None:
            self._loss = logits_of(outputs).float().logsumexp(-1).sum()
        passed()

    def backward(self, passed: Passed) -> None:
        """Its backward."""
        assert self._loss is not None, "forward came before"
        loss, self._loss = self._loss, None
        loss.backward()
        del loss
        passed()

    def _outputs(self) -> Any:
        return self.probes.adopted.inner(**self.probes.adopted.accepted(self.shard))


def _cut(length: int, most: int) -> list[int]:
    """A length in parts of at most ``most``."""
    return [min(most, length - start) for start in range(0, length, most)]


def _repeated(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` values, begun again where there are not as many."""
    return x.repeat(-(-count // len(x)), *[1] * (x.dim() - 1))[:count]
