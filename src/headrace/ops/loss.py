"""The head and its loss in one pass, a chunk of tokens at a time."""

from __future__ import annotations

import torch

from headrace.ops.linear import WeightSource
from headrace.ops.products import add_wide_product

__all__ = ["IGNORED", "head_loss"]

IGNORED = -100
"""Label of a token without a loss."""


def head_loss(
    x: torch.Tensor, labels: torch.Tensor, weight: WeightSource, scale: float, chunk: int = 2048,
    bias: WeightSource | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Cross-entropy of the labels, and its gradient, without whole logits.

        x        [T, h]       after the last norm
        labels   [T]          int64; IGNORED carries no loss
        weight   [V, h], bias [V]
        returns  loss [] = scale sum_t (logsumexp_v(z_t) - z_t[label_t]), z = x W^T + b, in fp64
                 dx   [T, h] = dz W, dz = scale (softmax - onehot)
        and      dW += dz^T x;  db += sum_T dz

    ``scale`` is 1 / (tokens with a loss in the whole batch), so the losses of all ranks and
    micro-batches add up to the batch's mean. The gradient is taken in the same pass because the
    loss is the end of the model: ``chunk`` tokens of logits are alive at a time and none are kept.
    """  # fmt: skip
    matrix = weight.rows()
    offset = None if bias is None else bias.rows().to(_wide(x.dtype))
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    dx = torch.empty_like(x)
    whole = torch.zeros_like(matrix, dtype=_wide(x.dtype))
    sums = whole.new_zeros(len(matrix))
    for start in range(0, x.shape[0], chunk):
        part = x[start : start + chunk]
        target = labels[start : start + chunk]
        kept = target != IGNORED
        logits = (part @ matrix.t()).to(_wide(x.dtype))
        if offset is not None:
            logits += offset
        normal = logits.logsumexp(-1)
        picked = logits.gather(1, target.clamp_min(0)[:, None]).squeeze(1)
        loss += ((normal - picked) * kept).double().sum()
        logits.sub_(normal[:, None]).exp_()
        place = target.clamp_min(0)[:, None]
        logits.scatter_(1, place, logits.gather(1, place) - 1.0)
        logits.mul_(kept.to(logits.dtype)[:, None] * scale)
        if bias is not None:
            sums += logits.sum(0)
        dlogits = logits.to(x.dtype)
        torch.mm(dlogits, matrix, out=dx[start : start + chunk])
        add_wide_product(whole, dlogits, part)
    weight.add(whole)
    if bias is not None:
        bias.add(sums)
    return loss * scale, dx


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
