"""``headrace plan`` with a configuration: decide, without a device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from headrace.cli.draw_plan import draw_picture, require_picture
from headrace.cli.flags import PlanFlags
from headrace.cli.planning_work import PlanningWork, fits, prepare
from headrace.engine.plans import rivals
from headrace.engine.plans import simulate as run_clock
from headrace.report.plan_bars import bars_of_plan
from headrace.simulator.memory import peak_parts
from headrace.spec.plan import Plan
from headrace.spec.step import Planned
from headrace.units import counted, seconds_text

__all__ = ["plan"]

Value = TypeVar("Value")


def plan(config_path: Path, flags: PlanFlags) -> int:
    """Plan batches and print them as text or JSON; ``--picture`` draws the plan that takes longest.
    Returns the exit code."""
    if flags.picture is not None:
        require_picture(flags.picture)
    work = prepare(config_path, flags)
    plans: list[Plan] = []
    plans_json: list[dict[str, Any]] = []
    for number, planned in enumerate(work.plans()):
        plans.append(planned.plan)
        if flags.json:
            plans_json.append(_json_of(planned, work))
            continue
        if number:
            print()
        _print(planned, work)
    if flags.json:
        print(json.dumps({"costs": work.source, "plans": plans_json}))
    else:
        print(f"{'assumed':<14}{work.assumed}")
    if flags.picture is not None:
        longest = max(range(len(plans)), key=lambda number: plans[number].predicted_s)
        bars = bars_of_plan(plans[longest], run_clock(plans[longest], work.costs))
        draw_picture(bars, f"batch {longest}", flags.picture)
    return 0


def _json_of(planned: Planned, work: PlanningWork) -> dict[str, Any]:
    """A plan as JSON, with what was predicted of it."""
    chosen = planned.plan
    facts: dict[str, Any] = {
        "planning_s": planned.planning_s,
        "forecast": work.rates(chosen).to_json(),
        "memory": asdict(peak_parts(chosen, work.costs, planned.peak_bytes)),
    }
    robust = work.robustness(planned)
    facts["robustness"] = None if robust is None else asdict(robust)
    return facts | chosen.to_json()


def _print(planned: Planned, work: PlanningWork) -> None:
    """Print a plan, what was predicted of it, how long other planners' plans would take, and what
    the planning of all these took."""
    chosen = planned.plan
    print(chosen)
    print(
        f"{'fits':<14}{fits(planned, work.costs)}     planned in {seconds_text(planned.planning_s)}"
    )
    print(f"{'memory':<14}{peak_parts(chosen, work.costs, planned.peak_bytes)}")
    print(f"{'forecast':<14}{work.rates(chosen)}")
    took = [f"{seconds_text(planned.planning_s)} to plan"]
    robust, robust_s = _timed(lambda: work.robustness(planned))
    if robust is not None and work.doubted is not None:
        print(f"{'robust':<14}{robust}")
        plans = counted(len(work.doubted.doubts), "plan")
        took.append(f"{seconds_text(robust_s)} more for {plans} of other efficiencies")
    problem, seed = work.planner.problem(), work.planner.seed
    others, others_s = _timed(lambda: rivals(problem, chosen.lengths, seed=seed))
    for name, rival in others.items():
        print(
            f"{name:<14}{rival.strategy}: {seconds_text(rival.predicted_s)}, the plan is "
            f"{rival.predicted_s / chosen.predicted_s:.2f} times as fast"
        )
    took.append(f"{seconds_text(others_s)} for plans of other planners")
    print(f"{'took':<14}{', '.join(took)}")


def _timed(call: Callable[[], Value]) -> tuple[Value, float]:
    """What a call returns, and the seconds that it took."""
    start = time.perf_counter()
    return call(), time.perf_counter() - start
