"""One door to all planners of pipelines: ours, the paper's, and what others do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import SpecError, did_you_mean
from headrace.planning.pipelines.baselines import max_length, static, token_balance
from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.choose import choose
from headrace.planning.pipelines.paper import paper
from headrace.planning.pipelines.plan import Iteration, PipelinePlan, iteration_of, reasons
from headrace.planning.pipelines.proposal import propose
from headrace.planning.pipelines.rivals import Rivals
from headrace.planning.pipelines.switching import switching
from headrace.planning.pipelines.world import World

__all__ = ["PLANNERS", "plan_pipelines"]

Planned = tuple[tuple[str, ...], Callable[[int, Batch], Iteration]]
"""Names of the candidates, and what plans iteration number i."""

Prepare = Callable[[World, Sequence[Sequence[int]], int], Planned]


def _headrace(world: World, iterations: Sequence[Sequence[int]], seed: int) -> Planned:
    proposal, rivals = propose(world, iterations, seed), Rivals(world, iterations, seed)

    def one(number: int, batch: Batch) -> Iteration:
        chosen = choose(world, batch, proposal.candidates, proposal.kinds)
        chosen = rivals.best(number, batch, chosen)
        return iteration_of(batch, chosen.solution, chosen.bound, why=reasons(batch, chosen))

    return tuple(world.text(counts) for counts in proposal.candidates), one


PLANNERS: Mapping[str, Prepare] = {
    "headrace": _headrace,
    "hydraulis": paper,
    "static": static,
    "max-length": max_length,
    "token-balance": token_balance,
    "switching": switching,
}
"""By name: what proposes strategies from the iterations (some of them, drawn from a seed), and
then plans one after the other."""


def plan_pipelines(
    costs: PipelineCosts,
    lengths: Sequence[Sequence[int]],
    devices: int,
    *,
    planner: str = "headrace",
    seed: int = 0,
) -> PipelinePlan:
    """Plan iterations, ``lengths[i]`` being the tokens of each sequence of iteration i.

    Same arguments, same plan. Raises SpecError for an unknown planner, no iterations, an empty one
    or a length that is none; CostError for costs that do not reach to so few devices;
    InfeasiblePlan for a sequence that no scheme holds and for devices that no scheme fits.
    """
    if planner not in PLANNERS:
        hint = did_you_mean(planner, PLANNERS) or f"known are {', '.join(PLANNERS)}"
        raise SpecError("planner", got=repr(planner), hint=hint)
    if not lengths:
        raise SpecError("iterations", got="none", wanted="at least one")
    world = World.of(costs, devices)
    for number, tokens in enumerate(lengths):
        world.require(tokens, number)
    began = time.perf_counter()
    candidates, one = PLANNERS[planner](world, lengths, seed)
    proposal_s = time.perf_counter() - began
    iterations = list[Iteration]()
    for number, tokens in enumerate(lengths):
        began = time.perf_counter()
        planned = one(number, Batch(world, tokens))
        iterations.append(planned.timed(time.perf_counter() - began))
    return PipelinePlan(
        devices=devices, iterations=tuple(iterations), planner=planner, seed=seed,
        candidates=candidates, proposal_s=proposal_s,
    )  # fmt: skip
