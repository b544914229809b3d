"""The costs of a user's model on the ranks at hand: a profile of two of its layers.

For every group size, packs of growing length run through two layers, the first to warm up, and
through the model without layers (DCP, section 3.5 and Eq. 4 to 6: T = L t + T_C, M likewise). Of
the exchanges the one that is quicker for the longest pack of both is kept for each size. Success
and memory are agreed by all ranks before the next pack is tried, so no rank decides alone.

The level ``full`` is not measured: it keeps a layer's input and runs its forward once more (Eq. 5).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from headrace.adopt.held_weights import HeldWeights
from headrace.adopt.model_layers import LayerCall, Layers
from headrace.adopt.spread_model import BatchPart, Item, Levels, SpreadModel
from headrace.comm.mesh import Groups
from headrace.errors import InfeasiblePlan
from headrace.native.counted import SavedBytes
from headrace.profiling.probe import ChainProbe, Counter, Passed, Probe
from headrace.profiling.sweep import Sweep, Sweeper, SweepOptions, blocks, slowest
from headrace.spec.cluster import Cluster
from headrace.spec.known_methods import SINGLE_RANK
from headrace.spec.layer_plan import LayerOption, Recompute
from headrace.spec.model_shape import ModelShape
from headrace.spec.plan import TokenOrder
from headrace.spec.profile import ENDS, Profile, ProfilePoint
from headrace.units import bytes_text

__all__ = [
    "LoopProfiler",
    "ModelProbes",
    "shape_of",
    "sizes_for",
]

_PROBED = 2
"""Layers that a probe runs."""


@dataclass(slots=True, kw_only=True, eq=False)
class ModelProbes:
    """Makes probes of a model, whose ``layers`` are None where it is measured whole.

    ``sample`` is one of the data set, of which packs of documents of at most ``document`` tokens
    are made: models may know no more places.
    """

    model: SpreadModel
    layers: Layers | None
    levels: Levels | None
    sample: Item
    document: int
    device: str

    def whole(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: str
    ) -> Probe:
        """A probe of the model for a pack of documents on ``ranks``: without its layers where these
        are known."""
        return _WholeProbe(probes=self, shard=self.shard(groups, ranks, lengths, exchange))

    def complete(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: str
    ) -> Probe:
        """A probe of the model with all its layers."""
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
        """A probe of two layers, for a pack of documents on ``ranks``."""
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

    def calls(self, shard: BatchPart) -> Sequence[LayerCall]:
        """The calls that the model makes of its layers for one part of a batch."""
        assert self.layers is not None, "there are layers"
        self.model.take(shard)
        self.choose([])
        with self.layers.left_out() as called, torch.no_grad():
            self.model.inner(**shard.inputs)
        return called

    def documents(self, tokens: int) -> list[int]:
        """The lengths of the documents of a pack of ``tokens`` tokens, none longer than
        ``document``."""
        most = self.document
        return [min(most, tokens - start) for start in range(0, tokens, most)]

    def choose(self, first: Sequence[Recompute]) -> None:
        """Have the first layers recompute as given, and the others nothing."""
        if self.levels is not None:
            self.levels.choose(first)

    def shard(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: str
    ) -> BatchPart:
        """This rank's part of a pack of documents on ``ranks``."""
        pack = self.model.made(self.sample, lengths, len(ranks), document=self.document)
        values = pack.to(self.device).values
        return self.model.place(
            values, ranks, targets=pack.tokens, exchange=exchange, groups=groups
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _WholeProbe:
    """A probe of the model on one rank's part of a pack, without its layers where these are known
    and the probe is not ``complete``; the backward is that of a scalar of its results."""

    probes: ModelProbes
    shard: BatchPart
    complete: bool = False
    segments: int = 1
    _loss: torch.Tensor | None = field(default=None, init=False)

    def forward(self, passed: Passed) -> None:
        """Run the model and keep a scalar of its results."""
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
        """Run the backward of the last forward."""
        assert self._loss is not None, "forward came before"
        loss, self._loss = self._loss, None
        loss.backward()
        del loss
        passed()

    def _outputs(self) -> Any:
        return self.probes.model.inner(**self.shard.inputs)


_EVERY = 8
"""Up to this many ranks every group size is measured; above, powers of two and the number of
ranks."""

_COUNTED = 2
"""Points with a measured number of bytes that a fit of a line needs."""

_LEAST_S = 1e-9
"""The least time of a point, as costs are never zero."""


def sizes_for(ranks: int, semantics: str) -> tuple[int, ...]:
    """Group sizes to measure and to plan with. Where all ranks meet at every layer, none may be
    left over by groups of one size."""
    every = [p for p in range(1, ranks + 1) if p <= _EVERY or p & (p - 1) == 0 or p == ranks]
    return tuple(p for p in every if semantics == "free" or ranks % p == 0)


def shape_of(model: torch.nn.Module, probes: ModelProbes) -> ModelShape:
    """What planners ask of a model: its layers, or one where it has none that are seen."""
    layers = list(probes.layers.modules) if probes.layers else [model]
    each = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    rest = max(0, sum(p.numel() for p in model.parameters()) - sum(each))
    counts = (rest, *each, 0)
    return ModelShape(
        name=f"{type(model).__name__}, {len(each)} layers",
        layers=len(each),
        hidden=_hidden_features(probes),
        split_elements=(0,) * len(counts),
        whole_elements=counts,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class LoopProfiler:
    """Measures a model within ``cluster.memory_bytes`` of each rank, of which ``state_bytes`` are
    taken. ``longest`` tokens of a pack; ``point_s`` as in SweepOptions."""

    probes: ModelProbes
    held: HeldWeights
    groups: Groups
    sizes: tuple[int, ...]
    exchanges: tuple[str, ...]
    longest: int
    cluster: Cluster
    state_bytes: int
    device: str
    point_s: float = 0.5
    progress: Callable[[str, int, int], None] = lambda what, done, of: None

    def profile(self, fingerprint: str, shape: ModelShape) -> Profile:
        """Run all sweeps. Collective: every rank makes the same call. Gradients are dropped."""
        started = time.perf_counter()
        options = SweepOptions(longest=self.longest, point_s=self.point_s, counts=1)
        sweeper = Sweeper(
            self.groups,
            options,
            device=self.device,
            room_bytes=max(1, self.cluster.memory_bytes - self.state_bytes),
        )
        self.groups.prepare(
            some
            for p in self.sizes
            for b in blocks(self.groups.ranks, p)
            for some in self.probes.model.groups_of(b)
        )
        points = list[ProfilePoint]()
        for done, p in enumerate(self.sizes):
            self.progress(f"profile cp{p}", done, len(self.sizes))
            points += self._size(sweeper, p)
        self.progress("profile", len(self.sizes), len(self.sizes))
        sizes = sorted({point.p for point in points})
        if not sizes:
            raise InfeasiblePlan(
                "model on these ranks",
                got=f"no room for {sweeper.not_fitting[0].tokens:,} tokens"
                if sweeper.not_fitting
                else "nothing measured",
                wanted=f"packs of up to {self.longest:,} tokens in "
                f"{bytes_text(self.cluster.memory_bytes)}, {bytes_text(self.state_bytes)} of it "
                "for weights, gradients and optimizer",
                hint="more memory, more ranks, or weights sharded by FSDP2",
            )
        sum_s = self._sum_s()
        for parameter in self.held.trained:
            parameter.grad = None
        return Profile(
            fingerprint=fingerprint,
            shape=shape,
            cluster=self.cluster,
            points=tuple(points),
            not_fitting=tuple(sweeper.not_fitting),
            state_bytes=self.state_bytes,
            exchange_s={"pull_s": 0.0, "push_s": sum_s, "update_s": 0.0},
            working_bytes={p: {"replicated": 0, "sharded": 0} for p in sizes},
            measured_in_s=slowest(self.groups, [time.perf_counter() - started])[0],
        )

    def _size(self, sweeper: Sweeper, p: int) -> Iterator[ProfilePoint]:
        """The points of one group size."""
        exchanges = self.exchanges if p > 1 else self.exchanges[:1]
        found = {
            exchange: sweeper.points(self._sweep(p, exchange, "none")) for exchange in exchanges
        }
        best = min(exchanges, key=partial(_longest_s, found))
        if sum(point.kept_bytes is not None for point in found[best]) < _COUNTED:
            return  # memory ran out before its growth was seen
        yield from found[best]
        if self.probes.layers is None:
            # The model was measured as its one layer, with what comes before and after.
            yield from (_empty_ends(point) for point in found[best])
            return
        if self.probes.levels is not None:
            yield from (
                _with_full_recompute(point, self._entry_bytes(p, point)) for point in found[best]
            )
            for level in self.probes.levels.known:
                if level != "full":
                    yield from sweeper.points(self._sweep(p, best, level))
        yield from sweeper.points(
            Sweep(
                p=p,
                option=ENDS,
                probe=partial(_ends_probe, self.probes, best),
                groups_of=self.probes.model.groups_of,
                order=self._order(best, p),
                counter=self._counter(),
            )
        )

    def _sweep(self, p: int, exchange: str, level: Recompute) -> Sweep:
        """What is measured of one layer on groups of ``p`` ranks, by one exchange of attention and
        at one recompute level."""

        def probe(groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...]) -> Probe:
            return self.probes.layer(groups, ranks, lengths, exchange, level)

        name = SINGLE_RANK if p == 1 else exchange
        return Sweep(
            p=p,
            option=str(LayerOption.of(name, level)),
            probe=probe,
            groups_of=self.probes.model.groups_of,
            order=self._order(exchange, p),
            counter=self._counter(),
        )

    def _counter(self) -> Callable[[], Counter] | None:
        """A counter of bytes for compiled models on a CPU, where the usual one (a dispatch mode)
        cannot be used; None for the usual one."""
        model = self.probes.model
        return (lambda: SavedBytes(model.inner.parameters())) if model.whole else None

    def _entry_bytes(self, p: int, point: ProfilePoint) -> int:
        """Bytes of the input that a layer with recompute ``full`` keeps on a rank."""
        levels = self.probes.levels
        tokens = -(-sum(point.lengths) // p) * (1 if levels is None else levels.entries)
        dtype = next(iter(self.probes.model.inner.parameters())).dtype
        return tokens * _hidden_features(self.probes) * dtype.itemsize

    def _order(self, exchange: str, p: int) -> TokenOrder:
        return "natural" if p == 1 else self.probes.model.order(exchange)

    def _sum_s(self) -> float:
        """Seconds to sum the gradients of all ranks."""
        for parameter in self.held.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        taken = list[float]()
        for _ in range(2):
            start = time.perf_counter()
            self.held.add_up()
            if self.device != "cpu":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return slowest(self.groups, [min(taken)])[0] if self.held.ranks > 1 else 0.0


def _hidden_features(probes: ModelProbes) -> int:
    """Features of a token between layers; for a model without known layers, those of its
    embedding."""
    if probes.layers is not None:
        return probes.layers.hidden
    for module in probes.model.inner.modules():
        if isinstance(module, torch.nn.Embedding):
            return module.embedding_dim
    return 1


def _ends_probe(
    probes: ModelProbes,
    exchange: str,
    groups: Groups,
    ranks: tuple[int, ...],
    lengths: tuple[int, ...],
) -> Probe:
    """The probe of the whole model on a pack, from which the sweep of the ends is taken; the
    exchange comes first so that it can be bound."""
    return probes.whole(groups, ranks, lengths, exchange)


def _longest_s(points_of: dict[str, list[ProfilePoint]], exchange: str) -> float:
    """Seconds of the longest pack that all exchanges could run."""
    shared = min(len(points) for points in points_of.values())
    point = points_of[exchange][shared - 1]
    return point.forward_s + point.backward_s


def _with_full_recompute(point: ProfilePoint, entry_bytes: int) -> ProfilePoint:
    """The point of a layer that keeps only its input of ``entry_bytes`` and runs its forward again,
    computed from the point that was measured without recompute."""
    kept, transient = point.kept_bytes, point.transient_bytes
    return replace(
        point,
        option=f"{point.option}+full",
        backward_s=point.forward_s + point.backward_s,
        kept_bytes=None if kept is None else min(kept, entry_bytes),
        transient_bytes=None if kept is None or transient is None else kept + transient,
    )


def _empty_ends(point: ProfilePoint) -> ProfilePoint:
    """A point of ends that cost nothing, for the pack of ``point``: the model was measured as one
    layer, which has the ends in it."""
    none = None if point.kept_bytes is None else 0
    return replace(
        point,
        option=ENDS,
        forward_s=_LEAST_S,
        backward_s=_LEAST_S,
        kept_bytes=none,
        transient_bytes=none,
    )
