"""Kernels that one layer launches, forward and backward, per method: counted without a device.

A layer of Llama's shape runs on tensors without contents, as one rank of several whose others are
absent; every operator that reaches a device is counted:

    kernels       operators that compute or copy; views and allocations are none
    stops         copies from the host that stand still until the device has done all before them,
                  and values that the host reads
    collectives   of torch.distributed
    elementwise   bytes read and written by operators that are neither products nor attention,
                  for each token of the rank

Examples:
    python benchmarks/launches.py
    python benchmarks/launches.py --ranks 4 --methods ulysses_z megatron_cz --tokens 8192
    python benchmarks/launches.py --methods local --list    # which operators, how often, bytes
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.comm.fake_world import fake_world
from headrace.methods.weights import Whole
from headrace.native.counted import tensors_in
from headrace.ops.fused import FUSED
from headrace.ops.loss import head_loss
from headrace.profiling.branches import BranchTarget
from headrace.profiling.two_layers import TwoLayers
from headrace.spec import Architecture
from headrace.spec.known_methods import FACTS
from headrace.spec.layer_plan import BRANCHES, Recompute

METHODS = ("local", "ulysses_z", "megatron_cz_gather", "megatron_cz", "megatron_ts", "metp")
_HEAD = "head and loss"
_ALLOCATES = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
    "set_",
    "resize_",
}
_READS = {"_local_scalar_dense", "nonzero", "item"}
_SOME_ROWS = {"index_copy_", "index_fill_", "put_up_"}
_ADDS = {"add_to_"}
"""Of those that give nothing, the ones that read what they write to."""
_PRODUCTS = {
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "_flash_attention_forward",
    "_flash_attention_backward",
}


@dataclass
class Counts:
    """Of one method's layer on one rank."""

    kernels: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    collectives: int = 0
    moved: Counter[str] = field(default_factory=Counter)

    @property
    def elementwise_bytes(self) -> int:
        """Read and written by all of them."""
        return self.moved.total()


class Launches(TorchDispatchMode):
    """Counts while :attr:`on`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.on = Counts(), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.on:
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        place, _, name = str(func._overloadpacket).rpartition(".")  # noqa: SLF001
        if place == "c10d":
            self.counts.collectives += 1
            return
        made = list(tensors_in(out if isinstance(out, tuple | list | dict) else (out,)))
        taken = [*tensors_in(args), *tensors_in(kwargs)]
        if name in _READS and all(x.device.type == "meta" for x in taken):
            self.counts.stops[name] += 1
        if name in _ALLOCATES or not any(x.device.type == "meta" for x in (*made, *taken)):
            return
        returns = func._schema.returns  # noqa: SLF001
        if any(r.alias_info and not r.alias_info.is_write for r in returns):
            return
        if any(x.device.type == "cpu" and x.dim() for x in taken) and name in ("_to_copy", "copy_"):
            if not kwargs.get("non_blocking", len(args) > 2 and args[2]):
                self.counts.stops[name] += 1
            return
        self.counts.kernels[name] += FUSED[name].kernels if name in FUSED else 1
        if name not in _PRODUCTS:
            self.counts.moved[name] += _moved(name, taken, made, kwargs.get("out"))


class Made(TorchFunctionMode):
    """Counts tensors that are made of the host's numbers: no operator tells of their copy."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and self._launches.on and out.dim():
            self._launches.counts.stops["tensor"] += out.device.type == "meta"
        return out


def _bytes(x: torch.Tensor) -> int:
    """What is read of a tensor: places that are the same count once."""
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride or length == 1 else 1
    return size


def _moved(
    name: str, taken: list[torch.Tensor], made: list[torch.Tensor], out: torch.Tensor | None
) -> int:
    """Bytes that an operator reads and writes; what it changes in place it does both to."""
    if name in _SOME_ROWS:  # of its first tensor, those of an index that comes next
        rows, index, *parts = taken
        return _bytes(rows) * len(index) // len(rows) + sum(map(_bytes, (index, *parts)))
    written = {id(x) for x in made}
    once = [x for x in taken if x.device.type == "meta" and id(x) not in written]
    again = [x for x in taken if id(x) in written and x is not out and name != "copy_"]
    again += once[:1] if name in _ADDS else []
    return sum(map(_bytes, (*once, *made, *again)))


