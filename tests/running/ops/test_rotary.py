"""Rotary positions against complex numbers; the order of heads against loops."""

from __future__ import annotations

import pytest
import torch

from headrace.ops.rotary import (
    Rotation,
    rotary_tables,
    rotate_and_sort,
    turned,
)

THETA = 100.0
SHAPES = {"mha": (3, 1), "gqa": (2, 3), "mqa": (1, 4)}  # KV groups, query heads of each
each_shape = pytest.mark.parametrize(("groups", "m"), SHAPES.values(), ids=SHAPES)


def _draw(tokens: int, groups: int, m: int, features: int = 6) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(tokens, groups, m + 2, features, dtype=torch.float64)


def _turned(x: torch.Tensor, position: float) -> torch.Tensor:
    """Features i and i + D / 2 as one complex number, turned by position * theta^(-2 i / D)."""
    half = x.shape[-1] // 2
    frequency = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones_like(frequency), position * frequency)
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([z.real, z.imag], -1)


@each_shape
@pytest.mark.parametrize("rotated", [True, False])
def test_heads_in_order_queries_and_keys_turned(groups: int, m: int, rotated: bool) -> None:
    """Would catch values rotated too, neighbours paired instead of halves, and heads of several
    groups in the order of the fused projection."""
    positions = torch.tensor([0, 5, 1, 2])
    qkv, n = _draw(4, groups, m), groups * m
    tables = rotary_tables(positions, 6, THETA, torch.float64) if rotated else None
    before = qkv.clone()
    out = rotate_and_sort(qkv, tables)
    assert torch.equal(qkv, before)
    assert out.shape == (4, n + 2 * groups, 6)
    for t, position in enumerate(positions.tolist()):
        for group in range(groups):
            for head in range(m + 2):
                at = group * m + head if head < m else n + (head - m) * groups + group
                wanted = qkv[t, group, head]
                if rotated and head <= m:
                    wanted = _turned(wanted, position)
                torch.testing.assert_close(out[t, at], wanted, rtol=0, atol=1e-14)


@each_shape
@pytest.mark.parametrize("rotated", [True, False])
def test_gradient_by_differences(groups: int, m: int, rotated: bool) -> None:
    """Would catch a backward that turns the same way as the forward, or in another order."""
    tables = rotary_tables(torch.tensor([3, 0]), 4, THETA, torch.float64) if rotated else None
    qkv = _draw(2, groups, m, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate_and_sort(x, tables), qkv)


def test_the_gradient_that_is_handed_in_stays_as_it_is() -> None:
    """Would catch a backward that rotates in place: autograd may hold that gradient elsewhere."""
    tables = rotary_tables(torch.tensor([3, 1]), 6, THETA, torch.float64)
    out = rotate_and_sort(_draw(2, 2, 3).requires_grad_(), tables)
    grad = torch.randn_like(out)
    before = grad.clone()
    out.backward(grad)
    assert torch.equal(grad, before)


def test_scores_depend_on_the_distance_alone() -> None:
    """Would catch angles that are not linear in the position."""
    qkv = _draw(1, 1, 1)
    scores = []
    for start in (0, 7, 100_000):
        tables = rotary_tables(torch.tensor([start, start + 3]), 6, THETA, torch.float64)
        out = rotate_and_sort(qkv.expand(2, 1, 3, 6), tables)
        scores.append(float(out[1, 0] @ out[0, 1]))
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-9)


def test_angles_of_far_positions_are_exact() -> None:
    """Would catch angles taken in fp32: at a million tokens they are off by a tenth of a turn."""
    positions = torch.tensor([0, 1_000_003])
    wide = rotary_tables(positions, 128, 10000.0, torch.float64)
    for dtype, tolerance in ((torch.float32, 1e-7), (torch.bfloat16, 2**-8)):
        for narrow, table in zip(rotary_tables(positions, 128, 10000.0, dtype), wide, strict=True):
            assert narrow.dtype == dtype
            assert narrow.shape == (2, 64)
            torch.testing.assert_close(narrow.double(), table, rtol=0, atol=tolerance)
    assert torch.equal(wide[0][0], torch.ones(64).double())
    assert torch.equal(wide[1][0], torch.zeros(64).double())


def test_no_tokens() -> None:
    """Would catch a shape inferred from nothing on a rank without tokens."""
    tables = rotary_tables(torch.empty(0, dtype=torch.int64), 6, THETA, torch.float64)
    qkv = _draw(0, 2, 3).requires_grad_()
    out = rotate_and_sort(qkv, tables)
    out.backward(torch.zeros_like(out))
    assert out.shape == (0, 10, 6)
    assert qkv.grad.shape == qkv.shape


@each_shape
@pytest.mark.parametrize("rotated", [True, False])
def test_without_autograd_the_pair_is_the_same(groups: int, m: int, rotated: bool) -> None:
    """Would catch two versions of the rotation that drift apart, and a gradient changed in place:
    a rotation is undone by its transpose, so the pair gives back what went in."""
    tables = rotary_tables(torch.tensor([3, 0, 9]), 6, THETA, torch.float64) if rotated else None
    qkv = _draw(3, groups, m)
    rotation = Rotation(tables=tables)
    out = rotation.turned(qkv)
    assert torch.equal(out, rotate_and_sort(qkv, tables))
    before = out.clone()
    again = rotation.turned_back(*out.split([groups * m, groups, groups], dim=1))
    assert torch.equal(out, before)
    torch.testing.assert_close(again, qkv, rtol=0, atol=1e-14)


def test_no_heads() -> None:
    """Would catch a division by zero on a rank whose shard holds no KV group."""
    tables = rotary_tables(torch.tensor([3, 0]), 6, THETA, torch.float64)
    rotation = Rotation(tables=tables)
    out = rotation.turned(_draw(2, 0, 3))
    assert out.shape == (2, 0, 6)
    assert rotation.turned_back(out, out, out).shape[:2] == (2, 0)


@pytest.mark.parametrize("rotated", [True, False])
def test_rows_that_stand_in_another_order(rotated: bool) -> None:
    """Would catch positions of other rows than those of the result, and a backward into the order
    of the result."""
    rows = torch.tensor([2, 0, 3, 1])
    tables = rotary_tables(torch.tensor([3, 0, 9, 4]), 6, THETA, torch.float64) if rotated else None
    qkv = _draw(4, 2, 3).requires_grad_()
    one = turned(qkv, Rotation(tables=tables, order=(rows, rows.argsort())))
    other = rotate_and_sort(qkv[rows], tables)
    assert torch.equal(one.qkv, other)
    weigh = torch.randn_like(other)
    (wanted,) = torch.autograd.grad(other, qkv, weigh)
    one.grads.append(weigh.split([6, 2, 2], dim=1))
    assert torch.equal(torch.autograd.grad(one.token, qkv, torch.empty(0))[0], wanted)
