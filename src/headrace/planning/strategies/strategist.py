"""Plans of a whole run: candidates thought of once, a strategy for every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.planning.strategies.feasible import require_fit
from headrace.planning.strategies.plan import plan_strategy
from headrace.planning.strategies.propose import propose_strategies
from headrace.planning.strategies.schemes import Schemes
from headrace.spec import Lengths, Plan, Strategy

__all__ = ["Strategist"]

Samples = Callable[[], Sequence[Sequence[int]]]
"""Lengths of some batches to come."""


@dataclass(slots=True, kw_only=True)
class Strategist:
    """Decides the strategy of each step.

    ``strategies`` are the candidates; where there are none they are proposed from ``samples``
    when first needed, and kept from then on. With ``rotate`` step i takes the candidate i modulo
    their number, whatever the others promise. ``steps`` counts the steps that are done.
    """

    strategies: tuple[Strategy, ...] = ()
    rotate: bool = False
    seed: int = 0
    samples: Samples = tuple
    steps: int = 0

    def plan(self, schemes: Schemes, lengths: Lengths, scale: float = 1.0) -> Plan:
        """The plan of the next step, its seconds times ``scale``. Raises InfeasiblePlan when the
        batch fits no candidate whose turn it is."""
        known = self.candidates(schemes, lengths)
        some = (known[self.steps % len(known)],) if self.rotate else known
        problem = schemes.problem
        if scale != problem.costs.scale:
            problem = problem.rescaled(scale)
        return plan_strategy(problem, lengths, seed=self.seed, strategies=some, schemes=schemes)

    def done(self) -> None:
        """The next step is another one's turn."""
        self.steps += 1

    def require(self, schemes: Schemes, longest: int) -> None:
        """Raise InfeasiblePlan when a sequence of ``longest`` tokens fits none of the candidates,
        or not each of them where they take turns."""
        known = self.candidates(schemes, Lengths(tokens=(longest,)))
        for strategy in known:
            schemes.require(strategy)
        for some in [(strategy,) for strategy in known] if self.rotate else [known]:
            require_fit(schemes, some, longest, 0)

    def candidates(self, schemes: Schemes, lengths: Lengths) -> tuple[Strategy, ...]:
        """The strategies to choose among, from ``lengths`` where there are no samples."""
        if not self.strategies:
            sampled = self.samples() or [lengths.tokens]
            self.strategies = propose_strategies(
                schemes.problem, sampled, self.seed, schemes=schemes
            )
        return self.strategies

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to plan alike."""
        return {"strategies": [str(strategy) for strategy in self.strategies], "steps": self.steps}

    def restore(self, state: Mapping[str, Any], devices: int) -> None:
        """Go on as an earlier run would have; its candidates are taken unless they were given, or
        do not fit so many ranks."""
        self.steps = int(state["steps"])
        before = tuple(map(Strategy.parse, state["strategies"]))
        if not self.strategies and all(strategy.devices <= devices for strategy in before):
            self.strategies = before
