"""What a loop asks of a model that can work on parts of a batch, whatever its parts are.

samples   items of a data set as tensors, with a length in tokens (places of a clip)
packs     samples that the model takes in one call
parts     what one rank has of a pack
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headrace.comm.mesh import Groups
from headrace.spec.method import Recompute
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder

__all__ = ["Item", "Levels", "LoopModel", "LoopPart", "Pack", "SampleReader"]

Item = dict[str, torch.Tensor]
"""A sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """What the model takes in one call: ``tokens`` of it, ``targets`` of which have a loss."""

    values: dict[str, torch.Tensor]
    tokens: int
    targets: int

    def to(self, device: str) -> Pack:
        """The same on a device."""
        moved = {name: value.to(device) for name, value in self.values.items()}
        return Pack(values=moved, tokens=self.tokens, targets=self.targets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopPart:
    """What one rank has of a pack: ``inputs`` of the model, ``labels`` of their places, fields of
    its samples that the model does not take (``rest``), and the ``group`` that works on it.
    ``targets`` are those of the step, ``tokens`` those of this rank; ``shard`` is the model's own.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None
    group: dist.ProcessGroup | None
    targets: int
    tokens: int
    shard: Any
    rest: dict[str, torch.Tensor] = field(default_factory=dict)


class SampleReader(Protocol):
    """Makes samples of the items of a data set."""

    def read(self, item: Any, what: str) -> Item:
        """The sample of an item. Raises DataError, about ``what``, for one that is none."""
        ...

    def length(self, sample: Item) -> int:
        """Tokens of a sample."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """``choose(levels)`` says what each layer computes again in the next forward: nothing, or one
    of the levels that are ``known``. Of a layer that computes all again ``entries`` are kept that
    are as large as its input."""

    choose: Callable[[Sequence[Recompute]], None]
    known: tuple[Recompute, ...]
    entries: int = 1


class LoopModel(SampleReader, Protocol):
    """A model whose packs are worked on by groups of ranks."""

    @property
    def inner(self) -> torch.nn.Module:
        """The user's own module."""
        ...

    @property
    def exchanges(self) -> tuple[str, ...]:
        """How ranks of a group may meet, of which the quickest is kept for each size."""
        ...

    @property
    def whole(self) -> bool:
        """Whether it can only be run, and measured, as a whole."""
        ...

    def begin(self, sample: Item, device: str) -> Callable[[], None]:
        """Look whether the model can be run on parts, and have it do so; returns what takes that
        back. Raises ModelError where it cannot."""
        ...

    def packs(self, samples: Sequence[Item]) -> list[Pack]:
        """Samples in as few packs as can be."""
        ...

    def made(self, sample: Item, lengths: Sequence[int], ranks: int, *, document: int) -> Pack:
        """A pack of samples like one, of such lengths or near, for so many ranks; none is longer
        than a ``document``: models may know no more places."""
        ...

    def ranks_for(self, pack: Pack, ranks: Members) -> Members:
        """Those of ``ranks`` that a pack can be spread over."""
        ...

    def groups_of(self, ranks: Members) -> list[Members]:
        """The groups that ranks which work together may need."""
        ...

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make groups. Collective: every rank of the world calls it alike."""
        ...

    def place(
        self,
        pack: Pack,
        ranks: Members,
        *,
        targets: int,
        exchange: str | None,
        groups: Groups | None = None,
    ) -> LoopPart:
        """This rank's part of a pack, which the model works on from here on."""
        ...

    def take(self, part: LoopPart) -> None:
        """Work on a part from here on."""
        ...

    def number(self, outputs: Any) -> torch.Tensor:
        """Some number of the model's results, to go backward from."""
        ...

    def order(self, exchange: str) -> TokenOrder:
        """How tokens are dealt out."""
        ...

    def levels(self, layers: Sequence[torch.nn.Module]) -> Levels | None:
        """What chooses recompute of layers; None where they know none."""
        ...

    def forget(self) -> None:
        """What was learnt from forwards, of which some ranks may have failed."""
        ...

    def shard(self, batch: Any) -> LoopPart:
        """This rank's part of a batch that all ranks have alike. Collective."""
        ...
