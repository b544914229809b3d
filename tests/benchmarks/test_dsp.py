"""The benchmark of models of several axes, by its functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dsp
import dsp_sides
import dsp_switches
import pytest
import torch
import torch.distributed as dist

from headrace.layouts.partition import split_sizes
from headrace.ops.switch import Columns, switch, to_columns
from ranks import run_ranks
from spread import whole


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What three ranks count."""
    return run_ranks(3, dsp.bytes_rows, 6, 9, timeout_s=100)[0]


def test_counted_bytes_are_those_of_the_formulas(rows: list[dict[str, Any]]) -> None:
    """Catches padding, exchanges that come twice, and formulas of another implementation."""
    for row in rows:
        assert row["sent"] == pytest.approx(row["formula"], rel=1e-12), row["method"]


def test_methods_have_the_same_gradients(rows: list[dict[str, Any]]) -> None:
    """Catches contenders that do other work."""
    assert [row["method"] for row in rows] == list(dsp.METHODS)
    norms = [row["gradient_norm"] for row in rows]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
    assert norms[0] > 0


def contender(method: str) -> float:
    """How far the gradients of a method on all ranks are from those of one process."""
    shape, (frames, patches) = dsp.Shape2D(layers=2, hidden=16, heads=4, channels=4), (7, 5)
    inputs = {
        name: x.double() if x.is_floating_point() else x
        for name, x in dsp.inputs_of(shape, frames, patches).items()
    }
    model, plain = dsp.model_of(shape).double(), dsp.model_of(shape).double()
    dsp_sides.prepare(method, model, inputs).loss().backward()
    plain(**inputs).square().sum().backward()
    off = top = 0.0
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        dist.all_reduce(grad)
        assert wanted.grad is not None
        off = max(off, float((grad - wanted.grad).abs().max()))
        top = max(top, float(wanted.grad.abs().max()))
    return off / top


@pytest.mark.parametrize("ranks", [whole(2), 3, whole(4)])
def test_contenders_are_exact(ranks: int) -> None:
    """Catches a contender with another backward: frames, patches and heads do not divide."""
    for method in dsp.METHODS:
        assert max(run_ranks(ranks, contender, method, timeout_s=100)) < 1e-10


def both_switches() -> bool:
    sizes = split_sizes(5, 2)
    x = torch.randn(sizes[dist.get_rank()], 7, 3)
    mine = switch(x, 0, 1, dist.group.WORLD, sizes=sizes)
    theirs = dsp_switches.padded(x, sizes)[:, : mine.shape[1]]
    widths = split_sizes(7, 2)
    back = dsp_switches.padded(mine, widths, 1, 0)[: len(x)]
    return torch.equal(mine, theirs) and torch.equal(x, back)


def test_the_padded_switch_is_one() -> None:
    """Catches a contender that does not bring what the other does."""
    assert all(run_ranks(2, both_switches))


def both_ways() -> bool:
    sizes, rank = split_sizes(7, 3), dist.get_rank()
    columns = Columns.consecutive(split_sizes(5, 3))
    x = torch.randn(sizes[rank], 5, 2)
    mine = to_columns(x, sizes, columns, dist.group.WORLD)  # type: ignore[arg-type]
    there = dsp_switches.plain_columns(x, sizes, columns)
    return torch.equal(mine, there) and torch.equal(
        dsp_switches.plain_tokens(there, sizes, columns), x
    )


def test_the_plain_exchange_of_heads_is_one() -> None:
    assert all(run_ranks(3, both_ways))


def test_figures_are_said_beside_the_papers() -> None:
    strong, weak = dsp.scaling_rows("h100"), dsp.scaling_rows("h100", weak=True)
    assert {r["clips"] for r in strong} == {1}
    assert max(r["clips"] for r in weak) == 16
    for row in dsp.figures(strong, weak)[2:]:
        assert 0 < float(row["here"].rstrip("%")) < 100


def test_scaling_is_that_of_the_formulas() -> None:
    """Catches heads that are shared among more devices than there are."""
    found = dsp.scaling_rows("h100")
    assert all(row["ulysses"] is None for row in found if row["devices"] == 64)
    for row in found:
        if row["devices"] > 1:
            assert row["dsp"] < min(row[m] for m in dsp.METHODS[1:] if row[m] is not None)
        else:
            assert len({row[m] for m in dsp.METHODS}) == 1


@pytest.mark.slow
def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches tables that lack a method, and a picture of nothing."""
    pytest.importorskip("altair")
    options = ["--ranks", "2", "--rounds", "1", "--frames", "4", "--patches", "6"]
    kept = dsp_switches.SWITCHES, dsp_switches.HEADS
    dsp_switches.SWITCHES = dsp_switches.HEADS = ((6, 5, 4),)
    try:
        code = dsp.main(
            [*options, "--json", str(tmp_path / "x.json"), "--picture", str(tmp_path / "x.svg")]
        )
    finally:
        dsp_switches.SWITCHES, dsp_switches.HEADS = kept
    assert code == 0
    out = capsys.readouterr().out
    assert all(out.count(method) >= 2 for method in dsp.METHODS)
    found = json.loads((tmp_path / "x.json").read_text())
    assert {row["method"] for row in found["steps"]} == set(dsp.METHODS)
    assert (tmp_path / "x.svg").read_text().count("<path") > 10
