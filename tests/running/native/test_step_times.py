"""What the first rank gets to know of a step, from what each rank sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.spec import Row, Timeline
from headrace.spec.step import RankTimes, StepTimes, packed_rows, rows_of_packed


def row(rank: int, action: str, seconds: float, start_s: float = 1.0) -> Row:
    kind = {"F": "forward", "B": "backward", "P": "pull"}.get(action.lstrip("01")[0], "update")
    end_s = start_s + seconds
    return Row(rank=rank, action=action, kind=kind, start_s=start_s, end_s=end_s)


def told(*rows: Row, ranks: int = 2, step_s: float = 9.0) -> StepTimes:
    """The step of these rows, rank r taking ``step_s`` + r and r bytes."""
    return StepTimes.of(
        [
            RankTimes(
                step_s=step_s + rank,
                waited_s=0.5 - rank / 4,
                peak_bytes=rank,
                rows=tuple(one for one in rows if one.rank == rank),
            ).to_bytes()
            for rank in range(ranks)
        ]
    )


def test_a_group_is_as_slow_as_its_last_member_not_as_its_first() -> None:
    """Would catch the waiting of a rank that came early counted as work, and a pull as work."""
    found = told(
        row(0, "0F0[0,1]", 3.0),
        row(1, "0F0[0,1]", 2.5),
        row(0, "0B0[0,1]", 5.0),
        row(1, "0B0[0,1]", 6.0),
        row(1, "0F1[1]", 2.0),
        row(1, "0B1[1]", 4.0),
        row(0, "P0", 1.0),
    )
    assert found.micro_batches == {0: 7.5, 1: 6.0}


@pytest.mark.parametrize("wait", [0.0, 7.0])
def test_stages_add_up_and_waits_do_not_count(wait: float) -> None:
    """Would catch a wait for weights taken for slow work, members of a group told apart by the
    pushes in their backwards, and stages of which only one counts."""
    first = replace(row(0, "0F0[0]", 2.0 + wait), waited_s=wait)
    found = told(
        first,
        row(1, "1F0[1]", 1.0),
        row(1, "1B0[1]{3,2}", 2.0),
        row(0, "0B0[0]{1,0}", 4.0),
        row(2, "0F1[2,3]", 1.0),
        row(3, "0F1[2,3]", 1.0),
        row(2, "0B1[2,3]", 2.5),
        row(3, "0B1[2,3]{3,2,1,0}", 2.0),
        ranks=4,
    )
    assert found.micro_batches == {0: 9.0, 1: 3.0}


def test_what_is_told_of_all_ranks() -> None:
    """Would catch one rank's seconds taken for all, and another idle time than the timeline's."""
    rows = (
        row(0, "P0", 1.0, 0.0),
        replace(row(0, "0F0[0]", 3.0), waited_s=1.0),
        row(0, "U", 0.5, 6.0),
        row(1, "0F1[1]", 4.0),
        row(1, "0B1[1]{1,0}", 1.0, 5.0),
    )
    found = told(*rows)
    assert (found.step_s, found.waited_s, found.peak_bytes) == (10.0, 0.5, (0, 1))
    timeline = Timeline(source="measured", rows=rows, devices=2)
    assert found.idle == pytest.approx(timeline.idle) == pytest.approx(1 - 7.5 / 13)
    assert told(ranks=3).idle == 0.0, "nothing ran"
    assert told(ranks=3).micro_batches == {}


def test_rows_arrive_as_they_were() -> None:
    """Would catch a field that is lost, and another rank's rows."""
    exchange = Row(
        rank=3,
        action="X(Sa5>3*96,Rg4<3*128)",
        kind="exchange",
        start_s=0.1,
        end_s=0.3,
        tokens=224,
        ranks=2,
        waited_s=0.125,
    )
    rows = (exchange, replace(row(3, "P12", 1e-9), ranks=4))
    assert rows_of_packed(packed_rows(rows), 3) == rows
    assert rows_of_packed(packed_rows(()), 3) == ()


def test_a_rank_sends_as_much_in_a_large_world() -> None:
    """Would catch rows of pulls and pushes, or names of groups, that travel in every step."""

    def sent(ranks: int) -> int:
        group = ",".join(map(str, range(ranks)))
        rows = (*(row(0, f"P{b}", 0.1) for b in range(60)), row(0, f"0F0[{group}]", 1.0))
        return len(RankTimes(step_s=1.0, waited_s=0.0, peak_bytes=0, rows=rows).to_bytes())

    assert sent(1024) == sent(2) < 100
