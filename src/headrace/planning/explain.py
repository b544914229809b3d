"""Why a plan is as it is, in a few short sentences, by the clock that its prediction shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.costs.cost_model import exchange_of
from headrace.errors import InfeasiblePlan
from headrace.planning.bounds import Bound, step_bound_s
from headrace.planning.priced import LayerTable, StageCosts, shares_of
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment
from headrace.planning.tolerances import GAIN, NEAR
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
    """Sentences that explain a plan: what limits it, and how far it is above the bounds.

    Args:
        problem: What was planned for.
        bound: The bound of computing.
        tried: The candidates that were timed, the quickest first: that of the plan.
        plan: The plan.
        static: The best static candidate.
        flat: The bound of only those plans that have neither stages nor tensor blocks; None where
            it is not known.

    Returns:
        Sentences: what binds and how far the plan is above bounds, which pipeline is busiest, what
        the best static plan and the next strategy would take, the layers and what is recomputed,
        idle ranks, and what of the exchange no computation hides (Hydraulis, appendix B.2).
    """
    best = tried[0]
    # Only such steps are simulated, with their exchange; others are timed by formula.
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
    """A time as text, multiplied by the scale of a model's costs."""
    scale = 1.0 if problem.is_published else problem.model.scale
    return seconds_text(seconds * scale)


def _ratio(seconds: float, reference_s: float) -> float:
    """How many times ``reference_s`` a time in seconds is; 1 where the reference is zero."""
    return seconds / reference_s if reference_s > 0 else 1.0


def _gap(problem: Problem, bound: Bound, best: Candidate) -> str:
    """A sentence on how far a plan timed by formula is above its lower bound, and on what sets the
    bound."""
    if bound.exact:
        reason = "no plan of so few sequences is quicker: all were compared"
    elif bound.by_wave:
        reason = (
            "on few devices the longest sequences make a wave longer than what fits into memory "
            "beside them, on many devices they take more device-seconds"
        )
    elif bound.by_longest:
        reason = "the longest sequence is quicker nowhere"
    else:
        reason = (
            "all sequences on the schemes that need the fewest devices keep "
            f"{problem.devices} busy so long"
        )
    gap = percent_text(_ratio(best.seconds, bound.seconds) - 1)
    return f"bound {_text(problem, bound.seconds)}, {gap} above it: {reason}"


def _busiest(best: Candidate) -> str:
    """A sentence on the pipeline that takes longest: its scheme, and its sequences."""
    schedule, table = best.schedule, best.schedule.table
    busiest = max(range(len(schedule.packs)), key=lambda g: schedule.packs[g].seconds)
    k, _, members = schedule.groups[busiest]
    micro_batches = len(schedule.packs[busiest].bins)
    return (
        f"the busiest pipeline is a {table.schemes[k]}: {counted(len(members), 'sequence')} in "
        f"{micro_batches:,} micro-batch{'es' if micro_batches != 1 else ''}, the longest of "
        f"{counted(table.tokens[min(members)], 'token')}"
    )


def _binding(problem: Problem, bound: Bound, best: Candidate, plan: Plan) -> str:
    """A sentence on what limits a model's step: the exchange of weights and gradients, the longest
    sequence, memory, or all work together."""
    costs, batch = problem.model, best.schedule.table.batch
    if (exchange := exchange_of(costs, plan)).total_s > best.schedule.seconds:
        seconds = _text(problem, exchange.total_s)
        return f"bound by pull, push and update: {seconds} of every step"
    if bound.by_longest:
        # Position 0 is the longest sequence.
        scheme = next(k for k, _, members in best.schedule.groups if 0 in members)
        return (
            f"bound by the longest sequence: {batch.tokens[0]:,} tokens take "
            f"{_text(problem, bound.longest_s)} at best, here on "
            f"{best.schedule.table.schemes[scheme]}"
        )
    if plan.working == "sharded" or _recomputing(plan):
        return (
            f"bound by memory: {bytes_text(costs.capacity_bytes)} of a rank, "
            f"{bytes_text(costs.state_bytes)} of it state, weights {plan.working}"
        )
    bound_s = step_bound_s(problem.pricing.costs, bound)
    return (
        f"bound by the total work: it keeps {counted(problem.devices, 'rank')} busy for "
        f"{_text(problem, bound_s)}, exchange included"
    )


