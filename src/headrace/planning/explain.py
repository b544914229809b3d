"""Why a plan is as it is, in a few short sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planning.bounds import Bound
from headrace.planning.problem import Problem
from headrace.planning.sizing import Batch
from headrace.planning.solution import Solution
from headrace.units import bytes_text, percent_text, seconds_text

__all__ = ["Candidate", "reasons"]

_SAME = 1e-9  # relative difference below which two candidates cost the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A solution that was considered, with a name for people."""

    solution: Solution
    name: str


def reasons(
    problem: Problem,
    batch: Batch,
    bound: Bound,
    candidates: Sequence[Candidate],
    static: Solution,
) -> tuple[str, ...]:
    """Two to five reasons for the first of ``candidates`` (best first): what binds, what the best
    static plan would cost, the runner-up, the methods where there was a choice, and what is
    recomputed."""
    best = candidates[0].solution
    texts = [_binding(problem, batch, bound, best), _static(problem, best, static)]
    runner_up = _runner_up(problem, candidates, static)
    if runner_up:
        texts.append(runner_up)
    layers = _layers(problem, best)
    if layers:
        texts.append(layers)
    texts.append(_recomputed(best))
    return tuple(texts)


def _step_s(problem: Problem, seconds: float) -> float:
    """A step's seconds from those between pull and push."""
    return (seconds + problem.costs.exchange_s.total_s) * problem.costs.scale


def _ratio(there_s: float, here_s: float) -> float:
    return there_s / here_s if here_s > 0 else 1.0


def _binding(problem: Problem, batch: Batch, bound: Bound, best: Solution) -> str:
    costs = problem.costs
    if costs.exchange_s.total_s > best.seconds:
        seconds = seconds_text(costs.exchange_s.total_s * costs.scale)
        return f"bound by pull, push and update: {seconds} of every step"
    if bound.longest_s >= bound.work_s:
        block = next(block for block, held in best.members.items() if 0 in held)
        return (
            f"bound by the longest sequence: {batch.tokens[0]:,} tokens take "
            f"{seconds_text(bound.longest_s * costs.scale)} at best, here on cp{block[0]}"
        )
    if best.arena.working == "sharded" or _recomputing(best):
        return (
            f"bound by memory: {bytes_text(costs.capacity_bytes)} of a rank, "
            f"{bytes_text(costs.state_bytes)} of it state, weights {best.arena.working}"
        )
    return (
        f"bound by the total work: {seconds_text(bound.work_s * costs.scale)} "
        f"on each of {problem.devices} ranks"
    )


def _static(problem: Problem, best: Solution, static: Solution) -> str:
    here_s, there_s = _step_s(problem, best.seconds), _step_s(problem, static.seconds)
    size = min(static.arena.sizes)
    ratio = _ratio(there_s, here_s)
    return f"best static: cp{size} everywhere, {seconds_text(there_s)} ({ratio:.3g}x)"


def _runner_up(problem: Problem, candidates: Sequence[Candidate], static: Solution) -> str | None:
    """The next candidate that differs in its groups, and is not the static plan named before."""
    best_s, named = candidates[0].solution.seconds, {candidates[0].name, str(static.strategy)}
    for candidate in candidates[1:]:
        other_s = candidate.solution.seconds
        if candidate.name not in named and other_s > best_s * (1 + _SAME):
            here_s, there_s = _step_s(problem, best_s), _step_s(problem, other_s)
            return (
                f"runner-up: {candidate.name}, {seconds_text(there_s)} "
                f"(+{percent_text(_ratio(there_s, here_s) - 1)})"
            )
    return None


def _layers(problem: Problem, best: Solution) -> str | None:
    """The layers of the micro-batches on every size where methods could be chosen, the most
    frequent of them."""
    texts = list[str]()
    for p in sorted({p for p, _ in best.packs}):
        if len({(o.attention, o.feed_forward) for o in problem.options[p]}) > 1:
            frontier = best.arena.frontiers[p]
            used = Counter(
                str(frontier.layer_plan(index))
                for (size, _), packed in best.packs.items()
                if size == p
                for index in packed.plans
            )
            most, count = min(used.items(), key=lambda item: (-item[1], item[0]))
            share = "" if len(used) == 1 else f" in {count} of {used.total()}"
            texts.append(f"cp{p} {most}{share}")
    return f"layers: {', '.join(texts)}" if texts else None


def _recomputing(best: Solution) -> dict[str, int]:
    """How many micro-batches have layers of each level that recompute."""
    counts = dict[str, int]()
    for (p, _), packed in best.packs.items():
        for index in packed.plans:
            levels = {o.recompute for o in best.arena.frontiers[p].layer_plan(index).options}
            for level in sorted(levels - {"none"}):
                counts[level] = counts.get(level, 0) + 1
    return counts


def _recomputed(best: Solution) -> str:
    counts = _recomputing(best)
    if not counts:
        return "nothing is recomputed: everything fits"
    texts = ", ".join(f"{level} in {count}" for level, count in sorted(counts.items()))
    micro_batches = sum(len(packed.plans) for packed in best.packs.values())
    return f"recomputes to fit memory: {texts} of {micro_batches} micro-batches"
