"""Kernels on one device: those written beside those compiled, and attention beside torch's own.

Gates and rotations of a layer of Llama's shape in bf16: milliseconds of the Triton kernel, of what
``torch.compile`` makes of the same function for any number of tokens, and of the memory alone (the
bytes read and written once, at the rate of a copy, measured first). Attention over one document:
FlashAttention as headrace calls it, and torch's ``scaled_dot_product_attention`` with its own
FlashAttention and with cuDNN, forward and backward, once the shape is known. Seconds are those of
the device (events), the median of several.

Examples:
    python benchmarks/gpu_kernels.py                                  # on a GPU
    python benchmarks/gpu_kernels.py --tokens 8192 --json out.json
    python benchmarks/gpu_kernels.py --device cpu --tokens 16         # to try it
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from launches import llama
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.models import transformer  # noqa: F401  with all functions that devices compile
from headrace.native.machine import copied_bytes_per_s, machine_facts
from headrace.native.spans import clock_of
from headrace.ops.attention import BACKENDS
from headrace.ops.fused import FUSED
from headrace.spec import Architecture

TIMES = 9


def seconds(run: Callable[[], object], device: str) -> float:
    """The median of several runs, the first ones left out: they compile."""
    clock = clock_of(device)
    found = []
    for _ in range(TIMES + 3):
        start = clock.mark()
        run()
        found.append(clock.between(start, clock.mark()))
    return statistics.median(found[3:])


def of_chains(a: Architecture, tokens: int, device: str, rate: float) -> list[dict[str, Any]]:
    """A row for each function that has a Triton kernel."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, grad = draw(tokens, 2 * a.ffn), draw(tokens, a.ffn)
    heads = draw(tokens, a.kv_heads, a.heads // a.kv_heads + 2, a.head_features)
    tables = draw(tokens, a.head_features // 2), draw(tokens, a.head_features // 2)
    parts = [draw(tokens, n, a.head_features) for n in (a.heads, a.kv_heads, a.kv_heads)]
    half = heads.element_size() * tokens
    gate, moved = half * a.ffn, 2 * half * heads[0].numel()
    cases: dict[str, tuple[tuple[Any, ...], int]] = {
        "swiglu": ((x, a.ffn), 3 * gate),
        "swiglu_backward": ((grad, x, a.ffn), 5 * gate),
        "rotate_and_sort": ((heads, *tables, None), moved),
        "unrotate_and_unsort": ((*parts, *tables, None), moved),
    }
    found = []
    for name, (args, moved_bytes) in cases.items():
        one = FUSED[name]
        row = {"tokens": tokens, "function": name, "memory_s": moved_bytes / rate}
        row["compiled_s"] = seconds(lambda one=one, args=args: one.of_compiler(*args), device)
        row["written_s"] = seconds(lambda one=one, args=args: one(*args), device)
        row["runs"] = "Triton" if one.written else "plain operators"
        found.append(row)
    return found


def of_attention(a: Architecture, tokens: int, device: str) -> dict[str, Any]:
    """Causal attention over one document, forward and backward, by each of its kernels."""

    def draw(count: int) -> torch.Tensor:
        return torch.randn(tokens, count, a.head_features, device=device, dtype=torch.bfloat16)

    q, k, v, grad = draw(a.heads), draw(a.kv_heads), draw(a.kv_heads), draw(a.heads)
    kernel, lengths = next(b for b in BACKENDS if b.supports(q)), (tokens,)
    flops = 3.5 * 2 * tokens**2 * a.heads * a.head_features

    def ours() -> None:
        out, sums = kernel.forward(q, k, v, lengths, lengths, True)
        kernel.backward(grad, q, k, v, out, sums, lengths, lengths, True)

    moved = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v, grad)]
    leaves = [x.requires_grad_() for x in moved[:3]]

    def torchs() -> None:
        done = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        done.backward(moved[3])

    row = {"tokens": tokens, "flops": flops, "headrace_s": seconds(ours, device)}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        if device == "cpu" and backend is SDPBackend.CUDNN_ATTENTION:
            continue
        with sdpa_kernel(backend):
            row[f"{backend.name.lower()}_s"] = seconds(torchs, device)
    return row


def chains(found: list[dict[str, Any]]) -> Table:
    made = Table("tokens", "function", "runs", "memory ms", "ms", "compiled", "compiled / ms")
    for row in found:
        made.add_row(
            f"{row['tokens']:,}",
            row["function"],
            row["runs"],
            *(f"{1e3 * row[name]:.3f}" for name in ("memory_s", "written_s", "compiled_s")),
            f"{row['compiled_s'] / row['written_s']:.2f}",
        )
    return made


def attentions(found: list[dict[str, Any]]) -> Table:
    names = [name for name in found[0] if name.endswith("_s")]
    made = Table("tokens", *(f"{name.removesuffix('_s')} ms (TFLOP/s)" for name in names))
    for row in found:
        made.add_row(
            f"{row['tokens']:,}",
            *(f"{1e3 * row[n]:.3f} ({row['flops'] / row[n] / 1e12:.0f})" for n in names),
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32_768])
    parser.add_argument("--hidden", type=int, default=4096, help="features")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    o = parser.parse_args(arguments)
    if o.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here: --device cpu tries the script")
    if min(o.tokens) < 1 or o.hidden < 128:
        parser.error("wanted --tokens of 1 or more and --hidden of 128 or more")
    a, facts, rate = llama(o.hidden), machine_facts(o.device), copied_bytes_per_s(o.device)
    print(f"{facts['device']}, torch {facts['torch']}: copies {rate / 1e12:.3g} TB/s")
    rows = [row for tokens in o.tokens for row in of_chains(a, tokens, o.device, rate)]
    attention = [of_attention(a, tokens, o.device) for tokens in o.tokens]
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(chains(rows))
    console.print(attentions(attention))
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        numbers = {
            "machine": facts,
            "copied_bytes_per_s": rate,
            "chains": rows,
            "attention": attention,
        }
        o.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
