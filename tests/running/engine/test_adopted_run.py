"""``headrace train`` on models that nobody here wrote: the same command, data and report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.errors import ConfigError, SpecError
from running.cli.jobs import metrics
from spread import whole

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.apart

CONTEXT = 96
TEXTS = [" ".join(f"word{(7 * n + i) % 31}" for i in range(2 + n % 23)) for n in range(40)]


def model_of(kind: str) -> Any:
    """A tiny model of a type, of fp64 when it is trained."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    config = transformers.Gemma3TextConfig(
        **sizes,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
    )
    return transformers.Gemma3ForCausalLM(config)


def qwen() -> Any:
    return model_of("qwen3")


def small() -> Any:
    """A model with fewer rows than there are bytes."""
    model = model_of("qwen3")
    model.resize_token_embeddings(100)
    return model


def job(folder: Path, kind: str | None, **changes: str) -> Path:
    """A configuration of ten steps on a folder of a model, or on a factory's where it is None."""
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    if kind is not None:
        model_of(kind).save_pretrained(folder / "model")
    of = "" if kind is None else 'from = "model"\n'
    text = f"""
[model]
{of}
[data]
kind = "jsonl"
paths = ["data.jsonl"]
tokenizer = "bytes"
context = {CONTEXT}
batch_tokens = 640
cache = "{folder / "cache"}"
[run]
steps = 10
seed = 5
[optimizer]
lr = 0.003
clip = 1.0
eps = 0.001
[devices]
ranks = 2
dtype = "float64"
memory = "1GiB"
[planner]
{changes.get("planner", "")}
[checkpoint]
every = 2
"""
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


def drawn_by(run: Path) -> list[list[int]]:
    """The documents of every step of a run."""
    lines = (run / "plans.jsonl").read_text().splitlines()
    return [json.loads(line)["lengths"]["ids"] for line in lines]


