"""Sequence parallelism of a foreign model: memory and time beside transformers' own attention.

Every contender takes a step of the same small Llama of transformers on rows of several lengths,
each in processes of its own, which start alike: bytes are the peak of a rank's memory during the
step beyond what it held before, seconds those of its CPU. Ratios are to the first contender of the
same length.

    one device        transformers' own attention (sdpa), one process
    one device, full  the same, every block computed again
    N ranks, LEVEL    headrace on N ranks: nothing computed again, all but attention, or everything

examples:
    python benchmarks/autosp.py
    python benchmarks/autosp.py --ranks 2 4 --tokens 2048 8192 --json autosp.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import headrace as hr
from headrace.adopt.block_recompute import recompute_blocks
from headrace.cli.display import tell
from headrace.comm.launch import World, start
from headrace.native.machine import machine_facts
from headrace.units import bytes_text, seconds_text

LEVELS = ("none", "attention", "full")


def small_llama(tokens: int, attention: str = "sdpa") -> LlamaForCausalLM:
    """Six layers of 256 features."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).train()


def batch_of(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def alone(tokens: int, level: str) -> Callable[[int], float]:
    """A step of transformers' own."""
    model = small_llama(tokens)
    if level == "full":
        recompute_blocks(model, "full", lambda run: run)

    def step(length: int) -> float:
        loss = model(**batch_of(length)).loss
        loss.backward()
        return float(loss.detach())

    return step


def spread(tokens: int, level: str) -> Callable[[int], float]:
    """A step of ours."""
    run = hr.compile(small_llama(tokens), recompute=None if level == "none" else level)

    def step(length: int) -> float:
        loss = run(**run.shard(batch_of(length)).inputs).loss
        run.backward(loss)
        return float(run.add_up(loss))

    return step


def measured(
    make: Callable[[int, str], Callable[[int], float]], tokens: int, level: str, ranks: int
) -> dict[str, Any]:
    """The step of ranks of their own: the most bytes of one, CPU seconds of all, and the loss."""
    with tempfile.TemporaryDirectory() as folder:

        def main(world: World) -> int:
            step = make(tokens, level)
            step(64)
            held, spent = psutil.Process().memory_info().rss, time.process_time()
            loss = step(tokens)
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            row = {"bytes": max(0, most - held), "cpu_s": time.process_time() - spent, "loss": loss}
            (Path(folder) / f"{world.rank}.json").write_text(json.dumps(row))
            return 0

        if start(main, ranks=ranks, threads=1) != 0:
            sys.exit("a rank failed; stderr says why")
        rows = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(ranks)]
    return {
        "bytes": max(row["bytes"] for row in rows),
        "cpu_s": sum(row["cpu_s"] for row in rows),
        "loss": rows[0]["loss"],
    }


def results(o: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for tokens in o.tokens:
        contenders = [("one device", alone, "none", 1), ("one device, full", alone, "full", 1)]
        contenders += [
            (f"{ranks} ranks, {level}", spread, level, ranks)
            for ranks in o.ranks
            for level in LEVELS
        ]
        for name, make, level, ranks in contenders:
            tell(f"{tokens} tokens: {name}")
            found.append(
                {"tokens": tokens, "contender": name, **measured(make, tokens, level, ranks)}
            )
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("tokens", "contender", "peak", "of one device", "CPU", "of one device", "loss"):
        table.add_column(title, justify="left" if title == "contender" else "right")
    for row in rows:
        first = next(r for r in rows if r["tokens"] == row["tokens"])
        table.add_row(
            f"{row['tokens']:,}",
            row["contender"],
            bytes_text(row["bytes"]),
            f"{row['bytes'] / first['bytes']:.2f}",
            seconds_text(row["cpu_s"]),
            f"{row['cpu_s'] / first['cpu_s']:.2f}",
            f"{row['loss']:.6f}",
        )
    Console(highlight=False, width=110).print(table)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--json", type=Path, help="write the rows there")
    o = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = results(o)
    show(rows)
    if o.json:
        facts = {"machine": machine_facts("cpu"), "rows": rows}
        o.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
