"""Samples of a loop drawn by the iterations that they fill, after Data-Centric Parallel.

The samples of a step follow from ranks and costs, so this order draws from the moment that the
costs are known; ranks have the same ones, and what they draw is compared at each step. The position
in the epoch does not depend on them: another number of ranks goes on with the samples that are
left.
"""

from __future__ import annotations

from typing import Any

from headrace.engine.iteration_sampler import IterationSampler
from headrace.engine.sample_order import DrawnOrder, Samples
from headrace.planning import Problem
from headrace.spec.draw_options import DrawOptions

__all__ = ["IterationOrder"]


class IterationOrder(DrawnOrder):
    """Iterations of a map-style data set that choose their own samples, read ahead by ``workers``
    processes where there are any: a :class:`~headrace.engine.sample_order.PricedOrder`."""

    def __init__(self, samples: Samples, options: DrawOptions, *, workers: int = 0) -> None:
        """An order of ``samples`` that draws as ``options`` say, once costs are known."""
        self._options, self._drawn = options, IterationSampler(samples, options)
        super().__init__(samples, self._drawn, workers=workers)

    def price(self, problem: Problem) -> None:
        """Draw for the costs and ranks of ``problem`` from now on, from the current position.
        Raises what :meth:`headrace.engine.iteration_sampler.IterationSampler.price` does."""
        self._drawn.price(problem)
        self._ahead = None  # a reader would give samples that were drawn for other costs

    @property
    def fingerprint(self) -> str:
        """A hash of the lengths and of some samples, and how iterations are drawn."""
        return f"{super().fingerprint} {self._options}"

    def facts(self) -> dict[str, Any]:
        """The lengths of the samples, summarized, and how iterations are drawn."""
        return super().facts() | {"iterations": str(self._options)}
