"""Planners of others with layers that are not mixed as ours are.

flexsp      Only the sizes of groups are chosen, and which sequences each gets: all layers of all
            micro-batches take one option, the best for the batch (FlexSP). Groups, in lockstep
            waves, are drafted by our own generators.
paradyse    Groups of one size, the best, each sequence to the group that ends first; the layers of
            every micro-batch by ParaDySe's Algorithm 1 (:mod:`headrace.planners.paradyse`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from headrace.planners.groups import groups_only
from headrace.planners.paradyse import StrategySelector
from headrace.planning.batch import PriceTable
from headrace.planning.bounds import BoundRows, lower_bound
from headrace.planning.fixed_methods import listed_frontier
from headrace.planning.generators import Draft, Known, Role
from headrace.planning.layer_choice import layer_table
from headrace.planning.nested import Nested
from headrace.planning.priced import PricedScheme
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment, Group, launched
from headrace.planning.side_by_side import ANY_SCHEME, SideBySide
from headrace.planning.static import static_schedule
from headrace.planning.waves import Waves
from headrace.spec import LayerPlan, Scheme
from headrace.spec.plan import Working

__all__ = ["Paradyse", "SizesOnly"]

_FLEXSP = Role(name="flexsp", tables="one size", semantics=("free", "lockstep"), beyond=-inf)
_PARADYSE = Role(
    name="paradyse",
    tables="one size",
    costs=("model",),
    semantics=("free", "lockstep"),
    beyond=-inf,
    final=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesOnly:
    """FlexSP's choice: the sizes of groups and their sequences, with one option for all layers.

    Attributes:
        role: For which problems it is, and when it is asked.
    """

    role: Role = _FLEXSP

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Draft | Assignment]:
        """Drafts of groups with one layer option for all layers, option by option by rising lower
        bound, until a bound is not below the best draft so far."""
        best_s = inf
        for bound_s, uniform_table in sorted(
            _bounded(table, known.problem), key=lambda item: item[0]
        ):
            if bound_s >= best_s:
                return
            # FlexSP does not know what other planners drafted, so nothing is cut short by it.
            for draft in _groups(
                uniform_table, replace(known, bound_s=bound_s, best_s=inf, packed_s=inf)
            ):
                best_s = min(best_s, draft.seconds)
                yield draft


def _bounded(table: PriceTable, problem: Problem) -> Iterator[tuple[float, PriceTable]]:
    """(lower bound in seconds, table of groups) for each option that all layers may take."""
    if problem.is_published:
        tables = [groups_only(table)]
    else:
        tables = [PriceTable.like(table, schemes) for schemes in _uniform(table, problem)]
    for option_table in tables:
        # Left out are options with which no group holds the longest sequence.
        if len(option_table) and np.isfinite(option_table.alone[:, 0]).any():
            bound = lower_bound(BoundRows.of(option_table), option_table.devices)
            yield bound.seconds, option_table


def _uniform(table: PriceTable, problem: Problem) -> Iterator[list[PricedScheme]]:
    """For each pair of methods and a recompute level, the priced schemes of groups of all sizes on
    which all layers take that option. A single rank, which spreads nothing, is listed with every
    method of its recompute level."""
    sizes = [scheme.devices for scheme in table.schemes]
    weights = table.schemes[0].weights
    plans = {p: problem.uniform_layers(p) for p in sizes}
    labels = dict.fromkeys(_label(p, plan) for p in sizes for plan in plans[p] if p > 1)
    if not labels:  # all groups are single ranks
        labels = dict.fromkeys(_label(p, plan) for p in sizes for plan in plans[p])
    for methods, level in labels:
        schemes = list[PricedScheme]()
        for p in sizes:
            fitting = (
                plan
                for plan in plans[p]
                if _label(p, plan)[1] == level and (p == 1 or _label(p, plan)[0] == methods)
            )
            schemes += [
                scheme
                for plan in fitting
                if (scheme := _priced(problem, p, plan, weights)) is not None
            ]
        yield schemes


def _label(p: int, plan: LayerPlan) -> tuple[str, str]:
    """(methods as text, recompute level) of a plan of uniform layers on groups of ``p`` ranks; on a
    single rank, which spreads nothing, all methods are one."""
    first = plan.options[0]
    methods = "" if p == 1 else f"{first.attention}/{first.feed_forward}"
    return methods, first.recompute


def _groups(table: PriceTable, known: Known) -> Iterator[Draft | Assignment]:
    """Drafts of groups by this library's own generators: waves in lockstep, else nested groups and
    groups side by side."""
    if known.problem.semantics == "lockstep":
        yield from Waves().drafts(table, known)
        return
    nested = Nested()
    # A rank of nested groups works in several sizes, which takes replicated weights: shards serve
    # one size only.
    if table.schemes[0].weights == "replicated" and nested.role.covers(known.problem):
        for draft in nested.drafts(table, known):
            known = replace(known, best_s=min(known.best_s, draft.seconds), drafted=True)
            yield draft
    yield from SideBySide(role=ANY_SCHEME).drafts(table, known)


def _priced(problem: Problem, p: int, plan: LayerPlan, weights: Working) -> PricedScheme | None:
    """The scheme of groups of ``p`` ranks that hold weights as ``weights`` says, with a frontier of
    the single layer plan ``plan``; None where memory holds no token."""
    pricing, options = problem.pricing, tuple(option for option, _ in plan.counts)
    if problem.semantics == "lockstep":
        table = pricing.lockstep_table(p, options)
    else:
        # Other ``sizes`` take no memory: a rank works in groups of one size, or has all weights.
        table = layer_table(costs=pricing.costs, p=p, working=weights, sizes=(), options=options)
    # Each layer has one option to choose from, the plan's.
    frontier = listed_frontier(table, slots=[(option,) for option in plan.options])
    if not frontier.most_tokens:
        return None
    return PricedScheme(scheme=Scheme(context=p), frontier=frontier, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paradyse:
    """Groups of one size whose layers ParaDySe's Algorithm 1 chooses for every micro-batch.

    Attributes:
        role: For which problems it is, and when it is asked.
    """

    role: Role = _PARADYSE

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Assignment]:
        """A schedule for each group size that holds the batch with the layers that the algorithm
        chooses."""
        problem = known.problem
        for k, p in enumerate(table.width):
            # The algorithm takes all layers to have the same options, which is a single slot; there
            # are several where options are listed layer by layer.
            static = static_schedule(table, k) if len(problem.slots[p]) == 1 else None
            schedule = None if static is None else _with_chosen_layers(static, problem, p)
            if schedule is not None:
                yield schedule


def _with_chosen_layers(static: Assignment, problem: Problem, p: int) -> Assignment | None:
    """The static schedule with the layers that Algorithm 1 chooses for each micro-batch, on groups
    of ``p`` ranks; None where a micro-batch does not fit with them."""
    if problem.semantics == "lockstep":
        static = launched(static)
    table, weights = static.table, static.table.schemes[0].weights
    selector = StrategySelector(
        costs=problem.pricing.costs, p=p, working=weights, options=problem.options[p]
    )
    priced: dict[LayerPlan, PricedScheme | None] = {}  # each layer plan is priced once
    launches_priced = list[tuple[PricedScheme, tuple[int, ...], list[int]]]()
    for (_, ranks, _), packed in zip(static.groups, static.packs, strict=True):
        for members in packed.bins:
            tokens = [table.tokens[i] for i in members]
            layers = selector.select(tokens).layers
            if layers not in priced:
                priced[layers] = _priced(problem, p, layers, weights)
            scheme = priced[layers]
            if scheme is None or scheme.most_tokens < sum(tokens):
                return None
            launches_priced.append((scheme, ranks, list(members)))
    chosen_table = PriceTable.like(
        table, [scheme for scheme in priced.values() if scheme is not None]
    )
    launches: Sequence[Group] = [
        (chosen_table.schemes.index(scheme), ranks, members)
        for scheme, ranks, members in launches_priced
    ]
    return Assignment.of_launches(chosen_table, launches, "paradyse", problem.semantics)
