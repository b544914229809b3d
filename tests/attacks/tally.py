"""What came of an attack's cases so far, as a line of a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attacks.attack import NO_START, Attack, Outcome

__all__ = ["Failure", "Tally", "table"]

_KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that was not survived, and the command that runs it again."""

    command: str
    verdict: str
    words: str


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of an attack's cases, the seconds they took and the worst of their errors."""

    attack: Attack
    cases: int = 0
    survived: int = 0
    seconds: float = 0.0
    worst: float | None = None
    verdicts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, outcome: Outcome, seconds: float, command: str) -> None:
        """Count a case."""
        self.cases += 1
        self.seconds += seconds
        self.survived += outcome.survived
        self.verdicts[outcome.verdict] += 1
        if outcome.error is not None:
            self.worst = max(self.worst or 0.0, outcome.error)
        if not outcome.survived and len(self.failures) < _KEPT:
            failure = Failure(command=command, verdict=outcome.verdict, words=outcome.words)
            self.failures.append(failure)

    @property
    def begins(self) -> bool:
        """Whether its cases can be run at all."""
        return not self.verdicts[NO_START]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "attack": self.attack.name,
            "cases": self.cases,
            "survived": self.survived,
            "worst_error": self.worst,
            "seconds": round(self.seconds, 3),
            "verdicts": dict(self.verdicts.most_common()),
            "failures": [
                {"command": f.command, "verdict": f.verdict, "words": f.words}
                for f in self.failures
            ],
        }


def table(tallies: Sequence[Tally]) -> str:
    """The table of some attacks, in Markdown, as documents want it."""
    head = ("attack", "cases", "survived", "worst error", "seconds", "how they ended")
    rows = [head, *(_row(tally) for tally in tallies)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _row(tally: Tally) -> tuple[str, ...]:
    ended = ", ".join(f"{verdict} {count:,}" for verdict, count in tally.verdicts.most_common())
    return (
        tally.attack.name,
        f"{tally.cases:,}",
        f"{tally.survived:,}",
        "" if tally.worst is None else f"{tally.worst:.1e}",
        f"{tally.seconds:,.0f}",
        ended,
    )
