"""What a run learns of its costs, keeps, and starts the next one with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config
from headrace.config.model import PlannerConfig
from headrace.costs import FORMULA_METHODS, CostModel, synthetic_costs
from headrace.costs.calibration import Calibration
from headrace.costs.drift import Drift
from headrace.engine.cost_cache import calibration_path
from headrace.engine.run_planner import RunPlanner
from headrace.errors import InfeasiblePlan
from headrace.spec import Lengths
from headrace.spec.architecture import Architecture
from headrace.spec.step import Planned, Step, StepTimes
from running.cli.jobs import losses, metrics, run, write_job

MODEL = Architecture.preset("llama-tiny", hidden=64, layers=4, heads=4, kv_heads=2, ffn=128)
MEMORY = 2**25
BATCH = Lengths.of([700, 300, 200, 90, 30])


def costs(margin: float = 0.1, memory: int = MEMORY) -> CostModel:
    found = synthetic_costs(2, architecture=MODEL, methods=FORMULA_METHODS, memory_bytes=memory)
    return found.replace(memory_margin=margin)


def finished(number: int, planned: Planned, peaks: tuple[int, int], slow: float = 1.0) -> Step:
    """The planned step as if rank 1 took ``slow`` times as long as predicted."""
    pipelines = planned.plan.pipelines
    found = {
        index: seconds * (slow if 1 in pipelines[micro.pipeline].ranks else 1.0)
        for index, (micro, seconds) in enumerate(
            zip(planned.plan.micro_batches, planned.micro_batch_s, strict=True)
        )
    }
    times = StepTimes(step_s=1.0, waited_s=0.0, peak_bytes=peaks, idle=0.0, micro_batches=found)
    return Step(
        number=number,
        plan=planned.plan,
        measured=None,
        predicted=None,
        times=times,
        micro_batch_s=planned.micro_batch_s,
        metrics={"peak_bytes": list(peaks), "predicted_peak_bytes": list(planned.peak_bytes)},
    )


@dataclass
class Trained:
    """A planner, and what it told and planned with for each of its steps."""

    online: RunPlanner
    told: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def steps(self, first: int, last: int, peak: Any = lambda step: 0) -> Trained:
        for number in range(first, last):
            planned = self.online.plan(BATCH)
            self.told += self.online.learn(finished(number, planned, (0, peak(number))))
            self.margins.append(self.online.margin)
        return self


def online(margin: float = 0.1, **changes: Any) -> RunPlanner:
    made = RunPlanner(costs=costs(margin), options=PlannerConfig(), **changes)
    made.check(700)
    return made


def test_plans_of_ordinary_runs_keep_their_margin() -> None:
    """Would catch a margin that follows every peak: a resumed run would plan otherwise."""
    trained = Trained(online()).steps(0, 30, lambda step: round(MEMORY * (0.5 + 0.01 * step)))
    assert set(trained.margins) == {0.1}
    assert trained.told == []
    assert trained.online.calibration.peaks.usual.count == 29


def test_a_peak_near_the_limit_raises_the_margin_once() -> None:
    """Would catch a run that goes on planning into the same wall, or lowers its margin again."""
    peak = lambda step: round(MEMORY * (0.97 if step == 5 else 0.4))  # noqa: E731
    trained = Trained(online()).steps(0, 12, peak)
    raised = trained.margins[-1]
    assert raised > 0.1
    assert trained.margins == [0.1] * 5 + [raised] * 7
    (told,) = trained.told
    assert told.startswith("memory margin raised from 10 %")
    assert "rank 1 took 31 MiB of 32 MiB" in told
    assert max(trained.online.plan(BATCH).peak_bytes) <= MEMORY * (1 - raised)


def test_a_resumed_run_plans_with_the_same_margins() -> None:
    """Would catch a margin outside the checkpoint: other plans, other bits."""
    peak = lambda step: round(MEMORY * {4: 0.92, 9: 0.99}.get(step, 0.4))  # noqa: E731
    whole = Trained(online()).steps(0, 15, peak)
    begun = Trained(online()).steps(0, 7, peak)
    state = json.loads(json.dumps(begun.online.state()))
    resumed = RunPlanner(costs=CostModel.from_json(state["costs"]), options=PlannerConfig())
    resumed.restore(state)
    resumed.check(700)
    assert resumed.calibration == begun.online.calibration
    went_on = Trained(resumed).steps(7, 15, peak)
    assert begun.margins + went_on.margins == whole.margins
    assert len(set(whole.margins)) == 3
    assert resumed.plan(BATCH).plan.hash == whole.online.plan(BATCH).plan.hash


def test_an_explicit_margin_stays() -> None:
    """Would catch a user's word that is overruled."""
    made = RunPlanner(costs=costs(0.2), options=PlannerConfig(memory_margin=0.2))
    made.check(700)
    trained = Trained(made).steps(0, 5, lambda step: MEMORY)
    assert set(trained.margins) == {0.2}
    assert trained.told == []


def longest_under(margin: float) -> int:
    """The longest sequence that a planner with this margin takes."""
    low, high = 1, 10**6
    while low < high:
        middle = (low + high + 1) // 2
        try:
            RunPlanner(costs=costs(margin), options=PlannerConfig(memory_margin=margin)).check(
                middle
            )
            low = middle
        except InfeasiblePlan:
            high = middle - 1
    return low


