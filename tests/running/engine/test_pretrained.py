"""Models of the Hugging Face: trained from their folder, and back into one."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import headrace as hr
from headrace.data.tokenizer_files import save_tokenizer
from headrace.data.tokens import make_tokenizer
from headrace.models.objective import objective_of
from headrace.models.plain import plain_logits
from headrace.native import checkpoint
from headrace.ops.loss import IGNORED
from spread import whole

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.apart

WORDS = ["<end>", "[MASK]", "the", "mill", "race", "turns", "a", "wheel", "of", "water", "and"]
TEXTS = ("the mill race turns a wheel of water and the wheel turns the mill", "water of the race")
SPARE = 5  # rows of the embedding that no token has


def _tokenizer(folder: Path) -> None:
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[MASK]")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<end>", "[MASK]"])
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "the"}))


def _model(kind: str) -> Any:
    """A small model of random weights, with an epsilon, a base and widths that are no default."""
    rows = len(WORDS) + SPARE
    torch.manual_seed(5)
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=80,
            vocab_size=rows,
            rms_norm_eps=1e-3,
            rope_theta=777.0,
            max_position_embeddings=4096,
            initializer_range=0.3,
            tie_word_embeddings=False,
        )
        return transformers.LlamaForCausalLM(config)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            vocab_size=rows,
            layer_norm_epsilon=1e-3,
            initializer_range=0.3,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=80,
        vocab_size=rows,
        max_position_embeddings=64,
        layer_norm_eps=1e-3,
        initializer_range=0.3,
    )
    return transformers.BertForMaskedLM(config)


def _config(folder: Path, kind: str, **changes: Any) -> hr.Config:
    """A configuration that trains ``folder/model`` on the texts for a step."""
    (folder / "corpus").mkdir(exist_ok=True)
    for i, text in enumerate(TEXTS):
        (folder / "corpus" / f"{i}.txt").write_text(text)
    path = folder / "my.toml"
    path.write_text(
        f"""
