"""The costs of a user's model on the ranks at hand: a profile of two of its layers.

For every group size, packs of growing length run through two layers, the first to warm up, and
through the model without layers (DCP, section 3.5 and Eq. 4 to 6: a model of L layers that take t
seconds each takes T = L t + T_C, with T_C of what comes before and after them; bytes likewise). For
each size the exchange is kept that is quickest for the longest pack that all of them could run.
Success and memory are agreed by all ranks before the next pack is tried, so no rank decides alone.

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
from headrace.native.spans import Clock
from headrace.profiling.probe import ChainProbe, Counter, Passed, Probe, seconds_of
from headrace.profiling.sweep import (
    Sweep,
    Sweeper,
    SweepOptions,
    blocks,
    first_of_each_node_first,
    slowest,
)
from headrace.spec.cluster import Cluster
from headrace.spec.known_methods import SINGLE_RANK
from headrace.spec.layer_plan import LayerOption, Recompute
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS, ModelShape
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
    """Makes probes of a model: forwards and backwards that are timed and whose bytes are counted.

    Attributes:
        model: The model, spread.
        layers: Its equal layers; None where it can only be measured whole.
        levels: The recompute levels of its layers; None where it has none.
        sample: A sample of the data set, from whose fields the packs to measure are made.
        document: The most tokens of a document in these packs, as models may have no positions
            for more.
        device: The device of the model, as torch names it.
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
        """A probe of the model for a pack of documents of ``lengths`` tokens on ``ranks``. Where
        its layers are known they are left out: it measures what comes before and after them."""
        return _WholeProbe(probes=self, shard=self.shard(groups, ranks, lengths, exchange))

    def complete(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: str
    ) -> Probe:
        """A probe of the model with all its layers, for a pack of documents of ``lengths`` tokens
        on ``ranks``."""
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
        """A probe of two layers (of the whole model where no layers are known) for a pack of
        documents of ``lengths`` tokens on ``ranks``, at one recompute level."""
        layers = self.layers
        if layers is None:
            return self.whole(groups, ranks, lengths, exchange)
        shard = self.shard(groups, ranks, lengths, exchange)
        calls = self.calls(shard)

        def entry() -> torch.Tensor:
            """Spread the model over the pack; returns a random input of the first layer."""
            self.model.take(shard)
            self.choose([level] * _PROBED)
            return torch.randn_like(calls[0].x)

        def layer(index: int, x: torch.Tensor) -> torch.Tensor:
            """The output of a layer for the input x."""
            return layers.call(index, x, calls[index])

        return ChainProbe(entry, [partial(layer, index) for index in range(_PROBED)])

    def calls(self, shard: BatchPart) -> Sequence[LayerCall]:
        """The arguments with which the model calls each of its layers on one part of a batch,
        recorded in a forward that leaves the layers themselves out."""
        assert self.layers is not None, "there are layers"
        self.model.take(shard)
        self.choose([])
        with self.layers.left_out() as recorded, torch.no_grad():
            self.model.inner(**shard.inputs)
        return recorded

    def documents(self, tokens: int) -> list[int]:
        """Cut a pack of ``tokens`` tokens into documents of at most ``self.document`` tokens;
        returns their lengths."""
        longest = self.document
        return [min(longest, tokens - start) for start in range(0, tokens, longest)]

    def choose(self, first: Sequence[Recompute]) -> None:
        """Set the recompute levels of the model's ``first`` layers, one for each; all other layers
        recompute nothing."""
        if self.levels is not None:
            self.levels.choose(first)

    def shard(
        self, groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...], exchange: str
    ) -> BatchPart:
        """Make a pack of documents of ``lengths`` tokens from the sample; returns this rank's part
        of it when it is spread over ``ranks``."""
        pack = self.model.made(self.sample, lengths, len(ranks), document=self.document)
        return self.model.place(
            pack.values, ranks, targets=pack.tokens, exchange=exchange, groups=groups
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _WholeProbe:
    """A probe of the model on one rank's part of a pack, as one segment. Where its layers are known
    they are left out, unless the probe is ``complete``. The backward is that of a scalar of the
    outputs."""

    probes: ModelProbes
    shard: BatchPart
    complete: bool = False
    segments: int = 1
    _loss: torch.Tensor | None = field(default=None, init=False)

    def forward(self, passed: Passed) -> None:
        """Run the model and keep a scalar of its outputs for the backward; ``passed`` is called
        before and after."""
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
        """Run the backward of the last forward, then call ``passed``."""
        assert self._loss is not None, "forward came before"
        loss, self._loss = self._loss, None
        loss.backward()
        del loss  # the graph must be freed before the bytes are counted
        passed()

    def _outputs(self) -> Any:
        """What the user's model returns for this part."""
        return self.probes.model.inner(**self.shard.inputs)


_EVERY_SIZE_UP_TO = 8
"""Up to this many ranks every group size is measured; above it, powers of two and the number of
all ranks."""

_WARM_TOKENS = 64
"""Tokens of the pack that warms up a rank: few, as only its kernels matter."""

_LEAST_COUNTED = 2
"""How many points with counted bytes the fit of a line (bytes by tokens) needs."""

_LEAST_S = 1e-9
"""Seconds of a point that costs nothing, as the costs of a point must be above zero."""


def sizes_for(ranks: int, semantics: str) -> tuple[int, ...]:
    """Group sizes to measure and to plan with, in ranks. Unless groups are ``free`` of each other,
    all ranks meet at every layer, so a size must divide their number and leave no rank over."""
    sizes = [
        p for p in range(1, ranks + 1) if p <= _EVERY_SIZE_UP_TO or p.bit_count() == 1 or p == ranks
    ]
    return tuple(p for p in sizes if semantics == "free" or ranks % p == 0)


def shape_of(model: torch.nn.Module, probes: ModelProbes) -> ModelShape:
    """The number of layers and the parameters of each, as planners take them. A model whose layers
    are not known counts as one layer."""
    layers = list(probes.layers.modules) if probes.layers else [model]
    layer_elements = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    other_elements = max(0, sum(p.numel() for p in model.parameters()) - sum(layer_elements))
    # By bucket: the embedding, each layer, the head. What is in no layer counts as the embedding.
    counts = (other_elements, *layer_elements, 0)
    return ModelShape(
        name=f"{type(model).__name__}, {len(layers)} layers",
        layers=len(layers),
        hidden=_hidden_features(probes),
        split_elements=(0,) * len(counts),  # no rank shares a weight with others
        whole_elements=counts,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class LoopProfiler:
    """Measures the profile of a model: seconds and bytes by group size and tokens of a pack.

    Attributes:
        probes: Make what is measured.
        held: How the model's weights are held.
        groups: The groups of this rank.
        sizes: The group sizes to measure, in ranks.
        exchanges: The attention methods to choose from, for each size the quickest.
        longest: Tokens of the longest pack.
        cluster: The ranks, and the memory of each.
        state_bytes: The part of that memory that weights, gradients and optimizer take.
        device: The device of the model, as torch names it.
        point_s: As in :class:`~headrace.profiling.sweep.SweepOptions`.
        progress: Called as ``progress(what, done, of)``.
    """

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
        """Measure the profile of the model on all group sizes. Gradients are dropped. Collective.

        Args:
            fingerprint: What the profile is valid for, as text; it is kept in the profile.
            shape: The layers and parameters of the model, kept likewise.

        Returns:
            The profile.

        Raises:
            InfeasiblePlan: Where memory has no room for packs of any size.
        """
        started = time.perf_counter()
        options = SweepOptions(longest=self.longest, point_s=self.point_s, counts=1)
        sweeper = Sweeper(
            self.groups,
            options,
            device=self.device,
            room_bytes=max(1, self.cluster.memory_bytes - self.state_bytes),
        )
        # Process groups are made now, as every rank must make all of them in the same order.
        self.groups.prepare(
            group
            for p in self.sizes
            for block in blocks(self.groups.ranks, p)
            for group in self.probes.model.groups_of(block)
        )
        if not self.held.sharded:  # no rank runs sharded weights alone
            first_of_each_node_first(self.groups, lambda: self._warm_up(sweeper.clock))
        points = list[ProfilePoint]()
        for done, p in enumerate(self.sizes):
            self.progress(f"profile cp{p}", done, len(self.sizes))
            points += self._points_of_size(sweeper, p)
        self.progress("profile", len(self.sizes), len(self.sizes))
        sizes = sorted({point.p for point in points})
        if not sizes:
            raise self._no_room(sweeper)
        sum_s = self._gradient_sum_s()
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

    def _warm_up(self, clock: Clock) -> None:
        """Run a small pack through two layers and the ends on this rank alone: kernels that the
        first rank of a node compiles are in the node's caches for the others."""
        alone, lengths = (self.groups.rank,), (min(_WARM_TOKENS, self.longest),)
        exchange = self.exchanges[0]
        seconds_of(self.probes.layer(self.groups, alone, lengths, exchange, "none"), clock)
        seconds_of(_ends_probe(self.probes, exchange, self.groups, alone, lengths), clock)

    def _no_room(self, sweeper: Sweeper) -> InfeasiblePlan:
        """The error for a model of which no group size could be measured."""
        too_long = sweeper.not_fitting
        got = f"no room for {too_long[0].tokens:,} tokens" if too_long else "nothing measured"
        return InfeasiblePlan(
            "model on these ranks",
            got=got,
            wanted=f"packs of up to {self.longest:,} tokens in "
            f"{bytes_text(self.cluster.memory_bytes)}, {bytes_text(self.state_bytes)} of it "
            "for weights, gradients and optimizer",
            hint="more memory, more ranks, or weights sharded by FSDP2",
        )

    def _points_of_size(self, sweeper: Sweeper, p: int) -> Iterator[ProfilePoint]:
        """Measure groups of ``p`` ranks; yields the points of a layer by the quickest exchange, at
        every recompute level, and those of the model without its layers. Yields nothing where
        memory runs out too early for a fit. Collective."""
        exchanges = self.exchanges if p > 1 else self.exchanges[:1]  # one rank exchanges nothing
        points_of = {
            exchange: sweeper.points(self._sweep(p, exchange, "none")) for exchange in exchanges
        }
        best = min(exchanges, key=partial(_longest_s, points_of))
        counted_points = sum(point.kept_bytes is not None for point in points_of[best])
        if counted_points < _LEAST_COUNTED:
            return  # memory ran out before its growth was seen
        yield from points_of[best]
        if self.probes.layers is None:
            # The model was measured as its one layer, with what comes before and after.
            yield from (_empty_ends(point) for point in points_of[best])
            return
        if self.probes.levels is not None:
            yield from (
                _with_full_recompute(point, self._entry_bytes(p, point))
                for point in points_of[best]
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
                chunk_tokens=HEAD_CHUNK_TOKENS,
            )
        )

    def _sweep(self, p: int, exchange: str, level: Recompute) -> Sweep:
        """The sweep over growing packs that measures one layer on groups of ``p`` ranks, with one
        exchange of attention and at one recompute level."""

        def probe(groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...]) -> Probe:
            """A probe of the layer for a pack of documents of ``lengths`` tokens on ``ranks``."""
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
        """Bytes of the tensors as large as its input that a layer with recompute ``full`` keeps on
        a rank, for the pack of ``point`` on ``p`` ranks."""
        levels = self.probes.levels
        local_tokens = -(-sum(point.lengths) // p)  # rounded up, as the fullest rank counts
        saved_tensors = 1 if levels is None else levels.entries
        dtype = next(iter(self.probes.model.inner.parameters())).dtype
        return local_tokens * saved_tensors * _hidden_features(self.probes) * dtype.itemsize

    def _order(self, exchange: str, p: int) -> TokenOrder:
        """The order in which an exchange has the tokens of a pack laid out over ``p`` ranks."""
        return "natural" if p == 1 else self.probes.model.order(exchange)

    def _gradient_sum_s(self) -> float:
        """Seconds to sum the gradients over all ranks, of the slowest rank; the quicker of two
        runs, as the first warms up. 0 where nothing is summed. Collective."""
        for parameter in self.held.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        seconds = list[float]()
        for _ in range(2):
            start = time.perf_counter()
            self.held.add_up(self.groups.world)
            if self.device != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return slowest(self.groups, [min(seconds)])[0] if self.held.ranks > 1 else 0.0


def _hidden_features(probes: ModelProbes) -> int:
    """Features of a token between layers; for a model without known layers those of its first
    embedding, or 1 where it has no embedding."""
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
    """The probe of the model without its layers, that is of what comes before and after them. The
    arguments that :func:`functools.partial` binds come first."""
    return probes.whole(groups, ranks, lengths, exchange)


def _longest_s(points_of: dict[str, list[ProfilePoint]], exchange: str) -> float:
    """Seconds of forward and backward by ``exchange`` for the longest pack that every exchange in
    ``points_of`` could run; points are of growing packs."""
    shared_count = min(len(points) for points in points_of.values())
    point = points_of[exchange][shared_count - 1]
    return point.forward_s + point.backward_s


def _with_full_recompute(point: ProfilePoint, entry_bytes: int) -> ProfilePoint:
    """The point of a layer that keeps only its input of ``entry_bytes`` and runs its forward again,
    computed from the point that was measured without recompute."""
    kept, transient = point.kept_bytes, point.transient_bytes
    # The backward runs the forward first, so what that keeps is alive only within the backward.
    return replace(
        point,
        option=f"{point.option}+full",
        backward_s=point.forward_s + point.backward_s,
        kept_bytes=None if kept is None else min(kept, entry_bytes),
        transient_bytes=None if kept is None or transient is None else kept + transient,
    )


def _empty_ends(point: ProfilePoint) -> ProfilePoint:
    """A point for the pack of ``point`` that says that embedding and head (the ends) cost nothing:
    the model was measured as one layer with these in it."""
    no_bytes = None if point.kept_bytes is None else 0  # None where bytes were not counted
    return replace(
        point,
        option=ENDS,
        forward_s=_LEAST_S,
        backward_s=_LEAST_S,
        kept_bytes=no_bytes,
        transient_bytes=no_bytes,
    )
