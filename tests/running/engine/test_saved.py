"""Checkpoints that a loop cannot go on from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import HeadraceError
from headrace.native import checkpoint
from headrace.native.shard_files import StoredShard
from ranks import run_ranks
from running.engine.loops import attached, costs, dataset, llama, trained


def newest(folder: Path) -> Path:
    return checkpoint.newest_first(folder)[0]


def of_a_run(folder: Path) -> None:
    """Beside it one that a run of its own wrote."""
    shard = StoredShard(name="model.x", first_row=0, tensor=torch.zeros(1), shape=(1,))
    checkpoint.save(folder, 9, [shard], {"step": 9}, rank=0, gather=lambda payload: [payload])


def cut(folder: Path) -> None:
    """All of its tensors' files cut short."""
    for file in newest(folder).glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-9])


def without_a_key(folder: Path) -> None:
    """Its index of another version."""
    path = newest(folder) / "index.json"
    index = json.loads(path.read_text())
    del index["extra"]["optimizer"]
    path.write_text(json.dumps(index))


def nothing(folder: Path) -> None:
    """As it is."""


CASES: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "of a run": (of_a_run, {}, "not one of a loop"),
    "cut": (cut, {}, "bytes"),
    "without a key": (without_a_key, {}, "optimizer|checksum"),
    "another optimizer": (nothing, {"optimizer": "adam"}, "state of SGD"),
    "more layers": (nothing, {"layers": 3}, r"one without model\.\w+\.layers\.2"),
    "fewer layers": (nothing, {"layers": 1}, r"one with model\.\w+\.layers\.1"),
    "other groups": (nothing, {"groups": 2}, r"with 1 group of parameters, wanted 2"),
    "other data": (nothing, {"items": 3}, "start anew"),
}


def going_on(ranks: int, folder: Path, case: str) -> str:
    """What is said of a checkpoint."""
    change, other, _ = CASES[case]
    model = llama()
    options = {"costs": costs(ranks), "steps": 1}
    run = attached(model, torch.optim.SGD(model.parameters(), lr=0.1), dataset(), folder, **options)
    trained(run, model)
    run.save(folder / "saved")
    run.detach()
    if run.rank == 0:
        change(folder / "saved")
    torch.distributed.barrier()
    model = llama(other.get("layers", 2))
    options["costs"] = costs(ranks, layers=other.get("layers", 2))
    kind = torch.optim.Adam if "optimizer" in other else torch.optim.SGD
    items = dataset()[: other.get("items")]
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest}] if "groups" in other else [first, *rest]
    run = attached(model, kind(groups, lr=0.1), items, folder, **options)  # type: ignore[arg-type]
    before = [p.detach().clone() for p in model.parameters()]
    try:
        run.load(folder / "saved")
    except HeadraceError as error:
        if "items" not in other:
            for mine, own in zip(model.parameters(), before, strict=True):
                assert torch.equal(mine, own), "weights were overwritten"
        return str(error)
    return "nothing"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_gone_on_from_is_said(case: str, ranks: int, tmp_path: Path) -> None:
    """Catches tracebacks from the depths, ranks that disagree, and state of another optimizer."""
    for said in run_ranks(ranks, going_on, ranks, tmp_path, case, timeout_s=100):
        assert re.search(CASES[case][2], said), said


class Remembers:
    """A rate that is asked for what it holds, not for a copy of it."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, step: int) -> float:
        self.seen.append(step)
        return 1.0


def left_by_break(folder: Path, finishes: bool) -> list[Any]:
    """A loop that goes on for a step after a checkpoint in the background, and is left."""
    model, told = llama(), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = Remembers()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    run = attached(
        model,
        optimizer,
        dataset(),
        folder,
        costs=costs(1),
        steps=4,
        scheduler=scheduler,
        say=told.append,
    )
    for step in run:
        for micro in step:
            micro.backward(model(**micro.inputs).loss)
        if step.number == 0:
            run.save(folder / "saved", background=True)
            run._writer.look = lambda gather: None  # the disk is slow
            saved = list(rate.seen)
        if step.number == 1:
            break
    if finishes:
        run.finish_saving()
    run.detach()
    found = checkpoint.newest_first(folder / "saved")
    states = [checkpoint.extra_of(path)["scheduler"]["lr_lambdas"][0]["seen"] for path in found]
    return [states == [saved] if found else None, rate.seen != saved, told]


@pytest.mark.parametrize("finishes", [True, False])
def test_a_loop_that_is_left(finishes: bool, tmp_path: Path) -> None:
    """Catches a scheduler's state that later steps changed, and a checkpoint that is lost without
    a word."""
    ((same, changed, told),) = run_ranks(1, left_by_break, tmp_path, finishes, timeout_s=100)
    assert changed
    assert same is (True if finishes else None)
    assert any("finish_saving() was not called" in line for line in told) is not finishes


def in_the_background(folder: Path, fails: bool) -> list[Any]:
    """What is in the folder when it is saved in the first of two steps, what is said, and how many
    steps are recorded."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = folder / "run"
    run = attached(model, optimizer, dataset(), folder, costs=costs(2), steps=2, out=out)
    found: list[Any] = []
    try:
        for step in run:
            for micro in step:
                micro.backward(model(**micro.inputs).loss)
            if step.number == 0:
                run.save(folder / "saved", background=True)
                found.append(len(checkpoint.newest_first(folder / "saved")))
                if fails and run.rank == 1:  # where its file would be
                    run._writer._finished_table()
                    run._writer._failed = OSError(28, "no space left")
    except HeadraceError as error:
        torch.distributed.barrier()
        return [*found, str(error), len((out / "metrics.jsonl").read_text().splitlines())]
    return [*found, checkpoint.extra_of(newest(folder / "saved"))["step"], 2]


@pytest.mark.parametrize("fails", [False, True])
def test_a_loop_ends_with_its_checkpoint(fails: bool, tmp_path: Path) -> None:
    """Catches a checkpoint that nobody publishes, a disk that is full on one rank only, and a step
    that is not recorded as its checkpoint failed."""
    for before, said, recorded in run_ranks(2, in_the_background, tmp_path, fails, timeout_s=100):
        assert before == 0
        if fails:
            assert "rank 1: no space left" in said
            assert "as they were" in said
            assert recorded == 2
        else:
            assert said == 1
