"""What steps teach about costs: estimates, the memory margin, and the file between runs."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.costs.calibration import (
    LEAST_MARGIN,
    MOST_MARGIN,
    Calibration,
    Estimate,
    Peaks,
    Residual,
    raised_margin,
)
from headrace.costs.saving import sealed
from headrace.errors import CostError


def residual(rank: int, factor: float, shares: dict[str, float], predicted_s: float = 1.0):
    return Residual(
        ranks=(rank,), predicted_s=predicted_s, measured_s=predicted_s * factor, shares=shares
    )


def test_known_residuals_give_known_estimates() -> None:
    """Would catch an option's error that is laid to another, or to the whole step."""
    known = Calibration(fingerprint="x")
    for common in (1.0, 3.0, 0.5) * 20:
        known.observe(
            [residual(0, common * 1.2, {"a": 1.0}), residual(1, common / 1.2, {"b": 1.0})]
        )
    assert known.options["a"].mean == pytest.approx(math.log(1.2))
    assert known.options["b"].mean == pytest.approx(-math.log(1.2))
    assert known.options["a"].spread == pytest.approx(0, abs=1e-9)
    assert known.options["a"].count == known.whole.count == 60
    assert known.whole.spread == pytest.approx(0.73, abs=0.05)
    assert known.ranks[0].mean == pytest.approx(2 * math.log(1.2))


def test_a_mixed_micro_batch_counts_by_its_shares() -> None:
    """Would catch shares that are ignored: the small part of one batch would count as a whole."""
    known = Calibration(fingerprint="x")
    known.observe(
        [residual(0, math.e, {"a": 0.25, "b": 0.75}), residual(1, 1.0, {"a": 1.0}, predicted_s=3.0)]
    )
    common = 0.25  # (1 x 1 + 3 x 0) / 4
    assert known.whole.mean == pytest.approx(common)
    assert known.options["b"].mean == pytest.approx(1 - common)
    a = (0.25 * (1 - common) + 3 * (0 - common)) / 3.25
    assert known.options["a"].mean == pytest.approx(a)
    within = (0.25 * (1 - common - a) ** 2 + 3 * (common + a) ** 2) / 3.25
    assert known.options["a"].variance == pytest.approx(within)


def test_one_micro_batch_says_nothing_of_its_option() -> None:
    """Would catch 'off by 0 %' said of an option that could not be compared with anything."""
    known = Calibration(fingerprint="x")
    known.observe([residual(0, 2.0, {"a": 1.0})])
    known.observe([])
    assert known.whole == Estimate(count=1, mean=math.log(2))
    assert known.options == known.ranks == {}


def test_estimates_forget() -> None:
    """Would catch a mean over all of the past, which learns a new driver in weeks."""
    chance, estimate = random.Random(0), Estimate()
    for _ in range(300):
        estimate = estimate.after(chance.gauss(1.0, 0.1))
    assert estimate.mean == pytest.approx(1.0, abs=0.04)
    assert estimate.spread == pytest.approx(0.1, abs=0.03)
    for _ in range(300):
        estimate = estimate.after(chance.gauss(2.0, 0.1))
    assert estimate.mean == pytest.approx(2.0, abs=0.04)
    assert estimate.spread == pytest.approx(0.1, abs=0.03)


def peaks_after(ratios: list[float]) -> Peaks:
    peaks = Peaks()
    for ratio in ratios:
        peaks = peaks.after([100, 9], [round(100 * ratio), 9], 150)
    return peaks


@pytest.mark.parametrize(
    ("ratio", "margin"),
    [(0.5, LEAST_MARGIN), (1.0, 0.1), (1.3, 0.35), (1.6, 0.45), (9.0, MOST_MARGIN)],
)
def test_the_margin_leaves_room_for_the_largest_ratio(ratio: float, margin: float) -> None:
    """Would catch a margin under which the worst peak seen would not fit."""
    found = peaks_after([ratio] * 30).margin(0.3)
    assert found == margin
    assert found >= min(MOST_MARGIN, 1 - 1 / (1.1 * ratio))
    assert found * 20 == pytest.approx(round(found * 20))


def test_the_prior_holds_until_enough_was_seen() -> None:
    """Would catch a run that gives up its margin after one lucky step, or never learns."""
    assert Peaks().margin(0.3) == 0.3
    assert peaks_after([1.0] * 19).margin(0.3) == 0.3
    assert peaks_after([1.0] * 20).margin(0.3) == 0.1
    assert peaks_after([2.0]).margin(0.3) == 0.55


