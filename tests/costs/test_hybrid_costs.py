"""Costs for plans that are fitted to hybrids."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headrace as hr
from headrace.config.planner_config import PlannerConfig
from headrace.costs import CostModel
from headrace.costs.fingerprint import is_of_hybrid
from headrace.costs.paradyse import fit_hybrid
from headrace.costs.paradyse.hybrid_costs import costs_of_hybrid
from headrace.costs.sources.measured import costs_from_profile
from headrace.engine.plans import make_problem
from headrace.errors import ConfigError, CostError
from headrace.spec.layer_plan import LayerOption
from headrace.spec.profile import Profile
from profiles import LENGTHS, cost, made_up

pytest.importorskip("sklearn.ensemble")

LOCAL = LayerOption.of("local")


def steep(option: str, length: int) -> float:
    """Seconds that grow with the cube of the tokens, as no quadratic does."""
    return cost(option, length) + 3e-14 * length**3


def steep_seconds(costs: CostModel, length: int) -> float:
    """How far a layer's forward is from the true one, as a share."""
    true_s = sum(steep(option, length) for option in ("attention:local", "feed_forward:local"))
    return abs(costs.option(1, LOCAL).forward((length,)) / true_s - 1)


def test_seconds_are_those_of_the_hybrid() -> None:
    """Catches costs of the measurements under another name: within the profiled lengths they
    follow the forest, which is flat below the shortest, beyond them the polynomial."""
    profile = made_up()
    found = costs_of_hybrid(profile, 8 * LENGTHS[-1])
    plain, model = costs_from_profile(profile), fit_hybrid(profile)
    assert found.error.median < 0.1
    for length in (LENGTHS[3], LENGTHS[-1], 8 * LENGTHS[-1]):
        hybrid_s = float(model.layer(1, LOCAL, "forward_s", length))
        assert found.costs.option(1, LOCAL).forward((length,)) == pytest.approx(hybrid_s, rel=0.3)
    assert found.costs.options[1].keys() == plain.options[1].keys()
    assert found.costs.options != plain.options
    assert "off by" in str(found)


def test_polynomials_are_followed_beyond_the_profile() -> None:
    """Catches a longest sequence that is ignored: where seconds grow with the cube, quadratics of
    what was measured are much further off than those that were shown the polynomial."""
    profile, far = made_up(seconds=steep), 8 * LENGTHS[-1]
    near = costs_of_hybrid(profile, LENGTHS[-1]).costs
    shown = costs_of_hybrid(profile, far).costs
    off = steep_seconds(shown, far)
    assert off < steep_seconds(costs_from_profile(profile), far) * 0.7
    assert off < steep_seconds(near, far) * 0.7


def test_bytes_that_were_not_counted_stay_so() -> None:
    """Catches zeros in the place of what nobody counted."""
    points = [replace(point, transient_bytes=None) for point in made_up().points]
    with pytest.raises(CostError, match="transient_bytes"):
        costs_of_hybrid(replace(made_up(), points=tuple(points)), 10)


def test_too_few_lengths_are_refused() -> None:
    """Catches a forest over two lengths."""
    with pytest.raises(CostError, match=r"measure documents of"):
        costs_of_hybrid(made_up(LENGTHS[:2]), 1000)


def of_hybrid(profile: Profile) -> CostModel:
    return costs_of_hybrid(profile, LENGTHS[-1]).costs


def test_a_plan_is_made_from_them() -> None:
    """Catches costs that the search cannot price, and seconds that a plan does not add up to."""
    costs = of_hybrid(made_up())
    options = PlannerConfig(costs="hybrid", recompute=("none",))
    plan = hr.plan([500, 90], make_problem(costs, options))
    (micro,) = plan.micro_batches
    layers_s = sum(costs.micro_batch_s([500, 90], 1, micro.layers))
    assert plan.predicted_s > layers_s > 0


def test_costs_from_elsewhere_are_refused_with_hybrid() -> None:
    """Catches a choice of the configuration that is ignored, and a mark that is lost in a file."""
    costs, options = of_hybrid(made_up()), PlannerConfig(costs="hybrid")
    read = CostModel.from_json(costs.to_json())
    assert is_of_hybrid(read.fingerprint)
    assert make_problem(read, options).costs is read
    plain = costs_from_profile(made_up())
    assert not is_of_hybrid(plain.fingerprint)
    with pytest.raises(ConfigError, match=r"planner.costs.*headrace profile"):
        make_problem(plain, options)
    assert make_problem(plain, PlannerConfig()).costs is plain
