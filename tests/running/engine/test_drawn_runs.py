"""Runs of a configuration whose steps choose their own samples, on native models."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import headrace as hr
from headrace.data.sampler import Pieces, cut
from headrace.data.tokens import make_tokenizer
from headrace.engine.iteration_sampler import IterationSampler
from headrace.engine.setup import architecture_of, open_sampler
from headrace.errors import DataError
from headrace.native import checkpoint
from headrace.native.optimizers import Schedule
from oracles import full_weights, reference_step
from running.cli.jobs import losses, run, write_job

EXACT = 1e-10
STEPS = 18
CONTEXT = 192
DRAWS = """[data.iterations]
bucket_ratio = 2.0
least_steps = 1
most_steps = 2

"""


def job(folder: Path) -> Path:
    """A configuration of more than an epoch of small iterations, in fp64, with plain SGD."""
    path = write_job(folder, steps=STEPS, candidates=["megatron_cz"])
    text = path.read_text()
    for old, new in (
        ("batch_tokens = 1500\n", ""),
        ("[model]", f"{DRAWS}[model]"),
        ("every = 4", f"every = 1\nkeep = {STEPS}"),
        ("context = 256", f"context = {CONTEXT}"),
        ("warmup_steps = 2", 'warmup_steps = 2\nname = "sgd"\noptions = { momentum = 0.9 }'),
        ("threads = 1", 'threads = 1\ndtype = "float64"'),
        ("lr = 0.01", "lr = 0.5\ndecay = 0.0\nclip = 0.0"),
        ("[planner]", "[planner]\nrecompute = ['none']"),
    ):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run on two ranks."""

    path: Path
    folder: Path
    err: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("drawn")
    path = job(folder)
    code, _, err = run("train", path, "--out", folder / "run")
    assert code == 0, err
    return Whole(path=path, folder=folder / "run", err=err)


