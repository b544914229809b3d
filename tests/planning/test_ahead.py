"""Plans made ahead: in order, the same whoever makes them, and no process left behind."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.comm.workers import PlanAhead
from headrace.costs.group_costs import GroupCosts
from headrace.errors import InfeasiblePlan, LaunchError, SpecError
from headrace.planning import Problem, plan
from headrace.spec import Lengths
from planning.ahead_work import (
    dies,
    dies_on_even_first,
    dies_on_two,
    fails_on_odd,
    first_of,
    half_second,
    hangs,
    large,
    marks_slowly,
    modules,
    odd_error,
    sleepy,
    slow,
    square,
    takes,
)
from spread import whole


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(ahead: PlanAhead) -> list[int]:
    return [producer.process.pid for producer in ahead._team]


@pytest.mark.parametrize(
    ("producers", "depth"), [(1, 4), (2, 3), *(whole(*x) for x in ((1, 1), (3, 8), (4, 2)))]
)
def test_results_come_in_order(producers: int, depth: int) -> None:
    """Would catch plans handed on as they are ready, or lost at the end."""
    with PlanAhead(sleepy, range(10), producers=producers, depth=depth) as ahead:
        results = list(ahead)
    assert [item for item, _ in results] == list(range(10))
    assert len({pid for _, pid in results}) <= min(producers, depth)
    assert os.getpid() not in {pid for _, pid in results}


def test_waiting_for_plans_starts_more_processes() -> None:
    """Catches one process that plans for thousands of devices, slower than these train, and more
    than one where nobody waits, or than asked for."""
    items = [(number, 0.4) for number in range(12)]
    with PlanAhead(takes, items, most=2, depth=3) as ahead:
        assert len(pids(ahead)) == 1
        results = list(itertools.islice(ahead, 3))
        assert len({pid for _, pid in results}) == 1  # the first plans are waited for in any case
        results += ahead
    assert [number for number, _ in results] == list(range(12))
    assert len({pid for _, pid in results}) == 2
    with PlanAhead(takes, items[:6], most=1, depth=3) as ahead:
        assert len({pid for _, pid in ahead}) == 1
    found = list[int]()
    with PlanAhead(takes, [(number, 0.0) for number in range(6)], most=2, depth=2) as ahead:
        for _, pid in ahead:
            found.append(pid)
            time.sleep(0.4)
    assert len(found) == 6
    assert len(set(found)) == 1


def test_plans_do_not_depend_on_the_number_of_producers() -> None:
    """Would catch plans that depend on what a process planned before, or on a seed of its own."""
    costs = GroupCosts(a_s=5e-9, b_s=2e-4, c_s=0.02, cap_tokens=16384, kappa_s={1: 0.0, 2: 2e-5})
    batches = [[100 * k + 1, 900, 17, 12000 + k] for k in range(6)]
    made = partial(plan, Problem(costs=costs, devices=3), seed=7)
    lengths = [Lengths.of(batch) for batch in batches]
    here = [made(batch) for batch in lengths]
    for producers in (1, 3):
        with PlanAhead(made, lengths, producers=producers, depth=4) as ahead:
            assert list(ahead) == here


def test_items_are_read_no_further_than_the_depth() -> None:
    """Would catch a queue without bound."""
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in itertools.count():
            read.append(item)
            yield item

    with PlanAhead(square, items(), producers=2, depth=3) as ahead:
        assert read == [0, 1, 2]
        assert [next(ahead) for _ in range(4)] == [0, 1, 4, 9]
        assert len(read) == 7


def test_errors_are_raised_at_their_turn() -> None:
    """Would catch an error that ends the others, comes early, or loses its text."""
    with PlanAhead(fails_on_odd, range(4), producers=2, depth=4) as ahead:
        assert next(ahead) == 0
        with pytest.raises(InfeasiblePlan, match="item 1: got odd, wanted even; add one") as caught:
            next(ahead)
        assert caught.value.hint == "add one"
        assert next(ahead) == 2
        with pytest.raises(InfeasiblePlan, match="item 3"):
            next(ahead)
        with pytest.raises(StopIteration):
            next(ahead)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_error_that_cannot_be_read_back_keeps_its_text() -> None:
    """Would catch a producer that dies of an error with arguments of its own."""
    with (
        PlanAhead(odd_error, range(1)) as ahead,
        pytest.raises(RuntimeError, match="_NotRead: no plan of 0"),
    ):
        next(ahead)


def test_an_error_of_the_items_comes_at_its_turn() -> None:
    """Would catch a sampler's error that hides the plans before it."""

    def items() -> Iterator[int]:
        yield 3
        raise OSError("the disk is gone")

    with PlanAhead(square, items(), depth=4) as ahead:
        assert next(ahead) == 9
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)
        with pytest.raises(StopIteration):
            next(ahead)