def _flat(problem: Problem, bound: Bound, flat: Bound, best: Candidate) -> str | None:
    """A clause on what ``flat``, the bound of plans without stages and tensor blocks, says of the
    plan, and what ``bound``, that of all plans, leaves out; None where the gap to ``flat`` is not
    clearly smaller than the one to ``bound``."""
    unscaled = problem.pricing.costs
    gap, flat_gap = (
        _ratio(best.seconds, step_bound_s(unscaled, each)) - 1 for each in (bound, flat)
    )
    if flat_gap > gap - NEAR:
        return None
    if flat_gap < 0:
        times = _ratio(1.0, 1 + flat_gap)
        text = f"plans without stages and tensor blocks take at least {times:.4g}x"
    else:
        text = f"at most {percent_text(flat_gap)} above any plan without stages and tensor blocks"
    return f"; {text}; the lower bound lets stages run without waiting for each other"


def _static(problem: Problem, best: Candidate, static: Candidate) -> str:
    """A sentence on the best static plan and its seconds, or that the plan itself is the best
    static one."""
    scheme = str(static.schedule.table.schemes[static.schedule.groups[0][0]])
    text = f"{scheme} everywhere, {_text(problem, static.seconds)}"
    if static is best:
        return f"the best static plan: {text}"
    return f"best static: {text} ({_ratio(static.seconds, best.seconds):.3g}x)"


def _next(problem: Problem, tried: Sequence[Candidate], static: Candidate | None) -> str | None:
    """A sentence on the next quickest candidate of another strategy, other than the static plan;
    None where there is none."""
    best = tried[0]
    for other in tried[1:]:
        if other is static or other.schedule.strategy == best.schedule.strategy:
            continue
        slower = _ratio(other.seconds, best.seconds) - 1
        how_much = f"+{percent_text(slower)}" if slower >= GAIN else "as fast"
        names = other.schedule.names
        return f"next strategy: {names}, {_text(problem, other.seconds)} ({how_much})"
    return None


def _layers(problem: Problem, plan: Plan) -> str | None:
    """A sentence on the most frequent layer plan of each group width at which the problem left a
    choice of methods; None without any."""
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
    """(layer plan, number of its micro-batches) by stage width and identity of the layer plan.
    Equal plans may have several entries, as comparing the layers of all plans would take longer."""
    found: dict[tuple[int, int], tuple[LayerPlan, int]] = {}
    for micro in plan.micro_batches:
        key = plan.pipelines[micro.pipeline].scheme.width, id(micro.layers)
        found[key] = micro.layers, found.get(key, (micro.layers, 0))[1] + 1
    return found


def _recomputing(plan: Plan) -> Counter[str]:
    """For each recompute level other than ``none``, how many micro-batches have layers that
    recompute at that level."""
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
    """A sentence on how many ranks have no work; None where all have some."""
    idle = plan.devices - len({rank for p in plan.pipelines for rank in p.ranks})
    if not idle:
        return None
    return f"{idle} of {counted(plan.devices, 'rank')} {'is' if idle == 1 else 'are'} idle"


def _exposed(problem: Problem, best: Candidate) -> str | None:
    """A sentence on the seconds of the step that are neither computing nor the update, so in which
    ranks wait for weights or gradients; None where they are few."""
    waits_s = best.seconds - best.schedule.seconds - problem.model.exchange_s.update_s
    if waits_s <= NEAR * best.seconds:
        return None
    return (
        f"{_text(problem, waits_s)} of moving weights and gradients, "
        f"{percent_text(waits_s / best.seconds)} of the step, are not hidden: few tokens for so "
        "many weights"
    )


def require_fit(problem: Problem, longest: int, index: int) -> None:
    """Raise InfeasiblePlan when sequence ``index``, the ``longest``, fits no pipeline."""
    _require_positions(problem, longest, index)
    pricing = problem.pricing
    if problem.planner == "static":  # it has no other schemes than groups
        sizes = problem.group_sizes if problem.static_size is None else (problem.static_size,)
        _require(problem, [Scheme(context=p) for p in sizes], longest, index)
        return
    # The usual case first: pricing all other schemes takes longer.
    for weights in problem.holding:
        if any(priced.most_tokens >= longest for priced in pricing.groups(weights)):
            return
    _require(problem, pricing.schemes(), longest, index)


