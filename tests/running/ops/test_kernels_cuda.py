"""Back ends of CUDA: on a GPU against plain operators; without one, how they call torch.

Without a GPU their operators are answered on the CPU, as torch's sources define them: which
arguments mean what, which shapes come back, and what the kernels read by address alone.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.comm.gpus import count_gpus
from headrace.native.counted import ByteCounter
from headrace.ops.attention import BACKENDS, Partial, attend_blocks, attend_blocks_backward
from headrace.ops.kernels import Backend, Plain
from headrace.ops.kernels_cuda import CudaEfficient, CudaFlash, flash_as_before, take_newest_flash
from headrace.spec.blocks import Block, document_blocks

aten = torch.ops.aten
ONE = Plain()
CASES = {
    "one causal": (((5,), (5,)), True),
    "pack causal": (((1, 40, 3), (1, 40, 3)), True),
    "pack full": (((1, 40, 3), (1, 40, 3)), False),
    "rectangles": (((7, 2, 1), (33, 1, 50)), False),
    "single queries": (((1, 1), (9, 4)), False),
}
KINDS = [
    (CudaFlash(), torch.float16, 3e-3),
    (CudaFlash(), torch.bfloat16, 0.02),
    (CudaEfficient(), torch.float32, 1e-5),
    (CudaEfficient(), torch.float16, 3e-3),
    (CudaEfficient(), torch.bfloat16, 0.02),
]
each_backend = pytest.mark.parametrize(
    "backend", [CudaFlash(), CudaEfficient()], ids=lambda b: type(b).__name__
)
each_case = pytest.mark.parametrize(("pack", "causal"), CASES.values(), ids=CASES)
each_causal = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_heads = pytest.mark.parametrize(("n", "g"), [(4, 4), (4, 2), (4, 1)], ids=str)


def on_gpu(test):
    """Run where there is a CUDA device."""
    missing = pytest.mark.skipif(not count_gpus(), reason="needs a CUDA device")
    return pytest.mark.gpu(missing(test))


class Answers(TorchDispatchMode):
    """torch's CUDA attention as its sources define it, on the CPU and in fp64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket
        if name is aten._flash_attention_forward:
            return self._flash(*args, **(kwargs or {}))
        if name is aten._flash_attention_backward:
            return self._flash_backward(*args, **(kwargs or {}))
        if name is aten._efficient_attention_forward:
            return self._efficient(*args, **(kwargs or {}))
        if name is aten._efficient_attention_backward:
            return self._efficient_backward(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _flash(self, q, k, v, q_starts, k_starts, q_most, k_most, dropout, causal, debug):
        assert (dropout, debug) == (0.0, False)
        self._check(q, k, v, q_starts, k_starts, q_most, k_most)
        lse = q.new_empty((q.shape[1], q.shape[0]))
        out = torch.empty_like(q)
        for at, of in self._documents(q_starts, k_starts):
            out[at], lse[:, at] = ONE.forward(q[at], k[of], v[of], (), (), causal)
        return out, lse, q.new_empty(2), q.new_empty(()), q.new_empty(0)

    def _flash_backward(
        self,
        grad,
        q,
        k,
        v,
        out,
        lse,
        q_starts,
        k_starts,
        q_most,
        k_most,
        dropout,
        causal,
        seed,
        offset,
    ):
        assert dropout == 0.0
        self._check(q, k, v, q_starts, k_starts, q_most, k_most)
        assert all(x.is_contiguous() for x in (grad, out, lse))
        assert lse.shape == (q.shape[1], q.shape[0])
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for at, of in self._documents(q_starts, k_starts):
            dq[at], dk[of], dv[of] = ONE.backward(
                grad[at], q[at], k[of], v[of], out[at], lse[:, at], (), (), causal
            )
        return dq, dk, dv

    def _efficient(
        self, q, k, v, bias, q_starts, k_starts, q_most, k_most, dropout, mask, with_lse
    ):
        assert (bias, dropout, with_lse) == (None, 0.0, True)
        assert q.shape[2] == k.shape[2], "no grouped heads"
        self._check(q[0], k[0], v[0], q_starts, k_starts, q_most, k_most)
        places = math.ceil(q_most / 32) * 32
        lse = q.new_full((len(q_starts) - 1, q.shape[2], places), math.nan)
        out = torch.empty_like(q)
        for i, (at, of) in enumerate(self._documents(q_starts, k_starts)):
            parts = ONE.forward(q[0, at], k[0, of], v[0, of], (), (), bool(mask))
            out[0, at], lse[i, :, : at.stop - at.start] = parts
        return out, lse, q.new_empty(()), q.new_empty(()), q_most, k_most

    def _efficient_backward(
        self,
        grad,
        q,
        k,
        v,
        bias,
        out,
        q_starts,
        k_starts,
        q_most,
        k_most,
        lse,
        dropout,
        seed,
        offset,
        mask,
        bias_grad,
    ):
        assert (bias, dropout, bias_grad) == (None, 0.0, False)
        assert q.shape[2] == k.shape[2], "no grouped heads"
        self._check(q[0], k[0], v[0], q_starts, k_starts, q_most, k_most)
        assert grad.is_contiguous()
        assert out.is_contiguous()
        assert lse.shape[:2] == (len(q_starts) - 1, q.shape[2])
        assert lse.stride(1) % 8 == 0
        assert lse.stride(2) == 1
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for i, (at, of) in enumerate(self._documents(q_starts, k_starts)):
            rows = at.stop - at.start
            assert lse[i, :, rows:].isposinf().all(), "padding must weigh nothing"
            dq[0, at], dk[0, of], dv[0, of] = ONE.backward(
                grad[0, at],
                q[0, at],
                k[0, of],
                v[0, of],
                out[0, at],
                lse[i, :, :rows],
                (),
                (),
                bool(mask),
            )
        return dq, dk, dv, q.new_empty(())

    def _check(self, q, k, v, q_starts, k_starts, q_most, k_most) -> None:
        for starts, most, x in ((q_starts, q_most, q), (k_starts, k_most, k)):
            assert starts.dtype == torch.int32
            assert starts.is_contiguous()
            assert starts.diff().max() == most
            assert (int(starts[0]), int(starts[-1])) == (0, x.shape[0])
        assert all(x.stride(-1) == 1 for x in (q, k, v))

    def _documents(self, q_starts, k_starts):
        rows, columns = (itertools.pairwise(x.tolist()) for x in (q_starts, k_starts))
        return [(slice(*at), slice(*of)) for at, of in zip(rows, columns, strict=True)]


def _draw(pack, n: int, g: int, d: int = 8) -> list[torch.Tensor]:
    """grad, q, k, v, the last three as parts of wider tensors."""
    torch.manual_seed(n + g)
    rows, columns = (sum(lengths) for lengths in pack)
    q, kv = torch.randn(rows, n + 2, d).double(), torch.randn(columns, 2 * g + 1, d).double()
    grad = torch.randn(d, n, rows).double().permute(2, 1, 0)
    return [grad, q[:, 1:-1], kv[:, :g], kv[:, g : 2 * g]]


def _one_by_one(grad, q, k, v, pack, causal: bool):
    """(out, lse, dq, dk, dv) of plain operators, a document at a time."""
    parts = []
    queries = [x.split(pack[0]) for x in (grad, q)]
    keys = [x.split(pack[1]) for x in (k, v)]
    for g, *qkv in zip(*queries, *keys, strict=True):
        out, lse = ONE.forward(*qkv, (), (), causal)
        parts.append((out, lse.t(), *ONE.backward(g, *qkv, out, lse, (), (), causal)))
    out, lse, dq, dk, dv = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, lse.t(), dq, dk, dv


@each_backend
@each_case
@each_heads
def test_calls_mean_what_torch_defines(
    backend: Backend, pack, causal: bool, n: int, g: int
) -> None:
    """Would catch arguments in another order, a log-sum-exp that is padded or read in the wrong
    place, padding that weighs something, heads repeated in another order than they are added."""
    grad, q, k, v = _draw(pack, n, g)
    with Answers():
        out, lse = backend.forward(q, k, v, *pack, causal)
        strided = lse.t().contiguous().t()
        turned = out.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        grads = backend.backward(grad, q, k, v, turned, strided, *pack, causal)
    wanted = _one_by_one(grad, q, k, v, pack, causal)
    for one, other in zip((out, lse, *grads), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Modes(Answers):
    """Notes whether torch's attention would raise for want of a deterministic kernel: only then
    does it run that kernel itself."""

    def __init__(self) -> None:
        super().__init__()
        self.strict = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention_backward" in func.overloadpacket.__name__:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            self.strict.append(torch.are_deterministic_algorithms_enabled() and not warns)
        return super().__torch_dispatch__(func, types, args, kwargs)


@each_backend
@pytest.mark.parametrize("asked", [True, False])
def test_attention_adds_in_one_order_where_asked(backend: Backend, asked: bool) -> None:
    """Catches a deterministic run whose attention is not: torch's is none while it only warns."""
    pack, causal = CASES["pack causal"]
    grad, q, k, v = _draw(pack, 4, 2)
    torch.use_deterministic_algorithms(asked, warn_only=True)
    try:
        with Modes() as modes:
            out, lse = backend.forward(q, k, v, *pack, causal)
            backend.backward(grad, q, k, v, out, lse, *pack, causal)
        assert modes.strict == [asked]
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() is asked
    finally:
        torch.use_deterministic_algorithms(mode=False)


@each_backend
@each_causal
def test_torch_takes_the_calls(backend: Backend, causal: bool) -> None:
    """Would catch arguments that the installed torch does not have, in number or in kind."""
    pack, meta = ((3, 40), (3, 40)), torch.device("meta")
    dtype = torch.bfloat16 if isinstance(backend, CudaFlash) else torch.float32
    grad, q, k, v = (x.to(device=meta, dtype=dtype) for x in _draw(pack, 4, 2))
    out, lse = backend.forward(q, k, v, *pack, causal)
    grads = backend.backward(grad, q, k, v, out, lse, *pack, causal)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == ((4, 43), torch.float32)
    for one, other in zip(grads, (q, k, v), strict=True):
        assert (one.shape, one.dtype) == (other.shape, dtype)


@each_backend
def test_tensors_of_a_cpu_are_not_theirs(backend: Backend) -> None:
    """Would catch CUDA kernels called where there is no CUDA."""
    for dtype in (torch.float32, torch.bfloat16):
        assert not backend.supports(torch.empty(1, 1, 8, dtype=dtype))
    like = torch.empty(1, 1, 8, dtype=torch.bfloat16, device="meta")
    assert backend.supports(like)  # which stands for a GPU's
    assert not backend.supports(torch.empty(1, 1, 9, dtype=torch.bfloat16, device="meta"))
    assert not backend.supports(like.double())


@on_gpu
@pytest.mark.parametrize(("backend", "dtype", "tolerance"), KINDS, ids=str)
@each_case
@pytest.mark.parametrize(("n", "g", "d"), [(4, 4, 64), (8, 2, 128), (4, 1, 72)], ids=str)
def test_kernels_agree_with_plain_operators(
    backend: Backend, dtype: torch.dtype, tolerance: float, pack, causal: bool, n, g, d
) -> None:
    """Would catch what the sources do not tell: values, masks and grouped heads on a GPU."""
    tensors = [x.to(device="cuda", dtype=dtype) for x in _draw(pack, n, g, d)]
    assert backend.supports(tensors[1])
    grad, q, k, v = tensors
    out, lse = backend.forward(q, k, v, *pack, causal)
    grads = backend.backward(grad, q, k, v, out, lse, *pack, causal)
    wanted = _one_by_one(*(x.double() for x in tensors), pack, causal)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=0, atol=max(tolerance / 10, 1e-5))
    for one, other in zip((out, *grads), (wanted[0], *wanted[2:]), strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * scale)


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_parts_of_documents_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    """Would catch a backward that does not take the output and log-sum-exp over all keys."""
    lengths, cuts = (70, 1, 30), (Block(0, 50, 0, 50, True), Block(50, 70, 0, 50, False))
    rest = (Block(50, 70, 50, 70, True), *document_blocks((70, 1, 30), True)[1:])
    tensors = [x.to(device="cuda", dtype=dtype) for x in _draw((lengths, lengths), 4, 2, 64)]
    grad, q, k, v = tensors
    partial = Partial(q)
    partial.add(q, k, v, cuts)
    partial.add(q, k, v, rest)
    out, lse = partial.result(dtype)
    grads = [torch.empty(x.shape, dtype=lse.dtype, device="cuda") for x in (q, k, v)]
    attend_blocks_backward(
        grad, q, k, v, out, lse, (*cuts, *rest), *grads, fresh_q=True, fresh_kv=True
    )
    again = attend_blocks(q, k, v, (*rest, *cuts))[0]
    wanted = _one_by_one(*(x.double() for x in tensors), (lengths, lengths), True)
    pairs = ((out, wanted[0]), (again, wanted[0]), *zip(grads, wanted[2:], strict=True))
    for one, other in pairs:
        scale = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * scale)


