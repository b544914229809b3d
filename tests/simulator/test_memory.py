"""Predicted peaks."""

from __future__ import annotations

import pytest

from headrace.costs.cost_model import held_bytes
from headrace.simulator import peak_bytes
from headrace.spec import Pipeline, Scheme
from headrace.spec.plan import Working
from simulator.test_simulate import costs_of, plan_of
from simulator.unit_world import pipeline_of, unit_costs


def test_a_rank_peaks_at_its_largest_micro_batch() -> None:
    """Catches adding micro-batches up, or giving a group's peak to idle ranks."""
    costs = costs_of(4)
    plan = plan_of(4, [((0, 1), (5000,)), ((0,), (100,)), ((1,), (40_000,))])
    layers = [micro.layers for micro in plan.micro_batches]
    sizes = {1, 2}
    group = costs.micro_batch_bytes(5000, 2, layers[0], "replicated", sizes)
    alone = costs.micro_batch_bytes(40_000, 1, layers[2], "replicated", sizes)
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


def test_micro_batches_in_flight_by_hand() -> None:
    """Catches one micro-batch at a time in a pipeline, forwards only, and a micro-batch that is
    counted beside itself in its backward."""
    costs = unit_costs(2, 2)
    peaks = peak_bytes(pipeline_of([2, 5, 3], 2, 2), costs)
    # Stage 0 runs F0 F1 B0 F2 B1 B2: in B1 it holds 3 tokens' 10 bytes and 5 tokens' 10 + 3.
    assert peaks[0] - costs.state_bytes == 3 * 10 + 5 * 13
    assert peaks[1] - costs.state_bytes == 5 * 13, "the last stage runs one at a time"
    few = peak_bytes(pipeline_of([2], 2, 2), costs)
    assert few == (costs.state_bytes + 2 * 13,) * 2


def test_early_stages_hold_more_micro_batches() -> None:
    """Catches as many in flight on every stage, and as many as there are micro-batches."""
    costs = unit_costs(4, 4)
    peaks = peak_bytes(pipeline_of([10] * 7, 4, 4), costs)
    assert [peak - costs.state_bytes for peak in peaks] == [430, 330, 230, 130]


def test_a_stage_holds_the_weights_of_its_layers() -> None:
    """Catches whole weights on every stage, those of the other stage, and the head's activations
    on the first."""
    costs = costs_of(2)
    plan = pipeline_of([1], 2, 2)
    first, last = held_bytes(costs, plan.pipelines[0], "replicated")
    peaks = [peak - costs.state_bytes for peak in peak_bytes(plan, costs)]
    assert first < peaks[0] < first + 2**20
    logits = costs.ends[1].transient.constant
    assert last < peaks[1] - logits < last + 2**20
    assert max(first, last) < costs.working_bytes[1]["replicated"]
    long = [p - costs.state_bytes for p in peak_bytes(pipeline_of([1000], 2, 2), costs)]
    ends = costs.ends[1]
    more = ends.kept(1000) + ends.transient(1000)
    assert long[1] - last <= long[0] - first + more
    assert long[1] - last > long[0] - first


@pytest.mark.parametrize("working", ["replicated", "sharded"])
def test_a_tensor_block_holds_half(working: Working) -> None:
    """Catches a rank of a tensor block that holds whole weights, and one that works alone beside
    it whose weights are not added up."""
    costs = costs_of(2)
    plan = plan_of(2, [((0, 1), (100,)), ((1,), (10,))]).replace(working=working)
    tensor = Pipeline(scheme=Scheme(tensor=2), ranks=(0, 1))
    plan = plan.replace(pipelines=(tensor, plan.pipelines[1]))
    peaks = peak_bytes(plan, costs)
    layers = plan.micro_batches[0].layers
    assert peaks[0] == costs.micro_batch_bytes(100, 2, layers, "sharded")
    shard, replicated = (costs.working_bytes[2][held] for held in ("sharded", "replicated"))
    assert peaks[1] == peaks[0] - shard + replicated, "both, but no more than all"
