"""Pictures of plans of pipelines and of groups."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Literal

import pytest

from headrace.costs import synthetic_costs
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import ConfigError
from headrace.planning import Problem
from headrace.planning import plan as make_plan
from headrace.planning.clock import published_timeline
from headrace.report.plan_bars import PlanBars, bars_of_plan
from headrace.simulator import simulate, without_waits
from headrace.spec import Lengths, Plan
from headrace.spec.program import compile_plan

PIPELINES = PipelineCosts.from_json(
    {
        "kind": "pipelines",
        "name": "small",
        "model": "",
        "device": "",
        "source": "",
        "meaning": "",
        "architecture": {"layers": 4, "hidden": 64, "vocabulary": 100},
        "schemes": [
            {
                "scheme": "tp2",
                "tensor": 2,
                "pipeline": 1,
                "devices": 2,
                "a_s": 2e-9,
                "b_s": 2e-4,
                "c_s": 0.02,
                "max_length": {"8": 4000},
                "util_length": 500,
            },
            {
                "scheme": "tp2-pp2",
                "tensor": 2,
                "pipeline": 2,
                "devices": 4,
                "a_s": 5e-10,
                "b_s": 8e-5,
                "c_s": 0.02,
                "max_length": {"8": 9000},
                "util_length": 500,
            },
        ],
    }
)
GROUPS = GroupCosts.from_json(
    {
        "kind": "groups",
        "name": "small",
        "model": "",
        "device": "",
        "source": "",
        "meaning": "",
        "a_s": 5e-9,
        "b_s": 2e-4,
        "c_s": 0.02,
        "cap_tokens": 4000,
        "kappa_s": {"1": 0.0, "2": 1e-5, "4": 2e-5},
    }
)
LENGTHS = [300, 7000, 40, 700, 700, 1500, 20, 3000]


def _checked(plan: PlanBars) -> None:
    """No device does two things at once, all lengths are placed, and it ends when it should."""
    for one, other in combinations(plan.bars, 2):
        if one.first <= other.last and other.first <= one.last:
            assert one.end_s <= other.start_s + 1e-12 or other.end_s <= one.start_s + 1e-12
    assert max(bar.end_s for bar in plan.bars) == pytest.approx(plan.seconds)
    assert all(0 <= bar.first <= bar.last < plan.devices for bar in plan.bars)
    placed = [length for lengths in plan.placed.values() for length in lengths]
    assert sorted(placed) == sorted(LENGTHS)


def shown(problem: Problem) -> tuple[Plan, PlanBars]:
    """The plan of the lengths and its bars."""
    plan = make_plan(problem, Lengths(tokens=tuple(LENGTHS)))
    return plan, bars_of_plan(plan, published_timeline(plan, problem.published))


def test_pipelines_end_when_the_plan_says() -> None:
    """Catches a pipeline without the time that its last stage is behind, and shared devices."""
    plan, found = shown(Problem(costs=PIPELINES, devices=8))
    _checked(found)
    assert found.seconds == pytest.approx(plan.predicted_s)
    behind = [bar for bar in found.bars if not bar.longest]
    assert len(behind) == sum(p.scheme.pipeline > 1 for p in plan.pipelines)
    assert behind, "the long sequence fits on two stages only"


@pytest.mark.parametrize("semantics", ["free", "lockstep"])
def test_groups_end_when_the_plan_says(semantics: Literal["free", "lockstep"]) -> None:
    """Catches waves that start before the one before has ended."""
    plan, found = shown(Problem(costs=GROUPS, devices=6, semantics=semantics))
    assert plan.semantics == semantics
    if semantics == "free":
        _checked(found)
        assert found.seconds == pytest.approx(plan.predicted_s)
    else:  # the last wave may be short where others are
        assert max(bar.end_s for bar in found.bars) <= plan.predicted_s * (1 + 1e-9)
    assert sum(bar.last - bar.first + 1 for bar in found.bars) == sum(
        len(plan.pipelines[micro.pipeline].ranks) for micro in plan.micro_batches
    )


def test_plans_of_a_configuration_show_the_clock() -> None:
    """Catches bars of other ranks than those that work, and micro-batches without their lengths."""
    costs = synthetic_costs(4)
    plan = make_plan(Problem(costs=costs, devices=4), Lengths(tokens=tuple(LENGTHS)))
    programs = compile_plan(plan, costs.shape.bucket_count)
    timeline = simulate(programs, plan, costs)
    found = bars_of_plan(plan, timeline)
    _checked(found)
    busy_s = sum((b.last - b.first + 1) * (b.end_s - b.start_s) for b in found.bars)
    assert busy_s == pytest.approx(sum(row.seconds for row in without_waits(timeline.rows)))
    shown = {bar.longest for bar in found.bars} - {0}
    assert shown == {max(plan.tokens_of(micro)) for micro in plan.micro_batches}


@pytest.mark.parametrize("ending", [".svg", ".png", ".json"])
def test_pictures_are_written(tmp_path: Path, ending: str) -> None:
    """Catches a picture in another format than its name says."""
    pytest.importorskip("altair")
    from headrace.report.plan_picture import write_plan_picture

    _, bars = shown(Problem(costs=GROUPS, devices=6))
    path = tmp_path / f"plan{ending}"
    write_plan_picture(bars, "a plan", path)
    start = path.read_bytes()[:4]
    assert start.startswith({".svg": b"<svg", ".png": b"\x89PNG", ".json": b"{"}[ending])
    if ending == ".json":
        assert "nan" not in path.read_text().lower()
        assert json.loads(path.read_text())["vconcat"]


def test_other_endings_and_places_are_refused(tmp_path: Path) -> None:
    """Catches a file of an unknown format, and a traceback of the file system."""
    pytest.importorskip("altair")
    from headrace.report.plan_picture import write_plan_picture

    _, bars = shown(Problem(costs=GROUPS, devices=6))
    for name in ("plan.bmp", "plan", "no/such/folder/plan.svg"):
        with pytest.raises(ConfigError, match="picture"):
            write_plan_picture(bars, "a plan", tmp_path / name)
