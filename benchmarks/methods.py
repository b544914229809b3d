"""Methods, side by side: one block and a small model, headrace's ways to spread it and torch's.

All sides run in the same processes, one thread each, round after round in rotating order, so that
a busy machine hurts all alike. Before anything is timed, each side's output, input gradient and
weight gradients are compared with one process; what is not equal is not reported. No side is
compiled, and each runs with the defaults of its library.

    one process       the block as torch's user would write it; ``local`` is headrace's
    tensor            DTensor tensor + sequence parallelism;  megatron_ts, metp
    context           torch's context parallelism, with FSDP2 where weights are sharded;
                      ulysses_z, megatron_cz, megatron_cz_gather, colossal_z, ulysses_ring
    tensor x context  both of torch's on a mesh of two axes;  tensor_ring

Weights are replicated (every rank has all, gradients stay partial sums) or sharded (gathered when
used, gradients reduce-scattered); sides of one kind and one holding do the same.

    block     one GPT-like layer: LayerNorm, GELU, MHA, biases, no rotary positions
    model     several of them, weights sharded
    llama     one layer with RMSNorm, SwiGLU, rotary positions and fewer key-value heads: no torch
              parallelism beside it

examples:
    python benchmarks/methods.py                                  # 2 and 4 ranks, all cases
    python benchmarks/methods.py --ranks 2 --cases block --tokens 8192 --rounds 9
    python benchmarks/methods.py --json methods.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from measured import seconds, settled
from method_sides import TOLERANCE, checked, reference, sides_of
from rich.console import Console
from rich.table import Table

from headrace.cli.display import tell
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.native.machine import machine_facts
from headrace.spec import Architecture
from headrace.units import MIB

CASES = ("block", "model", "llama")


def architecture_of(case: str, o: argparse.Namespace) -> Architecture:
    """The layers of a case."""
    if case == "llama":
        return Architecture(
            layers=1,
            hidden=o.hidden,
            heads=o.heads,
            kv_heads=o.kv_heads,
            vocabulary=1,
            ffn=-(-8 * o.hidden // (3 * 64)) * 64,
        )
    return Architecture(
        layers=o.layers if case == "model" else 1,
        hidden=o.hidden,
        heads=o.heads,
        kv_heads=o.heads,
        ffn=4 * o.hidden,
        vocabulary=1,
        kind="gpt",
        positions=1,
    )


def compare(world: World, case: str, o: argparse.Namespace) -> dict[str, Any]:
    """Check, count and time all sides of a case; the same on every rank."""
    a = architecture_of(case, o)
    truth = reference(a, o.tokens)
    say = tell if world.rank == 0 else lambda text: None
    title = f"{world.ranks} ranks, {case}"
    rows: list[dict[str, Any]] = []
    sides = sides_of(
        a, truth, Groups(), holdings=("replicated", "sharded") if case == "block" else ("sharded",)
    )
    for i, side in enumerate(sides):
        say(f"{title}: checking {i + 1}/{len(sides)}, {side.name} {side.held}")
        wrong, found = checked(side, truth)
        rows.append(
            {
                "name": side.name,
                "kind": side.kind,
                "held": side.held,
                "torch": side.by_torch,
                "ranks": 1 if side.alone else world.ranks,
                "error": wrong,
                **asdict(found),
                "wall_s": [],
                "cpu_s": [],
            }
        )
    for number in range(o.rounds if all(row["error"] <= TOLERANCE for row in rows) else 0):
        say(f"{title}: round {number + 1}/{o.rounds}")
        turn = number * len(sides) // o.rounds
        for side, row in [*zip(sides, rows, strict=True)][turn:] + [*zip(sides, rows, strict=True)][
            :turn
        ]:
            wall, cpu = seconds(side, truth.x, truth.dy)
            row["wall_s"].append(wall)
            row["cpu_s"].append(cpu)
    return {
        "case": case,
        "ranks": world.ranks,
        "tokens": o.tokens,
        "sides": rows,
        "architecture": a.to_json(),
    }


def counterpart(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest of torch's sides that does the same, by CPU seconds."""
    same = [
        other
        for other in rows
        if other["torch"]
        and other["kind"] == row["kind"]
        and (other["held"] in (row["held"], "shards"))
    ]
    return min(same, key=lambda other: median(other["cpu_s"]), default=None)


def ratio(row: dict[str, Any], other: dict[str, Any], what: str) -> float:
    """The median over rounds of the seconds of one by those of the other."""
    return median(mine / theirs for mine, theirs in zip(row[what], other[what], strict=True))


