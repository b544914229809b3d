"""Plans made ahead of the steps, by one rank for all."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.comm.mesh import Groups
from headrace.config.planner_config import PlannerConfig
from headrace.costs import FORMULA_METHODS, CostModel, Linear, synthetic_costs
from headrace.costs.forward import forward_costs
from headrace.engine.run_planner import RunPlanner
from headrace.engine.step_planner import StepPlanner
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem
from headrace.planning import plan as plan_batch
from headrace.simulator import step_s
from headrace.spec import Architecture, Lengths, Plan
from headrace.spec.step import BestStatic, Exhausted, Planned, PlanRequest, Step
from ranks import run_ranks
from spread import whole

MODEL = Architecture(layers=4, hidden=64, heads=8, kv_heads=2, ffn=192, vocabulary=50)
MEMORY = 2**25
SLOWER = 4.0
TEXTS = ("4*cp1", "1*pp3 + 1*cp1", "1*tp2-pp2")
BATCHES = [Lengths.of([700 + 10 * step, *range(360, 600, 23)]) for step in range(6)]
KINDS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "static": {"name": "static", "static_size": 2},
    "side by side": {"name": "strategies"},
    "rotate": {"name": "strategies", "strategies": TEXTS, "rotate": True},
}


def online(
    told: list[str] | None = None,
    saved: Any = None,
    memory_bytes: int = MEMORY,
    drawn: Container[int] = (0, 1),
    groups: Groups | None = None,
    compare: bool = False,
    **options: Any,
) -> RunPlanner:
    """A planner of four ranks, checked as a run does; gone on from ``saved``."""
    costs = synthetic_costs(
        4, architecture=MODEL, methods=FORMULA_METHODS, memory_bytes=memory_bytes
    )
    made = RunPlanner(
        groups=groups,
        costs=CostModel.from_json(saved["costs"]) if saved else costs.replace(memory_margin=0.1),
        options=PlannerConfig(compare=compare, **options),
        seed=7,
        drawn=drawn,
        tell=(told if told is not None else []).append,
    )
    if saved:
        made.restore(saved)
    made.check(800)
    return made


def walked(made: RunPlanner, batches: Sequence[Lengths]) -> list[Planned]:
    """Plans of batches, each of which then takes ``SLOWER`` times what the costs say."""
    found = []
    for lengths in batches:
        plan = (planned := made.plan(lengths)).plan
        found.append(planned)
        made.observe(plan.predicted_s, SLOWER * step_s(plan, made.costs))
    return found


def hashes(plans: Sequence[Planned]) -> list[str]:
    return [planned.plan.hash for planned in plans]


def saved(made: RunPlanner) -> Any:
    return json.loads(json.dumps(made.state()))


def no_more_here(made: RunPlanner) -> None:
    """From now on plans of this planner must come from its producer."""

    def refuse(self: StepPlanner, request: PlanRequest) -> Planned:
        raise AssertionError(f"step {request.step} planned where it is trained")

    made.steps = with_methods(made.steps, plan=refuse)


def with_methods(steps: StepPlanner, **methods: Any) -> StepPlanner:
    """The same planner with methods of its own."""
    other = type("Other", (StepPlanner,), methods)
    names = ("costs", "options", "seed", "semantics", "stages")
    return other(**{name: getattr(steps, name) for name in names})


def counted(made: RunPlanner) -> list[str]:
    """What is planned from now on where it is trained, in order: ``plan 3``, ``static 3``."""
    found = list[str]()

    def plan(self: StepPlanner, request: PlanRequest) -> Planned:
        found.append(f"plan {request.step}")
        return StepPlanner.plan(self, request)

    def best_static(self: StepPlanner, request: PlanRequest) -> BestStatic | None:
        found.append(f"static {request.step}")
        return StepPlanner.best_static(self, request)

    made.steps = with_methods(made.steps, plan=plan, best_static=best_static)
    return found


@pytest.mark.parametrize(
    "kind", [kind if kind in ("adaptive", "rotate") else whole(kind) for kind in KINDS]
)
def test_plans_made_ahead_are_those_made_here(kind: str) -> None:
    """Would catch a step's number, a turn or a seed that is counted otherwise ahead, from the
    first step or from where a run goes on; plans that were never made ahead; and a correction
    of seconds that is multiplied by itself, as plans ahead are predicted with an older one."""
    here = online(**KINDS[kind])
    wanted = walked(here, BATCHES)
    ahead = online(**KINDS[kind])
    ahead.plan_ahead(iter(BATCHES[:4]), depth=2)
    no_more_here(ahead)
    first = walked(ahead, BATCHES[:4])
    ahead.close()
    resumed = online(saved=saved(ahead), **KINDS[kind])
    resumed.plan_ahead(iter(BATCHES[4:]), depth=3)
    no_more_here(resumed)
    rest = walked(resumed, BATCHES[4:])
    resumed.close()
    assert hashes(first + rest) == hashes(wanted)
    assert first[0].predicted == wanted[0].predicted is not None
    assert [p.predicted is not None for p in first] == [True, True, False, False]
    assert first[0].micro_batch_s == wanted[0].micro_batch_s
    assert [p.peak_bytes for p in first + rest] == [p.peak_bytes for p in wanted]
    assert ahead.ratio == resumed.ratio == here.ratio == SLOWER
    if kind == "rotate":
        assert [str(p.plan.strategy) for p in first + rest] == list(TEXTS * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_changes_no_plan(kind: str) -> None:
    """Would catch plans that take equally long and are chosen between by the rounding of a
    correction: a resumed run would plan otherwise, by how quick the machine happens to be."""
    made = online(**KINDS[kind]).steps
    for step, lengths in enumerate(BATCHES):
        found = {
            made.plan(PlanRequest(lengths=lengths, step=step, ratio=ratio, margin=0.1)).plan.hash
            for ratio in (1.0, 4.000000000000001, 0.7, *(1.1 * n for n in range(1, 20, 3)))
        }
        assert len(found) == 1


def test_a_planner_goes_on_here_once_it_is_closed() -> None:
    """Would catch a closed planner that waits for its producer, or takes a turn anew."""
    made = online(**KINDS["rotate"])
    made.plan_ahead(iter(BATCHES), depth=2)
    plans = walked(made, BATCHES[:2])
    made.close()
    made.close()
    plans += walked(made, BATCHES[2:4])
    made.plan_ahead(iter(BATCHES[4:]), depth=2)
    no_more_here(made)
    plans += walked(made, BATCHES[4:])
    made.close()
    assert [str(planned.plan.strategy) for planned in plans] == list(TEXTS * 2)


def test_what_comes_out_of_turn_is_planned_here() -> None:
    """Would catch the plan of another batch that is taken for this one's."""
    made = online()
    made.plan_ahead(iter(BATCHES), depth=2)
    found = made.plan(BATCHES[3])
    made.close()
    assert found.plan.lengths == BATCHES[3]
    assert found.plan.hash == online().plan(BATCHES[3]).plan.hash


