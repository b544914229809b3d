"""A user's loop on one device: headrace's beside the same model's usual ones.

A Llama of transformers is trained on samples of long-tailed lengths, the same steps by each side:

    padded      samples sorted by length, padded to the longest of their micro-batch, torch's
                scaled_dot_product_attention with a mask
    packed      samples packed without padding (first fit, longest first) into the context, torch's
                varlen_attn: the strongest form without another package. With every layer's
                activations kept (a), and computed again (r)
    packed, c   the same with every layer compiled by torch (any number of tokens)
    headrace    hr.attach: packs, and what each of them keeps, follow from measured costs

Losses are sums over a step's tokens on all sides. Tokens a second are of the whole step, its update
included; the first steps, in which kernels are chosen and compiled, are left out. A side that runs
out of memory says so.

Examples:
    python benchmarks/gpu_loop.py                                   # on a GPU
    python benchmarks/gpu_loop.py --context 65536 --json out.json
    python benchmarks/gpu_loop.py --device cpu --layers 1 --hidden 64 --context 256 \\
        --batch-tokens 512 --steps 4                                # to try it
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import AttentionMaskInterface

import headrace as hr
from headrace.native.machine import is_out_of_memory, machine_facts

FIRST = 2
"""Steps that are left out of medians."""
TOLD = (
    "step_s",
    "predicted_s",
    "peak_bytes",
    "predicted_peak_bytes",
    "planning_s",
    "micro_batches",
)
"""What is kept of the metrics of an attached loop."""

Item = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class World:
    """What all sides train, and on what: items of tokens, ``counts`` of them in each step."""

    device: str
    config: LlamaConfig
    items: Sequence[Item]
    context: int
    batch_tokens: int
    steps: int

    def model(self, attention: str = "sdpa") -> Any:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(
                deepcopy(self.config), attn_implementation=attention, dtype=self.dtype
            )
        return model.train()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def drawn(count: int, context: int, vocabulary: int) -> list[Item]:
    """Samples of random tokens, their lengths lognormal: a median of a 20th of the context, a few
    of all of it."""
    rng = np.random.default_rng(0)
    lengths = np.clip(context / 20 * rng.lognormal(sigma=1.4, size=count), 16, context).astype(int)
    return [{"input_ids": torch.from_numpy(rng.integers(3, vocabulary, n))} for n in lengths]


def varlen(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    """Attention of a pack, [1, heads, tokens, features] each, as transformers calls it."""
    starts, longest = more["cu_seq_lens_q"], more["max_length_q"]
    if q.device.type == "cpu":
        parts = starts.diff().tolist()
        outs = [
            torch.nn.functional.scaled_dot_product_attention(
                *some, is_causal=True, enable_gqa=True, scale=more["scaling"]
            )
            for some in zip(*(x.split(parts, 2) for x in (q, k, v)), strict=True)
        ]
        return torch.cat(outs, 2).transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v)) if groups > 1 else (k, v)
    out = varlen_attn(
        q, k, v, starts, starts, longest, longest, scale=more["scaling"], **_causal_argument()
    )
    return out[None], None


def _causal_argument() -> dict[str, Any]:
    """How this torch's varlen_attn is told that attention is causal."""
    from inspect import signature

    from torch.nn.attention.varlen import varlen_attn

    names = signature(varlen_attn).parameters
    return {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}


AttentionInterface.register("varlen", varlen)
AttentionMaskInterface.register("varlen", lambda *args, **more: None)


def padded_rows(items: Sequence[Item], most: int) -> Iterator[list[Item]]:
    """Micro-batches of items of like lengths, padded to at most so many tokens."""
    rows: list[Item] = []
    for item in sorted(items, key=lambda item: len(item["input_ids"])):
        if rows and len(item["input_ids"]) * (len(rows) + 1) > most:
            yield rows
            rows = []
        rows.append(item)
    yield rows


