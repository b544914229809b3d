"""Our planner: how quick, how good, how far it reaches, beside others' planners.

    headrace       ours
    hydraulis      the paper's dynamic program, greedy dispatch with T trials, our packing
    static         the best strategy of one scheme, the same for all iterations
    max-length     the same, packed to the longest sequence and dealt out evenly (Megatron-LM)
    token-balance  the same, tokens balanced by differencing (Karmarkar and Karp)
    switching      up to three strategies of one scheme in turn, changes included (HotSPa)

With published costs, parts 1 to 5, the step is the longest pipeline's sum_j t_j + (P - 1) max_j
t_j. Gaps are over lower bounds: of every plan, in part 2 of the strategy's plans. Planning is timed
in CPU seconds of this process, on one core; only ``planning_s`` is the clock's. The lengths are
synthetic draws, the costs are what Hydraulis' authors measured; those of part 6 are a roofline's.

    1  whole planners: mean step, gap, CPU of all iterations, clock of the middle one. Others decide
       about all iterations at once, which the clock of one leaves out
    2  dispatch and packing of given strategies, beside the paper's greedy; equation 2 has no
       constants, so its gap shows the dispatch alone
    3  integer programs (HiGHS) on the first sequences of an iteration
    4  strategies of an iteration: ours beside the best of those that the paper's dynamic program
       (whole pipelines) proposes for three iterations, each dispatched and packed by ours
    5  growth with devices and tokens; the last rows have many sequences for their devices, and many
       devices
    6  plans for training, Llama 8B on H100: preparation is what a first plan takes beyond a warm
       one; of three batches the mean step, the middle CPU and gap, and the first strategy

``--beside`` sets ratios to an earlier run's numbers behind those that it has.

examples:
    python benchmarks/planner.py
    python benchmarks/planner.py --parts 1 --beside benchmarks/results/planner.json
    python benchmarks/planner.py --json planner.json --pictures pictures
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np
from beside import Earlier
from given_strategies import counted, dispatched, table_of
from rich.console import Console
from rich.table import Table

import headrace as hr
from headrace.cli.display import tell
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.data.drawn_lengths import draw_batches, parse_distribution
from headrace.engine.planned_iterations import OWN, plan_iterations, planner_names
from headrace.errors import HeadraceError
from headrace.planners.dynamic_program import proposed
from headrace.planners.hydraulis import greedy
from headrace.planning import Problem, plan
from headrace.planning.batch import PriceTable
from headrace.planning.packing import pack
from headrace.planning.priced import Frontier
from headrace.planning.schedule import Assignment, placed
from headrace.planning.side_by_side import Counts
from headrace.units import count_text, percent_text, seconds_text

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))  # where the references of parts 2 and 3 stand

CASES = (
    ("hydraulis-32b", 64, "commoncrawl-like-200k"),
    ("hydraulis-32b", 1024, "commoncrawl-like-3.2m"),
    ("hydraulis-13b", 32, "longtail-32k-100k"),
    ("hydraulis-13b", 32, "longtail-32k-1000k"),
    ("hydraulis-7b", 32, "longtail-32k-100k"),
    ("hydraulis-7b", 32, "longtail-32k-1000k"),
)
STRATEGIES = (
    "1*tp16",
    "1/4*tp16 + 6/4*tp8",
    "1/4*tp16 + 12/4*tp4",
    "1/4*tp16 + 6/4*tp2-pp4",
    "1/4*tp16 + 1/4*tp8-pp2 + 2/4*tp4-pp2 + 2/4*tp2-pp4",
)
"""Pipelines for every 16 devices."""
SIZES = (64, 256, 1024, 4096, 16_384)
TRAINING = ((8, 1), (64, 1), (256, 4), (1024, 16), (1024, 4))
"""Devices, and millions of tokens of a batch."""
TRAINED = "lognormal:median=2000,sigma=1.5,max=131072"

Value = TypeVar("Value")


def timed(work: Callable[[], Value]) -> tuple[float, Value]:
    began = time.process_time()
    value = work()
    return time.process_time() - began, value


def costs_of(name: str) -> PipelineCosts:
    return PipelineCosts.load(HERE / "published" / f"{name}.json")


def lengths_of(name: str) -> list[list[int]]:
    return json.loads((HERE / "fixtures" / f"{name}.json").read_text())["iterations"]


def drawn(tokens: int, seed: int) -> list[int]:
    """Like the fixtures: LogNormal(ln 700, 1.05), clipped to [16, 32768]."""
    draws = np.random.default_rng(seed).lognormal(np.log(700), 1.05, tokens // 500 + 50)
    lengths = np.clip(draws.round(), 16, 32_768).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1].tolist()


def planned(
    costs: PipelineCosts, iterations: Sequence[Sequence[int]], devices: int, planner: str, seed: int
) -> dict[str, Any]:
    """What a planner makes of some iterations."""
    problem = Problem(costs=costs, devices=devices)
    spent, found = timed(lambda: plan_iterations(problem, iterations, planner=planner, seed=seed))
    plans = [item.plan for item in found]
    return {
        "mean_s": fmean(own.predicted_s for own in plans),
        "steps_s": [own.predicted_s for own in plans],
        "bounds_s": [own.lower_bound_s for own in plans],
        "gap": median(own.gap for own in plans),
        "strategies": [item.strategy for item in found],
        "planning_s": median(item.planning_s for item in found),
        "cpu_s": spent,
    }


def whole_planners(o: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, devices, fixture in CASES:
        for planner in o.planners:
            tell(f"{planner}: {name}, {devices} devices, {fixture}")
            made = planned(costs_of(name), lengths_of(fixture), devices, planner, o.seed)
            case = {"costs": name, "devices": devices, "lengths": fixture, "planner": planner}
            rows.append({**case, **made})
    return rows


def strategy_of(table: PriceTable, text: str) -> Counts:
    """One of STRATEGIES for all the devices."""
    names, counts = list(map(str, table.schemes)), [0] * len(table)
    for term in text.split(" + "):
        number, _, name = term.partition("*")
        top, _, below = number.partition("/")
        counts[names.index(name)] = int(top) * table.devices // (16 * int(below or 1))
    return tuple(counts)


def without_constants(table: PriceTable) -> PriceTable:
    schemes = [
        replace(
            scheme,
            util=1,
            frontier=Frontier.of_rows(
                [(a, b, 0.0) for a, b, _ in scheme.frontier.rows], scheme.most_tokens
            ),
        )
        for scheme in table.schemes
    ]
    return PriceTable(table.batch, schemes, table.devices)


def given_strategies(o: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, devices, fixture in CASES[:2]:
        problem = Problem(costs=costs_of(name), devices=devices)
        tables = [table_of(problem, lengths) for lengths in lengths_of(fixture)[: o.iterations]]
        for text in STRATEGIES:
            counts = strategy_of(tables[0], text)
            strategy = counted(tables[0], counts)
            tell(f"{strategy} on {fixture}")
            ours = [of_strategy(table, counts, o) for table in tables]
            bare = [of_strategy(without_constants(table), counts, o) for table in tables]
            rows.append(
                {
                    "devices": devices,
                    "lengths": fixture,
                    "strategy": strategy,
                    "step_s": fmean(row["ours_s"] for row in ours),
                    "gap": median(row["gap"] for row in ours),
                    "gap_equation_2": median(row["gap"] for row in bare),
                    "cpu_s": median(row["cpu_s"] for row in ours),
                    "greedy_s": fmean(row["greedy_s"] for row in ours),
                    "greedy_gap_equation_2": median(row["greedy_gap"] for row in bare),
                    "greedy_cpu_s": median(row["greedy_cpu_s"] for row in ours),
                }
            )
    return rows


def of_strategy(table: PriceTable, counts: Counts, o: argparse.Namespace) -> dict[str, Any]:
    """Ours and the paper's greedy on one iteration."""
    from references.strategy_bound import strategy_bound_s

    cpu_s, ours = timed(lambda: dispatched(table, counts))
    assert ours is not None, "the strategies hold all sequences"
    greedy_cpu_s, theirs = timed(
        lambda: Assignment.of(
            table, placed(table, greedy(table, counts, seed=o.seed, trials=o.trials)), "hydraulis"
        )
    )
    bound_s = strategy_bound_s(table, counts)
    return {
        "ours_s": ours.seconds,
        "cpu_s": cpu_s,
        "gap": ours.seconds / bound_s - 1,
        "greedy_s": theirs.seconds,
        "greedy_cpu_s": greedy_cpu_s,
        "greedy_gap": theirs.seconds / bound_s - 1,
    }


