"""Strategies: counted schemes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import Scheme, Strategy

degrees = st.integers(1, 3)
schemes = st.lists(
    st.builds(Scheme, tensor=degrees, context=degrees, pipeline=degrees), max_size=12
)


@given(schemes)
def test_text_reads_back(found: list[Scheme]) -> None:
    """Catches a scheme whose count is lost, and the strategy of nothing."""
    strategy = Strategy.of(found)
    assert Strategy.parse(str(strategy)) == strategy


@given(schemes, st.randoms(use_true_random=False))
def test_the_order_of_schemes_does_not_matter(found: list[Scheme], random) -> None:
    """Catches equal strategies that differ by the order in which pipelines were listed."""
    shuffled = list(found)
    random.shuffle(shuffled)
    strategy = Strategy.of(shuffled)
    assert strategy == Strategy.of(found)
    assert strategy.devices == sum(scheme.devices for scheme in found)
    sizes = [scheme.devices for scheme, _ in strategy.counts]
    assert sizes == sorted(sizes, reverse=True), "largest first"


def test_texts_by_hand() -> None:
    """Catches a count of one that must be written, and blanks that matter."""
    strategy = Strategy.parse("4*cp1 +cp4")
    assert str(strategy) == "1*cp4 + 4*cp1"
    assert strategy.devices == 8
    assert str(Strategy.of([])) == "none"
    assert Strategy.parse(" none ") == Strategy.of([])


@pytest.mark.parametrize("text", ["", "two*cp1", "-1*cp1", "2*", "cp1 + ", "2*cp1*3", "2*none"])
def test_malformed_texts_are_refused(text: str) -> None:
    """Catches a traceback of int(), and half a sum that is read as a whole one."""
    with pytest.raises(SpecError):
        Strategy.parse(text)


def test_counts_are_at_least_one_and_schemes_differ() -> None:
    """Catches two entries for one scheme, which would print as a strategy they are not."""
    with pytest.raises(SpecError, match="pipelines of cp2: got 0, wanted >= 1"):
        Strategy(counts=((Scheme(context=2), 0),))
    with pytest.raises(SpecError, match="a scheme twice"):
        Strategy(counts=((Scheme(), 1), (Scheme(), 2)))


def test_a_text_counts_at_least_one() -> None:
    """Catches a mistyped count that drops a scheme in silence."""
    with pytest.raises(SpecError):
        Strategy.parse("0*cp4 + 4*cp1")
