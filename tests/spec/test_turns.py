"""Programs of models that a loop hands micro-batches to: what they hold, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import ProgramError
from headrace.spec import LayerPlan, Lengths, MicroBatch, Pipeline, Plan, Scheme
from headrace.spec.checker import check_turns
from headrace.spec.plan import Semantics
from headrace.spec.program import (
    Backward,
    Forward,
    Idle,
    Program,
    Update,
    compile_turns,
    parse_action,
    turns_of,
)

ONE = LayerPlan.parse("1*local")
Packs = list[list[tuple[int, ...]]]


def plan_of(groups: list[tuple[int, ...]], semantics: Semantics, devices: int) -> Plan:
    """One micro-batch for each group, in order."""
    kinds = list(dict.fromkeys(groups))
    return Plan(
        lengths=Lengths.of(range(9, 9 + len(groups))),
        devices=devices,
        semantics=semantics,
        pipelines=tuple(
            Pipeline(scheme=Scheme(context=len(ranks)), ranks=ranks) for ranks in kinds
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
        micro_batches=tuple(
            MicroBatch(pipeline=kinds.index(ranks), sequences=(i,), layers=ONE)
            for i, ranks in enumerate(groups)
        ),
    )


def drawn(rng: np.random.Generator, semantics: Semantics) -> tuple[Plan, Packs]:
    """Blocks of ranks of several sizes with random micro-batches of one to three packs."""
    blocks = [(0, 1, 2, 3), (0, 1), (2, 3), (0,), (1,), (2,), (3,)]
    chosen = [blocks[i] for i in rng.integers(0, len(blocks), size=rng.integers(1, 9))]
    packs = [
        [ranks[: rng.integers(1, len(ranks) + 1)] for _ in range(rng.integers(1, 4))]
        for ranks in chosen
    ]
    return plan_of(chosen, semantics, 4), packs


def run_out(programs: list[Program], *, lockstep: bool) -> bool:
    """Whether all programs come to their end where every forward and backward waits for its group,
    and in lockstep for the world: an oracle that knows no turns."""
    at = [0] * len(programs)
    while True:
        here = [
            program.actions[i] if i < len(program.actions) else None
            for program, i in zip(programs, at, strict=True)
        ]
        if all(action is None for action in here):
            return True
        moved = False
        if lockstep:
            if any(action is None for action in here):
                return False
            if all(isinstance(action, Update) for action in here):
                return True
            kinds = {isinstance(action, Update) for action in here}
            groups = [a.group for a in here if isinstance(a, Forward | Backward)]
            met = all(here[r] == here[g[0]] for g in groups for r in g)
            if kinds != {False} or not met:
                return False
            # An idle turn is a forward and a backward.
            for rank, action in enumerate(here):
                if isinstance(action, Idle):
                    at[rank] += 1
                else:
                    at[rank] += 2
            continue
        for action in here:
            ranks = action.group if isinstance(action, Forward | Backward) else ()
            if ranks and all(here[r] == action for r in ranks):
                for r in ranks:
                    at[r] += 1
                moved = True
                break
        if not moved:
            return all(isinstance(action, Update) for action in here)


@pytest.mark.parametrize("semantics", ["free", "lockstep"])
@pytest.mark.parametrize("seed", range(40))
def test_programs_of_all_ranks_come_to_their_end(seed: int, semantics: Semantics) -> None:
    """Would catch a rank that skips a turn in which all meet, and two ranks that meet two groups in
    different orders."""
    plan, packs = drawn(np.random.default_rng(seed), semantics)
    programs = [compile_turns(plan, packs, rank) for rank in range(4)]
    check_turns(programs, plan, packs)
    assert run_out(programs, lockstep=semantics == "lockstep")
    texts = [Program.parse(str(program)) for program in programs]
    assert texts == programs


def test_idle_turns_are_those_of_the_longest() -> None:
    """Would catch a rank without work that stays away from what the world does at every layer."""
    plan = plan_of([(0, 1), (2,), (2,)], "lockstep", 3)
    assert turns_of(plan) == [[0, 1], [2]]
    packs = [[(0, 1), (0,)], [(2,)], [(2,)]]
    said = [str(compile_turns(plan, packs, rank)) for rank in range(3)]
    assert said == [
        "rank 0: 0F0[0,1] 0B0[0,1] 0F0.1[0] 0B0.1[0] I1 U",
        "rank 1: 0F0[0,1] 0B0[0,1] I0 I1 U",
        "rank 2: 0F1[2] 0B1[2] I0 0F2[2] 0B2[2] U",
    ]
    free = replace(plan, semantics="free")
    assert str(compile_turns(free, packs, 1)) == "rank 1: 0F0[0,1] 0B0[0,1] U"


def changed(program: Program, change: Callable[[list[object]], list[object]]) -> Program:
    return replace(program, actions=tuple(change(list(program.actions))))


BROKEN = {
    "a pack is left out": (lambda a: a[2:], "rule"),
    "a pack runs twice": (lambda a: [*a[:2], *a], "rule"),
    "packs in another order": (lambda a: [*a[2:4], *a[:2], *a[4:]], "rule 2"),
    "a backward before its forward": (lambda a: [a[1], a[0], *a[2:]], "rule 3"),
    "the update in between": (lambda a: [*a[:2], a[-1], *a[2:-1]], "rule 3"),
    "another group": (lambda a: [replace(a[0], group=(0,)), *a[1:]], "rule 4"),
}


@pytest.mark.parametrize("semantics", ["free", "lockstep"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_is_refused(name: str, semantics: Semantics) -> None:
    """Would catch a check that looks away."""
    plan = plan_of([(0, 1), (0, 1), (0,)], semantics, 2)
    packs = [[(0, 1)], [(0, 1)], [(0,)]]
    sound = compile_turns(plan, packs, 0)
    change, rule = BROKEN[name]
    with pytest.raises(ProgramError, match=rule):
        check_turns([changed(sound, change)], plan, packs)


def test_an_idle_turn_too_many_or_few_is_refused() -> None:
    """Would catch a rank that waits for the world after the others have gone to the update."""
    plan, packs = plan_of([(0,), (1,), (1,)], "lockstep", 2), [[(0,)], [(1,)], [(1,)]]
    program = compile_turns(plan, packs, 0)
    assert str(program) == "rank 0: 0F0[0] 0B0[0] I1 U"
    for change in (lambda a: [*a[:2], a[-1]], lambda a: [*a[:3], *a[2:]]):
        with pytest.raises(ProgramError, match="rule 2"):
            check_turns([changed(program, change)], plan, packs)
    free = replace(plan, semantics="free")
    with pytest.raises(ProgramError, match="without idle turns"):
        check_turns([program], free, packs)


def test_a_pack_on_ranks_of_others_is_refused() -> None:
    """Would catch ranks that read other samples than the plan's: they would wait for nobody."""
    plan = plan_of([(0,), (1,)], "free", 2)
    packs = [[(0, 1)], [(1,)]]
    with pytest.raises(ProgramError, match="some of"):
        check_turns([compile_turns(plan, packs, 0)], plan, packs)


def test_actions_read_back() -> None:
    """Would catch a pack's number that is lost in text."""
    for text in ("0F4.1[2,3]", "0B4.12[2,3]", "I7"):
        assert str(parse_action(text)) == text
