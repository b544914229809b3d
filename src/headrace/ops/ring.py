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
"""A function that adds this rank's part of the gradient of rank s's rows to a partial sum
[t_s, ...], which the ranks before have added up, in place, and returns the sum. Given None, as the
first rank is, it returns this rank's part alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks of a ring: ``sizes[r]`` tokens on rank r, this one being ``member``."""

    sizes: Sequence[int]
    member: int
    group: dist.ProcessGroup | None

    @property
    def ranks(self) -> int:
        """The number R of ranks in the ring."""
        return len(self.sizes)

    def source(self, step: int) -> int:
        """The rank whose rows are on this one after ``step`` hops."""
        return (self.member - step) % self.ranks

    def onward(self, x: torch.Tensor, step: int) -> Arriving | None:
        """Send rows ``x``, which have made ``step`` hops around the ring, on to the next rank, and
        receive those of the rank before. None where they have made their last hop."""
        if step + 1 == self.ranks:
            return None
        return issue_shift(x, self.sizes[self.source(step + 1)], self.group)

    def sums(self, passing: torch.Tensor, attend: Callable[[torch.Tensor, int], Onto]) -> None:
        """Communicate for a backward: every rank's rows travel around the ring, and the partial sum
        of their gradient follows one step behind and ends at the rank that holds these rows.

        ``passing`` [t_r, ...] are this rank's rows. ``attend(rows, source)`` computes this rank's
        part of the gradient of the ``rows`` of rank ``source``, and returns a function that adds it
        to the partial sum once that has arrived, so that kernels need not wait for it. At the end
        the sum of the other ranks for this rank's own rows (None without other ranks) is given to
        the function that ``attend`` returned for these rows."""
        # the queue holds the partial sum that is on its way to this rank
        next_rows, partial_sums = self.onward(passing, 0), list[Arriving]()
        add_own = attend(passing, self.member)
        for step in range(1, self.ranks):
            assert next_rows is not None
            rows = next_rows.wait()
            next_rows = self.onward(rows, step)
            add_to = attend(rows, self.source(step))
            dsum = add_to(partial_sums.pop().wait() if partial_sums else None)
            partial_sums.append(issue_shift(dsum, self.sizes[self.source(step + 1)], self.group))
        # the sum of this rank's own rows arrives last
        add_own(partial_sums.pop().wait() if partial_sums else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCore:
    """Ring attention with its backward. ``blocks(s)`` are the scores that count between the local
    queries and the keys of rank s, as row intervals of both."""

    heads: Heads
    ring: Ring
    blocks: Callable[[int], Sequence[Block]]

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], (lse [N, t],))."""
        kv_heads, q = self.heads.keys, qkv[:, : self.heads.queries]
        partial = Partial(q)
        kv = qkv[:, self.heads.queries :].contiguous()
        for step in range(self.ring.ranks):
            # sent on before the kernels run, so that both overlap
            next_kv = self.ring.onward(kv, step)
            blocks = self.blocks(self.ring.source(step))
            partial.add(q, kv[:, :kv_heads], kv[:, kv_heads:], blocks, self.heads.softcap)
            kv = next_kv.wait() if next_kv is not None else kv
        out, lse = partial.result(qkv.dtype)
        return out, (lse,)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> Gradients:
        """The gradients of qkv; keys and values travel around the ring again."""
        queries, kv_heads = self.heads.queries, self.heads.keys
        dqkv = torch.empty_like(qkv, dtype=sum_dtype(qkv))
        dq_rows, dkv_own = dqkv[:, :queries], dqkv[:, queries:]
        dq = RowSum(len(qkv), total=dq_rows)

        def attend(kv: torch.Tensor, source: int) -> Onto:
            """Add to the gradient ``dq`` of the local queries. Returns a function that adds the
            gradients of the keys and values ``kv`` of rank ``source`` to the partial sum that comes
            round the ring."""
            sums = _KeySums(kv, kv_heads, dkv_own if source == self.ring.member else None)
            add_gradients(
                grad,
                qkv[:, :queries],
                kv[:, :kv_heads],
                kv[:, kv_heads:],
                out,
                saved[0],
                self.blocks(source),
                dq,
                sums.dk,
                sums.dv,
                self.heads.softcap,
            )
            return sums.onto if sums.own is None else sums.finish

        self.ring.sums(qkv[:, queries:].contiguous(), attend)
        dq.write(dq_rows)
        return Gradients.of(dqkv.to(qkv.dtype), self.heads)


class _KeySums:
    """This rank's part of the gradient of one rank's keys and values [t, 2 G, D], the part that
    comes through its queries: the sums ``dk`` and ``dv`` [t, G, D]. If the keys are this rank's,
    ``own`` [t, 2 G, D] is the tensor for the gradient summed over all ranks, else None."""

    def __init__(self, kv: torch.Tensor, kv_heads: int, own: torch.Tensor | None) -> None:
        """Empty sums for the keys and values ``kv`` [t, 2 G, D]."""
        # of kv only shape and type are needed: a view of one element keeps them without memory
        self.kv, self.kv_heads, self.own = kv.new_empty(()).expand(kv.shape), kv_heads, own
        # the parts of ``own`` for keys and values
        self.into = (None, None) if own is None else (own[:, :kv_heads], own[:, kv_heads:])
        self.dk, self.dv = (RowSum(len(kv), total=x) for x in self.into)

    def onto(self, behind: torch.Tensor | None) -> torch.Tensor:
        """Add the gradient in place to ``behind`` [t, 2 G, D], the sum of the ranks before in at
        least fp32, None on the first rank; returns the sum."""
        is_first = behind is None
        if behind is None:
            behind = self.kv.new_empty(self.kv.shape, dtype=wide_dtype(self.kv.dtype))
        for row_sum, part in (
            (self.dk, behind[:, : self.kv_heads]),
            (self.dv, behind[:, self.kv_heads :]),
        ):
            if is_first:
                row_sum.write(part)
            else:
                row_sum.add_to(part)
        return behind

    def finish(self, behind: torch.Tensor | None) -> torch.Tensor:
        """Write the gradient of this rank's keys and values, summed over all ranks, into ``own``
        and return it; ``behind`` [t, 2 G, D] is the sum of the other ranks, None where there are
        none."""
        assert self.own is not None, "of this rank's rows"
        if behind is not None:
            self.dk.add(0, behind[:, : self.kv_heads])
            self.dv.add(0, behind[:, self.kv_heads :])
        for row_sum, part in zip((self.dk, self.dv), self.into, strict=True):
            assert part is not None, "of this rank's rows"
            row_sum.write(part)
        return self.own
