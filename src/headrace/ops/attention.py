"""Attention over packed documents: the one entry point to attention kernels.

Shape legend: Q query and K key tokens, N query heads, G key-value heads (G divides N), D features
of a head; T tokens of a pack. Blocks of rows and columns tell which scores count.

A back end computes runs of documents; the first of ``BACKENDS`` that supports the tensors is used.
The log-sum-exp is natural, of scaled scores, [N, Q], fp32 (fp64 for fp64).

[Note: results over some of the keys] Softmax over all keys of a row follows from softmaxes over
parts of them: with l = logaddexp(l1, l2) the output is o1 e^(l1 - l) + o2 e^(l2 - l). The weights
sum to one, so this is o1 + (o2 - o1) w, w = e^(l2 - l) = sigmoid(l2 - l1). A backward needs no such
sum: given the output and the log-sum-exp over ALL keys, gradients of each part simply add.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from headrace.errors import SpecError
from headrace.ops.fused import fused, widened
from headrace.ops.kernels import Backend, CpuFlash, Pair, Plain, Triple, wide
from headrace.ops.kernels_cuda import CudaEfficient, CudaFlash
from headrace.ops.row_sums import (
    HELD,
    KernelRun,
    MarkedRows,
    RowSum,
    adds_at_once,
    runs_of,
    segments,
)
from headrace.spec.blocks import Block, document_blocks

__all__ = [
    "BACKENDS",
    "Partial",
    "add_gradients",
    "attend",
    "attend_blocks",
    "attend_blocks_backward",
]

BACKENDS: list[Backend] = [CpuFlash(), CudaFlash(), CudaEfficient(), Plain()]
"""All back ends, in order of preference."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], causal: bool
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v within each document of a pack.

        q         [T, N, D]
        k, v      [T, G, D]
        lengths   tokens of each document in pack order, summing to T
        returns   [T, N, D]
        backward  from q, k, v, the output and its log-sum-exp; scores are never kept

    Raises SpecError when the shapes disagree.
    """
    if sum(lengths) != q.shape[0] or k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise SpecError(
            "attention",
            got=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            wanted=f"{sum(lengths)} tokens in each",
        )
    if q.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        raise SpecError(
            "attention", got=f"{q.shape[1]} query heads", wanted=f"a multiple of {k.shape[1]}"
        )
    return _Attend.apply(q, k, v, document_blocks(lengths, causal))  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    """Autograd of :func:`attend`."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Any
    ) -> torch.Tensor:
        """Attention out [queries, heads, features] of packed documents, whose kernels run by
        ``blocks``."""
        out, lse = attend_blocks(q, k, v, blocks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradients of q, k and v from that of the result."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        attend_blocks_backward(
            grad, q, k, v, out, lse, ctx.blocks, dq, dk, dv, fresh_q=True, fresh_kv=True
        )
        return dq, dk, dv, None


def attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Iterable[Block],
    softcap: float = 0.0,
) -> Pair:
    """softmax(q k^T / sqrt(D)) v over the scores in ``blocks``, without autograd.

        q         [Q, N, D]
        k, v      [K, G, D]
        softcap   c above 0: scores are c tanh(score / c)
        returns   out [Q, N, D] in the type of q, lse [N, Q]

    Rows of several blocks are summed wide. Rows of no block get out 0 and lse -inf.
    """
    backend = _backend(q, softcap)
    runs = runs_of(blocks, backend.documents) if q.shape[1] else ()
    if len(runs) == 1 and runs[0].queries == slice(0, q.shape[0]):
        part, part_lse = _forward(backend, q, k, v, runs[0])
        return part.contiguous(), part_lse.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=wide(q))
    touched, several = _touched(runs)
    sums = [Partial(q[a:b]) for a, b in several]
    for run in runs:
        part, part_lse = _forward(backend, q, k, v, run)
        if not sums:
            out[run.queries], lse[:, run.queries] = part, part_lse
            continue
        start = run.queries.start
        for a, b, shared in several.pieces(start, run.queries.stop):
            rows, scale = part[a - start : b - start], part_lse[:, a - start : b - start]
            if shared:
                at = several.index(a)
                sums[at].merge(a - several.start(at), rows, scale)
            else:
                out[a:b], lse[:, a:b] = rows, scale
    for (a, b), total in zip(several, sums, strict=True):
        total.write(out[a:b], lse[:, a:b])
    for a, b in _unmarked(touched, q.shape[0]):
        out[a:b], lse[:, a:b] = 0, -math.inf
    return out, lse


