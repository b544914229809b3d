"""The search: from the lengths of a batch to the quickest plan found.

Data        lengths l_i; priced schemes (seconds, tokens and layer plans of a micro-batch); N
            devices.
Variables   the pipelines and their ranks; the pipeline and micro-batch of each sequence; the layers
            and order of each micro-batch.
Constraint  a micro-batch holds at most the tokens of its layers; a rank does one thing at a time.
Objective   minimise the step: of published costs when the last rank is free, of a model's costs the
            end of the simulated step with its exchange.

Solve.
1. Prices: tables of what each sequence takes on each scheme (:mod:`headrace.planning.batch`).
2. A lower bound (:mod:`headrace.planning.bounds`).
3. Drafts of the generators, one generator after the other (:mod:`headrace.planning.generators`):
   static schedules, pipelines side by side, nested groups, then schemes with tensor blocks and
   stages; in lockstep waves. A generator is left out where the best is close to the bound.
4. The best drafts are packed exactly (:mod:`headrace.planning.packing`) and the best schedules
   improved by local search (:mod:`headrace.planning.improvement`).
5. The best schedule and the static ones are timed by the clock that counts, and sequences move
   between pipelines with stages, which are estimated, until they end together on it. The quickest
   is the plan, so no plan is worse than a static one.
6. The plan says why (:mod:`headrace.planning.explain`).

What differs between costs is behind :class:`CostSource`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from headrace.errors import InfeasiblePlan, SpecError
from headrace.planning.batch import SortedBatch
from headrace.planning.bounds import Bound
from headrace.planning.explain import Candidate, reasons
from headrace.planning.formula_source import FormulaSource
from headrace.planning.generators import FEW, Draft, Generator, Known, Offer, TableKind
from headrace.planning.improvement import Improvement, improved
from headrace.planning.model_source import ModelSource
from headrace.planning.nested import Nested
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment
from headrace.planning.side_by_side import ANY_SCHEME, SideBySide
from headrace.planning.static import Homogeneous, Static
from headrace.planning.tolerances import NEAR
from headrace.planning.waves import Waves
from headrace.spec import Lengths, Plan, Strategy

__all__ = ["GENERATORS", "CostSource", "plan"]

GENERATORS: Mapping[str, tuple[Generator, ...]] = {
    "adaptive": (
        Static(),
        SideBySide(),
        Nested(),
        SideBySide(role=ANY_SCHEME),
        Waves(),
        Homogeneous(),
    ),
    "strategies": (Static(), SideBySide(), SideBySide(role=ANY_SCHEME), Waves(), Homogeneous()),
    "static": (Static(),),
}
"""The generators of each planner of this room, in the order in which they are asked."""


_AS_THEY_ARE = ("static", "homogeneous")
"""Sources of schedules of one scheme everywhere, which are timed as their generators give them."""


class CostSource(Protocol):
    """What a search needs of costs: tables of prices, bounds, and a clock.

    Attributes:
        simulates: Whether timing a schedule takes a simulation, so that only the best are timed.
        flat: The bound of only those plans that have neither stages nor tensor blocks; None where
            it is not known.
    """

    simulates: bool
    flat: Bound | None

    @property
    def bound(self) -> Bound:
        """The bound of all plans that the tables offered so far allow."""
        ...

    def offers(self, kind: TableKind, best_s: Callable[[], float]) -> Iterator[Offer]:
        """The tables of a kind that promise something; ``best_s`` gives the least seconds of
        computing so far."""
        ...

    def closer(self, bound: Bound, found: Sequence[Assignment]) -> Bound:
        """A bound at least as close, given packed schedules, the quickest first."""
        ...

    def latest_s(self, best: Assignment | None) -> float:
        """Seconds of computing from which on no schedule can have a quicker step than ``best``."""
        ...

    def least_s(self, schedule: Assignment) -> float:
        """Seconds that the step of a schedule takes at least."""
        ...

    def timed(self, schedule: Assignment) -> Candidate:
        """A schedule with the seconds of its step."""
        ...

    def late_s(self, schedule: Assignment) -> Sequence[float]:
        """By how many seconds each pipeline of a schedule ends later on the clock than the schedule
        estimates; empty where estimates are exact."""
        ...

    def plan(self, best: Candidate, bound: Bound, previous: Plan | None) -> Plan:
        """The plan of the best candidate."""
        ...


def plan(
    problem: Problem,
    lengths: Lengths,
    *,
    seed: int = 0,
    previous: Plan | None = None,
    generators: Sequence[Generator] | None = None,
    improvement: Improvement | None = None,
) -> Plan:
    """The quickest plan found for one batch.

    Deterministic in its arguments.

    Args:
        problem: What is planned for.
        lengths: Tokens of each sequence.
        seed: Feeds the search.
        previous: The plan of the step before: where the problem smooths, its layers stay if others
            would hardly be quicker (:mod:`headrace.planning.smoothing`).
        generators: What drafts schedules, in this order; those of the problem's planner when left
            out.
        improvement: How much drafts are packed and improved.

    Returns:
        The plan, with a lower bound and reasons.

    Raises:
        InfeasiblePlan: When a sequence fits no pipeline, saying by how much and what would help.
        SpecError: When no generator is for such problems.
    """
    if generators is None:
        generators = GENERATORS.get(problem.planner, ())
    chosen = [generator for generator in generators if generator.role.covers(problem)]
    if not chosen:
        _refuse(problem, generators)
    batch = SortedBatch.of(lengths)
    source: CostSource
    if problem.is_published or problem.semantics == "lockstep":
        source = FormulaSource(problem=problem, batch=batch)
    else:
        source = ModelSource(problem=problem, batch=batch)
    search = _Search(
        problem=problem,
        source=source,
        generators=chosen,
        seed=seed,
        improvement=improvement or Improvement(),
    )
    return search.plan(batch, previous)


def _refuse(problem: Problem, generators: Sequence[Generator]) -> None:
    """Raise SpecError: none of the ``generators`` can plan for the costs and semantics of the
    problem."""
    if not generators:
        raise SpecError(
            "generators",
            got=f"none for planner {problem.planner!r}",
            wanted="at least one",
            hint="hr.plan has the planners of others",
        )
    scopes = dict.fromkeys(str(generator.role) for generator in generators)
    costs = "published costs" if problem.is_published else "costs of a model"
    raise SpecError(
        f"planner {problem.planner!r}",
        got=f"{costs}, semantics {problem.semantics}",
        wanted="; ".join(scopes),
    )


@dataclass(slots=True, kw_only=True)
class _Search:
    """The search for the plan of one batch.

    Attributes:
        problem: What is planned for.
        source: Tables, bounds and clock.
        generators: What drafts, in order.
        seed: The seed of drawn orders.
        improvement: How much drafts are packed and improved.
        found: Schedules that are packed, the quickest first after :meth:`_pack`.
        drafts: Drafts that are not packed yet.
        drafted: Whether there was any draft before.
        unstaged: Whether schemes of one stage were drafted side by side.
        packed: Whether drafts were packed, and schedules improved, before.
    """

    problem: Problem
    source: CostSource
    generators: Sequence[Generator]
    seed: int
    improvement: Improvement
    found: list[Assignment] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    drafted: bool = False
    unstaged: bool = False
    packed: bool = False

    def plan(self, batch: SortedBatch, previous: Plan | None) -> Plan:
        """Plan the batch: ask the generators, pack and improve their drafts, and time the best
        schedules."""
        for generator in self.generators:
            if not generator.role.last:
                self._ask(generator)
        bound = self.source.bound
        if self.drafts or not self.packed:
            self._pack(bound.seconds)
        bound = self.source.closer(bound, self.found)
        for generator in self.generators:
            if generator.role.last:
                self._ask(generator, bound)
        if not self.found:
            raise InfeasiblePlan(
                f"sequence {batch.order[0]} of {batch.tokens[0]:,} tokens does not fit",
                got=f"planner {self._name}",
                wanted="a scheme that holds it",
            )
        tried = self._timed()
        best_s = min(one.seconds for one in tried)
        tried = [
            one if _is_static(one) else self._levelled(one, best_s, bound.seconds) for one in tried
        ]
        tried.sort(key=lambda candidate: (candidate.seconds, not _is_static(candidate)))
        made = self.source.plan(tried[0], bound, previous)
        static = next(filter(_is_static, tried), None)
        why = reasons(self.problem, bound, tried, made, static, self.source.flat)
        return made.replace(planner=self._name, seed=self.seed, why=(*why, *made.why))

    def _levelled(self, timed: Candidate, best_s: float, bound_s: float) -> Candidate:
        """A schedule with stages improved on the clock until it gets no quicker twice in a row:
        what is estimated of these pipelines is up to some percent off, each another way, and
        another way again once sequences have moved. It stays as it is where not even pipelines
        that all end together would make it quicker than ``best_s``."""
        best, missed, late_s = timed, False, self.source.late_s(timed.schedule)
        while any(late_s) and _even_s(timed.schedule, late_s) < best_s:
            better, _ = improved(
                timed.schedule,
                target_s=bound_s,
                looks=self.improvement.looks,
                late_s=late_s,
                packed=self.improvement.clocked,
            )
            if better is timed.schedule:
                break
            timed = self.source.timed(replace(better, source="improved"))
            late_s = self.source.late_s(timed.schedule)
            if timed.seconds < best.seconds:
                best, missed = timed, False
            elif missed:
                break
            else:
                missed = True
        return best

    @property
    def _name(self) -> str:
        """The planner's name, as plans have it in ``planner``."""
        size = self.problem.static_size
        return self.problem.planner if size is None else f"static-cp{size}"

    def _packed_s(self) -> float:
        """The least seconds of computing of all packed schedules; infinite without any."""
        return min((schedule.seconds for schedule in self.found), default=inf)

    def _best_s(self) -> float:
        """The least seconds of computing of all packed schedules and all drafts; infinite without
        any."""
        drafted_s = min((draft.seconds for draft in self.drafts), default=inf)
        return min(drafted_s, self._packed_s())

    def _strategies(self) -> list[Strategy]:
        """The strategies of all drafts and schedules so far, the quickest first, without those
        whose ranks work in several pipelines."""
        known = sorted([*self.drafts, *self.found], key=lambda one: one.expected_s)
        strategies = dict.fromkeys(
            Strategy.of(one.table.schemes[k].scheme for k, _, _ in one.groups) for one in known
        )
        return [one for one in strategies if one.devices <= self.problem.devices]

    def _ask(self, generator: Generator, bound: Bound | None = None) -> None:
        """Collect what a generator makes of each table that it is offered. A table is skipped where
        the best so far is so close to the table's bound, or to ``bound`` if given, that the
        generator may gain too little."""
        for offer in self.source.offers(generator.role.tables, self._best_s):
            bound_s = offer.bound_s if bound is None else bound.seconds
            if self._best_s() <= bound_s * (1 + generator.role.beyond):
                continue
            known = Known(
                problem=self.problem,
                bound_s=bound_s,
                best_s=self._best_s(),
                packed_s=self._packed_s(),
                drafted=self.drafted,
                unstaged=self.unstaged,
                strategies=self._strategies(),
                most=offer.most,
                seed=self.seed,
                latest_s=self.source.latest_s if self.source.simulates else None,
            )
            for made in generator.drafts(offer.table, known):
                if isinstance(made, Draft):
                    self.drafts.append(made)
                else:
                    self.found.append(made)
            self.drafted = self.drafted or bool(self.drafts)
            # Drafts of pipelines with stages promise too much, and those of schemes of one row are
            # quick to pack: packed at once, their real seconds are what the next table has to beat.
            few = len(offer.table.tokens) <= FEW
            at_once = any(offer.table.staged) or not any(offer.table.fluid)
            if self.drafts and at_once and not few:
                self._pack(bound_s)
        self.unstaged = self.unstaged or generator.role.tables == "groups"

    def _pack(self, bound_s: float) -> None:
        """Pack the best drafts, improve the best schedules, and sort all schedules, the quickest
        first."""
        self.packed = True
        if all(generator.role.final for generator in self.generators):  # there are no drafts
            self.found.sort(key=lambda schedule: schedule.seconds)
            return
        self.found = self.improvement.scheduled(self.drafts, self.found, bound_s)
        self.drafts = []

    def _unsure(self) -> Iterator[Assignment]:
        """The best schedule with stages beside the best of all and of another strategy, if it may
        turn out quicker on the clock: what its pipelines take is known only once their layers and
        order are chosen."""
        best = self.found[0]
        known = _strategy_of(best) if _is_staged(best) else None
        for schedule in self.found[1:]:
            if schedule.seconds > best.seconds * (1 + NEAR):
                return
            if _is_staged(schedule) and _strategy_of(schedule) != known:
                yield schedule
                return

    def _timed(self) -> list[Candidate]:
        """Schedules with the seconds of their steps. Where timing takes a
        simulation, only these are timed: the best schedule, those with stages that may be quicker,
        and those of one scheme that may be the quickest."""
        promising = self.found
        if self.source.simulates and not all(generator.role.final for generator in self.generators):
            others = (schedule for schedule in self.found[1:] if schedule.source in _AS_THEY_ARE)
            promising = [self.found[0], *self._unsure(), *others]
        timed = list[Candidate]()
        for schedule in promising:
            least_s = min((candidate.seconds for candidate in timed), default=inf)
            # One static schedule is timed in any case, to compare with. Those with stages are, too,
            # as their least seconds are only estimated.
            needless = schedule.source != "static" or any(map(_is_static, timed))
            too_slow = self.source.simulates and self.source.least_s(schedule) > least_s
            if not (needless and too_slow) or _is_staged(schedule):
                timed.append(self.source.timed(schedule))
        return timed


def _strategy_of(schedule: Assignment) -> tuple[list[int], int]:
    """What pipelines a schedule has, to compare with others: their schemes, by the table."""
    return sorted(k for k, _, _ in schedule.groups), id(schedule.table)


def _even_s(schedule: Assignment, late_s: Sequence[float]) -> float:
    """When the pipelines of a schedule, side by side, would all end if they did the same work
    together, each being ``late_s`` seconds later than is estimated."""
    table = schedule.table
    ends = [
        table.width[k] * (sum(table.times(k, packed)) + late)
        for (k, _, _), packed, late in zip(schedule.groups, schedule.packs, late_s, strict=True)
    ]
    return sum(ends) / table.devices


def _is_staged(schedule: Assignment) -> bool:
    """Whether a schedule has pipelines with stages."""
    return any(schedule.table.staged[k] for k, _, _ in schedule.groups)


def _is_static(candidate: Candidate) -> bool:
    """Whether a candidate is a static schedule."""
    return candidate.schedule.source == "static"
