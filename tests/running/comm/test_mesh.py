"""Groups: made alike on all ranks, found again, refused where they do not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.comm.fake_world import fake_world
from headrace.comm.mesh import Groups, groups_here
from headrace.errors import PlanMismatch
from ranks import run_ranks

OVERLAPPING = [(0, 1), (1, 2), (0, 2), (0, 1, 2), (2,)]


def _met() -> dict[str, Any]:
    groups = Groups()
    order = OVERLAPPING[groups.rank :] + OVERLAPPING[: groups.rank]
    groups.prepare(order)
    sums = {}
    for ranks in OVERLAPPING:
        if groups.rank in ranks and len(ranks) > 1:
            value = torch.tensor([2.0**groups.rank])
            dist.all_reduce(value, group=groups.get(ranks))
            sums[ranks] = float(value)
    before = {ranks: groups.get(ranks) for ranks in sums}
    groups.prepare(reversed(OVERLAPPING))
    return {
        "sums": sums,
        "cached": all(groups.get(ranks) is group for ranks, group in before.items()),
        "apart": all(group is not groups.world for group in before.values()),
        "sizes": {ranks: dist.get_world_size(group) for ranks, group in before.items()},
        "alone": groups.get((2,)),
        "place": (groups.rank, groups.ranks),
    }


def test_groups_meet_whatever_the_order_they_were_asked_in() -> None:
    """Would catch groups made in each rank's own order (they hang at first use), a group made
    again for each plan, and a layer's group that shares a communicator with links."""
    for rank, got in enumerate(run_ranks(3, _met, timeout_s=20.0)):
        mine = [ranks for ranks in OVERLAPPING if rank in ranks and len(ranks) > 1]
        assert got["sums"] == {ranks: sum(2.0**r for r in ranks) for ranks in mine}
        assert got["sizes"] == {ranks: len(ranks) for ranks in mine}
        assert got["cached"]
        assert got["apart"]
        assert got["alone"] is None
        assert got["place"] == (rank, 3)


def _refused() -> list[str]:
    groups = Groups()
    groups.prepare([(0, 1)])
    out = []
    for ranks in ((0, 1), (1, 2)):
        try:
            out.append("found" if groups.get(ranks) else "nothing")
        except PlanMismatch as error:
            out.append(str(error))
    return out


def test_a_group_that_is_not_there_is_refused() -> None:
    """Would catch None returned to a rank outside: it would run alone, with wrong results."""
    inside, _, outside = run_ranks(3, _refused)
    assert inside[0] == "found"
    assert outside[0].startswith("group (0, 1): got rank 2 outside it")
    assert all("wanted a group prepared by all ranks" in got[1] for got in (inside, outside))


class Lazy:
    """What torch's collectives are asked for, as communicators of NCCL see it: each is made at its
    first use, by all its members, and each way between two ranks at their first message."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._exchange, self._batch = dist.all_to_all_single, dist.batch_isend_irecv
        dist.all_to_all_single = self.exchange
        dist.batch_isend_irecv = self.batch

    def exchange(self, *args: Any, group: dist.ProcessGroup, **named: Any) -> Any:
        self._note(tuple(dist.get_process_group_ranks(group)))
        return self._exchange(*args, group=group, **named)

    def batch(self, operations: list[dist.P2POp]) -> Any:
        for peer in sorted({operation.peer for operation in operations}):
            self._note(peer)
        return self._batch(operations)

    def _note(self, what: Any) -> None:
        if what not in self.made:
            self.made.append(what)


def _opened() -> tuple[list[Any], list[Any], list[Any]]:
    """What was made when groups were, when messages were, and by using both."""
    lazy, groups = Lazy(), Groups()
    groups.prepare(reversed(OVERLAPPING))
    first = list(lazy.made)
    line = {0: (1,), 1: (0, 2), 2: (1,)}[groups.rank]
    groups.prepare_messages(line)
    groups.prepare_messages(line)
    second = lazy.made[len(first) :]
    for ranks in OVERLAPPING:
        if groups.rank in ranks and len(ranks) > 1:
            out = torch.empty(len(ranks))
            dist.all_to_all_single(out, torch.ones(len(ranks)), group=groups.get(ranks))
    for peer in line:
        groups.messages.send(torch.full((2,), float(groups.rank)), peer)
    for peer in line:
        assert float(groups.messages.receive((2,), torch.float32, "cpu", peer)[0]) == peer
    groups.messages.settle()
    return first, second, lazy.made[len(first) + len(second) :]


def test_communicators_are_opened_where_they_are_made() -> None:
    """Catches the first use of a communicator, or of the way between two stages, in a step: all its
    members stand still there, with transfers under way."""
    for rank, (first, second, later) in enumerate(run_ranks(3, _opened)):
        mine = sorted(ranks for ranks in OVERLAPPING if rank in ranks and len(ranks) > 1)
        assert first == [(0, 1, 2), *(ranks for ranks in mine if len(ranks) < 3)]
        assert [x for x in second if isinstance(x, int)] == [{0: 1, 1: 0, 2: 1}[rank]] + (
            [2] if rank == 1 else []
        )
        assert later == []


def _timeouts() -> list[float]:
    groups = Groups()
    groups.prepare([(0, 1)])
    groups.prepare_messages([1 - groups.rank])
    made = [groups.world, groups.get((0, 1)), groups.messages._group]
    backends = [group._get_backend(torch.device("cpu")) for group in made if group is not None]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_groups_wait_as_long_as_the_world() -> None:
    """Catches groups with torch's own timeout, which is ten minutes on NCCL: a rank that waits for
    another's checkpoint would be ended by it."""
    assert run_ranks(2, _timeouts, timeout_s=37.0) == [[37.0] * 3] * 2


