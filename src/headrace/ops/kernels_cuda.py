"""Back ends of attention on CUDA: one kernel for a whole run of documents.

Shape legend as in ``headrace.ops.kernels``. Arguments go by position and only those that torch has
had since 2.9, because later versions add and rename the rest.
"""

# ruff: noqa: SLF001  kernels have no public names

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.attention

from headrace.ops.fused import kept, to_device
from headrace.ops.kernels import Pair, Triple, dense, fold, spread

__all__ = ["CudaEfficient", "CudaFlash", "flash_as_before", "take_newest_flash"]

_GRID = 65_535
"""Most documents of one call: CUDA's limit for all dimensions of a kernel's grid but the first;
documents are one of these."""

_TILE = 128
"""Most rows by which FlashAttention pads each document's sums."""

_PAD = 32
"""Rows of the efficient kernel's log-sum-exp come in multiples of this many."""


@dataclass(frozen=True, slots=True)
class CudaFlash:
    """FlashAttention: half types on Ampere and later, grouped heads as they are.

    torch's later versions of it (3, 4), where they are turned on, stand behind the same names.
    Tensors without contents stand for those of such a device.
    """

    documents: int = _GRID

    def supports(self, q: torch.Tensor) -> bool:
        """Half types and features of a head in whole eights up to 256."""
        is_half, features = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
        if not is_half or features % 8 or features > 256:
            return False
        return q.is_meta or (
            q.is_cuda
            and torch.backends.cuda.is_flash_attention_available()
            and torch.cuda.get_device_capability(q.device) >= (8, 0)
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Pair:
        """Attention within each document of a run: (out [Q, N, D], lse [N, Q])."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            dense(q),
            dense(k),
            dense(v),
            *_starts(q_lengths, k_lengths, q.device),
            max(q_lengths),
            max(k_lengths),
            0.0,  # no dropout
            causal,
            False,  # no debug mask
        )
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Triple:
        """(dq, dk, dv) of a run of documents, in the shapes of q, k, v."""
        # The kernel reads lse and grad by address, so they are contiguous.
        unread = _unread((2,), torch.uint64, q.device)
        # where tensors have no contents, what the kernel would allocate, alive until this returns
        _ = _workspace(q, k, len(q_lengths)) if q.is_meta else ()
        with _deterministic():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                grad.contiguous(),
                dense(q),
                dense(k),
                dense(v),
                out.contiguous(),
                lse.contiguous(),
                *_starts(q_lengths, k_lengths, q.device),
                max(q_lengths),
                max(k_lengths),
                0.0,  # no dropout
                causal,
                unread,
                unread,
            )
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class CudaEfficient:
    """Memory-efficient attention: fp32, and half types where FlashAttention does not run.

    It knows neither grouped heads (keys and values are repeated, their gradients added up) nor a
    packed log-sum-exp (its own is [documents, N, longest document], padded to multiples of
    ``_PAD``).
    """

    documents: int = _GRID

    def supports(self, q: torch.Tensor) -> bool:
        """Features of a head in whole 16 bytes; bf16 on Ampere and later."""
        has_kernel = q.dtype in (torch.float32, torch.float16, torch.bfloat16)
        if not (q.is_cuda or q.is_meta) or not has_kernel or q.shape[-1] * q.element_size() % 16:
            return False
        return (
            q.is_meta
            or q.dtype != torch.bfloat16
            or torch.cuda.get_device_capability(q.device) >= (8, 0)
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Pair:
        """Attention within each document of a run: (out [Q, N, D], lse [N, Q])."""
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            dense(q)[None],
            dense(spread(k, q))[None],
            dense(spread(v, q))[None],
            None,  # no bias
            *_starts(q_lengths, k_lengths, q.device),
            max(q_lengths),
            max(k_lengths),
            0.0,  # no dropout
            int(causal),
            True,  # also returns the log-sum-exp
        )
        # lse is [documents, N, padded length]: keep the rows that are tokens
        rows = lse.transpose(0, 1).reshape(q.shape[1], -1)
        return out[0], rows.index_select(1, _padded_index(q_lengths, lse.shape[2], q.device))

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Triple:
        """(dq, dk, dv) of a run of documents, in the shapes of q, k, v."""
        width = math.ceil(max(q_lengths) / _PAD) * _PAD
        # padded as the kernel gave it: e^(score - inf) = 0 in rows that are no tokens
        rows = lse.new_full((q.shape[1], len(q_lengths) * width), math.inf)
        rows.index_copy_(1, _padded_index(q_lengths, width, q.device), lse)
        padded = rows.view(q.shape[1], len(q_lengths), width).transpose(0, 1).contiguous()
        unread = _unread((), torch.int64, q.device)
        # ``out`` is contiguous: the kernel reads only some of its strides and assumes the others.
        with _deterministic():
            dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
                grad.contiguous()[None],
                dense(q)[None],
                dense(spread(k, q))[None],
                dense(spread(v, q))[None],
                None,  # no bias
                out.contiguous()[None],
                *_starts(q_lengths, k_lengths, q.device),
                max(q_lengths),
                max(k_lengths),
                padded,
                0.0,  # no dropout
                unread,
                unread,
                int(causal),
                False,  # a bias needs no gradient
            )
        return dq[0], fold(dk[0], k), fold(dv[0], v)


def take_newest_flash() -> str:
    """Have torch run FlashAttention 3 where its package is installed (``flash_attn_interface``),
    the device is of the generation that it is for, and the user chose none. Returns the name of
    what runs, such as FA2; warns where the package cannot be used."""
    attention = torch.nn.attention
    implementation: str | None = attention.current_flash_attention_impl()
    fits = torch.cuda.get_device_capability() == (9, 0) and find_spec("flash_attn_interface")
    if implementation is None and fits and "FA3" in attention.list_flash_attention_impls():
        try:
            attention.activate_flash_attention_impl("FA3")
            implementation = "FA3"
        except Exception as error:  # whatever a package of another torch raises
            attention.restore_flash_attention_impl(_raise_warn=False)
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"FlashAttention 3 is installed and cannot be used: {why}", stacklevel=2)
    return implementation or "FA2"


def _workspace(q: torch.Tensor, k: torch.Tensor, documents: int) -> tuple[torch.Tensor, ...]:
    """Tensors of the sizes that FlashAttention 2 allocates within its backward of q [Q, N, D] and k
    [K, G, D], so that peak memory is right where tensors have no contents: sums of dq in fp32,
    padded for each document; one number for each row and head of them; and dk and dv of every query
    head where query heads share keys."""
    padded_tokens, (heads, features) = len(q) + _TILE * documents, q.shape[1:]
    # features are padded to a multiple of 32
    dq_sums = q.new_empty((padded_tokens, heads, -(-features // 32) * 32), dtype=torch.float32)
    row_values = q.new_empty((heads, padded_tokens), dtype=torch.float32)
    if k.shape[1] == heads:
        return dq_sums, row_values
    return dq_sums, row_values, *(k.new_empty((len(k), heads, features)) for _ in range(2))


@contextmanager
def _deterministic() -> Iterator[None]:
    """Context in which the backward of attention is deterministic where the user asked torch for
    deterministic algorithms. With ``warn_only`` torch would run kernels that add in any order, so
    that setting is off inside."""
    warns = (
        torch.are_deterministic_algorithms_enabled()
        and torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if warns:
        torch.use_deterministic_algorithms(mode=True, warn_only=False)
    try:
        yield
    finally:
        if warns:
            torch.use_deterministic_algorithms(mode=True, warn_only=True)


@contextmanager
def flash_as_before() -> Iterator[None]:
    """Context at whose end a FlashAttention that was activated inside is deactivated again."""
    attention = torch.nn.attention
    current_implementation = attention.current_flash_attention_impl
    before = current_implementation()
    try:
        yield
    finally:
        if current_implementation() != before:
            attention.restore_flash_attention_impl(_raise_warn=False)


def _starts(q_lengths: Sequence[int], k_lengths: Sequence[int], device: torch.device) -> Pair:
    """(starts of the documents among queries, among keys): int32 [documents + 1] each, with the end
    of the last document."""

    def make() -> torch.Tensor:
        starts = torch.tensor([[0, *q_lengths], [0, *k_lengths]], dtype=torch.int32)
        return to_device(starts.cumsum(1, dtype=torch.int32), device)

    queries, keys = kept(("starts", tuple(q_lengths), tuple(k_lengths), device), make)
    return queries, keys


def _padded_index(lengths: Sequence[int], width: int, device: torch.device) -> torch.Tensor:
    """[Q]: the place of each token where documents of these ``lengths``, one after the other, are
    padded to ``width`` places each."""

    def make() -> torch.Tensor:
        counts, tokens = torch.tensor(lengths), sum(lengths)
        # by how much padding moves the tokens of each document
        gaps = torch.arange(len(lengths)) * width - (counts.cumsum(0) - counts)
        places = torch.arange(tokens) + gaps.repeat_interleave(counts, output_size=tokens)
        return to_device(places, device)

    return kept(("padded", tuple(lengths), width, device), make)


def _unread(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor to pass as the random state, which kernels do not read without dropout."""
    return kept(
        ("unread", shape, dtype, device), lambda: torch.zeros(shape, dtype=dtype, device=device)
    )
