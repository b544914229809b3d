"""``headrace plan`` and ``headrace simulate``: decide, and look, without a device."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cli.display import Stopwatch, tell
from headrace.cli.plan_picture import draw_picture, require_picture
from headrace.cli.wiring import (
    best_static,
    formula_costs,
    make_problem,
    make_strategist,
    newest_costs,
    open_data,
    read_config,
)
from headrace.config import Config
from headrace.costs import CostModel, fingerprint_difference
from headrace.data import draw_batches, make_tokenizer, parse_distribution
from headrace.errors import ConfigError, CostError
from headrace.planning import Problem, static_plan
from headrace.planning import plan as make_plan
from headrace.planning.strategies import Schemes
from headrace.report.plan_bars import bars_of_plan
from headrace.simulator import draw, peak_bytes
from headrace.simulator import simulate as run_clock
from headrace.spec.architecture import Architecture
from headrace.spec.checker import check_programs
from headrace.spec.compiler import compile_plan
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.spec.program import Program
from headrace.units import bytes_text, seconds_text

__all__ = ["plan", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What to plan: the problem, the batches' lengths, and where the costs are from."""

    config: Config
    problem: Problem
    costs: CostModel
    batches: tuple[Lengths, ...]
    source: str


def plan(
    config_path: Path, *, batches: int, ranks: int | None, lengths: str | None,
    costs: Path | None, hardware: str | None, picture: Path | None, seed: int, as_json: bool,
    changes: list[str],
) -> int:  # fmt: skip
    """Plan batches; a table for people or JSON for programs, and a picture of the longest."""
    if picture is not None:
        require_picture(picture)
    work = _prepare(config_path, batches, ranks, lengths, costs, hardware, seed, changes)
    found, made = list[dict[str, Any]](), list[Plan]()
    for number, (batch, chosen, planning_s) in enumerate(_plans(work)):
        made.append(chosen)
        if as_json:
            found.append({"planning_s": planning_s} | chosen.to_json())
            continue
        if number:
            print()
        print(chosen)
        print(f"{'fits':<14}{_fits(chosen, work.costs)}     planned in {seconds_text(planning_s)}")
        best = best_static(work.problem, batch)
        if best is not None:
            print(
                f"{'best static':<14}{best.strategy}: {seconds_text(best.predicted_s)} "
                f"({best.predicted_s / chosen.predicted_s:.2f}x)"
            )
    if as_json:
        print(json.dumps({"costs": work.source, "plans": found}))
    if picture is not None:
        number = max(range(len(made)), key=lambda k: made[k].predicted_s)
        actions = _programs(made[number], work.costs)
        bars = bars_of_plan(made[number], run_clock(actions, made[number], work.costs))
        draw_picture(bars, f"batch {number}", picture)
    return 0


def simulate(
    config_path: Path, *, batches: int, ranks: int | None, lengths: str | None,
    costs: Path | None, hardware: str | None, trace: Path | None, programs: bool, seed: int,
    as_json: bool, changes: list[str],
) -> int:  # fmt: skip
    """Run the programs of planned batches on a clock; draw what every rank does."""
    work = _prepare(config_path, batches, ranks, lengths, costs, hardware, seed, changes)
    events: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    began_s = 0.0
    for number, (_, chosen, _) in enumerate(_plans(work)):
        actions = _programs(chosen, work.costs)
        timeline = run_clock(actions, chosen, work.costs)
        later_us, began_s = began_s * 1e6, began_s + timeline.seconds
        for event in timeline.to_chrome_trace(step=number):
            events.append({**event, "ts": event["ts"] + later_us})
        if as_json:
            found.append(
                {
                    "plan": chosen.to_json(),
                    "programs": [str(program) for program in actions],
                    "timeline": timeline.to_json(),
                    "peak_bytes": list(peak_bytes(chosen, work.costs)),
                }
            )
        else:
            _print_clock(number, chosen, timeline, work.costs)
            if programs:
                print("\n".join(map(str, actions)))
    if as_json:
        print(json.dumps({"costs": work.source, "batches": found}))
    if trace is not None:
        try:
            trace.write_text(json.dumps({"traceEvents": events}))
        except OSError as error:
            raise ConfigError(f"--trace {trace}", got=error.strerror, wanted="a writable file")
        tell(f"trace of {len(events)} actions in {trace}")
    return 0


