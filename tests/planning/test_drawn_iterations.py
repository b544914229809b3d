"""Iterations that choose their own samples."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.costs.group_costs import GroupCosts
from headrace.errors import DataError, InfeasiblePlan, SpecError
from headrace.planners.draw_bias import draw_bias
from headrace.planners.drawn_iterations import (
    DrawnIteration,
    DrawPosition,
    IterationDrawer,
    bucket_numbers,
)
from headrace.spec.draw_options import DrawOptions

LEVELS = ("none", "attention", "full")


def published(**changes: Any) -> GroupCosts:
    kappa = {1: 0.0, 2: 1e-5, 4: 2e-5, 8: 3e-5}
    given = {"a_s": 1e-8, "b_s": 1e-4, "c_s": 0.01, "cap_tokens": 1000, "kappa_s": kappa}
    return GroupCosts(**{**given, **changes})


def problem_of(devices: int = 8, planner: str = "dcp", **changes: Any) -> hr.Problem:
    return hr.Problem(costs=published(**changes), devices=devices, planner=planner)


def model_problem(devices: int, planner: str = "dcp", **changes: Any) -> hr.Problem:
    model = hr.Architecture.preset("llama-tiny")
    costs = hr.costs.roofline(model, "h100", devices=devices, memory_bytes=10**9)
    return hr.Problem(costs=costs, planner=planner, stages=False, **changes)


def pool(seed: int = 0, samples: int = 4000, longest: int = 7000) -> np.ndarray:
    """Lengths of which each is as frequent as it is short."""
    rng = np.random.default_rng(seed)
    return np.exp(rng.uniform(np.log(40), np.log(longest), samples)).astype(np.int64)


def loads_s(drawn: DrawnIteration, costs: GroupCosts) -> dict[tuple[int, ...], list[float]]:
    """Seconds of the launches of each group."""
    found = defaultdict(list)
    for launch in drawn.launches:
        tokens = [drawn.lengths.tokens[i] for i in launch.sequences]
        found[launch.ranks].append(costs.seconds(tokens, len(launch.ranks)))
    return dict(found)


@pytest.mark.parametrize("flow", ["dcp", "bucket"])
@pytest.mark.parametrize("of_a_model", [False, True])
def test_an_epoch_has_every_sample_once_in_plans_that_run(flow: Any, of_a_model: bool) -> None:
    """Catches samples lost at the end of a bucket or an epoch, groups that share ranks, launches of
    several buckets, and plans other than what was drawn."""
    problem = model_problem(8, flow) if of_a_model else problem_of(planner=flow)
    lengths = pool(samples=1500)
    drawer = IterationDrawer(problem, lengths, DrawOptions(flow=flow, bucket_ratio=2.0))
    seen = list[int]()
    for number, drawn in enumerate(drawer.epoch()):
        ids = drawn.lengths.ids
        seen += ids
        assert drawn.lengths.tokens == tuple(lengths[list(ids)].tolist())
        groups = {launch.ranks for launch in drawn.launches}
        ranks = [rank for own in groups for rank in own]
        assert len(ranks) == len(set(ranks)) <= 8
        if number % 5 == 0:
            plan = hr.plan(drawn.lengths, problem, generators=[drawn])
            assert plan.planner == flow
            assert {pipeline.ranks for pipeline in plan.pipelines} == groups
            found = sorted(tuple(sorted(one.sequences)) for one in plan.micro_batches)
            assert found == sorted(launch.sequences for launch in drawn.launches)
            assert hr.simulate(plan, problem.costs).seconds == pytest.approx(plan.predicted_s)
        for launch in drawn.launches:
            held = [drawn.lengths.tokens[i] for i in launch.sequences]
            assert len(set(bucket_numbers(np.array(held), 2.0).tolist())) == 1
    assert sorted(seen) == list(range(len(lengths)))
    assert drawer.position.epoch == 1


def test_accumulation_leaves_the_least_idle_share() -> None:
    """Catches equation 3 without its devices or in seconds: no other numbers of steps within T_max
    leave a smaller share of the devices' time idle. All samples of a bucket are equal here, so
    every choice can be tried."""
    costs = published()
    rng = np.random.default_rng(3)
    lengths = rng.choice([100, 450, 900, 3000, 7900], size=6000, p=[0.5, 0.2, 0.15, 0.1, 0.05])
    drawer = IterationDrawer(problem_of(), lengths, DrawOptions(least_steps=1, most_steps=4))
    tried = 0
    for _, drawn in zip(range(12), drawer.epoch(), strict=False):
        loads = loads_s(drawn, costs)
        latest_s = 4 * max(own[0] for own in loads.values())
        widths = [len(ranks) for ranks in loads]
        each_s = [own[0] for own in loads.values()]
        idle = _idle_share(widths, each_s, [len(own) for own in loads.values()])
        choices = [range(1, 1 + int(latest_s / one_s * (1 + 1e-9))) for one_s in each_s]
        if np.prod([len(own) for own in choices]) > 50_000:
            continue
        tried += 1
        best = min(_idle_share(widths, each_s, steps) for steps in product(*choices))
        # Groups of one bucket share their launches: some may have one fewer than they could.
        assert idle == pytest.approx(best, abs=1e-9)
    assert tried >= 3


def _idle_share(widths: list[int], each_s: list[float], steps: Any) -> float:
    """Share of the groups' device-seconds in which they wait for the last."""
    ends = [n * one_s for n, one_s in zip(steps, each_s, strict=True)]
    busy = sum(width * end for width, end in zip(widths, ends, strict=True))
    return 1 - busy / (sum(widths) * max(ends))


def test_steps_keep_to_their_limits() -> None:
    """Catches an iteration longer than G_max of its longest launch, and one whose groups all have
    fewer steps than G_min."""
    costs = published()
    for least, most in ((1, 1), (1, 3), (6, 2)):
        options = DrawOptions(least_steps=least, most_steps=most)
        drawer = IterationDrawer(problem_of(), pool(), options)
        for _, drawn in zip(range(8), drawer.epoch(), strict=False):
            loads = loads_s(drawn, costs)
            longest_s = max(own[0] for own in loads.values())
            if least <= most:
                assert max(map(sum, loads.values())) <= most * longest_s * (1 + 1e-9)
            assert max(map(len, loads.values())) >= least


def test_settings_have_the_best_throughput() -> None:
    """Catches equation 1 without its devices, or with a batch that memory does not hold."""
    costs = published()
    lengths = np.array([100] * 400 + [900] * 400 + [3900] * 400 + [7900] * 400)
    drawer = IterationDrawer(problem_of(), lengths, DrawOptions())
    for tokens, setting in zip(drawer.borders, drawer.settings, strict=True):
        each = {
            (p, batch): p * costs.seconds([tokens] * batch, p) / batch
            for p in costs.sizes
            for batch in range(1, 1 + min(400, costs.cap_tokens * p // tokens))
        }
        chosen = each[setting.width, setting.batch]
        assert chosen == pytest.approx(min(each.values()))


def test_fewer_layers_computed_again_take_smaller_batches_or_wider_groups() -> None:
    """Catches an intra flow that has the settings of the inter flow, and is no quicker."""
    lengths, found = pool(samples=6000, longest=60_000), {}
    for levels in (("full",), LEVELS):
        problem = model_problem(8, recompute=levels, holding=("replicated",))
        drawer = IterationDrawer(problem, lengths, DrawOptions())
        plans = [
            hr.plan(drawn.lengths, problem, generators=[drawn])
            for _, drawn in zip(range(6), drawer.epoch(), strict=False)
        ]
        found[levels] = sum(plan.lengths.total for plan in plans) / sum(
            plan.predicted_s for plan in plans
        )
    assert found[LEVELS] > 1.05 * found["full",]


def test_a_launch_of_bucket_parallel_takes_no_longer_than_one_of_the_longest() -> None:
    """Catches full batches of short samples, for which the longest would wait, and groups of
    several sizes."""
    costs, lengths = published(), pool()
    longest_s = costs.seconds([int(lengths.max())], 8)
    drawer = IterationDrawer(problem_of(16), lengths, DrawOptions(flow="bucket"))
    for drawn in drawer.epoch():
        loads = loads_s(drawn, costs)
        assert {len(ranks) for ranks in loads} == {8}
        assert all(len(own) == 1 for own in loads.values())
        assert max(map(sum, loads.values())) <= longest_s * (1 + 1e-9)
    wide = DrawOptions(flow="bucket", width=4)
    with pytest.raises(InfeasiblePlan, match="groups of 4"):
        IterationDrawer(problem_of(16), lengths, wide)
    with pytest.raises(InfeasiblePlan, match="groups of 4 of 2 ranks"):
        IterationDrawer(problem_of(2), [10, 20], wide)


def test_another_number_of_ranks_takes_over_an_epoch() -> None:
    """Catches samples that are repeated or lost where a run goes on with other ranks, and a
    position that does not survive JSON; with the same ranks the same iterations must follow."""
    lengths, options = pool(), DrawOptions(seed=5)
    drawer = IterationDrawer(problem_of(8), lengths, options)
    seen = [i for _ in range(3) for i in drawer.draw().lengths.ids]
    position = DrawPosition.from_json(drawer.position.to_json())
    again = IterationDrawer(problem_of(8), lengths, options)
    again.restore(position)
    assert again.draw() == drawer.draw()
    fewer = IterationDrawer(problem_of(16), lengths, options)
    fewer.restore(position)
    rest = [i for drawn in fewer.epoch() for i in drawn.lengths.ids]
    assert sorted([*seen, *rest]) == list(range(len(lengths)))


def test_epochs_have_orders_of_their_own() -> None:
    """Catches an order that does not depend on the epoch or the seed, and one that does not depend
    on these alone."""

    def drawn(seed: int) -> list[DrawnIteration]:
        drawer = IterationDrawer(problem_of(), pool(samples=300), DrawOptions(seed=seed))
        return [*drawer.epoch(), *drawer.epoch()]

    first = drawn(1)
    assert first == drawn(1)
    orders = {
        (seed, epoch): [i for one in own if one.epoch == epoch for i in one.lengths.ids]
        for seed, own in ((1, first), (2, drawn(2)))
        for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4


@pytest.mark.parametrize("flow", ["dcp", "bucket"])
def test_buckets_go_through_the_epoch_together(flow: Any) -> None:
    """Catches buckets drawn alike whatever is in them, which brings the rare ones early, and wide
    groups that come last as they seldom fit: samples of all lengths come in the middle of the epoch
    on average."""
    lengths = pool(samples=20_000)
    drawer = IterationDrawer(problem_of(16), lengths, DrawOptions(flow=flow, bucket_ratio=2.0))
    bias = draw_bias([drawn.lengths for drawn in drawer.epoch()])
    assert sum(place.samples for place in bias.buckets) == len(lengths)
    for place in bias.buckets:
        assert place.position == pytest.approx(0.5, abs=0.06)


def test_bias_is_seen() -> None:
    """Catches a measure that calls any order unbiased: short samples first, and batches of one
    length each, beside random batches."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(pool())
    even = draw_bias([hr.Lengths.of(own) for own in np.split(lengths, 40)])
    assert even.distance == pytest.approx(even.random_distance, rel=0.15)
    assert max(abs(p.position - 0.5) / p.error for p in even.buckets) < 4
    rising = draw_bias([hr.Lengths.of(own) for own in np.split(np.sort(lengths), 40)])
    places = [place.position for place in rising.buckets]
    assert places == sorted(places)
    assert places[0] < 0.1
    assert places[-1] > 0.9
    assert rising.distance > 5 * rising.random_distance
    assert even.tokens_deviation < rising.tokens_deviation
    with pytest.raises(DataError, match="iterations"):
        draw_bias([])


def test_what_cannot_be_drawn_is_refused() -> None:
    """Catches iterations for ranks that wait for each other at every layer, samples that fit
    nowhere, options that say nothing, and positions of other samples."""
    with pytest.raises(SpecError, match="lockstep"):
        IterationDrawer(model_problem(8, semantics="lockstep"), pool(), DrawOptions())
    pipelines = hr.Problem(costs=hr.costs.published("hydraulis-32b"), devices=64)
    with pytest.raises(SpecError, match="pipelines"):
        IterationDrawer(pipelines, [100], DrawOptions())
    with pytest.raises(InfeasiblePlan, match="9,000 tokens"):
        IterationDrawer(problem_of(), [9000, 10], DrawOptions())
    with pytest.raises(DataError, match="lengths"):
        IterationDrawer(problem_of(), [10, 0], DrawOptions())
    for changes in (
        {"flow": "packed"},
        {"most_steps": 0},
        {"bucket_ratio": 1.0},
        {"width": 4},
    ):
        with pytest.raises(SpecError):
            DrawOptions(**changes)
    drawer = IterationDrawer(problem_of(), [10, 20, 400], DrawOptions())
    for taken in ((0, 0), (0, 0, 9), (1, 1, 1)):
        with pytest.raises(DataError, match="position"):
            drawer.restore(DrawPosition(taken=taken))