@pytest.mark.parametrize("producers", [1, whole(3)])
def test_a_producer_that_is_killed_is_told_and_replaced(tmp_path: Path, producers: int) -> None:
    """Would catch a batch lost with its producer, or planned twice, or a death kept quiet."""
    told: list[str] = []
    items = [(number, str(tmp_path)) for number in range(8)]
    with PlanAhead(
        dies_on_even_first, items, producers=producers, depth=4, tell=told.append
    ) as ahead:
        assert list(ahead) == list(range(8))
    assert len(told) == 4
    for number in (0, 2, 4, 6):
        (line,) = [text for text in told if f"planning batch {number}" in text]
        assert "was killed by SIGKILL" in line
        assert "another takes over" in line
        assert "\n" not in line


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_frozen_producer_is_killed_and_replaced() -> None:
    """Catches training that waits for ever for a process that is stopped, or swapped out, and one
    that is killed although it only takes long."""
    told: list[str] = []
    with PlanAhead(slow, [3.5] * 4, depth=1, tell=told.append, silent_s=2.5) as ahead:
        assert next(ahead) == 3.5
        assert told == []
        (pid,) = pids(ahead)
        os.kill(pid, signal.SIGSTOP)
        assert list(ahead) == [3.5] * 3
        (line,) = told
        assert f"process {pid}) gave no sign of life for 2.5 s" in line
        assert "another takes over" in line
        assert not alive(pid)


def test_a_kill_from_outside_loses_nothing() -> None:
    """Would catch a producer that is missed only when it dies at work."""
    told: list[str] = []
    with PlanAhead(sleepy, range(12), producers=2, depth=4, tell=told.append) as ahead:
        first = [next(ahead)[0] for _ in range(3)]
        for pid in pids(ahead):
            os.kill(pid, signal.SIGKILL)
        assert first + [item for item, _ in ahead] == list(range(12))
    assert len(told) == 2


def test_a_batch_that_kills_every_producer_is_given_up() -> None:
    """Would catch an endless row of producers that die of one batch."""
    told: list[str] = []
    with PlanAhead(dies_on_two, range(5), producers=2, depth=3, tell=told.append) as ahead:
        assert [next(ahead), next(ahead)] == [0, 1]
        with pytest.raises(LaunchError, match=r"batch 2: got 3 producers dead over it.*code 5"):
            next(ahead)
        assert list(ahead) == [3, 4]
    assert len(told) == 3
    assert "batch 2, the third: it is given up" in told[-1]


def test_plans_larger_than_a_pipe_do_not_block() -> None:
    """Would catch a producer and its reader that wait for each other."""
    with PlanAhead(large, range(4), producers=1, depth=4) as ahead:
        assert [plan == large(n) for n, plan in enumerate(ahead)] == [True] * 4


def made_after(ahead: PlanAhead) -> Any:
    """What is made after the plan taken last, waited for."""
    limit = time.monotonic() + 20
    while (found := ahead.made_after()) is None and time.monotonic() < limit:
        time.sleep(0.01)
    return found


def test_what_is_made_after_a_plan_does_not_hold_it_up() -> None:
    """Would catch a plan that is sent with what is made after it, batches that wait behind such
    work although they could be planned, and a caller that waits for it."""
    with PlanAhead(half_second, range(3), after=hangs, depth=3) as ahead:
        assert list(itertools.islice(ahead, 3)) == [0, 1, 2]
        began = time.monotonic()
        assert ahead.made_after() is None
        assert time.monotonic() - began < 20  # what it would wait for takes minutes


