"""The schemes that costs support, and what a micro-batch costs on each.

A scheme of width w = tensor x context works as a group of w ranks does, so it needs costs of that
size. In a tensor block of t ranks each holds 1 / t of a layer's rows. Methods that work with those
as they lie would fetch, of sharded weights on w ranks, the share (1 / t - 1 / w) / (1 - 1 / w): by
that they are known. Without a tensor degree any method will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose

import numpy as np

from headrace.costs import CostModel
from headrace.errors import InfeasiblePlan
from headrace.planning.frontier import Frontier, worth_keeping
from headrace.planning.listed import listed_frontier
from headrace.planning.mixtures import Table, mixed_frontier
from headrace.planning.problem import Problem
from headrace.planning.strategies.stages import StageCosts, shares_of
from headrace.spec import LayerOption, LayerPlan, Scheme, Strategy
from headrace.spec.plan import Working

__all__ = ["Schemes", "Shape"]

_ALL_DEPTHS = 8
"""Pipelines of up to so many stages are all proposed, of more only powers of two."""

Slots = tuple[tuple[LayerOption, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A scheme with its weights held one way: the layer plans of a micro-batch that fit it, the
    smallest capacity first, and the seconds of its slowest stage, without the costs' scale.

    ``stages`` numbers its plans as ``frontier`` does. A pipeline with stages has the same option
    in all layers of a micro-batch, one without may mix them.
    """

    scheme: Scheme
    frontier: Frontier
    stages: StageCosts

    @property
    def most_tokens(self) -> int:
        """The longest sequence that it can take."""
        return self.frontier.most_tokens

    def layer_plan(self, plan: int) -> LayerPlan:
        """A layer plan by its number."""
        return self.frontier.layer_plan(plan)


