"""Layer options and layer plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import LayerOption, LayerPlan
from headrace.spec.layer_plan import RECOMPUTE

names = st.sampled_from(["local", "ulysses_z", "ring2"])
options = st.builds(
    LayerOption, attention=names, feed_forward=names, recompute=st.sampled_from(RECOMPUTE)
)
plans = st.lists(options, min_size=1, max_size=12).map(lambda o: LayerPlan(options=tuple(o)))


@given(options)
def test_an_option_reads_back(option: LayerOption) -> None:
    """Catches a text that leaves out the feed-forward or the recompute level."""
    assert LayerOption.parse(str(option)) == option


@given(plans)
def test_a_layer_plan_reads_back(plan: LayerPlan) -> None:
    """Catches runs that are counted wrongly or merged across others."""
    assert LayerPlan.parse(str(plan)) == plan
    assert sum(count for _, count in plan.counts) == len(plan.options)
    assert tuple(o for option, count in plan.counts for o in (option,) * count) == plan.options


def test_texts_by_hand() -> None:
    """Catches two texts for one option."""
    assert str(LayerOption.of("ulysses_z")) == "ulysses_z"
    assert str(LayerOption.of("ulysses_z", "full")) == "ulysses_z+full"
    mixed = LayerOption(attention="ulysses_z", feed_forward="local", recompute="attention")
    assert str(mixed) == "ulysses_z/local+attention"
    full, none = LayerOption.of("local", "full"), LayerOption.of("local")
    assert str(LayerPlan(options=(full, full, none, full))) == "2*local+full 1*local 1*local+full"
    assert LayerPlan.uniform(none, 3) == LayerPlan.parse("3*local")


@pytest.mark.parametrize("text", ["", "+full", "/local"])
def test_an_option_without_a_method_is_refused(text: str) -> None:
    """Catches an option that names no method and would fail on the ranks."""
    with pytest.raises(SpecError, match=r"wanted METHOD\[/METHOD\]\[\+RECOMPUTE\]"):
        LayerOption.parse(text)


def test_an_unknown_recompute_level_gets_a_suggestion() -> None:
    """Catches a level that no layer knows."""
    with pytest.raises(SpecError, match=r"'fulls', wanted none or .*; did you mean 'full'\?"):
        LayerOption.parse("local+fulls")
    with pytest.raises(SpecError, match="'all'"):
        LayerOption.of("local", "all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["local", "x*local", "-1*local", "2*local none", "*local", "99999999999*local"]
)
def test_a_layer_plan_without_counts_is_refused(text: str) -> None:
    """Catches a traceback of int(), or one layer where many were meant."""
    with pytest.raises(SpecError, match=r"wanted COUNT\*OPTION"):
        LayerPlan.parse(text)


def test_a_uniform_layer_plan_has_layers() -> None:
    """Catches a model of no layers."""
    with pytest.raises(SpecError, match="no layers"):
        LayerPlan.uniform(LayerOption.of("a"), 0)


def test_layers_may_be_unknown() -> None:
    """Catches a published plan, that names no methods, which cannot be read again."""
    assert str(LayerPlan()) == ""
    assert LayerPlan.parse("") == LayerPlan()


def test_counts_count() -> None:
    """Catches a mistyped count that shortens the model."""
    with pytest.raises(SpecError):
        LayerPlan.parse("0*local+full 2*local")
