"""Hybrid costs: forest within, polynomial beyond."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from headrace.costs.paradyse import TARGETS, HybridModel, fit_hybrid, fit_pair, fit_polynomial
from headrace.costs.paradyse.hybrid import measured
from headrace.costs.sources.measured import costs_from_profile
from headrace.errors import CostError
from headrace.spec.layer_plan import RECOMPUTE, LayerOption
from headrace.spec.profile import ENDS
from profiles import LENGTHS, OPTIONS, made_up

ensemble = pytest.importorskip("sklearn.ensemble")


@pytest.fixture(scope="module")
def model() -> HybridModel:
    return fit_hybrid(made_up())


def test_within_is_the_forest_and_beyond_the_polynomial(model: HybridModel) -> None:
    """Catches Eq. 9 with its sides swapped, and a switch one token early or late."""
    points = [x for x in made_up().points if x.option == "attention:local"]
    lengths, values = measured(points, "backward_s")
    forest = ensemble.RandomForestRegressor(50, max_depth=10, random_state=42)
    forest.fit(np.array(lengths)[:, None], values)
    within, beyond = np.arange(1, LENGTHS[-1] + 1), LENGTHS[-1] + np.array([1, 1000, 10**6])
    found = model.predict(1, "attention:local", "backward_s", [*within, *beyond])
    assert (found[: len(within)] == forest.predict(within[:, None])).all()
    assert (found[len(within) :] == fit_polynomial(lengths, values)[0](beyond)).all()


def test_every_target_of_every_option_is_fitted_apart(model: HybridModel) -> None:
    """Catches pairs that are mixed up: no two of them are alike."""
    profile = made_up()
    assert set(model.pairs[1]) == set(OPTIONS)
    for option in OPTIONS:
        points = [x for x in profile.points if x.option == option]
        for target in TARGETS:
            lengths, values = measured(points, target)
            found = model.predict(1, option, target, lengths)
            assert np.abs(found / values - 1).max() < 0.5
            beyond = model.predict(1, option, target, 10 * LENGTHS[-1])
            true = getattr(made_up([10 * LENGTHS[-1]], options=[option]).points[0], target)
            assert beyond == pytest.approx(true, rel=1e-6)


def test_boundaries_tell_degree_and_jump(model: HybridModel) -> None:
    """Catches a table of another pair, and a jump that is not the one that predictions make."""
    rows = {(row.option, row.target): row for row in model.boundaries()}
    assert len(rows) == len(OPTIONS) * len(TARGETS)
    assert rows["attention:local", "forward_s"].degree == 2
    assert rows["feed_forward:local", "forward_s"].degree == 1
    assert rows[ENDS, "kept_bytes"].degree == 1
    for (option, target), row in rows.items():
        assert row.longest == LENGTHS[-1]
        before, after = model.predict(1, option, target, [row.longest, row.longest + 1])
        assert row.jump == pytest.approx(after / before - 1, abs=0.01)
        assert row.jump > 0, "a forest's last step is a mean with shorter ones"


@pytest.mark.parametrize("level", RECOMPUTE)
def test_layers_are_put_together_as_the_quadratics_are(model: HybridModel, level) -> None:
    """Catches another rule for branches or for full recomputing than that of
    costs.sources.branches."""
    costs = costs_from_profile(made_up())
    option = LayerOption.of("local", level)
    cost, n = costs.option(1, option), 4 * LENGTHS[-1]
    wanted = {
        "forward_s": cost.forward([n]),
        "backward_s": cost.backward([n]),
        "kept_bytes": cost.kept(n),
        "transient_bytes": cost.transient(n),
    }
    for target in TARGETS:
        found = float(model.layer(1, option, target, n))
        assert found == pytest.approx(wanted[target], rel=2e-3), target


def test_a_layer_measured_whole_counts_as_it_is() -> None:
    """Catches a whole layer that is looked for among branches."""
    profile = made_up(options=[ENDS])
    whole = replace(profile, points=tuple(replace(x, option="local") for x in profile.points))
    found = fit_hybrid(whole)
    option = LayerOption.of("local")
    assert float(found.layer(1, option, "forward_s", 300)) == float(
        found.predict(1, "local", "forward_s", 300)
    )


def test_packs_and_uncounted_bytes_are_left_out() -> None:
    """Catches a pack of eight documents taken for one, and None taken as zero bytes."""
    profile = made_up(options=[ENDS])
    packs = [replace(x, lengths=(8,) * 8, forward_s=9.0) for x in profile.points[:3]]
    bare = [replace(x, kept_bytes=None, transient_bytes=None) for x in profile.points]
    found = fit_hybrid(replace(profile, points=(*bare, *packs)))
    assert set(found.pairs[1][ENDS]) == {"forward_s", "backward_s"}
    assert float(found.predict(1, ENDS, "forward_s", 64)) < 1
    with pytest.raises(CostError, match="hybrid kept_bytes of ends on cp1"):
        found.predict(1, ENDS, "kept_bytes", 64)


def test_too_few_lengths_name_some_to_add() -> None:
    """Catches a forest of two points, and a message that leaves one to guess what to measure."""
    with pytest.raises(CostError, match=r"forward_s of ends on cp1.*2 lengths.*256 and 512 tokens"):
        fit_hybrid(made_up([64, 128]))
    profile = made_up()
    packed = [replace(x, lengths=(8, 8)) for x in profile.points]
    with pytest.raises(CostError, match="0 lengths"):
        fit_hybrid(replace(profile, points=tuple(packed)))


def test_what_was_not_measured_is_refused(model: HybridModel) -> None:
    """Catches a KeyError."""
    with pytest.raises(CostError, match=r"attention:metp on cp1.*known are ends"):
        model.predict(1, "attention:metp", "forward_s", 1)
    with pytest.raises(CostError, match=r"on cp2.*sizes \(1,\)"):
        model.predict(2, ENDS, "forward_s", 1)


def test_json_needs_no_library(model: HybridModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches digits lost on the way, and costs that only a machine with the library can read."""
    text = json.dumps(model.to_json())
    monkeypatch.setitem(sys.modules, "sklearn", None)
    again = HybridModel.from_json(json.loads(text))
    assert again == model
    asked = np.arange(1, 3 * LENGTHS[-1])
    for target in TARGETS:
        for option in OPTIONS:
            found = again.predict(1, option, target, asked)
            assert (found == model.predict(1, option, target, asked)).all()


