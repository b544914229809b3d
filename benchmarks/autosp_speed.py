"""Seconds of a step of a foreign model on several ranks, beside sequence parallelism by hand.

A Llama of torch alone, and one of transformers, of the same shape. In every round each contender
takes a step of the same rows, one after the other, on all ranks; seconds are medians of the rounds,
of the slowest rank, and ratios to the first contender of the model.

    by hand             Ulysses written into the model's attention: an all-to-all of torch's
                        functional collectives with a backward, on heads that the ranks divide
    headrace            hr.compile: what the model calls is replaced, or transformers' registry
    headrace, compiled  the same with torch.compile (``--backend``); by hand is compiled likewise
    DeepSpeed           its Ulysses for transformers, where deepspeed can be imported

Gradients of all contenders are compared with those of one process; DeepSpeed leaves losses to its
user, so its labels are shifted before and losses summed here.

examples:
    python benchmarks/autosp_speed.py
    python benchmarks/autosp_speed.py --ranks 2 --tokens 2048 --rounds 9 --json autosp_speed.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from plain_llama import PlainLlama, causal
from rich.console import Console
from rich.table import Table
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import headrace as hr
from headrace.adopt.gradients import add_up
from headrace.cli.display import tell
from headrace.comm.launch import World, start
from headrace.native.machine import machine_facts
from headrace.units import seconds_text

SHAPE = {"layers": 4, "hidden": 512, "ffn": 1408, "heads": 8, "keys": 4, "vocabulary": 2048}


def heads_for_tokens(x: torch.Tensor) -> torch.Tensor:
    """x [b, N, s_r, D] to [b, N / R, s, D]."""
    ranks, (b, n, s, d) = dist.get_world_size(), x.shape
    sent = x.view(b, ranks, n // ranks, s, d).transpose(0, 1).contiguous()
    got = all_to_all_single_autograd(sent, None, None, dist.group.WORLD)
    return got.permute(1, 2, 0, 3, 4).reshape(b, n // ranks, ranks * s, d)


def tokens_for_heads(x: torch.Tensor) -> torch.Tensor:
    """Back."""
    ranks, (b, n, s, d) = dist.get_world_size(), x.shape
    sent = x.view(b, n, ranks, s // ranks, d).permute(2, 0, 1, 3, 4).contiguous()
    got = all_to_all_single_autograd(sent, None, None, dist.group.WORLD)
    return got.transpose(0, 1).reshape(b, ranks * n, s // ranks, d)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return tokens_for_heads(causal(*(heads_for_tokens(x) for x in (q, k, v))))


class HandWritten(PlainLlama):
    """With the places of this rank's tokens."""

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        return super().places(ids) + dist.get_rank() * ids.shape[1]


def plain(attend: Any = causal, kind: type[PlainLlama] = PlainLlama) -> PlainLlama:
    torch.manual_seed(0)
    return kind(**SHAPE, attend=attend)


def hugging() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SHAPE["vocabulary"],
        hidden_size=SHAPE["hidden"],
        intermediate_size=SHAPE["ffn"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["keys"],
        use_cache=False,
        max_position_embeddings=1 << 20,
    )
    return LlamaForCausalLM(config).train()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One row, its labels shifted, and this rank's part of both."""

    ids: torch.Tensor
    labels: torch.Tensor

    @property
    def part(self) -> slice:
        here = self.ids.shape[1] // dist.get_world_size()
        return slice(dist.get_rank() * here, (dist.get_rank() + 1) * here)


Step = Callable[[Batch], None]


def summed(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    flat, labels = logits.flatten(0, 1), batch.labels[:, batch.part].flatten()
    return cross_entropy(flat, labels, reduction="sum") / batch.labels.numel()


def hand_plain(backend: str | None) -> tuple[torch.nn.Module, Step]:
    model = plain(by_hand, HandWritten)
    call = model if backend is None else torch.compile(model, backend=backend, dynamic=True)

    def step(batch: Batch) -> None:
        summed(call(batch.ids[:, batch.part])[0], batch).backward()
        add_up(model.parameters(), dist.group.WORLD)

    return model, step


def ours_plain(backend: str | None) -> tuple[torch.nn.Module, Step]:
    model = plain()
    run = hr.compile(model, backend=backend)

    def step(batch: Batch) -> None:
        loss = run(**run.shard({"ids": batch.ids, "labels": batch.labels}).inputs)[1]
        run.backward(loss)
        run.add_up(loss)

    return model, step


def hand_hugging() -> tuple[torch.nn.Module, Step]:
    model = hugging()

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **rest: Any) -> Any:
        return by_hand(q, k, v).transpose(1, 2), None

    AttentionInterface.register("by_hand", attend)
    model.set_attn_implementation("by_hand")
    return model, whole_loop(model)


