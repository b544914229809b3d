"""Groups of ranks: made once per set of ranks, in one global order, and cached."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch.distributed as dist

from headrace.comm import waiting
from headrace.comm.messages import Messages
from headrace.comm.sockets import Connections
from headrace.comm.variables import number, under_torchrun
from headrace.errors import LaunchError, PlanMismatch

__all__ = ["Groups", "groups_here"]


def groups_here() -> Groups | None:
    """The groups of the world that the user began; None for a process alone. Raises LaunchError in
    one of several processes of a launcher where nobody began it: each would work for itself."""
    if dist.is_initialized():
        return Groups()
    if under_torchrun() and number("WORLD_SIZE") > 1:
        raise LaunchError(
            "torch.distributed", got="not begun", wanted="ranks that have met",
            hint="call torch.distributed.init_process_group() before",
        )  # fmt: skip
    return None


class Groups:
    """The process groups of one job.

    ``world`` is the group of links; the groups of methods are their own, so that a collective
    inside a layer is never matched with one of a link. Every rank must call :meth:`prepare` with
    the same sets of ranks: groups made in different orders on different ranks hang at first use.
    ``messages`` between stages have a group of their own, made when first prepared for.
    ``backend`` of the groups: the world's where it is None. ``connections`` remember theirs.
    """

    def __init__(
        self, *, backend: str | None = None, connections: Connections | None = None
    ) -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self._backend = backend
        self._connections = connections or Connections()
        self.renew()

    def renew(self) -> None:
        """Begin anew in a new world: the groups of the old one are forgotten."""
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialised"
        self.world: dist.ProcessGroup = world
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._messages: Messages | None = None

    def forget(self) -> None:
        """Let go of all groups: the world is about to end."""
        self._made.clear()
        self._messages = None
        del self.world

    def leave(self) -> None:
        """Leave all groups but the world, whoever waits in them, here or elsewhere: each is made
        anew when it is prepared for. The world must have been made by somebody else."""
        self._connections.cut()
        waiting.leave_behind()
        self._made.clear()
        self._messages = None

    def prepare(self, wanted: Iterable[tuple[int, ...]]) -> None:
        """Make the groups of ``wanted`` that do not exist yet. Collective: all ranks call it
        alike. Groups of one rank need no communicator and are skipped."""
        for ranks in sorted({r for r in wanted if len(r) > 1} - self._made.keys()):
            # Who is not in it opens nothing, and counts it only: looking for what was opened would
            # take a rank longer the more ranks, and so groups, there are.
            mine = self.rank in ranks
            with self._connections.opening() if mine else nullcontext():
                made = dist.new_group(list(ranks), backend=self._backend)
            self._made[ranks] = made if mine and isinstance(made, dist.ProcessGroup) else None

    def prepare_messages(self) -> None:
        """Make the group of messages unless it exists. Collective."""
        if self._messages is None and self.ranks > 1:
            with self._connections.opening():
                made = dist.new_group(list(range(self.ranks)), backend=self._backend)
            assert isinstance(made, dist.ProcessGroup), "every rank is in the world"
            self._messages = Messages(made)

    @property
    def messages(self) -> Messages:
        """Messages between stages. Raises PlanMismatch when they were never prepared."""
        if self._messages is None:
            raise PlanMismatch("messages", got="never prepared", wanted="prepared by all ranks")
        return self._messages

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
