"""``headrace plan --costs COSTS.json --lengths LENGTHS.json --devices N``: plans of costs and
lengths in files, without a configuration or a model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from headrace.cli.display import out_console, tell
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import ConfigError, CostError, DataError, MissingExtra
from headrace.planning.groups import GroupPlan, plan_groups, plans_to_json
from headrace.planning.pipelines import PipelinePlan, plan_pipelines
from headrace.report.plan_bars import PlanBars, bars_of_groups, bars_of_pipelines
from headrace.spec.plan import Semantics
from headrace.units import percent_text, seconds_text

__all__ = ["PlanFiles", "plan_files", "read_iterations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFiles:
    """The options of the command, as given; ``semantics`` None where left out."""

    costs: Path | None
    lengths: str | None
    devices: int | None
    planner: str | None
    semantics: str | None
    picture: Path | None
    seed: int
    as_json: bool


def plan_files(options: PlanFiles) -> int:
    """Plan every iteration of a file; a table for people, or the plan file on stdout."""
    if options.costs is None or options.lengths is None or options.devices is None:
        raise ConfigError(
            "plan", got="no configuration",
            wanted="a CONFIG, or all of --costs, --lengths and --devices",
        )  # fmt: skip
    if options.devices < 1:
        raise ConfigError("--devices", got=options.devices, wanted=">= 1")
    kind = _kind(options.costs)
    iterations = read_iterations(Path(options.lengths))
    if kind == "groups":
        return _groups(options, options.costs, iterations, options.devices)
    if options.semantics not in (None, "free"):
        raise ConfigError(
            "--semantics", got=repr(options.semantics),
            wanted="free for pipelines: each starts when its devices are free",
        )  # fmt: skip
    return _pipelines(options, options.costs, iterations, options.devices)


def read_iterations(path: Path) -> list[list[int]]:
    """The lengths of every iteration of a file: ``{"iterations": [[tokens, ...], ...]}``.

    Raises DataError, naming the entry, for a file that cannot be read, is malformed, or holds
    something that is no length.
    """
    value = _read(path)
    found = value.get("iterations") if isinstance(value, dict) else None
    if not isinstance(found, list) or not found:
        raise DataError(f"lengths {path}", got=type(value).__name__ if found is None else found,
                        wanted='{"iterations": [[tokens, ...], ...]}')  # fmt: skip
    for i, lengths in enumerate(found):
        if not isinstance(lengths, list) or not lengths:
            raise DataError(f"lengths {path}, iteration {i}", got=repr(lengths)[:40],
                            wanted="a list of lengths, at least one")  # fmt: skip
        for k, length in enumerate(lengths):
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise DataError(f"lengths {path}, iteration {i}, sequence {k}",
                                got=repr(length)[:40], wanted="a whole number >= 1")  # fmt: skip
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"file {path}", got=error.strerror, wanted="a readable JSON file")
    except ValueError as error:
        raise DataError(f"file {path}", got=str(error), wanted="JSON")


def _kind(path: Path) -> str:
    value = _read(path)
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in ("pipelines", "groups"):
        hint = "costs written by headrace profile need a CONFIG: headrace plan CONFIG --costs FILE"
        raise CostError(f"costs {path}, kind", got=repr(kind), wanted="'pipelines' or 'groups'",
                        hint=hint)  # fmt: skip
    return kind


def _groups(
    options: PlanFiles, costs_path: Path, iterations: Sequence[Sequence[int]], devices: int
) -> int:
    costs, plans, times = GroupCosts.load(costs_path), list[GroupPlan](), list[float]()
    semantics = options.semantics or "free"
    for word in get_args(Semantics):
        if word == semantics:
            for lengths in iterations:
                start = time.perf_counter()
                plans.append(
                    plan_groups(costs, lengths, devices, semantics=word,
                                planner=options.planner or "headrace", seed=options.seed)
                )  # fmt: skip
                times.append(time.perf_counter() - start)
    if not plans:
        raise ConfigError("--semantics", got=repr(semantics), wanted="free or lockstep")
    worst = max(plans, key=lambda plan: plan.predicted_s)
    _draw(options, lambda: bars_of_groups(costs, worst), plans.index(worst))
    if options.as_json:
        print(json.dumps(plans_to_json(plans, times)))
        return 0
    rows = [
        (plan.strategy, plan.predicted_s, plan.lower_bound_s, plan.gap, took, plan.why)
        for plan, took in zip(plans, times, strict=True)
    ]
    _print(f"{devices} devices, {semantics}, planner {plans[0].planner}", rows)
    return 0


def _pipelines(
    options: PlanFiles, costs_path: Path, iterations: Sequence[Sequence[int]], devices: int
) -> int:
    costs = PipelineCosts.load(costs_path)
    plan: PipelinePlan = plan_pipelines(
        costs, iterations, devices, planner=options.planner or "headrace", seed=options.seed
    )
    worst = max(range(len(iterations)), key=lambda i: plan.iterations[i].predicted_s)
    _draw(
        options,
        lambda: bars_of_pipelines(costs, plan.iterations[worst], iterations[worst], devices),
        worst,
    )
    if options.as_json:
        print(json.dumps(plan.to_json()))
        return 0
    rows = [
        (item.strategy, item.predicted_s, item.lower_bound_s, item.gap, item.planning_s, item.why)
        for item in plan.iterations
    ]
    proposed = f", {len(plan.candidates)} strategies proposed in {seconds_text(plan.proposal_s)}"
    _print(f"{devices} devices, planner {plan.planner}{proposed if plan.candidates else ''}", rows)
    return 0


def _draw(options: PlanFiles, bars: Callable[[], PlanBars], iteration: int) -> None:
    """The picture of the iteration that takes longest, where one is asked for."""
    if options.picture is None:
        return
    try:
        from headrace.report.plan_picture import write_plan_picture
    except ImportError as error:
        raise MissingExtra(error.name or "altair", extra="report", needed_for="--picture")
    write_plan_picture(bars(), f"iteration {iteration}", options.picture)
    tell(f"picture of iteration {iteration}, the longest, in {options.picture}")


_Row = tuple[str, float, float, float, float, tuple[str, ...]]


def _print(title: str, rows: list[_Row]) -> None:
    out = out_console()
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for i, name in enumerate(("iteration", "strategy", "predicted", "bound", "gap", "planned in")):
        table.add_column(name, justify="left" if i == 1 else "right", overflow="fold")
    for number, (strategy, predicted_s, bound_s, gap, took, _) in enumerate(rows):
        table.add_row(
            str(number), strategy, seconds_text(predicted_s), seconds_text(bound_s),
            percent_text(gap), seconds_text(took),
        )  # fmt: skip
    out.print(table)
    mean_s = sum(row[1] for row in rows) / len(rows)
    out.print(f"mean {seconds_text(mean_s)}, worst gap {percent_text(max(r[3] for r in rows))}")
    worst = max(range(len(rows)), key=lambda i: rows[i][1])
    for reason in rows[worst][5]:
        out.print(f"iteration {worst}: {reason}", soft_wrap=True, markup=False)