def test_a_learnt_margin_refuses_nothing_that_would_fit() -> None:
    """Would catch a run that trained yesterday and says 'does not fit' today."""
    longest = longest_under(0.2)
    made = RunPlanner(costs=costs(0.5), options=PlannerConfig())
    made.check(longest)
    assert made.margin == pytest.approx(0.2)
    with pytest.raises(InfeasiblePlan):
        made.check(longest_under(0.1) + 1)


def test_a_raised_margin_leaves_the_longest_sequence_its_room() -> None:
    """Would catch a raise after which the next long sequence ends the run."""
    made = online()
    made.check(longest_under(0.2))
    trained = Trained(made).steps(0, 4, lambda step: 10 * MEMORY)
    assert trained.margins[-1] == pytest.approx(0.2)
    assert len(trained.told) == 1


def test_drift_is_told_by_the_rank_that_watches() -> None:
    """Would catch a slow rank measured against seconds that were corrected for it."""
    watching = online(drift=Drift())
    told = []
    for number in range(80):
        planned = watching.plan(BATCH)
        told += watching.learn(finished(number, planned, (0, 0), slow=1.5))
        watching.observe(planned.plan.predicted_s, 1.3 * planned.plan.predicted_s)
    assert told == ["rank 1 has been 1.50x slower than the others since step 33"]


def test_the_first_step_of_a_process_corrects_only_until_the_second() -> None:
    """Catches seconds of warming up, or of attempts that ran out of memory, in what later steps are
    predicted to take: here they take five times, a step thrice, what the costs say."""
    made = online()

    def step(slow: float, retries: int = 0) -> float:
        planned = made.plan(BATCH)
        costs_s = planned.plan.predicted_s / made.ratio
        made.observe(planned.plan.predicted_s, slow * costs_s, retries=retries)
        made.learn(finished(0, planned, (0, 0)))
        return made.ratio

    assert step(15.0) == pytest.approx(15.0)
    assert [step(3.0), step(9.0, retries=1), step(3.0)] == pytest.approx([3.0, 3.0, 3.0])
    assert step(6.0) == pytest.approx(4.0)  # the mean of three
    state = json.loads(json.dumps(made.state()))
    made = online()
    made.restore(state)
    assert [step(15.0), step(4.0), step(8.0)] == pytest.approx([4.0, 4.0, 4.8])


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job that has run once: its configuration, and where its costs' calibration is kept."""
    folder = tmp_path_factory.mktemp("learning")
    config = write_job(folder, steps=6)
    code, _, err = run("train", config, "--out", folder / "first")
    assert code == 0, err
    index = json.loads((folder / "first/checkpoints/step-000006/index.json").read_text())
    fingerprint = index["extra"]["planner"]["costs"]["fingerprint"]
    return config, folder, calibration_path(Config.load(config), fingerprint), fingerprint


def margin_of(folder: Path, step: int) -> float:
    index = json.loads((folder / f"checkpoints/step-{step:06d}/index.json").read_text())
    return index["extra"]["planner"]["costs"]["memory_margin"]


def test_a_run_keeps_what_it_learnt(job) -> None:
    """Would catch a calibration that is never written, or written where nobody looks."""
    _, folder, path, fingerprint = job
    known = Calibration.load(path, fingerprint=fingerprint)
    assert known.whole.count == 5
    kept = json.loads((folder / "first" / "calibration.json").read_text())
    assert Calibration.from_json(kept) == known
    assert margin_of(folder / "first", 6) == 0.3
    assert {row["memory_margin"] for row in metrics(folder / "first")} == {0.3}


@pytest.mark.long
def test_the_next_run_starts_with_the_margin_learnt(job) -> None:
    """Would catch experience that is kept and not used, or used against the user's word."""
    config, folder, path, fingerprint = job
    known = Calibration.load(path, fingerprint=fingerprint)
    for _ in range(30):
        known.peaks = known.peaks.after([100], [160], 200)
    assert known.peaks.margin(0.3) == 0.45
    known.save(path)
    code, _, err = run("train", config, "--out", folder / "second")
    assert code == 0, err
    assert "memory        45 % kept free" in err
    assert margin_of(folder / "second", 6) == 0.45
    (folder / "second/checkpoints/step-000006/index.json").unlink()
    Calibration(fingerprint=fingerprint).save(path)
    code, _, err = run("train", config, "--out", folder / "second", "--resume")
    assert code == 0, err
    assert margin_of(folder / "second", 6) == 0.45, "a resumed run goes on with its own"
    assert len(losses(folder / "second")) == 6
    code, _, err = run(
        "train",
        config,
        "--out",
        folder / "told",
        "--set",
        "run.steps=2",
        "--set",
        "planner.memory_margin=0.25",
    )
    assert code == 0, err
    assert margin_of(folder / "told", 2) == 0.25
    assert "kept free" not in err


def test_a_damaged_calibration_is_told_and_ignored(job) -> None:
    """Would catch a torn file that ends a run, or is trusted."""
    config, folder, path, fingerprint = job
    path.write_text('{"format": 1, "fing')
    code, _, err = run("train", config, "--out", folder / "third", "--set", "run.steps=3")
    assert code == 0, err
    assert "learnt again" in err
    assert margin_of(folder / "third", 3) == 0.3
    assert Calibration.load(path, fingerprint=fingerprint).whole.count == 2
