"""ParaDySe's Algorithm 1, beside the exact choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import CostModel, Linear, OptionCost, Quadratic, synthetic_costs
from headrace.errors import SpecError
from headrace.planners.paradyse import StrategySelector
from headrace.planning.layer_choice import best_layers
from planning.test_layers import layer_costs


def constant(options: dict[str, tuple[float, float, float]], layers: int, free: int) -> CostModel:
    """Costs of (seconds, kept, passing) of one layer whatever the pack, and ``free`` bytes."""
    nothing = OptionCost(
        forward=Quadratic(), backward=Quadratic(), kept=Linear(), transient=Linear()
    )
    costs = synthetic_costs(1, layers=layers)
    return costs.replace(
        options={
            1: {
                text: replace(
                    nothing,
                    forward=Quadratic(c=seconds),
                    kept=Linear(constant=kept),
                    transient=Linear(constant=passing),
                )
                for text, (seconds, kept, passing) in options.items()
            }
        },
        ends={1: nothing},
        state_bytes=0,
        working_bytes={1: {"replicated": 0, "sharded": 0}},
        cluster=replace(costs.cluster, memory_bytes=free),
    )


THREE = {"metp+full": (4, 1, 0), "megatron_ts": (1, 6, 0), "ulysses_z": (2, 4, 0)}


def selector(costs: CostModel, **changes) -> StrategySelector:
    return StrategySelector(costs=costs, p=1, **changes)


@settings(max_examples=200, deadline=None)
@given(
    layer_costs(),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(["sum", "peak"]),
)
def test_the_exact_choice_is_never_worse(costs: CostModel, lengths: list[int], memory) -> None:
    """Catches an algorithm that says it fits what does not, or that beats what cannot be beaten:
    then one of the two is wrong."""
    found = selector(costs, memory=memory).select(lengths)
    assert found.seconds == pytest.approx(sum(costs.micro_batch_s(lengths, 1, found.layers)))
    if not found.fits:
        return
    needed = costs.micro_batch_bytes(sum(lengths), 1, found.layers)
    assert needed <= costs.capacity_bytes
    exact = best_layers(costs, lengths, 1)
    assert exact is not None
    assert sum(costs.micro_batch_s(lengths, 1, exact)) <= found.seconds * (1 + 1e-9)
    assert len(found.layers.counts) <= 2


def test_mixing_three_is_strictly_better() -> None:
    """Catches an Algorithm 1 that is better than printed: where only one layer of each of three
    strategies uses the memory up, two strategies take eight seconds in place of seven."""
    costs = constant(THREE, 3, 11)
    found = selector(costs).select([5])
    assert found.fits
    assert found.seconds == 8
    exact = best_layers(costs, [5], 1)
    assert exact is not None
    assert sum(costs.micro_batch_s([5], 1, exact)) == 7


def test_adding_what_is_needed_in_passing_is_strictly_worse() -> None:
    """Catches a sum rule that is a peak: four layers that need five bytes in passing do not fit
    twenty bytes by their sum, but one at a time they do."""
    costs = constant({"ulysses_z": (1, 3, 5), "ulysses_z+full": (2, 1, 1)}, 4, 20)
    assert str(selector(costs, memory="peak").select([5]).layers) == "4*ulysses_z"
    assert str(selector(costs).select([5]).layers) == "2*ulysses_z 2*ulysses_z+full"


def test_the_search_is_as_printed() -> None:
    """Catches a search that is set back for every k: the first strategy never meets the third,
    though 1 and 2 layers of them would take 9 seconds instead of 11.9."""
    costs = constant({"a": (1, 10, 0), "b": (3.9, 9, 0), "c": (4, 1, 0)}, 3, 12)
    found = selector(costs).select([5])
    assert (str(found.layers), found.seconds) == ("1*b 2*c", 11.9)
    exact = best_layers(costs, [5], 1)
    assert exact is not None
    assert sum(costs.micro_batch_s([5], 1, exact)) == 9


def test_strategies_that_are_worse_in_both_are_dropped() -> None:
    """Catches a sort by memory, and a strategy that wastes rounds of the search."""
    costs = constant({**THREE, "megatron_cz": (2, 4, 1), "colossal_z": (9, 9, 9)}, 3, 11)
    texts = [str(option) for option in selector(costs).strategies([5])]
    assert texts == ["megatron_ts", "ulysses_z", "metp+full"]


def test_the_fastest_is_taken_at_once_and_the_thriftiest_at_last() -> None:
    """Catches the printed slip, by which line 29 undoes the early end of line 10."""
    plenty = selector(constant(THREE, 3, 18)).select([5])
    assert (str(plenty.layers), plenty.fits) == ("3*megatron_ts", True)
    nothing = selector(constant(THREE, 3, 2)).select([5])
    assert (str(nothing.layers), nothing.fits) == ("3*metp+full", False)


def test_equal_packs_are_looked_up() -> None:
    """Catches a cache by tokens alone, under which long documents get the layers of short ones."""
    options = {"a": (1, 0, 0), "b": (2, 0, 0)}
    costs = constant(options, 2, 10)
    squares = {"a": Quadratic(a=1.0), "b": Quadratic(b=6.0)}
    costs = costs.replace(
        options={
            1: {
                text: replace(cost, forward=squares[text])
                for text, cost in costs.options[1].items()
            }
        }
    )
    chosen = selector(costs)
    assert str(chosen.select([4, 4]).layers) == "2*a"
    assert str(chosen.select([8]).layers) == "2*b"
    assert chosen.select([4, 4]) is chosen.select([4, 4])


def test_smoothing_keeps_what_is_hardly_slower_and_fits() -> None:
    """Catches a smoothing that never lets go, and one that asks the seconds of another pack."""

    def both(growth: float) -> CostModel:
        costs = constant({"fast": (10, 9, 0), "slow": (10.4, 1, 0)}, 2, 100)
        grown = replace(costs.options[1]["fast"], kept=Linear(slope=growth))
        return costs.replace(options={1: {**costs.options[1], "fast": grown}})

    for gamma, after in ((0.05, "2*slow"), (0.03, "2*fast"), (0.0, "2*fast")):
        chosen = selector(both(10.0), gamma=gamma)
        assert str(chosen.select([20]).layers) == "2*slow", "fast does not fit twenty tokens"
        assert str(chosen.select([2]).layers) == after, gamma
    chosen = selector(both(10.0), gamma=0.05)
    assert str(chosen.select([2]).layers) == "2*fast"
    assert str(chosen.select([20]).layers) == "2*slow", "what was kept must fit"


def test_choices_that_do_not_exist() -> None:
    """Catches a word that is taken for the other rule."""
    with pytest.raises(SpecError, match="memory rule"):
        selector(constant(THREE, 3, 11), memory="most")
    with pytest.raises(SpecError, match="gamma"):
        selector(constant(THREE, 3, 11), gamma=-0.1)
