"""A paper's claims beside what headrace gets: one row each, the same for all papers.

A script of a paper makes its rows with :class:`Claim` and ends in :func:`finish`, which shows them,
and writes them where ``--json`` says. ``headrace papers`` runs the scripts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from headrace.native.machine import machine_facts

__all__ = ["Claim", "finish", "options"]

How = Literal["measured", "simulated", "counted"]

_EVEN = 0.02  # a ratio this near to one is neither ahead nor behind
_TITLES = ("claim", "theirs", "ours", "ours/theirs", "", "how", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number of a paper, and the same of headrace.

    Attributes:
        where: Figure or table, and the cell of it.
        what: What the number is, such as ``inter over bucket parallel``.
        unit: Of both numbers: ``times``, ``tokens``, ``s``, ``bytes``, ``fraction``.
        theirs: The published number; of a range the least and the most; None where the paper has a
            picture only.
        ours: Likewise.
        how: ``measured`` on the machine of the results, ``simulated`` with ``costs``, or
            ``counted`` exactly.
        costs: What prices it, or on what it ran.
        less: Whether less is better.
        why: Why it is behind, or cannot be compared; the bound, where that is the reason.
    """

    where: str
    what: str
    unit: str
    theirs: float | tuple[float, float] | None
    ours: float | tuple[float, float]
    how: How
    costs: str
    less: bool = False
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as good ours is as theirs; of ranges the better ends are compared."""
        if self.theirs is None:
            return None
        pick = min if self.less else max
        theirs = pick(_ends(self.theirs))
        ours = pick(_ends(self.ours))
        return theirs / ours if self.less else ours / theirs

    @property
    def verdict(self) -> str:
        """``ahead``, ``even``, ``behind``, or nothing where theirs is not known."""
        if self.ratio is None:
            return ""
        if abs(self.ratio - 1) <= _EVEN:
            return "even"
        return "ahead" if self.ratio > 1 else "behind"


def _ends(number: float | tuple[float, float]) -> tuple[float, float]:
    return number if isinstance(number, tuple) else (number, number)


def _text(number: float | tuple[float, float] | None, unit: str) -> str:
    if number is None:
        return "not given"
    if isinstance(number, tuple):
        return f"{_text(number[0], unit)} to {_text(number[1], unit)}"
    if unit == "fraction":
        return f"{number:.1%}"
    if unit == "tokens":
        return f"{number:,.0f}"
    if unit == "bytes":
        return f"{number / 2**30:,.2f} GiB"
    return f"{number:,.3g}{'x' if unit == 'times' else f' {unit}'}"


def options(document: str | None) -> argparse.ArgumentParser:
    """The parser of a paper's script, with the options that all of them have."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cells and repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser


def finish(paper: str, claims: Sequence[Claim], o: argparse.Namespace, **more: Any) -> int:
    """Shows the rows, and writes them with ``more`` facts where ``o.json`` says."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(title=paper, title_justify="left", box=None, pad_edge=False)
    for title in _TITLES:
        table.add_column(title, justify="right" if "ours" in title or title == "theirs" else "left")
    for claim in claims:
        table.add_row(
            f"{claim.where}: {claim.what}",
            _text(claim.theirs, claim.unit),
            _text(claim.ours, claim.unit),
            "" if claim.ratio is None else f"{claim.ratio:.2f}",
            claim.verdict,
            f"{claim.how}, {claim.costs}",
            claim.why,
        )
    console.print(table, crop=False)
    if o.json:
        rows = [
            asdict(claim) | {"ratio": claim.ratio, "verdict": claim.verdict} for claim in claims
        ]
        found = {"paper": paper, "machine": machine_facts("cpu"), "quick": o.quick, "claims": rows}
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps(found | more, indent=1) + "\n")
    return 0
