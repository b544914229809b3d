"""Which strategies are candidates."""

from __future__ import annotations

import time

import pytest

from headrace.costs import FORMULA_METHODS, Speeds, synthetic_costs
from headrace.planning import Problem
from headrace.planning.strategies import Schemes, plan_strategy, propose_strategies
from headrace.planning.strategies.propose import homogeneous
from headrace.spec import Lengths, Strategy
from headrace.units import GIB
from planning.worlds import log_normal


def problem_of(devices: int, memory_gib: int = 8) -> Problem:
    costs = synthetic_costs(devices, 6, memory_bytes=memory_gib * GIB, methods=FORMULA_METHODS)
    return Problem(costs=costs, devices=devices)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 16])
def test_candidates_fill_the_ranks_and_are_the_same_again(devices: int) -> None:
    """Catches strategies for more ranks than there are, schemes without costs, none of one scheme,
    and dice that no seed holds."""
    problem = problem_of(devices)
    sampled = [log_normal(30, seed, longest=6000).tokens for seed in range(3)]
    found = propose_strategies(problem, sampled, 1)
    schemes = Schemes(problem)
    if devices <= 8:
        assert set(homogeneous(schemes)) <= set(found)
    assert len(set(found)) == len(found)
    for strategy in found:
        schemes.require(strategy)
        assert len(strategy.counts) == 1 or strategy.devices == devices
    if devices > 2:
        assert any(len(strategy.counts) > 1 for strategy in found)
    assert propose_strategies(problem_of(devices), sampled, 1) == found


def test_candidates_are_good_for_other_batches() -> None:
    """Catches a proposal that is no better than one scheme for all, where lengths differ."""
    costs = synthetic_costs(
        8, 6, memory_bytes=6 * GIB, methods=FORMULA_METHODS,
        speeds=Speeds(link_bytes_per_s=5e9),
    )  # fmt: skip
    problem = Problem(costs=costs, devices=8)
    schemes = Schemes(problem)
    batches = [Lengths.of([25_000 + 500 * seed, *[700] * 200]) for seed in range(5)]
    found = propose_strategies(problem, [batches[0].tokens], 0, schemes=schemes)
    for lengths in batches[1:3]:
        best, fixed = (
            plan_strategy(problem, lengths, strategies=some, schemes=schemes).predicted_s
            for some in (found, tuple(homogeneous(schemes)))
        )
        assert best < 0.9 * fixed


def test_longer_sequences_ask_for_roomier_schemes() -> None:
    """Catches a proposal from the lengths of one batch alone: shorter ones need other strategies,
    longer ones must fit."""
    problem = problem_of(4, 5)
    found = propose_strategies(problem, [[30_000, 500, 400], [500] * 40])
    for lengths in ([30_000, 500, 400], [500] * 40):
        made = plan_strategy(problem, Lengths.of(lengths), strategies=found)
        assert made.gap < 0.6
    widths = {max(s.devices for s, _ in strategy.counts) for strategy in found}
    assert {1, 4} <= widths


def test_a_large_world_is_searched_instead() -> None:
    """Catches an enumeration that grows with the ranks, and candidates for the longest sequences
    alone: batches without them are quicker on single ranks."""
    before = time.process_time()
    problem = problem_of(64)
    found = propose_strategies(problem, [log_normal(300, 1, longest=9000).tokens])
    assert time.process_time() - before < 30
    assert Strategy.parse("64*cp1") in found
    assert 10 < len(found) < 60
    for longest in (400, 9000):
        made = plan_strategy(problem, log_normal(300, 2, longest), strategies=found)
        assert made.lengths.longest <= longest
