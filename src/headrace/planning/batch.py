"""A batch sorted for planning, and what its sequences take on every priced scheme: the tables of
prices that generators draft from.

Sequences of equal length are alike to every scheme: a *run*. Prices are of runs, of which a large
batch has far fewer than sequences. A sequence goes by its *position*: its place in the batch,
longest first.

A scheme (how the devices of a pipeline share the work) is priced by a *frontier* of rows (a, b, c,
cap): on each stage a micro-batch takes a sum(l^2) + b sum(l) + c seconds, c being its *constant*,
and it holds at most cap tokens.

Of a sequence of l tokens in a micro-batch, over all rows (a, b, c, cap) of a scheme's frontier that
hold it, in seconds of one stage:

    alone    min a l^2 + b l + c              in a micro-batch of its own
    work     min a l^2 + b l                  without any constant
    spread   min a l^2 + (b + c / cap) l      with its share of a constant: a micro-batch holds at
                                              most cap tokens, so this much of c comes on l

Each is a lower bound, whichever row its micro-batch has. A search counts with one row, the *usual*
one: the row that is quickest for as many tokens as a pipeline of the scheme may expect. There a
sequence adds ``seconds`` to its pipeline and fills ``room`` tokens of a micro-batch, and each
micro-batch costs ``c`` and holds ``cap`` tokens; a sequence that the usual row does not hold takes
a micro-batch for itself, by the best row that does. Where a frontier has one row, micro-batches
are counted as they are filled. Where it has more, *fluid* ones, the next micro-batch is hardly
dearer if it holds a little more: beyond the first, constants are dealt out to tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.costs import ExchangeCost
from headrace.planning.priced import FORWARD, Columns, Frontier, Line, PricedScheme
from headrace.spec import Lengths

__all__ = [
    "Chains",
    "Packed",
    "PriceTable",
    "SortedBatch",
    "Times",
    "best_fit",
    "longest_two",
    "prices",
]

_IDLE = 0.75
"""Share of the bubbles of alike micro-batches with which fillings reckon where the simulator knows
the stages, as lengths differ: with 1 steps of 32B are 0.5 % longer in the mean."""

Times = tuple[float, float, float]
"""Seconds of a pipeline: until its weights are there, so that it can start; of computing; and from
the end of computing until its gradients are sent."""


class Chains:
    """Which pipelines wait for which, given the ranks of each in the order in which they run: a
    pipeline starts when the pipeline before it on each of its ranks has ended.

    Attributes:
        before: ``before[g]`` are the pipelines that pipeline g waits for.
        last_of: For every rank that has pipelines, the number of its last one.
        last: The pipelines in ``last_of``, each once.
    """

    def __init__(self, ranks: Iterable[Sequence[int]]) -> None:
        self.last_of: dict[int, int] = {}
        self.before: list[list[int]] = []
        for g, pipeline_ranks in enumerate(ranks):
            self.before.append(
                [
                    earlier
                    for earlier in set(map(self.last_of.get, pipeline_ranks))
                    if earlier is not None
                ]
            )
            self.last_of.update(dict.fromkeys(pipeline_ranks, g))
        self.last = sorted(set(self.last_of.values()))

    def free_s(self, times: Iterable[Times]) -> list[float]:
        """Seconds from the start of the step until each pipeline has done all its computing, given
        the ``times`` of each in the order in which pipelines run."""
        free = list[float]()
        for (ready_s, compute_s, _), waits_for in zip(times, self.before, strict=True):
            start_s = ready_s
            for earlier in waits_for:  # a loop, as ``max`` of a list takes longer for one or two
                if free[earlier] > start_s:
                    start_s = free[earlier]
            free.append(start_s + compute_s)
        return free

    def sent_s(self, times: Sequence[Times]) -> dict[int, float]:
        """Seconds from the start of the step until each pipeline that is the last of some rank has
        sent its gradients, by the pipeline's number."""
        free = self.free_s(times)
        sending = [sending_s for _, _, sending_s in times]
        return {g: free[g] + sending[g] for g in self.last}


