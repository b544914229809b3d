"""Models to verify that nobody here wrote: tiny ones of a type of transformers, a local folder's,
or what a factory makes."""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from headrace.errors import ConfigError, MissingExtra, did_you_mean

__all__ = ["foreign_model", "made"]

_PLAIN = {"experts_implementation": "eager"}
"""Kernels of experts know no fp64."""

_TINY = {
    "attention_chunk_size": 7,
    "d_model": 48,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 80,
    "decoder_layers": 2,
    "emb_dim": 48,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "encoder_hash_byte_group_vocab": 97,
    "encoder_layers": 2,
    "entity_vocab_size": 97,
    "expert_ffn_hidden_size": 32,
    "ffn_dim": 80,
    "ffn_hidden_size": 80,
    "head_dim": 8,
    "hidden_dim": 80,
    "hidden_size": 48,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 80,
    "kv_lora_rank": 16,
    "local_attention": 8,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "n_embd": 48,
    "n_group": 1,
    "n_head": 6,
    "n_heads": 6,
    "n_layer": 2,
    "n_layers": 2,
    "n_positions": 128,
    "n_routed_experts": 4,
    "num_attention_heads": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_heads": 6,
    "num_layers": 2,
    "num_local_experts": 4,
    "original_max_position_embeddings": 32,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "sliding_window": 7,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
    "word_embed_proj_dim": 48,
}
"""Settings of a tiny model, of those that its type has."""

_USES = ("CausalLM", "MaskedLM", "ImageTextToText")
"""What models are for: of a type that has several the first is taken."""

_KV_HEADS = (3, 2, 6)
"""Numbers of heads of keys and values to try: 3 of 6 fit most types, some want a pair or all."""

_MOST_PARAMETERS = 50_000_000
"""Parameters of a model that stays large, as its type has sizes of its own, at most."""

_NEEDED = {"head_dim", "num_key_value_heads", "vocab_size"}
"""Settings that a tiny model is given where its type has none."""


def foreign_model(name: str, seed: int) -> torch.nn.Module:
    """A model in fp64, in training and without dropout, with weights by ``seed``: ``name`` is a
    type of transformers (``llama``), a folder with its weights, or ``MODULE:FACTORY``, a function
    without arguments.

    Raises ConfigError for names that are none of these.
    """
    torch.manual_seed(seed)
    model = _model_named(name, seed).double().train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    return model


def _model_named(name: str, seed: int) -> torch.nn.Module:
    """The model of a name, in the type of numbers that it has: made by ``MODULE:FACTORY``, read
    from a local folder of transformers without its dropout, or a tiny one of a type of
    transformers with weights by ``seed``."""
    if ":" in name:
        model = made(name)
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model {name}", got=type(model).__name__, wanted="a torch.nn.Module")
        return model
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", extra="hf", needed_for=f"model {name}") from None
    transformers.logging.set_verbosity_error()
    if Path(name).is_dir():
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        _turn_dropout_off(config)
        return transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
            name, config=config, local_files_only=True, **_PLAIN
        )
    return _tiny(name, transformers, seed)


def made(name: str) -> Any:
    """What ``MODULE:FUNCTION`` makes. Raises ConfigError where that cannot be called."""
    module, _, factory = name.partition(":")
    try:
        return getattr(importlib.import_module(module), factory)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"model {name}",
            got=str(error),
            wanted="MODULE:FUNCTION that can be imported and takes no arguments",
        ) from error


def _tiny(kind: str, transformers: Any, seed: int) -> torch.nn.Module:
    """A tiny model of a type of transformers with weights by ``seed``, for causal language
    modelling, or where the type has no such model for masked language modelling or for texts and
    images: the first that runs of those with other numbers of heads.

    Raises ConfigError for a type that is unknown, or of which no such model can be made.
    """
    known = transformers.CONFIG_MAPPING
    if kind not in known:
        raise ConfigError(
            "model",
            got=repr(kind),
            wanted="native, checkpoint, a folder, MODULE:FUNCTION or a type of transformers",
            hint=did_you_mean(kind, known),
        )
    autos = [getattr(transformers, f"AutoModelFor{use}") for use in _USES]
    failed: Exception | None = None
    first_made: torch.nn.Module | None = None  # returned where none runs
    for kv_heads in _KV_HEADS:
        torch.manual_seed(seed)  # weights do not depend on the heads that were tried before
        try:
            config = transformers.AutoConfig.for_model(kind)
            _shrink(config, kv_heads)
            auto = next((a for a in autos if type(config) in a._model_mapping), None)  # noqa: SLF001
            if auto is None:  # whatever the heads: refused after the loop
                break
            _require_small(kind, auto, config)
            model: torch.nn.Module = auto.from_config(config, attn_implementation="eager", **_PLAIN)
        except ConfigError:
            raise
        except Exception as error:  # of a constructor of transformers: of any type
            failed = error
            continue
        if _runs(model):
            return model
        first_made = model if first_made is None else first_made
    if first_made is not None:
        return first_made
    if failed is not None:  # none of the numbers of heads worked
        raise _not_small(kind, f"{type(failed).__name__}: {str(failed).strip()}") from failed
    raise ConfigError(
        f"model type {kind}",
        got="no model of tokens",
        wanted="one for causal or masked language, or for texts and images",
    )


