"""Rollouts of reinforcement learning: what planning each batch gains, forwards alone and steps.

Every batch of rollouts is first run forward (log-probabilities of the old and the reference model),
then trained. Both are planned here for 64 H100 by the roofline, of Llama 8B and a 32B, and compared
with what is used for it:

    script    one group size, one method and one recompute level for the run, as a launch script
              says them: the best that hold the longest response allowed
    static    one group size for the run, the best one that holds the longest response allowed
    chosen    one group size for each batch, the best one
    batch     a power of two of ranks by the longest sequence of the batch
    micro     the same by the longest of each micro-batch (Megatron-Core's dynamic context
              parallelism, in verl and SkyRL); both with the best limit of tokens a rank and tensor
              degree for the run: ``sizes_by_longest.py``
    bound     what no plan beats

All but the first decide sizes alone: for them, too, headrace balances and packs sequences, and
chooses methods and recompute of every micro-batch, by its costs. Numbers are how many times as long
as headrace's a step takes, the geometric mean over seeds and the least and the most; under
``bound`` headrace's own over the bound. Plans are a search's: of single batches it is up to 0.3 %
behind a rule that happens to meet the best sizes.

Lengths: ``dapo`` is the preset ``rollouts``: responses of a step of DAPO, of 1,174 tokens in the
mean and 20,480 at most (verl, issue 1458). The others are as wide (log-normal, sigma 1) with
medians of 2K, 4K and 8K, cut at 64K: contexts that users of GRPO ask for (NeMo-RL issue 883,
ms-swift issue 9942), of which nobody has published a histogram.

Then really, on the ranks of this machine: a tiny Llama, lengths of ``4k`` divided by 16, the same
batches by each static size and by headrace in turn, in one run. Plans are announced one batch ahead
(``run.plan_ahead``), by all of them. Ranks beyond the cores of a machine share them: what one rank
leaves idle another one uses, so there the CPU seconds of all ranks decide and not who is last, and
small groups win, as they exchange the least. Plans are made for ranks that have a device each.

examples:
    python benchmarks/rollouts.py
    python benchmarks/rollouts.py --models 8b --laws dapo --sequences 128 --seeds 0 --ranks 0
    python benchmarks/rollouts.py --json benchmarks/results/rollouts.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from rich.table import Table
from sizes_by_longest import generators
from worlds import LLAMA_32B

import headrace as hr
from headrace.cli.display import tell
from headrace.costs.forward import forward_costs
from headrace.data.drawn_lengths import parse_distribution
from headrace.errors import InfeasiblePlan
from headrace.native.machine import machine_facts
from headrace.spec.layer_plan import RECOMPUTE

DEVICES = 64
LAWS = {
    "dapo": "rollouts",
    **{f"{k}k": f"lognormal:median={k << 10},sigma=1.0,min=64,max=65536" for k in (2, 4, 8)},
}
LIMITS = tuple(1 << power for power in range(9, 16))
"""Tokens of a sequence on a rank that the peers' rule may be configured with."""
TENSOR = {"8b": (1,), "32b": (1, 4, 8)}
"""Tensor degrees that it may be configured with: 32B's weights do not fit one H100."""
KINDS = ("forward", "step")
RIVALS = ("script", "static", "chosen", "batch", "micro")
METHODS = ("ulysses_z", "megatron_cz", "megatron_ts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Batches that are compared: those of all seeds."""

    model: str
    law: str
    sequences: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What each takes for the batches of a cell, in seconds; none where it holds not all."""

    cell: Cell
    tokens: list[int]
    ours_s: list[float]
    bound_s: list[float]
    planning_s: list[float]
    strategies: list[str]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)

    def over(self, name: str) -> list[float]:
        """How many times as long as ours each batch takes."""
        return [a / b for a, b in zip(self.seconds.get(name, ()), self.ours_s, strict=False)]

    @property
    def above_bound(self) -> list[float]:
        """Ours over the bound."""
        return [a / b for a, b in zip(self.ours_s, self.bound_s, strict=True)]


@cache
def problem_of(model: str, kind: str) -> hr.Problem:
    """Everything that may be chosen."""
    own = LLAMA_32B if model == "32b" else hr.Architecture.preset(f"llama-{model}")
    costs = hr.costs.roofline(own, "h100", devices=DEVICES)
    return hr.Problem(costs=costs if kind == "step" else forward_costs(costs))


def planned_s(lengths: hr.Lengths, problem: hr.Problem, **more: Any) -> float | None:
    """Seconds of a plan; None where nothing fits."""
    try:
        return hr.plan(lengths, problem, **more).predicted_s
    except InfeasiblePlan:
        return None


def by_sizes(batches: Sequence[hr.Lengths], problem: hr.Problem) -> dict[str, list[float | None]]:
    """Seconds of each batch by each group size."""
    return {
        f"cp{p}": [
            planned_s(own, problem.replace(planner="static", static_size=p)) for own in batches
        ]
        for p in problem.static_sizes
    }


def by_script(
    batches: Sequence[hr.Lengths], problem: hr.Problem, kind: str
) -> dict[str, list[float | None]]:
    """Seconds of each batch by each size, method and recompute level."""
    found = dict[str, list[float | None]]()
    for method in METHODS:
        for level in RECOMPUTE if kind == "step" else RECOMPUTE[:1]:
            own = problem.replace(methods=("local", method), recompute=(level,), stages=False)
            powers = own.replace(sizes=tuple(p for p in own.group_sizes if p & (p - 1) == 0))
            sizes = by_sizes(batches, powers)
            found |= {f"{name} {method} {level}": seconds for name, seconds in sizes.items()}
    return found


def by_rule(
    batches: Sequence[hr.Lengths], problem: hr.Problem, tensors: Sequence[int], *, batch: bool
) -> dict[str, list[float | None]]:
    """Seconds of each batch by the peers' rule with each configuration."""
    flat = problem.replace(stages=False)
    return {
        f"tp{tensor}, {limit >> 10}Ki a rank": [
            planned_s(own, flat, generators=generators(tensor=tensor, limit=limit, batch=batch))
            for own in batches
        ]
        for tensor in tensors
        for limit in LIMITS
    }


def best_of(found: dict[str, list[float | None]]) -> tuple[str, list[float]]:
    """The configuration that takes the least for all batches, of those that hold the last of them,
    the longest response that is allowed; and what it takes for the others."""
    held = {
        name: [s for s in seconds[:-1] if s is not None]
        for name, seconds in found.items()
        if None not in seconds
    }
    if not held:
        return "", []
    name = min(held, key=lambda name: geometric_mean(held[name]))
    return name, held[name]


def row_of(cell: Cell, seeds: Iterable[int]) -> Row:
    """All planners over the batches of a cell."""
    problem, law = problem_of(cell.model, cell.kind), LAWS[cell.law]
    batches = [hr.lengths.draw(law, sequences=cell.sequences, seed=seed) for seed in seeds]
    made, spent = list[hr.Plan](), list[float]()
    for lengths in batches:
        start = time.process_time()
        made.append(hr.plan(lengths, problem))
        spent.append(time.process_time() - start)
    row = Row(
        cell=cell,
        tokens=[own.total for own in batches],
        ours_s=[plan.predicted_s for plan in made],
        bound_s=[plan.lower_bound_s for plan in made],
        planning_s=spent,
        strategies=[str(plan.strategy) for plan in made],
    )
    longest = hr.Lengths.of([parse_distribution(law).longest])
    asked = [*batches, longest]
    sizes = by_sizes(asked, problem)
    each = [[s[n] for s in sizes.values()] for n in range(len(batches))]
    held = [[s for s in seconds if s is not None] for seconds in each]
    if all(held):
        row.seconds["chosen"] = [min(seconds) for seconds in held]
    tensors = TENSOR[cell.model]
    for name, found in (
        ("script", by_script(asked, problem, cell.kind)),
        ("static", sizes),
        ("batch", by_rule(asked, problem, tensors, batch=True)),
        ("micro", by_rule(asked, problem, tensors, batch=False)),
    ):
        row.chosen[name], seconds = best_of(found)
        if seconds:
            row.seconds[name] = seconds
    return row


def rows(o: argparse.Namespace) -> Iterator[Row]:
    """The rows of all cells."""
    cells = [
        Cell(model=model, law=law, sequences=sequences, kind=kind)
        for model in o.models
        for law in o.laws
        for sequences in o.sequences
        for kind in KINDS
    ]
    for n, cell in enumerate(cells):
        tell(f"{n + 1} of {len(cells)}: {cell}")
        yield row_of(cell, o.seeds)


def text_of(values: Sequence[float]) -> str:
    """The geometric mean, with the least and the most."""
    if not values:
        return "holds nothing"
    return f"{geometric_mean(values):.3f} ({min(values):.2f}-{max(values):.2f})"


def table_of(found: Sequence[Row]) -> Table:
    """A line for each cell."""
    table = Table(
        title=f"{DEVICES} H100 by the roofline: times as long as headrace",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for title in ("model", "lengths", "sequences", "tokens", "of", "headrace", *RIVALS, "bound"):
        table.add_column(title, justify="left" if title in ("model", "lengths", "of") else "right")
    for row in found:
        cell = row.cell
        table.add_row(
            cell.model,
            cell.law,
            str(cell.sequences),
            f"{geometric_mean(row.tokens) / 1e6:.2f}M",
            cell.kind,
            f"{geometric_mean(row.ours_s):.2f} s",
            *(text_of(row.over(name)) for name in RIVALS),
            text_of(row.above_bound),
        )
    for model in dict.fromkeys(row.cell.model for row in found):
        for kind in KINDS:
            own = [row for row in found if (row.cell.model, row.cell.kind) == (model, kind)]
            overs = {name: [x for row in own for x in row.over(name)] for name in RIVALS}
            above = [x for row in own for x in row.above_bound]
            blank = ("all", "", "", kind, "")
            table.add_row(model, *blank, *map(text_of, overs.values()), text_of(above))
    return table


# Really, on the ranks of this machine.


def samples_of(lengths: Sequence[int], vocabulary: int, seed: int) -> list[dict[str, Any]]:
    """Random tokens, the same on all ranks."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(0, vocabulary, (count,), generator=draw)} for count in lengths
    ]


def measured_here(batches: list[list[int]], repeats: int) -> dict[str, Any]:
    """Seconds of each batch, forward and step, by headrace and by each static size."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM

    from headrace.comm.collectives import gather_floats

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    longest, total = max(map(max, batches)), max(map(sum, batches))

    def logp(outputs: Any, micro: Any) -> torch.Tensor:
        flat = cross_entropy(
            outputs.logits[0], micro.labels[0], ignore_index=-100, reduction="none"
        )
        return -flat[None]

    def attached(planner: hr.PlannerConfig, costs: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config).train()
        run = hr.attach(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            longest=longest,
            batch_tokens=total,
            planner=planner,
            measure=hr.MeasureOptions(costs=costs),
            say=lambda text: None,
        )
        return run, model

    ours = hr.PlannerConfig(compare=False)
    runs = {"headrace": attached(ours, None)}
    costs, ranks = runs["headrace"][0].found.costs, dist.get_world_size()
    for p in (p for p in costs.group_sizes if ranks % p == 0):
        static = hr.PlannerConfig(name="static", static_size=p, compare=False)
        runs[f"cp{p}"] = attached(static, costs)

    def timed(name: str, kind: str, samples: list[dict[str, Any]]) -> tuple[float, float]:
        run, model = runs[name]
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        if kind == "forward":
            run.map(samples, logp)
        else:
            for micro in run.step(samples):
                micro.backward(micro.loss(model(**micro.inputs).logits))
        spent = [time.perf_counter() - start, time.process_time() - busy]
        rows = gather_floats(spent, dist.group.WORLD)
        return max(row[0] for row in rows), sum(row[1] for row in rows)

    names = list(runs)
    seconds = {kind: {name: list[float]() for name in names} for kind in KINDS}
    busy_s = {kind: {name: list[float]() for name in names} for kind in KINDS}
    given = [
        samples_of(lengths, config.vocab_size, number)
        for number, lengths in enumerate([batches[0], *batches])
    ]
    for number, samples in enumerate(given):
        for run, _ in runs.values():
            for coming in given[number + 1 : number + 2]:
                run.plan_ahead(coming)
        for kind in KINDS:
            best = dict.fromkeys(names, (float("inf"), float("inf")))
            for repeat in range(repeats):
                turn = (number + repeat) % len(names)
                for name in names[turn:] + names[:turn]:
                    best[name] = min(best[name], timed(name, kind, samples))
            for name in names if number else ():  # the first batch warms up
                seconds[kind][name].append(best[name][0])
                busy_s[kind][name].append(best[name][1])
    for run, _ in runs.values():
        run.detach()
    return {"ranks": ranks, "lengths": batches, "seconds": seconds, "cpu_s": busy_s}


def really(ranks: int, batches: list[list[int]], repeats: int) -> dict[str, Any]:
    """:func:`measured_here` on so many ranks of this machine."""
    from headrace.comm.launch import World, start

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            found = measured_here(batches, repeats)
            if world.rank == 0:
                result.write_text(json.dumps(found))
            return 0

        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        if code := start(main, ranks=ranks, threads=threads):
            sys.exit(code)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def table_of_ranks(found: dict[str, Any]) -> Table:
    """A line for forwards and one for steps."""
    table = Table(
        title=f"{found['ranks']} ranks of this machine, {len(found['lengths'])} batches: times as "
        "long as headrace",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    names = [name for name in found["seconds"]["step"] if name != "headrace"]
    for title in ("of", "headrace", *names):
        table.add_column(title, justify="left" if title == "of" else "right")
    for what, key in (("", "seconds"), (", CPU of all ranks", "cpu_s")):
        for kind, seconds in found[key].items():
            ours = seconds["headrace"]
            overs = ([a / b for a, b in zip(seconds[name], ours, strict=True)] for name in names)
            table.add_row(f"{kind}{what}", f"{geometric_mean(ours):.2f} s", *map(text_of, overs))
    return table


def batches_here(count: int, sequences: int) -> list[list[int]]:
    """Lengths of ``4k`` divided by 16, for a tiny model."""
    return [
        [max(4, tokens // 16) for tokens in drawn.tokens]
        for drawn in hr.lengths.batches(LAWS["4k"], count, sequences=sequences)
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=TENSOR, default=list(TENSOR))
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[128, 512], help="of a step's batch"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="measured; 0: none")
    parser.add_argument("--batches", type=int, default=4, help="that are measured")
    parser.add_argument("--repeats", type=int, default=2, help="of each; the quickest counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    o = parser.parse_args(arguments)
    found = list(rows(o))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 220)
    console.print(table_of(found), crop=False)
    measured = list[dict[str, Any]]()
    for ranks in filter(None, o.ranks):
        tell(f"{ranks} ranks")
        measured.append(really(ranks, batches_here(o.batches, 8 * ranks), o.repeats))
        console.print(table_of_ranks(measured[-1]), crop=False)
    if o.json is not None:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        cells = [
            {
                "model": row.cell.model,
                "law": row.cell.law,
                "sequences": row.cell.sequences,
                "kind": row.cell.kind,
                "tokens": row.tokens,
                "ours_s": row.ours_s,
                "bound_s": row.bound_s,
                "planning_s": row.planning_s,
                "strategies": row.strategies,
                "seconds": row.seconds,
                "chosen": row.chosen,
            }
            for row in found
        ]
        numbers = {
            "machine": machine_facts("cpu"),
            "devices": DEVICES,
            "laws": LAWS,
            "cells": cells,
            "measured": measured,
        }
        o.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
