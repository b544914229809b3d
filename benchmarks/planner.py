"""Planners of pipelines side by side: how quick, how good, how far they reach.

    headrace       ours
    hydraulis      the paper's dynamic program, greedy dispatch with T trials, our packing
    static         the best strategy of one scheme, the same for all iterations
    max-length     the same, packed to the longest sequence and dealt out evenly (Megatron-LM)
    token-balance  the same, tokens balanced by differencing (Karmarkar and Karp)
    switching      up to three strategies of one scheme in turn, changes included (HotSPa)

The step is the longest pipeline's sum_j t_j + (P - 1) max_j t_j. Gaps are over lower bounds: of
every plan (first table), of the strategy's plans (second). Planning is timed in CPU seconds of
this process, on one core; ``planning_s`` and ``proposal_s``, which plans carry, are the clock's.
The lengths are synthetic draws, the costs are what Hydraulis' authors measured.

    1  whole planners: mean step, gap, proposal once, planning per iteration
    2  dispatch and packing of given strategies, beside the paper's greedy; equation 2 has no
       constants, so its gap shows the dispatch alone
    3  integer programs (HiGHS) on the first sequences of an iteration
    4  proposals, beside the paper's dynamic program
    5  growth with devices and tokens

examples:
    python benchmarks/planner.py
    python benchmarks/planner.py --parts 1 5 --planners headrace static
    python benchmarks/planner.py --json planner.json --pictures pictures
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from headrace.planning.pipelines import PLANNERS, plan_pipelines
from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.dynamic_program import proposed
from headrace.planning.pipelines.packing import pack
from headrace.planning.pipelines.paper import greedy
from headrace.planning.pipelines.programs import dispatch_program, packing_program
from headrace.planning.pipelines.proposal import propose
from headrace.planning.pipelines.solution import packed, solved
from headrace.planning.pipelines.strategy_bound import strategy_bound_s
from headrace.planning.pipelines.world import Counts, World
from rich.table import Table

from headrace.cli.display import out_console, tell
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import HeadraceError
from headrace.units import count_text, percent_text, seconds_text

HERE = Path(__file__).parent
CASES = (
    ("hydraulis-32b", 64, "commoncrawl-like-200k"),
    ("hydraulis-32b", 1024, "commoncrawl-like-3.2m"),
    ("hydraulis-13b", 32, "longtail-32k-100k"),
    ("hydraulis-13b", 32, "longtail-32k-1000k"),
    ("hydraulis-7b", 32, "longtail-32k-100k"),
    ("hydraulis-7b", 32, "longtail-32k-1000k"),
)
STRATEGIES = (
    "1*tp16", "1/4*tp16 + 6/4*tp8", "1/4*tp16 + 12/4*tp4", "1/4*tp16 + 6/4*tp2-pp4",
    "1/4*tp16 + 1/4*tp8-pp2 + 2/4*tp4-pp2 + 2/4*tp2-pp4",
)  # fmt: skip
"""Pipelines for every 16 devices."""


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
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


def whole_planners(o: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, devices, fixture in CASES:
        costs, iterations = costs_of(name), lengths_of(fixture)
        for planner in o.planners:
            tell(f"{planner}: {name}, {devices} devices, {fixture}")
            spent, plan = timed(
                lambda: plan_pipelines(costs, iterations, devices, planner=planner, seed=o.seed)  # noqa: B023
            )
            rows.append(
                {
                    "costs": name, "devices": devices, "lengths": fixture, "planner": planner,
                    "mean_s": plan.mean_s,
                    "steps_s": [item.predicted_s for item in plan.iterations],
                    "bounds_s": [item.lower_bound_s for item in plan.iterations],
                    "gap": median(item.gap for item in plan.iterations),
                    "strategies": [item.strategy for item in plan.iterations],
                    "proposal_s": plan.proposal_s,
                    "planning_s": median(item.planning_s for item in plan.iterations),
                    "cpu_s": spent,
                }
            )  # fmt: skip
    return rows


def strategy_of(world: World, text: str) -> Counts:
    """One of STRATEGIES for all the devices."""
    counts = [0] * len(world.pipes)
    names = [pipe.name for pipe in world.pipes]
    for term in text.split(" + "):
        number, _, name = term.partition("*")
        top, _, below = number.partition("/")
        counts[names.index(name)] = int(top) * world.devices // (16 * int(below or 1))
    return tuple(counts)


def without_constants(world: World) -> World:
    return replace(world, pipes=tuple(replace(pipe, c=0.0, util=1) for pipe in world.pipes))


def given_strategies(o: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, devices, fixture in CASES[:2]:
        world = World.of(costs_of(name), devices)
        iterations = lengths_of(fixture)[: o.iterations]
        for text in STRATEGIES:
            counts = strategy_of(world, text)
            tell(f"{world.text(counts)} on {fixture}")
            found = [
                of_strategy(Batch(w, lengths), counts, o)
                for lengths in iterations
                for w in (world, without_constants(world))
            ]
            ours, bare = found[::2], found[1::2]
            rows.append(
                {
                    "devices": devices, "lengths": fixture, "strategy": world.text(counts),
                    "step_s": fmean(row["ours_s"] for row in ours),
                    "gap": median(row["gap"] for row in ours),
                    "gap_equation_2": median(row["gap"] for row in bare),
                    "cpu_s": median(row["cpu_s"] for row in ours),
                    "greedy_s": fmean(row["greedy_s"] for row in ours),
                    "greedy_gap_equation_2": median(row["greedy_gap"] for row in bare),
                    "greedy_cpu_s": median(row["greedy_cpu_s"] for row in ours),
                }
            )  # fmt: skip
    return rows


def of_strategy(batch: Batch, counts: Counts, o: argparse.Namespace) -> dict[str, Any]:
    """Ours and the paper's greedy on one iteration; tables of costs are made for both before."""
    for k, n in enumerate(counts):
        if n:
            batch.seconds(k), batch.work(k)
    cpu_s, ours = timed(lambda: solved(batch, counts, steps=12))
    greedy_cpu_s, theirs = timed(
        lambda: packed(batch, counts, greedy(batch, counts, seed=o.seed, trials=o.trials))
    )
    bound_s = strategy_bound_s(batch, counts)
    return {
        "ours_s": ours.seconds, "cpu_s": cpu_s, "gap": ours.seconds / bound_s - 1,
        "greedy_s": theirs.seconds, "greedy_cpu_s": greedy_cpu_s,
        "greedy_gap": theirs.seconds / bound_s - 1,
    }  # fmt: skip


