"""``benchmarks/roofline.py``: as a script, and that its comparison is one."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

import pytest
import roofline

from benchmarks.scripts import Ran, run
from headrace.spec.hardware import DEVICES


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run("roofline.py", "--all", json_in=tmp_path_factory.mktemp("roofline"))


def test_every_source_is_judged_and_errors_are_printed(ran: Ran) -> None:
    """Would catch a source that is left out, or numbers without where they are from."""
    assert ran.code == 0, ran.err
    assert ran.numbers is not None
    files = [json.loads(path.read_text()) for path in roofline.FOLDER.glob("*.json")]
    assert set(ran.numbers["sources"]) == {data["name"] for data in files}
    assert all(len(source) > 20 for source in ran.numbers["sources"].values())
    rows = ran.numbers["comparisons"]
    assert {row["source"] for row in rows} == set(ran.numbers["sources"])
    for row in rows:
        assert row["ratio"] == pytest.approx(row["predicted"] / row["published"])
        assert row["case"] in ran.out
    for text, error in ran.numbers["median_error"].items():
        source, what = text.split(", ")
        ratios = [r["ratio"] for r in rows if (r["source"], r["what"]) == (source, what)]
        assert error == pytest.approx(median(abs(ratio - 1) for ratio in ratios))
    assert "median error" in ran.out


def test_seconds_are_near_those_published(ran: Ran) -> None:
    """Would catch a formula that forgets or doubles a part: the median error of seconds of every
    source, also of those that nothing was calibrated on, stays below a fifth."""
    assert ran.numbers is not None
    errors = ran.numbers["median_error"]
    seconds = {text: error for text, error in errors.items() if text.endswith("seconds")}
    assert len(seconds) == 6
    assert max(seconds.values()) < 0.2, seconds
    longest = [error for text, error in errors.items() if text.startswith("hydraulis")]
    assert max(longest) < 0.55, errors  # their systems keep the logits of a whole micro-batch


def test_presets_are_what_was_calibrated() -> None:
    """Would catch presets that were changed by hand afterwards: they are the constants that agree
    best with one source, rounded, and another device does not agree."""
    best = roofline.calibrated()
    for name in ("a100-80g", "a100-40g", "a800"):
        device = DEVICES[name]
        assert device.attained_matmul == pytest.approx(best.attained_matmul, abs=0.01)
        assert device.attained_attention == pytest.approx(best.attained_attention, abs=0.01)
        assert device.launch_s == pytest.approx(best.launch_s, rel=0.1)
    data = json.loads((roofline.FOLDER / f"{roofline.CALIBRATED_ON}.json").read_text())
    slow = replace(best, attained_matmul=best.attained_matmul / 2)
    ratios = [each.ratio for each in roofline.of_groups(data, slow)]
    assert min(ratios) > 1.1


def test_published_numbers_are_as_published() -> None:
    """Would catch fits that were changed: T(4096) of two schemes and two lengths, worked out from
    the printed coefficients."""
    found, _ = roofline.compare()
    by_case = {(each.source, each.what, each.case): each.published for each in found}
    known = {
        ("hydraulis-7b", "seconds", "tp8, 4096 tokens"): 5.069e-10 * 4096**2
        + 3.66182e-5 * 4096
        + 44.3e-3,
        ("hydraulis-32b", "seconds", "tp16, 4096 tokens"): 1.378e-9 * 4096**2
        + 1.02435e-4 * 4096
        + 145.7e-3,
        ("paradyse-gpt", "longest", "without METP"): 112128,
        ("hydraulis-32b", "longest", "tp16, 64 devices"): 43520,
    }
    for key, value in known.items():
        assert by_case[key] == pytest.approx(value, rel=2e-3), key
