"""``headrace verify latte``: models on shards of their axes against one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from headrace.adopt.axis_examples import EXAMPLES, AxisExample
from headrace.cli.app import Output
from headrace.cli.foreign_models import made
from headrace.cli.verify_model import on_all

__all__ = ["axis_examples", "verify_axes"]

_EXACT, _SINGLE = 1e-10, 1e-6
"""Tolerances: in double precision, and where some of a model is in single precision."""

_Examples = Mapping[str, Callable[[], AxisExample]]
"""By the name of each case, a function that makes its example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The largest relative errors of one case of a model."""

    model: str
    ranks: int
    case: str
    loss_error: float
    gradient_error: float


def axis_examples(name: str) -> _Examples:
    """The examples to verify for a name: those that this library has under it, or the AxisExample
    that ``MODULE:FUNCTION`` makes. Empty where the name is of a model of tokens."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    if ":" in name and isinstance(made(name), AxisExample):
        return {name.rpartition(":")[2]: lambda: made(name)}
    return {}


def verify_axes(
    name: str, examples: _Examples, *, ranks: Sequence[int], tolerance: float | None, as_json: bool
) -> int:
    """Compare loss and gradients on each number of ``ranks`` with those of one process. The exit
    code is 0 when they are equal, 1 when they are not, 2 when the model is refused."""
    first = next(iter(examples.values()))()  # raises at once where a package is missing
    if tolerance is None:
        tolerance = _SINGLE if first.single else _EXACT
    rows = on_all(name, ranks, lambda count: _rows(name, count, examples))
    if rows is None:
        return 2
    found = [_Row(**row) for row in rows]
    good = all(max(row.loss_error, row.gradient_error) <= tolerance for row in found)
    if as_json:
        print(json.dumps({"exact": good, "cases": [asdict(row) for row in found]}, indent=1))
    else:
        _print(found, tolerance)
        worst = max(max(row.loss_error, row.gradient_error) for row in found)
        print(f"tolerance {tolerance:.0e}, worst {worst:.1e}: " + ("exact" if good else "FAILED"))
    return 0 if good else 1


def _rows(name: str, ranks: int, examples: _Examples) -> Iterator[_Row]:
    """Run every example on this rank's world; yields the errors of each. Collective."""
    for case, make in examples.items():
        example = make()
        loss, gradient = example.errors(copy.deepcopy(example.model))
        yield _Row(model=name, ranks=ranks, case=case, loss_error=loss, gradient_error=gradient)


def _print(found: Sequence[_Row], tolerance: float) -> None:
    """Print the errors of every case against the tolerance."""
    table = Table(box=None, pad_edge=False)
    for title in ("model", "ranks", "case", "loss error", "gradient error", "verdict"):
        table.add_column(title, justify="right" if "err" in title or title == "ranks" else "left")
    for row in found:
        fine = max(row.loss_error, row.gradient_error) <= tolerance
        table.add_row(
            row.model,
            str(row.ranks),
            row.case,
            f"{row.loss_error:.1e}",
            f"{row.gradient_error:.1e}",
            "exact" if fine else "WRONG",
        )
    Output(highlight=False, width=110).print(table)