@pytest.mark.parametrize(
    "fault",
    ["format", "no pairs", "target", "breaks", "longest", "polynomial", "a list", "a number"],
)
def test_damaged_json_is_refused(model: HybridModel, fault: str) -> None:
    """Catches a traceback for a file that was cut or edited."""
    value = json.loads(json.dumps(model.to_json()))
    pair = value["pairs"]["1"][ENDS]["forward_s"]
    match fault:
        case "format":
            value["format"] = 99
        case "no pairs":
            del value["pairs"]
        case "target":
            value["pairs"]["1"][ENDS]["sideways_s"] = pair
        case "breaks":
            pair["steps"]["breaks"].reverse()
        case "longest":
            pair["longest"] = 1.5
        case "polynomial":
            pair["polynomial"]["coefficients"] = [1.0]
        case "a list":
            value = [value]
        case "a number":
            value["pairs"]["1"][ENDS]["forward_s"] = 3
    with pytest.raises(CostError, match="hybrid costs"):
        HybridModel.from_json(value)


def test_a_prediction_takes_no_time() -> None:
    """Catches a walk through fifty trees for each length: at most 10 us of CPU time, at best."""
    rng = np.random.default_rng(0)
    lengths = sorted(rng.choice(np.arange(64, 60_000), size=200, replace=False).tolist())
    pair = fit_pair(lengths, [1e-8 * n * n * rng.uniform(0.9, 1.1) for n in lengths])
    asked = rng.integers(1, 120_000, size=20_000)
    seconds = list[float]()
    for _ in range(3):
        began = time.process_time()
        pair(asked)
        seconds.append(time.process_time() - began)
    assert min(seconds) / len(asked) < 10e-6
