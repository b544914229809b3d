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
    """One action of one rank.

    Attributes:
        rank: The rank.
        action: The action in words, as programs write it.
        kind: Its kind: pull, forward, backward, send, recv, exchange, push or update.
        start_s: Seconds from the start of the step to that of the action, on the rank's own clock.
        end_s: Seconds from the start of the step to the end of the action.
        tokens: Tokens of the pack for forward and backward, rows of messages, else 0.
        ranks: Ranks of the group that met.
        waited_s: Seconds of a forward or backward in which it waited for weights, which have rows
            of their own.

    Raises:
        SpecError: For an end before the start.
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
        """The seconds that the action took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What every rank did in one step, and when.

    Attributes:
        source: Whether a run ``measured`` the rows or the simulator ``predicted`` them.
        rows: The actions of all ranks.
        devices: Ranks of the step, those without rows too.
    """

    source: Literal["measured", "predicted"]
    rows: tuple[Row, ...]
    devices: int

    @property
    def seconds(self) -> float:
        """Seconds from the start of the step to the end of its last action."""
        return max((row.end_s for row in self.rows), default=0.0)

    @property
    def idle(self) -> float:
        """The fraction of all ranks' time in which no forward, backward or update ran."""
        busy = sum(row.seconds - row.waited_s for row in self.rows if row.kind in BUSY)
        total = self.devices * self.seconds
        return max(0.0, 1 - busy / total) if total > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """The timeline as JSON.

        Returns:
            An object that :meth:`from_json` reads back.
        """
        return {
            "source": self.source,
            "devices": self.devices,
            "rows": [asdict(row) for row in self.rows],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Timeline:
        """Read what :meth:`to_json` gave.

        Args:
            value: The JSON object.

        Returns:
            The timeline.
        """
        rows = tuple(Row(**row) for row in value["rows"])
        return cls(source=value["source"], rows=rows, devices=value["devices"])

    def to_chrome_trace(self, step: int = 0) -> list[dict[str, Any]]:
        """Events of the Chrome trace format, which Perfetto opens.

        Args:
            step: The number of the step, which every event carries.

        Returns:
            An event per row: ranks are threads of one process per source, times in microseconds.
        """
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
