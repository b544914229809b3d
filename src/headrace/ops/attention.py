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
        """Attention out [T, N, D] over the scores in ``blocks``, a tuple of :class:`Block`."""
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

    The results of rows that are in several blocks are merged in at least fp32. Rows of no block
    get out 0 and lse -inf.
    """
    backend = _backend(q, softcap)
    runs = runs_of(blocks, backend.documents) if q.shape[1] else ()
    # one kernel call computes all rows: its results are returned without a copy into ``out``
    if len(runs) == 1 and runs[0].queries == slice(0, q.shape[0]):
        part, part_lse = _forward(backend, q, k, v, runs[0])
        return part.contiguous(), part_lse.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=wide(q))
    # Rows that only one run computes are written to ``out``; those of several runs are merged, in
    # one Partial for each interval of such rows.
    covered, shared_rows = _covered_and_shared(runs)
    partials = [Partial(q[begin:end]) for begin, end in shared_rows]
    for run in runs:
        part, part_lse = _forward(backend, q, k, v, run)
        if not partials:
            out[run.queries], lse[:, run.queries] = part, part_lse
            continue
        start = run.queries.start
        for begin, end, is_shared in shared_rows.pieces(start, run.queries.stop):
            rows = part[begin - start : end - start]
            rows_lse = part_lse[:, begin - start : end - start]
            if is_shared:
                index = shared_rows.index(begin)
                partials[index].merge(begin - shared_rows.start(index), rows, rows_lse)
            else:
                out[begin:end], lse[:, begin:end] = rows, rows_lse
    for (begin, end), partial in zip(shared_rows, partials, strict=True):
        partial.write(out[begin:end], lse[:, begin:end])
    for begin, end in _unmarked(covered, q.shape[0]):
        out[begin:end], lse[:, begin:end] = 0, -math.inf
    return out, lse


class Partial:
    """Results of attention over some of the keys, into which results over other keys are merged,
    one step of a ring after the other; see [Note: results over some of the keys].

    A CPU merges each at once into an out [Q, N, D] and an lse [N, Q]; a device holds results and
    merges them all at the end, see [Note: held parts] of ``row_sums``.
    """

    __slots__ = ("_held", "_like", "_parts", "_sums", "_touched")

    def __init__(self, q: torch.Tensor) -> None:
        """Start with no keys, for queries like ``q`` [Q, N, D]."""
        self._like = q  # gives shape, type and device
        # on a CPU: the merged (out, lse), and the rows of them that have a result
        self._sums: Pair | None = None
        self._touched = MarkedRows()
        # on a device: the results that are not merged yet, and how many rows they have together
        self._parts: list[_Result] = []
        self._held = 0

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
        """Merge results ``out`` [q, N, D] and ``lse`` [N, q] over other keys, of the queries from
        ``start`` on."""
        if adds_at_once(out):
            self._merge_now(start, out, lse)
            return
        self._parts.append(_Result(start, out, lse))
        self._held += len(out)
        if self._held > HELD * len(self._like):
            self._join()

    def _join(self) -> None:
        """Merge the held results, in at least fp32, so that each row is held once and their memory
        stays bounded. One result is left for each segment of rows, cut where a held result begins
        or ends."""
        joined_out, joined_lse = self._new(wide(self._like))
        self._write(joined_out, joined_lse)
        spans = [(part.start, part.start + len(part.out)) for part in self._parts]
        self._parts = [
            _Result(begin, joined_out[begin:end], joined_lse[:, begin:end])
            for begin, end, part_indices in segments(spans, len(self._like))
            if part_indices
        ]
        self._held = len(self._like)

    def result(self, dtype: torch.dtype) -> Pair:
        """(out [Q, N, D] in ``dtype``, lse [N, Q]) over all keys added so far; rows to which no key
        was added get out 0 and lse -inf."""
        if self._sums is not None and self._sums[0].dtype == dtype:
            out, lse = self._sums
        else:
            out, lse = self._new(dtype)
        self.write(out, lse)
        return out, lse

    def write(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write what :meth:`result` returns to ``out`` [Q, N, D] and ``lse`` [N, Q]."""
        if self._sums is None:
            self._write(out, lse)
            return
        # ``result`` passes the sums themselves where they have the right type
        if out is not self._sums[0]:
            out.copy_(self._sums[0])
        if lse is not self._sums[1]:
            lse.copy_(self._sums[1])
        for begin, end in _unmarked(self._touched, len(self._like)):
            out[begin:end], lse[:, begin:end] = 0, -math.inf

    def _new(self, dtype: torch.dtype) -> Pair:
        """Uninitialised out [Q, N, D] of ``dtype`` and lse [N, Q] in at least fp32."""
        rows, heads = self._like.shape[:2]
        out = self._like.new_empty(self._like.shape, dtype=dtype)
        return out, self._like.new_empty((heads, rows), dtype=wide(self._like))

    def _write(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the held results, merged, to ``out`` [Q, N, D] and ``lse`` [N, Q], which are
        uninitialised; rows without a result get 0 and -inf."""
        spans = [(part.start, part.start + len(part.out)) for part in self._parts]
        for begin, end, part_indices in segments(spans, len(self._like)):
            parts = [self._parts[i].rows(begin, end) for i in part_indices]
            if len(parts) > 1:
                _merge_all(
                    out[begin:end],
                    lse[:, begin:end],
                    [part_out for part_out, _ in parts],
                    [part_lse for _, part_lse in parts],
                )
            else:
                out[begin:end], lse[:, begin:end] = parts[0] if parts else (0, -math.inf)

    def _merge_now(self, start: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge results ``out`` [q, N, D] and ``lse`` [N, q] over other keys into the rows from
        ``start`` on; where these have none yet, they are copied."""
        self._sums = self._sums or self._new(wide(self._like))
        for begin, end, has_result in self._touched.mark(start, start + out.shape[0]):
            rows, rows_lse = out[begin - start : end - start], lse[:, begin - start : end - start]
            own_out, own_lse = self._sums[0][begin:end], self._sums[1][:, begin:end]
            if has_result:
                _merge(own_out, own_lse, rows, rows_lse)
            else:
                own_out.copy_(rows)
                own_lse.copy_(rows_lse)


class _Result(NamedTuple):
    """Results ``out`` [q, N, D] and ``lse`` [N, q] over some keys, of the q queries from ``start``
    on."""

    start: int
    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, start: int, stop: int) -> Pair:
        """(out, lse) of the rows [start, stop), numbered as the queries are."""
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

    ``fresh_q``: dq is uninitialised and written whole, with 0 in rows of no block; else gradients
    are added to it. ``fresh_kv``: the same of dk and dv.
    """
    dq_sum = RowSum(len(dq), total=dq, fresh=fresh_q)
    dk_sum, dv_sum = (RowSum(len(x), total=x, fresh=fresh_kv) for x in (dk, dv))
    add_gradients(grad, q, k, v, out, lse, blocks, dq_sum, dk_sum, dv_sum)
    # where parts were added to dq, dk and dv at once (on a CPU), this only zeroes rows without any
    for row_sum, target, fresh in (
        (dq_sum, dq, fresh_q),
        (dk_sum, dk, fresh_kv),
        (dv_sum, dv, fresh_kv),
    ):
        if fresh:
            row_sum.write(target)
        else:
            row_sum.add_to(target)


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
        queries, keys = run.queries, run.keys
        parts = _backward(
            backend, grad[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries], run
        )
        dq.add(queries.start, parts[0])
        dk.add(keys.start, parts[1])
        dv.add(keys.start, parts[2])


def _merge(
    out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, rows_lse: torch.Tensor
) -> None:
    """Merge results ``rows`` [q, N, D] with log-sum-exp ``rows_lse`` [N, q] into ``out`` [q, N, D]
    and ``lse`` [N, q], which are over other keys, in place; see [Note: results over some of the
    keys]."""
    # [q, N, 1]: the share of the softmax that the other keys have
    weight = (rows_lse - lse).sigmoid_().t()[..., None]
    out.lerp_(rows.to(out.dtype), weight)
    torch.logaddexp(lse, rows_lse, out=lse)


def _merge_all(
    out: torch.Tensor, lse: torch.Tensor, outs: list[torch.Tensor], lses: list[torch.Tensor]
) -> None:
    """Merge results over several parts of the keys, ``outs[i]`` [q, N, D] with log-sum-exp
    ``lses[i]`` [N, q], into ``out`` and ``lse``, which are uninitialised."""
    _log_sum(lse, lses)
    _weigh_up(out, lse, outs, lses)


@fused("log_sum_(Tensor(a!) lse, Tensor[] lses) -> ()")
def _log_sum(lse: torch.Tensor, lses: list[torch.Tensor]) -> None:
    """Write the log-sum-exp over all parts of the keys to ``lse``, from those over each part,
    ``lses`` [N, q]."""
    total = lses[0]
    for part_lse in lses[1:]:
        total = torch.logaddexp(total, part_lse)
    lse.copy_(total)


@fused("weigh_up_(Tensor(a!) out, Tensor lse, Tensor[] outs, Tensor[] lses) -> ()")
def _weigh_up(
    out: torch.Tensor, lse: torch.Tensor, outs: list[torch.Tensor], lses: list[torch.Tensor]
) -> None:
    """Write the sum of the results ``outs`` [q, N, D] over parts of the keys to ``out``, each
    weighted by e^(its log-sum-exp - lse); ``lses`` [N, q] are these log-sum-exps, ``lse`` that over
    all parts."""
    weights = [(part_lse - lse).exp().t()[..., None] for part_lse in lses]
    total = widened(outs[0]) * weights[0]
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        total = total + widened(part) * weight
    out.copy_(total)


def _backend(q: torch.Tensor, softcap: float = 0.0) -> Backend:
    """The first back end that supports tensors like ``q``; with a ``softcap`` only plain operators
    do."""
    if softcap:
        return Plain(softcap=softcap)
    return next(backend for backend in BACKENDS if backend.supports(q))


def _forward(
    backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: KernelRun
) -> Pair:
    """(out [q, N, D], lse [N, q]) of one run, whose rows are taken out of all queries ``q`` and all
    keys ``k`` and values ``v``."""
    queries, keys = run.queries, run.keys
    if not run.turned:
        return backend.forward(
            q[queries], k[keys], v[keys], run.q_lengths, run.k_lengths, run.causal
        )
    # A turned block lets row i see the columns from i on: with rows and columns in reverse order it
    # is causal, which is what kernels can compute.
    out, lse = backend.forward(
        q[queries].flip(0),
        k[keys].flip(0),
        v[keys].flip(0),
        run.q_lengths[::-1],
        run.k_lengths[::-1],
        True,
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
    """(dq, dk, dv) of one run, where all tensors have the rows of the run alone."""
    if not run.turned:
        return backend.backward(grad, q, k, v, out, lse, run.q_lengths, run.k_lengths, run.causal)
    # as in the forward: in reverse order the block is causal
    grad, q, k, v, out = (x.flip(0) for x in (grad, q, k, v, out))
    dq, dk, dv = backend.backward(
        grad,
        q,
        k,
        v,
        out,
        lse.flip(1),
        run.q_lengths[::-1],
        run.k_lengths[::-1],
        True,
    )
    return dq.flip(0), dk.flip(0), dv.flip(0)


def _covered_and_shared(runs: Sequence[KernelRun]) -> tuple[MarkedRows, MarkedRows]:
    """(query rows of at least one run, query rows of more than one)."""
    covered, shared = MarkedRows(), MarkedRows()
    for run in runs:
        for begin, end, is_covered in covered.mark(run.queries.start, run.queries.stop):
            if is_covered:
                shared.mark(begin, end)
    return covered, shared


def _unmarked(rows: MarkedRows, count: int) -> list[tuple[int, int]]:
    """The intervals [start, stop) of rows below ``count`` that are not marked."""
    return [(start, stop) for start, stop, is_marked in rows.pieces(0, count) if not is_marked]
