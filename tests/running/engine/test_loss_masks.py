"""Rows whose masks leave prompts out of the loss, as native models learn from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import headrace as hr
from headrace.comm.mesh import Groups
from headrace.data.tokens import make_tokenizer
from headrace.engine.setup import architecture_of, open_sampler
from headrace.errors import DataError
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.spec import Architecture, Lengths
from oracles import full_weights, reference_logits
from plans import random_documents, random_plan
from ranks import run_ranks

LLAMA = Architecture(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)


def _batch(seed: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Documents, and masks of most of them: random, of nothing, and none."""
    rng = np.random.default_rng(seed)
    documents = random_documents(rng, LLAMA.vocabulary, 6, 37)
    masks = [rng.random(len(document)) < 0.4 for document in documents]
    masks[1], masks[2] = None, np.zeros(len(documents[2]), bool)  # type: ignore[call-overload]
    return documents, tuple(masks)


def _stepped(seed: int) -> tuple[float, dict[str, np.ndarray]]:
    torch.set_num_threads(1)
    groups = Groups()
    storage = Storage(LLAMA, groups, seed=seed, dtype=torch.float64, options=AdamW(clip=0.0))
    documents, masks = _batch(seed)
    lengths = Lengths.of(len(d) for d in documents)
    plan = random_plan(lengths, groups.ranks, LLAMA.layers, np.random.default_rng(seed), largest=4)
    executor = Executor(storage, groups, seed=seed)
    result = executor.run(plan, documents, step=0, lr=0.0, masks=masks)
    return result.loss, {name: s.numpy().copy() for name, s in storage.sums.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_masked_gradients_equal_one_process(ranks: int) -> None:
    """Catches a mask at the place that predicts in place of the predicted one, the mask of another
    sequence or part, and a mean over all tokens."""
    results = run_ranks(ranks, _stepped, 11)
    documents, masks = _batch(11)
    leaves = {n: w.requires_grad_() for n, w in full_weights(LLAMA, 11, torch.float64).items()}
    total, count = torch.zeros((), dtype=torch.float64), 0
    for document, mask in zip(documents, masks, strict=True):
        logits = reference_logits(torch.tensor(document.tolist()), leaves, LLAMA)
        for at in range(1, len(document)):
            if mask is None or mask[at]:
                total = total + cross_entropy(logits[at - 1], torch.tensor(int(document[at])))
                count += 1
    (total / count).backward()
    for loss, _ in results:
        assert loss == pytest.approx(float(total.detach()) / count, rel=1e-10)
    for name, weight in leaves.items():
        assert weight.grad is not None
        got = np.concatenate([results[r][1][name] for r in range(ranks)])
        scale = max(float(weight.grad.abs().max()), 1e-3)
        np.testing.assert_allclose(got, weight.grad.numpy(), rtol=0, atol=1e-10 * scale)


ROWS = [
    {
        "input_ids": [(7 * n + i) % 31 for i in range(4 + n % 23)],
        "completion_mask": [int(i > n % 5) for i in range(4 + n % 23)],
    }
    for n in range(24)
]


def _config(folder: Path, **changes: Any) -> hr.Config:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "my.toml").write_text(
        """
[data]
kind = "jsonl"
paths = ["rows.jsonl"]
tokenizer = "ids:31"
context = 16
batch_sequences = 8
[run]
steps = 3
[model]
layers = 1
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
[devices]
ranks = 1
device = "cpu"
threads = 1
dtype = "float64"
memory = "256MiB"
[profile]
rung_s = 0.01
repeats = 1
[report]
html = false
"""
    )
    cache = f"data.cache={folder / 'cache'}"
    more = (f"{key}={value}" for key, value in changes.items())
    return hr.Config.load(folder / "my.toml", cache, *more)


def test_a_native_run_learns_completions_alone(tmp_path: Path) -> None:
    """Catches masks that are lost between the rows and the model: the first loss is that of the
    completions of the first batch."""
    config = _config(tmp_path)
    told: list[str] = []
    run = hr.train(config, out=tmp_path / "run", tell=told.append)
    assert any("tokens have no loss: the rows' masks" in line for line in told)
    a = architecture_of(config)
    weights = full_weights(a, config.run.seed, torch.float64)
    _, sampler = open_sampler(config, make_tokenizer("ids:31"))
    total, count = 0.0, 0
    for sample in sampler.next_batch().samples:
        row, part = ROWS[sample.document], slice(sample.start, sample.start + sample.length)
        ids, mask = row["input_ids"][part], row["completion_mask"][part]
        logits = reference_logits(torch.tensor(ids), weights, a)
        for at in range(1, len(ids)):
            if mask[at]:
                total += float(cross_entropy(logits[at - 1], torch.tensor(ids[at])))
                count += 1
    assert run.losses[0] == pytest.approx(total / count, rel=1e-9)


def test_a_model_of_masked_tokens_refuses_masks(tmp_path: Path) -> None:
    """Catches a BERT that learns from prompts all the same."""
    config = _config(
        tmp_path, **{"model.kind": "bert", "data.tokenizer": "ids:31", "model.causal": "false"}
    )
    with pytest.raises(DataError, match="a model of masked tokens hides them itself"):
        hr.train(config, out=tmp_path / "run", tell=lambda line: None)
