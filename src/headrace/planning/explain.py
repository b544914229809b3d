"""Why a plan is as it is, in a few short sentences, by the clock that its prediction shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.errors import InfeasiblePlan
from headrace.planning.bounds import Bound, step_bound_s
from headrace.planning.priced import LayerTable, StageCosts, shares_of
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment
from headrace.spec import LayerPlan, Plan, Scheme, Strategy
from headrace.spec.plan import Working
from headrace.units import bytes_text, counted, percent_text, seconds_text

__all__ = [
    "Candidate",
    "reasons",
    "require_fit",
    "require_lockstep",
    "require_strategies",
]

_SAME = 1e-6
_GAP_SHOWN = 0.005  # the bound of unstaged plans is told where its gap is smaller by this
_EXPOSED_SHOWN = 0.05  # exposed traffic is told from this share of the step on


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule and its plan, timed without the costs' scale."""

    schedule: Assignment
    plan: Plan


def reasons(
    problem: Problem,
    bound: Bound,
    tried: Sequence[Candidate],
    static: Candidate | None,
    flat: Bound | None = None,
) -> tuple[str, ...]:
    """Reasons for the first of ``tried``, the quickest: what binds, how far it is above ``flat``,
    the bound of plans without stages and tensor blocks, what the best static plan and
    the next strategy would take, which layers there are and what is recomputed, and what of the
    exchange no computation hides (Hydraulis, appendix B.2)."""
    best = tried[0]
    texts = [_binding(problem, bound, best)]
    if flat is not None and (text := _flat(problem, bound, flat, best)):
        texts[0] += f"; {text}"
    if static is not None:
        texts.append(_static(problem, best, static))
    for text in (_next(problem, tried, static), _layers(problem, best.plan)):
        if text:
            texts.append(text)
    texts.append(_recomputed(best.plan))
    for text in (_idle(best.plan), _exposed(problem, best)):
        if text:
            texts.append(text)
    return tuple(texts)


def _text(problem: Problem, seconds: float) -> str:
    return seconds_text(seconds * problem.model.scale)


def _ratio(there_s: float, here_s: float) -> float:
    return there_s / here_s if here_s > 0 else 1.0


def _binding(problem: Problem, bound: Bound, best: Candidate) -> str:
    costs, batch = problem.model, best.schedule.table.batch
    if costs.exchange_s.total_s > best.schedule.seconds:
        seconds = _text(problem, costs.exchange_s.total_s)
        return f"bound by pull, push and update: {seconds} of every step"
    bound_s = step_bound_s(costs.replace(scale=1.0), bound.seconds)
    if bound.by_longest:
        where = next(k for k, _, members in best.schedule.groups if 0 in members)
        return (
            f"bound by the longest sequence: {batch.tokens[0]:,} tokens take "
            f"{_text(problem, bound.longest_s)} at best, here on "
            f"{best.schedule.table.schemes[where]}"
        )
    if best.plan.working == "sharded" or _recomputing(best.plan):
        return (
            f"bound by memory: {bytes_text(costs.capacity_bytes)} of a rank, "
            f"{bytes_text(costs.state_bytes)} of it state, weights {best.plan.working}"
        )
    return (
        f"bound by the total work: it keeps {counted(problem.devices, 'rank')} busy for "
        f"{_text(problem, bound_s)}, exchange included"
    )


def _flat(problem: Problem, bound: Bound, flat: Bound, best: Candidate) -> str | None:
    """Gap to the bound of unstaged plans, where it is much smaller."""
    unscaled = problem.model.replace(scale=1.0)
    over, flat_over = (
        _ratio(best.plan.predicted_s, step_bound_s(unscaled, one.seconds)) - 1
        for one in (bound, flat)
    )
    if flat_over < 0 or flat_over > over - _GAP_SHOWN:
        return None
    return f"at most {percent_text(flat_over)} above any plan without stages and tensor blocks"


def _static(problem: Problem, best: Candidate, static: Candidate) -> str:
    there_s = static.plan.predicted_s
    name = "the best static plan" if static.plan is best.plan else "best static"
    where = str(static.schedule.table.schemes[static.schedule.groups[0][0]])
    text = f"{name}: {where} everywhere, {_text(problem, there_s)}"
    if static.plan is best.plan:
        return text
    return f"{text} ({_ratio(there_s, best.plan.predicted_s):.3g}x)"


