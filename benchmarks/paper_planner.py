"""One planner for everything beside what each paper decides alone.

A planner that may choose more can never be worse, if its search finds what they find: every number
is the step of a restricted planner over that of the whole one, and none may be below 1. All plan
the same batches with the same costs, the roofline of H100s. What each may choose:

    methods     the methods of each layer, by Algorithm 1, groups of the one best size (ParaDySe)
    sizes       the sizes of groups and who gets which sequence, Ulysses (FlexSP, DCP-inter)
    recompute   layers computed again, groups of the one best size, Ulysses (DCP-intra's half)
    both        sizes and recompute (DCP-intra), by our search: the paper's own rounds are slower
    tensor      tensor and pipeline parallel, side by side (Hydraulis)
    static      nothing for a batch: one size, one method, one level for all, the best of them
    bucket      batches of like lengths on groups of the one best size
    packed      packs as full as memory allows on groups of the one best size

Where a paper leaves the recompute level, or the method, to the user, the best one for each batch is
taken: nobody configures that well by hand. ``both`` and ``tensor`` are planned by our own search
with less allowed, which is stronger than the papers' (see ``headrace papers dcp`` and
``hydraulis``).

Data: the papers' (GitHub code and the human genome of ParaDySe, Common Crawl of Hydraulis, DCP's
three, as likely as the length to the power of -3, -2, -1), books (PG-19) and rollouts (DAPO);
lengths beyond what all planners hold are cut.

examples:
    headrace papers planner --quick
    python benchmarks/paper_planner.py --models 8b --devices 64 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from statistics import geometric_mean
from typing import Any

from claims import Claim, finish, options
from rich.console import Console
from rich.table import Table
from worlds import LLAMA_32B

import headrace as hr
from headrace.cli.display import tell
from headrace.errors import InfeasiblePlan, SpecError

ULYSSES = ("local", "ulysses_z")
LEVELS = ("none", "attention", "full")
METHODS = ("ulysses_z", "megatron_cz", "megatron_cz_gather", "megatron_ts")
EDGES = "1024/2048/4096/8192/16384/32768/65536/131072"
LAWS = {
    "code": "github-code",
    "genome": "grch38-3mer",
    "crawl": "commoncrawl-like",
    "short": f"bins:edges={EDGES},shares=64/16/4/1/0.25/0.0625/0.015625",
    "balanced": f"bins:edges={EDGES},shares=64/32/16/8/4/2/1",
    "long": f"bins:edges={EDGES},shares=1/1/1/1/1/1/1",
    "books": "pg19-books",
    "rollouts": "rollouts",
}
"""Distributions of lengths by name; shares of an octave are those of l^-3, l^-2 and l^-1."""

LONGEST = {8: 1 << 15}
"""Longest sequences by devices, where not all planners hold 128Ki tokens."""

SIZES = {"8b": (8, 64, 256, 1024), "32b": (64, 256), "70b": (64, 256)}
"""Devices of each model."""

QUICK_SIZES = {"8b": (8, 64), "32b": (64,)}

SEEDS = {8: 3, 64: 3}
"""Batches of each law by devices, one where there are more."""

_MOST_TOKENS = 1 << 17
_EVERYWHERE = 1 - 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """What a planner may choose: the best of several problems, each with less allowed.

    Attributes:
        paper: Whose decisions they are.
        changes: What each of the problems has in place of the whole one's.
        static: Whether one group size serves the batch, the best.
    """

    paper: str
    changes: Sequence[Mapping[str, Any]]
    static: bool = False

    def seconds(self, lengths: hr.Lengths, problem: hr.Problem) -> float | None:
        """The quickest step; None where nothing holds the batch."""
        found = list[float]()
        for change in self.changes:
            try:
                own = problem.replace(**change)
                made = (
                    list(hr.baselines(lengths, own).values())
                    if self.static
                    else [hr.plan(lengths, own)]
                )
            except (InfeasiblePlan, SpecError):
                continue  # no such method for these heads, or too little memory
            found += [plan.predicted_s for plan in made]
        return min(found, default=None)


def each_level(**change: Any) -> list[dict[str, Any]]:
    """A change at each recompute level alone."""
    return [{**change, "recompute": (level,)} for level in LEVELS]


RESTRICTIONS = {
    "methods": Restriction(paper="ParaDySe", changes=each_level(planner="paradyse")),
    "sizes": Restriction(
        paper="FlexSP, DCP-inter", changes=each_level(methods=ULYSSES, stages=False)
    ),
    "recompute": Restriction(paper="DCP-intra", changes=[{"methods": ULYSSES}], static=True),
    "both": Restriction(paper="DCP-intra", changes=[{"methods": ULYSSES, "stages": False}]),
    "tensor": Restriction(paper="Hydraulis", changes=each_level(methods=("local", "megatron_ts"))),
    "static": Restriction(
        paper="a launch script",
        changes=[
            change
            for method in METHODS
            for change in each_level(methods=("local", method), stages=False)
        ],
        static=True,
    ),
    "bucket": Restriction(paper="bucket parallel", changes=[{"planner": "bucket"}]),
    "packed": Restriction(paper="packed parallel", changes=[{"planner": "packed"}]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A model on devices, and the batches of a law."""

    model: str
    devices: int
    law: str
    seed: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.model} on {self.devices}, {self.law}, {self.tokens >> 10}Ki, {self.seed}"

    @property
    def lengths(self) -> hr.Lengths:
        """The batch, cut to what all planners hold."""
        drawn = hr.lengths.draw(LAWS[self.law], tokens=self.tokens, seed=self.seed)
        longest = LONGEST.get(self.devices, _MOST_TOKENS)
        return hr.Lengths.of([min(tokens, longest) for tokens in drawn.tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What all planners take for one world; ``None`` where one does not hold it."""

    world: World
    step_s: float
    bound_s: float
    cpu_s: float
    seconds: dict[str, float | None] = field(default_factory=dict)

    def over(self, name: str) -> float | None:
        """A restricted planner's step over the whole one's."""
        own = self.seconds[name]
        return None if own is None else own / self.step_s

    @property
    def best(self) -> float:
        """The least of them: how much the whole planner gains over the best restriction."""
        return min(over for name in self.seconds if (over := self.over(name)) is not None)

    @property
    def at_most(self) -> float:
        """The same if the whole planner met its bound: no planner gains more."""
        return self.best * self.step_s / self.bound_s


@cache
def problem_of(model: str, devices: int) -> hr.Problem:
    """Everything that may be chosen."""
    own = LLAMA_32B if model == "32b" else hr.Architecture.preset(f"llama-{model}")
    return hr.Problem(costs=hr.costs.roofline(own, "h100", devices=devices))


def rows(worlds: Sequence[World], jobs: int) -> Iterator[Row]:
    """Plans of every world by all planners, in ``jobs`` processes."""
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        for n, row in enumerate(pool.map(row_of, worlds)):
            tell(f"{n + 1} of {len(worlds)}: {worlds[n]}{'' if row else ', which nothing holds'}")
            if row is not None:
                yield row


def row_of(world: World) -> Row | None:
    """Plans of a world by all planners; None where nothing holds it."""
    problem, lengths = problem_of(world.model, world.devices), world.lengths
    try:
        hr.plan(lengths, problem)
    except InfeasiblePlan:
        return None
    start = time.process_time()
    whole = hr.plan(lengths, problem)
    row = Row(
        world=world,
        step_s=whole.predicted_s,
        bound_s=whole.lower_bound_s,
        cpu_s=time.process_time() - start,
    )
    for name, one in RESTRICTIONS.items():
        row.seconds[name] = one.seconds(lengths, problem)
    return row


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return geometric_mean(values) if values else float("nan")


def table_of(found: Sequence[Row]) -> Table:
    """Geometric means by model and devices, and the least of every cell."""
    table = Table(
        title="a restricted planner's step over the whole one's: geometric means over laws and"
        " seeds (least)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for title in ("model", "devices", *RESTRICTIONS, "best of all", "at most", "planning"):
        table.add_column(title, justify="left" if title == "model" else "right")
    for key in dict.fromkeys((row.world.model, row.world.devices) for row in found):
        own = [row for row in found if (row.world.model, row.world.devices) == key]
        cells = list[str]()
        for name in RESTRICTIONS:
            overs = [over for row in own if (over := row.over(name)) is not None]
            lacking = len(own) - len(overs)
            text = f"{mean(overs):.2f} ({min(overs):.3f})" if overs else "fits nothing"
            cells.append(text + (f" -{lacking}" if lacking and overs else ""))
        best = [row.best for row in own]
        table.add_row(
            key[0],
            f"{key[1]:,}",
            *cells,
            f"{mean(best):.3f} ({min(best):.3f})",
            f"{mean([row.at_most for row in own]):.3f}",
            f"{max(row.cpu_s for row in own):.1f} s",
        )
    return table


def claims_of(found: Sequence[Row]) -> list[Claim]:
    """A row for each paper: how much one planner gains over its decisions alone."""
    costs = "roofline of H100s"
    made = list[Claim]()
    for name, one in RESTRICTIONS.items():
        overs = [over for row in found if (over := row.over(name)) is not None]
        lacking = len(found) - len(overs)
        why = f"holds {len(overs)} of {len(found)} batches" if lacking else ""
        made.append(
            Claim(
                where=f"{one.paper} alone",
                what=f"step with {name} only over ours, geometric mean",
                unit="times",
                theirs=1.0,
                ours=mean(overs),
                how="simulated",
                costs=costs,
                why=why,
            )
        )
    best = [row.best for row in found]
    made.append(
        Claim(
            where="the best of all for each batch",
            what="its step over ours, geometric mean",
            unit="times",
            theirs=1.0,
            ours=mean(best),
            how="simulated",
            costs=costs,
            why=f"{min(best):.3f} to {max(best):.3f}; a planner that met our bounds would have "
            f"{mean([row.at_most for row in found]):.3f}",
        )
    )
    return made


def worlds_of(o: argparse.Namespace) -> list[World]:
    """The worlds that are asked for."""
    sizes = QUICK_SIZES if o.quick else SIZES
    pairs = [(model, n) for model in o.models or sizes for n in o.devices or sizes[model]]
    laws = o.laws or (["code", "balanced", "rollouts"] if o.quick else list(LAWS))
    return [
        World(model=model, devices=n, law=law, seed=seed, tokens=o.tokens * n)
        for model, n in pairs
        for law in laws
        for seed in o.seeds or (range(SEEDS.get(n, 1)) if not o.quick else [0])
    ]


def main(arguments: Sequence[str]) -> int:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=("8b", "32b", "70b"))
    parser.add_argument("--devices", type=int, nargs="+")
    parser.add_argument("--laws", nargs="+", choices=LAWS)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--tokens", type=int, help="of a batch, for each device (32Ki)")
    o = parser.parse_args(arguments)
    o.tokens = o.tokens or (1 << 13 if o.quick else 1 << 15)
    found = list(rows(worlds_of(o), o.jobs))
    Console(width=None if sys.stdout.isatty() else 220).print(table_of(found), crop=False)
    behind = [row for row in found if row.best < _EVERYWHERE]
    for row in behind:
        tell(f"{row.world}: {row.best:.4f}")
    details = [
        {
            "world": str(row.world),
            "model": row.world.model,
            "devices": row.world.devices,
            "law": row.world.law,
            "seed": row.world.seed,
            "step_s": row.step_s,
            "bound_s": row.bound_s,
            "seconds": row.seconds,
        }
        for row in found
    ]
    return finish("one planner", claims_of(found), o, worlds=details)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
