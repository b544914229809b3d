"""Planners of others by name: what they make of a batch, and what each cannot beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from headrace.planning.baselines.accumulation import accumulated, accumulated_s
from headrace.planning.baselines.buckets import bucket, packed
from headrace.planning.baselines.homogeneous import (
    BatchPlanner,
    is_groups,
    max_length,
    static,
    token_balance,
)
from headrace.planning.baselines.hydraulis import hydraulis
from headrace.planning.baselines.launched import fitting, static_launches
from headrace.planning.baselines.megatron import dp_balanced, hybrid
from headrace.planning.baselines.switching import switching
from headrace.planning.baselines.token_balance import by_weight
from headrace.planning.batch import PriceTable
from headrace.planning.schedule import Assignment, Group
from headrace.planning.static import best_static, static_bounds, static_s
from headrace.spec.plan import Semantics

__all__ = ["BASELINES", "Baseline"]

_ABOUT = 1.01  # Slack: launches are priced by a row up to 1 % slower.

_NEAR = 1.03  # Bounds up to this times the least count as equal.


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A planner of others.

    Attributes:
        schedules: Plans one batch under some semantics with a seed; None where it cannot hold the
            batch.
        least_s: A bound of its schedules, in seconds, that costs less than making them, or 0.
        meaning: One line for people.
        staged: Whether it plans tables of any schemes; else only of groups.
        one_size: Whether all its groups have one size, the smallest of a table that holds the
            batch; as the planner of a problem it is given each size, and the quickest counts.
        prepare: Of those that are ``staged``, decides for all batches at once, with a seed and the
            model's parameters, if known; gives what plans one after the other, which raises
            InfeasiblePlan where a batch fits nowhere.
    """

    schedules: Callable[[PriceTable, Semantics, int], Assignment | None]
    least_s: Callable[[PriceTable], float]
    meaning: str
    staged: bool = False
    one_size: bool = False
    prepare: Callable[[Sequence[PriceTable], int, int | None], BatchPlanner] | None = None

    def tried(
        self, tables: Sequence[PriceTable], semantics: Semantics, seed: int
    ) -> list[Assignment]:
        """Its schedules for each table, or for each size of each; the quickest first, none where it
        cannot hold the batch."""
        given = [one for table in tables for one in _sizes(table)] if self.one_size else tables
        made = (self.schedules(table, semantics, seed) for table in given)
        return sorted((one for one in made if one is not None), key=lambda one: one.seconds)


def _sizes(table: PriceTable) -> list[PriceTable]:
    """A table for every scheme that holds the longest sequence."""
    holding = np.flatnonzero(np.isfinite(table.alone[:, 0])).tolist()
    return [PriceTable(table.batch, [table.schemes[k]], table.devices) for k in holding]


def _nothing_s(_: PriceTable) -> float:
    return 0.0


def _fitting_s(table: PriceTable) -> float:
    """Seconds that no groups of the smallest size that holds the longest sequence beat."""
    k = fitting(table)
    return 0.0 if k is None else static_s(table, k)


def _best_static_s(table: PriceTable) -> float:
    return min((bound_s for bound_s, _ in static_bounds(table)), default=0.0)


def _hybrid_s(table: PriceTable) -> float:
    """Seconds if every sequence is alone on the size of the fewest device-seconds, shared by all
    devices."""
    alone = (table.ranks * table.alone).min(axis=0)
    return float(alone @ table.batch.counts) / table.devices if np.isfinite(alone).all() else 0.0


def _static(table: PriceTable, semantics: Semantics, _: int) -> Assignment | None:
    if not is_groups(table):
        return best_static(table)
    k = fitting(table)
    return None if k is None else static_launches(table, k, semantics)


def _best_static(table: PriceTable, semantics: Semantics, _: int) -> Assignment | None:
    if semantics == "free":
        return best_static(table)
    best, best_s, bounds = None, inf, list(static_bounds(table))
    near_s = min((bound_s for bound_s, _ in bounds), default=0.0) * _NEAR
    # Of bounds that hardly differ the widest groups come first: fewer launches wait for each other.
    for bound_s, k in sorted(bounds, key=lambda item: (max(item[0], near_s), -item[1])):
        if bound_s <= best_s:
            made = static_launches(table, k, semantics, late=(_ABOUT * best_s).__lt__)
            if made is not None and made.seconds <= best_s:
                best, best_s = made, made.seconds
    return best


