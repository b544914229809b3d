"""Tables of ``headrace profile``: what they say of costs that are known."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from headrace.cli.profile_tables import fits_table, hybrid_table, limits_table
from headrace.costs import Linear, OptionCost, synthetic_costs
from headrace.costs.cost_model import MOST_TOKENS
from headrace.costs.limits import limits_of
from headrace.costs.paradyse import fit_hybrid
from headrace.costs.sources.measured import fit_parts
from headrace.spec.profile import ENDS
from headrace.units import GIB
from profiles import LENGTHS, OPTIONS, made_up


def words(table: Table) -> list[list[str]]:
    """The rows of a table, after its header."""
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return [line.split() for line in out.getvalue().splitlines()[1:]]


def test_fits() -> None:
    """Catches bytes beside the backward, where they would count twice."""
    rows = words(fits_table(fit_parts(made_up())))
    assert [(row[1], row[2]) for row in rows] == [
        (option, part) for option in OPTIONS for part in ("forward", "backward")
    ]
    assert all(("B/token" in " ".join(row)) == (row[2] == "forward") for row in rows)


def test_limits() -> None:
    """Catches replicated and sharded swapped, and a level without a row."""
    costs = synthetic_costs(2, layers=2, memory_bytes=2 * GIB, methods=("ulysses_z", "metp"))
    rows = words(limits_table(costs))
    replicated, sharded = (limits_of(costs, working) for working in ("replicated", "sharded"))
    assert len(rows) == len(replicated) == 6
    for row, one, other in zip(rows, replicated, sharded, strict=True):
        lengths = [one.max_length, one.util_length, other.max_length, other.util_length]
        assert row == [f"cp{one.p}", str(one.option), *(f"{n:,}" for n in lengths)]
    assert [x.max_length for x in replicated] != [x.max_length for x in sharded]


def test_limits_of_no_memory_and_of_any() -> None:
    """Catches 1,099,511,627,776 tokens, and None in a table."""
    costs = synthetic_costs(1)
    full = words(limits_table(costs.replace(state_bytes=costs.capacity_bytes)))
    assert full[0][2:] == ["0", "-", "0", "-"]

    def weightless(cost: OptionCost) -> OptionCost:
        return replace(cost, kept=Linear(), transient=Linear())

    free = costs.replace(
        options={1: {text: weightless(cost) for text, cost in costs.options[1].items()}},
        ends={1: weightless(costs.ends[1])},
    )
    assert limits_of(free)[0].max_length == MOST_TOKENS
    assert words(limits_table(free))[0][2:4] == ["no", "limit"]


def test_hybrid_costs() -> None:
    """Catches another target's switch in a row."""
    pytest.importorskip("sklearn")
    found = words(hybrid_table(fit_hybrid(made_up(options=[ENDS]))))
    assert [row[2] for row in found] == ["forward", "backward", "kept", "in"]
    assert found[0][:5] == ["cp1", ENDS, "forward", f"{LENGTHS[-1]:,}", "1"]
