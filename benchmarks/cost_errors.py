"""How far cost models are off where they were not fitted, on whole steps, and how fast they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from held_out import HeldOut, held_out, relative_errors, split
from shared_forest import SharedForest, fit_shared_forest

from headrace.costs import CostModel, Speeds, synthetic_costs
from headrace.costs.paradyse.hybrid import TARGETS, HybridModel, fit_hybrid, fit_pair, measured
from headrace.costs.sources.formulas import FORMULA_METHODS
from headrace.costs.sources.measured import costs_from_profile, points_by_option
from headrace.spec.architecture import Architecture
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.profile import ENDS, Profile, ProfilePoint

__all__ = ["SHARED", "against_step", "all_errors", "layered", "microseconds", "without_held"]

SHARED, FORMULAS = "hybrid, shared", "formulas"


def layered(profile: Profile) -> Profile:
    """The same with whole layers in place of branches, so that all models can be asked alike:
    seconds and kept bytes add up, of the bytes in passing the larger count."""
    found = {
        key: {x.lengths: x for x in points if len(x.lengths) == 1}
        for key, points in points_by_option(profile).items()
    }
    made: list[ProfilePoint] = []
    for (p, option), own in found.items():
        part, colon, text = option.partition(":")
        if not colon:
            made += own.values()
        if part != "attention":
            continue
        method, plus, level = text.partition("+")
        owner = profile.feed_forwards.get(method, method)
        others = found.get((p, f"feed_forward:{owner}{plus}{level}"), {})
        made += [_joined(own[n], others[n], text) for n in own if n in others]
    return replace(profile, points=tuple(made))


def _joined(attention: ProfilePoint, follower: ProfilePoint, option: str) -> ProfilePoint:
    def counted(name: str, together: Callable[[int, int], int]) -> int | None:
        pair = getattr(attention, name), getattr(follower, name)
        return None if None in pair else together(*pair)

    return replace(
        attention,
        option=option,
        forward_s=attention.forward_s + follower.forward_s,
        backward_s=attention.backward_s + follower.backward_s,
        kept_bytes=counted("kept_bytes", lambda x, y: x + y),
        transient_bytes=counted("transient_bytes", max),
    )


def without_held(profile: Profile) -> Profile:
    """The points that models are fitted to."""
    return _chosen(profile, held=False)


def _chosen(profile: Profile, *, held: bool) -> Profile:
    points: list[ProfilePoint] = []
    for own in points_by_option(profile).values():
        out = {n for lengths in split(x.lengths[0] for x in own).values() for n in lengths}
        points += [x for x in own if (x.lengths[0] in out) == held]
    return replace(profile, points=tuple(points))


def all_errors(
    profiles: list[Profile], models: list[Architecture | None]
) -> tuple[list[list[HeldOut]], SharedForest]:
    """For each profile (of whole layers) the errors of all models, formulas where its architecture
    is known; the forest that they share."""
    shared = fit_shared_forest([without_held(profile) for profile in profiles])
    errors = []
    for profile, model in zip(profiles, models, strict=True):
        steps_of = partial(shared.steps, profile.shape)
        hybrid = fit_hybrid(without_held(profile), steps_of)
        formulas = () if model is None else _of_formulas(profile, model)
        errors.append([*held_out(profile), *_of_shared(profile, hybrid), *formulas])
    return errors, shared


def _of_shared(profile: Profile, hybrid: HybridModel) -> Iterator[HeldOut]:
    for (p, option), target, lengths, values, most in _asked(profile):
        if target in hybrid.pairs[p][option]:
            found = hybrid.predict(p, option, target, lengths)
            yield from _rows(profile, p, option, target, SHARED, lengths, values, found, most)


def _of_formulas(profile: Profile, model: Architecture) -> Iterator[HeldOut]:
    """Formulas of a made-up device, made as fast as this one by two factors for all seconds: of
    what grows with the work, and of launches and latencies."""
    work = _formulas(profile, model, launch_s=0.0, latency_s=0.0)
    whole = _formulas(profile, model)

    def parts(x: ProfilePoint) -> tuple[float, float]:
        grows, both = (
            _formula(costs, x.p, x.option)["step_s"](x.lengths[0]) for costs in (work, whole)
        )
        return grows, both - grows

    known = [x for x in without_held(profile).points if _formula(whole, x.p, x.option)]
    if not known:
        return
    factors = _non_negative(
        np.array([parts(x) for x in known]), np.array([x.forward_s + x.backward_s for x in known])
    )
    for (p, option), target, lengths, values, most in _asked(profile):
        if not _formula(whole, p, option):
            continue
        grows, both = (
            np.array([_formula(costs, p, option)[target](n) for n in lengths])
            for costs in (work, whole)
        )
        seconds = grows * factors[0] + (both - grows) * factors[1]
        found = seconds if target.endswith("_s") else both
        yield from _rows(profile, p, option, target, FORMULAS, lengths, values, found, most)


def _formulas(profile: Profile, model: Architecture, **speeds: float) -> CostModel:
    names = {x.option.partition("+")[0] for x in profile.points}
    methods = tuple(m for m in FORMULA_METHODS if m in names and m != "local")
    sizes = tuple(sorted({x.p for x in profile.points}))
    return synthetic_costs(
        max(sizes),
        architecture=model,
        methods=methods or None,
        sizes=sizes,
        speeds=Speeds(element_bytes=profile.element_bytes, **speeds),
    )


def _formula(costs: CostModel, p: int, option: str) -> dict[str, Callable[[int], float]]:
    named = None if option == ENDS else LayerOption.parse(option)
    if named is None or str(costs.named(named)) not in costs.options.get(p, {}):
        return {}
    cost = costs.option(p, named)
    return {
        "forward_s": lambda n: cost.forward((n,)),
        "backward_s": lambda n: cost.backward((n,)),
        "step_s": lambda n: cost.forward((n,)) + cost.backward((n,)),
        "kept_bytes": cost.kept,
        "transient_bytes": cost.transient,
    }


def _non_negative(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Two factors >= 0 with the least relative squares."""
    scaled = features / seconds[:, None]
    found, *_ = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)
    if (found >= 0).all():
        return found
    alone = [column.sum() / max(column @ column, 1e-300) for column in scaled.T]
    left = [((column * x - 1) ** 2).sum() for column, x in zip(scaled.T, alone, strict=True)]
    best = int(np.argmin(left))
    return np.array([alone[i] if i == best else 0.0 for i in range(2)])


