"""``config.json`` of the Hugging Face and our architectures: Llama, GPT-2 and BERT.

What our model does not compute is refused, never ignored: other activations, scaled or partial
rotary positions, biases where there are none, attention that is scaled otherwise or sees other
tokens, dropout where ours has none. Ours has one rate, for what the branches of a layer add to the
residual stream; whoever names it himself takes it in place of all rates of a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError, SpecError, did_you_mean
from headrace.spec.architecture import Architecture

__all__ = ["CONFIG", "architecture_of", "config_of", "read_architecture", "read_object"]

CONFIG = "config.json"
"""The file of a model's configuration in its folder."""

# The first is what we write; the others hold the same weights, and more.
_CLASSES = {
    "llama": ("LlamaForCausalLM",),
    "gpt2": ("GPT2LMHeadModel",),
    "bert": ("BertForMaskedLM", "BertForPreTraining"),
}

# Fields with one or more values that our model can compute; the first is what an absent one means.
_LLAMA_FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "is_causal": (True,),
}
_GPT2_FIXED: dict[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "is_causal": (True,),
    "add_cross_attention": (False,),
}
_BERT_FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "type_vocab_size": (2,),
    "is_causal": (False,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
# Rates at places where our model drops nothing, and what transformers takes of a file without them.
_OTHER_DROPOUT = {
    "llama": {"attention_dropout": 0.0},
    "gpt2": {"embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "bert": {"attention_probs_dropout_prob": 0.1},
}
_BERT_MASK = 103
"""``[MASK]`` in all vocabularies that were published with BERT; no field of theirs names it."""


def read_architecture(folder: Path, *, dropout: float | None = None) -> Architecture:
    """The architecture of the ``config.json`` in a folder, see :func:`architecture_of`. Raises
    CheckpointError for a file that cannot be read, SpecError for a model that is not ours."""
    return architecture_of(read_object(folder / CONFIG), dropout=dropout)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(str(path), got=cause, wanted="a JSON object")
    if not isinstance(value, dict):
        raise CheckpointError(str(path), got=type(value).__name__, wanted="a JSON object")
    return value


def architecture_of(config: Mapping[str, Any], *, dropout: float | None = None) -> Architecture:
    """The architecture of a ``config.json`` of LlamaForCausalLM, GPT2LMHeadModel or
    BertForMaskedLM.

    ``dropout`` takes the place of all rates in the file. Where it is None, the rate is that of the
    residual stream in a GPT-2 or BERT file, and a rate above zero at another place is refused, also
    one that transformers would assume for a missing field. ``positions`` of a Llama is the longest
    context it was trained for. BERT's ``mask_id`` is ``mask_token_id`` where there is such a field,
    else 103 (the last id of smaller vocabularies). Raises SpecError for other models, for variants
    that our model does not compute, and for missing or malformed fields.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _CLASSES:
        hint = did_you_mean(str(kind), _CLASSES)
        raise SpecError("model_type", got=repr(kind), wanted="'llama', 'gpt2' or 'bert'", hint=hint)
    classes, known = config.get("architectures"), _CLASSES[kind]
    if classes and (not isinstance(classes, list) or not any(name in classes for name in known)):
        raise SpecError("architectures", got=classes, wanted=" or ".join(known))
    if dropout is None:
        _check_dropout(config, _OTHER_DROPOUT[kind])
    found = {"llama": _llama, "gpt2": _gpt, "bert": _bert}[kind](config)
    return found if dropout is None else replace(found, dropout=dropout)


def config_of(architecture: Architecture) -> dict[str, Any]:
    """The content of a ``config.json`` that transformers reads, old versions and new.

    Dropout of a Llama has no place in it. Raises SpecError for an architecture that transformers
    cannot compute: bidirectional without being BERT, or GPT-2 and BERT with fewer key-value heads
    than heads.
    """
    a = architecture
    if not a.causal and not a.masked:
        raise SpecError("model.causal", got=False, wanted="True to save it as Llama or GPT-2")
    if a.kind != "llama" and a.kv_heads != a.heads:
        wanted = f"{a.heads} to save it as {'GPT-2' if a.kind == 'gpt' else 'BERT'}"
        raise SpecError("model.kv_heads", got=a.kv_heads, wanted=wanted)
    config: dict[str, Any] = {
        "tie_word_embeddings": a.tied,
        "vocab_size": a.vocabulary,
        "bos_token_id": None,  # the tokenizer's, which is not known here
        "eos_token_id": None,
    }
    return config | {"llama": _llama_config, "gpt": _gpt_config, "bert": _bert_config}[a.kind](a)


def _llama(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a Llama ``config.json``; raises SpecError for options that are not
    implemented."""
    _check_fixed(config, _LLAMA_FIXED)
    heads = _count(config, "num_attention_heads")
    architecture = Architecture(
        kind="llama",
        layers=_count(config, "num_hidden_layers"),
        hidden=_count(config, "hidden_size"),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", heads),
        ffn=_count(config, "intermediate_size"),
        vocabulary=_count(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings", False),
        positions=_count(config, "max_position_embeddings", 0),
        rope_theta=_rope_theta(config),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
    )
    features = _count(config, "head_dim", architecture.head_features)
    if features != architecture.head_features:
        wanted = f"{architecture.head_features} = hidden_size / num_attention_heads"
        raise SpecError("head_dim", got=features, wanted=wanted)
    return architecture


def _llama_config(a: Architecture) -> dict[str, Any]:
    """The keys of a ``config.json`` that transformers reads as this Llama."""
    config = {
        "model_type": "llama",
        "architectures": [_CLASSES["llama"][0]],
        "num_hidden_layers": a.layers,
        "hidden_size": a.hidden,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_features,
        "intermediate_size": a.ffn,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope_theta,  # read by versions before 5, the next by later ones
        "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta},
        **{name: values[0] for name, values in _LLAMA_FIXED.items()},
    }
    return config | ({"max_position_embeddings": a.positions} if a.positions else {})


def _gpt(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a GPT-2 ``config.json``; raises SpecError for options that are not
    implemented."""
    _check_fixed(config, _GPT2_FIXED)
    hidden, heads = _count(config, "n_embd"), _count(config, "n_head")
    return Architecture(
        kind="gpt",
        layers=_count(config, "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=_count(config, "n_inner", 4 * hidden),
        vocabulary=_count(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings", True),
        positions=_count(config, "n_positions"),
        norm_eps=_number(config, "layer_norm_epsilon", 1e-5),
        dropout=_number(config, "resid_pdrop", 0.1),
    )


def _gpt_config(a: Architecture) -> dict[str, Any]:
    """The keys of a ``config.json`` that transformers reads as this GPT-2."""
    return {
        "model_type": "gpt2",
        "architectures": [_CLASSES["gpt2"][0]],
        "n_layer": a.layers,
        "n_embd": a.hidden,
        "n_head": a.heads,
        "n_inner": a.ffn,
        "n_positions": a.positions,
        "layer_norm_epsilon": a.norm_eps,
        "resid_pdrop": a.dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **{name: values[0] for name, values in _GPT2_FIXED.items()},
    }


def _bert(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a BERT ``config.json``; raises SpecError for options that are not
    implemented."""
    _check_fixed(config, _BERT_FIXED)
    heads, vocabulary = _count(config, "num_attention_heads"), _count(config, "vocab_size")
    return Architecture(
        kind="bert",
        layers=_count(config, "num_hidden_layers"),
        hidden=_count(config, "hidden_size"),
        heads=heads,
        kv_heads=heads,
        ffn=_count(config, "intermediate_size"),
        vocabulary=vocabulary,
        tied=_flag(config, "tie_word_embeddings", True),
        causal=False,
        positions=_count(config, "max_position_embeddings"),
        norm_eps=_number(config, "layer_norm_eps", 1e-12),
        dropout=_number(config, "hidden_dropout_prob", 0.1),
        mask_id=_count(config, "mask_token_id", min(_BERT_MASK, vocabulary - 1)),
    )


def _bert_config(a: Architecture) -> dict[str, Any]:
    """The keys of a ``config.json`` that transformers reads as this BERT."""
    return {
        "model_type": "bert",
        "architectures": [_CLASSES["bert"][0]],
        "num_hidden_layers": a.layers,
        "hidden_size": a.hidden,
        "num_attention_heads": a.heads,
        "intermediate_size": a.ffn,
        "max_position_embeddings": a.positions,
        "layer_norm_eps": a.norm_eps,
        "hidden_dropout_prob": a.dropout,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": None,  # the tokenizer's as well
        "mask_token_id": a.mask_id,
        **{name: values[0] for name, values in _BERT_FIXED.items()},
    }


def _check_fixed(config: Mapping[str, Any], fixed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise SpecError for a field whose value is none of the supported ones in ``fixed``; a missing
    field stands for the first of them."""
    for name, values in fixed.items():
        if config.get(name, values[0]) not in values:
            raise SpecError(name, got=repr(config[name]), wanted=repr(values[0]))


def _check_dropout(config: Mapping[str, Any], usual: Mapping[str, float]) -> None:
    """Raise SpecError for a dropout rate above 0 at a place where our model has no dropout. The
    keys of ``usual`` are these rates, its values what a missing key stands for."""
    for name, rate in usual.items():
        if _number(config, name, rate) != 0:
            raise SpecError(
                name,
                got=config.get(name, f"{rate}, what is meant where it is left out"),
                wanted="0",
                hint="model.dropout takes the place of all rates: there is none at this place",
            )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary positions: in ``rope_parameters`` since transformers 5, before that in
    ``rope_theta`` with ``rope_scaling`` beside it. Raises SpecError for scaled or partial ones."""
    theta = _number(config, "rope_theta", 10000.0)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if not isinstance(rope, dict):
            raise SpecError(name, got=repr(rope), wanted="an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            hint = "scaled rotary positions are not computed"
            raise SpecError(name, got=repr(kind), wanted="'default'", hint=hint)
        _check_fixed(rope, {"partial_rotary_factor": (1.0,)})
        theta = _number(rope, "rope_theta", theta)
    return theta


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number >= 0 under a key, or the default where the key is missing or null; raises
    SpecError for other values."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SpecError(name, got=repr(value), wanted="a whole number")
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """The boolean under a key, or the default where the key is missing; raises SpecError for other
    values."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise SpecError(name, got=repr(value), wanted="true or false")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    """The number under a key as a float, or the default where the key is missing; raises SpecError
    for other values."""
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SpecError(name, got=repr(value), wanted="a number")
    return float(value)
