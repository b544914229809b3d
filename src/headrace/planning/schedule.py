"""A schedule: pipelines on ranks, with their sequences in micro-batches.

Pipelines stand in the order in which their ranks run them, larger ones first. Pipelines side by
side share no ranks; nested ones lie one in another, so that short sequences fill the gaps that long
ones leave. When they start, by the semantics:

    free      a pipeline starts when the last of its ranks is free
    lockstep  the i-th pipeline of every rank starts together with every other i-th: ranks that
              share one wait until all of them have come to it, and each step lasts as long as its
              slowest pipeline

A schedule may be made launch by launch, each a group with one micro-batch, and it may have several
phases, one after the other, with other pipelines on the same ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import mul

from headrace.planning.batch import Packed, PriceTable
from headrace.planning.packing import pack
from headrace.spec import Strategy
from headrace.spec.plan import Semantics

__all__ = [
    "Assignment",
    "Group",
    "expected_s",
    "launch_s",
    "launched",
    "placed",
]

Group = tuple[int, tuple[int, ...], list[int]]
"""A pipeline: (number of its scheme in the table, its ranks, positions of its sequences). The
position of a sequence is its place in the batch, longest first."""

_Bins = tuple[int, tuple[int, ...], list[list[int]]]
"""A pipeline whose sequences are in micro-batches already: (number of its scheme in the table, its
ranks, positions of the sequences of each micro-batch)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """A schedule: pipelines on ranks, their sequences packed into micro-batches.

    Attributes:
        table: The prices it was made with.
        groups: Its pipelines: scheme, ranks, sequences.
        packs: The micro-batches of each.
        seconds: Until the last rank has nothing left to compute, if all weights are there at once;
            without the costs' scale.
        expected_s: Estimated seconds until all ranks have sent their gradients.
        source: What made it, by name.
        semantics: When its pipelines start.
        phases: Schedules of parts of the batch, one after the other, where it has several.
        switch_s: Seconds of ``seconds`` that changes between phases take.
    """

    table: PriceTable
    groups: tuple[Group, ...]
    packs: tuple[Packed, ...]
    seconds: float
    expected_s: float
    source: str
    semantics: Semantics = "free"
    phases: tuple[Assignment, ...] = ()
    switch_s: float = 0.0

    @classmethod
    def of(cls, table: PriceTable, groups: Iterable[Group], source: str) -> Assignment:
        """The schedule of pipelines that run in this order, packed exactly; those without
        sequences are left out.

        Args:
            table: The prices.
            groups: The pipelines, each with its sequences longest first.
            source: What made them, by name.
        """
        order = tuple(group for group in groups if group[2])
        packs = tuple(pack(table, k, members) for k, _, members in order)
        seconds, expected = _ends(table, order, packs)
        return cls(
            table=table,
            groups=order,
            packs=packs,
            seconds=seconds,
            expected_s=expected,
            source=source,
        )

    @classmethod
    def of_launches(
        cls,
        table: PriceTable,
        launches: Iterable[Group],
        source: str,
        semantics: Semantics = "free",
    ) -> Assignment:
        """The schedule of micro-batches that are issued one by one. With free semantics,
        micro-batches of one group between which its ranks did nothing else are joined to one
        pipeline.

        Args:
            table: The prices.
            launches: The micro-batches in order, each a group that its scheme holds at once.
            source: What made them, by name.
            semantics: When they start.
        """
        one_pack_each = ((k, ranks, [members]) for k, ranks, members in launches)
        pipelines = _joined(one_pack_each) if semantics == "free" else one_pack_each
        return cls.of_bins(table, pipelines, source, semantics)

    @classmethod
    def of_bins(
        cls, table: PriceTable, given: Iterable[_Bins], source: str, semantics: Semantics = "free"
    ) -> Assignment:
        """The schedule of pipelines whose sequences are packed already.

        Args:
            table: The prices.
            given: The pipelines in order; those without micro-batches are left out.
            source: What made them, by name.
            semantics: When they start.
        """
        used = [(k, ranks, bins) for k, ranks, bins in given if bins]
        packs = tuple(_timed(table, k, bins) for k, _, bins in used)
        groups = tuple((k, ranks, sorted(chain.from_iterable(bins))) for k, ranks, bins in used)
        if semantics == "free":
            seconds, expected = _ends(table, groups, packs)
        else:
            seconds = expected = _lockstep_s(table.devices, groups, packs)
        return cls(
            table=table,
            groups=groups,
            packs=packs,
            seconds=seconds,
            expected_s=expected,
            source=source,
            semantics=semantics,
        )

    @property
    def strategy(self) -> Strategy:
        """The schemes of all pipelines."""
        return Strategy.of(self.table.schemes[k].scheme for k, _, _ in self.groups)

    @property
    def names(self) -> str:
        """The strategy in the scheme names of the costs, like ``1*tp16 + 6*tp8``, larger pipelines
        first."""
        counts: dict[int, int] = {}
        for k, _, _ in self.groups:
            counts[k] = counts.get(k, 0) + 1
        order = sorted(counts, key=lambda k: (-self.table.width[k], k))
        return " + ".join(f"{counts[k]}*{self.table.schemes[k]}" for k in order)


