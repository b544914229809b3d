"""``headrace plan --costs COSTS.json --lengths LENGTHS.json --devices N``: plans of costs and
lengths in files, without a configuration or a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from rich.table import Table

from headrace.cli.display import out_console
from headrace.cli.draw_plan import draw_picture, require_picture
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.costs.saving import named_costs
from headrace.engine.planned_iterations import OWN, plan_iterations, plans_to_json
from headrace.errors import ConfigError, CostError, DataError, did_you_mean
from headrace.planning import Problem
from headrace.planning.clock import published_timeline
from headrace.report.plan_bars import bars_of_plan
from headrace.spec.cluster import MOST_DEVICES
from headrace.spec.given import read_json
from headrace.spec.plan import Semantics
from headrace.units import counted, percent_text, seconds_text

__all__ = ["PlanFiles", "plan_files", "read_iterations"]

Iterations = Sequence[Sequence[int]]
"""The lengths of the sequences of each iteration, in tokens."""

Costs = TypeVar("Costs")

_LEAST_S, _MOST_S = 1e-30, 1e30  # sums and ratios of such seconds are numbers


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
            "plan",
            got="no configuration",
            wanted="a CONFIG, or all of --costs, --lengths and --devices",
        )
    if not 1 <= options.devices <= MOST_DEVICES:
        raise ConfigError("--devices", got=options.devices, wanted=f"1 to {MOST_DEVICES:,}")
    if options.seed < 0:
        raise ConfigError("--seed", got=options.seed, wanted=">= 0")
    if options.picture is not None:
        require_picture(options.picture)
    costs_json = _read(options.costs)
    kind = _kind(costs_json, options.costs)
    iterations = read_iterations(Path(options.lengths))
    costs: PipelineCosts | GroupCosts
    if kind == "groups":
        costs = _costs(GroupCosts.from_json, costs_json, options.costs)
    else:
        costs = _costs(PipelineCosts.from_json, costs_json, options.costs)
        if options.semantics not in (None, "free"):
            raise ConfigError(
                "--semantics",
                got=repr(options.semantics),
                wanted="free for pipelines: each starts when its devices are free",
            )
    _require_ranges(costs, options.costs, iterations)
    semantics = _semantics(options.semantics)
    problem = Problem(costs=costs, devices=options.devices, semantics=semantics)
    return _plan(options, problem, iterations)


def read_iterations(path: Path) -> list[list[int]]:
    """The lengths of every iteration of a file: ``{"iterations": [[tokens, ...], ...]}``.

    Raises DataError, naming the entry, for a file that cannot be read, is malformed, or holds
    something that is no length.
    """
    value = _read(path)
    iterations = value.get("iterations") if isinstance(value, dict) else None
    if not isinstance(iterations, list) or not iterations:
        raise DataError(
            f"lengths {path}", got=repr(value)[:40], wanted='{"iterations": [[tokens, ...], ...]}'
        )
    for i, lengths in enumerate(iterations):
        if not isinstance(lengths, list) or not lengths:
            raise DataError(
                f"lengths {path}, iteration {i}",
                got=repr(lengths)[:40],
                wanted="a list of lengths, at least one",
            )
        for k, length in enumerate(lengths):
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise DataError(
                    f"lengths {path}, iteration {i}, sequence {k}",
                    got=repr(length)[:40],
                    wanted="a whole number >= 1",
                )
    return iterations


def _read(path: Path) -> Any:
    """The value of a JSON file; raises DataError for one that cannot be read."""
    return read_json(path, f"file {path}", error=DataError)


def _kind(value: Any, path: Path) -> str:
    """The entry ``kind`` of a file of published costs, ``pipelines`` or ``groups``. ``value`` is
    the file's JSON and ``path`` names it in errors. Raises CostError for another kind."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in ("pipelines", "groups"):
        hint = "costs written by headrace profile need a CONFIG: headrace plan CONFIG --costs FILE"
        raise CostError(
            f"costs {path}, kind", got=repr(kind)[:40], wanted="'pipelines' or 'groups'", hint=hint
        )
    return kind


def _costs(make: Callable[[Any], Costs], value: Any, path: Path) -> Costs:
    """The costs that ``make`` reads from ``value``, the JSON of the file ``path``. Raises
    CostError, which names the file, for malformed ones."""
    try:
        return named_costs(f"costs {path}", make, value)
    except ValueError as error:
        raise CostError(f"costs {path}", got=str(error))


