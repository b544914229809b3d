"""The strategies of a whole run."""

from __future__ import annotations

import json

import pytest

from headrace.costs import FORMULA_METHODS, synthetic_costs
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem
from headrace.planning.strategies import Schemes, Strategist
from headrace.spec import Strategy
from headrace.units import GIB
from planning.worlds import log_normal

TEXTS = ("1*tp2 + 2*cp1", "1*pp2 + 1*cp2", "1*tp2-pp2")
STRATEGIES = tuple(map(Strategy.parse, TEXTS))


def schemes_of(devices: int = 4, memory_gib: float = 40) -> Schemes:
    costs = synthetic_costs(devices, 4, memory_bytes=int(memory_gib * GIB), methods=FORMULA_METHODS)
    return Schemes(Problem(costs=costs, devices=devices))


def test_turns_are_taken_step_by_step_and_across_a_resumption() -> None:
    """Catches a turn that is lost with a restart, or that planning a step twice gives away."""
    schemes = schemes_of()
    whole = Strategist(strategies=STRATEGIES, rotate=True)
    seen = []
    for step in range(5):
        made = whole.plan(schemes, log_normal(30, step))
        assert whole.plan(schemes, log_normal(30, step)).hash == made.hash
        seen.append(str(made.strategy))
        whole.done()
    assert seen == [*TEXTS, *TEXTS[:2]]
    resumed = Strategist(strategies=STRATEGIES, rotate=True)
    resumed.restore(json.loads(json.dumps(whole.state())), 4)
    assert str(resumed.plan(schemes, log_normal(30, 5)).strategy) == TEXTS[2]


def test_candidates_are_proposed_once_and_kept() -> None:
    """Catches candidates proposed anew from other batches after a restart: other plans."""
    asked = []

    def samples() -> list[tuple[int, ...]]:
        asked.append(1)
        return [log_normal(30, seed, longest=9000).tokens for seed in range(2)]

    schemes = schemes_of(memory_gib=6)
    first = Strategist(samples=samples)
    plans = [first.plan(schemes, log_normal(30, seed, longest=9000)) for seed in range(3)]
    assert asked == [1]
    resumed = Strategist(samples=lambda: [[100] * 50])
    resumed.restore(json.loads(json.dumps(first.state())), 4)
    again = [resumed.plan(schemes, log_normal(30, seed, longest=9000)) for seed in range(3)]
    assert [made.hash for made in again] == [made.hash for made in plans]


def test_candidates_of_more_ranks_are_not_taken() -> None:
    """Catches a run that goes on with fewer ranks and plans for those it had."""
    small = Strategist(samples=lambda: [[100] * 9])
    small.restore({"strategies": list(TEXTS), "steps": 7}, 2)
    assert small.plan(schemes_of(2), log_normal(9, 1)).devices == 2
    given = Strategist(strategies=STRATEGIES[:1])
    given.restore({"strategies": ["4*cp1"], "steps": 7}, 4)
    assert given.strategies == STRATEGIES[:1]


def test_each_must_fit_where_they_take_turns() -> None:
    """Catches a run that stops at the first long sequence in the wrong turn."""
    schemes = schemes_of(memory_gib=5)
    some = (Strategy.parse("1*cp4"), Strategy.parse("4*cp1"))
    longest = 20_000
    Strategist(strategies=some).require(schemes, longest)
    with pytest.raises(InfeasiblePlan, match="cp1"):
        Strategist(strategies=some, rotate=True).require(schemes, longest)
    with pytest.raises(InfeasiblePlan, match="3\\*tp2"):
        Strategist(strategies=(Strategy.parse("3*tp2"),)).require(schemes, 10)
