"""A loss or a gradient that is not finite never reaches the weights, whatever the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import headrace as hr
from headrace.errors import HeadraceError
from ranks import run_ranks
from running.engine.loops import attached, costs, dataset, llama, weights
from spread import whole

pytest.importorskip("transformers")


class Overflowing(torch.autograd.Function):
    """A loss as it is, whose gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.full_like(grad, ctx.value), None


def troubled(how: str, value: float, clip: float | None, folder: Path) -> Any:
    """What is said of a step in which the last rank's gradient (or its loss) is not finite, and the
    weights and the optimizer's state before and after it; then of the step after."""
    model = llama()
    if how == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    options = {"clip": clip, "scheduler": scheduler, "costs": costs(ranks), "steps": 3}
    if how == "fsdp2":
        options.pop("costs")
    if how == "by hand":
        options |= {"scheduler": None, "update": False}
    run = attached(model, optimizer, dataset(), folder, **options)
    said, seen = "nothing", []
    for step in run:
        bad = step.number == 1 and run.rank == ranks - 1
        if step.number == 1:
            seen.append(state_of(model, optimizer, scheduler))
        try:
            for micro in step:
                loss = model(**micro.inputs).loss
                if bad:
                    loss = Overflowing.apply(loss, value) if how != "loss" else loss * value
                    bad = False
                micro.backward(loss)
        except HeadraceError as error:
            said = str(error)
            seen.append(state_of(model, optimizer, scheduler))
            assert all(p.grad is None or not p.grad.any() for p in model.parameters())
            break
        if how == "by hand":
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return said, seen


def state_of(model: Any, optimizer: Any, scheduler: Any) -> Any:
    """Weights, the optimizer's tensors and the rate, as arrays."""
    held = [x for state in optimizer.state.values() for x in state.values()]
    plain = [getattr(x, "full_tensor", lambda x=x: x)() for x in held if torch.is_tensor(x)]
    return [*weights(model), *(x.clone().numpy() for x in plain), scheduler.get_last_lr()[0]]


CASES = [
    ("alone", 1, float("inf"), None),
    ("alone", 2, float("nan"), None),
    ("alone", 2, float("inf"), 1.0),
    ("fsdp2", 2, float("inf"), None),
    ("loss", 2, float("nan"), 1.0),
    ("by hand", 2, float("inf"), None),
]


@pytest.mark.parametrize(
    ("how", "ranks", "value", "clip"), [*CASES, whole("fsdp2", 3, float("nan"), 1.0)]
)
def test_it_never_reaches_the_weights(
    how: str, ranks: int, value: float, clip: float | None, tmp_path: Path
) -> None:
    """Catches weights and optimizer states of nan that a checkpoint would keep, a rank that makes
    the step alone, and a message that does not name the step."""
    for said, seen in run_ranks(ranks, troubled, how, value, clip, tmp_path, timeout_s=100):
        assert said.startswith("loss of step 1: got ")
        assert ("gradient norm nan" in said) or ("gradient norm inf" in said)
        assert "lower the learning rate" in said
        before, after = seen
        for mine, other in zip(after, before, strict=True):
            np.testing.assert_array_equal(mine, other)
        assert all(np.isfinite(x).all() for x in after)


def by_gradients(value: float, folder: Path) -> Any:
    """What is said of a step by the gradients of values, where the last rank's gradients of its
    weights are not finite, and the weights and the optimizer's state before and after it."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    options = {"longest": 70, "scheduler": scheduler, "costs": costs(2)}
    run, samples = attached(model, optimizer, None, folder, **options), dataset()[:4]

    def values(outputs: Any, micro: Any, bad: bool) -> torch.Tensor:
        found = outputs.logits.logsumexp(-1)
        return Overflowing.apply(found, value) if bad and run.rank == 1 else found

    ones = [torch.ones(len(sample["input_ids"])) for sample in samples]
    run.backward(samples, lambda outputs, micro: values(outputs, micro, False), ones)
    before = state_of(model, optimizer, scheduler)
    with pytest.raises(HeadraceError) as caught:
        run.backward(samples, lambda outputs, micro: values(outputs, micro, True), ones)
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value), [before, state_of(model, optimizer, scheduler)]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_by_gradients_never_takes_it(value: float, tmp_path: Path) -> None:
    """Catches weights that are not finite where the run itself calls the model."""
    for said, (before, after) in run_ranks(2, by_gradients, value, tmp_path, timeout_s=100):
        assert said.startswith("loss of step 1: got ")
        for mine, other in zip(after, before, strict=True):
            np.testing.assert_array_equal(mine, other)


def test_a_checkpoint_after_it_is_whole(tmp_path: Path) -> None:
    """Catches "go on from the last checkpoint" where that one holds what was refused."""
    (said,) = run_ranks(1, saved_after, tmp_path, timeout_s=100)
    assert said is True


def saved_after(folder: Path) -> bool:
    """Whether a run goes on from what was saved after a step that was refused."""
    model = llama()
    run = attached(model, torch.optim.AdamW(model.parameters()), dataset(), folder, costs=costs(1))
    with pytest.raises(HeadraceError):
        overflow(run, model)
    run.save(folder / "saved")
    run.detach()
    again = llama()
    other = attached(
        again, torch.optim.AdamW(again.parameters()), dataset(), folder, costs=costs(1)
    )
    assert other.load(folder / "saved")
    assert other.number == 0
    for step in other:
        for micro in step:
            micro.backward(again(**micro.inputs).loss)
    return all(np.isfinite(w).all() for w in weights(again))


def overflow(run: Any, model: Any) -> None:
    """Train with gradients that are not finite."""
    for step in run:
        for micro in step:
            loss = model(**micro.inputs).loss
            micro.backward(Overflowing.apply(loss, float("inf")))


def test_former_names_of_options_are_refused() -> None:
    """Catches an option of before that is ignored."""
    model = llama()
    given = {"lengths": "samples", "logits": "spread", "memory": "measure", "sizes": "planner"}
    for name, wanted in given.items():
        with pytest.raises(hr.errors.SpecError, match=rf"attach\({name}=.*wanted {wanted}=hr\."):
            hr.attach(model, None, [], batch_tokens=5, **{name: None})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'batchtokens'"):
        hr.attach(model, None, [], batchtokens=5)  # type: ignore[arg-type]
