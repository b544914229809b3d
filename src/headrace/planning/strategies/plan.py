"""The planner of strategies: pipelines of different shapes side by side, one strategy per step.

Data        lengths l_i; for every scheme and way to hold weights the layer plans of its slowest
            stage, with seconds and room; N ranks; candidate strategies.
Variables   the strategy; the pipeline and micro-batch of each sequence; layer plan and order of
            each micro-batch; layers of each stage.
Constraint  pipelines share no rank; what a rank holds at any time fits its memory.
Objective   minimise the step on the simulator's clock.

Solve.
1. Candidates are ordered by what they would take if sequences could be cut. Those that promise the
   most are dealt and packed (:mod:`headrace.planning.strategies.dealing`), by the formula
   sum_j t_j + (P - 1) max_j t_j.
2. The best of them are laid out on ranks and timed by the simulator; the quickest is the plan.
3. Strategies of one scheme are left out only where their own lower bound is no better than what is
   found. The best static plan takes part too, where its strategy is a candidate or the choice is
   free. So a plan is never slower than the best of one scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from headrace.errors import InfeasiblePlan
from headrace.planning.baselines import best_static
from headrace.planning.bounds import step_bound_s
from headrace.planning.feasible import require_fit as require_group
from headrace.planning.problem import Problem
from headrace.planning.sizing import Batch
from headrace.planning.solution import planned
from headrace.planning.strategies.bound import bound_of, strategy_bound_s
from headrace.planning.strategies.dealing import Dealt, dealt, expected_s
from headrace.planning.strategies.explain import Tried, reasons
from headrace.planning.strategies.feasible import require_fit, workings_of
from headrace.planning.strategies.laying import Ground, laid_out
from headrace.planning.strategies.propose import propose_strategies
from headrace.planning.strategies.schemes import Schemes
from headrace.spec import Lengths, Plan, Strategy
from headrace.spec.plan import Working

__all__ = ["plan_strategy"]

_DEALT = 6
_LAID_OUT = 3
_CLOSE = 1.2  # times the best by formula: what is slower is not laid out
_PROMISES = 1.3  # times the best: what promises less is not dealt


def plan_strategy(
    problem: Problem,
    lengths: Lengths,
    *,
    seed: int = 0,
    strategies: Sequence[Strategy] | None = None,
    schemes: Schemes | None = None,
) -> Plan:
    """The quickest plan found for one batch.

    ``strategies`` are the candidates, proposed from this very batch where left out; then the best
    static plan competes with them, as it does where its strategy is one of them. ``schemes`` are
    those of the problem, for who plans many batches. Deterministic in all of these and ``seed``.
    Raises InfeasiblePlan for a strategy that ranks or costs do not support, and when a sequence
    fits nowhere, saying by how much and what would help.
    """
    schemes = schemes or Schemes(problem)
    batch = Batch.of(lengths)
    if strategies is None:
        candidates = propose_strategies(problem, [lengths.tokens], seed, schemes=schemes)
    else:
        candidates = tuple(dict.fromkeys(strategies))
        for strategy in candidates:
            schemes.require(strategy)
    require_fit(schemes, candidates, batch.tokens[0], batch.order[0])
    # Without the scale: its rounding would decide between plans that take equally long.
    unscaled = problem.rescaled(1.0)
    search = _Search(problem=unscaled, schemes=schemes, batch=batch)
    tried = list(search.tried(candidates))
    alike = {strategy.counts[0][0] for strategy in candidates if len(strategy.counts) == 1}
    free = strategies is None
    statics = _static(unscaled, batch) if free or alike else []
    tried += [made for made in statics if free or made.plan.pipelines[0].scheme in alike]
    tried.sort(key=lambda item: item.seconds)
    tried = [item.rescaled(problem.costs.scale) for item in tried]
    best = tried[0].plan
    bound = bound_of(schemes, batch.tokens)
    bound_s = step_bound_s(problem.costs, bound.seconds)
    assert bound_s <= best.predicted_s * (1 + 1e-9), "a bound is below every plan"
    return best.replace(
        lower_bound_s=min(bound_s, best.predicted_s), planner="strategies", seed=seed,
        why=reasons(problem.costs, batch, bound, tried, len(candidates)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Strategies tried on one batch."""

    problem: Problem
    schemes: Schemes
    batch: Batch

    def tried(self, candidates: Sequence[Strategy]) -> Iterator[Tried]:
        """Plans of the most promising strategies, and of those of one scheme that may beat them."""
        made, left = self._dealt(candidates)
        best_s = inf
        for number, (found, working) in enumerate(made):
            close = number < _LAID_OUT and found.seconds <= made[0][0].seconds * _CLOSE
            if close or self._may_beat(found.strategy, best_s):
                yield (tried := self._laid_out(found, working))
                best_s = min(best_s, tried.seconds)
        for strategy, working in left:
            if self._may_beat(strategy, best_s):
                found = self._deal(strategy, working)
                if found is not None:
                    yield (tried := self._laid_out(found, working))
                    best_s = min(best_s, tried.seconds)

    def _may_beat(self, strategy: Strategy, best_s: float) -> bool:
        """Whether a strategy of one scheme can, by its bound, be quicker."""
        if len(strategy.counts) > 1:
            return False
        bound_s = strategy_bound_s(self.schemes, strategy, self.batch.tokens)
        return step_bound_s(self.problem.costs, bound_s) < best_s

    def _dealt(
        self, candidates: Sequence[Strategy]
    ) -> tuple[list[tuple[Dealt, Working]], list[tuple[Strategy, Working]]]:
        """Those that promise the most, quickest first, and the others."""
        made, left = list[tuple[Dealt, Working]](), list[tuple[Strategy, Working]]()
        best_s = inf
        for promised_s, _, strategy, working in self._ordered(candidates):
            if len(made) >= _DEALT or promised_s > best_s * _PROMISES:
                left.append((strategy, working))
                continue
            found = self._deal(strategy, working)
            if found is not None:
                best_s = min(best_s, found.seconds)
                made.append((found, working))
        return sorted(made, key=lambda item: item[0].seconds), left

    def _deal(self, strategy: Strategy, working: Working) -> Dealt | None:
        shapes = self.schemes.shapes(strategy, working)
        assert shapes is not None, "it promised something"
        return dealt(strategy, shapes, self.batch.tokens, self.schemes.devices)

    def _laid_out(self, found: Dealt, working: Working) -> Tried:
        return Tried(strategy=found.strategy, plan=laid_out(found, self._ground(working)))

    def _ordered(
        self, candidates: Sequence[Strategy]
    ) -> list[tuple[float, int, Strategy, Working]]:
        """What candidates promise that hold the batch, the quickest first."""
        found = list[tuple[float, int, Strategy, Working]]()
        tokens, total = self.batch.tokens, sum(self.batch.tokens)
        for number, strategy in enumerate(candidates):
            for working in workings_of(self.schemes, strategy):
                shapes = self.schemes.shapes(strategy, working)
                if shapes is None:
                    continue
                seconds = expected_s(strategy, shapes, tokens, self.schemes.devices)
                if seconds < inf:
                    found.append((seconds, number, strategy, working))
                if all(shape.frontier.caps[0] >= total for shape in shapes):
                    break  # shards would only cost gathers
        return sorted(found, key=lambda item: item[:2])

    def _ground(self, working: Working) -> Ground:
        return Ground(
            lengths=self.batch.lengths, order=self.batch.order, costs=self.problem.costs,
            devices=self.schemes.devices, working=working,
        )  # fmt: skip


def _static(problem: Problem, batch: Batch) -> list[Tried]:
    """The best static plan, where groups without stages hold the longest sequence."""
    try:
        require_group(problem, batch)
    except InfeasiblePlan:
        return []
    solution = best_static(problem, batch)
    plan = planned(problem, solution, batch, bound_s=0.0, planner="strategies")
    return [Tried(strategy=plan.strategy, plan=plan)]
