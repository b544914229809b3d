"""Arguments of a batch, and of a call of a model on a part of it, that are refused by name.

What describes whole rows (masks), takes the place of token ids (embeddings), or changes a loss that
is made here is wrong for a part, and would change nothing, or each rank's own result, in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.errors import DataError, ModelError

__all__ = ["refuse_arguments", "refuse_embedded", "refuse_router_losses", "tensors_of"]

_EMBEDDED_INPUTS = ("inputs_embeds", "pixel_values", "input_features", "input_values")
"""Beginnings of the names of inputs that stand in the place of token ids: embeddings, images,
sound."""

_ROUTER_LOSSES = "the loss of the router is a mean over tokens of one rank"

_REFUSED_OPTIONS = {
    "use_cache": "a cache of this rank's tokens knows none of others: generate with the model, "
    "which is the plain one outside of run(...)",
    "past_key_values": "a cache of this rank's tokens knows none of others",
    "output_router_logits": _ROUTER_LOSSES,
    "logits_to_keep": "it would keep the last tokens of every rank: take logits of all, and keep "
    "those of run.gather(logits)",
    "attention_mask": "the part knows its padding from shard(): give it to shard()",
}
"""Why each of these arguments of a transformers forward is refused."""

_LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""Arguments by which transformers' losses are told what shard() knows."""


def refuse_arguments(arguments: Mapping[str, Any], tokens: str, *, labelled: bool) -> None:
    """Raise ModelError for arguments of a transformers forward, such as caches and masks, that a
    model on this rank's tokens alone cannot serve. ``tokens`` names the argument with token ids,
    and ``labelled`` says whether there are labels."""
    refuse_embedded(arguments, tokens)
    for name, why in _REFUSED_OPTIONS.items():
        value = arguments.get(name)
        is_off = value is None or (isinstance(value, int) and value == 0)
        if not is_off:
            got = str(value) if isinstance(value, int) else type(value).__name__
            raise ModelError(name, got=got, wanted="none", hint=why)
    for name in _LOSS_ARGUMENTS if labelled else ():
        if arguments.get(name) is not None:
            raise ModelError(
                name,
                got=f"{type(arguments[name]).__name__} beside labels",
                wanted="none",
                hint="the loss is that of the step's targets, whose labels are in their places and "
                "-100 where there are none: change labels before shard(), and give their number by "
                "shard(..., targets=)",
            )


def refuse_router_losses(config: Any) -> None:
    """Raise ModelError where a configuration asks for the losses of routers."""
    if getattr(config, "output_router_logits", False):
        raise ModelError("output_router_logits", got="True", wanted="none", hint=_ROUTER_LOSSES)


def refuse_embedded(given: Mapping[str, Any], tokens: str) -> None:
    """Raise ModelError for inputs of a transformers model that take the place of token ids, which
    stand under ``tokens``: embeddings, pixels, audio."""
    for name, value in given.items():
        if name != tokens and name.startswith(_EMBEDDED_INPUTS) and value is not None:
            raise ModelError(
                f"input {name}",
                got="what is no number of a token",
                wanted=f"{tokens} alone",
                hint="only token numbers, labels and places are spread over ranks: give "
                "hr.compile the language model alone, or a module of your own that takes "
                "token numbers and calls the model with what it makes of them",
            )


def tensors_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The fields of a batch without those that are None. Raises DataError for one that is no
    tensor."""
    found = dict[str, torch.Tensor]()
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif value is not None:
            raise DataError(
                f"field {name} of the batch",
                got=type(value).__name__,
                wanted="a tensor with one value for each token",
                hint="leave it out: what is for the model alone is an argument of run(...)",
            )
    return found
