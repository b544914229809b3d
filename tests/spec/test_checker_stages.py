"""The checker on pipelines of stages: messages that are lost, twice, wrong or too late."""

from __future__ import annotations

import re

import pytest

from faults import Change, changed, drop, late, move, parted, put, refusal, swap
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

BUCKETS = 6


def plan_of(scheme: str) -> Plan:
    """Four micro-batches of 10, 20, 30 and 40 tokens on one pipeline over all ranks."""
    pipeline = Scheme.parse(scheme)
    return Plan(
        lengths=Lengths.of([10, 20, 30, 40]),
        devices=pipeline.devices,
        pipelines=(Pipeline(scheme=pipeline, ranks=tuple(range(pipeline.devices))),),
        micro_batches=tuple(
            MicroBatch(pipeline=0, sequences=(i,), layers=LayerPlan.parse("4*local"))
            for i in range(4)
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


LINE = plan_of("pp3")
"""Its programs are those of tests/golden/pp3.txt with other rows: rank r is stage r, and the
buckets of the stages are 0 1, 2 3 and 4 5."""

FAULTS: dict[str, tuple[int, Change, str]] = {
    # Rule 1.
    "pushes of other stages swapped": (0, swap("G5", "G4"), "rule 1, rank 0, ...got G4, wanted G5"),
    "a push held back": (
        1,
        put("1B3[1]{3,2} Sg3>0*40 G1", "1B3[1]{3} Sg3>0*40 G1 G2"),
        "rule 1, rank 1, ...got G1, wanted G2",
    ),
    # Rule 2: each rank alone is fine.
    "messages swapped at the sender": (
        0,
        put("Sa0>1*10 0F1[0] Sa1>1*20", "0F1[0] Sa1>1*20 Sa0>1*10"),
        "rule 2, message 0 from rank 0 to rank 1: got a1*20 sent, a0*10 received",
    ),
    "messages swapped at the receiver": (
        1,
        put("Ra0<0*10 1F0[1] Sa0>2*10 Ra1<0*20", "Ra1<0*20 Ra0<0*10 1F0[1] Sa0>2*10"),
        "rule 2, message 0 from rank 0 to rank 1: got a0*10 sent, a1*20 received",
    ),
    "a message moved behind another": (
        0,
        put("Sa1>1*20 0F2[0] X(Sa2>1*30,Rg0<1*10)", "0F2[0] X(Sa2>1*30,Rg0<1*10) Sa1>1*20"),
        "rule 2, message 1 from rank 0 to rank 1: got a2*30 sent, a1*20 received",
    ),
    "micro-batches in another order on one stage": (
        2,
        put(
            "Ra0<1*10 2F0[2] 2B0[2] X(Sg0>1*10,Ra1<1*20) 2F1[2] 2B1[2] X(Sg1>1*20,Ra2<1*30)",
            "Ra1<1*20 2F1[2] 2B1[2] X(Sg1>1*20,Ra0<1*10) 2F0[2] 2B0[2] X(Sg0>1*10,Ra2<1*30)",
        ),
        "rule 2, message 0 from rank 1 to rank 2",
    ),
    # Rule 3.
    "a forward before its receive": (
        1,
        swap("Ra0<0*10", "1F0[1]"),
        "rule 3, rank 1, action 1F0[1]: wanted Ra0<0*10 before 1F0[1]",
    ),
    "a forward before its exchange": (
        1,
        swap("X(Sg0>0*10,Ra2<0*30)", "1F2[1]"),
        "rule 3, rank 1, action 1F2[1]: wanted Ra2<0*30 before 1F2[1]",
    ),
    "a backward before its receive": (
        0,
        put("Rg2<1*30 0B2[0]", "0B2[0] Rg2<1*30"),
        "rule 3, rank 0, action 0B2[0]: wanted Rg2<1*30 before 0B2[0]",
    ),
    "a last backward before its receive": (
        0,
        put("Rg3<1*40 0B3[0]{1,0}", "0B3[0]{1,0} Rg3<1*40"),
        "rule 3, rank 0, action 0B3[0]{1,0}: wanted Rg3<1*40 before 0B3[0]",
    ),
    "a send before its forward": (
        0,
        swap("0F0[0]", "Sa0>1*10"),
        "rule 3, rank 0, action Sa0>1*10: wanted 0F0[0] before Sa0>1*10",
    ),
    "an exchange before its forward": (
        0,
        swap("0F2[0]", "X(Sa2>1*30,Rg0<1*10)"),
        "rule 3, rank 0, action X(Sa2>1*30,Rg0<1*10): wanted 0F2[0] before Sa2",
    ),
    "a send before its backward": (
        1,
        put("1B2[1] Sg2>0*30", "Sg2>0*30 1B2[1]"),
        "rule 3, rank 1, action Sg2>0*30: wanted 1B2[1] before Sg2>0*30",
    ),
    "a push before the last backward": (
        0,
        put("0B3[0]{1,0}", "G1 0B3[0]{0}"),
        "rule 3, rank 0, action G1: wanted 0B3[0] before G1",
    ),
    "pushes within a backward that is not the last": (
        2,
        put(
            "2B2[2] X(Sg2>1*30,Ra3<1*40) 2F3[2] 2B3[2]{5,4}",
            "2B2[2]{5,4} X(Sg2>1*30,Ra3<1*40) 2F3[2] 2B3[2]",
        ),
        "rule 3, rank 2, action 2B2[2]{5,4}: wanted 2B3[2] before G",
    ),
    "a push of another stage's bucket within a backward": (
        0,
        put("G2 Rg3<1*40 0B3[0]{1,0}", "Rg3<1*40 0B3[0]{2,1,0}"),
        "rule 3, rank 0, action 0B3[0]{2,1,0}: got pushes of buckets (2, 1, 0)",
    ),
    "pushes within a backward from the first": (
        1,
        put("1B3[1]{3,2}", "1B3[1]{2,3}"),
        "rule 3, rank 1, action 1B3[1]{2,3}: got pushes",
    ),
    "the tied table pushed by the head before its last backward": (
        2,
        put("2B3[2]{5,4} Sg3>1*40 G3 G2 G1 G0", "G0 2B3[2]{5,4} Sg3>1*40 G3 G2 G1"),
        "rule 3, rank 2, action G0: wanted 2B3[2] before G0",
    ),
    "a message after the update": (
        1,
        put("Sg3>0*40 G1 G0 U", "G1 G0 U Sg3>0*40"),
        "rule 3, rank 1, action U: wanted Sg3",
    ),
    # Rule 4.
    "a send dropped": (0, drop("Sa0>1*10"), "rule 4, rank 0, action Sa0>1*10: got 0 times"),
    "a receive dropped": (1, drop("Ra1<0*20"), "rule 4, rank 1, action Ra1<0*20: got 0 times"),
    "an exchange dropped": (
        1,
        drop("X(Sg0>0*10,Ra2<0*30)"),
        "rule 4, rank 1, action Ra2<0*30: got 0 times",
    ),
    "half an exchange dropped": (
        1,
        put("X(Sg0>0*10,Ra2<0*30)", "Sg0>0*10"),
        "rule 4, rank 1, action Ra2<0*30: got 0",
    ),
    "a send doubled": (
        0,
        put("Sa1>1*20", "Sa1>1*20 Sa1>1*20"),
        "rule 4, rank 0, action Sa1>1*20: got 2 times",
    ),
    "a receive doubled": (
        0,
        put("Rg3<1*40", "Rg3<1*40 Rg3<1*40"),
        "rule 4, rank 0, action Rg3<1*40: got 2 times",
    ),
    "an exchange doubled": (
        2,
        put("X(Sg0>1*10,Ra1<1*20)", "X(Sg0>1*10,Ra1<1*20) X(Sg0>1*10,Ra1<1*20)"),
        "rule 4, rank 2, action Ra1<1*20: got 2 times",
    ),
    "a wrong micro-batch": (
        0,
        put("Sa0>1*10", "Sa4>1*10"),
        "rule 4, rank 0, action Sa0>1*10: got 0 times",
    ),
    "a wrong micro-batch in an exchange": (
        0,
        put("X(Sa2>1*30,Rg0<1*10)", "X(Sa2>1*30,Rg1<1*20)"),
        "rule 4, rank 0, action Rg0<1*10: got 0 times",
    ),
    "wrong rows": (
        0,
        put("Sa0>1*10", "Sa0>1*11"),
        "rule 4, rank 0, action Sa0>1*10: got 0 times, wanted 1",
    ),
    "wrong rows received": (
        1,
        put("Ra0<0*10", "Ra0<0*9"),
        "rule 4, rank 1, action Ra0<0*10: got 0 times, wanted 1",
    ),
    "a wrong peer": (
        0,
        put("Sa0>1*10", "Sa0>2*10"),
        "rule 4, rank 0, action Sa0>1*10: got 0 times, wanted 1",
    ),
    "a peer that does not exist": (
        2,
        put("Ra0<1*10", "Ra0<3*10"),
        "rule 4, rank 2, action Ra0<1*10: got 0 times, wanted 1",
    ),
    "a message to itself": (
        0,
        put("Sa0>1*10", "Sa0>0*10"),
        "rule 4, rank 0, action Sa0>0*10: got 1 times, wanted 0",
    ),
    "gradients for activations": (
        0,
        put("Sa0>1*10", "Sg0>1*10"),
        "rule 4, rank 0, action Sa0>1*10: got 0 times, wanted 1",
    ),
    "a receive for a send": (
        0,
        put("Sa0>1*10", "Ra0<1*10"),
        "rule 4, rank 0, action Ra0<1*10: got 1 times, wanted 0",
    ),
    "a wrong stage": (
        1,
        put("1F0[1]", "0F0[1]"),
        "rule 4, rank 1, action 0F0[1]: got 1 times, wanted 0",
    ),
    "a stage that takes another's part": (
        1,
        put("1F0[1]", "2F0[1]"),
        "rule 4, rank 1, action 1F0[1]: got 0 times, wanted 1",
    ),
    "ranks of two stages in a group": (
        1,
        put("1F0[1]", "1F0[0,1]"),
        "rule 4, rank 1, action 1F0[0,1]: got 1 times, wanted 0",
    ),
    # Rule 5.
    "a receive before what is sent for it": (
        0,
        put(
            "Sa0>1*10 0F1[0] Sa1>1*20 0F2[0] X(Sa2>1*30,Rg0<1*10)",
            "0F1[0] 0F2[0] Rg0<1*10 Sa0>1*10 Sa1>1*20 Sa2>1*30",
        ),
        "rule 5, ...rank 0 waits at Rg0<1*10; rank 1 waits at Ra0<0*10; rank 2 waits at Ra0<1",
    ),
    "a gradient awaited before its last activations": (
        1,
        put(
            "Sa0>2*10 Ra1<0*20 1F1[1] X(Sa1>2*20,Rg0<2*10)",
            "Ra1<0*20 1F1[1] Rg0<2*10 Sa0>2*10 Sa1>2*20",
        ),
        "rule 5, ...rank 1 waits at Rg0<2*10; rank 2 waits at Ra0<1*10",
    ),
    # Rule 6.
    "pushes of a later stage after its message": (
        0,
        put("G5 G4 G3 G2 Rg3<1*40", "Rg3<1*40 G5 G4 G3 G2"),
        "rule 6, ...rank 0 at Rg3<1*40; rank 1 at G5",
    ),
    "pushes before any forward": (
        0,
        move("G5", "0F0[0]"),
        "rule 6, ...rank 0 at G5; rank 1 at Ra0<0*10",
    ),
    "pushes of a stage after its message": (
        1,
        put("1B3[1]{3,2} Sg3>0*40", "1B3[1] Sg3>0*40 G3 G2"),
        "rule 6, ...rank 0 at G3; rank 1 at Sg3>0*40",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_rule(name: str) -> None:
    """Catches a rule that was lost: no other rule sees its fault before it does."""
    rank, change, text = FAULTS[name]
    programs = changed(compile_plan(LINE, BUCKETS), rank, change)
    with pytest.raises(ProgramError, match=".*".join(map(re.escape, text.split("...")))):
        check_programs(programs, LINE, BUCKETS)


SOUND: dict[str, tuple[int, Change]] = {
    "one exchange as its parts": (1, put("X(Sg0>0*10,Ra2<0*30)", "Sg0>0*10 Ra2<0*30")),
    "one exchange as its parts, turned": (1, put("X(Sg0>0*10,Ra2<0*30)", "Ra2<0*30 Sg0>0*10")),
    "an exchange of the first stage as its parts": (
        0,
        put("X(Sa2>1*30,Rg0<1*10)", "Sa2>1*30 Rg0<1*10"),
    ),
    "a message received early": (1, move("Ra1<0*20", "1F0[1]")),
    "a send after the next forward": (0, swap("Sa0>1*10", "0F1[0]")),
    "pushes after the backward": (1, put("1B3[1]{3,2}", "1B3[1] G3 G2")),
    "pushes of the first stage after the backward": (0, put("0B3[0]{1,0}", "0B3[0] G1 G0")),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_does_no_harm_passes(name: str) -> None:
    """Catches a checker that wants the compiler's own programs, letter by letter."""
    rank, change = SOUND[name]
    programs = changed(compile_plan(LINE, BUCKETS), rank, change)
    assert refusal(programs, LINE, BUCKETS) == ""


def test_pushes_after_all_backwards_pass() -> None:
    """Catches a checker for which a push belongs into a backward."""
    for plan in (LINE, plan_of("tp2-pp2")):
        programs = [late(program) for program in compile_plan(plan, BUCKETS)]
        assert refusal(programs, plan, BUCKETS) == ""


def test_sends_and_receives_that_are_not_exchanged_deadlock() -> None:
    """Catches a walk whose sends do not wait for their receivers: this runs on a transport that
    buffers, and hangs on one that does not, or for larger messages."""
    programs = compile_plan(LINE, BUCKETS)
    text = refusal([parted(program) for program in programs], LINE, BUCKETS)
    assert text.startswith("rule 5, the programs deadlock: got rank 1 waits at Sa1>2*20; rank 2")
    assert "rank 2 waits at Sg0>1*10; rank 0 waits at Sa2>1*30" in text
    turned = refusal([parted(p, receive_first=True) for p in programs], LINE, BUCKETS)
    assert "rank 1 waits at Rg0<2*10; rank 2 waits at Ra1<1*20" in turned


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_a_pull_after_what_another_rank_sends_deadlocks(bucket: int) -> None:
    """Catches a forward that waits for a pull which another rank issues only once it has the
    activations of that forward: locally each rank is fine, as its own forwards come later."""
    pulls = " ".join(f"P{i}" for i in range(bucket, BUCKETS))
    programs = changed(
        compile_plan(LINE, BUCKETS), 1, put(f"{pulls} Ra0<0*10", f"Ra0<0*10 {pulls}")
    )
    wanted = "rule 5, the programs deadlock: got rank 0 waits at 0F0[0]; rank 1 waits at Ra0<0*10"
    assert refusal(programs, LINE, BUCKETS).startswith(wanted)


def test_members_of_a_stage_keep_one_order() -> None:
    """Catches messages that are checked without the groups that meet between them: each of these
    ranks agrees with its neighbour in the other stage."""
    plan = plan_of("tp2-pp2")
    programs = changed(
        compile_plan(plan, BUCKETS),
        0,
        put("0F1[0,1] X(Sa1>2*10,Rg0<2*5) 0B0[0,1]", "Rg0<2*5 0B0[0,1] 0F1[0,1] Sa1>2*10"),
    )
    text = refusal(programs, plan, BUCKETS)
    assert text.startswith("rule 5")
    assert "rank 0 waits at 0B0[0,1]; rank 1 waits at 0F1[0,1]" in text


def test_rows_are_those_of_the_member() -> None:
    """Catches rows of the whole micro-batch, on which both ends would agree."""
    plan = Plan(
        lengths=Lengths.of([7]),
        devices=4,
        predicted_s=0.0,
        lower_bound_s=0.0,
        pipelines=(Pipeline(scheme=Scheme.parse("cp2-pp2"), ranks=(0, 1, 2, 3)),),
        micro_batches=(MicroBatch(pipeline=0, sequences=(0,), layers=LayerPlan.parse("4*local")),),
    )
    programs = compile_plan(plan, BUCKETS)
    programs = changed(programs, 0, put("Sa0>2*4", "Sa0>2*7"))
    programs = changed(programs, 2, put("Ra0<0*4", "Ra0<0*7"))
    assert "rule 4, rank 0, action Sa0>2*4: got 0 times" in refusal(programs, plan, BUCKETS)
