"""Samples drawn by the iterations that they fill, after Data-Centric Parallel.

The samples of a step follow from ranks and costs, so this order draws from the moment that the
costs are known; ranks have the same ones, and what they draw is compared at each step. The position
in the epoch does not depend on them: another number of ranks goes on with the samples that are
left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from headrace.adopt.spread_model import Item
from headrace.engine.sample_order import LoopBatch, Samples
from headrace.errors import DataError
from headrace.planners.drawn_iterations import DrawPosition, IterationDrawer
from headrace.planning import Problem
from headrace.spec.draw_options import DrawOptions
from headrace.spec.lengths import Lengths

__all__ = ["IterationOrder"]


class IterationOrder:
    """Iterations of a map-style data set that choose their own samples: a
    :class:`~headrace.engine.sample_order.SampleOrder` once it is priced."""

    def __init__(self, samples: Samples, options: DrawOptions) -> None:
        """An order of ``samples`` that draws as ``options`` say, once costs are known."""
        self.samples, self._options = samples, options
        self._at: DrawPosition | None = None
        self._margin: float | None = None  # by which it draws
        self._margin_before: float | None = None  # that of the run which goes on
        self._made: IterationDrawer | None = None

    def price(self, problem: Problem) -> None:
        """Draw for these costs and ranks from now on, from the position at which it stands. Raises
        what :class:`headrace.planners.drawn_iterations.IterationDrawer` does."""
        if self._margin_before is not None:
            costs = problem.model.replace(memory_margin=self._margin_before)
            problem = problem.replace(costs=costs)
        at = self._position
        self._made = IterationDrawer(problem, self.samples.lengths, self._options)
        if at is not None:
            self._made.restore(at)
        self._margin = problem.model.memory_margin

    @property
    def _position(self) -> DrawPosition | None:
        """Where it stands; None at the beginning of the data, before it is priced."""
        return self._at if self._made is None else self._made.position

    @property
    def _drawer(self) -> IterationDrawer:
        """What draws; there from the moment that costs are known."""
        assert self._made is not None, "priced before the first step"
        return self._made

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        at = self._position
        return 0 if at is None else at.epoch

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.samples.longest

    @property
    def total(self) -> int:
        """Sum of the tokens of all samples."""
        return self.samples.total

    @property
    def fingerprint(self) -> str:
        """A hash of the lengths and of some samples, and how iterations are drawn."""
        return f"{self.samples.contents()[:12]} {self.samples.fingerprint} {self._options}"

    def next_batch(self) -> LoopBatch:
        """The samples of the next iteration."""
        drawn = self._drawer.draw()
        ids = drawn.lengths.ids
        return LoopBatch(
            lengths=drawn.lengths,
            epoch=drawn.epoch,
            state_after=self._state(drawn.after),
            read=lambda i: self.samples.read(ids[i]),
        )

    def coming(self, epochs: int | None) -> Iterator[Lengths]:
        """The lengths of the iterations that follow, from a second drawer."""
        drawer = copy(self._drawer)  # what both share is never changed in place
        while epochs is None or drawer.position.epoch < epochs:
            yield drawer.draw().lengths

    def first(self) -> Item:
        """The longest sample of the data set."""
        return self.samples.read(int(self.samples.lengths.argmax()))

    def facts(self) -> dict[str, Any]:
        """The lengths of the samples, summarized, and how iterations are drawn."""
        return self.samples.facts() | {"iterations": str(self._options)}

    def state(self) -> dict[str, Any]:
        """The position in the epoch, as JSON."""
        return self._state(self._position)

    def _state(self, at: DrawPosition | None) -> dict[str, Any]:
        return {
            "corpus": self.samples.fingerprint,
            "iterations": str(self._options),
            "memory_margin": self._margin,
            "position": None if at is None else at.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with the samples that are left of its epoch. Raises
        DataError for that of other data, or of iterations that are drawn otherwise."""
        for name, value in (
            ("corpus", self.samples.fingerprint),
            ("iterations", str(self._options)),
        ):
            if state.get(name) != value:
                raise DataError(
                    f"{name} in the state of the data",
                    got=str(state.get(name))[:80],
                    wanted=f"{value[:80]}, as this run has",
                )
        position = state.get("position")
        self._at = None if position is None else DrawPosition.from_json(position)
        margin = state.get("memory_margin")
        self._margin_before = None if margin is None else float(margin)
        if self._made is not None and self._at is not None:
            self._made.restore(self._at)

    def close(self) -> None:
        """Do nothing: no process reads ahead."""
