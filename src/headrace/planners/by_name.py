"""Planners of others by name: what they make of a batch, and what each cannot beat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from headrace.planners.accumulation import accumulated, accumulated_s
from headrace.planners.buckets import bucket, packed
from headrace.planners.given_layers import Paradyse, SizesOnly
from headrace.planners.groups import groups_only, is_groups
from headrace.planners.homogeneous import (
    BatchPlanner,
    max_length,
    static,
    token_balance,
)
from headrace.planners.hydraulis import hydraulis, hydraulis_tuned
from headrace.planners.launched import fitting
from headrace.planners.megatron import dp_balanced, hybrid
from headrace.planners.switching import switching
from headrace.planners.token_balance import by_weight
from headrace.planning.batch import PriceTable
from headrace.planning.generators import FEW, CostKind, Generator, Known, Role, TableKind
from headrace.planning.schedule import Assignment, Group, launched
from headrace.planning.search import GENERATORS
from headrace.planning.static import (
    best_static,
    static_bounds,
    static_in_lockstep,
    static_s,
    static_schedule,
)
from headrace.planning.tolerances import NEAR
from headrace.spec.plan import Semantics

__all__ = ["BASELINES", "PLANNERS", "Baseline"]

Schedules = Callable[[PriceTable, Semantics, int], Assignment | None]
"""Plans one batch under some semantics with a seed; None where it cannot hold the batch."""

Bounded = Callable[[PriceTable], float]
"""Seconds that no schedule of a planner beats, which cost less than making it, or 0."""

Prepare = Callable[[Sequence[PriceTable], int, int | None], BatchPlanner]
"""Decides for all batches at once, with a seed and the model's parameters if known; gives what
plans one after the other, and raises InfeasiblePlan where a batch fits nowhere."""

_BY_NAME = Role(name="", tables="one size", semantics=("free", "lockstep"), beyond=-inf, final=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A planner from the literature as a generator of schedules.

    Attributes:
        role: For which problems it is, and when it is asked.
        schedules: Plans one batch.
        least_s: A bound of its schedules.
        meaning: One line for people.
        staged: Whether it plans tables of any schemes; else only of groups.
        one_size: Whether all its groups have one size, the smallest of a table that holds the
            batch; as a generator it is given each size, and the quickest counts.
        prepare: Of those that are ``staged``, decides for all batches at once.
        few: Whether the search asks it again only for batches of up to :data:`FEW` sequences: for
            more it takes long, and gained nothing (``docs/log.md``).
    """

    role: Role = _BY_NAME
    schedules: Schedules
    least_s: Bounded
    meaning: str
    staged: bool = False
    one_size: bool = False
    prepare: Prepare | None = None
    few: bool = False

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Assignment]:
        """The planner's schedules of a table: one, or one for each group size where it keeps to one
        size. A planner that is asked last makes none if its bound shows that none is quicker than
        the best known."""
        if not self.staged:
            table = groups_only(table)
            if not len(table):
                return
        if self.role.last and (
            (self.few and len(table.tokens) > FEW) or self.least_s(table) >= known.best_s
        ):
            return
        if self.one_size and not self.role.last:
            yield from self._of_sizes(table, known)
            return
        schedule = self.schedules(table, known.problem.semantics, known.seed)
        if schedule is not None:
            yield schedule

    def _of_sizes(self, table: PriceTable, known: Known) -> Iterator[Assignment]:
        """The schedule of each group size, those of the least bounds first, without sizes whose
        bounds show that they are not the quickest."""
        best: Assignment | None = None
        for bound_s, k in sorted(static_bounds(table)):
            if bound_s >= _late_s(best, known):
                return
            one_table = PriceTable.like(table, [table.schemes[k]])
            schedule = self.schedules(one_table, known.problem.semantics, known.seed)
            if schedule is not None:
                yield schedule
                if best is None or schedule.seconds < best.seconds:
                    best = schedule

    def named(self, name: str) -> Baseline:
        """This planner, under ``name``, as the only generator of a problem."""
        tables: TableKind = "every scheme" if self.staged else "one size"
        return replace(self, role=replace(self.role, name=name, tables=tables))

    def asked_again(self, name: str, costs: CostKind, *semantics: Semantics) -> Baseline:
        """This planner as a generator that is asked last, for one kind of costs, where the other
        generators leave a gap to the bound."""
        role = Role(
            name=name,
            tables="one size",
            costs=(costs,),
            semantics=semantics,
            beyond=NEAR,
            final=True,
            last=True,
        )
        return replace(self, role=role)


