"""Costs from formulas."""

from __future__ import annotations

import pytest

from headrace.costs import Speeds, group_sizes_of, synthetic_costs
from headrace.errors import CostError
from headrace.spec import Architecture, LayerOption, LayerPlan


def test_sizes() -> None:
    """Catches losing sizes that are not powers of two, or the whole world."""
    assert group_sizes_of(1) == (1,)
    assert group_sizes_of(6) == (1, 2, 3, 4, 5, 6)
    assert group_sizes_of(24) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 24)


def test_compute_is_the_architecture_s_flops() -> None:
    """Catches a formula that counts a matrix twice: without launches and traffic the seconds of
    one rank are its FLOPs over the rate."""
    for kind in ("llama", "gpt"):
        architecture = Architecture(
            layers=3, hidden=64, heads=4, kv_heads=2, ffn=256, vocabulary=100, kind=kind,
            positions=4096,
        )  # fmt: skip
        speeds = Speeds(flops_per_s=1e9, launch_s=0, latency_s=0)
        costs = synthetic_costs(1, architecture=architecture, speeds=speeds)
        layers = LayerPlan.uniform(LayerOption.of("local"), 3)
        seconds = sum(costs.micro_batch_s([1000], 1, layers))
        assert seconds == pytest.approx(1000 * architecture.flops_per_token(1000) / 1e9)


def test_more_ranks_are_quicker_and_hold_more_but_cost_more_device_seconds() -> None:
    """Catches a model under which one size is always best, so that planning is trivial."""
    costs = synthetic_costs(8)
    seconds, tokens = [], []
    for p in costs.group_sizes:
        layers = LayerPlan.uniform(LayerOption.of("local" if p == 1 else "ulysses_z"), 4)
        seconds.append(sum(costs.micro_batch_s([20_000], p, layers)))
        tokens.append(costs.max_tokens(p, layers))
    busy = [p * s for p, s in zip(costs.group_sizes, seconds, strict=True)]
    assert seconds == sorted(seconds, reverse=True)
    assert tokens == sorted(tokens)
    assert min(busy) == busy[0]
    assert busy[4] > busy[3], "five ranks do not divide sixteen heads"


def test_recomputing_saves_memory_and_costs_seconds() -> None:
    """Catches levels in the wrong order."""
    costs = synthetic_costs(2, memory_bytes=2**34)
    options = [LayerOption.of("ulysses_z", level) for level in ("none", "attention", "full")]
    plans = [LayerPlan.uniform(option, 4) for option in options]
    seconds = [sum(costs.micro_batch_s([5000], 2, layers)) for layers in plans]
    kept = [costs.option(2, option).kept.slope for option in options]
    assert seconds == sorted(seconds)
    assert kept == sorted(kept, reverse=True)


def test_speeds_are_checked() -> None:
    """Catches a division by zero in place of an error."""
    with pytest.raises(CostError):
        Speeds(flops_per_s=0)
    with pytest.raises(CostError):
        Speeds(latency_s=-1)
