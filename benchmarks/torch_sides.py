"""torch's own ways to spread a layer: one plain block, and what torch makes of it on several ranks.

    one process     the block as it stands
    tensor          DTensor tensor parallelism with sequence parallelism
    context         torch's context parallelism, replicated weights or FSDP2
    tensor x context  both on a mesh of two axes

The block is what its user would write: one fused projection, torch's attention, the weights of
headrace's layers in torch's layout.
"""

# ruff: noqa: SLF001  torch's context parallelism has no public door for the operator of a CPU

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo  # before ranks are forked: each would import it at its first DTensor
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import _attention, context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from headrace.ops.rotary import rotary_tables
from headrace.spec import Architecture

__all__ = ["Model", "context_on", "gradients", "sharded", "tensor_parallel"]

try:  # torch 2.10 and later
    from torch.distributed.tensor.experimental._context_parallel import _attention as _ring
except ImportError:
    _ring = _attention

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_TURNED = ("proj.weight", "out.weight")  # stored by input features here, by output ones in torch


class Attention(nn.Module):
    """Causal self-attention; per KV group its queries, its key, its value."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        rows = (a.heads + 2 * a.kv_heads) * a.head_features
        self.qkv = nn.Linear(a.hidden, rows, bias=a.biased)
        self.proj = nn.Linear(a.hidden, a.hidden, bias=a.biased)

    def forward(self, x: torch.Tensor, tables: Any) -> torch.Tensor:
        m, d = self.a.group_heads, self.a.head_features
        y = self.qkv(x).unflatten(-1, (-1, m + 2, d))
        q = y[..., :m, :].flatten(2, 3).transpose(1, 2)
        k, v = (y[..., m + i, :].transpose(1, 2) for i in (0, 1))
        if tables is not None:
            q, k = _rotated(q, *tables), _rotated(k, *tables)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=m > 1)
        return self.proj(out.transpose(1, 2).flatten(2, 3))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class FeedForward(nn.Module):
    """GELU, or SwiGLU with gate and up interleaved in blocks."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.into = nn.Linear(a.hidden, a.ffn * (2 if a.gated else 1), bias=a.biased)
        self.out = nn.Linear(a.ffn, a.hidden, bias=a.biased)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.into(x)
        if self.a.gated:
            gate, up = y.unflatten(-1, (-1, 2, self.a.ffn_block)).unbind(-2)
            return self.out((F.silu(gate) * up).flatten(-2))
        return self.out(F.gelu(y, approximate=self.a.gelu))


class Block(nn.Module):
    """One layer: x [1, t, h] to [1, t, h]."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        norm = nn.LayerNorm if a.biased else nn.RMSNorm
        self.norm1, self.norm2 = (norm(a.hidden, eps=a.norm_eps) for _ in range(2))
        self.attention, self.feed_forward = Attention(a), FeedForward(a)

    def forward(self, x: torch.Tensor, tables: Any) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), tables)
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    """The layers of an architecture: x [1, t, h] to [1, t, h]; rotary kinds take all ``tokens``."""

    def __init__(self, a: Architecture, weights: Mapping[str, torch.Tensor], tokens: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.tables = (
            None
            if a.biased
            else rotary_tables(torch.arange(tokens), a.head_features, a.rope_theta, torch.float32)
        )
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(_turned(_ours(name), weights[_ours(name)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.tables)
        return x


def _ours(name: str) -> str:
    """headrace's name of a parameter."""
    short = name.replace("attention.", "").replace("feed_forward.", "")
    return short.replace(".into.", ".in.")


def _turned(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.t() if name.endswith(_TURNED) else x


def gradients(model: nn.Module, scale: float) -> dict[str, torch.Tensor]:
    """The whole gradients of all weights by headrace's names; collective for DTensors."""
    # It would warn that a mesh of two axes is gathered one after the other, which is wanted.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found[_ours(name)] = _turned(_ours(name), whole) * scale
    return found


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    """DTensor tensor parallelism, activations between the products spread over the tokens."""
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for layer in model.layers:
        plan = {
            "norm1": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "attention.qkv": ColwiseParallel(),
            "attention.proj": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**gathered),
            "feed_forward.into": ColwiseParallel(),
            "feed_forward.out": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)


def sharded(model: Model, mesh: DeviceMesh) -> None:
    """FSDP2 with its defaults: each layer gathered when it runs, again in the backward."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def context_on(mesh: DeviceMesh, rotate: str) -> Iterator[None]:
    """torch's context parallelism, switched on: forward and backward must run inside."""
    _attention.set_rotate_method(rotate)
    _ring.custom_ops.update({_flash: _handler(_forward), _flash_backward: _handler(_backward)})
    something = torch.empty(1, 2 * mesh.size())  # it wants a buffer to cut
    with context_parallel(
        mesh, buffers=[something], buffer_seq_dims=[1], no_restore_buffers={something}
    ):
        yield


def _handler(local: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., Any]:
    """What DTensor is told to do with an attention operator: torch's own ring on local parts.

    torch registers CUDA's operators only, and fails on a CPU (pytorch#147793).
    """

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = next(x.device_mesh for x in args if isinstance(x, DTensor))
        parts = [x._local_tensor if isinstance(x, DTensor) else x for x in args]
        results = local(mesh.get_group(), *parts, **kwargs)
        return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)

    return handle


def _forward(
    group: dist.ProcessGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    return _ring._templated_ring_attention(
        group, 2, _flash, q, k, v, is_causal=causal, dropout_p=dropout, **rest
    )


def _backward(
    group: dist.ProcessGroup,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dropout: float,
    causal: bool,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    return _ring._templated_ring_attention_backward(
        group,
        2,
        _local_backward,
        grad,
        "grad_out",
        q,
        k,
        v,
        out,
        lse,
        causal,
        dropout_p=dropout,
        **rest,
    )


def _local_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    grad_out: torch.Tensor,
    dropout_p: float,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    """The CPU's operator by the names that torch's ring calls it with."""
    return _flash_backward(
        grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, **rest
    )
