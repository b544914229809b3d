"""Models to verify that nobody here wrote: tiny ones of a type of transformers, a local folder's,
or what a factory makes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from headrace.errors import ConfigError, MissingExtra, did_you_mean

__all__ = ["foreign_model", "made"]

_PLAIN = {"experts_implementation": "eager"}
"""Kernels of experts know no fp64."""

_TINY = {
    "d_model": 48,
    "ffn_dim": 80,
    "head_dim": 8,
    "hidden_size": 48,
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
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "num_layers": 2,
    "num_local_experts": 4,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "sliding_window": 7,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": 97,
    "word_embed_proj_dim": 48,
}
"""Settings of a tiny model, of those that its type has."""


def foreign_model(name: str, seed: int) -> torch.nn.Module:
    """A model in fp64 with weights by ``seed``: ``name`` is a type of transformers (``llama``), a
    folder with its weights, or ``MODULE:FACTORY``, a function without arguments.

    Raises ConfigError for names that are none of these.
    """
    torch.manual_seed(seed)
    if ":" in name:
        model = made(name)
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model {name}", got=type(model).__name__, wanted="a torch.nn.Module")
        return model.double()
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", extra="hf", needed_for=f"model {name}") from None
    transformers.logging.set_verbosity_error()
    if Path(name).is_dir():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            name, local_files_only=True, **_PLAIN
        )
        return loaded.double()
    return _tiny(name, transformers).double()


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


def _tiny(kind: str, transformers: Any) -> torch.nn.Module:
    known = transformers.CONFIG_MAPPING
    if kind not in known:
        raise ConfigError(
            "model",
            got=repr(kind),
            wanted="native, checkpoint, a folder, MODULE:FUNCTION or a type of transformers",
            hint=did_you_mean(kind, known),
        )
    config = transformers.AutoConfig.for_model(kind)
    for key in dir(config):
        value = getattr(config, key, None) if not key.startswith("_") else None
        if key in _TINY and isinstance(value, int):
            setattr(config, key, _TINY[key])
        elif isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, 0.0)
    types = config.__dict__.get("layer_types")
    if types:  # one layer of each kind
        config.layer_types = (list(dict.fromkeys(types)) * 2)[: config.num_hidden_layers]
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM):
        if type(config) in auto._model_mapping:  # noqa: SLF001
            return auto.from_config(config, attn_implementation="eager", **_PLAIN)  # type: ignore[no-any-return]
    raise ConfigError(
        f"model type {kind}", got="no model of tokens", wanted="one for causal or masked language"
    )
