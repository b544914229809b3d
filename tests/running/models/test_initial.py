"""Initial weights: the same for any parts, any threads, and normal."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from headrace.layouts.partition import Rows
from headrace.models import initial
from headrace.models.initial import initial_rows
from headrace.spec import Architecture
from headrace.spec.architecture import WeightSpec

MODEL = Architecture(layers=8, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
F64 = torch.float64


def _matrix(rows: int, columns: int, name: str = "layers.0.qkv.weight") -> WeightSpec:
    return WeightSpec(name=name, shape=(rows, columns), unit=None, bucket=1)


@pytest.mark.parametrize("columns", [1, 7, 8, 33, 640])
@pytest.mark.parametrize("at_once", [1, 100, 1 << 18])
def test_any_parts_are_the_same_rows(
    columns: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches numbers that depend on which rows a rank has, or on how many are drawn at once."""
    weight = _matrix(57, columns)
    whole = initial_rows(weight, Rows(0, 57), MODEL, 3, F64)
    monkeypatch.setattr(initial, "_AT_ONCE", at_once)
    for first, end in ((0, 0), (0, 1), (5, 6), (5, 31), (31, 57)):
        part = initial_rows(weight, Rows(first, end), MODEL, 3, F64)
        assert part.shape == (end - first, columns)
        torch.testing.assert_close(part, whole[first:end], rtol=0, atol=0)


def test_threads_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches threads that share a stream or write each other's rows."""
    weight, begun = _matrix(300, 64), []

    class Pool(ThreadPoolExecutor):
        def __init__(self, threads: int) -> None:
            begun.append(threads)
            super().__init__(threads)

    one = initial_rows(weight, Rows(0, 300), MODEL, 3, F64)
    monkeypatch.setattr(initial, "_AT_ONCE", 640)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(initial, "ThreadPoolExecutor", Pool)
    assert torch.equal(initial_rows(weight, Rows(0, 300), MODEL, 3, F64), one)
    assert begun == [4]


def test_numbers_are_normal_and_apart() -> None:
    """Catches a deviation that is wrong, tails that are missing, rows, seeds or names that draw the
    same, and pairs that are not independent."""
    weight = _matrix(500, 1000)
    x = initial_rows(weight, Rows(0, 500), MODEL, 3, F64).numpy() / 0.02
    n = x.size
    assert abs(x.mean()) < 4 / n**0.5
    assert abs((x**2).mean() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert 4.0 < np.abs(x).max() < 6.7
    for beside in (x[:, 1::2] * x[:, ::2], x[1:] * x[:-1], x[:, 2:] * x[:, :-2]):
        assert abs(beside.mean()) < 4 / beside.size**0.5
    # Numbers of a pair share a radius: squares must not go together.
    assert (
        abs(np.corrcoef(x[:, ::2].ravel() ** 2, x[:, 1::2].ravel() ** 2)[0, 1]) < 4 / (n / 2) ** 0.5
    )
    assert len(np.unique(x)) == n
    for other in (
        initial_rows(weight, Rows(0, 500), MODEL, 4, F64),
        initial_rows(_matrix(500, 1000, "layers.1.qkv.weight"), Rows(0, 500), MODEL, 3, F64),
    ):
        assert abs((other.numpy() / 0.02 * x).mean()) < 4 / n**0.5


def test_what_writes_to_the_residual_stream_is_smaller() -> None:
    """Catches the scale of GPT-2 at the wrong weights."""
    for name, deviation in (
        ("layers.0.qkv.weight", 0.02),
        ("layers.0.proj.weight", 0.005),
        ("layers.0.out.weight", 0.005),
    ):
        x = initial_rows(_matrix(200, 200, name), Rows(0, 200), MODEL, 0, F64)
        assert float(x.std()) == pytest.approx(deviation, rel=0.02), name
