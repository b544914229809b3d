"""A plan as bars over time, and where each length went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.simulator import without_waits
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.spec.program import Backward, Forward, parse_action

__all__ = ["PlanBars", "WorkBar", "bars_of_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkBar:
    """What devices ``first`` to ``last`` do together from ``start_s`` to ``end_s`` seconds: the
    micro-batch of a scheme ``where`` with ``longest`` tokens in its longest sequence. They only
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


def bars_of_plan(plan: Plan, timeline: Timeline) -> PlanBars:
    """The bars of a plan: forwards and backwards with the lengths of their micro-batch. Other
    actions (pull, push, update) are drawn as waiting. Neighbouring ranks that do the same at the
    same time share a bar."""
    # Ranks by (action, start, end).
    together: dict[tuple[str, float, float], list[int]] = {}
    for row in without_waits(timeline.rows):
        if row.end_s > row.start_s:
            together.setdefault((row.action, row.start_s, row.end_s), []).append(row.rank)
    bars, placed = list[WorkBar](), dict[str, list[int]]()
    for (text, start_s, end_s), ranks in together.items():
        action, lengths, where = parse_action(text), (), ""
        if isinstance(action, Forward | Backward):
            micro = plan.micro_batches[action.micro_batch]
            lengths, where = plan.tokens_of(micro), str(plan.pipelines[micro.pipeline].scheme)
        for first, last in _runs(sorted(ranks)):
            bars.append(
                WorkBar(
                    first=first,
                    last=last,
                    start_s=start_s,
                    end_s=end_s,
                    where=where,
                    longest=max(lengths, default=0),
                    tokens=sum(lengths),
                    sequences=len(lengths),
                )
            )
    for micro in plan.micro_batches:
        where = str(plan.pipelines[micro.pipeline].scheme)
        placed.setdefault(where, []).extend(plan.tokens_of(micro))
    return PlanBars(
        devices=plan.devices,
        seconds=timeline.seconds,
        lower_bound_s=plan.lower_bound_s,
        bars=tuple(bars),
        placed=placed,
    )


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of consecutive numbers in the ascending ``ranks``, as pairs (first, last)."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs
