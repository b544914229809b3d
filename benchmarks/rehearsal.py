"""Rehearsal beside the real thing: one rank played alone against the same rank among the others.

On 2 and on 4 real ranks, each branch of each method runs two layers among its partners, and then
again with partners that do not exist, every rank at the same time, so that both share the cores
alike. Collectives of the second run take what the link measured in this job says, and overlap as
the model of the link has it. Bytes are counted in both; seconds are those of the slowest rank.

    bytes     of what is kept, and of what is needed in passing, rehearsed by real
    seconds   forward and backward, rehearsed by real, median of the rounds

Real ranks on one machine communicate by copying in the same cores and memory that compute, which
the link's latency and bandwidth tell only in part.

examples:
    python benchmarks/rehearsal.py
    python benchmarks/rehearsal.py --ranks 2 --tokens 4096 --rounds 9 --json rehearsal.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.cli.display import tell
from headrace.comm.fake_world import fake_groups
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.native.counted import ByteCounter
from headrace.native.machine import machine_facts
from headrace.native.spans import HostClock
from headrace.native.storage import Storage
from headrace.profiling.branches import BranchTarget, ProfileOptions, targets
from headrace.profiling.constants import StepConstants
from headrace.profiling.link_clock import Timed
from headrace.profiling.probe import bytes_of, seconds_of
from headrace.profiling.sweep import slowest
from headrace.profiling.two_layers import TwoLayers
from headrace.spec import Architecture
from headrace.spec.hardware import Hardware
from headrace.spec.known_methods import automatic_methods
from headrace.units import MIB


def architecture(o: argparse.Namespace) -> Architecture:
    return Architecture(
        layers=2,
        hidden=o.hidden,
        heads=o.heads,
        kv_heads=o.heads,
        ffn=3 * o.hidden,
        vocabulary=1024,
    )


def measured_link(a: Architecture, groups: Groups, two: TwoLayers) -> Hardware:
    """This machine, with the link as it is between these ranks."""
    storage = Storage(replace(a, layers=1), groups, seed=0)
    constants = StepConstants(storage, two, groups, HostClock())
    latency_s, bytes_per_s = constants.link(groups.ranks)
    cpu = Hardware.parse("cpu")
    link = replace(cpu.inside, latency_s=latency_s, bytes_per_s=bytes_per_s, attained=1.0)
    return replace(cpu, inside=link, across=link)


def compare(world: World, o: argparse.Namespace) -> dict[str, Any]:
    """All branches; the same on every rank."""
    a, groups, alone = architecture(o), Groups(), fake_groups()
    two, everyone = TwoLayers(a), tuple(range(world.ranks))
    options = ProfileOptions(
        sizes=(world.ranks,), longest=o.tokens, methods=tuple(o.methods), levels=("none",)
    )
    found = [x for x in targets(a, world.ranks, options) if x.part is not None]
    wanted = {group for x in found for group in two.groups_of(x, everyone)}
    groups.prepare(wanted)
    alone.prepare(wanted)
    hardware = measured_link(a, groups, two)
    rows = []
    for number, target in enumerate(found):
        if world.rank == 0:
            tell(f"{world.ranks} ranks: {number + 1}/{len(found)}, {target.text}")
        rows.append(beside(target, two, groups, alone, hardware, o))
    link = hardware.inside
    return {
        "ranks": world.ranks,
        "latency_s": link.latency_s,
        "bytes_per_s": link.bytes_per_s,
        "rows": rows,
    }


def beside(
    target: BranchTarget,
    two: TwoLayers,
    groups: Groups,
    alone: Groups,
    hardware: Hardware,
    o: argparse.Namespace,
) -> dict[str, Any]:
    everyone = tuple(range(groups.ranks))
    real = two.probe(groups, everyone, target, (o.tokens,))
    played = two.probe(alone, everyone, target, (o.tokens,))

    def counter() -> ByteCounter:
        return ByteCounter(settle_s=0.005)

    kept = slowest(groups, [float(n) for n in bytes_of(real, counter, times=3)])
    held = slowest(groups, [float(n) for n in bytes_of(played, counter)])
    seconds: dict[str, list[float]] = {"real": [], "rehearsed": []}
    for _ in range(o.rounds):
        seconds["real"].append(sum(slowest(groups, seconds_of(real, HostClock()))))
        with Timed(hardware) as clock:
            local = seconds_of(played, clock)
        seconds["rehearsed"].append(sum(slowest(groups, local)))
    return {
        "branch": target.text,
        "tokens": o.tokens,
        "kept_bytes": kept[0],
        "rehearsed_kept_bytes": held[0],
        "transient_bytes": kept[1],
        "rehearsed_transient_bytes": held[1],
        "seconds": seconds,
        "ratio": median(r / s for r, s in zip(seconds["rehearsed"], seconds["real"], strict=True)),
    }


def table(found: dict[str, Any]) -> Table:
    shown = Table(
        title=f"{found['ranks']} ranks, link {found['latency_s'] * 1e6:.0f} us + "
        f"{found['bytes_per_s'] / 1e9:.2f} GB/s",
        title_justify="left",
    )
    for i, name in enumerate(
        (
            "branch",
            "MiB kept",
            "rehearsed",
            "MiB passing",
            "rehearsed",
            "real s",
            "rehearsed s",
            "ratio",
        )
    ):
        shown.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in found["rows"]:
        counts = (
            row["kept_bytes"],
            row["rehearsed_kept_bytes"],
            row["transient_bytes"],
            row["rehearsed_transient_bytes"],
        )
        shown.add_row(
            row["branch"],
            *(f"{n / MIB:.2f}" for n in counts),
            f"{median(row['seconds']['real']):.4f}",
            f"{median(row['seconds']['rehearsed']):.4f}",
            f"{row['ratio']:.2f}",
        )
    return shown


def summary(found: dict[str, Any]) -> str:
    def off(what: str) -> float:
        return max(abs(row[f"rehearsed_{what}"] / row[what] - 1) for row in found["rows"])

    ratios = [row["ratio"] for row in found["rows"]]
    wrong = median(abs(ratio - 1) for ratio in ratios)
    return (
        f"{found['ranks']} ranks: kept bytes off by at most {off('kept_bytes'):.1%}, in passing "
        f"{off('transient_bytes'):.1%}; seconds {min(ratios):.2f} to {max(ratios):.2f} of the "
        f"real ones, median error {wrong:.0%}\n"
    )


def on_ranks(ranks: int, o: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            found = compare(world, o)
            if world.rank == 0:
                result.write_text(json.dumps(found))
            return 0

        code = start(main, ranks=ranks, threads=1, hang_s=120)
        if code:
            sys.exit(code)
        return json.loads(result.read_text())


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    automatic = [name for name in automatic_methods() if name != "local"]
    add("--ranks", type=int, nargs="+", default=[2, 4], help="ranks, each in its turn (2 4)")
    add("--methods", nargs="+", choices=automatic, default=automatic, help="methods (all)")
    add("--tokens", type=int, default=2048, help="tokens of the one document (2048)")
    add("--hidden", type=int, default=256, help="features of the model (256)")
    add("--heads", type=int, default=8, help="heads (8)")
    add("--rounds", type=int, default=5, help="times that each is timed (5)")
    add("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    o = parser.parse_args(arguments)
    if min(o.ranks) < 2 or o.rounds < 1 or o.tokens < 16:
        parser.error("--ranks: at least 2; --rounds: at least 1; --tokens: at least 16")
    return o


def main(arguments: list[str] | None = None) -> int:
    o = options(arguments)
    facts = machine_facts("cpu")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{facts['host_cpu']}, {facts['cores']} cores, torch {facts['torch']}, fp32, one thread "
        f"per rank, 2 layers of {o.hidden} features, {o.tokens:,} tokens\n",
        highlight=False,
    )
    found = [on_ranks(ranks, o) for ranks in o.ranks]
    for case in found:
        console.print(table(case))
        console.print(summary(case), highlight=False)
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps({"machine": facts, "cases": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