@on_gpu
def test_each_type_has_its_kernel() -> None:
    """Would catch whole score rows where a kernel could run."""
    ampere = torch.cuda.get_device_capability() >= (8, 0)
    types = {
        torch.bfloat16: CudaFlash if ampere else Plain,
        torch.float16: CudaFlash if ampere else CudaEfficient,
        torch.float32: CudaEfficient,
        torch.float64: Plain,
    }
    for dtype, kind in types.items():
        q = torch.empty(1, 1, 64, dtype=dtype, device="cuda")
        assert type(next(b for b in BACKENDS if b.supports(q))) is kind


def _flash(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fails: str = "") -> str:
    attention, active = torch.nn.attention, list[str]()

    def activate(name: str) -> None:
        if fails:
            raise AttributeError(fails)
        active.append(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate)
    taken = take_newest_flash()
    assert active == ([taken] if taken == "FA3" else [])
    return taken


def test_the_newest_flash_attention_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a package that is installed and not used, one turned on where it does not run, a
    user's choice that is taken back, and a run that a broken package ends."""
    assert _flash(monkeypatch, (9, 0)) == "FA2"
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert _flash(monkeypatch, (9, 0)) == "FA3"
    assert _flash(monkeypatch, (8, 0)) == "FA2"
    with pytest.warns(UserWarning, match="cannot be used: AttributeError: no kernels"):
        assert _flash(monkeypatch, (9, 0), "no kernels") == "FA2"
    now: list[str | None] = [None]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: now[0])
    restored: list[bool] = []
    monkeypatch.setattr(
        torch.nn.attention, "restore_flash_attention_impl", lambda **_: restored.append(True)
    )
    with flash_as_before():
        assert not restored
    assert not restored
    with flash_as_before():
        now[0] = "FA4"
    assert restored
    assert _flash(monkeypatch, (9, 0)) == "FA4"


def test_what_the_backward_takes_is_counted() -> None:
    """Catches plans for a device that is rehearsed without what its kernel allocates: 32 KB a token
    of 4,096 features in 32 heads, of which 8 have keys."""
    with ByteCounter() as counter:
        tokens, flash = 4096, CudaFlash()
        q = torch.empty(tokens, 32, 128, dtype=torch.bfloat16, device="meta")
        k = torch.empty(tokens, 8, 128, dtype=torch.bfloat16, device="meta")
        out, lse = flash.forward(q, k, k, (tokens,), (tokens,), True)
        before = counter.current_bytes
        counter.reset_peak()
        made = flash.backward(out, q, k, k, out, lse, (tokens,), (tokens,), True)
        workspace = counter.peak_bytes - before - sum(x.nbytes for x in made)
    assert 32_768 <= workspace / tokens < 34_000
