"""Prices the schemes of a problem whose costs are a model's: a profile, a roofline, a rehearsal.

A scheme of width w = tensor x context works as a group of w ranks does, so it needs costs of that
size. In a tensor block of t ranks each holds 1 / t of a layer's rows; only methods that work with
those as they lie can run there. They would fetch, of sharded weights on w ranks, the share (1 / t -
1 / w) / (1 - 1 / w), which is how costs tell them. Without a tensor degree any method will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.costs import CostModel
from headrace.costs.stages import held_bytes
from headrace.errors import InfeasiblePlan
from headrace.planning.batch import prices
from headrace.planning.fixed_methods import listed_frontier
from headrace.planning.frontier import Frontier, worth_keeping
from headrace.planning.mixtures import Table, mixed_frontier
from headrace.planning.priced import PricedScheme
from headrace.planning.stages import LayerTable, StageCosts, shares_of
from headrace.spec import LayerOption, LayerPlan, Pipeline, Scheme, Strategy
from headrace.spec.known_methods import block_ranks
from headrace.spec.plan import Working

if TYPE_CHECKING:
    from headrace.planning.problem import Problem

__all__ = ["Pricing", "Slots"]

Slots = tuple[tuple[LayerOption, ...], ...]
"""Options of each layer, or of all in one where they are free."""

_MOST_TENSOR = 8
"""Tensor blocks of more ranks than a machine has are not proposed."""

_PAYS = 2e-3
"""Part of the device-seconds that a scheme with stages or tensor blocks saves at least."""

_LENGTHS = 40
"""As many lengths are looked at, up to the longest that a scheme holds."""


class Pricing:
    """Prices schemes of a problem, each when first asked for. Prices serve every scale of the
    problem's seconds."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs: CostModel = problem.model.replace(scale=1.0)
        self._priced: dict[tuple[Scheme, Working], PricedScheme | None] = {}
        self._kinds: dict[tuple[str, Working], tuple[PricedScheme, ...]] = {}
        self._lockstep: dict[str, tuple[PricedScheme, ...]] = {}
        self._nested: dict[tuple[Working, tuple[int, ...]], tuple[PricedScheme, ...]] = {}

    def groups(self, weights: Working) -> tuple[PricedScheme, ...]:
        """One stage without tensor blocks, of every group size that holds a token."""
        schemes = [Scheme(context=p) for p in self.problem.group_sizes]
        return self._several("groups", weights, schemes)

    def _several(
        self, kind: str, weights: Working, schemes: Iterable[Scheme]
    ) -> tuple[PricedScheme, ...]:
        if (kind, weights) not in self._kinds:
            found = (self.price(scheme, weights) for scheme in schemes)
            self._kinds[kind, weights] = tuple(priced for priced in found if priced is not None)
        return self._kinds[kind, weights]

    def lockstep(self) -> tuple[PricedScheme, ...]:
        """Groups of every size where all ranks meet at every layer, as its weights are gathered
        from the whole world and its gradients scattered over it: with the world's gather on each
        layer, and the memory that shards of the world leave."""
        if "lockstep" not in self._lockstep:
            world = max(self.costs.working_bytes)
            found = (self._in_lockstep(p, world) for p in self.problem.group_sizes)
            self._lockstep["lockstep"] = tuple(one for one in found if one.most_tokens)
        return self._lockstep["lockstep"]

    def _in_lockstep(self, p: int, world: int) -> PricedScheme:
        costs, slots = self.costs, self.problem.slots[p]
        room = costs.capacity_bytes - costs.state_bytes - costs.held_bytes({world}, "sharded")
        table = Table.of(costs, p, "replicated", self.problem.options[p], room)
        seconds = table.seconds.copy()
        # A layer that is computed again has its weights there: its backward gathers them anyway.
        seconds[:-1, 2] += sum(costs.gather_s.get(world, (0.0, 0.0)))
        table = replace(table, seconds=seconds)
        if len(slots) == 1:
            frontier = mixed_frontier(table, costs.shape.layers)
        else:
            frontier = listed_frontier(table, slots)
        return PricedScheme(scheme=Scheme(context=p), frontier=frontier, weights="sharded")

    def nested(self, weights: Working, sizes: Sequence[int]) -> tuple[PricedScheme, ...]:
        """The same where ranks work in groups of all ``sizes`` in one step: shards of several
        sizes are different rows, which add up."""
        key = (weights, tuple(sizes))
        if key not in self._nested:
            found = list[PricedScheme]()
            for p in sizes if weights in self.problem.holding else ():
                frontier = self.problem.frontier(p, weights, sizes)
                if frontier.most_tokens:
                    scheme = Scheme(context=p)
                    found.append(PricedScheme(scheme=scheme, frontier=frontier, weights=weights))
            self._nested[key] = tuple(found)
        return self._nested[key]

    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes that may be priced."""
        return (*(Scheme(context=p) for p in self.problem.group_sizes), *self._deeper())

    def deeper(self, weights: Working) -> tuple[PricedScheme, ...]:
        """Schemes with tensor blocks or several stages, which leave more room: degrees that are
        powers of two, or fill a width. Those that never pay are left out."""
        if ("paying", weights) not in self._kinds:
            every = self._several("deeper", weights, self._deeper())
            groups = [one for held in self.problem.holding for one in self.groups(held)]
            self._kinds["paying", weights] = _paying(every, groups)
        return self._kinds["paying", weights]

    def _deeper(self) -> Iterator[Scheme]:
        devices = self.problem.devices
        layers = self.costs.shape.layers if self.problem.stages else 1
        for width in self.problem.group_sizes:
            for tensor in (t for t in _powers(min(width, _MOST_TENSOR)) if width % t == 0):
                for depth in _powers(min(layers, devices // width)):
                    scheme = Scheme(tensor=tensor, context=width // tensor, pipeline=depth)
                    if scheme != Scheme(context=width) and self.slots(scheme):
                        yield scheme

    def slots(self, scheme: Scheme) -> Slots:
        """Options of each layer, or of all in one where they are free; none when the costs do not
        support the scheme."""
        width, problem = scheme.width, self.problem
        if width not in problem.group_sizes or scheme.pipeline > self.costs.shape.layers:
            return ()
        slots = problem.slots[width]
        if scheme.tensor > 1:
            slots = tuple(tuple(o for o in slot if self._in_blocks(scheme, o)) for slot in slots)
        return slots if all(slots) else ()

    def _in_blocks(self, scheme: Scheme, option: LayerOption) -> bool:
        """Whether an option works with the rows of a tensor block as they lie."""
        return block_ranks(option, scheme.width, self.costs.shape.tensor_ranks) == scheme.tensor

    def price(self, scheme: Scheme, weights: Working) -> PricedScheme | None:
        """A scheme with weights held one way; None when no token fits it."""
        alone = scheme.context == 1  # then it makes no difference
        key: tuple[Scheme, Working] = (scheme, "replicated" if alone else weights)
        if key not in self._priced:
            held_so = weights in self.problem.holding or alone
            made = self._made(*key) if held_so and self.slots(scheme) else None
            self._priced[key] = made if made is not None and made.most_tokens else None
        return self._priced[key]

    def strategy(self, strategy: Strategy, weights: Working) -> tuple[PricedScheme, ...] | None:
        """The schemes of a strategy; None when one of them fits nothing."""
        found = [self.price(scheme, weights) for scheme, _ in strategy.counts]
        some = tuple(priced for priced in found if priced is not None)
        return some if len(some) == len(found) else None

    def require(self, strategy: Strategy) -> None:
        """Raise InfeasiblePlan for a strategy that this problem's ranks or costs do not
        support, whatever their memory."""
        if strategy.devices > self.problem.devices or not strategy.counts:
            raise InfeasiblePlan(
                f"strategy {strategy}",
                got=f"{strategy.devices} ranks",
                wanted=f"1 to {self.problem.devices}",
            )
        for scheme, _ in strategy.counts:
            if not self.slots(scheme):
                raise InfeasiblePlan(
                    f"{scheme} of strategy {strategy}",
                    got="no layer option that can run in it",
                    wanted="a scheme with costs",
                    hint=self._lacking(scheme),
                )

    def _lacking(self, scheme: Scheme) -> str:
        width, layers = scheme.width, self.costs.shape.layers
        if scheme.pipeline > layers:
            return f"the model has {layers} layers, and each stage needs one"
        if width not in self.problem.group_sizes:
            return f"costs are of {', '.join(map(str, self.problem.group_sizes))} ranks in a stage"
        most = self.costs.shape.tensor_ranks
        if scheme.tensor > most:
            return f"a layer's weights can be cut for at most {most} ranks: model.ffn is too narrow"
        of = f"blocks of {scheme.tensor}" if scheme.context > 1 else f"{scheme.tensor} ranks"
        return (
            f"no measured method shares a layer's weights among {of}; planner.candidates names "
            "what is measured"
        )

    def layer_plans(self, scheme: Scheme) -> list[LayerPlan]:
        """Plans of equal layers, or of one level where methods are given for each layer."""
        slots = self.slots(scheme)
        if len(slots) == 1:
            return [LayerPlan.uniform(o, self.costs.shape.layers) for o in slots[0]]
        return [
            plan
            for plan in self.problem.uniform_layers(scheme.width)
            if slots and all(o in slot for o, slot in zip(plan.options, slots, strict=True))
        ]

    def _made(self, scheme: Scheme, weights: Working) -> PricedScheme | None:
        if scheme.pipeline > 1:
            return self._staged(scheme, weights)
        return PricedScheme(scheme=scheme, frontier=self._mixed(scheme, weights), weights=weights)

    def _mixed(self, scheme: Scheme, weights: Working) -> Frontier:
        """One stage: the exact layer plans, with the memory that this scheme leaves."""
        width, slots = scheme.width, self.slots(scheme)
        if scheme.tensor == 1:
            return self.problem.frontier(width, weights)
        pipeline = Pipeline(scheme=scheme, ranks=tuple(range(scheme.devices)))
        (held,) = held_bytes(self.costs, pipeline, weights)
        apart: Working = "replicated"
        if scheme.parts(sharded=weights == "sharded") == width:
            apart = "sharded"
        options = list(dict.fromkeys(option for slot in slots for option in slot))
        room = self.costs.capacity_bytes - self.costs.state_bytes - held
        table = Table.of(self.costs, width, apart, options, room)
        if len(slots) == 1:
            return mixed_frontier(table, self.costs.shape.layers)
        return listed_frontier(table, slots)

    def _staged(self, scheme: Scheme, weights: Working) -> PricedScheme | None:
        """Several stages: every layer plan as all micro-batches in flight could have it. The
        shares of the layers are those with the quickest slowest stage for short sequences, where
        the head weighs most; if these hold nothing, those that hold the most."""
        table = LayerTable.of(self.costs, scheme, weights, self.layer_plans(scheme))
        tried = list[StageCosts]()
        for shares in shares_of(self.costs.shape.layers, scheme.pipeline):
            made = StageCosts(
                costs=self.costs, scheme=scheme, shares=shares, working=weights, table=table
            )
            if tried and made.pace_s >= tried[-1].pace_s:
                break
            tried.append(made)
        best = tried[-1]
        if max(best.caps) < 1:
            best = max(tried, key=lambda made: max(made.caps))
        caps = np.array(best.caps, dtype=np.float64)
        seconds = np.array(best.slowest)
        kept = worth_keeping(seconds, caps)
        if not len(kept):
            return None
        a, b, c = seconds[kept].T
        frontier = Frontier(
            options=table.options,
            a=a.copy(),
            b=b.copy(),
            c=c.copy(),
            caps=tuple(best.caps[i] for i in kept),
            layers=table.layers[kept],
        )
        stages = replace(best, table=table.only(kept))
        return PricedScheme(scheme=scheme, frontier=frontier, weights=weights, stages=stages)


def _paying(
    deeper: Sequence[PricedScheme], groups: Sequence[PricedScheme]
) -> tuple[PricedScheme, ...]:
    """The schemes in which sequences of some length take clearly fewer device-seconds than in every
    group that is as quick for them alone."""
    most = max((scheme.most_tokens for scheme in deeper), default=1)
    lengths = np.geomspace(most, 1, _LENGTHS).round()
    with np.errstate(invalid="ignore"):
        known = [(g.devices, prices(g.frontier, lengths)) for g in groups]
        found = list[PricedScheme]()
        for scheme in deeper:
            alone, _, spread = prices(scheme.frontier, lengths)
            late_s, area = scheme.depth * alone * (1 + _PAYS), scheme.devices * spread
            beaten = ~np.isfinite(alone)
            for devices, (other, _, shared) in known:
                beaten |= (other <= late_s) & (devices * shared <= area * (1 - _PAYS))
            if not beaten.all():
                found.append(scheme)
    return tuple(found)


def _powers(most: int) -> list[int]:
    """Powers of two up to ``most``."""
    return [1 << power for power in range(most.bit_length())]