def finished(number: int, planned: Planned, peak: int) -> Step:
    """The planned step as predicted, but for the peak of rank 1."""
    peaks = [0, peak, 0, 0]
    return Step(
        number=number,
        plan=planned.plan,
        measured=None,
        predicted=None,
        times=None,
        micro_batch_s=planned.micro_batch_s,
        metrics={"peak_bytes": peaks, "predicted_peak_bytes": list(planned.peak_bytes)},
    )


def test_a_raised_margin_throws_away_what_was_planned_ahead() -> None:
    """Would catch plans ahead that still fill the memory up to the old margin, a margin that the
    producer never hears of, and another plan than the one made here."""
    made, here = online(), online()
    made.plan_ahead(iter(BATCHES), depth=2)
    both = []
    for number, lengths in enumerate(BATCHES):
        if number == 2:
            steps = counted(made)
        plans = [one.plan(lengths) for one in (made, here)]
        both.append(hashes(plans))
        margin = here.margin
        assert plans[0].request is not None
        assert plans[0].request.margin == margin
        assert max(plans[0].peak_bytes) <= MEMORY * (1 - margin)
        peak = round(MEMORY * (0.97 if number == 1 else 0.4))
        told = [one.learn(finished(number, plans[0], peak)) for one in (made, here)]
        assert [bool(lines) for lines in told] == [number == 1] * 2
    made.close()
    assert made.margin == here.margin > 0.1
    assert all(ahead == inline for ahead, inline in both)
    assert steps == ["plan 2", "plan 3"], "two were ahead"


def test_a_plan_that_ran_out_of_memory_is_made_thriftier() -> None:
    """Would catch a second try that takes as much, is another strategy's turn or shifts all later
    turns, and plans ahead that run into the same wall."""
    made = online(**KINDS["rotate"])
    made.plan_ahead(iter(BATCHES), depth=2)
    seen = []
    for number, lengths in enumerate(BATCHES):
        planned = made.plan(lengths)
        if number == 1:
            failed, count = planned, made.calibration.peaks.usual.count
            worst = max(range(4), key=failed.peak_bytes.__getitem__)
            planned = made.replan(lengths, failed.plan, Exhausted(actions=((worst, "1F0[0]"),)))
            assert planned.plan.lengths == lengths
            assert max(planned.peak_bytes) <= 0.9 * failed.peak_bytes[worst] + 1
            assert made.calibration.peaks.usual.count == count + 1
        if number:
            assert max(planned.peak_bytes) <= 0.9 * failed.peak_bytes[worst] + 1
        seen.append(str(planned.plan.strategy))
        made.observe(1.0, 1.0)
    made.close()
    assert seen == list(TEXTS * 2)
    again = online(saved=saved(made), **KINDS["rotate"])
    assert again.margin == made.margin


