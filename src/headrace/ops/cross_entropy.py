"""Cross-entropy of logits, and its gradient, each in few passes over them.

Of a token the logits of a vocabulary are more bytes than all else that a step touches of it outside
its layers, so a device reads them as the product left them, and writes their gradient in the same
type; all between is computed in fp32. On a CPU they are widened once and written over.
"""

from __future__ import annotations

import torch

from headrace.ops.fused import fused, widened

__all__ = ["label_terms", "logits_gradient", "logits_of"]


def logits_of(x: torch.Tensor, matrix: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b [T, V]: wide on a CPU and with an offset, else of the type of x."""
    logits = x @ matrix.t()
    if offset is None:
        return widened(logits) if x.device.type == "cpu" else logits
    return widened(logits).add_(offset)


def label_terms(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two terms of each token's loss, normal - picked.

    logits   [T, V]   z; V may be 0
    labels   [T]      int64; negative for none
    returns  normal [T] = logsumexp_v(z_t), wide
             picked [T] = z_t[label_t], 0 for a token without a label; wide
    """
    if not logits.shape[1]:
        none = widened(logits).new_zeros(len(logits))
        return none - torch.inf, none
    return _cross_entropy(logits, labels)  # type: ignore[no-any-return]


def logits_gradient(
    logits: torch.Tensor, labels: torch.Tensor, normal: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """dz = (exp(z - n) - onehot) f [T, V], in the type of ``logits``, which may be written over.

    ``normal`` n and ``factor`` f are [T] and wide; the rest is as for :func:`label_terms`.
    """
    return _cross_entropy_backward(logits, labels, normal, factor)  # type: ignore[no-any-return]


@fused("cross_entropy(Tensor logits, Tensor labels) -> (Tensor, Tensor)", kernels=3)
def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = widened(logits)
    picked = wide.gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    return wide.logsumexp(1), picked.masked_fill(labels < 0, 0.0)


def _written_over(
    logits: torch.Tensor, labels: torch.Tensor, normal: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    wide = widened(logits).sub_(normal[:, None]).exp_()
    if wide.shape[1]:
        ones = (labels >= 0).to(wide.dtype)[:, None]
        wide.scatter_add_(1, labels.clamp_min(0)[:, None], -ones)
    return wide.mul_(factor[:, None]).to(logits.dtype)


@fused(
    "cross_entropy_backward(Tensor logits, Tensor labels, Tensor normal, Tensor factor) -> Tensor",
    plain=_written_over,
)
def _cross_entropy_backward(
    logits: torch.Tensor, labels: torch.Tensor, normal: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    words = torch.arange(logits.shape[1], device=logits.device)
    wide = (widened(logits) - normal[:, None]).exp()
    dz = (wide - (words == labels[:, None]).to(wide.dtype)) * factor[:, None]
    return dz.to(logits.dtype)
