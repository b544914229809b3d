"""The correspondence of our weights to those of Hugging Face: Llama, GPT-2 and BERT.

A rule is the correspondence of one of our weights to one or more of theirs: a function that
splits ours and one that joins theirs, exact inverses that only move rows and columns. Shapes: n
heads in g groups, d features per head, h hidden, f feed-forward. ``T`` is transposed; GPT-2
stores matrices as [in, out].

    ours            Llama                                       GPT-2
    qkv.weight      q_proj, k_proj, v_proj by groups            c_attn T by groups
    proj.weight     o_proj T                                    attn.c_proj
    in.weight       gate_proj, up_proj in blocks by turns       c_fc T
    out.weight      down_proj T                                 mlp.c_proj

BERT is like Llama: query, key, value by groups, attention.output.dense T, intermediate.dense,
output.dense T. Rotary positions turn feature i with i + d / 2 in both namings, so that q and k
keep their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.errors import SpecError
from headrace.spec.architecture import Architecture

__all__ = ["EMBEDDING", "HEAD", "HEAD_BIASES", "PREFIX", "Rule", "rules_of"]

#: Prefix of the names of all weights but the head.
PREFIX = {"llama": "model.", "gpt": "transformer.", "bert": "bert."}
EMBEDDING = {
    "llama": "model.embed_tokens.weight",
    "gpt": "transformer.wte.weight",
    "bert": "bert.embeddings.word_embeddings.weight",
}
HEAD = {
    "llama": "lm_head.weight",
    "gpt": "lm_head.weight",
    "bert": "cls.predictions.decoder.weight",
}
#: One bias under two names: transformers 5 computes with the second, which is the first only where
#: the head is tied; earlier versions hold them equal always.
HEAD_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How our weight ``ours`` corresponds to one or more of Hugging Face, ``theirs`` (names):
    ``split`` makes their tensors from ours, ``join`` ours from theirs, in the order of the
    names."""

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]


def rules_of(architecture: Architecture) -> list[Rule]:
    """The rules of all weights, one for each of ours. Raises SpecError for a GPT-2 or BERT that has
    fewer key-value heads than query heads, as their files cannot state that."""
    if architecture.kind == "llama":
        return _llama_rules(architecture)
    if architecture.kv_heads != architecture.heads:
        got, heads = architecture.kv_heads, architecture.heads
        raise SpecError("model.kv_heads", got=got, wanted=f"{heads} as in every GPT-2 and BERT")
    return _gpt_rules(architecture) if architecture.kind == "gpt" else _bert_rules(architecture)


