"""Why a plan of strategies is as it is, in a few short sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.costs import CostModel
from headrace.planning.bounds import Bound, step_bound_s
from headrace.planning.sizing import Batch
from headrace.simulator import exposed_exchange_s, simulate
from headrace.spec import Pipeline, Plan, Strategy, compile_plan
from headrace.spec.measurement import Timeline
from headrace.units import percent_text, seconds_text

__all__ = ["Tried", "reasons"]

_BY_LONGEST = 1e-9
_WORTH_TELLING = 0.05  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The plan of a strategy."""

    strategy: Strategy
    plan: Plan

    @property
    def seconds(self) -> float:
        """What it is predicted to take."""
        return self.plan.predicted_s

    def rescaled(self, scale: float) -> Tried:
        """The same with ``scale`` times the seconds."""
        plan = self.plan.replace(predicted_s=scale * self.plan.predicted_s)
        return Tried(strategy=self.strategy, plan=plan)


def reasons(
    costs: CostModel, batch: Batch, bound: Bound, tried: Sequence[Tried], candidates: int
) -> tuple[str, ...]:
    """Two to six reasons for the first of ``tried``, the quickest: what binds, which pipeline
    is last, what the next strategy and the best of one scheme would cost, and what of the exchange
    no computation hides (Hydraulis, appendix B.2)."""
    best = tried[0]
    timeline = simulate(compile_plan(best.plan, costs.shape.bucket_count), best.plan, costs)
    texts = [
        _binding(costs, batch, bound, best.plan),
        _last(timeline, best.plan),
        _beside(best, tried, candidates),
    ]
    alike = [other for other in tried if len(other.strategy.counts) == 1]
    if alike and len(best.strategy.counts) > 1:
        ratio = alike[0].seconds / best.seconds
        texts.append(
            f"best static strategy, {alike[0].strategy}: {seconds_text(alike[0].seconds)} "
            f"({ratio:.2f}x)"
        )
    idle = best.plan.devices - len({r for p in best.plan.pipelines for r in p.ranks})
    if idle:
        texts.append(f"{idle} of {best.plan.devices} ranks are idle")
    bare_s = exposed_exchange_s(timeline)
    if bare_s > _WORTH_TELLING * timeline.seconds:
        texts.append(
            f"{seconds_text(bare_s)} of moving weights and gradients, "
            f"{percent_text(bare_s / timeline.seconds)} of the step, are not hidden: few tokens "
            "for so many weights"
        )
    return tuple(texts)


def _binding(costs: CostModel, batch: Batch, bound: Bound, plan: Plan) -> str:
    bound_s = step_bound_s(costs, bound.seconds)
    gap = percent_text(max(0.0, plan.predicted_s / bound_s - 1)) if bound_s > 0 else "0 %"
    if bound.seconds <= bound.longest_s * (1 + _BY_LONGEST):
        what = f"the longest sequence, {batch.tokens[0]:,} tokens, is quicker nowhere"
    else:
        what = f"sequences where they need the fewest ranks keep {plan.devices} busy so long"
    return f"bound {seconds_text(bound_s)}, {gap} above it: {what}"


def _last(timeline: Timeline, plan: Plan) -> str:
    """The pipeline that is busy longest, by the simulator."""
    ends = [0.0] * plan.devices
    for row in timeline.rows:
        if row.kind in ("forward", "backward"):
            ends[row.rank] = max(ends[row.rank], row.end_s)
    last = max(range(len(plan.pipelines)), key=lambda q: max(ends[r] for r in _ranks(plan, q)))
    own = [micro for micro in plan.micro_batches if micro.pipeline == last]
    longest = max(max(plan.tokens_of(micro)) for micro in own)
    count = sum(len(micro.sequences) for micro in own)
    pipeline = plan.pipelines[last]
    return (
        f"last is {pipeline.scheme} on {_span(pipeline)}: {_several(count, 'sequence', 's')} in "
        f"{_several(len(own), 'micro-batch', 'es')}, the longest of {longest:,} tokens"
    )


def _several(count: int, what: str, ending: str) -> str:
    return f"{count:,} {what}{ending if count != 1 else ''}"


def _ranks(plan: Plan, pipeline: int) -> tuple[int, ...]:
    return plan.pipelines[pipeline].ranks


def _span(pipeline: Pipeline) -> str:
    ranks = sorted(pipeline.ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _beside(best: Tried, tried: Sequence[Tried], candidates: int) -> str:
    others = [other for other in tried if other.strategy != best.strategy]
    if not others:
        return f"strategy {best.strategy}: the only one of {candidates} worth trying"
    over = percent_text(others[0].seconds / best.seconds - 1)
    return (
        f"of {candidates} strategies the next, {others[0].strategy}: "
        f"{seconds_text(others[0].seconds)}, {over} more"
    )
