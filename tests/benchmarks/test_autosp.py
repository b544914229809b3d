"""The benchmark of foreign models, by its functions."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

pytest.importorskip("transformers")

import autosp
import autosp_memory
import autosp_speed
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ranks import run_ranks


@pytest.mark.apart  # backward passes in the test's own process
def test_contenders_take_the_same_step() -> None:
    """Catches contenders that do other work."""
    losses = [autosp.alone(96, level)(96) for level in ("none", "full")]
    losses += [autosp.spread(96, level)(96) for level in autosp.LEVELS]
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-5)
    assert torch.isfinite(torch.tensor(losses)).all()


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches ratios to another contender than the first of the same length."""
    rows: list[dict[str, Any]] = [
        {"tokens": t, "contender": c, "bytes": b << 20, "cpu_s": s, "loss": 6.0}
        for t, c, b, s in (
            (64, "one device", 8, 1.0),
            (64, "2 ranks, none", 4, 1.5),
            (128, "one device", 16, 2.0),
        )
    ]
    autosp.show(rows)
    lines = capsys.readouterr().out.splitlines()
    assert "0.50" in lines[2]
    assert "1.50" in lines[2]
    assert lines[3].count("1.00") == 2


def test_bytes_of_a_graph() -> None:
    """Catches nodes that are counted after their last use, views that are counted twice, and
    results that are let go."""

    def work(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1).view(-1)  # alive: x, y
        z = y * x.view(-1)  # x, y, z: the most
        return (z * 2).sum().expand(4)  # z and its double

    x = torch.ones(4, 8)
    graph = make_fx(work, tracing_mode="fake")(x)
    held = {node.name for node in graph.graph.find_nodes(op="placeholder")}
    assert autosp_memory.peak_of(graph, held) == 3 * x.nbytes


@pytest.mark.slow
def test_what_is_computed_again_costs_less_memory() -> None:
    """Catches FLOPs of attention that are not counted, and recompute that saves nothing."""
    rows = autosp_memory.recompute_rows(3, [2048], [0.25])
    found = {row["contender"]: row for row in rows}
    assert found["torch"]["more_flops"] == pytest.approx(0, abs=1e-9)
    assert 0.2 < found["block checkpoint"]["more_flops"] < 1 / 3
    assert 0 < found["headrace"]["more_flops"] < found["block checkpoint"]["more_flops"]
    assert (
        found["headrace"]["peak_bytes"] < found["torch"]["peak_bytes"] < found["none"]["peak_bytes"]
    )
    assert found["headrace, compiled"]["kept_bytes"] < found["torch"]["kept_bytes"]
    ours, torchs = found["headrace"], found["selective checkpoint"]
    assert ours["more_flops"] == pytest.approx(torchs["more_flops"], rel=1e-3)
    assert ours["kept_bytes"] < 1.01 * torchs["kept_bytes"]


@pytest.mark.slow
def test_the_longest_sequence() -> None:
    """Catches bytes that are not linear in layers and tokens, which the table takes them for."""
    shape = (64, 128, 8, 4, 256)
    for way in ("ZeRO-3, block checkpoint", "headrace, recompute, no logits"):
        at = {
            (layers, tokens): autosp_memory.peak_bytes(shape, layers, tokens, way)
            for layers in (1, 2, 3)
            for tokens in (1 << 14, 1 << 15)
        }
        slopes = [at[n, 1 << 15] - at[n, 1 << 14] for n in (1, 2, 3)]
        assert slopes[2] - slopes[1] == pytest.approx(slopes[1] - slopes[0], rel=1e-6)
    rows = autosp_memory.longest_rows(["Llama 1B"], 80 << 30)
    longest = {row["way"]: row["longest"] for row in rows}
    assert longest["headrace, recompute"] > 1.5 * longest["Ulysses"]
    assert longest["headrace, recompute, no logits"] > 2.7 * longest["Ulysses"]


@pytest.mark.slow
def test_contenders_have_the_same_gradients() -> None:
    """Catches sequence parallelism by hand that is another step, beside which ours is measured."""
    options = argparse.Namespace(tokens=64, rounds=1, backend="eager")
    for rows in run_ranks(2, autosp_speed.measured, options, timeout_s=200):
        assert {row["contender"] for row in rows} >= {"by hand", "headrace"}
        assert max(row["gradient_error"] for row in rows) < 1e-5
