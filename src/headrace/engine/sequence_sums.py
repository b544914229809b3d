"""Sums over the tokens of each sequence of a micro-batch, whatever ranks have them.

Shape legend: k sequences of a micro-batch on R ranks; s_r of their tokens on rank r.

    forward   every rank adds up its own tokens by sequence [k], and all ranks add these in the
              order of ranks: the same numbers on each of them
    backward  the gradients [k] of all ranks are added likewise, and every token gets the one of its
              sequence: the adjoint of the sum of what all ranks compute

The losses of the ranks of a micro-batch are summed, and one that is made of such sums is the same
number on all of them. So each sequence has a *share* on every rank, which is one over the ranks of
the micro-batch and the sequences of the step: losses of sequences times their shares add up to the
mean over the sequences of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from headrace.adopt.own_losses import note_whole
from headrace.adopt.placement import Placement
from headrace.comm.collectives import all_gather_rows, sum_of_parts
from headrace.errors import ModelError

__all__ = ["SequenceSums"]


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceSums:
    """Adds up values of tokens by the sequences of a micro-batch, of which this rank has some
    tokens.

    Attributes:
        lengths: Tokens of each sequence of the micro-batch, in the order in which they are packed
            into one row; empty in an idle turn, in which this rank works on no sequence.
        shares: The share of each sequence on this rank; 0 where a trial of the loss leaves it out.
        placed: Which tokens of the row this rank has, as a :class:`Placement`; another value for a
            model of several axes, which has no row of tokens.
        group: The ranks of the micro-batch; None for one rank.
        dtype: The type of the shares.
        device: Where the shares are.
        used: Whether sums were asked for.
        leaks: The largest absolute gradient, [], of each backward that reached sequences whose
            share is 0: a loss that leaves them out gives 0.
    """

    lengths: Sequence[int]
    shares: Sequence[float]
    placed: Any
    group: dist.ProcessGroup | None
    dtype: torch.dtype
    device: str
    used: bool = field(default=False, init=False)
    leaks: list[torch.Tensor] = field(default_factory=list, init=False)

    def share(self) -> torch.Tensor:
        """The shares [k] as a tensor. Raises ModelError for a model of several axes."""
        self._require_tokens()
        return torch.tensor(self.shares, dtype=self.dtype, device=self.device)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values of the local tokens, [1, s_r] or [s_r], by sequence over all ranks of the
        micro-batch: [k], in single precision at least. Collective among these ranks. Raises
        ModelError for values of another shape."""
        self.used = True
        if not self.lengths:  # an idle turn: its backward still has to reach the model
            return values.flatten()[:0]
        index = self.local_index()
        shape = list(values.shape)
        if shape not in ([1, len(index)], [len(index)]):
            raise ModelError(
                "values to add up by sequence",
                got=f"shape {shape}",
                wanted=f"[1, {len(index)}], a value of each local token",
            )
        stops = np.cumsum(self.lengths)
        # The number of the sequence that each local token is of [s_r].
        sequence = torch.from_numpy(np.searchsorted(stops, index, side="right")).to(values.device)
        flat = values.flatten()
        wide = flat.float() if flat.element_size() < 4 else flat
        local_sums = wide.new_zeros(len(self.lengths)).index_add(0, sequence, wide)
        sums: torch.Tensor = (
            local_sums if self.group is None else _Sum.apply(local_sums, self.group)
        )
        note_whole(sums)
        if sums.requires_grad and 0.0 in self.shares:
            sums.register_hook(self._note_leak)
        return sums

    def local_index(self) -> np.ndarray:
        """[s_r] int64: the index in the row of each local token. Raises ModelError for a model of
        several axes."""
        return self._require_tokens().index()

    def _require_tokens(self) -> Placement:
        """The placement of the micro-batch's tokens; raises ModelError for a model of several axes,
        which has none."""
        if not isinstance(self.placed, Placement):
            raise ModelError(
                "values of sequences",
                got="a model of several axes",
                wanted="a model of tokens",
                hint="add up what its ranks have by collectives of micro.group",
            )
        return self.placed

    def _note_leak(self, gradient: torch.Tensor) -> None:
        """Append to ``leaks`` the largest absolute value of the ``gradient`` [k] of the sums among
        sequences whose share is 0."""
        left_out = self.share() == 0
        self.leaks.append(gradient[left_out].abs().max())


class _Sum(torch.autograd.Function):
    """The sum of a tensor [k] over a group, the same on all ranks. As every rank's result depends
    on every rank's tensor, the gradient is the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sum_over_group(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sum_over_group(grad, ctx.group), None


def _sum_over_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of x [n] over a group, added in rank order, so that all ranks have the same bits."""
    ranks = dist.get_world_size(group)
    rows = all_gather_rows(x, [len(x)] * ranks, group)
    return sum_of_parts(rows.view(ranks, -1))
