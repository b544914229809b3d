"""``headrace plan`` with a configuration: decide, without a device."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.cli.draw_plan import draw_picture, require_picture
from headrace.cli.flags import PlanFlags
from headrace.cli.planning_work import fits, prepare
from headrace.engine.plans import rivals
from headrace.engine.plans import simulate as run_clock
from headrace.engine.robustness import Robustness
from headrace.report.plan_bars import bars_of_plan
from headrace.simulator.memory import peak_parts
from headrace.spec.plan import Plan
from headrace.units import seconds_text

__all__ = ["plan"]


def plan(config_path: Path, flags: PlanFlags) -> int:
    """Plan batches; a table for people or JSON for programs, and a picture of the longest."""
    if flags.picture is not None:
        require_picture(flags.picture)
    work = prepare(config_path, flags)
    found, made = list[dict[str, Any]](), list[Plan]()
    for number, planned in enumerate(work.plans()):
        chosen, took = planned.plan, seconds_text(planned.planning_s)
        made.append(chosen)
        if flags.json:
            found.append(
                {
                    "planning_s": planned.planning_s,
                    "forecast": work.rates(chosen).to_json(),
                    "memory": asdict(peak_parts(chosen, work.costs, planned.peak_bytes)),
                    "robustness": _json_of(work.robustness(planned)),
                }
                | chosen.to_json()
            )
            continue
        if number:
            print()
        print(chosen)
        print(f"{'fits':<14}{fits(planned, work.costs)}     planned in {took}")
        print(f"{'memory':<14}{peak_parts(chosen, work.costs, planned.peak_bytes)}")
        print(f"{'forecast':<14}{work.rates(chosen)}")
        if (robust := work.robustness(planned)) is not None:
            print(f"{'robust':<14}{robust}")
        others = rivals(work.planner.problem(), chosen.lengths, seed=work.planner.seed)
        for name, rival in others.items():
            print(
                f"{name:<14}{rival.strategy}: {seconds_text(rival.predicted_s)}, the plan is "
                f"{rival.predicted_s / chosen.predicted_s:.2f} times as fast"
            )
    if flags.json:
        print(json.dumps({"costs": work.source, "plans": found}))
    else:
        print(f"{'assumed':<14}{work.assumed}")
    if flags.picture is not None:
        number = max(range(len(made)), key=lambda k: made[k].predicted_s)
        bars = bars_of_plan(made[number], run_clock(made[number], work.costs))
        draw_picture(bars, f"batch {number}", flags.picture)
    return 0


def _json_of(robust: Robustness | None) -> dict[str, Any] | None:
    return None if robust is None else asdict(robust)
