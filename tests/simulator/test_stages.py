"""Pipelines with stages on the clock."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import CostModel, ExchangeCost, synthetic_costs
from headrace.costs.cost_model import message_s
from headrace.simulator import (
    StagedPipeline,
    micro_batch_seconds,
    staged_clock,
    staged_pipeline,
    staged_steps_s,
    step_s,
)
from headrace.spec import Lengths, Plan, Row, Timeline, compile_plan
from headrace.spec.program import Backward, Forward, parse_action
from headrace.spec.random_plans import random_strategy
from headrace.spec.walk import messages_of
from simulator.unit_world import (
    arrivals_of,
    pipeline_of,
    rows_of_plan,
    timeline_of,
    unit_costs,
)


def test_micro_batches_of_different_sizes_by_hand() -> None:
    """Catches a stage that runs before its input or its gradients are there, and another order
    than one forward, one backward."""
    rows = rows_of_plan(pipeline_of([2, 5, 3], 2, 2), unit_costs(2, 2))
    spans = {
        (rank, action.split("[")[0]): (row.start_s, row.end_s)
        for (rank, action), row in rows.items()
        if row.kind in ("forward", "backward")
    }
    assert spans == {
        (0, "0F0"): (0, 2),
        (0, "0F1"): (2, 7),
        (0, "0B0"): (8, 12),
        (0, "0F2"): (12, 15),
        (0, "0B1"): (23, 33),
        (0, "0B2"): (33, 39),
        (1, "1F0"): (2, 4),
        (1, "1B0"): (4, 8),
        (1, "1F1"): (8, 13),
        (1, "1B1"): (13, 23),
        (1, "1F2"): (23, 26),
        (1, "1B2"): (26, 32),
    }
    assert (rows[1, "Ra0<0*2"].start_s, rows[1, "Ra0<0*2"].end_s) == (0, 2)
    waits = rows[0, "X(Sa2>1*3,Rg1<1*5)"]
    assert (waits.start_s, waits.end_s) == (15, 23)
    assert (waits.tokens, waits.ranks) == (8, 2)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equal_micro_batches_wait_only_to_fill_and_to_drain(stages: int) -> None:
    """Catches a bubble between micro-batches."""
    seconds = step_s(pipeline_of([7] * 6, stages, 4), unit_costs(stages, 4))
    assert seconds == pytest.approx((6 + stages - 1) * 7 * 3 * 4 / stages)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    stages=st.integers(1, 4),
    rising=st.booleans(),
)
def test_sorted_micro_batches_take_at_most_the_formula(
    sizes: list[int], stages: int, rising: bool
) -> None:
    """Catches stalls: in order of size sum + (P - 1) max is an upper bound, and every stage must
    run all, after the first forwards and before the last backwards."""
    sizes = sorted(sizes, reverse=not rising)
    seconds = step_s(pipeline_of(sizes, stages, stages), unit_costs(stages, stages))
    assert seconds <= 3 * (sum(sizes) + (stages - 1) * max(sizes)) * (1 + 1e-12)
    assert seconds >= 3 * sum(sizes) + (stages - 1) * (sizes[0] + 2 * sizes[-1])


def test_a_late_stage_waits_for_its_input_not_for_its_weights() -> None:
    """Catches a stage that waits for weights which it does not work with, or that starts to wait
    for its own only when its input is there."""
    costs = unit_costs(2, 2, pull_s=10.0)
    there, plan = arrivals_of(costs), pipeline_of([100], 2, 2)
    rows = rows_of_plan(plan, costs)
    message = message_s(costs, 100)
    assert rows[0, "0F0[0]"].end_s == pytest.approx(there[1] + 100)
    assert [rows[0, f"P{b}"].start_s for b in (2, 3)] == [rows[0, "Rg0<1*100"].end_s] * 2
    received = rows[1, "Ra0<0*100"]
    assert (received.start_s, received.end_s) == (0, pytest.approx(there[1] + 100 + message))
    left = rows[1, "Sg0>0*100"].end_s + message
    assert rows[1, "G3"].start_s == pytest.approx(left), "its own messages are taken first"
    forward = rows[1, "1F0[1]"]
    assert (forward.seconds, forward.waited_s) == (pytest.approx(100), 0)
    assert rows[1, "P2"].start_s == forward.start_s
    assert rows[1, "P1"].start_s == forward.end_s, "before the first backward, as others need it"
    tiny = rows_of_plan(pipeline_of([1], 2, 2), costs)[1, "1F0[1]"]
    arrived = there[1] + 1 + message_s(costs, 1)
    assert tiny.waited_s == pytest.approx(there[2] - arrived)


def test_pushes_of_all_stages_are_one_after_the_other() -> None:
    """Catches pushes that wait for no other stage: a bucket moves when the last rank has issued it,
    also one that has nothing to add."""
    costs = unit_costs(2, 2, pull_s=1e-6, push_s=6.0, update_s=1.0)
    share = [there * 1e6 for there in arrivals_of(costs)]
    rows = rows_of_plan(pipeline_of([100], 2, 2), costs)
    assert rows[1, "1B0[1]{3,2}"].end_s == pytest.approx(400)
    first = rows[0, "0B0[0]{1,0}"]
    assert first.end_s == pytest.approx(600)
    # Stage 0 has nothing for buckets 3 and 2 and issues them before its backward.
    assert rows[1, "G3"].start_s == pytest.approx(400)
    assert rows[1, "G3"].end_s == pytest.approx(400 + 6 * (share[3] - share[2]))
    assert rows[1, "G2"].end_s == pytest.approx(400 + 6 * (share[3] - share[1]))
    assert rows[1, "G0"].end_s == pytest.approx(600 + 6 * share[1])
    assert rows[1, "U"].end_s == rows[0, "U"].end_s == pytest.approx(601 + 6 * share[1])


def test_one_message_to_a_neighbour_is_under_way() -> None:
    """Catches a sender that runs ahead of what its neighbour has taken."""
    costs = unit_costs(3, 3, pull_s=1e5)
    rows = rows_of_plan(pipeline_of([100, 100, 100], 3, 3), costs)
    message = message_s(costs, 100)
    assert message > 100
    sent = rows[0, "Sa0>1*100"]
    assert sent.seconds == 0
    second = rows[0, "Sa1>1*100"]
    assert second.start_s == pytest.approx(sent.start_s + 100)
    assert second.end_s == pytest.approx(sent.start_s + message)
    assert rows[1, "Ra0<0*100"].end_s == second.end_s


def test_members_of_a_stage_meet_and_each_sends_its_part() -> None:
    """Catches a member that goes on before the others have received, and messages of the whole
    pack."""
    costs = unit_costs(4, 2, pull_s=1e3)
    rows = rows_of_plan(pipeline_of([101], 2, 2, width=2), costs)
    larger, smaller = rows[2, "Ra0<0*51"], rows[3, "Ra0<1*50"]
    assert larger.end_s - smaller.end_s == pytest.approx(message_s(costs, 1))
    for text in ("1F0[2,3]", "1B0[2,3]{3,2}"):
        assert rows[2, text].start_s == rows[3, text].start_s
    assert rows[3, "1F0[2,3]"].start_s == larger.end_s


def random_world(seed: int) -> tuple[Plan, CostModel]:
    """A random strategy on synthetic costs of any speed of the exchange."""
    rng = np.random.default_rng(seed)
    devices, layers = int(rng.integers(1, 9)), int(rng.integers(2, 7))
    pull_s, push_s = 10 ** rng.uniform(-4, 0, 2)
    costs = synthetic_costs(devices, layers).replace(
        exchange_s=ExchangeCost(pull_s=pull_s, push_s=push_s, update_s=0.01),
        scale=rng.uniform(0.5, 2),
    )
    methods = {p: ("local" if p == 1 else "ulysses_z",) for p in costs.group_sizes}
    lengths = Lengths.of(rng.integers(1, 20_000, int(rng.integers(1, 14))).tolist())
    return random_strategy(lengths, devices, layers, rng, methods=methods, most_tensor=2), costs


def check_lines(timeline: Timeline) -> None:
    """A rank does one thing at a time, in the order of its rows; waits for weights are within a
    forward or stand alone."""
    for rank in range(timeline.devices):
        rows = [row for row in timeline.rows if row.rank == rank]
        own: list[Row] = []
        waits: list[Row] = []
        for row in rows:
            if row.kind == "pull":
                waits.append(row)
                continue
            inside = [wait for wait in waits if row.start_s <= wait.start_s < row.end_s]
            assert sum(wait.seconds for wait in inside) == pytest.approx(row.waited_s, abs=1e-12)
            assert all(wait.end_s <= row.end_s for wait in inside)
            assert all(a.end_s <= b.start_s for a, b in pairwise(waits))
            own.append(row)
            waits = []
        assert not waits, "everything is waited for before the update"
        assert all(a.end_s <= b.start_s for a, b in pairwise(own))
        assert own[-1].kind == "update"


def check_messages(timeline: Timeline, costs: CostModel) -> None:
    """Whoever receives waits for its message and for nothing else."""
    posted: dict[tuple[int, int, str, int], tuple[Row, int]] = {}
    for row in timeline.rows:
        for message in messages_of(parse_action(row.action)):
            if message.sends:
                posted[message.key(row.rank)] = row, message.rows
    for row in timeline.rows:
        for message in messages_of(parse_action(row.action)):
            if not message.sends:
                sent, rows = posted.pop(message.key(row.rank))
                assert rows == message.rows
                took = message_s(costs, rows)
                assert row.end_s >= (sent.start_s + took) * (1 - 1e-12)
                if (sent.kind, row.kind) == ("send", "recv"):
                    assert row.end_s == pytest.approx(max(row.start_s, sent.end_s + took))
    assert not posted, "what is sent is received"


def worked(timeline: Timeline, micro_batch: int) -> float:
    """Forward and backward of a micro-batch, of one member of each stage."""
    found: dict[tuple[str, int], float] = {}
    for row in timeline.rows:
        action = parse_action(row.action)
        if isinstance(action, Forward | Backward) and action.micro_batch == micro_batch:
            found[row.kind, action.stage] = row.seconds - row.waited_s
    return sum(found.values())


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_any_strategy(seed: int) -> None:
    """Catches a rank in two places, messages that come before they are sent, a quick clock that
    differs from the walk, seconds of micro-batches that do, and a step that is shorter than a
    rank's work."""
    plan, costs = random_world(seed)
    timeline = timeline_of(plan, costs)
    check_lines(timeline)
    check_messages(timeline, costs)
    busy = [0.0] * plan.devices
    for row in timeline.rows:
        if row.kind in ("forward", "backward", "update"):
            busy[row.rank] += row.seconds - row.waited_s
    assert timeline.seconds >= max(busy) * (1 - 1e-12)
    for index, seconds in enumerate(micro_batch_seconds(plan, costs)):
        assert worked(timeline, index) == pytest.approx(seconds)
    bare = step_s(plan, costs.replace(exchange_s=ExchangeCost()))
    assert timeline.seconds >= bare * (1 - 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    drawn=st.lists(
        st.tuples(st.integers(2, 5), st.lists(st.integers(1, 300), min_size=1, max_size=9)),
        min_size=1,
        max_size=6,
    ),
    pull_s=st.sampled_from([1e-6, 300.0, 3000.0]),
    places=st.sampled_from([1, 200, 1 << 20]),
)
def test_pipelines_that_run_at_once_take_what_each_takes_alone(
    drawn: list[tuple[int, list[int]]], pull_s: float, places: int
) -> None:
    """Catches a pipeline that waits for another one's turns, and one that is done and goes on."""
    costs, alone = unit_costs(6, 5, pull_s=pull_s, push_s=2 * pull_s, update_s=1.0), list[float]()
    pipelines = list[StagedPipeline]()
    for depth, sizes in drawn:
        plan = pipeline_of(sizes, depth, 5)
        alone.append(step_s(plan.replace(devices=6), costs))
        pipelines.append(
            staged_pipeline(
                costs,
                plan.pipelines[0],
                "replicated",
                np.array(plan.lengths.tokens, dtype=np.float64),
                [micro.sequences for micro in plan.micro_batches],
                [micro.layers for micro in plan.micro_batches],
            )
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged_clock, "_MOST_PLACES", places)
        assert staged_steps_s(pipelines, costs) == pytest.approx(alone, rel=1e-12)


def test_the_programs_are_those_of_the_ranks() -> None:
    """Catches a quick clock of one rank per stage that leaves out the slowest."""
    plan = pipeline_of([101, 3, 57], 2, 4, width=2)
    costs = unit_costs(4, 4, pull_s=2e3, push_s=1e3)
    assert len(compile_plan(plan, costs.shape.bucket_count)) == 4
    assert timeline_of(plan, costs).seconds == pytest.approx(step_s(plan, costs), rel=1e-12)
