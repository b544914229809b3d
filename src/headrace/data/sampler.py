"""Random batches without replacement, the same whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.data.batch import Batch, Sample
from headrace.data.order import EpochOrder, SamplerOptions, order_epoch
from headrace.data.pieces import cut
from headrace.errors import DataError
from headrace.spec.lengths import Lengths

__all__ = ["MeasuredDocuments", "Sampler"]


class MeasuredDocuments(Protocol):
    """What a sampler asks of a corpus, or of anyone's data set."""

    @property
    def name(self) -> str:
        """What a person calls it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for equal documents."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a sampler stands: its next batch is ``batch`` of ``epoch``, trained in ``step``.

    ``first_step`` is the step in which the epoch began, on which a curriculum depends.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    first_step: int = 0

    def after(self, batches: int) -> Position:
        """The next position, in an epoch of so many batches."""
        if self.batch + 1 < batches:
            return replace(self, step=self.step + 1, batch=self.batch + 1)
        step = self.step + 1
        return Position(step=step, epoch=self.epoch + 1, first_step=step)


class Sampler:
    """Draws batches for ever, every sample once per epoch, in an order set by (seed, epoch).

    The state is four numbers and what they are valid for; it does not know of ranks, so a run
    continues with the same batches on any number of them. Raises DataError when no sample is
    left, or a document is longer than the context and the options refuse that.
    """

    def __init__(self, corpus: MeasuredDocuments, options: SamplerOptions) -> None:
        self._fingerprint, self._name, self._options = corpus.fingerprint, corpus.name, options
        self._pieces = cut(corpus.lengths, context=options.context, too_long=options.too_long)
        self._kept: NDArray[np.int64] = np.flatnonzero(self._pieces.lengths >= options.min_tokens)
        if not len(self._kept):
            got = f"{len(self._pieces):,}, all shorter"
            wanted = f"one of {options.min_tokens} tokens or more"
            raise DataError(f"samples of {corpus.name}", got=got, wanted=wanted)
        self._at = Position()
        self._order: EpochOrder | None = None

    @property
    def options(self) -> SamplerOptions:
        """How batches are drawn."""
        return self._options

    @property
    def samples(self) -> int:
        """Samples per epoch."""
        return len(self._kept)

    def _current(self) -> EpochOrder:
        """The order of the current epoch, made when it is first asked for."""
        if self._order is None:
            self._order = self._order_at(self._at)
        return self._order

    def _order_at(self, at: Position) -> EpochOrder:
        return order_epoch(
            self._kept,
            self._pieces.lengths[self._kept],
            self._options,
            epoch=at.epoch,
            first_step=at.first_step,
        )

    def next_batch(self) -> Batch:
        """Draw the next batch and move past it."""
        order, at = self._current(), self._at
        ids = order.batch(at.batch)
        self._at = at.after(order.batches)
        if self._at.epoch != at.epoch:
            self._order = None
        columns = (self._pieces.documents, self._pieces.starts, self._pieces.lengths)
        rows = zip(*(column[ids].tolist() for column in columns), strict=True)
        samples = tuple(Sample(*row) for row in rows)
        return Batch(
            step=at.step,
            epoch=at.epoch,
            lengths=Lengths.of((sample.length for sample in samples), ids),
            samples=samples,
            state_after=self.state(),
        )

    def copy(self) -> Sampler:
        """A sampler in the same state that moves on its own."""
        return copy(self)  # all that is shared is never changed in place

    def peek(self, batches: int = 1) -> tuple[Batch, ...]:
        """The next batches, without moving past them."""
        ahead = self.copy()
        return tuple(ahead.next_batch() for _ in range(batches))

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes to continue with the next batch; JSON."""
        return {
            "corpus": self._fingerprint,
            "options": self._options.to_json(),
            **asdict(self._at),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken: the same batches follow, in the same order.

        Raises DataError, and changes nothing, for the state of another corpus or of other options,
        naming what differs, and for a state that is damaged.
        """
        self._check(state)
        at = Position(**{field.name: state[field.name] for field in fields(Position)})
        order = self._order_at(at)
        if at.batch >= order.batches:
            wanted = f"fewer than {order.batches}, all of epoch {at.epoch}"
            raise DataError("batch in the state of the data", got=at.batch, wanted=wanted)
        self._at, self._order = at, order

    def _check(self, state: Mapping[str, Any]) -> None:
        own = self.state()
        if missing := own.keys() - state.keys():
            wanted = f"an entry {' and one '.join(sorted(missing))}"
            raise DataError("state of the data", got=f"{len(state)} entries", wanted=wanted)
        for field in fields(Position):
            value = state[field.name]
            if type(value) is not int or value < 0:
                what = f"{field.name} in the state of the data"
                raise DataError(what, got=repr(value), wanted="an int >= 0")
        if state["corpus"] != own["corpus"]:
            raise DataError(
                f"corpus {self._name}",
                got=f"fingerprint {own['corpus'][:12]}",
                wanted=f"{str(state['corpus'])[:12]} as when the state was taken",
                hint="documents or the tokenizer have changed since; start anew, or restore them",
            )
        before = state["options"] if isinstance(state["options"], dict) else {}
        for name, value in own["options"].items():
            if before.get(name) != value:
                wanted = f"{before.get(name)} as when the state was taken"
                raise DataError(f"data.{name}", got=value, wanted=wanted)
