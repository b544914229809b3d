"""The generator of pipelines side by side, which share no device.

Drafts come from fillings (:mod:`headrace.planning.filling`) in the least time in which they
succeed. Many schemes to choose from mislead a filling, so it is done by families of schemes: those
of one stage, then all, then those that share no sequence; of each first those of which the devices
are a power of two, which leave few devices over. Each filling is drafted as it is, and with its
shorter sequences dealt out again.

Filling opens pipelines as sequences come, which is good where there are many pipelines. Few large
ones are a choice of their own: from a strategy, 1, 2, 4, ... pipelines of a scheme take the place
of another's, and a strategy is better if its pipelines can be filled in a little less time. This
is done from the strategies found so far and from those of one scheme, with schemes whose devices
are a power of two and with all, and the best of each is drafted: where there are more schemes, the
few that take part are others, so more choices would be worse. Of many sequences it is done once
where costs are published (steps of the 12 such worlds of ``benchmarks/worlds.py`` are 0.01 %
longer in the mean, 0.14 % at worst), or where there are no stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isinf

import numpy as np
from numpy.typing import NDArray

from headrace.planning.batch import PriceTable
from headrace.planning.bounds import BoundRows
from headrace.planning.filling import Filler, Pipelines
from headrace.planning.generators import (
    FEW,
    Draft,
    Effort,
    Known,
    Role,
    Searched,
    least_time,
)
from headrace.planning.schedule import placed
from headrace.planning.tolerances import CLOSE
from headrace.spec.strategy import Strategy

__all__ = ["ANY_SCHEME", "Counts", "GROUPS", "SideBySide", "climbed", "counts_of", "worthwhile"]

Counts = tuple[int, ...]
"""A strategy: how many pipelines of each of a table's schemes."""

_KINDS = 8  # Schemes that take part in exchanges, at most.


