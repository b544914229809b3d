"""Strategies measured on ranks of this machine: where a step's time goes, and what was predicted.

A model is trained for some steps by each of several strategies on the same batches, side by side in
one run and in turns. For every strategy, of the slowest rank and the middle step:

    P      propagation: forwards, backwards and messages, without what they wait for weights
    O      optimization: the update
    O-P    what is left of the step: pulls and pushes that are not hidden, and waiting for others
    E2E    the step

with weights and gradients moved beside compute, and apart from it (Hydraulis, Table 1). The
simulator's step is set beside the measured one; its costs were profiled in the same run. ``factor``
is the one that a training run learns from its steps: errors are shown with it and without.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from headrace.cli.display import tell
from headrace.comm.collectives import gather_floats
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.costs import CostModel
from headrace.costs.sources.measured import costs_from_profile
from headrace.native.executor import Executor
from headrace.native.storage import Storage
from headrace.planning import Problem, plan
from headrace.profiling.profiler import ProfileOptions, Profiler
from headrace.spec import Architecture, Cluster, Lengths, Plan, Strategy
from headrace.spec.measurement import Row
from headrace.units import percent_text, seconds_text

__all__ = ["rank_tables", "ranks"]

STRATEGIES = {
    2: ("2*cp1", "1*tp2", "1*cp2", "1*pp2"),
    4: (
        "4*cp1",
        "2*tp2",
        "2*cp2",
        "2*pp2",
        "1*tp2 + 2*cp1",
        "1*pp2 + 2*cp1",
        "1*pp2 + 1*cp2",
        "1*tp2-pp2",
    ),
}
HOMOGENEOUS = {2: "1*tp2", 4: "2*tp2"}
GIB = 2**30


def ranks(o: argparse.Namespace) -> dict[str, Any]:
    """The JSON value of this section, by numbers of ranks. Ranks that outnumber cores share them:
    those that wait in a pipeline leave theirs to others, which no cost of one stage says."""
    return {str(count): _of(count, o) for count in STRATEGIES}


def _of(count: int, o: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            found = _measured(world, o)
            if world.rank == 0:
                result.write_text(json.dumps(found))
            return 0

        code = start(main, ranks=count, threads=1)
        if code:
            raise SystemExit(code)
        value: dict[str, Any] = json.loads(result.read_text())
    return value


def _architecture(quick: bool) -> Architecture:
    hidden = 64 if quick else 256
    return Architecture(
        layers=4, hidden=hidden, heads=8, kv_heads=4, ffn=3 * hidden, vocabulary=4096
    )


def _batches(o: argparse.Namespace) -> list[Lengths]:
    """Log-normal lengths, as of text: many short ones, one of 1,024 tokens."""
    rng = np.random.default_rng(o.seed)
    longest, count = (256, 8) if o.quick else (1024, 16)
    found = []
    for _ in range(1 if o.quick else 2):
        drawn = np.clip(rng.lognormal(np.log(longest / 12), 0.9, size=count), 8, longest)
        found.append(Lengths.of([longest, *drawn.astype(int).tolist()]))
    return found


def _measured(world: World, o: argparse.Namespace) -> dict[str, Any]:
    say = tell if world.rank == 0 else lambda text: None
    a, groups, batches = _architecture(o.quick), Groups(), _batches(o)
    storage = Storage(a, groups, seed=0)
    costs = _profiled(storage, groups, batches[0].longest, say)
    problem = Problem(costs=costs, devices=groups.ranks)
    found: dict[str, Any] = {"architecture": str(a), "batches": [b.total for b in batches]}
    found["ranks"], found["strategies"] = groups.ranks, {}
    sides = {
        True: Executor(storage, groups, seed=0),
        False: Executor(storage, groups, seed=0, overlap=False),
    }
    for text in STRATEGIES[groups.ranks]:
        say(f"{text}: {len(batches)} batches, with and without overlap")
        given = problem.replace(strategies=(Strategy.parse(text),))
        plans = [plan(given, lengths) for lengths in batches]
        found["strategies"][text] = _strategy(sides, plans, groups, 2 if o.quick else 3)
    return found


def _profiled(storage: Storage, groups: Groups, longest: int, say: Any) -> CostModel:
    profiler = Profiler(
        storage,
        groups,
        ProfileOptions(
            sizes=(1, 2),
            longest=longest,
            methods=("local", "ulysses_z", "megatron_ts"),
            levels=("none",),
        ),
        progress=lambda what, done, of: say(f"{what}, {done}/{of}") if done == 0 else None,
    )
    cluster = Cluster(devices=groups.ranks, memory_bytes=4 * GIB, device="cpu")
    return costs_from_profile(profiler.profile("benchmark", cluster))


def _strategy(
    sides: dict[bool, Executor], plans: list[Plan], groups: Groups, repeats: int
) -> dict[str, Any]:
    """Parts of the middle step of each side, and predicted and measured seconds of each batch."""
    parts: dict[bool, list[list[float]]] = {True: [], False: []}
    measured: list[float] = []
    for own in plans:
        rng = np.random.default_rng(own.lengths.total)
        tokens = tuple(rng.integers(4096, size=n).astype(np.int32) for n in own.lengths.tokens)
        steps: dict[bool, list[list[float]]] = {True: [], False: []}
        for number in range(repeats + 1):
            for side, executor in sides.items():
                rows = executor.run(own, tokens, step=0, lr=1e-4).rows
                if number:  # the first makes groups and buffers
                    steps[side].append(_slowest(rows, groups))
        for side, several in steps.items():
            parts[side].append(sorted(several)[len(several) // 2])
        measured.append(parts[True][-1][0])
    names = ("E2E", "P", "O", "O-P")
    return {
        "overlap": dict(zip(names, map(median, zip(*parts[True], strict=True)), strict=True)),
        "apart": dict(zip(names, map(median, zip(*parts[False], strict=True)), strict=True)),
        "measured_s": measured,
        "predicted_s": [plan.predicted_s for plan in plans],
    }


def _slowest(rows: tuple[Row, ...], groups: Groups) -> list[float]:
    """[E2E, P, O, O-P] of the rank that computed the longest; E2E of the last one."""
    total = max(row.end_s for row in rows)
    work = ("forward", "backward", "send", "recv", "exchange")
    inner = sum(row.seconds - row.waited_s for row in rows if row.kind in work)
    update = sum(row.seconds for row in rows if row.kind == "update")
    everyone = gather_floats([total, inner, update], groups.world)
    end = max(row[0] for row in everyone)
    _, longest, least = max(everyone, key=lambda row: row[1])
    return [end, longest, least, max(0.0, end - longest - least)]


def rank_tables(found: dict[str, Any]) -> list[Table]:
    """Tables for people."""
    return [table for one in found.values() for table in (_breakdown(one), _predictions(one))]


def _breakdown(found: dict[str, Any]) -> Table:
    table = Table(
        title=f"measured on {found['ranks']} ranks of this machine: {found['architecture']}",
        box=None,
    )
    for name in ("strategy", "P", "O", "O-P apart", "O-P", "E2E apart", "E2E", "of homogeneous"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    base = found["strategies"][HOMOGENEOUS[found["ranks"]]]["overlap"]["E2E"]
    for text, one in found["strategies"].items():
        with_, apart = one["overlap"], one["apart"]
        table.add_row(
            text,
            *(seconds_text(with_[name]) for name in ("P", "O")),
            seconds_text(apart["O-P"]),
            seconds_text(with_["O-P"]),
            seconds_text(apart["E2E"]),
            seconds_text(with_["E2E"]),
            f"{with_['E2E'] / base:.2f}",
        )
    return table


def _predictions(found: dict[str, Any]) -> Table:
    pairs = {
        t: list(zip(one["predicted_s"], one["measured_s"], strict=True))
        for t, one in found["strategies"].items()
    }
    factor = median(m / p for several in pairs.values() for p, m in several)
    table = Table(title=f"predicted step against measured, {found['ranks']} ranks", box=None)
    for name in ("strategy", "predicted", "measured", "off", "off with factor"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for text, several in pairs.items():
        predicted, measured = (median(values) for values in zip(*several, strict=True))
        off = median(abs(p / m - 1) for p, m in several)
        corrected = median(abs(p * factor / m - 1) for p, m in several)
        table.add_row(
            text,
            seconds_text(predicted),
            seconds_text(measured),
            percent_text(off),
            percent_text(corrected),
        )
    everything = [pair for several in pairs.values() for pair in several]
    table.add_row(
        f"median of all (factor {factor:.2f})",
        "",
        "",
        percent_text(median(abs(p / m - 1) for p, m in everything)),
        percent_text(median(abs(p * factor / m - 1) for p, m in everything)),
    )
    return table
