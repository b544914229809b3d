"""From measurements to a cost model: a quadratic per part, a line per kind of memory.

A profile may hold whole layers, branches of layers, which are put together here, or both; what was
measured as a whole counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.costs.cost_model import CostModel, ExchangeCost, OptionCost
from headrace.costs.quadratic import FitError, Linear, Quadratic, fit_linear, fit_quadratic
from headrace.errors import CostError
from headrace.spec.layer_plan import RECOMPUTE, Branch, LayerOption, Recompute
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS, ModelShape
from headrace.spec.profile import ENDS, Profile, ProfilePoint
from headrace.units import percent_text

__all__ = [
    "Branches",
    "FittedPart",
    "composed",
    "costs_from_profile",
    "fit_parts",
    "not_fitting_notes",
    "points_by_option",
    "recomputed",
    "reconciled",
]

Branches = Mapping[Branch, Mapping[str, OptionCost]]
"""Costs of the branches of one group size by ``METHOD[+LEVEL]``."""


def composed(
    branches: Branches,
    feed_forwards: Mapping[str, str],
    shape: ModelShape,
    p: int,
    element_bytes: int,
) -> dict[str, OptionCost]:
    """Put the measured branches of groups of p ranks together: the costs of layer options by their
    text, for all pairs of an attention and a feed-forward of one recompute level. The level
    ``full`` is computed from each pair without recompute.

    ``feed_forwards`` names for a method the one whose feed-forward it uses. Raises CostError when
    a branch is missing or claims the level ``full``.
    """
    attention_costs = _by_level(branches, "attention", p)
    feed_forward_costs = _by_level(branches, "feed_forward", p)
    share = shape.attention_share
    costs: dict[str, OptionCost] = {}
    for (method, level), attention in attention_costs.items():
        for (other, other_level), feed_forward in feed_forward_costs.items():
            if level != other_level:
                continue
            # A feed-forward that the attention's method uses anyway goes by that method's name.
            own = feed_forwards.get(method, method) == feed_forwards.get(other, other)
            option = LayerOption(
                attention=method, feed_forward=method if own else other, recompute=level
            )
            costs[str(option)] = _layer_cost(attention, feed_forward, share)
            if level == "none":
                full = replace(option, recompute="full")
                costs[str(full)] = recomputed(costs[str(option)], shape.hidden, p, element_bytes)
    return costs


def recomputed(none: OptionCost, hidden: int, p: int, element_bytes: int) -> OptionCost:
    """The costs of a layer with full recompute from its costs without (``none``): the backward runs
    the forward again, only the layer's input is kept, and what the layer would keep is needed in
    passing instead."""
    row_bytes = hidden * element_bytes
    # The busiest rank may have one row more than an even share.
    kept = Linear(slope=row_bytes / p, constant=0.0 if p == 1 else row_bytes)
    return replace(
        none,
        backward=none.backward + none.forward,
        kept=kept,
        transient=Linear(
            slope=max(0.0, none.kept.slope - kept.slope) + none.transient.slope,
            constant=max(0.0, none.kept.constant - kept.constant) + none.transient.constant,
        ),
    )


def _by_level(branches: Branches, name: Branch, p: int) -> dict[tuple[str, Recompute], OptionCost]:
    """The measured costs of one branch on groups of ``p`` ranks, by (method, recompute level);
    raises CostError for a profile without them."""
    found: dict[tuple[str, Recompute], OptionCost] = {}
    for text, cost in branches.get(name, {}).items():
        option = LayerOption.parse(text)
        if option.attention != option.feed_forward or option.recompute == "full":
            wanted = f"METHOD[+LEVEL], of the levels {' and '.join(RECOMPUTE[:-1])}"
            raise CostError(f"{name} of cp{p}", got=text, wanted=wanted, hint="profile again")
        found[option.attention, option.recompute] = cost
    if not found:
        raise CostError(f"profile of cp{p}", got=f"no {name}", hint="profile again")
    return found


def _layer_cost(attention: OptionCost, feed_forward: OptionCost, share: float) -> OptionCost:
    """The costs of a layer from those of its branches: seconds and kept bytes add up, but of
    transient bytes the larger count, as the branches run one after the other. ``share`` is the
    attention's fraction of the layer's weights."""
    return OptionCost(
        forward=attention.forward + feed_forward.forward,
        backward=attention.backward + feed_forward.backward,
        kept=Linear(
            slope=attention.kept.slope + feed_forward.kept.slope,
            constant=attention.kept.constant + feed_forward.kept.constant,
        ),
        transient=Linear(
            slope=max(attention.transient.slope, feed_forward.transient.slope),
            constant=max(attention.transient.constant, feed_forward.transient.constant),
        ),
        order=attention.order,
        fetched=share * attention.fetched + (1 - share) * feed_forward.fetched,
    )


Part = Literal["forward", "backward"]
"""Which seconds of a measured point a curve is fitted to."""

_FALL = 0.1
"""The share by which a longer document must be below a shorter one to be noted."""


_MOST_MARGIN = 0.9
"""More than this is never kept free, whatever failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPart:
    """The fit of one part of one layer option (or the ends) on groups of ``p`` ranks."""

    p: int
    option: str
    part: Part
    curve: Quadratic
    error: FitError
    points: tuple[ProfilePoint, ...]

    def measured_s(self, point: ProfilePoint) -> float:
        """Seconds that were measured at a point for this part, its forward or its backward."""
        return point.forward_s if self.part == "forward" else point.backward_s

    @property
    def kept(self) -> Linear:
        """Bytes that a rank keeps for the backward, as a line over tokens through the points.
        Raises CostError for too few points."""
        return _bytes_line(self.points, "kept_bytes")

    @property
    def transient(self) -> Linear:
        """Bytes that a rank needs in passing, as a line over tokens through the points. Raises
        CostError for too few points."""
        return _bytes_line(self.points, "transient_bytes")

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings, for people, that a longer document measured less than a shorter one: at most
        one for each quantity, seconds and, with the forward, bytes.

        Such points are fitted as all others are, as nothing says which of two is wrong.
        """
        notes = [_falls("seconds", [(x, self.measured_s(x)) for x in self.points])]
        if self.part == "forward":  # bytes are those of both parts, so they are noted once
            notes += [
                _falls("bytes kept", [(x, x.kept_bytes) for x in self.points]),
                _falls("bytes in passing", [(x, x.transient_bytes) for x in self.points]),
            ]
        return tuple(f"cp{self.p} {self.option} {self.part}: {note}" for note in notes if note)

    def to_json(self) -> list[dict[str, Any]]:
        """One JSON object per point: what was measured and what the fit says."""
        return [
            {
                "p": self.p,
                "option": self.option,
                "part": self.part,
                "tokens": sum(point.lengths),
                "longest": max(point.lengths),
                "measured_s": self.measured_s(point),
                "predicted_s": self.curve(point.lengths),
            }
            for point in self.points
        ]


def _falls(what: str, values: Sequence[tuple[ProfilePoint, float | None]]) -> str:
    """A note on single documents that measured at least a tenth less than a shorter one; empty
    without any. ``values`` are pairs (point, its value or None), ``what`` names the quantity."""
    singles = [
        (point.lengths[0], value)
        for point, value in values
        if len(point.lengths) == 1 and value is not None
    ]
    # ``most`` is the largest value of shorter documents, ``share`` the largest fall below it.
    lengths, most, share = list[int](), 0.0, 0.0
    for length, value in sorted(singles):
        if value < most * (1 - _FALL):
            lengths.append(length)
            share = max(share, 1 - value / most)
        most = max(most, value)
    if not lengths:
        return ""
    named = ", ".join(f"{length:,}" for length in lengths[:4])
    rest = f" and {len(lengths) - 4} other lengths" if len(lengths) > 4 else ""
    return f"{what} of {named}{rest} tokens up to {percent_text(share)} below a shorter document"


def costs_from_profile(profile: Profile) -> CostModel:
    """Fit the cost model of a profile: a quadratic to each option's forward and backward, by least
    squares of relative errors (Hydraulis, appendix C), and lines to its bytes.

    Raises CostError when an option was measured at too few lengths, naming some to add, or when the
    branches of a group size do not belong together.
    """
    curves = {(fit.p, fit.option, fit.part): fit.curve for fit in fit_parts(profile)}
    costs: dict[int, dict[str, OptionCost]] = {}
    for (p, option), points in points_by_option(profile).items():
        if (p, ENDS, "forward") not in curves:
            raise CostError(f"profile of cp{p}", got=f"no {ENDS}", hint="profile again")
        costs.setdefault(p, {})[option] = OptionCost(
            forward=curves[p, option, "forward"],
            backward=curves[p, option, "backward"],
            kept=_bytes_line(points, "kept_bytes"),
            transient=_bytes_line(points, "transient_bytes"),
            order=_agreed_on(points, "order"),
            fetched=_agreed_on(points, "fetched"),
        )
    return CostModel(
        shape=profile.shape,
        cluster=profile.cluster,
        fingerprint=profile.fingerprint,
        options={p: _options(profile, p, by_option) for p, by_option in costs.items()},
        ends={p: by_option[ENDS] for p, by_option in costs.items()},
        exchange_s=_exchange(profile),
        state_bytes=profile.state_bytes,
        working_bytes=profile.working_bytes,
        gather_s=profile.gather_s,
        feed_forwards=profile.feed_forwards,
        memory_margin=_margin(profile, costs),
    )


def not_fitting_notes(profile: Profile) -> list[str]:
    """A sentence for each option and group size whose measurement ended where memory ran out."""
    return [
        f"cp{pack.p} {pack.option}: two layers of {pack.tokens:,} tokens do not fit"
        for pack in profile.not_fitting
    ]


def _margin(profile: Profile, costs: Mapping[int, Mapping[str, OptionCost]]) -> float:
    """The fraction of the memory that plans have to leave free, so that the costs predict that the
    packs at which the profile ran out of memory do not fit.

    By its lines such a pack of T tokens, run through two layers, needs 2 kept(T) + transient(T)
    bytes. Where that is a fraction s < 1 of the memory besides the stored state, 1 - s was not
    available.
    """
    room = profile.cluster.memory_bytes - profile.state_bytes
    shares = [1.0]  # what each pack needs, as a fraction of the room
    for pack in profile.not_fitting:
        cost = costs.get(pack.p, {}).get(pack.option)
        if cost is not None and room > 0:
            shares.append((2 * cost.kept(pack.tokens) + cost.transient(pack.tokens)) / room)
    return min(1 - min(shares), _MOST_MARGIN)


def _options(profile: Profile, p: int, costs: Mapping[str, OptionCost]) -> dict[str, OptionCost]:
    """The costs of the layer options of groups of p ranks by their text: layers that were measured
    whole, and others put together from measured branches. ``costs`` are those of all layers and
    branches that were measured, by the option's text."""
    whole: dict[str, OptionCost] = {}
    branches: dict[Branch, dict[str, OptionCost]] = {}
    for point in profile.points:
        if point.p != p or point.option == ENDS:
            continue
        if point.branch is None:
            whole[point.option] = costs[point.option]
        else:
            branch, text = point.branch
            branches.setdefault(branch, {})[text] = costs[point.option]
    if not branches:
        return whole
    return {
        **composed(branches, profile.feed_forwards, profile.shape, p, profile.element_bytes),
        **whole,
    }


