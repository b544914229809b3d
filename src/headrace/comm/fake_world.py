"""One rank of a job without the others, in a single process.

Collectives of these groups return at once. What they would have delivered is whatever was in the
buffer (all-to-all copies what it sends), so results mean nothing; shapes, bytes and the work of
this rank are those of the real job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.comm.mesh import Groups

__all__ = ["fake_groups", "fake_world"]

_BACKEND = "fake"


@contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[Groups]:
    """A world of ``ranks`` in which this process is ``rank`` and no other process exists.

    torch.distributed must not be initialised; afterwards it is not.
    """
    dist.init_process_group(_BACKEND, rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield Groups()
    finally:
        dist.destroy_process_group()


def fake_groups() -> Groups:
    """Groups in a real world whose collectives return at once without communication: to try a
    rank's part where it could fail."""
    return Groups(backend=_BACKEND)
