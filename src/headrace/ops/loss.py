"""The head and its loss in one pass, a chunk of tokens at a time.

Shape legend: T or t tokens, h features, V words of the vocabulary.
"""

from __future__ import annotations

import torch

from headrace.ops.fused import fused, widened
from headrace.ops.linear import WeightSource, add_wide_product
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS

__all__ = [
    "IGNORED",
    "head_loss",
    "label_terms",
    "logits_gradient",
    "logits_of",
]


def logits_of(x: torch.Tensor, matrix: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    """The logits x W^T + b [T, V] of x [T, h], ``matrix`` W [V, h] and ``offset`` b [V]: in at
    least fp32 on a CPU and with an offset, else of the type of x."""
    logits = x @ matrix.t()
    if offset is None:
        return widened(logits) if x.device.type == "cpu" else logits
    return widened(logits).add_(offset)


def label_terms(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two terms of each token's cross-entropy, normal - picked, in at least fp32.

    logits   [T, V]   z; V may be 0
    labels   [T]      int64; negative for none
    returns  normal [T] = logsumexp_v(z_t)
             picked [T] = z_t[label_t], 0 for a token without a label
    """
    if not logits.shape[1]:
        none = widened(logits).new_zeros(len(logits))
        return none - torch.inf, none
    return _cross_entropy(logits, labels)  # type: ignore[no-any-return]


def logits_gradient(
    logits: torch.Tensor, labels: torch.Tensor, normal: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """dz = (exp(z - n) - onehot) f [T, V], in the type of ``logits``, which may be written over.

    ``normal`` n [T] is each token's log-sum-exp and ``factor`` f [T] the gradient of its loss, both
    in at least fp32; ``logits`` z and ``labels`` are as for :func:`label_terms`.
    """
    return _cross_entropy_backward(logits, labels, normal, factor)  # type: ignore[no-any-return]


@fused("cross_entropy(Tensor logits, Tensor labels) -> (Tensor, Tensor)", kernels=3)
def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-sum-exp [t], logit of the label [t], 0 where there is no label) of each row of logits
    [t, V]."""
    wide = widened(logits)
    picked = wide.gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    return wide.logsumexp(1), picked.masked_fill(labels < 0, 0.0)


def _plain_logits_gradient(
    logits: torch.Tensor, labels: torch.Tensor, normal: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """The gradient of the logits [t, V], written over them: (softmax - onehot(label)) factor, where
    softmax is exp(logits - ``normal``), ``normal`` [t] the log-sum-exp, and ``factor`` is [t]."""
    softmax = widened(logits).sub_(normal[:, None]).exp_()
    if softmax.shape[1]:
        has_label = (labels >= 0).to(softmax.dtype)[:, None]
        softmax.scatter_add_(1, labels.clamp_min(0)[:, None], -has_label)
    return softmax.mul_(factor[:, None]).to(logits.dtype)


@fused(
    "cross_entropy_backward(Tensor logits, Tensor labels, Tensor normal, Tensor factor) -> Tensor",
    plain=_plain_logits_gradient,
)
def _cross_entropy_backward(
    logits: torch.Tensor, labels: torch.Tensor, normal: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """As :func:`_plain_logits_gradient`, without writes in place, so that it can be compiled."""
    words = torch.arange(logits.shape[1], device=logits.device)
    softmax = (widened(logits) - normal[:, None]).exp()
    dz = (softmax - (words == labels[:, None]).to(softmax.dtype)) * factor[:, None]
    return dz.to(logits.dtype)


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
    bias_row = None if bias is None else widened(bias.rows())
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    dx = torch.empty_like(x)
    weight_grad = weight.sums()
    bias_grad = weight_grad.new_zeros(len(matrix))
    for start in range(0, x.shape[0], chunk):
        rows = x[start : start + chunk]
        target = labels[start : start + chunk]
        logits = logits_of(rows, matrix, bias_row)
        normal, picked = label_terms(logits, target)
        has_label = (target >= 0).to(normal.dtype)
        loss += ((normal - picked) * has_label).double().sum()
        dlogits = logits_gradient(logits, target, normal, has_label * scale)
        del logits
        if bias is not None:
            bias_grad += dlogits.sum(0)
        dlogits = dlogits.to(x.dtype)
        torch.mm(dlogits, matrix, out=dx[start : start + chunk])
        add_wide_product(weight_grad, dlogits, rows)
        del dlogits  # before those of the next chunk are allocated
    weight.add(weight_grad)
    if bias is not None:
        bias.add(bias_grad)
    return loss * scale, dx
