"""Plans of pipelines and of groups as bars over time, and where each length went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.planning.groups import GroupPlan
from headrace.planning.pipelines.plan import Iteration
from headrace.simulator import without_waits
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.spec.program import Backward, Forward, parse_action

__all__ = ["PlanBars", "WorkBar", "bars_of_groups", "bars_of_pipelines", "bars_of_plan"]


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

    @property
    def gap(self) -> float:
        """How far above the lower bound it ends, as a fraction."""
        return self.seconds / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0


def bars_of_pipelines(
    costs: PipelineCosts, iteration: Iteration, lengths: Sequence[int], devices: int
) -> PlanBars:
    """Pipelines below each other on the devices that they take, in the order of the plan.

    A pipeline of PP stages shows its micro-batches one after the other and then the time that its
    last stage is behind its first, (PP - 1) of the longest of them.
    """
    schemes = {scheme.name: scheme for scheme in costs.schemes}
    bars, placed, first = list[WorkBar](), dict[str, list[int]](), 0
    phases, begun = dict[int, int](), dict[int, float]()
    changes = max((pipeline.phase for pipeline in iteration.pipelines), default=0)
    for pipeline in iteration.pipelines:
        scheme = schemes[pipeline.scheme]
        first = phases.get(pipeline.phase, 0)
        last = first + scheme.scheme.devices - 1
        phases[pipeline.phase] = last + 1
        if pipeline.phase not in begun:
            change_s = iteration.switch_s / changes if pipeline.phase else 0.0
            begun[pipeline.phase] = max((bar.end_s for bar in bars), default=0.0) + change_s
        start, times = begun[pipeline.phase], [0.0]
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


def bars_of_plan(plan: Plan, timeline: Timeline) -> PlanBars:
    """What the ranks do on the clock, forwards and backwards by their micro-batch; the rest (pull,
    push, update) is nothing but waiting here."""
    together: dict[tuple[str, float, float], list[int]] = {}
    for row in without_waits(timeline.rows):
        if row.end_s > row.start_s:
            together.setdefault((row.action, row.start_s, row.end_s), []).append(row.rank)
    bars, placed = list[WorkBar](), dict[str, list[int]]()
    for (text, start_s, end_s), ranks in together.items():
        action, own, where = parse_action(text), (), ""
        if isinstance(action, Forward | Backward):
            micro = plan.micro_batches[action.micro_batch]
            own, where = plan.tokens_of(micro), str(plan.pipelines[micro.pipeline].scheme)
        for first, last in _runs(sorted(ranks)):
            bars.append(
                WorkBar(
                    first=first, last=last, start_s=start_s, end_s=end_s, where=where,
                    longest=max(own, default=0), tokens=sum(own), sequences=len(own),
                )
            )  # fmt: skip
    for micro in plan.micro_batches:
        where = str(plan.pipelines[micro.pipeline].scheme)
        placed.setdefault(where, []).extend(plan.tokens_of(micro))
    return PlanBars(
        devices=plan.devices, seconds=timeline.seconds, lower_bound_s=plan.lower_bound_s,
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
