"""Ranks agree on the attempt and learn each other's addresses, whatever died before."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from headrace.comm.meeting import JoinedAttempt, JoinRequest, interface_of, join_attempt, route
from headrace.errors import LaunchError

RANKS = 4


def request(rank: int) -> JoinRequest:
    return JoinRequest(address=f"10.0.0.{rank}", store="10.0.0.0", port=1000 + rank)


def meet(store: dist.Store, late: dict[int, float] | None = None) -> list[JoinedAttempt]:
    """All ranks come, some of them ``late`` by seconds."""

    def come(rank: int) -> JoinedAttempt:
        time.sleep((late or {}).get(rank, 0.0))
        return join_attempt(store, request(rank), rank=rank, ranks=RANKS, limit_s=10)

    with ThreadPoolExecutor(RANKS) as ranks:
        return list(ranks.map(come, range(RANKS)))


@pytest.mark.parametrize("late", [0, 3])
def test_attempts_follow_each_other(late: int) -> None:
    """Would catch a rank seated by what a dead attempt left in the store, whoever comes last, and
    ranks of one attempt that take it for two."""
    store = dist.HashStore()
    for attempt in range(3):
        seats = meet(store, {late: 0.2})
        assert [joined.attempt for joined in seats] == [attempt] * RANKS
        assert [joined.before[1] for joined in seats] == [1003, 1000, 1001, 1002]
        assert seats[1].before[0] == "10.0.0.0"


@pytest.mark.parametrize("first_again", [False, True])
def test_a_rank_dies_while_they_meet(first_again: bool) -> None:
    """Would catch ranks that wait for ever for one that has come and died, and its successor that
    finds the place taken."""
    store = dist.HashStore()
    meet(store)
    dead = dist.PrefixStore("meeting", store)
    dead.set("here/2", json.dumps(["dead", "10.9.9.9", "10.0.0.0", 1]))  # answers no call
    if first_again:
        for rank in range(RANKS):
            dead.set(f"here/{rank}", json.dumps([f"dead{rank}", "10.9.9.9", "10.0.0.0", 1]))
    seats = meet(store, {2: 0.3})
    assert len({joined.attempt for joined in seats}) == 1
    assert seats[0].attempt > 0
    assert seats[3].before == ("10.0.0.2", 1002)


def test_the_machine_of_the_store_learns_its_address() -> None:
    """Would catch ranks that tell others to reach them at 127.0.0.1, which is all that a machine
    may know of itself."""

    def come(rank: int) -> JoinedAttempt:
        here = JoinRequest(address="127.0.0.1", store="127.0.0.1", port=7)
        return join_attempt(store, request(rank) if rank else here, rank=rank, ranks=2, limit_s=10)

    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        seats = list(ranks.map(come, range(2)))
    assert [joined.address for joined in seats] == ["10.0.0.0", "10.0.0.1"]
    assert seats[1].before == ("10.0.0.0", 7)


def test_ranks_that_never_come_are_named() -> None:
    """Would catch a silent wait for a machine that was never started."""
    store = dist.HashStore()
    dist.PrefixStore("meeting", store).set("here/2", "[]")
    with pytest.raises(LaunchError, match=r"got no rank 1, 3, wanted all 4 within 200 ms"):
        join_attempt(store, request(0), rank=0, ranks=RANKS, limit_s=0.2)


def test_the_way_to_a_machine() -> None:
    """Would catch an address that is none of this machine's, and a made-up interface."""
    assert route("127.0.0.1", 9) == ("127.0.0.1", "127.0.0.1")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") is None
