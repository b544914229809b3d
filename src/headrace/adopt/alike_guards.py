"""Finds backwards that count once for every rank what ranks have alike.

Losses of ranks are summed. Where ranks have a tensor alike, such as a collected result, and each of
them adds a term of it to its loss, the gradient of this term comes out times their number. The
number of the loss need not show it, as other terms may be those of each rank's places. So such
tensors are guarded: hooks keep a few sums of the gradients that arrive at them, and ranks compare
these. Equal gradients are those of a term that every rank adds; ranks that use other parts of the
tensor, or compare it with other places, have other gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from headrace.comm.collectives import gather_bytes
from headrace.errors import ModelError

__all__ = ["AlikeGuards"]

_FIRST = 8
"""The first backwards whose gradients are compared; later ones are if their number is a power of
two."""
_CHUNK = 1 << 20
"""Entries of a gradient that are summed at once, to bound memory."""
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Differences, relative to a gradient's norm, that ranks which compute the same may have; 2 % in
half types."""


@dataclass(slots=True, kw_only=True, eq=False)
class AlikeGuards:
    """The guards of one model, and the gradients that arrived at them in a backward.

    Attributes:
        made: Whether any tensor was guarded so far.
        divides: Whether the caller has asked by how many ranks to divide since the last backward:
            it is taken to do so, and nothing is refused.
        refuses_own: Whether a backward that comes to a loss which the model itself makes is
            refused at once.
    """

    made: bool = False
    divides: bool = False
    refuses_own: bool = False
    _backwards: int = 0
    # Of each gradient, in the order of their arrival: its sums (float64 [3]), those of the guarded
    # tensor where it is not known to be alike, and the difference of sums, relative to the norm,
    # that counts as none.
    _arrived: list[tuple[list[torch.Tensor], float]] = field(default_factory=list)
    _notes: bool = False  # whether gradients are noted in the backward at work
    _notes_own: bool = False  # those of losses that the model makes, too

    def guard(self, x: torch.Tensor, *, own: bool = False, known: bool = True) -> torch.Tensor:
        """Guard a tensor that ranks have alike; ``own`` says that it is a loss that the model
        itself makes of this rank's samples. Where it is not ``known`` whether ranks have it alike,
        they compare the tensor, too. Returns the tensor."""
        compared = () if known else (x.detach(),)  # not x itself, which has the hook

        def note(gradient: torch.Tensor) -> None:
            """Keep sums of the gradient where they are wanted; raises ModelError for that of a loss
            of the model's own where it is refused."""
            if own and self.refuses_own:
                raise _own_loss_error()
            if self._notes and (self._notes_own or not own):
                tolerance = _TOLERANCES.get(gradient.dtype, 2e-2)
                sums = [_sums(one) for one in (gradient.detach(), *compared)]
                self._arrived.append((sums, tolerance))

        if x.requires_grad:
            x.register_hook(note)
            self.made = True
        return x

    def due(self) -> bool:
        """Count a backward; returns whether its gradients are to be compared."""
        self._backwards += 1
        return self._backwards <= _FIRST or not self._backwards & (self._backwards - 1)

    @contextmanager
    def noting(self, *, own: bool = False) -> Iterator[None]:
        """Context of a backward whose gradients are compared after it; with ``own`` also those that
        arrive at losses which the model makes."""
        self._arrived.clear()
        self._notes, self._notes_own = True, own
        try:
            yield
        finally:
            self._notes = self._notes_own = False

    def counts_for_every_rank(self, group: dist.ProcessGroup | None) -> bool:
        """Whether a gradient that was noted is the same, and not zero, on all ranks of ``group``,
        none of which divides by their number. Waits for the device. Collective."""
        own = [([one.tolist() for one in sums], tolerance) for sums, tolerance in self._arrived]
        self._arrived.clear()
        if group is None:
            return False
        payload = json.dumps(None if self.divides else own).encode()
        by_rank = [json.loads(data) for data in gather_bytes(payload, group)]
        if any(rows is None or len(rows) != len(own) for rows in by_rank):
            return False
        return any(_are_alike(of_ranks) for of_ranks in zip(*by_rank, strict=True))


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Three numbers of a tensor, float64 [3]: its norm, and two sums of its entries weighted by
    where they are, so that tensors with equal entries at other places differ."""
    flat = x.reshape(-1)
    sums = torch.zeros(3, dtype=torch.float64, device=x.device)
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK].double()
        at = torch.arange(start, start + len(chunk), device=x.device, dtype=torch.float64)
        weighted = (chunk.square(), chunk * (at + 1).sin(), chunk * (0.7 * at).cos())
        sums += torch.stack([values.sum() for values in weighted])
    return torch.cat([sums[:1].sqrt(), sums[1:]])


def _are_alike(of_ranks: Sequence[tuple[list[list[float]], float]]) -> bool:
    """Whether a gradient, and the guarded tensor where it was compared, are the same on all ranks:
    for each rank the sums of both, and the tolerance."""
    sums_by_rank, tolerances = zip(*of_ranks, strict=True)
    if len({len(sums) for sums in sums_by_rank}) > 1:
        return False
    return all(_are_equal(rows, max(tolerances)) for rows in zip(*sums_by_rank, strict=True))


def _are_equal(rows: Sequence[Sequence[float]], tolerance: float) -> bool:
    """Whether tensors are the same on all ranks, up to a ``tolerance`` relative to their norm, and
    not zero; a row for each rank has the three sums."""
    columns = list(zip(*rows, strict=True))
    norm = max(columns[0])
    if not norm > 0 or not all(math.isfinite(value) for column in columns for value in column):
        return False
    return all(max(column) - min(column) <= tolerance * norm for column in columns)


def _own_loss_error() -> ModelError:
    """The error for a mean over a rank's samples that would be added up as it is."""
    return ModelError(
        "loss that the model makes of its samples",
        got="a backward that counts it for every rank",
        wanted="run.backward(loss * run.share)",
        hint="a mean over samples is loss * run.share; what ranks have alike is "
        "run.backward(loss, alike=True)",
    )
