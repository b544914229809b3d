"""Names, rows and files of the Hugging Face, against forwards that share no code."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError, SpecError
from headrace.models.hf_weights import (
    architecture_of,
    config_of,
    from_hugging_face,
    load_pretrained,
    save_pretrained,
    to_hugging_face,
)
from headrace.spec import Architecture, weight_table
from oracles import reference_logits

LLAMA = Architecture(
    layers=2,
    hidden=48,
    heads=6,
    kv_heads=2,
    ffn=160,
    vocabulary=61,
    tied=False,
    rope_theta=5000.0,
    norm_eps=1e-6,
    positions=128,
)
GPT = Architecture(
    layers=2, hidden=32, heads=4, kv_heads=4, ffn=96, vocabulary=61, kind="gpt", positions=40
)
BERT = Architecture(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=96,
    vocabulary=61,
    kind="bert",
    causal=False,
    positions=40,
    norm_eps=1e-12,
    mask_id=17,
)
MODELS = {
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True),
    "llama-mqa": replace(LLAMA, kv_heads=1),
    "llama-mha": replace(LLAMA, kv_heads=6),
    "gpt": GPT,
    "gpt-untied": replace(GPT, tied=False),
    "bert": BERT,
    "bert-untied": replace(BERT, tied=False),
}
each_model = pytest.mark.parametrize("a", MODELS.values(), ids=MODELS)


def random_weights(a: Architecture, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """No two entries alike, norms and biases too, so that no exchange of rows goes unseen."""
    g = torch.Generator().manual_seed(3)
    weights = {}
    for w in weight_table(a):
        mean = 1.0 if "norm" in w.name and w.name.endswith("weight") else 0.0
        weights[w.name] = (mean + 0.1 * torch.randn(w.shape, generator=g)).to(dtype)
    return weights


def theirs_logits(ids: torch.Tensor, w: dict[str, torch.Tensor], a: Architecture) -> torch.Tensor:
    """Logits [L, V] from weights in their naming, written after the papers of the models."""
    if a.kind == "bert":
        return _bert(ids, w, a)
    x = _llama(ids, w, a) if a.kind == "llama" else _gpt(ids, w, a)
    embedding = "model.embed_tokens.weight" if a.kind == "llama" else "transformer.wte.weight"
    return F.linear(x, w.get("lm_head.weight", w[embedding]))


def _llama(ids: torch.Tensor, w: dict[str, torch.Tensor], a: Architecture) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a.norm_eps) * w[f"{name}.weight"]

    x = w["model.embed_tokens.weight"][ids]
    for i in range(a.layers):
        at = f"model.layers.{i}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (F.linear(y, w[f"{at}.self_attn.{n}_proj.weight"]) for n in "qkv")
        q, k = _rotate(q, a), _rotate(k, a)
        x = x + F.linear(_attention(q, k, v, a), w[f"{at}.self_attn.o_proj.weight"])
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (F.linear(y, w[f"{at}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(gate * torch.sigmoid(gate) * up, w[f"{at}.mlp.down_proj.weight"])
    return norm(x, "model.norm")


def _gpt(ids: torch.Tensor, w: dict[str, torch.Tensor], a: Architecture) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a.norm_eps)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: len(ids)]
    for i in range(a.layers):
        at = f"transformer.h.{i}"
        q, k, v = conv(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").split(a.hidden, -1)
        x = x + conv(_attention(q, k, v, a), f"{at}.attn.c_proj")
        y = conv(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + conv(y, f"{at}.mlp.c_proj")
    return norm(x, "transformer.ln_f")


def _bert(ids: torch.Tensor, w: dict[str, torch.Tensor], a: Architecture) -> torch.Tensor:
    def dense(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        name = f"{name}.LayerNorm"
        return F.layer_norm(x, x.shape[1:], w[f"{name}.weight"], w[f"{name}.bias"], a.norm_eps)

    at = "bert.embeddings"
    words, positions, types = (
        w[f"{at}.{n}_embeddings.weight"] for n in ("word", "position", "token_type")
    )
    x = norm(words[ids] + positions[: len(ids)] + types[torch.zeros_like(ids)], at)
    for i in range(a.layers):
        at = f"bert.encoder.layer.{i}"
        q, k, v = (dense(x, f"{at}.attention.self.{n}") for n in ("query", "key", "value"))
        y = _attention(q, k, v, a)
        x = norm(x + dense(y, f"{at}.attention.output.dense"), f"{at}.attention.output")
        y = F.gelu(dense(x, f"{at}.intermediate.dense"))
        x = norm(x + dense(y, f"{at}.output.dense"), f"{at}.output")
    at = "cls.predictions"
    x = norm(F.gelu(dense(x, f"{at}.transform.dense")), f"{at}.transform")
    bias = w.get(f"{at}.decoder.bias", w[f"{at}.bias"])
    return F.linear(x, w.get(f"{at}.decoder.weight", words), bias)


def _rotate(x: torch.Tensor, a: Architecture) -> torch.Tensor:
    """Feature pairs (i, i + d / 2) of each head turned as complex numbers: x [L, heads d]."""
    d = a.head_features
    first, second = x.view(len(x), -1, 2, d // 2).unbind(2)
    rates = a.rope_theta ** (-torch.arange(0, d, 2).double() / d)
    angles = torch.arange(len(x)).double()[:, None, None] * rates
    turned = torch.complex(first.double(), second.double()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.stack([turned.real, turned.imag], 2).view(x.shape).to(x.dtype)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: Architecture) -> torch.Tensor:
    q, k, v = (x.view(len(x), -1, a.head_features).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(a.group_heads, 0) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=a.causal).transpose(0, 1).flatten(1)


# Weights


@each_model
def test_logits_of_both_namings(a: Architecture) -> None:
    """Alone catches a row permutation that is its own inverse but not theirs."""
    weights = random_weights(a, torch.float64)
    ids = torch.randint(a.vocabulary, (17,), generator=torch.Generator().manual_seed(1))
    ours = reference_logits(ids, weights, a)
    theirs = theirs_logits(ids, to_hugging_face(weights, a), a)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-10)
    assert ours.std() > 0.1


@given(
    kind=st.sampled_from(["llama", "gpt", "bert"]),
    groups=st.integers(1, 4),
    share=st.integers(1, 4),
    features=st.sampled_from([2, 4, 6]),
    ffn=st.integers(1, 200),
    tied=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_exact_inverse(
    kind: Any, groups: int, share: int, features: int, ffn: int, tied: bool
) -> None:
    """Alone catches a shape that the two ways cut differently: odd ffn, one head, one group."""
    heads = groups * share
    a = Architecture(
        layers=2,
        hidden=heads * features,
        heads=heads,
        ffn=ffn,
        vocabulary=5,
        kind=kind,
        kv_heads=groups if kind == "llama" else heads,
        positions=3,
        tied=tied,
        causal=kind != "bert",
        mask_id=0 if kind == "bert" else None,
    )
    weights = random_weights(a, torch.bfloat16)
    theirs = to_hugging_face(weights, a)
    head = "cls.predictions.decoder.weight" if kind == "bert" else "lm_head.weight"
    assert (head in theirs) is not tied
    assert all(part.is_contiguous() for part in theirs.values())
    again = from_hugging_face(theirs, a)
    assert list(again) != [] and set(again) == set(weights)  # noqa: PT018
    for name, weight in weights.items():
        assert again[name].is_contiguous()
        assert again[name].dtype == torch.bfloat16
        assert torch.equal(again[name], weight)


def test_old_files() -> None:
    """Alone catches buffers of old files, or names without a prefix, taken for unknown."""
    weights = random_weights(GPT)
    theirs = to_hugging_face(weights, GPT)
    bare = {name.removeprefix("transformer."): part for name, part in theirs.items()}
    bare |= {"h.0.attn.bias": torch.ones(1), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    again = from_hugging_face(bare, GPT)
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    llama = to_hugging_face(random_weights(LLAMA), LLAMA)
    llama["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert set(from_hugging_face(llama, LLAMA)) == {w.name for w in weight_table(LLAMA)}


@pytest.mark.parametrize("a", [BERT, MODELS["bert-untied"]], ids=["tied", "untied"])
def test_the_first_berts(a: Architecture) -> None:
    """Alone catches what the published files hold besides: the pooler, the next sentence, buffers,
    doubles of tied weights, old names of norms, one bias of the head."""
    weights = random_weights(a)
    theirs = to_hugging_face(weights, a)
    theirs |= {
        "bert.pooler.dense.weight": torch.ones(1),
        "bert.pooler.dense.bias": torch.ones(1),
        "cls.seq_relationship.weight": torch.ones(1),
        "cls.seq_relationship.bias": torch.ones(1),
        "bert.embeddings.position_ids": torch.arange(40)[None],
    }
    if a.tied:
        theirs["cls.predictions.decoder.weight"] = weights["embed.weight"]
        theirs["cls.predictions.decoder.bias"] = weights["head.bias"]
    else:
        del theirs["cls.predictions.decoder.bias"]
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        theirs = {key.replace(new, name): part for key, part in theirs.items()}
    for named in (theirs, {key.removeprefix("bert."): part for key, part in theirs.items()}):
        again = from_hugging_face(named, a)
        assert set(again) == set(weights)
        assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_the_bias_that_berts_head_computes_with() -> None:
    """Alone catches the other of two names, which an untied head of transformers 5 ignores."""
    a = MODELS["bert-untied"]
    theirs = to_hugging_face(random_weights(a), a)
    used = theirs["cls.predictions.decoder.bias"]
    theirs["cls.predictions.bias"] = used + 1
    assert torch.equal(from_hugging_face(theirs, a)["head.bias"], used)
    tied = to_hugging_face(random_weights(BERT), BERT)
    tied["cls.predictions.decoder.bias"] = tied["cls.predictions.bias"] + 1
    with pytest.raises(CheckpointError, match="another bias than the head's"):
        from_hugging_face(tied, BERT)


def test_head_of_a_tied_model() -> None:
    """Alone catches a head of its own that is thrown away without a word."""
    a = MODELS["llama-tied"]
    theirs = to_hugging_face(random_weights(a), a)
    theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"].clone()
    assert "head.weight" not in from_hugging_face(theirs, a)
    for head in (theirs["lm_head.weight"] + 1, theirs["lm_head.weight"].double()):
        with pytest.raises(CheckpointError, match="another matrix than the embedding"):
            from_hugging_face(theirs | {"lm_head.weight": head}, a)


def test_weights_of_another_model() -> None:
    """Alone catches silent loss: unknown, missing or misshapen weights are named."""
    weights = random_weights(LLAMA)
    theirs = to_hugging_face(weights, LLAMA)
    extra = {f"model.layers.0.self_attn.{x}_proj.bias": torch.ones(1) for x in "qkv"}
    with pytest.raises(CheckpointError, match=r"unknown .*q_proj\.bias, .*k_proj\.bias, .*v_proj"):
        from_hugging_face(theirs | extra, LLAMA)
    many = {f"x{i}": torch.ones(1) for i in range(30)}
    with pytest.raises(CheckpointError, match="and 22 more"):
        from_hugging_face(theirs | many, LLAMA)
    less = {name: part for name, part in theirs.items() if "up_proj" not in name}
    with pytest.raises(CheckpointError, match=r"no model\.layers\.0\.mlp\.up_proj\.weight, model"):
        from_hugging_face(less, LLAMA)
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=r"k_proj.weight: got \(48, 16\), wanted \(16, 48\)"):
        from_hugging_face(theirs | {name: theirs[name].t()}, LLAMA)
    with pytest.raises(
        CheckpointError, match=r"unknown embed\.wight; did you mean 'embed\.weight'"
    ):
        to_hugging_face(weights | {"embed.wight": torch.ones(1)}, LLAMA)
    for few in (replace(GPT, kv_heads=2), replace(BERT, kv_heads=2)):
        with pytest.raises(SpecError, match="kv_heads"):
            to_hugging_face(random_weights(few), few)


# Configurations


@each_model
def test_config_reads_back(a: Architecture) -> None:
    """Alone catches a field that is written under another name than it is read."""
    for changed in (a, replace(a, norm_eps=3e-7, rope_theta=77.0 if a.kind == "llama" else 1e4)):
        assert architecture_of(json.loads(json.dumps(config_of(changed)))) == changed


def test_config_of_old_and_bare_files() -> None:
    """Alone catches defaults other than theirs: ffn, heads, tied head, epsilon, theta, and dropout
    at all three places of which one is computed."""
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "n_ctx": 1024,
        "vocab_size": 50257,
        "n_inner": None,
    }
    wanted = "embd_pdrop: got 0.1, what is meant where it is left out, wanted 0; model.dropout"
    with pytest.raises(SpecError, match=wanted):
        architecture_of(gpt2)
    gpt2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0}
    assert architecture_of(gpt2) == Architecture.preset("gpt2", dropout=0.1)
    llama = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 9,
        "num_hidden_layers": 1,
        "intermediate_size": 96,
        "rope_scaling": None,
    }
    expected = Architecture(
        layers=1, hidden=64, heads=4, kv_heads=4, ffn=96, vocabulary=9, tied=False, norm_eps=1e-6
    )
    assert architecture_of(llama) == expected
    assert architecture_of(llama | {"rope_theta": 5e5}).rope_theta == 5e5
    bert = {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "intermediate_size": 4096,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "architectures": ["BertForPreTraining"],
    }
    with pytest.raises(SpecError, match=r"attention_probs_dropout_prob: got 0\.1, what is meant"):
        architecture_of(bert)
    bert |= {"attention_probs_dropout_prob": 0.0}
    assert architecture_of(bert) == Architecture.preset("bert-large", dropout=0.1)
    assert architecture_of(bert | {"vocab_size": 50}).mask_id == 49
    assert architecture_of(bert | {"mask_token_id": 4}).mask_id == 4
    new = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 7}}
    assert architecture_of(llama | new).rope_theta == 7.0


L, G, B = "llama", "gpt2", "bert"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (L, {"model_type": "lama"}, "'lama', wanted 'llama', 'gpt2' or 'bert'; did you mean 'llama'"),
    (L, {"model_type": "mistral"}, "model_type"),
    (L, {"model_type": None}, "model_type: got None"),
    (L, {"model_type": [1]}, "model_type"),
    (L, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    (L, {"architectures": 3}, "architectures"),
    (L, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: got 'linear'"),
    (L, {"rope_scaling": {"rope_type": "llama3"}}, "scaled rotary positions"),
    (L, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "got 'yarn'"),
    (L, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
    (L, {"rope_parameters": "default"}, "wanted an object"),
    (L, {"rope_theta": "1e4", "rope_parameters": None}, "rope_theta: got '1e4', wanted a number"),
    (L, {"hidden_act": "gelu"}, "hidden_act: got 'gelu', wanted 'silu'"),
    (L, {"attention_bias": True}, "attention_bias"),
    (L, {"mlp_bias": True}, "mlp_bias"),
    (L, {"head_dim": 128}, "head_dim: got 128, wanted 8 ="),
    (L, {"hidden_size": "48"}, "hidden_size: got '48', wanted a whole number"),
    (L, {"hidden_size": None}, "hidden_size: got None"),
    (L, {"num_attention_heads": 0}, "heads"),
    (L, {"vocab_size": True}, "vocab_size"),
    (L, {"num_key_value_heads": 4}, "multiple of 4"),
    (L, {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    (G, {"activation_function": "relu"}, "activation_function: got 'relu', wanted 'gelu_new'"),
    (G, {"scale_attn_weights": False}, "scale_attn_weights"),
    (G, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer"),
    (G, {"add_cross_attention": True}, "add_cross"),
    (G, {"n_positions": 0}, "positions"),
    (L, {"is_causal": False}, "is_causal: got False, wanted True"),
    (G, {"is_causal": False}, "is_causal"),
    (B, {"is_causal": True}, "is_causal"),
    (L, {"attention_dropout": 0.1}, "attention_dropout: got 0.1, wanted 0; model.dropout takes"),
    (G, {"attn_pdrop": 0.1}, "attn_pdrop: got 0.1, wanted 0"),
    (G, {"embd_pdrop": 0.1}, "embd_pdrop"),
    (G, {"attn_pdrop": "0.1"}, "attn_pdrop: got '0.1', wanted a number"),
    (B, {"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob"),
    (G, {"n_inner": -1}, "n_inner"),
    (B, {"hidden_act": "gelu_new"}, "hidden_act: got 'gelu_new', wanted 'gelu'"),
    (B, {"position_embedding_type": "relative_key"}, "position_embedding_type: got 'relative_key'"),
    (B, {"type_vocab_size": 3}, "type_vocab_size: got 3, wanted 2"),
    (B, {"is_decoder": True}, "is_decoder"),
    (B, {"add_cross_attention": True}, "add_cross"),
    (B, {"mask_token_id": 61}, "mask_id: got 61"),
    (B, {"architectures": ["BertForQuestionAnswering"]}, "wanted BertForMaskedLM or BertForPre"),
]


@pytest.mark.parametrize(("kind", "change", "text"), REFUSED)
def test_config_refused(kind: str, change: dict[str, Any], text: str) -> None:
    """Alone catches a variant that would load and compute something else."""
    with pytest.raises(SpecError, match=text):
        architecture_of(config_of({L: LLAMA, G: GPT, B: BERT}[kind]) | change)


def test_a_dropout_of_one_s_own_takes_the_place_of_all() -> None:
    """Alone catches published GPT-2s and BERTs, which have dropout everywhere, refused for good."""
    rates = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    assert architecture_of(config_of(GPT) | rates, dropout=0.0) == GPT
    rates = {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
    assert architecture_of(config_of(BERT) | rates, dropout=0.2) == replace(BERT, dropout=0.2)
    assert architecture_of(config_of(LLAMA) | {"attention_dropout": 0.1}, dropout=0.0) == LLAMA


def test_architecture_without_counterpart() -> None:
    """Alone catches an export that transformers would compute otherwise."""
    with pytest.raises(SpecError, match="causal"):
        config_of(replace(LLAMA, causal=False))
    for a in (GPT, BERT):
        with pytest.raises(SpecError, match="kv_heads"):
            config_of(replace(a, kv_heads=2))


# Files


@each_model
@pytest.mark.parametrize("max_file_bytes", [10**9, 40_000, 1])
def test_save_and_load(tmp_path: Path, a: Architecture, max_file_bytes: int) -> None:
    """Alone catches a weight lost between files, a tied one written twice, a wrong size."""
    weights = random_weights(a, torch.bfloat16)
    save_pretrained(tmp_path / "new" / "m", weights, a, max_file_bytes=max_file_bytes)
    folder = tmp_path / "new" / "m"
    again, loaded = load_pretrained(folder)
    assert loaded == a
    assert set(again) == set(weights)
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    files = sorted(folder.glob("*.safetensors"))
    total = sum(weight.nbytes for weight in weights.values())
    if a.kind == "bert" and not a.tied:
        total += weights["head.bias"].nbytes  # which their head holds under two names
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    if max_file_bytes == 10**9:
        assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors"}
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == total
        assert {name: p.name for p in files for name in load_file(p)} == index["weight_map"]
        largest = max(weight.nbytes for weight in to_hugging_face(weights, a).values())
        sizes = [sum(part.nbytes for part in load_file(p).values()) for p in files]
        assert max(sizes) <= max(max_file_bytes, largest)
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"


def test_save_over_what_is_loaded(tmp_path: Path) -> None:
    """Alone catches stale files that are read in place of the new, and files overwritten while
    the weights that are saved still lie in them."""
    weights, changed = random_weights(LLAMA), random_weights(GPT)
    save_pretrained(tmp_path, weights, LLAMA)
    (tmp_path / "tokenizer.json").write_text("{}")
    loaded, _ = load_pretrained(tmp_path)
    save_pretrained(tmp_path, changed, GPT)
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    save_pretrained(tmp_path, loaded, LLAMA, max_file_bytes=40_000)
    assert not (tmp_path / "model.safetensors").exists()
    save_pretrained(tmp_path, changed, GPT)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    again, a = load_pretrained(tmp_path)
    assert a == GPT
    assert all(torch.equal(again[name], weight) for name, weight in changed.items())


def test_damaged_folders(tmp_path: Path) -> None:
    """Alone catches a traceback from the depths, and an index that opens other folders."""
    save_pretrained(tmp_path, random_weights(GPT), GPT, max_file_bytes=20_000)
    index, config = tmp_path / "model.safetensors.index.json", tmp_path / "config.json"
    good = index.read_text()
    for file in ("../x.safetensors", "/etc/passwd", "a/b.safetensors", ".", 3):
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(CheckpointError, match=r"weight_map of .*wanted names of files"):
            load_pretrained(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json: got list, wanted a JSON object"):
        load_pretrained(tmp_path)
    index.write_text(good)
    first = tmp_path / sorted(set(json.loads(good)["weight_map"].values()))[0]
    first.write_bytes(first.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="the file is damaged"):
        load_pretrained(tmp_path)
    first.unlink()
    with pytest.raises(CheckpointError, match=f"{first}: missing$"):
        load_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="missing; pickled files are not read"):
        load_pretrained(tmp_path)
    config.write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: got .*wanted a JSON object"):
        load_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json: got No such file"):
        load_pretrained(tmp_path / "absent")


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Alone catches the error of the system where one of ours is due."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file was not written"):
        save_pretrained(tmp_path / "file", random_weights(GPT), GPT)


def test_folder_with_other_weights(tmp_path: Path) -> None:
    """Alone catches an error that does not name the folder."""
    save_pretrained(tmp_path, random_weights(GPT), GPT)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: pretrained weights: unknown"):
        load_pretrained(tmp_path)


@each_model
@pytest.mark.parametrize("max_file_bytes", [10**9, 40_000])
def test_transformers_agrees(tmp_path: Path, a: Architecture, max_file_bytes: int) -> None:
    """Alone catches a disagreement with the package itself, in the file or in the forward."""
    transformers = pytest.importorskip("transformers")
    weights = random_weights(a)
    save_pretrained(tmp_path / "ours", weights, a, max_file_bytes=max_file_bytes)
    names = {"llama": "LlamaForCausalLM", "gpt": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}
    kind = getattr(transformers, names[a.kind])
    model, report = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    ids = torch.randint(a.vocabulary, (17,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model.eval()(ids[None]).logits[0]
    torch.testing.assert_close(theirs, reference_logits(ids, weights, a), rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_file_bytes)
    again, loaded = load_pretrained(tmp_path / "theirs")
    assert replace(loaded, dropout=a.dropout) == a
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
