"""Pipelines of several schemes: what they give, from published costs and measured here.

    scenarios  mean steps of Hydraulis' Figure 13, ours beside the baselines and Hydraulis' planner
    context    the same where sequences may be split over 2 or 4 ranks, by a rule, not measured
    ablation   its Figure 16: what each idea gives
    breakdown  its Table 1: propagation, optimization and what moves between the two
    ranks      the same, measured on ranks of this machine, beside the simulator's step

What is taken from the paper and what is chosen here stands at the top of hetero_scenarios.py,
hetero_ablation.py and hetero_breakdown.py.

examples:
    python benchmarks/hetero.py
    python benchmarks/hetero.py --only scenarios --quick
    python benchmarks/hetero.py --json hetero.json --pictures pictures
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_ablation import ablation, ablation_tables
from hetero_breakdown import breakdown, breakdown_tables
from hetero_ranks import rank_tables, ranks
from hetero_scenarios import context_scenarios, scenario_tables, scenarios
from rich.console import Console
from rich.table import Table

from headrace.cli.display import tell
from headrace.errors import HeadraceError
from headrace.native.machine import machine_facts


@dataclass(frozen=True, slots=True)
class Section:
    """``work`` makes a JSON value, ``tables`` show it."""

    work: Callable[[argparse.Namespace], dict[str, Any]]
    tables: Callable[[dict[str, Any]], list[Table]]


SECTIONS: Mapping[str, Section] = {
    "scenarios": Section(scenarios, scenario_tables),
    "context": Section(context_scenarios, scenario_tables),
    "ablation": Section(ablation, ablation_tables),
    "breakdown": Section(breakdown, breakdown_tables),
    "ranks": Section(ranks, rank_tables),
}
"""By name, in the order in which they run."""


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        default=list(SECTIONS),
        choices=list(SECTIONS),
        metavar="SECTION",
        help=f"{', '.join(SECTIONS)} (all)",
    )
    add("--quick", action="store_true", help="four scenarios, three iterations")
    add("--iterations", type=int, help="of every scenario (20, or 3)")
    add(
        "--more",
        type=float,
        default=0.05,
        help="of what a token costs that context parallelism adds at most (0.05)",
    )
    add("--seed", type=int, default=0, help="of lengths and planners (0)")
    add("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    add("--pictures", type=Path, metavar="FOLDER", help="of scenarios and ablation")
    o = parser.parse_args(arguments)
    if o.iterations is None:
        o.iterations = 3 if o.quick else 20
    if o.iterations < 1:
        parser.error("--iterations: at least 1")
    return o


def main(arguments: Sequence[str]) -> int:
    o = options(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    found: dict[str, Any] = {"machine": machine_facts("cpu"), "seed": o.seed}
    try:
        for name, section in SECTIONS.items():
            if name in o.only:
                found[name] = section.work(o)
                for table in section.tables(found[name]):
                    console.print(table, crop=False)
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 2
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps(found, indent=1) + "\n")
    if o.pictures:
        from hetero_pictures import draw  # needs altair

        for path in draw(found, o.pictures):
            tell(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
