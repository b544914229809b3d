"""Groups of ranks: made once per set of ranks, in one global order, and cached.

[Note: opening communicators] NCCL makes a communicator at its first collective, and the connection
between two ranks at their first message: all members block until the last one has called it. In the
middle of a step, with transfers under way that others have not posted, they may wait for ever. So
every communicator is used once where it is made, before the step, by all its members, on the device
where it will be used; on CPUs as well, so that all runs do the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist

from headrace.comm import waiting
from headrace.comm.collectives import all_gather_rows, all_to_all_rows, meet
from headrace.comm.gpus import make_current
from headrace.comm.sockets import Connections
from headrace.comm.variables import number, under_torchrun
from headrace.comm.waiting import Transfer
from headrace.errors import LaunchError, PlanMismatch

__all__ = [
    "Groups",
    "Messages",
    "NodeGroups",
    "device_of",
    "groups_here",
]


@dataclass(slots=True)
class _Sent:
    """A sent message in flight: keeps its buffer alive, and is waited for once."""

    transfer: Transfer
    buffer: torch.Tensor


class Messages:
    """Point-to-point messages of this rank over ``group``, which spans the world.

    At most one message to each neighbour is in flight: the next one waits for it, as memory for
    any number of them is not planned for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent: dict[int, _Sent] = {}

    def greet(self, peers: Sequence[int], device: str | torch.device) -> None:
        """Exchange one number with each of ``peers`` at once, on ``device``: the first message
        between two ranks opens their connection, which blocks both."""
        if not peers:
            return
        greetings = torch.ones(len(peers), device=device)
        received = torch.zeros_like(greetings)
        operations = [
            dist.P2POp(operation, buffer[i : i + 1], peer, self._group)
            for operation, buffer in ((dist.isend, greetings), (dist.irecv, received))
            for i, peer in enumerate(peers)
        ]
        for work in dist.batch_isend_irecv(operations):
            Transfer(work, self._group, greetings, here=True).wait()

    def send(self, x: torch.Tensor, peer: int) -> None:
        """Start to send ``x`` to rank ``peer``; its values must not change until the next message
        to that rank."""
        self._settle(peer)
        self._post([dist.P2POp(dist.isend, x.contiguous(), peer, self._group)])

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device, peer: int
    ) -> torch.Tensor:
        """The next message of rank ``peer``, of this shape; waits for it."""
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, peer, self._group)]):
            Transfer(work, self._group, out, here=True).wait()
        return out

    def exchange(self, x: torch.Tensor, shape: Sequence[int], peer: int) -> torch.Tensor:
        """Send ``x`` to a neighbour and receive a tensor of ``shape`` from it, both posted at once:
        the result is there, what was sent may still be under way (:meth:`settle`)."""
        self._settle(peer)
        out = x.new_empty(tuple(shape))
        receive = dist.P2POp(dist.irecv, out, peer, self._group)
        send = dist.P2POp(dist.isend, x.contiguous(), peer, self._group)
        self._post([send, receive])
        return out

    def settle(self) -> None:
        """Wait for all messages in flight."""
        for peer in list(self._sent):
            self._settle(peer)

    def _settle(self, peer: int) -> None:
        """Wait for the last message that was sent to ``peer``, if it was not waited for."""
        sent = self._sent.pop(peer, None)
        if sent is not None:
            sent.transfer.wait()  # once: a second wait never returns

    def _post(self, operations: list[dist.P2POp]) -> None:
        """Post operations with one neighbour, of which the first is a send: receives are waited
        for, the send stays in flight where its backend gives it a handle of its own."""
        works = dist.batch_isend_irecv(operations)
        sent = operations[0].tensor
        transfers = [Transfer(work, self._group, sent, here=True) for work in works]
        if len(works) < len(operations):  # NCCL gives one handle for all of them
            transfers[0].wait()
            return
        self._sent[operations[0].peer] = _Sent(transfer=transfers[0], buffer=sent)
        for transfer in transfers[1:]:
            transfer.wait()


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of a model's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def groups_here(device: str | torch.device = "cpu") -> Groups | None:
    """The groups of the user's initialized world, for tensors on ``device``, which is made the
    current one; None for a single process. Raises LaunchError in one of several launched processes
    where no world is initialized: each would train alone."""
    make_current(device)
    if dist.is_initialized():
        return Groups(device=device)
    if under_torchrun() and number("WORLD_SIZE") > 1:
        raise LaunchError(
            "torch.distributed",
            got="not begun",
            wanted="ranks that have met",
            hint="call torch.distributed.init_process_group() before",
        )
    return None


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of a group's collectives on ``device``; None where its backend has none. It is
    given to new groups, as torch gives them its default timeout, not that of the world."""
    try:  # only the backend's private options tell
        backend = group._get_backend(torch.device(device.type))  # noqa: SLF001
        return backend.options._timeout  # type: ignore[no-any-return]  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return None


def _with_gloo(backends: str) -> str | None:
    """The ``backends`` of a world (``"cuda:nccl"``) with gloo for CPUs; None where they have one
    for CPUs."""
    if any(one.startswith("cpu:") for one in backends.split(",")):
        return None
    return f"cpu:gloo,{backends}"


_MOST_GROUPS = 64
"""Groups that a rank is in at a time: each holds memory of the device, or a socket to each member.
A rank of 1,024 is in ten, where groups are blocks whose sizes are powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroups:
    """What a rank needs for two-step transfers over several nodes: the ``sizes`` of the nodes in
    ranks, the group ``inside`` of its own, and ``aside``, the CUDA stream on which one step waits
    for the other, None on CPUs."""

    sizes: tuple[int, ...]
    inside: dist.ProcessGroup
    aside: torch.cuda.Stream | None


