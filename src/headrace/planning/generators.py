"""What a search asks for schedules: the protocol of generators, and what all of them share.

A :class:`Generator` says for which problems and for which tables of prices it is, and drafts
schedules of one such table. A :class:`Draft` has the sequences of each pipeline but not yet its
micro-batches, so it is timed by estimate: by one row of each scheme's prices, the *usual* one
(:mod:`headrace.planning.batch`). The search packs the best drafts into micro-batches and times
these exactly. A generator may also give schedules that are packed already.

Most generators are dual approximations. A *filling* answers whether everything ends within a
guessed time and, if not, about which share of the work found no place. :func:`least_time` searches
the least time in which a filling succeeds: from a bound upwards the time grows by that share until
a filling succeeds; every second share is guessed from the one before, as a filling that is not
measured may end sooner. Then the time is halved between what failed and what did not. Effort is
counted in fillings, never in seconds, so plans do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, Literal, Protocol, TypeVar

from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.planning.batch import PriceTable
from headrace.planning.packing import likely, pack
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment, Group
from headrace.planning.tolerances import CLOSE, ROUNDING
from headrace.spec.plan import Semantics
from headrace.spec.strategy import Strategy

__all__ = [
    "ENOUGH",
    "FEW",
    "Draft",
    "Effort",
    "Fill",
    "Generator",
    "Known",
    "Offer",
    "Role",
    "Searched",
    "TableKind",
    "cost_kind",
    "least_time",
]

ENOUGH = 5e-4
"""Share above the bound, or of the best known time, that is not worth a search."""

FEW = 100
"""Of up to so many sequences the order in which schemes are looked at matters."""

CostKind = Literal["model", "groups", "pipelines"]
"""Where seconds come from: a model's costs, or published ones of groups or of pipelines."""

