"""Train a small Llama of transformers on Python's own sources, on one device.

    python examples/attach_transformers_single.py --steps 20

Prints one JSON line a step. ``attach_transformers.py`` beside it does the same
on many ranks, planned step by step.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 512


def documents() -> Iterator[dict[str, torch.Tensor]]:
    """The bytes of the standard library's modules, each up to the context."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids = torch.tensor(list(file.read_bytes()[: CONTEXT + 1]))
        if len(ids) > 1:
            yield {"input_ids": ids}


def batches(tokens: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """As many documents as the budget holds, one after the other."""
    batch, count = [], 0
    for item in documents():
        if batch and count + len(item["input_ids"]) > tokens:
            yield batch
            batch, count = [], 0
        batch.append(item)
        count += len(item["input_ids"])


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of one length; what is padding is masked and has no loss."""
    ids = [item["input_ids"] for item in batch]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
    }


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT + 1,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
    for step, batch in zip(range(options.steps), batches(4096), strict=False):
        loss = model(**padded(batch)).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step, "loss": loss.item()}))


if __name__ == "__main__":
    main()
