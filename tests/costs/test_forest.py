"""Forests as arrays, against the library that grew them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from headrace.costs.forest import Forest, Steps, fit_forest
from headrace.errors import CostError, MissingExtra

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
    assert fit_forest(x, y).to_json() == fit_forest(x, y).to_json()


def test_json() -> None:
    """Catches digits lost on the way."""
    x = np.random.default_rng(2).uniform(size=(30, 2))
    forest = fit_forest(x, x[:, 0])
    again = Forest.from_json(json.loads(json.dumps(forest.to_json())))
    assert (again(x) == forest(x)).all()
    steps = forest.steps([0.0, 0.3], 0)
    assert Steps.from_json(json.loads(json.dumps(steps.to_json()))) == steps


def test_damaged_trees_are_refused() -> None:
    """Catches a walk that never ends, or leaves the arrays."""
    whole = fit_forest([[1.0], [2.0], [3.0], [9.0]], [1.0, 2.0, 3.0, 4.0]).to_json()
    asks = next(i for i, feature in enumerate(whole["feature"]) if feature == 0)
    node = whole["left"][asks]
    faults = {
        "left": [asks if i == asks else x for i, x in enumerate(whole["left"])],
        "right": [10**6 if i == asks else x for i, x in enumerate(whole["right"])],
        "feature": [1 if i == asks else x for i, x in enumerate(whole["feature"])],
        "value": [float("nan") if i == node else x for i, x in enumerate(whole["value"])],
        "threshold": whole["threshold"][:-1],
        "roots": [],
        "importances": [],
    }
    Forest.from_json(whole)
    for name, bad in faults.items():
        with pytest.raises(CostError, match="no trees"):
            Forest.from_json({**whole, name: bad})


@pytest.mark.parametrize(
    ("breaks", "values"),
    [((1.0,), (1.0,)), ((2.0, 1.0), (1.0, 2.0, 3.0)), ((1.0, 1.0), (1.0, 2.0, 3.0)),
     ((1.0,), (1.0, float("inf"))), ((float("nan"),), (1.0, 2.0))],
)  # fmt: skip
def test_damaged_steps_are_refused(breaks, values) -> None:
    """Catches a search in numbers that are not sorted."""
    with pytest.raises(CostError, match="steps"):
        Steps(breaks=breaks, values=values)


def test_a_break_belongs_to_the_interval_before_it() -> None:
    """Catches a step one token early."""
    steps = Steps(breaks=(10.0, 20.0), values=(1.0, 2.0, 3.0))
    assert steps([1, 10, 11, 20, 21, 10**9]).tolist() == [1, 1, 2, 2, 3, 3]
    assert Steps(breaks=(), values=(7.0,))([1, 5]).tolist() == [7.0, 7.0]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback instead of what to install."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtra, match=r"scikit-learn.*headrace\[forest\]"):
        fit_forest([[1.0], [2.0]], [1.0, 2.0])


def test_costs_do_not_import_the_library() -> None:
    """Catches seconds that every command would pay, and a planner that needs the extra."""
    code = (
        "import sys, headrace.costs, headrace.costs.hybrid, headrace.costs.shared_forest, "
        "headrace.costs.held_out; sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
