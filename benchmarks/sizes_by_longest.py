"""Group sizes by the longest sequence: the rule of Megatron-Core's dynamic context parallelism, on
which verl and SkyRL build, in its strongest form.

A sequence of l tokens has context parallelism c = 2^ceil(log2(l / (t M))): the smallest power of
two of which each rank, with tensor parallelism t, holds at most M tokens of it; and no less than
the weights need. M and t are what a user configures, for a whole run.

    batch        all groups have the c of the longest sequence of the batch
    micro-batch  each sequence runs in a group of its own c, packed with others of the same c

The rule decides sizes and nothing else: which group has which sequences, packing, order, layers and
recompute are decided by headrace's own search with its costs, which is more than the peers do (a
greedy scheduler that counts l^2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from headrace.planning import Generator, Problem
from headrace.planning.batch import PriceTable
from headrace.planning.filling import Pipelines, deal
from headrace.planning.generators import Effort, Known, Role, TableKind, least_time
from headrace.planning.nested import Nesting
from headrace.planning.priced import PricedScheme
from headrace.planning.schedule import Assignment, placed
from headrace.planning.static import static_schedule

__all__ = ["SizesByLongest", "generators"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesByLongest:
    """Schedules whose sizes the rule decides.

    Attributes:
        tables: The tables of prices that it drafts from.
        tensor: Ranks that share the weights of a layer, t.
        limit: The most tokens of a sequence on a rank, M.
        batch: Whether the longest sequence of the batch decides for all.
    """

    tables: TableKind
    tensor: int
    limit: int
    batch: bool

    @property
    def role(self) -> Role:
        """For costs of a model, whatever the bound."""
        return Role(
            name="sizes by the longest",
            tables=self.tables,
            costs=("model",),
            beyond=-inf,
            final=True,
        )

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Assignment]:
        """The schedules of a table, packed; none where it lacks a size."""
        own = self._allowed(table, known.problem)
        if own is None:
            return
        sizes = np.isfinite(own.alone).argmax(axis=0)  # of each run
        if (sizes == sizes[0]).all():
            made = static_schedule(own, int(sizes[0]))
            if made is not None:
                yield made
        if self.batch:
            return
        if self.tables == "groups":  # a rank works in one size: it holds the weights of no other
            dealt = _side_by_side(own, sizes)
            if dealt:
                yield Assignment.of(own, placed(own, dealt), "by the longest")
            return
        effort = Effort()
        nesting = Nesting(own, range(len(own)))
        for fill in (nesting.fill, nesting.by_deadline):
            nested = least_time(fill, known.bound_s, inf, effort)
            if nested is not None:
                yield Assignment.of(own, nested.result, "by the longest")

    def _allowed(self, table: PriceTable, problem: Problem) -> PriceTable | None:
        """The table in which each sequence has the one size of the rule; None where a size is not
        there or does not hold a sequence."""
        schemes = [scheme for scheme in table.schemes if self._fits(scheme)]
        if not schemes:
            return None
        own = PriceTable.like(table, schemes)
        ranks = own.batch.run_values / (self.limit * self.tensor)
        wanted = 2.0 ** np.ceil(np.log2(np.maximum(1.0, ranks)))
        there = np.array([[scheme.scheme.context] for scheme in own.schemes])
        least = there.min()
        if self.tensor == 1:
            groups = (g for held in problem.holding for g in problem.pricing.groups(held))
            least = min(group.devices for group in groups if self._fits(group))
        wanted = np.maximum(wanted, least)
        if self.batch:
            wanted[:] = wanted.max()
        for prices in (own.alone, own.work, own.spread):
            prices[there != wanted] = np.inf
        return own if np.isfinite(own.alone).any(axis=0).all() else None

    def _fits(self, scheme: PricedScheme) -> bool:
        """Whether a scheme is one of the rule's: one stage, a power of two of ranks."""
        context = scheme.scheme.context
        powers = context & (context - 1) == 0
        return scheme.depth == 1 and scheme.scheme.tensor == self.tensor and powers


def _side_by_side(table: PriceTable, sizes: NDArray[np.int64]) -> Pipelines:
    """Groups of each size for the sequences that have it: one, then more where a group has the most
    to do, as long as there are devices; none where there are too few for one of each size."""
    work = table.work * table.batch.counts
    loads = {k: float(work[k, sizes == k].sum()) for k in np.unique(sizes).tolist()}
    counts, left = dict.fromkeys(loads, 1), table.devices - sum(table.width[k] for k in loads)
    if left < 0:
        return []
    while fitting := [k for k in counts if table.width[k] <= left]:
        k = max(fitting, key=lambda k: loads[k] / counts[k])
        counts[k] += 1
        left -= table.width[k]
    found: Pipelines = []
    each = table.batch.each(sizes)
    for k, count in counts.items():
        own: Pipelines = [(k, []) for _ in range(count)]
        deal(table, own, np.flatnonzero(each == k).tolist())
        found += [(k, held) for _, held in own if held]
    return found


def generators(*, tensor: int, limit: int, batch: bool) -> tuple[Generator, ...]:
    """The planner that follows the rule."""
    tables: tuple[TableKind, ...] = ("every scheme",)
    if tensor == 1:
        tables = ("one size",) if batch else ("nested", "groups")
    return tuple(
        SizesByLongest(tables=kind, tensor=tensor, limit=limit, batch=batch) for kind in tables
    )
