"""Why a plan is as it is, in a few short sentences, by the clock that its prediction shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.costs.cost_model import exchange_of
from headrace.errors import InfeasiblePlan
from headrace.planning.batch import GAIN, NEAR
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A schedule with the seconds of its step.

    Attributes:
        schedule: The packed schedule.
        seconds: Seconds of its step on the clock that counts, without the costs' scale.
    """

    schedule: Assignment
    seconds: float


def reasons(
    problem: Problem,
    bound: Bound,
    tried: Sequence[Candidate],
    plan: Plan,
    static: Candidate | None = None,
    flat: Bound | None = None,
) -> tuple[str, ...]:
    """Why a plan is as it is.

    Args:
        problem: What was planned for.
        bound: The bound of computing.
        tried: The candidates that were timed, the quickest first: that of the plan.
        plan: The plan.
        static: The best static candidate.
        flat: The bound of plans without stages and tensor blocks, where it is known apart.

    Returns:
        Sentences: what binds and how far the plan is above bounds, which pipeline is busiest, what
        the best static plan and the next strategy would take, the layers and what is recomputed,
        idle ranks, and what of the exchange no computation hides (Hydraulis, appendix B.2).
    """
    best = tried[0]
    simulated = not problem.is_published and problem.semantics == "free"
    texts = [_binding(problem, bound, best, plan) if simulated else _gap(problem, bound, best)]
    if flat is not None:
        texts[0] += _flat(problem, bound, flat, best) or ""
    found = [
        None if simulated else _busiest(best),
        None if static is None else _static(problem, best, static),
        _next(problem, tried, static),
        None if problem.is_published else _layers(problem, plan),
        None if problem.is_published else _recomputed(plan),
        _idle(plan),
        _exposed(problem, best) if simulated else None,
    ]
    return (*texts, *(text for text in found if text is not None))


def _text(problem: Problem, seconds: float) -> str:
    """Seconds as text, with the costs' scale."""
    scale = 1.0 if problem.is_published else problem.model.scale
    return seconds_text(seconds * scale)


def _ratio(there_s: float, here_s: float) -> float:
    """How many times as long something takes; 1 where there is nothing to compare with."""
    return there_s / here_s if here_s > 0 else 1.0


def _gap(problem: Problem, bound: Bound, best: Candidate) -> str:
    """How far a plan by formula is above its bound, and what the bound is of."""
    if bound.exact:
        binds = "no plan of so few sequences is quicker: all were compared"
    elif bound.by_wave:
        binds = (
            "on few devices the longest sequences make a wave longer than what fits into memory "
            "beside them, on many devices they take more device-seconds"
        )
    elif bound.by_longest:
        binds = "the longest sequence is quicker nowhere"
    else:
        binds = (
            "all sequences on the schemes that need the fewest devices keep "
            f"{problem.devices} busy so long"
        )
    gap = percent_text(_ratio(best.seconds, bound.seconds) - 1)
    return f"bound {_text(problem, bound.seconds)}, {gap} above it: {binds}"


def _busiest(best: Candidate) -> str:
    """The pipeline that takes longest, with its sequences."""
    schedule, table = best.schedule, best.schedule.table
    longest = max(range(len(schedule.packs)), key=lambda g: schedule.packs[g].seconds)
    k, _, members = schedule.groups[longest]
    micro_batches = len(schedule.packs[longest].bins)
    return (
        f"the busiest pipeline is a {table.schemes[k]}: {counted(len(members), 'sequence')} in "
        f"{micro_batches:,} micro-batch{'es' if micro_batches != 1 else ''}, the longest of "
        f"{table.tokens[min(members)]:,} tokens"
    )


def _binding(problem: Problem, bound: Bound, best: Candidate, plan: Plan) -> str:
    """What a model's step is bound by: the exchange, the longest sequence, memory or all work."""
    costs, batch = problem.model, best.schedule.table.batch
    if (exchange := exchange_of(costs, plan)).total_s > best.schedule.seconds:
        seconds = _text(problem, exchange.total_s)
        return f"bound by pull, push and update: {seconds} of every step"
    if bound.by_longest:
        where = next(k for k, _, members in best.schedule.groups if 0 in members)
        return (
            f"bound by the longest sequence: {batch.tokens[0]:,} tokens take "
            f"{_text(problem, bound.longest_s)} at best, here on "
            f"{best.schedule.table.schemes[where]}"
        )
    if plan.working == "sharded" or _recomputing(plan):
        return (
            f"bound by memory: {bytes_text(costs.capacity_bytes)} of a rank, "
            f"{bytes_text(costs.state_bytes)} of it state, weights {plan.working}"
        )
    bound_s = step_bound_s(costs.replace(scale=1.0), bound)
    return (
        f"bound by the total work: it keeps {counted(problem.devices, 'rank')} busy for "
        f"{_text(problem, bound_s)}, exchange included"
    )


def _flat(problem: Problem, bound: Bound, flat: Bound, best: Candidate) -> str | None:
    """The gap to the bound of unstaged plans, where it is much smaller than that to ``bound``."""
    unscaled = problem.model.replace(scale=1.0)
    over, flat_over = (
        _ratio(best.seconds, step_bound_s(unscaled, low)) - 1 for low in (bound, flat)
    )
    if flat_over < 0 or flat_over > over - NEAR:
        return None
    return f"; at most {percent_text(flat_over)} above any plan without stages and tensor blocks"


