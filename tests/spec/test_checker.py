"""The checker: sound programs pass, and every planted fault is found by the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ProgramError
from headrace.planning.drawn import random_plan
from headrace.spec import (
    Backward,
    Forward,
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Program,
    Pull,
    Push,
    Scheme,
    Update,
    check_programs,
    compile_plan,
)
from headrace.spec.program import parse_action

BUCKETS = 3
Programs = tuple[Program, ...]


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


def texts(rank: int, change: Callable[[list[str]], None]) -> Programs:
    """The programs of PAIR with the actions of one rank changed as texts."""
    programs = list(compile_plan(PAIR, BUCKETS))
    words = [str(action) for action in programs[rank].actions]
    change(words)
    programs[rank] = Program(rank=rank, actions=tuple(map(parse_action, words)))
    return tuple(programs)


def swap(one: str, other: str) -> Callable[[list[str]], None]:
    def change(words: list[str]) -> None:
        i, j = words.index(one), words.index(other)
        words[i], words[j] = words[j], words[i]

    return change


def move(word: str, at: int) -> Callable[[list[str]], None]:
    def change(words: list[str]) -> None:
        words.remove(word)
        words.insert(at if at >= 0 else len(words) + 1 + at, word)

    return change


def put(old: str, new: str) -> Callable[[list[str]], None]:
    def change(words: list[str]) -> None:
        words[words.index(old)] = new

    return change


F0, F1, F2, B0, B1, B2 = "0F0[0,1]", "0F1[0,1]", "0F2[1]", "0B0[0,1]", "0B1[0,1]", "0B2[1]"

FAULTS: dict[str, tuple[int, Callable[[list[str]], None], str]] = {
    # Rule 1: all else holds, since pulls and pushes are only issued.
    "pulls swapped": (1, swap("P0", "P1"), "rule 1.*P0 on rank 0 against P1 on rank 1"),
    "pushes swapped": (1, swap("G2", "G0"), "rule 1.*G2 on rank 0 against G0 on rank 1"),
    "pulls swapped on rank 0": (0, swap("P1", "P2"), "rule 1.*P2 on rank 0 against P1 on rank 1"),
    # Rule 2 is found by the walk of rule 5: ranks that disagree wait for each other.
    "micro-batches interleaved on one rank": (
        1, swap(B0, F1), r"rule 5.*rank 0 waits at 0B0\[0,1\]; rank 1 waits at 0F1\[0,1\]"),
    # Rule 3.
    "a forward before a pull": (1, move(F2, 0), r"rule 3, rank 1, action 0F2\[1\].*all pulls"),
    "a backward before its forward": (1, swap(F2, B2), r"rule 3, rank 1, action 0B2\[1\]"),
    "a push before a backward": (1, move("G2", 5), "rule 3, rank 1, action G2"),
    "a pull after a forward": (0, swap("P2", F0), r"rule 3, rank 0, action 0F0\[0,1\]"),
    "a push after the update": (0, move("G0", -1), "rule 3, rank 0, action U"),
    "a backward after the update": (1, move(B2, -1), "rule 3, rank 1, action G2"),
    # Rule 4.
    "a forward dropped": (1, lambda w: w.remove(F2), r"rule 4, rank 1, action 0F2\[1\].*0 times"),
    "a pull dropped": (0, lambda w: w.remove("P1"), "rule 4, rank 0, action P1: got 0 times"),
    "the update dropped": (0, lambda w: w.remove("U"), "rule 4, rank 0, action U: got 0 times"),
    "a push doubled": (0, lambda w: w.insert(-1, "G0"), "rule 4, rank 0, action G0: got 2 times"),
    "a backward doubled": (1, lambda w: w.insert(8, B2), r"rule 4, rank 1, action 0B2.*2 times"),
    "a bucket too many": (0, lambda w: w.insert(0, "P3"), "rule 4, rank 0, action P3: got 1"),
    "a wrong group": (0, put(F0, "0F0[0]"), r"rule 4, rank 0, action 0F0\[0(,1)?\]"),
    "a group in another order": (0, put(F0, "0F0[1,0]"), "rule 4, rank 0, action 0F0"),
    "a wrong micro-batch": (0, put(F0, "0F2[0,1]"), "rule 4, rank 0, action 0F"),
    "a micro-batch of another rank": (
        0, lambda w: w.__setitem__(slice(3, 3), [F2, B2]), "rule 4, rank 0, action 0B2"),
    "a wrong stage": (0, put(B1, "1B1[0,1]"), "rule 4, rank 0, action 0B1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_rule(name: str) -> None:
    """Catches a rule that was lost: no other rule sees its fault before it does."""
    rank, change, text = FAULTS[name]
    with pytest.raises(ProgramError, match=text):
        check_programs(texts(rank, change), PAIR, BUCKETS)


def test_a_micro_batch_that_no_rank_runs_is_missed() -> None:
    """Catches a check of the ranks against each other only: all of them agree here."""
    lost = {F1, B1}
    programs = [
        [action for action in program.actions if str(action) not in lost]
        for program in compile_plan(PAIR, BUCKETS)
    ]
    assert "rule 4, rank 0, action 0B1[0,1]: got 0 times, wanted 1" in str(_check(PAIR, programs))


def test_ranks_in_different_orders_deadlock_and_both_actions_are_named() -> None:
    """Catches a checker that looks at each rank alone: each of these programs is fine."""

    def change(words: list[str]) -> None:
        at = words.index(F0)
        words[at : at + 4] = [F1, B1, F0, B0]

    with pytest.raises(ProgramError, match="rule 5, the programs deadlock") as caught:
        check_programs(texts(1, change), PAIR, BUCKETS)
    assert f"rank 0 waits at {F0}; rank 1 waits at {F1}" in str(caught.value)


def test_a_ring_of_pairs_that_each_agree_deadlocks() -> None:
    """Catches rule 2 without rule 5: no two ranks disagree, and yet all wait."""
    plan = plan_of((0, 1), (1, 2), (0, 2))
    programs = [list(program.actions) for program in compile_plan(plan, BUCKETS)]
    at = BUCKETS
    rank_1 = programs[1]
    rank_1[at : at + 4] = [*rank_1[at + 2 : at + 4], *rank_1[at : at + 2]]
    swapped = [*programs[2][at + 2 : at + 4], *programs[2][at : at + 2]]
    assert _check(plan, programs) is None, "an order of one rank alone leads to no ring"
    programs[2][at : at + 4] = swapped
    assert "rank 0 waits at 0F0[0,1]; rank 1 waits at 0F1[1,2]; rank 2 waits at 0F2[0,2]" in str(
        _check(plan, programs)
    )


def _check(plan: Plan, actions: list[list]) -> ProgramError | None:
    programs = [Program(rank=rank, actions=tuple(found)) for rank, found in enumerate(actions)]
    try:
        check_programs(programs, plan, BUCKETS)
    except ProgramError as error:
        return error
    return None


@pytest.mark.parametrize("keep", [(), (0,), (1,), (1, 0), (0, 1, 1), (0, 0)], ids=str)
def test_there_is_one_program_for_each_rank(keep: tuple[int, ...]) -> None:
    """Catches a rank that was forgotten, or that would run another rank's program."""
    programs = compile_plan(PAIR, BUCKETS)
    with pytest.raises(ProgramError, match=r"ranks of the programs: got .*, wanted 0 to 1"):
        check_programs([programs[rank] for rank in keep], PAIR, BUCKETS)


