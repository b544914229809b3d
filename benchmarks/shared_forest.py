"""One random forest for several models and group sizes (ParaDySe, 'Cost model implementations').

A row of its features describes one measurement of a single document:

    option      one column for each measured option, 1 in its own and 0 in all others
    hidden      features h of the model        over the most of any profile
    layers      layers L                       likewise
    ranks       ranks p of the group           likewise; in the paper all runs have the same
    log length  log2 of the tokens             over that of the longest document

One forest for each target. For one option of one configuration it is a step function of the tokens
(:meth:`SharedForest.steps`), which may take the place of a forest of its own in hybrid costs. It
also answers for configurations that nobody profiled, by the nearest that somebody did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor

import numpy as np
from forest import Forest, fit_forest
from numpy.typing import ArrayLike, NDArray

from headrace.costs.paradyse.hybrid import TARGETS, Target, measured
from headrace.costs.paradyse.steps import Steps
from headrace.costs.sources.measured import points_by_option
from headrace.errors import CostError, did_you_mean
from headrace.spec.model_shape import ModelShape
from headrace.spec.profile import Profile

__all__ = ["SharedForest", "fit_shared_forest"]

Floats = NDArray[np.float64]

_NUMBERS = ("hidden", "layers", "ranks", "log length")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedForest:
    """Forests by target over the features above: ``options`` name the first columns, ``most``
    [4] are the numbers by which the others are divided."""

    options: tuple[str, ...]
    most: tuple[float, ...]
    forests: Mapping[Target, Forest]

    def __post_init__(self) -> None:
        if len(self.most) != len(_NUMBERS) or not all(x > 0 for x in self.most):
            raise CostError("scales of a forest", got=self.most, wanted="four numbers > 0")
        for forest in self.forests.values():
            if forest.features != len(self.columns):
                wanted = f"{len(self.columns)} features"
                raise CostError("shared forest", got=f"{forest.features}", wanted=wanted)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the features."""
        return (*self.options, *_NUMBERS)

    def importances(self, target: Target) -> dict[str, float]:
        """What share of the squared error each feature explains."""
        return dict(zip(self.columns, self._forest(target).importances, strict=True))

    def predict(
        self, a: ModelShape, p: int, option: str, target: Target, tokens: ArrayLike
    ) -> Floats:
        """Seconds or bytes [n] of an option for documents of ``tokens`` [n] on p ranks.

        Raises CostError for an option that was in no profile.
        """
        counts = np.atleast_1d(np.asarray(tokens))
        rows = np.array([self._row(a, p, option, float(count)) for count in counts])
        return self._forest(target)(rows)

    def steps(self, a: ModelShape, p: int, option: str, target: Target) -> Steps:
        """The same as a function of whole tokens."""
        forest = self._forest(target)
        found = forest.steps(self._row(a, p, option, 1.0), len(self.columns) - 1)
        # Steps between the same two whole lengths are one, and the last of them counts.
        at = {
            _last_at_most(x, self.most[-1]) + 0.5: value
            for x, value in zip(found.breaks, found.values[1:], strict=True)
        }
        return Steps(breaks=tuple(at), values=(found.values[0], *at.values()))

    def _row(self, a: ModelShape, p: int, option: str, tokens: float) -> list[float]:
        if option not in self.options:
            hint = did_you_mean(option, self.options) or f"known are {', '.join(self.options)}"
            raise CostError("option of a shared forest", got=repr(option), hint=hint)
        return _row(self.options, self.most, a, p, option, tokens)

    def _forest(self, target: Target) -> Forest:
        if target not in self.forests:
            raise CostError(f"shared forest of {target}", got="none", hint="it was not measured")
        return self.forests[target]


def fit_shared_forest(profiles: Sequence[Profile]) -> SharedForest:
    """One forest for each target over all single documents of ``profiles``.

    Raises CostError where nothing was timed, and MissingExtra without scikit-learn.
    """
    points = [(profile.shape, *rest) for profile in profiles for rest in _points(profile)]
    if not points:
        hint = "measure single documents"
        raise CostError("shared forest", got="no points of single documents", hint=hint)
    sizes = [(a.hidden, a.layers, p, _log(n)) for a, p, _, _, n, _ in points]
    most = tuple(max(float(x), 1e-9) for x in np.array(sizes).max(axis=0))
    options = tuple(sorted({option for _, _, option, *_ in points}))
    forests: dict[Target, Forest] = {}
    for target in TARGETS:
        own = [point for point in points if point[3] == target]
        if own:
            rows = [_row(options, most, a, p, option, n) for a, p, option, _, n, _ in own]
            forests[target] = fit_forest(rows, [value for *_, value in own])
    return SharedForest(options=options, most=most, forests=forests)


def _points(profile: Profile) -> Iterator[tuple[int, str, Target, float, float]]:
    for (p, option), points in points_by_option(profile).items():
        for target in TARGETS:
            for length, value in zip(*measured(points, target), strict=True):
                yield p, option, target, float(length), value


def _row(
    options: Sequence[str], most: Sequence[float], a: ModelShape, p: int, option: str, tokens: float
) -> list[float]:
    numbers = (a.hidden, a.layers, p, _log(tokens))
    scaled = [number / scale for number, scale in zip(numbers, most, strict=True)]
    return [*(float(option == other) for other in options), *scaled]


def _log(tokens: float) -> float:
    return float(np.log2(tokens))


def _last_at_most(threshold: float, scale: float) -> int:
    """The most whole tokens whose scaled logarithm, in single precision, is at most this."""

    def low(tokens: int) -> bool:
        return float(np.float32(_log(tokens) / scale)) <= threshold

    tokens = max(1, floor(2.0 ** (threshold * scale)))
    while low(tokens + 1):
        tokens += 1
    while tokens > 1 and not low(tokens):
        tokens -= 1
    return tokens