def programs(o: argparse.Namespace) -> list[dict[str, Any]]:
    from references.programs import dispatch_program, packing_program

    name, devices, fixture = CASES[0]
    problem = Problem(costs=costs_of(name), devices=devices)
    rooms = {str(scheme): scheme.most_tokens for scheme in problem.published_schemes}
    iterations, rows = lengths_of(fixture), []
    for lengths, (scheme, count) in zip(
        iterations, (("tp8", 14), ("tp4-pp2", 14), ("tp2-pp4", 14)), strict=False
    ):
        fits = [x for x in lengths if x <= rooms[scheme]][:count]
        table = table_of(problem, fits)
        k = list(map(str, table.schemes)).index(scheme)
        tell(f"integer program: packing on {scheme}")
        cpu_s, answer = timed(
            lambda: packing_program(table, k, range(count), limit_s=o.program_s)  # noqa: B023
        )
        own_s, ours = timed(lambda: pack(table, k, range(count)))  # noqa: B023
        text = f"packing {count} on {scheme}"
        rows.append(program_row(text, ours.seconds, own_s, answer, cpu_s))
    for lengths, wanted in zip(
        iterations, ({"tp8": 1, "tp4": 4}, {"tp8": 2, "tp4-pp2": 2, "tp4": 2}), strict=False
    ):
        table = table_of(problem, [x for x in lengths if x <= 20_000][:30])
        counts = tuple(wanted.get(str(scheme), 0) for scheme in table.schemes)
        text = counted(table, counts)
        tell(f"integer program: dispatch on {text}")
        cpu_s, answer = timed(lambda: dispatch_program(table, counts, limit_s=o.program_s))  # noqa: B023
        own_s, found = timed(lambda: dispatched(table, counts))  # noqa: B023
        assert found is not None, "the strategies hold 20,000 tokens"
        rows.append(program_row(f"dispatch 30 on {text}", found.seconds, own_s, answer, cpu_s))
    return rows


