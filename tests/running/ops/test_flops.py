"""Counted operations against the scores of blocks, for every kernel that is called."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headrace.ops.attention import BACKENDS, attend, attend_blocks, attend_blocks_backward
from headrace.ops.flops import ATTENTION, FLOPS, flop_counter
from headrace.ops.kernels_cuda import CudaEfficient, CudaFlash
from headrace.spec.blocks import Block, document_blocks, scores_of

D = 8
each_heads = pytest.mark.parametrize(("n", "g"), [(3, 3), (6, 2), (4, 1)], ids=str)
each_causal = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_pack = pytest.mark.parametrize("lengths", [(9,), (1, 20, 3), ()], ids=str)


def _draw(rows: int, columns: int, n: int, g: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, n, D), torch.randn(columns, g, D), torch.randn(columns, g, D)


@each_pack
@each_causal
@each_heads
def test_packs(lengths, n: int, g: int, causal: bool) -> None:
    """Would catch a CPU kernel that counts nothing, causal squares counted whole or without their
    diagonal, and heads of keys counted in place of those of queries."""
    q, k, v = (x.requires_grad_() for x in _draw(sum(lengths), sum(lengths), n, g))
    scores = scores_of(document_blocks(lengths, causal))
    with flop_counter() as forward:
        out = attend(q, k, v, lengths, causal)
    with flop_counter() as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 4 * n * D * scores
    assert backward.get_total_flops() == 10 * n * D * scores


@each_heads
def test_blocks(n: int, g: int) -> None:
    """Would catch rectangles counted as the squares of their rows, and merges that count."""
    blocks = (Block(0, 5, 3, 20, False), Block(2, 9, 0, 7, True), Block(2, 3, 7, 9, False))
    q, k, v = _draw(9, 20, n, g)
    with flop_counter() as forward:
        out, lse = attend_blocks(q, k, v, blocks)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    with flop_counter() as backward:
        attend_blocks_backward(q, q, k, v, out, lse, blocks, *grads, fresh_q=True, fresh_kv=True)
    assert forward.get_total_flops() == 4 * n * D * scores_of(blocks)
    assert backward.get_total_flops() == 10 * n * D * scores_of(blocks)


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (4, 9), (9, 4), (1, 3)])
def test_a_causal_rectangle_of_the_cpu_kernel(rows: int, columns: int) -> None:
    """Would catch a corner of the mask elsewhere than the kernel's: other models call it so."""
    q, k, v = (x.transpose(0, 1)[None] for x in _draw(rows, columns, 2, 2))
    with flop_counter() as counter:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)
    seen = int(torch.ones(rows, columns).tril().sum())
    assert counter.get_total_flops() == 4 * 2 * D * seen


def test_what_torch_counts_is_counted_still() -> None:
    """Would catch a mapping in place of torch's own, and one that outlives its counter."""
    known = torch.utils.flop_counter.flop_registry.copy()
    with flop_counter() as counter:
        _ = torch.ones(3, 4) @ torch.ones(4, 5)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5
    assert torch.utils.flop_counter.flop_registry == known


def test_a_rehearsal_without_values_counts_the_same() -> None:
    """Would catch formulas that read tensors: a step is counted before it runs."""
    lengths = (1, 20, 3)
    with FakeTensorMode(), flop_counter() as counter:
        q, k, v = (x.requires_grad_() for x in _draw(24, 24, 4, 2))
        attend(q, k, v, lengths, True).sum().backward()
    assert counter.get_total_flops() == 14 * 4 * D * scores_of(document_blocks(lengths, True))


def _cuda_arguments(backend, pack, causal: bool, device: str):
    """Arguments of a back end's two operators, as it gives them."""
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in FLOPS:
                seen.append((func.overloadpacket, args))
                args = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
                outs = func(*args, **(kwargs or {}))
                return [
                    torch.zeros(x.shape, device=device) if hasattr(x, "shape") else x for x in outs
                ]
            return func(*args, **(kwargs or {}))

    q, k, v = (x.to(device) for x in _draw(sum(pack[0]), sum(pack[1]), 4, 2))
    with Spy():
        out, lse = backend.forward(q, k, v, *pack, causal)
        backend.backward(q, q, k, v, out, lse, *pack, causal)
    return seen


@pytest.mark.parametrize("backend", [CudaFlash(), CudaEfficient()], ids=lambda b: type(b).__name__)
@pytest.mark.parametrize(
    ("pack", "causal"),
    [(((1, 20, 3),) * 2, True), (((1, 20, 3),) * 2, False), (((7, 2), (9, 1)), False)],
)
def test_packed_kernels_of_a_gpu(backend, pack, causal: bool) -> None:
    """Would catch a pack counted as documents of the longest length where lengths are known, and
    any other count than that where they are not."""
    pairs = list(zip(*pack, strict=True))
    known = sum(Block(0, q, 0, k, causal).scores for q, k in pairs)
    most = Block(0, max(pack[0]), 0, max(pack[1]), causal).scores * len(pairs)
    for device, scores in (("cpu", known), ("meta", most)):
        for (name, args), products in zip(
            _cuda_arguments(backend, pack, causal, device), (2, 5), strict=True
        ):
            assert FLOPS[name](*args, out_val=None) == 2 * products * 4 * D * scores


def test_batches_of_equal_lengths_on_a_gpu() -> None:
    """Would catch heads taken for tokens where there are no starts: other models call it so."""
    q, k, v = torch.randn(2, 5, 4, D), torch.randn(2, 7, 2, D), torch.randn(2, 7, 2, D)
    flash, efficient = (
        torch.ops.aten._flash_attention_forward,
        torch.ops.aten._efficient_attention_forward,
    )
    full, half = 4 * 4 * D * 2 * 5 * 7, 4 * 4 * D * 2 * 15
    assert FLOPS[flash](q, k, v, None, None, 5, 7, 0.0, False, False, scale=None) == full
    assert FLOPS[flash](q, k, v, None, None, 5, 7, 0.0, True, False) == half
    assert FLOPS[efficient](q, k, v, None, None, None, None, None, 0.0, 0, True) == full
    assert FLOPS[efficient](q, k, v, None, None, None, None, None, 0.0, 1) == half


def test_kernels_of_all_back_ends_are_known() -> None:
    """Would catch a back end that joins the list and counts nothing."""
    assert {type(b).__name__ for b in BACKENDS} == {
        "CpuFlash",
        "CudaFlash",
        "CudaEfficient",
        "Plain",
    }
    assert len(ATTENTION) == 2 * 3  # the plain one is made of products that torch counts
