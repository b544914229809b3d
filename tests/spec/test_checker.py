"""The checker: sound programs pass, and every planted fault is found by the rule it breaks."""

from __future__ import annotations

import pytest

from faults import Change, changed, drop, late, move, put, refusal, swap
from headrace.errors import ProgramError
from headrace.spec import (
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Scheme,
    check_programs,
    compile_plan,
)
from headrace.spec.checker import check_world
from headrace.spec.program import connected

BUCKETS = 3


def plan_of(*groups: tuple[int, ...]) -> Plan:
    """One micro-batch of one sequence per group, in this order."""
    return Plan(
        lengths=Lengths.of([10] * len(groups)),
        devices=max(rank for group in groups for rank in group) + 1,
        pipelines=tuple(Pipeline(scheme=Scheme(context=len(g)), ranks=g) for g in groups),
        micro_batches=tuple(
            MicroBatch(pipeline=i, sequences=(i,), layers=LayerPlan.parse("1*local"))
            for i in range(len(groups))
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


PAIR = plan_of((0, 1), (0, 1), (1,))
"""Two micro-batches on both ranks, then one on rank 1 alone."""


F0, F1, F2, B0, B1, B2 = "0F0[0,1]", "0F1[0,1]", "0F2[1]", "0B0[0,1]", "0B1[0,1]", "0B2[1]"
LAST_0, LAST_1 = f"{B1} G2 G1 G0", f"{B2}{{2,1,0}}"

FAULTS: dict[str, tuple[int, Change, str]] = {
    # Rule 1: all else holds, since pulls and pushes are only issued.
    "pulls swapped": (1, swap("P0", "P1"), "rule 1, rank 1, .*got P1, wanted P0"),
    "pulls swapped on rank 0": (0, swap("P1", "P2"), "rule 1, rank 0, .*got P2, wanted P1"),
    "pushes in another order": (
        1,
        put(LAST_1, f"{B2} G0 G1 G2"),
        "rule 1, rank 1, .*got G0, wanted G2",
    ),
    "a push held back": (0, put("G2 G1 G0", "G2 G0 G1"), "rule 1, rank 0, .*got G0, wanted G1"),
    # Rule 2 for groups is found by the walk of rule 5: ranks that disagree wait for each other.
    "micro-batches interleaved on one rank": (
        1,
        swap(B0, F1),
        r"rule 5, .*rank 0 waits at 0B0\[0,1\]; rank 1 waits at 0F1\[0,1\]",
    ),
    # Rule 3.
    "a forward before a pull": (
        1,
        move(F2, "P0"),
        r"rule 3, rank 1, action 0F2\[1\]: wanted P2 before 0F2",
    ),
    "a pull after a forward": (0, swap("P2", F0), r"rule 3, rank 0, action 0F0\[0,1\].*wanted P2"),
    "a backward before its forward": (
        1,
        swap(F2, LAST_1),
        r"rule 3, rank 1, action 0B2\[1\]{2,1,0}: wanted 0F2\[1\] before 0B2",
    ),
    "a push before a backward": (
        1,
        put(f"{F2} {LAST_1}", f"G2 {F2} {B2}{{1,0}}"),
        r"rule 3, rank 1, action G2: wanted 0B2\[1\] before G2",
    ),
    "pushes within a backward that is not the last": (
        1,
        put(f"{B1} {F2} {LAST_1}", f"{B1}{{2,1,0}} {F2} {B2}"),
        r"rule 3, rank 1, action 0B1\[0,1\]{2,1,0}: wanted 0B2\[1\] before G",
    ),
    "pushes before a micro-batch that was put off": (
        0,
        put(f"{F0} {B0} {F1} {LAST_0}", f"{F1} {LAST_0} {F0} {B0}"),
        r"rule 3, rank 0, action G0: wanted 0B0\[0,1\] before G",
    ),
    "pushes before a micro-batch of another group that was put off": (
        1,
        put(f"{F1} {B1} {F2} {LAST_1}", f"{F2} {LAST_1} {F1} {B1}"),
        r"rule 3, rank 1, action 0B2\[1\]{2,1,0}: wanted 0B1\[0,1\] before G",
    ),
    "pushes within a backward from the first": (
        1,
        put(LAST_1, f"{B2}{{0,1,2}}"),
        r"rule 3, rank 1, action 0B2\[1\]{0,1,2}: got pushes of buckets \(0, 1, 2\)",
    ),
    "a push after the update": (
        0,
        put("G0 U", "U G0"),
        "rule 3, rank 0, action U: wanted G0 before U",
    ),
    "a backward after the update": (
        1,
        put(f"{LAST_1} U", f"U {LAST_1}"),
        "rule 3, rank 1, action U: wanted G0 before U",
    ),
    # Rule 4.
    "a forward dropped": (1, drop(F2), r"rule 4, rank 1, action 0F2\[1\].*0 times"),
    "a backward dropped": (0, drop(B0), r"rule 4, rank 0, action 0B0\[0,1\].*0 times"),
    "a pull dropped": (0, drop("P1"), "rule 4, rank 0, action P1: got 0 times"),
    "a push dropped": (0, drop("G1"), "rule 4, rank 0, action G1: got 0 times"),
    "the update dropped": (0, drop("U"), "rule 4, rank 0, action U: got 0 times"),
    "a push doubled": (0, put("U", "G0 U"), "rule 4, rank 0, action G0: got 2 times"),
    "a push doubled in its backward": (
        1,
        put(LAST_1, f"{B2}{{2,1,1,0}}"),
        "rule 4, rank 1, action G1: got 2 times",
    ),
    "a forward doubled": (1, put(F2, f"{F2} {F2}"), r"rule 4, rank 1, action 0F2.*2 times"),
    "a backward doubled": (1, put(F2, f"{B1} {F2}"), r"rule 4, rank 1, action 0B1.*2 times"),
    "the update doubled": (1, put("U", "U U"), "rule 4, rank 1, action U: got 2 times, wanted 1"),
    "a bucket too many": (0, put("P0", "P3 P0"), "rule 4, rank 0, action P3: got 1"),
    "a push of a bucket too many": (
        1,
        put(LAST_1, f"{B2}{{3,2,1,0}}"),
        "rule 4, rank 1, action G3: got 1 times, wanted 0",
    ),
    "a wrong group": (0, put(F0, "0F0[0]"), r"rule 4, rank 0, action 0F0\[0(,1)?\]"),
    "a group in another order": (0, put(F0, "0F0[1,0]"), "rule 4, rank 0, action 0F0"),
    "a wrong micro-batch": (0, put(F0, "0F2[0,1]"), "rule 4, rank 0, action 0F"),
    "a micro-batch of another rank": (0, put(F0, f"{F2} {B2} {F0}"), "rule 4, rank 0, action 0B2"),
    "a wrong stage": (0, put(B0, "1B0[0,1]"), "rule 4, rank 0, action 0B0"),
    "a message that nobody wants": (
        0,
        put(B0, f"Sa0>1*5 {B0}"),
        r"rule 4, rank 0, action Sa0>1\*5: got 1 times, wanted 0",
    ),
    # Rule 6: on a device one waits for what the other has not posted.
    "pushes between collectives that another rank posts first": (
        0,
        put(LAST_0, f"{B1}{{2,1,0}}"),
        r"rule 6, collectives in different orders: got rank 0 at 0B1\[0,1\]{2,1,0}; rank 1 at 0B1",
    ),
    "some of them": (
        0,
        put(LAST_0, f"{B1}{{2}} G1 G0"),
        r"rule 6, .*rank 0 at 0B1\[0,1\]\{2\}; rank 1 at 0B1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_rule(name: str) -> None:
    """Catches a rule that was lost: no other rule sees its fault before it does."""
    rank, change, text = FAULTS[name]
    programs = changed(compile_plan(PAIR, BUCKETS), rank, change)
    with pytest.raises(ProgramError, match=text):
        check_programs(programs, PAIR, BUCKETS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_the_check_of_a_world(name: str) -> None:
    """Catches a quicker check of all ranks that lets through what the walk of all finds."""
    rank, change, _ = FAULTS[name]
    programs = changed(compile_plan(PAIR, BUCKETS), rank, change)
    with pytest.raises(ProgramError):
        check_world(programs, PAIR, BUCKETS)
    check_world(compile_plan(PAIR, BUCKETS), PAIR, BUCKETS)


def test_the_check_of_a_world_wants_one_order() -> None:
    """Catches ranks that are each sound and wait for each other, as each was checked alone."""
    turned = put(f"{F0} {B0} {F1} {B1}", f"{F1} {B1} {F0} {B0}")
    with pytest.raises(ProgramError, match="rule 2"):
        check_world(changed(compile_plan(PAIR, BUCKETS), 1, turned), PAIR, BUCKETS)


SOUND: dict[str, Change] = {
    "pushes after the backward": put(LAST_1, f"{B2} G2 G1 G0"),
    "some pushes after the backward": put(LAST_1, f"{B2}{{2,1}} G0"),
    "the first micro-batch last": put(f"{B1} {F2} {LAST_1}", f"{F2} {B1} {LAST_1}"),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_does_no_harm_passes(name: str) -> None:
    """Catches a checker that wants the compiler's own programs, letter by letter."""
    programs = changed(compile_plan(PAIR, BUCKETS), 1, SOUND[name])
    assert refusal(programs, PAIR, BUCKETS) == ""


def test_a_micro_batch_that_no_rank_runs_is_missed() -> None:
    """Catches a check of the ranks against each other only: all of them agree here."""
    programs = [late(program) for program in compile_plan(PAIR, BUCKETS)]
    for rank in (0, 1):
        programs = list(changed(programs, rank, put(f"{F1} {B1}", "")))
    text = refusal(programs, PAIR, BUCKETS)
    assert "rule 4, rank 0, action 0B1[0,1]: got 0 times, wanted 1" in text


def test_ranks_in_different_orders_deadlock_and_both_actions_are_named() -> None:
    """Catches a checker that looks at each rank alone: each of these programs is fine."""
    turned = put(f"{F0} {B0} {F1} {B1}", f"{F1} {B1} {F0} {B0}")
    text = refusal(changed(compile_plan(PAIR, BUCKETS), 1, turned), PAIR, BUCKETS)
    assert text.startswith("rule 5, the programs deadlock")
    assert f"rank 0 waits at {F0}; rank 1 waits at {F1}" in text


def test_a_ring_of_pairs_that_each_agree_deadlocks() -> None:
    """Catches rule 2 without rule 5: no two ranks disagree, and yet all wait."""
    plan = plan_of((0, 1), (1, 2), (0, 2))
    programs = tuple(map(late, compile_plan(plan, BUCKETS)))
    first, second, third = "0F0[0,1] 0B0[0,1]", "0F1[1,2] 0B1[1,2]", "0F2[0,2] 0B2[0,2]"
    programs = changed(programs, 1, put(f"{first} {second}", f"{second} {first}"))
    assert refusal(programs, plan, BUCKETS) == "", "an order of one rank alone leads to no ring"
    programs = changed(programs, 2, put(f"{second} {third}", f"{third} {second}"))
    text = refusal(programs, plan, BUCKETS)
    assert "rank 0 waits at 0F0[0,1]; rank 1 waits at 0F1[1,2]; rank 2 waits at 0F2[0,2]" in text


APART = plan_of((0, 1), (3,), (1, 2), (4, 5), (5,))


def test_connected_ranks() -> None:
    """Catches neighbours of neighbours that are forgotten, and pipelines without work that tie
    ranks together."""
    idle = Pipeline(scheme=Scheme(context=3), ranks=(2, 3, 4))
    plan = APART.replace(pipelines=(*APART.pipelines, idle))
    found = [connected(plan, rank) for rank in range(6)]
    assert found == [(0, 1, 2)] * 3 + [(3,)] + [(4, 5)] * 2


@pytest.mark.parametrize("keep", [(0, 1, 2), (3,), (4, 5), (3, 4, 5), (0, 1, 2, 4, 5)], ids=str)
def test_connected_ranks_are_checked_alone(keep: tuple[int, ...]) -> None:
    """Catches a check that needs the programs of ranks that do not matter, or that lets a fault of
    those given pass."""
    programs = compile_plan(APART, BUCKETS)
    assert refusal([programs[rank] for rank in keep], APART, BUCKETS) == ""
    for rank in keep:
        broken = changed(programs, rank, swap("P0", "P1"))
        text = refusal([broken[other] for other in keep], APART, BUCKETS)
        assert text.startswith(f"rule 1, rank {rank}")


@pytest.mark.parametrize("keep", [(0,), (0, 1), (1, 2), (4,), (0, 1, 2, 5), (2, 1, 0)], ids=str)
def test_ranks_that_others_depend_on_are_not_left_out(keep: tuple[int, ...]) -> None:
    """Catches a check of half a meeting."""
    programs = compile_plan(APART, BUCKETS)
    text = refusal([programs[rank] for rank in keep], APART, BUCKETS)
    assert text.startswith(f"ranks of the programs: got {list(keep)}, wanted 0 to 5, or ranks that")


@pytest.mark.parametrize("keep", [(), (0,), (1,), (1, 0), (0, 1, 1), (0, 0)], ids=str)
def test_there_is_one_program_for_each_rank(keep: tuple[int, ...]) -> None:
    """Catches a rank that was forgotten, or that would run another rank's program."""
    programs = compile_plan(PAIR, BUCKETS)
    with pytest.raises(ProgramError, match=r"ranks of the programs: got .*, wanted 0 to 1"):
        check_programs([programs[rank] for rank in keep], PAIR, BUCKETS)