def _launched(
    name: str, make: Callable[[PriceTable], list[Group]]
) -> Callable[[PriceTable, Semantics, int], Assignment | None]:
    """A planner that issues launch by launch."""

    def schedules(table: PriceTable, semantics: Semantics, _: int) -> Assignment | None:
        launches = make(table)
        return Assignment.of_launches(table, launches, name, semantics) if launches else None

    return schedules


def _alone(
    prepare: Callable[[Sequence[PriceTable], int], BatchPlanner],
) -> Callable[[PriceTable, Semantics, int], Assignment | None]:
    """A planner of several batches for one of them, under the free semantics."""

    def schedules(table: PriceTable, _: Semantics, seed: int) -> Assignment | None:
        if not np.isfinite(table.alone[:, 0]).any():
            return None
        return prepare([table], seed)(0, table)

    return schedules


BASELINES: Mapping[str, Baseline] = {
    "static": Baseline(
        schedules=_static,
        least_s=lambda t: _fitting_s(t) if is_groups(t) else _best_static_s(t),
        staged=True,
        prepare=lambda tables, *_: static(tables),
        meaning="one scheme: the smallest group that fits the longest sequence (DeepSpeed-like), "
        "or the pipelines that are best for all batches",
    ),
    "best-static": Baseline(
        schedules=_best_static, least_s=_best_static_s, meaning="one group size, the best of all"
    ),
    "karmarkar-karp": Baseline(
        schedules=_launched("karmarkar-karp", by_weight),
        least_s=_fitting_s,
        meaning="one group size, sequences balanced by a fixed formula (verl-like)",
    ),
    "dp-balanced": Baseline(
        schedules=_launched("dp-balanced", dp_balanced),
        least_s=_fitting_s,
        meaning="one group size, greedy packs dealt out in turn (Megatron-like)",
    ),
    "hybrid-cp": Baseline(
        schedules=_launched("hybrid-cp", hybrid),
        least_s=_hybrid_s,
        meaning="every sequence alone on the fewest ranks that hold it (Megatron-like)",
    ),
    "bucket": Baseline(
        schedules=_launched("bucket", bucket),
        least_s=_fitting_s,
        one_size=True,
        meaning="one group size, smaller batches of longer sequences (bucket parallel)",
    ),
    "packed": Baseline(
        schedules=_launched("packed", packed),
        least_s=_fitting_s,
        one_size=True,
        meaning="one group size, packs as full as memory allows (packed parallel)",
    ),
    "dcp": Baseline(
        schedules=_launched("dcp", accumulated),
        least_s=accumulated_s,
        meaning="a size per bucket, accumulation steps to end together (Data-Centric Parallel)",
    ),
    "max-length": Baseline(
        schedules=_alone(lambda tables, _: max_length(tables)),
        least_s=_best_static_s,
        staged=True,
        prepare=lambda tables, *_: max_length(tables),
        meaning="one scheme, packs as long as the longest sequence (Megatron-LM)",
    ),
    "token-balance": Baseline(
        schedules=_alone(lambda tables, _: token_balance(tables)),
        least_s=_best_static_s,
        staged=True,
        prepare=lambda tables, *_: token_balance(tables),
        meaning="one scheme, the same tokens for every pipeline",
    ),
    "hydraulis": Baseline(
        schedules=_alone(hydraulis),
        least_s=_nothing_s,
        staged=True,
        prepare=lambda tables, seed, _: hydraulis(tables, seed),
        meaning="strategies by a dynamic program, sequences by greedy trials (Hydraulis)",
    ),
    "switching": Baseline(
        schedules=_alone(lambda tables, _: switching(tables)),
        least_s=_nothing_s,
        staged=True,
        prepare=lambda tables, _, parameters: switching(tables, parameters),
        meaning="up to three homogeneous strategies in turn, by length (HotSPa-like)",
    ),
}
