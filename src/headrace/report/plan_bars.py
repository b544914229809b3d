"""Plans of pipelines and of groups as bars over time, and where each length went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.planning.groups import GroupPlan
from headrace.planning.pipelines.plan import Iteration

__all__ = ["PlanBars", "WorkBar", "bars_of_groups", "bars_of_pipelines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkBar:
    """Something that devices ``first`` to ``last`` do from ``start_s`` to ``end_s``; nothing but
    wait, as stages of a pipeline do, where ``longest`` is 0."""

    first: int
    last: int
    start_s: float
    end_s: float
    where: str
    longest: int = 0
    tokens: int = 0
    sequences: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBars:
    """What a picture of a plan shows. ``placed[where]`` are the lengths that went to a scheme."""

    devices: int
    seconds: float
    lower_bound_s: float
    bars: tuple[WorkBar, ...]
    placed: dict[str, list[int]]


def bars_of_pipelines(
    costs: PipelineCosts, iteration: Iteration, lengths: Sequence[int], devices: int
) -> PlanBars:
    """Pipelines below each other on the devices that they take, in the order of the plan.

    A pipeline of PP stages shows its micro-batches one after the other and then the time that its
    last stage is behind its first, (PP - 1) of the longest of them.
    """
    schemes = {scheme.name: scheme for scheme in costs.schemes}
    bars, placed, first = list[WorkBar](), dict[str, list[int]](), 0
    phases: dict[int, int] = {}
    for pipeline in iteration.pipelines:
        scheme = schemes[pipeline.scheme]
        first = phases.get(pipeline.phase, 0)
        last = first + scheme.scheme.devices - 1
        phases[pipeline.phase] = last + 1
        before = max((bar.end_s for bar in bars), default=0.0) if pipeline.phase else 0.0
        start, times = before, [0.0]
        for ids in pipeline.micro_batches:
            own = [lengths[i] for i in ids]
            times.append(scheme.micro_batch_s(own))
            bars.append(
                WorkBar(
                    first=first, last=last, start_s=start, end_s=start + times[-1],
                    where=pipeline.scheme, longest=max(own), tokens=sum(own), sequences=len(own),
                )
            )  # fmt: skip
            placed.setdefault(pipeline.scheme, []).extend(own)
            start += times[-1]
        behind = (scheme.scheme.pipeline - 1) * max(times)
        if behind:
            bars.append(
                WorkBar(first=first, last=last, start_s=start, end_s=start + behind,
                        where=pipeline.scheme)
            )  # fmt: skip
    return PlanBars(
        devices=devices, seconds=iteration.predicted_s, lower_bound_s=iteration.lower_bound_s,
        bars=tuple(bars), placed=placed,
    )  # fmt: skip


def bars_of_groups(costs: GroupCosts, plan: GroupPlan) -> PlanBars:
    """Launches on their ranks; one whose ranks are no neighbours has a bar for each run of them."""
    free, steps = [0.0] * plan.devices, _steps(costs, plan)
    bars, placed = list[WorkBar](), dict[str, list[int]]()
    for launch, step in zip(plan.launches, steps, strict=True):
        own = [plan.lengths.tokens[i] for i in launch.sequences]
        took = costs.seconds(own, len(launch.ranks))
        start = step if plan.semantics == "lockstep" else max(free[r] for r in launch.ranks)
        where = f"cp{len(launch.ranks)}"
        for first, last in _runs(sorted(launch.ranks)):
            bars.append(
                WorkBar(
                    first=first, last=last, start_s=start, end_s=start + took, where=where,
                    longest=max(own), tokens=sum(own), sequences=len(own),
                )
            )  # fmt: skip
        placed.setdefault(where, []).extend(own)
        for rank in launch.ranks:
            free[rank] = start + took
    return PlanBars(
        devices=plan.devices, seconds=plan.predicted_s, lower_bound_s=plan.lower_bound_s,
        bars=tuple(bars), placed=placed,
    )  # fmt: skip


def _steps(costs: GroupCosts, plan: GroupPlan) -> list[float]:
    """When the wave of each launch starts, if waves start together."""
    done, waves, at = [0] * plan.devices, list[float](), list[int]()
    for launch in plan.launches:
        wave = max(done[rank] for rank in launch.ranks)
        own = [plan.lengths.tokens[i] for i in launch.sequences]
        took = costs.seconds(own, len(launch.ranks))
        if wave == len(waves):
            waves.append(took)
        else:
            waves[wave] = max(waves[wave], took)
        at.append(wave)
        for rank in launch.ranks:
            done[rank] = wave + 1
    return [sum(waves[:wave]) for wave in at]


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours together."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs
