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
from headrace.planning.batch import PriceTable
from headrace.planning.generators import Known, Role
from headrace.planning.priced import Frontier, PricedScheme
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment
from headrace.planning.tolerances import ROUNDING
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
    """What the groups of a bucket run: a scheme and a batch size.

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
        """The number of ranks of a group."""
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
        """Its role as a generator: for free semantics, and with a schedule that is not improved
        further."""
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
        scheme_of_width = {width: k for k, width in enumerate(table.width)}
        position_of = {index: position for position, index in enumerate(table.batch.order)}
        groups = [
            (
                scheme_of_width.get(len(launch.ranks)),
                launch.ranks,
                sorted(position_of[i] for i in launch.sequences),
            )
            for launch in self.launches
        ]
        fitting = [
            (k, ranks, members)
            for k, ranks, members in groups
            if k is not None
            and sum(table.tokens[i] for i in members) <= table.schemes[k].most_tokens
        ]
        if len(fitting) == len(groups):
            yield Assignment.of_launches(table, fitting, f"drawn by {self.flow}")


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
        """How many launches its samples still make in this epoch, once ``taken`` of them were
        drawn."""
        return -(-(len(self.samples) - taken) // self.setting.batch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Queue:
    """The next launches of a bucket, dealt out to its groups in turn.

    Attributes:
        width: Ranks of a group.
        groups: Groups of the bucket in this iteration.
        seconds: Sum of the seconds of the first n launches, for every n from 0 [launches + 1].
        ends_s: Seconds until the first n launches have ended, for every n from 1 [launches].
    """

    width: int
    groups: int
    seconds: Floats
    ends_s: Floats

    @classmethod
    def of(cls, setting: Setting, groups: int, launch_s: Floats) -> _Queue:
        """The queue of launches that take ``launch_s`` seconds each [launches]; launch n goes to
        group n modulo ``groups``."""
        rounds = ceil(len(launch_s) / groups)
        padded_s = np.zeros(rounds * groups)  # the last round is filled up with zeros
        padded_s[: len(launch_s)] = launch_s
        # As [rounds, groups] each column has the launches of one group, one after the other.
        ends = padded_s.reshape(rounds, groups).cumsum(axis=0).reshape(-1)[: len(launch_s)]
        return cls(
            width=setting.width,
            groups=groups,
            seconds=np.append(0.0, launch_s.cumsum()),
            ends_s=np.maximum.accumulate(ends),  # a later launch of another group may end sooner
        )

    def by(self, ends_s: Floats) -> Counts:
        """How many launches of the queue have ended by each of the times ``ends_s`` [times]."""
        ended: Counts = np.searchsorted(self.ends_s, ends_s * (1 + ROUNDING), side="right")
        return ended


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EpochOrder:
    """The random order of an epoch.

    Attributes:
        epoch: The pass over the samples.
        samples: The order of each bucket's samples, as indices into the bucket's arrays [samples].
        offsets: A random fraction of a group, 0 to 1, for each bucket. It is added to the bucket's
            number of groups when the next bucket is picked, and so decides how early in an
            iteration the bucket's first group comes.
    """

    epoch: int
    samples: Sequence[Counts]
    offsets: Sequence[float]


class IterationDrawer:
    """Draws iterations without end, every sample once per epoch.

    The samples of an iteration depend on ranks and costs. A position, which says what is left of an
    epoch, does not, so a drawer for other ranks or costs can take over at any position.

    Args:
        problem: Devices, costs, and which choices are open.
        lengths: Tokens of each sample.
        options: How iterations are drawn.

    Attributes:
        position: Which samples of the epoch were drawn so far.
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
        """Sort the samples into buckets, and choose what the groups of each bucket run."""
        self._devices, self._options = problem.devices, options
        self._lengths = np.asarray(lengths, dtype=np.int64)
        if not len(self._lengths) or self._lengths.min() < 1:
            raise DataError(
                "lengths of the samples", got="none or below 1", wanted=">= 1 token each"
            )
        numbers = bucket_numbers(self._lengths, options.bucket_ratio)
        # Numbers of the samples of each bucket, the shortest bucket first.
        members = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        settings = _settings(problem, [self._lengths[samples] for samples in members], options)
        self._buckets = [
            _Bucket(samples=samples, tokens=self._lengths[samples], setting=setting)
            for samples, setting in zip(members, settings, strict=True)
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
        position = self.position
        groups = self._groups(position)
        counts = self._counts(position, groups)
        launches, samples = self._launches(position, groups, counts)
        after = self._after(position, counts)
        self.position = after
        return DrawnIteration(
            flow=self._options.flow,
            epoch=position.epoch,
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
        """The random order of ``epoch``, which follows from it and the seed; kept for the epoch
        drawn last."""
        if self._orders is None or self._orders.epoch != epoch:
            key = np.array([self._options.seed, epoch], dtype=np.uint64)
            philox = np.random.Philox(key=key)
            # A random number for each sample; those of a bucket are sorted by it.
            sort_keys = philox.random_raw(len(self._lengths))
            orders = [
                np.argsort(sort_keys[bucket.samples], kind="stable") for bucket in self._buckets
            ]
            offsets = np.random.Generator(philox).random(len(orders)).tolist()
            self._orders = _EpochOrder(epoch=epoch, samples=orders, offsets=offsets)
        return self._orders

    def _groups(self, position: DrawPosition) -> list[int]:
        """How many groups each bucket has in the iteration at ``position``. Groups are added one by
        one, each to the bucket that is behind most, until no further one fits the ranks."""
        offsets = self._order(position.epoch).offsets
        groups, free_ranks, longest_s = [0] * len(self._buckets), self._devices, 0.0
        while True:
            due = [
                (self._due(position, i, groups[i] + offsets[i], longest_s), i)
                for i, bucket in enumerate(self._buckets)
                if bucket.setting.width <= free_ranks
                and groups[i] < bucket.launches(position.taken[i])
            ]
            if not due:
                return groups
            _, i = min(due)
            groups[i] += 1
            free_ranks -= self._buckets[i].setting.width
            longest_s = max(longest_s, self._buckets[i].setting.mean_s)

    def _due(self, position: DrawPosition, i: int, groups: float, longest_s: float) -> float:
        """The fraction of bucket ``i`` that would be drawn by the end of this iteration if it had
        ``groups`` groups (a fraction of one included) and the longest launch of the iteration took
        ``longest_s`` seconds. The bucket with the least fraction gets the next group."""
        bucket, launches_each = self._buckets[i], 1.0
        if self._options.flow == "dcp":  # a group launches until G_max times the longest launch
            mean_s = bucket.setting.mean_s
            launches_each = self._options.most_steps * max(longest_s, mean_s) / mean_s
        count = len(bucket.samples)
        samples_each = min(launches_each * bucket.setting.batch, count)
        return (position.taken[i] + groups * samples_each) / count

    def _counts(self, position: DrawPosition, groups: Sequence[int]) -> list[int]:
        """How many launches each bucket has in the iteration at ``position``, given the ``groups``
        of each: those that end by the common end with the least idle time."""
        if self._options.flow == "bucket":
            return list(groups)
        drawn = [i for i, count in enumerate(groups) if count]
        longest_first_s = max(float(self._seconds(position, i, groups[i]).max()) for i in drawn)
        latest_s = self._options.most_steps * longest_first_s
        queues = {i: self._queue(position, i, groups[i], latest_s) for i in drawn}
        end_s = np.array([_least_idle_s(list(queues.values()), latest_s)])
        counts = [int(queues[i].by(end_s)[0]) if i in queues else 0 for i in range(len(groups))]
        most_steps = max(ceil(counts[i] / groups[i]) for i in drawn)
        # Where no group has G_min launches, every bucket gets a multiple of its launches.
        if most_steps < self._options.least_steps:
            factor = ceil(self._options.least_steps / most_steps)
            for i in drawn:
                counts[i] = min(counts[i] * factor, self._buckets[i].launches(position.taken[i]))
        return counts

    def _seconds(self, position: DrawPosition, i: int, launches: int) -> Floats:
        """Seconds of each of the next ``launches`` launches of bucket ``i`` [launches]."""
        bucket = self._buckets[i]
        start, batch = position.taken[i], bucket.setting.batch
        samples = self._order(position.epoch).samples[i][start : start + launches * batch]
        tokens = bucket.tokens[samples]
        return _launch_s(bucket.setting.scheme.frontier, tokens, batch)

    def _queue(self, position: DrawPosition, i: int, groups: int, latest_s: float) -> _Queue:
        """The next launches of bucket ``i`` on ``groups`` groups: all that may end within
        ``latest_s`` seconds, and maybe more."""
        setting, left = self._buckets[i].setting, self._buckets[i].launches(position.taken[i])
        launches = min(left, groups * ceil(1 + latest_s / setting.mean_s))
        # The mean seconds are a guess of how many these are: twice as many where it was too low.
        while True:
            queue = _Queue.of(setting, groups, self._seconds(position, i, launches))
            if launches == left or queue.ends_s[-1] > latest_s:
                return queue
            launches = min(left, 2 * launches)

    def _launches(
        self, position: DrawPosition, groups: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[DrawnLaunch], Counts]:
        """(launches in order, numbers of their samples [samples]), given how many ``groups`` and
        how many launches (``counts``) each bucket has. The first launch of every group comes before
        the second of any; wide groups get the first ranks."""
        widest_first = sorted(range(len(groups)), key=lambda i: -self._buckets[i].setting.width)
        in_round = list[tuple[int, DrawnLaunch]]()  # (round of its group, launch)
        samples = list[Counts]()
        first_rank = samples_before = 0  # ranks and samples of the buckets so far
        for i in widest_first:
            bucket, batch = self._buckets[i], self._buckets[i].setting.batch
            width, start = bucket.setting.width, position.taken[i]
            order = self._order(position.epoch).samples[i][start : start + counts[i] * batch]
            samples.append(bucket.samples[order])
            for number in range(counts[i]):
                ranks = tuple(first_rank + rank for rank in block(width, number % groups[i]))
                in_launch = range(number * batch, min((number + 1) * batch, len(order)))
                sequences = tuple(samples_before + member for member in in_launch)
                launch = DrawnLaunch(ranks=ranks, sequences=sequences)
                in_round.append((number // groups[i], launch))
            first_rank += groups[i] * width
            samples_before += len(order)
        in_round.sort(key=lambda item: item[0])  # stable: wide groups stay in front
        return [launch for _, launch in in_round], np.concatenate(samples)

    def _after(self, position: DrawPosition, counts: Sequence[int]) -> DrawPosition:
        """The position after ``counts`` launches of each bucket; the begin of the next epoch once
        all samples were drawn."""
        taken = tuple(
            min(taken + launches * bucket.setting.batch, len(bucket.samples))
            for taken, launches, bucket in zip(position.taken, counts, self._buckets, strict=True)
        )
        if sum(taken) == len(self._lengths):
            return DrawPosition(epoch=position.epoch + 1, taken=(0,) * len(taken))
        return DrawPosition(epoch=position.epoch, iteration=position.iteration + 1, taken=taken)


def _least_idle_s(queues: Sequence[_Queue], latest_s: float) -> float:
    """The common end of all groups, in seconds, that leaves the least share of the ranks' time
    idle. It is at most ``latest_s``, unless the first launch of some group ends later; of equal
    shares the latest end is taken."""
    # Every group has a launch, so the end is not before the first launches have ended.
    soonest_s = max(float(queue.ends_s[queue.groups - 1]) for queue in queues)
    # The idle share falls nowhere but where a launch ends, so only these times are tried.
    ends_s = np.unique(np.concatenate([queue.ends_s for queue in queues]))
    ends_s = ends_s[(ends_s >= soonest_s) & (ends_s <= max(latest_s, soonest_s))]
    # Rank-seconds of the launches that have ended by each time [times].
    busy_s = sum(queue.width * queue.seconds[queue.by(ends_s)] for queue in queues)
    busy_ranks = busy_s / ends_s  # on average until each time; the others are idle
    best = np.flatnonzero(busy_ranks >= busy_ranks.max() * (1 - ROUNDING))
    return float(ends_s[best[-1]])


def _launch_s(frontier: Frontier, tokens: Counts, batch: int) -> Floats:
    """Seconds of each launch [launches] where ``tokens`` [samples] are cut, in this order, into
    launches of ``batch`` samples; each takes the quickest layer plan that holds it."""
    starts = np.arange(0, len(tokens), batch)
    # Sums of lengths and of squared lengths of each launch [launches].
    sums = np.add.reduceat(tokens, starts).astype(np.float64)
    squares = np.add.reduceat(tokens.astype(np.float64) ** 2, starts)
    a, b, c, _, caps = frontier.columns(0)  # each [layer plans, 1]
    seconds = a * squares + b * sums + c  # [layer plans, launches]
    seconds[caps < sums] = np.inf
    quickest_s: Floats = seconds.min(axis=0)
    return quickest_s


def _settings(problem: Problem, buckets: Sequence[Counts], options: DrawOptions) -> list[Setting]:
    """What the groups of each bucket run, given the tokens of each bucket's samples. Of the ways to
    hold weights (replicated, sharded), the one that takes the fewest device-seconds for an epoch is
    chosen. Raises InfeasiblePlan where no group holds the longest sample."""
    choose = _throughput if options.flow == "dcp" else _one_width
    tried = [choose(problem, schemes, buckets, options) for schemes in _offers(problem)]
    candidates = [settings for settings in tried if settings]
    if not candidates:
        longest = max(int(tokens.max()) for tokens in buckets)
        ranks = counted(problem.devices, "rank")
        got = f"no group of {ranks} or fewer that holds it"
        if options.width is not None:
            too_wide = options.width > problem.devices
            why = f"of {ranks}" if too_wide else "that do not hold it, or without costs"
            got = f"groups of {options.width} {why}"
        raise InfeasiblePlan(
            f"the longest sample of {longest:,} tokens",
            got=got,
            wanted="a group size that does",
            hint="more memory, another recompute level, or a shorter context",
        )

    def device_s(settings: Sequence[Setting]) -> float:
        """Device-seconds of all launches of an epoch."""
        pairs = zip(settings, buckets, strict=True)
        return sum(s.width * s.mean_s * len(tokens) / s.batch for s, tokens in pairs)

    return min(candidates, key=device_s)


def _offers(problem: Problem) -> list[list[PricedScheme]]:
    """The schemes of groups of every size, one list for each way to hold weights. Raises SpecError
    where there are none."""
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
    """For each bucket the scheme and batch of the most tokens per device-second for its longest
    sample (equation 1), given the tokens of each bucket's samples; an empty list where a sample
    fits no group."""
    settings = list[Setting]()
    for tokens in buckets:
        longest, best = int(tokens.max()), (inf, 0, 0)  # (device-seconds a sample, scheme, batch)
        for k, scheme in enumerate(schemes):
            if scheme.devices <= problem.devices:
                # The largest batch that each layer plan holds [layer plans].
                batches = np.minimum(scheme.frontier.limits // longest, len(tokens))
                seconds = _equal_s(scheme.frontier, longest, batches)
                per_sample = np.where(batches > 0, seconds / np.maximum(batches, 1), inf)
                row = int(per_sample.argmin())
                device_s = scheme.devices * float(per_sample[row])
                best = min(best, (device_s, k, int(batches[row])))
        if best[0] == inf:
            return []
        settings.append(_setting(schemes[best[1]], best[2], tokens))
    return settings


def _one_width(
    problem: Problem,
    schemes: Sequence[PricedScheme],
    buckets: Sequence[Counts],
    options: DrawOptions,
) -> list[Setting]:
    """The settings of bucket parallel, on groups of one size: for each bucket the batch that memory
    allows and that takes no longer than one sample of the longest bucket. ``buckets`` are the
    tokens of the samples of each; an empty list where no size holds the longest sample."""
    longest = max(int(tokens.max()) for tokens in buckets)
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
    quickest = scheme.frontier.best(float(longest) ** 2, longest)
    assert quickest is not None, "it holds the longest sample"
    longest_s, settings = quickest[0], list[Setting]()
    for tokens in buckets:
        length, frontier = int(tokens.max()), scheme.frontier
        sample_s = (frontier.a * length + frontier.b) * length
        # The most samples n with n sample_s + c <= longest_s, for each layer plan [layer plans].
        within_time = np.floor((longest_s - frontier.c) / sample_s * (1 + ROUNDING))
        batches = np.minimum(frontier.limits // length, within_time)
        settings.append(_setting(scheme, min(max(1, floor(batches.max())), len(tokens)), tokens))
    return settings


def _equal_s(frontier: Frontier, length: int, batches: Floats) -> Floats:
    """Seconds of launches of equal samples of ``length`` tokens, for each layer plan and its number
    of samples in ``batches`` [layer plans]."""
    return (frontier.a * length + frontier.b) * length * batches + frontier.c


def _setting(scheme: PricedScheme, batch: int, lengths: Counts) -> Setting:
    """The setting of groups of ``scheme`` that launch ``batch`` samples at a time of a bucket whose
    samples have ``lengths`` tokens."""
    values = lengths.astype(np.float64)
    # The mean launch: as many samples, with the bucket's mean length and mean squared length.
    batch_tokens = floor(batch * float(values.mean()))
    quickest = scheme.frontier.best(batch * float((values**2).mean()), max(1, batch_tokens))
    assert quickest is not None, "it holds a batch of the longest samples"
    return Setting(scheme=scheme, batch=batch, mean_s=quickest[0])
