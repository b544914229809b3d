"""What planning expects of pulls and pushes, and how it hides them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.costs import CostModel, ExchangeCost, synthetic_costs
from headrace.planning import Problem, plan
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.model_source import laid_out
from headrace.planning.schedule import Assignment
from headrace.simulator import micro_batch_seconds, simulate, step_s
from headrace.spec import Lengths, compile_plan
from planning.worlds import log_normal


def priced(devices: int, pull_s: float, lengths: Lengths) -> tuple[CostModel, PriceTable]:
    """A table of groups where pulls take ``pull_s`` and pushes twice as long."""
    costs = synthetic_costs(devices, 8).replace(
        exchange_s=ExchangeCost(pull_s=pull_s, push_s=2 * pull_s, update_s=1e-3)
    )
    schemes = Problem(costs=costs, devices=devices).pricing.groups("replicated")
    batch = SortedBatch.of(lengths)
    unhidden = sum(costs.shape.bucket_shares[:2])
    table = PriceTable(batch, schemes, devices, exchange=costs.exchange_s, unhidden=unhidden)
    return costs, table


@pytest.mark.parametrize("pull_s", [1e-4, 0.02, 0.3])
def test_what_is_expected_is_about_what_is_simulated(pull_s: float) -> None:
    """Catches a forward or a backward that hides what it does not, or not what it does."""
    costs, table = priced(4, pull_s, log_normal(60, 1, longest=20_000))
    halves = [list(range(rank, 60, 4)) for rank in range(4)]
    side = Assignment.of(table, [(0, (rank,), own) for rank, own in enumerate(halves)], "drawn")
    two = table.width.index(2)
    below = [(two, (0, 1), halves[0]), (two, (2, 3), halves[1])]
    nested = Assignment.of(table, [*below, (0, (0,), halves[2]), (0, (3,), halves[3])], "drawn")
    for schedule in (side, nested):
        expected_s = schedule.expected_s + 1e-3
        simulated_s = laid_out(schedule, costs).predicted_s
        assert schedule.seconds <= schedule.expected_s
        assert expected_s == pytest.approx(simulated_s, rel=0.12)


def test_pipelines_start_and_end_with_their_longest() -> None:
    """Catches an order that leaves pulls or pushes beside short micro-batches."""
    lengths = Lengths.of([30_000, 9000, 8000, *[500] * 6])
    costs, table = priced(1, 0.05, lengths)
    bins = [[0], [1, 2], [3, 4], [5, 6], [7, 8]]
    schedule = Assignment.of_bins(table, [(0, (0,), bins)], "drawn")
    made = laid_out(schedule, costs)
    times = micro_batch_seconds(made, costs)
    assert max(times) == times[-1]
    assert sorted(times)[-2] == times[0]
    turned = made.replace(micro_batches=made.micro_batches[1:] + made.micro_batches[:1])
    assert step_s(made, costs) < step_s(turned, costs)
    programs = compile_plan(made, costs.shape.bucket_count)
    assert simulate(programs, made, costs).seconds == pytest.approx(made.predicted_s, rel=1e-9)


@pytest.mark.parametrize("devices", [4, 6])
def test_weights_that_stay_where_they_are_stored_hide_nothing(devices: int) -> None:
    """Catches a short step that moves all weights although one group of all devices would work with
    its own rows, and one that is planned so although weights move then, too."""
    costs = synthetic_costs(devices, 8).replace(
        exchange_s=ExchangeCost(pull_s=1.0, push_s=2.0, update_s=1e-3, sharded_share=1e-3)
    )
    lengths = Lengths.of([700, 300])
    made = plan(Problem(costs=costs, devices=devices), lengths)
    assert (made.working, str(made.strategy)) == ("sharded", f"1*cp{devices}")
    assert made.lower_bound_s <= made.predicted_s < 1.0
    all_move = costs.replace(exchange_s=replace(costs.exchange_s, sharded_share=1.0))
    made = plan(Problem(costs=all_move, devices=devices), lengths)
    assert made.predicted_s >= made.lower_bound_s >= 3.0


def test_few_tokens_for_many_weights_are_packed_to_hide_them() -> None:
    """Catches a choice by computing alone: groups whose last micro-batches are short."""
    costs = synthetic_costs(16, 8).replace(
        exchange_s=ExchangeCost(pull_s=0.05, push_s=0.1, update_s=1e-3)
    )
    free = costs.replace(exchange_s=ExchangeCost())
    ratios = []
    for seed in range(6):
        lengths = log_normal(80, seed, longest=20_000)
        made = plan(Problem(costs=costs, devices=16), lengths)
        blind = plan(Problem(costs=free, devices=16), lengths)
        ratios.append(made.predicted_s / step_s(blind, costs))
    assert max(ratios) <= 1 + 1e-9
    assert float(np.mean(ratios)) < 0.995
