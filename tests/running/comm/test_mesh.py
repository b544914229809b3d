"""Groups: made alike on all ranks, found again, refused where they do not exist."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from headrace.comm.mesh import Groups
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
