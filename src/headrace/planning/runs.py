"""Runs of equal sequences: as many of one as a pipeline takes, at once.

Best fit gives equal sequences one after the other to the same pipeline for as long as it has
seconds and micro-batches left, as it only gets fuller and so fits better. So a run costs as many
steps as it fills micro-batches, not as many as it has sequences, and the outcome is the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from headrace.planning.batch import PriceTable

__all__ = ["joined", "refilled"]


def joined(
    table: PriceTable,
    k: int,
    spare_s: float,
    room: list[int],
    need_s: float,
    tokens: int,
    count: int,
) -> tuple[int, float]:
    """How many of ``count`` sequences of ``need_s`` seconds and ``tokens`` tokens a pipeline of
    scheme k takes that has ``spare_s`` seconds left, and what it has left then. ``room`` are the
    tokens left of its micro-batches, which change; one number where the scheme has stages or is
    fluid, as there constants are dealt out to tokens."""
    if table.depth[k] > 1 or table.fluid[k]:
        return _dealt(table.share[k], spare_s, room, need_s, tokens, count)
    return _counted(table.c[k], table.cap[k], spare_s, room, need_s, tokens, count)


def _counted(
    c: float, cap: int, spare_s: float, room: list[int], need_s: float, tokens: int, count: int
) -> tuple[int, float]:
    """Each into the micro-batch that it fills best, a new one where none has room."""
    taken = 0
    while taken < count:
        at = bisect_left(room, tokens)
        new = at == len(room)
        left, usable_s = (cap, spare_s - c) if new else (room[at], spare_s)
        some = min(count - taken, left // tokens, _times(usable_s, need_s, count))
        if some < 1:
            break
        if not new:
            del room[at]
        insort(room, left - some * tokens)
        spare_s = usable_s - some * need_s
        taken += some
    return taken, spare_s


def _dealt(
    share: float, spare_s: float, room: list[int], need_s: float, tokens: int, count: int
) -> tuple[int, float]:
    """Those that fit the tokens left, then those that pay for theirs."""
    free = min(count, room[0] // tokens, _times(spare_s, need_s, count))
    spare_s -= free * need_s
    left = room[0] - free * tokens
    paid = 0
    if free < count and left < tokens:
        saved_s, dear_s = left * share, need_s + tokens * share
        paid = _times(spare_s + saved_s, dear_s, count - free)
        if paid:
            spare_s = max(0.0, spare_s + saved_s - paid * dear_s)
            left = 0
    room[0] = left
    return free + paid, spare_s


def _times(spare_s: float, need_s: float, most: int) -> int:
    """How many times ``need_s`` is in ``spare_s``, at most ``most``."""
    if spare_s < need_s:
        return 0
    if most * need_s <= spare_s:
        return most
    times = int(spare_s / need_s)
    return times - 1 if times * need_s > spare_s else times


def refilled(table: PriceTable, k: int, room: list[int], tokens: int, count: int) -> None:
    """Put ``count`` sequences into the micro-batches ``room`` of a scheme whose micro-batches are
    counted, whatever the seconds."""
    _counted(0.0, table.cap[k], 0.0, room, 0.0, tokens, count)
