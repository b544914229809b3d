"""The vocabulary sharded over a tensor group: each rank works with the words (rows) it holds.

Shape legend: t_r tokens on rank r of a tensor group of R, T in all, T_c in a chunk; h features;
V words, of which this rank holds v from ``first`` on. t_r and v may be zero: every rank takes part
in every collective.

A chunk is that of ops.spread: the same share of every rank's tokens, one rank after the other, the
next one on its way. A table or a matrix is never gathered, activations [T, h] neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from headrace.comm.collectives import all_gather_rows
from headrace.ops.core import wide_dtype
from headrace.ops.fused import widened
from headrace.ops.linear import WeightSource, add_wide_product
from headrace.ops.loss import IGNORED, label_terms, logits_gradient, logits_of
from headrace.ops.spread import Spread
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS

__all__ = ["spread_embed", "spread_head_loss"]


def spread_embed(
    ids: torch.Tensor, weight: WeightSource, first: int, anchor: torch.Tensor, spread: Spread
) -> torch.Tensor:
    """Rows of an embedding table whose words are spread over a group.

        ids       [t_r]      int64
        weight    [v, h]     this rank's words, ``first`` and those after it
        returns   [t_r, h] = reduce_scatter(E), E[t] = W[ids[t]] where the word is here, else 0
        keeps     the places of the tokens of all ranks whose words are here
        backward  dE = all_gather(dy);  dW[ids] += dE of those tokens
        sends     T h (R - 1) / R forward, as much backward

    ``anchor`` is any tensor that requires grad: ids do not, and every member of a group must run
    the backward, tokens or not.
    """
    return _SpreadEmbed.apply(anchor, ids, weight, first, spread)  # type: ignore[no-any-return]


class _SpreadEmbed(torch.autograd.Function):
    """Autograd of :func:`spread_embed`."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        ids: torch.Tensor,
        weight: WeightSource,
        first: int,
        spread: Spread,
    ) -> torch.Tensor:
        """The rows [t_r, h] of this rank's ids [t_r]: each rank looks up the words that it holds,
        from ``first`` on, for the tokens of all ranks, and a reduce-scatter adds up."""
        table, ids_of_chunks = weight.rows(), list[torch.Tensor]()

        def part(ids: torch.Tensor) -> torch.Tensor:
            """The rows [T_c, h] of one chunk of ids [T_c]: zeros where the word is not here."""
            ids_of_chunks.append(ids)
            if not len(table):
                return table.new_zeros((len(ids), *table.shape[1:]))
            words, of_others = _own_words(ids, first, len(table))
            return table.index_select(0, words).masked_fill_(of_others[:, None], 0)

        # shape and type of the result, without its memory: one expanded element
        like = table.new_empty(()).expand(len(ids), *table.shape[1:])
        out = spread.scattered(map(part, spread.gathered(ids)), like)
        ctx.save_for_backward(*ids_of_chunks)
        ctx.rest = (weight, first, table.shape, anchor, spread)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Gather the gradients [t_r, h] of all ranks, and add those of this rank's words up into
        the gradient of the weight [v, h]."""
        weight, first, table_shape, anchor, spread = ctx.rest
        table_grad = grad.new_zeros(table_shape, dtype=wide_dtype(grad.dtype))

        def add(rows: torch.Tensor, ids: torch.Tensor) -> None:
            """Add one chunk's gradients ``rows`` [T_c, h] to those of its words."""
            if not len(table_grad):
                return
            words, of_others = _own_words(ids, first, len(table_grad))
            wide = rows.to(table_grad.dtype)
            if spread.group is not None:  # then rows were gathered, and are nobody else's
                wide.masked_fill_(of_others[:, None], 0)
            table_grad.index_add_(0, words, wide)

        # map drops each chunk before the next one: see [Note: map] of ops/spread
        for _ in map(add, spread.gathered(grad), ctx.saved_tensors):
            pass
        weight.add(table_grad)
        return torch.zeros_like(anchor), None, None, None, None


