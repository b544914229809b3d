"""Sums of parts of rows, against sums of whole tensors."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.ops import row_sums
from headrace.ops.row_sums import RowSum, segments

ROWS = 9


def _parts(seed: int, dtype: torch.dtype) -> tuple[list[tuple[int, torch.Tensor]], torch.Tensor]:
    """Some rows [n, 2] each with the first's place, and their sum [ROWS, 2] in fp64."""
    draw, total = random.Random(seed), torch.zeros(ROWS, 2, dtype=torch.float64)
    generator, parts = torch.Generator().manual_seed(seed), []
    for _ in range(draw.randrange(6)):
        start, stop = sorted((draw.randrange(ROWS), draw.randrange(ROWS)))
        rows = torch.randn(stop - start, 2, generator=generator, dtype=torch.float64).to(dtype)
        total[start:stop] += rows
        parts.append((start, rows))
    return parts, total


def _sum(parts: list[tuple[int, torch.Tensor]], total: torch.Tensor | None = None) -> RowSum:
    found = RowSum(ROWS, total=total)
    for start, rows in parts:
        found.add(start, rows)
    return found


@pytest.mark.parametrize("held", [0, 1, 9])
def test_held_parts_are_added_in_their_rows(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch parts that are cut where others are not, rows without a part left as they were
    found, parts that are lost or added twice when they are joined, and places taken for rows."""
    monkeypatch.setattr(row_sums, "HELD", held)
    places = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    for seed in range(40):
        parts, wanted = _parts(seed, torch.float64)
        out, moved = (torch.full((ROWS, 2), float("nan")).double() for _ in range(2))
        _sum(parts).write(out)
        _sum(parts).write(moved, places)
        onto = torch.ones(ROWS, 4, dtype=torch.float64)[:, ::2]
        _sum(parts).add_to(onto)
        at_once = torch.full((ROWS, 2), float("nan")).double()
        _sum(parts, at_once).write(at_once)
        for got in (out, moved[places], onto - 1, at_once):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-14)


def test_half_types_are_rounded_once() -> None:
    """Would catch sums in a half type: a thousand and one are a thousand there."""
    thousand, one = torch.full((ROWS, 2), 1024.0).bfloat16(), torch.ones(ROWS, 2).bfloat16()
    out = torch.empty(ROWS, 2, dtype=torch.bfloat16)
    _sum([(0, thousand), *[(0, one)] * 8]).write(out)
    assert torch.equal(out, torch.full_like(out, 1032.0))


def test_a_single_part_is_the_sum() -> None:
    """Would catch a part of some rows taken for the sum of all."""
    part = torch.ones(ROWS, 2)
    assert _sum([(0, part)]).only() is part
    assert _sum([(0, part[:-1])]).only() is None
    assert _sum([(0, part), (3, part[:2])]).only() is None
    assert _sum([]).only() is None


def test_segments() -> None:
    """Would catch rows between parts, before them and after them left out."""
    assert segments([(2, 5), (4, 7)], 9) == [
        (0, 2, []),
        (2, 4, [0]),
        (4, 5, [0, 1]),
        (5, 7, [1]),
        (7, 9, []),
    ]
    assert segments([], 3) == [(0, 3, [])]
    assert segments([], 0) == []
