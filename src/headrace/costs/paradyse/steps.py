"""A random forest over one feature, stored as the step function that it is.

The mean of trees that ask whether a length is at most a threshold is constant between thresholds.
scikit-learn grows the forest and is not needed afterwards (ParaDySe; Breiman 2001).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.errors import CostError, MissingExtra

__all__ = ["DEPTH", "SEED", "TREES", "Steps", "fit_steps", "need_scikit_learn", "single"]

Floats = NDArray[np.float64]

TREES, DEPTH, SEED = 50, 10, 42
"""Trees, their depth and the seed of the forests in ParaDySe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A step function: ``values[i]`` where x lies above ``breaks[i - 1]`` and at most at
    ``breaks[i]``. Raises CostError unless breaks rise and there is a value for each interval."""

    breaks: tuple[float, ...]
    values: tuple[float, ...]
    _breaks: Floats = field(init=False, repr=False, compare=False)
    _values: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Keep breaks and values as arrays; raises CostError unless breaks rise and there is one
        value more."""
        breaks = np.array(self.breaks, dtype=np.float64)
        values = np.array(self.values, dtype=np.float64)
        if len(values) != len(breaks) + 1:
            got = f"{len(values)} values for {len(breaks)} breaks"
            raise CostError("steps", got=got, wanted="one value more than breaks")
        if not (np.isfinite(breaks).all() and np.isfinite(values).all()):
            raise CostError("steps", got="numbers that are not finite", wanted="finite ones")
        if (np.diff(breaks) <= 0).any():
            raise CostError("steps", got="breaks out of order", wanted="rising ones")
        object.__setattr__(self, "_breaks", breaks)
        object.__setattr__(self, "_values", values)

    def __call__(self, x: ArrayLike) -> Floats:
        """The values [n] of the function at x [n]."""
        return self._values[self._breaks.searchsorted(single(x))]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {"breaks": list(self.breaks), "values": list(self.values)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Steps:
        """Read the step function that :meth:`to_json` gave."""
        return cls(breaks=tuple(value["breaks"]), values=tuple(value["values"]))


def fit_steps(lengths: Sequence[int], values: Sequence[float]) -> Steps:
    """Grow a random forest (50 trees of depth 10 at most) through ``values`` at ``lengths`` tokens,
    and write it as the steps that it is. The same points give the same steps. Raises MissingExtra
    without scikit-learn."""
    need_scikit_learn()
    from sklearn.ensemble import RandomForestRegressor

    grown = RandomForestRegressor(n_estimators=TREES, max_depth=DEPTH, random_state=SEED)
    grown.fit(np.asarray(lengths, dtype=np.float64)[:, None], np.asarray(values, dtype=np.float64))
    trees: list[Any] = [tree.tree_ for tree in grown.estimators_]
    # Thresholds of the inner nodes, which are those with children.
    thresholds = [tree.threshold[tree.children_left >= 0] for tree in trees]
    breaks = np.unique(np.concatenate(thresholds))
    # Thresholds lie between whole lengths: the number just below one stands for the interval that
    # ends there, and a number above all lengths for the last interval.
    below = np.nextafter(breaks.astype(np.float32), np.float32(-np.inf))
    predicted = grown.predict(np.append(below, np.float32(2 * max(lengths)))[:, None])
    kept = np.flatnonzero(np.diff(predicted))  # breaks at which the mean of the trees changes
    return Steps(
        breaks=tuple(breaks[kept].tolist()),
        values=tuple(predicted[[*kept, len(breaks)]].tolist()),
    )


def need_scikit_learn() -> None:
    """Raise MissingExtra where scikit-learn is not installed."""
    try:
        import sklearn  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("scikit-learn", extra="forest", needed_for="fitting a random forest")


def single(x: ArrayLike) -> Floats:
    """Numbers rounded to single precision, in which scikit-learn compares them with thresholds; as
    float64."""
    return np.asarray(x, dtype=np.float32).astype(np.float64)
