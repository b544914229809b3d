"""A Transformer, written for one device: methods spread its layers over ranks.

Shape legend: T tokens of a pack over R ranks, h hidden, V vocabulary. Activations between layers
are [T / R, h] for every method.

The model runs in segments (embedding, each layer, end) that are cut from each other: forward and
backward are one segment after the other, whatever the plan, so the order of every sum is fixed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.comm.collectives import all_gather_rows
from headrace.errors import SpecError
from headrace.layouts.partition import Rows
from headrace.methods.block import dropout_rate, normalise
from headrace.methods.context import Context
from headrace.methods.registry import branch
from headrace.methods.weights import State, Weight
from headrace.ops.linear import embed, linear
from headrace.ops.loss import IGNORED, head_loss
from headrace.ops.random import dropout
from headrace.ops.recompute import region
from headrace.ops.spread import Spread
from headrace.ops.vocabulary import spread_embed, spread_head_loss
from headrace.spec.architecture import Architecture
from headrace.spec.layer_plan import BRANCHES, Branch, LayerOption

__all__ = ["Transformer"]

_CHUNK_TOKENS = 2048
"""Least tokens of a chunk of a tensor-parallel embedding, as in ``methods.megatron_ts``."""


class Transformer:
    """The segments of a model of one architecture; it holds no weights."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture

    def embedding(self, ids: torch.Tensor, weights: State, context: Context) -> torch.Tensor:
        """Token (and learned position) embeddings: ids [T / R] to [T / R, h].

        BERT adds the first of its types, that of single sequences, and ends with a norm.
        """
        a = self.architecture
        sizes = _block_sizes(context)
        x = _embed_rows(ids, "embed.weight", weights, sizes, context)
        if a.learned_positions:
            positions = context.dropout.positions
            x = x + _embed_rows(positions, "positions.weight", weights, sizes, context)
        if a.kind != "bert":
            return x
        # Row 0 of the types, looked up once on each rank and added to all of its tokens.
        one_each = (1,) * len(sizes)
        x = x + _embed_rows(ids.new_zeros(1), "types.weight", weights, one_each, context)
        x = normalise(x, weights, "embed_norm", a)
        # The branches of the layers have the dropout sites 0 to 2 L - 1; this is the one after
        # them.
        return dropout(x, dropout_rate(context), context.dropout, 2 * a.layers)

    def layer(
        self, x: torch.Tensor, index: int, option: LayerOption, state: State, context: Context
    ) -> torch.Tensor:
        """Layer ``index``: x [T / R, h] to [T / R, h], spread and recomputed as ``option`` says;
        ``state`` are the weights of the layer by short name.

        ``full`` keeps only x and runs the layer again in the backward, its communication too.
        """
        inner = replace(context, recompute=option.recompute, layer=index)
        if option.recompute == "full":

            def whole(x: torch.Tensor) -> torch.Tensor:
                """The layer's forward, x [T / R, h] to [T / R, h], to be run again."""
                return self._layer(x, option, state, inner)

            return region(whole, x)
        return self._layer(x, option, state, inner)

    def _layer(
        self, x: torch.Tensor, option: LayerOption, state: State, context: Context
    ) -> torch.Tensor:
        """One layer, x [T / R, h] to [T / R, h]: attention, then feed-forward, each with its
        residual sum."""
        for part in BRANCHES:
            x = self.branch(x, part, option, state, context)
        return x

    def branch(
        self, x: torch.Tensor, part: Branch, option: LayerOption, state: State, context: Context
    ) -> torch.Tensor:
        """One half of a layer with its residual sum: x [T / R, h] to [T / R, h].

        Raises SpecError when x is not what this rank holds, or the group cannot run the method.
        """
        wanted = (context.tokens.sizes[context.member], self.architecture.hidden)
        if x.shape != wanted:
            raise SpecError(
                f"activations of layer {context.layer} on member {context.member}",
                got=list(x.shape),
                wanted=list(wanted),
            )
        name = option.attention if part == "attention" else option.feed_forward
        run = branch(name, part, self.architecture, context.ranks)
        x, a = run(x, state, context), self.architecture
        if a.norm_first:
            return x
        return normalise(x, state, f"norm{BRANCHES.index(part) + 1}", a)

    def ending(
        self, x: torch.Tensor, labels: torch.Tensor, weights: State
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply to the layers' output x [T / R, h] what comes before the head's matrix: the last
        norm, or in a masked model (BERT) dense layer, GELU and norm, of tokens with a label only.

        Returns (rows [t, h] for the head, their labels [t]).
        """
        a = self.architecture
        if not a.masked:
            return normalise(x, weights, "norm", a), labels
        labelled = (labels != IGNORED).nonzero().squeeze(1)
        y = x.index_select(0, labelled)
        y = linear(y, weights["head_dense.weight"], weights["head_dense.bias"])
        y = torch.nn.functional.gelu(y, approximate=a.gelu)
        return normalise(y, weights, "head_norm", a), labels.index_select(0, labelled)

    def head(
        self, x: torch.Tensor, labels: torch.Tensor, weights: State, scale: float, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss [], its gradient with respect to x [t, h]) of the rows x [t, h] and labels [t] that
        :meth:`ending` gave; see ops.head_loss.

        The loss is the sum over this rank's tokens times ``scale``, also where the ranks of a block
        hold the rows of the head's matrix together.
        """
        name = "embed.weight" if self.architecture.tied else "head.weight"
        bias = weights.get("head.bias")
        if context.place.tensor == 1:
            return head_loss(x, labels, weights[name], scale, bias=bias)
        sizes = _block_sizes(context)
        if self.architecture.masked:  # the number of labels differs between ranks
            sizes = _gathered_sizes(x, context)
        cuts = _cuts(weights[name], context)
        return spread_head_loss(
            x,
            labels,
            weights[name].part(cuts),
            cuts[context.member].start,
            scale,
            _spread(sizes, context),
            bias=None if bias is None else bias.part(cuts),
        )


def _embed_rows(
    ids: torch.Tensor, name: str, weights: State, sizes: tuple[int, ...], context: Context
) -> torch.Tensor:
    """The rows ``ids`` [t] of the table ``name``, [t, h], also where the ranks of a block hold it
    together; ``sizes`` are the numbers of ids on the ranks of the block.

    Raises SpecError for an id outside a table that a block holds together: no rank would have it.
    """
    weight = weights[name]
    # Neither ids nor weights are tensors that need a gradient: this one has autograd run the
    # backward, which adds the weight's gradient to its source.
    anchor = torch.empty(0, device=ids.device, requires_grad=torch.is_grad_enabled())
    if context.place.tensor == 1:
        return embed(ids, weight, anchor)
    cuts = _cuts(weight, context)
    rows = max(cut.stop for cut in cuts)
    outside = ids[(ids < 0) | (ids >= rows)]
    if len(outside):
        raise SpecError(f"row of {name}", got=int(outside[0]), wanted=f"0 <= row < {rows}")
    spread = _spread(sizes, context)
    return spread_embed(ids, weight.part(cuts), cuts[context.member].start, anchor, spread)


def _cuts(weight: Weight, context: Context) -> list[Rows]:
    """The range of rows of a weight that each member of the group holds: the ranks of a block hold
    all rows together, and blocks follow each other in the group."""
    tensor = context.place.tensor
    cuts = weight.split(tensor)
    return [cuts[member % tensor] for member in range(context.ranks)]


def _spread(sizes: tuple[int, ...], context: Context) -> Spread:
    """How activations are sharded over the ranks of the block: ``sizes[r]`` rows on its rank r.
    They are sent in as many chunks as there are ranks, or in fewer of at least ``_CHUNK_TOKENS``
    rows."""
    group = context.place.subgroup(context.place.block)
    chunks = min(len(sizes), max(1, sum(sizes) // _CHUNK_TOKENS))
    return Spread(sizes=sizes, group=group, chunks=chunks)


def _block_sizes(context: Context) -> tuple[int, ...]:
    """The number of tokens on each rank of the block."""
    return tuple(context.tokens.sizes[member] for member in context.place.block)


def _gathered_sizes(x: torch.Tensor, context: Context) -> tuple[int, ...]:
    """The number of rows of x on each rank of the block, gathered from these ranks. Collective."""
    block = context.place.block
    own_size = torch.tensor([len(x)], device=x.device)
    sizes = all_gather_rows(own_size, [1] * len(block), context.place.subgroup(block))
    return tuple(sizes.tolist())
