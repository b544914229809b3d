"""Values of a step: what was asked and planned, what ran out of memory, what each rank tells of it,
and what came of it.

The first rank gets sums of all ranks' rows, and of some steps the rows. Ranks send float64 as they
lie in memory, which is the same on machines of one kind:

    own      seconds of the step and of waiting for its plan, peak bytes
    ends     when its last action ended, seconds of its forwards, backwards and update, 0
    works    micro-batch, 2 stage + (0 forward, 1 backward), seconds without waiting for weights;
             one line for each forward and backward
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.spec.lengths import Lengths
from headrace.spec.measurement import BUSY, Row, Timeline
from headrace.spec.plan import Plan
from headrace.spec.program import Backward, Forward, parse_action

__all__ = [
    "BestStatic",
    "Exhausted",
    "PlanRequest",
    "Planned",
    "RankTimes",
    "Step",
    "StepTimes",
    "packed_rows",
    "plan_metrics",
    "rows_of_packed",
]

_WIDTH = 3  # numbers of a line that a rank sends
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One rank's part of a step: its seconds, those in which it waited for the plan, its peak
    bytes, and its ``rows``."""

    step_s: float
    waited_s: float
    peak_bytes: int
    rows: tuple[Row, ...]

    def to_bytes(self) -> bytes:
        """The times as float64 bytes, three numbers a line: one line ``own``, one ``ends``, then
        one ``works`` for each forward and backward, as the module's docstring lists them."""
        busy = [row for row in self.rows if row.kind in BUSY]
        end_s = max((row.end_s for row in self.rows), default=0.0)
        lines = [
            (self.step_s, self.waited_s, float(self.peak_bytes)),
            (end_s, sum(row.seconds - row.waited_s for row in busy), 0.0),
        ]
        for row in busy:
            action = parse_action(row.action)
            if isinstance(action, Forward | Backward):
                part = 2 * action.stage + isinstance(action, Backward)
                lines.append((action.micro_batch, part, row.seconds - row.waited_s))
        return np.array(lines, dtype=np.float64).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What all ranks measured in a step: the longest ``step_s`` and ``waited_s`` of a rank, the
    ``peak_bytes`` of each, the fraction ``idle`` of all ranks' time in which no forward, backward
    or update ran, and for each of the ``micro_batches``, by index, the seconds of its forward and
    backward, summed over the stages.

    A member of a group that arrives early waits in the group's first collective, and its row is
    longer by that: of each stage the shortest counts, which is the last member's.
    """

    step_s: float
    waited_s: float
    peak_bytes: tuple[int, ...]
    idle: float
    micro_batches: Mapping[int, float]

    @classmethod
    def of(cls, told: Sequence[bytes]) -> StepTimes:
        """The times of a step, from the bytes ``told`` by :meth:`RankTimes.to_bytes` of all ranks,
        in rank order."""
        tables = [np.frombuffer(data, dtype=np.float64).reshape(-1, _WIDTH) for data in told]
        # The lines `own` and `ends` of all ranks, [ranks, 3] each.
        own = np.stack([table[0] for table in tables])
        ends = np.stack([table[1] for table in tables])
        total_s = len(tables) * float(ends[:, 0].max())
        busy_s = float(ends[:, 1].sum())
        idle = max(0.0, 1 - busy_s / total_s) if total_s > 0 else 0.0
        return cls(
            step_s=float(own[:, 0].max()),
            waited_s=float(own[:, 1].max()),
            peak_bytes=tuple(map(int, own[:, 2].tolist())),
            idle=idle,
            micro_batches=_micro_batches(np.concatenate([table[2:] for table in tables])),
        )


def _micro_batches(works: Floats) -> dict[int, float]:
    """Seconds of each micro-batch by its index: the sum over its parts (stage, forward or backward)
    of the shortest time that a rank had for the part. ``works`` has columns (micro-batch, part,
    seconds) and a row for each rank and part."""
    # Sorted by micro-batch, part, seconds, the first row of each part is its shortest time.
    order = np.lexsort((works[:, 2], works[:, 1], works[:, 0]))
    works = works[order]
    first = np.ones(len(works), dtype=bool)
    first[1:] = (works[1:, :2] != works[:-1, :2]).any(axis=1)
    index, seconds = works[first, 0].astype(np.int64), works[first, 2]
    numbers, group = np.unique(index, return_inverse=True)
    sums = np.bincount(group, weights=seconds, minlength=len(numbers))
    return dict(zip(numbers.tolist(), sums.tolist(), strict=True))


def packed_rows(rows: Sequence[Row]) -> bytes:
    """All rows of one rank as bytes: a line of JSON with pairs (action, kind), then for each row
    five float64: start, end and waited seconds, tokens, ranks."""
    texts = json.dumps([(row.action, row.kind) for row in rows]).encode()
    numbers = [(row.start_s, row.end_s, row.waited_s, row.tokens, row.ranks) for row in rows]
    return texts + b"\n" + np.array(numbers, dtype=np.float64).tobytes()


def rows_of_packed(told: bytes, rank: int) -> tuple[Row, ...]:
    """The rows of one rank that :func:`packed_rows` packed."""
    texts, _, numbers = told.partition(b"\n")
    lines = np.frombuffer(numbers, dtype=np.float64).reshape(-1, 5).tolist()
    return tuple(
        Row(
            rank=rank,
            action=action,
            kind=kind,
            start_s=start_s,
            end_s=end_s,
            waited_s=waited_s,
            tokens=int(tokens),
            ranks=int(ranks),
        )
        for (action, kind), (start_s, end_s, waited_s, tokens, ranks) in zip(
            json.loads(texts), lines, strict=True
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the plan of one step follows from, besides costs and options.

    Attributes:
        lengths: The batch.
        step: The number of the step; where strategies take turns it says whose turn it is.
        ratio: Measured over predicted seconds so far, which all predicted seconds are multiplied
            by; that of the costs where it is None.
        margin: The fraction of a rank's memory that the plan leaves free; that of the costs where
            it is None.
        previous: The plan of the step before, whose layers are kept where plans are smoothed.
        drawn: Whether the step will be drawn, for which the timeline of all ranks is predicted.
        forward: Whether the plan is of forwards alone, without gradients, and not of a step.
    """

    lengths: Lengths
    step: int = 0
    ratio: float | None = None
    margin: float | None = None
    previous: Plan | None = None
    drawn: bool = False
    forward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what its planner expects of it.

    Attributes:
        plan: The plan.
        predicted: The predicted timeline of all ranks, where the step is drawn.
        peak_bytes: The most that each rank is expected to hold.
        planning_s: Seconds that planning took.
        micro_batch_s: Predicted seconds of the micro-batches.
        request: What was asked for; known on the rank that plans.
    """

    plan: Plan
    predicted: Timeline | None
    peak_bytes: tuple[int, ...]
    planning_s: float
    micro_batch_s: Sequence[float] = ()
    request: PlanRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BestStatic:
    """What the best plan with one group size would take for the batch of a step.

    Attributes:
        strategy: Its groups, such as ``4*cp2``.
        seconds: Its predicted seconds.
        predicted: The predicted timeline of all ranks, where the step is drawn.
    """

    strategy: str
    seconds: float
    predicted: Timeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A finished step: its metrics, plan and timelines.

    What is known of all ranks, most metrics and ``times``, is known on the first one; on others
    the metrics are those that every rank has by itself: step, epoch, loss, grad_norm, lr and
    out_of_memory. ``micro_batch_s`` are the predicted seconds of the plan's micro-batches;
    ``measured`` and ``predicted`` are there where the step is drawn. ``best_static`` is what the
    plan is compared with, where that is known when the step is written down.
    """

    number: int
    metrics: Mapping[str, Any]
    plan: Plan
    micro_batch_s: Sequence[float]
    times: StepTimes | None
    measured: Timeline | None
    predicted: Timeline | None
    best_static: BestStatic | None = None

    def compared_with(self, best: BestStatic) -> Step:
        """The same step beside the best static plan of its batch, which its metrics name too."""
        told = {"best_static": best.strategy, "best_static_s": best.seconds}
        return replace(self, metrics={**self.metrics, **told}, best_static=best)

    @property
    def loss(self) -> float:
        """The mean loss of the batch's tokens, before the step."""
        return float(self.metrics["loss"])

    @property
    def seconds(self) -> float:
        """What the step took, on the slowest rank; known on the first rank."""
        return float(self.metrics["step_s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """Ranks that ran out of memory in one step, and in which action each; the same on all."""

    actions: tuple[tuple[int, str], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ran out of memory."""
        return tuple(rank for rank, _ in self.actions)

    def __str__(self) -> str:
        return ", ".join(f"rank {rank} ran out of memory in {text}" for rank, text in self.actions)


def plan_metrics(planned: Planned, times: StepTimes) -> dict[str, Any]:
    """The metrics of a step by name that only the first rank knows: what its plan expected and what
    was measured on all ranks. ``micro_batches`` describes each micro-batch, ``assignment`` has a
    pair (tokens, ranks of its group) for each sequence."""
    plan, step_s, waited_s = planned.plan, times.step_s, times.waited_s
    found = {
        "tokens": plan.lengths.total,
        "sequences": len(plan.lengths),
        "longest": plan.lengths.longest,
        "step_s": step_s,
        "tokens_per_s": plan.lengths.total / (step_s + waited_s),
        "idle": times.idle,
        "strategy": str(plan.strategy),
        "working": plan.working,
        "predicted_s": plan.predicted_s,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "planning_s": planned.planning_s,
        "waited_s": waited_s,
        "waited": waited_s / (step_s + waited_s),
        "plan_hash": plan.hash,
        "peak_bytes": list(times.peak_bytes),
        "predicted_peak_bytes": list(planned.peak_bytes),
        "micro_batches": [
            {
                "ranks": len(plan.pipelines[m.pipeline].ranks),
                "tokens": sum(plan.tokens_of(m)),
                "longest": max(plan.tokens_of(m)),
                "sequences": len(m.sequences),
                "layers": str(m.layers),
                "order": m.order,
            }
            for m in plan.micro_batches
        ],
        "assignment": [
            [plan.lengths.tokens[i], len(plan.pipelines[m.pipeline].ranks)]
            for m in plan.micro_batches
            for i in m.sequences
        ],
    }
    if planned.request is not None and planned.request.margin is not None:
        found["memory_margin"] = planned.request.margin
    return found