def deepspeeds() -> tuple[torch.nn.Module, Step]:
    from deepspeed import init_distributed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    init_distributed(dist_backend="gloo", dist_init_required=False)
    model = hugging()
    model.set_attn_implementation("sdpa")
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=1,
    )
    return model, whole_loop(model)


def whole_loop(model: Any) -> Step:
    """A step of a user who shards himself."""

    def step(batch: Batch) -> None:
        part = batch.part
        places = torch.arange(part.start, part.stop)[None]
        outputs = model(batch.ids[:, part], position_ids=places, use_cache=False)
        summed(outputs.logits, batch).backward()
        add_up(model.parameters(), dist.group.WORLD)

    return step


def ours_hugging() -> tuple[torch.nn.Module, Step]:
    model = hugging()
    run = hr.compile(model, labels="same")

    def step(batch: Batch) -> None:
        loss = run(**run.shard({"input_ids": batch.ids, "labels": batch.labels}).inputs).loss
        run.backward(loss)
        run.add_up(loss)

    return model, step


def contenders(backend: str) -> dict[str, dict[str, Callable[[], tuple[torch.nn.Module, Step]]]]:
    own = {
        "by hand": lambda: hand_plain(None),
        "headrace": lambda: ours_plain(None),
        "by hand, compiled": lambda: hand_plain(backend),
        "headrace, compiled": lambda: ours_plain(backend),
    }
    others = {"by hand": hand_hugging, "headrace": ours_hugging}
    if importlib.util.find_spec("deepspeed"):
        others["DeepSpeed"] = deepspeeds
    return {"torch alone": own, "transformers": others}


def alone(model: Any, batch: Batch) -> list[torch.Tensor]:
    """Gradients of one process."""
    outputs = model(batch.ids)
    logits = outputs[0] if isinstance(outputs, tuple) else outputs.logits
    cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
    return [p.grad for p in model.parameters()]


def measured(o: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank: medians of the seconds of the slowest, and errors of gradients."""
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randint(SHAPE["vocabulary"], (1, o.tokens + 1), generator=draw)
    batch = Batch(ids=drawn[:, :-1], labels=drawn[:, 1:])
    found = []
    for kind, makers in contenders(o.backend).items():
        wanted = alone(plain() if kind == "torch alone" else hugging(), batch)
        largest = max(float(g.abs().max()) for g in wanted)
        made, errors = {}, {}
        for name, make in makers.items():
            if dist.get_rank() == 0:
                tell(f"{kind}: {name}")
            model, step = made[name] = make()
            step(batch)
            off = [
                (p.grad - g).abs().max() for p, g in zip(model.parameters(), wanted, strict=True)
            ]
            errors[name] = float(max(off)) / largest
        taken: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(o.rounds):
            for name, (model, step) in made.items():
                model.zero_grad()
                dist.barrier()
                start_s = time.perf_counter()
                step(batch)
                spent = torch.tensor([time.perf_counter() - start_s])
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                taken[name].append(float(spent))
        first = taken[next(iter(made))]
        for name, seconds in taken.items():
            base = taken["by hand, compiled"] if "compiled" in name else first
            found.append(
                {
                    "model": kind,
                    "contender": name,
                    "step_s": median(seconds),
                    "speed": median(a / b for a, b in zip(base, seconds, strict=True)),
                    "gradient_error": errors[name],
                }
            )
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("model", "contender", "a step", "speed of by hand", "gradient error"):
        table.add_column(title, justify="left" if title in ("model", "contender") else "right")
    for row in rows:
        table.add_row(
            row["model"],
            row["contender"],
            seconds_text(row["step_s"]),
            f"{row['speed']:.3f}",
            f"{row['gradient_error']:.1e}",
        )
    Console(highlight=False, width=110).print(table)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    parser.add_argument("--json", type=Path, help="write the rows there")
    o = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"

        def work(world: World) -> int:
            rows = measured(o)
            if world.rank == 0:
                path.write_text(json.dumps(rows))
            return 0

        if start(work, ranks=o.ranks, threads=1) != 0:
            sys.exit("a rank failed; stderr says why")
        rows = json.loads(path.read_text())
    show(rows)
    if o.json:
        facts = {"machine": machine_facts("cpu"), "ranks": o.ranks, "tokens": o.tokens}
        o.json.write_text(json.dumps(facts | {"backend": o.backend, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
