"""What a rank does in a step besides its work, by the number of ranks.

    told    the plan: written by the first rank, read by the others
    ready   hash and agreement, the rank's program (checked where its kind is new), its groups, the
            layout looked up
    rows    what a rank tells of its step, and on the first rank what all of them tell
    calls   of torch that pack and unpack one layer's pull and push; by their count, as the bytes
            that they move are the step's work

Where the strategy changes, ready has the layout with its links too; where no step had the strategy
before, a program of a new kind and its groups. One process plays one rank: collectives return at
once and tensors have no memory, so what is left is what Python does. Half of the ranks are 2-stage
pipelines of tensor blocks of 8, a quarter blocks of 4 with context over 2, a quarter works alone.

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
import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.cli.display import tell
from headrace.comm.fake_world import fake_world
from headrace.comm.mesh import Groups
from headrace.native.executor import Executor
from headrace.native.machine import machine_facts
from headrace.native.storage import Storage, Working
from headrace.spec import Architecture, Lengths, Plan
from headrace.spec.layer_plan import LayerPlan
from headrace.spec.measurement import Row
from headrace.spec.plan import MicroBatch, Pipeline
from headrace.spec.program import Backward, Forward
from headrace.spec.step import RankTimes, StepTimes
from headrace.spec.strategy import Scheme

KINDS = (("tp8-pp2", 2, "megatron_ts"), ("tp4-cp2", 4, "tensor_ring"), ("cp1", 4, "local"))
"""Scheme, its part of the ranks (one in so many), method of its layers."""

PARTS = ("told", "ready", "rows")


def plan_of(
    ranks: int, layers: int, sequences: int, kinds: tuple[tuple[str, int, str], ...] = KINDS
) -> Plan:
    """A plan over ``ranks``, a multiple of 32; one sequence to a micro-batch, in turn."""
    pipelines, of_layers, first = list[Pipeline](), list[LayerPlan](), 0
    for text, part, method in kinds:
        scheme, layer_plan = Scheme.parse(text), LayerPlan.parse(f"{layers}*{method}")
        for _ in range(ranks // part // scheme.devices):
            here = tuple(range(first, first + scheme.devices))
            pipelines.append(Pipeline(scheme=scheme, ranks=here))
            of_layers.append(layer_plan)
            first += scheme.devices
    tokens = np.random.default_rng(0).integers(100, 5000, size=sequences)
    return Plan(
        lengths=Lengths.of(tokens),
        devices=ranks,
        pipelines=tuple(pipelines),
        micro_batches=tuple(
            MicroBatch(
                pipeline=i % len(pipelines), sequences=(i,), layers=of_layers[i % len(pipelines)]
            )
            for i in range(sequences)
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def seconds(body: Callable[[], object], times: int) -> float:
    """The least of several times, of this process alone: others may be busy."""
    found = list[float]()
    for _ in range(times):
        start = time.process_time()
        body()
        found.append(time.process_time() - start)
    return min(found)


def told_of(plan: Plan, layers: int) -> list[RankTimes]:
    """What every rank would tell of a step: a row for each of its forwards and backwards."""
    rows: list[list[Row]] = [[] for _ in range(plan.devices)]
    stages = [pipeline.stages(layers) for pipeline in plan.pipelines]
    for index, micro in enumerate(plan.micro_batches):
        for stage in stages[micro.pipeline]:
            for kind in (Forward, Backward):
                action = kind(stage=stage.index, micro_batch=index, group=stage.ranks)
                for rank in stage.ranks:
                    row = Row(rank=rank, action=str(action), kind=kind.kind, start_s=0.0, end_s=1.0)
                    rows[rank].append(row)
    return [RankTimes(step_s=1.0, waited_s=0.0, peak_bytes=1, rows=tuple(mine)) for mine in rows]


class Calls(TorchDispatchMode):
    """Counts what torch is called for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(working: Working, bucket: int) -> int:
    """Calls of torch in the pull and the push of a bucket."""
    with Calls() as counted:
        for issued in (working.pull(bucket), working.push(bucket)):
            if issued is not None:
                issued.wait()
    return counted.count


def measured(rank: int, ranks: int, layers: int, sequences: int, times: int) -> dict[str, Any]:
    """Seconds of every part on ``rank``, of a step as the one before and of one that changes."""
    a = Architecture(layers=layers, hidden=4096, heads=32, kv_heads=8, ffn=11008, vocabulary=32000)
    plan, first = plan_of(ranks, layers, sequences), rank == 0
    other = plan_of(ranks, layers, sequences, KINDS[::-1])
    told, payload = told_of(plan, layers), plan.to_bytes()
    sent = [one.to_bytes() for one in told]
    with fake_world(rank, ranks) as groups:
        storage = Storage(a, groups, seed=0, device="meta", working_dtype=torch.bfloat16)

        def ready(next_plan: Plan) -> None:
            executor.prepare(next_plan)
            storage.working(next_plan)

        def rows() -> None:
            told[rank].to_bytes()
            if first:
                StepTimes.of(sent)

        anew, changes = list[float](), list[float]()
        for _ in range(times):
            executor = Executor(storage, Groups(), seed=0)
            ready(other)
            anew.append(seconds(lambda: ready(plan), 1))
            ready(other)
            changes.append(seconds(lambda: ready(plan), 1))
        ready_s = seconds(lambda: ready(plan), times)
        made = max(calls(storage.working(plan), bucket) for bucket in (1, layers))
    found = {
        "told_s": seconds(plan.to_bytes if first else lambda: Plan.from_bytes(payload), times),
        "ready_s": ready_s,
        "rows_s": seconds(rows, times),
    }
    same_s = sum(found.values())
    return {
        "ranks": ranks,
        "rank": rank,
        "sequences": sequences,
        **found,
        "same_s": same_s,
        "change_s": same_s - ready_s + min(changes),
        "anew_s": same_s - ready_s + min(anew),
        "calls": made,
        "plan_bytes": len(payload),
        "row_bytes": len(sent[rank]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--sequences", type=int, default=2600, help="of a plan of 1,024 ranks")
    parser.add_argument("--times", type=int, default=5, help="the least of them is reported")
    parser.add_argument("--json", type=Path, metavar="FILE")
    o = parser.parse_args()
    if wrong := [ranks for ranks in o.ranks if ranks < 32 or ranks % 32]:
        parser.error(f"--ranks: got {wrong[0]}, wanted multiples of 32")
    facts, rows = machine_facts("cpu"), list[dict[str, Any]]()
    for ranks in o.ranks:
        tell(f"{ranks} ranks")
        sequences = max(ranks // 8, o.sequences * ranks // 1024)
        rows += [measured(rank, ranks, o.layers, sequences, o.times) for rank in (0, 1, ranks - 1)]
    shown = Table(title=f"milliseconds a step on one core of {facts['host_cpu']}")
    for name in ("ranks", "rank", *PARTS, "all", "where it changes", "to a new one", "calls"):
        shown.add_column(name, justify="right")
    for row in rows:
        names = (*(f"{part}_s" for part in PARTS), "same_s", "change_s", "anew_s")
        texts = (f"{1000 * row[name]:.1f}" for name in names)
        shown.add_row(f"{row['ranks']:,}", f"{row['rank']:,}", *texts, f"{row['calls']:,}")
    Console(width=None if sys.stdout.isatty() else 100).print(shown)
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
