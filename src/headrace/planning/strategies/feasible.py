"""Whether a sequence fits some pipeline, and if not, what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.errors import InfeasiblePlan
from headrace.planning.strategies.schemes import Schemes
from headrace.planning.strategies.stages import StageCosts, shares_of
from headrace.spec import Scheme, Strategy
from headrace.spec.plan import Working
from headrace.units import bytes_text

__all__ = ["require_fit", "workings_of"]


def workings_of(schemes: Schemes, strategy: Strategy) -> tuple[Working, ...]:
    """Ways to hold weights that make a difference to a strategy."""
    holding = schemes.problem.holding
    if all(scheme.context == 1 for scheme, _ in strategy.counts):
        return ("whole",) if "whole" in holding else holding[:1]
    return holding


def require_fit(schemes: Schemes, strategies: Sequence[Strategy], longest: int, index: int) -> None:
    """Raise InfeasiblePlan when sequence ``index``, the ``longest``, fits no pipeline of the
    strategies or no strategy fits at all."""
    name = f"sequence {index} of {longest:,} tokens"
    limit = schemes.costs.shape.longest
    if limit is not None and longest > limit:
        raise InfeasiblePlan(
            name, got=f"{longest:,} positions", wanted=f"at most the model's {limit:,}",
            hint=f"a context of {limit:,}, or a model with more positions",
        )  # fmt: skip
    holds = max((_most_tokens(schemes, strategy) for strategy in strategies), default=0)
    if holds >= longest:
        return
    among = {scheme for strategy in strategies for scheme, _ in strategy.counts}
    among = among or set(schemes.supported())
    lacks, where = _least(schemes, among, longest)
    capacity = schemes.costs.capacity_bytes
    raise InfeasiblePlan(
        f"{name} does not fit", got=f"{bytes_text(capacity + lacks)} on {where}",
        wanted=f"at most {bytes_text(capacity)} ({lacks:,} bytes less)",
        hint=", or ".join(_ways_out(schemes, among, longest, holds)),
    )  # fmt: skip


def _most_tokens(schemes: Schemes, strategy: Strategy) -> int:
    """The longest sequence that a strategy can take; 0 where some pipeline of it holds nothing."""
    most = 0
    for working in workings_of(schemes, strategy):
        shapes = schemes.shapes(strategy, working)
        most = max([most, *(shape.most_tokens for shape in shapes or ())])
    return most


def _least(schemes: Schemes, among: Iterable[Scheme], tokens: int) -> tuple[int, str]:
    """(bytes that lack, in words) of the thriftiest way to hold micro-batches of ``tokens``."""
    found = list[tuple[int, str]]()
    for scheme in sorted(among):
        for working in workings_of(schemes, Strategy.of([scheme])):
            plans = tuple(schemes.layer_plans(scheme))
            for shares in shares_of(schemes.costs.shape.layers, scheme.pipeline):
                costs = StageCosts(
                    costs=schemes.costs, scheme=scheme, shares=shares, working=working, plans=plans
                )
                for number, plan in enumerate(plans):
                    what = str(plan.options[0]) if len(plan.counts) == 1 else str(plan)
                    where = f"{scheme} with {what} and {working} weights"
                    found.append((costs.needs(number, tokens), where))
    return min(found)


def _ways_out(schemes: Schemes, among: Iterable[Scheme], longest: int, holds: int) -> list[str]:
    ways = list[str]()
    roomy = [
        scheme
        for scheme in schemes.supported()
        if scheme not in among and _most_tokens(schemes, Strategy.of([scheme])) >= longest
    ]
    if roomy:
        fewest = min(roomy, key=lambda scheme: (scheme.devices, scheme))
        ways.append(f"a strategy with {fewest}, which holds it")
    if "full" not in schemes.problem.recompute:
        ways.append("recompute 'full'")
    if holds:
        ways.append(f"a context of at most {holds:,} tokens")
    else:
        ways.append("more ranks, or a smaller model")
    return ways
