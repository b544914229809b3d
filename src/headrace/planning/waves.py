"""The generator of lockstep schedules: waves of launches that all take the same time.

Data        sequences with their seconds and tokens on every group size; N ranks.
Variables   waves; in each a partition of the ranks into groups, the sequences of every group.
Constraint  a group is one micro-batch: it holds at most its scheme's tokens.
Objective   minimise the sum over the waves of their slowest launch.

Solve. Waves that grow shorter come first where some sequences are far longer than the rest
(:class:`Opening`). For the rest, of V waves the least time D is sought in which groups of V N ranks
can be filled, from an estimate upwards and then by halving, and the groups are sorted into waves by
their seconds. Which V: few
waves pay few constants, but leave the longest sequence more of the world and memory less room; the
best by estimate are tried, as long as one could beat the best that is known. What the best opening
leaves is tried in other orders too where sequences are few, until too many fail or the effort is
spent: so many sequences placed, never so much time. The waves of few sequences are exact, and of
more, waves with few sequences are joined and solved anew
(:mod:`headrace.planning.exact_waves`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from math import ceil, inf, isfinite, log
from operator import neg

import numpy as np
from numpy.typing import NDArray

from headrace.planning.batch import PriceTable
from headrace.planning.exact_waves import MOST_SEQUENCES, exact_waves, rejoined
from headrace.planning.filling import Pipelines
from headrace.planning.generators import FEW, Known, Role
from headrace.planning.schedule import Assignment, launch_s
from headrace.planning.tolerances import CLOSE, NEAR, NEVER, ROUNDING
from headrace.planning.wave_bounds import SAMPLES

__all__ = [
    "Begun",
    "Estimates",
    "Opening",
    "Wave",
    "WaveCount",
    "WaveFiller",
    "Waves",
    "openings",
    "sorted_into_waves",
    "waves",
]

Floats = NDArray[np.float64]

Wave = Pipelines


class WaveFiller:
    """Fills groups of waves. A *launch* is a group with its micro-batch. A sequence goes by its
    *position*, its place in the batch, longest first; a *kind* is the number of a scheme.

    Args:
        table: The prices.
        kinds: The schemes that groups may have, each of one stage.

    Attributes:
        seconds: Seconds that each sequence adds to a launch, by kind, without the constant that
            every launch pays.
        room: Tokens that each sequence takes of a launch, by kind.
        cheapest: For each sequence the kinds that hold it, by rising device-seconds.
        alone: Seconds of a sequence in a launch of its own [kinds, sequences].
        bare: Device-seconds of a sequence without the constant [kinds, sequences].
        constant_s: Seconds of the constant of a launch [kinds, 1].
        part: Ranks whose memory a sequence fills [kinds, sequences].
        needs: Least device-seconds of each sequence, without constants.
        least: Least device-seconds of each sequence with its share of a constant.
    """

    def __init__(self, table: PriceTable, kinds: Sequence[int]) -> None:
        self.table, self.kinds = table, list(kinds)
        self.seconds = {k: table.seconds(k) for k in self.kinds}
        self.room = {k: self._room(k) for k in self.kinds}
        each, device_s = table.batch.each, (table.ranks * table.spread)[self.kinds]
        self.least = each(device_s.min(axis=0))
        rows = map(table.priced_arrays, self.kinds)
        seconds, room = (np.array(values) for values in zip(*rows, strict=True))
        ranks = table.ranks[self.kinds]
        self.constant_s = np.array([[table.c[k]] for k in self.kinds])
        caps = np.array([[table.cap[k]] for k in self.kinds], dtype=np.float64)
        # The part of a launch's tokens that a sequence takes, times the launch's ranks.
        ranks_filled = ranks * room / caps
        ranks_filled[np.isinf(seconds)] = np.inf
        self.alone, self.bare, self.part = (
            each(seconds + self.constant_s),
            each(ranks * seconds),
            each(ranks_filled),
        )
        self.needs: list[float] = self.bare.min(axis=0).tolist()
        kinds_that_fit = np.isfinite(device_s).sum(axis=0).tolist()
        order = np.array(self.kinds)[device_s.argsort(axis=0, kind="stable")].T.tolist()
        self.cheapest = table.batch.listed(
            [
                ranked[:count] if count < len(ranked) else ranked
                for ranked, count in zip(order, kinds_that_fit, strict=True)
            ]
        )

    def _room(self, k: int) -> list[int]:
        """For each position the tokens that it takes of a launch of scheme k; where k does not hold
        the sequence, more than a launch has, so that it never fits."""
        room, seconds, never_fits = self.table.room(k), self.seconds[k], self.table.cap[k] + 1
        # On a scheme of one row ``room`` is the length, which is too long already. With several
        # rows (``fluid``) it is at most a launch's tokens.
        if not self.table.fluid[k] or isfinite(seconds[0]):
            return room
        pairs = zip(room, seconds, strict=True)
        return [tokens if isfinite(own_s) else never_fits for tokens, own_s in pairs]

    def alone_s(self, k: int, i: int) -> float:
        """Seconds of a launch on scheme k of the sequence at position i alone, by the usual row."""
        return self.seconds[k][i] + self.table.c[k]

    def quickest_s(self, i: int) -> float:
        """The least seconds of a launch of the sequence at position i alone, over all schemes, by
        the usual rows."""
        return min([self.alone_s(k, i) for k in self.cheapest[i]])

    def wave_s(self, wave: Wave) -> float:
        """Seconds of a wave: its slowest launch."""
        return max([launch_s(self.table, k, members) for k, members in wave])

    def waves_s(self, waves: Sequence[Wave]) -> float:
        """Seconds of all waves together, as they run one after the other."""
        return sum([self.wave_s(wave) for wave in waves])

    def fill(
        self,
        time_s: float,
        ranks: int,
        order: Sequence[int],
        *,
        join_any: bool = True,
        whole: bool = True,
    ) -> tuple[Pipelines, list[int]]:
        """Place sequences in groups that end within a time.

        Args:
            time_s: The time in seconds.
            ranks: Ranks of all groups together.
            order: Positions in the order in which they are placed; rising unless ``whole``.
            join_any: Whether a sequence looks for room in groups of every kind before it opens one;
                else it does kind by kind.
            whole: Whether filling ends at the first sequence that finds no place, or where the
                sequences left need more device-seconds than are left.

        Returns:
            The groups, and the positions of the sequences that found no place.
        """
        table, cheapest = self.table, self.cheapest
        kinds_range, widths, caps = range(len(table)), table.width, table.cap
        seconds_of = [self.seconds.get(k, []) for k in kinds_range]
        room_of = [self.room.get(k, []) for k in kinds_range]
        room_s = [time_s - c for c in table.c]  # seconds that a new launch has for sequences
        # Groups of each kind with room, as (seconds left, group), rising.
        open_of: list[list[tuple[float, int]]] = [[] for _ in kinds_range]
        # Groups without the tokens for the sequence before, as (tokens left, negated; seconds left;
        # group) in a heap, those with the most tokens first.
        parked_of: list[list[tuple[int, float, int]]] = [[] for _ in kinds_range]
        groups: Pipelines = []
        tokens_left, not_placed = list[int](), list[int]()  # tokens by group; positions
        narrowest, n = min(widths[k] for k in self.kinds), 0
        least_of = self.needs
        # Rank-seconds that nothing needs: below zero, not all sequences can find a place.
        spare_s = ranks * time_s - sum([least_of[i] for i in order]) if whole else inf
        give_up_s = -ROUNDING * ranks * time_s
        while n < len(order):
            if spare_s < give_up_s:
                return groups, [*order[n:]]
            i, kind, at = order[n], -1, -1
            n += 1
            # Look for the kind, and the group of it (its index in ``open_of``), that the sequence
            # goes to: the fullest open group with room of its cheapest kinds, else a new group.
            for k in cheapest[i]:
                need_s, tokens = seconds_of[k][i], room_of[k][i]
                open_k, parked_k = open_of[k], parked_of[k]
                if need_s > room_s[k]:
                    continue
                # Parked groups that have the tokens for this shorter sequence are open again.
                while parked_k and -parked_k[0][0] >= tokens:
                    _, rest_s, g = heappop(parked_k)
                    insort(open_k, (rest_s, g))
                if open_k:
                    at, size = bisect_left(open_k, (need_s, -1)), len(open_k)
                    while at < size and tokens_left[open_k[at][1]] < tokens:
                        rest_s, g = open_k.pop(at)
                        heappush(parked_k, (-tokens_left[g], rest_s, g))
                        size -= 1
                    if at < size:
                        kind = k
                        break
                if kind < 0 and widths[k] <= ranks:
                    kind = k  # of which a group may be opened, if none of another kind has room
                    if not join_any:
                        break
                at = -1
            if kind < 0:
                first = n - 1
                if whole:
                    n = len(order)  # filling has failed
                elif (
                    ranks < narrowest
                ):  # no group can be opened: go on with what fits some group's rest
                    n = max(n, bisect_left(order, self._next(open_of, parked_of), n))
                not_placed += order[first:n]
                continue
            k, open_k = kind, open_of[kind]
            if 0 <= at < len(open_k):
                rest_s, g = open_k.pop(at)
            else:  # open a group
                rest_s, g, at = room_s[k], len(groups), len(open_k)
                ranks -= widths[k]
                spare_s -= table.c[k] * widths[k]
                groups.append((k, []))
                tokens_left.append(caps[k])
            seconds_of_k, tokens_of_k = seconds_of[k], room_of[k]
            parked_k, room = parked_of[k], tokens_left[g]
            members, below_s = groups[g][1], open_k[at - 1][0] if at else -1.0
            while True:
                rest_s -= seconds_of_k[i]
                room -= tokens_of_k[i]
                spare_s -= seconds_of_k[i] * widths[k] - least_of[i]
                members.append(i)
                if room <= 0 or rest_s <= 0:
                    spare_s -= rest_s * widths[k]
                    break
                # The next one goes to the same group where it looks for one of this scheme first,
                # and no other is fuller and holds it.
                i, follows = order[n] if n < len(order) else -1, False
                if i >= 0 and below_s < seconds_of_k[i] <= rest_s and cheapest[i][0] == k:
                    follows = tokens_of_k[i] <= room and not (
                        parked_k and -parked_k[0][0] >= tokens_of_k[i]
                    )
                if not follows:
                    insort(open_k, (rest_s, g))
                    break
                n += 1
            tokens_left[g] = room
        return groups, not_placed

    def _next(
        self,
        rooms: Sequence[list[tuple[float, int]]],
        parked: Sequence[list[tuple[int, float, int]]],
    ) -> int:
        """The first position, so the longest sequence, that may still find a place in a group. For
        each kind ``rooms`` has the groups as (seconds left, group), rising, and ``parked`` those
        that lacked tokens for the sequence before, as (tokens left, negated; seconds left;
        group)."""
        # Tokens and seconds fall with the position, so negated ones can be bisected. The group with
        # the most left decides: parked ones by tokens, open ones by seconds.
        position = len(self.table.tokens)
        for k in self.kinds:
            if parked[k]:
                position = bisect_left(self.room[k], parked[k][0][0], hi=position, key=neg)
            if rooms[k]:
                position = bisect_left(self.seconds[k], -rooms[k][-1][0], hi=position, key=neg)
        return position


def sorted_into_waves(
    filler: WaveFiller, groups: Pipelines, count: int
) -> tuple[float, list[Wave]] | None:
    """Sort groups into waves by their seconds: each, longest first, goes to the first wave that has
    ranks left for it. Where some group finds none, that is tried again with the widest first.

    Args:
        filler: What filled the groups.
        groups: The groups.
        count: Number of waves.

    Returns:
        Seconds of all waves, and the waves, longest first; None when the groups do not fit.
    """
    widths, devices = filler.table.width, filler.table.devices
    narrowest = min(widths[k] for k in filler.kinds)
    timed = [(launch_s(filler.table, *group), group) for group in groups]
    by_time = sorted(timed, key=lambda item: (-item[0], item[1][1][0]))
    by_size = sorted(timed, key=lambda item: (-item[1][0], -item[0], item[1][1][0]))
    for order in (by_time, by_size):  # by size more groups find ranks, by time waves are shorter
        ranks_left, first = [devices] * count, 0
        waves: list[Wave] = [[] for _ in range(count)]
        waves_s = [0.0] * count
        for seconds, group in order:
            while first < count and ranks_left[first] < narrowest:
                first += 1
            width = widths[group[0]]
            wave = next((w for w in range(first, count) if ranks_left[w] >= width), None)
            if wave is None:
                break
            ranks_left[wave] -= width
            waves_s[wave] = max(waves_s[wave], seconds)
            waves[wave].append(group)
        else:
            used = sorted((w for w in range(count) if waves[w]), key=lambda w: -waves_s[w])
            return sum(waves_s), [waves[w] for w in used]
    return None


# Estimates look at samples of the sequences: at the longest one by one, and at the others in chunks
# of neighbours, the middle one of which stands for all. A sample's *need* are the ranks that one of
# its sequences keeps busy for a whole wave; needs are worked out for a grid of wave times and
# interpolated between them.
_GRID_STEP = 1.1  # Ratio of neighbouring times.
_READ = 0.99  # Safety factor on interpolated lower estimates.
_MORE = np.array([1.0, 1.3, 2.0])  # Numbers of waves considered, over the fewest.


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveCount:
    """A number of waves that is worth trying.

    Attributes:
        count: The number.
        least_s: Seconds of a wave, estimated from below.
        guess_s: Seconds of a wave, estimated as if no launch held sequences of different kinds.
    """

    count: int
    least_s: float
    guess_s: float


class Estimates:
    """Estimates of how many waves any part of a batch takes, and of their seconds.

    A *part* of the batch is an array [samples]: how many of its sequences each sample stands for.

    Attributes:
        devices: Ranks of a wave.
        sample: The number of the sample that stands for each position.
        all: The whole batch as a part [samples].
        most_constant_s: Seconds of the largest constant of a launch.
        times: Least seconds of a launch of one sequence alone [samples].
        bare: Least device-seconds of a sequence without the constant [samples].
        part: Least ranks whose memory a sequence fills [samples].
        grid: Wave times in seconds, rising [times].
        mixed: Least need of ranks by time alone, as if launches could mix sequences so that memory
            is no matter [times, samples].
        apart: Least need of ranks by time and by memory, as if every launch had sequences of one
            sample only [times, samples].
    """

    def __init__(self, filler: WaveFiller) -> None:
        self.devices, count = filler.table.devices, len(filler.table.tokens)
        heads = min(SAMPLES, count)  # sequences that are samples of their own
        chunk = max(1, -(-(count - heads) // SAMPLES))
        sample = np.arange(count)
        sample[heads:] = heads + (sample[heads:] - heads) // chunk
        self.sample: list[int] = sample.tolist()
        self.all = np.bincount(sample).astype(np.float64)
        ends = np.cumsum(self.all).astype(np.int64)
        middle = ends - 1 - (self.all / 2).astype(np.int64)  # the middle position of each chunk
        self._times, bare, part = (
            np.minimum(rows[:, middle], NEVER) for rows in (filler.alone, filler.bare, filler.part)
        )
        # By kind: [kinds, samples], and the constant [kinds, 1].
        self._bare, self._part, self._constant_s = bare, part, filler.constant_s
        self.most_constant_s = float(filler.constant_s.max())
        self.times, self.bare, self.part = (
            values.min(axis=0) for values in (self._times, bare, part)
        )
        self.grid = self._grid()
        # At times too short for a sequence its need is that of the least time in which it ends:
        # jumps could not be interpolated, and whether the longest ends is checked elsewhere.
        limits = np.maximum(self.grid[:, None], self.times)
        needs = self._needs(limits)
        self.mixed: Floats = needs.min(axis=1)
        self.apart: Floats = np.maximum(needs, part).min(axis=1)

    def _grid(self) -> Floats:
        """A rising grid of wave times in seconds, [times], for which needs are worked out;
        neighbours differ by a constant ratio."""
        longest_s = max(float(self.times.max()), 1e-300)
        even_s = float(self.bare @ self.all) / self.devices + self.most_constant_s
        most_s = 2 * max(longest_s, even_s)
        least_s = max(float(self.times.min()), most_s * CLOSE)
        count = ceil(log(most_s / least_s, _GRID_STEP))
        return np.append(least_s * _GRID_STEP ** np.arange(count), most_s)

    def _needs(self, times_s: Floats) -> Floats:
        """Ranks that one sequence of each sample keeps busy for a whole wave of ``times_s`` [times,
        samples or 1] seconds: its rank-seconds over the seconds that a launch's constant leaves;
        ``NEVER`` where the sequence alone takes longer than the wave. Returns [times, schemes,
        samples]."""
        # [times, 1, samples or 1]. A wave shorter than the constant gets NEVER below, so its
        # divisor only must not be 0.
        limits = times_s[:, None]
        needs: Floats = self._bare / np.maximum(limits - self._constant_s, 1e-100)
        np.putmask(needs, self._times > limits * (1 + ROUNDING), NEVER)
        return needs

    def without(self, part: Floats, placed: Iterable[int]) -> Floats:
        """The part [samples], a count of sequences for each sample, that is left when the positions
        ``placed`` are gone."""
        left = part.copy()
        for i in placed:
            left[self.sample[i]] -= 1
        return left

    def launches_s(self, part: Floats, heads: int) -> Floats:
        """Candidates for the seconds of the next wave of a part [samples], rising: the seconds that
        each of its ``heads`` longest samples takes alone in a launch, on each kind of group, if the
        longest of all can end within them."""
        times = self._times[:, part.nonzero()[0][:heads]]
        candidates = set(times[(times >= times[:, 0].min()) & (times < NEVER)].tolist())
        return np.array(sorted(candidates))

    def after(self, part: Floats, times_s: Floats) -> Floats:
        """An estimate of what is left of a part [samples] after one wave that takes the longest
        sequences first and lasts each of ``times_s`` seconds [times, samples]."""
        ranks_wanted = np.maximum(self._needs(times_s[:, None]), self._part).min(axis=1) * part
        # Samples stand longest first; the first whose ranks sum up to the devices are placed.
        ranks_over = np.maximum(np.cumsum(ranks_wanted, axis=1) - self.devices, 0.0)
        # A sample is left by the share of its ranks that exceeds the devices.
        left: Floats = part * np.minimum(ranks_over / np.maximum(ranks_wanted, 1e-300), 1.0)
        return left

    def likely(self, parts: Floats) -> tuple[Floats, Floats]:
        """The number of waves that promises the least seconds for each of ``parts`` [parts,
        samples], and the seconds of each of these waves; both are [parts], and 0 for an empty
        part."""
        counts, least_s = self._counts(parts)
        ranks = counts * self.devices  # of all waves together
        needs = (self.apart @ parts.T).T
        crossings = [
            _crossing(self.grid, need, wave_ranks)
            for need, wave_ranks in zip(needs, ranks, strict=True)
        ]
        guesses = np.maximum(least_s[:, None], crossings)
        rows, best = np.arange(len(parts)), (guesses * counts).argmin(axis=1)
        not_empty = parts.any(axis=1)
        return counts[rows, best] * not_empty, guesses[rows, best] * not_empty

    def worth_trying(self, part: Floats) -> list[WaveCount]:
        """Numbers of waves for a part [samples], the most promising first."""
        counts, (floor_s,) = self._counts(part[None])
        ranks = counts[0] * self.devices
        least = np.maximum(floor_s, _READ * _crossing(self.grid, self.mixed @ part, ranks))
        guesses = np.maximum(least, _crossing(self.grid, self.apart @ part, ranks))
        rows = zip(counts[0].tolist(), least.tolist(), guesses.tolist(), strict=True)
        found = {
            int(count): WaveCount(count=int(count), least_s=least_s, guess_s=guess_s)
            for count, least_s, guess_s in rows
        }
        return sorted(found.values(), key=lambda own: (own.guess_s * own.count, own.count))

    def _counts(self, parts: Floats) -> tuple[Floats, Floats]:
        """Numbers of waves to consider for each of ``parts``: the fewest by memory, and a little
        more [parts, numbers]. Also the least seconds of a wave [parts], by the longest sequence and
        by an even split of the work over the most waves."""
        fewest = np.maximum(1, np.ceil(parts @ self.part / self.devices * (1 - 1e-9)))[:, None]
        counts = np.concatenate([np.round(fewest * _MORE), fewest + 1, fewest + 2], axis=1)
        even_s = parts @ self.bare / self.devices + self.most_constant_s
        longest_s = self.times[(parts > 0).argmax(axis=1)]
        return counts, np.maximum(longest_s, even_s / counts.max(axis=1))


def _crossing(grid: Floats, need: Floats, ranks: Floats) -> Floats:
    """The wave times in seconds at which a ``need`` of ranks, given for the times of ``grid``
    [times], comes down to each of ``ranks`` [numbers]; interpolated in 1 / time, in which the need
    is about linear."""
    falling = np.minimum.accumulate(need)[::-1]
    return 1 / np.interp(ranks, falling, 1 / grid[::-1])


_FOLLOWED = 2  # The best openings that are made longer, and numbers of waves tried for each.
_HEADS = 4  # Longest sequences whose seconds a wave may last, and next waves that are filled.


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The first waves of a plan, and the sequences that they leave.

    Attributes:
        before: The first waves.
        spent_s: Their seconds.
        left: Positions of the sequences that are left, longest first.
        part: The same sequences as a part for :class:`Estimates`.
    """

    before: list[Wave]
    spent_s: float
    left: list[int]
    part: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """First waves, and an estimate of what follows.

    Attributes:
        begun: The first waves.
        wave_s: Estimated seconds of each wave for what is left.
        estimate_s: Estimated seconds of the whole plan.
    """

    begun: Begun
    wave_s: float
    estimate_s: float


