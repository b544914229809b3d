"""Costs that plans can be made from, fitted to ParaDySe's hybrid in place of the measurements.

The search prices packs of sequences by rows a sum(l^2) + b sum(l) + c, and bytes by lines; a forest
is a step function of one document, which says nothing of a pack. So the hybrid of every measured
part is sampled at lengths with even ratios, from the shortest that was profiled to the longest that
will be planned, and the quadratics (for bytes, lines) are fitted to these samples instead of the
measurements: to the forest within the profiled lengths, to the polynomial beyond them. Relative
errors count, so each octave of lengths weighs the same. How far the quadratics then are from the
hybrid is part of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from headrace.costs.cost_model import CostModel
from headrace.costs.fingerprint import HYBRID
from headrace.costs.paradyse.hybrid import HybridModel, Target, fit_hybrid
from headrace.costs.quadratic import FitError
from headrace.costs.sources.measured import costs_from_profile, fit_parts, points_by_option
from headrace.spec.profile import Profile, ProfilePoint

__all__ = ["HybridCosts", "costs_of_hybrid"]

_SAMPLES = 48
"""Lengths at which a hybrid is sampled: several for each step of a forest over a dozen points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridCosts:
    """Costs fitted to a hybrid, and how far their seconds are from it, over all its parts."""

    costs: CostModel
    error: FitError

    def __str__(self) -> str:
        """How far the quadratics are from the hybrid, in a sentence."""
        return f"quadratics fitted to forests and polynomials are off by {self.error}"


def costs_of_hybrid(profile: Profile, longest: int) -> HybridCosts:
    """Fit costs to the hybrid of a profile instead of its measurements, for sequences of up to
    ``longest`` tokens.

    Raises CostError where documents of fewer than three lengths were measured, naming lengths to
    add, and MissingExtra without scikit-learn.
    """
    sampled = _sampled(profile, fit_hybrid(profile), longest)
    errors = [part.error for part in fit_parts(sampled)]
    return HybridCosts(
        costs=costs_from_profile(sampled),
        error=FitError(
            median=median(error.median for error in errors),
            worst=max(error.worst for error in errors),
            points=sum(error.points for error in errors),
        ),
    )


def _sampled(profile: Profile, model: HybridModel, longest: int) -> Profile:
    """The profile with the hybrid's predictions in the place of its measured points, and a
    fingerprint that says so."""
    points = [
        point
        for option_points in points_by_option(profile).values()
        for point in _samples(model, option_points, longest)
    ]
    fingerprint = f"{profile.fingerprint}; {HYBRID}"
    return replace(profile, points=tuple(points), fingerprint=fingerprint)


def _samples(
    model: HybridModel, points: Sequence[ProfilePoint], longest: int
) -> list[ProfilePoint]:
    """Points that the hybrid predicts for one option on one group size, given its measured
    ``points``: documents of geometrically spaced lengths from the shortest measured one to
    ``longest`` tokens, or the longest measured one if that is longer."""
    first = points[0]  # what all points of an option share is copied from it
    measured = [point.lengths[0] for point in points if len(point.lengths) == 1]
    spaced = np.geomspace(min(measured), max(longest, *measured), _SAMPLES)
    lengths = sorted({round(float(n)) for n in spaced})

    def predicted(target: Target) -> list[float]:
        """The target at each of ``lengths``."""
        return model.predict(first.p, first.option, target, lengths).tolist()

    def predicted_bytes(target: Target) -> list[int | None]:
        """Bytes at each of ``lengths``; None where they were not measured."""
        if target not in model.pairs[first.p][first.option]:
            return [None] * len(lengths)
        return [round(count) for count in predicted(target)]

    columns = zip(
        lengths,
        predicted("forward_s"),
        predicted("backward_s"),
        predicted_bytes("kept_bytes"),
        predicted_bytes("transient_bytes"),
        strict=True,
    )
    return [
        replace(
            first,
            lengths=(length,),
            forward_s=forward_s,
            backward_s=backward_s,
            kept_bytes=kept,
            transient_bytes=passing,
        )
        for length, forward_s, backward_s, kept, passing in columns
    ]