def programs(o: argparse.Namespace) -> list[dict[str, Any]]:
    name, devices, fixture = CASES[0]
    world = World.of(costs_of(name), devices)
    names = [pipe.name for pipe in world.pipes]
    rows = []
    for number, (pipe, sequences) in enumerate((("tp8", 14), ("tp4-pp2", 14), ("tp2-pp4", 14))):
        k = names.index(pipe)
        fits = [x for x in lengths_of(fixture)[number] if x <= world.pipes[k].cap][:sequences]
        batch, everything = Batch(world, fits), range(sequences)
        tell(f"integer program: packing on {pipe}")
        cpu_s, answer = timed(
            lambda: packing_program(batch, k, everything, limit_s=o.program_s)  # noqa: B023
        )
        own_s, (seconds, _) = timed(lambda: pack(batch, k, everything))  # noqa: B023
        rows.append(program_row(f"packing {sequences} on {pipe}", seconds, own_s, answer, cpu_s))
    for number, wanted in enumerate(({"tp8": 1, "tp4": 4}, {"tp8": 2, "tp4-pp2": 2, "tp4": 2})):
        counts = tuple(wanted.get(name, 0) for name in names)
        batch = Batch(world, [x for x in lengths_of(fixture)[number] if x <= 20_000][:30])
        tell(f"integer program: dispatch on {world.text(counts)}")
        cpu_s, answer = timed(lambda: dispatch_program(batch, counts, limit_s=o.program_s))  # noqa: B023
        own_s, ours = timed(lambda: solved(batch, counts, steps=40))  # noqa: B023
        text = f"dispatch 30 on {world.text(counts)}"
        rows.append(program_row(text, ours.seconds, own_s, answer, cpu_s))
    return rows


def program_row(text: str, seconds: float, own_s: float, answer: Any, cpu_s: float) -> Any:
    return {
        "problem": text, "ours_s": seconds, "cpu_s": own_s, "program_s": answer.seconds,
        "program_bound_s": answer.bound_s, "program_cpu_s": cpu_s,
    }  # fmt: skip


