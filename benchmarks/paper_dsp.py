"""Claims of DSP (Zhao et al., ICML 2025) beside what headrace gets.

    Table 3, 8  volumes, counted in the real code of one rank among absent partners, on the paper's
                layers: forward as in the paper, with the backward, and with recompute
    Table 9     exchanges alone: by the links' numbers, and measured on ranks of this machine
    Figure 5    steps on 128 H100s with the paper's group sizes (Table 4)
    Figure 6-8  weak and strong scaling, and inference
    Figure 9    bytes of activations, counted at the paper's sizes

Seconds at the paper's sizes are simulated: the rank's operators by the roofline of the device, its
exchanges by the links (dsp_absent.py). Rivals are strong forms of theirs: Ulysses exchanges
queries, keys and values at once, a ring computes whole rows while the next keys come, Megatron's
sums cross to each node once. Blocks are computed again in the backward; the paper does not say so,
but its clips fit no H100 otherwise.

examples:
    python benchmarks/paper_dsp.py --quick
    python benchmarks/paper_dsp.py --json benchmarks/results/papers/dsp.json
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from claims import Claim, finish, options
from dsp import FRAMES, PATCHES, SMALL, inputs_of, model_of, on_ranks
from dsp_absent import Cell, Rehearsed, rehearsed
from dsp_sides import METHODS, Prepared, prepare
from dsp_switches import layer_rows
from measured import settled

from headrace.cli.display import tell
from headrace.comm.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from headrace.comm.fake_world import fake_world
from headrace.models.transformer_2d import SHAPES_2D
from headrace.native.counted import ByteCounter, TrafficCounter
from headrace.spec.hardware import Hardware

HARDWARE = "h100"
COSTS = "roofline of H100s with NVLink and NDR InfiniBand"
COUNTED = "one rank of N = 8, blocks of the 720M model"
NODE = 8

LENGTHS = (128, 256, 512, 1024)
"""Frames of Figure 5: 0.5M to 4M places."""

RANKS_OF_LENGTH = {"720m": (2, 4, 8, 16), "3b": (4, 8, 16, 32)}
"""Ranks that share a clip of each length (Table 4), by all but Megatron-SP."""

MEGATRON_RANKS = {"720m": {128: 2, 256: 4, 512: 16}, "3b": {128: 4, 256: 16}}
"""Those by Megatron-SP, by frames; there are none for longer clips."""

Scaling = tuple[tuple[str, int, tuple[int, ...]], ...]

SCALING: Scaling = (
    ("720m", 64, (1, 2, 4, 8)),
    ("720m", 256, (8, 16, 32, 64)),
    ("3b", 16, (1, 2, 4, 8)),
    ("3b", 128, (8, 16, 32, 64)),
)
"""Model, frames and GPUs of Tables 6 and 7."""

QUICK: Scaling = (("720m", 64, (1, 8)),)

ACROSS = ("720m", 256, 8, 64)
"""Model, frames, and first and last GPUs of what Figure 6 is said to lose across nodes."""

TABLE_9 = {"dsp": 914.0, "ulysses": 5828.0, "megatron-lm": 8412.0, "megatron-sp": 51908.0}
"""Milliseconds."""


@cache
def _found(cell: Cell) -> tuple[Rehearsed, Rehearsed]:
    return rehearsed(cell, HARDWARE)


def _has_heads(cell: Cell) -> bool:
    """Whether the method can share the cell's model among as many ranks."""
    return cell.method in ("dsp", "ring") or cell.ranks <= SHAPES_2D[cell.model].heads


def _weights_s(cell: Cell, devices: int) -> float:
    """Seconds of a step in which gradients are summed and weights gathered over all devices, not
    hidden; Megatron's are in shards."""
    if devices == 1 or cell.method.startswith("megatron"):
        return 0.0
    shape = SHAPES_2D[cell.model]
    weights = 2 * shape.layers * shape.block_elements
    return 2 * Hardware.parse(HARDWARE).gather_s(devices, weights)


def _step_s(cell: Cell, devices: int | None = None) -> float:
    """Seconds of a step of the whole model."""
    return _found(cell)[0].step_s + _weights_s(cell, devices or cell.ranks)


