"""Packs the sequences of one pipeline into micro-batches (Hydraulis, equation 1, appendix D).

Data        sequences, longest first; the scheme's frontier (seconds and tokens of every row).
Variables   the number V of micro-batches, which sequence goes to which, the row of each.
Constraint  a micro-batch holds at most the tokens of its row.
Objective   sum_j t_j + (P - 1) max_j t_j, t_j = sum_i (a l_i^2 + b l_i) + c by the row of j.

One stage: only the sum counts. If everything fits one micro-batch by the first row, and no other
row is quicker, that is optimal. With one row, V is what counts: best-fit decreasing finds the
fewest, nearly always. With more rows, fewer micro-batches pay fewer constants and more of them
recompute less, so the most promising V by an even split are filled longest first, beside best fit
under the quickest row's tokens, where longer sequences stand alone; each takes its quickest row. A
V that could not beat what is found if the least a, b and c of all rows came together is left out.

Several stages (:mod:`headrace.planning.staged_packing`): the pipeline is packed as if all its
micro-batches ran by one row, for the rows by which it seems to be quickest; a longer sequence than
that row holds stands alone. Then each micro-batch takes its quickest row. A row's tokens are such
that as many micro-batches as are in flight fit at once, so those of different rows nearly always
fit together, too; where they do not, some take thriftier rows when the plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from math import inf
from operator import mul

import numpy as np
from numpy.typing import NDArray

from headrace.planning.batch import Packed, PriceTable, best_fit, longest_two
from headrace.planning.priced import Frontier, Line, PricedScheme
from headrace.planning.staged_packing import COUNTS_TRIED, pack_stages
from headrace.planning.tolerances import CLOSE

__all__ = ["likely", "pack"]

_COUNTS_RANKED = 8  # numbers of micro-batches that are compared by an even split

Floats = NDArray[np.float64]
Bins = list[list[int]]
"""Positions of the sequences of each micro-batch."""


def pack(table: PriceTable, k: int, members: Sequence[int]) -> Packed:
    """Pack the sequences of one pipeline into micro-batches. Drafts share many pipelines, so packs
    are kept with the table; where lengths repeat, pipelines of equal lengths share one, too.

    Args:
        table: The prices.
        k: The scheme of the pipeline.
        members: Positions of the sequences, longest first, each of which the scheme holds.

    Returns:
        The micro-batches.
    """
    key = (k, *members)
    if key not in table.packs:
        alike = len(members) > 1 and table.batch.repeats
        table.packs[key] = _alike(table, k, members) if alike else _packed(table, k, members)
    return table.packs[key]


def _alike(table: PriceTable, k: int, members: Sequence[int]) -> Packed:
    """Pack the sequences of one pipeline as the first pipeline of scheme k whose sequences had the
    same lengths was packed, sequence by sequence."""
    key = (k, *[table.tokens[i] for i in members])
    if key not in table.alike_packs:
        table.alike_packs[key] = members, _packed(table, k, members)
    firsts, packed = table.alike_packs[key]
    in_place_of = dict(zip(firsts, members, strict=True))
    bins = tuple(tuple([in_place_of[i] for i in held]) for held in packed.bins)
    return replace(packed, bins=bins)


def _packed(table: PriceTable, k: int, members: Sequence[int]) -> Packed:
    """Pack the sequences of one pipeline, as :func:`pack` does, without its cache."""
    scheme = table.schemes[k]
    frontier, tokens = scheme.frontier, table.tokens
    if not members:
        return Packed(0.0, (), (), (), 0.0, 0.0, 0.0)
    if scheme.depth > 1:
        return _staged(table, k, members)
    if len(frontier.caps) == 1:  # one row: as few micro-batches as best fit finds
        seconds, cap, c = table.seconds(k), frontier.caps[0], frontier.rows[0][2]
        held = sum([tokens[i] for i in members])
        bins = [members] if held <= cap else best_fit(tokens, members, cap)
        return Packed.of(bins, (0,) * len(bins), [sum([seconds[i] for i in b]) + c for b in bins])
    lengths = list(map(tokens.__getitem__, members))
    total, squares = sum(lengths), sum(map(mul, lengths, lengths))
    # Everything fits one micro-batch by the first row, and no other row is quicker.
    if total <= frontier.caps[0] and frontier.rules[0]:
        a, b, c = frontier.rows[0]
        return Packed.of([members], (0,), [a * squares + b * total + c])
    best: tuple[float, Bins, list[int], list[float]] | None = None
    a, b, c = frontier.least
    # Waiting for weights and gradients as if the first and the last micro-batch were so long that
    # they hide all that can be hidden.
    waits_s = sum(table.exposed_s(k, inf, inf))
    least_s = a * squares + b * total + waits_s
    spread = table.each_spread(k)
    enough_s = (sum(map(spread.__getitem__, members)) + waits_s) * (1 + CLOSE)
    for count, pack_so in _tries(tokens, members, total, squares, frontier):
        # Not even the least a, b and c of all rows together would make it quicker.
        if best is not None and (least_s + c * count >= best[0] or best[0] <= enough_s):
            continue
        bins = pack_so()
        if bins is None:
            continue
        times, rows = _priced(bins, tokens, frontier)
        longest_s, next_s = longest_two(times)
        seconds = sum(times) + sum(table.exposed_s(k, next_s, longest_s))
        if best is None or seconds < best[0]:
            best = seconds, bins, rows, times
    assert best is not None, "the scheme holds every member"
    _, bins, rows, times = best
    return Packed.of(bins, rows, times)


def _tries(
    tokens: Sequence[int], members: Sequence[int], total: int, squares: float, frontier: Frontier
) -> Iterator[tuple[int, Callable[[], Bins | None]]]:
    """Ways to pack ``members`` that are worth trying, each as (least number of micro-batches,
    function that packs). ``total`` is the sum of their tokens, ``squares`` the sum of their squared
    tokens."""
    quick_cap, most_cap = frontier.quickest_cap(squares, total), frontier.most_tokens
    if len(members) == 1 or total <= quick_cap:  # in one micro-batch there is nothing to choose
        yield 1, lambda: [list(members)]
        return
    yield 1, lambda: best_fit(tokens, members, quick_cap)
    if total <= most_cap:
        yield 1, lambda: [list(members)]
    else:
        yield -(-total // most_cap), lambda: best_fit(tokens, members, most_cap)
    for count in _counts(len(members), total, squares, quick_cap, frontier):
        if count > 1:
            yield count, partial(_fill, tokens, members, count, most_cap)


def likely(table: PriceTable, k: int, members: Sequence[int]) -> Packed:
    """An estimate of the seconds that :func:`pack` gives for ``members``, longest first, without
    packing: as few equal micro-batches as the tokens need, by the usual row; only the longest takes
    no less than the longest sequence alone. Micro-batches are not listed."""
    seconds, tokens = table.seconds(k), table.room(k)
    work_s, longest_s = sum(map(seconds.__getitem__, members)), seconds[members[0]]
    count = table.lines[k].count(work_s, sum(map(tokens.__getitem__, members)), longest_s)
    total_s = work_s + table.c[k] * count
    longest_s = max(total_s / count, longest_s + table.c[k])
    next_s = (total_s - longest_s) / (count - 1) if count > 1 else longest_s
    total_s += (table.depth[k] - 1) * longest_s
    return Packed(
        seconds=total_s,
        bins=(),
        rows=(),
        times=(),
        longest_s=longest_s,
        next_s=next_s,
        shortest_s=next_s,
    )


def _priced(bins: Bins, tokens: Sequence[int], frontier: Frontier) -> tuple[list[float], list[int]]:
    """Two lists: the seconds of each micro-batch by its quickest row of the frontier, and the
    number of this row."""
    times, rows = list[float](), list[int]()
    token_of = tokens.__getitem__
    for members in bins:
        lengths = list(map(token_of, members))
        quickest = frontier.nearly_best(sum(map(mul, lengths, lengths)), sum(lengths))
        assert quickest is not None, "a pack is within the capacity"
        seconds, row = quickest
        times.append(seconds)
        rows.append(row)
    return times, rows


def _counts(
    sequences: int, total: int, squares: float, quick: int, frontier: Frontier
) -> list[int]:
    """Numbers of micro-batches worth trying for ``sequences`` sequences of ``total`` tokens and
    ``squares`` squared ones, the best first if split evenly. There are at most as many
    micro-batches as the quickest row needs, which holds ``quick`` tokens, and one more."""
    least = -(-total // frontier.most_tokens)
    most = min(sequences, max(least, -(-total // quick)) + 1)
    # A geometric series from the fewest to the most.
    step = (most / least) ** (1 / _COUNTS_RANKED)
    counts = {round(least * step**power) for power in range(_COUNTS_RANKED + 1)} | {least + 1}
    ranked = []
    for count in counts:
        even_pack = frontier.nearly_best(squares / count, -(-total // count))
        if even_pack is not None and count <= sequences:
            each_s, _ = even_pack
            ranked.append((count * each_s, count))
    return [count for _, count in sorted(ranked)[:COUNTS_TRIED]]


def _fill(tokens: Sequence[int], members: Sequence[int], count: int, cap: int) -> Bins | None:
    """Put ``members``, longest first, each into the emptiest of ``count`` micro-batches of ``cap``
    tokens; None when one overflows."""
    bins: Bins = [[] for _ in range(count)]
    unit = 1 << count.bit_length()
    # Of each bin its tokens times ``unit``, plus its number: one heap finds the emptiest bin.
    fullness = list(range(count))
    full = (cap + 1) * unit
    for i in members:
        filled = fullness[0] + tokens[i] * unit
        if filled >= full:
            return None
        bins[filled % unit].append(i)
        heapreplace(fullness, filled)
    return [held for held in bins if held]


def _staged(table: PriceTable, k: int, members: Sequence[int]) -> Packed:
    """Pack a pipeline of scheme k with stages: as if all micro-batches ran by one row of the
    frontier, which sequences that it does not hold leave for a micro-batch of their own. Then each
    takes its quickest row. The rows that seem to be the quickest are tried."""
    scheme, tokens = table.schemes[k], table.tokens
    frontier, depth = scheme.frontier, scheme.depth
    lengths = np.array([tokens[i] for i in members], dtype=np.float64)
    each_alone = table.each_alone(k)
    alone_s = np.array([each_alone[i] for i in members])
    best, tried = None, 0
    for expected_s, row in sorted(_expected(scheme, lengths, alone_s)):
        below_s = inf if best is None else best.seconds
        if tried == COUNTS_TRIED or expected_s >= below_s:
            break
        tried += 1
        (a, b, c), cap = frontier.rows[row], frontier.caps[row]
        each_s = np.where(lengths > cap, alone_s - c, (a * lengths + b) * lengths).tolist()
        seconds = dict(zip(members, each_s, strict=True))
        room = {i: min(tokens[i], cap) for i in members}
        line = Line(stages=depth, c=c, cap=cap, util=scheme.util)
        found = pack_stages(line, room, seconds, members, below_s)
        if found is None:
            continue
        _, bins = found
        if len(frontier.caps) > 1:
            times, rows = _priced(bins, tokens, frontier)
        else:
            times, rows = [sum([seconds[i] for i in held]) + c for held in bins], [0] * len(bins)
        packed = Packed.of(bins, rows, times, depth)
        if packed.seconds < below_s:
            best = packed
    assert best is not None, "the scheme holds every member"
    return best


def _expected(
    scheme: PricedScheme, lengths: Floats, alone_s: Floats
) -> Iterator[tuple[float, int]]:
    """(expected seconds of a pipeline with stages if it is packed by a row, number of the row) for
    each row of the frontier, given the ``lengths`` of its sequences in tokens and their seconds in
    a micro-batch of their own, each [sequences]."""
    a, b, c, _, caps = scheme.frontier.columns(0)
    each_s = np.where(lengths > caps, alone_s - c, (a * lengths + b) * lengths)  # [rows, sequences]
    held, work_s = np.minimum(lengths, caps).sum(axis=1), each_s.sum(axis=1)
    longest_s = each_s.max(axis=1)
    for row, cap in enumerate(scheme.frontier.caps):
        line = Line(stages=scheme.depth, c=float(c[row, 0]), cap=cap, util=scheme.util)
        count = line.count(float(work_s[row]), float(held[row]), float(longest_s[row]))
        longest = max(float(longest_s[row]), float(work_s[row]) / count) + line.c
        yield float(work_s[row]) + line.c * count + (scheme.depth - 1) * longest, row