def packs(items: Sequence[Item], most: int) -> list[list[Item]]:
    """Packs of at most so many tokens, by first fit, the longest first."""
    found: list[tuple[int, list[Item]]] = []
    for item in sorted(items, key=lambda item: -len(item["input_ids"])):
        n = len(item["input_ids"])
        at = next((i for i, (used, _) in enumerate(found) if used + n <= most), None)
        if at is None:
            found.append((n, [item]))
        else:
            found[at] = (found[at][0] + n, [*found[at][1], item])
    return [rows for _, rows in found]


def padded_inputs(rows: Sequence[Item], device: str) -> dict[str, Any]:
    """Rows filled up on the right, which have no loss there."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
    given = {
        "input_ids": ids,
        "labels": ids.masked_fill(~mask, -100),
        "attention_mask": mask.long(),
    }
    return {name: x.to(device) for name, x in given.items()}


def packed_inputs(rows: Sequence[Item], device: str) -> dict[str, Any]:
    """A row of samples one after the other; the first token of each is nobody's target."""
    ids = [row["input_ids"] for row in rows]
    lengths = [len(x) for x in ids]
    labels = torch.cat(ids)
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()])
    labels[starts[:-1]] = -100
    given = {
        "input_ids": torch.cat(ids)[None],
        "labels": labels[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": starts.int(),
    }
    return {"max_length_q": max(lengths), **{name: x.to(device) for name, x in given.items()}}


def usual(
    world: World, counts: Sequence[int], *, packed: bool, again: bool, compiled: bool = False
) -> dict[str, Any]:
    """A row of a loop as one writes it."""
    model = world.model("varlen" if packed else "sdpa")
    if again:
        model.gradient_checkpointing_enable(
            {"use_reentrant": False}
        )  # its newer name: transformers 6
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    optimizer, at = world.optimizer(model), 0
    split, inputs = (packs, packed_inputs) if packed else (padded_rows, padded_inputs)
    clock = StepClock(world.device)
    for count in counts:
        items, at = world.items[at : at + count], at + count
        targets = sum(len(item["input_ids"]) - 1 for item in items)
        total = torch.zeros((), device=world.device)
        for rows in split(items, world.context):
            loss = model(
                **inputs(rows, world.device), num_items_in_batch=targets, use_cache=False
            ).loss
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        clock.done(float(total), targets + count)
    return clock.row()


def headraces(world: World, **spread: Any) -> tuple[dict[str, Any], list[int]]:
    """A row of an attached loop, and how many samples each step had."""
    model = world.model()
    with tempfile.TemporaryDirectory() as folder:
        run = hr.attach(
            model,
            world.optimizer(model),
            world.items,
            batch_tokens=world.batch_tokens,
            steps=world.steps,
            samples=hr.SampleOptions(shuffle=False),
            spread=hr.SpreadOptions(**spread),
            measure=hr.MeasureOptions(cache=folder),
            out=Path(folder) / "run",
        )
        clock, counts = StepClock(world.device), list[int]()
        costs = run.found.costs.to_json()
        for step in run:
            for micro in step:
                micro.backward(model(**micro.inputs).loss)
            counts.append(len(step.plan.lengths))
            clock.done(step.loss, step.tokens)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        run.detach()
    told = [row for row in map(json.loads, lines) if "step_s" in row]
    kept = [{name: row.get(name) for name in TOLD} for row in told]
    return {**clock.row(), "told": kept, "costs": costs}, counts


class StepClock:
    """Seconds, tokens, losses and the peak of bytes of a loop's steps."""

    def __init__(self, device: str) -> None:
        self.device, self.steps = device, list[tuple[float, int, float]]()
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()

    def done(self, loss: float, tokens: int) -> None:
        """A step has ended."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.steps.append((now - self.start, tokens, loss))
        self.start = now

    def row(self) -> dict[str, Any]:
        counted = self.steps[FIRST:]
        rates = [tokens / seconds for seconds, tokens, _ in counted]
        peak = 0 if self.device == "cpu" else torch.cuda.max_memory_allocated()
        return {
            "tokens_per_s": sum(t for _, t, _ in counted) / sum(s for s, _, _ in counted),
            "rates": rates,
            "spread": (max(rates) - min(rates)) / median(rates),
            "peak_bytes": peak,
            "seconds": [seconds for seconds, _, _ in self.steps],
            "losses": [loss for _, _, loss in self.steps],
        }


def attempted(run: Callable[[], dict[str, Any]], device: str) -> dict[str, Any]:
    """The row of a side, or that it ran out of memory; nothing of it stays."""
    try:
        row = run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        row = {"out_of_memory": str(error).partition("\n")[0]}
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return row


def sides(
    world: World, *, compiled: bool, done: Callable[[dict[str, Any]], object]
) -> dict[str, dict[str, Any]]:
    """The rows of all sides, of which ``done`` is told as each ends. headrace comes first: the
    others train the steps that it drew."""
    found, device = dict[str, dict[str, Any]](), world.device
    counts = list[int]()

    def first() -> dict[str, Any]:
        nonlocal counts
        row, counts = headraces(world)
        return row

    def tell(name: str, run: Callable[[], dict[str, Any]]) -> None:
        print(name, end=" ", file=sys.stderr, flush=True)
        found[name] = attempted(run, device)
        rate = found[name].get("tokens_per_s")
        print("out of memory" if rate is None else f"{rate:,.0f}", file=sys.stderr, flush=True)
        done(found)

    tell("headrace", first)
    tell("headrace, no logits", lambda: headraces(world, logits=False)[0])
    tell("packed, a", lambda: usual(world, counts, packed=True, again=False))
    tell("packed, r", lambda: usual(world, counts, packed=True, again=True))
    tell("padded, a", lambda: usual(world, counts, packed=False, again=False))
    tell("padded, r", lambda: usual(world, counts, packed=False, again=True))
    if compiled:
        tell("packed, a, c", lambda: usual(world, counts, packed=True, again=False, compiled=True))
        tell("packed, r, c", lambda: usual(world, counts, packed=True, again=True, compiled=True))
    return found


def table(found: dict[str, dict[str, Any]]) -> Table:
    made = Table("side", "tokens/s", "headrace's / this", "spread", "peak GB", "last loss")
    own = found["headrace"].get("tokens_per_s", float("nan"))
    for name, row in found.items():
        if "out_of_memory" in row:
            made.add_row(name, "out of memory", "", "", "", "")
            continue
        made.add_row(
            name,
            f"{row['tokens_per_s']:,.0f}",
            f"{own / row['tokens_per_s']:.2f}",
            f"{row['spread']:.1%}",
            f"{row['peak_bytes'] / 1e9:.1f}",
            f"{row['losses'][-1]:.4f}",
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--context", type=int, default=32_768, help="tokens of the longest sample")
    parser.add_argument("--batch-tokens", type=int, default=131_072, help="of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--compiled", action="store_true", help="run the compiled sides, too")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    o = parser.parse_args(arguments)
    if o.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here: --device cpu tries the script")
    warnings.filterwarnings("ignore", category=UserWarning)
    config = LlamaConfig(
        vocab_size=o.vocabulary,
        hidden_size=o.hidden,
        intermediate_size=4 * o.hidden,
        num_hidden_layers=o.layers,
        num_attention_heads=max(o.hidden // 128, 2),
        num_key_value_heads=max(o.hidden // 256, 1),
        max_position_embeddings=o.context,
    )
    world = World(
        device=o.device,
        config=config,
        items=drawn(20 * o.steps * o.batch_tokens // o.context, o.context, o.vocabulary),
        context=o.context,
        batch_tokens=o.batch_tokens,
        steps=o.steps,
    )
    facts = machine_facts(o.device)
    given = {name: value for name, value in vars(o).items() if name != "json"}

    def done(found: dict[str, Any]) -> None:
        if o.json:
            o.json.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"machine": facts, "given": given, "sides": found}, indent=1)
            o.json.write_text(text + "\n")

    found = sides(world, compiled=o.compiled, done=done)
    print(f"{facts['device']}, {facts['host_cpu']}, torch {facts['torch']}")
    Console(width=None if sys.stdout.isatty() else 120).print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