def _require_small(kind: str, auto: Any, config: Any) -> None:
    """Raise ConfigError where a configuration is still one of a large model, which may take more
    memory than there is. Models that cannot be made without memory are taken as they are."""
    try:
        with torch.device("meta"):
            model = auto.from_config(config, attn_implementation="eager", **_PLAIN)
    except Exception:  # of a constructor of transformers: of any type
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise _not_small(kind, f"{count:,} parameters of the smallest")


def _not_small(kind: str, got: str) -> ConfigError:
    """The error that no small model of a type can be made."""
    return ConfigError(
        f"model type {kind}",
        got=got,
        wanted="a type of which a small model can be made",
        hint="give a function that makes a small one: headrace verify MODULE:FUNCTION",
    )


def _runs(model: torch.nn.Module) -> bool:
    """Whether a tiny model runs on a few tokens: some types can be made with heads of keys and
    values that their attention cannot be computed with."""
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            model.eval()(torch.arange(3, 9)[None])
    except Exception:  # of a forward of transformers: of any type
        return False
    finally:
        torch.set_rng_state(state)
    return True


def _shrink(config: Any, kv_heads: int) -> None:
    """Change a configuration, and those within it, to one of a tiny model without dropout that has
    a layer of every kind and ``kv_heads`` heads of keys and values."""
    kept_layers = _layers_of_each_kind(config)
    tiny = {**_TINY, "num_hidden_layers": len(kept_layers), "num_key_value_heads": kv_heads}
    if getattr(config, "first_k_dense_replace", 0):
        tiny["first_k_dense_replace"] = 1
    for key, value in list(vars(config).items()):
        if _is_list_of_layers(config, value):
            _set(config, key, [value[layer] for layer in kept_layers])
    for key in dir(config):
        try:
            value = getattr(config, key, None) if not key.startswith("_") else None
        except Exception:  # of a property of transformers: of any type
            continue
        # ``is int``, as a flag of the same name may be a bool.
        if key in tiny and (type(value) is int or (value is None and key in _NEEDED)):
            _set(config, key, tiny[key])
        elif key in config.sub_configs and value is not None:
            _shrink(value, kv_heads)
    _turn_dropout_off(config)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = _TINY["original_max_position_embeddings"]
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2


def _turn_dropout_off(config: Any) -> None:
    """Set all probabilities of dropout in a configuration to 0."""
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            _set(config, key, 0.0)


def _set(config: Any, key: str, value: Any) -> None:
    """Set a key of a configuration, where it can be set."""
    with suppress(AttributeError, NotImplementedError):  # a property that follows from others
        setattr(config, key, value)


def _is_list_of_layers(config: Any, value: Any) -> bool:
    """Whether a value of a configuration is a list with an item for each of its layers."""
    layers = getattr(config, "num_hidden_layers", None) or 0
    return isinstance(value, (list, tuple)) and len(value) == layers > 1


def _layers_of_each_kind(config: Any) -> list[int]:
    """The indices of the layers to keep: the first of each kind, or the first two where all are of
    one kind. Two layers are of one kind when every list of the configuration that has an item for
    each layer has equal items for them."""
    lists = [value for value in vars(config).values() if _is_list_of_layers(config, value)]
    if not lists:
        return [0, 1]
    kinds = [repr([items[layer] for items in lists]) for layer in range(len(lists[0]))]
    first_of_each = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    return first_of_each if len(first_of_each) > 1 else [0, 1]
