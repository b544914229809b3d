"""Reads the folder of a run: ``run.json``, ``metrics.jsonl``, ``timelines.jsonl``, ``plans.jsonl``
and ``calibration.json``.

The first two must be there; without the others the report leaves out what they would show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Literal

from headrace.costs.learning.calibration import Calibration
from headrace.errors import CostError, DataError, HeadraceError
from headrace.report.json_lines import Fields, read_lines, read_object
from headrace.report.records import (
    Corpus,
    CostPoint,
    Costs,
    Facts,
    Machine,
    MicroBatchRow,
    Planned,
    RecordedStep,
    Run,
    Step,
)
from headrace.spec import Architecture, LayerPlan, Plan, Row, Timeline

__all__ = ["FORMAT", "length_bin", "read_run"]

FORMAT = 1
_PLAN_SAMPLES = 2000


def length_bin(tokens: int) -> int:
    """The bin b of a length: ``2**(b - 1) < tokens <= 2**b``."""
    return max(0, tokens - 1).bit_length()


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises DataError when ``run.json`` or ``metrics.jsonl`` is missing, holds no step, is of
    another format, or has a field of a wrong type. Half a line left by a killed run is skipped
    and noted.
    """
    notes: list[str] = []
    notices: list[str] = []
    facts = _facts(read_object(_required(folder, "run.json")))
    assigned: Counter[tuple[int, int]] = Counter()
    layer_plans: dict[str, LayerPlan] = {}
    steps = _steps(_required(folder, "metrics.jsonl"), assigned, layer_plans, notices, notes)
    longest = max(steps, key=lambda step: (step.longest, step.step))
    plan, recomputed = _plans(folder / "plans.jsonl", longest, len(steps), notes)
    return Run(
        folder=folder, facts=facts, steps=steps, assigned=dict(assigned), recomputed=recomputed,
        layer_plans=layer_plans, plan=plan,
        recorded=_recorded(folder / "timelines.jsonl", steps, notes),
        calibration=_calibration(folder / "calibration.json", notes), notices=tuple(notices),
        notes=tuple(notes),
    )  # fmt: skip