def openings(filler: WaveFiller, estimates: Estimates, effort: int) -> list[Opening]:
    """Openings to continue from.

    Args:
        filler: Fills groups of waves.
        estimates: Foretells how many waves a part takes.
        effort: Sequences that may be placed.

    Returns:
        The openings, the most promising first; among them the one without waves.
    """
    everyone = list(range(len(filler.table.tokens)))
    start = Begun(before=[], spent_s=0.0, left=everyone, part=estimates.all)
    # A beam search: in each round the few best openings, ``wide``, get one wave more.
    found = wide = _estimated(estimates, [start])
    best_s = found[0].estimate_s
    while wide and effort > 0:
        # Openings of equal seconds that leave as many sequences are taken for the same.
        longer = dict[tuple[float, int], Begun]()
        for opening in wide:
            for time_s in _promising(estimates, opening):
                begun = _filled(filler, estimates, opening.begun, time_s)
                effort -= len(opening.begun.left) - len(begun.left)
                longer.setdefault((round(begun.spent_s, 9), len(begun.left)), begun)
        if not longer:
            break
        more = _estimated(estimates, longer.values())
        more.sort(key=lambda opening: opening.estimate_s)
        found = found + more
        best_s = min(best_s, more[0].estimate_s)
        wide = [opening for opening in more[:_FOLLOWED] if _may_win(filler, opening, best_s)]
    return sorted(found, key=lambda opening: (opening.estimate_s, len(opening.begun.before)))


