"""The clock beside the executor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.costs import CostModel, ExchangeCost, synthetic_costs
from headrace.errors import CostError, ProgramError
from headrace.simulator import peak_bytes, simulate, step_s
from headrace.spec import (
    LayerOption,
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Program,
    Push,
    Scheme,
    compile_plan,
)
from simulator.unit_world import arrivals_of, rows_of_plan, unit_costs


def costs_of(devices: int) -> CostModel:
    exchange = ExchangeCost(pull_s=1.0, push_s=2.0, update_s=3.0)
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
        lengths=Lengths.of(tokens),
        devices=devices,
        pipelines=tuple(pipelines),
        micro_batches=tuple(micro_batches),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def test_groups_start_when_their_ranks_are_free() -> None:
    """Catches starting a group when its first rank is free, or ignoring the plan's order."""
    costs = costs_of(3)
    plan = plan_of(3, [((0,), (5000,)), ((0, 1), (800, 900)), ((2,), (10,)), ((1, 2), (7,))])
    rows = rows_of_plan(plan, costs)
    first, second = rows[0, "0B0[0]"], rows[1, "0F1[0,1]"]
    assert rows[0, "0F0[0]"].start_s == 0
    assert second.start_s == first.end_s == rows[0, "0F1[0,1]"].start_s
    assert rows[2, "0F3[1,2]"].start_s == rows[1, "0B1[0,1]"].end_s
    forward, backward = costs.micro_batch_s([800, 900], 2, plan.micro_batches[1].layers)
    assert second.seconds == pytest.approx(forward)
    assert rows[1, "0B1[0,1]"].seconds == pytest.approx(backward)
    assert rows[0, "0B1[0,1]"].end_s == rows[1, "0B1[0,1]"].end_s
    assert (second.tokens, second.ranks) == (1700, 2)


def test_a_forward_waits_for_each_segments_weights() -> None:
    """Catches all pulls before the first forward, a wait for the sum of all, waiting that is no
    row, and a second forward that waits again."""
    costs = unit_costs(1, 2, pull_s=10.0)
    there = arrivals_of(costs)
    rows = rows_of_plan(plan_of(1, [((0,), (100,)), ((0,), (50,))]), costs)
    first = rows[0, "0F0[0]"]
    assert (first.start_s, first.end_s) == (0, pytest.approx(there[1] + 200))
    assert first.waited_s == pytest.approx(there[1])
    assert (rows[0, "P0"].start_s, rows[0, "P0"].end_s) == (0, pytest.approx(there[0]))
    assert rows[0, "P1"].start_s == rows[0, "P0"].end_s
    assert rows[0, "P1"].end_s == pytest.approx(there[1])
    assert rows[0, "P2"].start_s == rows[0, "P2"].end_s == pytest.approx(there[1] + 100), "hidden"
    assert rows[0, "P3"].start_s == pytest.approx(first.end_s)
    assert rows[0, "0F1[0]"].waited_s == 0
    assert rows[0, "0F1[0]"].seconds == pytest.approx(100)
    short = rows_of_plan(plan_of(1, [((0,), (1,))]), costs)[0, "0F0[0]"]
    assert there[2] + 1 > there[3]
    assert short.end_s == pytest.approx(there[2] + 1), "layer 1 after its weights"
    assert short.waited_s == pytest.approx(there[2] - 1)


