"""Iterations that choose their own samples: Data-Centric Parallel and bucket parallel as samplers.

Other planners get the samples of a step and say who works on them. Here the devices are filled
first, and what fills them is the step: nothing is left over at its end, and how many samples and
tokens it has follows from ranks and costs.

Data-Centric Parallel, an iteration on W ranks (its sections 3.2 to 3.4 and appendix C):

1. Samples of like lengths are a bucket. Each bucket has the group size p and the batch b of the
   most tokens per device-second (equation 1), by the recompute levels that the problem allows:
   ``full`` alone is DCP-inter, several are DCP-intra.
2. Groups, each of one bucket, are drawn until no further one fits the ranks.
3. Group j takes g_j launches of b samples of its bucket. Their seconds T are known, so g follows
   from a common end tau: as many launches as end by tau. Of all ends up to T_max, G_max times the
   longest first launch, the one with the least idle share of the devices' time is taken:

       sum over j of p_j (tau - sum of the T of group j)  /  (W tau)

   Equation 3 is this without p_j, as if an idle group of eight wasted as much as an idle rank, and
   in seconds, not as a share, which favours short iterations.
4. If no group then has G_min launches, all have ceil(G_min / the most of any) times as many.

Bucket parallel draws alike, with one group size for all buckets, one launch for each group, and
batches that take no longer than one sample of the longest bucket.

The next group is of the bucket that is behind most: of which the smallest share would be drawn
after a part of one more group, a part that is random for each bucket and epoch. So all buckets go
through the epoch together, wide groups that did not fit an iteration come first in the next, and
each sample is as likely as any other; the reference implementation draws each bucket alike,
whatever is in it. What bias remains is measured by :mod:`headrace.planners.draw_bias`. Within an
epoch every sample comes once; its last iterations may leave ranks without work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import ceil, floor, inf, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError, InfeasiblePlan, SpecError
from headrace.planners.launched import block
from headrace.planning.batch import ROUNDING, PriceTable
from headrace.planning.generators import Known, Role
from headrace.planning.priced import Frontier, PricedScheme
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment
from headrace.spec import Lengths
from headrace.spec.draw_options import DrawOptions, Flow
from headrace.units import counted

__all__ = [
    "DrawPosition",
    "DrawnIteration",
    "DrawnLaunch",
    "IterationDrawer",
    "Setting",
    "bucket_numbers",
]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def bucket_numbers(lengths: Counts, ratio: float) -> Counts:
    """The bucket of each sample, counted from the shortest there can be.

    Bucket n holds lengths above ``ratio ** (n - 1)`` up to ``ratio ** n`` tokens.

    Args:
        lengths: Tokens of each sample [samples].
        ratio: The longest over the shortest length of a bucket.

    Returns:
        Numbers of buckets [samples].
    """
    return np.ceil(np.log2(lengths) / log2(ratio) - ROUNDING).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the groups of a bucket run.

    Attributes:
        scheme: Their scheme and its frontier of layer plans.
        batch: Samples of a launch.
        mean_s: Seconds of a launch of samples of the bucket's mean length.
    """

    scheme: PricedScheme
    batch: int
    mean_s: float

    @property
    def width(self) -> int:
        """Ranks of a group."""
        return self.scheme.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPosition:
    """Where a drawer stands, whatever ranks and costs it draws for.

    Attributes:
        epoch: The pass over the samples.
        iteration: Iterations of the epoch that were drawn.
        taken: Samples of each bucket that were drawn, in the bucket's order of this epoch.
    """

    epoch: int = 0
    iteration: int = 0
    taken: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return asdict(self) | {"taken": list(self.taken)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DrawPosition:
        """Read what :meth:`to_json` gave."""
        return cls(epoch=value["epoch"], iteration=value["iteration"], taken=tuple(value["taken"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLaunch:
    """One micro-batch of an iteration.

    Attributes:
        ranks: The ranks of its group.
        sequences: Indices into the lengths of the iteration.
    """

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnIteration:
    """The samples of one optimizer step and who works on them.

    It is a generator with a single schedule, so its plan is
    ``hr.plan(drawn.lengths, problem, generators=[drawn])``.

    Attributes:
        flow: What drew it.
        epoch: The pass over the samples.
        lengths: Its samples; ``lengths.ids`` are their numbers.
        launches: Its micro-batches in order.
        after: Where the drawer stands after it.
    """

    flow: Flow
    epoch: int
    lengths: Lengths
    launches: tuple[DrawnLaunch, ...]
    after: DrawPosition = field(repr=False)

    @property
    def role(self) -> Role:
        """For which problems it is."""
        return Role(
            name=f"drawn by {self.flow}",
            tables="one size",
            costs=("model", "groups"),
            beyond=-inf,
            final=True,
        )

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Assignment]:
        """Its launches as a schedule, where the table's schemes hold them.

        Args:
            table: The prices of the iteration's samples.
            known: What the search knows so far.

        Yields:
            The schedule.
        """
        schemes = {width: k for k, width in enumerate(table.width)}
        place = {index: position for position, index in enumerate(table.batch.order)}
        groups = [
            (schemes.get(len(one.ranks)), one.ranks, sorted(place[i] for i in one.sequences))
            for one in self.launches
        ]
        held = [
            (k, ranks, members)
            for k, ranks, members in groups
            if k is not None
            and sum(table.tokens[i] for i in members) <= table.schemes[k].most_tokens
        ]
        if len(held) == len(groups):
            yield Assignment.of_launches(table, held, f"drawn by {self.flow}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bucket:
    """Samples of like lengths.

    Attributes:
        samples: Their numbers [samples].
        tokens: Their lengths [samples].
        setting: What its groups run.
    """

    samples: Counts
    tokens: Counts
    setting: Setting

    def launches(self, taken: int) -> int:
        """Launches until the epoch ends, once so many samples were taken."""
        return -(-(len(self.samples) - taken) // self.setting.batch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Queue:
    """The next launches of a bucket, dealt out to its groups in turn.

    Attributes:
        width: Ranks of a group.
        groups: Groups of the bucket in this iteration.
        seconds: Seconds of the launches before each [launches + 1].
        ends_s: Seconds until the first n launches have ended, for every n from one on [launches].
    """

    width: int
    groups: int
    seconds: Floats
    ends_s: Floats

    @classmethod
    def of(cls, setting: Setting, groups: int, launch_s: Floats) -> _Queue:
        """Launches of ``launch_s`` seconds [launches], the n-th for group n modulo ``groups``."""
        rounds = ceil(len(launch_s) / groups)
        dealt = np.zeros(rounds * groups)
        dealt[: len(launch_s)] = launch_s
        ends = dealt.reshape(rounds, groups).cumsum(axis=0).reshape(-1)[: len(launch_s)]
        return cls(
            width=setting.width,
            groups=groups,
            seconds=np.append(0.0, launch_s.cumsum()),
            ends_s=np.maximum.accumulate(ends),
        )

    def by(self, ends_s: Floats) -> Counts:
        """How many launches have ended by each of some times [times]."""
        found: Counts = np.searchsorted(self.ends_s, ends_s * (1 + ROUNDING), side="right")
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EpochOrder:
    """What an epoch draws: for every bucket the order of its samples, as positions in it, and the
    part of a group after which its first one is due."""

    epoch: int
    samples: Sequence[Counts]
    offsets: Sequence[float]


class IterationDrawer:
    """Draws iterations for ever, every sample once per epoch.

    What an iteration holds follows from ranks and costs; what is left of an epoch does not, so a
    drawer for other ranks or costs takes over at any position.

    Args:
        problem: Devices, costs, and which choices are open.
        lengths: Tokens of each sample.
        options: How iterations are drawn.

    Attributes:
        position: Where it stands.
        settings: What the groups of each bucket run, the shortest bucket first.

    Raises:
        InfeasiblePlan: When the longest sample fits no group.
        SpecError: For costs of pipelines, and for ranks in lockstep, whose groups cannot end
            together as they wait for each other at every layer.

    Example:
        >>> drawer = IterationDrawer(problem, corpus_lengths, DrawOptions())
        >>> drawn = drawer.draw()
        >>> plan = hr.plan(drawn.lengths, problem, generators=[drawn])
    """

    def __init__(
        self, problem: Problem, lengths: Sequence[int] | Counts, options: DrawOptions
    ) -> None:
        self._devices, self._options = problem.devices, options
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if not len(self._lengths) or self._lengths.min() < 1:
            raise DataError(
                "lengths of the samples", got="none or below 1", wanted=">= 1 token each"
            )
        numbers = bucket_numbers(self._lengths, options.bucket_ratio)
        members = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        settings = _settings(problem, [self._lengths[own] for own in members], options)
        self._buckets = [
            _Bucket(samples=own, tokens=self._lengths[own], setting=setting)
            for own, setting in zip(members, settings, strict=True)
        ]
        self.position = DrawPosition(taken=(0,) * len(members))
        self._orders: _EpochOrder | None = None

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """What the groups of each bucket run, the shortest bucket first."""
        return tuple(bucket.setting for bucket in self._buckets)

    @property
    def borders(self) -> tuple[int, ...]:
        """Tokens of the longest sample of each bucket, the shortest bucket first."""
        return tuple(int(bucket.tokens.max()) for bucket in self._buckets)

    def restore(self, position: DrawPosition) -> None:
        """Continue where another drawer of the same samples stood.

        Args:
            position: Its position.

        Raises:
            DataError: For a position of other samples or other buckets.
        """
        counts = [len(bucket.samples) for bucket in self._buckets]
        fits = len(position.taken) == len(counts) and all(
            0 <= taken <= count for taken, count in zip(position.taken, counts, strict=True)
        )
        if not fits or sum(position.taken) == len(self._lengths):
            raise DataError(
                "position in the samples",
                got=f"{list(position.taken)} taken of the buckets",
                wanted=f"fewer than {counts}, a number for each",
                hint="samples or buckets have changed since",
            )
        self.position = position

    def draw(self) -> DrawnIteration:
        """Draw the next iteration and move past it.

        Returns:
            Its samples and launches.
        """
        at = self.position
        groups = self._groups(at)
        counts = self._counts(at, groups)
        launches, samples = self._launches(at, groups, counts)
        after = self._after(at, counts)
        self.position = after
        return DrawnIteration(
            flow=self._options.flow,
            epoch=at.epoch,
            lengths=Lengths.of(self._lengths[samples], samples),
            launches=tuple(launches),
            after=after,
        )

    def epoch(self) -> Iterator[DrawnIteration]:
        """The iterations until the epoch ends.

        Yields:
            One after the other.
        """
        epoch = self.position.epoch
        while self.position.epoch == epoch:
            yield self.draw()

    def _order(self, epoch: int) -> _EpochOrder:
        """The order of an epoch."""
        if self._orders is None or self._orders.epoch != epoch:
            key = np.array([self._options.seed, epoch], dtype=np.uint64)
            bits = np.random.Philox(key=key)
            drawn = bits.random_raw(len(self._lengths))
            own = [np.argsort(drawn[bucket.samples], kind="stable") for bucket in self._buckets]
            offsets = np.random.Generator(bits).random(len(own)).tolist()
            self._orders = _EpochOrder(epoch=epoch, samples=own, offsets=offsets)
        return self._orders

    def _groups(self, at: DrawPosition) -> list[int]:
        """Groups of each bucket, drawn until no further one fits the ranks: each time of the bucket
        that is behind most."""
        offsets = self._order(at.epoch).offsets
        groups, room, longest_s = [0] * len(self._buckets), self._devices, 0.0
        while True:
            due = [
                (self._due(at, i, groups[i] + offsets[i], longest_s), i)
                for i, bucket in enumerate(self._buckets)
                if bucket.setting.width <= room and groups[i] < bucket.launches(at.taken[i])
            ]
            if not due:
                return groups
            _, i = min(due)
            groups[i] += 1
            room -= self._buckets[i].setting.width
            longest_s = max(longest_s, self._buckets[i].setting.mean_s)

    def _due(self, at: DrawPosition, i: int, groups: float, longest_s: float) -> float:
        """The share of a bucket that is drawn after so many groups of an iteration whose launches
        take up to ``longest_s`` seconds."""
        bucket, steps = self._buckets[i], 1.0
        if self._options.flow == "dcp":
            mean_s = bucket.setting.mean_s
            steps = self._options.most_steps * max(longest_s, mean_s) / mean_s
        count = len(bucket.samples)
        return (at.taken[i] + groups * min(steps * bucket.setting.batch, count)) / count

    def _counts(self, at: DrawPosition, groups: Sequence[int]) -> list[int]:
        """Launches of each bucket."""
        if self._options.flow == "bucket":
            return list(groups)
        used = [i for i, many in enumerate(groups) if many]
        first_s = max(float(self._seconds(at, i, groups[i]).max()) for i in used)
        latest_s = self._options.most_steps * first_s
        queues = {i: self._queue(at, i, groups[i], latest_s) for i in used}
        end_s = np.array([_least_idle_s(list(queues.values()), latest_s)])
        counts = [int(queues[i].by(end_s)[0]) if i in queues else 0 for i in range(len(groups))]
        most = max(ceil(counts[i] / groups[i]) for i in used)
        if most < self._options.least_steps:
            times = ceil(self._options.least_steps / most)
            for i in used:
                counts[i] = min(counts[i] * times, self._buckets[i].launches(at.taken[i]))
        return counts

    def _seconds(self, at: DrawPosition, i: int, many: int) -> Floats:
        """Seconds of the next ``many`` launches of a bucket [launches]."""
        bucket = self._buckets[i]
        start, batch = at.taken[i], bucket.setting.batch
        own = bucket.tokens[self._order(at.epoch).samples[i][start : start + many * batch]]
        return _launch_s(bucket.setting.scheme.frontier, own, batch)

    def _queue(self, at: DrawPosition, i: int, groups: int, latest_s: float) -> _Queue:
        """The launches of a bucket that may end by ``latest_s``."""
        setting, left = self._buckets[i].setting, self._buckets[i].launches(at.taken[i])
        many = min(left, groups * ceil(1 + latest_s / setting.mean_s))
        while True:
            queue = _Queue.of(setting, groups, self._seconds(at, i, many))
            if many == left or queue.ends_s[-1] > latest_s:
                return queue
            many = min(left, 2 * many)

    def _launches(
        self, at: DrawPosition, groups: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[DrawnLaunch], Counts]:
        """The launches in order, the first of every group before the second of any, and the numbers
        of their samples; wide groups have the first ranks. ``groups`` and ``counts`` are the groups
        and the launches of each bucket."""
        widest = sorted(range(len(groups)), key=lambda i: -self._buckets[i].setting.width)
        in_round, samples = list[tuple[int, DrawnLaunch]](), list[Counts]()
        first_rank = samples_before = 0  # of the buckets so far
        for i in widest:
            bucket, batch = self._buckets[i], self._buckets[i].setting.batch
            width, start = bucket.setting.width, at.taken[i]
            own = self._order(at.epoch).samples[i][start : start + counts[i] * batch]
            samples.append(bucket.samples[own])
            for n in range(counts[i]):
                ranks = tuple(first_rank + rank for rank in block(width, n % groups[i]))
                some = range(n * batch, min((n + 1) * batch, len(own)))
                sequences = tuple(samples_before + member for member in some)
                launch = DrawnLaunch(ranks=ranks, sequences=sequences)
                in_round.append((n // groups[i], launch))
            first_rank += groups[i] * width
            samples_before += len(own)
        in_round.sort(key=lambda item: item[0])  # stable: wide groups stay in front
        return [launch for _, launch in in_round], np.concatenate(samples)

    def _after(self, at: DrawPosition, counts: Sequence[int]) -> DrawPosition:
        """Where it stands after so many launches of each bucket."""
        taken = tuple(
            min(taken + many * bucket.setting.batch, len(bucket.samples))
            for taken, many, bucket in zip(at.taken, counts, self._buckets, strict=True)
        )
        if sum(taken) == len(self._lengths):
            return DrawPosition(epoch=at.epoch + 1, taken=(0,) * len(taken))
        return DrawPosition(epoch=at.epoch, iteration=at.iteration + 1, taken=taken)


def _least_idle_s(queues: Sequence[_Queue], latest_s: float) -> float:
    """The end in seconds, up to ``latest_s``, with the least idle share of the ranks' time; every
    group has a launch, and of equal shares the latest end is taken."""
    soonest_s = max(float(queue.ends_s[queue.groups - 1]) for queue in queues)
    ends_s = np.unique(np.concatenate([queue.ends_s for queue in queues]))
    ends_s = ends_s[(ends_s >= soonest_s) & (ends_s <= max(latest_s, soonest_s))]
    busy_s = sum(queue.width * queue.seconds[queue.by(ends_s)] for queue in queues)
    share = busy_s / ends_s
    return float(ends_s[np.flatnonzero(share >= share.max() * (1 - ROUNDING))[-1]])


def _launch_s(frontier: Frontier, tokens: Counts, batch: int) -> Floats:
    """Seconds of launches of ``batch`` samples each of ``tokens`` [samples], in this order, by the
    quickest layer plan that holds each [launches]."""
    starts = np.arange(0, len(tokens), batch)
    sums = np.add.reduceat(tokens, starts).astype(np.float64)
    squares = np.add.reduceat(tokens.astype(np.float64) ** 2, starts)
    a, b, c, _, caps = frontier.columns(0)
    seconds = a * squares + b * sums + c
    seconds[caps < sums] = np.inf
    least: Floats = seconds.min(axis=0)
    return least


def _settings(problem: Problem, buckets: Sequence[Counts], options: DrawOptions) -> list[Setting]:
    """What the groups of each bucket run, given the lengths of its samples; with weights held in
    the way that takes the fewest device-seconds of the epoch."""
    choose = _throughput if options.flow == "dcp" else _one_width
    tried = [choose(problem, schemes, buckets, options) for schemes in _offers(problem)]
    found = [settings for settings in tried if settings]
    if not found:
        longest, ranks = max(int(own.max()) for own in buckets), counted(problem.devices, "rank")
        got = f"no group of {ranks} or fewer that holds it"
        if options.width is not None:
            beyond = options.width > problem.devices
            why = f"of {ranks}" if beyond else "that do not hold it, or without costs"
            got = f"groups of {options.width} {why}"
        raise InfeasiblePlan(
            f"the longest sample of {longest:,} tokens",
            got=got,
            wanted="a group size that does",
            hint="more memory, another recompute level, or a shorter context",
        )

    def device_s(settings: Sequence[Setting]) -> float:
        pairs = zip(settings, buckets, strict=True)
        return sum(s.width * s.mean_s * len(own) / s.batch for s, own in pairs)

    return min(found, key=device_s)


def _offers(problem: Problem) -> list[list[PricedScheme]]:
    """Groups of every size, for each way to hold weights. Raises SpecError where there are none."""
    if problem.semantics != "free":
        raise SpecError(
            "semantics of drawn iterations",
            got=problem.semantics,
            wanted="free",
            hint="in lockstep groups wait for each other at every layer: plan given batches",
        )
    if problem.is_published:
        groups = [s for s in problem.published_schemes if s.depth == 1 and s.scheme.tensor == 1]
        if not groups:
            raise SpecError(
                "costs of drawn iterations", got="those of pipelines", wanted="those of groups"
            )
        return [groups]
    return [list(problem.pricing.groups(weights)) for weights in problem.holding]


def _throughput(
    problem: Problem,
    schemes: Sequence[PricedScheme],
    buckets: Sequence[Counts],
    options: DrawOptions,
) -> list[Setting]:
    """For each bucket the size and batch of the most tokens per device-second for its longest
    sample (equation 1); nothing where one fits no group."""
    settings = list[Setting]()
    for own in buckets:
        longest, best = int(own.max()), (inf, 0, 0)
        for k, scheme in enumerate(schemes):
            if scheme.devices <= problem.devices:
                batches = np.minimum(scheme.frontier.limits // longest, len(own))
                seconds = _equal_s(scheme.frontier, longest, batches)
                per_sample = np.where(batches > 0, seconds / np.maximum(batches, 1), inf)
                row = int(per_sample.argmin())
                priced = scheme.devices * float(per_sample[row])
                best = min(best, (priced, k, int(batches[row])))
        if best[0] == inf:
            return []
        settings.append(_setting(schemes[best[1]], best[2], own))
    return settings


def _one_width(
    problem: Problem,
    schemes: Sequence[PricedScheme],
    buckets: Sequence[Counts],
    options: DrawOptions,
) -> list[Setting]:
    """For each bucket the batch that memory allows and that takes no longer than one sample of the
    longest bucket, on groups of one size; nothing where that does not hold the longest sample."""
    longest = max(int(own.max()) for own in buckets)
    holding = [
        s
        for s in schemes
        if longest <= s.most_tokens
        and s.devices <= problem.devices
        and options.width in (None, s.devices)
    ]
    if not holding:
        return []
    scheme = min(holding, key=lambda s: s.devices)
    found = scheme.frontier.best(float(longest) ** 2, longest)
    assert found is not None, "it holds the longest sample"
    slowest_s, settings = found[0], list[Setting]()
    for own in buckets:
        length, frontier = int(own.max()), scheme.frontier
        each_s = (frontier.a * length + frontier.b) * length
        even = np.floor((slowest_s - frontier.c) / each_s * (1 + ROUNDING))
        batches = np.minimum(frontier.limits // length, even)
        settings.append(_setting(scheme, min(max(1, floor(batches.max())), len(own)), own))
    return settings


def _equal_s(frontier: Frontier, length: int, batches: Floats) -> Floats:
    """Seconds of launches of samples of one length, by layer plan and its batch [rows]."""
    return (frontier.a * length + frontier.b) * length * batches + frontier.c


def _setting(scheme: PricedScheme, batch: int, own: Counts) -> Setting:
    """Groups of a scheme that launch ``batch`` of a bucket's samples, of lengths ``own``."""
    values = own.astype(np.float64)
    tokens = floor(batch * float(values.mean()))
    found = scheme.frontier.best(batch * float((values**2).mean()), max(1, tokens))
    assert found is not None, "it holds a batch of the longest samples"
    return Setting(scheme=scheme, batch=batch, mean_s=found[0])