def _rivals(cell: Cell) -> Iterator[Cell]:
    """The same by the other methods that have heads for it."""
    for method in METHODS[1:]:
        other = replace(cell, method=method)
        if _has_heads(other):
            yield other


# ------------------------------------------------------------------------------ Tables 3, 8 and 9


_REASONS = {
    "forward": "",
    "forward and backward": "the paper counts the forward only; a ring's backward sends keys and "
    "values again, and their gradients",
    "and recompute": "the switches of hr.adapt stand outside of checkpoints; exchanges within "
    "blocks are repeated",
}


def volumes() -> Iterator[Claim]:
    """Table 3, on 8 ranks."""
    ranks = 8
    own = Cell(method="dsp", model="720m", frames=64, ranks=ranks)
    sent = {
        (method, recompute): _found(replace(own, method=method, recompute=recompute))[1]
        for method in METHODS
        for recompute in (False, True)
    }
    tensor = own.tensor_bytes
    yield Claim(
        where="Table 3, DSP",
        what="sent by each rank of 8, a layer forward, of M",
        unit="M",
        theirs=2 / ranks,
        ours=sent["dsp", False].sent_forward / tensor,
        how="counted",
        costs=COUNTED,
        less=True,
        why="2 M (N - 1) / N^2: the paper counts what a rank keeps, too",
    )
    theirs = {"ulysses": 2.0, "ring": float(ranks), "megatron-sp": 4.0 * ranks}
    theirs["megatron-lm"] = theirs["megatron-sp"]
    parts: Mapping[str, Callable[[str], float]] = {
        "forward": lambda m: sent[m, False].sent_forward,
        "forward and backward": lambda m: sent[m, False].sent_step,
        "and recompute": lambda m: sent[m, True].sent_step,
    }
    for method, times in theirs.items():
        for part, count in parts.items():
            yield Claim(
                where=f"Table 3, {method}",
                what=f"bytes beside DSP's, {part}",
                unit="times",
                theirs=times,
                ours=count(method) / count("dsp"),
                how="counted",
                costs=COUNTED,
                why=_REASONS[part],
            )
    yield from _reductions(sent)


def _reductions(sent: Mapping[tuple[str, bool], Rehearsed]) -> Iterator[Claim]:
    """The two sentences on how much less is sent than by the others."""
    ours = min(
        1 - sent["dsp", False].sent_step / sent[method, False].sent_step for method in METHODS[1:]
    )
    for where, theirs in (("abstract, contributions", 0.5), ("sections 1 and 6", 0.75)):
        yield Claim(
            where=where,
            what="less sent than by any other, at least",
            unit="fraction",
            theirs=theirs,
            ours=ours,
            how="counted",
            costs=COUNTED,
            why=""
            if theirs == 0.5
            else "Table 3's own 2 M/N against 4 M/N is 50 %; counted it is the same, so 75 % is "
            "an error of the text",
        )