def _late_s(best: Assignment | None, known: Known) -> float:
    """Seconds of computing from which on no schedule is quicker than ``best`` or those known."""
    if known.latest_s is not None:
        return known.latest_s(best)
    return known.best_s if best is None else min(best.seconds, known.best_s)


def _nothing_s(_: PriceTable) -> float:
    """The bound of planners of which no bound is known: zero seconds."""
    return 0.0


def _fitting_s(table: PriceTable) -> float:
    """Seconds that no schedule beats on groups of the smallest size that holds the longest
    sequence; 0 where no size does."""
    k = fitting(table)
    return 0.0 if k is None else static_s(table, k)


def _best_static_s(table: PriceTable) -> float:
    """Seconds that no schedule of a single scheme beats, whichever it is."""
    return min((bound_s for bound_s, _ in static_bounds(table)), default=0.0)


def _hybrid_s(table: PriceTable) -> float:
    """Seconds that no schedule beats in which every sequence runs alone: each on its size of the
    fewest device-seconds, shared evenly by all devices."""
    device_s = (table.ranks * table.alone).min(axis=0)  # of a sequence of each run of equal ones
    if not np.isfinite(device_s).all():  # some sequence fits no size
        return 0.0
    return float(device_s @ table.batch.counts) / table.devices


def _static(table: PriceTable, semantics: Semantics, _: int) -> Assignment | None:
    """The static schedule that a user would configure. In a table of groups its scheme is the
    smallest group that holds the longest sequence, and in lockstep it is issued launch by launch;
    in a table with other schemes it is the best schedule of one scheme."""
    if not is_groups(table):
        return best_static(table)
    k = fitting(table)
    schedule = None if k is None else static_schedule(table, k)
    return schedule if schedule is None or semantics == "free" else launched(schedule)


def _best_static(table: PriceTable, semantics: Semantics, _: int) -> Assignment | None:
    """The best schedule of one group size, in free semantics or in lockstep."""
    return best_static(table) if semantics == "free" else static_in_lockstep(table)


def _from_launches(
    name: str, make: Callable[[PriceTable], list[Group]]
) -> Callable[[PriceTable, Semantics, int], Assignment | None]:
    """Turn ``make``, which gives a batch's launches in order, into a planner of schedules called
    ``name``."""

    def schedules(table: PriceTable, semantics: Semantics, _: int) -> Assignment | None:
        """The schedule of these launches; None where there are none."""
        launches = make(table)
        return Assignment.of_launches(table, launches, name, semantics) if launches else None

    return schedules


def _from_tuned(
    name: str, make: Callable[[PriceTable, Semantics], list[Group]]
) -> Callable[[PriceTable, Semantics, int], Assignment | None]:
    """The schedules of a planner that tunes the launches of a batch for some semantics."""

    def schedules(table: PriceTable, semantics: Semantics, seed: int) -> Assignment | None:
        """The schedule of the launches that are best; None where there are none."""
        tuned = _from_launches(name, lambda table: make(table, semantics))
        return tuned(table, semantics, seed)

    return schedules


def _for_one_batch(
    prepare: Callable[[Sequence[PriceTable], int], BatchPlanner],
) -> Callable[[PriceTable, Semantics, int], Assignment | None]:
    """Turn ``prepare``, which decides for several batches at once, into a planner of a single
    batch; in lockstep its micro-batches are issued one by one."""

    def schedules(table: PriceTable, semantics: Semantics, seed: int) -> Assignment | None:
        """The schedule of a single batch; None where no scheme holds its longest sequence."""
        if not np.isfinite(table.alone[:, 0]).any():
            return None
        schedule = prepare([table], seed)(0, table)
        return schedule if semantics == "free" else launched(schedule)

    return schedules


def _staged_baseline(
    prepare: Prepare, least_s: Bounded, meaning: str, role: Role = _BY_NAME
) -> Baseline:
    """A baseline that decides for all batches at once and plans tables of any schemes."""
    return Baseline(
        role=role,
        schedules=_for_one_batch(lambda tables, seed: prepare(tables, seed, None)),
        least_s=least_s,
        staged=True,
        prepare=prepare,
        few=True,
        meaning=meaning,
    )


