"""Triton kernels, run by Triton's interpreter on a CPU: what they give beside plain operators."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from headrace.ops.fused import FUSED
from running.ops.test_fused import call, draw, tables

pytest.importorskip("triton")
ROOM = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}


def agree(name: str, got: torch.Tensor, wanted: torch.Tensor, room: float) -> None:
    assert got.shape == wanted.shape, name
    scale = float(wanted.abs().max()) if len(wanted) else 0.0
    off = float((got.double() - wanted).abs().max()) if len(wanted) else 0.0
    assert off <= room * scale, f"{name} of {got.dtype}: off by {off}"


def of_any_type_and_number_of_tokens() -> None:
    from headrace.ops import triton_kernels

    for name in triton_kernels.__all__:
        for dtype, room in ROOM.items():
            for tokens in (0, 1, 5, 37):
                got = call(getattr(triton_kernels, name), name, tokens, dtype)
                wanted = call(FUSED[name].function, name, tokens, torch.float64)
                for one, exact in zip(got, wanted, strict=True):
                    assert one.dtype == dtype
                    agree(name, one, exact, room)


def of_odd_sizes_rows_and_strides() -> None:
    """Sizes that no power of two divides, rows in any order and twice, tensors that are parts of
    others, and more heads and features than a program takes."""
    from headrace.ops import triton_kernels as kernels

    cos, sin = tables(9, 24, torch.float64)
    rows = torch.tensor([3, 1, 6, 0, 2, 5, 4, 1, 1])
    thin = draw(24, 9, 8).permute(1, 2, 0)
    wide = draw(11, 30, 24)[1:10].split([24, 3, 3], dim=1)
    cases = (
        ("rotate_and_sort", (draw(7, 3, 6, 24), cos, sin, rows)),
        ("rotate_and_sort", (draw(9, 7, 6, 24), cos, sin, None)),
        ("unrotate_and_unsort", (*wide, cos, sin, None)),
        ("unrotate_and_unsort", (draw(9, 16, 24), thin, draw(9, 8, 24), cos, sin, rows % 9)),
        ("swiglu", (draw(3, 6000), 1500)),
        ("swiglu", (draw(3, 3000), 4)),
        ("swiglu_backward", (draw(3, 3000), draw(6000, 3).T, 1500)),
        ("swiglu_backward", (draw(3, 1500), draw(3, 3000), 4)),
    )
    for name, args in cases:
        agree(name, getattr(kernels, name)(*args), FUSED[name].function(*args), 1e-12)


def test_kernels_give_what_plain_operators_do() -> None:
    """Catches a kernel that takes or writes another place, or rounds on the way. In a process of
    its own, as kernels are interpreted or compiled from their import on."""
    code = f"import {__name__} as t; {'; '.join(f't.{f.__name__}()' for f in CHECKS)}"
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


CHECKS = (of_any_type_and_number_of_tokens, of_odd_sizes_rows_and_strides)
