"""Fillings that are given up early, and the prices and rankings that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.planning import Problem
from headrace.planning.batch import PriceTable, prices
from headrace.planning.nested import Nesting
from headrace.planning.search import Effort, least_time
from headrace.planning.side_by_side import Filler
from headrace.planning.wave_counts import Estimates, wave_counts
from headrace.planning.wave_filling import WaveFiller
from planning.pipeline_worlds import published
from planning.tables import bound_s, flexsp, group_table, pipeline_table

SEEDS = st.integers(0, 2**32)


def tight(fill: Callable[[float], object], tau: float) -> float:
    """The least time, to the last bit, in which a filling succeeds that does not at ``tau``, or
    ``tau``."""
    low, high = tau, tau
    for _ in range(12):
        if not isinstance(fill(high), float):
            break
        low, high = high, 1.5 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if isinstance(fill(middle), float) else (low, middle)
    return high


def drawn(seed: int, *, stages: bool) -> PriceTable:
    """Groups with one row or three, or pipelines with stages."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 120))
    lengths = np.clip(rng.lognormal(np.log(1500), 1.3, count), 1, 30_000).astype(int).tolist()
    if stages and seed % 3 == 2:
        held = [min(length, 20_000) for length in lengths]
        return pipeline_table(published("hydraulis-7b"), held, 32)
    return group_table(flexsp(), lengths, int(rng.choice([4, 8, 12])), rows=1 + 2 * (seed % 2))


@settings(max_examples=200, deadline=None)
@given(
    seed=SEEDS, factor=st.floats(0.9, 1.4), shaken=st.booleans(), given_counts=st.booleans(),
    closely=st.booleans(),
)  # fmt: skip
def test_a_filling_is_given_up_only_where_it_fails(
    seed: int, factor: float, shaken: bool, given_counts: bool, closely: bool
) -> None:
    """Catches a filling that is given up although everything finds a place, by an account of the
    seconds left that loses some."""
    table, rng = drawn(seed, stages=True), np.random.default_rng(seed)
    most = rng.integers(0, 4, len(table)).tolist() if given_counts else None
    filler, tau = Filler(table, most=most), bound_s(table) * factor
    order = rng.permutation(len(table.tokens)).tolist() if shaken else None
    if closely:
        tau = tight(lambda tau: filler.fill(tau, order), tau)
    whole, early = filler.fill(tau, order), filler.fill(tau, order, measured=False)
    if isinstance(whole, float):
        assert isinstance(early, float)
    else:
        assert early == whole


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, factor=st.floats(0.9, 2.0), join_any=st.booleans())
def test_waves_are_given_up_only_where_they_fail(seed: int, factor: float, join_any: bool) -> None:
    """Catches the same of waves: where none is left without a place, none is when the filling may
    end early, and the groups are the same."""
    table = drawn(seed, stages=False)
    filler, everyone = WaveFiller(table, range(len(table))), list(range(len(table.tokens)))
    time_s = bound_s(table) * factor
    groups, left = filler.fill(time_s, table.devices, everyone, join_any=join_any, whole=False)
    early, rest = filler.fill(time_s, table.devices, everyone, join_any=join_any)
    assert bool(left) == bool(rest)
    assert left or early == groups


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, factor=st.floats(0.9, 1.6), closely=st.booleans())
def test_nested_groups_are_given_up_only_where_they_fail(
    seed: int, factor: float, closely: bool
) -> None:
    """Catches the same of groups one in another."""
    table = drawn(seed, stages=False)
    rows = [k for k, width in enumerate(table.width) if width in (1, 2, 4, 8)]
    if not np.isfinite(table.alone[rows, 0]).any():
        return
    nesting, patient, tau = Nesting(table, rows), Nesting(table, rows), bound_s(table) * factor
    vars(patient)["_rest_s"] = [-np.inf] * len(table.tokens)  # what is left always fits
    if closely:
        tau = tight(patient.by_deadline, tau)
    whole, early = patient.by_deadline(tau), nesting.by_deadline(tau)
    assert isinstance(early, float) if isinstance(whole, float) else early == whole


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_estimates_of_a_part_are_those_of_its_sequences(seed: int) -> None:
    """Catches samples that stand for others' sequences, or sequences that a part still has although
    they were placed: estimates are then no longer those that are made for the part alone."""
    table, rng = drawn(seed, stages=False), np.random.default_rng(seed)
    filler, count = WaveFiller(table, range(len(table))), len(table.tokens)
    estimates = Estimates(filler)
    assert estimates.likely(0 * estimates.all) == (0, 0.0)
    placed = rng.choice(count, int(rng.integers(0, count)), replace=False).tolist()
    left = sorted(set(range(count)) - set(placed))
    waves, wave_s = estimates.likely(estimates.without(estimates.all, placed))
    alone = min(wave_counts(filler, left), key=lambda one: one.count * one.guess_s)
    assert waves * wave_s == pytest.approx(alone.count * alone.guess_s, rel=0.08)


@pytest.mark.parametrize("high_s", [1e5, float("inf")])
@pytest.mark.parametrize("part", [0.9, 0.1, 1e-4])
def test_a_time_far_above_the_bound_is_found(part: float, high_s: float) -> None:
    """Catches a search that ends without a time where steps by what is missing are too small."""

    def fill(
        tau: float, order: Sequence[int] | None = None, *, measured: bool = True
    ) -> list[int] | float:
        return [0] if tau >= 9000 else part

    found = least_time(fill, np.ones(3), 1.0, high_s, Effort(halvings=20))
    assert found is not None
    assert 9000 <= found.seconds <= 9000 * 1.002


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, factor=st.floats(1.0, 2.0), biased=st.booleans())
def test_schemes_are_ranked_alike_for_strategies_that_are_given(
    seed: int, factor: float, biased: bool
) -> None:
    """Catches a bias that is lost, or schemes that are not to be used, where the ranking of all
    schemes serves many strategies."""
    table, rng = drawn(seed, stages=True), np.random.default_rng(seed)
    most = rng.integers(0, 3, len(table)).tolist()
    weights = rng.choice([1.0, 1.1, 1.25], len(table)) if biased else np.ones(len(table))
    unused = np.where(np.array(most) == 0, np.inf, weights).tolist()
    tau = bound_s(table) * factor
    strategy = Filler(table, most=most, bias=weights.tolist())
    assert strategy.cheapest(tau) == Filler(table, bias=unused).cheapest(tau)


@pytest.mark.parametrize("devices", [8, 64])
def test_prices_are_those_of_the_quickest_row_that_holds_a_sequence(devices: int) -> None:
    """Catches a row that is left out although it is the quickest, or holds less than a
    sequence."""
    costs = hr.costs.roofline(hr.Architecture.preset("llama-8b"), "h100", devices=devices)
    schemes = Problem(costs=costs).pricing.groups("replicated")
    rng = np.random.default_rng(devices)
    lengths = np.unique(np.clip(rng.lognormal(8, 2, 400), 16, 400_000).astype(int))[::-1]
    most = [len(scheme.frontier.caps) for scheme in schemes]
    assert max(most) > 100, "the case shows nothing"
    for scheme in schemes:
        rows, some = scheme.frontier, lengths.astype(np.float64)
        a, b, c, caps = (each[:, None] for each in (rows.a, rows.b, rows.c, rows.limits))
        work = np.where(caps < some, np.inf, (a * some + b) * some)
        wanted = [work + c, work, work + c / caps * some]
        for found, ways in zip(prices(rows, some), wanted, strict=True):
            np.testing.assert_allclose(found, ways.min(axis=0), rtol=1e-12)
