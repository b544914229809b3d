"""The head and its loss in one pass, a chunk of tokens at a time."""

from __future__ import annotations

import torch

from headrace.ops.cross_entropy import label_terms, logits_gradient, logits_of
from headrace.ops.fused import widened
from headrace.ops.linear import WeightSource
from headrace.ops.products import add_wide_product
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS

__all__ = ["IGNORED", "head_loss"]

IGNORED = -100
"""Label of a token without a loss, as any negative one."""


def head_loss(
    x: torch.Tensor,
    labels: torch.Tensor,
    weight: WeightSource,
    scale: float,
    chunk: int = HEAD_CHUNK_TOKENS,
    bias: WeightSource | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    ``scale`` is multiplied in fp32; ``dz`` is rounded to the type of x once.
    """
    matrix = weight.rows()
    offset = None if bias is None else widened(bias.rows())
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    dx = torch.empty_like(x)
    gradient = weight.sums()
    sums = gradient.new_zeros(len(matrix))
    for start in range(0, x.shape[0], chunk):
        part = x[start : start + chunk]
        target = labels[start : start + chunk]
        logits = logits_of(part, matrix, offset)
        normal, picked = label_terms(logits, target)
        kept = (target >= 0).to(normal.dtype)
        loss += ((normal - picked) * kept).double().sum()
        dlogits = logits_gradient(logits, target, normal, kept * scale)
        del logits
        if bias is not None:
            sums += dlogits.sum(0)
        dlogits = dlogits.to(x.dtype)
        torch.mm(dlogits, matrix, out=dx[start : start + chunk])
        add_wide_product(gradient, dlogits, part)
        del dlogits  # before the next chunk has its own
    weight.add(gradient)
    if bias is not None:
        bias.add(sums)
    return loss * scale, dx