def program_row(text: str, seconds: float, own_s: float, answer: Any, cpu_s: float) -> Any:
    return {
        "problem": text,
        "ours_s": seconds,
        "cpu_s": own_s,
        "program_s": answer.seconds,
        "program_bound_s": answer.bound_s,
        "program_cpu_s": cpu_s,
    }


def strategies(o: argparse.Namespace) -> list[dict[str, Any]]:
    rows, costs = [], costs_of("hydraulis-32b")
    for devices in (size for size in SIZES if size <= o.largest):
        iterations = [drawn(devices * 3125, seed) for seed in range(3)]
        tell(f"strategies for {devices} devices")
        table = table_of(Problem(costs=costs, devices=devices), iterations[0])
        every = [tokens for lengths in iterations for tokens in lengths]
        program_s, found = timed(lambda: proposed(table, every, relaxed=False))  # noqa: B023
        tried_s, steps = timed(lambda: [dispatched(table, counts) for counts in found])  # noqa: B023
        ours = planned(costs, iterations[:1], devices, OWN, o.seed)
        rows.append(
            {
                "devices": devices,
                "step_s": ours["mean_s"],
                "gap": ours["gap"],
                "cpu_s": ours["cpu_s"],
                "program_step_s": min(one.seconds for one in steps if one is not None),
                "program_cpu_s": program_s,
                "tried": len(found),
                "tried_cpu_s": tried_s,
            }
        )
    return rows


