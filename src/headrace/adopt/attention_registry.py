"""The entry point of transformers: its public registry of attention functions.

A model that takes its attention from the registry is given one function, under a name of its own
and without a mask function: no dense mask is built, and a layer states its window and scale as
arguments. Every argument that may change the result and is not known here is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from headrace.adopt.layer_masks import (
    RECORDS_MASKS,
    LayerMask,
    layer_masks,
    register_recorder,
)
from headrace.adopt.operators import ModelSlot, attend, joins_inputs
from headrace.errors import ModelError

__all__ = [
    "asks_registry",
    "attention",
    "registered",
]

_SAME = 1e-12
"""The difference from 1 below which a factor of the scores is left out."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    handle: int,
    *,
    causal: bool,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the local tokens over all tokens of the group that share a document.

        q         [b, N, s_r, D]   s_r tokens of every row on this rank
        k         [b, G, s_r, D]   G divides N
        v         [b, G, s_r, E]   E at most D
        window    w > 0: a sliding window, in which a query sees w tokens on one side, itself among
                  them (on each side, where not causal); 0: all tokens; -n: those of its own chunk,
                  where each document is cut into chunks of n tokens
        scale     the factor of the scores, 1 / sqrt(D) where it is None
        softcap   c > 0: scores become c tanh(score / c); 0: they stay as they are
        sinks     [N] attention sinks: one more score of each head in the softmax's denominator,
                  which has no value
        returns   [b, N, s_r, E]

    Under autocast it computes in autocast's type, as torch's attention does. The adjoint is that of
    attention over the whole batch: gradients of keys and values that other ranks used come back
    summed.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    rows, heads, tokens, features = q.shape
    # attend itself scales scores by 1 / sqrt(D), so another scale is reached by a factor of q.
    wanted_scale = features**-0.5 if scale is None else scale
    factor = wanted_scale / features**-0.5
    # While a graph is compiled, the factor may be a symbol, which cannot be compared with 1.
    if torch.compiler.is_compiling() or abs(factor - 1) > _SAME:
        q = q * factor
    value_features = v.shape[-1]
    if value_features < features:  # attend takes q, k and v of equal D; zeros are cut off below
        v = pad(v, (0, features - value_features))
    # attend takes [b s_r, heads, D]; what it returns besides its output is for its backward.
    flat = [x.transpose(1, 2).reshape(rows * tokens, x.shape[1], features) for x in (q, k, v)]
    joins = joins_inputs()
    out, *_for_backward = attend(*flat, handle, causal, window, joins, softcap, sinks)
    return out.view(rows, tokens, heads, features)[..., :value_features].transpose(1, 2)


_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "dense", "sparse"}
"""The ``layer_types`` of a configuration whose attention can be spread over ranks."""

# Arguments that transformers passes along to the attention and that do not change its result in
# training.
_HARMLESS = {
    "cache_position",
    "head_mask",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "return_dict",
    "token_type_ids",
    "use_cache",
}


_MASK = "_headrace_mask"
"""The attribute of a copied configuration that holds the mask of its layers, where it is known."""


class _Layer(Protocol):
    """The attributes of an attention module that are read here."""

    config: Any
    is_causal: bool


def asks_registry(model: torch.nn.Module) -> bool:
    """Whether a model takes its attention from the registry of transformers."""
    can_set = getattr(model, "_can_set_attn_implementation", None)
    return callable(can_set) and hasattr(model, "set_attn_implementation") and bool(can_set())


