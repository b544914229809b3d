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
from headrace.loop.model import Item, Levels, LoopModel, LoopPart
from headrace.passes.layers import LayerCall, Layers
from headrace.profiling.probe import ChainProbe, Passed, Probe
from headrace.spec.method import Recompute

__all__ = ["ModelProbes"]

_PROBED = 2
"""Layers that are run."""


@dataclass(slots=True, kw_only=True, eq=False)
class ModelProbes:
    """Makes probes of a model, whose ``layers`` are None where it is measured whole.

    ``sample`` is one of the data set, of which packs of documents of at most ``document`` tokens
    are made: models may know no more places.
    """

    model: LoopModel
    layers: Layers | None
    levels: Levels | None
    sample: Item
    document: int
    device: str

    def whole(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: str
    ) -> Probe:
        """The model for a pack of documents on ``ranks``, without its layers where it has some."""
        return _WholeProbe(probes=self, shard=self.shard(groups, ranks, lengths, exchange))

    def complete(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: str
    ) -> Probe:
        """The model with all its layers."""
        shard = self.shard(groups, ranks, lengths, exchange)
        return _WholeProbe(probes=self, shard=shard, complete=True)

    def layer(
        self,
        groups: Groups,
        ranks: tuple[int, ...],
        lengths: tuple[int, ...],
        exchange: str,
        level: Recompute,
    ) -> Probe:
        """Two of the layers, for a pack of documents on ``ranks``."""
        layers = self.layers
        if layers is None:
            return self.whole(groups, ranks, lengths, exchange)
        shard = self.shard(groups, ranks, lengths, exchange)
        calls = self.calls(shard)

        def entry() -> torch.Tensor:
            self.model.take(shard)
            self.choose([level] * _PROBED)
            return torch.randn_like(calls[0].x)

        def layer(index: int, x: torch.Tensor) -> torch.Tensor:
            return layers.call(index, x, calls[index])

        return ChainProbe(entry, [partial(layer, index) for index in range(_PROBED)])

    def calls(self, shard: LoopPart) -> Sequence[LayerCall]:
        """How the model calls its layers for a shard."""
        assert self.layers is not None, "there are layers"
        self.model.take(shard)
        self.choose([])
        with self.layers.left_out() as called, torch.no_grad():
            self.model.inner(**shard.inputs)
        return called

    def documents(self, tokens: int) -> list[int]:
        """The documents of a pack of so many tokens, none longer than the model may know."""
        most = self.document
        return [min(most, tokens - start) for start in range(0, tokens, most)]

    def choose(self, first: Sequence[Recompute]) -> None:
        """What the first layers compute again; the others nothing."""
        if self.levels is not None and self.layers is not None:
            rest: list[Recompute] = ["none"] * (len(self.layers) - len(first))
            self.levels.choose([*first, *rest])

    def shard(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: str
    ) -> LoopPart:
        """A pack of documents on ``ranks``."""
        pack = self.model.made(self.sample, lengths, len(ranks), document=self.document)
        return self.model.place(
            pack.to(self.device), ranks, targets=pack.tokens, exchange=exchange, groups=groups
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _WholeProbe:
    probes: ModelProbes
    shard: LoopPart
    complete: bool = False
    segments: int = 1
    _loss: torch.Tensor | None = field(default=None, init=False)

    def forward(self, passed: Passed) -> None:
        """The model up to a loss."""
        probes = self.probes
        probes.model.take(self.shard)
        probes.choose([])
        passed()
        if probes.layers is None or self.complete:
            outputs = self._outputs()
        else:
            with probes.layers.left_out():
                outputs = self._outputs()
        self._loss = probes.model.number(outputs)
        passed()

    def backward(self, passed: Passed) -> None:
        """Its backward."""
        assert self._loss is not None, "forward came before"
        loss, self._loss = self._loss, None
        loss.backward()
        del loss
        passed()

    def _outputs(self) -> Any:
        return self.probes.model.inner(**self.shard.inputs)
