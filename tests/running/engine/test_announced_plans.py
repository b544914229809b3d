"""Plans of given batches that are made before the batches come."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.announced_plans import AnnouncedPlans
from headrace.engine.step_planner import StepPlanner
from headrace.errors import HeadraceError, InfeasiblePlan, SpecError
from headrace.spec.step import Exhausted, Planned, PlanRequest
from ranks import run_ranks
from running.engine.loops import attached, costs, dataset, llama, weights
from running.engine.test_given_batches import (
    BATCHES as SAMPLES,
)
from running.engine.test_given_batches import (
    alone,
    arrays,
    by_tokens,
    require_equal,
    sgd,
    token_values,
)
from running.engine.test_run_planner import (
    BATCHES,
    KINDS,
    MEMORY,
    TOO_LONG,
    counted,
    finished,
    hashes,
    no_more_here,
    online,
    saved,
    walked,
)

pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", KINDS)
def test_announced_plans_are_those_made_here(kind: str) -> None:
    """Catches a plan of another batch, turn or kind, plans that are made again where they are
    needed, and a batch that is planned again for its second update."""
    here, made = online(**KINDS[kind]), online(**KINDS[kind])
    turns = len(KINDS[kind].get("strategies", ())) or 1
    forwards, steps = list[Planned](), list[Planned]()
    planners = here.steps
    for lengths in BATCHES[:4]:
        made.announce(lengths)
        here.steps = made.steps = planners
        wanted = [here.plan_forward(lengths), *walked(here, [lengths] * turns)]
        if turns == 1:
            no_more_here(made)
        forwards.append(made.plan_forward(lengths))
        found = [made.plan_forward(lengths), *walked(made, [lengths] * turns)]
        steps += found[1:]
        assert hashes(found) == hashes(wanted)
        assert [own.predicted is None for own in found] == [own.predicted is None for own in wanted]
        assert [own.request and own.request.forward for own in found] == [True] + [False] * turns
        assert found[0].planning_s == 0, "as it was made before"
    made.close()
    made.steps = here.steps = planners
    assert saved(made) == saved(here)
    assert len({*hashes(forwards), *hashes(steps)}) >= 4


def test_an_announced_plan_is_never_stale() -> None:
    """Catches a plan announced with an older margin, which still fills the memory."""
    made, here = online(), online()
    for lengths in BATCHES:
        made.announce(lengths)
    for number, lengths in enumerate(BATCHES):
        plans = [one.plan(lengths) for one in (made, here)]
        assert hashes(plans[:1]) == hashes(plans[1:])
        assert max(plans[0].peak_bytes) <= MEMORY * (1 - here.margin)
        forward = made.plan_forward(lengths)
        assert forward.request is not None
        assert forward.request.margin == here.margin
        peak = round(MEMORY * (0.97 if number == 1 else 0.4))
        for one in (made, here):
            one.learn(finished(number, plans[0], peak))
    assert made.margin > 0.1
    exhausted = Exhausted(actions=((0, "1F0[0]"),))
    made.announce(BATCHES[0])
    again = made.replan(BATCHES[5], plans[0].plan, exhausted)
    assert again.plan.hash == here.replan(BATCHES[5], plans[1].plan, exhausted).plan.hash
    assert made.plan(BATCHES[0]).plan.hash == here.plan(BATCHES[0]).plan.hash
    made.close()


class Failing(StepPlanner):
    """Cannot plan."""

    def plan(self, request: PlanRequest) -> Planned:
        raise ZeroDivisionError


def test_a_process_that_cannot_plan_stops_nobody() -> None:
    """Catches a step that fails as its plan was to be made elsewhere."""
    told = list[str]()
    made, here = online(told), online()
    failing = Failing(costs=made.costs, options=made.steps.options)
    made._announced = AnnouncedPlans(steps=failing, tell=told.append)
    made.announce(BATCHES[0])
    assert made.plan(BATCHES[0]).plan.hash == here.plan(BATCHES[0]).plan.hash
    assert made.plan_forward(BATCHES[0]).plan.hash == here.plan_forward(BATCHES[0]).plan.hash
    made.close()
    assert any("made when it is needed" in line for line in told), told


def test_what_is_announced_and_not_taken_is_in_nobodys_way() -> None:
    """Catches a plan that waits for one before it which nobody asks for, and a refusal of a batch
    that never comes."""
    made, here = online(), online()
    for lengths in (BATCHES[3], TOO_LONG, BATCHES[1], BATCHES[2]):
        made.announce(lengths)
    calls = counted(made)
    assert made.plan(BATCHES[2]).plan.hash == here.plan(BATCHES[2]).plan.hash
    assert made.plan(BATCHES[3]).plan.hash == here.plan(BATCHES[3]).plan.hash
    assert made.plan(BATCHES[0]).plan.hash == here.plan(BATCHES[0]).plan.hash
    assert calls == ["plan 2"]
    made.announce(TOO_LONG)
    with pytest.raises(InfeasiblePlan):
        made.plan(TOO_LONG)
    made.close()


def test_smoothed_steps_are_planned_here() -> None:
    """Catches a plan ahead that does not know the layers of the step before."""
    made, here = online(smoothing=0.9), online(smoothing=0.9)
    for lengths in BATCHES:
        made.announce(lengths)
    calls = counted(made)
    assert hashes(walked(made, BATCHES)) == hashes(walked(here, BATCHES))
    assert len(calls) == len(BATCHES)
    assert made.plan_forward(BATCHES[4]).plan.hash == here.plan_forward(BATCHES[4]).plan.hash
    assert len(calls) == len(BATCHES)
    made.close()


def test_nothing_is_made_ahead_where_that_is_not_wanted() -> None:
    """Catches a process beside a run that wants none."""
    made = online(ahead=0)
    made.announce(BATCHES[0])
    assert made._announced._maker is None
    calls = counted(made)
    made.plan(BATCHES[0])
    assert calls == ["plan 0"]


def test_comparisons_with_announced_plans() -> None:
    """Catches a step compared with the best static plan of another batch."""
    made, here = online(compare=True), online(compare=True)
    for lengths in BATCHES[:2]:
        made.announce(lengths)
    for number, lengths in enumerate([BATCHES[0], BATCHES[0], BATCHES[1]]):
        found = made.plan(lengths), here.plan(lengths)
        wanted = here.compared(finished(number, found[1], 0)).best_static
        got = made.compared(finished(number, found[0], 0)).best_static
        assert got is None or got == wanted, number
        assert number != 1 or got is not None, "a plan that is used again is compared here"
    made.close()


def with_coming(folder: Path, announced: bool) -> Any:
    """Losses, weights, values, plans and how many were made while ranks waited, of a run that
    announces each batch one before."""
    model = llama()
    options = {"longest": 80, "batch_tokens": 200, "costs": costs(2), "ahead": 2}
    run = attached(model, sgd(model), None, folder, **options)
    calls, plan = [0], StepPlanner.plan

    def counting(self: StepPlanner, request: PlanRequest) -> Planned:
        calls[0] += 1
        return plan(self, request)

    counting.__name__ = "plan"  # by which it is found where plans are made ahead
    StepPlanner.plan = counting  # type: ignore[method-assign]
    losses, values, plans = [], [], []
    if announced:
        run.plan_ahead(SAMPLES[0])
    for number, batch in enumerate(SAMPLES):
        if announced and number + 1 < len(SAMPLES):
            run.plan_ahead(SAMPLES[number + 1])
        values.append(arrays(run.map(batch, token_values)))
        step = run.step(batch)
        for micro in step:
            micro.backward(by_tokens(model(**micro.inputs).logits, micro))
        losses.append(step.loss)
        plans.append(step.plan.hash)
    run.detach()
    return losses, weights(model), plans, values, calls[0]


@pytest.mark.parametrize("ranks", [2])
def test_runs_with_coming_batches(ranks: int, tmp_path: Path) -> None:
    """Catches plans that differ between ranks or from those made in time, and batches that are
    planned while ranks wait although they were announced."""
    wanted = run_ranks(ranks, with_coming, tmp_path, False, timeout_s=100)
    found = run_ranks(ranks, with_coming, tmp_path, True, timeout_s=100)
    require_equal([one[:3] for one in found], alone("tokens"))
    for one, other in zip(found, wanted, strict=True):
        assert one[0] == other[0]
        assert all((x == y).all() for x, y in zip(one[1], other[1], strict=True))
        assert one[2] == other[2] == wanted[0][2]
        for mine, own in zip(one[3], other[3], strict=True):
            assert all((x == y).all() for x, y in zip(mine, own, strict=True))
    assert [one[4] for one in found] == [0] * ranks
    assert [one[4] for one in wanted] == [2 * len(SAMPLES)] + [0] * (ranks - 1)


CASES: dict[str, tuple[Any, str]] = {
    "other lengths": (
        lambda run: run.plan_ahead(SAMPLES[run.rank]),
        "rank 1 asks for: got plans made ahead before step 0 of 4 samples",
    ),
    "on one rank": (
        lambda run: run.plan_ahead(SAMPLES[0]) if run.rank else run.map(SAMPLES[0], token_values),
        "rank 1 asks for: got plans made ahead before step 0, wanted a map before step 0",
    ),
    "too long": (
        lambda run: run.plan_ahead([{"input_ids": [1] * 9}, {"input_ids": [1] * 81}]),
        "sample 1: got 81 tokens",
    ),
    "together too long": (
        lambda run: run.plan_ahead(SAMPLES[0], together=[(1, 4)]),
        r"samples \[1, 4\], kept together: got 110 tokens",
    ),
}


def refused(folder: Path) -> dict[str, str]:
    """The error of each case."""
    model = llama()
    options = {"longest": 80, "batch_tokens": 200, "costs": costs(2), "ahead": 2}
    run = attached(model, sgd(model), None, folder, **options)
    found = {}
    for case, (loop, _) in CASES.items():
        try:
            loop(run)
            found[case] = "nothing"
        except HeadraceError as error:
            found[case] = str(error)
    run.map(SAMPLES[0], token_values)
    run.detach()
    return found


def test_refused_on_all_ranks(tmp_path: Path) -> None:
    """Catches ranks that announce other batches, of which one waits for the other."""
    for found in run_ranks(2, refused, tmp_path, timeout_s=60):
        for case, text in found.items():
            assert re.search(CASES[case][1], text), (case, text)


def of_a_data_set(folder: Path) -> None:
    model = llama()
    run = attached(model, sgd(model), dataset(), folder, costs=costs(1))
    with pytest.raises(SpecError, match="plan_ahead: got a run with a data set"):
        run.plan_ahead(SAMPLES[0])
    run.detach()


def test_a_data_set_needs_no_announcement(tmp_path: Path) -> None:
    """Catches plans of batches that will never come."""
    run_ranks(1, of_a_data_set, tmp_path)