def _may_win(filler: WaveFiller, opening: Opening, best_s: float) -> bool:
    """Whether further waves after an opening may lead to a plan below ``best_s``, the best estimate
    in seconds."""
    begun, estimate_s = opening.begun, opening.estimate_s
    least_s = begun.spent_s + float(filler.least[begun.left].sum()) / filler.table.devices
    return bool(begun.left) and estimate_s <= best_s * (1 + NEAR) and least_s < best_s


def _estimated(estimates: Estimates, begun_waves: Collection[Begun]) -> list[Opening]:
    """Openings made of begun plans, each with the estimated seconds of the waves that follow."""
    counts, waves_s = estimates.likely(np.stack([begun.part for begun in begun_waves]))
    rows = zip(begun_waves, counts.tolist(), waves_s.tolist(), strict=True)
    return [
        Opening(begun=begun, wave_s=wave_s, estimate_s=begun.spent_s + count * wave_s)
        for begun, count, wave_s in rows
    ]


def _promising(estimates: Estimates, opening: Opening) -> list[float]:
    """Seconds to try for the next wave after an opening: as long as launches of the longest
    sequences that are left; where many sequences are left, only the few with the best estimates."""
    begun = opening.begun
    times_s = estimates.launches_s(begun.part, _HEADS)
    if len(times_s) > _HEADS and len(begun.left) >= FEW:
        counts, waves_s = estimates.likely(estimates.after(begun.part, times_s))
        promised_s = begun.spent_s + times_s + counts * waves_s
        times_s = times_s[promised_s.argsort(kind="stable")[:_HEADS]]
    tried_s: list[float] = times_s.tolist()
    return tried_s


