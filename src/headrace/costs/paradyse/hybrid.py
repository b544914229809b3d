"""ParaDySe's hybrid costs: a random forest within the profiled lengths, a polynomial beyond them.

For a document of s tokens (Eq. 9; T seconds, M bytes):

    T(s), M(s) = forest(s)        s <= the longest profiled
                 polynomial(s)    s >  the longest profiled

one pair for each group size, measured option (a layer, a branch of it, the ends) and target. The
forest follows whatever kernels do at some lengths and not at others, which no quadratic can, and
pays for it between lengths that were profiled far apart, and below the shortest, as it is flat
there. It is stored as the steps that it is, so neither asking nor reading it back needs the library
that grew it.

Packs are not modelled: a pair knows documents that are alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.costs.paradyse.polynomial import Polynomial, fit_polynomial
from headrace.costs.paradyse.steps import Steps, fit_steps, need_scikit_learn
from headrace.costs.sources.measured import points_by_option
from headrace.errors import CostError, HeadraceError
from headrace.spec.architecture import stored_shape
from headrace.spec.layer_plan import LayerOption
from headrace.spec.model_shape import ModelShape
from headrace.spec.profile import Profile, ProfilePoint

__all__ = [
    "LEAST_LENGTHS",
    "TARGETS",
    "Boundary",
    "HybridModel",
    "Pair",
    "Target",
    "fit_hybrid",
    "fit_pair",
    "measured",
]

Floats = NDArray[np.float64]
HYBRID_FORMAT = 1

Target = Literal["forward_s", "backward_s", "kept_bytes", "transient_bytes"]
TARGETS: tuple[Target, ...] = get_args(Target)

LEAST_LENGTHS: dict[Target, int] = {
    "forward_s": 3,
    "backward_s": 3,
    "kept_bytes": 2,
    "transient_bytes": 2,
}
"""Different lengths that a fit takes: seconds bend, bytes do not."""


def _target_of(name: str) -> Target:
    """``name`` as a measured quantity of :data:`TARGETS`. Raises CostError for another name."""
    for target in TARGETS:
        if name == target:
            return target
    raise CostError("target", got=repr(name), wanted=" or ".join(TARGETS))


def measured(points: Sequence[ProfilePoint], target: Target) -> tuple[list[int], list[float]]:
    """The points whose pack is a single document, as (tokens of each, its seconds or bytes). Points
    at which the target was not measured are left out."""
    pairs = [
        (point.lengths[0], float(value))
        for point in points
        if len(point.lengths) == 1 and (value := getattr(point, target)) is not None
    ]
    return [length for length, _ in pairs], [value for _, value in pairs]


def _check_lengths(what: str, lengths: Sequence[int], target: Target) -> None:
    """Raise CostError for fewer different lengths than a fit of the target takes; it names lengths
    to add."""
    wanted, longest = LEAST_LENGTHS[target], max(lengths, default=256)
    if len(set(lengths)) < wanted:
        raise CostError(
            what,
            got=f"{len(set(lengths))} lengths of single documents",
            wanted=f"at least {wanted}",
            hint=f"measure documents of {2 * longest:,} and {4 * longest:,} tokens too",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The forest (as ``steps``) and the polynomial of one target: documents of up to ``longest``
    tokens are predicted by the forest, longer ones by the polynomial."""

    longest: int
    steps: Steps
    polynomial: Polynomial

    def __post_init__(self) -> None:
        """Raise CostError for a longest length that is no int of at least 1."""
        if isinstance(self.longest, bool) or not isinstance(self.longest, int) or self.longest < 1:
            raise CostError("longest length", got=repr(self.longest), wanted="an int >= 1")

    def __call__(self, tokens: ArrayLike) -> Floats:
        """Seconds or bytes [n] of documents of ``tokens`` [n]."""
        x = np.asarray(tokens, dtype=np.float64)
        return np.where(x <= self.longest, self.steps(x), self.polynomial(x))

    @property
    def jump(self) -> float:
        """How far the polynomial is above the forest at ``longest`` tokens, where the one follows
        the other, as a fraction of the forest's value."""
        by_forest = float(self.steps(self.longest))
        by_polynomial = float(self.polynomial(self.longest))
        if by_forest == 0:
            return 0.0 if by_polynomial == 0 else math.inf
        return by_polynomial / by_forest - 1

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "longest": self.longest,
            "steps": self.steps.to_json(),
            "polynomial": self.polynomial.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Pair:
        """Read the pair that :meth:`to_json` gave."""
        return cls(
            longest=value["longest"],
            steps=Steps.from_json(value["steps"]),
            polynomial=Polynomial.from_json(value["polynomial"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where one pair switches: ``longest`` profiled tokens, the polynomial's ``degree``, and by
    which share it begins above the forest."""

    p: int
    option: str
    target: Target
    longest: int
    degree: int
    jump: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridModel:
    """The pairs of one profile: ``pairs[p][option][target]``.

    ``feed_forwards`` and ``element_bytes`` are the profile's. A target that was not measured has
    no pair.
    """

    shape: ModelShape
    fingerprint: str
    pairs: Mapping[int, Mapping[str, Mapping[Target, Pair]]]
    feed_forwards: Mapping[str, str] = field(default_factory=dict)
    element_bytes: int = 4

    def predict(self, p: int, option: str, target: Target, tokens: ArrayLike) -> Floats:
        """Seconds or bytes [n] of a measured option for documents of ``tokens`` [n] on p ranks.

        Raises CostError for what was not measured.
        """
        return self._pair(p, option, target)(tokens)

    def layer(self, p: int, option: LayerOption, target: Target, tokens: ArrayLike) -> Floats:
        """Seconds or bytes [n] of a layer for documents of ``tokens`` [n] on p ranks. A layer that
        was not measured whole is put together from its branches, by the rules of
        :mod:`headrace.costs.sources.measured`."""
        if str(option) in self.pairs.get(p, {}):
            return self.predict(p, str(option), target, tokens)
        if option.recompute == "full":
            return self._at_full_level(p, option, target, tokens)
        level = "" if option.recompute == "none" else f"+{option.recompute}"
        owner = self.feed_forwards.get(option.feed_forward, option.feed_forward)
        attention = self.predict(p, f"attention:{option.attention}{level}", target, tokens)
        feed_forward = self.predict(p, f"feed_forward:{owner}{level}", target, tokens)
        if target == "transient_bytes":  # the branches run one after the other
            return np.maximum(attention, feed_forward)
        return attention + feed_forward

    def _at_full_level(
        self, p: int, option: LayerOption, target: Target, tokens: ArrayLike
    ) -> Floats:
        """Seconds or bytes [n] of a layer with full recompute for documents of ``tokens`` [n],
        computed from those without recompute: the backward runs the forward again, only the layer's
        input is kept, and what the layer would keep is needed in passing instead."""
        none = LayerOption(attention=option.attention, feed_forward=option.feed_forward)
        without = self.layer(p, none, target, tokens)
        if target == "forward_s":
            return without
        if target == "backward_s":
            return without + self.layer(p, none, "forward_s", tokens)
        # Rows of the busiest rank, which may have one more than an even share.
        rows = np.asarray(tokens, dtype=np.float64) / p + (0 if p == 1 else 1)
        input_bytes = rows * self.shape.hidden * self.element_bytes
        if target == "kept_bytes":
            return input_bytes
        kept_without = self.layer(p, none, "kept_bytes", tokens)
        return without + np.maximum(0.0, kept_without - input_bytes)

    def _pair(self, p: int, option: str, target: Target) -> Pair:
        """The forest and polynomial of one option and target; raises CostError where none was
        fitted."""
        options = self.pairs.get(p, {})
        found = options.get(option, {}).get(target)
        if found is None:
            known = ", ".join(options) or f"sizes {tuple(sorted(self.pairs))}"
            raise CostError(
                f"hybrid {target} of {option} on cp{p}", got="none", hint=f"known are {known}"
            )
        return found

    def boundaries(self) -> list[Boundary]:
        """Where every pair switches from its forest to its polynomial."""
        return [
            Boundary(
                p=p,
                option=option,
                target=target,
                longest=pair.longest,
                degree=pair.polynomial.degree,
                jump=pair.jump,
            )
            for p, options in self.pairs.items()
            for option, targets in options.items()
            for target, pair in targets.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "format": HYBRID_FORMAT,
            "fingerprint": self.fingerprint,
            "shape": self.shape.to_json(),
            "pairs": {
                str(p): {
                    option: {target: pair.to_json() for target, pair in targets.items()}
                    for option, targets in options.items()
                }
                for p, options in self.pairs.items()
            },
            "feed_forwards": dict(self.feed_forwards),
            "element_bytes": self.element_bytes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HybridModel:
        """The inverse of :meth:`to_json`. Raises CostError when the value is malformed."""
        try:
            if value["format"] != HYBRID_FORMAT:
                raise CostError("format of hybrid costs", got=value["format"], wanted=HYBRID_FORMAT)
            return cls(
                shape=stored_shape(value),
                fingerprint=value["fingerprint"],
                pairs={
                    int(p): {
                        option: {
                            _target_of(name): Pair.from_json(pair) for name, pair in targets.items()
                        }
                        for option, targets in options.items()
                    }
                    for p, options in value["pairs"].items()
                },
                feed_forwards=dict(value["feed_forwards"]),
                element_bytes=value["element_bytes"],
            )
        except (KeyError, TypeError, ValueError, AttributeError, HeadraceError) as error:
            got = f"{type(error).__name__}: {error}"
            raise CostError("hybrid costs", got=got, hint="fit them again")


def fit_hybrid(
    profile: Profile, steps_of: Callable[[int, str, Target], Steps] | None = None
) -> HybridModel:
    """Fit a forest and a polynomial to each target of each option and group size, from what a
    profile measured of single documents. Where ``steps_of(p, option, target)`` is given, it makes
    the steps, and no forest is grown.

    Raises CostError for fewer than three lengths with seconds or fewer than two with bytes, naming
    lengths to add, and MissingExtra without scikit-learn.
    """
    need_scikit_learn()
    pairs: dict[int, dict[str, dict[Target, Pair]]] = {}
    for (p, option), points in points_by_option(profile).items():
        of_option = pairs.setdefault(p, {}).setdefault(option, {})
        for target in TARGETS:
            lengths, values = measured(points, target)
            if values or target.endswith("_s"):  # bytes may not have been measured, seconds must
                _check_lengths(f"hybrid {target} of {option} on cp{p}", lengths, target)
                steps = None if steps_of is None else steps_of(p, option, target)
                of_option[target] = fit_pair(lengths, values, steps)
    return HybridModel(
        shape=profile.shape,
        fingerprint=profile.fingerprint,
        pairs=pairs,
        feed_forwards=profile.feed_forwards,
        element_bytes=profile.element_bytes,
    )


def fit_pair(lengths: Sequence[int], values: Sequence[float], steps: Steps | None = None) -> Pair:
    """Fit a polynomial and a forest to ``values`` at ``lengths`` tokens, and switch between them
    after the longest; ``steps`` take the place of the forest where they are given."""
    polynomial, _ = fit_polynomial(lengths, values)
    return Pair(
        longest=max(lengths), steps=steps or fit_steps(lengths, values), polynomial=polynomial
    )