def registered(model: Any, slot: ModelSlot) -> RegisteredAttention:
    """Register with transformers an attention function that attends over the placement in ``slot``,
    and return the switch that makes ``model`` use it: ``switch(True)`` turns it on,
    ``switch(False)`` off. Raises ModelError for layers that mix tokens in ways that the function
    does not know.

    Modules name their attention function in their configuration, which other models may share. So
    while the switch is on they have a copy of it, and a deep copy of the model gets the user's own
    again.
    """
    from transformers import AttentionInterface

    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"model type {model.config.model_type}",
            got="an encoder and a decoder",
            wanted="one stack of layers",
            hint="cross attention is not spread over ranks",
        )
    # That of the texts of a model of texts and images, else the model's own.
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ())
    unknown_types = sorted(types - _KNOWN_LAYERS)
    if unknown_types:
        raise ModelError(
            f"layers of model type {config.model_type}",
            got=", ".join(unknown_types),
            wanted=", ".join(sorted(_KNOWN_LAYERS)),
            hint="their tokens meet in ways that attention over all ranks does not stand for",
        )
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            "output_router_logits",
            got="true",
            wanted="false",
            hint="the loss of the router is a mean over tokens of one rank",
        )
    # The function refers to the slot by number: the registry keeps functions for ever.
    handle = slot.handle
    name = f"headrace_{handle}"

    def spread(
        module: _Layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """The registered function, with the arguments that transformers gives: q [b, N, s_r, D], k
        and v [b, G, s_r, D] to (output [b, s_r, N, D], None for the attention weights)."""
        _refuse(module, attention_mask, dropout, rest)
        causal, window = _mask_seen(module, sliding_window, is_causal)
        out = attention(
            query,
            key,
            value,
            handle,
            causal=causal,
            window=window,
            scale=scaling,
            softcap=softcap or 0.0,
            sinks=s_aux,
        )
        return out.transpose(1, 2), None

    AttentionInterface.register(name, spread)
    register_recorder()
    return RegisteredAttention(model, name)


class RegisteredAttention:
    """A switch, called with True or False: while it is on, the modules of ``model`` have copies of
    their configurations, which name the attention function ``name`` of transformers' registry;
    while it is off, they have the user's own configurations."""

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        """Make the switch of ``model``, which is off at first."""
        self._model, self._name = model, name
        # (module, the user's configuration of it) of all modules that have a copy now.
        self._given: list[tuple[torch.nn.Module, Any]] = []
        # The copies made: by (id of the user's configuration, mask of the layer), (the user's
        # configuration, its attributes when it was copied, the copy).
        self._copies: dict[tuple[int, LayerMask | None], tuple[Any, dict[str, Any], Any]] = {}
        # The masks that layers are known to have, once they were read.
        self._masks = dict[torch.nn.Module, LayerMask]()

    def read_masks(self, run: Callable[[], object]) -> None:
        """Find and keep the mask of each attention layer, while this switch is off. ``run()`` runs
        the model on a few tokens without padding; see :func:`layer_masks`."""
        # A switch of its own, to the attention function that records masks.
        recording = RegisteredAttention(self._model, RECORDS_MASKS)
        recording(True)
        try:
            copies = [copied for _, _, copied in recording._copies.values()]
            self._masks = layer_masks(run, copies)
        finally:
            recording(False)

    def __call__(self, on: bool) -> None:
        """Give the modules the copied configurations when ``on``, else the user's own."""
        for module, plain in self._given:
            vars(module)["config"] = plain
        self._given.clear()
        if not on:
            return
        for module in self._model.modules():
            plain = vars(module).get("config")
            if hasattr(plain, "_attn_implementation"):
                self._given.append((module, plain))
                vars(module)["config"] = self._copy_of(plain, self._masks.get(module))

    def _copy_of(self, plain: Any, mask: LayerMask | None) -> Any:
        """A copy of the user's configuration ``plain`` that names the attention function and holds
        the ``mask`` of a layer, and so do those within it, without a mask."""
        made = self._known_copy(plain, mask)
        if made is None:
            made = self._new_copy(plain, mask)
        # A model of texts and images makes the masks of its texts by the configuration of these.
        for name in getattr(plain, "sub_configs", ()):
            inner = vars(plain).get(name)
            if hasattr(inner, "_attn_implementation"):
                vars(made)[name] = self._copy_of(inner, None)
        return made

    def _known_copy(self, plain: Any, mask: LayerMask | None) -> Any:
        """The copy made before; None where there is none or the configuration has changed since."""
        original, attributes, made = self._copies.get((id(plain), mask), (None, {}, None))
        return made if original is plain and attributes == vars(plain) else None

    def _new_copy(self, plain: Any, mask: LayerMask | None) -> Any:
        """A new copy, which is kept."""
        made = copy.copy(plain)
        # Where transformers keeps the name of the attention function.
        vars(made)["_attn_implementation_internal"] = self._name
        # A deep copy of a module that has this configuration gets a copy of the user's.
        vars(made)["__deepcopy__"] = partial(copy.deepcopy, plain)
        vars(made)[_MASK] = mask
        self._copies[id(plain), mask] = plain, dict(vars(plain)), made
        return made


def _refuse(
    module: _Layer, mask: torch.Tensor | None, dropout: float, rest: dict[str, Any]
) -> None:
    """Raise ModelError for a mask tensor, dropout, or an argument in ``rest`` that would change the
    scores, as none of them is spread over ranks. ``module`` is the attention layer."""
    what = f"attention of {type(module).__name__}"
    if mask is not None:
        raise ModelError(
            what,
            got="a mask tensor",
            wanted="none: masks are declared",
            hint="documents, padding and windows are known from what shard() was given",
        )
    if dropout > 0:
        raise ModelError(
            what,
            got=f"dropout {dropout}",
            wanted="0",
            hint="set attention_dropout (attn_pdrop, attention_probs_dropout_prob) to 0",
        )
    unknown = [
        name
        for name, value in rest.items()
        if name not in _HARMLESS and value is not None and value is not False
    ]
    if unknown:
        raise ModelError(
            what,
            got=f"the argument {unknown[0]}",
            wanted="none that changes the scores",
            hint="biases and caches are not spread over ranks",
        )


def _mask_seen(module: _Layer, limit: int | None, is_causal: bool | None) -> tuple[bool, int]:
    """(causal, window) of an attention layer, both as :func:`attention` takes them: those of the
    model's own mask where it was read before, else what the layer states. ``limit`` is the
    argument ``sliding_window`` that the layer gives to its attention function, None for none, and
    ``is_causal`` the argument of that name."""
    mask: LayerMask | None = getattr(module.config, _MASK, None)
    if mask is not None:
        return mask.causal, mask.window
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return causal, _window(module, limit, causal=causal)


def _window(module: _Layer, limit: int | None, *, causal: bool) -> int:
    """The window of an attention layer as :func:`attention` takes it, from its configuration: w
    tokens of a sliding window, 0 for all tokens, -n for chunks of n tokens.

    ``limit`` is the argument ``sliding_window`` that the layer gives to its attention function,
    None for none. Raises ModelError where it is not the width that the configuration states, from
    which transformers makes its masks; where attention is not causal it may be one more."""
    config, layer = module.config, getattr(module, "layer_idx", None)
    types, width = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    kind = types[layer] if types and layer is not None else None
    if kind == "chunked_attention":
        chunk = getattr(config, "attention_chunk_size", None)
        if not isinstance(chunk, int) or not causal or limit is not None:
            raise ModelError(
                f"attention of {type(module).__name__}",
                got=f"chunks of {chunk}",
                wanted="causal attention in chunks of attention_chunk_size tokens",
            )
        return -chunk
    if types and layer is not None:
        slides = kind == "sliding_attention"
    else:
        slides = width is not None and getattr(config, "use_sliding_window", True)
    if not slides:
        return 0
    if width is None or limit not in ((width,) if causal else (width, width + 1)):
        raise ModelError(
            f"attention of {type(module).__name__}",
            got=f"a window of {limit}",
            wanted=f"sliding_window = {width} of the configuration",
            hint="its width cannot be known for sure",
        )
    return int(width if causal else width + 1)
