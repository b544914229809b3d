"""Training by intervals of lengths beside training in random order (Hydraulis, Figure 6).

The paper sorts its samples into three intervals (below 4K, 4K to 16K, 16K to 32K), trains on them
one by one, and gets a perplexity on held-out samples twice that of random order (13B, 250M tokens
of GitHub). Here a small Llama trains on the .py files of Python's standard library, once in random
order and once by intervals in the same proportions of its context (an eighth, a half, the whole),
each sample once, from the same weights, in batches of the same tokens. Held-out samples are drawn
at random, and are the same for both.

What headrace plans is the random order: no plan changes which samples a step has.

examples:
    python benchmarks/length_order.py
    python benchmarks/length_order.py --tokens 50000
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.data.files import find_files
from headrace.data.source import Source
from headrace.data.tokens import make_tokenizer
from headrace.models.plain import plain_loss, whole_weights
from headrace.native.machine import machine_facts
from headrace.spec import Architecture

__all__ = ["Samples", "by_intervals", "in_batches", "perplexities", "samples_of"]

TOKENIZER = Path(__file__).parents[1] / "examples" / "tokenizers" / "python-4096.json"
ENDS = (1 / 8, 1 / 2, 1)
"""Upper ends of the intervals, as shares of the context: 4K, 16K and 32K of 32K."""

_RATE = 3e-3
_WARMUP = 10  # steps
_FILE_BYTES = 200_000  # longer files are data more than code, and take the tokenizer minutes

Order = list[NDArray[np.int64]]
"""Samples in the order in which they are trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Token ids of each sample, in random order."""

    train: Order
    held_out: Order


def samples_of(tokens: int, held_out: int, context: int, seed: int) -> Samples:
    """Files of the standard library in random order, truncated to the context, until they have so
    many tokens; then those that are held out."""
    tokenizer = make_tokenizer(str(TOKENIZER))
    source = Source(kind="text", paths=("python:stdlib",))
    files = [one.path for one in find_files(source).files]
    files = [path for path in files if 0 < path.stat().st_size <= _FILE_BYTES]
    parts: tuple[Order, Order] = ([], [])
    wanted, at = (tokens, held_out), 0
    for index in np.random.default_rng(seed).permutation(len(files)):
        text = files[index].read_text(encoding="utf-8", errors="ignore")
        ids = tokenizer.encode_batch([text])[0][:context].astype(np.int64)
        if len(ids) < 2:
            continue
        parts[at].append(ids)
        if sum(map(len, parts[at])) >= wanted[at]:
            at += 1
        if at == len(parts):
            break
    return Samples(train=parts[0], held_out=parts[1])


def by_intervals(samples: Sequence[NDArray[np.int64]], context: int) -> Order:
    """Samples of the shortest interval first, within one in the order that they have."""
    ends = [share * context for share in ENDS]
    return sorted(samples, key=lambda ids: next(i for i, end in enumerate(ends) if len(ids) <= end))


def in_batches(samples: Sequence[NDArray[np.int64]], batch_tokens: int) -> list[Order]:
    """Samples in their order, in batches of at most so many tokens, or of one longer sample."""
    batches, held = list[Order](), batch_tokens + 1
    for ids in samples:
        if held + len(ids) > batch_tokens:
            batches.append([])
            held = 0
        batches[-1].append(ids)
        held += len(ids)
    return batches


def loss_of(
    batch: Sequence[NDArray[np.int64]], weights: dict[str, torch.Tensor], model: Architecture
) -> tuple[torch.Tensor, int]:
    """Mean loss of the tokens that are predicted, and their number."""
    ids = torch.from_numpy(np.concatenate(batch))
    labels = torch.from_numpy(np.concatenate([np.append(own[1:], -100) for own in batch]))
    count = sum(len(own) - 1 for own in batch)
    return plain_loss(ids, labels, [len(own) for own in batch], weights, model, count), count


def trained(batches: Sequence[Order], model: Architecture, seed: int) -> dict[str, torch.Tensor]:
    """Weights after one step for each batch."""
    weights = whole_weights(model, seed, torch.float32)
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights.values(), lr=_RATE, betas=(0.9, 0.95))
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = _RATE * min(1.0, (step + 1) / _WARMUP)
        loss, _ = loss_of(batch, weights, model)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
    return weights


def perplexities(
    tokens: int = 200_000,
    *,
    context: int = 1024,
    batch_tokens: int = 2048,
    hidden: int = 64,
    layers: int = 2,
    seed: int = 0,
) -> dict[str, float]:
    """Perplexity on held-out samples after training in each order."""
    model = Architecture(
        layers=layers, hidden=hidden, heads=4, kv_heads=4, ffn=3 * hidden, vocabulary=4096
    )
    samples = samples_of(tokens, max(tokens // 10, context), context, seed)
    orders = {"random": samples.train, "by intervals": by_intervals(samples.train, context)}
    found = dict[str, float]()
    for name, order in orders.items():
        weights = trained(in_batches(order, batch_tokens), model, seed)
        with torch.no_grad():
            parts = [loss_of(batch, weights, model) for batch in in_batches(samples.held_out, 8192)]
        total = sum(count for _, count in parts)
        found[name] = math.exp(sum(float(loss) * count for loss, count in parts) / total)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=200_000, help="of training (200,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    o = parser.parse_args(arguments)
    found = perplexities(o.tokens, seed=o.seed)
    for name, value in found.items():
        print(f"{name}: perplexity {value:.1f}")
    print(f"by intervals over random: {found['by intervals'] / found['random']:.2f}")
    if o.json:
        written = {"machine": machine_facts("cpu"), "tokens": o.tokens, "perplexity": found}
        o.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
