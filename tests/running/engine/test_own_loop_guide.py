"""The guide of one's own loop, as it reads."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from ranks import run_ranks
from running.engine.loops import alone, batches, costs, dataset, llama, weights

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/guides/your-own-loop.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
LOOP, LOSS, EVALUATION, AVERAGE, STOPPABLE, MEMORY = BLOCKS
STEPS = 5


def with_advantages() -> list[dict[str, Any]]:
    """Samples with a number for each token."""
    drawn = torch.Generator().manual_seed(3)
    return [
        {**item, "advantages": torch.rand(len(item["labels"]), generator=drawn).double()}
        for item in dataset()
    ]


def begun(ranks: int, folder: Path, items: Any) -> dict[str, Any]:
    """Names after the line of the guide that attaches a model, with few tokens a step."""
    line, _, _ = LOOP.partition("\n")
    small = f"batch_tokens=150, steps={STEPS}, say=print, planner=hr.PlannerConfig(ahead=0)"
    measure = 'measure=hr.MeasureOptions(costs=costs, memory="256MiB")'
    made = line.replace('batch_tokens="64Ki"', f"{small}, {measure}")
    assert made != line
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "copy": copy,
        "hr": hr,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS),
        "dataset": items,
        "costs": costs(ranks),
    }
    os.chdir(folder)
    exec(made, names)
    return names


def as_it_reads(ranks: int, folder: Path) -> tuple[list[Any], bool, list[float]]:
    """Weights after the guide's loop; whether its checkpoint is there; its loss of an evaluation,
    and that of the plain model."""
    names = begun(ranks, folder, dataset())
    model, run = names["model"], names["run"]
    exec(LOOP.partition("\n")[2], names)
    found = weights(model)
    ids = torch.randint(3, 61, (1, 40), generator=torch.Generator().manual_seed(0))
    names["batch"] = {"input_ids": ids, "labels": ids}
    exec(EVALUATION, names)
    wanted = float(model(**names["batch"]).loss.detach())
    total = names["loss"].clone()
    if ranks > 1:
        torch.distributed.all_reduce(total)
    run.detach()
    return found, any(Path("checkpoint").rglob("*.json")), [float(total), wanted]


def other_loops(ranks: int, folder: Path, body: str) -> list[Any]:
    """Weights after another of the guide's loops."""
    names = begun(ranks, folder, dataset())
    lines = body if body.startswith("with run") else f"for step in run:\n{_indented(body)}"
    exec(lines, names)
    names["run"].detach()
    return weights(names["model"])


def averaged(ranks: int, folder: Path) -> tuple[list[Any], list[Any], list[float]]:
    """Weights of the model and of the guide's moving average of it, and the loss of the average
    beside that of a plain model with its weights."""
    names = begun(ranks, folder, dataset())
    exec(AVERAGE, names)
    average, again = names["average"], llama()
    again.load_state_dict(average.state_dict())
    ids = torch.arange(40)[None]
    losses = [float(called(input_ids=ids, labels=ids).loss.detach()) for called in (average, again)]
    names["run"].detach()
    return weights(names["model"]), weights(average), losses


def averages_of_one_process() -> list[Any]:
    """The moving average of the weights after the same steps of one process."""
    model = llama()
    average = weights(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    for batch in batches(dataset(), STEPS, batch_tokens=150):
        alone(model, optimizer, [batch], scheduler=schedule)
        pairs = zip(average, weights(model), strict=True)
        average = [old + 0.001 * (new - old) for old, new in pairs]
    return average


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def with_its_loss(ranks: int, folder: Path) -> list[Any]:
    """Weights after steps with the guide's loss of advantages and a penalty."""
    names = begun(ranks, folder, with_advantages())
    model = names["model"]
    for step in names["run"]:
        for micro in step:
            inputs = {name: x for name, x in micro.inputs.items() if name != "labels"}
            logits = model(**inputs).logits.log_softmax(-1)
            said = micro.labels.clamp(min=0)[..., None]
            penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            given = {"logp": logits.gather(2, said)[..., 0], "penalty": penalty, "micro": micro}
            exec(LOSS, {**names, **given})
    names["run"].detach()
    return weights(model)


def by_one_process() -> list[Any]:
    """Weights after the same steps of one process, with its own loss."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    alone(model, optimizer, batches(dataset(), STEPS, batch_tokens=150), scheduler=schedule)
    return weights(model)


def by_one_process_with_its_loss() -> list[Any]:
    """The same with the guide's loss."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    for batch in batches(with_advantages(), STEPS, batch_tokens=150):
        items = [batch.read(i) for i in range(len(batch.lengths))]
        targets = sum(int((item["labels"] != -100).sum()) for item in items)
        for item in items:
            logp = model(input_ids=item["input_ids"][None]).logits[0].log_softmax(-1)
            kept = item["labels"] != -100
            said = logp.gather(1, item["labels"].clamp(min=0)[:, None])[:, 0]
            (-(said * item["advantages"] * kept).sum() / targets).backward()
        torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights(model)


def _require_alike(found: list[Any], wanted: list[Any]) -> None:
    for mine, exact in zip(found, wanted, strict=True):
        assert abs(mine - exact).max() < 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_and_the_evaluation_run(ranks: int, tmp_path: Path) -> None:
    """Catches lines that do not run, and what they leave out."""
    wanted = by_one_process()
    for found, saved, (loss, plain) in run_ranks(ranks, as_it_reads, ranks, tmp_path):
        _require_alike(found, wanted)
        assert saved
        assert loss == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("body", [STOPPABLE, MEMORY], ids=["stoppable", "memory"])
def test_other_loops_run(body: str, tmp_path: Path) -> None:
    """Catches statements around the loop and its micro-batches that change what is trained."""
    wanted = by_one_process()
    for found in run_ranks(2, other_loops, 2, tmp_path, body):
        _require_alike(found, wanted)


def test_the_average_runs(tmp_path: Path) -> None:
    """Catches a copy of the model that is spread over ranks as the model is, one that is no plain
    model, and averages that ranks do not share."""
    wanted, mean = by_one_process(), averages_of_one_process()
    for found, average, (loss, plain) in run_ranks(2, averaged, 2, tmp_path):
        _require_alike(found, wanted)
        for mine, exact in zip(average, mean, strict=True):
            assert abs(mine - exact).max() < 1e-8
        assert loss == plain


def test_the_loss_with_a_penalty_runs(tmp_path: Path) -> None:
    """Catches columns that do not come as the guide says, and a penalty that counts twice."""
    wanted = by_one_process_with_its_loss()
    for found in run_ranks(2, with_its_loss, 2, tmp_path):
        _require_alike(found, wanted)