def growth(o: argparse.Namespace) -> list[dict[str, Any]]:
    rows, costs = [], costs_of("hydraulis-32b")
    cases = [(size, 64_000_000 * size // 16_384, 3) for size in SIZES]
    for devices, tokens, count in [*cases, (64, 121_000_000, 1), (16_384, 256_000_000, 1)]:
        if devices > o.largest:
            continue
        iterations = [drawn(tokens, seed) for seed in range(count)]
        tell(f"{devices} devices, {count_text(tokens)} tokens")
        made = planned(costs, iterations, devices, OWN, o.seed)
        sizes = {"devices": devices, "tokens": tokens, "sequences": len(iterations[0])}
        rows.append({**sizes, **made})
    return rows


def training(o: argparse.Namespace) -> list[dict[str, Any]]:
    rows, law = [], parse_distribution(TRAINED)
    for devices, millions in (row for row in TRAINING if row[0] <= o.largest):
        tell(f"training on {devices} devices, {millions}M tokens")
        model = hr.Architecture.preset("llama-8b")
        problem = Problem(
            costs=hr.costs.roofline(model, "h100", devices=devices, implementation="ideal")
        )
        batches = draw_batches(law, millions * 10**6, 3, o.seed)
        first_s, _ = timed(lambda: plan(problem, batches[0], seed=o.seed))  # noqa: B023
        found = [timed(lambda: plan(problem, own, seed=o.seed)) for own in batches]  # noqa: B023
        plans = [made for _, made in found]
        rows.append(
            {
                "devices": devices,
                "tokens": millions * 10**6,
                "sequences": len(batches[0]),
                "preparation_s": max(0.0, first_s - found[0][0]),
                "cpu_s": median(spent for spent, _ in found),
                "cpus_s": [spent for spent, _ in found],
                "mean_s": fmean(made.predicted_s for made in plans),
                "steps_s": [made.predicted_s for made in plans],
                "bounds_s": [made.lower_bound_s for made in plans],
                "gap": median(made.gap for made in plans),
                "strategy": str(plans[0].strategy),
                "strategies": [str(made.strategy) for made in plans],
            }
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``work`` makes rows of different ``keys``; ``columns`` are (title, name of a number, form),
    those of the keys first."""

    work: Callable[[argparse.Namespace], list[dict[str, Any]]]
    keys: Sequence[str]
    columns: Sequence[tuple[str, str, Callable[[Any], str]]]
    after: Sequence[str] = ()


STEP = "{:.4f} s".format
PARTS = {
    "whole planners": Part(
        work=whole_planners,
        keys=("costs", "devices", "lengths", "planner"),
        columns=(
            ("mean step", "mean_s", STEP),
            ("gap", "gap", percent_text),
            ("cpu", "cpu_s", seconds_text),
            ("clock of one", "planning_s", seconds_text),
        ),
    ),
    "given strategies": Part(
        work=given_strategies,
        keys=("devices", "lengths", "strategy"),
        columns=(
            ("step", "step_s", STEP),
            ("gap", "gap", percent_text),
            ("equation 2", "gap_equation_2", percent_text),
            ("cpu", "cpu_s", seconds_text),
            ("greedy", "greedy_s", STEP),
            ("equation 2", "greedy_gap_equation_2", percent_text),
            ("cpu", "greedy_cpu_s", seconds_text),
        ),
    ),
    "integer programs": Part(
        work=programs,
        keys=("problem",),
        columns=(
            ("ours", "ours_s", STEP),
            ("cpu", "cpu_s", seconds_text),
            ("program", "program_s", STEP),
            ("proved", "program_bound_s", STEP),
            ("cpu", "program_cpu_s", seconds_text),
        ),
    ),
    "strategies": Part(
        work=strategies,
        keys=("devices",),
        columns=(
            ("step", "step_s", STEP),
            ("gap", "gap", percent_text),
            ("cpu", "cpu_s", seconds_text),
            ("theirs", "program_step_s", STEP),
            ("cpu", "program_cpu_s", seconds_text),
            ("tried", "tried", str),
            ("cpu", "tried_cpu_s", seconds_text),
        ),
    ),
    "growth": Part(
        work=growth,
        keys=("devices", "tokens", "sequences"),
        columns=(
            ("mean step", "mean_s", STEP),
            ("gap", "gap", percent_text),
            ("cpu", "cpu_s", seconds_text),
            ("clock of one", "planning_s", seconds_text),
        ),
    ),
    "training": Part(
        work=training,
        keys=("devices", "tokens", "sequences"),
        columns=(
            ("preparation", "preparation_s", seconds_text),
            ("cpu", "cpu_s", seconds_text),
            ("mean step", "mean_s", STEP),
            ("gap", "gap", percent_text),
        ),
        after=("strategy",),
    ),
}


def table_for(name: str, rows: Sequence[dict[str, Any]], earlier: dict[str, Any]) -> Table:
    part = PARTS[name]
    before = Earlier(earlier.get(name, ()), part.keys)
    table = Table(title=name, title_justify="left")
    for title in part.keys:
        table.add_column(title, no_wrap=True)
    for title, _, _ in part.columns:
        table.add_column(title, justify="right", no_wrap=True)
    for title in part.after:
        table.add_column(title)
    last = None
    for row in rows:
        group = [row[key] for key in part.keys[:-1]]
        if last is not None and last != group and len(part.keys) > 2 and "tokens" not in row:
            table.add_section()
        last = group
        keys = (count_text(row[key]) if key == "tokens" else str(row[key]) for key in part.keys)
        numbers = (
            before.text(row, key, form) if key.endswith("_s") else form(row[key])
            for _, key, form in part.columns
        )
        table.add_row(*keys, *numbers, *(row[key] for key in part.after))
    return table


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = range(1, len(PARTS) + 1)
    planners = planner_names(Problem(costs=costs_of("hydraulis-32b"), devices=64))
    parser.add_argument("--parts", type=int, nargs="+", default=every, choices=every)
    parser.add_argument("--planners", nargs="+", default=planners, choices=planners)
    parser.add_argument("--trials", type=int, default=100, help="of the paper's greedy")
    parser.add_argument("--iterations", type=int, default=3, help="of part 2")
    parser.add_argument("--program-s", type=float, default=10.0, help="limit of one program")
    parser.add_argument("--largest", type=int, default=16_384, help="devices in parts 4 to 6")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="of an earlier run")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="of parts 1 and 5")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    o = options(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    found: dict[str, Any] = {}
    earlier = json.loads(o.beside.read_text()) if o.beside else {}
    try:
        for number, (name, part) in enumerate(PARTS.items(), 1):
            if number in o.parts:
                found[name] = part.work(o)
                console.print(table_for(name, found[name], earlier), crop=False)
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 2
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps(found, indent=1) + "\n")
    if o.pictures:
        from planner_pictures import draw  # needs altair

        for path in draw(found, o.pictures):
            tell(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
