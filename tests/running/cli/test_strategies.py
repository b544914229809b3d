"""Strategies from the configuration to the trained model."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.planner_config import PlannerConfig
from headrace.costs import FORMULA_METHODS, CostModel, synthetic_costs
from headrace.engine.run_planner import RunPlanner
from headrace.errors import InfeasiblePlan
from headrace.spec import Lengths
from running.cli.jobs import children, losses, metrics, run, start, wait_for_step

TEXTS = ("1*tp2 + 2*cp1", "1*pp2 + 1*cp2", "1*tp2-pp2")
BATCHES = [Lengths.of([4000 + 100 * step, *[300] * 20]) for step in range(6)]
EXAMPLE = Path(__file__).parents[3] / "examples" / "heterogeneous.toml"


def costs() -> CostModel:
    return synthetic_costs(4, 4, methods=FORMULA_METHODS)


def online(**options: Any) -> RunPlanner:
    made = RunPlanner(
        costs=costs(),
        options=PlannerConfig(name="strategies", **options),
        drawn=range(9),
    )
    made.check(5000)
    return made


def hashes(planner: RunPlanner, batches: list[Lengths]) -> list[str]:
    found = []
    for lengths in batches:
        planned = planner.plan(lengths)
        found.append(planned.plan.hash)
        planner.observe(planned.plan.predicted_s, planned.plan.predicted_s)
    return found


def test_strategies_take_turns() -> None:
    """Would catch strategies that are configured and not used, or in another order."""
    planner = online(strategies=TEXTS, rotate=True)
    seen = []
    for lengths in BATCHES:
        planned = planner.plan(lengths)
        seen.append(str(planned.plan.strategy))
        assert planned.predicted is not None
        assert planned.predicted.seconds == pytest.approx(planned.plan.predicted_s)
        assert len(planned.peak_bytes) == 4
        planner.observe(1.0, 1.0)
    assert tuple(seen) == TEXTS + TEXTS


@pytest.mark.parametrize("options", [{}, {"strategies": TEXTS}, {"strategies": TEXTS, "rotate": 1}])
def test_a_resumed_run_plans_alike(options: dict[str, Any]) -> None:
    """Would catch turns outside the checkpoint: other plans, other bits."""
    whole = hashes(online(**options), BATCHES)
    begun = online(**options)
    first = hashes(begun, BATCHES[:2])
    state = json.loads(json.dumps(begun.state()))
    resumed = RunPlanner(
        costs=CostModel.from_json(state["costs"]),
        options=PlannerConfig(name="strategies", **options),
    )
    resumed.restore(state)
    assert first + hashes(resumed, BATCHES[2:]) == whole


def test_a_strategy_that_cannot_hold_the_longest_is_refused_first() -> None:
    """Would catch a run that stops in the middle, at the first long document."""
    with pytest.raises(InfeasiblePlan, match="does not fit"):
        online(strategies=("4*cp1",)).check(10_000_000)
    with pytest.raises(InfeasiblePlan, match="tp2-cp2"):
        online(strategies=("1*tp2-cp2",))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_example_trains_as_one_rank_does(tmp_path: Path) -> None:
    """Would catch an example that is documented and does not run, or trains another model."""
    changes = [
        "--set",
        "run.steps=6",
        "--set",
        f"data.cache={tmp_path / 'cache'}",
        "--set",
        "report.html=false",
        "--set",
        "data.paths=['package:pydantic']",
        "--set",
        "data.context=1024",
        "--set",
        "data.batch_tokens=4096",
        "--set",
        "profile.rung_s=0.1",
    ]
    alone = [
        "--ranks",
        "1",
        "--set",
        "planner.strategies=",
        "--set",
        "planner.rotate=",
        "--set",
        "planner.candidates=",
        "--set",
        "planner.name=adaptive",
    ]
    for name, more in (("four", []), ("one", alone)):
        code, _, err = run(
            "train", EXAMPLE, "--out", tmp_path / name, *changes, *more, timeout_s=400
        )
        assert code == 0, err
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "one"), rtol=1e-5)
    ran = [row["strategy"] for row in metrics(tmp_path / "four")]
    assert {ran[step] for step in range(2, len(ran), 3)} == {"1*tp2-pp2"}, "each third turn"
    assert len(set(ran)) >= 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_run_of_strategies_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Would catch turns that begin anew after a restart, plans made ahead that go on from the
    wrong step, a checkpoint that holds only some ranks' rows, and a producer of plans or a rank
    left behind by a kill."""
    changes = [
        "--set",
        "run.steps=9",
        "--set",
        "checkpoint.every=2",
        "--set",
        f"data.cache={tmp_path / 'cache'}",
        "--set",
        "report.html=false",
        "--set",
        "data.paths=['package:pydantic']",
        "--set",
        "data.context=256",
        "--set",
        "data.batch_tokens=1024",
        "--set",
        "profile.rung_s=0.02",
        "--set",
        "planner.recompute=['none']",
        "--set",
        "planner.memory_margin=0.3",
    ]
    code, _, err = run("train", EXAMPLE, "--out", tmp_path / "whole", *changes, timeout_s=200)
    assert code == 0, err
    process = start("train", EXAMPLE, "--out", tmp_path / "killed", *changes)
    wait_for_step(process, tmp_path / "killed", 4)
    everyone = children(process)
    everyone[2].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 2 was killed by SIGKILL" in err
    assert not any(child.is_running() and child.status() != "zombie" for child in everyone)
    before = len(metrics(tmp_path / "killed"))
    assert 5 <= before < 9, "killed between two steps of the run"
    code, _, err = run(
        "train", EXAMPLE, "--out", tmp_path / "killed", *changes, "--resume", timeout_s=100
    )
    assert code == 0, err
    assert "continuing from" in err
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    turns = [[r["strategy"] for r in metrics(tmp_path / name)] for name in ("whole", "killed")]
    assert turns[0] == turns[1]
    assert all(turns[0][step] != turns[0][step + 1] for step in range(8)), "each has its turn"
