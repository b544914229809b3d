"""Data-Centric Parallel beside what it starts from, by simulation, and a real loop on two ranks.

Three data sets, named after what takes their time as in the paper, whose own are pictures only:
lengths l from 1 Ki to 128 Ki tokens, each length as frequent as l^-k, with k = 3 where short
sequences dominate, 2 where both do, 1 where long ones do; and those of a real corpus, the sources
of Python's standard library, a token for each byte. The model is the paper's Transformer-1D (42
layers of 3072 features, 48 heads, 5B parameters) or Transformer-2D (dcp_clips.py) on H200 with
80 GB a device, by data sheets and formulas, with Ulysses or DSP and weights replicated while they
work, as with ZeRO-1.

    bucket   one group size for all steps, the smallest that holds the longest sequence there can
             be (the paper's baseline); batches of like lengths
    packed   the same groups, packs as full as memory allows
    best ... both on the group size that is quickest for each batch, as nobody chooses by hand
    inter    a size and a batch for each bucket of lengths, accumulation to end together;
             as those before, every layer computed again
    intra    the same, and no more layers computed again than memory asks for
    headrace whatever is quickest, group sizes that are no powers of two among them

Tokens per second are those of the simulated steps, idle is the share of all devices' time, and
planning is the CPU time of one plan in a warm process. The real loop (--loop) attaches the same
small Llama of transformers with each planner, and with each static group size, one after the other
in the same two processes; tokens per second of their steps after the first two, and what a step
waits for its plan, which a process beside makes while others train.

examples:
    python benchmarks/dcp.py
    python benchmarks/dcp.py --devices 8 32 128 --steps 3 --loop
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from dcp_clips import costs_of_clips
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import headrace as hr
from headrace.cli.display import tell
from headrace.units import percent_text, seconds_text

MODEL = hr.Architecture(
    kind="gpt",
    layers=42,
    hidden=3072,
    heads=48,
    kv_heads=48,
    ffn=4 * 3072,
    vocabulary=32_000,
    positions=1 << 17,
    tied=True,
)
MEMORY = 80 * 10**9
EXPONENTS = {"short": 3.0, "balanced": 2.0, "long": 1.0}
FULL = ("full",)
LEVELS = ("none", "attention", "full")
PLANNERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bucket": ("bucket", FULL),
    "packed": ("packed", FULL),
    "best bucket": ("bucket", FULL),
    "best packed": ("packed", FULL),
    "inter": ("dcp", FULL),
    "intra": ("dcp", LEVELS),
    "headrace": ("adaptive", LEVELS),
}


def corpus() -> NDArray[np.int64]:
    """Bytes of each source of the standard library, up to the longest sequence."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    sizes = np.array([file.stat().st_size for file in files], dtype=np.int64)
    return sizes[sizes > 0].clip(max=MODEL.positions)