def _programs(chosen: Plan, costs: CostModel) -> tuple[Program, ...]:
    """The checked programs of a plan."""
    count = costs.shape.bucket_count
    actions = compile_plan(chosen, count)
    check_programs(actions, chosen, count)
    return actions


def _print_clock(number: int, chosen: Plan, timeline: Timeline, costs: CostModel) -> None:
    if number:
        print()
    print(
        f"batch {number}: {len(chosen.lengths)} sequences, {chosen.lengths.total:,} tokens, "
        f"{chosen.strategy}, programs checked"
    )
    print(draw(timeline))
    print(_fits(chosen, costs))


def _fits(chosen: Plan, costs: CostModel) -> str:
    peaks = peak_bytes(chosen, costs)
    rank = max(range(len(peaks)), key=lambda r: peaks[r])
    return f"peak {bytes_text(peaks[rank])} of {bytes_text(costs.capacity_bytes)} (rank {rank})"


def _plans(work: _Work) -> Iterator[tuple[Lengths, Plan, float]]:
    options, seed = work.config.planner, work.config.run.seed
    schemes = Schemes(work.problem)
    strategist = make_strategist(options, seed, lambda: [b.tokens for b in work.batches])
    if options.name == "strategies" and not options.strategies:
        known = strategist.candidates(schemes, work.batches[0])
        tell(f"strategies    {len(known)} to choose among: {', '.join(map(str, known))}")
    for batch in work.batches:
        start = time.perf_counter()
        if options.name == "strategies":
            chosen = strategist.plan(schemes, batch)
            strategist.done()
        elif options.static_size is not None:
            chosen = static_plan(work.problem, batch, options.static_size)
        else:
            chosen = make_plan(work.problem, batch, seed=seed)
        yield batch, chosen, time.perf_counter() - start


def _prepare(
    config_path: Path, batches: int, ranks: int | None, lengths: str | None, costs: Path | None,
    hardware: str | None, seed: int, changes: list[str],
) -> _Work:  # fmt: skip
    if batches < 1:
        raise ConfigError("--batches", got=batches, wanted=">= 1")
    if costs is not None and hardware is not None:
        raise ConfigError("--hardware", got="--costs too", wanted="one of them")
    config = read_config(config_path, changes, ranks=ranks, hardware=hardware)
    if lengths is None:
        data = open_data(config, Stopwatch())
        architecture = data.architecture
        drawn = tuple(batch.lengths for batch in data.sampler.peek(batches))
    else:
        tokenizer = make_tokenizer(config.data.tokenizer)
        architecture = config.model.architecture(
            tokenizer.vocabulary, config.data.context, tokenizer.mask_id
        )
        drawn = _drawn(config, lengths, batches, seed)
    model, source = _costs(config, architecture, costs)
    if source:
        tell(source)
    return _Work(
        config=config, problem=make_problem(model, config.planner), costs=model, batches=drawn,
        source=source or model.fingerprint,
    )  # fmt: skip


def _drawn(config: Config, text: str, batches: int, seed: int) -> tuple[Lengths, ...]:
    budget = config.data.batch_tokens
    if budget is None:
        raise ConfigError(
            "--lengths", got="a configuration that counts sequences", wanted="data.batch_tokens",
            hint="add --set data.batch_tokens=N --set data.batch_sequences=",
        )  # fmt: skip
    return tuple(draw_batches(parse_distribution(text), budget, batches, seed))


def _costs(config: Config, architecture: Architecture, path: Path | None) -> tuple[CostModel, str]:
    """The costs, and a remark when they were not measured on these devices."""
    ranks = config.devices.ranks
    if path is not None:
        costs = CostModel.load(path)
        theirs, ours = costs.shape, architecture.shape
        if theirs != ours:
            other = fingerprint_difference(theirs.fingerprint, ours.fingerprint)
            raise CostError(f"costs {path}", got=f"a model {theirs} ({other})", wanted=ours)
        if costs.cluster.devices != ranks:
            raise CostError(f"costs {path}", got=f"{costs.cluster.devices} ranks", wanted=ranks)
        return costs, ""
    if config.devices.hardware is not None:
        made = formula_costs(config, architecture, ranks)
        what = f"roofline of {config.devices.hardware} in {config.devices.dtype}"
        return made, f"costs: {what}, by data sheets and formulas, not measured"
    measured = newest_costs(config, architecture, ranks)
    if measured is not None:
        return measured, ""
    made = formula_costs(config, architecture, ranks)
    return made, "costs by formula, not measured: headrace profile measures them on these devices"