@dataclass(frozen=True, slots=True)
class Packed:
    """The micro-batches of one pipeline.

    Attributes:
        seconds: Seconds of the pipeline, the bubbles of its stages included.
        bins: Positions in the batch of the sequences of each micro-batch.
        rows: The row of the scheme's frontier, by its number, of each micro-batch.
        times: Seconds of each micro-batch on one stage, forward and backward.
        longest_s: Seconds of the longest micro-batch on one stage.
        next_s: Seconds of the second longest; ``longest_s`` where there is only one.
        shortest_s: Seconds of the shortest.
    """

    seconds: float
    bins: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    times: tuple[float, ...]
    longest_s: float
    next_s: float
    shortest_s: float

    @classmethod
    def of(
        cls,
        bins: Iterable[Sequence[int]],
        rows: Sequence[int],
        times: Sequence[float],
        depth: int = 1,
    ) -> Packed:
        """Micro-batches ``bins``, positions of their sequences, with the frontier row of each and
        the ``times`` in seconds of each on one of ``depth`` stages. The bubbles of the pipeline,
        (depth - 1) times the longest, are added."""
        longest_s, next_s = longest_two(times)
        seconds = sum(times) + (depth - 1) * longest_s
        packs = tuple(map(tuple, bins))
        return cls(seconds, packs, tuple(rows), tuple(times), longest_s, next_s, min(times))


def longest_two(times: Sequence[float]) -> tuple[float, float]:
    """The longest and the second longest of some seconds; where there is only one, it is
    both."""
    if len(times) == 1:
        return times[0], times[0]
    rising = sorted(times)
    return rising[-1], rising[-2]


def best_fit(
    tokens: Mapping[int, int] | Sequence[int], members: Sequence[int], cap: int
) -> list[list[int]]:
    """Best-fit decreasing: put ``members``, positions with the longest first, each into the bin of
    ``cap`` tokens that it fills best, or into a new bin where none has room. A sequence longer than
    ``cap`` stands alone. Returns the positions of each bin."""
    bins: list[list[int]] = []
    unit = 1 << len(members).bit_length()  # above every index of a bin
    # For each bin with room one number, rising: its free tokens times ``unit``, plus the bin's
    # index. So one sorted list of numbers finds the fullest bin with room and says which one it is.
    # The number of the bin that was filled last stands apart: sequences as long as the last one
    # follow it while there is room, as the bin is the fullest for them.
    rooms: list[int] = []
    room, last_need, filled = 0, 0, list[int]()
    for i in members:
        need = tokens[i] * unit
        if need != last_need or room < need:
            if room >= unit:
                insort(rooms, room)
            at = bisect_left(rooms, need)
            if at < len(rooms):
                room = rooms.pop(at)
                filled = bins[room % unit]
            else:
                room, filled = cap * unit + len(bins), list[int]()
                bins.append(filled)
            last_need = need
        filled.append(i)
        room -= need
    return bins


