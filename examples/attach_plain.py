"""Train a small GPT of one's own on Python's own sources, planned step by step.

    torchrun --nproc-per-node 2 examples/attach_plain.py --steps 20

Prints one JSON line a step. ``attach_plain_single.py`` beside it does the same
on one device, without headrace.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import gelu, scaled_dot_product_attention

import headrace as hr

CONTEXT = 512


def documents() -> Iterator[dict[str, torch.Tensor]]:
    """The bytes of the standard library's modules, each up to the context."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids = torch.tensor(list(file.read_bytes()[: CONTEXT + 1]))
        if len(ids) > 1:
            yield {"ids": ids[:-1], "labels": ids[1:]}


class Block(torch.nn.Module):
    """Attention and a feed-forward."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = torch.nn.LayerNorm(features), torch.nn.LayerNorm(features)
        self.qkv = torch.nn.Linear(features, 3 * features)
        self.out = torch.nn.Linear(features, features)
        self.up = torch.nn.Linear(features, 4 * features)
        self.down = torch.nn.Linear(4 * features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer over x [b, s, features]."""
        b, s, features = x.shape
        qkv = self.qkv(self.norm(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, features))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Gpt(torch.nn.Module):
    """A GPT of bytes."""

    def __init__(self, features: int = 128, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(256, features)
        self.place = torch.nn.Embedding(CONTEXT, features)
        self.blocks = torch.nn.ModuleList(Block(features, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(features)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [b, s, 256] of ids [b, s]."""
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.t()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = list(documents())
    run = hr.attach(
        model,
        optimizer,
        data,
        batch_tokens=4096,
        steps=options.steps,
        samples=hr.SampleOptions(shuffle=False),
    )
    for step in run:
        for micro in step:
            logits = model(**micro.inputs)
            micro.backward(micro.loss(logits))
        if run.rank == 0:
            print(json.dumps({"step": step.number, "loss": step.loss}))


if __name__ == "__main__":
    main()
