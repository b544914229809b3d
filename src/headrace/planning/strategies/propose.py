"""Which strategies are worth trying in every step, from batches that were sampled.

On few ranks all strategies that fill them are few: every multiset of schemes is scored by what the
samples would take if sequences could be cut, and those that do best are dealt out. On more, or
where schemes are many, the proposal of :mod:`headrace.planning.pipelines` searches. Which lengths
come decides which schemes are roomy enough, so each is done for the samples as they are and cut off
at the rooms of the schemes. Strategies of one scheme are candidates too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.fluid import fluid
from headrace.planning.pipelines.proposal import propose
from headrace.planning.pipelines.world import Counts
from headrace.planning.problem import Problem
from headrace.planning.strategies.dealing import dealt, expected_s
from headrace.planning.strategies.pipes import Pipes
from headrace.planning.strategies.schemes import Schemes, Shape
from headrace.spec import Scheme, Strategy
from headrace.spec.plan import Working

__all__ = ["homogeneous", "propose_strategies"]

_RANKS = 8
_FILLINGS = 600  # strategies that are enumerated at most
_SAMPLES = 4
_SHORTEST = 0.5  # of the sequences: a room that cuts off more is not met
_DEALT = 24
_KEPT = 12
_KEPT_OF_EACH = 3
_ALIKE = 40  # strategies of one scheme; of more only some are candidates
_BEST_ALIKE = 12
_BEST_OF_EACH = 2
_CLASSES = 6
# On many ranks schemes are worth a search that for sequences of these quantiles are among so many.
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
_CHEAPEST = 3
_QUICKEST = 2


def propose_strategies(
    problem: Problem,
    sampled: Sequence[Sequence[int]],
    seed: int = 0,
    *,
    schemes: Schemes | None = None,
) -> tuple[Strategy, ...]:
    """Candidates from the lengths of sampled batches: those of one scheme (of many only the best,
    and the roomiest), then the best found. Deterministic; ``seed`` draws which samples a search
    looks at."""
    schemes = schemes or Schemes(problem)
    found = dict.fromkeys(_of_one_scheme(schemes, sampled))
    workings: tuple[Working, ...] = problem.holding
    for working in workings:
        shapes = [
            shape
            for scheme in schemes.supported()
            if (shape := schemes.shape(scheme, working)) is not None
        ]
        fitting = [lengths for lengths in sampled if _fits(shapes, max(lengths))]
        if fitting:
            found.update(dict.fromkeys(_proposed(schemes, shapes, fitting, seed)))
        most = max((sum(lengths) for lengths in fitting), default=0)
        if fitting and all(shape.frontier.caps[0] >= most for shape in shapes):
            break  # memory does not bind: shards would only cost gathers
    return tuple(found)


def homogeneous(schemes: Schemes) -> Iterator[Strategy]:
    """As many pipelines of one scheme as there is room for, of every scheme that holds a token."""
    for scheme in schemes.supported():
        if any(schemes.shape(scheme, working) for working in schemes.problem.holding):
            yield Strategy(counts=((scheme, schemes.devices // scheme.devices),))


def _of_one_scheme(schemes: Schemes, sampled: Sequence[Sequence[int]]) -> Sequence[Strategy]:
    every = list(homogeneous(schemes))
    if len(every) <= _ALIKE:
        return every
    shapes = [shape for strategy in every for shape in _shapes(schemes, strategy)]
    table = [
        [_least_s(schemes, strategy, lengths) for strategy in every]
        for lengths in _classes(shapes, sampled)
    ]
    kept = _order(table, len(every))[:_BEST_ALIKE]
    for row in table:
        kept += sorted(range(len(every)), key=row.__getitem__)[:_BEST_OF_EACH]
    kept.append(max(range(len(every)), key=lambda i: _most_tokens(schemes, every[i])))
    return [every[i] for i in dict.fromkeys(kept)]


def _least_s(schemes: Schemes, strategy: Strategy, lengths: Sequence[int]) -> float:
    """What a strategy may come to with weights held in the better way."""
    found = [inf]
    for working in schemes.problem.holding:
        shapes = schemes.shapes(strategy, working)
        if shapes is not None:
            found.append(expected_s(strategy, shapes, lengths, schemes.devices))
    return min(found)


def _shapes(schemes: Schemes, strategy: Strategy) -> Iterator[Shape]:
    for working in schemes.problem.holding:
        yield from schemes.shapes(strategy, working) or ()


def _most_tokens(schemes: Schemes, strategy: Strategy) -> int:
    return max((shape.most_tokens for shape in _shapes(schemes, strategy)), default=0)


def _fits(shapes: Sequence[Shape], longest: int) -> bool:
    return any(shape.most_tokens >= longest for shape in shapes)


def _proposed(
    schemes: Schemes, shapes: Sequence[Shape], sampled: Sequence[Sequence[int]], seed: int
) -> Iterator[Strategy]:
    devices = schemes.devices
    every = list(_fillings([shape.scheme for shape in shapes], devices))
    if devices <= _RANKS and every:
        yield from _best(every, shapes, _classes(shapes, sampled), devices)
        return
    pipes = Pipes.of(_worthwhile(shapes, sampled), devices)
    for counts in propose(pipes.world, sampled, seed).candidates:
        strategy = pipes.strategy(counts)
        if len(strategy.counts) > 1:
            yield strategy


def _worthwhile(shapes: Sequence[Shape], sampled: Sequence[Sequence[int]]) -> list[Shape]:
    """Shapes that for some length need the fewest device-seconds, or are quickest, or nearly."""
    every = sorted(tokens for lengths in sampled for tokens in lengths)
    found = dict[int, None]()
    for quantile in _QUANTILES:
        tokens = every[round(quantile * (len(every) - 1))]
        holding = [i for i, shape in enumerate(shapes) if shape.most_tokens >= tokens]
        busy = sorted(holding, key=lambda i: (shapes[i].scheme.devices * _alone_s(shapes[i], tokens)
                                              / shapes[i].scheme.pipeline, i))  # fmt: skip
        quick = sorted(holding, key=lambda i: (_alone_s(shapes[i], tokens), i))
        found.update(dict.fromkeys([*busy[:_CHEAPEST], *quick[:_QUICKEST]]))
    return [shapes[i] for i in sorted(found)]


def _alone_s(shape: Shape, tokens: int) -> float:
    """Seconds of a sequence in a pipeline of its own."""
    best = shape.frontier.best(tokens**2, tokens)
    assert best is not None, "it holds the sequence"
    return shape.scheme.pipeline * best[0]


def _fillings(schemes: Sequence[Scheme], devices: int) -> Iterator[Strategy]:
    """All multisets of schemes with so many ranks; none when they are too many."""
    found = list[list[Scheme]]()

    def fill(some: list[Scheme], first: int, left: int) -> None:
        if not left:
            found.append(some)
        for at in range(first, len(schemes)) if len(found) <= _FILLINGS else ():
            if schemes[at].devices <= left:
                fill([*some, schemes[at]], at, left - schemes[at].devices)

    fill([], 0, devices)
    if len(found) <= _FILLINGS:
        yield from map(Strategy.of, found)


def _classes(shapes: Sequence[Shape], sampled: Sequence[Sequence[int]]) -> list[list[int]]:
    """Samples longest first, whole, and the first also cut off at every room that changes what
    fits, and without its longest tenth."""
    found = [sorted(lengths, reverse=True) for lengths in sampled[:_SAMPLES]]
    first = found[0]
    rooms = sorted({shape.most_tokens for shape in shapes if shape.most_tokens < first[0]})
    for room in {*rooms[:: max(1, len(rooms) // _CLASSES)], first[len(first) // 10]}:
        short = [tokens for tokens in first if tokens <= room]
        if _SHORTEST * len(first) <= len(short) < len(first):
            found.append(short)
    return sorted(found, key=lambda lengths: (-lengths[0], lengths))


def _best(
    every: Sequence[Strategy], shapes: Sequence[Shape], samples: Sequence[Sequence[int]],
    devices: int,
) -> Iterator[Strategy]:  # fmt: skip
    """Those with the least seconds over all samples that they hold, and for each sample."""
    pipes = Pipes.of(shapes, devices, bracketed=False)
    table = list[list[float]]()
    counts = [pipes.counts(strategy)[0] for strategy in every]
    for lengths in samples:
        batch = Batch(pipes.world, lengths)
        table.append([_promised_s(batch, some) for some in counts])
    order = _order(table, len(every))
    dealing = order[:_DEALT]
    real = [[_dealt_s(every[i], shapes, lengths, devices) for i in dealing] for lengths in samples]
    kept = [dealing[k] for k in _order(real, len(dealing))[:_KEPT]]
    for row in real:
        best = sorted(range(len(dealing)), key=row.__getitem__)[:_KEPT_OF_EACH]
        kept += [dealing[k] for k in best]
    for i in dict.fromkeys(kept):
        yield every[i]


def _promised_s(batch: Batch, counts: Counts) -> float:
    return fluid(batch, counts).seconds


def _dealt_s(
    strategy: Strategy, shapes: Sequence[Shape], lengths: Sequence[int], devices: int
) -> float:
    own = [shape for shape in shapes if shape.scheme in dict(strategy.counts)]
    found = dealt(strategy, own, lengths, devices, roughly=True)
    return inf if found is None else found.seconds


def _order(table: Sequence[Sequence[float]], count: int) -> list[int]:
    """Columns by how much longer than the best of a row they take, on average; those that hold
    fewer rows last."""
    least = [min(row) for row in table]

    def key(i: int) -> tuple[int, float, int]:
        ratios = [row[i] / best if best > 0 else 1.0 for row, best in zip(table, least, strict=True)
                  if row[i] < inf]  # fmt: skip
        return len(table) - len(ratios), sum(ratios) / len(ratios) if ratios else inf, i

    return sorted(range(count), key=key)
