"""Gather and scatter of the sequence around matrix products, a chunk of tokens at a time.

Shape legend: t_r tokens on rank r of a tensor group of R, T in all, T_c in a chunk, h features, O
and I features of this rank's shard of a matrix; V = (R - 1) / R.

A chunk has the same share of every rank's tokens. The next chunk is being gathered while one is
multiplied, so two chunks of gathered activations are alive and never all of them, where
Megatron-LM's sequence parallelism holds R local activations at a time. A tensor of all T tokens
stands in one of three orders:

    rank order    the tokens of rank 0, those of rank 1, ...
    pack order    as tokens lie in the pack; equals rank order unless ranks hold several pieces
    chunk order   chunk 0, chunk 1, ..., each in rank order

[Note: map] Chunks go through ``map``, which keeps no reference to one when it asks for the next.
The variable of a loop or a generator, ``enumerate`` and ``zip`` would keep one, so that three
chunks were alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from headrace.comm.collectives import (
    Arriving,
    issue_all_gather,
    issue_reduce_scatter,
    sum_of_parts,
)
from headrace.ops.activation import Activation
from headrace.ops.fused import fused, widened
from headrace.ops.linear import WeightSource, total
from headrace.ops.norm import Norm
from headrace.ops.row_sums import adds_at_once

__all__ = ["FeedForward", "Spread", "gather_linear", "linear_scatter", "spread_feed_forward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How tokens are sharded over a tensor group: ``sizes[r]`` on rank r. They are gathered and
    scattered in ``chunks`` chunks. ``places`` [T] is the index in the pack of each row in rank
    order; None where rank order is pack order."""

    sizes: tuple[int, ...]
    group: dist.ProcessGroup | None
    places: torch.Tensor | None = None
    chunks: int = 1

    @property
    def total(self) -> int:
        """T, the tokens of all ranks."""
        return sum(self.sizes)

    @property
    def own(self) -> int:
        """Number of tokens on this rank."""
        return self.sizes[0 if self.group is None else dist.get_rank(self.group)]

    def share(self, rank: int, chunk: int) -> slice:
        """The rows of one rank's tokens that are in a chunk, counted from the rank's first. Their
        number is the same for every rank if possible; a row that only some ranks have is in the
        last chunk."""
        size, least = self.sizes[rank], min(self.sizes)
        # equal sizes, or very different ones: each rank's rows are cut as evenly as possible
        if max(self.sizes) != least + 1:
            return slice(size * chunk // self.chunks, size * (chunk + 1) // self.chunks)
        # Some ranks have one row more than others: all are cut where the smaller size would be cut,
        # rounded up, and the additional row is in the last chunk.
        start, stop = (-(-least * i // self.chunks) for i in (chunk, chunk + 1))
        return slice(start, size if chunk + 1 == self.chunks else stop)

    def mine(self, chunk: int) -> slice:
        """The rows of this rank's tokens that are in a chunk, counted from the rank's first."""
        return self.share(0 if self.group is None else dist.get_rank(self.group), chunk)

    def counts(self, chunk: int) -> list[int]:
        """Tokens of each rank in a chunk."""
        shares = [self.share(rank, chunk) for rank in range(len(self.sizes))]
        return [share.stop - share.start for share in shares]

    def gathered(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """The chunks [T_c, ...] of all ranks' rows of x [t_r, ...], rank after rank, each gathered
        while the one before is used."""
        coming: Arriving | None = self._issue(x, 0)
        for chunk in range(self.chunks):
            assert coming is not None
            # popped as it is yielded: a variable of this generator would keep the chunk alive
            arrived = [coming.wait()]
            coming = self._issue(x, chunk + 1) if chunk + 1 < self.chunks else None
            yield arrived.pop()

    def _issue(self, x: torch.Tensor, chunk: int) -> Arriving:
        """Start to gather this rank's rows of a chunk with those of all others."""
        return issue_all_gather(x[self.mine(chunk)], self.counts(chunk), self.group)

    def take(self, whole: torch.Tensor, chunk: int) -> torch.Tensor:
        """The rows of a chunk [T_c, ...], in rank order, taken from ``whole`` [T, ...] in pack
        order."""
        if self.places is not None:
            places = torch.cat([self.places[rows] for rows in self._slices(chunk)])
            return whole.index_select(0, places)
        if self.chunks == 1:
            return whole
        return torch.cat([whole[rows] for rows in self._slices(chunk)])

    def put(self, whole: torch.Tensor, chunk: int, rows: torch.Tensor) -> None:
        """Write the ``rows`` [T_c, ...] of a chunk back to their places in ``whole`` [T, ...]: the
        inverse of :meth:`take`."""
        if self.places is not None:
            places = torch.cat([self.places[s] for s in self._slices(chunk)])
            whole.index_copy_(0, places, rows)
            return
        # equal sizes: one strided copy serves all ranks
        if len(set(self.sizes)) == 1:
            ranks, rank_share = len(self.sizes), self.share(0, chunk)
            whole.unflatten(0, (ranks, -1))[:, rank_share] = rows.unflatten(0, (ranks, -1))
            return
        for target, part in zip(self._slices(chunk), rows.split(self.counts(chunk)), strict=True):
            whole[target] = part

    def apart(self, whole: torch.Tensor, chunk: int) -> torch.Tensor | None:
        """What :meth:`take` returns, without a copy: a view [R, rows of a rank, ...] of ``whole``
        [T, ...]. None where there is no such view, as sizes differ or pack order is not rank order,
        and where matrix products on it would be slow."""
        if self.places is not None or len(set(self.sizes)) > 1 or not _takes_blocks(whole):
            return None
        return whole.unflatten(0, (len(self.sizes), self.sizes[0]))[:, self.share(0, chunk)]

    def rows(self, chunk: int) -> slice:
        """The rows of a chunk in a tensor [T, ...] in chunk order."""
        start = sum(sum(self.counts(before)) for before in range(chunk))
        return slice(start, start + sum(self.counts(chunk)))

    def arrival(self) -> np.ndarray:
        """[T]: for each row in chunk order, its index in rank order."""
        parts = [
            np.arange(rows.start, rows.stop)
            for chunk in range(self.chunks)
            for rows in self._slices(chunk)
        ]
        return np.concatenate(parts)

    def scattered(
        self, chunks: Iterator[torch.Tensor], like: torch.Tensor, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reduce-scatter of ``chunks`` [T_c, h] of this rank's partial sums, each sent while the
        next is computed. Returns this rank's rows [t_r, h] of the sum over ranks, plus ``onto``
        [t_r, h] where it is given. ``like`` [t_r, h] gives type and shape."""
        # before the first chunk there is nothing to wait for
        out, previous = torch.empty_like(like), Arriving.there(like[:0])
        for chunk in range(self.chunks):
            rows, mine = next(chunks), self.mine(chunk)
            previous.wait()  # only now: it was under way while this chunk was computed
            add = _SumInto(out[mine], None if onto is None else onto[mine])
            previous = issue_reduce_scatter(rows, self.counts(chunk), self.group, add=add)
            del rows
        previous.wait()
        return out

    def _slices(self, chunk: int) -> Iterator[slice]:
        """The rows of a chunk in a tensor [T, ...] in rank order: one slice for each rank."""
        start = 0
        for rank, size in enumerate(self.sizes):
            share = self.share(rank, chunk)
            yield slice(start + share.start, start + share.stop)
            start += size


@dataclass(frozen=True, slots=True)
class _SumInto:
    """Function for a reduce-scatter that sums the parts of all ranks [R, t, h] into ``out`` [t, h],
    and adds ``onto`` [t, h] where it is given."""

    out: torch.Tensor
    onto: torch.Tensor | None

    def __call__(self, parts: torch.Tensor) -> torch.Tensor:
        """Write the sum over ranks of ``parts`` [R, t, h], plus ``onto``, to ``out``, and return
        it."""
        if self.onto is None:
            return sum_of_parts(parts, self.out)
        if adds_at_once(parts):
            return sum_of_parts(parts, self.out).add_(self.onto)
        _sum_onto(self.out, parts, self.onto)
        return self.out


@fused("sum_onto_(Tensor(a!) out, Tensor parts, Tensor onto) -> ()")
def _sum_onto(out: torch.Tensor, parts: torch.Tensor, onto: torch.Tensor) -> None:
    """Write the sum of parts [R, t, h] plus ``onto`` [t, h] to ``out``, in at least fp32 and
    rounded once."""
    out.copy_(widened(parts).sum(0) + onto)


def gather_linear(
    x: torch.Tensor,
    weight: WeightSource,
    bias: WeightSource | None,
    norm: Norm | None,
    spread: Spread,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Y = all_gather(norm(x)) W^T + b with a shard of W's output features; and x, for a residual
    sum.

        x         [t_r, h]
        weight    [O, h], bias [O]     this rank's rows
        returns   [T, O] in chunk order; x [t_r, h]
        keeps     x
        backward  X gathered again;  dW += dY^T X;  dx = reduce_scatter(dY W), and what comes back
                  to the second result
        sends     V T h forward, 2 V T h backward
    """
    return _GatherLinear.apply(x, weight, bias, norm, spread)  # type: ignore[no-any-return]


class _GatherLinear(torch.autograd.Function):
    """Autograd of :func:`gather_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: WeightSource,
        bias: WeightSource | None,
        norm: Norm | None,
        spread: Spread,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """all_gather(norm(x)) W^T + b [T, O] of x [t_r, h], a chunk of tokens at a time; and x, for
        a residual sum."""
        y, stats = (x, ()) if norm is None else norm.forward(x)
        ctx.save_for_backward(x, *stats)
        ctx.rest = (weight, bias, norm, spread)
        ctx.set_materialize_grads(False)
        matrix = weight.rows()
        out = y.new_empty((spread.total, len(matrix)))

        def part(chunk: int, rows: torch.Tensor) -> None:
            """Write the products of one chunk's rows to their place in ``out``."""
            _product(rows, matrix.t(), bias, out[spread.rows(chunk)])

        _run(map(part, range(spread.chunks), spread.gathered(y)))
        return out, x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, passed: torch.Tensor | None) -> Any:  # type: ignore[override]
        """The gradient of x [t_r, h] from ``grad`` [T, O], summed over ranks a chunk at a time, and
        with ``passed`` [t_r, h], that of the second result, added. norm(x) is gathered again for
        the gradient of the weight."""
        if grad is None:
            return passed, None, None, None, None
        x, *stats = ctx.saved_tensors
        weight, bias, norm, spread = ctx.rest
        matrix = weight.rows()
        y = x if norm is None else norm.again(x, tuple(stats))

        def part(chunk: int, rows: torch.Tensor) -> torch.Tensor:
            """Add one chunk's part of the weight's gradient; returns its gradient of norm(x)
            [T_c, h]."""
            dy = grad[spread.rows(chunk)]
            weight.add_product(dy, rows)
            return dy @ matrix

        # ``passed`` is added by the reduce-scatter, or by the norm's backward where there is a norm
        onto = passed if norm is None else None
        dx = spread.scattered(map(part, range(spread.chunks), spread.gathered(y)), y, onto)
        if bias is not None:
            bias.add(total(grad))
        if norm is not None:
            dx = norm.backward(dx, x, tuple(stats), passed)
        return dx, None, None, None, None


def linear_scatter(
    y: torch.Tensor,
    weight: WeightSource,
    bias: WeightSource | None,
    onto: torch.Tensor | None,
    spread: Spread,
    *,
    in_pack: bool,
) -> torch.Tensor:
    """z = reduce_scatter(Y W) + b with a shard of W's input features, and a residual sum.

    y         [T, I], in pack order where ``in_pack``, else in chunk order, as
              :func:`gather_linear` returns it
    weight    [I, h] this rank's rows, bias [h] whole
    onto      [t_r, h], to which z is added; None for z itself
    returns   [t_r, h]
    keeps     Y
    backward  dZ = all_gather(dz);  dY = dZ W^T;  dW += Y^T dZ;  db += sum_t dz
    sends     V T h forward, V T h backward
    """
    return _LinearScatter.apply(y, weight, bias, onto, spread, in_pack)  # type: ignore[no-any-return]


class _LinearScatter(torch.autograd.Function):
    """Autograd of :func:`linear_scatter`."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        weight: WeightSource,
        bias: WeightSource | None,
        onto: torch.Tensor | None,
        spread: Spread,
        in_pack: bool,
    ) -> torch.Tensor:
        """reduce_scatter(y W) + b + onto [t_r, h] of y [T, I], a chunk of tokens at a time."""
        ctx.save_for_backward(y)
        ctx.rest = (weight, bias, spread, in_pack)
        matrix = weight.rows()
        # shape and type of the result, without its memory: one expanded element
        like = y.new_empty(()).expand(spread.own, matrix.shape[1])

        def part(chunk: int) -> torch.Tensor:
            """One chunk's products [T_c, h], in rank order."""
            apart = spread.apart(y, chunk) if in_pack else None
            if apart is not None:
                return torch.bmm(apart, matrix.expand(len(apart), -1, -1)).flatten(0, 1)
            return _chunk_rows(y, chunk, spread, in_pack) @ matrix

        if bias is None:
            return spread.scattered(map(part, range(spread.chunks)), like, onto)
        out = _plus(spread.scattered(map(part, range(spread.chunks)), like), bias)
        return out if onto is None else out.add_(onto)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of y [T, I] from ``grad`` [t_r, h], gathered a chunk at a time; that of
        ``onto`` is ``grad`` itself."""
        (y,) = ctx.saved_tensors
        weight, bias, spread, in_pack = ctx.rest
        matrix, out = weight.rows(), torch.empty_like(y)

        def part(chunk: int, rows: torch.Tensor) -> None:
            """Add one chunk's part of the weight's gradient, and write its rows of the gradient of
            y."""
            weight.add_product(_chunk_rows(y, chunk, spread, in_pack), rows)
            apart = spread.apart(out, chunk) if in_pack else None
            if apart is not None:
                rows_by_rank = rows.unflatten(0, apart.shape[:2])
                torch.bmm(rows_by_rank, matrix.t().expand(len(apart), -1, -1), out=apart)
            elif in_pack:
                spread.put(out, chunk, rows @ matrix.t())
            else:
                torch.mm(rows, matrix.t(), out=out[spread.rows(chunk)])

        _run(map(part, range(spread.chunks), spread.gathered(grad)))
        if bias is not None:
            bias.add(total(grad))
        return out, None, None, grad if ctx.needs_input_grad[3] else None, None, None


def _chunk_rows(whole: torch.Tensor, chunk: int, spread: Spread, in_pack: bool) -> torch.Tensor:
    """The rows of a chunk [T_c, ...], in rank order, out of ``whole`` [T, ...], which is in pack
    order where ``in_pack``, else in chunk order."""
    return spread.take(whole, chunk) if in_pack else whole[spread.rows(chunk)]


def _takes_blocks(x: torch.Tensor) -> bool:
    """Whether products of blocks of rows (torch.bmm) are as fast on x's device as one product of
    adjacent rows."""
    return x.device.type != "cpu"


def _run(steps: Iterator[None]) -> None:
    """Run all steps of a ``map``, which runs one only when its result, here None, is asked for."""
    for _ in steps:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The parts of a feed-forward: of ``matrix_in``, ``bias_in`` and ``matrix_out`` this rank's
    rows, ``norm`` and ``bias_out`` whole. None stands for a part that the model does not have."""

    norm: Norm | None
    matrix_in: WeightSource
    bias_in: WeightSource | None
    activation: Activation
    matrix_out: WeightSource
    bias_out: WeightSource | None


def spread_feed_forward(
    x: torch.Tensor, parts: FeedForward, spread: Spread
) -> tuple[torch.Tensor, torch.Tensor]:
    """z = reduce_scatter(act(all_gather(norm(x)) W_in^T) W_out), keeping x alone; and x, for a
    residual sum.

        x         [t_r, h]
        returns   [t_r, h], x [t_r, h]
        backward  everything but z is computed again, chunk by chunk, from the gathered norm(x)
                  that the gradient of W_in needs anyway: no more is sent than without recompute
        sends     2 V T h forward, 3 V T h backward
    """
    return _SpreadFeedForward.apply(x, parts, spread)  # type: ignore[no-any-return]


class _SpreadFeedForward(torch.autograd.Function):
    """Autograd of :func:`spread_feed_forward`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, parts: FeedForward, spread: Spread
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The feed-forward of x [t_r, h] by this rank's features, summed over ranks; and x, for a
        residual sum."""
        ctx.set_materialize_grads(False)
        y, stats = (x, ()) if parts.norm is None else parts.norm.forward(x)
        ctx.save_for_backward(x, *stats)
        ctx.rest = (parts, spread)
        into, out = parts.matrix_in.rows(), parts.matrix_out.rows()

        def part(rows: torch.Tensor) -> torch.Tensor:
            """The feed-forward of one chunk's rows by this rank's features."""
            return parts.activation.forward(_product(rows, into.t(), parts.bias_in)) @ out

        return _plus(spread.scattered(map(part, spread.gathered(y)), x), parts.bias_out), x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, passed: torch.Tensor | None) -> Any:  # type: ignore[override]
        """The gradient of x [t_r, h] from ``grad`` [t_r, h], with ``passed`` [t_r, h], that of the
        second result, added. Each chunk is computed again from the gathered norm of x."""
        if grad is None:
            return passed, None, None
        x, *stats = ctx.saved_tensors
        parts, spread = ctx.rest
        y = x if parts.norm is None else parts.norm.again(x, tuple(stats))
        into, out = parts.matrix_in.rows(), parts.matrix_out.rows()

        def part(rows: torch.Tensor, dz: torch.Tensor) -> torch.Tensor:
            """Add one chunk's parts of the matrices' gradients; returns its gradient of norm(x)
            [T_c, h]. ``rows`` are norm(x), ``dz`` the gradient of the result, [T_c, h] each."""
            wide = _product(rows, into.t(), parts.bias_in)
            parts.matrix_out.add_product(parts.activation.forward(wide), dz)
            dwide = parts.activation.backward(dz @ out.t(), wide)
            parts.matrix_in.add_product(dwide, rows)
            if parts.bias_in is not None:
                parts.bias_in.add(total(dwide))
            return dwide @ into

        # ``passed`` is added by the reduce-scatter, or by the norm's backward where there is a norm
        onto = passed if parts.norm is None else None
        dx = spread.scattered(map(part, spread.gathered(y), spread.gathered(grad)), y, onto)
        if parts.bias_out is not None:
            parts.bias_out.add(total(grad))
        if parts.norm is not None:
            dx = parts.norm.backward(dx, x, tuple(stats), passed)
        return dx, None, None


def _product(
    x: torch.Tensor,
    matrix: torch.Tensor,
    bias: WeightSource | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [t, in] times matrix [in, out], plus the bias, into ``out`` where it is given."""
    if bias is None:
        return torch.mm(x, matrix, out=out)
    return torch.addmm(bias.rows(), x, matrix, out=out)


def _plus(x: torch.Tensor, bias: WeightSource | None) -> torch.Tensor:
    """x [t, h] plus the bias where there is one, in place."""
    return x if bias is None else x.add_(bias.rows())
