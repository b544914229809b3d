"""Whether a loss is what a plan needs: a sum over tokens, divided by those of the whole step.

A mean over the tokens of one micro-batch weighs samples by whom they were packed with. It cannot be
told from the number alone, but from how it was made: torch's cross entropy leaves a node in the
graph that knows the tokens it was over, and the gradient of the loss by its result says what each
of them weighs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from headrace.errors import ModelError

__all__ = ["check_loss"]

_TOKEN_LOSSES = ("NllLossBackward0", "NllLoss2DBackward0")
_VALUE_LOSSES = ("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")
_MEAN = 1
_FAR = 64
"""Autograd nodes that are searched: a loss is near the end of a graph."""


def check_loss(loss: torch.Tensor, targets: int, tokens: int) -> None:
    """Raise ModelError for a loss that does not belong to a graph or is no single number, and have
    its backward raise one where one of this rank's ``tokens`` weighs something else than one over
    the step's ``targets``. Of losses between values (mse_loss) only means are judged: a sum may
    leave values out."""
    if loss.dim() or not loss.requires_grad:
        raise ModelError(
            "loss of a micro-batch",
            got=f"shape {list(loss.shape)}{'' if loss.requires_grad else ' without gradient'}",
            wanted="a single number with a gradient",
        )
    nodes = _loss_nodes(loss)
    if len(nodes) != 1 or not targets:
        return
    (node,) = nodes

    # In the backward itself: an extra backward of these nodes would trigger hooks of FSDP2.
    def judge(outer: Sequence[torch.Tensor | None]) -> None:
        weight = _weight(outer[0], node, tokens)
        if weight is not None and abs(weight * targets - 1) > 1e-3:
            raise ModelError(
                "loss of a micro-batch",
                got=f"each token weighs 1 / {1 / weight:,.6g}",
                wanted=f"1 / {targets:,}, over all tokens of the step that have a loss",
                hint="a mean over one micro-batch weighs samples by their company: use "
                'reduction="sum" and divide by step.tokens, or micro.loss(logits)',
            )

    node.register_prehook(judge)


def _loss_nodes(loss: torch.Tensor) -> list[Any]:
    """The nodes of torch's losses near the end of a graph."""
    found, seen = list[Any](), set[Any]()
    coming = deque([loss.grad_fn])
    while coming and len(seen) < _FAR:
        node = coming.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in (*_TOKEN_LOSSES, *_VALUE_LOSSES):
            found.append(node)
            continue
        coming.extend(following for following, _ in node.next_functions)
    return found


def _weight(outer: torch.Tensor | None, node: Any, tokens: int) -> float | None:
    """The weight of each of ``tokens`` tokens in the loss, where ``outer`` is the gradient of the
    loss by the node's result; None where it cannot be determined."""
    if outer is None or outer.dim():
        return None
    mean = node._saved_reduction == _MEAN  # noqa: SLF001
    if node.name() in _VALUE_LOSSES:
        return float(outer) / tokens if mean else None
    within = float(node._saved_total_weight) if mean else 1.0  # noqa: SLF001
    return float(outer) / within if within else None
