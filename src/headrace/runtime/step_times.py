"""What the first rank gets to know of a step: sums of all ranks' rows, and of some steps the rows.

Ranks send float64 as they lie in memory, which is the same on machines of one kind:

    own      seconds of the step and of waiting for its plan, peak bytes
    ends     when its last action ended, seconds of its forwards, backwards and update, 0
    works    micro-batch, 2 stage + (0 forward, 1 backward), seconds without waiting for weights;
             one line for each forward and backward
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.spec.measurement import BUSY, Row
from headrace.spec.program import Backward, Forward, parse_action

__all__ = ["RankTimes", "StepTimes", "packed_rows", "rows_of_packed"]

_WIDTH = 3
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
        """Three numbers a line, as the module says."""
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
    """Of all ranks: the longest ``step_s`` and ``waited_s``, ``peak_bytes`` of each, the fraction
    of all ranks' time in which no forward, backward or update ran, and the seconds of the forward
    and backward of micro-batches over their stages.

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
        """What all ranks' :meth:`RankTimes.to_bytes` say together."""
        ranks = [np.frombuffer(one, dtype=np.float64).reshape(-1, _WIDTH) for one in told]
        own, ends = np.stack([rank[0] for rank in ranks]), np.stack([rank[1] for rank in ranks])
        total_s = len(ranks) * float(ends[:, 0].max())
        idle = max(0.0, 1 - float(ends[:, 1].sum()) / total_s) if total_s > 0 else 0.0
        return cls(
            step_s=float(own[:, 0].max()),
            waited_s=float(own[:, 1].max()),
            peak_bytes=tuple(map(int, own[:, 2].tolist())),
            idle=idle,
            micro_batches=_micro_batches(np.concatenate([rank[2:] for rank in ranks])),
        )


def _micro_batches(works: Floats) -> dict[int, float]:
    """Seconds of each micro-batch: the sum over its parts of the shortest of each."""
    order = np.lexsort((works[:, 2], works[:, 1], works[:, 0]))
    works = works[order]
    first = np.ones(len(works), dtype=bool)
    first[1:] = (works[1:, :2] != works[:-1, :2]).any(axis=1)
    index, seconds = works[first, 0].astype(np.int64), works[first, 2]
    numbers, place = np.unique(index, return_inverse=True)
    sums = np.bincount(place, weights=seconds, minlength=len(numbers))
    return dict(zip(numbers.tolist(), sums.tolist(), strict=True))


def packed_rows(rows: Sequence[Row]) -> bytes:
    """All rows of one rank: a line of texts, then five numbers each."""
    texts = json.dumps([(row.action, row.kind) for row in rows]).encode()
    numbers = [(row.start_s, row.end_s, row.waited_s, row.tokens, row.ranks) for row in rows]
    return texts + b"\n" + np.array(numbers, dtype=np.float64).tobytes()


def rows_of_packed(told: bytes, rank: int) -> tuple[Row, ...]:
    """The inverse of :func:`packed_rows`."""
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
