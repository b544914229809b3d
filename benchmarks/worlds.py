"""Plans of one planner over many worlds: what they lose in the mean and at worst, and their time.

A world is costs, devices and a batch. A plan is compared with the best that is known of its world:
the least step of this run, of the restrictions that ``--restrict`` plans, and of earlier runs
(``--known``), so that what any of them finds counts. Planners are judged by these means and worst
cases, not world by world: a search is a lottery within a fraction of a percent.

    pipelines   published costs of pipelines (Hydraulis), of 140 to 16,000 sequences
    groups      published costs of groups (FlexSP), groups start when their ranks are free
    lockstep    the same, groups meet at every layer, and drawn batches of few sequences
    8b          Llama 8B by a roofline on 8 to 256 H100
    32b         Llama 32B (60 layers of 6,656) on 48 and 64
    70b         Llama 70B on 64 and 256, where memory binds
    own         32B and 70B on 48 to 128 by headrace's kernels of today, the others by ideal ones
    small       made-up costs of 2 to 9 ranks, of few sequences
    large       Llama 8B on 64 with 98,960 sequences, and on 1,024

    behind      the step over the best known, less one: mean and worst of the group
    gap         the step over its own bound, less one: mean and worst
    cpu         processor time of a warm plan: geometric mean and most
    of a step   processor time over the seconds of the step, the largest of the group: below 100 %
                one more core, as fast as this one, plans batches as quickly as they train

``--restrict`` plans each world with less allowed (one stage; powers of two; weights held one way;
tensor blocks and stages without context groups): where such a plan is quicker, the search is to
blame, as more choices can never be worse.

``--set`` plans with other numbers, ``--without`` leaves generators out; ``search_numbers.py`` says
what each number of the search gains.

examples:
    python benchmarks/worlds.py
    python benchmarks/worlds.py --groups 32b 70b --restrict --known benchmarks/results/worlds.json
    python benchmarks/worlds.py --without "side by side" --known benchmarks/results/worlds.json
    python benchmarks/worlds.py --set nested.near=0.02 improvement.looks=0
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import headrace as hr
from headrace.cli.display import tell
from headrace.costs import CostModel, Speeds, published, synthetic_costs
from headrace.errors import InfeasiblePlan, SpecError
from headrace.planners import PLANNERS
from headrace.planning import Generator, Problem, plan
from headrace.planning.improvement import Improvement
from headrace.spec import Lengths, Plan
from headrace.units import GIB, percent_text, seconds_text

HERE = Path(__file__).parent
LLAMA_32B = hr.Architecture(
    kind="llama",
    layers=60,
    hidden=6656,
    heads=52,
    kv_heads=52,
    ffn=17_920,
    vocabulary=32_000,
)
SHORT = "bins:edges=1024/2048/4096/8192/16384/32768/65536/131072,shares=64/16/9/5/3/2/1"
"""Lengths as frequent as their cube is rare (Data-Centric Parallel's short data)."""
CURVED = "lognormal:median=2000,sigma=1.5,max=131072"
FEW = "lognormal:median=600,sigma=1,max=131072"

OWN: Sequence[tuple[str, int, tuple[str, str], tuple[str, str], tuple[str, str]]] = (
    ("32b", 64, ("github-code", "2M"), ("commoncrawl-like", "1M"), (SHORT, "2M")),
    ("32b", 48, ("github-code", "2M"), ("chatqa2-sft", "1M"), (CURVED, "1M")),
    ("70b", 64, ("github-code", "2M"), ("chatqa2-sft", "1M"), (CURVED, "1M")),
    ("70b", 128, ("github-code", "2M"), ("prolong", "4M"), (CURVED, "2M")),
)
"""Worlds of headrace's own kernels: a model, devices and batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is planned for: a problem and a batch."""

    group: str
    name: str
    problem: Callable[[], Problem]
    lengths: Callable[[], Lengths]


def fixture(name: str, at: int) -> Lengths:
    found = json.loads((HERE / "fixtures" / f"{name}.json").read_text())["iterations"]
    return Lengths(tokens=tuple(found[at]))


@cache
def of_model(name: str, devices: int, kernels: str = "ideal") -> Problem:
    model = LLAMA_32B if name == "32b" else hr.Architecture.preset(f"llama-{name}")
    return Problem(costs=hr.costs.roofline(model, "h100", devices=devices, implementation=kernels))


@cache
def of_published(name: str, devices: int, semantics: Any = "free") -> Problem:
    return Problem(costs=published(name), devices=devices, semantics=semantics)


def drawn(law: str, tokens: str, seed: int) -> Callable[[], Lengths]:
    return lambda: hr.lengths.draw(law, tokens=tokens, seed=seed)


def of_pipelines() -> Iterator[World]:
    for name, devices, lengths in (
        ("hydraulis-32b", 64, "commoncrawl-like-200k"),
        ("hydraulis-13b", 32, "longtail-32k-100k"),
        ("hydraulis-13b", 32, "longtail-32k-1000k"),
        ("hydraulis-7b", 32, "longtail-32k-100k"),
        ("hydraulis-7b", 32, "longtail-32k-1000k"),
    ):
        for at in (0, 1):
            yield World(
                group="pipelines",
                name=f"{name} on {devices}, {lengths} {at}",
                problem=lambda name=name, devices=devices: of_published(name, devices),
                lengths=lambda lengths=lengths, at=at: fixture(lengths, at),
            )
    for tokens in ("5M", "15M"):
        yield World(
            group="pipelines",
            name=f"hydraulis-32b on 64, {tokens}",
            problem=lambda: of_published("hydraulis-32b", 64),
            lengths=drawn("lognormal:median=700,sigma=1.05,min=16,max=32768", tokens, 0),
        )


def of_groups(semantics: Any) -> Iterator[World]:
    group = "groups" if semantics == "free" else "lockstep"

    def made(devices: int, text: str, lengths: Callable[[], Lengths]) -> World:
        return World(
            group=group,
            name=f"flexsp on {devices}, {text}",
            problem=lambda: of_published("flexsp-7b-a100", devices, semantics),
            lengths=lengths,
        )

    for devices in (8, 64, 256):
        for text in ("32k-100k", "32k-1000k"):
            for at in (0, 1):
                name = f"longtail-{text}"
                yield made(devices, f"{text} {at}", lambda name=name, at=at: fixture(name, at))
        if devices > 8:
            yield made(devices, "128k-4000k", lambda: fixture("longtail-128k-4000k", 0))
        for seed in (1, 2, 3):  # long tails, 5 to 10 sequences for each device
            law, tokens = "lognormal:median=700,sigma=1.5,max=131072", f"{devices * 15}K"
            yield made(devices, f"tail {seed}", drawn(law, tokens, seed))


def of_a_model(
    name: str, devices: int, *batches: tuple[str, str], kernels: str = "ideal"
) -> Iterator[World]:
    short = {CURVED: "median 2,000", FEW: "median 600", SHORT: "mostly short"}
    for law, tokens in batches:
        for seed in (1, 2):
            yield World(
                group=name if kernels == "ideal" else "own",
                name=f"{name} on {devices}, {short.get(law, law)} {tokens} {seed}",
                problem=lambda: of_model(name, devices, kernels),
                lengths=drawn(law, tokens, seed),
            )


def of_few(seed: int, semantics: Any) -> World:
    random = np.random.default_rng([seed, 5])
    ranks = int(random.integers(2, 10))
    speeds = Speeds(
        launch_s=float(random.choice([0.0, 5e-5, 1e-3])),
        link_bytes_per_s=float(random.choice([1e11, 5e9])),
    )
    memory = int(random.choice([3, 5, 10]) * GIB)
    count = int(random.integers(1, 14))
    most = 8_000 if memory < 4 * GIB else 30_000
    tokens = np.exp(random.normal(np.log(most / 4), 1.2, count)).clip(16, most).round()

    def problem() -> Problem:
        costs: CostModel = synthetic_costs(ranks, 2, memory_bytes=memory, speeds=speeds)
        return Problem(costs=costs, semantics=semantics)

    return World(
        group="small" if semantics == "free" else "lockstep",
        name=f"made up {seed}: {count} sequences on {ranks}",
        problem=problem,
        lengths=lambda: Lengths.of(tokens),
    )


def all_worlds() -> Iterator[World]:
    yield from of_pipelines()
    yield from of_groups("free")
    yield from of_groups("lockstep")
    yield from (of_few(seed, "lockstep") for seed in range(40))
    yield from of_a_model("8b", 8, (CURVED, "250K"), ("chatqa2-sft", "500K"))
    yield from of_a_model("8b", 64, (CURVED, "1M"), ("github-code", "4M"), ("prolong", "4M"))
    yield from of_a_model("8b", 256, (CURVED, "4M"))
    yield from of_a_model(
        "32b", 64, ("commoncrawl-like", "1600K"), ("chatqa2-sft", "1M"), (SHORT, "4M")
    )
    yield from of_a_model("32b", 64, ("github-code", "4M"))
    yield from of_a_model("32b", 48, ("chatqa2-sft", "1M"))
    yield from of_a_model("70b", 64, (CURVED, "1M"))
    yield from of_a_model("70b", 256, (CURVED, "4M"), (FEW, "4M"))
    for name, devices, *batches in OWN:
        yield from of_a_model(name, devices, *batches, kernels="headrace")
    yield from (of_few(seed, "free") for seed in range(60))
    for devices, law, tokens in ((64, FEW, "98M"), (1024, CURVED, "16M")):
        yield World(
            group="large",
            name=f"8b on {devices}, {tokens}",
            problem=lambda devices=devices: of_model("8b", devices),
            lengths=drawn(law, tokens, 1),
        )


def restricted(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The problem with less allowed, by name."""
    if problem.is_published:
        return
    sizes = problem.group_sizes
    powers = tuple(p for p in sizes if p & (p - 1) == 0)
    blocks = tuple(
        method
        for method in problem.model.feed_forwards
        if method.startswith(("local", "megatron_ts", "metp"))
    )
    changes: dict[str, dict[str, Any]] = {
        "one stage": {"stages": False},
        "powers of two": {"sizes": powers},
        "replicated": {"holding": ("replicated",)},
        "sharded": {"holding": ("sharded",)},
        "blocks and stages": {"methods": blocks},
    }
    for name, change in changes.items():
        try:
            yield name, problem.replace(**change)
        except SpecError:
            continue


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How worlds are planned: the generators of a planner with other numbers, or without some."""

    numbers: Mapping[str, Mapping[str, Any]]
    without: tuple[str, ...] = ()

    @property
    def improvement(self) -> Improvement:
        return Improvement(**self.numbers.get("improvement", {}))

    def generators(self, problem: Problem) -> list[Generator]:
        """Those of the problem's planner."""
        kept = (own for own in PLANNERS[problem.planner] if own.role.name not in self.without)
        return [
            replace(own, **dict(self.numbers.get(own.role.name, {})))  # type: ignore[type-var]
            for own in kept
        ]

    def plan(self, problem: Problem, lengths: Lengths) -> Plan:
        return plan(
            problem,
            lengths,
            generators=self.generators(problem),
            improvement=self.improvement,
        )


def planned(world: World, search: Search) -> tuple[Plan, float]:
    """The plan of a world, and the processor seconds of making it again: the first plan of a
    problem also works out what all batches share."""
    problem, lengths = world.problem(), world.lengths()
    made = search.plan(problem, lengths)
    began = time.process_time()
    search.plan(problem, lengths)
    return made, time.process_time() - began


def row_of(world: World, search: Search, *, restrict: bool) -> dict[str, Any]:
    made, spent_s = planned(world, search)
    found = {
        "group": world.group,
        "world": world.name,
        "step_s": made.predicted_s,
        "best_s": made.predicted_s,
        "by": "",
        "gap": made.gap,
        "cpu_s": spent_s,
        "strategy": str(made.strategy),
    }
    for name, problem in restricted(world.problem()) if restrict else ():
        try:
            other = search.plan(problem, world.lengths())
        except InfeasiblePlan:
            continue
        if other.predicted_s < found["best_s"]:
            found |= {"best_s": other.predicted_s, "by": name}
    return found


def summed(rows: list[dict[str, Any]]) -> dict[str, float]:
    behind = [row["step_s"] / row["best_s"] - 1 for row in rows]
    gaps, spent = [row["gap"] for row in rows], [max(row["cpu_s"], 1e-4) for row in rows]
    return {
        "worlds": len(rows),
        "behind": fmean(behind),
        "worst": max(behind),
        "gap": fmean(gaps),
        "widest": max(gaps),
        "cpu_s": geometric_mean(spent),
        "most_cpu_s": max(spent),
        "of_step": max(row["cpu_s"] / row["step_s"] for row in rows),
    }


def told(rows: list[dict[str, Any]], console: Console, *, each: bool) -> None:
    columns = ("group", "worlds", "behind", "worst", "gap", "widest", "cpu", "most", "of a step")
    table = Table(*columns)
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group]
        found = summed(own)
        table.add_row(
            group,
            str(len(own)),
            *(f"{100 * found[key]:.2f} %" for key in ("behind", "worst", "gap", "widest")),
            *(seconds_text(found[key]) for key in ("cpu_s", "most_cpu_s")),
            f"{100 * found['of_step']:.3g} %",
        )
    console.print(table)
    for row in rows if each else ():
        behind = row["step_s"] / row["best_s"] - 1
        if behind > 1e-3:
            text = f"{row['group']}: {row['world']}: {percent_text(behind)} behind {row['by']}"
            console.print(f"{text}, gap {percent_text(row['gap'])}, {row['strategy']}")


def numbers_of(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``GENERATOR.FIELD=VALUE`` as fields by generator."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        where, _, value = text.partition("=")
        name, _, field = where.rpartition(".")
        read = json.loads(value)
        found.setdefault(name, {})[field] = tuple(read) if isinstance(read, list) else read
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = list(dict.fromkeys(world.group for world in all_worlds()))
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--restrict", action="store_true", help="plan with less allowed, too")
    parser.add_argument(
        "--set",
        nargs="+",
        default=(),
        metavar="GENERATOR.FIELD=VALUE",
        help="numbers of a generator, or of the improvement",
    )
    parser.add_argument("--without", nargs="+", default=(), help="generators that are left out")
    parser.add_argument("--known", type=Path, help="the JSON of earlier runs: the best of them")
    parser.add_argument("--each", action="store_true", help="every world 0.1 %% behind")
    parser.add_argument("--json", type=Path, help="where rows are kept")
    return parser.parse_args()


def main() -> None:
    o, rows = options(), list[dict[str, Any]]()
    worlds = [world for world in all_worlds() if world.group in o.groups]
    search = Search(numbers=numbers_of(o.set), without=tuple(o.without))
    for n, world in enumerate(worlds):
        tell(f"{n + 1} of {len(worlds)}: {world.name}")
        rows.append(row_of(world, search, restrict=o.restrict))
    known = json.loads(o.known.read_text()) if o.known is not None else []
    best = {(row["group"], row["world"]): row for row in known}
    for row in rows:
        other = best.get((row["group"], row["world"]))
        if other is not None and other["best_s"] < row["best_s"]:
            row |= {"best_s": other["best_s"], "by": other["by"] or "an earlier run"}
    console = Console()
    told(rows, console, each=o.each)
    if o.json is not None:
        o.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
