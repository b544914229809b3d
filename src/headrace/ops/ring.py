"""Ring attention: keys and values travel from rank to rank, queries stay.

Shape legend: t_r tokens on rank r of R, N query heads, G key-value heads, D features of a head.
kv [t_r, 2 G, D] are the keys and values of one rank's tokens.

    step i = 0..R-1, source s = r - i (mod R): the keys and values of s are here
    forward    o, l <- merge(o, l; attention of the local queries over the blocks with s)
    backward   from the merged o and l: dq += ..., dkv of s is added here and travels one step
               behind kv; a rank's own share never leaves it, so both take R - 1 hops

Elements sent per rank, kv = G D, V = (R - 1) / R, T tokens of the pack: forward 2 V T kv;
backward 2 V T kv for kv and as many for dkv, which is fp32 for half types. What a causal block
structure leaves out is sent all the same. Kept: out and its log-sum-exp. On a device results and
dq of all steps are added once (ops/row_sums); dkv is read and written at each hop, where it is not
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.comm.collectives import Arriving, issue_shift
from headrace.ops.attention import Partial, add_gradients
from headrace.ops.core import Gradients, Heads, Saved, sum_dtype, wide_dtype
from headrace.ops.row_sums import RowSum
from headrace.spec.blocks import Block

__all__ = ["Onto", "Ring", "RingCore"]


Onto = Callable[[torch.Tensor | None], torch.Tensor]
"""Adds this rank's gradient, in place, to the sum [t_s, ...] of the ranks before; with None, starts
the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks of a ring: ``sizes[r]`` tokens on rank r, this one being ``member``."""

    sizes: Sequence[int]
    member: int
    group: dist.ProcessGroup | None

    @property
    def ranks(self) -> int:
        """R, the number of ranks."""
        return len(self.sizes)

    def source(self, step: int) -> int:
        """The rank whose rows are here after ``step`` hops."""
        return (self.member - step) % self.ranks

    def onward(self, x: torch.Tensor, step: int) -> Arriving | None:
        """Issue the hop after ``step`` of rows that travel around the ring; None after the last."""
        if step + 1 == self.ranks:
            return None
        return issue_shift(x, self.sizes[self.source(step + 1)], self.group)

    def sums(self, passing: torch.Tensor, attend: Callable[[torch.Tensor, int], Onto]) -> None:
        """The backward walk: ``attend(rows, source)`` computes what this rank has to add to the
        gradient of the ``rows`` of ``source``, and gives a function that adds it to what others
        have, to nothing where it is the first: so a kernel does not wait for what is to come.

        passing   [t_r, ...]  this rank's rows, passed round
        """
        coming, behind = self.onward(passing, 0), list[Arriving]()
        own = attend(passing, self.member)
        for step in range(1, self.ranks):
            assert coming is not None
            rows = coming.wait()
            coming = self.onward(rows, step)
            put = attend(rows, self.source(step))
            here = put(behind.pop().wait() if behind else None)
            behind.append(issue_shift(here, self.sizes[self.source(step + 1)], self.group))
        own(behind.pop().wait() if behind else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCore:
    """Ring attention; ``blocks(s)`` are the scores of the local queries with the tokens of s."""

    heads: Heads
    ring: Ring
    blocks: Callable[[int], Sequence[Block]]

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], (lse [N, t],))."""
        g, q = self.heads.keys, qkv[:, : self.heads.queries]
        partial = Partial(q)
        kv = qkv[:, self.heads.queries :].contiguous()
        for step in range(self.ring.ranks):
            coming = self.ring.onward(kv, step)
            blocks = self.blocks(self.ring.source(step))
            partial.add(q, kv[:, :g], kv[:, g:], blocks, self.heads.softcap)
            kv = coming.wait() if coming is not None else kv
        out, lse = partial.result(qkv.dtype)
        return out, (lse,)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> Gradients:
        """The gradients of qkv; keys and values travel around the ring again."""
        n, g = self.heads.queries, self.heads.keys
        dqkv = torch.empty_like(qkv, dtype=sum_dtype(qkv))
        mine, own = dqkv[:, :n], dqkv[:, n:]
        dq = RowSum(len(qkv), total=mine)

        def attend(kv: torch.Tensor, source: int) -> Onto:
            """Add the gradients of the local queries, and those of the keys and values of rank
            ``source``, which travel on with them."""
            sums = _KeySums(kv, g, own if source == self.ring.member else None)
            add_gradients(
                grad,
                qkv[:, :n],
                kv[:, :g],
                kv[:, g:],
                out,
                saved[0],
                self.blocks(source),
                dq,
                sums.dk,
                sums.dv,
                self.heads.softcap,
            )
            return sums.onto if sums.own is None else sums.finish

        self.ring.sums(qkv[:, n:].contiguous(), attend)
        dq.write(mine)
        return Gradients.of(dqkv.to(qkv.dtype), self.heads)


class _KeySums:
    """The gradient of keys and values ``kv`` [t, 2 G, D], of this rank's queries; into ``own``
    where they are this rank's."""

    def __init__(self, kv: torch.Tensor, g: int, own: torch.Tensor | None) -> None:
        self.kv, self.g, self.own = kv.new_empty(()).expand(kv.shape), g, own
        self.into = (None, None) if own is None else (own[:, :g], own[:, g:])
        self.dk, self.dv = (RowSum(len(kv), total=x) for x in self.into)

    def onto(self, behind: torch.Tensor | None) -> torch.Tensor:
        """The gradient added to ``behind``, the wide sum of the ranks before."""
        fresh = behind is None
        if behind is None:
            behind = self.kv.new_empty(self.kv.shape, dtype=wide_dtype(self.kv.dtype))
        for x, into in ((self.dk, behind[:, : self.g]), (self.dv, behind[:, self.g :])):
            x.write(into) if fresh else x.add_to(into)
        return behind

    def finish(self, behind: torch.Tensor | None) -> torch.Tensor:
        """Write the gradient into ``own``, with the sum ``behind`` of the other ranks."""
        assert self.own is not None, "of this rank's rows"
        if behind is not None:
            self.dk.add(0, behind[:, : self.g])
            self.dv.add(0, behind[:, self.g :])
        for x, into in zip((self.dk, self.dv), self.into, strict=True):
            assert into is not None, "of this rank's rows"
            x.write(into)
        return self.own
