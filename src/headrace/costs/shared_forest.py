"""One random forest for several models and group sizes (ParaDySe, 'Cost model implementations').

A row of its features describes one measurement of a single document:

    option      one column for each measured option, 1 in its own and 0 in all others
    hidden      features h of the model        over the most of any profile
    heads       query heads n                  likewise
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
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.costs.forest import Forest, Steps, fit_forest, need_scikit_learn
from headrace.costs.from_profile import ladders
from headrace.costs.targets import TARGETS, Target, measured, target_of
from headrace.errors import CostError, HeadraceError, did_you_mean
from headrace.spec.architecture import Architecture
from headrace.spec.profile import Profile

__all__ = ["SharedForest", "fit_shared_forest"]

Floats = NDArray[np.float64]

SHARED_FORMAT = 1

_NUMBERS = ("hidden", "heads", "layers", "ranks", "log length")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedForest:
    """Forests by target over the features above: ``options`` name the first columns, ``most``
    [5] are the numbers by which the others are divided."""

    options: tuple[str, ...]
    most: tuple[float, ...]
    forests: Mapping[Target, Forest]

    def __post_init__(self) -> None:
        if len(self.most) != len(_NUMBERS) or not all(x > 0 for x in self.most):
            raise CostError("scales of a forest", got=self.most, wanted="five numbers > 0")
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
        self, a: Architecture, p: int, option: str, target: Target, tokens: ArrayLike
    ) -> Floats:
        """Seconds or bytes [n] of an option for documents of ``tokens`` [n] on p ranks.

        Raises CostError for an option that was in no profile.
        """
        counts = np.atleast_1d(np.asarray(tokens))
        rows = np.array([self._row(a, p, option, float(count)) for count in counts])
        return self._forest(target)(rows)

    def steps(self, a: Architecture, p: int, option: str, target: Target) -> Steps:
        """The same as a function of whole tokens."""
        forest = self._forest(target)
        found = forest.steps(self._row(a, p, option, 1.0), len(self.columns) - 1)
        # Steps between the same two whole lengths are one, and the last of them counts.
        at = {
            _last_at_most(x, self.most[-1]) + 0.5: value
            for x, value in zip(found.breaks, found.values[1:], strict=True)
        }
        return Steps(breaks=tuple(at), values=(found.values[0], *at.values()))

    def _row(self, a: Architecture, p: int, option: str, tokens: float) -> list[float]:
        if option not in self.options:
            hint = did_you_mean(option, self.options) or f"known are {', '.join(self.options)}"
            raise CostError("option of a shared forest", got=repr(option), hint=hint)
        return _row(self.options, self.most, a, p, option, tokens)

    def _forest(self, target: Target) -> Forest:
        if target not in self.forests:
            raise CostError(f"shared forest of {target}", got="none", hint="it was not measured")
        return self.forests[target]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "format": SHARED_FORMAT,
            "options": list(self.options),
            "most": list(self.most),
            "forests": {target: forest.to_json() for target, forest in self.forests.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SharedForest:
        """The inverse of :meth:`to_json`. Raises CostError when the value is malformed."""
        try:
            if value["format"] != SHARED_FORMAT:
                raise CostError("format of a forest", got=value["format"], wanted=SHARED_FORMAT)
            return cls(
                options=tuple(value["options"]),
                most=tuple(value["most"]),
                forests={
                    target_of(name): Forest.from_json(forest)
                    for name, forest in value["forests"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError, HeadraceError) as error:
            got = f"{type(error).__name__}: {error}"
            raise CostError("shared forest", got=got, hint="fit it again")


def fit_shared_forest(profiles: Sequence[Profile]) -> SharedForest:
    """One forest for each target over all single documents of ``profiles``.

    Raises CostError where nothing was timed, and MissingExtra without scikit-learn.
    """
    need_scikit_learn()
    points = [(profile.architecture, *rest) for profile in profiles for rest in _points(profile)]
    if not points:
        hint = "measure single documents"
        raise CostError("shared forest", got="no points of single documents", hint=hint)
    sizes = [(a.hidden, a.heads, a.layers, p, _log(n)) for a, p, _, _, n, _ in points]
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
    for (p, option), points in ladders(profile).items():
        for target in TARGETS:
            for length, value in zip(*measured(points, target), strict=True):
                yield p, option, target, float(length), value


def _row(
    options: Sequence[str], most: Sequence[float], a: Architecture, p: int, option: str,
    tokens: float,
) -> list[float]:  # fmt: skip
    numbers = (a.hidden, a.heads, a.layers, p, _log(tokens))
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