def lengths_of(name: str, tokens: int, seed: int) -> hr.Lengths:
    """One batch of a data set, of about so many tokens."""
    rng = np.random.default_rng(seed)
    if name == "corpus":
        drawn = rng.permutation(corpus())
    else:
        grid = np.geomspace(1 << 10, 1 << 17, 400)
        weights = grid ** (1 - EXPONENTS[name])  # of a grid whose cells grow as it does
        drawn = rng.choice(grid, size=tokens // 1024, p=weights / weights.sum()).astype(int)
    many = max(1, int(np.searchsorted(np.cumsum(drawn), tokens)))
    return hr.Lengths.of(drawn[:many])


def problem_of(planner: str, devices: int, model: str = "1d") -> hr.Problem:
    """What a planner may choose from."""
    name, levels = PLANNERS[planner]
    if model == "1d":
        costs = hr.costs.roofline(MODEL, "h200", devices=devices, memory_bytes=MEMORY)
        methods = ("local", "ulysses_z")
    else:
        costs = costs_of_clips(
            "h200", devices, memory_bytes=MEMORY, longest=MODEL.positions or 1 << 17
        )
        methods = ("local", "dsp")
    problem = hr.Problem(
        costs=costs,
        planner=name,
        recompute=levels,
        holding=("replicated",),
        stages=False,
        methods=methods,
    )
    return (
        problem if planner not in ("bucket", "packed") else problem.replace(sizes=(held(problem),))
    )


def held(problem: hr.Problem) -> int:
    """The smallest group size that holds the longest sequence there can be."""
    for p in problem.group_sizes:
        with suppress(hr.errors.InfeasiblePlan):
            hr.plan([MODEL.positions], problem.replace(sizes=(p,)))
            return p
    raise SystemExit(f"no group holds {MODEL.positions} tokens")


def simulated(
    data: Sequence[str], devices: int, steps: int, each: int, model: str = "1d"
) -> Iterator[dict[str, Any]]:
    """A row for every data set and planner, means over ``steps`` batches of ``each`` tokens for
    every device."""
    for name in data:
        batches = [lengths_of(name, each * devices, seed) for seed in range(steps)]
        for planner in PLANNERS:
            tell(f"{model}, {devices} devices, {name}: {planner}")
            problem = problem_of(planner, devices, model)
            hr.plan(batches[0], problem)
            seconds, idle, planning = [], [], []
            for batch in batches:
                start = time.process_time()
                plan = hr.plan(batch, problem)
                planning.append(time.process_time() - start)
                seconds.append(plan.predicted_s)
                idle.append(hr.simulate(plan, problem.model).idle)
            tokens = sum(batch.total for batch in batches)
            yield {
                "model": model,
                "devices": devices,
                "data": name,
                "planner": planner,
                "tokens_per_s": tokens / sum(seconds),
                "idle": statistics.mean(idle),
                "planning_s": statistics.median(planning),
            }


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    titles = ("model", "devices", "data", "planner", "tokens/s", "over bucket", "idle", "planning")
    for title in titles:
        table.add_column(
            title, justify="left" if title in ("model", "data", "planner") else "right"
        )
    least: dict[tuple[str, int, str], float] = {}
    for row in rows:
        key = row["model"], row["devices"], row["data"]
        first = least.setdefault(key, row["tokens_per_s"])
        table.add_row(
            row["model"],
            f"{row['devices']:,}",
            row["data"],
            row["planner"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s'] / first:.2f}x",
            percent_text(row["idle"]) if row["idle"] is not None else "",
            seconds_text(row["planning_s"]) if row["planning_s"] is not None else "",
        )
    Console().print(table)


CONTENDERS: dict[str, dict[str, Any]] = {
    "static 1": {"name": "static", "static_size": 1},
    "static 2": {"name": "static", "static_size": 2},
    "bucket": {"name": "bucket"},
    "packed": {"name": "packed"},
    "headrace": {"name": "adaptive"},
}


def looped(steps: int) -> list[dict[str, Any]]:
    """Tokens per second of real loops on two ranks."""
    from headrace.comm.launch import World, start

    with tempfile.TemporaryDirectory() as folder:

        def main(world: World) -> int:
            rows = [_loop(name, steps, folder) for name in CONTENDERS]
            if world.rank == 0:
                (Path(folder) / "rows.json").write_text(json.dumps(rows))
            return 0

        if start(main, ranks=2, threads=1) != 0:
            sys.exit("a rank failed; stderr says why")
        found: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return found


def _loop(name: str, steps: int, folder: str) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tell(f"loop: {name}")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1 << 14,
    )
    model = LlamaForCausalLM(config).train()
    rng = np.random.default_rng(0)
    grid = np.geomspace(64, 4096, 200)
    drawn = rng.choice(grid, size=4000, p=grid**-1.0 / (grid**-1.0).sum()).astype(int)
    data = [{"input_ids": torch.randint(512, (int(n),))} for n in drawn[: 40 * steps]]
    run = hr.attach(
        model,
        torch.optim.AdamW(model.parameters()),
        data,
        batch_tokens=16384,
        steps=steps,
        measure=hr.MeasureOptions(cache=folder),
        say=lambda text: None,
        planner=hr.PlannerConfig(**CONTENDERS[name]),
    )
    tokens, seconds, waits, strategies = 0, 0.0, list[float](), set[str]()
    for step in run:
        for micro in step:
            micro.backward(model(**micro.inputs).loss)
        if step.number >= 2:
            tokens, seconds = tokens + step.plan.lengths.total, seconds + step.seconds
            strategies.add(str(step.plan.strategy))
            waits.append(step.waited_s)
    run.detach()
    return {
        "model": "Llama",
        "devices": 2,
        "data": "loop",
        "planner": name,
        "tokens_per_s": tokens / seconds,
        "idle": None,
        "planning_s": statistics.median(waits),
        "strategies": sorted(strategies),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("1d", "2d"), nargs="+", default=["1d", "2d"])
    parser.add_argument("--devices", type=int, nargs="+", default=[32])
    parser.add_argument("--data", nargs="+", default=[*EXPONENTS, "corpus"])
    parser.add_argument("--steps", type=int, default=5, help="batches, or steps of the loop")
    parser.add_argument("--tokens", type=int, default=1 << 16, help="of a batch, for each device")
    parser.add_argument("--loop", action="store_true", help="train on two ranks here too")
    parser.add_argument("--json", type=Path, help="write the rows there")
    o = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [
        row
        for model in o.model
        for n in o.devices
        for row in simulated(o.data, n, o.steps, o.tokens, model)
    ]
    show(rows)
    if o.loop:
        real = looped(o.steps + 2)
        show(real)
        rows += real
    if o.json:
        from headrace.native.machine import machine_facts

        o.json.write_text(json.dumps({"machine": machine_facts("cpu"), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
