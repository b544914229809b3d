"""What ``headrace profile`` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.table import Table

from headrace.costs import CostModel
from headrace.costs.cost_model import MOST_TOKENS
from headrace.costs.limits import Limits, limits_of
from headrace.costs.paradyse import HybridModel, Target
from headrace.costs.sources.measured import FittedPart
from headrace.spec.plan import Working
from headrace.units import bytes_text, percent_text, seconds_text

__all__ = ["fits_table", "hybrid_table", "limits_table"]

_TARGETS: dict[Target, str] = {
    "forward_s": "forward",
    "backward_s": "backward",
    "kept_bytes": "kept",
    "transient_bytes": "in passing",
}


def fits_table(fits: Iterable[FittedPart]) -> Table:
    """Seconds and bytes of every measured part, and how far the fit is off."""
    columns = ("group", "part", "1K tokens", "4K tokens", "error", "kept", "in passing")
    table = _table(columns, left=2)
    for fit in fits:
        forward = fit.part == "forward"
        table.add_row(
            f"cp{fit.p}",
            f"{fit.option} {fit.part}",
            seconds_text(fit.curve([1024])),
            seconds_text(fit.curve([4096])),
            percent_text(fit.error.median),
            f"{bytes_text(fit.kept.slope)}/token" if forward else "",
            f"{bytes_text(fit.transient.slope)}/token" if forward else "",
        )
    return table


def limits_table(costs: CostModel) -> Table:
    """MaxLen and UtilLen of every group size and level, with weights replicated and sharded."""
    held: tuple[Working, ...] = ("replicated", "sharded")
    names = [f"{what} {working}" for working in held for what in ("MaxLen", "UtilLen")]
    table = _table(("group", "all layers", *names), left=2)
    for rows in zip(*(limits_of(costs, working) for working in held), strict=True):
        lengths = (text for row in rows for text in _lengths(row))
        table.add_row(f"cp{rows[0].p}", str(rows[0].option), *lengths)
    return table


def hybrid_table(model: HybridModel) -> Table:
    """Where every pair switches from its forest to its polynomial."""
    table = _table(("group", "part", "of", "forest to", "degree", "jump"), left=3)
    for found in model.boundaries():
        table.add_row(
            f"cp{found.p}",
            found.option,
            _TARGETS[found.target],
            f"{found.longest:,}",
            str(found.degree),
            "-" if math.isinf(found.jump) else percent_text(found.jump),
        )
    return table


def _lengths(row: Limits) -> tuple[str, str]:
    most = "no limit" if row.max_length >= MOST_TOKENS else f"{row.max_length:,}"
    return most, "-" if row.util_length is None else f"{row.util_length:,}"


def _table(columns: Iterable[str], *, left: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right")
    return table
