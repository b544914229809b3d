"""Deals the sequences of a batch to the pipelines of one strategy.

The search of :mod:`headrace.planning.pipelines` deals by pipes, which bracket what the shapes cost
(:mod:`headrace.planning.strategies.pipes`). Of several ways to bracket the most promising are
dealt out; then sequences are packed with the shapes' own layer plans, and moved from the pipeline
that ends last to others while by those seconds that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.choose import ranked
from headrace.planning.pipelines.solution import Solution, solved
from headrace.planning.strategies.pipes import Pipes
from headrace.planning.strategies.schemes import Shape
from headrace.planning.strategies.staged import Load, loaded
from headrace.spec import Strategy

__all__ = ["Dealt", "dealt", "expected_s"]

_BRACKETS = 3
_STEPS = 12
_ROUNDS = 12
_MOVES = 12  # tried in each round
_SWAPS = 20_000  # looked at in each round; with more, sequences are short enough to just move


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """A strategy with every sequence in a micro-batch; ``seconds`` by shapes and formula, without
    the costs' scale."""

    strategy: Strategy
    loads: tuple[Load, ...]

    @property
    def seconds(self) -> float:
        """The last pipeline's."""
        return max(load.seconds for load in self.loads)


def expected_s(
    strategy: Strategy, shapes: Sequence[Shape], lengths: Sequence[int], devices: int
) -> float:
    """What the strategy may come to if sequences could be cut; infinite when it cannot hold
    them."""
    pipes = Pipes.of(shapes, devices, bracketed=False)
    found = ranked(Batch(pipes.world, lengths), pipes.counts(strategy))
    return found[0][0] if found else float("inf")


def dealt(
    strategy: Strategy, shapes: Sequence[Shape], lengths: Sequence[int], devices: int,
    *, roughly: bool = False,
) -> Dealt | None:  # fmt: skip
    """The sequences of ``lengths``, sorted longest first, on the pipelines of a strategy whose
    schemes have ``shapes``; None when it cannot hold them. ``roughly``: without any search."""
    pipes = Pipes.of(shapes, devices)
    batch = Batch(pipes.world, lengths)
    by_scheme = {shape.scheme: shape for shape in shapes}
    found = list[Dealt]()
    for counts in _brackets(batch, pipes, strategy):
        solution = solved(batch, counts, steps=0 if roughly else _STEPS)
        if solution is not None:
            loads = tuple(
                loaded(by_scheme[pipes.owners[k]], batch.tokens, members)
                for k, members in _members(solution)
            )
            found.append(Dealt(strategy=strategy, loads=loads))
    if not found:
        return None
    best = min(found, key=lambda made: made.seconds)
    return best if roughly else _moved(best, batch.tokens)


def _brackets(batch: Batch, pipes: Pipes, strategy: Strategy) -> Iterator[tuple[int, ...]]:
    """The most promising ways to give the pipelines pipes. Roomy ones promise too much: one that
    does not is always among them."""
    order = [counts for _, counts in ranked(batch, pipes.counts(strategy))]
    honest = [counts for counts in order if not _promising(pipes, counts)]
    yield from dict.fromkeys([*order[: _BRACKETS - 1], *honest[:1]])


def _promising(pipes: Pipes, counts: Sequence[int]) -> bool:
    """Whether some pipe is roomier than its plan."""
    every = {pipe.name for pipe in pipes.world.pipes}
    names = [pipe.name for pipe, n in zip(pipes.world.pipes, counts, strict=True) if n]
    return any(f"{name}+quick" in every for name in names)


def _members(solution: Solution) -> Iterator[tuple[int, list[int]]]:
    for k, bins in zip(solution.pipes, solution.micro_batches, strict=True):
        yield k, sorted(i for own in bins for i in own)


def _moved(made: Dealt, tokens: Sequence[int]) -> Dealt:
    """Move sequences, or swap two, out of the pipeline that ends last while that helps."""
    loads = list(made.loads)
    for _ in range(_ROUNDS if len(loads) > 1 else 0):
        last = max(range(len(loads)), key=lambda q: loads[q].seconds)
        change = _change(loads, last, tokens)
        if change is None:
            break
        other, here, there = change
        loads[last], loads[other] = here, there
    return Dealt(strategy=made.strategy, loads=tuple(loads))


def _change(
    loads: Sequence[Load], last: int, tokens: Sequence[int]
) -> tuple[int, Load, Load] | None:
    """The first pair of loads found that ends earlier than ``last`` does now."""
    limit_s = loads[last].seconds * (1 - 1e-9)
    for other, out, back in _exchanges(loads, last, tokens)[:_MOVES]:
        here = [i for i in loads[last].members if i != out] + ([back] if back is not None else [])
        there = [i for i in loads[other].members if i != back] + [out]
        one = loaded(loads[last].shape, tokens, sorted(here))
        if one.seconds < limit_s:
            two = loaded(loads[other].shape, tokens, sorted(there))
            if two.seconds < limit_s:
                return other, one, two
    return None


def _exchanges(
    loads: Sequence[Load], last: int, tokens: Sequence[int]
) -> list[tuple[int, int, int | None]]:
    """(pipeline, sequence to it, sequence back or None) that should help by the seconds of the
    quickest plans, what should end first first."""
    found = list[tuple[float, int, int, int | None]]()
    here = loads[last]
    swaps = len(here.members) * sum(len(load.members) for load in loads) <= _SWAPS
    for other, there in enumerate(loads):
        if other == last:
            continue
        backs: list[int | None] = [None, *(there.members if swaps else ())]
        for out in here.members:
            if tokens[out] > there.shape.most_tokens:
                continue
            for back in backs:
                if back is not None and not _worth(tokens[back], tokens[out], here.shape):
                    continue
                one = here.seconds - _work_s(here.shape, tokens[out])
                two = there.seconds + _work_s(there.shape, tokens[out])
                if back is not None:
                    one += _work_s(here.shape, tokens[back])
                    two -= _work_s(there.shape, tokens[back])
                if max(one, two) < here.seconds * (1 - 1e-6):
                    found.append((max(one, two), other, out, back))
    found.sort(key=lambda item: (item[0], item[1], item[2], -1 if item[3] is None else item[3]))
    return [(other, out, back) for _, other, out, back in found]


def _worth(back: int, out: int, shape: Shape) -> bool:
    """Whether a swap makes sense: a shorter sequence comes back, and it fits."""
    return back < out and back <= shape.most_tokens


def _work_s(shape: Shape, tokens: int) -> float:
    a, b, _ = shape.frontier.rows[0]
    return (a * tokens + b) * tokens
