"""The claims of DSP, in their quick form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dsp
import dsp_absent
import dsp_switches
import paper_dsp
import pytest
import torch
import torch.distributed as dist

from headrace.ops.switch import gather, switch
from ranks import run_ranks


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows that the script writes."""
    file = tmp_path_factory.mktemp("dsp") / "rows.json"
    assert paper_dsp.main(["--quick", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert set(found["exchanges_s"]) == {"dsp", "ulysses", "four exchanges", "padded dsp"}
    return found["claims"]


def of(claims: list[dict[str, Any]], where: str, what: str = "") -> dict[str, Any]:
    (found,) = [c for c in claims if c["where"] == where and what in c["what"]]
    return found


@pytest.mark.slow
def test_counted_volumes_are_the_papers_less_what_stays(claims: list[dict[str, Any]]) -> None:
    """Catches exchanges that are padded, repeated in a recompute, or not counted: on 8 ranks, as
    rationals of M."""
    assert of(claims, "Table 3, DSP")["ours"] == pytest.approx(2 * 7 / 64)
    wanted = {"ulysses": (2, 2, 3), "ring": (8, 12, 16)}
    wanted |= {"megatron-sp": (32, 32, 48), "megatron-lm": (32, 32, 48)}
    for method, ratios in wanted.items():
        rows = [c["ours"] for c in claims if c["where"] == f"Table 3, {method}"]
        assert rows == pytest.approx(ratios), method
    assert of(claims, "abstract, contributions")["ours"] == pytest.approx(0.5)
    volumes = {
        "all-gather": 7 / 8,
        "reduce-scatter": 7 / 8,
        "all-reduce": 7 / 4,
        "all-to-all": 7 / 64,
    }
    for name, volume in volumes.items():
        assert of(claims, f"Table 8, {name}")["ours"] == pytest.approx(volume)


@pytest.mark.slow
def test_what_is_behind_has_a_reason(claims: list[dict[str, Any]]) -> None:
    """Catches a row that is behind and says nothing, and a claim that is left out."""
    assert all(c["why"] for c in claims if c["verdict"] == "behind")
    places = {c["where"].split(",")[0] for c in claims}
    assert {"Table 3", "Table 8", "Table 9", *(f"Figure {n}" for n in (5, 6, 7, 8))} <= places
    assert of(claims, "sections 1 and 6")["verdict"] == "behind"


@pytest.mark.slow
def test_verdicts_that_must_hold(claims: list[dict[str, Any]]) -> None:
    """Catches exchanges that are priced otherwise than their bytes, and rivals that became weak: a
    Ulysses of twice the bytes takes twice the time, not the paper's six times."""
    simulated = [c for c in claims if c["where"] == "Table 9, ulysses" and c["how"] == "simulated"]
    assert [c["ours"] for c in simulated] == [pytest.approx(2, abs=0.1)]
    least, most = _ratios(claims)
    assert 1 < least < 1.1
    assert 1.2 < most < 1.32
    assert of(claims, "Figure 5", "FLOPs lost")["verdict"] == "ahead"
    assert of(claims, "Figure 6, weak", "of its own")["verdict"] == "ahead"
    assert 0.9 < of(claims, "Figure 7, strong", "from 1 to 8")["ours"] < 1
    memory = [c["ours"] for c in claims if c["where"] == "Figure 9, 8 GPUs"]
    assert len(memory) == 4
    assert min(memory) > 1


def _ratios(claims: list[dict[str, Any]]) -> tuple[float, float]:
    (row,) = [c for c in claims if c["what"] == "DSP over Ulysses"]
    assert row["verdict"] == "behind"
    least, most = row["ours"]
    return least, most


def test_a_rank_among_absent_partners_sends_what_a_real_one_does() -> None:
    """Catches a world of absent partners in which other code runs: bytes are those of the formulas,
    which ranks are counted by in the benchmark of DSP."""
    for method in dsp.METHODS:
        cell = dsp_absent.Cell(method=method, model="720m", frames=8, ranks=4, recompute=False)
        _, layer = dsp_absent.rehearsed(cell)
        forward, backward = (x * cell.tensor_bytes for x in dsp.formula(method, 4))
        assert layer.sent_forward == pytest.approx(forward), method
        assert layer.sent_step == pytest.approx(forward + backward), method


def test_crossing_to_another_node_costs_more() -> None:
    """Catches a group of two nodes that talks over the link of one."""
    few, many = (
        dsp_absent.rehearsed(dsp_absent.Cell(method="dsp", model="720m", frames=64, ranks=n))[1]
        for n in (8, 16)
    )
    assert many.sent_step < few.sent_step
    assert many.link_s > few.link_s
    assert many.step_s - many.link_s < few.step_s - few.link_s


def exchanged() -> float:
    """How far DeepSpeed's four exchanges, without attention between them, are from none."""
    torch.manual_seed(dist.get_rank())
    q, k, v = torch.randn(3, 2, 3, 4, 5)
    whole = gather(q, 0, dist.group.WORLD)
    heads = dsp_switches._heads_for_frames(q)
    same = torch.equal(heads, switch(q, 0, 2, dist.group.WORLD))
    assert same
    assert heads.shape == (whole.shape[0], 3, 2, 5)
    return float((dsp_switches.four_exchanges(q, k, v) - q).abs().max())


def test_the_four_exchanges_are_some() -> None:
    """Catches a contender that brings something else than heads of all frames."""
    assert run_ranks(2, exchanged) == [0.0, 0.0]


def test_whole_results_are_there() -> None:
    """Catches results of a quick run, and rows that are behind without a reason."""
    file = Path(__file__).parents[2] / "benchmarks/results/papers/dsp.json"
    found = json.loads(file.read_text())
    assert not found["quick"]
    assert all(c["why"] for c in found["claims"] if c["verdict"] == "behind")
