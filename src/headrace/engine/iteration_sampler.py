"""Iterations that choose their own samples, drawn as the batches of a run; no torch here.

What an iteration holds follows from ranks and costs, so a sampler draws from the moment that it is
priced; ranks that have the same costs draw the same. A saved state tells for which ranks, memory
and margin was drawn: as many ranks go on with the iterations of a run without a break, whatever
memory they have by then, others with the samples that are left of the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.sampler import (
    Batch,
    MeasuredDocuments,
    Position,
    SampleTable,
    TooLong,
    position_in,
)
from headrace.errors import DataError
from headrace.planners.drawn_iterations import DrawPosition, IterationDrawer, bucket_numbers
from headrace.planning import Problem
from headrace.spec.draw_options import DrawOptions
from headrace.units import counted

__all__ = ["IterationSampler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnFor:
    """The ranks, their memory and the part of it left free for which iterations are drawn."""

    ranks: int
    memory_bytes: int
    memory_margin: float

    @classmethod
    def of(cls, problem: Problem) -> _DrawnFor:
        """The ranks, memory and margin of a problem with a model's costs."""
        costs = problem.model
        return cls(
            ranks=costs.cluster.devices,
            memory_bytes=costs.cluster.memory_bytes,
            memory_margin=costs.memory_margin,
        )

    def applied(self, problem: Problem) -> Problem:
        """The problem with its memory and margin replaced by these; unchanged where it has another
        number of ranks."""
        costs = problem.model
        if costs.cluster.devices != self.ranks or _DrawnFor.of(problem) == self:
            return problem
        cluster = replace(costs.cluster, memory_bytes=self.memory_bytes)
        return problem.replace(
            costs=costs.replace(cluster=cluster, memory_margin=self.memory_margin)
        )