def _llama_rules(a: Architecture) -> list[Rule]:
    """The rules of a Llama: for each of our weights those of transformers, and how they convert."""
    rules = [_same("embed.weight", EMBEDDING["llama"])]
    for i in range(a.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attention = tuple(f"{theirs}.self_attn.{x}_proj" for x in "qkv")
        gates = tuple(f"{theirs}.mlp.{x}_proj.weight" for x in ("gate", "up"))
        rules += [
            _same(f"{ours}.norm1.weight", f"{theirs}.input_layernorm.weight"),
            _grouped(f"{ours}.qkv", attention, "weight", a),
            _transposed(f"{ours}.proj.weight", f"{theirs}.self_attn.o_proj.weight"),
            _same(f"{ours}.norm2.weight", f"{theirs}.post_attention_layernorm.weight"),
            Rule(
                ours=f"{ours}.in.weight",
                theirs=gates,
                split=lambda t: _split_blocks(t, a),
                join=lambda both: _join_blocks(both, a),
            ),
            _transposed(f"{ours}.out.weight", f"{theirs}.mlp.down_proj.weight"),
        ]
    rules.append(_same("norm.weight", "model.norm.weight"))
    return rules if a.tied else [*rules, _same("head.weight", HEAD["llama"])]


def _gpt_rules(a: Architecture) -> list[Rule]:
    """The rules of a GPT-2: for each of our weights those of transformers, and how they convert."""
    rules = [
        _same("embed.weight", EMBEDDING["gpt"]),
        _same("positions.weight", "transformer.wpe.weight"),
    ]
    for i in range(a.layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        rules += [
            _fused(f"{ours}.qkv.weight", f"{theirs}.attn.c_attn.weight", a),
            _fused(f"{ours}.qkv.bias", f"{theirs}.attn.c_attn.bias", a),
            _transposed(f"{ours}.in.weight", f"{theirs}.mlp.c_fc.weight"),
            _same(f"{ours}.in.bias", f"{theirs}.mlp.c_fc.bias"),
        ]
        same = {"norm1": "ln_1", "proj": "attn.c_proj", "norm2": "ln_2", "out": "mlp.c_proj"}
        rules += [
            _same(f"{ours}.{mine}.{part}", f"{theirs}.{other}.{part}")
            for mine, other in same.items()
            for part in ("weight", "bias")
        ]
    rules += [_same(f"norm.{part}", f"transformer.ln_f.{part}") for part in ("weight", "bias")]
    return rules if a.tied else [*rules, _same("head.weight", HEAD["gpt"])]


def _bert_rules(a: Architecture) -> list[Rule]:
    """The rules of a BERT: for each of our weights those of transformers, and how they convert."""
    rules = [
        _same("embed.weight", EMBEDDING["bert"]),
        _same("positions.weight", "bert.embeddings.position_embeddings.weight"),
        _same("types.weight", "bert.embeddings.token_type_embeddings.weight"),
    ]
    same = {
        "embed_norm": "bert.embeddings.LayerNorm",
        "head_dense": "cls.predictions.transform.dense",
        "head_norm": "cls.predictions.transform.LayerNorm",
    }
    for i in range(a.layers):
        ours, theirs = f"layers.{i}", f"bert.encoder.layer.{i}"
        attention = tuple(f"{theirs}.attention.self.{x}" for x in ("query", "key", "value"))
        transposed = {"proj": "attention.output.dense", "out": "output.dense"}
        same |= {
            f"{ours}.norm1": f"{theirs}.attention.output.LayerNorm",
            f"{ours}.in": f"{theirs}.intermediate.dense",
            f"{ours}.norm2": f"{theirs}.output.LayerNorm",
        }
        rules += [_grouped(f"{ours}.qkv", attention, part, a) for part in ("weight", "bias")]
        for mine, other in transposed.items():
            rules.append(_transposed(f"{ours}.{mine}.weight", f"{theirs}.{other}.weight"))
            rules.append(_same(f"{ours}.{mine}.bias", f"{theirs}.{other}.bias"))
    rules += [
        _same(f"{mine}.{part}", f"{other}.{part}")
        for mine, other in same.items()
        for part in ("weight", "bias")
    ]
    if a.tied:
        return [*rules, _same("head.bias", HEAD_BIASES[0])]
    # Where the head is not tied, transformers computes with the second of both biases.
    both_biases = Rule(
        ours="head.bias", theirs=HEAD_BIASES, split=lambda t: (t, t.clone()), join=lambda ts: ts[1]
    )
    return [*rules, both_biases, _same("head.weight", HEAD["bert"])]


def _same(ours: str, theirs: str) -> Rule:
    """The rule of a weight that is the same tensor under both names."""
    return Rule(ours=ours, theirs=(theirs,), split=lambda t: (t,), join=lambda ts: ts[0])


def _transposed(ours: str, theirs: str) -> Rule:
    """The rule of a matrix that is transposed."""
    return Rule(ours=ours, theirs=(theirs,), split=lambda t: (t.t(),), join=lambda ts: ts[0].t())


def _grouped(ours: str, theirs: tuple[str, ...], part: str, a: Architecture) -> Rule:
    """The rule of our fused projection of queries, keys and values, of which they have the three
    apart: our ``part``, ``weight`` [(n + 2 g) d, h] or ``bias`` [(n + 2 g) d], of the module
    ``ours``, and theirs of the three modules ``theirs``, [n d, ...] and twice [g d, ...]."""
    return Rule(
        ours=f"{ours}.{part}",
        theirs=tuple(f"{name}.{part}" for name in theirs),
        split=lambda t: _split_groups(t, a),
        join=lambda qkv: _join_groups(qkv, a),
    )


def _fused(ours: str, theirs: str, a: Architecture) -> Rule:
    """The rule of GPT-2's c_attn: a weight [h, 3 h], stored as [in, out], or a bias [3 h], with all
    queries, then all keys, then all values, which ours has by groups."""
    return Rule(
        ours=ours,
        theirs=(theirs,),
        split=lambda t: (torch.cat(_split_groups(t, a)).t(),),
        join=lambda ts: _join_groups(ts[0].t().chunk(3), a),
    )


def _join_groups(qkv: Sequence[torch.Tensor], a: Architecture) -> torch.Tensor:
    """Join the rows of q [n d, ...], k and v [g d, ...] to [(n + 2 g) d, ...]: of each KV group its
    n / g query heads, then its key, then its value."""
    parts = [part.unflatten(0, (a.kv_heads, -1)) for part in qkv]
    return torch.cat(parts, 1).flatten(0, 1)


def _split_groups(qkv: torch.Tensor, a: Architecture) -> tuple[torch.Tensor, ...]:
    """The inverse of :func:`_join_groups`: (q [n d, ...], k [g d, ...], v [g d, ...]) from rows
    [(n + 2 g) d, ...] in groups of n / g query heads, a key and a value."""
    d = a.head_features
    parts = qkv.unflatten(0, (a.kv_heads, -1)).split([a.group_heads * d, d, d], 1)
    return tuple(part.flatten(0, 1) for part in parts)


def _join_blocks(both: Sequence[torch.Tensor], a: Architecture) -> torch.Tensor:
    """Join (gate, up), [f, h] each, to [2 f, h]: a block of ``ffn_block`` rows of gate, one of up,
    the next of gate, and so on."""
    parts = [part.unflatten(0, (-1, a.ffn_block)) for part in both]
    return torch.stack(parts, 1).flatten(0, 2)


def _split_blocks(both: torch.Tensor, a: Architecture) -> tuple[torch.Tensor, ...]:
    """The inverse of :func:`_join_blocks`: (gate, up), [f, h] each, from [2 f, h]."""
    blocks = both.unflatten(0, (-1, 2, a.ffn_block))
    return tuple(part.flatten(0, 1) for part in blocks.unbind(1))
