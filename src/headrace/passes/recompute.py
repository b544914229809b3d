"""Recompute for long sequences: blocks keep their attention and compute the rest again.

The work of linear parts grows with the tokens, that of attention with their square: of long
sequences all but attention is computed again for next to nothing, O(1 / s) of the work (AutoSP),
and its memory is that of one block. What attention kept stays, so no traffic is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from headrace.errors import ModelError

__all__ = ["Kept", "recompute_blocks", "recomputed"]

Kept = Literal["attention", "full"]
"""Recompute level of a block, as that of a layer: all but attention, or everything."""


def recomputed(function: Callable[..., Any], *inputs: Any, level: Kept = "attention") -> Any:
    """``function(*inputs)``, of which the backward computes again what ``level`` says."""
    if level == "full":
        return checkpoint(function, *inputs, use_reentrant=False)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=_contexts)


def recompute_blocks(model: Any, level: Kept) -> None:
    """Have a model of transformers compute its blocks again. Raises ModelError for models that do
    not know their blocks."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"recompute of {type(model).__name__}", got="no blocks that it knows",
            wanted="supports_gradient_checkpointing", hint="use recompute(block, x) in its forward",
        )  # fmt: skip
    given: dict[str, Any] = {"use_reentrant": False}
    if level == "attention":
        given["context_fn"] = _contexts
    older = model.gradient_checkpointing_enable  # the name of before
    getattr(model, "activation_checkpointing_enable", older)(given)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    attends = operator is torch.ops.headrace.attend.default
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _policy)