@pytest.mark.parametrize("options", [{}, {"smoothing": 0.05}, KINDS["rotate"]])
def test_forwards_change_no_step(options: dict[str, Any]) -> None:
    """Catches a forward alone that takes a step's turn, is learnt of, or is kept for smoothing,
    also where it runs out of memory."""
    plain, other = online(**options), online(**options)
    found = []
    for number, lengths in enumerate(BATCHES[:4]):
        aside = other.plan_forward(BATCHES[5])
        assert aside.plan.lengths == BATCHES[5]
        assert aside.predicted is None
        if number == 2 and not options:
            exhausted = Exhausted(actions=((0, "0F0[0]"),))
            again = other.replan_forward(BATCHES[5], aside.plan, exhausted)
            assert again.peak_bytes[0] <= 0.995 * aside.peak_bytes[0]
            later = other.plan_forward(BATCHES[5])
            assert later.peak_bytes[0] <= again.peak_bytes[0], "as little is taken from then on"
        found += walked(other, [lengths])
    assert hashes(found) == hashes(walked(plain, BATCHES[:4]))
    assert saved(other) == saved(plain)


def test_forwards_are_planned_as_such() -> None:
    """Catches forwards planned by the costs of steps: they take longer by their own, as groups are
    larger than forwards need, and their seconds are those of forwards and backwards."""
    made = online()
    lengths = Lengths.of([_longest_that_trains(made), *range(360, 600, 23)])
    step, forward = made.plan(lengths), made.plan_forward(lengths)
    costs = forward_costs(made.costs)
    assert forward.plan.predicted_s == pytest.approx(step_s(forward.plan, costs))
    assert forward.plan.predicted_s < step_s(step.plan, costs) < step.plan.predicted_s
    assert max(forward.peak_bytes) <= made.costs.capacity_bytes