TableKind = Literal["one size", "groups", "nested", "any scheme", "every scheme"]
"""Which tables of prices a generator drafts from.

one size      the schemes of static plans: of a model the groups, by how weights are held
groups        groups of a model's costs side by side, by how weights are held
nested        groups of which ranks may work in several in one step, and hold the weights for all
any scheme    all schemes, where those with stages or tensor blocks may gain something
every scheme  all schemes, whether they may gain something or not
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """For which problems a generator is, and when the search asks it.

    Attributes:
        name: What errors call it.
        tables: The tables that it drafts from.
        costs: The kinds of costs that it is for.
        semantics: When micro-batches may start.
        beyond: Share above the bound from which on it is asked: it is left out where the best
            schedule is closer.
        final: Whether what it gives is packed already and stays as it is.
        last: Whether it is asked when the drafts of the others are packed, to beat these.
    """

    name: str
    tables: TableKind
    costs: tuple[CostKind, ...] = ("model", "groups", "pipelines")
    semantics: tuple[Semantics, ...] = ("free",)
    beyond: float = ENOUGH
    final: bool = False
    last: bool = False

    def covers(self, problem: Problem) -> bool:
        """Whether a generator of this role can plan a problem."""
        return cost_kind(problem) in self.costs and problem.semantics in self.semantics

    def __str__(self) -> str:
        words = {"model": "a model", "groups": "groups", "pipelines": "pipelines"}
        costs = " or ".join(words[kind] for kind in self.costs)
        return f"{self.name} for costs of {costs}, semantics {' or '.join(self.semantics)}"


def cost_kind(problem: Problem) -> CostKind:
    """Which kind of costs a problem has: a model's, or published ones of groups or pipelines."""
    if isinstance(problem.costs, PipelineCosts):
        return "pipelines"
    return "groups" if isinstance(problem.costs, GroupCosts) else "model"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """A table of prices to draft schedules from.

    Attributes:
        table: The prices.
        bound_s: Seconds of computing that no schedule of the table beats.
        most: The most pipelines of each scheme of the table; None where only the devices limit
            them.
    """

    table: PriceTable
    bound_s: float
    most: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a search knows when it asks a generator for schedules of one table.

    Attributes:
        problem: What is planned for.
        bound_s: Seconds of computing that no schedule beats.
        best_s: Least seconds of computing of all drafts and schedules so far, infinite without any.
        packed_s: Least seconds of computing of packed schedules alone, infinite without any.
        drafted: Whether the search has had any draft before.
        unstaged: Whether schemes of one stage were drafted side by side before, from tables of the
            kind ``groups``.
        strategies: Those of the drafts and schedules so far, without the ones whose ranks work in
            several pipelines; the quickest first.
        most: The most pipelines of each scheme of the table; None where only the devices limit
            them.
        seed: Seed of drawn orders.
        latest_s: A function from a schedule, or None, to the seconds of computing from which on no
            other schedule can have a quicker step than this one or any timed before; None where a
            step takes what computing takes.
    """

    problem: Problem
    bound_s: float
    best_s: float = inf
    packed_s: float = inf
    drafted: bool = False
    unstaged: bool = False
    strategies: Sequence[Strategy] = ()
    most: Sequence[int] | None = None
    seed: int = 0
    latest_s: Callable[[Assignment | None], float] | None = None


class Generator(Protocol):
    """Drafts schedules of one table of prices.

    Example:
        >>> class Alone:
        ...     role = Role(name="alone", tables="one size", final=True)
        ...
        ...     def drafts(self, table, known):
        ...         yield from best_statics(table)
    """

    @property
    def role(self) -> Role:
        """For which problems it is, and when it is asked."""
        ...

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Draft | Assignment]:
        """Schedules of all sequences of a table, drafts or packed ones.

        Args:
            table: The prices of the batch.
            known: What the search knows so far.

        Yields:
            Schedules in any order; none where the table's schemes do not hold the batch.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """A schedule before it is packed, timed by the usual rows.

    Attributes:
        table: The prices.
        seconds: Expected seconds of computing.
        expected_s: Expected seconds until all gradients are sent.
        groups: Its pipelines with their sequences, larger ones first.
        source: What drafted it, by name.
        ends: Numbers of the pipelines that are the last of some rank, the one that is expected to
            end last first; empty where gradients take no time.
    """

    table: PriceTable
    seconds: float
    expected_s: float
    groups: list[Group]
    source: str
    ends: Sequence[int] = ()

    @classmethod
    def of(cls, table: PriceTable, seconds: float, groups: list[Group], source: str) -> Draft:
        """The draft of pipelines, ``groups``, that compute for ``seconds``; when gradients are sent
        is estimated, without packing."""
        expected_s, ends = seconds, list[int]()
        if table.estimates:
            times = [table.times(k, likely(table, k, members)) for k, _, members in groups]
            chains = table.chained(ranks for _, ranks, _ in groups)
            sent_s = chains.sent_s(times)
            expected_s = max(seconds, *sent_s.values())
            ends = sorted(sent_s, key=sent_s.__getitem__, reverse=True)
        return cls(
            table=table,
            seconds=seconds,
            expected_s=expected_s,
            groups=groups,
            source=source,
            ends=ends,
        )

    def is_late(self, limit_s: float) -> bool:
        """Whether some pipeline of ``ends``, packed exactly, has its gradients sent at ``limit_s``
        seconds or later. Then the draft is of no use and its other pipelines need no packing."""
        if not self.ends:
            return False
        before = self.table.chained(ranks for _, ranks, _ in self.groups).before
        sent = dict[int, tuple[float, float]]()
        return any(self._sent_s(g, before, sent)[1] >= limit_s for g in self.ends)

    def _sent_s(
        self, g: int, before: Sequence[Sequence[int]], known: dict[int, tuple[float, float]]
    ) -> tuple[float, float]:
        """(seconds until pipeline ``g`` has computed, seconds until it has sent its gradients),
        packed exactly. ``before`` has the pipelines that each one waits for; ``known`` keeps the
        results of all that were asked for."""
        if g not in known:
            k, _, members = self.groups[g]
            ready_s, compute_s, sending_s = self.table.times(k, pack(self.table, k, members))
            start_s = max(
                [ready_s, *(self._sent_s(earlier, before, known)[0] for earlier in before[g])]
            )
            known[g] = start_s + compute_s, start_s + compute_s + sending_s
        return known[g]


Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard :func:`least_time` searches.

    Attributes:
        least: After a failure the time grows by at least this share.
        growth: After a failure the time grows by this factor times the share of the work that found
            no place.
        steps: Fillings until one succeeds, at most.
        halvings: Fillings after that, at most.
        close: Halving ends when the least time is known to this share.
        probe: Whether to search only if a filling succeeds in a time shorter than the best known
            one by the share :data:`ENOUGH`.
    """

    least: float = 2e-3
    growth: float = 0.7
    steps: int = 16
    halvings: int = 5
    close: float = CLOSE
    probe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched(Generic[Result]):
    """A filling that succeeded: what it placed (``result``) and the time in seconds that it was
    given (``seconds``)."""

    seconds: float
    result: Result


