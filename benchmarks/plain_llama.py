"""A Llama as people write it, of torch alone: nothing in it knows of other ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu

__all__ = ["PlainLlama"]

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [b, heads, s, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Block(nn.Module):
    """Attention over ``heads`` of which ``keys`` have keys and values, and a gated feed-forward."""

    def __init__(self, hidden: int, ffn: int, heads: int, keys: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.keys, self.attend = heads, keys, attend
        features = hidden // heads
        self.norm, self.norm2 = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.qkv = nn.Linear(hidden, (heads + 2 * keys) * features, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, tokens, hidden = x.shape
        qkv = self.qkv(rms_norm(x, (hidden,), self.norm)).view(
            rows, tokens, -1, hidden // self.heads
        )
        q, k, v = qkv.transpose(1, 2).split([self.heads, self.keys, self.keys], dim=1)
        y = self.attend(rotated(q, cos, sin), rotated(k, cos, sin), v)
        x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, hidden))
        z = rms_norm(x, (hidden,), self.norm2)
        return x + self.down(silu(self.gate(z)) * self.up(z))


class PlainLlama(nn.Module):
    """Logits and the mean loss of labels that were shifted before. ``run_block`` calls a block."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        ffn: int,
        heads: int,
        keys: int,
        vocabulary: int,
        attend: Attend = causal,
    ) -> None:
        super().__init__()
        self.features = hidden // heads
        self.token = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, ffn, heads, keys, attend) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.run_block: Callable[..., torch.Tensor] = lambda block, *inputs: block(*inputs)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        places = self.places(ids)
        angles = 10_000.0 ** (-torch.arange(0, self.features, 2, device=ids.device) / self.features)
        turned = (places[:, None] * angles).repeat(1, 2)
        cos, sin = turned.cos(), turned.sin()
        x = self.token(ids)
        for block in self.blocks:
            x = self.run_block(block, x, cos, sin)
        logits = self.head(rms_norm(x, (x.shape[-1],), self.norm))
        if labels is None:
            return logits, None
        return logits, cross_entropy(logits.flatten(0, 1), labels.flatten())

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(ids.shape[1], device=ids.device)