class Groups:
    """The process groups of one job.

    ``world`` is the group of all ranks, used for pulls and pushes of weights. Methods have groups
    of their own, so that a collective inside a layer is never matched with one of the world;
    ``messages`` between stages have one too. Every rank must call :meth:`prepare` with the same
    sets of ranks: groups made in different orders on different ranks hang at first use.

    The groups exchange tensors on ``device``, with ``backend`` (the world's where None) and the
    world's timeout; ``connections`` remembers their connections. A world that was begun without a
    way between CPUs (``nccl`` alone) is replaced by a group of all ranks that has gloo as well.
    A rank is in ``most`` groups at a time, or as many as one call of :meth:`prepare` wants: those
    whose last use is longest ago are destroyed, and made anew when they are wanted again.

    Where ranks are on several nodes, whose ``node_sizes`` are their numbers of neighbouring ranks,
    ``nodes`` is what pulls and pushes in two steps need, across the nodes and inside of them.
    """

    def __init__(
        self,
        *,
        backend: str | None = None,
        connections: Connections | None = None,
        device: str | torch.device = "cpu",
        node_sizes: Sequence[int] | None = None,
        most: int = _MOST_GROUPS,
    ) -> None:
        """The groups of this rank's world; ``node_sizes`` are the ranks of each node, in the order
        of the ranks, None where nodes play no role. Collective in a world without a way between
        CPUs."""
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        sizes = tuple(node_sizes or ())
        if node_sizes is not None and (sum(sizes) != self.ranks or min(sizes) < 1):
            raise LaunchError(
                "ranks of the nodes", got=list(sizes), wanted=f"{self.ranks} ranks in all"
            )
        self.node_sizes = sizes if 1 < len(sizes) < self.ranks else None
        self._backend, self._most = backend, most
        self._connections = connections or Connections()
        self.device = torch.device(device)
        self.renew()

    def renew(self) -> None:
        """Use the current default group as the world, and drop all groups of the former world."""
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialised"
        self._timeout = _timeout_of(world, self.device)
        backends = _with_gloo(str(dist.get_backend_config()))
        if backends is not None:
            self._backend = self._backend or backends
            made = dist.new_group(timeout=self._timeout, backend=backends)
            assert isinstance(made, dist.ProcessGroup), "every rank is in the world"
            world = made
        self.world: dist.ProcessGroup = world
        # Those that were wanted last come last.
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._counts = [0] * self.ranks  # of the groups that each rank is in
        self._messages: Messages | None = None
        self._nodes: NodeGroups | None = None
        self._met: set[int] = set()  # ranks with which a connection for messages is open
        self._opened = False  # whether the world's communicator has been used once

    def forget(self) -> None:
        """Drop all groups, as the world is about to be destroyed."""
        self._made.clear()
        self._messages = self._nodes = None
        del self.world

    def leave(self) -> None:
        """Leave all groups but the world, even while ranks wait in them: each is created again when
        it is prepared next. The world must belong to the user."""
        self._connections.cut()
        self._connections.settle()
        waiting.leave_behind()
        self._made.clear()
        self._counts = [0] * self.ranks
        self._messages = self._nodes = None
        self._met.clear()

    def prepare(self, wanted: Iterable[tuple[int, ...]]) -> None:
        """Make and open the groups of ``wanted`` (ranks of the world, ascending) that do not exist
        yet, and open the world. Collective: all ranks make the same call, and none returns before
        all groups exist; a rank that waits in it cannot be freed. Groups of one rank need no
        communicator and are skipped."""
        asked = sorted({r for r in wanted if len(r) > 1})
        missing = [ranks for ranks in asked if ranks not in self._made]
        for ranks in asked:
            if ranks in self._made:
                self._made[ranks] = self._made.pop(ranks)  # to the end
        if missing:
            self._destroy_for(missing, keep=frozenset(asked))
        if not self._opened and self.ranks > 1:
            self._open(self.world)
            self._opened = True
        if self.node_sizes and self._nodes is None:
            self._nodes = self._make_nodes(self.node_sizes)
        for ranks in missing:
            self._made[ranks] = self._make(ranks)
        if missing:
            meet(self.world)

    def _destroy_for(
        self, coming: Collection[tuple[int, ...]], *, keep: Collection[tuple[int, ...]]
    ) -> None:
        """Destroy the groups whose last use is longest ago, but none of ``keep``, until no rank
        will be in more than ``most`` once those that are ``coming`` are made. Every rank counts the
        groups of all ranks, so all destroy the same ones."""
        for rank in (rank for ranks in coming for rank in ranks):
            self._counts[rank] += 1
        for ranks in list(self._made):
            if max(self._counts) <= self._most:
                return
            if ranks in keep or all(self._counts[rank] <= self._most for rank in ranks):
                continue
            group = self._made.pop(ranks)
            for rank in ranks:
                self._counts[rank] -= 1
            if group is not None:
                self._settle()
                dist.destroy_process_group(group)

    def _make(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Make the group of ``ranks``, and open it; returns it, None where this rank is not in
        it."""
        # A rank outside of the group opens nothing and only counts it: a search for new
        # connections would take longer the more ranks, and so groups, there are.
        is_member = self.rank in ranks
        with self._connections.opening() if is_member else nullcontext():
            group = self._new(ranks)
        if group is None:
            return None
        self._open(group)
        return group

    def _make_nodes(self, node_sizes: tuple[int, ...]) -> NodeGroups:
        """Create the groups of all nodes, as every rank does in the same order; returns what this
        rank needs of them."""
        stops = [*accumulate(node_sizes)]
        made = [
            self._make(range(stop - size, stop))
            for size, stop in zip(node_sizes, stops, strict=True)
        ]
        inside = next(group for group in made if group is not None)
        aside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        return NodeGroups(sizes=node_sizes, inside=inside, aside=aside)

    @property
    def nodes(self) -> NodeGroups | None:
        """The groups for pulls and pushes in two steps; None where there are no several nodes.
        Raises PlanMismatch when they were never prepared."""
        if self.node_sizes and self._nodes is None:
            raise PlanMismatch("groups of nodes", got="never prepared", wanted="prepared by all")
        return self._nodes

    def prepare_messages(self, peers: Collection[int] = ()) -> None:
        """Make the group of messages unless it exists, and open the ways to ``peers``, with whom
        this rank will exchange some. Collective: every rank calls it, and peers name each other."""
        if self.ranks == 1:
            return
        if self._messages is None:
            with self._connections.opening():
                made = self._new(range(self.ranks))
            assert made is not None, "every rank is in the world"
            self._open(made)
            self._messages = Messages(made)
            meet(self.world)
        new = sorted(set(peers) - self._met)
        self._messages.greet(new, self.device)
        self._settle()
        self._met.update(new)

    def _new(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A new group of ``ranks``; None where this rank is not in it. Collective over the
        world."""
        group = dist.new_group(list(ranks), timeout=self._timeout, backend=self._backend)
        if not isinstance(group, dist.ProcessGroup):  # torch's marker for a group without this rank
            return None
        self._connections.keep(group)
        return group

    def _open(self, group: dist.ProcessGroup) -> None:
        """Run an all-to-all and an all-gather of one number per rank in a group, the two
        collectives that layouts use: all its members meet, and its communicator is made now."""
        numbers = torch.ones(dist.get_world_size(group), device=self.device)
        rows = [1] * len(numbers)
        all_to_all_rows(numbers, rows, rows, group)
        all_gather_rows(numbers[:1], rows, group)
        self._settle()

    def _settle(self) -> None:
        """Wait until the device has done the collectives: on a GPU, waiting for a transfer makes
        only the device wait, not the host."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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
                f"group {ranks}",
                got=f"rank {self.rank} outside it or group never made",
                wanted="a group prepared by all ranks",
            )
        return group
