"""Pipelines side by side: filled like bins, all within one time.

Data        sequences with their seconds on every scheme; N devices; a time tau.
Variables   the pipelines; the pipeline of each sequence.
Constraint  pipelines share no device; each ends within tau.

A dual approximation: a time is guessed, and the question is whether pipelines that end within it
can hold everything. Longest first, a sequence joins the pipeline that it fills best, of the scheme
on which it needs the fewest devices; else it opens a pipeline of such a scheme. A pipeline holds
its devices for all of tau whatever it has, so joining costs nothing. Pipelines with stages pay for
their longest sequence P - 1 times: what is left for work is told when the longest opens one, and
like lengths come together by the order. Best fit decreasing needs at most 22 % more time than the
optimum where bins are alike (MULTIFIT), and hardly ever more than 1 % with many sequences.

Afterwards short sequences are dealt out again, each where it ends first, which levels the ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import chain, groupby, repeat
from math import inf, log, sqrt
from sys import float_info

import numpy as np
from numpy.typing import NDArray

from headrace.planning.batch import ROUNDING, PriceTable
from headrace.planning.priced import Line

__all__ = ["Filler", "Pipelines", "deal", "joined", "refilled"]

Floats = NDArray[np.float64]

Pipelines = list[tuple[int, list[int]]]
"""(number of the scheme, positions longest first) of each pipeline."""

_STEP = 0.04  # schemes are ranked anew when the time has changed by this share
_LOOKS = 16  # pipelines tried for a sequence before it takes any with seconds to spare
_RANKED = 4  # schemes tried for a sequence, the cheapest first


class Filler:
    """Fills pipelines of a table's schemes.

    Args:
        table: The prices.
        most: The most pipelines of each scheme; as many as there is room for when left out.
        bias: How many times its devices each scheme is taken to need; infinite where it is not to
            be used.
    """

    def __init__(
        self,
        table: PriceTable,
        *,
        most: Sequence[int] | None = None,
        bias: Sequence[float] | None = None,
    ) -> None:
        self.table, self.most, self.devices = table, most, table.devices
        weights = np.ones(len(table)) if bias is None else np.array(bias)
        if most is not None:
            weights[np.array(most) == 0] = np.inf
            self.devices = sum(
                [count * width for count, width in zip(most, table.width, strict=True)]
            )
        self.used = np.flatnonzero(np.isfinite(weights))
        self.weights = weights[self.used, None]
        self._after: Floats | None = None
        self._least_s: tuple[list[float], float] | None = None
        self._cheapest: dict[int, list[list[int]]] = {}

    def cheapest(self, tau: float) -> list[list[int]]:
        """For every run the numbers of the schemes that may end its sequences within about ``tau``
        seconds, those of which it needs the fewest devices first."""
        step = round(log(max(tau, float_info.min)) / _STEP)
        if step not in self._cheapest:
            if self.most is None or (self.weights != 1).any():
                self._cheapest[step] = self._first_of(_needs(self.table, step))
            else:
                self._cheapest[step] = self._some_of(_ranking(self.table, step))
        return self._cheapest[step]

    def _first_of(self, needs: Floats) -> list[list[int]]:
        """:meth:`cheapest` with the schemes' biases, from the devices that each run ``needs`` of
        every scheme [schemes, runs]."""
        needed = needs[self.used] * self.weights
        opened = np.minimum(np.isfinite(needed).sum(axis=0), _RANKED)
        runs, order = np.arange(needed.shape[1]), list[NDArray[np.int64]]()
        for _ in range(int(opened.max())):  # sorting all takes longer
            least = needed.argmin(axis=0)
            needed[least, runs] = np.inf
            order.append(self.used[least])
        rows = np.stack(order, axis=1).tolist() if order else [[] for _ in runs]
        if opened.min() < len(order):
            rows = [row[:count] for row, count in zip(rows, opened.tolist(), strict=True)]
        return rows

    def _some_of(self, ranking: Sequence[tuple[list[int], int]]) -> list[list[int]]:
        """:meth:`cheapest` without biases, from a ``ranking`` of all schemes that serves many
        strategies: (schemes in their order, number of runs that have this order)."""
        used = set(self.used.tolist())
        rows = [([k for k in row if k in used][:_RANKED], count) for row, count in ranking]
        return [*chain.from_iterable(repeat(row, count) for row, count in rows)]

    def is_like(self, filler: Filler, tau: float) -> bool:
        """Whether another filler of the same table fills alike within ``tau`` seconds."""
        return tau < inf and self.cheapest(tau) == filler.cheapest(tau)

    def fill_in_two_orders(self, tau: float, *, measured: bool = True) -> Pipelines | float:
        """:meth:`fill`, and where that fails, again scheme by scheme, which matters where sequences
        are few."""
        found = self.fill(tau, measured=measured)
        if isinstance(found, float):
            return self.fill(tau, join_any=False, measured=measured)
        return found

    def fill(
        self,
        tau: float,
        order: Sequence[int] | None = None,
        *,
        join_any: bool = True,
        measured: bool = True,
    ) -> Pipelines | float:
        """Place all sequences in pipelines that end within a time.

        Args:
            tau: The time in seconds.
            order: Positions as they are placed; longest first where left out, and then runs of
                equal ones at once.
            join_any: Whether a sequence looks for room in pipelines of all its schemes before it
                opens one; else it does scheme by scheme.
            measured: Whether a failure is measured. If not, the filling ends as soon as the
                sequences left need more device-seconds than are left.

        Returns:
            The pipelines; else, as a float, the share of the work that the first sequence without a
            place and those after it have, or 0 if it is not measured.
        """
        table, lines = self.table, self.table.lines
        caps, widths, staged = table.cap, table.width, table.staged
        seconds_of, tokens_of = table.each_seconds, table.each_alike
        cheapest = self.cheapest(tau)
        c, share, unlimited = table.c, table.share, float("inf")
        dealt = table.dealt
        rooms: list[list[tuple[float, int]]] = [[] for _ in widths]  # (seconds left, g), rising
        found: Pipelines = []
        spaces, longest = list[list[int]](), list[float]()  # tokens left of micro-batches, rising
        opened = [-1]  # after this mark the schemes of which there is a pipeline
        free, left = table.devices, list(self.most) if self.most is not None else None
        full = set[int]()  # schemes without room for the run that is being placed
        least, least_s = self._least()
        spare_s = self.devices * tau - least_s  # that nothing needs, of all devices together
        given_up_s = -inf if measured else -ROUNDING * self.devices * tau
        # What the last sequence went into: scheme, pipeline, its seconds and tokens left, and all
        # pipelines of that scheme.
        k, g, rest, space, room = 0, 0, 0.0, list[int](), rooms[0]
        turns, n = table.batch.turns(order), 0
        while n < len(turns):
            if spare_s < given_up_s:
                return 0.0
            r, i, count = turns[n]
            n, several = n + 1, count > 1
            full.clear()
            while count:
                opening = -1
                for k in chain(cheapest[r], opened):
                    if k < 0:  # nothing can be opened: any pipeline will do
                        if opening >= 0:
                            break
                        continue
                    need, tokens, room = seconds_of[k][r], tokens_of[k][r], rooms[k]
                    at = bisect_left(room, (need, -1)) if k not in full else len(room)
                    looks = at + _LOOKS
                    while at < len(room):
                        if at == looks:  # those before have no tokens left: pay for a micro-batch
                            at, looks = max(at, bisect_left(room, (need + c[k], -1))), -1
                            continue
                        spare, g = room[at]
                        if need <= longest[g]:
                            rest, space = spare - need, spaces[g]
                            if tokens > space[-1]:
                                rest -= (tokens - space[0]) * share[k] if dealt[k] else c[k]
                            if rest >= 0:
                                del room[at]
                                if dealt[k]:
                                    space[0] = max(0, space[0] - tokens)
                                elif len(space) == 1 and tokens <= space[0]:
                                    space[0] -= tokens
                                else:
                                    table.put(k, space, tokens)
                                if count == 1:
                                    spare_s -= (spare - rest) * widths[k] - least[r]
                                    found[g][1].append(i)
                                    count = 0
                                    break
                                more, rest = joined(table, k, rest, space, need, tokens, count - 1)
                                spare_s -= (spare - rest) * widths[k] - least[r] * (1 + more)
                                found[g][1].extend(range(i, i + 1 + more))
                                i += 1 + more
                                count -= 1 + more
                                if not count:
                                    break
                                insort(room, (rest, g))
                        at += 1  # the one that is full now stands no later
                    else:
                        if several:
                            full.add(k)
                        if (
                            opening < 0
                            and (left[k] > 0 if left is not None else widths[k] <= free)
                            and need <= lines[k].usable_s(tau, need)
                        ):
                            opening = k
                            if not join_any:
                                break
                        continue
                    break
                if not count:
                    break
                if opening < 0:
                    return self._rest(i)
                k, g, room = opening, len(found), rooms[opening]
                need, tokens = seconds_of[k][r], tokens_of[k][r]
                free -= widths[k]
                if not room:
                    opened.append(k)
                if left is not None:
                    left[k] -= 1
                usable_s, held = lines[k].usable(tau, need)
                space = [max(0, held - tokens) if staged[k] else caps[k] - tokens]
                more, rest = 0, usable_s - need
                if count > 1:
                    more, rest = joined(table, k, rest, space, need, tokens, count - 1)
                spare_s -= (tau - rest) * widths[k] - least[r] * (1 + more)
                found.append((k, [*range(i, i + 1 + more)]))
                spaces.append(space)
                longest.append(need if staged[k] else unlimited)
                i += 1 + more
                count -= 1 + more
                if count:
                    insort(room, (rest, g))
            # Sequences follow into this pipeline as long as they look for one of its scheme first
            # and no other is fuller and holds them.
            members, most_s, at = found[g][1], longest[g], bisect_left(room, (rest, g))
            fuller_s = room[at - 1][0] if at else -1.0
            while n < len(turns):
                r, i, count = turns[n]
                need, schemes = seconds_of[k][r], cheapest[r]
                if count > 1 or not schemes or schemes[0] != k or need > most_s or need <= fuller_s:
                    break
                tokens, left_s = tokens_of[k][r], rest - need
                if tokens > space[-1]:
                    left_s -= (tokens - space[0]) * share[k] if dealt[k] else unlimited
                elif len(space) > 1:
                    break
                if left_s < 0:
                    break
                space[0] = max(0, space[0] - tokens)
                spare_s -= (rest - left_s) * widths[k] - least[r]
                rest = left_s
                members.append(i)
                n += 1
            insort(room, (rest, g))
        if order is not None:
            for _, members in found:
                members.sort()
        return found

    def _least(self) -> tuple[list[float], float]:
        """Least device-seconds of a sequence of each run by the usual rows [runs], and their sum
        over all sequences."""
        if self._least_s is None:
            least = self.table.usual[self.used].min(axis=0, initial=np.inf)
            self._least_s = least.tolist(), float(least @ self.table.batch.counts)
        return self._least_s

    def _rest(self, i: int) -> float:
        """The share of all work, in device-seconds, of position i and those after it; 0 where some
        sequence fits no scheme, so that it is unknown."""
        if self._after is None:
            least = self.table.batch.each((self.table.ranks * self.table.spread).min(axis=0))
            total = least.sum()
            fits = np.isfinite(total)
            self._after = np.cumsum(least[::-1])[::-1] / total if fits else np.zeros(len(least))
        return float(self._after[i])

    def levelled(self, found: Pipelines, limit_s: float) -> tuple[float, Pipelines]:
        """Deal the shorter sequences of a filling out again, longest first, each where it ends
        first. Pipelines with stages keep what they have; devices that are left get pipelines of
        the smallest scheme, or those that there may be.

        Args:
            found: The pipelines of a filling.
            limit_s: Sequences that take up to so many seconds are dealt out.

        Returns:
            Seconds until the last pipeline without stages ends, and all pipelines; 0 and none where
            nothing is to be dealt out.
        """
        table = self.table
        kept, loose = Pipelines(), list[int]()
        for k, members in found:
            seconds = table.seconds(k)
            if table.depth[k] > 1 or seconds[members[-1]] > limit_s:
                kept.append((k, list(members)))
                continue
            first = next(n for n, i in enumerate(members) if seconds[i] <= limit_s)
            kept.append((k, members[:first]))
            loose += members[first:]
        if not loose:
            return 0.0, []
        kept += [(k, []) for k in self._idle(found)]
        end_s = deal(table, kept, sorted(loose))
        return end_s, [(k, members) for k, members in kept if members]

    def _idle(self, found: Pipelines) -> Iterator[int]:
        """The scheme of every pipeline without stages that the devices have room for beside those
        of a filling."""
        table = self.table
        if self.most is not None:
            used = Counter(k for k, _ in found)
            for k, most in enumerate(self.most):
                yield from [k] * (most - used[k] if table.depth[k] == 1 else 0)
        elif table.depth[0] == 1:
            left = table.devices - sum(table.width[k] for k, _ in found)
            yield from [0] * (left // table.width[0])


def _needs(table: PriceTable, step: int) -> Floats:
    """Devices that a sequence of each run needs [schemes, runs] within a ``step`` of the time's
    logarithm, worked out once (:func:`_needed`)."""
    if step not in table.needs:
        table.needs[step] = _needed(table, float(np.exp((step + 1) * _STEP)))
    return table.needs[step]


def _ranking(table: PriceTable, step: int) -> list[tuple[list[int], int]]:
    """(schemes, number of runs) for each row of runs that rank schemes alike: the schemes that may
    end such a sequence within a step of the time, those of which it needs the fewest devices
    first."""
    if step not in table.rankings:
        needed = _needs(table, step)
        order = needed.argsort(axis=0, kind="stable")
        order[np.isinf(np.take_along_axis(needed, order, axis=0))] = -1
        starts = np.flatnonzero(np.append(True, (order[:, 1:] != order[:, :-1]).any(axis=0)))
        counts = np.diff(np.append(starts, order.shape[1])).tolist()
        rows = [[k for k in row if k >= 0] for row in order[:, starts].T.tolist()]
        table.rankings[step] = list(zip(rows, counts, strict=True))
    return table.rankings[step]


def _needed(table: PriceTable, tau: float) -> Floats:
    """Devices that a sequence of each run needs of each scheme for ``tau`` seconds [schemes, runs],
    as the longest of its pipeline; infinite where it does not end in time."""
    needed = table.ranks * table.spread / tau
    needed[table.stages * table.alone > tau] = np.inf
    for k, line in enumerate(table.lines):
        if line.stages > 1:
            usable = _usable_s(line, tau, table.work[k])
            with np.errstate(divide="ignore", invalid="ignore"):
                staged = table.width[k] * table.spread[k] / usable
            needed[k] = np.where(usable >= table.work[k], staged, np.inf)
    return needed


def _usable_s(line: Line, limit_s: float, longest_s: Floats) -> Floats:
    """Seconds of work that end within ``limit_s`` on a pipeline with stages, if its longest
    sequence takes ``longest_s`` [runs]: :meth:`Line.usable_s` for many sequences at once."""
    bubbles = line.stages - 1
    rest_s = limit_s - bubbles * line.c
    with np.errstate(divide="ignore", invalid="ignore"):
        count = (rest_s - bubbles * longest_s) / (longest_s + line.c)
    if line.c > 0:
        count = np.minimum(count, sqrt(limit_s * bubbles / line.c) - bubbles)
    v = np.maximum(np.floor(np.nan_to_num(count) + 0.5), 1.0)
    by_count = (rest_s - line.c * v) * v / (v + bubbles)
    return np.minimum(by_count, rest_s - line.c * v - bubbles * longest_s)


def joined(
    table: PriceTable,
    k: int,
    spare_s: float,
    room: list[int],
    need_s: float,
    tokens: int,
    count: int,
) -> tuple[int, float]:
    """How many of some equal sequences a pipeline takes, and the seconds it has left then.

    Args:
        table: The prices.
        k: The scheme.
        spare_s: Seconds that the pipeline has left.
        room: Tokens left of its micro-batches, rising, changed in place; one number where the
            scheme has stages or is fluid, as there constants are dealt out to tokens.
        need_s: Seconds of each sequence, without constants.
        tokens: Tokens of each sequence.
        count: Number of sequences.

    Returns:
        (number of sequences taken, seconds left).
    """
    if table.depth[k] > 1 or table.fluid[k]:
        return _joined_dealt(table.share[k], spare_s, room, need_s, tokens, count)
    return _joined_counted(table.c[k], table.cap[k], spare_s, room, need_s, tokens, count)


def _joined_counted(
    c: float, cap: int, spare_s: float, room: list[int], need_s: float, tokens: int, count: int
) -> tuple[int, float]:
    """:func:`joined` where micro-batches are counted: each sequence into the fullest that holds it,
    else into a new one."""
    taken = 0
    while taken < count:
        at = bisect_left(room, tokens)
        new = at == len(room)
        left, usable_s = (cap, spare_s - c) if new else (room[at], spare_s)
        more = min(count - taken, left // tokens, _times(usable_s, need_s, count))
        if more < 1:
            break
        if not new:
            del room[at]
        insort(room, left - more * tokens)
        spare_s = usable_s - more * need_s
        taken += more
    return taken, spare_s


def _joined_dealt(
    share: float, spare_s: float, room: list[int], need_s: float, tokens: int, count: int
) -> tuple[int, float]:
    """:func:`joined` where constants are dealt out: first sequences for which tokens are left, then
    those that pay for theirs."""
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
    _joined_counted(0.0, table.cap[k], 0.0, room, 0.0, tokens, count)


def deal(table: PriceTable, kept: Pipelines, loose: Sequence[int]) -> float:
    """Give sequences to pipelines without stages, each where it ends first.

    Args:
        table: The prices.
        kept: Pipelines, some of them without stages; they are changed.
        loose: Positions of the sequences, longest first.

    Returns:
        Seconds until the last pipeline without stages ends.
    """
    heaps: dict[int, list[tuple[float, int]]] = {}
    spaces = list[list[int]]()
    for g, (k, members) in enumerate(kept):
        space = list[int]()
        if table.depth[k] == 1:
            load, space = _held_by(table, k, members)
            heaps.setdefault(k, []).append((load, g))
        spaces.append(space)
    for heap in heaps.values():
        heapify(heap)
    fluid, share, c, cap = table.fluid, table.share, table.c, table.cap
    left_of = [s[0] if s else table.cap[k] for s, (k, _) in zip(spaces, kept, strict=True)]
    kinds = [(heap, table.seconds(k), table.room(k), k) for k, heap in heaps.items()]
    first, others = kinds[0], kinds[1:]
    for i in loose:
        heap, seconds, tokens, k = first
        if others:
            first_s = heap[0][0] + seconds[i]
            for kind in others:
                end_s = kind[0][0][0] + kind[1][i]
                if end_s < first_s:
                    first_s, (heap, seconds, tokens, k) = end_s, kind
        load, g = heap[0]
        kept[g][1].append(i)
        # The rules of ``added_s`` and ``put``, without calls: the innermost loop.
        if fluid[k]:
            left = left_of[g] - tokens[i]
            if left < 0:
                load -= left * share[k]
                left = 0
            left_of[g] = left
            heapreplace(heap, (load + seconds[i], g))
            continue
        space, length = spaces[g], tokens[i]
        at = bisect_left(space, length)
        if at < len(space):
            insort(space, space.pop(at) - length)
        else:
            load += c[k] if space else 0.0  # the first micro-batch is paid
            insort(space, cap[k] - length)
        heapreplace(heap, (load + seconds[i], g))
    return max(max(heap)[0] for heap in heaps.values())


def _held_by(table: PriceTable, k: int, members: Sequence[int]) -> tuple[float, list[int]]:
    """(seconds, tokens left of each micro-batch, rising) of a pipeline of scheme k without stages
    that holds ``members``, longest first; without any it has paid for its first micro-batch."""
    c, cap = table.c[k], table.cap[k]
    if not members:
        return c, []
    seconds, tokens, room = table.seconds(k), table.room(k), list[int]()
    load_s = sum([seconds[i] for i in members])
    if table.fluid[k]:
        left = cap - sum([tokens[i] for i in members])
        return load_s + c + max(0, -left) * table.share[k], [max(0, left)]
    for length, run in groupby(map(tokens.__getitem__, members)):
        refilled(table, k, room, length, len(list(run)))
    return load_s + len(room) * c, room
