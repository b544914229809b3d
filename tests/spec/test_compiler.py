"""From plans to programs, beside golden texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    compile_plan,
    compile_rank,
)

GOLDEN = Path(__file__).parents[1] / "golden"


def _plan(
    tokens: str, devices: int, groups: list[tuple[int, ...]], packs: list[tuple[int, list[int]]]
) -> Plan:
    return Plan(
        lengths=Lengths.parse(tokens),
        devices=devices,
        pipelines=tuple(Pipeline(scheme=Scheme(context=len(g)), ranks=g) for g in groups),
        micro_batches=tuple(
            MicroBatch(pipeline=p, sequences=tuple(pack), layers=LayerPlan.parse("2*local"))
            for p, pack in packs
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


PLANS = {
    "one-rank": _plan("30 20x2", 1, [(0,)], [(0, [0]), (0, [2, 1])]),
    "idle-rank": _plan("900 40 50", 4, [(0, 1), (3,)], [(0, [0]), (1, [1, 2])]),
    "several-sizes": _plan(
        "8000 900 800 40x4", 4, [(0, 1, 2, 3), (0, 1), (2, 3), (1,), (3,)],
        [(0, [0]), (2, [2]), (1, [1]), (3, [3, 5]), (4, [4]), (4, [6])],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_programs_are_the_golden_ones(name: str, request: pytest.FixtureRequest) -> None:
    """Catches a changed order of actions that nobody looked at; --update-golden writes anew."""
    plan = PLANS[name]
    programs = compile_plan(plan, bucket_count=4)
    text = f"{plan}\n\n" + "\n".join(map(str, programs)) + "\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()
    printed = text.partition("\n\n")[2].splitlines()
    assert tuple(Program.parse(line) for line in printed) == programs


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 999), min_size=1, max_size=20), st.integers(1, 9), st.integers(1, 9),
    st.integers(0, 2**32),
)  # fmt: skip
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
        assert [a.bucket for a in actions if isinstance(a, Push)] == list(range(buckets))[::-1]
        assert actions.count(Update()) == 1
        mine = [
            (number, plan.pipelines[micro.pipeline].ranks)
            for number, micro in enumerate(plan.micro_batches)
            if rank in plan.pipelines[micro.pipeline].ranks
        ]
        for kind in (Forward, Backward):
            found = [(a.micro_batch, a.group) for a in actions if isinstance(a, kind)]
            assert found == mine, "in the plan's order"
