"""Tables of ``headrace profile``: what they say of costs that are known."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from headrace.cli.profile_tables import fits_table, held_out_lines, hybrid_table, limits_table
from headrace.costs import Linear, OptionCost, synthetic_costs
from headrace.costs.cost_model import MOST_TOKENS
from headrace.costs.from_profile import fit_parts
from headrace.costs.held_out import HeldOut
from headrace.costs.limits import limits_of
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
    """Catches whole and sharded swapped, and a level without a row."""
    costs = synthetic_costs(2, layers=2, memory_bytes=GIB, methods=("ulysses_z", "metp"))
    rows = words(limits_table(costs))
    whole, sharded = (limits_of(costs, working) for working in ("whole", "sharded"))
    assert len(rows) == len(whole) == 6
    for row, one, other in zip(rows, whole, sharded, strict=True):
        lengths = [one.max_length, one.util_length, other.max_length, other.util_length]
        assert row == [f"cp{one.p}", str(one.option), *(f"{n:,}" for n in lengths)]
    assert [x.max_length for x in whole] != [x.max_length for x in sharded]


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


def test_hybrid_beside_quadratic() -> None:
    """Catches errors of one target or place in the cells of another."""
    pytest.importorskip("sklearn")
    from headrace.costs.hybrid import fit_hybrid

    def row(target: str, model: str, where: str, error: float) -> HeldOut:
        return HeldOut(
            p=1, option=ENDS, target=target, model=model, where=where, lengths=(1,),
            errors=(error,),
        )  # fmt: skip

    held = [
        row("forward_s", "hybrid", "inside", 0.01), row("forward_s", "quadratic", "inside", 0.02),
        row("forward_s", "hybrid", "beyond", 0.03), row("forward_s", "quadratic", "beyond", 0.04),
        row("kept_bytes", "hybrid", "beyond", 0.05), row("kept_bytes", "forest", "beyond", 0.9),
        row("kept_bytes", "quadratic", "beyond", 0.06),
    ]  # fmt: skip
    found = words(hybrid_table(fit_hybrid(made_up(options=[ENDS])), held))
    assert [row[2] for row in found] == ["forward", "backward", "kept", "in"]
    assert found[0][:5] == ["cp1", ENDS, "forward", f"{LENGTHS[-1]:,}", "1"]
    assert found[0][7:] == ["1", "%", "2", "%", "3", "%", "4", "%"]
    assert found[1][7:] == ["-", "-", "-", "-"]
    assert found[2][7:] == ["-", "-", "5", "%", "6", "%"]
    lines = held_out_lines(held)
    assert [line.partition(":")[0] for line in lines] == [
        "seconds held out inside", "seconds held out beyond", "bytes held out beyond",
    ]  # fmt: skip
    assert "hybrid median 3 %" in lines[1]
    assert "quadratic median 6 %" in lines[2]
