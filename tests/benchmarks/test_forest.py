"""Forests as arrays, against the library that grew them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from forest import fit_forest

from headrace.errors import CostError

ensemble = pytest.importorskip("sklearn.ensemble")


def grown(x, y):
    return ensemble.RandomForestRegressor(50, max_depth=10, random_state=42).fit(x, y)


@pytest.mark.parametrize("count", [2, 7, 300])
def test_steps_are_the_library_s_predictions_to_the_bit(count: int) -> None:
    """Catches thresholds on the wrong side, single precision forgotten, another seed, and trees
    summed in another order."""
    rng = np.random.default_rng(count)
    lengths = np.sort(rng.choice(np.arange(64, 9000), size=count, replace=False))
    seconds = 1e-8 * lengths**2.0 + rng.uniform(size=count)
    forest = fit_forest(lengths[:, None], seconds)
    steps = forest.steps([0.0], 0)
    asked = np.arange(1, 10_000)
    wanted = grown(lengths[:, None], seconds).predict(asked[:, None])
    assert (steps(asked) == wanted).all()
    assert (forest(asked[:, None]) == wanted).all()
    assert forest.importances == (1.0,) or count == 2


def test_several_features() -> None:
    """Catches steps that follow branches which the fixed features rule out."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(150, 4))
    x[:, 0] = rng.integers(2, size=150)
    y = x[:, 0] * x[:, 1] + x[:, 3] ** 2
    forest, library = fit_forest(x, y), grown(x, y)
    asked = rng.uniform(size=(500, 4))
    assert (forest(asked) == library.predict(asked)).all()
    assert forest.importances == tuple(library.feature_importances_)
    for free in (0, 3):
        rows = np.tile(asked[0], (400, 1))
        rows[:, free] = np.linspace(-0.5, 1.5, 400)
        steps = forest.steps(asked[0].tolist(), free)
        assert (steps(rows[:, free]) == library.predict(rows)).all()


def test_the_same_points_give_the_same_forest() -> None:
    """Catches a seed left to chance: ranks would plan differently."""
    x, y = [[1], [5], [9], [20]], [1.0, 2.0, 4.0, 3.0]
    one, other = fit_forest(x, y), fit_forest(x, y)
    assert (one.value == other.value).all()


def test_damaged_trees_are_refused() -> None:
    """Catches a walk that never ends, or leaves the arrays."""
    whole = fit_forest([[1.0], [2.0], [3.0], [9.0]], [1.0, 2.0, 3.0, 4.0])
    asks = int(np.flatnonzero(whole.feature == 0)[0])
    for name, at, bad in (
        ("left", asks, asks),
        ("right", asks, 10**6),
        ("feature", asks, 1),
        ("value", whole.left[asks], np.nan),
    ):
        array = getattr(whole, name).copy()
        array[at] = bad
        with pytest.raises(CostError, match="no trees"):
            replace(whole, **{name: array})
    with pytest.raises(CostError, match="no trees"):
        replace(whole, threshold=whole.threshold[:-1])
    with pytest.raises(CostError, match="no trees"):
        replace(whole, roots=whole.roots[:0])
