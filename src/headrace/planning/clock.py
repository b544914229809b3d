"""The clock of published costs: what every rank of a plan does, by the formula.

A micro-batch takes sum_i (a l_i^2 + b l_i) + c on each stage, forward and backward together. Under
the semantics ``free`` it starts when all its ranks are free; in ``lockstep`` the i-th micro-batch
of every rank starts together with every other i-th. A pipeline of P stages is (P - 1) max_j t_j
longer than the sum of its micro-batches, shown as the wait behind them.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import CostError
from headrace.planning.priced import PricedScheme
from headrace.planning.published import priced
from headrace.simulator.lockstep import wave_starts
from headrace.spec import Plan, Scheme, Timeline
from headrace.spec.measurement import Row
from headrace.spec.program import Forward

__all__ = ["published_timeline"]


def published_timeline(plan: Plan, costs: PipelineCosts | GroupCosts) -> Timeline:
    """The timeline of a plan: a forward row of each rank for each of its micro-batches. Raises
    CostError when the costs lack a scheme of the plan."""
    schemes = {known.scheme: known for known in priced(costs, plan.devices)}
    times = [_seconds(plan, number, schemes) for number in range(len(plan.micro_batches))]
    free = plan.semantics == "free"
    starts = _free_starts(plan, times) if free else wave_starts(plan, times)[0]
    rows: list[list[Row]] = [[] for _ in range(plan.devices)]
    for number, (micro, start_s, taken_s) in enumerate(
        zip(plan.micro_batches, starts, times, strict=True)
    ):
        ranks = plan.pipelines[micro.pipeline].ranks
        action = str(Forward(stage=0, micro_batch=number, group=ranks))
        for rank in ranks:
            rows[rank].append(
                Row(
                    rank=rank,
                    action=action,
                    kind="forward",
                    start_s=start_s,
                    end_s=start_s + taken_s,
                )
            )
    _add_drains(plan, times, rows)
    return Timeline(
        source="predicted", rows=tuple(row for own in rows for row in own), devices=plan.devices
    )


def _seconds(plan: Plan, number: int, schemes: Mapping[Scheme, PricedScheme]) -> float:
    """Seconds of micro-batch ``number`` of a plan on one stage of its pipeline, forward and
    backward, by the formula of published costs."""
    micro = plan.micro_batches[number]
    scheme = plan.pipelines[micro.pipeline].scheme
    if scheme not in schemes:
        raise CostError(f"costs of {scheme}", got="none", wanted=", ".join(map(str, schemes)))
    ((a, b, c),) = schemes[scheme].frontier.rows  # published costs have one row for each scheme
    return sum((a * n + b) * n for n in plan.tokens_of(micro)) + c


def _free_starts(plan: Plan, times: list[float]) -> list[float]:
    """When each micro-batch starts, in seconds, if it waits only for its own ranks to be free;
    ``times`` are the seconds of each micro-batch."""
    free, starts = [0.0] * plan.devices, list[float]()
    for micro, taken_s in zip(plan.micro_batches, times, strict=True):
        ranks = plan.pipelines[micro.pipeline].ranks
        starts.append(max(free[rank] for rank in ranks))
        for rank in ranks:
            free[rank] = starts[-1] + taken_s
    return starts


def _add_drains(plan: Plan, times: list[float], rows: list[list[Row]]) -> None:
    """Add to the ``rows`` of every rank a wait behind each pipeline with stages, in which the
    pipeline drains: (P - 1) times its longest micro-batch. ``times`` are the seconds of each
    micro-batch."""
    for number, pipeline in enumerate(plan.pipelines):
        own = [
            taken_s
            for micro, taken_s in zip(plan.micro_batches, times, strict=True)
            if micro.pipeline == number
        ]
        behind_s = (pipeline.scheme.pipeline - 1) * max(own, default=0.0)
        for rank in pipeline.ranks if behind_s else ():
            end_s = rows[rank][-1].end_s
            rows[rank].append(
                Row(rank=rank, action="U", kind="update", start_s=end_s, end_s=end_s + behind_s)
            )