def test_one_large_peak_among_many_counts_and_fades() -> None:
    """Would catch a mean that hides the peak which ends a run, and a peak never forgotten."""
    once = peaks_after([1.0] * 30 + [1.5])
    assert once.margin(0.3) >= 1 - 1 / (1.1 * 1.5)
    assert peaks_after([1.0] * 30 + [1.5] + [1.0] * 400).margin(0.3) == 0.1


def test_small_peaks_say_nothing() -> None:
    """Would catch a tiny model's overhead learnt as an error of 500 %."""
    peaks = Peaks()
    for _ in range(50):
        peaks = peaks.after([2, 2], [20, 20], 100)
    assert peaks == Peaks()
    assert Peaks().after([2], [50], 100).largest == pytest.approx(2.0)  # 2 counts as 25


def test_a_margin_is_raised_only_by_a_peak_near_the_limit() -> None:
    """Would catch plans that change with every noisy peak, and a raise that asks for too little."""
    assert raised_margin(0.3, [60, 70], [80, 90], 100) == 0.3
    assert raised_margin(0.3, [60, 70], [95, 60], 100) == 0.45
    assert raised_margin(0.5, [70], [95], 100) == 0.5
    for margin in (0.05, 0.1, 0.3, 0.55):
        assert (
            raised_margin(margin, [round(1e9 * (1 - margin))], [round(1e9 / 1.09)], 10**9) > margin
        )
    assert raised_margin(0.7, [1], [100], 100) == 0.7


def filled() -> Calibration:
    known = Calibration(fingerprint="cores=2")
    for _ in range(3):
        known.observe([residual(0, 1.3, {"cp1 local": 1.0}), residual(1, 1.1, {"cp1 local": 1.0})])
    known.peaks = peaks_after([1.1] * 4)
    return known


def test_a_calibration_reads_back(tmp_path: Path) -> None:
    """Would catch a field that is lost between runs, and half a file left behind."""
    path = tmp_path / "deep" / "calibration-x.json"
    known = filled()
    known.save(path)
    assert Calibration.load(path, fingerprint="cores=2") == known
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    empty = Calibration.load(tmp_path / "none.json", fingerprint="cores=2")
    assert empty == Calibration(fingerprint="cores=2")


DAMAGED = {
    "half a file": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[]",
    "another format": lambda text: text.replace('"format": 1', '"format": 99'),
    "no peaks": lambda text: text.replace('"peaks"', '"speaks"'),
    "negative variance": lambda text: text.replace('"variance": 0', '"variance": -1', 1),
    "not finite": lambda text: text.replace('"largest": 1.1', '"largest": NaN'),
    "a text for a number": lambda text: text.replace('"count": 3', '"count": "three"'),
    "a flag for a number": lambda text: text.replace('"count": 3', '"count": true'),
    "an unknown rank": lambda text: text.replace('{"0": {', '{"zero": {'),
    "an estimate of another shape": lambda text: text.replace('"mean"', '"man"', 1),
    "another fingerprint": lambda text: text.replace("cores=2", "cores=3"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_an_error_that_can_be_told(case: str, tmp_path: Path) -> None:
    """Would catch a torn file that ends a run with a KeyError, or plans with its nonsense."""
    path = tmp_path / "calibration.json"
    text = json.dumps(filled().to_json())
    bad = DAMAGED[case](text)
    assert bad != text
    with suppress(ValueError, TypeError):
        bad = sealed(json.loads(bad))  # whoever wrote it, it is not what a calibration is
    path.write_text(bad)
    with pytest.raises(CostError):
        Calibration.load(path, fingerprint="cores=2")


def test_a_flipped_digit_is_found(tmp_path: Path) -> None:
    """Would catch a number that changed on the disk and is planned with, as good as any other."""
    path = tmp_path / "calibration.json"
    filled().save(path)
    path.write_text(path.read_text().replace('"count": 3', '"count": 7'))
    with pytest.raises(CostError, match="checksum differs"):
        Calibration.load(path, fingerprint="cores=2")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """Would catch a traceback in place of the folder's name."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CostError, match="file"):
        filled().save(tmp_path / "file" / "x.json")
