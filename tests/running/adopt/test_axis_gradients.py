"""Gradients of models on shards of their axes, however a loss and its backward come about."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.ops.switch import gather, switch
from ranks import run_ranks
from running.adopt.axial import table
from running.adopt.test_adapted import EXACT, adapted, drawn, gradients


def penalised(returns: bool) -> float:
    """How far gradients of a loss with a gradient penalty are from one process'."""
    model, plain, x = table(), table(), drawn(1, 1, 5, 4, 6)
    run = adapted(model, returns=returns)
    with sdpa_kernel(SDPBackend.MATH):
        part = run.shard({"x": x})
        part["x"].requires_grad_()
        out = run(**part)
        (slope,) = torch.autograd.grad(out.sin().sum(), part["x"], create_graph=True)
        loss = out.square().sum() + slope.square().sum()
        run.backward(loss)
        total = run.add_up(loss)
        x.requires_grad_()
        out = plain(x)
        (slope,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        loss = out.square().sum() + slope.square().sum()
        loss.backward()
    assert float(total) == pytest.approx(float(loss.detach()), rel=1e-12)
    return float((gradients(model) - gradients(plain)).abs().max() / gradients(plain).abs().max())


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_gradient_penalty_equals_one_process(ranks: int, returns: bool) -> None:
    """Catches switches whose backward is a dead end: a part of the penalty would be lost."""
    assert max(run_ranks(ranks, penalised, returns)) <= EXACT


def differentiated_twice() -> list[bool]:
    """Whether switches and gathers of uneven shards have the second derivatives of what
    they compute, for the sum of all ranks' results."""
    group, rank = dist.group.WORLD, dist.get_rank()
    sizes, found = (3, 2), list[bool]()
    for operator, copies in (
        (lambda x: switch(x, 0, 1, group, sizes=sizes), 1),
        (lambda x: gather(x, 0, group, sizes=sizes), 2),
    ):
        x = drawn(rank, sizes[rank], 4).requires_grad_()
        (slope,) = torch.autograd.grad(operator(x).pow(3).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.pow(2).sum(), x)
        wanted = 36 * copies**2 * x.detach().pow(3)
        found.append(torch.allclose(bend, wanted, rtol=1e-12))
    return found


def test_switches_and_gathers_differentiate_twice() -> None:
    """Catches an adjoint of the second order that forgets what several ranks hold."""
    assert all(all(found) for found in run_ranks(2, differentiated_twice))