def _agreed_on(points: Sequence[ProfilePoint], name: str) -> Any:
    """The value of the field ``name`` that all points of one option share. Raises CostError when
    they do not share one."""
    values = {getattr(point, name) for point in points}
    if len(values) > 1:
        raise CostError(
            f"{name} of {points[0].option} on cp{points[0].p}",
            got=", ".join(map(str, sorted(values))),
            wanted="one",
            hint="profile again",
        )
    return values.pop()


def _exchange(profile: Profile) -> ExchangeCost:
    """The seconds of a step's pull, push and update from a profile; raises CostError where any is
    missing."""
    wanted = {"pull_s", "push_s", "update_s"}
    if set(profile.exchange_s) != wanted:
        raise CostError(
            "constants of a profile",
            got=", ".join(profile.exchange_s),
            wanted=", ".join(sorted(wanted)),
            hint="profile again",
        )
    return ExchangeCost(**profile.exchange_s, sharded_share=profile.sharded_share)


def fit_parts(profile: Profile) -> list[FittedPart]:
    """Fit a quadratic to the forward and the backward of every option and group size. Raises
    CostError where the points do not determine one."""
    fits = []
    for (p, option), points in points_by_option(profile).items():
        packs = [point.lengths for point in points]
        parts: tuple[Part, Part] = ("forward", "backward")
        for part in parts:
            # Above zero, as errors are relative.
            seconds = [max(1e-9, getattr(point, f"{part}_s")) for point in points]
            try:
                curve, error = fit_quadratic(packs, seconds)
            except CostError as problem:
                raise CostError(f"profile of cp{p} {option}, {part}: {problem}")
            fits.append(
                FittedPart(
                    p=p, option=option, part=part, curve=curve, error=error, points=tuple(points)
                )
            )
    return fits


