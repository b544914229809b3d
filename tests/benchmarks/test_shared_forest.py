"""One forest for several configurations."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from shared_forest import SharedForest, fit_shared_forest

from headrace.costs.paradyse import fit_hybrid
from headrace.errors import CostError
from profiles import LENGTHS, OPTIONS, cost, made_up

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def profiles():
    wide = made_up(hidden=512, seconds=lambda option, n: 8 * cost(option, n))
    return [made_up(), wide]


@pytest.fixture(scope="module")
def shared(profiles) -> SharedForest:
    return fit_shared_forest(profiles)


def test_configurations_and_options_are_told_apart(profiles, shared: SharedForest) -> None:
    """Catches features of one configuration given to all, and one-hot columns out of order."""
    a, b = (profile.shape for profile in profiles)
    errors: list[float] = []
    for option in OPTIONS:
        narrow = shared.predict(a, 1, option, "forward_s", LENGTHS[-4:])
        wide = shared.predict(b, 1, option, "forward_s", LENGTHS[-4:])
        assert ((wide / narrow > 3) & (wide / narrow < 24)).all()
        errors += [*np.abs(wide / [8 * cost(option, n) for n in LENGTHS[-4:]] - 1)]
    assert np.median(errors) < 0.5


def test_steps_are_the_predictions_for_whole_lengths(profiles, shared: SharedForest) -> None:
    """Catches logarithms turned into lengths one token off."""
    asked = np.arange(1, 2 * LENGTHS[-1])
    for profile in profiles:
        for target in ("forward_s", "kept_bytes"):
            steps = shared.steps(profile.shape, 1, "attention:local", target)
            wanted = shared.predict(profile.shape, 1, "attention:local", target, asked)
            assert (steps(asked) == wanted).all()
            assert len(steps.breaks) > 3


def test_importances_name_what_matters(shared: SharedForest) -> None:
    """Catches names beside the wrong columns: length and width decide, what never varies cannot."""
    found = shared.importances("forward_s")
    assert set(found) == {*OPTIONS, "hidden", "layers", "ranks", "log length"}
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["log length"] > 0.3
    assert found["hidden"] > 0.1
    assert found["layers"] == found["ranks"] == 0


def test_hybrid_costs_can_share_a_forest(profiles, shared: SharedForest) -> None:
    """Catches a shared forest that is fitted and not used, or used beyond the profiled lengths."""
    own, found = (
        fit_hybrid(profiles[1]),
        fit_hybrid(profiles[1], partial(shared.steps, profiles[1].shape)),
    )
    asked = np.arange(1, 2 * LENGTHS[-1])
    a, got = profiles[1].shape, found.predict(1, "ends", "backward_s", asked)
    within = asked <= LENGTHS[-1]
    assert (got[within] == shared.predict(a, 1, "ends", "backward_s", asked[within])).all()
    assert (got[~within] == own.predict(1, "ends", "backward_s", asked[~within])).all()
    assert (got[within] != own.predict(1, "ends", "backward_s", asked[within])).any()


def test_what_nobody_measured_is_refused(profiles, shared: SharedForest) -> None:
    """Catches a row of zeros for an unknown option."""
    with pytest.raises(CostError, match="did you mean 'attention:local'"):
        shared.predict(profiles[0].shape, 1, "attention:locl", "forward_s", [1])
    with pytest.raises(CostError, match="no points"):
        fit_shared_forest([])
