"""Several homogeneous strategies in turn for every batch, as HotSPa does.

Sequences of a range of lengths run on the strategy of that range; then the model is brought into
the layout of the next, which takes time. Ranges are cut at 4K and 16K tokens, or at one of them, or
not at all (Hydraulis, appendix G); what is best over all batches is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from headrace.errors import InfeasiblePlan
from headrace.planners.homogeneous import BatchPlanner, best_scheme
from headrace.planning.batch import Packed, PriceTable, SortedBatch
from headrace.planning.schedule import Assignment, Group
from headrace.planning.static import static_schedule
from headrace.spec import Lengths

__all__ = ["sequences_of", "switch_s", "switching"]

_CUTS = ((), (4096,), (16384,), (4096, 16384))  # tokens at which lengths are cut into ranges

# (parameters, seconds of one change) of two models. Hydraulis, table 4: an iteration with three
# strategies, two changes, spends 1.54 s on them with 7B parameters and 2.19 s with 32B. Layers have
# 12 h^2 parameters: 32 layers with h = 4096, and 60 with 6656.
_MEASURED = ((12 * 32 * 4096**2, 1.54 / 2), (12 * 60 * 6656**2, 2.19 / 2))

Phase = tuple[int, int, int]
"""(tokens that its sequences exceed, tokens that they have at most, scheme on which they run)."""


def switch_s(parameters: int | None) -> float:
    """Seconds of one change of strategy, on the line through what was measured for two models;
    those of the smaller model where the number of parameters is not known."""
    (small, small_s), (large, large_s) = _MEASURED
    if parameters is None:
        return small_s
    return max(0.0, small_s + (parameters - small) * (large_s - small_s) / (large - small))


def switching(tables: Sequence[PriceTable], parameters: int | None = None) -> BatchPlanner:
    """Plans every batch with up to three homogeneous strategies in turn, one for each range of
    lengths. Ranges and strategies are chosen once, over all batches; the number of ``parameters``
    of the model gives the seconds of a change."""
    change_s = switch_s(parameters)
    longest = max(table.tokens[0] for table in tables)
    best_s, best = inf, list[Phase]()
    for cuts in _CUTS:
        total_s, phases = 0.0, list[Phase]()
        for low, high in zip((0, *cuts), (*cuts, max((longest, *cuts))), strict=True):
            batch_parts = [
                part for table in tables if (part := _part(table, low, high)) is not None
            ]
            if batch_parts:
                seconds, k = best_scheme(batch_parts, static_schedule)
                total_s += seconds
                if k is None:  # then the seconds are infinite, and these cuts are not taken
                    break
                phases.append((low, high, k))
        total_s += change_s * (len(phases) - 1) * len(tables)
        if total_s < best_s:
            best_s, best = total_s, phases
    if not best:
        raise InfeasiblePlan("no homogeneous strategy holds every iteration")

    def planned(_: int, table: PriceTable) -> Assignment:
        """The schedule of a batch: ranges of lengths in turn, each with its own strategy."""
        schedules = list[Assignment]()
        for low, high, k in best:
            part = _part(table, low, high)
            if part is not None:
                schedule = static_schedule(part, k)
                assert schedule is not None, "the strategy holds its range"
                schedules.append(schedule)
        return _joined(table, schedules, change_s)

    return planned


def sequences_of(whole: Assignment, phase: Assignment) -> list[int]:
    """Indices in the caller's batch of the sequences of a ``phase`` of the schedule ``whole``, in
    the caller's order."""
    longest, shortest = phase.table.tokens[0], phase.table.tokens[-1]
    tokens = whole.table.batch.lengths.tokens
    return [i for i, length in enumerate(tokens) if shortest <= length <= longest]


def _part(table: PriceTable, low: int, high: int) -> PriceTable | None:
    """The table of those sequences of a batch that have more than ``low`` and at most ``high``
    tokens, in the caller's order; None where there are none."""
    tokens = tuple(length for length in table.batch.lengths.tokens if low < length <= high)
    if not tokens:
        return None
    return PriceTable(SortedBatch.of(Lengths(tokens=tokens)), table.schemes, table.devices)


def _joined(table: PriceTable, phases: Sequence[Assignment], change_s: float) -> Assignment:
    """One schedule of the whole batch, made of schedules of its ranges of lengths, short ones
    first, which run one after the other with changes of ``change_s`` seconds in between."""
    groups, packs, first = list[Group](), list[Packed](), len(table.tokens)
    for phase in phases:
        # Positions are longest first, and each phase has longer sequences than the one before: its
        # positions begin at ``first`` and end where those of the phase before begin.
        first -= len(phase.table.tokens)
        groups += [(k, ranks, [first + i for i in members]) for k, ranks, members in phase.groups]
        packs += [
            replace(
                packed,
                bins=tuple(tuple(first + i for i in bin_members) for bin_members in packed.bins),
            )
            for packed in phase.packs
        ]
    changes_s = change_s * (len(phases) - 1)
    seconds = sum(phase.seconds for phase in phases) + changes_s
    return Assignment(
        table=table,
        groups=tuple(groups),
        packs=tuple(packs),
        source="switching",
        seconds=seconds,
        expected_s=seconds,
        phases=tuple(phases) if len(phases) > 1 else (),
        switch_s=changes_s,
    )