def samples(folder: Path) -> list[tuple[int, ...]]:
    """The numbers of the samples of every step."""
    lines = (folder / "plans.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)["lengths"]["ids"]) for line in lines]


def pieces_of(config: hr.Config) -> tuple[Any, Pieces]:
    """The corpus and its samples."""
    corpus, _ = open_sampler(config, make_tokenizer("bytes"))
    return corpus, cut(corpus.lengths, context=CONTEXT, too_long="split")


def alone(config: hr.Config, drawn: list[tuple[int, ...]]) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of one process that takes a step of each iteration."""
    corpus, pieces = pieces_of(config)
    a, seed = architecture_of(config), config.run.seed
    weights = full_weights(a, seed, torch.float64)
    speed = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    rates = Schedule(lr=0.5, steps=STEPS, warmup_steps=2, floor=config.optimizer.floor)
    found = []
    for step, ids in enumerate(drawn):
        parts = [
            corpus.tokens(pieces.documents[i], pieces.starts[i], pieces.starts[i] + length)
            for i, length in zip(ids, pieces.lengths[list(ids)].tolist(), strict=True)
        ]
        loss, gradients = reference_step(parts, weights, a, seed=seed, step=step)
        for name, gradient in gradients.items():
            speed[name] = 0.9 * speed[name] + gradient
            weights[name] = weights[name] - rates.rate(step) * speed[name]
        found.append(loss)
    return found, weights


def require_as_alone(config: hr.Config, folder: Path) -> None:
    """Hold losses and weights of a run to those of one process on the same samples."""
    wanted, weights = alone(config, samples(folder))
    assert losses(folder) == pytest.approx(wanted, rel=EXACT)
    assert wanted[-1] < wanted[0]
    held = checkpoint.read_all(folder / "checkpoints" / f"step-{STEPS:06d}")
    for name, weight in weights.items():
        np.testing.assert_allclose(held[name].numpy(), weight.numpy(), rtol=0, atol=EXACT)


def require_epochs(config: hr.Config, drawn: list[tuple[int, ...]], folder: Path) -> None:
    """Hold a run of more than an epoch to each sample once in the first, and none twice after."""
    corpus, pieces = pieces_of(config)
    everything = np.flatnonzero(pieces.lengths >= 2).tolist()
    assert len(everything) > len(corpus.lengths), "documents are split"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line)["epoch"] for line in lines]
    by_epoch = [
        sorted(i for ids, epoch in zip(drawn, epochs, strict=True) if epoch == n for i in ids)
        for n in range(max(epochs) + 1)
    ]
    assert by_epoch[0] == everything
    assert len(set(map(len, drawn))) > 2, "steps differ in size"
    assert by_epoch[1:]
    assert all(len(set(own)) == len(own) for own in by_epoch)


def test_two_ranks_train_as_one_process_would(whole: Whole) -> None:
    """Catches ranks that read other samples than were planned, a loss that is a mean over groups or
    launches, an optimizer that takes several steps, and samples that an epoch leaves out."""
    config = hr.Config.load(whole.path)
    require_as_alone(config, whole.folder)
    require_epochs(config, samples(whole.folder), whole.folder)
    assert "iterations    drawn by dcp from" in whole.err


def test_one_rank_draws_for_itself(whole: Whole, tmp_path: Path) -> None:
    """Catches costs of one rank that nothing is drawn for, and a run from Python that reads another
    key than the command."""
    config = hr.Config.load(whole.path, "devices.ranks=1", "data.iterations.flow=bucket")
    told: list[str] = []
    hr.train(config, out=tmp_path / "run", tell=told.append)
    assert any("drawn by bucket" in line for line in told)
    assert samples(tmp_path / "run") != samples(whole.folder)
    require_as_alone(config, tmp_path / "run")


def test_an_interrupted_run_goes_on_to_the_same_bits(whole: Whole, tmp_path: Path) -> None:
    """Catches a state that lacks the place in a bucket, and iterations that are drawn anew with the
    margin or from the batches that were read ahead."""
    copy = tmp_path / "run"
    shutil.copytree(whole.folder, copy)
    epochs = [json.loads(line)["epoch"] for line in (copy / "metrics.jsonl").open()]
    within = [step for step in range(1, STEPS) if epochs[step - 1] == epochs[step] > 0]
    stopped = within[len(within) // 2]
    for path in checkpoint.newest_first(copy / "checkpoints"):
        if checkpoint.step_of(path) != stopped:
            shutil.rmtree(path)
    code, _, err = run("train", whole.path, "--out", copy, "--resume")
    assert code == 0, err
    assert f"step-{stopped:06d}, saved by 2 ranks" in err
    assert losses(copy) == losses(whole.folder)
    assert samples(copy) == samples(whole.folder)
    mine, wanted = (
        checkpoint.read_all(folder / "checkpoints" / f"step-{STEPS:06d}")
        for folder in (copy, whole.folder)
    )
    for name, tensor in wanted.items():
        assert torch.equal(mine[name], tensor), name


def test_other_ranks_go_on_with_what_is_left(whole: Whole, tmp_path: Path) -> None:
    """Catches a position that counts for one number of ranks only."""
    changes = ("--set", "run.steps=2", "--set", "checkpoint.every=0")
    code, _, err = run("train", whole.path, "--out", tmp_path / "run", *changes)
    assert code == 0, err
    assert samples(tmp_path / "run") == samples(whole.folder)[:2]
    config = hr.Config.load(whole.path, "devices.ranks=1")
    hr.train(config, out=tmp_path / "run", resume=True, tell=lambda text: None)
    require_epochs(config, samples(tmp_path / "run"), tmp_path / "run")


def test_a_run_of_a_size_does_not_go_on_with_iterations(whole: Whole, tmp_path: Path) -> None:
    """Catches a position in batches that is taken for one in buckets, and the other way round."""
    sized = ("data.iterations=", "data.batch_tokens=900", "devices.ranks=1")
    config = hr.Config.load(whole.path, *sized, "run.steps=1")
    hr.train(config, out=tmp_path / "sized", tell=lambda text: None)
    drawn = hr.Config.load(whole.path, "devices.ranks=1")
    with pytest.raises(DataError, match=r"data\.iterations: got .*, wanted None"):
        hr.train(drawn, out=tmp_path / "sized", resume=True, tell=lambda text: None)
    shutil.copytree(whole.folder, tmp_path / "drawn")
    with pytest.raises(DataError, match=r"data\.batch_tokens: got 900, wanted None"):
        hr.train(
            hr.Config.load(whole.path, *sized),
            out=tmp_path / "drawn",
            resume=True,
            tell=lambda text: None,
        )


def test_ranks_that_draw_other_samples_are_told(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches ranks that train the plan of one draw on the samples of another."""
    price = IterationSampler.price

    def torn(made: IterationSampler, problem: hr.Problem) -> None:
        """Costs of which the second rank has others."""
        price(made, problem.replace(sizes=(2,)) if dist.get_rank() else problem)

    monkeypatch.setattr(IterationSampler, "price", torn)
    code, _, err = run("train", whole.path, "--out", tmp_path / "run")
    assert code not in (0, None)
    assert "samples of the iteration" in err
    trained = losses(tmp_path / "run")
    assert len(trained) < STEPS
    assert trained == losses(whole.folder)[: len(trained)], "before draws differed"