def _required(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise DataError(
            "run folder", got=f"{folder}, which is no folder", wanted="the folder of a run",
            hint="headrace train CONFIG --out DIR writes one",
        )  # fmt: skip
    path = folder / name
    if not path.is_file():
        raise DataError(
            f"run folder {folder}", got=f"no {name}", wanted="run.json and metrics.jsonl",
            hint=f"headrace train CONFIG --out {folder} writes them",
        )  # fmt: skip
    return path


def _facts(run: Fields) -> Facts:
    if run.integer("format") != FORMAT:
        raise DataError(
            f"{run.place}, format", got=run.values["format"], wanted=FORMAT,
            hint="the run is of another version of headrace",
        )  # fmt: skip
    return Facts(
        name=run.text("name"), started=run.text("started"), version=run.text("headrace"),
        machine=_machine(run.object("machine")), ranks=run.integer("ranks", least=1),
        seed=run.integer("seed", 0), config=run.object("config").values,
        architecture=_architecture(run.object("architecture")),
        parameters=run.integer("parameters", 0), corpus=_corpus(run.object("corpus")),
        costs=_costs(run.object("costs")),
        capacity_bytes=run.object("memory").number("capacity_bytes") or nan,
    )  # fmt: skip


def _machine(value: Fields) -> Machine:
    return Machine(
        host_cpu=value.text("host_cpu"), cores=value.integer("cores", 0),
        memory_bytes=value.integer("memory_bytes", 0), device=value.text("device"),
        python=value.text("python"), torch=value.text("torch"),
    )  # fmt: skip


def _architecture(value: Fields) -> Architecture | None:
    if not value.values:
        return None
    try:
        return Architecture.from_json(dict(value.values))
    except (TypeError, HeadraceError) as error:
        raise DataError(value.place, got=str(error), wanted="the JSON form of an architecture")


def _corpus(value: Fields) -> Corpus:
    histogram = value.object("histogram")
    edges, counts = histogram.numbers("edges"), histogram.numbers("counts")
    growing = all(low < high for low, high in pairwise(edges))
    if counts and not (growing and min(counts) >= 0 and len(edges) == len(counts) + 1):
        raise DataError(
            histogram.place, got=f"{len(edges)} edges for {len(counts)} counts",
            wanted="counts >= 0 and one edge more, growing",
        )  # fmt: skip
    return Corpus(
        name=value.text("name"), documents=value.integer("documents", 0),
        tokens=value.integer("tokens", 0), median=value.number("median"),
        p90=value.number("p90"), p99=value.number("p99"), max=value.number("max"),
        skipped=value.integer("skipped", 0), context=value.number("context"), edges=edges,
        counts=tuple(int(count) for count in counts),
    )  # fmt: skip


def _costs(value: Fields) -> Costs:
    error = value.object("error")
    rows = []
    for part in error.values:
        cases = error.object(part)
        for case in cases.values:
            found = cases.object(case)
            rows.append((part, case, found.number("median"), found.number("worst")))
    points = tuple(map(_cost_point, value.objects("points")))
    return Costs(fingerprint=value.text("fingerprint"), errors=tuple(rows), points=points)


def _cost_point(value: Fields) -> CostPoint:
    tokens = value.integer("tokens", least=1)
    return CostPoint(
        p=value.integer("p", least=1), option=value.text("option"), part=value.text("part"),
        tokens=tokens, longest=value.integer("longest", tokens),
        measured_s=value.number("measured_s"), predicted_s=value.number("predicted_s"),
    )  # fmt: skip


def _steps(
    path: Path, assigned: Counter[tuple[int, int]], layer_plans: dict[str, LayerPlan],
    notices: list[str], notes: list[str],
) -> tuple[Step, ...]:  # fmt: skip
    """All steps in order; a step that a resumed run did again counts once, the last time."""
    steps: dict[int, Step] = {}
    again = 0
    for line in read_lines(path, notes):
        step = _step(line, layer_plans)
        again += step.step in steps
        steps[step.step] = step
        assigned.update(_assignments(line))
        notices += [text for text in line.array("notices") if isinstance(text, str)]
    if not steps:
        raise DataError(
            str(path), got="no complete step", wanted="at least one",
            hint="the run ended before its first step",
        )  # fmt: skip
    if again:
        notes.append(f"{path.name}: {again} steps were run again after a resume; the last counts")
    return tuple(steps[number] for number in sorted(steps))


def _assignments(line: Fields) -> Iterable[tuple[int, int]]:
    for pair in line.array("assignment"):
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair))):
            raise DataError(
                f"{line.place}, assignment", got=repr(pair)[:60], wanted="[length, ranks]"
            )
        yield length_bin(pair[0]), pair[1]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _step(line: Fields, layer_plans: dict[str, LayerPlan]) -> Step:
    tokens, seconds = line.integer("tokens"), line.positive("step_s")
    return Step(
        step=line.integer("step"), loss=line.number("loss", signed=True), tokens=tokens,
        sequences=line.integer("sequences", 0), longest=line.integer("longest", 0),
        lr=line.number("lr"), grad_norm=line.number("grad_norm"), step_s=seconds,
        tokens_per_s=line.number("tokens_per_s", tokens / seconds), idle=line.number("idle"),
        mfu=line.number("mfu"), peak_bytes=line.numbers("peak_bytes"),
        micro_batches=tuple(_micro_batch(m, layer_plans) for m in line.objects("micro_batches")),
        planned=_planned(line),
    )  # fmt: skip


def _micro_batch(value: Fields, layer_plans: dict[str, LayerPlan]) -> MicroBatchRow:
    layers = value.text("layers")
    if layers not in layer_plans and value.values.get("layers") is not None:
        layer_plans[layers] = _layer_plan(layers, value.place)
    return MicroBatchRow(
        ranks=value.integer("ranks", least=1), tokens=value.integer("tokens", 0),
        longest=value.integer("longest", 0), sequences=value.integer("sequences", 0),
        layers=layers, order=value.text("order"),
    )  # fmt: skip


def _layer_plan(text: str, place: str) -> LayerPlan:
    try:
        return LayerPlan.parse(text)
    except HeadraceError as error:
        raise DataError(f"{place}, layers", got=str(error), wanted="the text of a layer plan")