def alone(config: hr.Config, model: Any, drawn: list[list[int]] | None = None) -> list[float]:
    """The losses of one process, which runs every document by itself: those of the configuration's
    batches, or of the ``drawn`` ones, none of which is cut."""
    from headrace.data.tokens import make_tokenizer
    from headrace.engine.adopted_run import user_optimizer
    from headrace.engine.setup import open_sampler

    model = model.double().train()
    corpus, sampler = open_sampler(config, make_tokenizer("bytes"))
    optimizer, scheduler = user_optimizer(model, config.optimizer, config.run.steps)
    losses = []
    for step in range(config.run.steps):
        if drawn is None:
            samples = sampler.next_batch().samples
            parts = [(s.document, s.start, s.start + s.length) for s in samples]
        else:
            parts = [(at, 0, int(corpus.lengths[at])) for at in drawn[step]]
        learned = [corpus.learned(*part) for part in parts]
        count = sum(
            stop - start - 1 if mask is None else int(mask[1:].sum())
            for (_, start, stop), mask in zip(parts, learned, strict=True)
        )
        total = 0.0
        for part, mask in zip(parts, learned, strict=True):
            ids = torch.from_numpy(corpus.tokens(*part)).long()
            said = slice(None) if mask is None else torch.from_numpy(mask)[1:]
            logits = model(input_ids=ids[None]).logits[0, :-1][said]
            loss = torch.nn.functional.cross_entropy(logits, ids[1:][said], reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(path: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", "train", str(path), "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize(
    ("kind", "planner"),
    [("qwen3", ""), whole("gemma3", ""), whole("qwen3", 'working = "sharded"')],
)
def test_folders_of_other_types_train(kind: str, planner: str, tmp_path: Path) -> None:
    """Catches losses of two ranks that are not those of one process, a report without steps, and a
    model that is taken for a native one."""
    path = job(tmp_path, kind, planner=planner)
    done = train(path, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the model is adopted" in done.stderr
    assert Path(done.stdout.strip()).name == "report.html"
    config = hr.Config.load(path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64
    )
    wanted = alone(config, loaded)
    # Gemma multiplies by the weights of its norms in single precision.
    exact = 1e-9 if kind == "qwen3" else 1e-6
    assert hr.TrainingRun(tmp_path / "run").losses == pytest.approx(wanted, rel=exact)
    assert wanted[-1] < wanted[0]


@pytest.mark.slow
def test_masks_of_the_loss_are_honoured(tmp_path: Path) -> None:
    """Catches prompts that an adopted model is trained on, and a mean over all tokens."""
    path = job(tmp_path, "qwen3")
    rows = [list(text.encode()) for text in TEXTS]
    masks = [[int(i > len(ids) // 3) for i in range(len(ids))] for ids in rows]
    lines = [
        json.dumps({"input_ids": ids, "completion_mask": mask})
        for ids, mask in zip(rows, masks, strict=True)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    changes = ("run.steps=3", "checkpoint.every=0", "report.html=false")
    more = [word for change in changes for word in ("--set", change)]
    done = train(path, tmp_path / "run", *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens have no loss: the rows' masks" in done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64
    )
    wanted = alone(hr.Config.load(path, *changes), model)
    assert hr.TrainingRun(tmp_path / "run").losses == pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Catches a run that begins anew, and one that goes on with other weights, rates or samples."""
    path = job(tmp_path, "qwen3")
    whole_run = train(path, tmp_path / "whole")
    assert whole_run.returncode == 0, whole_run.stderr[-3000:]
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "headrace", "train", str(path), "--out", str(out)]
    going = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not (out / "checkpoints/step-000004/index.json").exists():
        assert going.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(going.pid, signal.SIGKILL)
    going.wait()
    again = train(path, out, "--resume")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "going on with step" in again.stderr
    wanted = hr.TrainingRun(tmp_path / "whole").losses
    assert hr.TrainingRun(out).losses == pytest.approx(wanted, rel=1e-12)
    assert train(path, out, "--resume").returncode == 0


@pytest.mark.slow
def test_a_run_that_is_stopped_keeps_its_steps(tmp_path: Path) -> None:
    """Catches an adopted model whose steps since the last checkpoint are lost at a signal, and one
    that goes on elsewhere than where it stopped."""
    path, out = job(tmp_path, "qwen3"), tmp_path / "stopped"
    more = ("--steps", "40", "--set", "checkpoint.every=0", "--set", "report.html=false")
    command = [sys.executable, "-m", "headrace", "train", str(path), "--out", str(out), *more]
    going = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, pipesize=1 << 20
    )
    deadline = time.monotonic() + 200
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_bytes():
        assert going.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    going.send_signal(signal.SIGTERM)
    _, said = going.communicate(timeout=60)
    assert going.returncode == 143
    steps = len((out / "metrics.jsonl").read_text().splitlines())
    folder = out / "checkpoints" / f"step-{steps:06d}"
    assert f"stopped after step {steps}; checkpoint {folder}; continue with: headrace" in said
    for one, again in ((out, ["--resume"]), (tmp_path / "whole", [])):
        done = train(path, one, *more, *again)
        assert done.returncode == 0, done.stderr[-3000:]
    assert 0 < steps < 40
    assert hr.TrainingRun(out).losses == hr.TrainingRun(tmp_path / "whole").losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_choose_their_own_samples(tmp_path: Path) -> None:
    """Catches an adopted model whose iterations are drawn before its costs are known, whose samples
    weigh by their group, that leaves some out of an epoch, and that goes on with other iterations
    than without a break."""
    path, out = job(tmp_path, "qwen3"), tmp_path / "run"
    changes = (
        "data.batch_tokens=",
        "data.context=160",
        "data.too_long=refuse",
        "data.iterations.least_steps=1",
        "data.iterations.most_steps=2",
        "checkpoint.every=3",
        "checkpoint.keep=9",
        "report.html=false",
    )
    more = [word for change in changes for word in ("--set", change)]
    done = train(path, out, *more)
    assert done.returncode == 0, done.stderr[-3000:]
    drawn, losses = drawn_by(out), hr.TrainingRun(out).losses
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64
    )
    assert losses == pytest.approx(alone(hr.Config.load(path, *changes), model, drawn), rel=1e-9)
    epochs = [row["epoch"] for row in metrics(out)]
    first = [i for ids, epoch in zip(drawn, epochs, strict=True) if epoch == 0 for i in ids]
    assert sorted(first) == list(range(len(TEXTS)))
    assert epochs.count(0) > 1
    assert max(epochs) > 0
    for saved in (out / "checkpoints").glob("step-*"):
        if saved.name != "step-000003":
            shutil.rmtree(saved)
    again = train(path, out, *more, "--resume")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "going on with step 3" in again.stderr
    assert drawn_by(out) == drawn
    assert hr.TrainingRun(out).losses == losses


def test_a_factory_makes_the_model(tmp_path: Path) -> None:
    """Catches a factory that is not asked on every rank, and one beside a shape."""
    path = job(tmp_path, None)
    config = hr.Config.load(path, "devices.ranks=1", "run.steps=3")
    told: list[str] = []
    run = hr.train(config, model=qwen, out=tmp_path / "run", tell=told.append)
    assert run.losses == pytest.approx(alone(config, qwen()), rel=1e-9)
    with pytest.raises(ConfigError, match=r"leave the section \[model\] empty"):
        hr.train(
            hr.Config.load(path, "devices.ranks=1", "model.preset=llama-tiny"),
            model=qwen,
            out=tmp_path / "both",
        )
    with pytest.raises(SpecError, match="got 100, wanted at least the tokenizer's 257"):
        hr.train(config, model=small, out=tmp_path / "small", tell=told.append)
    with pytest.raises(ConfigError, match=r"wanted a torch\.nn\.Module"):
        hr.train(config, model=dict, out=tmp_path / "none", tell=told.append)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_takes_a_factory(tmp_path: Path) -> None:
    """Catches a flag that is parsed and not passed on."""
    path = job(tmp_path, None)
    (tmp_path / "mine.py").write_text("from running.engine.test_adopted_run import qwen\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "headrace", "train", str(path), "--model", "mine:qwen"]
    command += ["--out", str(tmp_path / "run"), "--steps", "2", "--set", "report.html=false"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(hr.TrainingRun(tmp_path / "run").losses) == 2


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            "planner.methods=megatron_ts",
            ConfigError,
            "planner.methods: got a model that is adopted",
        ),
        ("model.dropout=0.1", ConfigError, "the rates of its own configuration"),
        ("data.context=512", SpecError, "at most 256, the model's places"),
        ("devices.dtype=bfloat16", ConfigError, "'replicated' in bfloat16"),
        (
            "planner.working=sharded data.iterations=dcp data.batch_tokens=",
            ConfigError,
            "data.iterations: got an adopted model whose weights are sharded",
        ),
    ],
)
def test_what_an_adopted_model_cannot_is_refused(
    change: str, error: type[Exception], says: str, tmp_path: Path
) -> None:
    """Catches a key that does nothing, and errors from the depths."""
    path = job(tmp_path, "qwen3", planner='working = "replicated"')
    config = hr.Config.load(path, "devices.ranks=1", *change.split())
    with pytest.raises(error, match=says):
        hr.train(config, out=tmp_path / "run", tell=lambda text: None)