def counted(
    a: Architecture, method: str, ranks: int, lengths: Sequence[int], level: Recompute = "none"
) -> Counts:
    """One layer of ``method`` on one of ``ranks``, over a pack of documents."""
    ranks = 1 if method == "local" else ranks
    found = Launches()
    with fake_world(0, ranks) as groups:
        two = TwoLayers(a, dtype=torch.bfloat16, device="meta")
        for part in BRANCHES:
            target = BranchTarget(p=ranks, part=part, method=method, level=level)
            groups.prepare(two.groups_of(target, tuple(range(ranks))))
            probe = two.probe(groups, tuple(range(ranks)), target, tuple(lengths))
            probe.forward(lambda: None)  # makes what is made once
            probe.backward(lambda: None)
            places: list[None] = []

            def forwards(places: list[None] = places) -> None:
                places.append(None)
                found.on = len(places) == 2  # the second layer: the first makes what all share

            def backwards(places: list[None] = places) -> None:
                found.on = False

            with found, Made(found):
                probe.forward(forwards)
                found.on = True
                probe.backward(backwards)
    return found.counts


def counted_head(hidden: int, tokens: int, words: int = 128_256) -> Counts:
    """The head and its loss, forward and backward in one, of so many tokens of a rank."""
    found = Launches()
    x, matrix = (
        torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta") for rows in (tokens, words)
    )
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    weight = Whole(value=matrix, grad=torch.empty_like(matrix, dtype=torch.float32))
    with found, Made(found):
        found.on = True
        head_loss(x, labels, weight, 1 / tokens)
    return found.counts


def row(method: str, counts: Counts, tokens: int) -> dict[str, Any]:
    """The numbers of one method; ``tokens`` of the rank."""
    return {
        "method": method,
        "kernels": counts.kernels.total(),
        "stops": counts.stops.total(),
        "collectives": counts.collectives,
        "elementwise_mb_per_token": counts.elementwise_bytes / tokens / 1e6,
    }


def llama(hidden: int = 4096) -> Architecture:
    """A layer of Llama 3 8B, of another width as told."""
    heads = hidden // 128
    return Architecture(
        layers=2,
        hidden=hidden,
        heads=heads,
        kv_heads=max(1, heads // 4),
        ffn=hidden * 7 // 2,
        vocabulary=512,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=8, help="ranks of a group (8)")
    parser.add_argument("--tokens", type=int, default=65_536, help="of the pack of a group (65536)")
    parser.add_argument("--documents", type=int, default=3, help="in the pack (3)")
    parser.add_argument("--hidden", type=int, default=4096, help="features (4096)")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    parser.add_argument("--list", action="store_true", help="operators: how often, and their bytes")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    o = parser.parse_args(arguments)
    each = o.tokens // o.documents
    if each < 1 or o.ranks < 1 or o.hidden < 128:
        parser.error("wanted --tokens of at least --documents, a rank, and --hidden of 128 or more")
    lengths = [each] * (o.documents - 1) + [o.tokens - each * (o.documents - 1)]
    table = Table("method", "kernels", "stops", "collectives", "elementwise MB a token")
    rows = []
    for method in (*o.methods, _HEAD):
        tokens = o.tokens if method == "local" else o.tokens // o.ranks
        if method == _HEAD:
            counts = counted_head(o.hidden, tokens)
        elif rule := FACTS[method].supports(llama(o.hidden), 1 if method == "local" else o.ranks):
            table.add_row(method, rule)
            continue
        else:
            counts = counted(llama(o.hidden), method, o.ranks, lengths)
        found = row(method, counts, tokens)
        rows.append(found)
        *numbers, moved = [found[key] for key in list(found)[1:]]
        table.add_row(method, *(f"{n:,}" for n in numbers), f"{moved:.2f}")
        if o.list:
            for name in sorted(counts.kernels, key=lambda name: -counts.moved[name]):
                cells = str(counts.kernels[name]), str(counts.stops.get(name, "")), ""
                each_mb = f"{counts.moved[name] / tokens / 1e6:.3f}"
                table.add_row(f"  {name}", *cells, each_mb if name in counts.moved else "")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
