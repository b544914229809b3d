"""Drift: told once when it is there, never when it is not."""

from __future__ import annotations

import random
import re

import pytest

from headrace.costs.calibration import Residual
from headrace.costs.drift import Drift


def run(steps: int, factor, *, ranks: int = 4, noise: float = 0.1, seed: int = 0, scale=None):
    """What is told, by step: ``factor(step, rank)`` is measured over predicted without noise."""
    chance, drift, told = random.Random(seed), Drift(), {}
    for step in range(steps):
        machine = chance.gauss(0, noise)
        corrected = 1.0 if scale is None else scale(step)
        found = drift.observe(
            step,
            [
                Residual(
                    ranks=(rank,),
                    predicted_s=corrected,
                    shares={"x": 1.0},
                    measured_s=factor(step, rank)
                    * 2.718281828 ** (machine + chance.gauss(0, noise)),
                )
                for rank in range(ranks)
            ],
            corrected,
        )
        if found:
            told[step] = found
    return told


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_quiet_run_is_silent(noise: float, ranks: int) -> None:
    """Would catch alarms of noise: 2,000 steps, of one rank and of several."""
    assert run(2000, lambda step, rank: 1.0, ranks=ranks, noise=noise, seed=ranks) == {}


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_becomes_slow_is_found_soon_and_told_once(seed: int) -> None:
    """Would catch a slow device that is never named, named late, again at every step, or with
    another rank's number."""
    told = run(600, lambda step, rank: 1.5 if rank == 1 and step >= 120 else 1.0, seed=seed)
    ((step, (text,)),) = told.items()
    assert 120 < step <= 140
    found = re.fullmatch(
        r"rank 1 has been (1\.\d\d)x slower than the others since step (\d+)", text
    )
    assert found, text
    assert 1.35 < float(found[1]) < 1.7
    assert abs(int(found[2]) - 120) <= 3


def test_a_rank_slow_from_the_start_is_told() -> None:
    """Would catch a baseline that takes the slow rank for normal."""
    told = run(200, lambda step, rank: 1.4 if rank == 3 else 1.0, ranks=4, noise=0.05)
    assert len(told) == 1
    assert "rank 3 has been 1.4" in next(iter(told.values()))[0]


def test_of_two_ranks_the_slow_one_is_named() -> None:
    """Would catch 'rank 0 is faster', or a slow machine, said of one slow rank of two."""
    told = run(
        300, lambda step, rank: 1.5 if rank == 1 and step >= 100 else 1.0, ranks=2, noise=0.02
    )
    assert [text[:10] for texts in told.values() for text in texts] == ["rank 1 has"]


def test_the_end_is_told_too() -> None:
    """Would catch a rank that stays slow in the user's mind."""
    told = run(600, lambda step, rank: 1.6 if rank == 0 and 200 <= step < 400 else 1.0, noise=0.03)
    texts = [text for texts in told.values() for text in texts]
    assert len(texts) == 2
    assert "rank 0 has been 1.6" in texts[0]
    assert texts[1] == "rank 0 has been as fast as the others since step 400"


def test_everything_slower_is_told_of_all_ranks() -> None:
    """Would catch a neighbour on the machine that the running correction hides."""
    told = run(
        500,
        lambda step, rank: 1.4 if step >= 250 else 1.0,
        noise=0.03,
        scale=lambda step: 1.4 if step >= 260 else 1.0,
    )
    texts = [text for texts in told.values() for text in texts]
    assert len(texts) == 1
    wanted = r"all ranks have been (1\.\d\d)x slower than at the start since step (\d+)"
    found = re.fullmatch(wanted, texts[0])
    assert found, texts
    assert float(found[1]) == pytest.approx(1.4, abs=0.07)
    assert abs(int(found[2]) - 250) <= 3


def test_faster_and_back_again_is_told() -> None:
    """Would catch a neighbour's leaving told as a slow end."""
    told = run(700, lambda step, rank: 0.6 if 200 <= step < 400 else 1.0, noise=0.03, ranks=3)
    texts = [text for texts in told.values() for text in texts]
    assert len(texts) == 2
    assert "x faster than at the start since step 200" in texts[0]
    assert texts[1] == "all ranks have been as fast as at the start since step 400"


def test_single_slow_steps_are_no_drift() -> None:
    """Would catch an alarm for a checkpoint being written or a page cache being filled."""
    assert run(1500, lambda step, rank: 5.0 if step % 20 == rank else 1.0, noise=0.05) == {}


def test_several_ranks_are_one_sentence() -> None:
    """Would catch a thousand lines from a slow rack."""
    told = run(120, lambda step, rank: 1.5 if rank < 10 else 1.0, ranks=24, noise=0.0)
    ((text,),) = told.values()
    assert text.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more have been 1.50x slower")
    told = run(120, lambda step, rank: 1.5 if rank < 3 else 1.0, ranks=8, noise=0.0)
    assert next(iter(told.values()))[0].startswith("ranks 0, 1 and 2 have been 1.50x")


def test_steps_without_work_are_nothing() -> None:
    """Would catch a median of nothing."""
    assert Drift().observe(0, []) == ()
