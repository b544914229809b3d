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

Terms of :mod:`headrace.planning.batch`: a sequence goes by its *position*, its place in the batch,
longest first; a *run* has the sequences of equal length; the *usual row* of a scheme has the
seconds ``c`` of each micro-batch's constant and the ``cap`` tokens that it holds. A scheme is
*fluid* where it has several rows: then constants are charged to tokens, ``share`` seconds each.
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

from headrace.planning.batch import PriceTable
from headrace.planning.priced import Line
from headrace.planning.tolerances import NEVER, ROUNDING

__all__ = ["Filler", "Pipelines", "deal", "joined", "refilled"]

Floats = NDArray[np.float64]

Pipelines = list[tuple[int, list[int]]]
"""(number of the scheme in the table, positions of its sequences, longest first) of each
pipeline."""

_STEP = 0.04  # schemes are ranked anew when the time has changed by this share
_RANKED = 4  # schemes tried for a sequence, the cheapest first


class Filler:
    """Fills pipelines of a table's schemes with all sequences of its batch, within a time.

    Args:
        table: The prices.
        most: The most pipelines of each scheme; as many as there is room for when left out.
        bias: For each scheme the factor by which the devices that it needs are multiplied when
            schemes are compared; infinite where it is not to be used.
    """

    def __init__(
        self,
        table: PriceTable,
        *,
        most: Sequence[int] | None = None,
        bias: Sequence[float] | None = None,
    ) -> None:
        self.table, self.most, self.devices = table, most, table.devices
        bias_of = np.ones(len(table)) if bias is None else np.array(bias)
        if most is not None:
            bias_of[np.array(most) == 0] = np.inf
            self.devices = sum(
                [count * width for count, width in zip(most, table.width, strict=True)]
            )
        self.used = np.flatnonzero(np.isfinite(bias_of))
        self.weights = bias_of[self.used, None]
        self._after: Floats | None = None
        self._least_s: tuple[list[float], float] | None = None
        self._cheapest: dict[int, list[list[int]]] = {}

    def cheapest(self, tau: float) -> list[list[int]]:
        """For every run the numbers of the schemes that may end its sequences within about ``tau``
        seconds, the cheapest first: those of which a sequence needs the fewest devices. Times
        within one step of the logarithm share an answer."""
        log_step = round(log(max(tau, float_info.min)) / _STEP)
        if log_step not in self._cheapest:
            if self.most is None or (self.weights != 1).any():
                self._cheapest[log_step] = self._cheapest_biased(_needs(self.table, log_step))
            else:
                self._cheapest[log_step] = self._cheapest_ranked(_ranking(self.table, log_step))
        return self._cheapest[log_step]

    def _cheapest_biased(self, needs: Floats) -> list[list[int]]:
        """:meth:`cheapest` with the schemes' biases: for every run its ``_RANKED`` cheapest
        schemes, given the devices that a sequence of each run ``needs`` of every scheme [schemes,
        runs]."""
        needed = needs[self.used] * self.weights
        counts = np.minimum(np.isfinite(needed).sum(axis=0), _RANKED)
        runs, order = np.arange(needed.shape[1]), list[NDArray[np.int64]]()
        for _ in range(int(counts.max())):  # the next cheapest of all runs; sorting takes longer
            cheapest = needed.argmin(axis=0)
            needed[cheapest, runs] = np.inf
            order.append(self.used[cheapest])
        schemes_of_run = np.stack(order, axis=1).tolist() if order else [[] for _ in runs]
        if counts.min() < len(order):
            schemes_of_run = [
                schemes[:count]
                for schemes, count in zip(schemes_of_run, counts.tolist(), strict=True)
            ]
        return schemes_of_run

    def _cheapest_ranked(self, ranking: Sequence[tuple[list[int], int]]) -> list[list[int]]:
        """:meth:`cheapest` without biases. ``ranking`` is that of :func:`_ranking`, computed once
        for all schemes of the table: (schemes, the cheapest first; number of runs) for each stretch
        of runs with the same order."""
        used = set(self.used.tolist())
        schemes_of_runs = [
            ([k for k in schemes if k in used][:_RANKED], count) for schemes, count in ranking
        ]
        return [*chain.from_iterable(repeat(schemes, count) for schemes, count in schemes_of_runs)]

    def is_like(self, filler: Filler, tau: float) -> bool:
        """Whether another filler of the same table looks at the same schemes in the same order, so
        that it fills alike within ``tau`` seconds."""
        return tau < inf and self.cheapest(tau) == filler.cheapest(tau)

    def fill_in_two_orders(self, tau: float, *, measured: bool = True) -> Pipelines | float:
        """:meth:`fill`, and where that fails again with ``join_any=False``, so that sequences look
        for room scheme by scheme; that matters where sequences are few."""
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
        # An innermost loop, so it calls little. Schemes are k, pipelines g, runs r, positions i.
        # The pipelines of each scheme that may have room, as (seconds left, pipeline), rising.
        open_of: list[list[tuple[float, int]]] = [[] for _ in widths]
        pipelines: Pipelines = []
        token_rooms = list[list[int]]()  # by pipeline: tokens left in its micro-batches, rising
        longest_s = list[float]()  # by pipeline: the most seconds that a sequence of it may take
        opened = [-1]  # after this mark the schemes of which there is a pipeline
        free_devices = table.devices
        # Pipelines of each scheme that may still be opened; None where only devices limit them.
        may_open = list(self.most) if self.most is not None else None
        full_schemes = set[int]()  # schemes without room for the run that is being placed
        least_of, least_s = self._least()
        # Device-seconds that nothing needs: what pipelines waste comes off, and below zero the
        # sequences that are left cannot all find a place.
        spare_s = self.devices * tau - least_s
        given_up_s = -inf if measured else -ROUNDING * self.devices * tau
        # By scheme, the device-seconds that a pipeline wastes at least. Where it is known how many
        # there are, they come off before the pipelines are opened.
        foreseen_s = [0.0] * len(widths)
        if may_open is not None and not measured:
            foreseen_s = _idle_s(table, tau)
            pipelines_of = zip(may_open, foreseen_s, strict=True)
            spare_s -= sum([count * idle_s for count, idle_s in pipelines_of if count])
        # What the last sequence went into: scheme, pipeline, its seconds and tokens left, and all
        # pipelines of that scheme with room.
        k, g, left_s, token_room, open_k = 0, 0, 0.0, list[int](), open_of[0]
        blocks, n = table.batch.turns(order), 0  # of equal sequences
        while n < len(blocks):
            if spare_s < given_up_s:
                return 0.0
            r, i, count = blocks[n]  # run, first position, how many
            n, is_run = n + 1, count > 1
            full_schemes.clear()
            while count:  # sequences of this block without a place, the first of them i
                # Look for the fullest pipeline with room, of the cheapest schemes and, where none
                # of these can be opened, of all others that have a pipeline.
                to_open = -1
                for k in chain(cheapest[r], opened):
                    if k < 0:  # nothing can be opened: any pipeline will do
                        if to_open >= 0:
                            break
                        continue
                    need_s, tokens, open_k = seconds_of[k][r], tokens_of[k][r], open_of[k]
                    full = k in full_schemes
                    at = len(open_k) if full else bisect_left(open_k, (need_s, -1))
                    while at < len(open_k):
                        had_s, g = open_k[at]
                        if need_s <= longest_s[g]:
                            left_s, token_room = had_s - need_s, token_rooms[g]
                            if tokens > token_room[-1]:
                                left_s -= (tokens - token_room[0]) * share[k] if dealt[k] else c[k]
                            if left_s >= 0:
                                del open_k[at]
                                if dealt[k]:
                                    token_room[0] = max(0, token_room[0] - tokens)
                                elif len(token_room) == 1 and tokens <= token_room[0]:
                                    token_room[0] -= tokens
                                else:
                                    table.put(k, token_room, tokens)
                                if count == 1:
                                    spare_s -= (had_s - left_s) * widths[k] - least_of[r]
                                    pipelines[g][1].append(i)
                                    count = 0
                                    break
                                joining, left_s = joined(
                                    table, k, left_s, token_room, need_s, tokens, count - 1
                                )
                                spare_s -= (had_s - left_s) * widths[k] - least_of[r] * (
                                    1 + joining
                                )
                                pipelines[g][1].extend(range(i, i + 1 + joining))
                                i += 1 + joining
                                count -= 1 + joining
                                if not count:
                                    break
                                insort(open_k, (left_s, g))
                        at += 1  # the one that is full now stands no later
                    else:  # no pipeline of scheme k has room: may one be opened?
                        if is_run:
                            full_schemes.add(k)
                        if (
                            to_open < 0
                            and (
                                may_open[k] > 0
                                if may_open is not None
                                else widths[k] <= free_devices
                            )
                            and need_s <= lines[k].usable_s(tau, need_s)
                        ):
                            to_open = k
                            if not join_any:
                                break
                        continue
                    break
                if not count:
                    break
                if to_open < 0:
                    return self._work_share_from(i)  # no room, and nothing can be opened
                # Open a pipeline, and put as many of the block into it as it takes.
                k, g, open_k = to_open, len(pipelines), open_of[to_open]
                need_s, tokens = seconds_of[k][r], tokens_of[k][r]
                free_devices -= widths[k]
                if not open_k:
                    opened.append(k)
                if may_open is not None:
                    may_open[k] -= 1
                usable_s, held_tokens = lines[k].usable(tau, need_s)
                # With stages: the tokens of all the micro-batches that it pays constants for.
                token_room = [max(0, held_tokens - tokens) if staged[k] else caps[k] - tokens]
                joining, left_s = 0, usable_s - need_s
                if count > 1:
                    joining, left_s = joined(
                        table, k, left_s, token_room, need_s, tokens, count - 1
                    )
                held_s = (tau - left_s) * widths[k] - foreseen_s[k]
                spare_s -= held_s - least_of[r] * (1 + joining)
                pipelines.append((k, [*range(i, i + 1 + joining)]))
                token_rooms.append(token_room)
                # With stages the first sequence, the longest, has set what the bubbles take.
                longest_s.append(need_s if staged[k] else unlimited)
                i += 1 + joining
                count -= 1 + joining
                if count:
                    insort(open_k, (left_s, g))
            # Sequences follow into this pipeline as long as they look for one of its scheme first
            # and no other is fuller and holds them.
            members, most_s, at = pipelines[g][1], longest_s[g], bisect_left(open_k, (left_s, g))
            fuller_s = open_k[at - 1][0] if at else -1.0
            while n < len(blocks):
                r, i, count = blocks[n]
                need_s, schemes = seconds_of[k][r], cheapest[r]
                if (
                    count > 1
                    or not schemes
                    or schemes[0] != k
                    or need_s > most_s
                    or need_s <= fuller_s
                ):
                    break
                tokens, after_s = tokens_of[k][r], left_s - need_s
                if tokens > token_room[-1]:
                    after_s -= (tokens - token_room[0]) * share[k] if dealt[k] else unlimited
                elif len(token_room) > 1:
                    break
                if after_s < 0:
                    break
                token_room[0] = max(0, token_room[0] - tokens)
                spare_s -= (left_s - after_s) * widths[k] - least_of[r]
                left_s = after_s
                members.append(i)
                n += 1
            insort(open_k, (left_s, g))
        if order is not None:
            for _, members in pipelines:
                members.sort()
        return pipelines

    def _least(self) -> tuple[list[float], float]:
        """(least device-seconds of a sequence of each run by the usual rows of the schemes in use
        [runs], their sum over all sequences)."""
        if self._least_s is None:
            least = self.table.usual[self.used].min(axis=0, initial=np.inf)
            self._least_s = least.tolist(), float(least @ self.table.batch.counts)
        return self._least_s

    def _work_share_from(self, position: int) -> float:
        """The share of all work, in device-seconds, that the sequence at ``position`` and all
        later, shorter ones have; 0 where some sequence fits no scheme, so that the share is
        unknown."""
        if self._after is None:
            least_s = self.table.batch.each((self.table.ranks * self.table.spread).min(axis=0))
            total_s = least_s.sum()
            fits = np.isfinite(total_s)
            self._after = (
                np.cumsum(least_s[::-1])[::-1] / total_s if fits else np.zeros(len(least_s))
            )
        return float(self._after[position])

    def levelled(self, found: Pipelines, limit_s: float) -> tuple[float, Pipelines]:
        """Deal the shorter sequences of a filling out again, longest first, each where it ends
        first. Pipelines with stages keep what they have; devices that are left get pipelines of
        the smallest scheme, or those that there may be.

        Args:
            found: The pipelines of a filling.
            limit_s: Sequences that take up to so many seconds are dealt out.

        Returns:
            (seconds until the last pipeline without stages ends, all pipelines); (0, none) where
            nothing is to be dealt out.
        """
        table = self.table
        dealt, to_deal = Pipelines(), list[int]()  # pipelines with what stays, what goes
        for k, members in found:
            seconds = table.seconds(k)
            if table.depth[k] > 1 or seconds[members[-1]] > limit_s:
                dealt.append((k, list(members)))
                continue
            first = next(n for n, i in enumerate(members) if seconds[i] <= limit_s)
            dealt.append((k, members[:first]))
            to_deal += members[first:]
        if not to_deal:
            return 0.0, []
        dealt += [(k, []) for k in self._idle(found)]
        end_s = deal(table, dealt, sorted(to_deal))
        return end_s, [(k, members) for k, members in dealt if members]

    def _idle(self, found: Pipelines) -> Iterator[int]:
        """The scheme of every further pipeline without stages that there may be beside the
        pipelines ``found``: by the counts ``most``, or as many of the smallest scheme as fit on
        idle devices."""
        table = self.table
        if self.most is not None:
            used = Counter(k for k, _ in found)
            for k, most in enumerate(self.most):
                yield from [k] * (most - used[k] if table.depth[k] == 1 else 0)
        elif table.depth[0] == 1:  # scheme 0 has the fewest devices
            left = table.devices - sum(table.width[k] for k, _ in found)
            yield from [0] * (left // table.width[0])


def _needs(table: PriceTable, step: int) -> Floats:
    """:func:`_needed` for the time ``exp((step + 1) * _STEP)`` seconds, the end of a step of the
    time's logarithm; computed once for each step [schemes, runs]."""
    if step not in table.needs:
        table.needs[step] = _needed(table, float(np.exp((step + 1) * _STEP)))
    return table.needs[step]


def _idle_s(table: PriceTable, tau: float) -> list[float]:
    """Device-seconds for which a pipeline of each scheme does no work within ``tau`` seconds, at
    least, whatever its longest sequence; computed once for each time."""
    if tau not in table.idle:
        idle_s = list[float]()
        for k, line in enumerate(table.lines):
            longest_s = np.array(table.each_seconds[k])
            usable_s = _usable_s(line, tau, longest_s[np.isfinite(longest_s)])
            idle_s.append(table.width[k] * (tau - float(usable_s.max(initial=0.0))))
        table.idle[tau] = idle_s
    return table.idle[tau]


def _ranking(table: PriceTable, step: int) -> list[tuple[list[int], int]]:
    """(schemes, number of runs) for each stretch of consecutive runs that have the same order of
    schemes. The schemes are those on which such a sequence can end within the time of ``step``, as
    :func:`_needs` counts steps, ordered by the devices that it needs, the fewest first."""
    if step not in table.rankings:
        needed = _needs(table, step)
        order = needed.argsort(axis=0, kind="stable")
        # -1 stands for schemes on which the sequence does not end in time.
        order[np.isinf(np.take_along_axis(needed, order, axis=0))] = -1
        starts = np.flatnonzero(np.append(True, (order[:, 1:] != order[:, :-1]).any(axis=0)))
        counts = np.diff(np.append(starts, order.shape[1])).tolist()
        rows = [[k for k in row if k >= 0] for row in order[:, starts].T.tolist()]
        table.rankings[step] = list(zip(rows, counts, strict=True))
    return table.rankings[step]


def _needed(table: PriceTable, tau: float) -> Floats:
    """Devices of each scheme that a sequence of each run occupies if everything ends within ``tau``
    seconds [schemes, runs]: its device-seconds over the seconds that its pipeline can work. With
    stages that is known if it is the longest of its pipeline, as is assumed. Infinite where the
    sequence does not end in time."""
    devices = table.ranks * table.spread / tau
    devices[table.stages * table.alone > tau] = np.inf
    for k, line in enumerate(table.lines):
        if line.stages > 1:
            usable_s = _usable_s(line, tau, table.work[k])
            with np.errstate(divide="ignore", invalid="ignore"):
                with_stages = table.width[k] * table.spread[k] / usable_s
            devices[k] = np.where(usable_s >= table.work[k], with_stages, np.inf)
    return devices


def _usable_s(line: Line, limit_s: float, longest_s: Floats) -> Floats:
    """:meth:`Line.usable_s`, which explains the formula, for many longest sequences at once:
    seconds of work [runs] that a pipeline with stages can do on each stage within ``limit_s``
    seconds, if its longest sequence takes ``longest_s`` [runs]."""
    bubbles = line.bubbles
    rest_s = limit_s - bubbles * line.c
    with np.errstate(divide="ignore", invalid="ignore"):
        count = (rest_s - bubbles * longest_s) / (longest_s + line.c)
    if line.c > 0:
        count = np.minimum(count, sqrt(limit_s * bubbles / line.c) - bubbles)
    number = np.maximum(np.floor(np.nan_to_num(count) + 0.5), 1.0)
    by_count = (rest_s - line.c * number) * number / (number + bubbles)
    usable_s = np.minimum(by_count, rest_s - line.c * number - bubbles * longest_s)
    micro_batch_s = np.maximum(longest_s, usable_s / number) + line.c
    return usable_s - line.wait_s(np.minimum(micro_batch_s, NEVER))


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
    """:func:`joined` where each micro-batch costs its constant ``c`` and holds ``cap`` tokens:
    sequences go into the fullest micro-batch that holds one, as many as it holds, else into a new
    one."""
    taken = 0
    while taken < count:
        at = bisect_left(room, tokens)
        is_new = at == len(room)
        left_tokens, usable_s = (cap, spare_s - c) if is_new else (room[at], spare_s)
        # As many as are left, as the micro-batch has tokens for, and as there are seconds for.
        joining = min(count - taken, left_tokens // tokens, _whole_times(usable_s, need_s, count))
        if joining < 1:
            break
        if not is_new:
            del room[at]
        insort(room, left_tokens - joining * tokens)
        spare_s = usable_s - joining * need_s
        taken += joining
    return taken, spare_s


def _joined_dealt(
    share: float, spare_s: float, room: list[int], need_s: float, tokens: int, count: int
) -> tuple[int, float]:
    """:func:`joined` where each token bears the ``share`` of a constant, in seconds: first come
    sequences that fit the tokens left in ``room``, whose constant is paid already, then those that
    pay for their own tokens."""
    free_count = min(count, room[0] // tokens, _whole_times(spare_s, need_s, count))
    spare_s -= free_count * need_s
    left_tokens = room[0] - free_count * tokens
    paid_count = 0
    if free_count < count and left_tokens < tokens:
        # The first that pays still uses the tokens that are left.
        saved_s, paying_s = left_tokens * share, need_s + tokens * share
        paid_count = _whole_times(spare_s + saved_s, paying_s, count - free_count)
        if paid_count:
            spare_s = max(0.0, spare_s + saved_s - paid_count * paying_s)
            left_tokens = 0
    room[0] = left_tokens
    return free_count + paid_count, spare_s


def _whole_times(spare_s: float, need_s: float, most: int) -> int:
    """How many times ``need_s`` fits into ``spare_s`` seconds as a whole, at most ``most``."""
    if spare_s < need_s:
        return 0
    if most * need_s <= spare_s:
        return most
    times = int(spare_s / need_s)
    return times - 1 if times * need_s > spare_s else times  # the quotient may be rounded up


def refilled(table: PriceTable, k: int, room: list[int], tokens: int, count: int) -> None:
    """Put ``count`` sequences of ``tokens`` each into the micro-batches of scheme k, whatever the
    seconds. ``room`` are the tokens left in each, rising; it is changed in place and grows by new
    micro-batches. The scheme is one whose micro-batches each pay a constant."""
    _joined_counted(
        c=0.0, cap=table.cap[k], spare_s=0.0, room=room, need_s=0.0, tokens=tokens, count=count
    )


def deal(table: PriceTable, kept: Pipelines, loose: Sequence[int]) -> float:
    """Give sequences to pipelines without stages, each where it ends first.

    Args:
        table: The prices.
        kept: Pipelines, some of them without stages; they are changed.
        loose: Positions of the sequences, longest first.

    Returns:
        Seconds until the last pipeline without stages ends.
    """
    heaps: dict[int, list[tuple[float, int]]] = {}  # by scheme: (seconds, pipeline)
    rooms = list[list[int]]()  # tokens left of each pipeline's micro-batches, rising
    for g, (k, members) in enumerate(kept):
        room = list[int]()
        if table.depth[k] == 1:
            load_s, room = _held_by(table, k, members)
            heaps.setdefault(k, []).append((load_s, g))
        rooms.append(room)
    for heap in heaps.values():
        heapify(heap)
    fluid, share, c, cap = table.fluid, table.share, table.c, table.cap
    # On fluid schemes one number of tokens for each pipeline, as constants are charged to tokens.
    left_of = [room[0] if room else cap[k] for room, (k, _) in zip(rooms, kept, strict=True)]
    # For each scheme: its pipelines, seconds and tokens of every position there, its number.
    by_scheme = [(heap, table.seconds(k), table.room(k), k) for k, heap in heaps.items()]
    first_scheme, other_schemes = by_scheme[0], by_scheme[1:]
    for i in loose:
        # The scheme whose pipeline that is free first would end first with this sequence.
        heap, seconds, tokens, k = first_scheme
        if other_schemes:
            least_s = heap[0][0] + seconds[i]
            for candidate in other_schemes:
                end_s = candidate[0][0][0] + candidate[1][i]
                if end_s < least_s:
                    least_s, (heap, seconds, tokens, k) = end_s, candidate
        load_s, g = heap[0]
        kept[g][1].append(i)
        # The rules of ``added_s`` and ``put``, without calls: the innermost loop.
        if fluid[k]:
            left = left_of[g] - tokens[i]
            if left < 0:
                load_s -= left * share[k]
                left = 0
            left_of[g] = left
            heapreplace(heap, (load_s + seconds[i], g))
            continue
        room, need = rooms[g], tokens[i]
        at = bisect_left(room, need)
        if at < len(room):
            insort(room, room.pop(at) - need)
        else:
            load_s += c[k] if room else 0.0  # the first micro-batch is paid
            insort(room, cap[k] - need)
        heapreplace(heap, (load_s + seconds[i], g))
    return max(max(heap)[0] for heap in heaps.values())


def _held_by(table: PriceTable, k: int, members: Sequence[int]) -> tuple[float, list[int]]:
    """(seconds, tokens left in each micro-batch, rising) of a pipeline of scheme k without stages
    that holds ``members``, longest first; an empty one already pays for its first micro-batch."""
    c, cap = table.c[k], table.cap[k]
    if not members:
        return c, []
    seconds, tokens, room = table.seconds(k), table.room(k), list[int]()
    load_s = sum([seconds[i] for i in members])
    if table.fluid[k]:
        left = cap - sum([tokens[i] for i in members])
        return load_s + c + max(0, -left) * table.share[k], [max(0, left)]
    for need, equal in groupby(map(tokens.__getitem__, members)):
        refilled(table, k, room, need, len(list(equal)))
    return load_s + len(room) * c, room
