"""Sequence-parallel sizing: what the planners of groups make of long-tailed batches, and how fast.

Synthetic batches (log-normal, median 700 tokens, sigma 1.5, at most 32,768) of 100 thousand, 1 and
4 million tokens, and of 4 million with lengths up to 131,072, three of each, on 8, 64 and 256
devices, under both step semantics, with the published costs of a GPT 7B on A100 (FlexSP). All
planners run in this process, one after the other: headrace's, and those of others as their authors
describe them.

    ratio   seconds of a plan over the plain bound: all work shared by all devices and one constant,
            or the quickest launch of the longest sequence; mean of the batches
    gap     headrace's seconds over its own, closer bound, less one
    ms      planning, processor time of one core, median of the batches and rounds

``--beside`` sets ratios to an earlier run's numbers behind those that it has.

examples:
    python benchmarks/planner_groups.py
    python benchmarks/planner_groups.py --beside benchmarks/results/planner_groups.json
    python benchmarks/planner_groups.py --tokens 1000k --devices 64 --rounds 5 --json groups.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, get_args

from beside import Earlier
from rich.console import Console
from rich.table import Table

from headrace.cli.display import tell
from headrace.costs.group_costs import GroupCosts
from headrace.engine.planned_iterations import OWN, plan_iterations, planner_names
from headrace.planning import Problem
from headrace.spec import Plan
from headrace.spec.plan import Semantics

_FOLDER = Path(__file__).parent
_FIXTURES = {
    "100k": "longtail-32k-100k",
    "1000k": "longtail-32k-1000k",
    "4000k": "longtail-32k-4000k",
    "4000k-128k": "longtail-128k-4000k",
}


def plain_bound_s(costs: GroupCosts, lengths: Sequence[int], devices: int) -> float:
    longest = max(lengths)
    sizes = [p for p in costs.sizes if p <= devices and p * costs.cap_tokens >= longest]
    work = sum(costs.a_s * n * n + costs.b_s * n for n in lengths)
    return max(work / devices + costs.c_s, min(costs.seconds([longest], p) for p in sizes))


def timed(
    problem: Problem, lengths: Sequence[int], planner: str, rounds: int
) -> tuple[Plan, list[float]]:
    """The plan, and the seconds of every round of making it."""
    found = list[float]()
    while True:
        began = time.process_time()
        (made,) = plan_iterations(problem, [lengths], planner=planner)
        found.append(time.process_time() - began)
        if len(found) >= rounds:
            return made.plan, found


def cell(
    problem: Problem, costs: GroupCosts, batches: Sequence[list[int]], planner: str, rounds: int
) -> dict[str, Any]:
    """One planner on the batches of one size."""
    ratios, gaps, planning = list[float](), list[float](), list[float]()
    for lengths in batches:
        plan, seconds = timed(problem, lengths, planner, rounds)
        ratios.append(plan.predicted_s / plain_bound_s(costs, lengths, problem.devices))
        gaps.append(plan.gap)
        planning += seconds
    return {
        "planner": planner,
        "ratio": mean(ratios),
        "ratios": ratios,
        "gap": mean(gaps),
        "planning_ms": 1e3 * median(planning),
        "slowest_ms": 1e3 * max(planning),
    }


def cells(o: argparse.Namespace, costs: GroupCosts) -> Iterator[dict[str, Any]]:
    timed(Problem(costs=costs, devices=8), [4096, 64], OWN, 1)  # what is loaded late is loaded now
    for tokens in o.tokens:
        path = _FOLDER / f"fixtures/{_FIXTURES[tokens]}.json"
        batches = json.loads(path.read_text())["iterations"]
        for devices in o.devices:
            for semantics in o.semantics:
                tell(f"{tokens} tokens on {devices} devices, {semantics}")
                problem = Problem(costs=costs, devices=devices, semantics=semantics)
                yield {
                    "tokens": tokens,
                    "devices": devices,
                    "semantics": semantics,
                    "sequences": [len(lengths) for lengths in batches],
                    "planners": [
                        cell(problem, costs, batches, planner, o.rounds) for planner in o.planners
                    ],
                }


def flat(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every cell and planner."""
    return [{**row, **own} for row in found for own in row["planners"]]


def show(found: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]]) -> None:
    before = Earlier(flat(earlier), ("tokens", "devices", "semantics", "planner"))
    console = Console(width=220 if not sys.stdout.isatty() else None)
    table = Table(title="seconds over the plain bound")
    for name in ("tokens", "devices", "semantics", "gap", "ms"):
        table.add_column(name, justify="right")
    for own in found[0]["planners"]:
        table.add_column(own["planner"], justify="right")
    for row in found:
        every = flat([row])
        ours = next((x for x in every if x["planner"] == OWN), None)
        table.add_row(
            row["tokens"],
            str(row["devices"]),
            row["semantics"],
            f"{100 * ours['gap']:.1f} %" if ours else "",
            before.text(ours, "planning_ms", "{:.0f}".format) if ours else "",
            *(before.text(x, "ratio", "{:.3f}".format) for x in every),
        )
    console.print(table)


def main() -> int:
    costs = GroupCosts.load(_FOLDER / "published/flexsp-7b-a100.json")
    planners = planner_names(Problem(costs=costs, devices=8))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", nargs="+", choices=_FIXTURES, default=list(_FIXTURES))
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument(
        "--semantics", nargs="+", choices=get_args(Semantics), default=list(get_args(Semantics))
    )
    parser.add_argument("--planners", nargs="+", choices=planners, default=planners)
    parser.add_argument("--rounds", type=int, default=3, help="plans of every batch, for the ms")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="of an earlier run")
    o = parser.parse_args()
    found = list(cells(o, costs))
    show(found, json.loads(o.beside.read_text())["cells"] if o.beside else ())
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        value = {"costs": costs.to_json(), "rounds": o.rounds, "cells": found}
        o.json.write_text(json.dumps(value, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
