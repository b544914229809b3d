"""Sweeps: one thing measured on packs of growing length, agreed on by all ranks.

Nothing here knows a model: a sweep is given a function that makes the probe of a pack, so that
layers of native models, their branches and anyone's ``nn.Module`` are measured alike. All groups of
a size run at the same time, as they will in training, and the slowest rank counts. What a rank
learns is agreed before the next pack, so all ranks measure alike.

[Note: memory runs out] A pack that may take more than half of the memory is first tried by each
rank alone, without communication: a rank that runs out of memory there blocks no other.
Then the ranks agree; when any of them failed, the sweep ends and the pack is kept as one that does
not fit. A pack whose bytes, extrapolated, exceed the memory is not tried at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from headrace.comm.collectives import gather_floats
from headrace.comm.fake_world import fake_groups
from headrace.comm.mesh import Groups
from headrace.native.counted import ByteCounter, DeviceBytes
from headrace.native.machine import is_out_of_memory
from headrace.native.spans import Clock, clock_of
from headrace.profiling.probe import Counter, Probe, bytes_of, seconds_of
from headrace.spec.plan import TokenOrder
from headrace.spec.profile import NotFitting, ProfilePoint

__all__ = [
    "Sweep",
    "SweepOptions",
    "Sweeper",
    "block",
    "blocks",
    "first_of_each_node_first",
    "slowest",
]

Ranks = tuple[int, ...]
"""Ranks of the world that make up a group."""

_RISKY = 0.5
"""The fraction of the memory above which a pack is tried by each rank alone first."""

_SETTLE_S = 2e-3
"""Seconds in which gloo's threads free the buffers that they have sent."""

_NOISY_S = 0.05
"""Seconds that may be spent on up to six timings of a pack, as those of short ones are noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The measurement of one option, named ``option``, on groups of ``p`` ranks.

    ``probe(groups, ranks, lengths)`` makes the probe of a pack of documents of ``lengths`` tokens
    on the ranks of one group; ``groups_of(ranks)`` are the groups it needs beside. ``order`` and
    ``fetched`` are said of every point (:class:`headrace.spec.profile.ProfilePoint`). ``counter``
    counts bytes on a CPU in another way than by operators. What works on ``chunk_tokens`` tokens of
    a rank at a time needs bytes by another line from there on, so that they are counted at the
    first two packs of as many as well.
    """

    p: int
    option: str
    probe: Callable[[Groups, Ranks, tuple[int, ...]], Probe]
    groups_of: Callable[[Ranks], Iterable[Ranks]] = lambda ranks: ()
    order: TokenOrder = "natural"
    fetched: float = 1.0
    counter: Callable[[], Counter] | None = None
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """On which packs to measure, and how often.

    ``longest`` is the longest pack in tokens. ``point_s`` ends a sweep: no pack is measured that
    is expected to take longer (seconds of one forward and backward of a probe of two layers).
    ``repeats`` timings per point, the least counts; bytes are counted ``counts`` times where groups
    have several ranks, whose buffers come and go. ``lengths`` are documents to measure in the
    place of packs chosen here, bytes counted at each.
    """

    longest: int
    point_s: float = 1.0
    repeats: int = 2
    counts: int = 3
    lengths: tuple[int, ...] = ()