def _filled(filler: WaveFiller, estimates: Estimates, begun: Begun, time_s: float) -> Begun:
    """An opening made longer by one wave of ``time_s`` seconds, or of the quickest launch of the
    longest sequence left, where that takes longer."""
    limit_s = max(time_s, filler.quickest_s(begun.left[0])) * (1 + ROUNDING)
    groups, left = filler.fill(limit_s, filler.table.devices, begun.left, whole=False)
    return Begun(
        before=[*begun.before, groups],
        spent_s=begun.spent_s + filler.wave_s(groups),
        left=left,
        part=estimates.without(begun.part, chain.from_iterable(members for _, members in groups)),
    )


Span = tuple[float, float]
"""(seconds that fail, seconds to try next)."""

# Wave times that are tried, as multiples of the first: 1, 1.01, 1.03, 1.07, ...
_FACTORS = tuple(1 + 0.01 * (2**k - 1) for k in range(14))
_SPREADS = (0.03, 0.1, 0.3)  # Standard deviations of the noise on log lengths in drawn orders.
_MISSED = 60  # Drawn orders that may fail in a row.


def waves(table: PriceTable, bound_s: float, *, seed: int, effort: int) -> Assignment | None:
    """The best waves found for all sequences, of groups with one stage.

    Args:
        table: The prices.
        bound_s: Seconds that no waves beat.
        seed: Seed of drawn orders.
        effort: About how many sequences are placed.

    Returns:
        The schedule; None where no group holds the longest sequence.
    """
    kinds = [
        k for k, depth in enumerate(table.depth) if depth == 1 and table.width[k] <= table.devices
    ]
    if not kinds or not np.isfinite(table.alone[kinds, 0]).any():
        return None
    if len(table.tokens) <= MOST_SEQUENCES:
        exact = exact_waves(table, kinds, range(len(table.tokens)))
        return None if exact is None else _assigned(table, exact[1])
    filler = WaveFiller(table, kinds)
    few, estimates = len(table.tokens) < FEW, Estimates(filler)
    found = openings(filler, estimates, effort // 2)
    start = next(opening.begun for opening in found if not opening.begun.before)
    search = _Search(filler=filler, enough_s=bound_s * (1 + CLOSE), effort=effort, begun=start)
    for opening in found:
        if opening.estimate_s > search.seconds * (1 + NEAR):
            break
        search.finish(opening.begun, estimates.worth_trying(opening.begun.part)[:_FOLLOWED])
    if not search.best:
        search.one_by_one(found[0].begun)
    if few:
        search.shuffled(np.random.default_rng(seed), start)
    return _assigned(table, rejoined(table, kinds, search.best, bound_s))


def _assigned(table: PriceTable, waves: Iterable[Wave]) -> Assignment:
    """The schedule of some waves."""
    launches = [launch for wave in waves for launch in _launches(table, wave)]
    return Assignment.of_launches(table, launches, "waves", "lockstep")


def _launches(table: PriceTable, wave: Wave) -> Iterator[tuple[int, tuple[int, ...], list[int]]]:
    """(scheme, ranks, positions) of each launch of a wave. The largest groups come first, and each
    gets the next neighbouring ranks."""
    start = 0
    for k, members in sorted(wave, key=lambda group: (-table.width[group[0]], min(group[1]))):
        end = start + table.width[k]
        yield k, tuple(range(start, end)), sorted(members)
        start = end


@dataclass(slots=True, kw_only=True)
class _Search:
    """A search for the best waves: the best so far, and the effort that may still be spent.

    Attributes:
        filler: Fills groups of waves.
        enough_s: Seconds of waves that are good enough.
        effort: Sequences that may still be placed.
        begun: The opening of the best waves.
        best: The best waves.
        seconds: Seconds of the best waves.
    """

    filler: WaveFiller
    enough_s: float
    effort: int
    begun: Begun
    best: list[Wave] = field(default_factory=list)
    seconds: float = float("inf")

    @property
    def over(self) -> bool:
        """Whether to stop: the best waves are near the bound, or some were found and the effort is
        spent."""
        return self.seconds <= self.enough_s or (self.effort <= 0 and bool(self.best))

    def finish(self, begun: Begun, counts: Sequence[WaveCount]) -> None:
        """Place the sequences that an opening leaves in waves of equal time, and keep what is
        better. For each number of waves in ``counts``, times are tried from the estimate upwards
        until one succeeds, which is then made shorter by halving."""
        if not begun.left:
            self._keep(begun, 0.0, [])
            return
        if self.over:
            return
        for wave_count in counts:
            # A wave of so many seconds would be no better than the best plan.
            limit_s = (self.seconds - begun.spent_s) / wave_count.count * (1 - CLOSE)
            if self.over or wave_count.least_s >= limit_s:
                continue
            for low_s, time_s in _wave_times(wave_count, limit_s, few=len(begun.left) < FEW):
                groups = self._try(begun, begun.left, wave_count.count, time_s)
                if groups:
                    self._halve(begun, wave_count.count, low_s, time_s)
                if groups or self.over:
                    break

    def one_by_one(self, begun: Begun) -> None:
        """Place the sequences that an opening leaves in waves, each of which lasts as long as its
        longest sequence takes on its cheapest scheme; this always succeeds."""
        filler, made, left = self.filler, list[Wave](), begun.left
        while left:
            time_s = filler.alone_s(filler.cheapest[left[0]][0], left[0]) * (1 + ROUNDING)
            groups, left = filler.fill(time_s, filler.table.devices, left, whole=False)
            made.append(groups)
        self._keep(begun, filler.waves_s(made), made)

    def shuffled(self, random: np.random.Generator, start: Begun) -> None:
        """Try randomly drawn orders of the sequences after the best opening (after ``start`` where
        that one left nothing), in as many waves as the best plan has, each a little shorter, until
        too many orders in a row fail."""
        begun = self.begun if self.begun.left else start
        length, failed = self.filler.table.batch.values[begun.left], 0
        least_s = self.filler.quickest_s(begun.left[0])
        while not self.over and failed < _MISSED:
            count = len(self.best) - len(begun.before)
            time_s = (self.seconds - begun.spent_s) / count * (1 - CLOSE)
            if time_s < least_s:
                break
            noise = np.exp(random.normal(0.0, _SPREADS[failed % len(_SPREADS)], len(length)))
            order = np.argsort(-length * noise, kind="stable").tolist()
            groups = self._try(begun, [begun.left[number] for number in order], count, time_s)
            failed = 0 if groups else failed + 1

    def _halve(self, begun: Begun, count: int, low_s: float, high_s: float) -> None:
        """Narrow down, by halving, the least seconds of each of ``count`` waves after an opening:
        filling fails in ``low_s`` and succeeds in ``high_s``. Better waves are kept on the way."""
        while high_s - low_s > CLOSE * low_s and not self.over:
            middle_s = (low_s + high_s) / 2
            if self._try(begun, begun.left, count, middle_s):
                high_s = middle_s
            else:
                low_s = middle_s

    def _try(self, begun: Begun, order: Sequence[int], count: int, time_s: float) -> Pipelines:
        """Place the sequences that an opening leaves, in this ``order``, in groups of ``count``
        waves of ``time_s`` seconds; keep the waves if they are better. Returns the groups, an empty
        list where not all find a place."""
        ranks = count * self.filler.table.devices
        ways = (True, False) if len(order) < FEW else (True,)  # of few the second way may succeed
        for join_any in ways:
            groups, left = self.filler.fill(time_s, ranks, order, join_any=join_any)
            self.effort -= len(order) - len(left)
            sorted_waves = None if left else sorted_into_waves(self.filler, groups, count)
            if sorted_waves is not None:
                self._keep(begun, *sorted_waves)
                return groups
        return []

    def _keep(self, begun: Begun, more_s: float, found: list[Wave]) -> None:
        """Keep an opening together with the waves ``found`` after it, which take ``more_s``
        seconds, if they are the best so far."""
        seconds = begun.spent_s + more_s
        if seconds < self.seconds:
            self.seconds, self.best, self.begun = seconds, begun.before + found, begun


def _wave_times(wave_count: WaveCount, limit_s: float, *, few: bool) -> Iterator[Span]:
    """(seconds that fail, seconds to try next) of a wave for a number of waves: rising up to
    ``limit_s`` from the estimate, or for ``few`` sequences from the least seconds. The caller
    narrows down between both where a time succeeds."""
    start_s = wave_count.least_s if few else wave_count.guess_s
    low_s = wave_count.least_s * (1 - CLOSE)
    for factor in _FACTORS:
        time_s = min(start_s * factor, limit_s)
        if time_s <= low_s:
            break
        yield low_s, time_s
        low_s = time_s


_WAVES = Role(
    name="waves",
    tables="one size",
    costs=("model", "groups"),
    semantics=("lockstep",),
    beyond=-inf,
    final=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """Drafts waves of groups that all start together, for steps in lockstep.

    Attributes:
        role: For which problems it is, and when it is asked: whatever the gap, as of few sequences
            the best waves are the bound.
        effort: About how many sequences are placed.
    """

    role: Role = _WAVES
    effort: int = 40_000

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Assignment]:
        """The best waves found for all sequences."""
        made = waves(table, known.bound_s, seed=known.seed, effort=self.effort)
        if made is not None:
            yield made