def _joined(pipelines: Iterable[_Bins]) -> list[_Bins]:
    """Join pipelines of equal scheme and ranks where none of these ranks did something else between
    them; for groups that start when they are free the clock is the same."""
    joined, last_of_rank = list[_Bins](), dict[int, int]()
    for k, ranks, bins in pipelines:
        # The pipelines that its ranks ran last: to be joined to it there must be a single one.
        previous = {last_of_rank.get(rank) for rank in ranks}
        pipeline = previous.pop()
        if pipeline is not None and not previous and joined[pipeline][:2] == (k, ranks):
            joined[pipeline][2].extend(bins)
            continue
        last_of_rank |= dict.fromkeys(ranks, len(joined))
        joined.append((k, ranks, list(bins)))
    return joined


def _ends(
    table: PriceTable, groups: Sequence[Group], packs: Sequence[Packed]
) -> tuple[float, float]:
    """(seconds until the last rank has computed if all weights are there at once, estimated seconds
    until all ranks have sent their gradients)."""
    chains = table.chained(ranks for _, ranks, _ in groups)
    free_s = max(chains.free_s((0.0, packed.seconds, 0.0) for packed in packs), default=0.0)
    if not table.estimates:
        return free_s, free_s
    times = [table.times(k, packed) for (k, _, _), packed in zip(groups, packs, strict=True)]
    return free_s, max(chains.sent_s(times).values(), default=0.0)


def expected_s(table: PriceTable, groups: Sequence[Group], packs: Sequence[Packed]) -> float:
    """Estimated seconds until all ranks have sent their gradients, if pipelines run in the order of
    ``groups``, with the micro-batches ``packs``."""
    return _ends(table, groups, packs)[1]


def _lockstep_s(devices: int, groups: Iterable[Group], packs: Iterable[Packed]) -> float:
    """Seconds until the last rank is free in lockstep: the i-th pipelines of all ranks start
    together, and each such step takes as long as its slowest pipeline."""
    steps_done, step_s = [0] * devices, list[float]()
    for (_, ranks, _), packed in zip(groups, packs, strict=True):
        seconds = packed.seconds
        step = max([steps_done[rank] for rank in ranks])
        if step == len(step_s):
            step_s.append(seconds)
        else:
            step_s[step] = max(step_s[step], seconds)
        for rank in ranks:
            steps_done[rank] = step + 1
    return sum(step_s)


def launch_s(table: PriceTable, k: int, members: Sequence[int]) -> float:
    """Seconds of one micro-batch of the sequences ``members`` on one stage of scheme k, by the
    quickest row that holds it."""
    scheme = table.schemes[k]
    if len(scheme.frontier.caps) == 1:
        seconds = table.seconds(k)
        return sum([seconds[i] for i in members]) + table.c[k]
    found = scheme.frontier.best(*_sums(table, members))
    assert found is not None, "a scheme holds its micro-batches"
    seconds_of_row, _ = found
    return seconds_of_row


def _sums(table: PriceTable, members: Sequence[int]) -> tuple[int, int]:
    """(sum of squared tokens, sum of tokens) of the sequences of a micro-batch."""
    tokens = [table.tokens[i] for i in members]
    return sum(map(mul, tokens, tokens)), sum(tokens)


def _timed(table: PriceTable, k: int, bins: Sequence[Sequence[int]]) -> Packed:
    """The micro-batches ``bins`` of a pipeline of scheme k, each with the quickest frontier row
    that holds it and its seconds."""
    frontier, sums = table.schemes[k].frontier, [_sums(table, members) for members in bins]
    choices = [frontier.best(squares, tokens) for squares, tokens in sums]
    best = [choice for choice in choices if choice is not None]
    assert len(best) == len(choices), "a scheme holds its micro-batches"
    rows, times = [row for _, row in best], [seconds for seconds, _ in best]
    return Packed.of(bins, rows, times, table.depth[k])


def placed(table: PriceTable, pipelines: Iterable[tuple[int, list[int]]]) -> list[Group]:
    """Put pipelines side by side on ranks from the first: wide tensor blocks first, and among
    equals large pipelines; so blocks start at multiples of their width wherever widths divide one
    another.

    Args:
        table: The prices.
        pipelines: (scheme, sequences) of each pipeline.

    Returns:
        The pipelines with their ranks.
    """
    first, groups = 0, list[Group]()
    schemes = [priced.scheme for priced in table.schemes]
    order = sorted(
        pipelines,
        key=lambda item: (-schemes[item[0]].tensor, -schemes[item[0]].devices, item[0]),
    )
    for k, members in order:
        width = table.width[k]
        groups.append((k, tuple(range(first, first + width)), members))
        first += width
    return groups


def launched(schedule: Assignment) -> Assignment:
    """A schedule in lockstep, made of one of pipelines side by side without stages: micro-batches
    are issued one by one, the longest of every pipeline before the second longest of any."""
    table = schedule.table
    # (number of the micro-batch in its pipeline, ranks, launch), to be sorted by the first two.
    launches = list[tuple[int, tuple[int, ...], Group]]()
    for (k, ranks, _), packed in zip(schedule.groups, schedule.packs, strict=True):
        seconds = table.seconds(k)
        longest_first = sorted(
            map(list, packed.bins),
            key=lambda members: (-sum([seconds[i] for i in members]), members[0]),
        )
        launches += [
            (number, ranks, (k, ranks, members)) for number, members in enumerate(longest_first)
        ]
    launches.sort(key=lambda item: item[:2])
    return Assignment.of_launches(
        table, [launch for _, _, launch in launches], schedule.source, "lockstep"
    )
