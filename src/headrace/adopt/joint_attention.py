"""Attention over the places of all ranks, within a stage that mixes the sharded axis.

Inside such a stage, calls of ``scaled_dot_product_attention`` attend to the places of all ranks, by
Ulysses (an all-to-all of heads for places) or a ring (keys and values go from rank to rank).
Nothing is masked there, so the order of places does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from headrace.adopt.attention_registry import attention
from headrace.adopt.axis_shards import AxisShards, Dims
from headrace.adopt.axis_stages import AxisStage
from headrace.adopt.operators import ModelSlot
from headrace.adopt.placement import Placement
from headrace.errors import ModelError
from headrace.layouts.partition import Rows
from headrace.layouts.token_plan import TokenPlan
from headrace.methods.switched import split_heads
from headrace.spec.axes import AxisMove

__all__ = ["JointAttention", "JointMethod"]

JointMethod = Literal["ulysses", "ring"]
"""How ranks exchange for such attention: see the module."""


class JointAttention(TorchFunctionMode):
    """A torch function mode for one call of a ``stage`` that mixes all axes, one of which is
    sharded: attention in it runs over the places of all ranks. ``calls`` counts the calls of
    attention, ``heads`` is the number of query heads of the last one."""

    def __init__(
        self,
        shards: AxisShards,
        stage: AxisStage,
        slot: ModelSlot,
        method: JointMethod | None,
    ) -> None:
        """``shards`` tells the places of each rank. The placement of the tokens is put into
        ``slot``, where the attention operator looks it up. ``method`` None stands for Ulysses where
        there are as many heads as ranks, else a ring."""
        super().__init__()
        self._shards, self._stage, self._slot, self._method = shards, stage, slot, method
        self.calls, self.heads = 0, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in the place of ``func``: replaces attention by :meth:`_attend`, and
        runs any other function unchanged."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attention of this rank's queries over the places of all ranks, with the arguments of
        ``scaled_dot_product_attention``: query [..., N, places, D] of N heads, key and value
        [..., G, places, D] of G heads, with this rank's places. Returns [..., N, places, D]. Raises
        ModelError for masks, dropout, causal attention and other numbers of places. Collective."""
        if attn_mask is not None or dropout_p or is_causal:
            got = "a mask" if attn_mask is not None else "dropout" if dropout_p else "causal"
            raise ModelError(
                f"attention of stage {self._stage.modules}",
                got=got,
                wanted="all places that see each other",
                hint="hr.compile spreads causal attention and packed documents",
            )
        sizes = self._shards.joint_sizes(self._stage.sequences)  # places by rank
        here = sizes[self._shards.rank]
        if query.shape[-2] != here or key.shape[-2] != here:
            raise ModelError(
                f"attention of stage {self._stage.modules}",
                got=f"{query.shape[-2]} queries and {key.shape[-2]} keys",
                wanted=f"the {here} places of this rank, of both",
                hint="name the module of the attention over places alone as the stage",
            )
        self.calls, self.heads = self.calls + 1, query.shape[-3]
        if self._shards.simulated:  # a probe, in one process
            key, value = self._whole(key), self._whole(value)
            return scaled_dot_product_attention(
                query, key, value, scale=scale, enable_gqa=enable_gqa
            )
        rows = query.shape[:-3].numel()  # the samples, as the product of all dims before heads
        method = self._method or ("ulysses" if self.heads >= len(sizes) else "ring")
        axis, kv_heads = self._shards.axis, key.shape[-3]
        sent_vectors = _sent_vectors(sizes, self._shards.rank, self.heads, kv_heads, method)
        sent_bytes = rows * query.shape[-1] * query.element_size() * sent_vectors
        self._shards.moves.append(
            AxisMove(before=axis, after=axis, method=method, sent_bytes=sent_bytes)
        )
        self._slot.take(_placement(self._shards, sizes, rows, method))
        q, k, v = (x.reshape(rows, *x.shape[-3:]) for x in (query, key, value))
        out = attention(q, k, v, self._slot.handle, causal=False, scale=scale)
        return out.reshape(*query.shape[:-1], value.shape[-1])

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """Gather keys or values ``x`` [..., places of this rank, D] over all ranks, sequence by
        sequence: [..., places of all ranks, D], each sequence whole before the next."""
        # Names for the dims that are not of places, so that each sequence can be gathered by name.
        row_dims = tuple((f"_{at}",) for at in range(x.dim() - 2))
        here, wholes = self._shards.here(), list[torch.Tensor]()
        sequences = self._stage.sequences.names
        counts = [math.prod(here[name] for name in names) for names in sequences]
        for names, part in zip(sequences, x.split(counts, dim=-2), strict=True):
            wholes.append(self._shards.whole(part, Dims((*row_dims, names, ("_",)))))
        return torch.cat(wholes, dim=-2)


def _sent_vectors(
    sizes: tuple[int, ...], rank: int, heads: int, kv_heads: int, method: JointMethod
) -> int:
    """The number of vectors [D], one for a head at a place, that ``rank`` sends in a forward for
    one sample, where the ranks have ``sizes`` places. By Ulysses these are the queries, keys and
    values of other ranks' heads at its own places, and the results of its own heads at other ranks'
    places; by a ring the keys and values of all ranks but the next."""
    total, own = sum(sizes), sizes[rank]
    if method == "ring":
        return 2 * kv_heads * (total - sizes[(rank + 1) % len(sizes)])
    split = split_heads(heads, kv_heads, len(sizes))
    others_columns = sum(len(columns) for at, columns in enumerate(split.columns.of) if at != rank)
    return own * others_columns + (total - own) * len(split.queries.of[rank])


def _placement(
    shards: AxisShards, sizes: tuple[int, ...], rows: int, method: JointMethod
) -> Placement:
    """The placement of ``rows`` rows, one for each sample, each with all places of the mixed axes:
    rank r has ``sizes[r]`` consecutive places of every row. Cached in ``shards``, as all stages of
    a forward ask for it."""
    key = sizes, rows, method
    if key not in shards.joint:
        total, bounds = sum(sizes), list(accumulate(sizes, initial=0))
        # For each rank its range of places in every row, all rows being numbered through.
        parts = tuple(
            tuple(Rows(row * total + start, row * total + stop) for row in range(rows))
            for start, stop in pairwise(bounds)
        )
        tokens = TokenPlan(lengths=(total,) * rows, ranks=len(sizes), given=parts)
        shards.joint[key] = Placement(
            tokens=tokens,
            rows=rows,
            member=shards.rank,
            group=shards.group,
            exchange=method,
            targets=None,
        )
    return shards.joint[key]