def reconciled(points: Sequence[ProfilePoint]) -> list[ProfilePoint]:
    """Points in which the recompute levels of one method, or of one branch, agree on what they
    share.

    Levels run the same forward, ``full`` runs it again before the backward of ``none``, and
    ``attention`` runs a part of it again (DCP, Eq. 4 and 5). A busy machine only ever adds time,
    so of what several levels measured of the same work on the same pack the least counts; without
    this, noise makes the thriftiest level look like the fastest.
    """
    # Points by (group size, method, lengths of the pack), then by recompute level.
    levels_of: dict[tuple[int, str, tuple[int, ...]], dict[str, ProfilePoint]] = {}
    for point in points:
        method, _, level = point.option.partition("+")
        levels_of.setdefault((point.p, method, point.lengths), {})[level or "none"] = point
    return [_consistent_point(point, levels_of) for point in points]


def _consistent_point(
    point: ProfilePoint,
    levels_of: Mapping[tuple[int, str, tuple[int, ...]], dict[str, ProfilePoint]],
) -> ProfilePoint:
    """A point with seconds that agree with those of the other recompute levels on the same pack
    (``levels_of``): the least forward of all levels; the least backward without recompute; for
    ``full`` both together; for ``attention`` what was measured, within these two."""
    method, _, level = point.option.partition("+")
    levels = levels_of[point.p, method, point.lengths]
    forward_s = min(other.forward_s for other in levels.values())
    # Measurements of the backward without recompute; that of ``full`` has a forward besides.
    backwards_s = [
        other.backward_s - (forward_s if name == "full" else 0.0)
        for name, other in levels.items()
        if name in ("none", "full")
    ]
    least_s = min((seconds for seconds in backwards_s if seconds > 0), default=point.backward_s)
    backward_s = {
        "full": least_s + forward_s,
        "attention": min(max(point.backward_s, least_s), least_s + forward_s),
    }.get(level, least_s)  # the level ``none`` has no text
    return replace(point, forward_s=forward_s, backward_s=backward_s)


