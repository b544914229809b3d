"""Seconds of actions on a device: read when the step is over, in the device's own time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from headrace.native.spans import Spans
from headrace.spec import compile_plan
from headrace.spec.architecture import bucket_count
from headrace.spec.measurement import Row
from ranks import run_ranks
from running.native.test_executor import LLAMA, _documents, _executor, _plan


@dataclass
class Stream:
    """Work of a device: it takes seconds, and none of the host's. A mark is a place among it."""

    work: list[float] = field(default_factory=list)
    reached: int = 0
    waited_for: list[int] = field(default_factory=list)

    def mark(self) -> int:
        return len(self.work)

    def past(self, mark: int) -> bool:
        return mark <= self.reached

    def reach(self, mark: int) -> None:
        self.waited_for.append(mark)
        self.reached = max(self.reached, mark)

    def between(self, start: int, end: int) -> float:
        self.reach(end)
        return sum(self.work[start:end])


def _row(action: str, kind: str, start_s: float, end_s: float, waited_s: float = 0.0) -> Row:
    return Row(rank=2, action=action, kind=kind, start_s=start_s, end_s=end_s, waited_s=waited_s)


def test_waits_of_the_device_are_its_own() -> None:
    """Catches pulls that seem to take no time, as the host does not wait for them, waits counted as
    computing, and waits before an action counted as its own."""
    stream = Stream()
    spans = Spans(stream, rank=2)
    with spans.wait(), spans.action("P2", "pull"):
        stream.work.append(0.25)
    with spans.action("0F0", "forward"):
        stream.work.append(1.0)
        for bucket in range(2):
            with spans.wait(), spans.action(f"P{bucket}", "pull"):
                stream.work.append(2.0)
        stream.work.append(4.0)
    with spans.action("0B0", "backward"):
        stream.work.append(8.0)
    assert stream.waited_for == []
    assert spans.rows() == (
        _row("P2", "pull", 0.0, 0.25),
        _row("P0", "pull", 1.25, 3.25),
        _row("P1", "pull", 3.25, 5.25),
        _row("0F0", "forward", 0.25, 9.25, 4.0),
        _row("0B0", "backward", 9.25, 17.25),
    )


def test_the_action_that_does_not_end_is_named() -> None:
    """Catches a hang that is told as one of the update, where the host stands still."""
    stream, entered = Stream(), list[str]()
    spans = Spans(stream, rank=0)
    for action in ("0F0", "0B0", "1F1"):
        with spans.action(action, "forward"):
            stream.work.append(1.0)
    stream.reached = 1  # the first has ended
    spans.reach(entered.append)
    assert entered == ["0B0", "1F1"]
    assert stream.waited_for == [2, 3]


@dataclass
class Seconds(Stream):
    """A second between any two marks."""

    def mark(self) -> int:
        self.work.append(1.0)
        return len(self.work)


def _step(overlap: bool) -> tuple[list[str], list[str], tuple[Row, ...]]:
    """What was entered, each with how often the host had waited; the actions; the rows."""
    clock, entered = Seconds(), list[str]()
    executor = _executor(
        overlap=overlap,
        clock=clock,
        entered=lambda action: entered.append(f"{action} {len(clock.waited_for)}"),
    )
    plan = _plan(2, (5, 4, 3), (0, 1), (0,), (1,))
    result = executor.run(plan, _documents((5, 4, 3)), step=0, lr=0.0)
    program = compile_plan(plan, bucket_count(LLAMA), overlap=overlap)[executor.groups.rank]
    return entered, [str(action) for action in program.actions], result.rows


def test_a_host_waits_for_its_device_at_the_update() -> None:
    """Catches a host that waits after each action, so that the device has nothing to do."""
    for entered, actions, rows in run_ranks(2, _step, True):
        told = [row.action for row in rows]
        assert entered[: len(actions)] == [f"{action} 0" for action in actions]
        later = [line.split()[0] for line in entered[len(actions) : -1]]
        assert later == [text for text in told if text != actions[-1]]
        assert all(row.seconds >= 1 for row in rows)
        forwards = [row for row in rows if row.kind == "forward"]
        pulls = [row for row in rows if row.kind == "pull"]
        assert len(pulls) == bucket_count(LLAMA)
        # Marks of a wait with a pull in it: around the wait, and around the pull.
        assert sum(row.waited_s for row in forwards) == sum(3 * row.seconds for row in pulls)
        assert [row.end_s for row in rows] == sorted(row.end_s for row in rows)


def test_rows_of_steps_without_overlap_follow_each_other() -> None:
    """Catches waits that are taken for those of the action after them."""
    for _, _, rows in run_ranks(2, _step, False):
        assert all(row.waited_s == 0 for row in rows)
        assert all(one.end_s <= other.start_s for one, other in pairwise(rows))
        assert any(row.kind == "forward" for row in rows)
