"""Whether a sequence fits some pipeline, and if not, what would help."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from headrace.errors import InfeasiblePlan
from headrace.planning.problem import Problem
from headrace.planning.stages import LayerTable, StageCosts, shares_of
from headrace.spec import Scheme, Strategy
from headrace.spec.plan import Working
from headrace.units import bytes_text

__all__ = ["require_fit", "require_lockstep", "require_strategies"]


def require_fit(problem: Problem, longest: int, index: int) -> None:
    """Raise InfeasiblePlan when sequence ``index``, the ``longest``, fits no pipeline."""
    _require_positions(problem, longest, index)
    pricing = problem.pricing
    if problem.planner == "static":
        sizes = problem.group_sizes if problem.static_size is None else (problem.static_size,)
        _require(problem, [Scheme(context=p) for p in sizes], longest, index)
        return
    for weights in problem.holding:
        if any(priced.most_tokens >= longest for priced in pricing.groups(weights)):
            return
    _require(problem, pricing.schemes(), longest, index)


def require_lockstep(problem: Problem, longest: int, index: int) -> None:
    """Raise InfeasiblePlan when a sequence fits no group whose weights are gathered layer by layer
    from the whole world."""
    _require_positions(problem, longest, index)
    priced = problem.pricing.lockstep()
    holds = max((one.most_tokens for one in priced), default=0)
    if holds < longest:
        raise InfeasiblePlan(
            f"{_name(index, longest)} does not fit",
            got=f"{longest:,} tokens",
            wanted=f"at most {holds:,} on any group in lockstep",
            hint=f"a context of at most {holds:,} tokens" if holds else "more devices",
        )


def require_strategies(
    problem: Problem, strategies: Sequence[Strategy], longest: int, index: int
) -> None:
    """The same for pipelines of the strategies; raises InfeasiblePlan, too, for a strategy that
    the problem's costs or devices do not support."""
    _require_positions(problem, longest, index)
    for strategy in strategies:
        problem.pricing.require(strategy)
    holds = max(_most_of(problem, strategy) for strategy in strategies)
    if holds < longest:
        among = {scheme for strategy in strategies for scheme, _ in strategy.counts}
        _refuse(problem, sorted(among), longest, index, holds)


def _require_positions(problem: Problem, longest: int, index: int) -> None:
    limit = problem.model.shape.longest
    if limit is not None and longest > limit:
        raise InfeasiblePlan(
            _name(index, longest),
            got=f"{longest:,} positions",
            wanted=f"at most the model's {limit:,}",
            hint=f"a context of {limit:,}, or a model with more positions",
        )


def _name(index: int, longest: int) -> str:
    return f"sequence {index} of {longest:,} tokens"


def _most_tokens(problem: Problem, schemes: Iterable[Scheme]) -> int:
    found = [problem.pricing.price(scheme, w) for scheme in schemes for w in problem.holding]
    return max((priced.most_tokens for priced in found if priced is not None), default=0)


def _most_of(problem: Problem, strategy: Strategy) -> int:
    """The longest sequence that a strategy takes; 0 where some pipeline of it holds nothing."""
    most = 0
    for weights in problem.holding:
        priced = problem.pricing.strategy(strategy, weights)
        most = max([most, *(one.most_tokens for one in priced or ())])
    return most


def _require(problem: Problem, schemes: Sequence[Scheme], longest: int, index: int) -> None:
    holds = _most_tokens(problem, schemes)
    if holds < longest:
        _refuse(problem, schemes, longest, index, holds)


def _refuse(
    problem: Problem, among: Sequence[Scheme], longest: int, index: int, holds: int
) -> None:
    needed, where, scheme = _least_bytes(problem, among, longest)
    capacity = problem.model.capacity_bytes
    raise InfeasiblePlan(
        f"{_name(index, longest)} does not fit",
        got=f"{bytes_text(needed)} on {where}",
        wanted=f"at most {bytes_text(capacity)} ({needed - capacity:,} bytes less)",
        hint=", or ".join(_ways_out(problem, among, scheme, needed, longest, holds)),
    )


def _least_bytes(problem: Problem, among: Iterable[Scheme], tokens: int) -> tuple[int, str, Scheme]:
    """The thriftiest way to hold a micro-batch: (bytes, in words, scheme)."""
    found = list[tuple[int, Scheme, str]]()
    capacity = problem.model.capacity_bytes
    for scheme in among:
        plans = tuple(problem.pricing.layer_plans(scheme))
        weights: tuple[Working, ...] = problem.holding if scheme.context > 1 else ("replicated",)
        for working in weights:
            table = LayerTable.of(problem.pricing.costs, scheme, working, plans)
            for shares in shares_of(problem.model.shape.layers, scheme.pipeline):
                costs = StageCosts(
                    costs=problem.pricing.costs,
                    scheme=scheme,
                    shares=shares,
                    working=working,
                    table=table,
                )
                for number, plan in enumerate(plans):
                    what = str(plan.options[0]) if len(plan.counts) == 1 else str(plan)
                    where = f"{scheme} with {what} and {working} weights"
                    found.append((capacity + costs.needs(number, tokens), scheme, where))
    needed, scheme, where = min(found)
    return needed, where, scheme


def _ways_out(
    problem: Problem, among: Sequence[Scheme], scheme: Scheme, needed: int, longest: int, holds: int
) -> list[str]:
    ways, pricing = list[str](), problem.pricing
    roomy = [
        other
        for other in pricing.schemes()
        if other not in among and _most_tokens(problem, [other]) >= longest
    ]
    if roomy and problem.strategies:
        fewest = min(roomy, key=lambda other: (other.devices, other))
        ways.append(f"a strategy with {fewest}, which holds it")
    if "full" not in {option.recompute for option in problem.options[scheme.width]}:
        ways.append("recompute 'full'")
    fixed, _, _ = _least_bytes(problem, [scheme], 1)
    room = problem.model.capacity_bytes - fixed
    if room > 0 and scheme.pipeline == 1:
        # A rank's activations shrink with the group; its state is taken to stay.
        ranks = math.ceil(scheme.width * (needed - fixed) / room)
        ways.append(f"about {max(ranks, scheme.width + 1)} ranks in a group")
    if holds:
        ways.append(f"a context of at most {holds:,} tokens")
    else:
        if room <= 0:  # what is stored, too, is shared by all devices
            capacity = max(1, problem.model.capacity_bytes)
            ways.append(f"about {math.ceil(problem.devices * needed / capacity):,} devices")
        ways.append(f"a smaller model: {bytes_text(fixed)} are needed before any sequence")
    return ways
