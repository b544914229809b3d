"""Reads the folder of a run: ``run.json``, ``metrics.jsonl``, ``timelines.jsonl``, ``plans.jsonl``
and ``calibration.json``.

The first two must be there; without the others the report leaves out what they would show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.costs.calibration import Calibration
from headrace.errors import CostError, DataError
from headrace.report.records import Facts, RecordedStep, Run, StepMetrics
from headrace.report.stored import Object, read_lines, read_object
from headrace.spec import LayerPlan, Plan

__all__ = ["FORMAT", "length_bin", "read_run"]

FORMAT = 1
_PLAN_SAMPLES = 2000  # plans of a long run that are read, about


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered:
    """The field that every line of a run's files has, its step."""

    step: int


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
    facts = read_object(_require_file(folder, "run.json"))
    if facts.values.get("format") != FORMAT:
        raise DataError(
            f"{facts.place}, format",
            got=facts.values.get("format"),
            wanted=FORMAT,
            hint="the run is of another version of headrace",
        )
    assigned: Counter[tuple[int, int]] = Counter()
    layer_plans: dict[str, LayerPlan] = {}
    steps = _steps(_require_file(folder, "metrics.jsonl"), assigned, layer_plans, notices, notes)
    longest = max(steps, key=lambda step: (step.longest, step.step))
    plan, recomputed = _plans(folder / "plans.jsonl", longest, len(steps), notes)
    return Run(
        folder=folder,
        facts=facts.read(Facts),
        steps=steps,
        assigned=assigned,
        recomputed=recomputed,
        layer_plans=layer_plans,
        plan=plan,
        recorded=_longest_recorded(folder / "timelines.jsonl", steps, notes),
        calibration=_calibration(folder / "calibration.json", notes),
        notices=tuple(notices),
        notes=tuple(notes),
    )


def _require_file(folder: Path, name: str) -> Path:
    """The path of a file that every run has; raises DataError where folder or file is missing."""
    if not folder.is_dir():
        raise DataError(
            "run folder",
            got=f"{folder}, which is no folder",
            wanted="the folder of a run",
            hint="headrace train CONFIG --out DIR writes one",
        )
    path = folder / name
    if not path.is_file():
        raise DataError(
            f"run folder {folder}",
            got=f"no {name}",
            wanted="run.json and metrics.jsonl",
            hint=f"headrace train CONFIG --out {folder} writes them",
        )
    return path


def _steps(
    path: Path,
    assigned: Counter[tuple[int, int]],
    layer_plans: dict[str, LayerPlan],
    notices: list[str],
    notes: list[str],
) -> tuple[StepMetrics, ...]:
    """All steps in order. A step that a resumed run did again counts once, the last time. Adds to
    ``assigned`` the sequences by (length bin, ranks), to ``layer_plans`` the plans by their text,
    and to ``notices`` what the run told."""
    steps: dict[int, StepMetrics] = {}
    again = 0  # lines of a step that an earlier line had
    for line in read_lines(path, notes):
        # What the planner said stands in the same object as what was measured.
        step = line.read(StepMetrics, planned=line.values)
        again += step.step in steps
        steps[step.step] = step
        assigned.update(_assignments(line))
        notices += [text for text in _list(line, "notices") if isinstance(text, str)]
        for text in dict.fromkeys(micro.layers for micro in step.micro_batches):
            if text not in layer_plans and text != "unknown":
                layer_plans[text] = line.checked(partial(LayerPlan.parse, text))
    if not steps:
        raise DataError(
            str(path),
            got="no complete step",
            wanted="at least one",
            hint="the run ended before its first step",
        )
    if again:
        notes.append(f"{path.name}: {again} steps were run again after a resume; the last counts")
    return tuple(steps[number] for number in sorted(steps))


def _list(line: Object, key: str) -> list[object]:
    """The list under a key, empty where there is none; raises DataError for anything else."""
    value = line.values.get(key) or []
    if not isinstance(value, list):
        raise DataError(f"{line.place}, {key}", got=repr(value)[:60], wanted="a list")
    return value


def _assignments(line: Object) -> Iterator[tuple[int, int]]:
    """Pairs (length bin, number of ranks) of every sequence of a step. Raises DataError for
    malformed ones."""
    for pair in _list(line, "assignment"):
        match pair:
            case [int(tokens), int(ranks)] if tokens > 0 and ranks > 0:
                yield length_bin(tokens), ranks
            case _:
                raise DataError(
                    f"{line.place}, assignment", got=repr(pair)[:60], wanted="[length, ranks]"
                )


def _plans(
    path: Path, longest: StepMetrics, steps: int, notes: list[str]
) -> tuple[Plan | None, dict[tuple[int, str], int]]:
    """(the plan of the step ``longest`` or None, the number of layers by (length bin, recompute
    level)). The layers are counted in about ``_PLAN_SAMPLES`` plans spread over the run, as there
    may be many."""
    if not path.is_file():
        notes.append(f"{path.name} is missing: no plan is explained")
        return None, {}
    longest_plan: Plan | None = None
    levels: Counter[tuple[int, str]] = Counter()
    stride = max(1, steps // _PLAN_SAMPLES)
    for number, line in enumerate(read_lines(path, notes)):
        wanted = line.values.get("step") == longest.step
        if not (wanted or number % stride == 0):
            continue
        plan = line.checked(partial(Plan.from_json, dict(line.values)))
        longest_plan = plan if wanted else longest_plan
        if number % stride == 0:
            levels.update(_levels(plan))
    return longest_plan, dict(levels)


def _levels(plan: Plan) -> Counter[tuple[int, str]]:
    """How many layers ran at each recompute level, by (bin of the sequence's length, level)."""
    levels: Counter[tuple[int, str]] = Counter()
    for micro in plan.micro_batches:
        for tokens in plan.tokens_of(micro):
            for option, layers in micro.layers.counts:
                levels[length_bin(tokens), option.recompute] += layers
    return levels


def _calibration(path: Path, notes: list[str]) -> Calibration | None:
    """What a run learnt of its costs; None where nothing was written, or with a note where it is
    damaged."""
    if not path.is_file():
        return None
    try:
        return Calibration.from_json(dict(read_object(path).values))
    except (DataError, CostError) as error:
        notes.append(f"{path.name} is damaged: what was learnt of the costs is not shown ({error})")
        return None


def _longest_recorded(
    path: Path, steps: tuple[StepMetrics, ...], notes: list[str]
) -> RecordedStep | None:
    """The recorded step with the longest sequence; the first step of a run, which pays for
    warming up, only when there is no other."""
    if not path.is_file():
        notes.append(f"{path.name} is missing: no step is drawn")
        return None
    lengths = {step.step: step.longest for step in steps}
    # (whether it is not the first step, tokens of its longest sequence, step), and its line.
    best: tuple[tuple[bool, int, int], Object] | None = None
    for line in read_lines(path, notes):
        number = line.read(_Numbered).step
        rank = (number != steps[0].step, lengths.get(number, 0), number)
        if best is None or rank >= best[0]:
            best = rank, line
    return best[1].read(RecordedStep) if best else None
