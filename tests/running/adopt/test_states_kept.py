"""Losses of hidden states that a user's hook has kept are exact, whatever is computed again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace as hr
from headrace.cli.foreign_models import foreign_model
from ranks import run_ranks
from running.adopt.axial import DIMS, stages, table
from running.adopt.foreign import Gpt, drawn, gpt

pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(200)


class Sliced(Gpt):
    """Its author computes stretches of a block again, not whole modules."""

    def forward(self, ids: torch.Tensor, labels: Any = None) -> Any:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: b(y) * 1.5, x, use_reentrant=False)
        return (self.norm(x) @ self.token.weight.t(),)


def sliced() -> Gpt:
    """A :class:`Sliced` in fp64."""
    plain = gpt(layers=3)
    made = Sliced(list(plain.blocks)).double()
    made.load_state_dict(plain.state_dict())
    return made


def model_of(how: str) -> tuple[Any, dict[str, Any]]:
    """(model, options of ``compile``) of a way in which blocks are computed again."""
    if how.startswith("llama"):
        model = foreign_model("llama", 0)
        if "own" in how:  # by the user's switch
            reentrant = "reentrant" in how
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        return model, {} if "own" in how else {"recompute": how.split()[1]}
    if how == "sliced":
        return sliced(), {}
    return gpt(layers=3, checkpointed=how == "checkpointed"), (
        {} if how == "checkpointed" else {"recompute": how}
    )


def place_of(model: Any, where: str) -> nn.Module:
    """The module whose results are kept: the second block, or one within it."""
    blocks = model.model.layers if hasattr(model, "model") else model.blocks
    block = blocks[1]
    if where == "block":
        return block
    return next(m for m in block.modules() if isinstance(m, nn.Linear))


def gradient(model: Any, call: Any, inputs: dict[str, Any], where: str, backward: Any) -> Any:
    """Run a loss of the states of one module alone, and return all gradients in a row."""
    kept: list[torch.Tensor] = []

    def keep(_: Any, __: Any, out: Any) -> None:
        kept.append(out[0] if isinstance(out, tuple) else out)

    place = place_of(model, where)
    hook = place.register_forward_hook(keep)
    call(**inputs)
    hook.remove()
    backward(kept[0].double().square().sum())


def flat(model: Any) -> torch.Tensor:
    """All gradients in a row; zeros where there is none."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([g.flatten() for g in grads])


def error(how: str, where: str) -> float:
    """How far gradients are from those of the plain model."""
    model, options = model_of(how)
    plain, _ = model_of(how)
    model.train()
    plain.train()
    name = "input_ids" if how.startswith("llama") else "ids"
    ids = drawn(2, 21)["ids"] % 97
    run = hr.compile(model, **options)
    part = run.shard({name: ids})
    gradient(model, run, part.inputs, where, run.backward)
    run.add_up(torch.zeros(()))
    gradient(plain, plain, {name: ids}, where, lambda loss: loss.backward())
    assert float(flat(plain).abs().max()) > 0
    return float((flat(model) - flat(plain)).abs().max() / flat(plain).abs().max())


@pytest.mark.parametrize("where", ["block", "within"])
@pytest.mark.parametrize(
    "how",
    [
        "attention",
        "full",
        "checkpointed",
        "sliced",
        "llama full",
        "llama attention",
        "llama own",
        "llama own reentrant",
    ],
)
def test_a_loss_of_states_that_a_hook_kept(how: str, where: str) -> None:
    """Catches blocks that are computed again as those of the plain model, which sees only this
    rank's tokens: the model's results, which say what to spread, are not on the way."""
    if how.endswith("reentrant") and where == "within":
        pytest.skip("such states have no gradient")
    assert max(run_ranks(2, error, how, where)) < 1e-6  # norms of transformers are fp32


def axial_error(where: str, returns: bool) -> float:
    """The same of a model of three axes whose author computes its stages again."""
    model, plain = table(checkpointed=True), table(checkpointed=True)
    x = torch.randn(1, 5, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    run = hr.adapt(model, stages=stages(returns=returns), inputs={"x": DIMS}, axis="i")
    for _ in range(2):  # the second forward knows the order of stages
        model.zero_grad()
        part = run.shard({"x": x})
        axial_gradient(model, run, part, where, run.backward)
    run.add_up(torch.zeros((), dtype=torch.float64))
    axial_gradient(plain, plain, {"x": x}, where, lambda loss: loss.backward())
    return float((flat(model) - flat(plain)).abs().max() / flat(plain).abs().max())


def axial_gradient(model: Any, call: Any, inputs: Any, where: str, backward: Any) -> None:
    """Run a loss of what one module of a :class:`Table` gave."""
    kept: list[torch.Tensor] = []
    block = model.blocks[1]["j"]
    place = block if where == "block" else block.out
    hook = place.register_forward_hook(lambda _, __, out: kept.append(out))
    call(**inputs)
    hook.remove()
    backward(kept[0].square().sum())


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("where", ["block", "within"])
def test_a_loss_of_states_of_an_axial_model(where: str, returns: bool) -> None:
    """Catches stages that are computed again without the switches of their forward."""
    assert max(run_ranks(2, axial_error, where, returns)) < 1e-10


def latte_error() -> float:
    """The same of Latte, whose blocks diffusers computes again."""
    from headrace.adopt.axis_examples import latte

    made = latte(frames=4, checkpoints=True)
    plain = copy.deepcopy(made.model)
    run = hr.adapt(made.model)
    kept: list[torch.Tensor] = []

    def of(model: Any, call: Any, inputs: Any, backward: Any) -> None:
        place = model.temporal_transformer_blocks[-1]
        hook = place.register_forward_hook(lambda _, __, out: kept.append(out))
        call(**inputs)
        hook.remove()
        backward(kept[-1].square().sum())

    of(made.model, run, run.shard(made.inputs), run.backward)
    run.add_up(torch.zeros((), dtype=torch.float64))
    of(plain, plain, made.inputs, lambda loss: loss.backward())
    return float((flat(made.model) - flat(plain)).abs().max() / flat(plain).abs().max())


def test_a_loss_of_states_of_latte() -> None:
    """Catches functions of diffusers that compute blocks again as those of the plain model."""
    pytest.importorskip("diffusers")
    assert max(run_ranks(2, latte_error)) < 1e-10


@pytest.mark.parametrize("recompute", [None, "full"])
def test_copies_have_the_users_checkpoints(recompute: Any) -> None:
    """Catches copies and pickles, made while the model is spread, whose checkpoints change it."""
    model = foreign_model("llama", 0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    block = model.model.layers[0]
    users = block._gradient_checkpointing_func
    run = hr.compile(model, recompute=recompute)
    run.take(run.shard({"input_ids": drawn(1, 9)["ids"] % 97}))
    assert block._gradient_checkpointing_func is not users
    copied = copy.deepcopy(model).model.layers[0]._gradient_checkpointing_func
    copies = [copied, pickle.loads(pickle.dumps(block._gradient_checkpointing_func))]
    run.release()
    assert block._gradient_checkpointing_func is users
    for found in copies:
        assert found.func is users.func
        assert found.keywords["use_reentrant"] is False
    run.detach()
