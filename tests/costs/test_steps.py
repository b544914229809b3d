"""A forest over one feature as the steps that it is, against the library that grew it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from headrace.costs.paradyse import Steps, fit_steps
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
    steps = fit_steps(lengths.tolist(), seconds.tolist())
    asked = np.arange(1, 10_000)
    assert (steps(asked) == grown(lengths[:, None], seconds).predict(asked[:, None])).all()
    assert Steps.from_json(json.loads(json.dumps(steps.to_json()))) == steps
    assert fit_steps(lengths.tolist(), seconds.tolist()) == steps


@pytest.mark.parametrize(
    ("breaks", "values"),
    [
        ((1.0,), (1.0,)),
        ((2.0, 1.0), (1.0, 2.0, 3.0)),
        ((1.0, 1.0), (1.0, 2.0, 3.0)),
        ((1.0,), (1.0, float("inf"))),
        ((float("nan"),), (1.0, 2.0)),
    ],
)
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
        fit_steps([1, 2], [1.0, 2.0])


def test_costs_do_not_import_the_library() -> None:
    """Catches seconds that every command would pay, and a planner that needs the extra."""
    code = "import sys, headrace.costs.paradyse; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
