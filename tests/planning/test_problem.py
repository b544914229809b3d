"""Problems."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.costs import synthetic_costs
from headrace.errors import SpecError
from headrace.planning import Problem, plan
from headrace.spec import Lengths


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"semantics": "lockstep"}, "not supported by this planner"),
        ({"devices": 3}, "got 3, wanted 4"),
        ({"sizes": (1, 9)}, "one with costs"),
        ({"methods": ("ulyses_z",)}, "did you mean 'ulysses_z'"),
        ({"methods": ("metp",)}, "known are local, ulysses_z"),
        ({"methods": ()}, "at least one layer option"),
        ({"recompute": ()}, "at least one layer option"),
    ],
)
def test_choices_that_do_not_exist(changes: dict[str, Any], text: str) -> None:
    """Catches accepting what is then ignored."""
    fields: dict[str, Any] = {"costs": synthetic_costs(4), "devices": 4}
    with pytest.raises(SpecError, match=text):
        Problem(**(fields | changes))


def test_costs_without_a_small_enough_size() -> None:
    """Catches an empty search in place of an error."""
    costs = synthetic_costs(2, sizes=(4,))
    with pytest.raises(SpecError, match=r"one of at most 2"):
        Problem(costs=costs, devices=2)


def test_restrictions_are_kept() -> None:
    """Catches a restriction that only some of the planner's parts know."""
    costs = synthetic_costs(4, layers=8, memory_bytes=12 * 2**30)
    lengths = Lengths.of([30_000, 20_000, 700, 600, 20])
    problem = Problem(costs=costs, devices=4, sizes=(2, 4), recompute=("full",))
    made = plan(problem, lengths)
    assert {len(p.ranks) for p in made.pipelines} <= {2, 4}
    assert {o.recompute for m in made.micro_batches for o in m.layers.options} == {"full"}
    local = plan(Problem(costs=costs, devices=4, methods=("local",)), Lengths.of([900, 30]))
    assert {len(p.ranks) for p in local.pipelines} == {1}