class Schemes:
    """The shapes of a problem, each worked out when first asked for. They serve every scale of the
    problem's seconds."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs: CostModel = problem.costs.replace(scale=1.0)
        self._shapes: dict[tuple[Scheme, Working], Shape | None] = {}

    @property
    def devices(self) -> int:
        """Ranks to fill."""
        return self.problem.devices

    def supported(self) -> tuple[Scheme, ...]:
        """The schemes worth proposing: those with costs that fit the ranks, of any depth up to
        eight stages and then of powers of two."""
        return tuple(scheme for scheme in self._every() if self.slots(scheme))

    def _every(self) -> Iterator[Scheme]:
        layers = self.costs.shape.layers
        for width in self.problem.group_sizes:
            for tensor in (t for t in range(1, width + 1) if width % t == 0):
                for depth in range(1, min(layers, self.devices // width) + 1):
                    if depth <= _ALL_DEPTHS or depth & (depth - 1) == 0:
                        yield Scheme(tensor=tensor, context=width // tensor, pipeline=depth)

    def slots(self, scheme: Scheme) -> Slots:
        """Options of each layer, or of all in one where they are free; none when the costs do not
        support the scheme."""
        width, problem = scheme.width, self.problem
        layers = self.costs.shape.layers
        if width not in problem.group_sizes or scheme.pipeline > layers:
            return ()
        slots = problem.slots[width]
        if scheme.tensor > 1:
            slots = tuple(
                tuple(option for option in slot if self._in_blocks(scheme, option))
                for slot in slots
            )
        return slots if all(slots) else ()

    def _in_blocks(self, scheme: Scheme, option: LayerOption) -> bool:
        """Whether an option works with the rows of a tensor block as they lie."""
        width = scheme.width
        lacking = (1 / scheme.tensor - 1 / width) / (1 - 1 / width)
        return isclose(self.costs.option(width, option).fetched, lacking, abs_tol=1e-9)

    def shape(self, scheme: Scheme, working: Working) -> Shape | None:
        """A scheme with weights held one way; None when no token fits it."""
        alone = scheme.context == 1  # then it makes no difference
        key: tuple[Scheme, Working] = (scheme, "whole" if alone else working)
        if key not in self._shapes:
            held_so = working in self.problem.holding or alone
            made = self._made(*key) if held_so and self.slots(scheme) else None
            self._shapes[key] = made if made is not None and made.most_tokens else None
        return self._shapes[key]

    def shapes(self, strategy: Strategy, working: Working) -> tuple[Shape, ...] | None:
        """Those of a strategy's schemes, as it has them; None when one of them fits nothing."""
        found = [self.shape(scheme, working) for scheme, _ in strategy.counts]
        some = tuple(shape for shape in found if shape is not None)
        return some if len(some) == len(found) else None

    def require(self, strategy: Strategy) -> None:
        """Raise InfeasiblePlan for a strategy that this problem's ranks or costs do not
        support, whatever their memory."""
        if strategy.devices > self.devices or not strategy.counts:
            raise InfeasiblePlan(
                f"strategy {strategy}", got=f"{strategy.devices} ranks",
                wanted=f"1 to {self.devices}",
            )  # fmt: skip
        for scheme, _ in strategy.counts:
            if not self.slots(scheme):
                raise InfeasiblePlan(
                    f"{scheme} of strategy {strategy}", got="no layer option that can run in it",
                    wanted="a scheme with costs", hint=self._lacking(scheme),
                )  # fmt: skip

    def _lacking(self, scheme: Scheme) -> str:
        width, layers = scheme.width, self.costs.shape.layers
        if scheme.pipeline > layers:
            return f"the model has {layers} layers, and each stage needs one"
        if width not in self.problem.group_sizes:
            return f"costs are of {', '.join(map(str, self.problem.group_sizes))} ranks in a stage"
        of = f"blocks of {scheme.tensor}" if scheme.context > 1 else f"{scheme.tensor} ranks"
        return (
            f"no measured method shares a layer's weights among {of}; planner.candidates names "
            "what is measured"
        )

    def layer_plans(self, scheme: Scheme) -> list[LayerPlan]:
        """Plans of equal layers, or of one level where methods are given for each layer."""
        width, slots = scheme.width, self.slots(scheme)
        number = self.costs.shape.layers
        each = slots * number if len(slots) == 1 else slots
        return [
            plan
            for plan in self.problem.uniform_layers(width)
            if slots and all(o in slot for o, slot in zip(plan.options, each, strict=True))
        ]

    def _made(self, scheme: Scheme, working: Working) -> Shape:
        if scheme.pipeline > 1:
            return self._staged(scheme, working)
        frontier = self._mixed(scheme, working)
        plans = tuple(frontier.layer_plan(i) for i in range(len(frontier.caps)))
        costs = StageCosts(costs=self.costs, scheme=scheme, shares=(), working=working, plans=plans)
        return Shape(scheme=scheme, frontier=frontier, stages=costs)

    def _mixed(self, scheme: Scheme, working: Working) -> Frontier:
        """One stage: the planner's exact layer plans, with the memory that this scheme leaves."""
        width, slots = scheme.width, self.slots(scheme)
        if scheme.tensor == 1:
            return self.problem.frontier(width, working)
        alone = StageCosts(costs=self.costs, scheme=scheme, shares=(), working=working, plans=())
        parts = scheme.parts(sharded=working == "sharded")
        apart: Working = "sharded" if parts == width else "whole"
        options = list(dict.fromkeys(option for slot in slots for option in slot))
        table = Table.of(self.costs, width, apart, options, alone.rooms[0])
        if len(slots) == 1:
            return mixed_frontier(table, self.costs.shape.layers)
        return listed_frontier(table, slots)

    def _staged(self, scheme: Scheme, working: Working) -> Shape:
        """Several stages: every layer plan as all micro-batches in flight could have it."""
        plans = tuple(self.layer_plans(scheme))
        best = self._shared(scheme, working, plans)
        seconds = np.array(best.slowest)
        kept = worth_keeping(seconds, np.array(best.caps, dtype=np.float64))
        options = tuple(dict.fromkeys(o for plan in plans for o in plan.options))
        layers = [[options.index(o) for o in plans[i].options] for i in kept]
        a, b, c = seconds[kept].T
        frontier = Frontier(
            options=options, a=a.copy(), b=b.copy(), c=c.copy(),
            caps=tuple(best.caps[i] for i in kept),
            layers=np.array(layers, dtype=np.int64).reshape(len(kept), len(plans[0].options)),
        )  # fmt: skip
        chosen = tuple(plans[i] for i in kept)
        costs = StageCosts(
            costs=self.costs, scheme=scheme, shares=best.shares, working=working, plans=chosen
        )
        return Shape(scheme=scheme, frontier=frontier, stages=costs)

    def _shared(self, scheme: Scheme, working: Working, plans: tuple[LayerPlan, ...]) -> StageCosts:
        """Of the shares those with the quickest slowest stage for short sequences, where the head
        weighs most; if these hold nothing, those that hold the most."""
        tried = list[StageCosts]()
        for shares in shares_of(self.costs.shape.layers, scheme.pipeline):
            made = StageCosts(
                costs=self.costs, scheme=scheme, shares=shares, working=working, plans=plans
            )
            if tried and made.pace_s >= tried[-1].pace_s:
                break
            tried.append(made)
        best = tried[-1]
        return best if max(best.caps) >= 1 else max(tried, key=lambda made: max(made.caps))
