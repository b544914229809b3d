"""The sides of ``methods.py``: every method of headrace, and torch's own, on the same layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from measured import Costs, Counted, Side, Storages, Traffic
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_sides import Model, context_on, gradients, sharded, tensor_parallel

from headrace.comm.mesh import Groups
from headrace.layouts.partition import group_shards
from headrace.layouts.token_plan import TokenPlan
from headrace.methods import Context, Place, Shard, Whole
from headrace.methods.weights import Weight
from headrace.models.transformer import Transformer
from headrace.native.micro_batch import layer_states
from headrace.ops.random import DropoutKey
from headrace.spec import Architecture, weight_table
from headrace.spec.architecture import WeightSpec
from headrace.spec.known_methods import FACTS, LOCAL, subgroups
from headrace.spec.layer_plan import LayerOption
from headrace.spec.method_facts import MethodFacts
from headrace.spec.plan import TokenOrder

__all__ = ["TOLERANCE", "Truth", "checked", "reference", "sides_of"]

TOLERANCE = 1e-4
"""How far a side may be from one process: the largest difference by the largest value."""

_KINDS = {
    "local": "one process",
    "megatron_ts": "tensor",
    "metp": "tensor",
    "tensor_ring": "tensor x context",
}
"""Other methods are of kind ``context``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What one process gives: x, dy, out, dx [T, h], weights and their gradients by name."""

    x: torch.Tensor
    dy: torch.Tensor
    out: torch.Tensor
    dx: torch.Tensor
    weights: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]


def _table(a: Architecture) -> list[WeightSpec]:
    return [w for w in weight_table(a) if 1 <= w.bucket <= a.layers]


def reference(a: Architecture, tokens: int) -> Truth:
    """Drawn on every rank alike, run by the first."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {
        w.name: 0.05 * randn(*w.shape) + float("norm" in w.name and w.name.endswith("weight"))
        for w in _table(a)
    }
    x, dy = randn(tokens, a.hidden), randn(tokens, a.hidden)
    out, dx = torch.empty_like(x), torch.empty_like(x)
    grads = {name: torch.empty_like(weight) for name, weight in weights.items()}
    if dist.get_rank() == 0:
        model, leaf = Model(a, weights, tokens), x.clone().requires_grad_()
        y = model(leaf[None])[0]
        y.backward(dy)
        assert leaf.grad is not None
        out, dx = y.detach(), leaf.grad
        found = gradients(model, 1.0)
        grads = {name: found[name].contiguous() for name in weights}
    for tensor in (out, dx, *(grads[name] for name in weights)):
        dist.broadcast(tensor, 0)
    return Truth(x=x, dy=dy, out=out, dx=dx, weights=weights, grads=grads)


def checked(side: Side, truth: Truth) -> tuple[float, Costs]:
    """The first forward and backward of a side: its largest relative difference from one process
    in the output, the gradient of x and the gradients of all weights, and its costs. Collective."""
    worst = torch.zeros(1)

    def look(got: torch.Tensor, wanted: torch.Tensor, whole: torch.Tensor) -> None:
        off = (got - wanted).abs().max() / whole.abs().max()
        worst[0] = max(float(worst), float(off.nan_to_num(torch.inf)))

    share: dict[str, torch.Tensor] = {}
    leaf, grad = truth.x[side.places].requires_grad_(), truth.dy[side.places]
    found = Counted(wire=Traffic(), memory=Storages())
    if side.runs_here:
        with side.on(), found.wire, found.memory:
            out = side.forward(leaf)
            found.forward_done()
            out.backward(grad)
        assert leaf.grad is not None
        look(out.detach(), truth.out[side.places], truth.out)
        look(leaf.grad, truth.dx[side.places], truth.dx)
        share = side.gradients()
    for name, wanted in truth.grads.items():
        total = share[name].contiguous() if name in share else torch.zeros_like(wanted)
        dist.all_reduce(total)
        look(total, wanted, wanted)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst), found.costs()


def sides_of(
    a: Architecture, truth: Truth, groups: Groups, *, holdings: Sequence[str]
) -> list[Side]:
    """One process first, then headrace's methods, then torch's own. Collective."""
    made = [_one_process(a, truth), _ours(a, truth, groups, LOCAL, "replicated")]
    for method in FACTS.values():
        if method is not LOCAL and method.supports(a, groups.ranks) is None:
            made += [_ours(a, truth, groups, method, held) for held in holdings]
    if a.kind == "gpt":
        made += _torch_sides(a, truth, groups.ranks, holdings)
    return made


def _ours(a: Architecture, truth: Truth, groups: Groups, method: MethodFacts, held: str) -> Side:
    alone = method is LOCAL
    ranks, member = (1, 0) if alone else (groups.ranks, groups.rank)
    world = tuple(range(ranks))
    option = LayerOption(attention=method.name, feed_forward=method.name)
    groups.prepare({world, *subgroups(option, a, ranks)})
    group = groups.get(world)
    weights = _held(a, truth, held, group, member, ranks)
    states = layer_states(weights, a.layers)
    model = Transformer(a)

    def forward(x: torch.Tensor) -> torch.Tensor:
        pack = TokenPlan(lengths=(len(truth.x),), ranks=ranks, order=method.order)
        place = Place(
            architecture=a,
            tokens=pack,
            member=member,
            group=group,
            dtype=x.dtype,
            subgroup=groups.get,
        )
        context = Context(place=place, dropout=_no_dropout())
        for index, state in enumerate(states):
            x = model.layer(x, index, option, state, context)
        return x

    def share() -> dict[str, torch.Tensor]:
        return {
            name: _spread_out(weight, truth.grads[name], member) for name, weight in weights.items()
        }

    def clear() -> None:
        for weight in weights.values():
            weight.grad.zero_()

    return Side(
        name=method.name,
        kind=_KINDS.get(method.name, "context"),
        held="" if alone else held,
        by_torch=False,
        alone=alone,
        places=_places(len(truth.x), ranks, method.order, member),
        forward=forward,
        gradients=share,
        clear=clear,
        on=nullcontext,
    )


