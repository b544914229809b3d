"""Numbers over steps: thinned, smoothed, summed up, warned of."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.report.headline import cards
from headrace.report.records import RelativeErrors, Run
from headrace.report.run_reader import read_run
from headrace.report.run_summary import mean, median, summed_up
from headrace.report.warnings import warnings

pytest.importorskip("altair")
from headrace.report.charts.step_charts import every, series


def with_losses(run: Run, losses: list[float]) -> Run:
    steps = tuple(replace(run.steps[0], step=i, loss=loss) for i, loss in enumerate(losses))
    return replace(run, steps=steps)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_run(folder)


@pytest.mark.parametrize("count", [1, 2, 1999, 2000, 2001, 5003])
def test_thinning_keeps_the_mean_and_the_ends(run: Run, count: int) -> None:
    """Catches steps dropped between buckets, and more points than may be drawn."""
    losses = np.random.default_rng(0).normal(3, 1, count)
    points = series(with_losses(run, losses.tolist()), lambda s: s.loss)
    assert len(points) == min(count, 2000)
    assert points[0].step == 0
    steps = [p.step for p in points] + [count]
    total = sum((b - a) * (p.value or 0) for p, a, b in zip(points, steps, steps[1:], strict=False))
    assert total == pytest.approx(losses.sum(), rel=1e-3)


def test_gaps_stay_gaps(run: Run) -> None:
    """Catches a loss that is not a number drawn as a number, or breaking JSON."""
    points = series(with_losses(run, [1.0, nan, 3.0]), lambda s: s.loss)
    assert [p.value for p in points] == [1.0, None, 3.0]


def test_an_outlier_does_not_bend_the_line(run: Run) -> None:
    """Catches smoothing by means alone."""
    losses = [2.0] * 60
    losses[30] = 1e6
    assert {p.smooth for p in series(with_losses(run, losses), lambda s: s.loss)} == {2.0}


@given(st.integers(1, 5000), st.integers(2, 50))
def test_every_spreads_and_keeps_the_last(count: int, limit: int) -> None:
    """Catches the newest steps being cut off."""
    steps = list(range(count))
    kept = every(steps, limit)  # type: ignore[type-var]
    assert len(kept) == min(count, limit)
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert list(kept) == sorted(set(kept))


def test_medians_and_means_skip_what_is_missing() -> None:
    """Catches NaN poisoning a headline."""
    assert median([nan, 1.0, 3.0]) == 2.0
    assert isnan(median([nan]))
    assert mean([nan, 1.0, 2.0], [5.0, 1.0, 3.0]) == 1.75
    assert isnan(mean([], []))


def test_headline_by_hand(run: Run) -> None:
    """Catches the warm-up step in rates, and ratios of means where sums are meant."""
    top = summed_up(run)
    rest = run.steps[1:]
    assert top.tokens_per_s == pytest.approx(
        sum(s.tokens for s in rest) / sum(s.step_s for s in rest)
    )
    planned = [s.planned for s in rest]
    assert top.against_static == pytest.approx(
        sum(p.best_static_s for p in planned) / sum(p.predicted_s for p in planned)
    )
    assert top.error == np.median([abs(s.planned.predicted_s / s.step_s - 1) for s in rest])
    assert top.peak[0] == max(max(s.peak_bytes) for s in run.steps)
    assert isnan(top.mfu)


def test_the_gain_is_over_the_best_static_plan_of_each_step(run: Run) -> None:
    """Catches steps without a comparison that count as if they were compared, or give their name
    to it, and the best of each step told as if it were one choice."""
    planned = replace(run.steps[0].planned, predicted_s=2.0)
    known = replace(planned, best_static_s=3.0, best_static="2*cp2")
    unknown = replace(planned, best_static_s=nan, best_static="unknown")
    steps = tuple(
        replace(run.steps[0], planned=own) for own in (unknown, unknown, known, unknown, unknown)
    )
    top = summed_up(replace(run, steps=steps))
    assert (top.best_static, top.against_static) == ("2*cp2", 1.5)
    gain = cards(top)[0]
    assert (gain.name, gain.value) == ("gain", "1.50")
    assert gain.remark == "the best size of each step, mostly 2*cp2, both predicted"
    top = summed_up(replace(run, steps=(steps[0],)))
    assert cards(top)[0].value == "-"
    assert cards(top)[0].remark == ""


def test_the_gain_of_an_older_run_is_over_one_size_for_all_steps(run: Run) -> None:
    """Catches runs that wrote the seconds of every size and are read no more, or as if the best of
    each step had been one choice."""
    sizes = ({"cp2": 3.0, "cp4": 9.0}, {"cp1": 1.0, "cp2": 5.0, "cp4": 3.0})
    steps = tuple(
        replace(
            run.steps[0],
            planned=replace(run.steps[0].planned, predicted_s=2.0, static_s=own, strategy=name),
        )
        for own, name in zip((sizes[0], *sizes), ("a", "a", "b"), strict=True)
    )
    top = summed_up(replace(run, steps=steps))
    assert (top.best_static, top.against_static) == ("cp2", 2.0)
    assert top.changes == 1
    gain = cards(top)[0]
    assert (gain.name, gain.value) == ("gain", "2.00")
    assert gain.remark == "cp2 in every step, both predicted"


def test_a_run_that_says_nothing_shows_dashes(run: Run) -> None:
    """Catches 'nan x' and crashes on runs without plans, memory or idle times."""
    bare = replace(
        run.steps[0],
        idle=nan,
        peak_bytes=(),
        micro_batches=(),
        planned=replace(
            run.steps[0].planned,
            predicted_s=nan,
            best_static_s=nan,
            planning_s=nan,
            waited_s=nan,
            gap=nan,
            peak_bytes=(),
        ),
    )
    empty = replace(run, steps=(bare,), facts=replace(run.facts, capacity_bytes=nan))
    shown = cards(summed_up(empty))
    assert [card.value for card in shown if card.name != "speed"] == ["-"] * 5
    assert not any("nan" in card.value + card.remark for card in shown)


def test_every_fault_is_warned_of(run: Run) -> None:
    """Catches a warning that never fires, and one that always does."""
    calm = replace(
        run,
        facts=replace(run.facts, corpus=replace(run.facts.corpus, skipped=0)),
        steps=tuple(
            replace(s, planned=replace(s.planned, predicted_s=s.step_s)) for s in run.steps
        ),
    )
    assert warnings(calm) == []
    text = "the whole model takes 2 s for 9 tokens, two layers foretell 1 s (-50%)"
    compared = replace(calm.facts, costs=replace(calm.facts.costs, compared=text))
    assert warnings(replace(calm, facts=compared)) == [text]
    bad = replace(
        calm.steps[5],
        loss=nan,
        step_s=9.0,
        peak_bytes=(3.0 * 2**30,),
        planned=replace(calm.steps[5].planned, waited_s=5.0),
    )
    errors = {"forward": {"p1 none": RelativeErrors(median=0.03, worst=0.5)}}
    costs = replace(run.facts.costs, errors=errors)
    facts = replace(run.facts, costs=costs)
    faulty = replace(calm, steps=(*calm.steps[:5], bad, *calm.steps[6:]), facts=facts)
    text = "\n".join(warnings(replace(faulty, notes=("a note",))))
    for part in (
        "not a number in step 5",
        "exceeded the capacity of 2 GiB in step 5",
        "off in step 5: predicted",
        "forward p1 none (50 %)",
        "3 documents were skipped",
        "training waited 5",
        "a note",
    ):
        assert part in text
