"""From plans to programs, beside golden texts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import (
    Backward,
    Exchange,
    Forward,
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Program,
    Pull,
    Scheme,
    Update,
    check_programs,
    compile_plan,
    compile_rank,
)
from headrace.spec.program import is_last, last_of_ranks, pushes_of, rows_of
from headrace.spec.walk import messages_of
from plans import random_plan, random_staged_plan

GOLDEN = Path(__file__).parents[1] / "golden"


def _plan(
    tokens: str,
    devices: int,
    pipelines: list[Pipeline],
    packs: list[tuple[int, list[int]]],
    layers: int = 2,
) -> Plan:
    return Plan(
        lengths=Lengths.parse(tokens),
        devices=devices,
        pipelines=tuple(pipelines),
        micro_batches=tuple(
            MicroBatch(pipeline=p, sequences=tuple(pack), layers=LayerPlan.parse(f"{layers}*local"))
            for p, pack in packs
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def _group(*ranks: int) -> Pipeline:
    return Pipeline(scheme=Scheme(context=len(ranks)), ranks=ranks)


def _staged(scheme: str, *ranks: int, shares: tuple[int, ...] = ()) -> Pipeline:
    return Pipeline(scheme=Scheme.parse(scheme), ranks=ranks, shares=shares)


PLANS = {
    "one-rank": _plan("30 20x2", 1, [_group(0)], [(0, [0]), (0, [2, 1])]),
    "idle-rank": _plan("900 40 50", 4, [_group(0, 1), _group(3)], [(0, [0]), (1, [1, 2])]),
    "several-sizes": _plan(
        "8000 900 800 40x4",
        4,
        [_group(0, 1, 2, 3), _group(0, 1), _group(2, 3), _group(1), _group(3)],
        [(0, [0]), (2, [2]), (1, [1]), (3, [3, 5]), (4, [4]), (4, [6])],
    ),
    "pp2": _plan(
        "40 30 20 10 5", 2, [_staged("pp2", 0, 1)], [(0, [0]), (0, [2]), (0, [1]), (0, [3, 4])]
    ),
    "pp3": _plan(
        "40 30 20 10",
        3,
        [_staged("pp3", 0, 1, 2)],
        [(0, [0]), (0, [1]), (0, [2]), (0, [3])],
        layers=4,
    ),
    "pp3-few": _plan("40 30", 3, [_staged("pp3", 2, 1, 0)], [(0, [0]), (0, [1])], layers=3),
    "pp3-one": _plan("40", 3, [_staged("pp3", 0, 1, 2)], [(0, [0])], layers=3),
    "tp2-pp2": _plan(
        "41 30 1", 4, [_staged("tp2-pp2", 0, 1, 2, 3)], [(0, [0]), (0, [1]), (0, [2])]
    ),
    "pp2-beside-cp2": _plan(
        "41 30 7 20 10",
        4,
        [_staged("pp2", 0, 2), _group(1, 3), _group(3)],
        [(1, [0]), (0, [1]), (0, [3]), (2, [2]), (0, [4])],
    ),
    "uneven-shares": _plan(
        "40 30 20",
        2,
        [_staged("pp2", 0, 1, shares=(4, 1))],
        [(0, [0]), (0, [1]), (0, [2])],
        layers=5,
    ),
    "idle-rank-pp2": _plan(
        "40 30", 5, [_staged("pp2", 3, 1), _staged("pp2", 2, 4)], [(0, [0]), (0, [1])]
    ),
}


def _buckets(plan: Plan) -> int:
    return len(plan.micro_batches[0].layers.options) + 2


@pytest.mark.parametrize("name", PLANS)
def test_programs_are_the_golden_ones(name: str, request: pytest.FixtureRequest) -> None:
    """Catches a changed order of actions that nobody looked at; --update-golden writes anew."""
    plan = PLANS[name]
    programs = compile_plan(plan, _buckets(plan))
    check_programs(programs, plan, _buckets(plan))
    text = f"{plan}\n\n" + "\n".join(map(str, programs)) + "\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()
    printed = text.partition("\n\n")[2].splitlines()
    assert tuple(Program.parse(line) for line in printed) == programs


def test_the_programs_of_the_docs() -> None:
    """Catches examples that readers cannot reproduce."""
    text = (GOLDEN.parents[1] / "docs" / "concepts" / "programs.md").read_text()
    packs = [(0, [0]), (1, [1]), (2, [2])]
    groups = _plan("90 20 10", 2, [_group(0, 1), _group(0), _group(1)], packs)
    stages = _plan("40 30 20", 2, [_staged("pp2", 0, 1)], [(0, [0]), (0, [1]), (0, [2])])
    for plan in (groups, stages):
        assert "\n".join(map(str, compile_plan(plan, 4))) in text


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 999), min_size=1, max_size=20),
    st.integers(1, 9),
    st.integers(3, 9),
    st.integers(0, 2**32),
)
def test_every_rank_does_its_part_once(
    tokens: list[int], devices: int, buckets: int, seed: int
) -> None:
    """Catches a rank that skips a world collective because it has no work, and one that works
    for a pipeline it is not in."""
    plan = random_plan(Lengths.of(tokens), devices, 2, np.random.default_rng(seed))
    programs = compile_plan(plan, buckets)
    assert [program.rank for program in programs] == list(range(devices))
    for rank, program in enumerate(programs):
        assert program == compile_rank(plan, rank, buckets)
        actions = program.actions
        assert [a.bucket for a in actions if isinstance(a, Pull)] == list(range(buckets))
        assert [b for a in actions for b in pushes_of(a)] == list(range(buckets))[::-1]
        assert actions.count(Update()) == 1
        mine = [
            (number, plan.pipelines[micro.pipeline].ranks)
            for number, micro in enumerate(plan.micro_batches)
            if rank in plan.pipelines[micro.pipeline].ranks
        ]
        for kind in (Forward, Backward):
            found = [(a.micro_batch, a.group) for a in actions if isinstance(a, kind)]
            assert found == mine, "in the plan's order"


@st.composite
def staged(draw: st.DrawFn) -> tuple[Plan, int]:
    """A plan of random pipelines and its count of buckets."""
    layers = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    plan = random_staged_plan(rng, draw(st.integers(1, 8)), layers, draw(st.integers(1, 9)))
    return plan, layers + 2


@settings(deadline=None, max_examples=200)
@given(staged())
def test_staged_plans_compile_to_sound_programs_that_read_back(pair: tuple[Plan, int]) -> None:
    """Catches any shape of pipelines whose messages do not meet, that would deadlock, or whose
    text loses a part."""
    plan, buckets = pair
    programs = compile_plan(plan, buckets)
    check_programs(programs, plan, buckets)
    assert tuple(Program.parse(str(program)) for program in programs) == programs


@settings(deadline=None)
@given(staged())
def test_an_early_stage_holds_one_micro_batch_more_than_the_next(pair: tuple[Plan, int]) -> None:
    """Catches all forwards before all backwards, which holds the activations of every
    micro-batch, and one micro-batch at a time, which leaves the other stages idle."""
    plan, buckets = pair
    for program in compile_plan(plan, buckets):
        count = most = 0
        for action in program.actions:
            count += isinstance(action, Forward)
            count -= isinstance(action, Backward)
            most = max(most, count)
        runs = sum(isinstance(action, Forward) for action in program.actions)
        for pipeline in plan.pipelines:
            if runs and program.rank in pipeline.ranks:
                stage = pipeline.stage_of(program.rank, buckets - 2)
                assert most == min(runs, stage.count - stage.index)


@settings(deadline=None)
@given(staged())
def test_pushes_go_out_as_soon_as_their_gradients_are_complete(pair: tuple[Plan, int]) -> None:
    """Catches a push that waits for the end of the last backward, one inside it for which the stage
    has no gradients, and one inside it where a rank of its group has more to do."""
    plan, buckets = pair
    for program in compile_plan(plan, buckets):
        assert [b for a in program.actions for b in pushes_of(a)] == list(range(buckets))[::-1]
        backwards = [action for action in program.actions if isinstance(action, Backward)]
        assert not any(action.pushes for action in backwards[:-1])
        if backwards:
            micro = plan.micro_batches[backwards[-1].micro_batch]
            stage = plan.pipelines[micro.pipeline].stage_of(program.rank, buckets - 2)
            busy = not is_last(last_of_ranks(plan), backwards[-1])
            assert backwards[-1].pushes == (() if busy else stage.buckets[::-1])


@settings(deadline=None)
@given(staged())
def test_messages_have_the_rows_of_their_members(pair: tuple[Plan, int]) -> None:
    """Catches the tokens of the whole micro-batch in every message, or of another member."""
    plan, buckets = pair
    rows: dict[tuple[str, int, int], int] = {}
    for program in compile_plan(plan, buckets):
        for message in (m for action in program.actions for m in messages_of(action)):
            if message.sends:
                stage = plan.pipelines[plan.micro_batches[message.micro_batch].pipeline].stage_of(
                    program.rank, buckets - 2
                )
                key = (message.what, stage.index, message.micro_batch)
                rows[key] = rows.get(key, 0) + message.rows
    for (_, _, index), total in rows.items():
        assert total == sum(plan.tokens_of(plan.micro_batches[index]))
    for index, micro in enumerate(plan.micro_batches):
        stages = plan.pipelines[micro.pipeline].stages(buckets - 2)
        for here, there in pairwise(stages):
            assert {("a", here.index, index), ("g", there.index, index)} <= rows.keys()


@given(st.integers(0, 999), st.integers(1, 40))
def test_rows_of_members_are_even_and_the_first_hold_more(tokens: int, ranks: int) -> None:
    """Catches a message of other rows than the token plan gives the member: no other split of
    the tokens has these three properties."""
    found = [rows_of(tokens, ranks, member) for member in range(ranks)]
    assert sum(found) == tokens
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


@settings(deadline=None)
@given(staged())
def test_the_steady_state_exchanges(pair: tuple[Plan, int]) -> None:
    """Catches a send beside a receive where neighbours meet: both would wait for each other
    wherever sends wait for their receivers."""
    plan, buckets = pair
    for program in compile_plan(plan, buckets):
        actions = program.actions
        runs = sum(isinstance(action, Forward) for action in actions)
        stage = next(
            (
                p.stage_of(program.rank, buckets - 2)
                for p in plan.pipelines
                if program.rank in p.ranks
            ),
            None,
        )
        if stage is None or stage.count == 1 or not runs:
            continue
        steady = max(0, runs - (stage.count - 1 - stage.index))
        wanted = steady * (not stage.last) + max(0, steady - 1) * (not stage.first)
        assert sum(isinstance(action, Exchange) for action in actions) == wanted


def test_a_pipeline_needs_a_layer_for_each_stage() -> None:
    """Catches a stage that passes on what it gets; one that has no work does not matter."""
    plan = PLANS["pp3"]
    with pytest.raises(SpecError, match="stages of a pipeline: got 3 for 2 layers"):
        compile_plan(plan, 4)
    with pytest.raises(SpecError, match="got 1 for 0 layers"):
        compile_plan(PLANS["one-rank"], 2)
    idle = _plan("5", 4, [_group(0), _staged("pp3", 1, 2, 3)], [(0, [0])], layers=1)
    assert [len(program.actions) for program in compile_plan(idle, 3)] == [6, 7, 7, 7]
