"""Tables of published costs, and a check of schedules that shares nothing with what made them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.bounds import BoundRows, lower_bound
from headrace.planning.priced import Frontier, PricedScheme
from headrace.planning.schedule import Assignment
from headrace.spec import Lengths, Scheme
from planning.group_worlds import clock_s

__all__ = ["bound_s", "checked_s", "fixture", "flexsp", "group_table", "pipeline_table"]

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@cache
def flexsp() -> GroupCosts:
    return GroupCosts.load(_BENCHMARKS / "published/flexsp-7b-a100.json")


@cache
def fixture(name: str) -> list[list[int]]:
    return json.loads((_BENCHMARKS / f"fixtures/{name}.json").read_text())["iterations"]


def group_table(
    costs: GroupCosts, lengths: Sequence[int], devices: int, *, rows: int = 1
) -> PriceTable:
    """Groups of all sizes; each of ``rows`` rows more is a tenth slower and holds twice as much."""
    schemes = []
    for p in (p for p in costs.sizes if p <= devices):
        a, b, c, cap = (
            costs.a_s / p,
            (costs.b_s + costs.kappa_s[p]) / p,
            costs.c_s,
            costs.cap_tokens,
        )
        frontier = Frontier.of_rows([(a, b, c)] * rows, cap * p)
        if rows > 1:
            slower = [1.1**row for row in range(rows)]
            frontier = Frontier(
                options=(),
                a=frontier.a * slower,
                b=frontier.b * slower,
                c=frontier.c * slower,
                caps=tuple(cap * p * 2**row for row in range(rows)),
                layers=frontier.layers,
            )
        schemes.append(PricedScheme(scheme=Scheme(context=p), frontier=frontier))
    return PriceTable(SortedBatch.of(Lengths(tokens=tuple(lengths))), schemes, devices)


def pipeline_table(costs: PipelineCosts, lengths: Sequence[int], devices: int) -> PriceTable:
    """All schemes that fit the devices; lengths are cut to what they hold."""
    rooms = [(cost, cost.most_tokens(devices) or 0) for cost in costs.schemes]
    schemes = [
        PricedScheme(
            scheme=cost.scheme,
            frontier=Frontier.of_rows([(cost.a_s, cost.b_s, cost.c_s)], room),
            util=max(1, cost.util_length),
            name=cost.name,
        )
        for cost, room in rooms
        if room > 0 and cost.scheme.devices <= devices
    ]
    most = max((scheme.most_tokens for scheme in schemes), default=0)
    tokens = tuple(min(most, length) for length in lengths)
    return PriceTable(SortedBatch.of(Lengths(tokens=tokens)), schemes, devices)


def bound_s(table: PriceTable) -> float:
    return lower_bound(BoundRows.of(table), table.devices).seconds


def checked_s(schedule: Assignment) -> float:
    """Seconds worked out anew; fails when the schedule is none."""
    table, seen, runs = schedule.table, list[int](), list[tuple[tuple[int, ...], float]]()
    for (k, ranks, members), own in zip(schedule.groups, schedule.packs, strict=True):
        scheme = table.schemes[k]
        assert len(ranks) == scheme.devices
        assert sorted(set(ranks)) == sorted(ranks)
        assert set(ranks) <= set(range(table.devices))
        assert sorted(i for held in own.bins for i in held) == sorted(members)
        seen += members
        times = []
        for held, row in zip(own.bins, own.rows, strict=True):
            a, b, c = scheme.frontier.rows[row]
            tokens = [table.tokens[i] for i in held]
            assert tokens
            assert sum(tokens) <= scheme.frontier.caps[row], "memory"
            times.append(sum(a * n * n + b * n for n in tokens) + c)
        runs.append((ranks, sum(times) + (scheme.depth - 1) * max(times)))
    assert sorted(seen) == list(range(len(table.tokens))), "every sequence once"
    if schedule.phases:
        return sum(map(checked_s, schedule.phases)) + schedule.switch_s
    return clock_s(table.devices, runs, schedule.semantics)
