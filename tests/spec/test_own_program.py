"""A rank's own program: what it compiles, what it checks of it, and how often."""

from __future__ import annotations

import numpy as np
import pytest

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
from headrace.spec.checker import OwnPrograms, check_alone
from headrace.spec.program import Program, compile_rank
from headrace.spec.random_plans import random_plan
from plans import random_staged_plan

BUCKETS = 4
TWO = LayerPlan.parse("2*local")


def plan_of(micro_batches: int, *pipelines: Pipeline, devices: int = 6, tokens: int = 9) -> Plan:
    """Micro-batches of one sequence each, on the pipelines in turn."""
    return Plan(
        lengths=Lengths.of(range(tokens, tokens + micro_batches)),
        devices=devices,
        pipelines=pipelines,
        predicted_s=0.0,
        lower_bound_s=0.0,
        micro_batches=tuple(
            MicroBatch(pipeline=i % len(pipelines), sequences=(i,), layers=TWO)
            for i in range(micro_batches)
        ),
    )


def group(*ranks: int) -> Pipeline:
    return Pipeline(scheme=Scheme(context=len(ranks)), ranks=ranks)


def staged(*ranks: int) -> Pipeline:
    return Pipeline(scheme=Scheme(context=len(ranks) // 2, pipeline=2), ranks=ranks)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_each_rank_gets_its_program_of_every_plan(seed: int, overlap: bool) -> None:
    """Would catch a program that is kept from a plan of the same kind, and kinds so fine that a
    sound plan is refused."""
    rng = np.random.default_rng(seed)
    own = [OwnPrograms(rank=rank, bucket_count=BUCKETS, overlap=overlap) for rank in range(6)]
    for _ in range(8):
        lengths = Lengths.of(rng.integers(1, 99, size=rng.integers(1, 9)))
        if rng.integers(2):
            plan = random_staged_plan(rng, 6, 2, len(lengths))
        else:
            plan = random_plan(lengths, 6, 2, rng)
        programs = compile_plan(plan, BUCKETS, overlap=overlap)
        check_programs(programs, plan, BUCKETS)
        assert tuple(one.of(plan) for one in own) == programs


def checks(plans: list[Plan], rank: int) -> list[int]:
    """How many programs are checked for each of these plans, one after the other."""
    seen = list[int]()

    class Counting(OwnPrograms):
        def _check(self, mine: Program, plan: Plan, members: list[Pipeline]) -> None:
            seen.append(len(members[0].ranks) if members else 1)
            super()._check(mine, plan, members)

    own, found = Counting(rank=rank, bucket_count=BUCKETS), []
    for plan in plans:
        own.of(plan)
        found.append(sum(seen))
        seen.clear()
    return found


def test_a_kind_is_checked_once() -> None:
    """Would catch a check in every step, of every rank of the world, and none where there are
    more micro-batches than before."""
    nested = [plan_of(n, group(0, 1, 2, 3), group(0, 1), group(3), tokens=n) for n in (6, 6, 8, 6)]
    assert checks(nested, 0) == [1, 0, 1, 0], "it meets all others, and is checked alone"
    lines = [plan_of(n, staged(0, 1, 2, 3), group(4, 5), tokens=n) for n in (4, 4, 6)]
    assert checks(lines, 1) == [4, 0, 4], "with those of its pipeline"
    assert checks(lines, 5) == [1, 0, 1]
    renamed = plan_of(4, staged(4, 2, 0, 5), group(1), group(3))
    narrow = plan_of(4, staged(0, 2), group(1))
    assert checks([lines[0], renamed, narrow], 0) == [4, 0, 2]
    assert checks([plan_of(1, group(1), staged(0, 2))], 0) == [1], "its pipeline has no work"


PLAN = plan_of(6, group(0, 1), group(1, 2), group(1))


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("0F0[0,1] 0B0[0,1] 0F1[1,2] 0B1[1,2]", "0F1[1,2] 0B1[1,2] 0F0[0,1] 0B0[0,1]", "rule 2"),
        ("0B0[0,1] 0F1[1,2]", "0F1[1,2] 0B0[0,1]", "rule 2"),
        ("P0 P1", "P1 P0", "rule 1"),
        ("0F2[1] 0B2[1]", "", "rule 4"),
        ("P3 0F0[0,1]", "0F0[0,1] P3", "rule 3"),
    ],
)
def test_a_fault_is_found_in_one_rank_s_list(before: str, after: str, text: str) -> None:
    """Would catch a rank that meets others in another order than the plan's, which none of the
    rules for one list alone forbids."""
    sound = compile_rank(PLAN, 1, BUCKETS)
    check_alone(sound, PLAN, BUCKETS)
    assert before in str(sound)
    with pytest.raises(ProgramError, match=f"{text}, rank 1"):
        check_alone(Program.parse(str(sound).replace(before, after)), PLAN, BUCKETS)


def test_a_rank_of_stages_is_not_checked_alone() -> None:
    """Would catch messages that nobody compares."""
    plan = plan_of(2, staged(0, 1))
    with pytest.raises(ProgramError, match="program of rank 1: got alone, wanted those of its"):
        check_alone(compile_rank(plan, 1, BUCKETS), plan, BUCKETS)