def _next(problem: Problem, tried: Sequence[Candidate], static: Candidate | None) -> str | None:
    """A sentence about the next candidate of another strategy that is not the static plan."""
    best_s, mine = tried[0].plan.predicted_s, tried[0].schedule.strategy
    for other in tried[1:]:
        if other is static or other.schedule.strategy == mine:
            continue
        if other.plan.predicted_s > best_s * (1 + _SAME):
            over = percent_text(_ratio(other.plan.predicted_s, best_s) - 1)
            return (
                f"next strategy: {other.schedule.strategy}, "
                f"{_text(problem, other.plan.predicted_s)} (+{over})"
            )
    return None


def _layers(problem: Problem, plan: Plan) -> str | None:
    """A sentence about the layers most frequent on each width where methods could be chosen."""
    used: dict[int, Counter[str]] = {}
    for (width, _), (layers, count) in _used(plan).items():
        used.setdefault(width, Counter())[str(layers)] += count
    texts = list[str]()
    for width, counts in sorted(used.items()):
        if len({(o.attention, o.feed_forward) for o in problem.options[width]}) > 1:
            most, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
            share = "" if len(counts) == 1 else f" in {count} of {counts.total()}"
            texts.append(f"{width} {'rank' if width == 1 else 'ranks'} {most}{share}")
    return f"layers: {', '.join(texts)}" if texts else None


def _used(plan: Plan) -> dict[tuple[int, int], tuple[LayerPlan, int]]:
    """By width and identity of a layer plan: the plan and how many micro-batches have it. Comparing
    all layers of all plans would take longer than keeping a few equal ones apart."""
    found: dict[tuple[int, int], tuple[LayerPlan, int]] = {}
    for micro in plan.micro_batches:
        key = plan.pipelines[micro.pipeline].scheme.width, id(micro.layers)
        found[key] = micro.layers, found.get(key, (micro.layers, 0))[1] + 1
    return found


def _recomputing(plan: Plan) -> Counter[str]:
    """How many micro-batches have layers of each level that recompute."""
    counts = Counter[str]()
    for layers, number in _used(plan).values():
        for level in {option.recompute for option, _ in layers.counts} - {"none"}:
            counts[level] += number
    return counts


def _recomputed(plan: Plan) -> str:
    counts = _recomputing(plan)
    if not counts:
        return "nothing is recomputed: everything fits"
    texts = ", ".join(f"{level} in {count}" for level, count in sorted(counts.items()))
    return f"recomputes to fit memory: {texts} of {len(plan.micro_batches)} micro-batches"


def _idle(plan: Plan) -> str | None:
    idle = plan.devices - len({rank for p in plan.pipelines for rank in p.ranks})
    return f"{idle} of {counted(plan.devices, 'rank')} are idle" if idle else None


def _exposed(problem: Problem, best: Candidate) -> str | None:
    """A sentence about seconds of the step that are neither computing nor the update, where there
    are many."""
    step_s = best.plan.predicted_s
    bare_s = step_s - best.schedule.seconds - problem.model.exchange_s.update_s
    if bare_s <= _EXPOSED_SHOWN * step_s:
        return None
    return (
        f"{_text(problem, bare_s)} of moving weights and gradients, "
        f"{percent_text(bare_s / step_s)} of the step, are not hidden: few tokens for so many "
        "weights"
    )


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
    """Raise InfeasiblePlan when sequence ``index``, the ``longest``, fits no pipeline of the
    strategies, and for a strategy that the problem's costs or devices do not support."""
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
    """The fewest bytes that hold a micro-batch of ``tokens``, how in words, and the scheme."""
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
        ways.append(f"about {counted(max(ranks, scheme.width + 1), 'rank')} in a group")
    if holds:
        ways.append(f"a context of at most {holds:,} tokens")
    else:
        if room <= 0:  # what is stored, too, is shared by all devices
            capacity = max(1, problem.model.capacity_bytes)
            ways.append(f"about {math.ceil(problem.devices * needed / capacity):,} devices")
        ways.append(f"a smaller model: {bytes_text(fixed)} are needed before any sequence")
    return ways