def against_torch(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of headrace's sides with torch's best of its kind."""
    found = []
    for row in rows:
        other = None if row["torch"] else counterpart(row, rows)
        if other is not None:
            found.append(
                {
                    "name": row["name"],
                    "held": row["held"],
                    "kind": row["kind"],
                    "torch": other["name"],
                    "wall_ratio": ratio(row, other, "wall_s"),
                    "cpu_ratio": ratio(row, other, "cpu_s"),
                    "sent_ratio": row["sent_bytes"] / other["sent_bytes"]
                    if other["sent_bytes"]
                    else None,
                    "peak_ratio": row["peak_bytes"] / other["peak_bytes"],
                }
            )
    return found


def sides_table(found: dict[str, Any]) -> Table:
    a = Architecture.from_json(found["architecture"])
    table = Table(
        title=f"{found['case']} on {found['ranks']} ranks: {a.kind} {a.layers}x{a.hidden}"
        f", {a.heads}/{a.kv_heads} heads, {found['tokens']:,} tokens",
        title_justify="left",
    )
    for name in ("side", "weights"):
        table.add_column(name, no_wrap=True)
    for name in ("wall s", "CPU s/rank", "of one/R", "MiB sent", "MiB kept", "MiB peak", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    one = found["sides"][0]
    for row in found["sides"]:
        share = ratio(row, one, "cpu_s") * row["ranks"]
        name = f"torch: {row['name']}" if row["torch"] else row["name"]
        table.add_row(
            name,
            row["held"],
            f"{median(row['wall_s']):.3f}",
            f"{median(row['cpu_s']):.3f}",
            f"{share:.2f}",
            *(f"{row[f'{what}_bytes'] / MIB:.1f}" for what in ("sent", "kept", "peak")),
            f"{row['error']:.0e}",
        )
    return table


def ratios_table(found: dict[str, Any]) -> Table:
    table = Table(
        title=f"{found['case']} on {found['ranks']} ranks, of torch's best of the kind",
        title_justify="left",
    )
    for name in ("method", "weights", "torch's best"):
        table.add_column(name, no_wrap=True)
    for name in ("wall", "CPU", "sent", "peak"):
        table.add_column(name, justify="right")
    for row in found["against_torch"]:
        parts = [row[f"{what}_ratio"] for what in ("wall", "cpu", "sent", "peak")]
        texts = ["-" if part is None else f"{part:.2f}x" for part in parts]
        table.add_row(row["name"], row["held"], row["torch"], *texts)
    return table


def on_ranks(ranks: int, o: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            found = []
            for case in o.cases:
                with settled():
                    found.append(compare(world, case, o))
            if world.rank == 0:
                result.write_text(json.dumps(found))
            return 0

        # One long operator may hold Python's lock for longer than a rank may be silent.
        code = start(main, ranks=ranks, threads=1, hang_s=120)
        if code:
            sys.exit(code)
        return json.loads(result.read_text())


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="ranks, each in its turn (2 4)")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="what to run (all)")
    add("--tokens", type=int, default=1536, help="tokens of the one document (1536)")
    add("--hidden", type=int, default=512, help="features of the model (512)")
    add("--heads", type=int, default=8, help="query heads (8)")
    add("--kv-heads", type=int, default=2, help="key-value heads of the llama case (2)")
    add("--layers", type=int, default=4, help="layers of the model case (4)")
    add("--rounds", type=int, default=3, help="times that each side is timed (3)")
    add("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    o = parser.parse_args(arguments)
    if min(o.ranks) < 2 or o.rounds < 1:
        parser.error("--ranks: at least 2; --rounds: at least 1")
    for ranks in o.ranks:
        if o.tokens % (2 * ranks) or o.heads % ranks or o.hidden % o.heads:
            parser.error(
                f"torch wants --tokens a multiple of {2 * ranks}, --heads of {ranks}, "
                "--hidden of --heads"
            )
    return o


def main(arguments: list[str] | None = None) -> int:
    o = options(arguments)
    facts = machine_facts("cpu")
    found = [case for ranks in o.ranks for case in on_ranks(ranks, o)]
    wrong = [
        f"{case['case']} on {case['ranks']} ranks: {row['name']} {row['held']} differs from one "
        f"process by {row['error']:.1e}"
        for case in found
        for row in case["sides"]
        if not row["error"] <= TOLERANCE
    ]
    if wrong:
        tell("\n".join([*wrong, f"nothing is reported: wanted at most {TOLERANCE:.0e}"]))
        return 1
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{facts['host_cpu']}, {facts['cores']} cores, torch {facts['torch']}, fp32, one thread "
        f"per rank; medians of {o.rounds} rounds of one forward and backward\n",
        highlight=False,
    )
    for case in found:
        case["against_torch"] = against_torch(case["sides"])
        console.print(sides_table(case))
        if case["against_torch"]:
            console.print(ratios_table(case))
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(
            json.dumps(
                {"machine": facts, "rounds": o.rounds, "tolerance": TOLERANCE, "cases": found},
                indent=1,
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