def spread_head_loss(
    x: torch.Tensor,
    labels: torch.Tensor,
    weight: WeightSource,
    first: int,
    scale: float,
    spread: Spread,
    chunk: int = HEAD_CHUNK_TOKENS,
    bias: WeightSource | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of the labels, and its gradient, of a head whose words are spread over a group.

        x        [t_r, h]        after the last norm
        labels   [t_r]           int64; IGNORED carries no loss
        weight   [v, h], bias [v]    this rank's words, ``first`` and those after it
        returns  loss []       = scale sum_t (n_t - z_t[label_t]) over this rank's own tokens, fp64
                 dx   [t_r, h] = reduce_scatter(dZ W), dZ = scale (exp(Z - n) - onehot)
        with     X = all_gather(x);  Z = X W^T + b [T_c, v] the logits of this rank's words
                 n_t = logsumexp over ranks of logsumexp_v(Z_t)
        and      dW += dZ^T X;  db += sum_T dZ
        sends    T h (R - 1) / R for X, as much for dx; and of every token its log-sum-exp and
                 its label's logit to every rank

    The losses of a group's ranks add up to that of ``head_loss``, which says more; ``chunk`` is
    how many tokens of the group have logits at a time, about, in place of the spread's chunks.
    All ranks take the sums from the same numbers in the same order, so they agree on every bit.
    """
    spread = replace(spread, chunks=max(1, -(-spread.total // chunk)))
    matrix = weight.rows()
    bias_row = None if bias is None else widened(bias.rows())
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    weight_grad = weight.sums()
    bias_grad = weight_grad.new_zeros(len(matrix))

    def part(chunk: int, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One chunk of all ranks' tokens: add this rank's loss and the weight's gradient, and
        return its part of the gradient of rows [n, h]."""
        logits = logits_of(rows, matrix, bias_row)
        own_words = targets - first
        of_others = (own_words < 0) | (own_words >= len(matrix))
        own_words.masked_fill_(of_others, IGNORED)
        lse, picked = _of_all_words(*label_terms(logits, own_words), spread.group)
        has_label = (targets >= 0).to(lse.dtype)
        losses_by_rank = ((lse - picked) * has_label).split(spread.counts(chunk))
        loss.add_(losses_by_rank[_rank(spread)].double().sum())
        dlogits = logits_gradient(logits, own_words, lse, has_label * scale)
        if bias is not None:
            bias_grad.add_(dlogits.sum(0))
        dlogits = dlogits.to(x.dtype)
        add_wide_product(weight_grad, dlogits, rows)
        return dlogits @ matrix

    chunks = map(part, range(spread.chunks), spread.gathered(x), spread.gathered(labels))
    dx = spread.scattered(chunks, x)
    weight.add(weight_grad)
    if bias is not None:
        bias.add(bias_grad)
    return loss * scale, dx


def _own_words(ids: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For ids [T_c] of words, of which this rank holds ``count`` > 0 from ``first`` on: (the row of
    each in its table [T_c], whether another rank holds it [T_c]). Words of others get some row, to
    be masked; different ones, as adding to few rows is slow on a device. No size depends on the
    ids, as the host would have to wait for them."""
    own = ids - first
    return own.remainder(count), (own < 0) | (own >= count)


def _of_all_words(
    lse: torch.Tensor, picked: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logsumexp over the words of all ranks [T_c], logit of the label [T_c]) of each token of a
    chunk, from the same two over this rank's words. One gather serves both; a rank without words,
    or without a token's label, gives -inf and 0."""
    own = torch.stack((lse, picked), 1)
    ranks = 1 if group is None else dist.get_world_size(group)
    by_rank = all_gather_rows(own, [len(own)] * ranks, group).view(ranks, len(own), 2)
    return by_rank[:, :, 0].logsumexp(0), by_rank[:, :, 1].sum(0)


def _rank(spread: Spread) -> int:
    """This rank's index in the group of ``spread``."""
    return 0 if spread.group is None else dist.get_rank(spread.group)
