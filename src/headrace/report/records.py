"""What a run left behind, as frozen values; :mod:`headrace.report.run_reader` reads them.

The JSON objects of a run have the keys of these fields, where a field names no other. Numbers that
a run did not write (no model FLOPs on this device, no static plan to compare with) are NaN, so that
figures show a gap instead of a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasPath, BeforeValidator, Field

from headrace.costs.calibration import Calibration
from headrace.errors import SpecError
from headrace.report.stored import Amount, Count, Number, Ranks
from headrace.spec import Architecture, LayerPlan, Plan, Timeline

__all__ = [
    "CorpusStatistics",
    "CostPoint",
    "Costs",
    "Facts",
    "Machine",
    "MicroBatchRow",
    "PlanMetrics",
    "RecordedStep",
    "RelativeErrors",
    "Run",
    "StepMetrics",
]


def _within(key: str, *keys: str) -> Any:
    """A field that is stored at a path of keys in nested objects, not under its own name."""
    return Field(validation_alias=AliasPath(key, *keys))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the run ran. ``cores`` counts the host's, ``memory_bytes`` is the host's memory."""

    host_cpu: str = "unknown"
    cores: Count = 0
    memory_bytes: Count = 0
    device: str = "unknown"
    python: str = "unknown"
    torch: str = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusStatistics:
    """The corpus in numbers, lengths in tokens.

    ``counts[i]`` documents have a length from ``edges[i]`` to ``edges[i + 1]``; ``context`` is the
    longest sequence the run trains on, ``skipped`` counts documents that were left out.
    """

    name: str = "unknown"
    documents: Count = 0
    tokens: Count = 0
    median: Amount = nan
    p90: Amount = nan
    p99: Amount = nan
    max: Amount = nan
    skipped: Count = 0
    context: Amount = nan
    edges: Annotated[tuple[Amount, ...], _within("histogram", "edges")] = ()
    counts: Annotated[tuple[Count, ...], _within("histogram", "counts")] = ()

    def __post_init__(self) -> None:
        """Raise SpecError unless the edges of the histogram rise and enclose its counts."""
        growing = all(low < high for low, high in pairwise(self.edges))
        if self.counts and not (growing and len(self.edges) == len(self.counts) + 1):
            raise SpecError(
                "histogram",
                got=f"{len(self.edges)} edges for {len(self.counts)} counts",
                wanted="one edge more than counts, growing",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoint:
    """The seconds, measured and fitted, of one profiled point: ``part`` of a layer with ``option``
    (of embedding and loss where that is ``ends``) on groups of ``p`` ranks. ``tokens`` are those of
    the pack, ``longest`` those of its longest sequence, 0 where it has one sequence only."""

    p: Ranks
    option: str = "unknown"
    part: str = "unknown"
    tokens: Count
    longest: Count = 0
    measured_s: Amount = nan
    predicted_s: Amount = nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeErrors:
    """The median and the worst relative error of one fit."""

    median: Amount = nan
    worst: Amount = nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The cost model the run planned with: ``errors[part][case]`` are those of its fits, and
    ``compared`` says how far the forecast from two layers was from the whole model."""

    fingerprint: str = "unknown"
    compared: str = ""
    errors: Annotated[Mapping[str, Mapping[str, RelativeErrors]], _within("error")] = field(
        default_factory=dict
    )
    points: tuple[CostPoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is fixed for the whole run. ``capacity_bytes`` is what one rank may use (NaN when the
    run did not say)."""

    name: str = "unknown"
    started: str = "unknown"
    version: Annotated[str, _within("headrace")] = "unknown"
    machine: Machine = Machine()
    ranks: Ranks
    seed: Count = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    architecture: Architecture | None = None
    parameters: Count = 0
    corpus: CorpusStatistics = CorpusStatistics()
    costs: Costs = field(default_factory=Costs)
    # A capacity of 0 means that the run did not say.
    capacity_bytes: Annotated[
        Amount, BeforeValidator(lambda size: size or None), _within("memory", "capacity_bytes")
    ] = nan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMetrics:
    """What the planner said of one step before it ran.

    ``waited_s`` is how long training waited for the plan, ``best_static_s`` the predicted seconds
    of the best plan that uses one group size for everything (NaN where no comparison was made, or
    not in time). ``static_s`` are those of each size (``cp2``) that held the batch, which runs of
    earlier versions wrote. ``peak_bytes[r]`` belongs to rank r.
    """

    strategy: str = "unknown"
    predicted_s: Amount = nan
    lower_bound_s: Amount = nan
    gap: Number = nan
    planning_s: Amount = nan
    waited_s: Amount = nan
    best_static_s: Amount = nan
    best_static: str = "unknown"
    static_s: Mapping[str, Amount] = field(default_factory=dict)
    peak_bytes: Annotated[tuple[Amount, ...], _within("predicted_peak_bytes")] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRow:
    """One micro-batch that ran: ``ranks`` shared ``tokens`` tokens of ``sequences`` sequences.

    ``layers`` is the text of its layer plan, ``order`` its token order.
    """

    ranks: Ranks
    tokens: Count = 0
    longest: Count = 0
    sequences: Count = 0
    layers: str = "unknown"
    order: str = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What was measured in one step. ``idle`` and ``mfu`` are fractions, ``peak_bytes[r]`` belongs
    to rank r; ``longest`` is the longest sequence in tokens."""

    step: Count
    loss: Number = nan
    tokens: Count
    longest: Count = 0
    step_s: Amount
    tokens_per_s: Amount = nan
    idle: Amount = nan
    mfu: Amount = nan
    peak_bytes: tuple[Amount, ...] = ()
    micro_batches: tuple[MicroBatchRow, ...] = ()
    planned: PlanMetrics

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise SpecError("step_s", got=self.step_s, wanted="above 0")

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds of the step."""
        return self.planned.predicted_s / self.step_s

    @property
    def largest_group(self) -> int:
        """Ranks of the largest group that worked together (1 when the run did not say)."""
        return max((micro.ranks for micro in self.micro_batches), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The timelines of one step; ``static`` is the prediction for the best static plan."""

    step: Count
    measured: Timeline
    predicted: Timeline
    static: Timeline | None = None

    def __post_init__(self) -> None:
        """Raise SpecError for an action that ends before it starts or is of a rank that the run
        does not have."""
        for timeline in filter(None, (self.measured, self.predicted, self.static)):
            for row in timeline.rows:
                if not (row.start_s <= row.end_s and row.rank < timeline.devices):
                    raise SpecError(
                        timeline.source,
                        wanted="a rank of the run that ends after it starts",
                        got=f"rank {row.rank} of {timeline.devices} from {row.start_s} to "
                        f"{row.end_s} s",
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder, read.

    ``assigned[(length bin, ranks)]`` counts sequences over all lines of the metrics; bin ``b``
    holds the lengths in ``(2**(b - 1), 2**b]``. ``recomputed[(length bin, level)]`` sums layers
    over the sequences of sampled plans. ``layer_plans[text]`` is the layer plan that the ``layers``
    of micro-batches name; empty where a run wrote none. ``plan`` is the plan of the
    step with the longest sequence. ``calibration`` is what was learnt about the costs until the
    last checkpoint. ``notices`` is what the run told while it trained (drift, a raised margin),
    ``notes`` what could not be read.
    """

    folder: Path
    facts: Facts
    steps: tuple[StepMetrics, ...]
    assigned: Mapping[tuple[int, int], int] = field(default_factory=dict)
    recomputed: Mapping[tuple[int, str], int] = field(default_factory=dict)
    layer_plans: Mapping[str, LayerPlan] = field(default_factory=dict)
    recorded: RecordedStep | None = None
    plan: Plan | None = None
    calibration: Calibration | None = None
    notices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def warm(self) -> tuple[StepMetrics, ...]:
        """The steps without the first, which pays for warming up, when there are others."""
        return self.steps[1:] or self.steps

    @property
    def longest_step(self) -> StepMetrics:
        """The step with the longest sequence, the latest of several."""
        return max(self.steps, key=lambda step: (step.longest, step.step))
