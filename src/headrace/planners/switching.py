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

_CUTS = ((), (4096,), (16384,), (4096, 16384))

# Hydraulis, table 4: an iteration with three strategies, two changes, spends 1.54 s on them with
# 7B parameters and 2.19 s with 32B.
_MEASURED = ((12 * 32 * 4096**2, 1.54 / 2), (12 * 60 * 6656**2, 2.19 / 2))

Phase = tuple[int, int, int]
"""(tokens that its sequences exceed, tokens that they have at most, scheme on which they run)."""


def switch_s(parameters: int | None) -> float:
    """Seconds of one change, on the line through what was measured for two models; the smaller's
    where nothing is known of the model."""
    (small, low_s), (large, high_s) = _MEASURED
    if parameters is None:
        return low_s
    return max(0.0, low_s + (parameters - small) * (high_s - low_s) / (large - small))


def switching(tables: Sequence[PriceTable], parameters: int | None = None) -> BatchPlanner:
    """Up to three homogeneous strategies in turn, of a model of so many ``parameters``."""
    change_s = switch_s(parameters)
    longest = max(table.tokens[0] for table in tables)
    best_s, best = inf, list[Phase]()
    for cuts in _CUTS:
        total, phases = 0.0, list[Phase]()
        for low, high in zip((0, *cuts), (*cuts, max((longest, *cuts))), strict=True):
            parts = [part for table in tables if (part := _part(table, low, high)) is not None]
            if parts:
                seconds, k = best_scheme(parts, static_schedule)
                total += seconds
                if k is None:
                    break
                phases.append((low, high, k))
        total += change_s * (len(phases) - 1) * len(tables)
        if total < best_s:
            best_s, best = total, phases
    if not best:
        raise InfeasiblePlan("no homogeneous strategy holds every iteration")

    def planned(_: int, table: PriceTable) -> Assignment:
        made = list[Assignment]()
        for low, high, k in best:
            part = _part(table, low, high)
            if part is not None:
                schedule = static_schedule(part, k)
                assert schedule is not None, "the strategy holds its range"
                made.append(schedule)
        return _joined(table, made, change_s)

    return planned


def sequences_of(whole: Assignment, phase: Assignment) -> list[int]:
    """Indices in the caller's batch of the sequences of a phase, in the order of its lengths."""
    longest, shortest = phase.table.tokens[0], phase.table.tokens[-1]
    tokens = whole.table.batch.lengths.tokens
    return [i for i, length in enumerate(tokens) if shortest <= length <= longest]


def _part(table: PriceTable, low: int, high: int) -> PriceTable | None:
    """The sequences of a range of lengths, in the caller's order; None where there are none."""
    tokens = tuple(length for length in table.batch.lengths.tokens if low < length <= high)
    if not tokens:
        return None
    return PriceTable(SortedBatch.of(Lengths(tokens=tokens)), table.schemes, table.devices)


def _joined(table: PriceTable, made: Sequence[Assignment], change_s: float) -> Assignment:
    """Schedules of ranges of lengths, the short ones first, as one of the whole batch."""
    groups, packs, first = list[Group](), list[Packed](), len(table.tokens)
    for phase in made:
        first -= len(phase.table.tokens)  # both stand longest first, so a phase is a run
        groups += [(k, r, [first + i for i in members]) for k, r, members in phase.groups]
        packs += [
            replace(own, bins=tuple(tuple(first + i for i in held) for held in own.bins))
            for own in phase.packs
        ]
    changes_s = change_s * (len(made) - 1)
    seconds = sum(phase.seconds for phase in made) + changes_s
    return Assignment(
        table=table,
        groups=tuple(groups),
        packs=tuple(packs),
        source="switching",
        seconds=seconds,
        expected_s=seconds,
        phases=tuple(made) if len(made) > 1 else (),
        switch_s=changes_s,
    )
