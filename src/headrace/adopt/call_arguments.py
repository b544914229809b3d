"""Arguments of a batch, and of a call of a model on a part of it, that are refused by name.

What describes whole rows (masks), takes the place of token ids (embeddings), or changes a loss that
is made here is wrong for a part, and would change nothing, or each rank's own result, in silence.
So is a part in the hands of another model, which would take it for whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self
from weakref import ref

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_map

from headrace.errors import DataError, ModelError

__all__ = [
    "of_part",
    "plain",
    "plain_arguments",
    "refuse_arguments",
    "refuse_configured",
    "refuse_embedded",
    "tensors_of",
]

_EMBEDDED_INPUTS = ("inputs_embeds", "pixel_values", "input_features", "input_values")
"""Beginnings of the names of inputs that stand in the place of token ids: embeddings, images,
sound."""

_ROUTER_LOSSES = "the loss of the router is a mean over tokens of one rank"

_ATTENTION_MAPS = "attention of tokens that are spread over ranks makes no maps"

_REFUSED_OPTIONS = {
    "use_cache": "a cache of this rank's tokens knows none of others: generate with the model, "
    "which is the plain one outside of run(...)",
    "past_key_values": "a cache of this rank's tokens knows none of others",
    "output_router_logits": _ROUTER_LOSSES,
    "output_attentions": _ATTENTION_MAPS,
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


def refuse_configured(config: Any) -> None:
    """Raise ModelError where a configuration asks for the losses of routers, or for maps of
    attention."""
    for name in ("output_router_logits", "output_attentions"):
        if getattr(config, name, False):
            raise ModelError(name, got="True", wanted="none", hint=_REFUSED_OPTIONS[name])


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


_SAME_TOKENS = frozenset(
    {
        *("__getitem__", "contiguous", "detach", "flatten", "reshape", "squeeze", "transpose"),
        *("unsqueeze", "view", "bfloat16", "cuda", "float", "half", "int", "long", "to", "type"),
    }
)
"""Names of functions whose results are these tokens still, in another shape or type."""

_NOT_OF_SUBCLASSES = frozenset({"__array__", "__format__", "numpy", "tolist"})
"""Names of functions that torch refuses for tensors with a dispatch of their own."""


class PartValue(torch.Tensor):
    """An input of a spread model, cut to this rank, [b, s_r, ...]. Parameters that are not of that
    model refuse it, as another model would take the part for whole rows: its attention would see
    the tokens of one rank only, and nothing would say so. All other functions of torch take it as a
    plain tensor in the same memory. A copy (``x.clone()``) is plain.
    """

    model: ref[torch.nn.Module]
    unmarked: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, model: ref[torch.nn.Module]) -> Self:
        """The tensor [b, s_r, ...] as a value of the part that ``model`` works on."""
        found = x.as_subclass(cls)
        found.model, found.unmarked = model, x.detach()
        return found

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on the plain tensors; raises ModelError for weights of others."""
        named, name = kwargs or {}, getattr(func, "__name__", "")
        own = next((x for x in (*args, *named.values()) if isinstance(x, cls)), None)
        if own is not None:
            own.refuse_weights((*args, *named.values()))
        if name in _NOT_OF_SUBCLASSES:
            args, named = plain_arguments(args, named)
        with DisableTorchFunctionSubclass():
            found = func(*args, **named)
        if not isinstance(found, torch.Tensor) or found is own:  # changed in place
            return found
        # An index is a part, too, but what it picks is of another tensor.
        first = args[0] if args else None
        if not isinstance(first, cls) or name not in _SAME_TOKENS:
            return plain(found)
        return cls.of(found, first.model)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, below autograd, on the plain tensors: compiled functions ask for it."""

        def unmarked(x: Any) -> Any:
            """The plain tensor in the same memory; anything else as it is."""
            return x.unmarked if isinstance(x, cls) else x

        return func(*tree_map(unmarked, args), **tree_map(unmarked, kwargs or {}))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """A copy, which is plain."""
        return plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and files have the plain tensor."""
        return plain(self).__reduce_ex__(protocol)

    def refuse_weights(self, values: Iterable[Any]) -> None:
        """Raise ModelError for a parameter among ``values`` that is not of this value's model."""
        weights = [x for x in values if isinstance(x, torch.nn.Parameter)]
        model = self.model()
        if not weights or model is None or all(_has(model, weight) for weight in weights):
            return
        raise ModelError(
            f"a part of a batch given to weights {list(weights[0].shape)} of another model than "
            f"{type(model).__name__}",
            got="a model that is not spread over ranks",
            wanted="one that hr.compile or run.map(model=...) spreads, or the whole batch",
            hint="it would take this rank's tokens for whole rows; where it works on each token "
            "alone, give it a copy (x.clone())",
        )


def of_part(x: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """The tensor [b, s_r, ...], in the same memory, as one that parameters of other models than
    ``model`` refuse. It stays as it is where it is of a kind of its own, as fake tensors are."""
    return PartValue.of(x, ref(model)) if type(x) is torch.Tensor else x


def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself, which any weights take; in the same memory."""
    return x.as_subclass(torch.Tensor) if isinstance(x, PartValue) else x


def plain_arguments(
    args: Iterable[Any], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of the spread model, (positional, keyword), with plain tensors."""
    own = tuple(plain(x) if isinstance(x, PartValue) else x for x in args)
    return own, {k: plain(x) if isinstance(x, PartValue) else x for k, x in named.items()}


def _has(model: torch.nn.Module, weight: torch.nn.Parameter) -> bool:
    """Whether the weight is the model's now, as sharding swaps parameters while they are used."""
    return any(weight is own for own in model.parameters())
