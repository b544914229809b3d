"""What a rank does for a plan besides running it, by the number of ranks.

    each step     the plan read and hashed; the programs of the ranks that this one depends on,
                  compiled and checked; whether the layout is the one before
    each change   of strategy: the rows that every rank works with, and this rank's links

Beside them, in the same process: the programs of all ranks, and links by pairs of ranks (of one
weight, times the weights). Half of the ranks are 2-stage pipelines of tensor blocks of 8, a quarter
blocks of 4 with context over 2, a quarter works alone. Nothing is communicated.

examples:
    python benchmarks/overhead.py
    python benchmarks/overhead.py --ranks 64 --layers 32 --json overhead.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.cli.display import tell
from headrace.layouts.layout import (
    storage_partition,
    storage_partitions,
    working_key,
    working_partition,
    working_partitions,
)
from headrace.layouts.link import link, link_of
from headrace.runtime.machine import machine_facts
from headrace.spec import Architecture, Lengths, Plan, compile_plan, weight_table
from headrace.spec.checker import check_programs
from headrace.spec.compiler import compile_rank, connected
from headrace.spec.method import LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline
from headrace.spec.scheme import Scheme

KINDS = (("tp8-pp2", 2, "megatron_ts"), ("tp4-cp2", 4, "tensor_ring"), ("cp1", 4, "local"))
"""Scheme, its part of the ranks (one in so many), method of its layers."""


def plan_of(ranks: int, layers: int, sequences: int) -> Plan:
    """A plan over ``ranks``, a multiple of 32; one sequence to a micro-batch, in turn."""
    pipelines, methods, first = list[Pipeline](), list[str](), 0
    for text, part, method in KINDS:
        scheme = Scheme.parse(text)
        for _ in range(ranks // part // scheme.devices):
            here = tuple(range(first, first + scheme.devices))
            pipelines.append(Pipeline(scheme=scheme, ranks=here))
            methods.append(method)
            first += scheme.devices
    tokens = np.random.default_rng(0).integers(100, 5000, size=sequences)
    return Plan(
        lengths=Lengths.of(tokens), devices=ranks, pipelines=tuple(pipelines),
        micro_batches=tuple(
            MicroBatch(
                pipeline=i % len(pipelines), sequences=(i,),
                layers=LayerPlan.parse(f"{layers}*{methods[i % len(pipelines)]}"),
            )
            for i in range(sequences)
        ),
        predicted_s=0.0, lower_bound_s=0.0,
    )  # fmt: skip


def seconds(body: Callable[[], object], times: int) -> float:
    """The least of several times."""
    found = list[float]()
    for _ in range(times):
        start = time.perf_counter()
        body()
        found.append(time.perf_counter() - start)
    return min(found)


def measured(ranks: int, layers: int, sequences: int, times: int) -> dict[str, Any]:
    """Seconds of every part for the rank with the most to do, and of the same for all."""
    a = Architecture(
        layers=layers, hidden=4096, heads=32, kv_heads=8, ffn=11008, vocabulary=32000
    )  # fmt: skip
    plan, table, count = plan_of(ranks, layers, sequences), weight_table(a), layers + 2

    def mine() -> None:
        near = connected(plan, 0)
        check_programs([compile_rank(plan, rank, count) for rank in near], plan, count)

    def links() -> None:
        owners, readers = storage_partitions(table, ranks), working_partitions(table, plan)
        for pair in {(id(owners[n]), id(readers[n])): n for n in readers}.values():
            link_of(owners[pair], readers[pair], 0)

    key, weight = working_key(plan), next(w for w in table if w.unit and w.bucket == 1)
    owners, readers = storage_partition(weight, ranks), working_partition(weight, plan)
    return {
        "ranks": ranks, "weights": len(table), "sequences": sequences,
        "hash_s": seconds(lambda: Plan.from_json(plan.to_json()).hash, times),
        "near_s": seconds(mine, times),
        "same_s": seconds(lambda: key == working_key(plan), times),
        "change_s": seconds(links, times),
        "all_programs_s": seconds(
            lambda: check_programs(compile_plan(plan, count), plan, count), 1
        ),
        "pairs_s": seconds(lambda: link(owners, readers), 1) * len(table),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--sequences", type=int, default=2600, help="of a plan of 1,024 ranks")
    parser.add_argument("--times", type=int, default=3, help="the least of them is reported")
    parser.add_argument("--json", type=Path, metavar="FILE")
    o = parser.parse_args()
    if wrong := [ranks for ranks in o.ranks if ranks < 32 or ranks % 32]:
        parser.error(f"--ranks: got {wrong[0]}, wanted multiples of 32")
    facts, rows = machine_facts("cpu"), list[dict[str, Any]]()
    for ranks in o.ranks:
        tell(f"{ranks} ranks")
        sequences = max(ranks // 8, o.sequences * ranks // 1024)
        rows.append(measured(ranks, o.layers, sequences, o.times))
    shown = Table(title=f"seconds on one core of {facts['host_cpu']}, rank 0")
    for name in ("ranks", "hash", "its programs", "all programs", "same layout", "change",
                 "by pairs"):  # fmt: skip
        shown.add_column(name, justify="right")
    for row in rows:
        names = ("hash_s", "near_s", "all_programs_s", "same_s", "change_s", "pairs_s")
        shown.add_row(f"{row['ranks']:,}", *(f"{row[name]:.4f}" for name in names))
    Console(width=None if sys.stdout.isatty() else 100).print(shown)
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
