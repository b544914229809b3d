"""How many numbers steer the search for plans."""

from __future__ import annotations

from search_numbers import search_numbers

MOST = 50


def test_numbers_that_steer_the_search_are_few() -> None:
    """Catches one more constant that nobody weighed: what cannot be forgotten cannot be made
    simpler. ``benchmarks/search_numbers.py`` says what each number gains."""
    found = list(map(str, search_numbers()))
    assert "waves._HEADS" in found
    assert "improvement.Improvement.packed" in found
    assert len(found) <= MOST, found
