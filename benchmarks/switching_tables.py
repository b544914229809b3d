"""What ``switching.py`` prints: medians of what it measured, and the paper's number beside them."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.table import Table

from headrace.spec import Architecture
from headrace.units import seconds_text

__all__ = ["PAPER", "PARTS", "costs_table", "restart_table", "summary"]

PARTS = (
    "end the processes",
    "start the interpreter",
    "import torch",
    "import headrace",
    "ranks, rendezvous, groups",
    "weights, AdamW's state",
)
PAPER = {
    "where": "ParaDySe, Case Study (GPT on GRCh38, their GPUs)",
    "said": "a total reset latency exceeding 31 seconds",
    "parts": "2-3 s imports, 5 s dataset, 22 s model, 1 s Adam",
    "seconds": 31,
}


def summary(found: dict[str, Any]) -> dict[str, float | None]:
    """Medians over everything of a kind, in seconds; a step's is a ratio."""
    changes, pairs = found["changes"], found["pairs"]

    def middle(key: str, rows: list[dict[str, Any]]) -> float | None:
        values = [value for row in rows for value in row[key]]
        return median(values) if values else None

    def ratio(one: str, other: str) -> float:
        return median(x / y for row in pairs for x, y in zip(row[one], row[other], strict=True))

    return {
        "look_up_s": max(median(row["look_up_s"]) for row in changes),
        "change_s": max(median(row["later_s"]) for row in changes),
        "first_change_s": middle("first_s", [row for row in changes if row["groups"]]),
        "changed_step_s": middle("changed_s", pairs),
        "same_step_s": middle("same_s", pairs),
        "changed_ratio": ratio("changed_s", "same_s"),
        "same_ratio": ratio("again_s", "same_s"),
        "changes": len(pairs) * len(pairs[0]["same_s"]),
        "restart_s": median(sum(restart.values()) for restart in found["restarts"]),
    }


def costs_table(found: dict[str, Any]) -> Table:
    """What a change costs, and how many times as much a restart."""
    a, s = Architecture.from_json(found["architecture"]), found["summary"]
    table = Table(
        title=f"a change of method on {found['ranks']} ranks: {a.kind} {a.layers}x{a.hidden}, "
        f"{found['tokens']:,} tokens",
        title_justify="left",
    )
    table.add_column("what", no_wrap=True)
    for name in ("median", "a restart is"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [
        ("look-up of one layer, the slowest method", s["look_up_s"]),
        ("change of all layers, the slowest method", s["change_s"]),
        ("first change to a method with groups of its own", s["first_change_s"]),
        ("restart", s["restart_s"]),
    ]
    for name, spent in rows:
        times = "-" if spent is None else f"{s['restart_s'] / spent:,.0f}x"
        table.add_row(name, "-" if spent is None else seconds_text(spent), times)
    table.add_row("bytes that a change moves", f"{found['changed_bytes']:,.0f}", "")
    table.add_section()
    for name, part in (
        (f"first step after a change ({s['changes']} changes)", "changed_step_s"),
        ("the same step again", "same_step_s"),
    ):
        table.add_row(name, seconds_text(s[part]), f"{s['restart_s'] / s[part]:,.1f}x")
    table.add_row("first step after a change, of the same again", f"{s['changed_ratio']:.3f}x", "")
    table.add_row("the third step in a row, of the second", f"{s['same_ratio']:.3f}x", "")
    return table


def restart_table(found: dict[str, Any]) -> Table:
    """Where a restart's time goes, beside the paper's."""
    table = Table(
        title=f"a restart on {found['ranks']} ranks, median of {len(found['restarts'])}",
        title_justify="left",
    )
    table.add_column("part", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    for part in PARTS:
        table.add_row(part, seconds_text(median(row[part] for row in found["restarts"])))
    table.add_row("together", seconds_text(found["summary"]["restart_s"]))
    table.add_section()
    table.add_row(f"quoted: {PAPER['where']}", f"> {PAPER['seconds']} s")
    table.add_row(f"  {PAPER['parts']}", "")
    return table
