"""From measurements to costs: known curves come back, thin measurements are refused."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import CostModel, Linear, OptionCost, Quadratic
from headrace.costs.sources.measured import (
    costs_from_profile,
    fit_parts,
    not_fitting_notes,
    reconciled,
)
from headrace.errors import CostError
from headrace.spec import Architecture, Cluster
from headrace.spec.profile import ENDS, NotFitting, Profile, ProfilePoint
from profiles import OPTIONS, made_up

PACKS = ((64,), (256,), (1024,), (4096,), (64,) * 16, (1024, 256, 64))


def truth(p: int, option: str) -> OptionCost:
    """Another curve for every ladder; levels of one method share what they share in truth."""
    n = {"local": 1.0, "ulysses_z": 2.0, "ulysses_z+full": 3.0, ENDS: 0.5}[option] / p
    work = {"ulysses_z+full": 2.0 / p}.get(option, n)
    forward = Quadratic(a=1e-9 * work, b=2e-6 * work, c=1e-4 + work * 1e-5)
    backward = Quadratic(a=2e-9 * work, b=5e-6 * work, c=3e-4 + work * 1e-5)
    return OptionCost(
        forward=forward,
        backward=backward + forward if option.endswith("+full") else backward,
        kept=Linear(slope=1000 * n, constant=64 * p),
        transient=Linear(slope=300 * n),
    )


LADDERS = ((1, "local"), (1, ENDS), (2, "ulysses_z"), (2, "ulysses_z+full"), (2, ENDS))


def points(p: int, option: str, packs=PACKS) -> list[ProfilePoint]:
    true = truth(p, option)
    return [
        ProfilePoint(
            p=p,
            option=option,
            lengths=pack,
            forward_s=true.forward(pack),
            backward_s=true.backward(pack),
            kept_bytes=round(true.kept(sum(pack))),
            transient_bytes=round(true.transient(sum(pack))),
        )
        for pack in packs
    ]


def profile(found: list[ProfilePoint] | None = None) -> Profile:
    """Everything measured without noise, the ladders of all groups mixed."""
    measured = [point for ladder in LADDERS for point in points(*ladder)]
    return Profile(
        fingerprint="device=none",
        shape=Architecture.preset("llama-tiny").shape,
        cluster=Cluster(devices=2, memory_bytes=10**9),
        points=tuple(measured[::2] + measured[1::2] if found is None else found),
        exchange_s={"pull_s": 0.1, "push_s": 0.2, "update_s": 0.3},
        state_bytes=1234,
        working_bytes={1: {"replicated": 9, "sharded": 9}, 2: {"replicated": 9, "sharded": 5}},
        gather_s={1: (0.0, 0.0), 2: (0.01, 0.02)},
    )


@pytest.mark.parametrize(("p", "option"), LADDERS)
def test_known_curves_come_back(p: int, option: str) -> None:
    """Catches options, parts or kinds of bytes that are mixed up: no two of them are alike."""
    costs = costs_from_profile(profile())
    got = costs.ends[p] if option == ENDS else costs.options[p][option]
    true = truth(p, option)
    for pack in ((100,), (20_000,), (3000, 7, 7)):
        assert got.forward(pack) == pytest.approx(true.forward(pack), rel=1e-6)
        assert got.backward(pack) == pytest.approx(true.backward(pack), rel=1e-6)
        assert got.kept(sum(pack)) == pytest.approx(true.kept(sum(pack)), rel=1e-3)
        assert got.transient(sum(pack)) == pytest.approx(true.transient(sum(pack)), rel=1e-3)


def test_what_is_measured_once_is_taken_over() -> None:
    """Catches a constant that is dropped, and the ends listed as a layer's option."""
    costs = costs_from_profile(profile())
    assert set(costs.options[1]) == {"local"}
    assert set(costs.options[2]) == {"ulysses_z", "ulysses_z+full"}
    assert set(costs.ends) == {1, 2}
    assert (costs.exchange_s.pull_s, costs.exchange_s.push_s, costs.exchange_s.update_s) == (
        0.1,
        0.2,
        0.3,
    )
    assert costs.state_bytes == 1234
    assert costs.gather_s[2] == (0.01, 0.02)
    assert costs.working_bytes[2] == {"replicated": 9, "sharded": 5}
    assert (costs.fingerprint, costs.scale) == ("device=none", 1.0)
    assert CostModel.from_json(costs.to_json()) == costs


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=6))
def test_errors_are_those_over_the_points(noise: list[float]) -> None:
    """Catches an error of another fit, or a signed one, in which misses cancel."""
    found = [
        replace(point, forward_s=point.forward_s * factor)
        for point, factor in zip(points(1, "local"), noise, strict=True)
    ]
    forward, backward = fit_parts(profile(found))
    assert (forward.part, backward.part) == ("forward", "backward")
    errors = [abs(forward.curve(x.lengths) / x.forward_s - 1) for x in found]
    assert forward.error.points == 6
    assert forward.error.median == pytest.approx(median(errors), abs=1e-9)
    assert forward.error.worst == pytest.approx(max(errors), abs=1e-9)
    assert backward.error.worst < 1e-6


def test_a_fit_shows_its_points() -> None:
    """Catches a table in which measured and predicted, or the parts, are swapped."""
    found = {(fit.p, fit.option, fit.part): fit for fit in fit_parts(profile())}
    assert len(found) == 2 * len(LADDERS)
    fit = found[2, "ulysses_z", "backward"]
    rows = fit.to_json()
    assert {row["tokens"] for row in rows} == {sum(pack) for pack in PACKS}
    packed = next(r for r in rows if r["tokens"] == 1344)
    assert packed["longest"] == 1024
    true = truth(2, "ulysses_z").backward((1024, 256, 64))
    assert packed["measured_s"] == pytest.approx(true)
    assert packed["predicted_s"] == pytest.approx(true, rel=1e-6)
    assert (packed["p"], packed["option"], packed["part"]) == (2, "ulysses_z", "backward")


