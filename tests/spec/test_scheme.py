"""Schemes of one pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import Scheme

degrees = st.integers(1, 64)
schemes = st.builds(Scheme, tensor=degrees, context=degrees, pipeline=degrees)


@given(schemes)
def test_text_reads_back(scheme: Scheme) -> None:
    """Catches degrees that are swapped or left out."""
    assert Scheme.parse(str(scheme)) == scheme
    assert scheme.devices == scheme.tensor * scheme.context * scheme.pipeline


@given(schemes, st.permutations([0, 1, 2]))
def test_the_order_of_a_text_is_free(scheme: Scheme, order: list[int]) -> None:
    """Catches a parser that wants one order, or no degrees of one."""
    parts = [f"tp{scheme.tensor}", f"cp{scheme.context}", f"pp{scheme.pipeline}"]
    assert Scheme.parse(" " + "-".join(parts[i] for i in order) + " ") == scheme


def test_texts_by_hand() -> None:
    """Catches an empty text for a single device."""
    assert str(Scheme(tensor=4, context=2, pipeline=2)) == "tp4-cp2-pp2"
    assert str(Scheme(pipeline=3)) == "pp3"
    assert str(Scheme()) == "cp1"


BAD = ["", "-", "cp", "cp0", "cp-1", "dp2", "cp2-", "cp2-cp2", "cp2 tp2", "2cp", "cp2-cp4", "CP2"]


@pytest.mark.parametrize("text", BAD)
def test_malformed_texts_are_refused(text: str) -> None:
    """Catches a degree given twice, of which one would be dropped."""
    with pytest.raises(SpecError, match="wanted tpN, cpN, ppN joined by '-'"):
        Scheme.parse(text)


@pytest.mark.parametrize("name", ["tensor", "context", "pipeline"])
def test_degrees_are_at_least_one(name: str) -> None:
    """Catches a pipeline of no devices."""
    with pytest.raises(SpecError, match=f"{name} degree: got 0"):
        Scheme(**{name: 0})