def test_pushes_are_hidden_but_for_the_last_two() -> None:
    """Catches pushes that start after the backward, that move before their segment has ended, or
    two at a time."""
    costs = unit_costs(1, 2, pull_s=10.0, push_s=20.0, update_s=3.0)
    there = arrivals_of(costs)
    rows = rows_of_plan(plan_of(1, [((0,), (100,)), ((0,), (30,))]), costs)
    done = there[1] + 600 + 180
    last = rows[0, "0B1[0]{3,2,1,0}"]
    assert last.end_s == pytest.approx(done)
    assert [rows[0, f"G{b}"].start_s for b in (3, 2)] == [last.end_s] * 2
    assert [rows[0, f"G{b}"].seconds for b in (3, 2)] == [0, 0], "moved while layer 0 ran"
    assert rows[0, "G1"].start_s == last.end_s
    assert rows[0, "G0"].end_s == pytest.approx(done + 2 * there[1]), "the first two: twice as slow"
    assert rows[0, "U"].start_s == rows[0, "G0"].end_s
    assert rows[0, "U"].seconds == 3
    slow = costs.replace(exchange_s=ExchangeCost(push_s=10_000.0))
    rows = rows_of_plan(plan_of(1, [((0,), (100,))]), slow)
    # Issued when the backward of layer 1 ends, and from then on one after the other.
    assert rows[0, "G0"].end_s == pytest.approx(200 + 200 + 1000 * there[2])


def test_pushes_and_the_update_meet_the_world() -> None:
    """Catches a push that moves before the last rank has issued it, and one that waits until the
    last rank is done."""
    costs = unit_costs(2, 2, pull_s=1.0, push_s=2.0, update_s=3.0)
    there = arrivals_of(costs)
    rows = rows_of_plan(plan_of(2, [((0,), (300,)), ((1,), (10,))]), costs)
    late, early = rows[0, "0B0[0]{3,2,1,0}"], rows[1, "0B1[1]{3,2,1,0}"]
    assert late.end_s == pytest.approx(there[1] + 1800)
    assert rows[1, "G3"].start_s == early.end_s
    assert rows[1, "G3"].end_s == pytest.approx(late.start_s + 2 * (there[3] - there[2]))
    assert rows[1, "G2"].end_s == pytest.approx(late.start_s + 600 + 2 * (there[2] - there[1]))
    assert rows[1, "G0"].end_s == rows[0, "G0"].end_s == pytest.approx(late.end_s + 2 * there[1])
    assert rows[1, "U"].start_s == rows[0, "U"].start_s == rows[0, "G0"].end_s
    assert rows[1, "U"].seconds == pytest.approx(3.0)


def test_the_rank_that_ends_last_is_not_the_last_to_push() -> None:
    """Catches a quick clock that asks only the rank that ends last: another one's last backward may
    begin later, and so its first push."""
    costs = unit_costs(2, 2, push_s=5000.0)
    share = arrivals_of(costs.replace(exchange_s=ExchangeCost(pull_s=1.0)))
    plan = plan_of(2, [((0,), (300,)), ((1,), (290,)), ((1,), (9,))])
    rows = rows_of_plan(plan, costs)
    assert rows[0, "0B0[0]{3,2,1,0}"].end_s == 1800
    begun = rows[1, "0B2[1]{3,2,1,0}"].start_s
    assert begun == 1740 + 18
    assert rows[0, "G3"].end_s == pytest.approx(max(1800, begun + 5000 * (share[3] - share[2])))
    assert rows[0, "G0"].end_s == pytest.approx(begun + 18 + 5000 * share[2])


def test_ranks_without_work_take_part() -> None:
    """Catches a walk that waits for ever for a rank that has no micro-batch."""
    rows = rows_of_plan(plan_of(3, [((1,), (100,))]), costs_of(3))
    assert {action for rank, action in rows if rank == 0} == (
        {f"P{b}" for b in range(4)} | {f"G{b}" for b in range(4)} | {"U"}
    )
    assert rows[0, "P3"].end_s == pytest.approx(1.0)
    assert rows[0, "G3"].start_s == rows[0, "P3"].end_s


def test_scale_multiplies_the_whole_timeline() -> None:
    """Catches a scale that misses the exchange."""
    costs, plan = costs_of(2), plan_of(2, [((0, 1), (300,)), ((1,), (10,))])
    assert step_s(plan, costs.replace(scale=3.0)) == pytest.approx(3 * step_s(plan, costs))
    assert rows_of_plan(plan, costs.replace(scale=3.0))[0, "U"].end_s == pytest.approx(
        3 * rows_of_plan(plan, costs)[0, "U"].end_s
    )