def _static(problem: Problem, best: Candidate, static: Candidate) -> str:
    """What the best static plan takes; that it is the plan where it is."""
    where = str(static.schedule.table.schemes[static.schedule.groups[0][0]])
    text = f"{where} everywhere, {_text(problem, static.seconds)}"
    if static is best:
        return f"the best static plan: {text}"
    return f"best static: {text} ({_ratio(static.seconds, best.seconds):.3g}x)"


def _next(problem: Problem, tried: Sequence[Candidate], static: Candidate | None) -> str | None:
    """The next candidate of another strategy that is not the static plan."""
    best = tried[0]
    for other in tried[1:]:
        if other is static or other.schedule.strategy == best.schedule.strategy:
            continue
        over = _ratio(other.seconds, best.seconds) - 1
        more = f"+{percent_text(over)}" if over >= GAIN else "as fast"
        names = other.schedule.names
        return f"next strategy: {names}, {_text(problem, other.seconds)} ({more})"
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
    """A sentence about what is recomputed, in how many micro-batches."""
    counts = _recomputing(plan)
    if not counts:
        return "nothing is recomputed: everything fits"
    texts = ", ".join(f"{level} in {count}" for level, count in sorted(counts.items()))
    return f"recomputes to fit memory: {texts} of {len(plan.micro_batches)} micro-batches"


def _idle(plan: Plan) -> str | None:
    """How many ranks no pipeline has."""
    idle = plan.devices - len({rank for p in plan.pipelines for rank in p.ranks})
    return f"{idle} of {counted(plan.devices, 'rank')} are idle" if idle else None


def _exposed(problem: Problem, best: Candidate) -> str | None:
    """Seconds of the step that are neither computing nor the update, where there are many."""
    bare_s = best.seconds - best.schedule.seconds - problem.model.exchange_s.update_s
    if bare_s <= NEAR * best.seconds:
        return None
    return (
        f"{_text(problem, bare_s)} of moving weights and gradients, "
        f"{percent_text(bare_s / best.seconds)} of the step, are not hidden: few tokens for so "
        "many weights"
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
    holds = max((scheme.most_tokens for scheme in priced), default=0)
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
    """Raise InfeasiblePlan when sequence ``index`` of ``longest`` tokens is longer than the model's
    positions."""
    limit = problem.model.shape.longest
    if limit is not None and longest > limit:
        raise InfeasiblePlan(
            _name(index, longest),
            got=f"{longest:,} positions",
            wanted=f"at most the model's {limit:,}",
            hint=f"a context of {limit:,}, or a model with more positions",
        )


def _name(index: int, longest: int) -> str:
    """What errors call sequence ``index`` of ``longest`` tokens."""
    return f"sequence {index} of {longest:,} tokens"


def _most_tokens(problem: Problem, schemes: Iterable[Scheme]) -> int:
    """The longest sequence, in tokens, that one of the schemes holds; 0 when they hold nothing."""
    found = [problem.pricing.price(scheme, w) for scheme in schemes for w in problem.holding]
    return max((priced.most_tokens for priced in found if priced is not None), default=0)


def _most_of(problem: Problem, strategy: Strategy) -> int:
    """The longest sequence, in tokens, that a strategy holds; 0 where one of its pipelines holds
    nothing."""
    most = 0
    for weights in problem.holding:
        priced = problem.pricing.strategy(strategy, weights)
        most = max([most, *(scheme.most_tokens for scheme in priced or ())])
    return most


def _require(problem: Problem, schemes: Sequence[Scheme], longest: int, index: int) -> None:
    """Raise InfeasiblePlan when sequence ``index`` of ``longest`` tokens fits none of the
    schemes."""
    holds = _most_tokens(problem, schemes)
    if holds < longest:
        _refuse(problem, schemes, longest, index, holds)


def _refuse(
    problem: Problem, among: Sequence[Scheme], longest: int, index: int, holds: int
) -> None:
    """Raise InfeasiblePlan for sequence ``index`` of ``longest`` tokens: by how many bytes it
    exceeds the roomiest scheme ``among`` those allowed, which hold ``holds`` tokens, and what
    helps."""
    needed, where, scheme = _least_bytes(problem, among, longest)
    capacity = problem.model.capacity_bytes
    raise InfeasiblePlan(
        f"{_name(index, longest)} does not fit",
        got=f"{bytes_text(needed)} on {where}",
        wanted=f"at most {bytes_text(capacity)} ({needed - capacity:,} bytes less)",
        hint=", or ".join(_ways_out(problem, among, scheme, needed, longest, holds)),
    )


def _least_bytes(problem: Problem, among: Iterable[Scheme], tokens: int) -> tuple[int, str, Scheme]:
    """The fewest bytes of a rank that hold a micro-batch of ``tokens`` on a scheme ``among`` those
    given, how this is done in words, and the scheme."""
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
    """What would help a sequence of ``longest`` tokens that needs ``needed`` bytes on ``scheme``,
    the roomiest ``among`` those allowed, which hold ``holds`` tokens at most."""
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