def operations() -> Iterator[Claim]:
    """Table 8: what a rank of 8 sends in each collective of a tensor of M."""
    ranks, rows = 8, 1024
    sizes, group = [rows // ranks] * ranks, None
    with fake_world(0, ranks) as groups:
        group = groups.world
        shard, whole = torch.zeros(rows // ranks), torch.zeros(rows)
        calls: Mapping[str, tuple[float, Callable[[], Any]]] = {
            "all-gather": (1.0, lambda: all_gather_rows(shard, sizes, group)),
            "reduce-scatter": (1.0, lambda: reduce_scatter_rows(whole, sizes, group)),
            "all-reduce": (
                2.0,
                lambda: all_gather_rows(reduce_scatter_rows(whole, sizes, group), sizes, group),
            ),
            "all-to-all": (
                1 / ranks,
                lambda: all_to_all_rows(
                    shard, [rows // ranks**2] * ranks, [rows // ranks**2] * ranks, group
                ),
            ),
        }
        for name, (theirs, call) in calls.items():
            with TrafficCounter() as wire:
                call()
            yield Claim(
                where=f"Table 8, {name}",
                what="sent by each rank of 8, of M",
                unit="M",
                theirs=theirs,
                ours=wire.sent_bytes / whole.nbytes,
                how="counted",
                costs="collectives on 8 ranks",
                less=True,
                why="(N - 1) / N of it leaves the rank",
            )


def latencies(measured: Mapping[str, float]) -> Iterator[Claim]:
    """Table 9: times of exchanges of others beside DSP's. Each of 4 ranks for the measured ones."""
    cell = Cell(method="dsp", model="720m", frames=2048, ranks=16, training=False)
    own = _found(cell)[0].link_s
    sent = _found(cell)[1].sent_forward
    wider = _found(replace(cell, ranks=32))[0].link_s
    yield Claim(
        where="Table 9, DSP",
        what="switches of a forward of 8M places, 720M on 32 and on 16 GPUs",
        unit="s",
        theirs=TABLE_9["dsp"] / 1e3,
        ours=(wider, own),
        how="simulated",
        costs=COSTS,
        less=True,
        why="the paper names neither the model nor the GPUs of its 914 ms",
    )
    reasons = {
        "ulysses": "in as many messages: what is more than that is its implementation",
        "megatron-lm": "which cross to a node once only",
        "megatron-sp": "as many as Megatron-LM, for which Table 9 has a sixth of the time",
    }
    for method in ("ulysses", "megatron-lm", "megatron-sp"):
        whole, layer = _found(replace(cell, method=method))
        yield Claim(
            where=f"Table 9, {method}",
            what="exchanges beside DSP's, 8M places on 16 GPUs",
            unit="times",
            theirs=TABLE_9[method] / TABLE_9["dsp"],
            ours=whole.link_s / own,
            how="simulated",
            costs=COSTS,
            why=f"it sends {layer.sent_forward / sent:.0f} times the bytes of DSP (counted), "
            + reasons[method],
        )
    names = {
        "ulysses": "as one exchange of queries, keys and values",
        "four exchanges": "as the four of DeepSpeed",
    }
    for way, what in names.items():
        yield Claim(
            where="Table 9, ulysses",
            what=f"exchanges beside DSP's, {what}",
            unit="times",
            theirs=TABLE_9["ulysses"] / TABLE_9["dsp"],
            ours=measured[way] / measured["dsp"],
            how="measured",
            costs="4 CPU ranks",
            why="twice the bytes (counted); theirs is slower still",
        )
    yield Claim(
        where="Table 9, DSP",
        what="two switches as the paper's code has them, beside headrace's",
        unit="times",
        theirs=1.0,
        ours=measured["padded dsp"] / measured["dsp"],
        how="measured",
        costs="4 CPU ranks",
        why="one message without padding instead of a list, a pad and a cat",
    )


# ------------------------------------------------------------------------------------ Figure 5


def end_to_end(cells: Sequence[Cell]) -> Iterator[Claim]:
    """Figure 5: cells of DSP with the paper's group sizes, on 128 devices."""
    devices = 128
    steps = {cell: _step_s(cell, devices) for cell in cells}
    ulysses = [(cell, replace(cell, method="ulysses")) for cell in cells]
    ratios = [_step_s(other, devices) / steps[cell] for cell, other in ulysses]
    free = max(
        _step_s(other, devices) / (steps[cell] - _found(cell)[0].link_s) for cell, other in ulysses
    )
    yield Claim(
        where="Figure 5",
        what="DSP over Ulysses",
        unit="times",
        theirs=(1.32, 1.75),
        ours=(min(ratios), max(ratios)),
        how="simulated",
        costs=COSTS,
        why=f"with exchanges of no time at all it were at most {free:.2f}; theirs is over the "
        "Ulysses of its Table 9",
    )
    excess = TABLE_9["ulysses"] / TABLE_9["dsp"] / 2
    slow = [
        (_step_s(other, devices) + (excess - 1) * _found(other)[0].link_s) / steps[cell]
        for cell, other in ulysses
    ]
    yield Claim(
        where="Figure 5",
        what=f"DSP over Ulysses with exchanges {excess:.1f} times as slow, as in Table 9",
        unit="times",
        theirs=(1.32, 1.75),
        ours=(min(slow), max(slow)),
        how="simulated",
        costs=COSTS,
        why="their Figure 5 by their Table 9: most of the gain is that of a slow Ulysses",
    )
    others = {
        other: _step_s(other, devices) * other.ranks / (steps[cell] * cell.ranks)
        for cell in cells
        for other in _others(cell)
    }
    most = max(others, key=lambda other: others[other])
    yield Claim(
        where="Figure 5",
        what=f"DSP over the others, at most ({most.method})",
        unit="times",
        theirs=10.0,
        ours=others[most],
        how="simulated",
        costs=COSTS,
        why=f"{_busy(most)}; it computes meanwhile, and sends no byte twice",
    )
    yield from _kept_speed(cells, steps)


def _others(cell: Cell) -> Iterator[Cell]:
    """The same clip by a ring, and by Megatron-SP on as many ranks as the paper has."""
    yield replace(cell, method="ring")
    ranks = MEGATRON_RANKS[cell.model].get(cell.frames)
    if ranks is not None:
        yield replace(cell, method="megatron-sp", ranks=ranks)


def _kept_speed(cells: Sequence[Cell], steps: Mapping[Cell, float]) -> Iterator[Claim]:
    """FLOPs of a GPU per second at the longest clip beside the shortest."""
    speeds = {cell: _flops(cell) / cell.ranks / steps[cell] for cell in cells}
    lost, longest = list[float](), list[Cell]()
    for model in {cell.model: None for cell in cells}:
        own = [cell for cell in cells if cell.model == model]
        first, last = min(own, key=lambda c: c.frames), max(own, key=lambda c: c.frames)
        lost.append(1 - speeds[last] / speeds[first])
        longest.append(last)
        for cell in (first, last):
            yield Claim(
                where="Figure 5",
                what=f"TFLOPs of a GPU, {model}, {cell.frames} frames on {cell.ranks} each",
                unit="TFLOP/s",
                theirs=None,
                ours=speeds[cell] / 1e12,
                how="simulated",
                costs=COSTS,
            )
    yield Claim(
        where="Figure 5",
        what="FLOPs lost from the shortest to the longest clip",
        unit="fraction",
        theirs=0.23,
        ours=max(lost),
        how="simulated",
        costs=COSTS,
        less=True,
        why="the longest: " + ", ".join(map(_busy, longest)),
    )


def _busy(cell: Cell) -> str:
    """How long a rank's links are busy in a step."""
    found = _found(cell)[0]
    return f"links of {cell.model} busy {found.link_s:.2f} s of {found.step_s:.2f} s"


def _flops(cell: Cell) -> float:
    """Operations of a forward and a backward, recompute not counted."""
    shape, tokens = SHAPES_2D[cell.model], cell.tokens
    attention = 4 * tokens * shape.hidden * (cell.frames + 4096)
    return 3.0 * shape.layers * (2 * tokens * shape.block_elements + attention)


# ----------------------------------------------------------------------------- Figures 6, 7 and 8


def weak_scaling(tables: Scaling) -> Iterator[Claim]:
    """Figure 6: as many more clips as there are more GPUs, all shared by all of them."""
    cells = [
        Cell(method="dsp", model=model, frames=frames, ranks=count, clips=count // counts[0])
        for model, frames, counts in tables
        for count in counts
        if count > 1
    ]
    ahead = {cell: min(map(_step_s, _rivals(cell))) / _step_s(cell) for cell in cells}
    least = min(ahead, key=lambda cell: ahead[cell])
    nearest = min(_rivals(least), key=_step_s)
    free = _step_s(nearest) / (_step_s(least) - _found(least)[0].link_s)
    yield Claim(
        where="Figure 6, weak",
        what=f"DSP over the next, at least ({least.model}, {least.ranks} GPUs)",
        unit="times",
        theirs=1.807,
        ours=ahead[least],
        how="simulated",
        costs=COSTS,
        why=f"with no exchange at all it were {free:.3f}: {nearest.method} sends "
        f"{_found(nearest)[0].link_s / _found(nearest)[0].step_s:.1%} of its step over NVLink",
    )
    yield from _lost()


def _lost() -> Iterator[Claim]:
    """The throughput of each GPU that is lost from the first to the last count across nodes."""
    model, frames, few, many = ACROSS
    first = Cell(method="dsp", model=model, frames=frames, ranks=few)
    last = replace(first, ranks=many, clips=many // few)
    shared, link = _found(last)[0], Hardware.parse(HARDWARE).across
    crossing = (many - NODE) / many**2 * last.tensor_bytes
    bound_s = 4 * SHAPES_2D[model].layers * crossing / (link.bytes_per_s * link.attained)
    ways = {
        "all GPUs share all clips": (
            _step_s(last),
            f"{bound_s:.2f} s of {shared.step_s:.2f} s are bytes that must cross between nodes",
        ),
        "as headrace plans it: each node takes clips of its own": (
            _step_s(first, many),
            "only gradients cross between nodes",
        ),
    }
    for what, (step_s, why) in ways.items():
        yield Claim(
            where="Figure 6, weak",
            what=f"lost from {few} to {many} GPUs, {what}",
            unit="fraction",
            theirs=0.15,
            ours=1 - _step_s(first) / step_s,
            how="simulated",
            costs=COSTS,
            less=True,
            why=why,
        )


def strong_scaling(tables: Scaling) -> Iterator[Claim]:
    """Figures 7 and 8: one clip on more and more GPUs."""
    linear = {("720m", 64): 8, ("3b", 16): 4}
    for model, frames, counts in tables:
        first = Cell(method="dsp", model=model, frames=frames, ranks=counts[0])
        last = replace(first, ranks=linear.get((model, frames), counts[-1]))
        if last.ranks not in counts:
            continue
        kept = _step_s(first) / _step_s(last) * first.ranks / last.ranks
        yield Claim(
            where="Figure 7, strong",
            what=f"kept of each GPU from {first.ranks} to {last.ranks}, {model}",
            unit="fraction",
            theirs=1.0 if (model, frames) in linear else None,
            ours=kept,
            how="simulated",
            costs=COSTS,
            why=_where_time_goes(first, last),
        )
    for model, frames, counts in tables:
        cell = Cell(method="dsp", model=model, frames=frames, ranks=counts[-1], training=False)
        own = _found(cell)[0].forward_s
        others = {c.method: _found(c)[0].forward_s / own for c in _rivals(cell)}
        nearest = min(others, key=lambda method: others[method])
        yield Claim(
            where="Figure 8, inference",
            what=f"a forward of {frames} frames on {cell.ranks} GPUs, {model}; the next is "
            f"{nearest}, {others[nearest]:.2f} times as long",
            unit="s",
            theirs=None,
            ours=own,
            how="simulated",
            costs=COSTS,
            less=True,
        )


def _where_time_goes(first: Cell, last: Cell) -> str:
    """What keeps a step from being as many times shorter as there are more GPUs."""
    whole, part = _found(first)[0], _found(last)[0]
    ideal = whole.step_s * first.ranks / last.ranks
    return (
        f"of {part.step_s:.3f} s links are busy {part.link_s:.3f} s, gradients and weights "
        f"{_weights_s(last, last.ranks):.3f} s; linear were {ideal:.3f} s"
    )


# ------------------------------------------------------------------------------------ Figure 9


def memory(ranks: Sequence[int]) -> Iterator[Claim]:
    """Figure 9: activations of one rank, weak scaling of 64 frames on each GPU."""
    for count in ranks:
        cell = Cell(method="dsp", model="720m", frames=64, ranks=count, clips=count)
        own = _found(cell)[0].peak_bytes
        for other in _rivals(cell):
            yield Claim(
                where=f"Figure 9, {count} GPUs",
                what=f"bytes of {other.method} beside DSP's {own / 2**30:.1f} GiB",
                unit="times",
                theirs=None,
                ours=_found(other)[0].peak_bytes / own,
                how="counted",
                costs="720M, 262,144 places of each rank, computed again",
            )


# ---------------------------------------------------------------------------- measured on CPUs


ALONE = "no exchange"
"""A rank's frames by the plain model, as if no others were: the least that a step can take."""

SHAPE = replace(SMALL, hidden=256)
"""Large enough that computing is most of a step."""


def _alone(model: Any, inputs: dict[str, torch.Tensor]) -> Prepared:
    """This rank's frames by themselves."""
    local = dict(inputs)
    for name, dim in (("x", 1), ("frames", 0)):
        local[name] = inputs[name].chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return Prepared(loss=lambda: model(**local).square().sum())


def _side(method: str, model: Any, inputs: dict[str, torch.Tensor]) -> Prepared:
    return _alone(model, inputs) if method == ALONE else prepare(method, model, inputs)


def steps_here(rounds: int) -> dict[str, dict[str, float]]:
    """The least seconds of a step and of a forward without gradients of a small model by each
    method, all in every round, as others may work on this machine; and the peak of live bytes."""
    sides, found = {}, dict[str, dict[str, list[float]]]()
    for method in (*METHODS, ALONE):
        model, inputs = model_of(SHAPE), inputs_of(SHAPE, FRAMES, PATCHES)
        sides[method] = (model, _side(method, model, inputs))
        with ByteCounter(settle_s=0.05) as live:
            sides[method][1].loss().backward()
        found[method] = {"train": [], "infer": [], "bytes": [float(live.peak_bytes)]}
    with settled():
        for _ in range(rounds + 1):
            for method, (model, side) in sides.items():
                model.zero_grad()
                for kind in ("train", "infer"):
                    dist.barrier()
                    begin = time.perf_counter()
                    with torch.set_grad_enabled(kind == "train"):
                        loss = side.loss()
                    if kind == "train":
                        loss.backward()
                    dist.barrier()
                    found[method][kind].append(time.perf_counter() - begin)
    return {
        method: {kind: min(some) for kind, some in kinds.items()} for method, kinds in found.items()
    }


def measured_here(found: Mapping[str, Mapping[str, float]]) -> Iterator[Claim]:
    """Figures 6, 8 and 9 on ranks of this machine."""
    own = found["dsp"]
    costs = "4 CPU ranks on 2 cores, 2 layers of 256 features"
    ratios = {m: found[m]["train"] / own["train"] for m in METHODS[1:]}
    nearest = min(ratios, key=lambda method: ratios[method])
    bound = found[nearest]["train"] / min(found[ALONE]["train"], own["train"])
    yield Claim(
        where="Figure 6, small",
        what=f"DSP over the next, a step ({nearest})",
        unit="times",
        theirs=1.807,
        ours=ratios[nearest],
        how="measured",
        costs=costs,
        why=f"with no exchange at all it were {bound:.2f}",
    )
    kinds = (
        ("Figure 6, small", "train", "a step of {} beside DSP's"),
        ("Figure 8, small", "infer", "a forward of {} beside DSP's"),
        ("Figure 9, small", "bytes", "bytes of {} beside DSP's"),
    )
    for where, kind, what in kinds:
        for method in METHODS[1:]:
            yield Claim(
                where=where,
                what=what.format(method),
                unit="times",
                theirs=None,
                ours=found[method][kind] / own[kind],
                how="counted" if kind == "bytes" else "measured",
                costs=costs,
            )


def claims(*, quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """All rows, and what was measured."""
    rounds = 3 if quick else 20
    tell("ranks of this machine")
    exchanges = on_ranks(4, lambda: layer_rows(rounds))
    steps = on_ranks(4, lambda: steps_here(rounds))
    tell("volumes and exchanges")
    found = [*volumes(), *operations(), *latencies(exchanges)]
    tell("steps at the paper's sizes")
    cells = [
        Cell(method="dsp", model=model, frames=frames, ranks=ranks)
        for model, sizes in RANKS_OF_LENGTH.items()
        for frames, ranks in zip(LENGTHS, sizes, strict=True)
        if not quick or (model == "720m" and frames in (LENGTHS[0], LENGTHS[-1]))
    ]
    tables = QUICK if quick else SCALING
    found += [*end_to_end(cells), *weak_scaling(tables), *strong_scaling(tables)]
    found += [*memory((8,) if quick else (2, 4, 8)), *measured_here(steps)]
    return found, {"exchanges_s": exchanges, "steps": steps}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    given = options(__doc__).parse_args(arguments)
    found, more = claims(quick=given.quick)
    return finish("dsp", found, given, **more)


if __name__ == "__main__":
    raise SystemExit(main())
