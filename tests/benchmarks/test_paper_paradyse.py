"""``benchmarks/paper_paradyse.py``: its rows, and the models that it prices."""

from __future__ import annotations

import math
from typing import Any

import pytest
from paradyse_models import DATA, METHODS, Node, lengths_of, longest_of

from benchmarks.scripts import Ran, run
from headrace.data.drawn_lengths import PRESETS
from headrace.spec import LayerOption


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run("paper_paradyse.py", "--quick", json_in=tmp_path_factory.mktemp("paradyse"))


@pytest.fixture(scope="module")
def rows(ran: Ran) -> list[dict[str, Any]]:
    assert ran.code == 0, ran.err
    assert ran.numbers is not None
    return ran.numbers["claims"]


def named(rows: list[dict[str, Any]], where: str, what: str) -> dict[str, Any]:
    (found,) = (row for row in rows if row["where"] == where and row["what"].startswith(what))
    return found


@pytest.mark.slow
def test_rows_behind_say_why(rows: list[dict[str, Any]]) -> None:
    """Catches a row that is behind without a reason, and one that was not to be; what this machine
    timed for Equation 9 may fall either way."""
    behind = [row for row in rows if row["verdict"] == "behind"]
    assert all(row["why"] for row in behind)
    assert {row["where"] for row in behind} - {"Equation 9"} <= {
        "Figure 2, BERT on GitHubCode",
        "Figure 2, BERT on GRCh38",
        "Algorithm 1, LLaMA on GitHubCode",
        "Table 5, without MegatronTS",
    }


@pytest.mark.slow
def test_lengths_are_those_of_the_paper_or_longer(rows: list[dict[str, Any]]) -> None:
    """Catches memory that is counted wrongly: without METP the roofline says what Table 5 does, to
    a fiftieth, and with it more."""
    where = "Table 5, without METP"
    assert named(rows, where, "longest sequence, exact mixture")["verdict"] == "even"
    assert named(rows, where, "longest sequence, plan")["verdict"] == "ahead"
    for way in ("exact mixture", "plan"):
        row = named(rows, "Figure 2, GPT on GRCh38", f"longest sequence, {way}")
        assert row["verdict"] == "ahead"
        longest = named(rows, "Figure 2, BERT on GRCh38", f"longest sequence, {way}")
        assert longest["ours"] == longest["theirs"] == 624 * 1024
    assert named(rows, "Table 5, all strategies", "longest")["verdict"] == "ahead"


@pytest.mark.slow
def test_the_exact_mixture_is_not_beaten_by_algorithm_1(rows: list[dict[str, Any]]) -> None:
    """Catches a choice that is called exact and is not; the peak makes Algorithm 1 nearly so, the
    printed sum does not."""
    printed = list[float]()
    for row in rows:
        if row["what"].startswith("seconds above the exact mixture's"):
            in_all, worst = row["ours"]
            assert -1e-9 <= in_all <= worst + 1e-9
            if "true peak" in row["what"]:
                assert worst < 0.01
            else:
                printed.append(worst)
    assert len(printed) == 6
    assert max(printed) > 0.03


@pytest.mark.slow
def test_what_strategies_add_is_as_in_the_paper(rows: list[dict[str, Any]]) -> None:
    """Catches costs in which another strategy matters than in the paper's measurements."""
    what = "seconds over those with all strategies"
    over = {name: named(rows, f"Table 5, without {name}", what) for name in METHODS}
    assert all(row["ours"] >= 1 - 1e-9 for row in over.values())
    assert max(over, key=lambda name: over[name]["ours"]) == "MegatronTS"
    assert all(row["ratio"] == pytest.approx(1, abs=0.03) for row in over.values())


@pytest.mark.slow
def test_plans_hold_what_no_method_alone_does(rows: list[dict[str, Any]], ran: Ran) -> None:
    """Catches a planner that may choose more and holds less, or is slower where weights are not
    replicated; and curves with a point where nothing fits."""
    for model in ("BERT", "LLaMA", "GPT"):
        row = named(rows, f"section Overall Experiment, {model}", "longest")
        mixture, plan = row["ours"]
        assert mixture == pytest.approx(1, abs=1e-3)
        assert plan > 1.5
    assert ran.numbers is not None
    for cell in ran.numbers["cells"]:
        for name, seconds in cell["seconds"].items():
            held = [cell["longest"][name] >= tokens for tokens in cell["tokens"]]
            assert [each is not None for each in seconds] == held


@pytest.mark.slow
def test_switching_and_cost_models(rows: list[dict[str, Any]]) -> None:
    """Catches a change of method that costs a run something, quadratics that choose worse than
    the forests that they stand in for, and errors of cost models that were not measured."""
    assert named(rows, "Case Study", "a change of method")["verdict"] == "ahead"
    assert named(rows, "Table 5, without smoothing", "share")["verdict"] == "ahead"
    assert named(rows, "Table 5, without RF", "seconds")["verdict"] == "even"
    for where in ("inside", "beyond"):
        row = named(rows, "Equation 9", f"median error {where}")
        assert row["how"] == "measured"
        assert all(math.isfinite(error) and error >= 0 for error in (row["theirs"], row["ours"]))


@pytest.mark.parametrize("data", DATA)
def test_lengths_have_the_shares_of_the_table(data: str) -> None:
    """Catches quantiles that slipped by a bin."""
    law = PRESETS[DATA[data]]
    lengths, shares = lengths_of(data, 1000), law.shares
    counts = [
        sum(a <= n < b for n in lengths) for a, b in zip(law.edges, law.edges[1:], strict=False)
    ]
    assert counts == pytest.approx([1000 * share / sum(shares) for share in shares], abs=2)
    assert max(lengths) <= longest_of(data)


def test_scores_take_the_memory_of_the_fifth_strategy() -> None:
    """Catches scores that are counted with a line: n l^2 / p elements of two bytes in each of the
    eight layers, and two more in one of them."""
    node = Node.of("GPT")
    longest = node.longest_by_colossal_z()
    assert node.fits_colossal_z(longest)
    assert not node.fits_colossal_z(longest + 1)
    assert longest < node.longest_by("megatron_cz") / 4
    costs, ring = node.with_colossal_z(longest), node.costs
    option = LayerOption.of("colossal_z")
    scores = 96 * 2 * longest**2 // 8
    more = costs.micro_batch_bytes(longest, 8, node.uniform("colossal_z"), "sharded")
    more -= ring.micro_batch_bytes(longest, 8, node.uniform("megatron_cz"), "sharded")
    assert more == pytest.approx((8 + 2) * scores, rel=1e-6)
    assert sum(costs.layer_seconds([longest], 8, option)) > sum(
        ring.layer_seconds([longest], 8, LayerOption.of("megatron_cz"))
    )


def test_no_plan_beats_its_products() -> None:
    """Catches a bound that is none."""
    for model in ("BERT", "LLaMA", "GPT"):
        node = Node.of(model)
        exact, planned = node.exact(), node.planned()
        for tokens in (300, 20_000, 100_000):
            for seconds in (exact(tokens), planned(tokens)):
                assert seconds is not None
                assert seconds > node.products_s(tokens)
