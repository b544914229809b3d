"""Fillings that are given up early, and the prices and rankings that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.planning import Problem
from headrace.planning.batch import PriceTable, SortedBatch, prices
from headrace.planning.filling import Filler
from headrace.planning.generators import Effort, least_time
from headrace.planning.nested import Nesting
from headrace.planning.waves import Estimates, WaveFiller
from headrace.spec import Lengths
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
    seed=SEEDS,
    factor=st.floats(0.9, 1.4),
    shaken=st.booleans(),
    given_counts=st.booleans(),
    closely=st.booleans(),
)
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


@settings(max_examples=120, deadline=None)
@given(seed=SEEDS, factor=st.floats(0.9, 2.5), join_any=st.booleans())
def test_sequences_follow_each_other_into_a_pipeline_as_if_each_looked_anew(
    seed: int, factor: float, join_any: bool
) -> None:
    """Catches a pipeline that takes the next sequence although another is fuller and holds it, or
    although it has no time or tokens left: it is compared with a filling one by one."""
    table, rng = drawn(seed, stages=True), np.random.default_rng(seed)
    deep = [float("inf") if depth == 1 else 1.0 for depth in table.depth]
    filler, tau = (
        Filler(table, bias=deep if max(table.depth) > 1 else None),
        factor * bound_s(table),
    )
    order = rng.permutation(len(table.tokens)).tolist() if seed % 2 else None
    found = filler.fill(tau, order, join_any=join_any, measured=False)
    plain = one_by_one(filler, tau, order or range(len(table.tokens)), join_any=join_any)
    assert plain is None if isinstance(found, float) else plain == found


def one_by_one(
    filler: Filler, tau: float, order: Sequence[int], *, join_any: bool
) -> list[tuple[int, list[int]]] | None:
    """Each sequence to the pipeline of least time left, of those of a scheme, that holds it."""
    table, cheapest = filler.table, filler.table.batch.listed(filler.cheapest(tau))
    found: list[tuple[int, list[int]]] = []
    rests, spaces, longest, free = list[float](), list[list[int]](), list[float](), table.devices
    opened = list[int]()
    for i in order:
        place, opening = -1, -1
        for k in [*cheapest[i], -1, *opened]:
            if k < 0:
                if opening >= 0:
                    break
                continue
            need, tokens = table.seconds(k)[i], table.batch.listed(table.alike(k))[i]
            own = sorted((rests[g], g) for g, (kind, _) in enumerate(found) if kind == k)
            own = [(rest, g) for rest, g in own if rest >= need]
            for rest, g in own:
                after_s = rest - need - paid_s(table, k, spaces[g], tokens)
                if need <= longest[g] and after_s >= 0:
                    place = g
                    break
            if place >= 0:
                rests[place] = after_s
                if table.dealt[k]:
                    spaces[place][0] = max(0, spaces[place][0] - tokens)
                else:
                    table.put(k, spaces[place], tokens)
                break
            if (
                opening < 0
                and table.width[k] <= free
                and need <= table.lines[k].usable_s(tau, need)
            ):
                opening = k
                if not join_any:
                    break
        if place >= 0:
            found[place][1].append(i)
            continue
        if opening < 0:
            return None
        need, tokens = table.seconds(opening)[i], table.batch.listed(table.alike(opening))[i]
        usable_s, held = table.lines[opening].usable(tau, need)
        staged = table.staged[opening]
        spaces.append([max(0, held - tokens) if staged else table.cap[opening] - tokens])
        rests.append(usable_s - need)
        longest.append(need if staged else float("inf"))
        found.append((opening, [i]))
        free -= table.width[opening]
        opened += [] if opening in opened else [opening]
    return [(k, sorted(members)) for k, members in found]


def paid_s(table: PriceTable, k: int, space: list[int], tokens: int) -> float:
    if tokens <= space[-1]:
        return 0.0
    return (tokens - space[0]) * table.share[k] if table.dealt[k] else table.c[k]


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_estimates_of_a_part_are_those_of_its_sequences(seed: int) -> None:
    """Catches samples that stand for others' sequences, or sequences that a part still has although
    they were placed: estimates are then no longer those that are made for the part alone."""
    table, rng = drawn(seed, stages=False), np.random.default_rng(seed)
    count, estimates = len(table.tokens), estimated(table)
    (waves,), (wave_s,) = estimates.likely(0 * estimates.all[None])
    assert (waves, wave_s) == (0, 0.0)
    placed = rng.choice(count, int(rng.integers(0, count)), replace=False).tolist()
    left = sorted(set(range(count)) - set(placed))
    part = estimates.without(estimates.all, placed)
    (waves,), (wave_s,) = estimates.likely(part[None])
    alone = estimated(alone_table(table, left))
    (same,), (same_s,) = alone.likely(alone.all[None])
    assert waves * wave_s == pytest.approx(same * same_s, rel=0.08)
    best, *_ = estimates.worth_trying(part)
    assert best.least_s <= best.guess_s
    assert best.count * best.guess_s == pytest.approx(waves * wave_s)
    (first, *_), one = np.eye(len(estimates.all)), WaveFiller(table, range(len(table)))
    assert estimates.worth_trying(first)[0].guess_s == pytest.approx(one.quickest_s(0))


def estimated(table: PriceTable) -> Estimates:
    return Estimates(WaveFiller(table, range(len(table))))


def alone_table(table: PriceTable, some: Sequence[int]) -> PriceTable:
    """Some sequences of a table without the others, by the same usual rows."""
    batch = SortedBatch.of(Lengths(tokens=tuple(table.tokens[i] for i in some)))
    alone = PriceTable(batch, table.schemes, table.devices)
    alone.rows = table.rows
    return alone


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, factor=st.floats(1.0, 3.0))
def test_what_a_wave_leaves_is_foretold(seed: int, factor: float) -> None:
    """Catches a forecast of waves that takes more than ranks have time for, the short before the
    long, or nothing: it would keep openings from being tried that are filled much better."""
    table = drawn(seed, stages=False)
    filler, estimates, count = (
        WaveFiller(table, range(len(table))),
        estimated(table),
        len(table.tokens),
    )
    time_s = factor * filler.quickest_s(0)
    (left,) = estimates.after(estimates.all, np.array([time_s]))
    _, rest = filler.fill(time_s * (1 + 1e-9), table.devices, range(count), whole=False)
    real = estimates.without(0 * estimates.all, rest) * -1
    assert np.all((left >= 0) & (left <= estimates.all))
    first = int(np.flatnonzero(left > 0)[0]) if left.any() else len(left)
    assert np.all(left[first + 1 :] == estimates.all[first + 1 :])

    def work_s(part: np.ndarray) -> float:
        return float(estimates.bare @ part)

    # Groups of whole sequences leave gaps, and such of different ones fill those of each other.
    assert abs(work_s(real) - work_s(left)) <= 0.5 * table.devices * time_s
    assert work_s(left) < work_s(estimates.all)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, factor=st.floats(0.6, 2.0), join_any=st.booleans(), ranks=st.integers(1, 40))
def test_sequences_that_follow_each_other_into_a_group_are_placed_as_one_by_one(
    seed: int, factor: float, join_any: bool, ranks: int
) -> None:
    """Catches a filling that keeps to a group although another is fuller and has room, or that goes
    on beyond its time or tokens: it is compared with one that looks for each sequence anew."""
    table = drawn(seed, stages=False)
    filler = WaveFiller(table, range(len(table)))
    time_s, order = factor * filler.quickest_s(0), range(len(table.tokens))
    found = filler.fill(time_s, ranks, order, join_any=join_any, whole=False)
    assert found == filled_plainly(filler, time_s, ranks, order, join_any=join_any)


def filled_plainly(
    filler: WaveFiller, time_s: float, ranks: int, order: Sequence[int], *, join_any: bool
) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """Each sequence to the group of least time left that holds it, scheme by scheme."""
    table, left = filler.table, list[int]()
    groups: list[tuple[int, list[int]]] = []
    rests, spare = list[float](), list[int]()
    for i in order:
        place, opened = -1, -1
        for k in filler.cheapest[i]:
            need, tokens = filler.seconds[k][i], filler.room[k][i]
            if need > time_s - table.c[k]:
                continue
            fits = [
                (rests[g], g)
                for g, (kind, _) in enumerate(groups)
                if kind == k
                and rests[g] >= need
                and spare[g] >= tokens
                and spare[g] > 0
                and rests[g] > 0
            ]
            if fits:
                place = min(fits)[1]
                break
            if opened < 0 and table.width[k] <= ranks:
                opened = k
                if not join_any:
                    break
        if place < 0 and opened >= 0:
            place = len(groups)
            groups.append((opened, []))
            rests.append(time_s - table.c[opened])
            spare.append(table.cap[opened])
            ranks -= table.width[opened]
        if place < 0:
            left.append(i)
            continue
        k, members = groups[place]
        members.append(i)
        rests[place] -= filler.seconds[k][i]
        spare[place] -= filler.room[k][i]
    return groups, left


@pytest.mark.parametrize("high_s", [1e5, float("inf")])
@pytest.mark.parametrize("part", [0.9, 0.1, 1e-4])
def test_a_time_far_above_the_bound_is_found(part: float, high_s: float) -> None:
    """Catches a search that ends without a time where steps by what is missing are too small."""

    def fill(tau: float, *, measured: bool = True) -> list[int] | float:
        return [0] if tau >= 9000 else part

    found = least_time(fill, 1.0, high_s, Effort(halvings=20))
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
