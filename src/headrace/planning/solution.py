"""A schedule while it is being made: which block holds which sequences, with exact seconds."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.planning.bounds import step_bound_s
from headrace.planning.dispatch import Block, Members, finish_times, order_of
from headrace.planning.packing import Packed, pack
from headrace.planning.problem import Arena, Problem
from headrace.planning.sizing import Batch
from headrace.planning.smoothing import smoothed
from headrace.simulator import step_s
from headrace.spec import MicroBatch, Pipeline, Plan, Scheme, Strategy

__all__ = ["Solution", "planned"]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Blocks with their sequences (positions, longest first) and packs, and when ranks are free.

    ``seconds`` is when the last rank has nothing left to compute if all weights are there at once,
    without the costs' scale. With pull, push and update it is more than the step takes, of which
    it hides a part; so solutions are compared by it.
    """

    arena: Arena
    members: Members
    packs: dict[Block, Packed]
    free: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """When the last rank is free."""
        return max(self.free)

    @property
    def strategy(self) -> Strategy:
        """The groups that have work."""
        return Strategy.of(Scheme(context=p) for p, _ in self.members)

    @classmethod
    def of(cls, arena: Arena, batch: Batch, devices: int, members: Members) -> Solution:
        """Pack every block of ``members``."""
        packs = {
            block: pack([batch.tokens[i] for i in held], arena.frontiers[block[0]])
            for block, held in members.items()
        }
        return cls._timed(arena, devices, members, packs)

    @classmethod
    def _timed(
        cls, arena: Arena, devices: int, members: Members, packs: dict[Block, Packed]
    ) -> Solution:
        order = order_of(members)
        free = finish_times(devices, [(block, packs[block].seconds) for block in order])
        return cls(arena=arena, members=members, packs=packs, free=tuple(free))

    def changed(self, batch: Batch, changes: Members) -> Solution:
        """A copy in which the blocks of ``changes`` hold other sequences (none: no block)."""
        members, packs = {**self.members, **changes}, dict(self.packs)
        for block, held in changes.items():
            if held:
                tokens = [batch.tokens[i] for i in held]
                packs[block] = pack(tokens, self.arena.frontiers[block[0]])
            else:
                del members[block]
                packs.pop(block, None)
        return self._timed(self.arena, len(self.free), members, packs)


def planned(
    problem: Problem,
    solution: Solution,
    batch: Batch,
    *,
    bound_s: float,
    planner: str,
    seed: int = 0,
    why: tuple[str, ...] = (),
    previous: Plan | None = None,
) -> Plan:
    """The plan of a solution, larger groups first, timed by the simulator. ``bound_s`` is that
    of the computations, without the costs' scale. Layers of ``previous``, the plan of the step
    before, are kept where the problem smooths."""
    costs = problem.costs
    least_s = step_bound_s(costs, bound_s)
    pipelines, micro_batches = _shape(problem, solution, batch)
    plan = Plan(
        lengths=batch.lengths,
        devices=problem.devices,
        pipelines=pipelines,
        micro_batches=micro_batches,
        predicted_s=least_s,
        lower_bound_s=least_s,
        working=solution.arena.working,
        planner=planner,
        seed=seed,
        why=why,
    )
    predicted_s = step_s(plan, costs)
    assert least_s <= predicted_s * (1 + 1e-9), "a bound is below every plan"
    if previous is not None and problem.smoothing > 0:
        # Layers of another frontier, which are kept, may be quicker than any of this one.
        plan = smoothed(problem, solution.arena, plan, previous)
        predicted_s = step_s(plan, costs)
    return plan.replace(predicted_s=predicted_s, lower_bound_s=min(least_s, predicted_s))


def _shape(
    problem: Problem, solution: Solution, batch: Batch
) -> tuple[tuple[Pipeline, ...], tuple[MicroBatch, ...]]:
    pipelines: list[Pipeline] = []
    micro_batches: list[MicroBatch] = []
    for p, k in order_of(solution.members):
        held, packed = solution.members[p, k], solution.packs[p, k]
        for pack_, index in zip(packed.bins, packed.plans, strict=True):
            layers = solution.arena.frontiers[p].layer_plan(index)
            micro_batches.append(
                MicroBatch(
                    pipeline=len(pipelines),
                    sequences=tuple(batch.order[held[i]] for i in pack_),
                    layers=layers,
                    order=problem.costs.order_of(p, layers),
                )
            )
        ranks = tuple(range(k * p, (k + 1) * p))
        pipelines.append(Pipeline(scheme=Scheme(context=p), ranks=ranks))
    return tuple(pipelines), tuple(micro_batches)
