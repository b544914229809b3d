"""``headrace plan --costs COSTS.json --lengths LENGTHS.json --devices N``: plans of costs and
lengths in files, without a configuration or a model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from rich.table import Table

from headrace.cli.display import out_console, tell
from headrace.cli.plan_picture import draw_picture, require_picture
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import ConfigError, CostError, DataError, InfeasiblePlan, did_you_mean
from headrace.planning.groups import GroupPlan, plan_groups, plans_to_json
from headrace.planning.pipelines import PipelinePlan, phases_apart, plan_pipelines
from headrace.report.plan_bars import bars_of_groups, bars_of_pipelines
from headrace.spec.plan import Semantics
from headrace.units import percent_text, seconds_text

__all__ = ["PlanFiles", "plan_files", "read_iterations"]

Iterations = Sequence[Sequence[int]]
Costs = TypeVar("Costs")

_MOST_DEVICES = 1_000_000
_DIGITS = 300  # of a whole number: a float holds its size
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
            "plan", got="no configuration",
            wanted="a CONFIG, or all of --costs, --lengths and --devices",
        )  # fmt: skip
    if not 1 <= options.devices <= _MOST_DEVICES:
        raise ConfigError("--devices", got=options.devices, wanted=f"1 to {_MOST_DEVICES:,}")
    if options.seed < 0:
        raise ConfigError("--seed", got=options.seed, wanted=">= 0")
    if options.picture is not None:
        require_picture(options.picture)
    value = _read(options.costs)
    kind = _kind(value, options.costs)
    iterations = read_iterations(Path(options.lengths))
    if kind == "groups":
        groups = _costs(GroupCosts.from_json, value, options.costs)
        return _groups(options, groups, iterations, options.devices)
    if options.semantics not in (None, "free"):
        raise ConfigError(
            "--semantics", got=repr(options.semantics),
            wanted="free for pipelines: each starts when its devices are free",
        )  # fmt: skip
    pipelines = _costs(PipelineCosts.from_json, value, options.costs)
    return _pipelines(options, pipelines, iterations, options.devices)


def read_iterations(path: Path) -> list[list[int]]:
    """The lengths of every iteration of a file: ``{"iterations": [[tokens, ...], ...]}``.

    Raises DataError, naming the entry, for a file that cannot be read, is malformed, or holds
    something that is no length.
    """
    value = _read(path)
    found = value.get("iterations") if isinstance(value, dict) else None
    if not isinstance(found, list) or not found:
        raise DataError(f"lengths {path}", got=repr(value)[:40],
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
        return json.loads(path.read_bytes(), parse_int=_whole)
    except OSError as error:
        raise DataError(f"file {path}", got=error.strerror, wanted="a readable JSON file")
    except (ValueError, RecursionError) as error:
        raise DataError(f"file {path}", got=str(error), wanted="JSON")


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _kind(value: Any, path: Path) -> str:
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in ("pipelines", "groups"):
        hint = "costs written by headrace profile need a CONFIG: headrace plan CONFIG --costs FILE"
        raise CostError(f"costs {path}, kind", got=repr(kind)[:40],
                        wanted="'pipelines' or 'groups'", hint=hint)  # fmt: skip
    return kind


def _costs(make: Callable[[Any], Costs], value: Any, path: Path) -> Costs:
    """The costs of a file's value; errors name the file."""
    try:
        return make(value)
    except CostError as error:
        raise CostError(f"costs {path}: {error.what}", got=error.got, wanted=error.wanted,
                        hint=error.hint)  # fmt: skip
    except ValueError as error:
        raise CostError(f"costs {path}", got=str(error))


def _require_range(what: str, seconds: float, tokens: int) -> None:
    """Raise CostError for seconds whose sums or ratios would be no numbers."""
    if seconds and not _LEAST_S <= seconds <= _MOST_S:
        raise CostError(what, got=f"{seconds:.3g} s for {tokens:,} tokens",
                        wanted=f"{_LEAST_S} to {_MOST_S} s")  # fmt: skip


def _semantics(given: str | None) -> Semantics:
    for word in get_args(Semantics):
        if given in (word, None):
            return word
    raise ConfigError("--semantics", got=repr(given), wanted="free or lockstep",
                      hint=did_you_mean(str(given), get_args(Semantics)))  # fmt: skip


def _groups(options: PlanFiles, costs: GroupCosts, iterations: Iterations, devices: int) -> int:
    plans, times, semantics = list[GroupPlan](), list[float](), _semantics(options.semantics)
    planner = "headrace" if options.planner is None else options.planner
    for tokens in (1, max(map(sum, iterations))):
        for p in costs.sizes:
            _require_range(
                f"costs {options.costs}, groups of {p}", costs.seconds([tokens], p), tokens
            )
    for number, lengths in enumerate(iterations):
        start = time.perf_counter()
        try:
            made = plan_groups(costs, lengths, devices, semantics=semantics, planner=planner,
                               seed=options.seed)  # fmt: skip
        except InfeasiblePlan as error:
            what = error.what if error.what == "devices" else f"iteration {number}, {error.what}"
            raise InfeasiblePlan(what, got=error.got, wanted=error.wanted, hint=error.hint)
        times.append(time.perf_counter() - start)
        plans.append(made)
    worst = max(plans, key=lambda plan: plan.predicted_s)
    if options.picture is not None:
        name = f"iteration {plans.index(worst)}"
        draw_picture(bars_of_groups(costs, worst), name, options.picture)
    if options.as_json:
        print(json.dumps(plans_to_json(plans, times)))
        return 0
    rows = [
        (plan.strategy, plan.predicted_s, plan.lower_bound_s, plan.gap, took, plan.why)
        for plan, took in zip(plans, times, strict=True)
    ]
    _print(f"{devices} devices, {semantics}, planner {planner}", rows)
    return 0


def _pipelines(
    options: PlanFiles, costs: PipelineCosts, iterations: Iterations, devices: int
) -> int:
    for tokens in (1, max(map(sum, iterations))):
        for scheme in costs.schemes:
            _require_range(
                f"costs {options.costs}, {scheme.name}", scheme.micro_batch_s([tokens]), tokens
            )
    plan: PipelinePlan = plan_pipelines(
        costs, iterations, devices, seed=options.seed,
        planner="headrace" if options.planner is None else options.planner,
    )  # fmt: skip
    worst = max(range(len(iterations)), key=lambda i: plan.iterations[i].predicted_s)
    if options.picture is not None:
        bars = bars_of_pipelines(costs, plan.iterations[worst], iterations[worst], devices)
        draw_picture(bars, f"iteration {worst}", options.picture)
    if options.as_json:
        in_turn = any(item.phases for item in plan.iterations)
        if in_turn:
            tell("strategies change within iterations: every phase is written as an iteration, "
                 "and the lengths that go with them as `lengths`")  # fmt: skip
        print(json.dumps(phases_apart(plan, iterations) if in_turn else plan.to_json()))
        return 0
    rows = [
        (item.strategy, item.predicted_s, item.lower_bound_s, item.gap, item.planning_s, item.why)
        for item in plan.iterations
    ]
    proposed = f", {len(plan.candidates)} strategies proposed in {seconds_text(plan.proposal_s)}"
    _print(f"{devices} devices, planner {plan.planner}{proposed if plan.candidates else ''}", rows)
    return 0


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
