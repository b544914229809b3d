"""The benchmark of rehearsal runs, and its bytes are those of the real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scripts import run


@pytest.mark.slow
def test_bytes_are_the_real_ones(tmp_path: Path) -> None:
    """Would catch a rehearsal of something else than what it is compared with."""
    ran = run(
        "rehearsal.py",
        "--ranks",
        2,
        "--tokens",
        128,
        "--hidden",
        64,
        "--heads",
        4,
        "--rounds",
        1,
        json_in=tmp_path,
    )
    assert ran.code == 0, ran.err
    assert "2 ranks: kept bytes off by at most" in ran.out
    assert "1/8" in ran.err
    assert ran.numbers is not None
    (case,) = ran.numbers["cases"]
    assert len(case["rows"]) == 8
    for row in case["rows"]:
        assert row["rehearsed_kept_bytes"] == pytest.approx(row["kept_bytes"], rel=0.02)
        assert row["seconds"]["rehearsed"][0] > 0