def test_what_is_made_after_a_plan_belongs_to_it() -> None:
    """Would catch what was made of another batch, or of one that is long trained."""
    with PlanAhead(str, range(6), after=square, depth=2) as ahead:
        for item in range(4):
            assert next(ahead) == str(item)
            assert made_after(ahead) == item * item
            assert ahead.made_after() is None, "taken"
        assert next(ahead) == "4"
        limit = time.monotonic() + 20
        while set(ahead._afters) != {4, 5} and time.monotonic() < limit:
            ahead._receive(0.1)
        assert next(ahead) == "5"
        assert set(ahead._afters) == {5}
    assert ahead.made_after() is None


def test_work_of_trained_batches_is_left_out(tmp_path: Path) -> None:
    """Would catch work that nobody asks for any more, which puts off what comes next."""
    items = [(number, str(tmp_path)) for number in range(30)]
    with PlanAhead(first_of, items, after=marks_slowly, depth=8) as ahead:
        assert list(itertools.islice(ahead, 30)) == list(range(30))
        assert made_after(ahead) == 29
    made = {int(path.name) for path in tmp_path.iterdir()}
    assert made >= set(range(22, 30))
    assert len(made) < 20


def test_what_cannot_be_made_after_a_plan_is_told_when_it_is_asked_for() -> None:
    """Would catch an error that ends plans, or that is hidden; and a death that costs a plan."""
    with PlanAhead(square, range(3), after=fails_on_odd, depth=1) as ahead:
        assert (next(ahead), made_after(ahead)) == (0, 0)
        assert next(ahead) == 1
        with pytest.raises(InfeasiblePlan, match="item 1: got odd"):
            made_after(ahead)
        assert (next(ahead), made_after(ahead)) == (4, 2)
    told: list[str] = []
    with PlanAhead(square, range(5), after=dies, depth=2, tell=told.append) as ahead:
        assert list(ahead) == [0, 1, 4, 9, 16]
    assert all("left with code 6" in line for line in told)


def test_close_ends_producers_at_work() -> None:
    """Would catch a producer that outlives its owner, or a close that waits for a plan."""
    ahead = PlanAhead(hangs, range(3), producers=2, depth=3)
    team = pids(ahead)
    assert len(team) == 2
    assert all(map(alive, team))
    began = time.monotonic()
    ahead.close()
    ahead.close()
    assert time.monotonic() - began < 5
    assert not any(map(alive, team))
    with pytest.raises(StopIteration):
        next(ahead)


def test_what_is_dropped_ends_its_producers() -> None:
    """Would catch orphans of an iterator that nobody closed."""
    ahead = PlanAhead(hangs, range(3), producers=2, depth=3)
    team = pids(ahead)
    del ahead
    gc.collect()
    assert not any(map(alive, team))


def test_a_killed_owner_leaves_no_producer() -> None:
    """Would catch producers that work on for nobody after the training was killed."""
    program = (
        f"import sys, time; sys.path[:] = {sys.path!r}\n"
        "from planning.ahead_work import hangs\n"
        "from headrace.comm.workers import PlanAhead\n"
        "ahead = PlanAhead(hangs, range(3), producers=2, depth=3)\n"
        "print(*[p.process.pid for p in ahead._team], flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        team = [int(word) for word in owner.stdout.readline().split()]
        owner.kill()
    assert len(team) == 2
    limit = time.monotonic() + 20
    while any(map(alive, team)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(alive, team))


def test_producers_do_not_import_torch() -> None:
    """Would catch producers that take seconds and gigabytes to start."""
    with PlanAhead(modules, range(1)) as ahead:
        assert "torch" not in next(ahead)


def test_what_cannot_be_sent_is_named() -> None:
    """Would catch a traceback of pickle in place of an error."""
    with pytest.raises(SpecError, match="the function that plans"):
        PlanAhead(lambda item: item, range(3))
    with PlanAhead(square, iter([2, lambda: 3])) as ahead:
        assert next(ahead) == 4
        with pytest.raises(SpecError, match=r"batch 1: got .*wanted what can be pickled"):
            next(ahead)
    for wrong in ({"producers": 0}, {"most": 0}, {"depth": 0}, {"depth": True}):
        with pytest.raises(SpecError, match="whole number >= 1"):
            PlanAhead(square, range(3), **wrong)
