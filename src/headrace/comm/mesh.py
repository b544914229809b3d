"""Groups of ranks: made once per set of ranks, in one global order, and cached."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from headrace.errors import PlanMismatch

__all__ = ["Groups"]


class Groups:
    """The process groups of one job.

    ``world`` is the group of links; the groups of methods are their own, so that a collective
    inside a layer is never matched with one of a link. Every rank must call :meth:`prepare` with
    the same sets of ranks: groups made in different orders on different ranks hang at first use.
    ``backend`` of the groups: the world's where it is None.
    """

    def __init__(self, *, backend: str | None = None) -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialised"
        self.world: dist.ProcessGroup = world
        self._backend = backend
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def prepare(self, wanted: Iterable[tuple[int, ...]]) -> None:
        """Make the groups of ``wanted`` that do not exist yet. Collective: all ranks call it
        alike. Groups of one rank need no communicator and are skipped."""
        for ranks in sorted({r for r in wanted if len(r) > 1} - self._made.keys()):
            made = dist.new_group(list(ranks), backend=self._backend)
            member = self.rank in ranks and isinstance(made, dist.ProcessGroup)
            self._made[ranks] = made if member else None

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of ``ranks``, None for a single rank. Raises PlanMismatch when it was never
        prepared or this rank is outside it."""
        if len(ranks) == 1:
            return None
        group = self._made.get(ranks)
        if group is None:
            raise PlanMismatch(
                f"group {ranks}", got=f"rank {self.rank} outside it or group never made",
                wanted="a group prepared by all ranks",
            )  # fmt: skip
        return group