def test_a_clock_that_saw_nothing_is_no_error() -> None:
    """Catches a refusal of zero seconds, which coarse clocks give for the least packs."""
    found = [replace(x, backward_s=0.0) if sum(x.lengths) == 64 else x for x in profile().points]
    costs_from_profile(profile(found))


def test_bytes_that_were_not_measured_are_left_out() -> None:
    """Catches None taken as zero bytes, which would halve the line."""
    found = [
        replace(x, kept_bytes=None, transient_bytes=None) if len(x.lengths) > 1 else x
        for x in profile().points
    ]
    line = costs_from_profile(profile(found)).options[2]["ulysses_z"].kept
    assert line(10_000) == pytest.approx(truth(2, "ulysses_z").kept(10_000), rel=1e-3)


def test_too_few_packs_name_the_ladder_and_lengths_to_add() -> None:
    """Catches a curve through two points, which would be wrong for every length between."""
    found = [x for x in profile().points if x.option != "ulysses_z+full"]
    found += points(2, "ulysses_z+full", ((64,), (256,)))
    with pytest.raises(CostError) as caught:
        costs_from_profile(profile(found))
    text = str(caught.value)
    assert text.startswith("profile of cp2 ulysses_z+full, forward: ")
    assert "2 different packs" in text
    assert "512 and 1,024 tokens" in text


def test_too_few_counts_of_bytes_name_the_option() -> None:
    """Catches a line through one point."""
    found = [
        replace(x, transient_bytes=None) if x.option == "local" and x.lengths != (64,) else x
        for x in profile().points
    ]
    with pytest.raises(CostError, match="transient_bytes of local: got 1 points, wanted >= 2"):
        costs_from_profile(profile(found))


def test_too_few_counts_of_bytes_name_lengths_to_add() -> None:
    """Catches a message that leaves one to guess what to measure."""
    found = [replace(x, kept_bytes=None) if x.lengths != (64,) else x for x in profile().points]
    with pytest.raises(CostError, match="measure a pack of 128 tokens too"):
        costs_from_profile(profile(found))


@pytest.mark.parametrize("fault", ["no ends", "another constant"])
def test_a_damaged_profile_is_refused(fault: str) -> None:
    """Catches a traceback for a cached file that was cut or edited."""
    found = profile([x for x in profile().points if fault != "no ends" or x.option != ENDS])
    if fault == "another constant":
        found = replace(found, exchange_s={"pull_s": 0.1, "wait_s": 0.2})
    with pytest.raises(CostError):
        costs_from_profile(found)


def test_noise_does_not_make_a_thrifty_level_fast() -> None:
    """Catches plans that recompute because the machine was busy while ``none`` was measured."""

    def point(level: str, forward_s: float, backward_s: float) -> ProfilePoint:
        option = "local" if level == "none" else f"local+{level}"
        return ProfilePoint(
            p=1, option=option, lengths=(64,), forward_s=forward_s, backward_s=backward_s
        )

    busy = [point("none", 1.8, 3.5), point("attention", 1.0, 1.7), point("full", 1.0, 3.0)]
    none, attention, full = reconciled(busy)
    assert (none.forward_s, none.backward_s) == (1.0, 2.0)
    assert (attention.forward_s, attention.backward_s) == (1.0, 2.0)
    assert (full.forward_s, full.backward_s) == (1.0, 3.0)
    alone = [point("attention", 1.0, 2.5)]
    assert reconciled(alone) == alone


def test_measurements_that_fall_are_flagged_and_counted() -> None:
    """Catches a note on noise below a tenth, one on a pack of short documents, and a point that is
    dropped because it was flagged."""
    found = points(1, "local")
    changed = {(256,): 0.95, (1024,): 0.25}
    sunk = [
        replace(x, forward_s=found[i - 1].forward_s * share)
        if (share := changed.get(x.lengths))
        else x
        for i, x in enumerate(found)
    ]
    sunk = [replace(x, kept_bytes=7) if x.lengths == (4096,) else x for x in sunk]
    forward, backward = fit_parts(profile(sunk))
    assert backward.notes == ()
    seconds, kept = forward.notes
    assert seconds.startswith("cp1 local forward: seconds of 1,024 tokens up to ")
    assert seconds.endswith(" below a shorter document")
    assert kept.startswith("cp1 local forward: bytes kept of 4,096 tokens up to 100 % below")
    assert forward.points == tuple(sunk)
    assert all(fit.notes == () for fit in fit_parts(profile()))


def test_what_did_not_fit_is_kept_free() -> None:
    """Catches memory that was promised and is not there, and a margin where all is as it was
    counted."""
    profile = made_up()
    option = "attention:local"
    costs = costs_from_profile(profile)
    assert costs.memory_margin == 0
    tokens = 10**6
    needs = 2 * 100 * tokens * (1 + OPTIONS.index(option)) + 77 * tokens + 640
    over = (NotFitting(p=1, option=option, tokens=tokens),)
    for memory, share in ((needs // 2, 1.0), (2 * needs, 0.5), (1000 * needs, 0.1)):
        cluster = Cluster(devices=1, memory_bytes=memory + profile.state_bytes)
        found = costs_from_profile(replace(profile, cluster=cluster, not_fitting=over))
        assert found.memory_margin == pytest.approx(1 - share, abs=1e-6)
    assert not_fitting_notes(replace(profile, not_fitting=over)) == [
        "cp1 attention:local: two layers of 1,000,000 tokens do not fit"
    ]
