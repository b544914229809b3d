"""The choice of axes against every other choice, and against its formulas."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InfeasiblePlan, SpecError
from headrace.spec.axes import AxisChoice, AxisPlan, MixingStage, plan_axes, split_batch

GB_S = 1e9


def transfer_s(sent: float) -> float:
    return 1e-5 + sent / GB_S


def planned(mixes: list[str], sizes: dict[str, int], ranks: int, **options: object) -> AxisPlan:
    stages = [MixingStage(mixes=tuple(m), work_s=0.0) for m in mixes]
    given: dict[str, object] = {"tensor_bytes": 1e6, "transfer_s": transfer_s} | options
    return plan_axes(stages, sizes, ranks, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("axes", "rounds"), [("ab", 6), ("abc", 6), ("abcd", 6), ("abcde", 4)])
def test_switches_of_axes_in_turn(axes: str, rounds: int) -> None:
    """Catches a switch at every boundary: looking ahead takes K / (K - 1) for K stages."""
    plan = planned(list(axes) * rounds, dict.fromkeys(axes, 64), 8)
    count = len(axes) * rounds
    # The axis of the input is free, so the first K - 1 stages need none.
    assert plan.switches == math.ceil((count - (len(axes) - 1)) / (len(axes) - 1))
    assert plan.sent_bytes == pytest.approx(plan.switches * 1e6 * 7 / 64)
    assert all(c.axis not in m for c, m in zip(plan.choices, list(axes) * rounds, strict=True))


def test_a_batch_needs_no_switch() -> None:
    """Catches an axis that is exchanged where samples are enough for all ranks."""
    plan = planned(list("ts") * 4, {"b": 8, "t": 16, "s": 64}, 8)
    assert plan.switches == 0
    assert {choice.axis for choice in plan.choices} == {"b"}
    assert plan.sent_bytes == 0


def test_an_axis_that_is_too_small_is_left_alone() -> None:
    """Catches ranks without work where another axis has places for all."""
    plan = planned(["x"] * 3, {"x": 64, "t": 3, "s": 64}, 4)
    assert {choice.axis for choice in plan.choices} == {"s"}
    few = planned(["s"] * 3, {"s": 64, "t": 3}, 4, empty=True)
    assert {choice.axis for choice in few.choices} == {"t"}
    with pytest.raises(InfeasiblePlan, match=r"stage 0, which mixes s.*wanted another axis"):
        planned(["s"] * 3, {"s": 64, "t": 3}, 4)


def test_what_mixes_everything() -> None:
    """Catches a joint attention that cannot be run, and the dearer of two ways."""
    sizes, stages = {"t": 64, "s": 64}, ["s", "ts", "t"]
    plan = planned(stages, sizes, 8, heads=16)
    assert [c.method for c in plan.choices] == ["none", "ulysses", "none"]
    assert planned(stages, sizes, 8, heads=4).choices[1].method == "ring"
    # Bytes of both are equal on two ranks, where a ring's 2 M / N are 4 M / N^2.
    assert planned(["ts"], sizes, 2, heads=2).sent_bytes == pytest.approx(1e6)
    with pytest.raises(InfeasiblePlan, match="stage 1"):
        planned(stages, sizes, 8)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "c", "ab", "abc"]), min_size=1, max_size=5),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 5),
    st.lists(st.floats(0, 0.01), min_size=5, max_size=5),
    st.sampled_from([None, "a", "c"]),
    st.sampled_from([None, "b"]),
)
def test_no_other_choice_is_quicker(
    mixes: list[str],
    sizes: tuple[int, int, int],
    ranks: int,
    works: list[float],
    entry: str | None,
    exit_: str | None,
) -> None:
    """Catches a program that misses a way: every choice of axes and methods is tried."""
    axes = dict(zip("abc", sizes, strict=True))
    stages = [MixingStage(mixes=tuple(m), work_s=w) for m, w in zip(mixes, works, strict=False)]

    def seconds(choices: tuple[AxisChoice, ...]) -> float:
        total, last = 0.0, entry or choices[0].axis
        for stage, choice in zip(stages, choices, strict=True):
            mixed = choice.axis in stage.mixes and ranks > 1
            if mixed != (choice.method != "none"):
                return math.inf
            total += stage.work_s * math.ceil(axes[choice.axis] / ranks) / axes[choice.axis]
            factor = {"none": 0, "ulysses": 4 / ranks, "ring": 2}[choice.method]
            if factor:
                total += transfer_s(factor * 1e6 * (ranks - 1) / ranks)
            moved = choice.axis != last and ranks > 1
            total += transfer_s(1e6 * (ranks - 1) / ranks**2) if moved else 0.0
            last = choice.axis
        moved = exit_ is not None and last != exit_ and ranks > 1
        return total + (transfer_s(1e6 * (ranks - 1) / ranks**2) if moved else 0.0)

    each = [AxisChoice(axis=a, method=m) for a in "abc" for m in ("none", "ulysses", "ring")]  # type: ignore[arg-type]
    best = min(map(seconds, itertools.product(each, repeat=len(stages))))
    plan = plan_axes(
        stages,
        axes,
        ranks,
        tensor_bytes=1e6,
        transfer_s=transfer_s,
        heads=8,
        entry=entry,
        exit_=exit_,
        empty=True,
    )
    assert plan.seconds == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert seconds(plan.choices) == pytest.approx(plan.seconds, rel=1e-9, abs=1e-15)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 16))
def test_parts_of_a_batch(batch: int, places: int, ranks: int) -> None:
    """Catches ranks without work, and a busier rank than another split has."""
    loads = {
        parts: math.ceil(batch / parts) * math.ceil(places / (ranks // parts))
        for parts in range(1, ranks + 1)
        if ranks % parts == 0 and parts <= batch and ranks // parts <= places
    }
    if not loads:
        with pytest.raises(InfeasiblePlan, match="a place for each"):
            split_batch(batch, places, ranks)
        return
    assert loads[split_batch(batch, places, ranks)] == min(loads.values())


def test_wrong_questions_are_refused() -> None:
    """Catches a traceback from within the program."""
    with pytest.raises(SpecError, match="axis x"):
        planned(["x"], {"x": 0}, 2)
    with pytest.raises(SpecError, match="got z"):
        planned(["x"], {"x": 4}, 2, entry="z")
    with pytest.raises(SpecError, match="stages"):
        planned([], {"x": 4}, 2)
    with pytest.raises(SpecError, match="each once"):
        MixingStage(mixes=("a", "a"))
