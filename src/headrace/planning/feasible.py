"""Whether a batch can be planned at all, and if not, what would help."""

from __future__ import annotations

import math
from typing import get_args

from headrace.errors import InfeasiblePlan
from headrace.planning.problem import Problem
from headrace.planning.sizing import Batch, SizeTable
from headrace.spec.plan import Working
from headrace.units import bytes_text

__all__ = ["require_fit", "widest_table"]


def widest_table(problem: Problem, batch: Batch) -> SizeTable:
    """What every sequence costs at least, over both ways to hold weights, with no other size on
    its ranks: the table of the bound. Raises InfeasiblePlan when a sequence fits nowhere."""
    require_fit(problem, batch)
    arenas = [
        problem.arena(working, problem.group_sizes, mixed=False) for working in get_args(Working)
    ]
    return SizeTable.least([SizeTable.of(arena.frontiers, batch) for arena in arenas])


def require_fit(problem: Problem, batch: Batch, p: int | None = None) -> None:
    """Raise InfeasiblePlan when the longest sequence fits no group (or not one of p ranks)."""
    longest, index = batch.tokens[0], batch.order[0]
    name = f"sequence {index} of {longest:,} tokens"
    limit = problem.costs.shape.longest
    if limit is not None and longest > limit:
        raise InfeasiblePlan(
            name, got=f"{longest:,} positions", wanted=f"at most the model's {limit:,}",
            hint=f"a context of {limit:,}, or a model with more positions",
        )  # fmt: skip
    sizes = problem.group_sizes if p is None else (p,)
    holds = _most_tokens(problem, sizes)
    if holds >= longest:
        return
    needed, where, size = _least_bytes(problem, longest, sizes)
    capacity = problem.costs.capacity_bytes
    raise InfeasiblePlan(
        f"{name} does not fit",
        got=f"{bytes_text(needed)} on {where}",
        wanted=f"at most {bytes_text(capacity)} ({needed - capacity:,} bytes less)",
        hint=", or ".join(_ways_out(problem, longest, holds, needed, size)),
    )


def _most_tokens(problem: Problem, sizes: tuple[int, ...]) -> int:
    arenas = (problem.arena(working, sizes, mixed=False) for working in get_args(Working))
    return max(arena.most_tokens for arena in arenas)


def _least_bytes(problem: Problem, tokens: int, sizes: tuple[int, ...]) -> tuple[int, str, int]:
    """The thriftiest way to hold a sequence: (bytes, in words, group size)."""
    costs, found = problem.costs, list[tuple[int, int, str]]()
    for p in sizes:
        for layers in problem.uniform_layers(p):
            name = str(layers.options[0]) if len(layers.counts) == 1 else str(layers)
            for working in get_args(Working):
                needed = costs.micro_batch_bytes(tokens, p, layers, working)
                found.append((needed, p, f"cp{p} with {name} and {working} weights"))
    needed, p, where = min(found)
    return needed, where, p


def _ways_out(problem: Problem, longest: int, holds: int, needed: int, size: int) -> list[str]:
    costs, ways = problem.costs, list[str]()
    fixed, _, _ = _least_bytes(problem, 1, (size,))
    room = costs.capacity_bytes - fixed
    if "full" not in {option.recompute for option in problem.options[size]}:
        ways.append("recompute 'full'")
    if room > 0:
        # A rank's activations shrink with the group; its state is taken to stay.
        ranks = math.ceil(size * (needed - fixed) / room)
        ways.append(f"about {max(ranks, size + 1)} ranks in a group")
    if holds:
        ways.append(f"a context of at most {holds:,} tokens")
    else:
        ways.append(f"a smaller model: {bytes_text(fixed)} are needed before any sequence")
    assert longest > holds, "asked only when it does not fit"
    return ways