Floats = NDArray[np.float64]
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, eq=False)
class SortedBatch:
    """A batch with its longest sequences first, ties by index.

    Attributes:
        lengths: The batch.
        order: Position i is sequence ``order[i]`` of the batch.
        tokens: Tokens of each position.
        run_tokens: Tokens of each run, a run being the positions of equal length.
        counts: Positions of each run.
    """

    lengths: Lengths
    order: tuple[int, ...]
    tokens: list[int]
    run_tokens: list[int]
    counts: NDArray[np.int64]
    _rows: dict[int, tuple[Frontier, Floats]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, lengths: Lengths) -> SortedBatch:
        """Sort the sequences of a batch, the longest first."""
        given = np.array(lengths.tokens, dtype=np.int64)
        order = np.argsort(-given, kind="stable")
        tokens = given[order]
        starts = np.flatnonzero(np.append(True, tokens[1:] != tokens[:-1]))  # of each run
        return cls(
            lengths=lengths,
            order=tuple(order.tolist()),
            tokens=tokens.tolist(),
            run_tokens=tokens[starts].tolist(),
            counts=np.diff(np.append(starts, len(tokens))).astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def values(self) -> Floats:
        """``tokens`` as an array of floats [sequences]."""
        return np.array(self.tokens, dtype=np.float64)

    @cached_property
    def run_values(self) -> Floats:
        """``run_tokens`` as an array of floats [runs]."""
        return np.array(self.run_tokens, dtype=np.float64)

    def turns(self, order: Sequence[int] | None) -> list[tuple[int, int, int]]:
        """The blocks of equal sequences that a filling places one after the other, each as (number
        of the run, first position, number of positions). Where ``order`` is None a block is a whole
        run, longest first; else it is a single position, in that order."""
        return self._runs if order is None else [(self._run_of[i], i, 1) for i in order]

    @cached_property
    def _runs(self) -> list[tuple[int, int, int]]:
        """For every run, longest first: (its number, its first position, how many positions)."""
        starts, counts = np.cumsum(self.counts) - self.counts, self.counts.tolist()
        return list(zip(range(len(counts)), starts.tolist(), counts, strict=True))

    @cached_property
    def _run_of(self) -> list[int]:
        """The number of the run that each position belongs to [sequences]."""
        return self.listed(list(range(len(self.run_tokens))))

    def each(self, of_runs: NDArray[Any]) -> NDArray[Any]:
        """Spread values of runs [..., runs] over positions [..., sequences]: every position gets
        its run's value."""
        if of_runs.shape[-1] == len(self.tokens):  # no two sequences are equal
            return of_runs
        return np.repeat(of_runs, self.counts, axis=-1)

    def listed(self, of_runs: list[Value]) -> list[Value]:
        """Spread a list of values of runs over positions: every position gets its run's value, as
        the same object, so that a value takes no more memory however long its run."""
        if len(of_runs) == len(self.tokens):  # no two sequences are equal
            return of_runs
        each: list[Value] = []
        each.extend(chain.from_iterable(map(repeat, of_runs, self.counts.tolist())))
        return each

    @cached_property
    def repeats(self) -> bool:
        """Whether sequences have few lengths: runs of two and more in the mean."""
        return 2 * len(self.run_tokens) <= len(self.tokens)

    @cached_property
    def sums(self) -> tuple[float, float]:
        """(sum of squared lengths, sum of lengths)."""
        return float((self.values**2).sum()), float(self.values.sum())

    def row(self, frontier: Frontier) -> Floats:
        """Seconds (alone, work, spread) of a sequence of every run under a frontier [3, runs], as
        this module explains them, computed once; infinite for runs that no row of the frontier
        holds."""
        key = id(frontier)  # the frontier is kept too, so that no other object gets its id
        if key not in self._rows:
            self._rows[key] = (frontier, prices(frontier, self.run_values))
        return self._rows[key][1]


class PriceTable:
    """The prices of a batch on priced schemes. Schemes go by their number, those of the fewest
    devices first; sequences by their position, the longest first.

    Attributes:
        batch: The sorted batch.
        devices: Number of devices to plan for.
        schemes: The priced schemes.
        tokens: Tokens of each position.
        width: Devices of a pipeline of each scheme.
        depth: Stages of a pipeline of each scheme.
        util: Tokens from which on a micro-batch of each scheme keeps its devices busy.
        alone: Least seconds on one stage of a sequence in a micro-batch of its own
            [schemes, runs], infinite where the scheme does not hold it.
        work: Least seconds without any constant [schemes, runs].
        spread: Least seconds with a share of the constant [schemes, runs].
        least_c: Least seconds of a micro-batch's constant [schemes, 1].
        ranks: ``width`` as an array of floats [schemes, 1].
        stages: ``depth`` as an array of floats [schemes, 1].
        fluid: Whether each scheme's frontier has several rows, so that a micro-batch is hardly
            dearer if it holds a little more.
        staged: Whether each scheme has several stages.
        clocked: Whether the simulator knows the stages of each scheme: its pipelines run their
            longest micro-batches first, and are only estimated here.
        exchange: Seconds in which weights arrive and gradients leave if no computation hides them.
        unhidden: The share of these seconds that no computation ever hides.
        moved: By scheme, the share of these seconds that a plan of this scheme alone takes; below 1
            where one group of all devices shards the weights.
        packs: Cache of packed pipelines, by scheme and members.
        alike_packs: Cache of packed pipelines with their members, by scheme and lengths.
        needs: Cache of :mod:`headrace.planning.filling`: the devices that a sequence of each run
            needs of each scheme, by step of the time in which it must end.
        idle: Another: the device-seconds that a pipeline of each scheme wastes at least, by the
            time in which it must end.
        rankings: Cache of the schemes ordered by these devices, by the step of ``needs``.
    """

    def __init__(
        self,
        batch: SortedBatch,
        schemes: Sequence[PricedScheme],
        devices: int,
        *,
        exchange: ExchangeCost | None = None,
        unhidden: float = 0.0,
    ) -> None:
        self.batch, self.devices = batch, devices
        self.exchange, self.unhidden = exchange or ExchangeCost(), unhidden
        self.schemes = sorted(schemes, key=lambda s: (s.devices, s.depth, s.scheme.tensor))
        self.tokens = batch.tokens
        self.width = [scheme.devices for scheme in self.schemes]
        self.depth = [scheme.depth for scheme in self.schemes]
        self.util = [scheme.util for scheme in self.schemes]
        rows = np.stack([batch.row(scheme.frontier) for scheme in self.schemes], axis=1)
        self.alone, self.work, self.spread = rows
        self.least_c = np.array([[scheme.frontier.c.min()] for scheme in self.schemes])
        self.ranks = np.array([[float(width)] for width in self.width])
        self.stages = np.array([[float(depth)] for depth in self.depth])
        self.fluid = [len(scheme.frontier.caps) > 1 for scheme in self.schemes]
        self.staged = [depth > 1 for depth in self.depth]
        self.clocked = [scheme.stages is not None for scheme in self.schemes]
        share = self.exchange.sharded_share
        self.moved = [share if scheme.shards_over(devices) else 1.0 for scheme in self.schemes]
        self.needs: dict[int, Floats] = {}
        self.idle: dict[float, list[float]] = {}
        self.rankings: dict[int, list[tuple[list[int], int]]] = {}
        self.packs: dict[tuple[int, ...], Packed] = {}
        self.alike_packs: dict[tuple[int, ...], tuple[Sequence[int], Packed]] = {}
        self._chains: dict[tuple[tuple[int, ...], ...], Chains] = {}
        self._priced: dict[int, tuple[list[float], list[int]]] = {}
        self._seconds: dict[int, list[float]] = {}
        self._alone: dict[int, list[float]] = {}
        self._room: dict[int, list[int]] = {}
        self._spread: dict[int, list[float]] = {}
        self._alike: dict[int, list[int]] = {}

    @classmethod
    def like(cls, table: PriceTable, schemes: Sequence[PricedScheme]) -> PriceTable:
        """The prices of other ``schemes`` for the same batch, devices and exchange."""
        return cls(
            table.batch,
            schemes,
            table.devices,
            exchange=table.exchange,
            unhidden=table.unhidden,
        )

    def __len__(self) -> int:
        return len(self.schemes)

    @cached_property
    def estimates(self) -> bool:
        """Whether a pipeline ends at other seconds than those of its micro-batches and bubbles: for
        waits of the exchange, or as the simulator knows its stages."""
        return self.exchange.push_s > 0 or any(self.clocked)

    @cached_property
    def rows(self) -> list[int]:
        """By scheme, the number of its frontier's *usual* row: the one row by which searches price
        all micro-batches of a scheme."""
        return [self._usual(scheme) for scheme in self.schemes]

    @cached_property
    def c(self) -> list[float]:
        """Seconds of the constant of each scheme's usual row, for each micro-batch."""
        return [s.frontier.rows[row][2] for s, row in zip(self.schemes, self.rows, strict=True)]

    @cached_property
    def cap(self) -> list[int]:
        """Tokens that a micro-batch holds by each scheme's usual row."""
        return [s.frontier.caps[row] for s, row in zip(self.schemes, self.rows, strict=True)]

    @cached_property
    def share(self) -> list[float]:
        """Seconds of the constant that one token bears by each scheme's usual row, c / cap."""
        return [c / cap if cap else 0.0 for c, cap in zip(self.c, self.cap, strict=True)]

    @cached_property
    def dealt(self) -> list[bool]:
        """Whether the constants of each scheme are charged to tokens, a share each, and not
        counted by micro-batch."""
        return [fluid or deep for fluid, deep in zip(self.fluid, self.staged, strict=True)]

    @cached_property
    def each_seconds(self) -> list[list[float]]:
        """Seconds of each run by the usual rows [schemes][runs], as in :meth:`priced`."""
        return [self.priced(k)[0] for k in range(len(self))]

    @cached_property
    def each_alike(self) -> list[list[int]]:
        """Tokens that each run takes of micro-batches [schemes][runs], as in :meth:`alike`."""
        return [self.alike(k) for k in range(len(self))]

    @cached_property
    def usual(self) -> Floats:
        """Device-seconds of a sequence of each run on each scheme by the usual rows, without
        constants [schemes, runs]."""
        return self.ranks * np.array(self.each_seconds)

    @cached_property
    def lines(self) -> list[Line]:
        """For each scheme a :class:`Line`, which says how much work one of its pipelines can do
        within a time if all micro-batches pay the constant of the scheme's usual row and hold its
        tokens."""
        usual_rows = zip(
            self.depth, self.c, self.cap, self.util, self.moved, self.clocked, strict=True
        )
        hidden, exchange = 1 - self.unhidden, self.exchange
        return [
            Line(
                stages=stages,
                c=c,
                cap=cap,
                util=util,
                pull_s=hidden * moved * exchange.pull_s,
                push_s=hidden * moved * exchange.push_s,
                idle=_IDLE if clocked else 1.0,
            )
            for stages, c, cap, util, moved, clocked in usual_rows
        ]

    def _usual(self, scheme: PricedScheme) -> int:
        """The number of the frontier row by which a pipeline of ``scheme`` is quickest if it gets
        its even share, by devices, of the whole batch."""
        frontier, (squares, tokens) = scheme.frontier, self.batch.sums
        if len(frontier.caps) == 1:
            return 0
        share = min(1.0, scheme.devices / self.devices)  # of the batch that a pipeline gets
        micro_batches = np.maximum(1.0, tokens * share / frontier.limits)
        seconds = (frontier.a * squares + frontier.b * tokens) * share + frontier.c * micro_batches
        return int(seconds.argmin())

    def seconds(self, k: int) -> list[float]:
        """Seconds that each position adds to a pipeline of scheme k by the usual row, without
        constants; infinite where it does not fit."""
        if k not in self._seconds:
            self._seconds[k] = self.batch.listed(self.priced(k)[0])
        return self._seconds[k]

    def each_spread(self, k: int) -> list[float]:
        """Least seconds of each position on scheme k with a share of the constant."""
        if k not in self._spread:
            self._spread[k] = self.batch.listed(self.spread[k].tolist())
        return self._spread[k]

    def each_alone(self, k: int) -> list[float]:
        """Least seconds of each position on scheme k in a micro-batch of its own."""
        if k not in self._alone:
            self._alone[k] = self.batch.listed(self.alone[k].tolist())
        return self._alone[k]

    def room(self, k: int) -> list[int]:
        """For each position the tokens of a micro-batch of scheme k that it fills: its own length;
        on a *fluid* scheme, whose rows differ in seconds and tokens, at most the usual row's
        capacity."""
        if not self.fluid[k]:
            return self.tokens
        if k not in self._room:
            self._room[k] = self.batch.listed(self.priced(k)[1])
        return self._room[k]

    def priced(self, k: int) -> tuple[list[float], list[int]]:
        """Two lists [runs]: seconds that a sequence of each run adds to a pipeline of scheme k by
        the usual row, without constants; and tokens that it fills of a micro-batch."""
        if k not in self._priced:
            seconds, room = self.priced_arrays(k)
            tokens: list[int] = (
                room.astype(np.int64).tolist() if self.fluid[k] else self.batch.run_tokens
            )
            self._priced[k] = seconds.tolist(), tokens
        return self._priced[k]

    def priced_arrays(self, k: int) -> tuple[Floats, Floats]:
        """The two lists of :meth:`priced` as arrays, each [runs]."""
        values = self.batch.run_values
        if not self.fluid[k]:
            return self.work[k], values
        (a, b, c), cap = self.schemes[k].frontier.rows[self.rows[k]], self.cap[k]
        # What the usual row does not hold takes a micro-batch of its own; its constant c is counted
        # elsewhere.
        seconds = np.where(values > cap, self.alone[k] - c, (a * values + b) * values)
        return seconds, np.minimum(values, cap)

    def alike(self, k: int) -> list[int]:
        """For each run the tokens of a micro-batch of scheme k that one sequence takes [runs]. With
        stages, sequences of like length come together, so a micro-batch holds cap // length of them
        and each takes an equal part of the capacity."""
        room, cap = self.priced(k)[1], self.cap[k]
        if self.depth[k] == 1:
            return room
        if k not in self._alike:
            self._alike[k] = [cap // max(1, cap // tokens) for tokens in room]
        return self._alike[k]

    def added_s(self, k: int, room: list[int], tokens: int) -> float:
        """Seconds of constants that ``tokens`` more cost a pipeline of scheme k without stages.
        ``room`` has the tokens left in each of its micro-batches, rising. On a fluid scheme only
        the first micro-batch pays a whole constant, and each token beyond it a share; else every
        new micro-batch pays one."""
        if self.fluid[k]:
            return max(0, tokens - room[0]) * self.share[k] if room else self.c[k]
        return 0.0 if room and tokens <= room[-1] else self.c[k]

    def exposed_s(self, k: int, first_s: float, last_s: float) -> tuple[float, float]:
        """(pull, push): estimated seconds that ranks wait for weights before a pipeline of scheme k
        that starts with the step, and for gradients to leave after it. ``first_s`` and ``last_s``
        are seconds of its first and last micro-batch, forward and backward: the forward of the
        first hides some of the pull, the backward of the last some of the push."""
        exchange = self.exchange
        if not exchange.push_s:
            return 0.0, 0.0
        all_pull_s, all_push_s = exchange.pull_s * self.moved[k], exchange.push_s * self.moved[k]
        # Weights come stage by stage: a forward hides what moves while it passes all of them. The
        # first stage, the last to end, joins in no push before it waits for its last backward.
        pull_wait_s = all_pull_s - self.depth[k] * first_s * FORWARD
        push_wait_s = all_push_s - last_s * (1.0 if self.staged[k] else 1 - FORWARD)
        pull_wait_s = max(pull_wait_s, self.unhidden * all_pull_s)
        return pull_wait_s, max(push_wait_s, self.unhidden * all_push_s)

    def times(self, k: int, packed: Packed) -> Times:
        """Estimated seconds (wait for weights, computing, sending of gradients) of a pipeline of
        scheme k with the micro-batches ``packed``. The second longest runs first and the longest
        last, as these hide the most of the waits."""
        if not self.clocked[k]:
            pull_wait_s, push_wait_s = self.exposed_s(k, packed.next_s, packed.longest_s)
            return pull_wait_s, packed.seconds, push_wait_s
        # Longest first, the shortest drains the pipeline.
        drained_s = (self.depth[k] - 1) * (packed.longest_s - packed.shortest_s) * (1 - FORWARD)
        pull_wait_s, push_wait_s = self.exposed_s(k, packed.longest_s, packed.shortest_s)
        return pull_wait_s, packed.seconds - drained_s, push_wait_s

    def chained(self, ranks: Iterable[tuple[int, ...]]) -> Chains:
        """Which pipelines wait for which (:class:`Chains`), given the ranks of each pipeline in the
        order in which pipelines run; cached, as many schedules have the same ranks."""
        key = tuple(ranks)
        if key not in self._chains:
            self._chains[key] = Chains(key)
        return self._chains[key]

    def put(self, k: int, room: list[int], tokens: int) -> None:
        """Put ``tokens`` into the micro-batch of a pipeline of scheme k that they fill best, or
        into a new one where none has room. ``room``, the tokens left in each micro-batch, rising,
        is changed in place; a fluid scheme has one entry, which never falls below 0."""
        if self.fluid[k]:
            left = (room.pop() if room else self.cap[k]) - tokens
            room.append(max(0, left))
            return
        at = bisect_left(room, tokens)
        left = (room.pop(at) if at < len(room) else self.cap[k]) - tokens
        insort(room, left)

    def sum_s(self, k: int) -> float:
        """Seconds of all sequences together on scheme k by the usual row, without constants."""
        return sum(self.seconds(k))


def prices(frontier: Frontier, lengths: Floats) -> Floats:
    """Least seconds (alone, work, spread) [3, sequences], as this module explains them, of
    sequences of ``lengths`` tokens [sequences], longest first, over the rows of a frontier;
    infinite where no row holds a sequence."""
    out, first_short = np.empty((3, len(lengths))), 0
    if lengths[0] > frontier.caps[0]:  # the longest does not fit the smallest row
        # [:first_held] no row holds, [first_held:first_short] only some rows, the others all rows.
        first_held, first_short = np.searchsorted(
            -lengths, (-frontier.limits[-1], -frontier.limits[0])
        )
        out[:, :first_held] = np.inf
        _longer(frontier, lengths[first_held:first_short], out[:, first_held:first_short])
    _least(frontier.quick, lengths[first_short:], out[:, first_short:])
    return out


def _longer(frontier: Frontier, lengths: Floats, out: Floats) -> None:
    """Write the seconds of :func:`prices` to ``out`` [3, sequences] for ``lengths`` [sequences],
    longest first, that do not fit the row of the smallest capacity but fit a later one."""
    if not len(lengths):
        return
    # The first row that holds each length; rows go by rising capacity, so these numbers fall.
    first = np.searchsorted(frontier.limits, lengths)
    ruled = np.zeros((3, len(lengths)), dtype=np.bool_)
    for charge, share in enumerate(frontier.shares):  # alone, work and spread
        # Where the first row that holds a sequence is as quick as all later ones, take it.
        ruled[charge] = share.rules[first]
        out[charge] = (frontier.a[first] * lengths + share.b[first]) * lengths + share.c[first]
    unruled = np.flatnonzero(~ruled.all(axis=0))  # for these all rows are compared
    if len(unruled):
        least_s = np.empty((3, len(unruled)))
        _least(frontier.columns(int(first[unruled[-1]])), lengths[unruled], least_s, held=True)
        out[:, unruled] = least_s


def _least(columns: Columns, lengths: Floats, out: Floats, *, held: bool = False) -> None:
    """Write the seconds (alone, work, spread) of :func:`prices` to ``out`` [3, sequences] for
    ``lengths`` [sequences], each by the quickest row of a frontier's ``columns``; with ``held``
    only rows count that hold the length, else all are known to."""
    a, b, c, c_per_token, caps = columns
    work_s = (a * lengths + b) * lengths
    if held:
        work_s[caps < lengths] = np.inf
    np.minimum.reduce(work_s + c, axis=0, out=out[0])
    np.minimum.reduce(work_s, axis=0, out=out[1])
    np.minimum.reduce(work_s + c_per_token * lengths, axis=0, out=out[2])