def points_by_option(profile: Profile) -> dict[tuple[int, str], list[ProfilePoint]]:
    """The points of a profile by (group size, option), in the order of their measurement, with
    seconds on which the recompute levels agree (:func:`reconciled`)."""
    found: dict[tuple[int, str], list[ProfilePoint]] = {}
    for point in reconciled(profile.points):
        found.setdefault((point.p, point.option), []).append(point)
    return found


def _bytes_line(points: Sequence[ProfilePoint], name: str) -> Linear:
    """A line over tokens fitted to the byte counts ``name`` (``kept_bytes`` or ``transient_bytes``)
    of the points that have them; raises CostError for fewer than two. The head works in chunks, so
    that its bytes grow up to a chunk's tokens and hardly beyond: its line is that of the packs of a
    chunk or more, where there are two, and above what smaller ones need."""
    counted = [
        (sum(point.lengths), value)
        for point in points
        if (value := getattr(point, name)) is not None
    ]
    if points[0].option == ENDS:
        chunk = HEAD_CHUNK_TOKENS * points[0].p
        of_chunks = [(tokens, value) for tokens, value in counted if tokens >= chunk]
        counted = of_chunks if len(of_chunks) >= 2 else counted
    if len(counted) < 2:
        longest = max([tokens for tokens, _ in counted], default=sum(points[0].lengths))
        raise CostError(
            f"{name} of {points[0].option}",
            got=f"{len(counted)} points",
            wanted=">= 2",
            hint=f"measure a pack of {2 * longest:,} tokens too",
        )
    return fit_linear([tokens for tokens, _ in counted], [value for _, value in counted])[0]
