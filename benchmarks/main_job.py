"""The main job, side by side: adaptive, static group sizes, and plain PyTorch loops.

    python benchmarks/main_job.py [--ranks 2] [--batches 8] [--config examples/python-sources.toml]

All contenders train the same model on the same batches of the same corpus in one run; batch by
batch in rotating order, each twice and the faster counting, so that a busy machine hurts all
alike. Prints tokens/s and the ratio to
the adaptive runtime, the runtime's overhead on one rank against a hand-written loop, and the bytes
that were moved against the formulas. Writes benchmarks/results/main_job.json.

    adaptive      headrace, a plan per batch
    static cpP    headrace, every sequence on groups of P ranks, always
    ddp packed    DistributedDataParallel over a plain model, sequences dealt by count, packed
    ddp padded    the same, padded to the longest of each micro-batch
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from headrace.comm.launch import World, start
from headrace.config import Config
from headrace.config.model import PlannerConfig
from headrace.data.reader import Reader
from headrace.data.sampler import Batch
from headrace.engine.measured_costs import measured_costs
from headrace.engine.rank import Rank, open_rank
from headrace.engine.run_planner import RunPlanner
from headrace.errors import InfeasiblePlan
from headrace.layouts.partition import link, received_rows, storage_partition, working_partition
from headrace.models.plain import plain_logits, whole_weights
from headrace.native.executor import Executor
from headrace.native.storage import Storage
from headrace.spec import Architecture, Plan, weight_table

REPEATS = 2
"""Each batch is timed so often with each contender; the faster time counts."""

Contender = Callable[[Batch, int], float]


class Plain(torch.nn.Module):
    """The model as one process would write it, behind DistributedDataParallel."""

    def __init__(self, a: Architecture, seed: int) -> None:
        super().__init__()
        self.a = a
        self.weights = torch.nn.ParameterDict(
            {
                name.replace(".", "/"): torch.nn.Parameter(weight)
                for name, weight in whole_weights(a, seed, torch.float32).items()
            }
        )

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        weights = {name.replace("/", "."): w for name, w in self.weights.items()}
        logits = plain_logits(ids, lengths, weights, self.a)
        return F.cross_entropy(logits, labels, reduction="sum")


def plain_optimizer(model: torch.nn.Module, rank: Rank) -> torch.optim.AdamW:
    o = rank.storage.options
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": o.decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=o.lr,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
    )


def packs(tokens: list[np.ndarray], most: int, *, padded: bool) -> list[list[np.ndarray]]:
    """Micro-batches of at most ``most`` tokens (padding counted), in order; at least one."""
    out: list[list[np.ndarray]] = [[]]
    for document in sorted(tokens, key=len, reverse=padded):
        trial = [*out[-1], document]
        size = len(trial) * max(map(len, trial)) if padded else sum(map(len, trial))
        if out[-1] and size > most:
            out.append([document])
        else:
            out[-1] = trial
    return out


def plain_inputs(
    documents: list[np.ndarray], *, padded: bool
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    if not documents:  # this rank got none, but must meet the others
        documents = [np.zeros(1, np.int32)]
    width = max(map(len, documents)) if padded else 0
    ids = [np.pad(d, (0, max(0, width - len(d)))) for d in documents]
    labels = [
        np.pad(d[1:], (0, 1 + max(0, width - len(d))), constant_values=-100) for d in documents
    ]
    return (
        torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        [len(i) for i in ids],
    )


def plain_contender(rank: Rank, most: int, *, padded: bool) -> Contender:
    """A usual training loop: deal, micro-batch, accumulate without sync, step."""
    model = Plain(rank.storage.architecture, 0)
    parallel = DistributedDataParallel(model) if rank.world.ranks > 1 else None
    optimizer = plain_optimizer(model, rank)
    clip = rank.storage.options.clip

    def step(batch: Batch, number: int) -> float:
        mine = list(batch.tokens[rank.world.rank :: rank.world.ranks])
        optimizer.zero_grad(set_to_none=False)
        micro = packs(mine, most, padded=padded)
        # The usual average over ranks is undone: the loss is a sum over the global count.
        scale = rank.world.ranks / batch.lengths.predicted
        total = 0.0
        for i, documents in enumerate(micro):
            last = i == len(micro) - 1
            quiet = parallel.no_sync() if parallel is not None and not last else nullcontext()
            with quiet:
                loss = (parallel or model)(*plain_inputs(documents, padded=padded)) * scale
                loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return total

    return step


def headrace_contender(
    rank: Rank, storage: Storage, options: PlannerConfig, costs: Any
) -> Contender:
    executor = Executor(storage, rank.groups, seed=0)
    planner = RunPlanner(costs=costs, options=options, groups=rank.groups)

    def step(batch: Batch, number: int) -> float:
        planned = planner.plan(batch.lengths)
        return executor.run(planned.plan, batch.tokens, step=number, lr=1e-3).loss

    return step


def contenders(rank: Rank, costs: Any, batches: list[Batch]) -> dict[str, Contender]:
    a, groups = rank.storage.architecture, rank.groups
    found: dict[str, Contender] = {}
    options = {"adaptive": PlannerConfig()}
    options |= {
        f"static cp{p}": PlannerConfig(name="static", static_size=p) for p in costs.group_sizes
    }
    for name, option in options.items():
        planner = RunPlanner(costs=costs, options=option, groups=rank.groups)
        try:
            for batch in batches:
                planner.plan(batch.lengths)
        except InfeasiblePlan:
            continue  # this size cannot hold the longest sequence
        found[name] = headrace_contender(rank, Storage(a, groups, seed=0), option, costs)
    most = max(batch.lengths.longest for batch in batches)
    found["ddp packed"] = plain_contender(rank, most, padded=False)
    found["ddp padded"] = plain_contender(rank, most, padded=True)
    return found


def compare(rank: Rank, count: int) -> dict[str, Any]:
    """Seconds per contender and batch, the slowest rank's."""
    costs, _ = measured_costs(rank)
    with Reader(rank.data.corpus, rank.data.sampler, ahead=2) as reader:
        batches = [next(reader) for _ in range(count + 1)]
    runners = contenders(rank, costs, batches)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for number, batch in enumerate(batches):
        best: dict[str, float] = dict.fromkeys(names, float("inf"))
        for repeat in range(REPEATS if number else 1):
            turn = (number + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                dist.barrier()
                start_s = time.perf_counter()
                runners[name](batch, number)
                dist.barrier()
                best[name] = min(best[name], time.perf_counter() - start_s)
        if number:  # the first batch warms up
            for name in names:
                seconds[name].append(best[name])
        if rank.first:
            print(f"batch {number}/{count}", file=sys.stderr)
    tokens = sum(batch.lengths.total for batch in batches[1:])
    return {
        "tokens": tokens,
        "seconds": {name: sum(values) for name, values in seconds.items()},
        "per_batch_s": seconds,
        "lengths": [list(batch.lengths.tokens) for batch in batches[1:]],
    }


def moved_bytes(rank: Rank, count: int) -> dict[str, Any]:
    """Bytes this rank sent to others in one step, counted at torch.distributed, and by formula."""
    costs, _ = measured_costs(rank)
    storage = Storage(rank.storage.architecture, rank.groups, seed=0)
    executor = Executor(storage, rank.groups, seed=0)
    with Reader(rank.data.corpus, rank.data.sampler, ahead=1) as reader:
        batch = next(reader)
    plan = (
        RunPlanner(costs=costs, options=PlannerConfig(), groups=rank.groups)
        .plan(batch.lengths)
        .plan
    )
    executor.run(plan, batch.tokens, step=0, lr=0.0)
    sent = [0]
    real = dist.all_to_all_single

    def counted(out, value, receive=None, send=None, group=None, async_op=False):  # type: ignore[no-untyped-def]
        parts = send or [len(value) // dist.get_world_size(group)] * dist.get_world_size(group)
        others = sum(n for r, n in enumerate(parts) if r != dist.get_rank(group))
        row = value[0].numel() if len(value) else 0
        sent[0] += others * row * value.element_size()
        return real(out, value, receive, send, group=group, async_op=async_op)

    dist.all_to_all_single = counted
    try:
        executor.run(plan, batch.tokens, step=1, lr=0.0)
    finally:
        dist.all_to_all_single = real
    return {
        "strategy": str(plan.strategy),
        "counted": sent[0],
        "formula": formula_bytes(rank, plan),
    }


def formula_bytes(rank: Rank, plan: Plan) -> int:
    """Links: rows of the table. Ulysses: per layer, forward and backward, local tokens times the
    heads of others out, and others' tokens times local heads back (exact for uneven splits)."""
    me, a, size = rank.world.rank, rank.storage.architecture, 4
    total = 0
    for weight in weight_table(a):
        table = link(storage_partition(weight, plan.devices), working_partition(weight, plan))
        pulled = received_rows(table, me) * weight.row_elements * size
        served = sum(len(s.rows) for s in table if s.owner == me != s.reader)
        total += pulled + served * weight.row_elements * size
    for micro in plan.micro_batches:
        ranks = plan.pipelines[micro.pipeline].ranks
        if me in ranks and len(ranks) > 1:
            total += len(micro.layers.options) * switch_bytes(
                sum(plan.tokens_of(micro)), len(ranks), ranks.index(me), a, size
            )
            for option in micro.layers.options:
                if option.recompute == "full":
                    total += (
                        switch_bytes(
                            sum(plan.tokens_of(micro)), len(ranks), ranks.index(me), a, size
                        )
                        // 2
                    )
    return total


def switch_bytes(tokens: int, ranks: int, member: int, a: Architecture, size: int) -> int:
    from headrace.layouts import split_sizes
    from headrace.methods.ulysses_z import split_heads

    heads, sizes = split_heads(a.heads, a.kv_heads, ranks), split_sizes(tokens, ranks)
    columns = [len(c) for c in heads.columns.of]
    queries = [len(q) for q in heads.queries.of]
    others = [r for r in range(ranks) if r != member]
    there = sum(sizes[member] * columns[r] for r in others)
    back = sum(sizes[r] * queries[member] for r in others)
    there_backward = sum(sizes[r] * columns[member] for r in others)
    back_backward = sum(sizes[member] * queries[r] for r in others)
    return (there + back + there_backward + back_backward) * a.head_features * size


def overhead(rank: Rank, count: int) -> dict[str, Any]:
    """One rank: the runtime against a hand-written loop over the same batches."""
    costs, _ = measured_costs(rank)
    with Reader(rank.data.corpus, rank.data.sampler, ahead=2) as reader:
        batches = [next(reader) for _ in range(count + 1)]
    a = rank.storage.architecture
    most = max(batch.lengths.longest for batch in batches)
    runners = {
        "headrace": headrace_contender(
            rank, Storage(a, rank.groups, seed=0), PlannerConfig(), costs
        ),
        "hand-written": plain_contender(rank, most, padded=False),
    }
    seconds: dict[str, float] = dict.fromkeys(runners, 0.0)
    for number, batch in enumerate(batches):
        best: dict[str, float] = dict.fromkeys(runners, float("inf"))
        for repeat in range(REPEATS):
            for name in sorted(runners, reverse=bool((number + repeat) % 2)):
                start_s = time.perf_counter()
                runners[name](batch, number)
                best[name] = min(best[name], time.perf_counter() - start_s)
        for name in runners:
            seconds[name] += best[name] * bool(number)  # the first batch warms up
    return {"seconds": seconds}


ONE_METHOD = ('planner.methods="auto"', 'planner.candidates=["ulysses_z"]')
"""The formula of bytes is that of one method."""


def on_ranks(
    ranks: int, config_path: Path, changes: list[str], task: Callable[[Rank, int], Any], count: int
) -> Any:
    config = Config.load(config_path, *changes, f"devices.ranks={ranks}")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            found = task(open_rank(world, config), count)
            if world.rank == 0:
                result.write_text(json.dumps(found))
            return 0

        code = start(main, ranks=ranks, threads=max(1, len(os.sched_getaffinity(0)) // ranks))
        if code:
            sys.exit(code)
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--config", type=Path, default=Path("examples/python-sources.toml"))
    parser.add_argument("--set", dest="changes", action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/main_job.json"))
    o = parser.parse_args()
    if o.ranks < 2:
        parser.error("--ranks: the comparison needs at least 2")
    Config.load(o.config, *o.changes, *ONE_METHOD)  # before minutes are spent
    sides = on_ranks(o.ranks, o.config, o.changes, compare, o.batches)
    alone = on_ranks(1, o.config, o.changes, overhead, max(2, o.batches // 2))
    moved = on_ranks(o.ranks, o.config, [*o.changes, *ONE_METHOD], moved_bytes, 1)
    from headrace.native.machine import machine_facts

    facts = machine_facts("cpu")
    best = sides["seconds"]["adaptive"]
    print(f"{facts['host_cpu']}, {facts['cores']} cores, torch {facts['torch']}, {o.ranks} ranks")
    print(f"{o.batches} batches of {o.config}, {sides['tokens']:,} tokens\n")
    print(f"{'contender':<16}{'tokens/s':>10}{'seconds':>10}{'of adaptive':>13}")
    for name, seconds in sorted(sides["seconds"].items(), key=lambda item: item[1]):
        print(
            f"{name:<16}{sides['tokens'] / seconds:>10.0f}{seconds:>10.2f}{best / seconds:>12.2f}x"
        )
    one = alone["seconds"]
    ratio = one["headrace"] / one["hand-written"]
    print(
        f"\none rank: headrace {one['headrace']:.2f} s, hand-written loop "
        f"{one['hand-written']:.2f} s, ratio {ratio:.3f}"
    )
    print(
        f"bytes sent by rank 0 in a step of {moved['strategy']}, ulysses_z: "
        f"counted {moved['counted']:,}, formula {moved['formula']:,}"
    )
    o.out.parent.mkdir(parents=True, exist_ok=True)
    o.out.write_text(
        json.dumps(
            {
                "machine": facts,
                "ranks": o.ranks,
                "side_by_side": sides,
                "one_rank": alone,
                "bytes": moved,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
