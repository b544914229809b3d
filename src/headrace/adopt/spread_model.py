"""One protocol for users' models that are spread over ranks, by tokens or by axes.

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
from headrace.errors import ModelError
from headrace.spec.layer_plan import Recompute
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder

__all__ = ["Item", "Levels", "Pack", "BatchPart", "Watcher", "SampleReader", "SpreadModel"]

Item = dict[str, torch.Tensor]
"""A sample: its fields as tensors."""

Watcher = Callable[[Sequence[torch.Tensor]], None]
"""Is given the tensors among the results of a forward."""


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
        """Copy the pack to a device."""
        moved = {name: value.to(device) for name, value in self.values.items()}
        return Pack(values=moved, tokens=self.tokens, targets=self.targets)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPart(Mapping[str, Any]):
    """One rank's part of a batch. As a mapping it is its ``inputs``: ``run(**part)``.

    Attributes:
        inputs: Arguments of the model, cut to this rank: for tokens [b, s_r, ...].
        labels: The labels of the local places, [b, s_r] of tokens, with IGNORED (-100) where there
            is no loss; None where the batch has none.
        group: The group of ranks that share the batch; None where this rank has it alone.
        targets: Tokens of the whole step that have a loss; 0 where that is not known.
        tokens: Tokens (places) on this rank.
        rest: Fields of the local samples that the model does not take.
        placed: How the batch is sharded: a :class:`~headrace.adopt.placement.Placement` of tokens,
            :class:`~headrace.adopt.axis_shards.AxisShards` of axes.
        by_places: Whether a rank's share of a step is that of its places, as for a model of several
            axes; else that of its labels.
    """

    inputs: dict[str, Any]
    labels: torch.Tensor | None
    group: dist.ProcessGroup | None
    targets: int
    tokens: int
    placed: Any
    rest: dict[str, torch.Tensor] = field(default_factory=dict)
    by_places: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inputs)

    def __len__(self) -> int:
        return len(self.inputs)


class SampleReader(Protocol):
    """Makes samples of the items of a data set."""

    def read(self, item: Any, what: str, *, labelled: bool = True) -> Item:
        """Make a sample of an item of the data set.

        Args:
            item: The item.
            what: What the item is called in errors.
            labelled: Whether it must have labels, where the model does not learn from tokens alone.

        Returns:
            Its fields as tensors.

        Raises:
            DataError: For an item that is no sample.
        """
        ...

    def forget_fields(self) -> None:
        """Let the samples that follow have other fields than those before."""
        ...

    def length(self, sample: Item) -> int:
        """Count the tokens of a sample.

        Args:
            sample: What :meth:`read` gave.

        Returns:
            Tokens, or places of a clip.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """The recompute levels that layers support.

    Attributes:
        choose: A function that sets, for the next forward, the level of each layer in order:
            ``none`` or one of ``known``. Layers beyond the end of the list recompute nothing.
        known: The supported levels.
        entries: How many tensors of the size of its input a layer keeps for its backward at the
            level ``full``, at which it recomputes everything.
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
        """Cut a batch that all ranks have alike into this rank's part. Collective.

        Args:
            batch: Inputs of the model by name, and other values of the batch.

        Returns:
            The part: call ``run(**part)``.
        """
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
        """Cut values into this rank's part without communication: they must be the same on all
        ``ranks``, and the ranks' process groups must exist.

        Args:
            values: The values of a pack or of a batch, by name.
            ranks: The ranks that share them; this one is among them.
            targets: The number of tokens of the whole step that have a loss.
            exchange: The exchange between the ranks; the model's own choice where it is None.
            groups: The groups of this rank, where they are not the model's own.

        Returns:
            This rank's part.
        """
        ...

    def take(self, part: BatchPart) -> None:
        """Spread the model: it works on a part from here on.

        Args:
            part: What :meth:`shard` or :meth:`place` gave.
        """
        ...

    def release(self) -> None:
        """Make the model the user's plain one again."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of this rank's part of a loss and add its gradients.

        Args:
            loss: This rank's part, a single number.
        """
        ...

    def watch(self, watcher: Watcher | None) -> None:
        """Have the results of spread forwards in a loop looked at, from here on, and noted for
        :meth:`checked_backward`.

        Args:
            watcher: Is given the tensors among the results of each forward; None ends it.
        """
        ...

    def checked_backward(self, loss: torch.Tensor, *, weighed: bool) -> ModelError | None:
        """Run the backward of this rank's part of a loss in a loop that checks losses, and tell
        what is wrong: that it is no sum over the part, as its graph shows, or that ranks add a term
        of what they have alike, which counts for each of them. Collective among the ranks of the
        part.

        Args:
            loss: This rank's part, a single number, of results that :meth:`watch` noted.
            weighed: Whether terms are weighed by this rank's share of the step.

        Returns:
            The error; None where nothing is wrong.
        """
        ...

    def add_up(self, loss: torch.Tensor) -> torch.Tensor:
        """Sum the loss over all ranks, and gradients too, where no wrapper does; call it once
        gradients are there. Collective.

        Args:
            loss: This rank's part, a single number.

        Returns:
            The loss of all ranks together.
        """
        ...

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make groups of ranks. Collective: every rank of the world calls it alike.

        Args:
            groups: The ranks of each group.
        """
        ...

    def install(self) -> Callable[[], None]:
        """Have the model itself do what a call of this object does while it is spread, so that a
        loop that calls the model need not change.

        Returns:
            A function that undoes this.
        """
        ...

    def detach(self) -> None:
        """Restore the model as it was; this object is of no use afterwards."""
        ...

    def join(self, groups: Groups, *, label_name: str) -> None:
        """Work in a training loop.

        Args:
            groups: The groups of this rank in the loop.
            label_name: The field of samples that has their labels.
        """
        ...

    def begin(self, sample: Item, device: str) -> Callable[[], None]:
        """Test with a sample whether the model can be run on parts, and :meth:`install`.

        Args:
            sample: A sample of the data set.
            device: Where the model lives.

        Returns:
            A function that undoes all of it.

        Raises:
            ModelError: Where the model cannot be run on parts.
        """
        ...

    def packs(self, samples: Sequence[Item]) -> list[Pack]:
        """Put samples together into as few packs as can be.

        Args:
            samples: The samples of a micro-batch.

        Returns:
            The packs, each for one call of the model.
        """
        ...

    def few(self, sample: Item) -> int:
        """Count the tokens of a sample, made of another one, that shows which layers the model has,
        even where the other one fits no single rank.

        Args:
            sample: A sample of the data set.

        Returns:
            Tokens, or places of a clip.
        """
        ...

    def made(self, sample: Item, lengths: Sequence[int], ranks: int, *, document: int) -> Pack:
        """Make a pack of samples with given lengths from one sample, to measure the model with.

        Args:
            sample: The sample whose values are repeated or cut.
            lengths: The tokens that each sample of the pack should have, or nearly.
            ranks: The number of ranks that will share the pack.
            document: The most tokens of one sample: models may have no more positions.

        Returns:
            The pack.
        """
        ...

    def ranks_for(self, pack: Pack, ranks: Members) -> Members:
        """Choose the ranks that a pack can be spread over.

        Args:
            pack: The pack.
            ranks: The ranks that are there for it.

        Returns:
            The first of these, as many as can have a part.
        """
        ...

    def groups_of(self, ranks: Members) -> list[Members]:
        """List the groups that ranks which work together may need.

        Args:
            ranks: The ranks.

        Returns:
            The ranks of each group.
        """
        ...

    def number(self, outputs: Any) -> torch.Tensor:
        """Make a scalar of the model's results, to run a backward from when the model is measured.

        Args:
            outputs: What the model gave.

        Returns:
            A single number.
        """
        ...

    def order(self, exchange: str) -> TokenOrder:
        """Say how tokens are divided among the ranks of a group.

        Args:
            exchange: The exchange between the ranks.

        Returns:
            ``natural`` or ``zigzag``.
        """
        ...

    def levels(self, layers: Sequence[torch.nn.Module]) -> Levels | None:
        """Find the recompute levels of layers, and the function that sets them.

        Args:
            layers: The layers, in the order of the forward.

        Returns:
            The levels; None where the layers know none.
        """
        ...

    def look_again(self) -> None:
        """Between two steps of a loop: look at a model again that has changed since."""
        ...

    def forget(self) -> None:
        """Drop records of earlier forwards: after a failure they may differ between ranks."""
        ...