def _planned(line: Fields) -> Planned:
    return Planned(
        strategy=line.text("strategy"), working=line.text("working"),
        predicted_s=line.number("predicted_s"), lower_bound_s=line.number("lower_bound_s"),
        gap=line.number("gap", signed=True), planning_s=line.number("planning_s"),
        waited_s=line.number("waited_s"), plan_hash=line.text("plan_hash", ""),
        best_static_s=line.number("best_static_s"), best_static=line.text("best_static"),
        peak_bytes=line.numbers("predicted_peak_bytes"),
    )  # fmt: skip


def _plans(
    path: Path, longest: Step, steps: int, notes: list[str]
) -> tuple[Plan | None, dict[tuple[int, str], int]]:
    """The plan of step ``longest``, and layers per length bin and recompute level over at most
    ``_PLAN_SAMPLES`` plans spread evenly over the run."""
    if not path.is_file():
        notes.append(f"{path.name} is missing: no plan is explained")
        return None, {}
    found: Plan | None = None
    levels: Counter[tuple[int, str]] = Counter()
    stride = max(1, steps // _PLAN_SAMPLES)
    for number, line in enumerate(read_lines(path, notes)):
        if line.integer("step", steps) == longest.step:
            found = _plan(line)
        if number % stride == 0:
            levels.update(_levels(_plan(line)))
    return found, dict(levels)


def _plan(line: Fields) -> Plan:
    try:
        return Plan.from_json(dict(line.values))
    except (HeadraceError, ValueError, AttributeError) as error:
        raise DataError(line.place, got=str(error), wanted="the JSON form of a plan")


def _levels(plan: Plan) -> Counter[tuple[int, str]]:
    levels: Counter[tuple[int, str]] = Counter()
    for micro in plan.micro_batches:
        for tokens in plan.tokens_of(micro):
            for option, layers in micro.layers.counts:
                levels[length_bin(tokens), option.recompute] += layers
    return levels


def _calibration(path: Path, notes: list[str]) -> Calibration | None:
    if not path.is_file():
        return None
    try:
        return Calibration.from_json(dict(read_object(path).values))
    except (DataError, CostError) as error:
        notes.append(f"{path.name} is damaged: what was learnt of the costs is not shown ({error})")
        return None


def _recorded(path: Path, steps: tuple[Step, ...], notes: list[str]) -> RecordedStep | None:
    """The recorded step with the longest sequence; the first step of a run, which pays for
    warming up, only when there is no other."""
    if not path.is_file():
        notes.append(f"{path.name} is missing: no step is drawn")
        return None
    lengths = {step.step: step.longest for step in steps}
    best: tuple[tuple[bool, int, int], Fields] | None = None
    for line in read_lines(path, notes):
        number = line.integer("step")
        rank = (number != steps[0].step, lengths.get(number, 0), number)
        if best is None or rank >= best[0]:
            best = rank, line
    return _recorded_step(best[1]) if best else None


def _recorded_step(line: Fields) -> RecordedStep:
    static = line.object("static")
    return RecordedStep(
        step=line.integer("step"), measured=_timeline(line.object("measured")),
        predicted=_timeline(line.object("predicted")),
        static=_timeline(static) if static.values else None,
    )  # fmt: skip


def _timeline(value: Fields) -> Timeline:
    devices = value.integer("devices", least=1)
    rows = tuple(_row(row, devices) for row in value.objects("rows"))
    source: Literal["measured", "predicted"] = "measured"
    if value.text("source") != source:
        source = "predicted"
    return Timeline(source=source, rows=rows, devices=devices)


def _row(value: Fields, devices: int) -> Row:
    start, rank = value.number("start_s", None), value.integer("rank")
    end = value.number("end_s", None)
    if not (0 <= start <= end and rank < devices):
        raise DataError(
            value.place, got=f"rank {rank} of {devices} from {start} to {end} s",
            wanted="a rank of the run that ends after it starts",
        )  # fmt: skip
    return Row(
        rank=rank, action=value.text("action"), kind=value.text("kind"), start_s=start, end_s=end,
        tokens=value.integer("tokens", 0), ranks=value.integer("ranks", 1, least=1),
        waited_s=value.number("waited_s", 0.0),
    )  # fmt: skip
