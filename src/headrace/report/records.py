"""What a run left behind, as frozen values; :mod:`headrace.report.run_folder` reads them.

Numbers that a run did not write (no model FLOPs on this device, no static plan to compare with) are
NaN, so that figures show a gap instead of a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

from headrace.costs.learning.calibration import Calibration
from headrace.spec import Architecture, LayerPlan, Plan, Timeline

__all__ = [
    "Corpus",
    "CostPoint",
    "Costs",
    "Facts",
    "Machine",
    "MicroBatchRow",
    "Planned",
    "RecordedStep",
    "Run",
    "Step",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the run ran. ``cores`` counts the host's, ``memory_bytes`` is the host's memory."""

    host_cpu: str = "unknown"
    cores: int = 0
    memory_bytes: int = 0
    device: str = "unknown"
    python: str = "unknown"
    torch: str = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The corpus in numbers, lengths in tokens.

    ``counts[i]`` documents have a length from ``edges[i]`` to ``edges[i + 1]``; ``context`` is the
    longest sequence the run trains on, ``skipped`` counts documents that were left out.
    """

    name: str = "unknown"
    documents: int = 0
    tokens: int = 0
    median: float = nan
    p90: float = nan
    p99: float = nan
    max: float = nan
    skipped: int = 0
    context: float = nan
    edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoint:
    """One profiled point: ``part`` of a layer under ``option`` over ``p`` ranks (of embedding and
    loss, when the option is ``ends``), ``tokens`` in the pack whose longest sequence has
    ``longest``, measured and fitted seconds."""

    p: int
    option: str
    part: str
    tokens: int
    longest: int
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The cost model the run planned with: ``errors`` are (part, case, median, worst) relative
    errors of its fits."""

    fingerprint: str = "unknown"
    errors: tuple[tuple[str, str, float, float], ...] = ()
    points: tuple[CostPoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is fixed for the whole run. ``capacity_bytes`` is what one rank may use (NaN when the
    run did not say)."""

    name: str
    started: str
    version: str
    machine: Machine
    ranks: int
    seed: int
    config: Mapping[str, Any]
    architecture: Architecture | None
    parameters: int
    corpus: Corpus
    costs: Costs
    capacity_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the planner said of one step before it ran.

    ``waited_s`` is how long training waited for the plan, ``best_static_s`` the predicted seconds
    of the best plan that uses one group size for everything. ``peak_bytes[r]`` belongs to rank r.
    """

    strategy: str = "unknown"
    working: str = "unknown"
    predicted_s: float = nan
    lower_bound_s: float = nan
    gap: float = nan
    planning_s: float = nan
    waited_s: float = nan
    plan_hash: str = ""
    best_static_s: float = nan
    best_static: str = "unknown"
    peak_bytes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRow:
    """One micro-batch that ran: ``ranks`` shared ``tokens`` tokens of ``sequences`` sequences.

    ``layers`` is the text of its layer plan, ``order`` its token order.
    """

    ranks: int
    tokens: int
    longest: int
    sequences: int
    layers: str
    order: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was measured in one step. ``idle`` and ``mfu`` are fractions, ``peak_bytes[r]`` belongs
    to rank r; ``longest`` is the longest sequence in tokens."""

    step: int
    loss: float
    tokens: int
    sequences: int
    longest: int
    lr: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    idle: float
    mfu: float
    peak_bytes: tuple[float, ...]
    micro_batches: tuple[MicroBatchRow, ...]
    planned: Planned

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds of the step."""
        return self.planned.predicted_s / self.step_s if self.step_s > 0 else nan

    @property
    def largest_group(self) -> int:
        """Ranks of the largest group that worked together (1 when the run did not say)."""
        return max((micro.ranks for micro in self.micro_batches), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The timelines of one step; ``static`` is the prediction for the best static plan."""

    step: int
    measured: Timeline
    predicted: Timeline
    static: Timeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder, read.

    ``assigned[(length bin, ranks)]`` counts sequences over all lines of the metrics; bin ``b``
    holds the lengths in ``(2**(b - 1), 2**b]``. ``recomputed[(length bin, level)]`` sums layers
    over the sequences of sampled plans. ``layer_plans[text]`` is what the ``layers`` of the
    micro-batches mean; without those of runs that did not write any. ``plan`` is the plan of the
    step with the longest sequence. ``calibration`` is what was learnt about the costs until the
    last checkpoint. ``notices`` is what the run told while it trained (drift, a raised margin),
    ``notes`` what could not be read.
    """

    folder: Path
    facts: Facts
    steps: tuple[Step, ...]
    assigned: Mapping[tuple[int, int], int] = field(default_factory=dict)
    recomputed: Mapping[tuple[int, str], int] = field(default_factory=dict)
    layer_plans: Mapping[str, LayerPlan] = field(default_factory=dict)
    recorded: RecordedStep | None = None
    plan: Plan | None = None
    calibration: Calibration | None = None
    notices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def longest_step(self) -> Step:
        """The step with the longest sequence, the latest of several."""
        return max(self.steps, key=lambda step: (step.longest, step.step))