@st.composite
def compiled(draw: st.DrawFn) -> tuple[Plan, Programs]:
    tokens = draw(st.lists(st.integers(1, 99), min_size=1, max_size=14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    plan = random_plan(Lengths.of(tokens), draw(st.integers(1, 9)), 2, rng)
    return plan, compile_plan(plan, BUCKETS)


@settings(deadline=None)
@given(compiled())
def test_compiled_plans_pass(pair: tuple[Plan, Programs]) -> None:
    """Catches a rule that is too strict, in worlds that are no powers of two."""
    check_programs(pair[1], pair[0], BUCKETS)


@settings(deadline=None)
@given(compiled(), st.randoms(use_true_random=False))
def test_any_common_order_of_micro_batches_passes(pair: tuple[Plan, Programs], random) -> None:
    """Catches a checker that wants the compiler's own order."""
    plan, programs = pair
    order = list(range(len(plan.micro_batches)))
    random.shuffle(order)
    changed = []
    for program in programs:
        runs = [a for a in program.actions if isinstance(a, Forward | Backward)]
        runs.sort(key=lambda action: (order[action.micro_batch], action.kind == "backward"))
        actions = (*program.actions[:BUCKETS], *runs, *program.actions[-BUCKETS - 1 :])
        changed.append(replace(program, actions=actions))
    check_programs(changed, plan, BUCKETS)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Plan, Programs]:
    plan, programs = draw(compiled())
    rank = draw(st.integers(0, plan.devices - 1))
    actions = list(programs[rank].actions)
    index = st.integers(0, len(actions) - 1)
    i, j = draw(index), draw(index)
    match draw(st.sampled_from(["drop", "double", "move", "swap", "other", "blocks"])):
        case "drop":
            del actions[i]
        case "double":
            actions.insert(j, actions[i])
        case "move":
            actions.insert(j, actions.pop(i))
        case "swap":
            actions[i], actions[j] = actions[j], actions[i]
        case "other":
            other = programs[draw(st.integers(0, plan.devices - 1))].actions
            actions[i] = other[j % len(other)]
        case "blocks":
            # Neighbouring micro-batches change places: fine on one rank, perhaps not together.
            middle = range(BUCKETS, len(actions) - BUCKETS - 1 - 2, 2)
            for at in middle:
                if draw(st.booleans()):
                    actions[at : at + 4] = [*actions[at + 2 : at + 4], *actions[at : at + 2]]
    changed = list(programs)
    changed[rank] = Program(rank=rank, actions=tuple(actions))
    return plan, tuple(changed)


def sound(plan: Plan, programs: Programs) -> bool:
    """The rules again, as a graph: an action that several ranks share is one node."""
    wanted = compile_plan(plan, BUCKETS)
    graph: dict[str, set[str]] = {}
    for program, model in zip(programs, wanted, strict=True):
        words = [str(action) for action in program.actions]
        if sorted(words) != sorted(map(str, model.actions)):
            return False
        kinds = [action.kind for action in program.actions]
        last = {kind: max((i for i, k in enumerate(kinds) if k == kind), default=-1)
                for kind in ("pull", "backward")}  # fmt: skip
        for at, action in enumerate(program.actions):
            if isinstance(action, Forward) and at < last["pull"]:
                return False
            if isinstance(action, Push) and at < last["backward"]:
                return False
            forward = str(action).replace("B", "F")
            if isinstance(action, Backward) and forward not in words[:at]:
                return False
        if kinds[-1] != "update":
            return False
        nodes = [f"{program.rank} {a}" if isinstance(a, Pull | Push) else str(a)
                 for a in program.actions]  # fmt: skip
        for before, after in pairwise(nodes):
            graph.setdefault(after, set()).add(before)
    world = [[str(a) for a in p.actions if isinstance(a, Pull | Push | Update)] for p in programs]
    if any(order != world[0] for order in world):
        return False
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


@settings(deadline=None, max_examples=400)
@given(mutated())
def test_the_checker_agrees_with_a_graph(pair: tuple[Plan, Programs]) -> None:
    """Catches any fault that slips through, and any sound program that is refused."""
    plan, programs = pair
    try:
        check_programs(programs, plan, BUCKETS)
    except ProgramError:
        assert not sound(plan, programs)
    else:
        assert sound(plan, programs)
