"""One layer on one device: microseconds a token, per method, beside plain torch.

A layer of Llama's shape in bf16 runs forward and backward as one rank of several would run it; the
others are absent, so links take no time. Beside it a block of torch alone, as it is and compiled.
Seconds are the device's own (events), the least of several; utilisation is against the rate of a
product of large matrices, measured first.

Examples:
    python benchmarks/gpu_layer.py                                  # on a GPU
    python benchmarks/gpu_layer.py --hidden 1024 4096 --tokens 8192 131072 --json out.json
    python benchmarks/gpu_layer.py --device cpu --hidden 256 --tokens 128 --ranks 2   # to try it
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from launches import METHODS, llama
from plain_llama import Block, causal
from rich.console import Console
from rich.table import Table

from headrace.comm.fake_world import fake_world
from headrace.native.counted import ByteCounter, DeviceBytes
from headrace.native.machine import is_out_of_memory, machine_facts, matmul_flops_per_s
from headrace.native.spans import clock_of
from headrace.profiling.branches import BranchTarget
from headrace.profiling.probe import ChainProbe, Probe, bytes_of, seconds_of
from headrace.profiling.two_layers import TwoLayers
from headrace.spec import Architecture
from headrace.spec.known_methods import FACTS
from headrace.spec.layer_plan import BRANCHES

TIMES = 5


def measured(probes: list[Probe], device: str) -> dict[str, float]:
    """Seconds forward and backward and bytes kept, of all probes together."""
    clock, counter = clock_of(device), ByteCounter if device == "cpu" else DeviceBytes
    found = {"forward_s": 0.0, "backward_s": 0.0, "kept_bytes": 0.0}
    for probe in probes:
        seconds_of(probe, clock)  # what is compiled or allocated first
        runs = [seconds_of(probe, clock) for _ in range(TIMES)]
        found["forward_s"] += min(run[0] for run in runs)
        found["backward_s"] += min(run[1] for run in runs)
        found["kept_bytes"] += bytes_of(probe, counter)[0]
    return found


def of_method(
    a: Architecture, method: str, ranks: int, tokens: int, device: str
) -> dict[str, float]:
    """A layer of a method on one of ``ranks`` with ``tokens`` each."""
    ranks = 1 if method == "local" else ranks
    with fake_world(0, ranks) as groups:
        two, everyone = TwoLayers(a, dtype=torch.bfloat16, device=device), tuple(range(ranks))
        targets = [
            BranchTarget(p=ranks, part=part, method=method, level="none") for part in BRANCHES
        ]
        groups.prepare(g for target in targets for g in two.groups_of(target, everyone))
        return measured(
            [two.probe(groups, everyone, target, (tokens * ranks,)) for target in targets], device
        )


def of_torch(a: Architecture, tokens: int, device: str, *, compiled: bool) -> dict[str, float]:
    """Two blocks of torch alone."""
    blocks = [
        Block(a.hidden, a.ffn, a.heads, a.kv_heads, causal).to(device, torch.bfloat16)
        for _ in range(2)
    ]
    angles = torch.arange(tokens, device=device)[:, None] * torch.ones(
        a.head_features, device=device
    )
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    run: Callable[..., torch.Tensor] = torch.compile(Block.forward) if compiled else Block.forward

    def entry() -> torch.Tensor:
        return torch.randn(1, tokens, a.hidden, device=device, dtype=torch.bfloat16)

    def layer(block: Block) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: run(block, x, cos, sin)

    return measured([ChainProbe(entry, [layer(block) for block in blocks])], device)


def sides(a: Architecture, o: argparse.Namespace) -> dict[str, Callable[[int], dict[str, float]]]:
    found: dict[str, Callable[[int], dict[str, float]]] = {
        "torch": lambda tokens: of_torch(a, tokens, o.device, compiled=False),
    }
    if o.compile:
        found["torch, compiled"] = lambda tokens: of_torch(a, tokens, o.device, compiled=True)
    for method in o.methods:
        if FACTS[method].supports(a, 1 if method == "local" else o.ranks) is not None:
            continue
        found[method] = lambda tokens, method=method: of_method(
            a, method, o.ranks, tokens, o.device
        )
    return found


def rows(o: argparse.Namespace, peak: float) -> list[dict[str, Any]]:
    """A row for each width, number of tokens and side; one that does not fit says so."""
    found = []
    for hidden in o.hidden:
        a = llama(hidden)
        matrices = sum(
            n * m
            for n, m in (
                (a.hidden, (a.heads + 2 * a.kv_heads) * a.head_features),
                (a.hidden, a.hidden),
                (a.hidden, 3 * a.ffn),
            )
        )
        for tokens in o.tokens:
            for side, run in sides(a, o).items():
                print(f"hidden {hidden}, {tokens:,} tokens: {side}", file=sys.stderr)
                row: dict[str, Any] = {"hidden": hidden, "tokens": tokens, "side": side}
                try:
                    row |= run(tokens)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    row["out_of_memory"] = True
                else:
                    pack = tokens * (
                        1 if side in ("torch", "torch, compiled", "local") else o.ranks
                    )
                    flops = 6 * tokens * matrices + 6 * tokens * pack * a.hidden
                    seconds = row["forward_s"] + row["backward_s"]
                    row |= {
                        "us_per_token": 1e6 * seconds / tokens,
                        "utilisation": flops / seconds / peak,
                    }
                found.append(row)
    return found


def table(found: list[dict[str, Any]]) -> Table:
    made = Table(
        "hidden", "tokens", "side", "us a token", "of the peak", "kept KB a token", "times torch"
    )
    plain = {(row["hidden"], row["tokens"]): row for row in found if row["side"] == "torch"}
    for row in found:
        texts = [str(row["hidden"]), f"{row['tokens']:,}", row["side"]]
        if "out_of_memory" in row:
            made.add_row(*texts, "out of memory")
            continue
        base = plain[row["hidden"], row["tokens"]].get("us_per_token")
        made.add_row(
            *texts,
            f"{row['us_per_token']:.3f}",
            f"{row['utilisation']:.1%}",
            f"{row['kept_bytes'] / row['tokens'] / 1e3:.0f}",
            f"{row['us_per_token'] / base:.3f}" if base else "",
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 4096], help="features")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 8192, 32_768], help="of the rank"
    )
    parser.add_argument("--ranks", type=int, default=8, help="ranks of a group (8)")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=METHODS[:-1],
        choices=METHODS,
        metavar="METHOD",
        help="which of " + ", ".join(METHODS),
    )
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave out what torch compiles"
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    o = parser.parse_args(arguments)
    if o.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here: --device cpu tries the script")
    if min(*o.hidden, 128) < 128 or min(*o.tokens, 1) < 1 or o.ranks < 2:
        parser.error("wanted --hidden of 128 or more, tokens, and two ranks or more")
    facts = machine_facts(o.device)
    peak = matmul_flops_per_s(o.device, torch.bfloat16)
    print(f"{facts['device']}, torch {facts['torch']}: products at {peak / 1e12:.3g} TFLOP/s")
    found = rows(o, peak)
    Console(width=None if sys.stdout.isatty() else 120).print(table(found))
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        numbers = {"machine": facts, "peak_flops_per_s": peak, "ranks": o.ranks, "rows": found}
        o.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