def _require_range(what: str, seconds: float, tokens: int) -> None:
    """Raise CostError, which names ``what`` the costs are of, where ``tokens`` take so few or so
    many ``seconds`` that sums or ratios would overflow."""
    if seconds and not _LEAST_S <= seconds <= _MOST_S:
        raise CostError(
            what, got=f"{seconds:.3g} s for {tokens:,} tokens", wanted=f"{_LEAST_S} to {_MOST_S} s"
        )


def _semantics(given: str | None) -> Semantics:
    """The semantics that a flag names, ``free`` for None; raises ConfigError for another word."""
    for word in get_args(Semantics):
        if given in (word, None):
            return word
    raise ConfigError(
        "--semantics",
        got=repr(given),
        wanted="free or lockstep",
        hint=did_you_mean(str(given), get_args(Semantics)),
    )


def _plan(options: PlanFiles, problem: Problem, iterations: Iterations) -> int:
    """Plan all iterations of a file and print them, as JSON or as a table; returns the exit
    code."""
    planner = OWN if options.planner is None else options.planner
    planned = plan_iterations(problem, iterations, planner=planner, seed=options.seed)
    if options.picture is not None:
        longest = max(range(len(planned)), key=lambda i: planned[i].plan.predicted_s)
        plan = planned[longest].plan
        if planned[longest].phases:
            raise ConfigError(
                "--picture",
                got=f"iteration {longest} with strategies in turn",
                wanted="a plan of one strategy",
            )
        bars = bars_of_plan(plan, published_timeline(plan, problem.published))
        draw_picture(bars, f"iteration {longest}", options.picture)
    if options.as_json:
        print(json.dumps(plans_to_json(problem, planned, planner=planner, seed=options.seed)))
        return 0
    rows = [
        (
            one.strategy,
            one.plan.predicted_s,
            one.plan.lower_bound_s,
            one.plan.gap,
            one.planning_s,
            one.plan.why,
        )
        for one in planned
    ]
    semantics = "" if isinstance(problem.published, PipelineCosts) else f", {problem.semantics}"
    devices = counted(options.devices or 0, "device")
    _print(f"{devices}{semantics}, planner {planner}", rows)
    return 0


def _require_ranges(costs: PipelineCosts | GroupCosts, path: Path, iterations: Iterations) -> None:
    """Raise CostError for ``costs`` of the file ``path`` whose sums or ratios would overflow, for
    one token or for the longest iteration as one sequence."""
    for tokens in (1, max(map(sum, iterations))):
        if isinstance(costs, GroupCosts):
            for p in costs.sizes:
                _require_range(f"costs {path}, groups of {p}", costs.seconds([tokens], p), tokens)
        else:
            for scheme in costs.schemes:
                what = f"costs {path}, {scheme.name}"
                _require_range(what, scheme.micro_batch_s([tokens]), tokens)


_Row = tuple[str, float, float, float, float, tuple[str, ...]]
"""(strategy, predicted seconds, lower bound in seconds, gap, seconds of planning, reasons)."""


def _print(title: str, rows: list[_Row]) -> None:
    """Print a table with a line for each iteration, the mean, and why the slowest plan was
    taken."""
    out = out_console()
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for i, name in enumerate(("iteration", "strategy", "predicted", "bound", "gap", "planned in")):
        table.add_column(name, justify="left" if i == 1 else "right", overflow="fold")
    for number, (strategy, predicted_s, bound_s, gap, took, _) in enumerate(rows):
        table.add_row(
            str(number),
            strategy,
            seconds_text(predicted_s),
            seconds_text(bound_s),
            percent_text(gap),
            seconds_text(took),
        )
    out.print(table)
    seconds = [predicted_s for _, predicted_s, *_ in rows]
    worst_gap = max(gap for _, _, _, gap, _, _ in rows)
    mean_s = sum(seconds) / len(rows)
    out.print(f"mean {seconds_text(mean_s)}, worst gap {percent_text(worst_gap)}")
    slowest = max(range(len(rows)), key=lambda i: seconds[i])
    *_, reasons = rows[slowest]
    for reason in reasons:
        out.print(f"iteration {slowest}: {reason}", soft_wrap=True, markup=False)
