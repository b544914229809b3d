"""The clock beside the executor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.costs import CostModel, Exchange, synthetic_costs
from headrace.errors import CostError, ProgramError
from headrace.simulator import simulate, step_s
from headrace.spec import (
    LayerOption,
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Program,
    Push,
    Row,
    Scheme,
    compile_plan,
)
from headrace.spec.weights import bucket_count, buckets


def costs_of(devices: int) -> CostModel:
    exchange = Exchange(pull_s=1.0, push_s=2.0, update_s=3.0)
    return synthetic_costs(devices, layers=2).replace(exchange_s=exchange)


def plan_of(devices: int, jobs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Plan:
    """One micro-batch per (ranks, lengths), in this order."""
    tokens = [n for _, lengths in jobs for n in lengths]
    pipelines, micro_batches, at = list[Pipeline](), list[MicroBatch](), 0
    for ranks, lengths in jobs:
        pipelines.append(Pipeline(scheme=Scheme(context=len(ranks)), ranks=ranks))
        option = LayerOption.of("local" if len(ranks) == 1 else "ulysses_z")
        micro_batches.append(
            MicroBatch(
                pipeline=len(pipelines) - 1,
                sequences=tuple(range(at, at + len(lengths))),
                layers=LayerPlan.uniform(option, 2),
            )
        )
        at += len(lengths)
    return Plan(
        lengths=Lengths.of(tokens), devices=devices, pipelines=tuple(pipelines),
        micro_batches=tuple(micro_batches), predicted_s=0.0, lower_bound_s=0.0,
    )  # fmt: skip


def run(plan: Plan, costs: CostModel) -> dict[tuple[int, str], Row]:
    programs = compile_plan(plan, bucket_count(costs.architecture))
    timeline = simulate(programs, plan, costs)
    assert timeline.source == "predicted"
    rows = {(row.rank, row.action): row for row in timeline.rows}
    wanted = {(p.rank, str(action)) for p in programs for action in p.actions}
    assert rows.keys() == wanted, "a row for every action, as the executor writes them"
    assert timeline.seconds == pytest.approx(step_s(plan, costs), rel=1e-12)
    return rows


def test_groups_start_when_their_ranks_are_free() -> None:
    """Catches starting a group when its first rank is free, or ignoring the plan's order."""
    costs = costs_of(3)
    plan = plan_of(3, [((0,), (5000,)), ((0, 1), (800, 900)), ((2,), (10,)), ((1, 2), (7,))])
    rows = run(plan, costs)
    first, second = rows[0, "0B0[0]"], rows[1, "0F1[0,1]"]
    assert rows[0, "0F0[0]"].start_s == pytest.approx(1.0), "after the pull"
    assert second.start_s == first.end_s == rows[0, "0F1[0,1]"].start_s
    assert rows[2, "0F3[1,2]"].start_s == rows[1, "0B1[0,1]"].end_s
    forward, backward = costs.micro_batch_s([800, 900], 2, plan.micro_batches[1].layers)
    assert second.seconds == pytest.approx(forward)
    assert rows[1, "0B1[0,1]"].seconds == pytest.approx(backward)
    assert (second.tokens, second.ranks) == (1700, 2)


def test_pull_push_and_update_meet_the_world() -> None:
    """Catches charging the exchange per bucket, or an update before the last rank has arrived."""
    costs = costs_of(2)
    plan = plan_of(2, [((0,), (3000,)), ((1,), (10,))])
    rows = run(plan, costs)
    elements = [sum(w.elements for w in bucket) for bucket in buckets(costs.architecture)]
    assert rows[1, "P0"].seconds == pytest.approx(elements[0] / sum(elements))
    assert rows[1, "P3"].end_s == pytest.approx(1.0)
    late = rows[0, "0B0[0]"].end_s
    assert rows[1, "G3"].start_s == rows[1, "0B1[1]"].end_s
    assert rows[1, "G3"].end_s > late
    assert rows[1, "G0"].end_s == pytest.approx(late + 2.0)
    assert rows[1, "U"].start_s == rows[0, "U"].start_s == rows[0, "G0"].end_s
    assert rows[1, "U"].seconds == pytest.approx(3.0)


def test_ranks_without_work_take_part() -> None:
    """Catches a walk that waits for ever for a rank that has no micro-batch."""
    rows = run(plan_of(3, [((1,), (100,))]), costs_of(3))
    assert {action for rank, action in rows if rank == 0} == (
        {f"P{b}" for b in range(4)} | {f"G{b}" for b in range(4)} | {"U"}
    )


def test_scale_multiplies_the_whole_timeline() -> None:
    """Catches a scale that misses the exchange."""
    costs, plan = costs_of(2), plan_of(2, [((0, 1), (300,)), ((1,), (10,))])
    assert step_s(plan, costs.replace(scale=3.0)) == pytest.approx(3 * step_s(plan, costs))
    assert run(plan, costs.replace(scale=3.0))[0, "U"].end_s == pytest.approx(
        3 * run(plan, costs)[0, "U"].end_s
    )


def test_sharded_weights_are_slower() -> None:
    """Catches a clock that does not know how the plan holds its weights."""
    costs, plan = costs_of(2), plan_of(2, [((0, 1), (300,))])
    gather = 2 * sum(costs.gather_s[2])
    sharded = step_s(plan.replace(working="sharded"), costs)
    assert sharded - step_s(plan, costs) == pytest.approx(gather)


def test_broken_programs_are_refused() -> None:
    """Catches an endless loop or an IndexError for programs that do not fit the plan."""
    costs, plan = costs_of(2), plan_of(2, [((0, 1), (300,)), ((0, 1), (10,))])
    programs = compile_plan(plan, bucket_count(costs.architecture))
    with pytest.raises(ProgramError, match="one for each of 2"):
        simulate(programs[:1], plan, costs)
    actions = list(programs[0].actions)
    actions[4:8] = actions[6:8] + actions[4:6]
    swapped = replace(programs[0], actions=tuple(actions))
    with pytest.raises(ProgramError, match="deadlock: got rank 0 waits at 0F1"):
        simulate((swapped, programs[1]), plan, costs)
    alone = plan_of(1, [((0,), (300,))])
    with pytest.raises(ProgramError, match="bucket of G9"):
        simulate((Program(rank=0, actions=(Push(bucket=9),)),), alone, costs_of(1))
    with pytest.raises(ProgramError, match="micro-batch of 0F1"):
        simulate((Program.parse("rank 0: 0F1[0]"),), alone, costs_of(1))


def test_schemes_without_costs_are_named() -> None:
    """Catches a KeyError for a plan that was made with other costs."""
    costs = synthetic_costs(4, layers=2, sizes=(1, 4))
    with pytest.raises(CostError, match=r"costs of cp2.*cp1, cp4"):
        step_s(plan_of(4, [((0, 1), (5,))]), costs)