class IterationSampler:
    """Draws iterations for ever, every sample once per epoch: a
    :class:`~headrace.data.sampler.BatchSampler` once :meth:`price` has given it costs.

    Args:
        corpus: The documents.
        options: How iterations are drawn.
        context: The most tokens of a sample; None for no limit.
        too_long: What becomes of longer documents.
        min_tokens: Shorter samples are left out.

    Raises:
        DataError: When no sample is left, or a document is longer than allowed.
    """

    def __init__(
        self,
        corpus: MeasuredDocuments,
        options: DrawOptions,
        *,
        context: int | None = None,
        too_long: TooLong = "refuse",
        min_tokens: int = 1,
    ) -> None:
        self._options = options
        self._table = SampleTable.of(
            corpus, context=context, too_long=too_long, min_tokens=min_tokens
        )
        self._saved_options = {
            "iterations": {k: v for k, v in asdict(options).items() if k != "seed"},
            "context": context,
            "too_long": too_long,
            "min_tokens": min_tokens,
            "seed": options.seed,
        }
        # The number of the next iteration, and which samples of the epoch were drawn before it.
        self._step, self._at = 0, DrawPosition(taken=(0,) * len(self._bucket_sizes()))
        self._problem: Problem | None = None
        self._saved_for: _DrawnFor | None = None  # in the state from which it was restored
        self._drawn_for: _DrawnFor | None = None  # of the drawer; saved with the state
        self._drawer: IterationDrawer | None = None

    def _bucket_sizes(self) -> NDArray[np.int64]:
        """The number of samples of each bucket of lengths, [buckets], shortest bucket first."""
        numbers = bucket_numbers(self._table.lengths, self._options.bucket_ratio)
        return np.unique(numbers, return_counts=True)[1].astype(np.int64)

    def price(self, problem: Problem) -> None:
        """Draw for these costs and ranks from now on, from the current position.

        Args:
            problem: The costs and choices of the plans that follow. The memory of ranks is that of
                the state from which it was restored, where that is of as many ranks.

        Raises:
            InfeasiblePlan: When the longest sample fits no group.
            SpecError: For costs of pipelines, and for ranks in lockstep.
        """
        if problem.static_size is not None:  # the planner may use one size: draw for it alone
            problem = problem.replace(sizes=(problem.static_size,))
        self._problem = problem
        self._drawer = self._made_drawer(problem)

    def _made_drawer(self, problem: Problem) -> IterationDrawer:
        """A new drawer of iterations for a problem, at the position where this sampler stands;
        notes the ranks and memory for which it draws."""
        if self._saved_for is not None:
            problem = self._saved_for.applied(problem)
        drawer = IterationDrawer(problem, self._table.lengths, self._options)
        drawer.restore(self._at)
        self._drawn_for = _DrawnFor.of(problem)
        return drawer

    def _priced(self) -> IterationDrawer:
        """The drawer of iterations; a new one is made where :meth:`restore` has dropped it. Call
        :meth:`price` before."""
        if self._drawer is None:
            assert self._problem is not None, "priced before the first step"
            self._drawer = self._made_drawer(self._problem)
        return self._drawer

    @property
    def per_batch(self) -> float:
        """The number of samples of the next iteration."""
        return float(len(self.peek()[0].samples))

    def next_batch(self) -> Batch:
        """Draw the next iteration and move past it.

        Returns:
            Its samples.
        """
        drawn = self._priced().draw()
        step = self._step
        self._step, self._at = step + 1, drawn.after
        return self._table.batch(
            self._table.kept[np.array(drawn.lengths.ids)],
            step=step,
            epoch=drawn.epoch,
            state_after=self.state(),
        )

    def copy(self) -> IterationSampler:
        """A sampler in the same state that moves on its own.

        Returns:
            The sampler; what both share is never changed in place.
        """
        other = copy(self)
        # The drawer is the one thing that changes in place when a batch is drawn.
        other._drawer = copy(self._drawer)  # noqa: SLF001
        return other

    def peek(self, batches: int = 1) -> tuple[Batch, ...]:
        """The next iterations, without moving past them.

        Args:
            batches: How many.

        Returns:
            Their samples.
        """
        ahead = self.copy()
        return tuple(ahead.next_batch() for _ in range(batches))

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes to continue with the next iteration.

        Returns:
            JSON: the position as a :class:`~headrace.data.sampler.Sampler` has it, and the samples
            that were taken of each bucket.
        """
        position = Position(
            step=self._step,
            epoch=self._at.epoch,
            batch=self._at.iteration,
            first_step=self._step - self._at.iteration,
        )
        return {
            "corpus": self._table.fingerprint,
            "options": self._saved_options,
            **asdict(position),
            "taken": list(self._at.taken),
            "drawn_for": None if self._drawn_for is None else asdict(self._drawn_for),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken: on as many ranks with the same iterations, on others
        with the samples that are left of the epoch.

        Args:
            state: What :meth:`state` gave.

        Raises:
            DataError: With nothing changed, for the state of another corpus or of other options, or
                one that is damaged.
        """
        at = position_in(state, self._table, self._saved_options)
        if at.first_step + at.batch != at.step:
            wanted = f"{at.step - at.batch}, {counted(at.batch, 'iteration')} before step {at.step}"
            raise DataError("first_step in the state of the data", got=at.first_step, wanted=wanted)
        taken, drawn_for = self._taken_in(state), _drawn_for_in(state)
        self._step = at.step
        self._at = DrawPosition(epoch=at.epoch, iteration=at.batch, taken=taken)
        self._saved_for = self._drawn_for = drawn_for
        self._drawer = None

    def _taken_in(self, state: Mapping[str, Any]) -> tuple[int, ...]:
        """How many samples of each bucket of lengths a saved state says were taken. Raises
        DataError for numbers that cannot be."""
        taken, sizes = state.get("taken"), self._bucket_sizes().tolist()
        fits = isinstance(taken, list) and len(taken) == len(sizes)
        if not fits or not all(
            type(one) is int and 0 <= one <= size for one, size in zip(taken, sizes, strict=True)
        ):
            raise DataError(
                "samples taken of each bucket in the state of the data",
                got=repr(taken)[:80],
                wanted=f"{counted(len(sizes), 'number')}, at most {str(sizes)[:80]}",
            )
        if sum(taken) == sum(sizes):  # the next epoch would have begun
            raise DataError(
                "samples taken in the state of the data", got="all", wanted="fewer in an epoch"
            )
        return tuple(taken)

    def __str__(self) -> str:
        """How iterations are drawn, in words: the number of buckets, and the sizes of groups and
        launches. Call :meth:`price` before."""
        settings = self._priced().settings
        widths = sorted({one.width for one in settings})
        batches = sorted({one.batch for one in settings})
        return (
            f"drawn by {self._options.flow} from {counted(len(settings), 'bucket')} of lengths: "
            f"groups of {_span(widths, 'rank')}, {_span(batches, 'sample')} a launch"
        )


def _drawn_for_in(state: Mapping[str, Any]) -> _DrawnFor | None:
    """The ranks, memory and margin for which a saved state was drawn, None where it has none.
    Raises DataError for a malformed entry."""
    found = state.get("drawn_for")
    if found is None:
        return None
    try:
        return _DrawnFor(
            ranks=int(found["ranks"]),
            memory_bytes=int(found["memory_bytes"]),
            memory_margin=float(found["memory_margin"]),
        )
    except (KeyError, TypeError, ValueError):
        raise DataError(
            "drawn_for in the state of the data",
            got=repr(found)[:80],
            wanted="ranks, memory_bytes and memory_margin",
        ) from None


def _span(values: list[int], unit: str) -> str:
    """The least and the greatest of ascending ``values`` in words: ``1 to 8 ranks``."""
    most = counted(values[-1], unit)
    return most if len(values) == 1 else f"{values[0]:,} to {most}"
