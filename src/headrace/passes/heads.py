"""Attention between tensors of heads as models hold them: the call behind all doors."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from headrace.passes.operators import attend

__all__ = ["attention"]

_SAME = 1e-12


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    handle: int,
    *,
    causal: bool,
    window: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of the local tokens over all tokens of the group that share a document.

        q         [b, N, s_r, D]   s_r tokens of every row on this rank
        k         [b, G, s_r, D]   G divides N
        v         [b, G, s_r, E]   E at most D
        window    tokens that a query sees with itself (on either side, where not causal), 0 for all
        scale     of the scores, 1 / sqrt(D) where it is None
        returns   [b, N, s_r, E]

    Under autocast it computes in autocast's type, as torch's attention does. The adjoint is that of
    attention over the whole batch: gradients of keys and values that other ranks used come back
    summed.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    rows, heads, tokens, features = q.shape
    wanted = features**-0.5 if scale is None else scale
    factor = wanted / features**-0.5
    # Compilers take a module's numbers for symbols, which cannot be compared.
    if torch.compiler.is_compiling() or abs(factor - 1) > _SAME:
        q = q * factor
    own = v.shape[-1]
    if own < features:
        v = pad(v, (0, features - own))
    flat = [x.transpose(1, 2).reshape(rows * tokens, x.shape[1], features) for x in (q, k, v)]
    out = attend(*flat, handle, causal, window)[0]
    return out.view(rows, tokens, heads, features)[..., :own].transpose(1, 2)
