"""Labels of tokens, and the loss of those that a rank has.

Shape legend: a batch of b rows of S tokens; s_r of every row on rank r; V tokens in a vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch.nn.functional import cross_entropy

from headrace.errors import ModelError
from headrace.ops.loss import IGNORED

__all__ = ["Labels", "convention_of", "count_targets", "local_loss", "predicted"]

Labels = Literal["next", "same"]
"""Whether a model predicts the label of the next place, as causal models of transformers do, or
that of the same place."""

_CONVENTIONS: dict[str, Labels] = {
    "ForCausalLM": "next",
    "LMHeadModel": "next",
    "ForMaskedLM": "same",
}
"""By the end of the names of transformers' classes."""


def convention_of(model: torch.nn.Module) -> Labels:
    """What a model of transformers predicts. Raises ModelError where its name does not tell."""
    name = type(model).__name__
    for end, kind in _CONVENTIONS.items():
        if name.endswith(end):
            return kind
    raise ModelError(
        f"loss of {name}",
        got="unknown labels",
        wanted=f"a model named ...{', ...'.join(_CONVENTIONS)}",
        hint="give labels='next' or 'same' if its logits are of tokens",
    )


def predicted(labels: torch.Tensor, kind: Labels) -> torch.Tensor:
    """The label that each place predicts [b, S]."""
    if kind == "same":
        return labels
    last = labels.new_full((labels.shape[0], 1), IGNORED)
    return torch.cat([labels[:, 1:], last], dim=1)


def count_targets(batch: Mapping[str, torch.Tensor], kind: Labels) -> int | None:
    """Tokens of a batch that have a loss; None where it has no labels."""
    labels = batch.get("labels")
    return None if labels is None else int((predicted(labels, kind) != IGNORED).sum())


def local_loss(logits: torch.Tensor, labels: torch.Tensor, targets: int | None) -> torch.Tensor:
    """The cross entropy of this rank's tokens, summed, over the ``targets`` of the step; in single
    precision at least.

        logits   [b, s_r, V]
        labels   [b, s_r]      of the local places, IGNORED (-100) where there is no loss
    """
    flat = logits.flatten(0, -2)
    total = cross_entropy(
        flat.float() if flat.element_size() < 4 else flat,
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    return total / max(1, targets or 0)
