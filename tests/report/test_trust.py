"""What a run learnt of its costs, in its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.costs.calibration import Calibration, Residual
from headrace.report import summary_text
from headrace.report.facts import trust_rows, trust_text
from headrace.report.run_reader import read_run
from report.fake_run import fake_run


def learnt(steps: int = 40) -> Calibration:
    known = Calibration(fingerprint="x")
    for _ in range(steps):
        known.observe(
            [
                Residual(
                    ranks=(rank,), predicted_s=1.0, measured_s=factor, shares={f"cp1 {option}": 1.0}
                )
                for rank, option, factor in ((0, "local", 1.0), (1, "local+full", 1.21))
            ]
        )
        known.peaks = known.peaks.after([100], [120], 200)
    return known


@pytest.fixture
def taught(tmp_path: Path) -> Path:
    folder = fake_run(tmp_path / "run", steps=12, ranks=2, recorded=0, plans=False)
    learnt().save(folder / "calibration.json")
    return folder


def notices(folder: Path, told: dict[int, list[str]]) -> None:
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | {"notices": told[row["step"]]} if row["step"] in told else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_say_how_far_off_and_how_sure(taught: Path) -> None:
    """Would catch signs turned round, and logarithms shown as percent."""
    run = read_run(taught)
    assert trust_rows(run) == [
        ("all of a step", "40", "+10 %", "± 0 %"),
        ("cp1 local", "40", "-9.1 %", "± 0 %"),
        ("cp1 local+full", "40", "+10 %", "± 0 %"),
    ]
    assert trust_text(run) == (
        "Peak memory was usually 1.20 and seldom over 1.20 of predicted; "
        "rank 1 was 1.21x slower than the others."
    )


def test_a_run_that_learnt_nothing_shows_nothing(tmp_path: Path) -> None:
    """Would catch an empty table, and a rank blamed for two steps."""
    folder = fake_run(tmp_path / "run", steps=3, ranks=2, recorded=0, plans=False)
    assert (trust_rows(read_run(folder)), trust_text(read_run(folder))) == ([], "")
    Calibration(fingerprint="x").save(folder / "calibration.json")
    assert (trust_rows(read_run(folder)), trust_text(read_run(folder))) == ([], "")
    learnt(2).save(folder / "calibration.json")
    assert "slower" not in trust_text(read_run(folder))


def test_drift_is_among_the_warnings(taught: Path) -> None:
    """Would catch what was said on a terminal and is lost with it, and a hundred lines of it."""
    text = "rank 1 has been 1.42x slower than the others since step 5"
    notices(taught, {7: [text]})
    assert read_run(taught).notices == (text,)
    assert text in summary_text(taught)
    notices(taught, {step: [f"notice {step}", "more"] for step in range(12)})
    shown = summary_text(taught)
    assert "notice 11" in shown
    assert "notice 3" not in shown
    assert "18 earlier notices are in metrics.jsonl" in shown


def test_a_damaged_calibration_is_noted(taught: Path) -> None:
    """Would catch a report that cannot be written for a file that only adds to it."""
    (taught / "calibration.json").write_text('{"format": 1, "finger')
    assert "calibration.json is damaged" in summary_text(taught)
    (taught / "calibration.json").write_text('{"format": 2}')
    assert "calibration.json is damaged" in summary_text(taught)


def test_the_page_shows_the_table(taught: Path, tmp_path: Path) -> None:
    """Would catch rows that are made and not shown, or shown under the data."""
    pytest.importorskip("altair")
    from headrace.report import write_report

    html = write_report(taught, tmp_path / "report.html", pictures=False).read_text()
    before, _, after = html.partition('id="trust"')
    assert before.rindex("<h2>How far to trust the predictions</h2>") == before.rindex("<h2>")
    assert "<td>cp1 local+full</td>" in after
    assert "rank 1 was 1.21x slower" in after