GROUPS = Role(name="side by side", tables="groups", costs=("model",))
ANY_SCHEME = Role(name="side by side with stages", tables="any scheme")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Drafts pipelines side by side.

    Attributes:
        role: For which problems it is, and when it is asked.
        levels: For each of these shares of a filling's seconds a draft is made in which sequences
            that take up to this share are dealt out again.
        biases: Factors on the devices that schemes with stages are taken to need when a filling
            compares schemes. Each is tried where the pipelines of a strategy are given: with 1
            alone steps of 1,024 devices are up to 4 % longer (``benchmarks/planner.py --parts 2``).
            Where all strategies are open, the others lead to worse ones (32B 0.05 % in the mean of
            ``benchmarks/worlds.py``), and only the first is tried.
        exchanged: Fillings in each search for better strategies, at most. Only strategies of up to
            as many pipelines are searched from: of more, one pipeline of another scheme hardly
            counts (no step of ``benchmarks/worlds.py`` changes).
        allowed: Share of what the bound leaves by which a filling may take longer than the best
            known where the clock knows the stages: pipelines end up to 4 % sooner there than
            fillings reckon. Without it steps of 30 drawn batches of 32B and 70B are 0.07 % longer
            in the mean, 0.9 % at worst; those of ``benchmarks/worlds.py`` stay the same in the
            mean.
    """

    role: Role = GROUPS
    levels: tuple[float, ...] = (0.08, 0.3, inf)
    biases: tuple[float, ...] = (1.0, 1.1, 1.25)
    exchanged: int = 60
    allowed: float = 0.25

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Draft]:
        """Drafts of pipelines: fillings by each family of schemes, dealt out again in several ways,
        then the best filling after exchanges of pipelines."""
        few, fluid = len(table.tokens) <= FEW, any(table.fluid)
        bound_s, enough_s = known.bound_s, known.bound_s * (1 + self.role.beyond)
        # With few sequences and one row for each scheme other drafts may prove slower when packed.
        high_s = known.packed_s if few and not fluid else known.best_s
        if any(table.clocked):
            high_s += self.allowed * (high_s - bound_s)
        exchanges = fluid or few or not known.drafted
        strategies, fillers = list[Counts](), list[Filler]()
        biases = self.biases[:1] if known.most is None else self.biases
        for bias in _scheme_biases(table, biases, deeper=known.unstaged):
            filler = Filler(table, most=known.most, bias=bias)
            # While nothing was found, a filler like the last one would fail as well.
            if not strategies and any(filler.is_like(other, high_s) for other in fillers[-1:]):
                continue
            fillers.append(filler)
            probes = not few and (strategies or (known.drafted and known.most is None))
            effort = Effort(probe=bool(probes))
            fill = filler.fill_in_two_orders if few else filler.fill
            filled = least_time(fill, bound_s, high_s, effort)
            if filled is not None:
                strategies.append(counts_of(table, filled.result))
                high_s = min(high_s, filled.seconds)
                near_bound = not fluid and high_s <= enough_s
                yield from _dealt(filler, filled, self.levels[-1:] if near_bound else self.levels)
                if near_bound:
                    return
        if known.most is not None or high_s <= enough_s or not (exchanges or strategies):
            return
        # The last one found is the quickest.
        found = dict.fromkeys([*strategies[::-1], *_counted(table, known.strategies)])
        alike, every = _homogeneous(table), tuple(range(len(table)))
        searches: list[tuple[Iterable[Counts], tuple[int, ...]]] = [(found or alike, every)]
        # Of many sequences without stages, nested groups are quicker nearly always; and published
        # costs of stages are no estimates, so one search is enough.
        if few or any(table.clocked):
            families = [*filter(None, dict.fromkeys((_powers_of_two(table), every)))]
            searches = [(starts, family) for starts in (found, alike) for family in families]
        yield from self._exchanged(table, searches, high_s, bound_s)

    def _exchanged(
        self,
        table: PriceTable,
        searches: Iterable[tuple[Iterable[Counts], tuple[int, ...]]],
        high_s: float,
        bound_s: float,
    ) -> Iterator[Draft]:
        """Drafts of the best strategies below ``high_s`` seconds to which exchanges of pipelines
        lead: of each of ``searches``, from strategies, the most promising first, among a family
        of schemes."""
        for starts, family in searches:
            own = [one for one in starts if _within(one, family) and sum(one) <= self.exchanged]
            kinds = worthwhile(table, family, bound_s * 1.1)
            climbs = [*climbed(table, own, kinds, high_s, bound_s, self.exchanged)]
            if climbs:
                yield from _dealt(*climbs[-1], self.levels)


def _counted(table: PriceTable, strategies: Sequence[Strategy]) -> Iterator[Counts]:
    """The pipelines of each scheme of a table in ``strategies``, of those that have no others."""
    for strategy in strategies:
        counts = dict(strategy.counts)
        found = tuple(counts.get(priced.scheme, 0) for priced in table.schemes)
        if sum(found) == sum(counts.values()):
            yield found


def _within(counts: Counts, family: Sequence[int]) -> bool:
    """Whether a strategy has only pipelines of the schemes of a ``family``."""
    return sum(counts) == sum(counts[k] for k in family)


def _powers_of_two(table: PriceTable) -> tuple[int, ...]:
    """The schemes whose devices are a power of two, by number; pipelines of these leave few devices
    over."""
    return tuple(k for k, width in enumerate(table.width) if width & (width - 1) == 0)


def _scheme_biases(
    table: PriceTable, biases: Sequence[float], *, deeper: bool
) -> Iterator[list[float]]:
    """For each family of schemes to fill with, how many times its devices each of the table's
    schemes is taken to need [schemes]; infinite for schemes outside the family. Schemes whose
    devices are a power of two come first, then all of the family. ``deeper`` leaves out the
    family without stages."""
    single_stage = [depth == 1 for depth in table.depth]
    power_of_two = set(_powers_of_two(table))
    # (whether each scheme is in the family, factor for those of its schemes with stages)
    families = list[tuple[list[bool], float]]()
    if any(single_stage) and not deeper:
        families.append((single_stage, 1.0))
    if not all(single_stage):
        families += [([True] * len(table), bias) for bias in biases]
        # Schemes in which no sequence is split among ranks.
        unshared = [scheme.scheme.context == 1 for scheme in table.schemes]
        if any(unshared) and not all(unshared):
            families += [(unshared, bias) for bias in biases]
    for family, bias in families:
        powers = [in_family and k in power_of_two for k, in_family in enumerate(family)]
        for chosen in (powers, family) if any(powers) and powers != family else (family,):
            yield [
                (1.0 if is_single else bias) if used else inf
                for used, is_single in zip(chosen, single_stage, strict=True)
            ]


def _dealt(filler: Filler, filled: Searched[Pipelines], levels: Sequence[float]) -> Iterator[Draft]:
    """Drafts of one filling: as it is, and for each of ``levels`` with its shorter sequences dealt
    out again, those that take up to this share of its seconds; infinite deals all out."""
    table = filler.table
    yield Draft.of(table, filled.seconds, placed(table, filled.result), "filled")
    # Members are longest first: the most seconds of any sequence of a pipeline without stages.
    longest_s = max(
        [table.seconds(k)[members[0]] for k, members in filled.result if table.depth[k] == 1],
        default=0.0,
    )
    for level in levels:
        limit_s = inf if isinf(level) else filled.seconds * level  # 0 s times inf is no number
        seconds, pipelines = filler.levelled(filled.result, limit_s)
        if pipelines:
            yield Draft.of(table, seconds, placed(table, pipelines), f"dealt {level}")
        if limit_s >= longest_s:  # all were dealt out: larger levels do the same
            return


def _homogeneous(table: PriceTable) -> list[Counts]:
    """Strategies of pipelines of one scheme that holds the longest sequence, as many as the devices
    allow; those that need the fewest device-seconds first."""
    fits = [
        k
        for k in range(len(table))
        if np.isfinite(table.alone[k, 0]) and table.width[k] <= table.devices
    ]
    fits.sort(key=lambda k: float(table.ranks[k, 0] * (table.spread[k] @ table.batch.counts)))
    return [
        tuple(table.devices // table.width[k] if other == k else 0 for other in range(len(table)))
        for k in fits
    ]


def counts_of(table: PriceTable, pipelines: Pipelines) -> Counts:
    """The strategy of some pipelines: how many there are of each scheme."""
    counts = [0] * len(table)
    for k, _ in pipelines:
        counts[k] += 1
    return tuple(counts)


def worthwhile(table: PriceTable, family: Sequence[int], tau: float) -> list[int]:
    """The schemes of a ``family`` that take part in exchanges, at most eight: those on which
    sequences need the fewest devices within ``tau`` seconds, or nearly so."""
    shares = BoundRows.of(table).only(family).shares(tau)  # devices of a sequence [family, runs]
    least, chosen = shares.min(axis=0), shares.argmin(axis=0)
    finite = np.where(np.isfinite(least), least, 0.0) * table.batch.counts
    # Devices of all sequences for which a scheme is the cheapest, and how many sequences there are
    # for which it is the cheapest or up to a tenth dearer [family].
    devices = np.bincount(chosen, weights=finite, minlength=len(family))
    close_count = (shares <= least * 1.1) @ table.batch.counts
    order = sorted(range(len(family)), key=lambda at: (-devices[at], -int(close_count[at]), at))
    return sorted(family[at] for at in order[:_KINDS] if close_count[at])


def climbed(
    table: PriceTable,
    starts: Sequence[Counts],
    kinds: Sequence[int],
    best_s: float,
    bound_s: float,
    work: int,
) -> Iterator[tuple[Filler, Searched[Pipelines]]]:
    """Search quicker strategies by exchanging pipelines of one scheme for those of another.

    Args:
        table: The prices.
        starts: Strategies to begin from, the most promising first.
        kinds: The schemes that take part in exchanges.
        best_s: Seconds that a filling has to be below.
        bound_s: Seconds that no plan beats.
        work: Fillings, at most.

    Yields:
        Each filling that is quicker than all before, with its filler.
    """
    seen, waiting = set(starts), list(starts)
    needs = _Needs(table)
    while waiting and work > 0 and best_s > bound_s * (1 + CLOSE):
        start = waiting.pop(0)
        for strategy in _neighbours(table, start, kinds):
            if strategy in seen:
                continue
            if work <= 0:
                return
            seen.add(strategy)
            gain, tau, found = CLOSE, best_s * (1 - CLOSE), None
            used = tuple(k for k, count in enumerate(strategy) if count)
            # Its devices are too few, however sequences are placed.
            if needs.devices(tau, used) > sum(strategy[k] * table.width[k] for k in used):
                continue
            filler = Filler(table, most=strategy)
            # The least time: after each success try a gain twice as large, after a failure the
            # least gain, and end where that fails.
            while True:
                filled = filler.fill(tau, measured=False)
                work -= 1
                if not isinstance(filled, float):
                    found = Searched(seconds=tau, result=filled)
                    gain *= 2
                elif gain > CLOSE:
                    gain = CLOSE
                else:
                    break
                assert found is not None, "a gain grows where something was found"
                tau = found.seconds * (1 - gain)
            if found is not None:
                best_s = found.seconds
                yield filler, found
                waiting.insert(0, strategy)  # go on from the better strategy
                break


class _Needs:
    """Devices that all sequences of a batch take at least, worked out once for each time and set of
    schemes."""

    def __init__(self, table: PriceTable) -> None:
        self.counts = table.batch.counts
        self.rows = BoundRows.of(table)
        self._shares: dict[float, NDArray[np.float64]] = {}
        self._devices: dict[tuple[float, tuple[int, ...]], float] = {}

    def devices(self, tau: float, schemes: tuple[int, ...]) -> float:
        """Devices that all sequences take at least to end within ``tau`` seconds, each on the
        cheapest of ``schemes``, whatever the number of pipelines of each."""
        key = tau, schemes
        if key not in self._devices:
            if tau not in self._shares:
                self._shares[tau] = self.rows.shares(tau)
            least = self._shares[tau][list(schemes)].min(axis=0)
            self._devices[key] = float(least @ self.counts)
        return self._devices[key]


def _neighbours(table: PriceTable, counts: Counts, kinds: Sequence[int]) -> Iterator[Counts]:
    """Strategies that differ from ``counts`` by one exchange: 1, 2, 4, ... pipelines of one of the
    schemes ``kinds`` take the devices of as few pipelines of another scheme as suffice, and idle
    ones. Devices that are left over get pipelines of ``kinds``, the largest first."""
    widths = table.width
    idle = table.devices - sum([count * width for count, width in zip(counts, widths, strict=True)])
    held = [k for k in range(len(counts)) if counts[k]]
    largest = max((counts[k] * widths[k] for k in held), default=0)
    widest_first, amount = sorted(kinds, key=lambda k: (-widths[k], k)), 1
    while amount <= max(1, largest):
        for replaced in held:
            for added in kinds:
                removed = max(0, -(-(amount * widths[added] - idle) // widths[replaced]))
                if added == replaced or removed > counts[replaced]:
                    continue
                changed = list(counts)
                changed[replaced] -= removed
                changed[added] += amount
                left = idle + removed * widths[replaced] - amount * widths[added]
                for other in widest_first if left else ():
                    if left >= widths[other]:
                        changed[other] += left // widths[other]
                        left %= widths[other]
                yield tuple(changed)
        amount *= 2
