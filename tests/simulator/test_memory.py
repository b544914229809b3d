"""Predicted peaks."""

from __future__ import annotations

from headrace.simulator import peak_bytes
from simulator.test_simulate import costs_of, plan_of


def test_a_rank_peaks_at_its_largest_micro_batch() -> None:
    """Catches adding micro-batches up, or giving a group's peak to idle ranks."""
    costs = costs_of(4)
    plan = plan_of(4, [((0, 1), (5000,)), ((0,), (100,)), ((1,), (40_000,))])
    layers = [micro.layers for micro in plan.micro_batches]
    sizes = {1, 2}
    group = costs.micro_batch_bytes(5000, 2, layers[0], "whole", sizes)
    alone = costs.micro_batch_bytes(40_000, 1, layers[2], "whole", sizes)
    assert alone > group
    assert peak_bytes(plan, costs) == (group, alone, costs.state_bytes, costs.state_bytes)


def test_shards_of_all_sizes_are_held() -> None:
    """Catches counting only the shard of the running group."""
    costs = costs_of(4)
    plan = plan_of(4, [((0, 1, 2, 3), (5000,)), ((0, 1), (50,))]).replace(working="sharded")
    peaks = peak_bytes(plan, costs)
    layers = plan.micro_batches[0].layers
    assert peaks[0] == costs.micro_batch_bytes(5000, 4, layers, "sharded", {2, 4})
    assert peaks[3] == costs.micro_batch_bytes(5000, 4, layers, "sharded", {4}) < peaks[0]