def require_lockstep(problem: Problem, longest: int, index: int) -> None:
    """Raise InfeasiblePlan when sequence ``index``, the ``longest``, fits no group in lockstep,
    where weights are gathered layer by layer from the whole world."""
    _require_positions(problem, longest, index)
    priced = problem.pricing.lockstep()
    holds = max((scheme.most_tokens for scheme in priced), default=0)
    if holds < longest:
        raise InfeasiblePlan(
            f"{_name(index, longest)} does not fit",
            got=counted(longest, "token"),
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
    """Raise InfeasiblePlan when sequence ``index`` of ``longest`` tokens has more tokens than the
    model has positions."""
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
    return f"sequence {index} of {counted(longest, 'token')}"


def _most_tokens(problem: Problem, schemes: Iterable[Scheme]) -> int:
    """The longest sequence, in tokens, that one of the schemes holds; 0 when they hold nothing."""
    found = [problem.pricing.price(scheme, w) for scheme in schemes for w in problem.holding]
    return max((priced.most_tokens for priced in found if priced is not None), default=0)


def _most_of(problem: Problem, strategy: Strategy) -> int:
    """Tokens of the longest sequence that some pipeline of a strategy holds, with weights held in
    any allowed way; 0 where in each way one of its pipelines holds nothing."""
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
    problem: Problem, schemes: Sequence[Scheme], longest: int, index: int, holds: int
) -> None:
    """Raise InfeasiblePlan for sequence ``index`` of ``longest`` tokens, which fits none of
    ``schemes``: these hold at most ``holds`` tokens. The error says by how many bytes the sequence
    exceeds the roomiest scheme and what helps."""
    needed, how, roomiest = _least_bytes(problem, schemes, longest)
    capacity = problem.model.capacity_bytes
    raise InfeasiblePlan(
        f"{_name(index, longest)} does not fit",
        got=f"{bytes_text(needed)} on {how}",
        wanted=f"at most {bytes_text(capacity)} ({needed - capacity:,} bytes less)",
        hint=", or ".join(_ways_out(problem, schemes, roomiest, needed, longest, holds)),
    )


def _least_bytes(
    problem: Problem, schemes: Iterable[Scheme], tokens: int
) -> tuple[int, str, Scheme]:
    """The fewest bytes of a rank's memory with which any of ``schemes`` holds a micro-batch of
    ``tokens`` tokens, over all layer plans and ways to hold weights. Returns (these bytes, the way
    in words, its scheme)."""
    ways = list[tuple[int, Scheme, str]]()
    capacity = problem.model.capacity_bytes
    for scheme in schemes:
        plans = tuple(problem.pricing.layer_plans(scheme))
        weights: tuple[Working, ...] = problem.holding if scheme.context > 1 else ("replicated",)
        for working in weights:
            table = LayerTable.of(problem.pricing.costs, scheme, working, plans)
            for shares in shares_of(problem.model.shape.layers, scheme.pipeline):
                stage_costs = StageCosts(
                    costs=problem.pricing.costs,
                    scheme=scheme,
                    shares=shares,
                    working=working,
                    table=table,
                )
                for number, plan in enumerate(plans):
                    layers = str(plan.options[0]) if len(plan.counts) == 1 else str(plan)
                    how = f"{scheme} with {layers} and {working} weights"
                    lacking = stage_costs.needs(number, tokens)  # below 0 where bytes are left
                    ways.append((capacity + lacking, scheme, how))
    needed, scheme, how = min(ways)
    return needed, how, scheme


def _ways_out(
    problem: Problem, among: Sequence[Scheme], scheme: Scheme, needed: int, longest: int, holds: int
) -> list[str]:
    """Texts on what would help a sequence of ``longest`` tokens that needs ``needed`` bytes on
    ``scheme``, the roomiest of the allowed schemes ``among``, which hold at most ``holds``
    tokens."""
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
    # What is there before any sequence: the bytes with a single token.
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
