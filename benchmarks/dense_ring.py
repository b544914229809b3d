"""Ring attention over time on whole rows of frames: the strong form for the benchmarks of DSP.

Every clip has the same frames, so nothing is masked and each step of the ring is one kernel.
Queries stay; keys and values go round, the next ones on their way while some are used, and in the
backward once more, followed by their gradients in the type of the activations:

    O = sum_r exp(L_r - L) O_r,  L = log sum_r exp(L_r)      over the frames of rank r
    sends   2 M (N - 1) / N forward, 4 M (N - 1) / N backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from headrace.comm.collectives import Arriving, issue_shift

__all__ = ["ring_attention"]

# Kernels that a CPU has and that run on tensors without contents, too.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001


def ring_attention(
    qkv: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Attention over all frames: [b, t_r, s, n, 3, d] to [b, t_r, s, n, d], ``sizes[r]`` is t_r."""
    return _Ring.apply(qkv, tuple(sizes), group)  # type: ignore[no-any-return]


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[t, b, s, n, d] as [b s, n, t, d]."""
    return x.permute(1, 2, 3, 0, 4).flatten(0, 1)


def _frames(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[b s, n, t, d] as [t, b, s, n, d], of as many b and s as ``like`` [t, b, s, n, d] has."""
    return x.unflatten(0, like.shape[1:3]).permute(3, 0, 1, 2, 4)


class _Ring(torch.autograd.Function):
    """Autograd of :func:`ring_attention`."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, sizes: tuple[int, ...], group: Any) -> torch.Tensor:
        q, *kv = qkv.transpose(0, 1).unbind(-2)
        own = torch.stack(kv, dim=1)  # [t, 2, b, s, n, d]
        rows, out, lse = _heads(q), None, None
        for _, passing in _passed(own, sizes, group):
            if not len(passing) or not len(q):
                continue
            part, part_lse = _forward(rows, *map(_heads, passing.unbind(1)))
            if out is None or lse is None:
                out, lse = part, part_lse
                continue
            both = torch.logaddexp(lse, part_lse)
            out = _weighted(out, lse - both) + _weighted(part, part_lse - both)
            lse = both
        if out is None:
            out = torch.zeros_like(rows)
        ctx.save_for_backward(q, own, out, lse)
        ctx.rest = (sizes, group)
        return _frames(out, q).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The keys' and values' gradients begin at the rank after theirs, and end there."""
        q, own, out, lse = ctx.saved_tensors
        sizes, group = ctx.rest
        rows, d_out = _heads(q), _heads(grad.transpose(0, 1))
        dq, before = torch.zeros_like(rows), Arriving.there(own[:0])
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        mine = torch.zeros_like(own)
        for step, passing in _passed(own, sizes, group):
            dkv = torch.zeros_like(passing)
            if len(passing) and len(q):
                keys, values = map(_heads, passing.unbind(1))
                parts = _backward(d_out, rows, keys, values, out, lse, 0.0, False)
                dq += parts[0]
                dkv = torch.stack([_frames(part, q) for part in parts[1:]], dim=1)
            if step == 0:
                mine = dkv
                continue
            arrived = before.wait()
            total = dkv if step == 1 else arrived + dkv
            before = issue_shift(total, sizes[(rank - step - 1) % ranks], group)
        if ranks > 1:
            mine = mine + before.wait()
        dqkv = torch.stack([_frames(dq, q), *mine.unbind(1)], dim=-2)
        return dqkv.transpose(0, 1), None, None


def _weighted(x: torch.Tensor, log_weight: torch.Tensor) -> torch.Tensor:
    return x * log_weight.exp()[..., None].to(x.dtype)


def _passed(
    own: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> Iterator[tuple[int, torch.Tensor]]:
    """(step, the frames of the rank that many before), the next ones on their way meanwhile."""
    ranks, rank, passing = dist.get_world_size(group), dist.get_rank(group), own
    for step in range(ranks):
        last = step + 1 == ranks
        coming = None if last else issue_shift(passing, sizes[(rank - step - 1) % ranks], group)
        yield step, passing
        if coming is not None:
            passing = coming.wait()