class Partial:
    """Results over some of the keys, to which more are added, one step of a ring after the other.

    A CPU merges at once into sums [Q, N, D] and [N, Q]; a device holds results, see
    [Note: held parts] of ``row_sums``.
    """

    __slots__ = ("_held", "_like", "_parts", "_sums", "_touched")

    def __init__(self, q: torch.Tensor) -> None:
        """Start with no keys, for queries like ``q`` [Q, N, D]."""
        self._like, self._touched, self._held = q, MarkedRows(), 0
        self._sums: Pair | None = None
        self._parts: list[_Result] = []

    def add(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        blocks: Iterable[Block],
        softcap: float = 0.0,
    ) -> None:
        """Attend ``q`` [Q, N, D] to more keys ``k`` and values ``v`` [K, G, D] and merge what comes
        out. ``blocks`` say which scores count, by rows of ``q`` and of ``k``. A rank may have no
        heads (N = 0)."""
        backend = _backend(q, softcap)
        for run in runs_of(blocks, backend.documents) if q.shape[1] else ():
            self.merge(run.queries.start, *_forward(backend, q, k, v, run))

    def merge(self, start: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add results [q, N, D] and [N, q] over other keys, of the rows from ``start``."""
        if adds_at_once(out):
            self._merge_now(start, out, lse)
            return
        self._parts.append(_Result(start, out, lse))
        self._held += len(out)
        if self._held > HELD * len(self._like):
            joined = self._new(wide(self._like))
            self._write(*joined)
            spans = [(part.start, part.start + len(part.out)) for part in self._parts]
            self._parts = [
                _Result(a, joined[0][a:b], joined[1][:, a:b])
                for a, b, of in segments(spans, len(self._like))
                if of
            ]
            self._held = len(self._like)

    def result(self, dtype: torch.dtype) -> Pair:
        """(out [Q, N, D] in ``dtype``, lse [N, Q]): 0 and -inf where no key was added."""
        if self._sums is not None and self._sums[0].dtype == dtype:
            out, lse = self._sums
        else:
            out, lse = self._new(dtype)
        self.write(out, lse)
        return out, lse

    def write(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """:meth:`result` into ``out`` [Q, N, D] and ``lse`` [N, Q]."""
        if self._sums is None:
            self._write(out, lse)
            return
        if out is not self._sums[0]:
            out.copy_(self._sums[0])
        if lse is not self._sums[1]:
            lse.copy_(self._sums[1])
        for a, b in _unmarked(self._touched, len(self._like)):
            out[a:b], lse[:, a:b] = 0, -math.inf

    def _new(self, dtype: torch.dtype) -> Pair:
        """Uninitialised out [rows, heads, features] of ``dtype`` and lse [heads, rows] in at least
        fp32."""
        rows, heads = self._like.shape[:2]
        out = self._like.new_empty(self._like.shape, dtype=dtype)
        return out, self._like.new_empty((heads, rows), dtype=wide(self._like))

    def _write(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the held results into ``out`` and ``lse``."""
        spans = [(part.start, part.start + len(part.out)) for part in self._parts]
        for a, b, of in segments(spans, len(self._like)):
            parts = [self._parts[i].rows(a, b) for i in of]
            if len(parts) > 1:
                _merge_all(out[a:b], lse[:, a:b], [p[0] for p in parts], [p[1] for p in parts])
            else:
                out[a:b], lse[:, a:b] = parts[0] if parts else (0, -math.inf)

    def _merge_now(self, start: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge attention out [rows, heads, features] over more keys, with its log-sum-exp lse
        [heads, rows], into the rows from ``start`` on."""
        self._sums = self._sums or self._new(wide(self._like))
        for a, b, known in self._touched.mark(start, start + out.shape[0]):
            rows, scale = out[a - start : b - start], lse[:, a - start : b - start]
            mine, mine_scale = self._sums[0][a:b], self._sums[1][:, a:b]
            if known:
                _merge(mine, mine_scale, rows, scale)
            else:
                mine.copy_(rows)
                mine_scale.copy_(scale)


class _Result(NamedTuple):
    """Of the queries from ``start``: out [q, N, D] and lse [N, q] over some keys."""

    start: int
    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, start: int, stop: int) -> Pair:
        at = slice(start - self.start, stop - self.start)
        return self.out[at], self.lse[:, at]


def attend_blocks_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Iterable[Block],
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    fresh_q: bool,
    fresh_kv: bool,
) -> None:
    """Add the gradients through the scores in ``blocks``, without autograd.

        grad, q      [Q, N, D]
        k, v         [K, G, D]
        out, lse     [Q, N, D], [N, Q]   over all keys, those of other blocks too
        dq           [Q, N, D]           of any strides, perhaps wider than q
        dk, dv       [K, G, D]           likewise

    ``fresh_q``: dq holds nothing yet and is written whole; ``fresh_kv``: dk and dv.
    """
    of_q = RowSum(len(dq), total=dq, fresh=fresh_q)
    of_k, of_v = (RowSum(len(x), total=x, fresh=fresh_kv) for x in (dk, dv))
    add_gradients(grad, q, k, v, out, lse, blocks, of_q, of_k, of_v)
    for total, x, fresh in ((of_q, dq, fresh_q), (of_k, dk, fresh_kv), (of_v, dv, fresh_kv)):
        total.write(x) if fresh else total.add_to(x)


def add_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Iterable[Block],
    dq: RowSum,
    dk: RowSum,
    dv: RowSum,
    softcap: float = 0.0,
) -> None:
    """Add gradients of attention over ``blocks`` to ``dq`` (Q rows), ``dk`` and ``dv`` (K rows).

    grad, q, out [Q, N, D]; k, v [K, G, D]; lse [N, Q] over all keys. A sum may keep a part instead
    of adding it at once. A rank without heads (N = 0) adds nothing.
    """
    backend = _backend(q, softcap)
    for run in runs_of(blocks, backend.documents) if q.shape[1] else ():
        at, of = run.queries, run.keys
        parts = _backward(backend, grad[at], q[at], k[of], v[of], out[at], lse[:, at], run)
        dq.add(at.start, parts[0])
        dk.add(of.start, parts[1])
        dv.add(of.start, parts[2])


def _merge(out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor) -> None:
    """Merge results over some keys into results over other keys, in place."""
    weight = (scale - lse).sigmoid_().t()[..., None]
    out.lerp_(rows.to(out.dtype), weight)
    torch.logaddexp(lse, scale, out=lse)


def _merge_all(
    out: torch.Tensor, lse: torch.Tensor, rows: list[torch.Tensor], scales: list[torch.Tensor]
) -> None:
    """Merge the results of all parts into ``out`` and ``lse``, which are uninitialized."""
    _log_sum(lse, scales)
    _weigh_up(out, lse, rows, scales)


@fused("log_sum_(Tensor(a!) lse, Tensor[] scales) -> ()")
def _log_sum(lse: torch.Tensor, scales: list[torch.Tensor]) -> None:
    """Write log(sum of exp) of ``scales``, each [heads, rows], into ``lse``."""
    total = scales[0]
    for scale in scales[1:]:
        total = torch.logaddexp(total, scale)
    lse.copy_(total)


@fused("weigh_up_(Tensor(a!) out, Tensor lse, Tensor[] rows, Tensor[] scales) -> ()")
def _weigh_up(
    out: torch.Tensor, lse: torch.Tensor, rows: list[torch.Tensor], scales: list[torch.Tensor]
) -> None:
    """The sum of ``rows`` [q, N, D], each times e^(its scale - lse) [N, q], into ``out``."""
    shares = [(scale - lse).exp().t()[..., None] for scale in scales]
    total = widened(rows[0]) * shares[0]
    for part, share in zip(rows[1:], shares[1:], strict=True):
        total = total + widened(part) * share
    out.copy_(total)


def _backend(q: torch.Tensor, softcap: float = 0.0) -> Backend:
    """The first back end for tensors like ``q``; bounded scores only plain operators have."""
    if softcap:
        return Plain(softcap=softcap)
    return next(backend for backend in BACKENDS if backend.supports(q))


def _forward(
    backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: KernelRun
) -> Pair:
    """Attention and its log-sum-exp of one run of a kernel: its documents of queries against their
    keys."""
    at, of = run.queries, run.keys
    if not run.turned:
        return backend.forward(q[at], k[of], v[of], run.q_lengths, run.k_lengths, run.causal)
    # With ``turned``, the square is causal when rows and columns are read from the end.
    out, lse = backend.forward(
        q[at].flip(0), k[of].flip(0), v[of].flip(0), run.q_lengths[::-1], run.k_lengths[::-1], True
    )
    return out.flip(0), lse.flip(1)


def _backward(
    backend: Backend,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    run: KernelRun,
) -> Triple:
    """(dq, dk, dv) of the rows of one run."""
    if not run.turned:
        return backend.backward(grad, q, k, v, out, lse, run.q_lengths, run.k_lengths, run.causal)
    back = [x.flip(0) for x in (grad, q, k, v, out)]
    dq, dk, dv = backend.backward(
        back[0],
        back[1],
        back[2],
        back[3],
        back[4],
        lse.flip(1),
        run.q_lengths[::-1],
        run.k_lengths[::-1],
        True,
    )
    return dq.flip(0), dk.flip(0), dv.flip(0)


def _touched(runs: Sequence[KernelRun]) -> tuple[MarkedRows, MarkedRows]:
    """Rows of queries in at least one run, and in more than one."""
    touched, several = MarkedRows(), MarkedRows()
    for run in runs:
        for a, b, again in touched.mark(run.queries.start, run.queries.stop):
            if again:
                several.mark(a, b)
    return touched, several


def _unmarked(rows: MarkedRows, count: int) -> list[tuple[int, int]]:
    """Rows below ``count`` that are not marked."""
    return [(a, b) for a, b, marked in rows.pieces(0, count) if not marked]
