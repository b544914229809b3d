"""A real loop on two ranks with each planner, for the benchmark of Data-Centric Parallel.

It attaches the same small Llama of transformers with each planner, and with each static group size,
one after the other in the same two processes: tokens per second of their steps after the first two,
and what a step waits for its plan, which a process beside makes while others train.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import headrace as hr
from headrace.cli.display import tell

__all__ = ["CONTENDERS", "looped"]

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
