"""Messages between neighbouring stages: activations forwards, their gradients backwards.

They have a group of their own: point-to-point messages are matched by order, and on one group with
others they would be taken for each other. Sizes are known from the program, so nothing is
negotiated; what arrives is checked by being received into a tensor of just that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.comm.waiting import Transfer

__all__ = ["Messages"]


@dataclass(slots=True)
class _Sent:
    """A message under way: its buffer lives as long as it does, and it is waited for once."""

    transfer: Transfer
    buffer: torch.Tensor


class Messages:
    """This rank's messages over ``group``, which spans the world.

    At most one message to each neighbour is under way: the next one waits for it, as memory for
    any number of them is not planned for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent: dict[int, _Sent] = {}

    def greet(self, peers: Sequence[int], device: str | torch.device) -> None:
        """Exchange a number with each of ``peers``, all at once: the first message between two
        ranks makes their connection, and has both stand still."""
        if not peers:
            return
        sent = torch.ones(len(peers), device=device)
        got = torch.zeros_like(sent)
        operations = [
            dist.P2POp(kind, x[at : at + 1], peer, self._group)
            for kind, x in ((dist.isend, sent), (dist.irecv, got))
            for at, peer in enumerate(peers)
        ]
        for work in dist.batch_isend_irecv(operations):
            Transfer(work, self._group, sent, here=True).wait()

    def send(self, x: torch.Tensor, peer: int) -> None:
        """Issue ``x`` to rank ``peer``; its values must not change until the next message there."""
        self._settle(peer)
        self._post([dist.P2POp(dist.isend, x.contiguous(), peer, self._group)])

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device, peer: int
    ) -> torch.Tensor:
        """What rank ``peer`` sends next, of this shape; waits for it."""
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, peer, self._group)]):
            Transfer(work, self._group, out, here=True).wait()
        return out

    def exchange(self, x: torch.Tensor, shape: Sequence[int], peer: int) -> torch.Tensor:
        """Send ``x`` and receive what the same neighbour sends, both posted at once."""
        self._settle(peer)
        out = x.new_empty(tuple(shape))
        receive = dist.P2POp(dist.irecv, out, peer, self._group)
        send = dist.P2POp(dist.isend, x.contiguous(), peer, self._group)
        self._post([send, receive])
        return out

    def settle(self) -> None:
        """Wait for all messages under way."""
        for peer in list(self._sent):
            self._settle(peer)

    def _settle(self, peer: int) -> None:
        sent = self._sent.pop(peer, None)
        if sent is not None:
            sent.transfer.wait()  # once: a second wait never returns

    def _post(self, operations: list[dist.P2POp]) -> None:
        """Post operations with one neighbour: the first is a send, which is left under way."""
        works = dist.batch_isend_irecv(operations)
        x = operations[0].tensor
        transfers = [Transfer(work, self._group, x, here=True) for work in works]
        if len(works) < len(operations):  # one handle for all of them
            transfers[0].wait()
            return
        self._sent[operations[0].peer] = _Sent(transfer=transfers[0], buffer=x)
        for transfer in transfers[1:]:
            transfer.wait()
