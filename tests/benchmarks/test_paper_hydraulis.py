"""``benchmarks/paper_hydraulis.py``: its quick form, and its arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import length_order
import numpy as np
import paper_hydraulis
import pytest

from benchmarks.scripts import run


@pytest.mark.slow
def test_the_papers_claims(tmp_path: Path) -> None:
    """Would catch a planner that falls behind either form of the paper's, a point of Figure 14 at
    which another is quicker, planning that takes longer than the paper's, a dispatch further from
    the best than the paper's, and a row behind that does not say which bound forbids more."""
    ended = run("paper_hydraulis.py", "--quick", json_in=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.numbers is not None
    rows = ended.numbers["claims"]
    places = {row["where"].partition(",")[0] for row in rows}
    assert places == {f"Figure {n}" for n in (13, 14, "15a", "15b", 16, 17, 20)} | {
        f"Table {n}" for n in (1, 2, 3, 4)
    }
    for row in rows:
        if row["verdict"] == "behind":
            assert row["where"].startswith(
                ("Figure 13", "Figure 16", "Figure 15b", "Table 1", "Table 4")
            ), row
            assert any(word in row["why"] for word in ("no plan", "lower bound", "stage")), row
    by_what = {(row["where"], row["what"]): row for row in rows}

    def verdicts(where: str, what: str = "") -> set[str]:
        return {own["verdict"] for (a, b), own in by_what.items() if where in a and what in b}

    assert verdicts("Figure 13", "their planner (hydraulis)") == {"ahead"}
    assert verdicts("Figure 13", "hydraulis-tuned") <= {"ahead", "even"}
    assert verdicts("Figure 14", "quickest") == {"even"}
    assert verdicts("Figure 20", "at most") == {"ahead"}
    assert verdicts("Table 2") == {"ahead"}
    clock = next(row for row in rows if "clock of 1F1B" in row["what"])["ours"]
    assert 0.4 < clock[0] <= clock[1] < 1.5
    for row in ended.numbers["scenarios"]:
        assert row["over_best"] <= row["at_most"] * (1 + 1e-9)
    assert ended.numbers["figure 13"]["behind_static"]["hydraulis-tuned"] == 0


def test_the_clock_of_1f1b_by_hand() -> None:
    """Would catch stages that do not wait for one another: equal micro-batches take
    (V + P - 1) t, one stage takes the sum, and a long one first is not paid P times in full."""
    clock = paper_hydraulis.one_f_one_b_s
    assert clock([3.0, 6.0, 3.0], 1) == pytest.approx(12.0)
    for count, depth in ((4, 2), (8, 4), (2, 4)):
        assert clock([3.0] * count, depth) == pytest.approx(3.0 * (count + depth - 1))
    # Two stages, 3 then 6: forwards 1 and 2, backwards 2 and 4. The first stage has F1 0-1, F2
    # 1-3; the second F1 1-2, B1 2-4, F2 4-6, B2 6-10; the first then B1 4-6, B2 10-14.
    assert clock([3.0, 6.0], 2) == pytest.approx(14.0)


def test_gaps_between_ranks() -> None:
    """Would catch ranks without work that are left out, and a gap over the quickest."""
    assert paper_hydraulis.gap_of([4.0, 3.0]) == pytest.approx(0.25)
    used = type("Used", (), {"seconds": 4.0, "scheme": "tp2"})
    assert paper_hydraulis.rank_seconds([used], 3) == [4.0, 4.0, 0.0]


def test_orders_of_samples() -> None:
    """Would catch intervals that lose samples or sort within, and batches over their tokens."""
    samples = [np.arange(n) for n in (900, 10, 500, 128, 129, 11)]
    order = [len(own) for own in length_order.by_intervals(samples, 1024)]
    assert order == [10, 128, 11, 500, 129, 900]
    batches = length_order.in_batches(samples, 640)
    assert [[len(own) for own in batch] for batch in batches] == [[900], [10, 500, 128], [129, 11]]


def test_order_by_length_is_trained() -> None:
    """Would catch weights that do not learn, and orders that train on the same batches: from
    thousands of equally likely tokens a few steps go far."""
    found = length_order.perplexities(8000, context=256, batch_tokens=512, hidden=32, layers=1)
    assert found["random"] < 4096 * 0.9
    assert found["by intervals"] != found["random"]
