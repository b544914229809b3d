"""Rows and timelines."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import Row, Timeline

times = st.floats(0, 100)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    start, length = draw(times), draw(times)
    kind = draw(st.sampled_from(["pull", "forward", "backward", "push", "update"]))
    return Row(
        rank=draw(st.integers(0, 7)),
        action=draw(st.sampled_from(["P0", "0F1[0,1]", "U"])),
        kind=kind,
        start_s=start,
        end_s=start + length,
        tokens=draw(st.integers(0, 9999)),
        ranks=draw(st.integers(1, 8)),
    )


timelines = st.builds(
    Timeline,
    source=st.sampled_from(["measured", "predicted"]),
    rows=st.lists(rows(), max_size=9).map(tuple),
    devices=st.integers(8, 9),
)


@given(timelines)
def test_json_reads_back(timeline: Timeline) -> None:
    """Catches a column that is lost between the executor and the report."""
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


@given(timelines)
def test_idle_is_a_fraction(timeline: Timeline) -> None:
    """Catches a negative idle time where rows of one rank overlap, and a step of no time."""
    assert 0 <= timeline.idle <= 1
    assert timeline.seconds == max([row.end_s for row in timeline.rows], default=0.0)


@given(timelines, st.integers(0, 99))
def test_the_chrome_trace_holds_every_row(timeline: Timeline, step: int) -> None:
    """Catches seconds where the format wants microseconds, and rows that are left out."""
    events = json.loads(json.dumps(timeline.to_chrome_trace(step)))
    assert len(events) == len(timeline.rows)
    for row, event in zip(timeline.rows, events, strict=True):
        assert (event["name"], event["cat"], event["ph"]) == (row.action, row.kind, "X")
        assert (event["pid"], event["tid"]) == (timeline.source, row.rank)
        assert event["ts"] == pytest.approx(row.start_s * 1e6)
        assert event["dur"] == pytest.approx((row.end_s - row.start_s) * 1e6)
        assert event["args"] == {"tokens": row.tokens, "ranks": row.ranks, "step": step}


def test_idle_by_hand() -> None:
    """Catches waiting in a pull or push that is counted as work."""

    def row(rank: int, kind: str, start: float, end: float) -> Row:
        return Row(rank=rank, action=kind, kind=kind, start_s=start, end_s=end)

    found = (
        row(0, "pull", 0, 1),
        row(0, "forward", 1, 3),
        row(0, "backward", 3, 7),
        row(0, "push", 7, 9),
        row(0, "update", 9, 10),
        row(1, "forward", 1, 2),
        row(1, "update", 9, 10),
    )
    timeline = Timeline(source="measured", rows=found, devices=2)
    assert timeline.seconds == 10
    assert timeline.idle == pytest.approx(1 - (2 + 4 + 1 + 1 + 1) / 20)
    assert Timeline(source="predicted", rows=(), devices=2).idle == 0
    both = (row(0, "forward", 0, 10), row(0, "backward", 0, 10))
    assert Timeline(source="measured", rows=both, devices=1).idle == 0, "not below"


def test_time_runs_forward() -> None:
    """Catches a clock that was read in the wrong order."""
    with pytest.raises(SpecError, match=r"row U: got end 1.0 < start 2.0"):
        Row(rank=0, action="U", kind="update", start_s=2.0, end_s=1.0)
