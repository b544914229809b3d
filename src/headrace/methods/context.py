"""Where a layer runs: the group and this rank's place in it, the pack, the model's shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from headrace.layouts.token_plan import TokenPlan
from headrace.ops.fused import to_device
from headrace.ops.random import DropoutKey
from headrace.ops.rotary import rotary_tables
from headrace.ops.spread import Spread
from headrace.spec.architecture import Architecture
from headrace.spec.layer_plan import Recompute
from headrace.spec.method_facts import Members

__all__ = ["Context", "Place", "Tables"]

Tables = tuple[torch.Tensor, torch.Tensor]
"""Rotary cosines and sines, [tokens, features of a head / 2] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The tokens of one micro-batch on one rank, and values derived from them once for all layers.

    ``tokens`` says which rank of the group has which tokens; ``member`` is this rank's index in the
    group. ``group`` is None for a single rank; ``subgroup(members)`` is the process group of some
    of its ranks, None for one. ``dtype`` is that of the activations. ``tensor`` is the number of
    ranks in a tensor-parallel block, neighbours that hold the rows of a weight together; 1 without
    tensor parallelism.
    """

    architecture: Architecture
    tokens: TokenPlan
    member: int
    group: dist.ProcessGroup | None
    dtype: torch.dtype
    device: str | torch.device = "cpu"
    tensor: int = 1
    subgroup: Callable[[Members], dist.ProcessGroup | None] = lambda members: None
    _tables: dict[Members, Tables | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _orders: dict[Members, tuple[torch.Tensor, torch.Tensor] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _arrivals: dict[tuple[Members, int], tuple[torch.Tensor, torch.Tensor] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def everyone(self) -> Members:
        """All members of the group."""
        return tuple(range(self.tokens.ranks))

    @property
    def block(self) -> Members:
        """The members of this rank's tensor-parallel block."""
        first = self.member - self.member % self.tensor
        return tuple(range(first, first + self.tensor))

    def tables(self, members: Members) -> Tables | None:
        """Rotary cosines and sines for the tokens of ``members``, in the order of the pack; None
        where positions are learned."""
        architecture = self.architecture
        if architecture.kind != "llama":
            return None
        if members not in self._tables:
            held = self.tokens.held(members)
            # indices of these tokens in the pack; the empty array is for members without tokens
            pack_rows = np.concatenate(
                [
                    np.zeros(0, np.int64),
                    *(np.arange(interval.start, interval.stop) for interval in held.intervals),
                ]
            )
            positions = to_device(
                torch.from_numpy(self.tokens.pack_positions[pack_rows]), self.device
            )
            self._tables[members] = rotary_tables(
                positions, architecture.head_features, architecture.rope_theta, self.dtype
            )
        return self._tables[members]

    def order(self, members: Members) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Index tensors (into, back), [T] each: ``rows[into]`` puts the rows of ``members``, which
        lie one rank after the other, into the order of the pack, and ``rows[back]`` undoes that.
        None where they are in the order of the pack already."""
        if members not in self._orders:
            order = self.tokens.held(members).order
            self._orders[members] = (
                None
                if order is None
                else (
                    to_device(torch.from_numpy(order), self.device),
                    to_device(torch.from_numpy(np.argsort(order, kind="stable")), self.device),
                )
            )
        return self._orders[members]

    def arrival(self, members: Members, chunks: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As :meth:`order`, for rows of ``members`` that lie one chunk after the other, as they
        arrive when they are gathered in ``chunks`` chunks, each with the same share of every rank's
        tokens; see :class:`headrace.ops.spread.Spread`."""
        key = members, chunks
        if key not in self._arrivals:
            order = self.tokens.held(members).order
            sizes = tuple(self.tokens.sizes[member] for member in members)
            # for each arriving row its index in rank order, and from that its index in pack order
            rank_rows = Spread(sizes=sizes, group=None, chunks=chunks).arrival()
            pack_rows = rank_rows if order is None else np.argsort(order, kind="stable")[rank_rows]
            in_order = chunks == 1 and order is None
            self._arrivals[key] = (
                None
                if in_order
                else (
                    to_device(torch.from_numpy(np.argsort(pack_rows, kind="stable")), self.device),
                    to_device(torch.from_numpy(pack_rows), self.device),
                )
            )
        return self._arrivals[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The arguments of a method besides activations and weights: where the tokens are, the key of
    dropout masks, the recompute level, the layer's index in the model (from 0), and whether the
    model is in training."""

    place: Place
    dropout: DropoutKey
    recompute: Recompute = "none"
    layer: int = 0
    training: bool = True

    @property
    def architecture(self) -> Architecture:
        """The architecture of the model."""
        return self.place.architecture

    @property
    def tokens(self) -> TokenPlan:
        """The token plan: which rank holds which tokens."""
        return self.place.tokens

    @property
    def member(self) -> int:
        """The index of this rank in the group."""
        return self.place.member

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that runs the layer; None for a single rank."""
        return self.place.group

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""
        return self.tokens.ranks

    @property
    def keeps_linear(self) -> bool:
        """Whether the results of linear maps are saved for the backward."""
        return self.recompute != "attention"
