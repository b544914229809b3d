"""What ``headrace profile`` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.table import Table

from headrace.costs import CostModel
from headrace.costs.cost_model import MOST_TOKENS
from headrace.costs.limits import Limits, limits_of
from headrace.costs.paradyse import HybridModel, Target
from headrace.costs.quadratic import Linear
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
    """A table with the fit of every measured part (a layer option's forward or backward on one
    group size): its seconds for 1K and 4K tokens, median error, and the lines of its bytes."""
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
            _line_text(fit.kept) if forward else "",
            _line_text(fit.transient) if forward else "",
        )
    return table


def limits_table(costs: CostModel) -> Table:
    """MaxLen and UtilLen of every group size and level, with weights replicated and sharded."""
    workings: tuple[Working, ...] = ("replicated", "sharded")
    names = [f"{what} {working}" for working in workings for what in ("MaxLen", "UtilLen")]
    table = _table(("group", "all layers", *names), left=2)
    for replicated, sharded in zip(*(limits_of(costs, w) for w in workings), strict=True):
        lengths = (*_lengths(replicated), *_lengths(sharded))
        table.add_row(f"cp{replicated.p}", str(replicated.option), *lengths)
    return table


def hybrid_table(model: HybridModel) -> Table:
    """A table with a line for each group size, layer option and quantity: up to how many tokens its
    random forest is used, the degree of the polynomial beyond, and by which share costs jump
    there."""
    table = _table(("group", "part", "of", "forest to", "degree", "jump"), left=3)
    for boundary in model.boundaries():
        table.add_row(
            f"cp{boundary.p}",
            boundary.option,
            _TARGETS[boundary.target],
            f"{boundary.longest:,}",
            str(boundary.degree),
            "-" if math.isinf(boundary.jump) else percent_text(boundary.jump),
        )
    return table


def _line_text(line: Linear) -> str:
    """The bytes of a line over tokens, such as "64 B/token"; what does not grow with tokens stands
    before where it is more than 1,024 tokens take, as a head's logits of one chunk."""
    grows = f"{bytes_text(line.slope)}/token"
    return f"{bytes_text(line.constant)} + {grows}" if line.constant > 1024 * line.slope else grows


def _lengths(row: Limits) -> tuple[str, str]:
    """(MaxLen, UtilLen) of a row as texts: tokens, "no limit", or "-" where there is no UtilLen."""
    max_length = "no limit" if row.max_length >= MOST_TOKENS else f"{row.max_length:,}"
    return max_length, "-" if row.util_length is None else f"{row.util_length:,}"


def _table(columns: Iterable[str], *, left: int) -> Table:
    """An empty table, of which the first ``left`` columns are aligned to the left."""
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right")
    return table
