"""``headrace simulate``: look at planned batches, and at what other planners make of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import headrace
from headrace.cli.display import tell
from headrace.cli.flags import SimulateFlags
from headrace.cli.planning_work import PlanningWork, fits, prepare
from headrace.engine.compared_planners import compare_plans
from headrace.engine.listener import ProgressLines
from headrace.engine.plans import programs_of
from headrace.errors import ConfigError, MissingExtra
from headrace.simulator import draw
from headrace.simulator import simulate as run_programs
from headrace.spec.comparison import Comparison
from headrace.spec.given import require_place
from headrace.spec.measurement import Timeline
from headrace.spec.program import Program
from headrace.spec.step import Planned
from headrace.units import counted, seconds_text

__all__ = ["simulate"]

_RANKS_DRAWN = 16
"""Ranks whose timelines are drawn, which a terminal can show. Where there are more, only the first
batch is run on the clock: of a thousand ranks it takes seconds a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clocked:
    """A planned batch; where it was run on the clock, its programs and their predicted timeline."""

    planned: Planned
    programs: tuple[Program, ...] = ()
    timeline: Timeline | None = field(default=None)


def simulate(config_path: Path, flags: SimulateFlags) -> int:
    """Run the programs of planned batches on a clock, draw what every rank does, and compare the
    plans with those of other planners."""
    if flags.page is not None:
        _require_page(flags.page)
    if flags.trace is not None:
        require_place(f"--trace {flags.trace}", flags.trace, error=ConfigError)
    work = prepare(config_path, flags)
    batches = _clocked(work, flags)
    if not flags.json:
        for number, batch in enumerate(batches):
            _print_batch(number, batch, work, flags)
    planner = work.planner
    plans = [batch.planned.plan for batch in batches]
    comparison = compare_plans(
        plans, planner.problem(), seed=planner.seed, progress=ProgressLines()
    )
    if flags.json:
        output = {
            "costs": work.source,
            "batches": [_json_of(batch, work) for batch in batches],
            "comparison": comparison.to_json(),
        }
        print(json.dumps(output))
    else:
        print(f"\n{comparison}\nassumed: {work.assumed}")
    if flags.page is not None:
        _write_page(comparison, config_path, work, flags.page)
    if flags.trace is not None:
        _write_trace(batches, flags.trace)
    return 0


def _clocked(work: PlanningWork, flags: SimulateFlags) -> list[_Clocked]:
    """Plan all batches. The first one is run on the clock too; all are with at most _RANKS_DRAWN
    ranks, and where a trace or programs are asked for."""
    batches, progress = list[_Clocked](), ProgressLines()
    devices = work.costs.cluster.devices
    clock_all = devices <= _RANKS_DRAWN or flags.trace is not None or flags.programs
    for number, planned in enumerate(work.plans()):
        batch = _Clocked(planned=planned)
        if clock_all or number == 0:
            programs = programs_of(planned.plan, work.costs)
            timeline = run_programs(programs, planned.plan, work.costs)
            batch = _Clocked(planned=planned, programs=programs, timeline=timeline)
        batches.append(batch)
        progress("planned batches", len(batches), len(work.batches))
    return batches


def _print_batch(number: int, batch: _Clocked, work: PlanningWork, flags: SimulateFlags) -> None:
    """Print one batch's plan: its seconds (for the first batch as a picture of its ranks over
    time), how full memory is, its rates, and with ``--programs`` the actions of every rank."""
    chosen, timeline = batch.planned.plan, batch.timeline
    if number:
        print()
    checked = "" if timeline is None else ", programs checked"
    print(
        f"batch {number}: {counted(len(chosen.lengths), 'sequence')}, "
        f"{chosen.lengths.total:,} tokens, {chosen.strategy}{checked}"
    )
    if number == 0 and timeline is not None:
        print(_drawing(timeline))
    else:
        print(seconds_text(chosen.predicted_s))
    print(fits(batch.planned, work.costs))
    print(work.rates(chosen))
    if flags.programs:
        print("\n".join(map(str, batch.programs)))


def _drawing(timeline: Timeline) -> str:
    """The picture of a timeline, of its first ranks where there are many."""
    lines = draw(timeline).splitlines()
    more = timeline.devices - _RANKS_DRAWN
    if more > 0:  # one line for each rank, then that of the whole step
        lines[_RANKS_DRAWN:-1] = [f"and {counted(more, 'more rank')}; --trace FILE has them all"]
    return "\n".join(lines)


def _json_of(batch: _Clocked, work: PlanningWork) -> dict[str, Any]:
    """A batch as JSON; programs and timeline are null where it was not run on the clock."""
    timeline = batch.timeline
    return {
        "plan": batch.planned.plan.to_json(),
        "programs": None if timeline is None else list(map(str, batch.programs)),
        "timeline": None if timeline is None else timeline.to_json(),
        "peak_bytes": list(batch.planned.peak_bytes),
        "forecast": work.rates(batch.planned.plan).to_json(),
    }


def _write_trace(batches: Sequence[_Clocked], path: Path) -> None:
    """Write the actions of all batches, one after the other, as a Chrome trace. Raises ConfigError
    where the file cannot be written."""
    events, began_s = list[dict[str, Any]](), 0.0
    for number, batch in enumerate(batches):
        if batch.timeline is None:
            continue
        for event in batch.timeline.to_chrome_trace(step=number):
            events.append({**event, "ts": event["ts"] + began_s * 1e6})  # microseconds
        began_s += batch.timeline.seconds
    try:
        path.write_text(json.dumps({"traceEvents": events}))
    except OSError as error:
        raise ConfigError(f"--trace {path}", got=error.strerror, wanted="a writable file")
    tell(f"trace of {len(events)} actions in {path}")


def _require_page(path: Path) -> None:
    """Raise, before anything is planned, MissingExtra or ConfigError where no page could be
    written."""
    try:
        from headrace.report.comparison_page import require_page
    except ImportError as error:
        package = {"vl_convert": "vl-convert-python"}.get(str(error.name), error.name or "altair")
        raise MissingExtra(package, extra="report", needed_for="--page")
    require_page(path)


def _write_page(comparison: Comparison, config_path: Path, work: PlanningWork, page: Path) -> None:
    """Write the page of the comparison, and say where it is."""
    from headrace.report.comparison_page import write_comparison

    write_comparison(
        comparison,
        page,
        name=config_path.stem,
        assumed=str(work.assumed),
        costs=work.source,
        version=headrace.__version__,
    )
    tell(f"page of {counted(len(comparison.results), 'planner')} in {page}")
