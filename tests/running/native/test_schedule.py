"""The learning rate at the steps that matter, and everywhere between."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.native.optimizers import Schedule


def test_warm_up_peak_middle_and_end() -> None:
    """Would catch a first step of rate zero, a peak never reached, and a cosine of half its
    length."""
    schedule = Schedule(lr=2.0, steps=110, warmup_steps=10, floor=0.1)
    assert [schedule.rate(step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert schedule.rate(10) == 2.0
    assert schedule.rate(60) == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert schedule.rate(35) == pytest.approx(2.0 * (0.1 + 0.45 * (1 + math.sqrt(0.5))))
    assert schedule.rate(110) == pytest.approx(0.2)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 250), st.floats(0, 1))
def test_it_rises_then_falls_and_stays_in_bounds(steps: int, warmup: int, floor: float) -> None:
    """Would catch a rate that grows again after the last step, or falls below the floor."""
    schedule = Schedule(lr=3.0, steps=steps, warmup_steps=warmup, floor=floor)
    rates = [schedule.rate(step) for step in range(2 * (steps + warmup))]
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert all(one >= other - 1e-12 for one, other in pairwise(falling))
    assert all(0 < rate <= 3.0 for rate in rising)
    assert all(3.0 * floor - 1e-12 <= rate <= 3.0 for rate in falling)
    assert rates[-1] == pytest.approx(3.0 * floor, abs=1e-12)


@pytest.mark.parametrize(("steps", "warmup"), [(0, 0), (-5, 0), (10, -1)])
def test_impossible_schedules_are_refused(steps: int, warmup: int) -> None:
    """Would catch a division by zero in the middle of a run."""
    with pytest.raises(SpecError, match="schedule"):
        Schedule(lr=1.0, steps=steps, warmup_steps=warmup)