def _without_options() -> int:
    dist.destroy_process_group()
    with fake_world(0, 2) as groups:
        groups.prepare([(0, 1)])
        return dist.get_world_size(groups.get((0, 1)))


def test_groups_of_a_backend_without_a_timeout() -> None:
    """Catches a backend that knows none."""
    assert run_ranks(1, _without_options) == [2]


def _asked_for() -> list[object]:
    new, asked = dist.new_group, list[object]()

    def recorded(ranks: list[int], *, backend: str | None, **more: Any) -> Any:
        asked.append(backend)
        return new(ranks, **more)

    dist.new_group = recorded
    try:
        for backend in ("nccl", None):
            groups = Groups(backend=backend)
            groups.prepare([(0, 1)])
            groups.prepare_messages([1 - groups.rank])
    finally:
        dist.new_group = new
    return asked


def test_groups_of_a_device_have_no_sockets_of_their_own() -> None:
    """Catches groups that open gloo's connections between all pairs of their ranks beside NCCL's:
    of hundreds of groups on each rank these are more files than a process may have."""
    assert run_ranks(2, _asked_for) == [["nccl", "nccl", None, None]] * 2


PAIRS = [(0, 1), (1, 2), (0, 2), (0, 3), (1, 3), (2, 3), (0, 1, 2), (0, 1, 2, 3)]


def _bounded() -> dict[str, Any]:
    groups = Groups(most=3)
    found: dict[str, Any] = {"sums": [], "most": 0}
    for ranks in [*PAIRS, *PAIRS[:3]]:
        groups.prepare([ranks])
        if groups.rank in ranks:
            value = torch.tensor([1.0 + groups.rank])
            dist.all_reduce(value, group=groups.get(ranks))
            found["sums"].append(float(value))
        found["most"] = max(found["most"], len(dist.distributed_c10d._world.pg_map))
    groups.prepare([(0, 1), (0, 2), (0, 3), (0, 1, 2)])  # more than 3, in one call
    found["together"] = [groups.rank in ranks for ranks in groups._made]
    try:
        groups.get((0, 1, 2, 3))
    except PlanMismatch:
        found["gone"] = True
    return found


def test_groups_are_bounded() -> None:
    """Catches communicators that grow in number for as long as a run goes on, ranks that destroy
    others than their peers do, and one that a plan needs destroyed for another of its own."""
    for rank, found in enumerate(run_ranks(4, _bounded, timeout_s=30.0)):
        asked = [ranks for ranks in [*PAIRS, *PAIRS[:3]] if rank in ranks]
        assert found["sums"] == [sum(1.0 + r for r in ranks) for ranks in asked]
        assert found["most"] <= 1 + 3  # the world, too
        assert found["gone"]
        assert len(found["together"]) >= 4


def _beside(folder: Path) -> tuple[float, str]:
    rank = dist.get_rank()

    def begin(backend: str, name: str) -> None:
        store = dist.FileStore(str(folder / name), 2)
        dist.init_process_group(backend, store=store, rank=rank, world_size=2)

    dist.destroy_process_group()
    begin("cuda:fake", "without")
    groups = Groups()
    groups.prepare([(0, 1)])
    value = torch.tensor([1.0 + groups.rank])
    dist.all_reduce(value, group=groups.get((0, 1)))
    other = torch.tensor([1.0 + groups.rank])
    dist.all_reduce(other, group=groups.world)
    backends = str(dist.get_backend_config())
    dist.destroy_process_group()
    begin("gloo", "with")
    return float(value + other), backends


def test_a_world_without_a_way_between_cpus_gets_one(tmp_path: Path) -> None:
    """Catches a refusal of ``init_process_group("nccl")``, which most scripts call, and agreements
    that the world's own backend would have to carry."""
    for total, backends in run_ranks(2, _beside, tmp_path):
        assert backends == "cuda:fake"
        assert total == 2 * (1.0 + 2.0)


def test_the_device_of_a_model_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches kernels that are started on another device than their tensors are on."""
    made = list[Any]()
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    assert groups_here("cuda:1") is None
    assert groups_here("cpu") is None
    assert made == ["cuda:1"]
