"""Bytes that the two branches of a Llama's layer keep, each traced apart with fake tensors.

A branch is its norm, its products, its attention or activation, and its residual sum; its input
counts as kept. Contenders:

    none        eager, nothing computed again
    torch       the partition that torch.compile makes by itself
    headrace    hr.recomputed: the input, and what attention keeps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from autosp_memory import partitioned, without_values
from plain_llama import Block, causal, rotated
from torch._functorch import partitioners
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import rms_norm, silu

import headrace as hr
from headrace.native.counted import ByteCounter

__all__ = ["Kept", "kept_bytes"]


class AttentionBranch(Block):
    """A layer without its feed-forward."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, tokens, hidden = x.shape
        qkv = self.qkv(rms_norm(x, (hidden,), self.norm)).view(
            rows, tokens, -1, hidden // self.heads
        )
        q, k, v = qkv.transpose(1, 2).split([self.heads, self.keys, self.keys], dim=1)
        y = self.attend(rotated(q, cos, sin), rotated(k, cos, sin), v)
        return x + self.out(y.transpose(1, 2).reshape(rows, tokens, hidden))


class FeedForwardBranch(Block):
    """A layer without its attention."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        z = rms_norm(x, (x.shape[-1],), self.norm2)
        return x + self.down(silu(self.gate(z)) * self.up(z))


BRANCHES: dict[str, type[Block]] = {"attention": AttentionBranch, "MLP": FeedForwardBranch}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes of a token that a branch keeps, by contender, and those of its input."""

    none: float
    torch: float
    headrace: float
    input: float


def kept_bytes(branch: str, shape: tuple[int, int, int, int], tokens: int) -> Kept:
    """What a branch keeps, in bfloat16.

    Args:
        branch: ``attention`` or ``MLP``.
        shape: Features, those of the feed-forward, heads, and heads of keys and values.
        tokens: Tokens of the sequence; bytes are linear in them.

    Returns:
        Bytes of a token.
    """
    hidden, ffn, heads, keys = shape
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = BRANCHES[branch](hidden, ffn, heads, keys, causal)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            without_values(module, fake)
            angles = [torch.zeros(tokens, hidden // heads) for _ in range(2)]
            eager = _eager_bytes(module, hidden, tokens, angles)
            again = _eager_bytes(
                lambda *inputs: hr.recomputed(module, *inputs), hidden, tokens, angles
            )
        compiled = _compiled_bytes(branch, shape, tokens)
    finally:
        torch.set_default_dtype(before)
    one = 2.0 * hidden
    return Kept(
        none=eager / tokens, torch=compiled / tokens + one, headrace=again / tokens, input=one
    )


def _eager_bytes(
    call: Callable[..., torch.Tensor], hidden: int, tokens: int, angles: list[torch.Tensor]
) -> int:
    """Bytes alive after the forward without those of its result."""
    leaf = torch.zeros(1, tokens, hidden, requires_grad=True)
    with ByteCounter() as counter:
        x = leaf * 1
        result = call(x, *angles)
        del x
        return counter.look()[0] - result.nbytes


def _compiled_bytes(branch: str, shape: tuple[int, int, int, int], tokens: int) -> int:
    """Bytes that torch's partition keeps, inputs aside."""
    hidden, _, heads, _ = shape
    module: Any = BRANCHES[branch](*shape, causal)
    inputs = (
        torch.empty(1, tokens, hidden, requires_grad=True),
        *(torch.empty(tokens, hidden // heads) for _ in range(2)),
    )
    return partitioned(module, inputs, partitioners.min_cut_rematerialization_partition).kept