def test_a_share_moves_where_all_devices_shard_weights() -> None:
    """Catches all of pull and push charged to a group that works with stored rows, and a share to
    plans in which a rank needs others' rows, too."""
    costs = costs_of(4)
    few = costs.replace(exchange_s=replace(costs.exchange_s, sharded_share=0.25))
    everyone, alone = (0, 1, 2, 3), (0,)
    for jobs, working, moved in (
        ([(everyone, (1000,))], "sharded", 0.25),
        ([(everyone, (1000,))], "replicated", 1.0),
        ([(everyone, (1000,)), (alone, (10,))], "sharded", 1.0),
    ):
        plan = plan_of(4, jobs).replace(working=working)
        exchange = ExchangeCost(pull_s=moved, push_s=2 * moved, update_s=3.0)
        expected_s = step_s(plan, costs.replace(exchange_s=exchange))
        assert step_s(plan, few) == pytest.approx(expected_s)
        assert max(row.end_s for row in rows_of_plan(plan, few).values()) == pytest.approx(
            expected_s
        )


def test_sharded_weights_are_slower() -> None:
    """Catches a clock that does not know how the plan holds its weights."""
    costs, plan = costs_of(2).replace(exchange_s=ExchangeCost()), plan_of(2, [((0, 1), (300,))])
    gather = 2 * sum(costs.gather_s[2])
    sharded = step_s(plan.replace(working="sharded"), costs)
    assert sharded - step_s(plan, costs) == pytest.approx(gather)


def test_broken_programs_are_refused() -> None:
    """Catches an endless loop or an IndexError for programs that do not fit the plan."""
    costs, plan = costs_of(2), plan_of(2, [((0, 1), (300,)), ((0, 1), (10,))])
    programs = compile_plan(plan, costs.shape.bucket_count)
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
    with pytest.raises(ProgramError, match="stage of 1F0"):
        simulate((Program.parse("rank 0: 1F0[0]"),), alone, costs_of(1))
    with pytest.raises(ProgramError, match="deadlock: got rank 0 waits at Ra0<1"):
        simulate((Program.parse("rank 0: Ra0<1*300"),), alone, costs_of(1))
    texts = ("rank 0: G1 G0 U", "rank 1: G0 G1 U")
    with pytest.raises(ProgramError, match=r"pushes of rank 1: got \[0, 1\], wanted \[1, 0\]"):
        simulate([Program.parse(text) for text in texts], plan, costs)


def test_schemes_without_costs_are_named() -> None:
    """Catches a KeyError for a plan that was made with other costs."""
    costs = synthetic_costs(4, layers=2, sizes=(1, 4))
    with pytest.raises(CostError, match=r"costs of cp2.*cp1, cp4"):
        step_s(plan_of(4, [((0, 1), (5,))]), costs)
    deep = Pipeline(scheme=Scheme(tensor=2, pipeline=2), ranks=(0, 1, 2, 3))
    plan = plan_of(4, [((0, 1, 2, 3), (5,))]).replace(pipelines=(deep,))
    with pytest.raises(CostError, match=r"costs of tp2-pp2.*cp1, cp4"):
        step_s(plan, costs)
    local = replace(plan.micro_batches[0], layers=LayerPlan.parse("2*local"))
    with pytest.raises(CostError, match=r"costs of local on cp2"):
        step_s(plan.replace(micro_batches=(local,)), synthetic_costs(4, layers=2))
    with pytest.raises(CostError, match=r"layer plan: got 2 layers, wanted 3"):
        step_s(plan, synthetic_costs(4, layers=3))


@pytest.mark.parametrize("devices", [2, 8])
def test_costs_are_of_as_many_devices(devices: int) -> None:
    """Catches a plan that is answered with the stored state and exchanges of other devices."""
    plan, costs = plan_of(4, [((0, 1), (5,))]), costs_of(devices)
    programs = compile_plan(plan, costs.shape.bucket_count)
    told = f"devices of the costs: got {devices}, wanted the plan's 4"
    for answer in (step_s, peak_bytes, lambda *given: simulate(programs, *given)):
        with pytest.raises(CostError, match=told):
            answer(plan, costs)
