"""Timelines as text."""

from __future__ import annotations

import pytest

from headrace.errors import SpecError
from headrace.simulator import draw, without_waits
from headrace.spec import Row, Timeline


def row(rank: int, action: str, kind: str, start_s: float, end_s: float) -> Row:
    return Row(rank=rank, action=action, kind=kind, start_s=start_s, end_s=end_s)


TIMELINE = Timeline(
    source="predicted",
    devices=2,
    rows=(
        row(0, "P0", "pull", 0, 1),
        row(0, "0F0[0]", "forward", 1, 3),
        row(0, "0B0[0]", "backward", 3, 7),
        row(0, "G0", "push", 7, 8),
        row(0, "U", "update", 8, 10),
        row(1, "P0", "pull", 0, 1),
        row(1, "0F27[1]", "forward", 4, 6),
        row(1, "G0", "push", 6, 8),
        row(1, "U", "update", 8, 10),
    ),
)


def test_one_line_per_rank() -> None:
    """Catches columns that are shifted, and idle time drawn as work."""
    assert draw(TIMELINE, width=13).splitlines() == [
        "0 |<aaAAAA>==",
        "1 |<...bb>>==",
        "10 s, idle 40 %",
    ]


def test_a_column_shows_what_takes_most_of_it() -> None:
    """Catches a short action that hides a long one."""
    assert draw(TIMELINE, width=10).splitlines()[0] == "0 |<aAAA>="
    assert all(len(line) <= 40 for line in draw(TIMELINE, width=40).splitlines())


def test_empty_and_narrow() -> None:
    """Catches a division by a step of no seconds."""
    nothing = Timeline(source="measured", devices=1, rows=(row(0, "U", "update", 0, 0),))
    assert draw(nothing, width=12).splitlines()[0] == "0 |" + "." * 9
    with pytest.raises(SpecError):
        draw(TIMELINE, width=5)


WAITING = Timeline(
    source="predicted",
    devices=2,
    rows=(
        row(0, "P0", "pull", 0, 1),
        row(0, "P1", "pull", 3, 4),
        row(0, "P2", "pull", 5, 5),
        Row(rank=0, action="0F0[0]", kind="forward", start_s=0, end_s=6, waited_s=2),
        row(0, "Sa0>1*9", "send", 6, 6),
        row(0, "Rg0<1*9", "recv", 6, 10),
        row(1, "P0", "pull", 0, 3),
        row(1, "Ra0<0*9", "recv", 3, 6),
        row(1, "1F0[1]", "forward", 6, 10),
    ),
)


def test_waits_within_a_forward_are_cut_out() -> None:
    """Catches a wait counted as work, twice, or on another rank, and parts without length."""
    rows = without_waits(WAITING.rows)
    parts = [(r.start_s, r.end_s, r.waited_s) for r in rows if r.action == "0F0[0]"]
    assert parts == [(1, 3, 0), (4, 6, 0)]
    assert [r for r in rows if r.kind != "forward"] == [
        r for r in WAITING.rows if r.kind != "forward"
    ]
    assert WAITING.rows[-1] in rows


def test_waiting_is_drawn_where_it_is() -> None:
    """Catches a forward drawn over its waits, and a bubble drawn as if nothing was there."""
    assert draw(WAITING, width=13).splitlines()[:2] == ["0 |<aa<aa----", "1 |<<<---aaaa"]