def blocks(ranks: int, p: int) -> list[Ranks]:
    """The groups of p neighbouring ranks that can work side by side."""
    return [tuple(range(k * p, (k + 1) * p)) for k in range(ranks // p)]


def block(groups: Groups, p: int) -> Ranks | None:
    """This rank's group of p; None where p does not divide the ranks and this rank is left over."""
    return next((ranks for ranks in blocks(groups.ranks, p) if groups.rank in ranks), None)


def slowest(groups: Groups, values: list[float]) -> list[float]:
    """Of each of some values, of which every rank has its own, the largest on any rank.
    Collective."""
    values_by_rank = gather_floats(values, groups.world)
    return [max(column) for column in zip(*values_by_rank, strict=True)]


def first_of_each_node_first(groups: Groups, work: Callable[[], None]) -> None:
    """Run ``work``, which may not communicate, on the first rank of each node, and when all of
    these are done on the other ranks. Collective."""
    firsts = accumulate(groups.node_sizes or (groups.ranks,), initial=0)
    is_first = groups.rank in firsts
    if is_first:
        work()
    slowest(groups, [0.0])  # nobody passes before all have come
    if not is_first:
        work()


class Sweeper:
    """Runs sweeps on the ranks of ``groups``; every rank gets the same points.

    ``room_bytes`` is the memory of a rank for activations. ``not_fitting`` collects the packs for
    which a rank had too little.
    """

    def __init__(
        self, groups: Groups, options: SweepOptions, *, room_bytes: float = inf, device: str = "cpu"
    ) -> None:
        """A sweeper of this rank; a pack that needs more than ``room_bytes`` is not run."""
        self.not_fitting: list[NotFitting] = []
        self.clock: Clock = clock_of(device)
        self._groups, self._options = groups, options
        self._room_bytes, self._device = room_bytes, device
        self._fake_groups: Groups | None = None  # in which ranks try packs without communication

    def prepare(self, sweeps: Iterable[Sweep]) -> None:
        """Make the groups that sweeps need. Collective, before the first of them."""
        self._groups.prepare(g for sweep in sweeps for g in self._needed_groups(sweep))

    def points(self, sweep: Sweep) -> list[ProfilePoint]:
        """The points of a sweep, pack after pack until one is too slow or does not fit; a pack that
        does not fit is added to ``not_fitting``. Collective."""
        points: list[ProfilePoint] = []
        counted: list[ProfilePoint] = []  # those whose bytes were counted
        last_s, last_tokens = 0.0, 1  # of the pack before
        for lengths, count_bytes in self._packs(sweep):
            tokens = sum(lengths)
            growth = tokens / last_tokens
            # Seconds grow with the square of the tokens at most.
            slow = last_s * growth * max(1.0, growth) > self._options.point_s
            if len(counted) >= 2 and slow and not self._options.lengths:
                break
            if not self._fits(sweep, lengths, _extrapolate_bytes(counted, tokens)):
                self.not_fitting.append(NotFitting(p=sweep.p, option=sweep.option, tokens=tokens))
                break
            point = self._point(sweep, lengths, count_bytes=count_bytes)
            points.append(point)
            if count_bytes:
                counted.append(point)
            last_s = 2 * (point.forward_s + point.backward_s)  # of the probe's two layers
            last_tokens = tokens
        return points

    def _fits(self, sweep: Sweep, lengths: tuple[int, ...], expected_bytes: float) -> bool:
        """Whether a pack, which is expected to need so many bytes, fits in the memory of every
        rank. Collective where it may take more than half of it: then each rank tries alone."""
        if expected_bytes > self._room_bytes:
            return False
        return expected_bytes <= _RISKY * self._room_bytes or self._survives(sweep, lengths)

    def _needed_groups(self, sweep: Sweep) -> Iterator[Ranks]:
        """The groups of the sweep's size, each followed by the sets of its ranks that the layers
        need."""
        for ranks in blocks(self._groups.ranks, sweep.p):
            yield ranks
            yield from sweep.groups_of(ranks)

    def _packs(self, sweep: Sweep) -> Iterator[tuple[tuple[int, ...], bool]]:
        """(lengths of a pack's documents in tokens, whether to count bytes there): single documents
        whose length doubles from step to step, and at some of the first steps a pack of eight short
        ones with as many tokens, which tell the costs of tokens and of their squares apart. Bytes
        grow in a line, so three steps are enough to count them."""
        longest = self._options.longest
        if self._options.lengths:
            yield from (((length,), True) for length in self._options.lengths)
            return
        chunk = inf if sweep.chunk_tokens is None else sweep.chunk_tokens * sweep.p
        length, step = max(1, min(64 * sweep.p, longest // 16)), 0
        while length < longest:
            yield (length,), 2 <= step < 5 or chunk <= length < 4 * chunk
            if 2 <= step < 6 and length >= 16:
                yield (length // 8,) * 8, False
            length, step = 2 * length, step + 1
        yield (longest,), step < 5 or chunk <= longest < 4 * chunk

    def _survives(self, sweep: Sweep, lengths: tuple[int, ...]) -> bool:
        """Whether every rank can run a pack without running out of memory, each with absent
        partners; the same answer on all ranks. Collective."""
        group_ranks, failed = block(self._groups, sweep.p), False
        if self._fake_groups is None:
            self._fake_groups = fake_groups()
        self._fake_groups.prepare(self._needed_groups(sweep))
        try:
            if group_ranks is not None:
                seconds_of(sweep.probe(self._fake_groups, group_ranks, lengths), self.clock)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        return not slowest(self._groups, [float(failed)])[0]

    def _point(self, sweep: Sweep, lengths: tuple[int, ...], *, count_bytes: bool) -> ProfilePoint:
        """The point of a pack: the largest values of all ranks, of times the least of some runs.
        Collective."""
        group_ranks = block(self._groups, sweep.p)
        probe = sweep.probe(self._groups, group_ranks, lengths) if group_ranks else None
        best = [inf] * 2
        spent_s, repeat = 0.0, 0
        while repeat < self._options.repeats or (repeat < 6 and spent_s < _NOISY_S):
            local = seconds_of(probe, self.clock) if probe else [0.0] * 2
            agreed = slowest(self._groups, local)
            best = [min(pair) for pair in zip(best, agreed, strict=True)]
            spent_s, repeat = spent_s + sum(agreed), repeat + 1
        counts = slowest(self._groups, self._count(probe, sweep)) if count_bytes else []
        return ProfilePoint(
            p=sweep.p,
            option=sweep.option,
            lengths=lengths,
            forward_s=best[0],
            backward_s=best[1],
            kept_bytes=int(counts[0]) if count_bytes else None,
            transient_bytes=int(counts[1]) if count_bytes else None,
            order=sweep.order,
            fetched=sweep.fetched,
        )

    def _count(self, probe: Probe | None, sweep: Sweep) -> list[float]:
        """[kept, transient] bytes of a probe on this rank, zeros on a rank that has no probe."""
        if probe is None:
            return [0.0, 0.0]
        if self._device != "cpu":
            return list(map(float, bytes_of(probe, DeviceBytes)))
        if sweep.counter is not None:
            return list(map(float, bytes_of(probe, sweep.counter)))
        settle_s = _SETTLE_S if sweep.p > 1 else 0.0
        times = self._options.counts if sweep.p > 1 else 1
        return list(map(float, bytes_of(probe, lambda: ByteCounter(settle_s=settle_s), times)))


def _extrapolate_bytes(counted: list[ProfilePoint], tokens: int) -> float:
    """Bytes that two layers are expected to need for so many tokens: on the line through the last
    two points in ``counted``, or in proportion to its only one, and never fewer than the last
    needed; 0 without points. Points of ``counted`` have bytes."""
    if not counted:
        return 0.0
    needed = [
        (sum(point.lengths), 2 * (point.kept_bytes or 0) + (point.transient_bytes or 0))
        for point in counted
    ]
    last_tokens, last_bytes = needed[-1]
    earlier_tokens, earlier_bytes = needed[-2] if len(needed) > 1 else (0, 0)
    if earlier_tokens >= last_tokens:  # lengths that were asked for may fall
        earlier_tokens, earlier_bytes = 0, 0
    slope = (last_bytes - earlier_bytes) / (last_tokens - earlier_tokens)
    return last_bytes + max(0.0, slope) * (tokens - last_tokens)
