"""Anyone's loop: whatever the plans, its losses and weights are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.engine import loop_runner
from headrace.engine.run_planner import RunPlanner
from headrace.engine.step_planner import StepPlanner
from headrace.errors import ConfigError, ModelError
from headrace.native.spans import HostClock
from headrace.spec.step import Planned, PlanRequest
from ranks import run_ranks
from running.engine.loops import (
    LENGTHS,
    VOCABULARY,
    Drawn,
    alone,
    attached,
    batches,
    costs,
    dataset,
    llama,
    trained,
    weights,
)
from spread import whole

pytest.importorskip("transformers")

EXACT = 1e-10


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrapped(how: str) -> tuple[Any, Any]:
    """(a model as a user has it, what he calls)."""
    model = llama()
    if how == "ddp":
        return model, DistributedDataParallel(model)
    if how == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model, model


def drawn_steps(how: str, ranks: int, folder: Path, seed: int) -> tuple[list[float], Any, Any]:
    """Losses, weights and strategies of steps with plans drawn at random."""
    model, called = wrapped(how)
    optimizer = sgd(called)
    run = attached(
        called, optimizer, dataset(), folder, clip=0.5, costs=costs(ranks), logits=ranks == 3
    )
    run.engine.planner = drawn = Drawn(
        ranks=ranks, layers=2, seed=seed, semantics="lockstep" if how == "fsdp2" else "free"
    )
    return trained(run, called), weights(model), drawn.strategies


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("alone", 1),
        ("alone", 2),
        ("ddp", 3),
        ("fsdp2", 2),
        whole("alone", 3),
        whole("alone", 4),
        whole("ddp", 1),
        whole("ddp", 2),
        whole("ddp", 4),
        whole("fsdp2", 3),
        whole("fsdp2", 4),
    ],
)
def test_any_plans_equal_one_process(how: str, ranks: int, tmp_path: Path) -> None:
    """Catches gradients counted by ranks, means of means, lost borders, an update too many, and
    layers computed again for another group."""
    found = run_ranks(ranks, drawn_steps, how, ranks, tmp_path, 7, timeout_s=200)
    model = llama()
    steps = len(found[0][0])
    assert steps >= 3
    losses = alone(model, sgd(model), batches(dataset(), steps, batch_tokens=150), clip=0.5)
    for got, ends, strategies in found:
        assert got == pytest.approx(losses, rel=EXACT)
        assert strategies == found[0][2]
        for mine, wanted in zip(ends, weights(model), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=EXACT)


def roberta() -> Any:
    """A RoBERTa that predicts masked tokens in fp64; positions of its tokens begin at 2."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=1,
        max_position_embeddings=128,
    )
    return RobertaForMaskedLM(config).double().train()


def masked_items() -> list[dict[str, Any]]:
    """Items without the id of padding, of which every third token has a label."""
    items = []
    for item in dataset(ignored=False):
        ids = item["input_ids"].clamp(min=2)
        labels = torch.full_like(ids, -100)
        labels[::3] = ids[::3]
        items.append({"input_ids": ids, "labels": labels})
    return items