class Fill(Protocol[Result_co]):
    """Places all sequences within a time."""

    def __call__(self, tau: float, *, measured: bool = True) -> Result_co | float:
        """What was placed, where all sequences can be placed within ``tau`` seconds. Otherwise a
        float: the share of the work that found no place, or any number unless ``measured``."""
        ...


def least_time(
    fill: Fill[Result], low_s: float, high_s: float, effort: Effort
) -> Searched[Result] | None:
    """Search the least time in which a filling succeeds.

    Args:
        fill: Places all sequences within a time, or fails.
        low_s: Seconds that nothing beats.
        high_s: Seconds from which on a success is of no use.
        effort: How hard to search.

    Returns:
        What was placed, and in how many seconds; None when nothing below ``high_s`` succeeds.
    """
    best: Searched[Result] | None = None
    if effort.probe:  # is there a gain at all?
        tau = high_s * (1 - ENOUGH)
        result = 0.0 if tau < low_s else fill(tau, measured=False)
        if isinstance(result, float):
            return None
        best, high_s = Searched(seconds=tau, result=result), tau
    # From below, the time grows with the shortfall: the share of the work that found no place. An
    # unmeasured filling is quicker, so every second one is; its shortfall is guessed from the last.
    tau, shortfall = low_s * (1 + ROUNDING), 0.0
    for step in range(effort.steps):
        tau = min(tau, high_s)
        if best is not None and tau >= high_s:
            break
        result = fill(tau, measured=step % 2 == 0)
        if not isinstance(result, float):
            best, high_s = Searched(seconds=tau, result=result), tau
            break
        if tau >= high_s:
            return None
        low_s = tau
        # What the time grew by is taken off a shortfall that was not measured.
        shortfall = shortfall * (1 - effort.growth) if step % 2 else result
        at_top = tau * (1 + shortfall) >= high_s  # then ask at once whether high_s succeeds
        tau = high_s if at_top else tau * (1 + max(effort.least, effort.growth * shortfall))
    # Where none of the steps succeeded, double the time until one does.
    for _ in range(effort.steps if best is None else 0):
        tau = min(high_s, 2 * low_s)
        result = fill(tau, measured=False)
        if not isinstance(result, float):
            best, high_s = Searched(seconds=tau, result=result), tau
            break
        if tau >= high_s:
            return None
        low_s = tau
    # Halve between the longest time that failed and the shortest that succeeded.
    for _ in range(effort.halvings if best is not None else 0):
        if high_s <= low_s * (1 + effort.close):
            break
        tau = (low_s + high_s) / 2
        result = fill(tau, measured=False)
        if isinstance(result, float):
            low_s = tau
        else:
            best, high_s = Searched(seconds=tau, result=result), tau
    return best
