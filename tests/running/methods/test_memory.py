"""Memory of every method at the size it is made for, without the devices: one rank of eight plays
its part with fake tensors (shapes without contents) and a fake process group (no partner)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # before the fake mode, which its import would meet otherwise
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.layouts.partition import group_shards
from headrace.layouts.token_plan import TokenPlan
from headrace.methods import Context, Place, Shard, Whole
from headrace.methods.weights import Weight
from headrace.models.transformer import Transformer
from headrace.native.counted import ByteCounter
from headrace.ops.random import DropoutKey
from headrace.spec import Architecture, weight_table
from headrace.spec.known_methods import FACTS
from headrace.spec.layer_plan import RECOMPUTE, LayerOption
from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANKS, MEMBER, TOKENS = 8, 3, 65536
GPT = Architecture(
    layers=1,
    hidden=4096,
    heads=32,
    kv_heads=32,
    ffn=16384,
    vocabulary=100,
    kind="gpt",
    positions=TOKENS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Of one layer on one rank, in local activations (T / R, h): what forward leaves for the
    backward, and the most that is alive during each."""

    kept: float
    forward: float
    backward: float


def _weights(group: dist.ProcessGroup) -> dict[str, Weight]:
    """A layer's weights in bf16 and gradients in fp32, rows spread over the group."""
    state: dict[str, Weight] = {}
    for weight in weight_table(GPT):
        if weight.bucket != 1:
            continue
        name = weight.name.split(".", 2)[2]
        if weight.unit is None:
            value = torch.empty(weight.shape, dtype=torch.bfloat16)
            grad = torch.empty(weight.shape)
            state[name] = Whole(value=value, grad=grad, member=MEMBER, unit=1)
        else:
            shards = group_shards(weight, RANKS)
            shape = (len(shards[MEMBER]), *weight.shape[1:])
            value, grad = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape)
            state[name] = Shard(
                value=value, grad=grad, shards=shards, group=group, unit=weight.unit
            )
    return state


def _layer(option: LayerOption, world: dist.ProcessGroup) -> Bytes:
    """One layer forward and backward."""
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(RANKS)): world}

    def subgroup(members: tuple[int, ...]) -> dist.ProcessGroup | None:
        if members not in groups:
            groups[members] = dist.new_group(list(members)) if len(members) > 1 else None
        return groups[members]

    order = FACTS[option.attention].order
    place = Place(
        architecture=GPT,
        tokens=TokenPlan(lengths=(TOKENS,), ranks=RANKS, order=order),
        member=MEMBER,
        group=world,
        dtype=torch.bfloat16,
        subgroup=subgroup,
    )
    place.order(place.everyone)  # once per pack, not per layer
    nothing = torch.zeros(TOKENS // RANKS, dtype=torch.int64)
    context = Context(
        place=place, dropout=DropoutKey(seed=0, step=0, samples=nothing, positions=nothing)
    )
    state = _weights(world)
    x = torch.empty(TOKENS // RANKS, GPT.hidden, dtype=torch.bfloat16, requires_grad=True)
    with ByteCounter() as counter:
        y = Transformer(GPT).layer(x, 0, option, state, context)
        kept, forward = counter.current_bytes, counter.peak_bytes
        counter.reset_peak()
        y.backward(torch.empty_like(y))
    assert x.grad is not None
    assert x.grad.shape == x.shape
    unit = x.nbytes
    return Bytes(kept=kept / unit, forward=forward / unit, backward=counter.peak_bytes / unit)


def _play(options: Sequence[LayerOption]) -> list[Bytes]:
    """Rank 3 of 8 runs each option's layer."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=MEMBER, world_size=RANKS, store=FakeStore())
    world = dist.group.WORLD
    assert world is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [_layer(option, world) for option in options]


@pytest.fixture(scope="module")
def layers() -> dict[str, Bytes]:
    options = [
        LayerOption.of(name, level)
        for name in FACTS
        for level in RECOMPUTE
        if name != "local" and (level == "none" or FACTS[name].automatic)
    ]
    (played,) = run_ranks(1, _play, options, timeout_s=120)
    return {str(option): found for option, found in zip(options, played, strict=True)}


KEPT = {
    "ulysses_z": (15, 7),
    "megatron_cz": (14, 3),
    "megatron_cz_gather": (14, 3),
    "megatron_ts": (14, 6),
    "metp": (3, 3),
    "ulysses_ring": (15, 7),
    "tensor_ring": (14, 6),
}
"""Levels none and attention; see each method's docstring. Ulysses counts the heads before and
after they are switched back, which the notes of the papers' prototypes count once."""


def test_kept_bytes_at_eight_ranks(layers: dict[str, Bytes]) -> None:
    """Would catch what only shows when groups and lengths are large: a gathered matrix or the
    whole keys kept for the backward, and statistics or tables that grow with the pack."""
    for name, (none, attention) in KEPT.items():
        assert layers[name].kept == pytest.approx(none, rel=0.02), name
        if not FACTS[name].automatic:
            continue
        assert layers[f"{name}+attention"].kept == pytest.approx(attention, rel=0.02), name
        assert layers[f"{name}+full"].kept == pytest.approx(1, rel=0.02), name


def test_score_rows_are_kept_whole(layers: dict[str, Bytes]) -> None:
    """Would catch score rows kept in fp32, or kept for keys that no query may see."""
    causal_half = TOKENS / (GPT.hidden / GPT.heads) / 2  # of T rows of scores by head features
    assert 1 <= layers["colossal_z"].kept / causal_half < 1.2


PEAKS = {
    "ulysses_z": (17, 30.5),
    "megatron_cz": (16, 35),
    "megatron_cz_gather": (35, 82),
    "megatron_ts": (17.5, 22),
    "metp": (9, 17.5),
}


def test_peaks_at_eight_ranks(layers: dict[str, Bytes]) -> None:
    """Would catch a buffer more in passing than the methods are known for."""
    for name, (forward, backward) in PEAKS.items():
        assert layers[name].forward < 1.05 * forward, name
        assert layers[name].backward < 1.05 * backward, name