data = {{ paths = ["corpus"], context = 64, batch_sequences = 2, cache = "cache" }}
model = {{ from = "model"{"" if kind == "llama" else ", dropout = 0.0"} }}
run = {{ steps = 1 }}
planner = {{ candidates = ["ulysses_z"] }}
devices = {{ ranks = 1, device = "cpu", threads = 1, memory = "256MiB" }}
profile = {{ rung_s = 0.01, repeats = 1 }}
report = {{ html = false }}
"""
    )
    cache = f"data.cache={folder / 'cache'}"
    return hr.Config.load(path, cache, *(f"{key}={value}" for key, value in changes.items()))


def _their_loss(model: Any, kind: str, config: hr.Config) -> float:
    """What transformers makes of the first batch, document by document."""
    tokenizer, losses, count = make_tokenizer(config.data.tokenizer), 0.0, 0
    masked = 1 if kind == "bert" else None
    shape = {"kind": "bert", "causal": False, "positions": 64} if masked else {}
    a = hr.Architecture(
        layers=1,
        hidden=8,
        heads=1,
        kv_heads=1,
        ffn=8,
        vocabulary=len(WORDS) + SPARE,
        mask_id=masked,
        **shape,
    )
    objective = objective_of(a, seed=config.run.seed, step=0)
    for sample, ids in enumerate(tokenizer.encode_batch(list(TEXTS))):
        read, labels = map(torch.from_numpy, objective.example(ids, sample))
        with torch.no_grad():
            logits = model.eval()(read.long()[None]).logits[0]
        losses += float(F.cross_entropy(logits, labels.long(), reduction="sum"))
        count += int((labels != IGNORED).sum())
    return losses / count


@pytest.mark.parametrize("kind", ["llama", whole("gpt2"), "bert"])
def test_the_first_loss_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    """Catches weights that stay those of the seed, an epsilon or base of our own, ids of another
    tokenizer, a row order that is not theirs; and a way back that loses one of them."""
    model = _model(kind)
    model.save_pretrained(tmp_path / "model")
    _tokenizer(tmp_path / "model")
    # On two ranks each takes its rows.
    config = _config(tmp_path, kind, **{"devices.ranks": 2 if kind == "llama" else 1})
    assert config.data.tokenizer == str(tmp_path / "model")
    told: list[str] = []
    run = hr.train(config, out=tmp_path / "run", tell=told.append)
    assert run.losses[0] == pytest.approx(_their_loss(model, kind, config), abs=1e-5)
    assert any(str(tmp_path / "model") in line for line in told)
    out = run.checkpoints.latest().export(tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    if kind == "llama":
        assert written["max_position_embeddings"] == 4096
    assert (written["bos_token_id"], written["eos_token_id"]) == (2, 0)
    assert _modes(out) == {_modes_of(out / "config.json")}
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    ours = make_tokenizer(config.data.tokenizer).encode_batch([TEXTS[0]])[0]
    assert [*theirs(TEXTS[0])["input_ids"], theirs.eos_token_id] == ours.tolist()
    if kind != "bert":
        _generates_alike(run, out)


def _modes(folder: Path) -> set[int]:
    return {_modes_of(path) for path in folder.iterdir()}


def _modes_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _generates_alike(run: hr.TrainingRun, out: Path) -> None:
    """Twelve tokens, each the likeliest: by transformers from the folder, by our weights."""
    latest = run.checkpoints.latest()
    a = hr.Architecture.from_json(latest.state["architecture"])
    weights = checkpoint.read_all(latest.path)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    start = torch.tensor([2, 3, 4])
    got = model.generate(
        start[None],
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        attention_mask=torch.ones(1, 3, dtype=torch.long),
    )
    ids = start
    for _ in range(12):
        ids = torch.cat([ids, plain_logits(ids, [len(ids)], weights, a)[-1:].argmax(1)])
    assert got[0].tolist() == ids.tolist()


def test_what_a_folder_cannot_do_is_said(tmp_path: Path) -> None:
    """Catches positions that the folder has no rows for, and a tokenizer of another model."""
    model = _model("gpt2")
    model.save_pretrained(tmp_path / "model")
    _tokenizer(tmp_path / "model")
    with pytest.raises(hr.errors.SpecError, match=r"data.context: got 65, wanted at most 64"):
        hr.train(_config(tmp_path, "gpt2", **{"data.context": 65}), out=tmp_path / "run")
    with pytest.raises(hr.errors.SpecError, match=r"got 16, wanted at least the tokenizer's 257"):
        hr.train(_config(tmp_path, "gpt2", **{"data.tokenizer": "bytes"}), out=tmp_path / "run")
    with pytest.raises(hr.errors.SpecError, match=r"embd_pdrop: .*model\.dropout takes"):
        hr.train(_config(tmp_path, "gpt2", **{"model.dropout": ""}), out=tmp_path / "run")
    with pytest.raises(hr.errors.CheckpointError, match=r"config\.json: got No such file"):
        hr.train(_config(tmp_path, "gpt2", **{"model.from": "nowhere"}), out=tmp_path / "run")


def test_bytes_in_the_words_of_the_library(tmp_path: Path) -> None:
    """Catches a letter that stands for another byte: what is generated would be read wrongly."""
    assert save_tokenizer("bytes", tmp_path) == {"bos_token_id": None, "eos_token_id": 256}
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(0x250))) + "\n  ab c\t\u4f60 \U0001f600 it's <|x|>"
    ours = make_tokenizer("bytes").encode_batch([text])[0].tolist()
    assert [*theirs(text)["input_ids"], theirs.eos_token_id] == ours
    assert theirs.decode(ours, skip_special_tokens=True) == text
    assert (theirs.eos_token_id, len(theirs)) == (256, 257)
    assert save_tokenizer("kmer:2", tmp_path / "k") == {"bos_token_id": None, "eos_token_id": 17}
    assert list((tmp_path / "k").iterdir()) == []


def test_a_tokenizer_file_alone(tmp_path: Path) -> None:
    """Catches a folder that transformers cannot open for want of a tokenizer's configuration."""
    (tmp_path / "model").mkdir()
    _tokenizer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    ids = save_tokenizer(str(tmp_path / "model" / "tokenizer.json"), tmp_path / "out")
    assert ids == {"bos_token_id": None, "eos_token_id": None}
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("the mill")["input_ids"] == [2, 3]
    with pytest.raises(hr.errors.DataError, match="was not written"):
        save_tokenizer("bytes", tmp_path / "model" / "tokenizer.json")


def test_a_model_from_scratch_says_how_far_it_was_trained(tmp_path: Path) -> None:
    """Catches an export that transformers takes for one of 2,048 positions."""
    config = _config(tmp_path, "llama", **{"model.from": ""})
    shape = {"preset": "llama-tiny", "layers": 1}
    config = hr.Config(**config.to_json() | {"model": shape})
    run = hr.train(config, out=tmp_path / "run", tell=lambda text: None)
    out = run.checkpoints.latest().export(tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    assert (written["max_position_embeddings"], written["eos_token_id"]) == (64, 256)
    _generates_alike(run, out)
    assert replace(hr.Architecture.preset("llama-tiny"), layers=1).positions == 0
