"""One protocol for models that nobody here wrote, spread over ranks: by tokens or by axes.

samples   items of a data set as tensors, with a length in tokens (places of a clip)
packs     samples that the model takes in one call
parts     what one rank has of a batch or a pack

A model is *spread* from :meth:`SpreadModel.take` to :meth:`SpreadModel.release`, and while the
backward of what it gave in between runs. At all other times it is the user's plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headrace.comm.mesh import Groups
from headrace.spec.layer_plan import Recompute
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder

__all__ = ["Item", "Levels", "Pack", "BatchPart", "SampleReader", "SpreadModel"]

Item = dict[str, torch.Tensor]
"""A sample: its fields as tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack:
    """The samples that a model takes in one call.

    Attributes:
        values: Inputs and other fields of the samples, not sharded.
        tokens: How many tokens (places) it has.
        targets: How many of these tokens have a loss.
    """

    values: dict[str, torch.Tensor]
    tokens: int
    targets: int

    def to(self, device: str) -> Pack:
        """The same pack on a device."""
        moved = {name: value.to(device) for name, value in self.values.items()}
        return Pack(values=moved, tokens=self.tokens, targets=self.targets)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPart(Mapping[str, Any]):
    """One rank's part of a batch. As a mapping it is its ``inputs``: ``run(**part)``.

    Attributes:
        inputs: Arguments of the model: for tokens [b, s_r, ...], the local ones of every row.
        labels: The labels of the local places, [b, s_r] of tokens, with IGNORED (-100) where there
            is no loss; None where the batch has none.
        group: The group of ranks that share the batch; None where this rank has it alone.
        targets: Tokens of the whole step that have a loss; 0 where nobody knows.
        tokens: Tokens (places) on this rank.
        rest: Fields of the local samples that the model does not take.
        placed: How the batch is sharded: a :class:`~headrace.adopt.placement.Placement` of tokens,
            :class:`~headrace.adopt.axis_shards.AxisShards` of axes.
    """

    inputs: dict[str, Any]
    labels: torch.Tensor | None
    group: dist.ProcessGroup | None
    targets: int
    tokens: int
    placed: Any
    rest: dict[str, torch.Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)


class SampleReader(Protocol):
    """Makes samples of the items of a data set."""

    def read(self, item: Any, what: str) -> Item:
        """The sample of an item. Raises DataError, about ``what``, for one that is none."""
        ...

    def length(self, sample: Item) -> int:
        """The number of tokens of a sample."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """The recompute levels that layers support.

    Attributes:
        choose: Sets what each layer recomputes after the next forward: nothing, or a level.
        known: The supported levels.
        entries: Tensors as large as its input that a layer saves when it recomputes everything.
    """

    choose: Callable[[Sequence[Recompute]], None]
    known: tuple[Recompute, ...]
    entries: int = 1


class SpreadModel(SampleReader, Protocol):
    """A model that groups of ranks run together, each rank on its part of a batch."""

    @property
    def model(self) -> torch.nn.Module:
        """The model as the user calls it, perhaps wrapped."""
        ...

    @property
    def inner(self) -> torch.nn.Module:
        """The user's own module, without wrappers."""
        ...

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The exchanges that ranks of a group may use; the quickest is kept for each group size."""
        ...

    @property
    def whole(self) -> bool:
        """Whether the model can be run and measured only with all its layers."""
        ...

    def shard(self, batch: Any) -> BatchPart:
        """This rank's part of a batch that all ranks have alike. Collective."""
        ...

    def place(
        self,
        values: Mapping[str, Any],
        ranks: Members,
        *,
        targets: int | None = None,
        exchange: str | None = None,
        groups: Groups | None = None,
    ) -> BatchPart:
        """:meth:`shard` without communication, for values that all ``ranks`` have alike and whose
        groups exist.

        Args:
            values: Those of a pack, or a batch.
            ranks: The ranks that share them; this one is among them.
            targets: Tokens of the whole step that have a loss.
            exchange: How the ranks meet; the model's own choice where it is None.
            groups: The groups of this rank, where they are not the model's own.
        """
        ...

    def take(self, part: BatchPart) -> None:
        """Spread the model: its forwards work on ``part`` from now on."""
        ...

    def release(self) -> None:
        """Make the model the user's plain one again."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this rank's part of a loss."""
        ...

    def add_up(self, loss: torch.Tensor) -> torch.Tensor:
        """The sum of the loss over all ranks; sums gradients too where no wrapper does. Called
        after the backward. Collective."""
        ...

    def prepare(self, groups: Iterable[Members]) -> None:
        """Create the process groups. Collective: every rank of the world calls it with the same
        groups."""
        ...

    def install(self) -> Callable[[], None]:
        """Have the model itself do what a call of this object does while it is spread, so that a
        loop that calls the model need not change. Returns a function that undoes this."""
        ...

    def detach(self) -> None:
        """Restore the model as it was; this object is of no use afterwards."""
        ...

    def join(self, groups: Groups, *, label_name: str) -> None:
        """Work in a training loop: with its groups, and samples whose labels are in
        ``label_name``."""
        ...

    def begin(self, sample: Item, device: str) -> Callable[[], None]:
        """Probe with a sample whether the model can be run on parts, and :meth:`install`. Raises
        ModelError where it cannot."""
        ...

    def packs(self, samples: Sequence[Item]) -> list[Pack]:
        """Samples in as few packs as can be."""
        ...

    def made(self, sample: Item, lengths: Sequence[int], ranks: int, *, document: int) -> Pack:
        """A pack of samples like ``sample``, of about these lengths, for ``ranks`` ranks. No
        document is longer than ``document``, as models may have a limit of positions."""
        ...

    def ranks_for(self, pack: Pack, ranks: Members) -> Members:
        """Those of ``ranks`` over which a pack can be spread."""
        ...

    def groups_of(self, ranks: Members) -> list[Members]:
        """All groups that ranks which work together may need."""
        ...

    def number(self, outputs: Any) -> torch.Tensor:
        """A scalar of the model's results to start a backward from, when the model is measured."""
        ...

    def order(self, exchange: str) -> TokenOrder:
        """How tokens are dealt out to the ranks of a group."""
        ...

    def levels(self, layers: Sequence[torch.nn.Module]) -> Levels | None:
        """The recompute levels of ``layers``; None where they have none."""
        ...

    def forget(self) -> None:
        """Drop records of earlier forwards: after a failure they may differ between ranks."""
        ...
