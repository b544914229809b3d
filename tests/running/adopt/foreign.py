"""Models that nobody here wrote, in the manner of those that people write."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint

VOCABULARY = 61


class Attention(nn.Module):
    """``heads`` of 8 features, ``keys`` of them for keys and values."""

    def __init__(self, heads: int, keys: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.keys, self.causal = heads, keys, causal
        self.qkv = nn.Linear(heads * 8, (heads + 2 * keys) * 8)
        self.out = nn.Linear(heads * 8, heads * 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        parts = self.qkv(x).view(rows, tokens, -1, 8).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.keys, self.keys], dim=1)
        y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).reshape(rows, tokens, -1))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return f.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.keys
        )


class MaskedAttention(Attention):
    """With a mask tensor."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return f.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class OwnAttention(Attention):
    """Without torch's function."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(2, 3) / 8**0.5
        return scores.softmax(-1) @ v


class DroppingAttention(Attention):
    """With dropout of its weights."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return f.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


class Shifting(nn.Module):
    """A causal convolution over tokens."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(features, features, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(f.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class Centred(nn.Module):
    """Without the mean over all tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=1, keepdim=True)


class BatchNormed(nn.Module):
    """Normed over tokens."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """Attention, perhaps something else, and a feed-forward."""

    def __init__(self, attention: nn.Module, other: nn.Module | None, features: int) -> None:
        super().__init__()
        self.attention, self.other = attention, other
        self.norm, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.mlp = nn.Sequential(nn.Linear(features, 48), nn.GELU(), nn.Linear(48, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        if self.other is not None:
            x = x + self.other(x)
        return x + self.mlp(self.norm2(x))


class ModuleAttention(nn.Module):
    """Torch's own module, told to be causal."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(features, features // 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def _counted(tokens: int) -> torch.Tensor:
    """0, 1, 2, ..."""
    return torch.arange(start=0, end=tokens, dtype=torch.float32).long()


class Gpt(nn.Module):
    """A model as in tutorials: places counted by itself (``counted`` or ``sliced`` from a table),
    logits and the mean loss of labels that were shifted before (or, ``shifts``, are here)."""

    def __init__(
        self,
        blocks: list[Any],
        *,
        places: str = "counted",
        checkpointed: bool = False,
        shifts: bool = False,
    ) -> None:
        super().__init__()
        features = blocks[0].norm.normalized_shape[0]
        self.token = nn.Embedding(VOCABULARY, features)
        self.place = nn.Embedding(128, features)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(features)
        self.places, self.checkpointed, self.shifts = places, checkpointed, shifts

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = ids.shape[1]
        if self.places == "counted":
            where = self.place(torch.arange(tokens, device=ids.device))
        elif self.places == "by hand":
            where = self.place(_counted(tokens)[None])
        else:
            where = self.place.weight[:tokens]
        x = self.token(ids) + where
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.norm(x) @ self.token.weight.t()
        if labels is None:
            return logits, None
        if self.shifts:
            return logits, f.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return logits, f.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt(
    heads: int = 4,
    keys: int = 4,
    *,
    kind: type[Attention] = Attention,
    other: type[nn.Module] | None = None,
    causal: bool = True,
    layers: int = 2,
    attends: str = "",
    **options: object,
) -> Gpt:
    """Blocks in fp64."""
    torch.manual_seed(0)
    made: Any = partial(kind, heads, keys, causal=causal)
    if attends == "module":
        made = partial(ModuleAttention, heads * 8)
    features = () if other is Centred else (heads * 8,)
    blocks = [Block(made(), other(*features) if other else None, heads * 8) for _ in range(layers)]
    return Gpt(blocks, **options).double()  # type: ignore[arg-type]


def drawn(rows: int, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens, and shifted labels of which half have no loss, with all of the first third."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, tokens + 1), generator=draw)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=draw) < 0.5] = -100
    labels[:, : tokens // 3] = -100
    labels[:, -1] = ids[:, -1]
    return {"ids": ids[:, :-1], "labels": labels}
