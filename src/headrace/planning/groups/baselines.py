"""Planners of others by name, and what each cannot beat without being run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.planning.groups.accumulation import accumulation_jobs, accumulation_s
from headrace.planning.groups.buckets import bucket_jobs, packed_jobs
from headrace.planning.groups.clock import Job, Semantics
from headrace.planning.groups.megatron import dp_balanced_jobs, hybrid_jobs
from headrace.planning.groups.static import best_static_jobs, fitting_row, static_jobs, static_s
from headrace.planning.groups.token_balance import token_balance_jobs
from headrace.planning.groups.work import Work

__all__ = ["BASELINES", "Baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A planner of others: ``jobs`` plans a batch under some semantics, ``least_s`` is a bound of
    its plans that costs less than making them, ``meaning`` one line for people."""

    jobs: Callable[[Work, Semantics], list[Job]]
    least_s: Callable[[Work], float]
    meaning: str


def _fitting_s(work: Work) -> float:
    return static_s(work, fitting_row(work))


def _best_static_s(work: Work) -> float:
    return min(static_s(work, row) for row in range(fitting_row(work), len(work.sizes)))


def _hybrid_s(work: Work) -> float:
    """Every sequence in a launch of its own, on the size of the least device-seconds."""
    ranks = np.array(work.sizes, dtype=np.float64)[:, None]
    return float((ranks * (work.seconds + work.c_s)).min(axis=0).sum()) / work.devices


BASELINES: Mapping[str, Baseline] = {
    "static": Baseline(
        jobs=lambda work, _: static_jobs(work, fitting_row(work)), least_s=_fitting_s,
        meaning="one group size, the smallest that fits the longest sequence (DeepSpeed-like)",
    ),
    "best-static": Baseline(
        jobs=lambda work, semantics: best_static_jobs(work, semantics)[1], least_s=_best_static_s,
        meaning="one group size, the best of all",
    ),
    "karmarkar-karp": Baseline(
        jobs=lambda work, _: token_balance_jobs(work), least_s=_fitting_s,
        meaning="one group size, sequences balanced by a fixed formula (verl-like)",
    ),
    "dp-balanced": Baseline(
        jobs=lambda work, _: dp_balanced_jobs(work), least_s=_fitting_s,
        meaning="one group size, greedy packs dealt out in turn (Megatron-like)",
    ),
    "hybrid-cp": Baseline(
        jobs=lambda work, _: hybrid_jobs(work), least_s=_hybrid_s,
        meaning="every sequence alone on the fewest ranks that hold it (Megatron-like)",
    ),
    "bucket": Baseline(
        jobs=lambda work, _: bucket_jobs(work), least_s=_fitting_s,
        meaning="one group size, smaller batches of longer sequences (bucket parallel)",
    ),
    "packed": Baseline(
        jobs=lambda work, _: packed_jobs(work), least_s=_fitting_s,
        meaning="one group size, packs as full as memory allows (packed parallel)",
    ),
    "dcp": Baseline(
        jobs=lambda work, _: accumulation_jobs(work), least_s=accumulation_s,
        meaning="a size per bucket, accumulation steps to end together (Data-Centric Parallel)",
    ),
}  # fmt: skip
