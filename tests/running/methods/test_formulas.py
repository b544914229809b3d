"""The formulas' operations and bytes against those counted while real layers run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.comm.mesh import Groups
from headrace.costs import FORMULA_METHODS, CostModel, roofline_costs
from headrace.costs.sources.roofline import KERNELS
from headrace.layouts.partition import group_shards
from headrace.layouts.token_plan import TokenPlan
from headrace.methods import Context, Place, Shard, Whole
from headrace.methods.weights import Weight
from headrace.models.transformer import Transformer
from headrace.native.counted import TrafficCounter
from headrace.native.micro_batch import layer_states
from headrace.ops.flops import flop_counter
from headrace.ops.random import DropoutKey
from headrace.spec import Architecture, LayerOption, weight_table
from headrace.spec.hardware import Device, Hardware, Link
from headrace.spec.layer_plan import RECOMPUTE
from ranks import run_ranks
from spread import spread, whole

NEVER = 1e60  # so fast that it takes no time
PACK = (31, 1, 32)  # on two ranks zigzag order shares the scores evenly, but for the middle
MODELS = {
    "llama": Architecture(layers=1, hidden=32, heads=8, kv_heads=4, ffn=128, vocabulary=5),
    "gpt": Architecture(
        layers=1, hidden=32, heads=8, kv_heads=8, ffn=128, vocabulary=5, kind="gpt", positions=64
    ),
    "bert": Architecture(
        layers=1,
        hidden=32,
        heads=8,
        kv_heads=8,
        ffn=128,
        vocabulary=5,
        kind="bert",
        causal=False,
        positions=64,
        mask_id=4,
    ),
}


def _costs(
    architecture: Architecture, p: int, *, flops: float = NEVER, sent: float = NEVER
) -> CostModel:
    """Costs in fp64 of devices on which all but what is asked for takes no time."""
    link = Link(name="link", bytes_per_s=sent, latency_s=0.0, attained=1.0, source="made up")
    device = Device(
        name="device",
        flops_per_s={"float64": flops},
        memory_bytes=1,
        memory_bytes_per_s=NEVER,
        launch_s=0.0,
        attained_matmul=1.0,
        attained_attention=1.0,
        attained_memory=1.0,
        source="made up",
    )
    hardware = Hardware(device=device, inside=link, across=link, devices_per_node=8)
    return roofline_costs(hardware, p, architecture, sizes=(p,), element_bytes=8)


def _counted(model: str, text: str, groups: Groups | None) -> dict[str, tuple[float, float]]:
    """Operations, and bytes sent with weights replicated and sharded, forward and backward."""
    found = {}
    for held in ("replicated", "sharded"):
        layer, dy = _layer(model, text, held, groups)
        with TrafficCounter() as wire, flop_counter() as flops:
            out = layer()
            forward = wire.take(), flops.get_total_flops()
            out.backward(dy)
        found[held] = (forward[0], wire.take())
        found["flops"] = (forward[1], flops.get_total_flops() - forward[1])
    return found


def _layer(
    model: str, text: str, held: str, groups: Groups | None
) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """A layer to run forward, and the gradient to run it backward with."""
    a, option = MODELS[model], LayerOption.parse(text)
    ranks, member = (groups.ranks, groups.rank) if groups else (1, 0)
    world = tuple(range(ranks))
    if groups:
        groups.prepare([world])
    order = "zigzag" if option.attention in ("megatron_cz", "megatron_cz_gather") else "natural"
    pack = TokenPlan(lengths=PACK, ranks=ranks, order=order)
    place = Place(
        architecture=a,
        tokens=pack,
        member=member,
        dtype=torch.float64,
        group=groups.get(world) if groups else None,
        subgroup=groups.get if groups else lambda members: None,
    )
    key = DropoutKey(
        seed=0,
        step=0,
        samples=torch.from_numpy(pack.documents(member)),
        positions=torch.from_numpy(pack.positions(member)),
    )
    sources: dict[str, Weight] = {}
    for w in weight_table(a):
        if w.bucket != 1:
            continue
        value = torch.full(w.shape, 0.1, dtype=torch.float64)
        if held == "replicated" or w.unit is None or not groups:
            sources[w.name] = Whole(
                value=value, grad=torch.zeros_like(value), member=member, unit=w.unit or 1
            )
            continue
        shards = group_shards(w, ranks)
        part = value[shards[member].start : shards[member].stop].clone()
        sources[w.name] = Shard(
            value=part,
            grad=torch.zeros_like(part),
            shards=shards,
            group=groups.get(world),
            unit=w.unit,
        )
    x = torch.randn(len(pack.index(member)), a.hidden, dtype=torch.float64, requires_grad=True)
    [state] = layer_states(sources, 1)
    context = Context(place=place, dropout=key)
    transformer = Transformer(a)
    return lambda: transformer.layer(x, 0, option, state, context), torch.randn_like(x)


def _count_all(cases: list[tuple[str, str]]) -> list[Any]:
    groups = Groups()
    return [_counted(model, text, groups) for model, text in cases]


@pytest.mark.parametrize("level", RECOMPUTE)
@pytest.mark.parametrize("model", MODELS)
def test_operations_of_one_rank(model: str, level: str) -> None:
    """Would catch a matrix counted twice, causal squares counted whole or without a diagonal,
    scores that the backward computes again, and recompute levels that run something else."""
    text = str(LayerOption.parse(f"local+{level}"))
    cost = _costs(MODELS[model], 1, flops=1.0).options[1][text]
    assert (cost.forward(PACK), cost.backward(PACK)) == pytest.approx(
        _counted(model, text, None)["flops"], rel=1e-12
    )


@pytest.mark.parametrize("every", [2, whole(1)])
def test_operations_and_bytes_of_every_method(every: int) -> None:
    """Would catch a method that sends or computes more than its formula, at any level: operations
    added over the ranks are those of the formula times the ranks, bytes are those of each rank."""
    cases = [
        (model, text)
        for model in MODELS
        for text in _costs(MODELS[model], 2).options[2]
        if "/" not in text
    ]
    assert {text.partition("+")[0] for _, text in cases} == set(FORMULA_METHODS) - {"local"}
    cases = spread(cases, every)
    results = run_ranks(2, _count_all, cases, timeout_s=240)
    for i, (model, text) in enumerate(cases):
        a, option = MODELS[model], LayerOption.parse(text)
        cost = _costs(a, 2, flops=1.0).options[2][text]
        total = [sum(r[i]["flops"][way] for r in results) for way in (0, 1)]
        wanted = [2 * cost.forward(PACK), 2 * cost.backward(PACK)]
        assert total == pytest.approx(wanted, rel=1e-12), (model, text)
        bytes_of = _costs(a, 2, sent=1.0)
        sent = bytes_of.options[2][text]
        wanted = [sent.forward(PACK), sent.backward(PACK)]
        assert list(results[0][i]["replicated"]) == pytest.approx(wanted, rel=1e-12), (model, text)
        if option.recompute == "none":
            gathered = bytes_of.layer_seconds(PACK, 2, option, "sharded")
            assert results[0][i]["sharded"] == pytest.approx(gathered, rel=1e-12), (model, text)


_SHAPES = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "narrow",
    "new_empty",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}


class _Kernels(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__.partition(".")[0] not in _SHAPES
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", MODELS)
def test_launches_of_a_layer(model: str) -> None:
    """Would catch a constant that no longer has to do with the layers: it is within 40 % of the
    operators that run."""
    layer, dy = _layer(model, "local", "replicated", None)
    with _Kernels() as kernels:
        out = layer()
        forward = kernels.count
        out.backward(dy)
    assert forward == pytest.approx(KERNELS, rel=0.4)
    assert kernels.count - forward == pytest.approx(2 * KERNELS, rel=0.4)
