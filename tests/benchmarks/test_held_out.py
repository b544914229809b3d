"""Errors at lengths that a fit did not see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from held_out import MODELS, error_of, held_out, relative_errors, split

from headrace.costs.paradyse import TARGETS
from headrace.errors import CostError
from profiles import LENGTHS, OPTIONS, made_up

pytest.importorskip("sklearn")


def test_the_split() -> None:
    """Catches ends that are held out inside: what is asked there would lie beyond."""
    held = split([*range(20, 0, -1), 5])
    assert held == {"inside": (2, 5, 8, 11, 14, 17), "beyond": (19, 20)}
    assert split([1, 2, 3, 4, 5]) == {"inside": (), "beyond": (4, 5)}
    assert split([1, 2, 3, 4, 5, 6]) == {"inside": (2,), "beyond": (5, 6)}


def test_models_are_not_shown_what_they_are_asked() -> None:
    """Catches points that are fitted and then held out: the quadratic would bend to them."""
    profile = made_up()
    held = split(LENGTHS)
    spoiled = [
        replace(x, forward_s=50 * x.forward_s) if x.lengths[0] in held["inside"] else x
        for x in profile.points
    ]
    rows = held_out(replace(profile, points=tuple(spoiled)))
    for row in rows:
        if row.target == "forward_s" and row.model == "quadratic":
            wanted = 0.98 if row.where == "inside" else 0.0
            assert row.errors == pytest.approx([wanted] * len(row.lengths), abs=1e-3)


def test_models_without_noise() -> None:
    """Catches models under each other's names: only a forest is off here, and only it is flat
    beyond."""
    rows = held_out(made_up())
    assert len(rows) == len(OPTIONS) * len(TARGETS) * len(MODELS) * 2
    by = {
        (model, where): error_of(x for x in rows if (x.model, x.where) == (model, where))
        for model in MODELS
        for where in ("inside", "beyond")
    }
    assert by["quadratic", "inside"].worst < 1e-3
    assert by["quadratic", "beyond"].worst < 1e-3
    assert by["polynomial", "beyond"].worst < 0.05
    assert by["hybrid", "beyond"] == by["polynomial", "beyond"]
    assert by["hybrid", "inside"] == by["forest", "inside"]
    assert by["forest", "inside"].median > 0.02
    assert by["forest", "beyond"].median > 0.3
    assert by["quadratic", "inside"].points == len(OPTIONS) * len(TARGETS) * len(
        split(LENGTHS)["inside"]
    )


def test_short_ladders_are_left_out() -> None:
    """Catches a fit of two lengths, and a silent empty result."""
    profile = made_up(LENGTHS[:8], options=["ends"])
    few = [replace(x, kept_bytes=None) if x.lengths[0] > LENGTHS[2] else x for x in profile.points]
    rows = held_out(replace(profile, points=tuple(few)))
    assert {row.where for row in rows if row.target == "kept_bytes"} == {"inside"}
    with pytest.raises(CostError, match=r"too short to be split.*288 and 576"):
        held_out(made_up(LENGTHS[:3]))


def test_zeros_can_be_predicted() -> None:
    """Catches a division by zero."""
    assert relative_errors(np.array([0.0, 1.0]), [0.0, 2.0], 2.0) == (0.0, 0.5)
    assert relative_errors(np.array([0.002]), [0.0], 2.0) == (1.0,)
    with pytest.raises(CostError, match="held-out errors"):
        error_of([])
