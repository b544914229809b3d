"""Which layers used what: token-layers, changes of methods, runs of steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.report.layer_use import LayerUse, layer_use, spans
from headrace.report.records import MicroBatchRow, Run
from headrace.report.run_reader import read_run
from headrace.spec import LayerOption, LayerPlan
from report.fake_run import layered_run

Step = list[tuple[str | None, int]]


def tiny(tmp_path: Path, *steps: Step) -> Run:
    return read_run(layered_run(tmp_path / "run", *steps))


def named(counts: dict[LayerOption, float]) -> dict[str, float]:
    return {str(option): count for option, count in counts.items()}


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_run(folder)


def test_tokens_by_hand(tmp_path: Path) -> None:
    """Catches layers counted without their tokens, and a plan that two micro-batches share
    counted once."""
    run = tiny(tmp_path, [("2*a+full 1*b", 10), ("3*a", 4)], [("3*a", 6)])
    use = layer_use(run)
    first = {"a+full": 10, "a": 10}
    assert [named(dict(tokens)) for tokens in use.tokens] == [first, first, {"b": 10, "a": 10}]
    assert named(use.shares) == pytest.approx({"a": 30 / 60, "a+full": 20 / 60, "b": 10 / 60})


def test_every_token_passes_every_layer(run: Run) -> None:
    """Catches micro-batches that are lost on the way."""
    tokens = sum(step.tokens for step in run.steps)
    assert [sum(layer.values()) for layer in layer_use(run).tokens] == [tokens] * 8


def test_layers_of_different_depth(tmp_path: Path) -> None:
    """Catches the depth of the first plan, or of the shortest, taken for that of all."""
    use = layer_use(tiny(tmp_path, [("1*a", 1), ("3*b", 2), ("2*a", 4)]))
    layers = [named(dict(tokens)) for tokens in use.tokens]
    assert layers == [{"a": 5, "b": 2}, {"a": 4, "b": 2}, {"b": 2}]


@pytest.mark.parametrize(
    ("step", "switches"),
    [
        ([("4*a", 9)], 0),
        ([("2*a 2*b", 9)], 1),
        ([("2*a 2*b", 9), ("2*a 2*b", 3), ("4*b", 1)], 2),
        ([("1*a 1*b 1*a", 9)], 2),
        ([("1*a 1*a/b 1*b", 9)], 2),
        ([("1*a+full 1*a+attention 1*a", 9)], 0),
        ([("1*a+full 1*b", 9)], 1),
    ],
)
def test_changes_between_layers(tmp_path: Path, step: Step, switches: int) -> None:
    """Catches recompute levels taken for methods, feed-forwards overlooked, plans counted instead
    of micro-batches, and tokens counted instead of either."""
    assert layer_use(tiny(tmp_path, step, step)).between_layers == 2 * switches


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        ([[("4*a", 1)]], 0),
        ([[("4*a", 1)], [("4*a", 2), ("4*a", 3)]], 0),
        ([[("4*a", 1)], [("2*a+full 2*a+attention", 1)]], 0),
        ([[("4*a", 1)], [("3*a 1*b", 1)], [("4*a", 1)]], 2),
        ([[("4*a", 1)], [("4*a/b", 1)], [("4*a/b", 1)]], 1),
        ([[("4*a", 1)], [("4*a", 1), ("4*b", 1)]], 1),
        ([[("4*a", 1), ("4*b", 1)], [("4*b", 1), ("4*a", 1)]], 0),
        ([[("2*a 2*b", 1), ("2*b 2*a", 1)], [("4*a", 1), ("4*b", 1)]], 0),
        ([[("2*a 2*b", 1)], [("2*b 2*a", 1)]], 1),
        ([[("2*a", 1)], [("3*a", 1)]], 1),
        ([[("1*a", 1), ("1*a 1*b", 1)], [("1*a", 1), ("1*a 1*c", 1)]], 1),
        ([[("4*a", 1)], [(None, 1)], [("4*a", 1)], [(None, 1)], [("4*b", 1)]], 1),
    ],
)
def test_changes_between_steps(tmp_path: Path, steps: list[Step], changes: int) -> None:
    """Catches recompute levels or the order of micro-batches taken for a change, a change in one
    layer or one branch overlooked, and steps that say nothing taken for a change."""
    assert layer_use(tiny(tmp_path, *steps)).between_steps == changes


def test_a_run_without_layer_plans_is_empty(tmp_path: Path) -> None:
    """Catches a crash on runs of before layers were written, and a share of nothing."""
    run = tiny(tmp_path, [(None, 5)], [], [(None, 7)])
    assert layer_use(run) == LayerUse()
    assert layer_use(run).shares == {}
    assert [dict(span.token_layers) for span in spans(run, 5)] == [{}, {}, {}]


def test_micro_batches_without_layers_are_left_out(tmp_path: Path) -> None:
    """Catches tokens whose layers nobody knows in the shares."""
    use = layer_use(tiny(tmp_path, [("2*a", 5), (None, 100)], [("1*a 1*b", 15)]))
    assert named(use.shares) == pytest.approx({"a": 25 / 40, "b": 15 / 40})


def test_shares_are_ordered(tmp_path: Path) -> None:
    """Catches colours that depend on which option a run used first."""
    run = tiny(tmp_path, [("1*d 1*c/d 1*c+full 1*c", 2)], [("4*z", 1)], [("1*z 3*y", 1)])
    assert list(named(layer_use(run).shares)) == ["z", "y", "c+full", "c", "c/d", "d"]


def test_shares_of_a_run_sum_to_one(run: Run) -> None:
    """Catches shares of the tokens of one layer instead of all."""
    shares = list(layer_use(run).shares.values())
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)


def test_spans_by_hand(tmp_path: Path) -> None:
    """Catches steps that fall between two spans, and layers counted without their tokens."""
    steps: list[Step] = [[("1*a 2*b 1*a", 10)], [("4*a", 1), ("4*b", 2)], [("4*b", 5)], []]
    run = tiny(tmp_path, *steps)
    found = [(s.first, s.last, named(dict(s.token_layers))) for s in spans(run, 2)]
    assert found == [(0, 1, {"a": 24, "b": 28}), (2, 3, {"b": 20})]
    alone = [(s.first, s.last, named(dict(s.token_layers))) for s in spans(run, 10)]
    assert alone == [
        (0, 0, {"a": 20, "b": 20}),
        (1, 1, {"a": 4, "b": 8}),
        (2, 2, {"b": 20}),
        (3, 3, {}),
    ]


@given(count=st.integers(1, 700), limit=st.integers(1, 250))
def test_spans_hold_every_step_once(run: Run, count: int, limit: int) -> None:
    """Catches empty spans, lopsided ones, and more than may be drawn."""
    micro = MicroBatchRow(ranks=1, tokens=1, longest=1, sequences=1, layers="2*a", order="natural")
    steps = tuple(replace(run.steps[0], step=3 * i, micro_batches=(micro,)) for i in range(count))
    many = replace(run, steps=steps, layer_plans={"2*a": LayerPlan.parse("2*a")})
    found = spans(many, limit)
    assert len(found) == min(count, limit)
    assert (found[0].first, found[-1].last) == (0, 3 * (count - 1))
    assert all(after.first == before.last + 3 for before, after in pairwise(found))
    sizes = [(span.last - span.first) // 3 + 1 for span in found]
    assert max(sizes) - min(sizes) <= 1
    assert [sum(span.token_layers.values()) for span in found] == [2 * size for size in sizes]