def proposals(o: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    costs = costs_of("hydraulis-32b")
    for devices in (size for size in (64, 256, 1024, 4096, 16_384) if size <= o.largest):
        world = World.of(costs, devices)
        iterations = [drawn(devices * 3125, seed) for seed in range(3)]
        tell(f"proposal for {devices} devices")
        cpu_s, made = timed(lambda: propose(world, iterations, o.seed))  # noqa: B023
        every = [tokens for lengths in iterations for tokens in lengths]
        whole_s, whole = timed(lambda: proposed(world, every, relaxed=False))  # noqa: B023
        relaxed_s, relaxed = timed(lambda: proposed(world, every, relaxed=True))  # noqa: B023
        rows.append(
            {
                "devices": devices, "cpu_s": cpu_s, "candidates": len(made.candidates),
                "whole_cpu_s": whole_s, "whole_candidates": len(whole),
                "relaxed_cpu_s": relaxed_s, "relaxed_candidates": len(relaxed),
            }
        )  # fmt: skip
    return rows


def growth(o: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    costs = costs_of("hydraulis-32b")
    for devices in (size for size in (64, 256, 1024, 4096, 16_384) if size <= o.largest):
        tokens = 64_000_000 * devices // 16_384
        iterations = [drawn(tokens, seed) for seed in range(3)]
        tell(f"{devices} devices, {count_text(tokens)} tokens")
        spent, plan = timed(lambda: plan_pipelines(costs, iterations, devices, seed=o.seed))  # noqa: B023
        rows.append(
            {
                "devices": devices, "tokens": tokens, "sequences": len(iterations[0]),
                "proposal_s": plan.proposal_s, "cpu_s": spent,
                "planning_s": median(item.planning_s for item in plan.iterations),
                "mean_s": plan.mean_s, "gap": median(item.gap for item in plan.iterations),
            }
        )  # fmt: skip
    return rows


COLUMNS: dict[str, Sequence[tuple[str, str, Callable[[Any], str]]]] = {
    "whole planners": (
        ("costs", "costs", str), ("devices", "devices", str), ("lengths", "lengths", str),
        ("planner", "planner", str), ("mean step", "mean_s", "{:.4f} s".format),
        ("gap", "gap", percent_text), ("proposal", "proposal_s", seconds_text),
        ("an iteration", "planning_s", seconds_text),
    ),
    "given strategies": (
        ("strategy", "strategy", str), ("step", "step_s", "{:.4f} s".format),
        ("gap", "gap", percent_text), ("equation 2", "gap_equation_2", percent_text),
        ("cpu", "cpu_s", seconds_text), ("greedy", "greedy_s", "{:.4f} s".format),
        ("equation 2", "greedy_gap_equation_2", percent_text),
        ("cpu", "greedy_cpu_s", seconds_text),
    ),
    "integer programs": (
        ("problem", "problem", str), ("ours", "ours_s", "{:.4f} s".format),
        ("cpu", "cpu_s", seconds_text), ("program", "program_s", "{:.4f} s".format),
        ("proved", "program_bound_s", "{:.4f} s".format), ("cpu", "program_cpu_s", seconds_text),
    ),
    "proposals": (
        ("devices", "devices", str), ("ours", "cpu_s", seconds_text),
        ("candidates", "candidates", str), ("whole pipelines", "whole_cpu_s", seconds_text),
        ("candidates", "whole_candidates", str), ("relaxed", "relaxed_cpu_s", seconds_text),
        ("candidates", "relaxed_candidates", str),
    ),
    "growth": (
        ("devices", "devices", str), ("tokens", "tokens", count_text),
        ("sequences", "sequences", str), ("proposal", "proposal_s", seconds_text),
        ("an iteration", "planning_s", seconds_text), ("mean step", "mean_s", seconds_text),
        ("gap", "gap", percent_text),
    ),
}  # fmt: skip
PARTS = dict(
    zip(COLUMNS, (whole_planners, given_strategies, programs, proposals, growth), strict=True)
)


def table_of(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=name, title_justify="left")
    for title, _, form in COLUMNS[name]:
        table.add_column(title, justify="left" if form is str else "right", no_wrap=True)
    before = None
    for row in rows:
        group = (row.get("costs"), row.get("devices"), row.get("lengths"))
        if before is not None and before != group and name != "growth":
            table.add_section()
        before = group
        table.add_row(*(form(row[key]) for _, key, form in COLUMNS[name]))
    return table


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=int, nargs="+", default=range(1, 6), choices=range(1, 6))
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), choices=list(PLANNERS))
    parser.add_argument("--trials", type=int, default=100, help="of the paper's greedy")
    parser.add_argument("--iterations", type=int, default=3, help="of part 2")
    parser.add_argument("--program-s", type=float, default=10.0, help="limit of one program")
    parser.add_argument("--largest", type=int, default=16_384, help="devices in parts 4 and 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="of parts 1 and 5")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    o = options(arguments)
    console = out_console()
    found: dict[str, Any] = {}
    try:
        for number, (name, part) in enumerate(PARTS.items(), 1):
            if number in o.parts:
                found[name] = part(o)
                console.print(table_of(name, found[name]), crop=False)
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
