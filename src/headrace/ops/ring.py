"""Ring attention: keys and values travel from rank to rank, queries stay.

Shape legend: t_r tokens on rank r of R, N query heads, G key-value heads, D features of a head.
kv [t_r, 2 G, D] are the keys and values of one rank's tokens.

    step i = 0..R-1, source s = r - i (mod R): the keys and values of s are here
    forward    o, l <- merge(o, l; attention of the local queries over the blocks with s)
    backward   from the merged o and l: dq += ..., dkv of s is added here and travels one step
               behind kv; a rank's own share never leaves it, so both take R - 1 hops

Elements sent per rank, kv = G D, V = (R - 1) / R, T tokens of the pack: forward 2 V T kv;
backward 2 V T kv for kv and as many for dkv, which is fp32 for half types. What a causal block
structure leaves out is sent all the same. Kept: out and its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.comm.collectives import Arriving, issue_shift
from headrace.ops.attention import Partial, attend_blocks_backward
from headrace.ops.core import Heads, Saved, wide_dtype
from headrace.spec.blocks import Block

__all__ = ["Ring", "RingCore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks of a ring: ``sizes[r]`` tokens on rank r, this one being ``member``."""

    sizes: Sequence[int]
    member: int
    group: dist.ProcessGroup | None

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.sizes)

    def source(self, step: int) -> int:
        """Whose rows are here after ``step`` hops."""
        return (self.member - step) % self.ranks

    def onward(self, x: torch.Tensor, step: int) -> Arriving | None:
        """Issue the hop after ``step`` of rows that all ranks pass round; None after the last."""
        if step + 1 == self.ranks:
            return None
        return issue_shift(x, self.sizes[self.source(step + 1)], self.group)

    def sums(
        self,
        passing: torch.Tensor,
        own: torch.Tensor,
        add: Callable[[torch.Tensor, int, torch.Tensor], None],
    ) -> None:
        """The backward walk: ``add(rows, source, into)`` writes what this rank has to add to the
        gradient of the ``rows`` of ``source`` into the uninitialised ``into``.

        passing   [t_r, ...]  this rank's rows, passed round
        own       [t_r, ...]  receives the whole gradient of this rank's rows
        """
        rows, coming = passing, self.onward(passing, 0)
        add(rows, self.member, own)
        behind: Arriving | None = None
        for step in range(1, self.ranks):
            assert coming is not None
            rows = coming.wait()
            coming = self.onward(rows, step)
            source = self.source(step)
            here = own.new_empty((self.sizes[source], *own.shape[1:]))
            add(rows, source, here)
            if behind is not None:
                here += behind.wait()
            behind = issue_shift(here, self.sizes[self.source(step + 1)], self.group)
        if behind is not None:
            own += behind.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCore:
    """Ring attention; ``blocks(s)`` are the scores of the local queries with the tokens of s."""

    heads: Heads
    ring: Ring
    blocks: Callable[[int], Sequence[Block]]

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], (lse [N, t],))."""
        g, q = self.heads.keys, qkv[:, : self.heads.queries]
        partial = Partial.empty(q)
        kv = qkv[:, self.heads.queries :].contiguous()
        for step in range(self.ring.ranks):
            coming = self.ring.onward(kv, step)
            partial.add(q, kv[:, :g], kv[:, g:], self.blocks(self.ring.source(step)))
            kv = coming.wait() if coming is not None else kv
        out, lse = partial.result(qkv.dtype)
        return out, (lse,)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> torch.Tensor:
        """dqkv [t, N + 2 G, D]."""
        n, g = self.heads.queries, self.heads.keys
        dqkv = torch.empty_like(qkv, dtype=wide_dtype(qkv.dtype))

        def add(kv: torch.Tensor, source: int, into: torch.Tensor) -> None:
            attend_blocks_backward(
                grad, qkv[:, :n], kv[:, :g], kv[:, g:], out, saved[0], self.blocks(source),
                dqkv[:, :n], into[:, :g], into[:, g:],
                fresh_q=source == self.ring.member, fresh_kv=True,
            )  # fmt: skip

        self.ring.sums(qkv[:, n:].contiguous(), dqkv[:, n:], add)
        return dqkv.to(qkv.dtype)