def _asked(profile: Profile) -> Iterator[tuple[Any, ...]]:
    """(ladder, target, held-out lengths, values there, the largest value of the ladder)."""
    held, everything = points_by_option(_chosen(profile, held=True)), points_by_option(profile)
    for key, points in held.items():
        for target in TARGETS:
            lengths, values = measured(points, target)
            if lengths:
                yield key, target, lengths, values, max(measured(everything[key], target)[1])


def _rows(
    profile: Profile,
    p: int,
    option: str,
    target: Any,
    model: str,
    lengths: list[int],
    values: list[float],
    found: np.ndarray,
    most: float,
) -> Iterator[HeldOut]:
    errors = dict(zip(lengths, relative_errors(found, values, most), strict=True))
    own = [x for x in profile.points if (x.p, x.option) == (p, option)]
    for where, out in split(x.lengths[0] for x in own).items():
        asked = tuple(n for n in lengths if n in out)
        if asked:
            yield HeldOut(
                p=p,
                option=option,
                target=target,
                model=model,
                where=where,
                lengths=asked,
                errors=tuple(errors[n] for n in asked),
            )


def against_step(
    profile: Profile, costs: CostModel, hybrid: HybridModel, step: dict[str, Any]
) -> dict[str, Any]:
    """What quadratic and hybrid say of a measured step, from the profile of two layers."""
    a, p, tokens = profile.shape, profile.cluster.devices, step["tokens"]
    option = LayerOption.parse(step["option"])
    layers, once = LayerPlan.uniform(option, a.layers), costs.exchange_s.total_s
    fixed = costs.state_bytes + costs.held_bytes([p], "replicated")

    def ask(target: Any) -> tuple[float, float]:
        return (
            float(hybrid.layer(p, option, target, tokens)),
            float(hybrid.predict(p, ENDS, target, tokens)),
        )

    parts = {target: ask(target) for target in TARGETS}
    seconds = sum(a.layers * parts[x][0] + parts[x][1] for x in ("forward_s", "backward_s"))
    kept = a.layers * parts["kept_bytes"][0] + parts["kept_bytes"][1]
    return {
        **step,
        "quadratic_s": sum(costs.micro_batch_s([tokens], p, layers)) + once,
        "hybrid_s": seconds + once,
        "quadratic_bytes": costs.micro_batch_bytes(tokens, p, layers) - fixed,
        "hybrid_bytes": kept + max(parts["transient_bytes"]),
    }


def microseconds(profile: Profile, lengths: np.ndarray) -> dict[str, float]:
    """Per length: one at a time and all at once, of the first option's forward."""
    from sklearn.ensemble import RandomForestRegressor

    (p, option), points = next(x for x in points_by_option(profile).items() if x[0][1] != ENDS)
    known, values = measured(points, "forward_s")
    pair = fit_pair(known, values)
    curve = costs_from_profile(profile).options[p][option].forward
    forest = RandomForestRegressor(50, max_depth=10, random_state=42)
    forest.fit(np.array(known)[:, None], values)
    some = lengths[:: max(1, len(lengths) // 200)]
    return {
        "quadratic, one at a time": _each_us(lambda: [curve((n,)) for n in some.tolist()], some),
        "hybrid, one at a time": _each_us(lambda: [pair(n) for n in some.tolist()], some),
        "hybrid, all at once": _each_us(lambda: pair(lengths), lengths),
        "scikit-learn, one at a time": _each_us(
            lambda: [forest.predict([[n]]) for n in some[:20].tolist()], some[:20]
        ),
        "scikit-learn, all at once": _each_us(lambda: forest.predict(lengths[:, None]), lengths),
    }


def _each_us(work: Callable[[], Any], lengths: Iterable[Any]) -> float:
    count, best = len(list(lengths)), float("inf")
    for _ in range(3):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best / count * 1e6