def test_forwards_hold_whatever_steps_hold() -> None:
    """Catches a sequence that can be trained and is refused where it is only run forward."""
    made = online()
    longest = _longest_that_trains(made)
    assert made.plan_forward(Lengths.of([longest])).plan.devices == 4
    plain = online(recompute=("none",))
    held = _longest_that_trains(plain)
    assert plain.steps.fits(3 * held // 2, plain.margin, forward=True), "nothing is kept"
    tight = replace(made.steps, costs=_with_hungry_forwards(made.costs))
    request = PlanRequest(lengths=Lengths.of([longest]), margin=made.margin, forward=True)
    assert tight.plan(request).plan.predicted_s > 0, "as a step is planned"


def _longest_that_trains(made: RunPlanner) -> int:
    """Tokens of about the longest sequence whose step fits."""
    longest = max(n for n in range(1000, 100_000, 1000) if made.steps.fits(n, made.margin))
    assert not made.steps.fits(longest + 1000, made.margin)
    return longest


def _with_hungry_forwards(costs: CostModel) -> CostModel:
    """Costs by which a step is found to fit and its forward not: by error, as fits have them."""
    return costs.replace(
        options={
            p: {
                text: replace(
                    cost,
                    kept=Linear(),
                    transient=Linear(constant=0.0 if "+" in text else 2.0 * MEMORY),
                )
                for text, cost in options.items()
            }
            for p, options in costs.options.items()
        }
    )


def test_running_out_of_memory_again_and_again_comes_to_an_end() -> None:
    """Would catch a batch that is planned alike, and tried, for ever."""
    made = online(memory_bytes=2**36)  # of which next to nothing is needed
    plan = made.plan(BATCHES[0]).plan
    exhausted = Exhausted(actions=((0, "0F0[0]"),))

    def retry() -> None:
        failed = plan
        for _ in range(40):
            failed = made.replan(BATCHES[0], failed, exhausted).plan

    with pytest.raises(InfeasiblePlan, match=r"64 GiB: got rank 0 ran out of memory in 0F0"):
        retry()


def test_a_second_failure_is_not_the_end() -> None:
    """Would catch a run that gives up after two failures because little memory was predicted, and
    one whose longest sequence fits no more after them."""
    made = online(memory_bytes=2**36)
    planned = made.plan(BATCHES[0])
    peaks = [max(planned.peak_bytes)]
    for _ in range(2):
        worst = max(range(4), key=planned.peak_bytes.__getitem__)
        exhausted = Exhausted(actions=((worst, "1F0[0]"),))
        planned = made.replan(BATCHES[0], planned.plan, exhausted)
        peaks.append(max(planned.peak_bytes))
    assert peaks[0] > peaks[1] > peaks[2]
    assert made.margin > 0.95
    made.plan(Lengths.of([800]))


def test_smoothed_plans_are_made_here() -> None:
    """Would catch a plan ahead that does not know the layers of the step before."""
    made, here = online(smoothing=0.9), online(smoothing=0.9)
    made.plan_ahead(iter(BATCHES), depth=2)
    steps = counted(made)
    assert hashes(walked(made, BATCHES)) == hashes(walked(here, BATCHES))
    made.close()
    assert steps == [f"plan {step}" for step in range(6)]


def test_a_killed_producer_is_told_and_replaced() -> None:
    """Would catch a run that ends with its producer, a batch lost, or a death kept quiet."""
    told: list[str] = []
    made = online(told)
    made.plan_ahead(iter(BATCHES), depth=2)
    first = walked(made, BATCHES[:2])
    assert made._ahead is not None
    (producer,) = made._ahead._team
    os.kill(producer.process.pid, signal.SIGKILL)
    no_more_here(made)
    rest = walked(made, BATCHES[2:])
    made.close()
    assert hashes(first + rest) == hashes(walked(online(), BATCHES))
    (line,) = told
    assert "was killed by SIGKILL" in line
    assert "another takes over" in line


def waited(made: RunPlanner, step: Step) -> Step:
    """The step beside its comparison, waited for."""
    limit = time.monotonic() + 20
    while (found := made.compared(step)).best_static is None and time.monotonic() < limit:
        time.sleep(0.01)
    return found


def test_a_plan_is_compared_once_it_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a step that waits for what it is compared with, one static plan for each group
    size, and a comparison where none is asked for."""
    searched = list[str]()

    def counting(problem: Problem, *arguments: Any, **options: Any) -> Plan:
        searched.append(problem.planner)
        return plan_batch(problem, *arguments, **options)

    for module in ("step_planner", "plans"):
        monkeypatch.setattr(f"headrace.engine.{module}.plan_batch", counting)
    for compare in (True, False):
        made = online(compare=compare)
        calls = counted(made)
        for number, lengths in enumerate(BATCHES[:2]):
            searched.clear()
            planned = made.plan(lengths)
            assert searched == ["adaptive"], "handed out before anything is compared"
            step = finished(number, planned, 0)
            made.learn(step)
            found = made.compared(step)
            assert searched == ["adaptive", *(["static"] if compare else [])]
            assert ("best_static" in found.metrics) == compare
            if not compare:
                assert found is step
                continue
            best = found.best_static
            assert best is not None
            assert (best.strategy, best.seconds) == tuple(
                found.metrics[key] for key in ("best_static", "best_static_s")
            )
            assert best.seconds >= planned.plan.predicted_s
            assert best.predicted is not None
            assert best.predicted.seconds == pytest.approx(best.seconds)
        kinds = ("plan", "static") if compare else ("plan",)
        assert calls == [f"{kind} {number}" for number in range(2) for kind in kinds]


@pytest.mark.parametrize("kind", ["adaptive", "static"])
def test_comparisons_made_ahead_are_those_made_here(kind: str) -> None:
    """Would catch plans that depend on what they are compared with, the comparison of another
    step, and one that is made where it is trained although a process beside makes it."""
    plain = online(**KINDS[kind])
    here, ahead = (online(compare=True, **KINDS[kind]) for _ in range(2))
    ahead.plan_ahead(iter(BATCHES), depth=2)
    calls = counted(ahead)
    for number, lengths in enumerate(BATCHES):
        wanted, inline, beside = (one.plan(lengths) for one in (plain, here, ahead))
        assert wanted.plan.hash == inline.plan.hash == beside.plan.hash
        step = finished(number, beside, 0)
        assert waited(ahead, step).best_static == here.compared(step).best_static is not None
        assert plain.compared(step) is step
    ahead.close()
    assert calls == []
    assert saved(plain) == saved(here) == saved(ahead)


def test_a_plan_made_here_is_compared_here() -> None:
    """Would catch the comparison of a plan that was made ahead and thrown away: it left less of
    the memory free, or was another batch's."""
    made = online(compare=True)
    made.plan_ahead(iter(BATCHES), depth=2)
    calls = counted(made)
    planned = made.plan(BATCHES[3])
    found = made.compared(finished(0, planned, 0)).best_static
    made.close()
    assert calls == ["plan 0", "static 0"]
    other = online(compare=True)
    step = finished(0, other.plan(BATCHES[3]), 0)
    assert found == other.compared(step).best_static


TOO_LONG = Lengths.of([10_000_000, 40])


def _shared(ahead: bool) -> list[Any]:
    groups = Groups()
    planner = RunPlanner(
        groups=groups, costs=online().costs, options=PlannerConfig(compare=False), seed=7, drawn=[0]
    )
    planner.check(800)
    found: list[Any] = []
    batches = [BATCHES[0], TOO_LONG, BATCHES[1]]
    if ahead:
        planner.plan_ahead(iter(batches), depth=2)
    planned = planner.plan(batches[0])
    found.append(planned.plan.hash)
    found.append((planned.predicted is not None, max(planned.peak_bytes, default=0) > 0))
    refused = [
        lambda: planner.plan(TOO_LONG),
        lambda: planner.replan(TOO_LONG, planned.plan, Exhausted(actions=((1, "1F0[0]"),))),
        lambda: planner.check(10_000_000),
    ]
    for ask in refused:
        with pytest.raises(InfeasiblePlan) as caught:
            ask()
        found.append(str(caught.value))
    planner.check(10)
    planner.observe(1.0, 2.0)
    found.append(planner.plan(batches[2]).plan.hash)
    again = planner.replan(batches[2], planned.plan, Exhausted(actions=((0, "0F0[0]"),)))
    found += [again.plan.hash, sorted(planner.state())]
    planner.close()
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_one_rank_plans_for_all(ahead: bool) -> None:
    """Would catch ranks with plans of their own, an error that the first rank raises alone (the
    others would wait for its plan), a text wrapped once more on its way, and a second rank that
    plans."""
    first, second = run_ranks(2, _shared, ahead)
    plan, expected, *texts = first[:5]
    assert second[:1] + second[2:-1] == first[:1] + first[2:-1]
    assert (expected, second[1]) == ((True, True), (False, False)), "the journal's is the first's"
    with pytest.raises(InfeasiblePlan) as caught:
        online().plan(TOO_LONG)
    assert texts[0] == str(caught.value)
    assert all(text.count("does not fit") <= 1 and "10,000,000" in text for text in texts)
    inline = online()
    assert plan == inline.plan(BATCHES[0]).plan.hash
    assert first[5] != plan
    assert set(first[-1]) == set(inline.state())
    assert second[-1] == [], "the first rank's state is the run's"


_WITHOUT_TORCH = """
import pickle, sys
sys.path[:] = {path!r}
sys.modules["torch"] = None  # an import of it raises
planner, asked = pickle.loads(sys.stdin.buffer.read())
found = [planner.plan(some) for some in asked]
assert not any(name.startswith("torch.") for name in sys.modules)
sys.stdout.buffer.write(pickle.dumps([one.plan.to_json() for one in found]))
"""


@pytest.mark.parametrize("kind", ["adaptive", "rotate"])
def test_producers_need_no_torch(kind: str) -> None:
    """Would catch a planner that drags torch into the process that plans: seconds at its start
    and a gigabyte beside the training."""
    made = online(**KINDS[kind]).steps
    asked = [
        PlanRequest(lengths=BATCHES[0], step=4, ratio=1.2, margin=margin) for margin in (0.1, 0.3)
    ]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH.format(path=sys.path)],
        input=pickle.dumps((made, asked)),
        capture_output=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr.decode()
    here = [made.plan(some) for some in asked]
    assert [Plan.from_json(value) for value in pickle.loads(done.stdout)] == [f.plan for f in here]


def _margins(longest: int) -> tuple[float, float]:
    """The margin in force after a check, on this rank and agreed on."""
    groups = Groups()
    costs = online().costs.replace(memory_margin=0.95)
    planner = RunPlanner(groups=groups, costs=costs, options=PlannerConfig(compare=False), seed=7)
    planner.check(longest)
    return planner.margin, planner.agreed_problem().model.memory_margin


def test_what_is_drawn_for_leaves_the_same_memory_free_on_all_ranks() -> None:
    """Catches ranks that draw their samples with a margin which the first one has lowered, so that
    the longest sample fits."""
    first, second = run_ranks(2, _margins, 4000)
    assert first[0] < second[0] == 0.95, "the first rank's check lowered it"
    assert first[1] == second[1] == first[0]
