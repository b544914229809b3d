"""What was measured, and in the same rows what was predicted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from headrace.errors import SpecError

__all__ = ["BUSY", "Row", "Timeline"]

BUSY = ("forward", "backward", "update")
"""Kinds of actions in which a rank works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One action of one rank; seconds since the step began on that rank's clock.

    ``kind`` is that of the action: pull, forward, backward, send, recv, exchange, push or update;
    ``tokens`` is the pack's size for forward and backward, the rows of messages (0 otherwise),
    ``ranks`` the size of the group that met. ``waited_s`` are the seconds of a forward or backward
    in which it waited for weights, which have rows of their own.
    """

    rank: int
    action: str
    kind: str
    start_s: float
    end_s: float
    tokens: int = 0
    ranks: int = 1
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise SpecError(f"row {self.action}", got=f"end {self.end_s} < start {self.start_s}")

    @property
    def seconds(self) -> float:
        """How long the action took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The rows of one step of all ranks, measured by the executor or predicted by the simulator."""

    source: Literal["measured", "predicted"]
    rows: tuple[Row, ...]
    devices: int

    @property
    def seconds(self) -> float:
        """From the start of the step to the end of its last action."""
        return max((row.end_s for row in self.rows), default=0.0)

    @property
    def idle(self) -> float:
        """Fraction of all ranks' time in which no forward, backward or update ran."""
        busy = sum(row.seconds - row.waited_s for row in self.rows if row.kind in BUSY)
        total = self.devices * self.seconds
        return max(0.0, 1 - busy / total) if total > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "source": self.source,
            "devices": self.devices,
            "rows": [asdict(row) for row in self.rows],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Timeline:
        """The inverse of :meth:`to_json`."""
        rows = tuple(Row(**row) for row in value["rows"])
        return cls(source=value["source"], rows=rows, devices=value["devices"])

    def to_chrome_trace(self, step: int = 0) -> list[dict[str, Any]]:
        """Events of the Chrome trace format (opens in Perfetto): ranks as threads of one process
        per source, times in microseconds."""
        return [
            {
                "name": row.action,
                "cat": row.kind,
                "ph": "X",
                "ts": row.start_s * 1e6,
                "dur": row.seconds * 1e6,
                "pid": self.source,
                "tid": row.rank,
                "args": {"tokens": row.tokens, "ranks": row.ranks, "step": step},
            }
            for row in self.rows
        ]
