"""Programs on ranks whose collectives are kernels, and whose hosts wait for them at will."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults import refusal
from headrace.spec import (
    Backward,
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Program,
    Push,
    Recv,
    Scheme,
    compile_plan,
)
from headrace.spec.program import pushes_of
from plans import random_plan, random_staged_plan
from references.device_ranks import stuck
from spec.test_checker_graph import BUCKETS, LAYERS, Programs, mutated


def everywhere(rank: int, place: int) -> bool:
    return True


def nowhere(rank: int, place: int) -> bool:
    return False


def plan_of(*work: tuple[str, tuple[int, ...]]) -> Plan:
    """One micro-batch for each (scheme, ranks)."""
    return Plan(
        lengths=Lengths.of([40] * len(work)),
        devices=1 + max(rank for _, ranks in work for rank in ranks),
        pipelines=tuple(Pipeline(scheme=Scheme.parse(text), ranks=ranks) for text, ranks in work),
        micro_batches=tuple(
            MicroBatch(pipeline=i, sequences=(i,), layers=LayerPlan.parse(f"{LAYERS}*local"))
            for i in range(len(work))
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def eager(programs: Sequence[Program], plan: Plan) -> list[Program]:
    """With pushes as early as gradients allow, whatever others of the group have to do: every rank
    in its own last backward, and those of later stages just before it."""
    found = []
    for program in programs:
        actions = [a for a in program.actions if not isinstance(a, Push)]
        last = max((i for i, a in enumerate(actions) if isinstance(a, Backward)), default=-1)
        order = sorted({b for a in program.actions for b in pushes_of(a)}, reverse=True)
        if last >= 0:
            backward = actions[last]
            pipeline = plan.pipelines[plan.micro_batches[backward.micro_batch].pipeline]
            own = pipeline.stage_of(program.rank, LAYERS).buckets
            within = replace(backward, pushes=tuple(reversed(own)))
            before = [Push(bucket=b) for b in order if b > own[-1]]
            after = [Push(bucket=b) for b in order if b < own[0]]
            actions[last : last + 1] = [*before, within]
            actions[-1:-1] = after
        found.append(Program(rank=program.rank, actions=tuple(actions)))
    return found


HANGS = {
    "a rank with more to do": plan_of(("cp2", (0, 1)), ("cp1", (1,))),
    "a line of stages": plan_of(("pp2", (0, 1))),
    "groups that overlap": plan_of(("cp2", (0, 1)), ("cp2", (1, 2))),
}


@pytest.mark.parametrize("name", HANGS)
def test_pushes_as_early_as_can_be_hang(name: str) -> None:
    """Catches a model of devices on which nothing hangs, and a rule that lets these pass: they run
    as long as no host waits for its device."""
    plan = HANGS[name]
    programs = eager(compile_plan(plan, BUCKETS), plan)
    assert not stuck(programs, BUCKETS, nowhere)
    assert stuck(programs, BUCKETS, everywhere)
    assert refusal(programs, plan, BUCKETS).startswith("rule 6")
    assert not stuck(compile_plan(plan, BUCKETS), BUCKETS, everywhere)


@st.composite
def compiled(draw: st.DrawFn) -> Programs:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    devices = draw(st.integers(2, 8))
    if draw(st.booleans()):
        plan = random_staged_plan(rng, devices, LAYERS, draw(st.integers(1, 9)))
    else:
        tokens = draw(st.lists(st.integers(1, 99), min_size=1, max_size=14))
        plan = random_plan(Lengths.of(tokens), devices, LAYERS, rng)
    return compile_plan(plan, BUCKETS)


@settings(deadline=None, max_examples=150)
@given(compiled(), st.integers(0, 2**32), st.floats(0, 1))
def test_compiled_programs_do_not_hang(programs: Programs, seed: int, share: float) -> None:
    """Catches an order in which a host may wait for what another has not posted."""
    rng = np.random.default_rng(seed)
    drawn = {(p.rank, i): rng.random() < share for p in programs for i in range(1000)}
    waits: list[Callable[[int, int], bool]] = [everywhere, lambda rank, at: drawn[rank, at]]
    for synchronises in waits:
        assert not stuck(programs, BUCKETS, synchronises)


@settings(deadline=None, max_examples=200)
@given(mutated())
def test_what_the_checker_lets_pass_does_not_hang(pair: tuple[Plan, Programs]) -> None:
    """Catches a rule that says less than it should."""
    plan, programs = pair
    if refusal(programs, plan, BUCKETS) == "":
        assert not stuck(programs, BUCKETS, everywhere)


def test_communicators_that_nobody_has_opened() -> None:
    """Catches a first message between two stages for which ranks without stages, that send none,
    would have to come, and a first collective within layers while pulls are under way."""
    for plan in (plan_of(("pp2", (0, 1)), ("cp2", (2, 3))), plan_of(("cp2", (0, 1)))):
        programs = compile_plan(plan, BUCKETS)
        assert not stuck(programs, BUCKETS, nowhere)
    staged = compile_plan(plan_of(("pp2", (0, 1)), ("cp2", (2, 3))), BUCKETS)
    found = [action for _, action in stuck(staged, BUCKETS, nowhere, opened=False)]
    assert any(isinstance(action, Recv) for action in found)