BASELINES: Mapping[str, Baseline] = {
    "static": Baseline(
        schedules=_static,
        least_s=lambda table: _fitting_s(table) if is_groups(table) else _best_static_s(table),
        staged=True,
        prepare=lambda tables, *_: static(tables),
        meaning="one scheme: the smallest group that fits the longest sequence (DeepSpeed-like), "
        "or the pipelines that are best for all batches",
    ),
    "best-static": Baseline(
        schedules=_best_static, least_s=_best_static_s, meaning="one group size, the best of all"
    ),
    "karmarkar-karp": Baseline(
        schedules=_from_launches("karmarkar-karp", by_weight),
        least_s=_fitting_s,
        meaning="one group size, sequences balanced by a fixed formula (verl-like)",
    ),
    "dp-balanced": Baseline(
        schedules=_from_launches("dp-balanced", dp_balanced),
        least_s=_fitting_s,
        meaning="one group size, greedy packs dealt out in turn (Megatron-like)",
    ),
    "hybrid-cp": Baseline(
        schedules=_from_launches("hybrid-cp", hybrid),
        least_s=_hybrid_s,
        few=True,
        meaning="every sequence alone on the fewest ranks that hold it (Megatron-like)",
    ),
    "bucket": Baseline(
        schedules=_from_tuned("bucket", bucket),
        least_s=_fitting_s,
        one_size=True,
        meaning="one group size, smaller batches of longer sequences, tuned (bucket parallel)",
    ),
    "packed": Baseline(
        schedules=_from_tuned("packed", packed),
        least_s=_fitting_s,
        one_size=True,
        meaning="one group size, packs of one size, tuned (packed parallel)",
    ),
    "dcp": Baseline(
        schedules=_from_launches("dcp", accumulated),
        least_s=accumulated_s,
        few=True,
        meaning="a size per bucket, accumulation steps to end together (Data-Centric Parallel)",
    ),
    "max-length": _staged_baseline(
        lambda tables, *_: max_length(tables),
        _best_static_s,
        "one scheme, packs as long as the longest sequence (Megatron-LM)",
    ),
    "token-balance": _staged_baseline(
        lambda tables, *_: token_balance(tables),
        _best_static_s,
        "one scheme, the same tokens for every pipeline",
    ),
    "hydraulis": _staged_baseline(
        lambda tables, seed, _: hydraulis(tables, seed),
        _nothing_s,
        "strategies by a dynamic program, sequences by greedy trials (Hydraulis)",
    ),
    "hydraulis-tuned": _staged_baseline(
        lambda tables, seed, _: hydraulis_tuned(tables, seed),
        _nothing_s,
        "Hydraulis with amortized constants, strategies of one scheme too, longest first",
    ),
    "switching": _staged_baseline(
        lambda tables, _, parameters: switching(tables, parameters),
        _nothing_s,
        "up to three homogeneous strategies in turn, by length (HotSPa-like)",
        replace(_BY_NAME, costs=("pipelines",), semantics=("free",)),
    ),
}


def _asked_again() -> Iterator[Generator]:
    """Planners of others that the search asks last, for costs by formula: of pipelines those that
    plan any schemes, of groups the others. ``switching`` is left out, as changing within a step
    would be free, and so are Hydraulis' two, which take longer than the whole search."""
    for name, baseline in BASELINES.items():
        if not baseline.staged:
            yield baseline.asked_again(name, "groups", "free", "lockstep")
            yield baseline.asked_again(name, "model", "lockstep")
        elif name not in ("switching", "hydraulis", "hydraulis-tuned"):
            yield baseline.asked_again(name, "pipelines", "free")


PLANNERS: Mapping[str, tuple[Generator, ...]] = {
    **{
        name: (baseline.named(name),)
        for name, baseline in BASELINES.items()
        if name not in ("static", "best-static", "switching")
    },
    "flexsp": (SizesOnly(),),
    "paradyse": (Paradyse(),),
    **GENERATORS,
    "adaptive": (*GENERATORS["adaptive"], *_asked_again()),
    "strategies": (*GENERATORS["strategies"], *_asked_again()),
}
"""The generators of a problem by the name of its planner."""
