"""The stand on which pieces of a model are measured: two layers of it, and weights of noise.

Two layers serve for the whole model, as layers are alike: the first warms up (DCP, section 3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from headrace.comm.mesh import Groups
from headrace.layouts.layout import group_shards
from headrace.methods.weights import Shard, Weight, Whole
from headrace.models.transformer import Transformer
from headrace.runtime.ladders import Ladder
from headrace.runtime.micro_batch import MicroBatchRun
from headrace.runtime.pieces import BranchPiece, EndsPiece, Piece
from headrace.spec.architecture import Architecture
from headrace.spec.known_methods import subgroups
from headrace.spec.lengths import Lengths
from headrace.spec.method import LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.scheme import Scheme
from headrace.spec.weights import buckets, weight_table

__all__ = ["Stand"]


class Stand:
    """Makes pieces of ``architecture`` for this rank; ``two`` is the model that is run.

    Weights are whole on every rank, of ``dtype``; gradients are fp32 for half types.
    """

    def __init__(
        self, architecture: Architecture, *, dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self.two = replace(architecture, layers=min(2, architecture.layers))
        self.dtype, self.device = dtype, device
        self.model = Transformer(self.two)
        wide = dtype if dtype.itemsize >= 4 else torch.float32
        self._held: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}
        for weight in weight_table(self.two):
            value = torch.empty(weight.shape, dtype=dtype, device=device).normal_(std=0.02)
            grad = torch.zeros(weight.shape, dtype=wide, device=device)
            self._held[weight.name] = (value, grad, weight.unit or 1)

    @property
    def bytes_held(self) -> int:
        """Bytes of the weights and their gradients."""
        return sum(value.nbytes + grad.nbytes for value, grad, _ in self._held.values())

    def groups_of(self, ladder: Ladder, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The groups that a ladder needs on ``ranks``."""
        members = [tuple(range(ladder.p)), *subgroups(ladder.option, self.two, ladder.p)]
        return [tuple(ranks[member] for member in group) for group in members]

    def piece(
        self, groups: Groups, ranks: tuple[int, ...], ladder: Ladder, lengths: tuple[int, ...]
    ) -> Piece:
        """A ladder's piece on ``ranks`` of ``groups``, for a pack of documents."""
        layers = LayerPlan.uniform(ladder.option, self.two.layers)
        order = ladder.order(self.two)
        micro = MicroBatch(
            pipeline=0, sequences=tuple(range(len(lengths))), layers=layers, order=order
        )
        plan = Plan(
            lengths=Lengths(tokens=lengths), devices=groups.ranks,
            pipelines=(Pipeline(scheme=Scheme(context=len(ranks)), ranks=ranks),),
            micro_batches=(micro,), predicted_s=0.0, lower_bound_s=0.0,
        )  # fmt: skip
        run = MicroBatchRun.of(
            self.model, plan, micro, self._tokens(lengths), self._weights(ranks.index(groups.rank)),
            groups, seed=0, step=0, dtype=self.dtype, device=self.device,
        )  # fmt: skip
        if ladder.part is None:
            return EndsPiece(run)
        return BranchPiece(run, ladder.part, ladder.option, segments=self.two.layers)

    def shards(self, groups: Groups, ranks: tuple[int, ...]) -> list[Shard]:
        """One layer's matrices, spread over ``ranks``."""
        group = groups.get(ranks)
        assert group is not None, "a group of several ranks"
        found = []
        for weight in buckets(self.two)[1]:
            if weight.unit is not None:
                value, grad, _ = self._held[weight.name]
                parts = group_shards(weight, len(ranks))
                rows = len(parts[ranks.index(groups.rank)])
                found.append(Shard(value=value[:rows], grad=grad[:rows], shards=parts, group=group))
        return found

    def _weights(self, member: int) -> dict[str, Weight]:
        return {
            name: Whole(value=value, grad=grad, member=member, unit=unit)
            for name, (value, grad, unit) in self._held.items()
        }

    def _tokens(self, lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(sum(lengths))
        return tuple(rng.integers(self.two.vocabulary, size=n).astype(np.int32) for n in lengths)