def _no_dropout() -> DropoutKey:
    nothing = torch.zeros(0, dtype=torch.int64)
    return DropoutKey(seed=0, step=0, samples=nothing, positions=nothing)


def _places(tokens: int, ranks: int, order: TokenOrder, member: int) -> torch.Tensor:
    return torch.from_numpy(TokenPlan(lengths=(tokens,), ranks=ranks, order=order).index(member))


def _held(
    a: Architecture, truth: Truth, held: str, group: Any, member: int, ranks: int
) -> dict[str, Whole | Shard]:
    """The weights as a rank holds them."""
    found: dict[str, Whole | Shard] = {}
    for w in _table(a):
        value = truth.weights[w.name]
        if held == "replicated" or w.unit is None:
            found[w.name] = Whole(
                value=value.clone(), grad=torch.zeros_like(value), member=member, unit=w.unit or 1
            )
            continue
        shards = group_shards(w, ranks)
        part = value[shards[member].start : shards[member].stop].clone()
        found[w.name] = Shard(
            value=part, grad=torch.zeros_like(part), shards=shards, group=group, unit=w.unit
        )
    return found


def _spread_out(weight: Weight, like: torch.Tensor, member: int) -> torch.Tensor:
    """A rank's part of a gradient among zeros."""
    if isinstance(weight, Whole):
        return weight.grad.clone()
    assert isinstance(weight, Shard)
    whole, rows = torch.zeros_like(like), weight.shards[member]
    whole[rows.start : rows.stop] = weight.grad
    return whole


def _torch(
    a: Architecture,
    truth: Truth,
    name: str,
    kind: str,
    held: str,
    places: torch.Tensor,
    spread: Callable[[Model], None],
    share: float,
    *,
    alone: bool = False,
    on: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Side:
    """A side of torch's; ``share`` times its gradients is what this rank adds to the whole ones."""
    model = Model(a, truth.weights, len(truth.x))
    spread(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    return Side(
        name=name,
        kind=kind,
        held=held,
        by_torch=True,
        alone=alone,
        places=places,
        forward=lambda x: model(x[None])[0],
        gradients=lambda: gradients(model, share),
        clear=model.zero_grad,
        on=on,
    )


def _one_process(a: Architecture, truth: Truth) -> Side:
    everything = torch.arange(len(truth.x))
    return _torch(
        a, truth, "one process", "one process", "", everything, lambda model: None, 1.0, alone=True
    )


def _torch_sides(
    a: Architecture, truth: Truth, ranks: int, holdings: Sequence[str]
) -> Iterator[Side]:
    rank, tokens = dist.get_rank(), len(truth.x)
    mesh = init_device_mesh("cpu", (ranks,))
    yield _torch(
        a,
        truth,
        "DTensor TP + SP",
        "tensor",
        "shards",
        _places(tokens, ranks, "natural", rank),
        partial(tensor_parallel, mesh=mesh),
        float(rank == 0),
    )
    for held, rotate in product(holdings, ("allgather", "alltoall")):
        yield _torch(
            a,
            truth,
            f"CP {rotate}{' + FSDP2' * (held == 'sharded')}",
            "context",
            held,
            _head_and_tail(tokens, ranks, rank),
            partial(sharded, mesh=mesh) if held == "sharded" else lambda model: None,
            # FSDP2 averages over the ranks, and its whole gradients are the same on all of them.
            ranks * float(rank == 0) if held == "sharded" else 1.0,
            on=partial(context_on, mesh, rotate),
        )
    if ranks >= 4 and ranks % 2 == 0:
        yield from _two_axes(a, truth, ranks, holdings)


def _head_and_tail(tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """The tokens that torch's context parallelism wants on a rank, for balance."""
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def _two_axes(a: Architecture, truth: Truth, ranks: int, holdings: Sequence[str]) -> Iterator[Side]:
    """Tensor parallelism inside blocks of half the ranks, context parallelism across the two."""
    inner, rank = ranks // 2, dist.get_rank()
    mesh = init_device_mesh("cpu", (2, inner), mesh_dim_names=("context", "tensor"))
    block = _head_and_tail(len(truth.x), 2, rank // inner)

    def spread(model: Model, held: str, mesh: DeviceMesh) -> None:
        tensor_parallel(model, mesh["tensor"])
        if held == "sharded":
            sharded(model, mesh["context"])

    for held, rotate in product(holdings, ("allgather", "alltoall")):
        share = 2.0 * (rank == 0) if held == "sharded" else float(rank % inner == 0)
        yield _torch(
            a,
            truth,
            f"TP x CP {rotate}{' + FSDP2' * (held == 'sharded')}",
            "tensor x context",
            held,
            block.chunk(inner)[rank % inner],
            partial(spread, held=held, mesh=mesh),
            share,
            on=partial(context_on, mesh["context"], rotate),
        )