def roberta_steps(ranks: int, folder: Path) -> list[float]:
    model = roberta()
    run = attached(model, sgd(model), masked_items(), folder, costs=costs(ranks), labels="same")
    run.engine.planner = Drawn(ranks=ranks, layers=2, seed=3)
    return trained(run, model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_positions_begin_where_the_model_counts_them_from(ranks: int, tmp_path: Path) -> None:
    """Catches positions from 0 on for a model that keeps the first ones for padding."""
    found = run_ranks(ranks, roberta_steps, ranks, tmp_path, timeout_s=200)
    model, steps = roberta(), len(found[0])
    drawn = batches(masked_items(), steps, kind="same", batch_tokens=150)
    losses = alone(model, sgd(model), drawn)
    for got in found:
        assert got == pytest.approx(losses, rel=1e-6)  # the model's loss is in single precision


def loss_of_nothing(folder: Path) -> str:
    model = llama()
    run = attached(model, sgd(model), dataset(), folder, costs=costs(1))
    for step in run:
        for micro in step:
            try:
                micro.backward(torch.zeros((), requires_grad=True))
            except ModelError as error:
                return str(error)
    return ""


def test_a_loss_of_no_result_is_refused(tmp_path: Path) -> None:
    """Catches a micro-batch whose backward nobody begins, while other ranks wait in theirs."""
    (said,) = run_ranks(1, loss_of_nothing, tmp_path)
    assert "loss given to micro.backward: got a number made of no result" in said


def planned_steps(how: str, folder: Path, options: dict[str, Any]) -> Any:
    """Losses, weights and plans of steps that the run plans itself."""
    model, called = wrapped(how)
    said: list[str] = []
    run = attached(called, sgd(called), dataset(), folder, say=said.append, **options)
    losses, plans = [], []
    for step in run:
        for micro in step:
            micro.backward(model(**micro.inputs).loss)
        losses.append(step.loss)
        plans.append(step.plan)
    return losses, weights(model), plans, run.found.costs.shape.layers, said


@pytest.mark.parametrize("how", [whole("ddp"), "fsdp2"])
def test_a_run_plans_for_itself(how: str, tmp_path: Path) -> None:
    """Catches costs that plans cannot be made from, and plans that the weights do not allow."""
    found = run_ranks(2, planned_steps, how, tmp_path, {"epochs": 2}, timeout_s=200)
    losses, ends, plans, layers, said = found[0]
    assert any("two layers foretell" in text for text in said)
    model = llama()
    wanted = alone(model, sgd(model), batches(dataset(), len(losses), batch_tokens=150))
    assert losses == pytest.approx(wanted, rel=EXACT)
    for mine, other in zip(ends, weights(model), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=EXACT)
    assert layers == 2
    assert {plan.semantics for plan in plans} == {"lockstep" if how == "fsdp2" else "free"}
    assert all(plan.predicted_s > 0 for plan in plans)
    assert sum(len(plan.lengths) for plan in plans) == 2 * len(LENGTHS)


@pytest.mark.parametrize("how", ["alone", whole("fsdp2")])
def test_layers_by_algorithm_1_equal_one_process(how: str, tmp_path: Path) -> None:
    """Catches a planner of others that a loop knows by its name and cannot run: groups of one size,
    free or in lockstep, whose layers are chosen for each micro-batch."""
    options = {"steps": 2, "planner": "paradyse"}
    losses, _, plans, _, _ = run_ranks(2, planned_steps, how, tmp_path, options, timeout_s=200)[0]
    model = llama()
    wanted = alone(model, sgd(model), batches(dataset(), len(losses), batch_tokens=150))
    assert losses == pytest.approx(wanted, rel=EXACT)
    for plan in plans:
        assert plan.planner == "paradyse"
        assert plan.semantics == ("lockstep" if how == "fsdp2" else "free")
        assert len({len(pipeline.ranks) for pipeline in plan.pipelines}) == 1


def hybrid_steps(folder: Path, given: bool) -> tuple[list[float], str, list[str]]:
    """Losses, the fingerprint of costs and what was said, with costs fitted to hybrids."""
    model, said = llama(), list[str]()
    run = hr.attach(
        model,
        sgd(model),
        dataset(),
        batch_tokens=150,
        steps=2,
        measure=hr.MeasureOptions(memory="256MiB", cache=folder, costs=costs(2) if given else None),
        planner=hr.PlannerConfig(costs="hybrid", ahead=0),
        say=said.append,
    )
    return trained(run, model), run.found.costs.fingerprint, said


def test_a_loop_plans_with_hybrid_costs(tmp_path: Path) -> None:
    """Catches a loop that ignores planner.costs, and ranks with forests of their own."""
    pytest.importorskip("sklearn")
    found = run_ranks(2, hybrid_steps, tmp_path, False, timeout_s=200)
    model = llama()
    wanted = alone(model, sgd(model), batches(dataset(), 2, batch_tokens=150))
    for losses, fingerprint, _ in found:
        assert losses == pytest.approx(wanted, rel=EXACT)
        assert fingerprint == found[0][1]
        assert fingerprint.endswith("fit=hybrid")
    assert any("hybrid costs: quadratics fitted" in text for text in found[0][2])


def refused_costs(folder: Path) -> str:
    """What is said of given costs that were not fitted to a hybrid."""
    try:
        hybrid_steps(folder, True)
    except ConfigError as error:
        return str(error)
    return ""


def test_given_costs_are_refused_as_hybrid(tmp_path: Path) -> None:
    """Catches given costs that silently take the place of those that were asked for."""
    for said in run_ranks(2, refused_costs, tmp_path, timeout_s=100):
        assert "planner.costs" in said


def trained_later(how: str, folder: Path) -> tuple[list[float], Any]:
    """Losses and weights of steps whose optimizer gets the layers after the loop was begun."""
    model, called = wrapped(how)
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    run = attached(called, optimizer, dataset(), folder, costs=costs(2), steps=2)
    optimizer.add_param_group({"params": model.model.parameters()})
    return trained(run, called), weights(model)


@pytest.mark.parametrize("how", ["alone", "fsdp2"])
def test_an_optimizer_may_get_more_of_the_model(how: str, tmp_path: Path) -> None:
    """Catches layers that are unfrozen late and taken for parameters of nobody, as weights that
    FSDP2 has gathered are other tensors."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = alone(model, optimizer, batches(dataset(), 2, batch_tokens=150))
    for got, ends in run_ranks(2, trained_later, how, tmp_path, timeout_s=100):
        assert got == pytest.approx(losses, rel=EXACT)
        for mine, wanted in zip(ends, weights(model), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=EXACT)


class Elsewhere(StepPlanner):
    """A planner that is not asked here."""

    def plan(self, request: PlanRequest) -> Planned:
        raise AssertionError(f"step {request.step} is planned here")


def planned_beside(folder: Path, ahead: int) -> tuple[list[str], list[int]]:
    """Plans of two epochs, and the processes beside while they are trained."""
    model, _ = wrapped("alone")
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2), epochs=2, ahead=ahead)
    plans, beside = [], []
    planner = run.engine.planner
    assert isinstance(planner, RunPlanner)
    for step in run:
        value = step.plan.to_json()
        plans.append(json.dumps([value["lengths"], value["pipelines"], value["micro_batches"]]))
        if ahead:
            planner.steps = Elsewhere(
                costs=planner.steps.costs, options=planner.steps.options, semantics="free"
            )
        for micro in step:
            micro.backward(model(**micro.inputs).loss)
        beside.append(len(psutil.Process().children()))
    run.detach()
    return plans, [*beside, len(psutil.Process().children())]


def test_plans_are_made_beside(tmp_path: Path) -> None:
    """Catches plans that training waits for, that are other ones, and a process that stays."""
    (here, none), _ = run_ranks(2, planned_beside, tmp_path, 0, timeout_s=100)
    (there, some), (told, others) = run_ranks(2, planned_beside, tmp_path, 2, timeout_s=100)
    assert here == there == told
    assert set(none) == set(others) == {0}
    assert some[0] == 1
    assert some[-1] == 0


def saved_and_gone_on(
    ranks: int, folder: Path, stop: int | None, how: str, background: bool = False
) -> Any:
    """Losses and samples from wherever the folder's checkpoint stands, to the end or ``stop``; a
    checkpoint in the background is written while one more step is taken."""
    model, called = wrapped(how)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run = attached(
        called,
        optimizer,
        dataset(),
        folder,
        scheduler=scheduler,
        steps=6,
        clip=1.0,
        costs=costs(ranks),
    )
    run.load(folder / "saved")
    found = []
    for step in run:
        for micro in step:
            micro.backward(model(**micro.inputs).loss)
        if stop is not None and step.number > stop:
            run.finish_saving()
            break
        found.append((step.number, step.loss, step.plan.lengths.ids, scheduler.get_last_lr()))
        if step.number == stop:
            run.save(folder / "saved", background=background)
            if not background:
                break
    return found, weights(model)


@pytest.mark.parametrize(
    ("before", "after", "how", "background"),
    [
        (2, 2, "alone", True),
        (2, 1, "fsdp2", False),
        whole(1, 3, "alone", False),
        whole(3, 2, "fsdp2", True),
    ],
)
def test_a_loop_goes_on(
    before: int, after: int, how: str, background: bool, tmp_path: Path
) -> None:
    """Catches state that is lost between runs: moments, rates, samples; on as many ranks to the
    bit; and checkpoints in the background that hold what later steps made."""
    first = run_ranks(
        before, saved_and_gone_on, before, tmp_path, 2, how, background, timeout_s=200
    )
    rest = run_ranks(after, saved_and_gone_on, after, tmp_path, None, how, timeout_s=200)
    unbroken = run_ranks(
        before, saved_and_gone_on, before, tmp_path / "own", None, how, timeout_s=200
    )
    got, wanted = first[0][0] + rest[0][0], unbroken[0][0]
    assert [row[0] for row in got] == list(range(6))
    assert [row[2:] for row in got] == [row[2:] for row in wanted]
    assert [row[1] for row in got] == pytest.approx([row[1] for row in wanted], rel=1e-9)
    for mine, other in zip(rest[0][1], unbroken[0][1], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-9)
    rates = {rate for _, _, _, (rate,) in got}
    assert rates == {0.01 * (1 / (1 + step)) for step in range(1, 7)}


def exhausted_steps(ranks: int, folder: Path, where: str) -> Any:
    """Losses and weights of a loop in which the last rank runs out of memory once a step."""
    model, called = wrapped("ddp")
    run = attached(called, sgd(called), dataset(), folder, costs=costs(ranks))
    run.engine.planner = drawn = Drawn(ranks=ranks, layers=2, seed=5)
    left = [0]

    def fail(*_: Any) -> None:
        if dist.get_rank() == ranks - 1 and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("no more")

    layer = model.model.layers[1]
    layer.register_forward_pre_hook(fail if where == "forward" else lambda *_: None)
    layer.register_full_backward_hook(fail if where == "backward" else lambda *_: None)
    losses, retries = [], []
    for step in run:
        left[0] = 1
        for micro in step:
            with micro:
                micro.backward(called(**micro.inputs).loss)
        losses.append(step.loss)
        retries.append(step.retries)
    return losses, weights(model), retries, drawn.failed


@pytest.mark.parametrize(
    ("ranks", "where"), [(2, "forward"), (3, "backward"), whole(1, "forward"), whole(4, "forward")]
)
def test_running_out_of_memory_loses_nothing(ranks: int, where: str, tmp_path: Path) -> None:
    """Catches ranks that hang in collectives of one that has gone, gradients of an attempt that
    failed, and groups that are used after they broke."""
    found = run_ranks(ranks, exhausted_steps, ranks, tmp_path, where, timeout_s=200)
    model = llama()
    losses = alone(model, sgd(model), batches(dataset(), len(found[0][0]), batch_tokens=150))
    for got, ends, retries, failed in found:
        assert got == pytest.approx(losses, rel=EXACT)
        assert retries == found[0][2]
        assert sum(retries) == len(failed) >= 2
        assert all(f"rank {ranks - 1} ran out of memory" in text for text in failed)
        for mine, wanted in zip(ends, weights(model), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=EXACT)


def evaluated(folder: Path) -> tuple[float, float]:
    """The losses of a batch by the attached model on two ranks, before and after a step."""
    _, called = wrapped("ddp")
    run = attached(called, sgd(called), dataset(), folder, costs=costs(2), steps=1)
    ids = torch.arange(26).view(2, 13)
    found = []
    for at in range(2):
        with torch.no_grad(), run.shard({"input_ids": ids, "labels": ids}) as shard:
            part = called(**shard.inputs).loss
        dist.all_reduce(part)
        found.append(float(part))
        if not at:
            trained(run, called)
    return found[0], found[1]


def test_an_attached_model_is_evaluated(tmp_path: Path) -> None:
    """Catches labels that are shifted twice, or not at all, outside of steps."""
    found = run_ranks(2, evaluated, tmp_path, timeout_s=100)
    ids, model = torch.arange(26).view(2, 13), llama()
    before = model(input_ids=ids, labels=ids).loss.item()
    alone(model, sgd(model), batches(dataset(), 1, batch_tokens=150))
    after = model(input_ids=ids, labels=ids).loss.item()
    for got in found:
        assert got == pytest.approx((before, after), rel=1e-6)  # theirs is in single precision


class Looked(HostClock):
    """A clock that notes when seconds are asked for, for which a device's host would wait."""

    def __init__(self) -> None:
        self.looks = 0

    def between(self, start: float, end: float) -> float:
        self.looks += 1
        return super().between(start, end)


def looks(folder: Path) -> tuple[list[int], list[int], Any]:
    """How often a clock was looked at in each micro-batch, and in each step; rows of the last."""
    clock, within, after, last = Looked(), list[int](), list[int](), None
    loop_runner.clock_of = lambda device: clock
    model, _ = wrapped("alone")
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2))
    for step in run:
        clock.looks = 0
        for micro in step:
            micro.backward(model(**micro.inputs).loss)
            within.append(clock.looks)
        after.append(clock.looks)
        last = step
    run.detach()
    assert last is not None
    return within, after, (run.engine.runner.rows(), last.seconds)


def test_nobody_waits_for_a_device_within_a_step(tmp_path: Path) -> None:
    """Catches a host that stands still after each forward and backward."""
    for within, after, (rows, seconds) in run_ranks(2, looks, tmp_path, timeout_s=100):
        assert set(within) == {0}
        assert min(after) > 0
        assert [row.kind for row in rows[-3:]] == ["forward", "backward", "update"]
        assert all(row.seconds > 0 for row in rows)
        assert rows[-1].end_s <= seconds
