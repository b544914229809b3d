"""Sequence parallelism of a model of two axes: DSP beside what shards one (DSP, Table 3).

Four tables, on ranks of this machine and for larger ones by the network's numbers:

    bytes       that each rank sends per layer of two blocks, counted at the collectives, beside the
                formulas; the paper's Table 3 gives the forward without (N - 1) / N
    steps       forward and backward of a small Transformer-2D by each method, one after the other
                in every round; medians beside DSP's, and peaks of live bytes
    switch      one uneven all-to-all beside padding, a list of messages and a cat, as the paper's
                code has it; heads for tokens and back by it, beside an exchange written for these
    scaling     seconds by the device's and links' numbers at one utilisation for all, sequence
                parallel over all devices, as in the paper's Tables 6 and 7, and beside what it says
                of Figures 6 and 7; "-" where heads are fewer than devices

examples:
    python benchmarks/dsp.py
    python benchmarks/dsp.py --ranks 2 --rounds 3 --frames 8 --patches 32
    python benchmarks/dsp.py --json dsp.json --picture dsp.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dsp_sides import METHODS, prepare
from dsp_switches import heads_rows, switch_rows
from measured import settled
from rich.console import Console
from rich.table import Table

from headrace.cli.display import tell
from headrace.comm.launch import World, start
from headrace.models.transformer_2d import SHAPES_2D, Shape2D, Transformer2D
from headrace.native.counted import ByteCounter, TrafficCounter
from headrace.native.machine import machine_facts
from headrace.spec.hardware import Hardware

Row = dict[str, Any]

SMALL = Shape2D(layers=2, hidden=128, heads=8, channels=8)
FRAMES, PATCHES = 16, 64
UTILISATION = 0.4
STRONG = (
    ("720m", 64, (1, 2, 4, 8)),
    ("720m", 256, (8, 16, 32, 64)),
    ("3b", 16, (1, 2, 4, 8)),
    ("3b", 128, (8, 16, 32, 64, 128)),
)
SPACE = 4096


def formula(method: str, ranks: int) -> tuple[float, float]:
    """(forward, backward) tensors [b, t, s, h] that a rank sends per layer."""
    n = ranks
    if method == "dsp":
        return 2 * (n - 1) / n**2, 2 * (n - 1) / n**2
    if method == "ulysses":
        return 4 * (n - 1) / n**2, 4 * (n - 1) / n**2
    if method == "ring":  # keys and values again, and their gradients as many hops
        return 2 * (n - 1) / n, 4 * (n - 1) / n
    return 8 * (n - 1) / n, 8 * (n - 1) / n


PAPER = {
    "dsp": "2 M/N",
    "ulysses": "4 M/N",
    "ring": "2 M",
    "megatron-sp": "8 M",
    "megatron-lm": "8 M",
}


def inputs_of(shape: Shape2D, frames: int, patches: int) -> dict[str, torch.Tensor]:
    """One drawn clip."""
    torch.manual_seed(1)
    return {
        "x": torch.randn(1, frames, patches, shape.channels),
        "timestep": torch.tensor([7]),
        "frames": torch.arange(frames),
        "patches": torch.arange(patches),
    }


def model_of(shape: Shape2D) -> Transformer2D:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Transformer2D(shape)


def counted(method: str, layers: int, frames: int, patches: int) -> tuple[int, int, float]:
    """Bytes sent by a forward and by a backward, and the norm of the whole gradient."""
    shape = Shape2D(layers=layers, hidden=SMALL.hidden, heads=SMALL.heads, channels=8)
    model = model_of(shape)
    side = prepare(method, model, inputs_of(shape, frames, patches))
    with TrafficCounter() as wire:
        loss = side.loss()
        forward = wire.sent_bytes
        loss.backward()
    backward = wire.sent_bytes - forward
    total = torch.zeros(())
    for parameter in model.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grad)
        total += grad.square().sum()
    return forward, backward, float(total.sqrt())


def bytes_rows(frames: int, patches: int) -> list[Row]:
    """Of one layer, the mean of all ranks: of three layers less those of one."""
    ranks, found = dist.get_world_size(), []
    for method in METHODS:
        few, many = (counted(method, layers, frames, patches) for layers in (1, 3))
        sent = torch.tensor([(many[i] - few[i]) / 2 for i in range(2)], dtype=torch.float64)
        dist.all_reduce(sent)
        tensor = frames * patches * SMALL.hidden * 4
        wanted = [part * tensor for part in formula(method, ranks)]
        found.append(
            {
                "ranks": ranks,
                "method": method,
                "sent": [x / ranks for x in sent.tolist()],
                "formula": wanted,
                "tensor": tensor,
                "gradient_norm": many[2],
            }
        )
    return found


def step_rows(frames: int, patches: int, rounds: int) -> list[Row]:
    """Seconds of a step, one method after the other in every round; and live bytes."""
    found: dict[str, Row] = {}
    sides = {}
    for method in METHODS:
        model = model_of(SMALL)
        sides[method] = (model, prepare(method, model, inputs_of(SMALL, frames, patches)))
        with ByteCounter(settle_s=0.05) as live:
            sides[method][1].loss().backward()
        found[method] = {"method": method, "peak_bytes": live.peak_bytes, "seconds": []}
    with settled():
        for _ in range(rounds + 1):
            for method, (model, side) in sides.items():
                model.zero_grad()
                dist.barrier()
                begin = time.perf_counter()
                side.loss().backward()
                dist.barrier()
                found[method]["seconds"].append(time.perf_counter() - begin)
    for row in found.values():
        row |= {"ranks": dist.get_world_size(), "seconds": statistics.median(row["seconds"][1:])}
    return list(found.values())


def scaling_rows(hardware: str, *, weak: bool = False) -> list[Row]:
    """Seconds of a step with all devices in one group: of one clip, or (``weak``) of as many more
    as there are more devices."""
    machine, found = Hardware.parse(hardware), []
    peak = machine.device.peak("bfloat16")
    for name, frames, counts in STRONG:
        shape = SHAPES_2D[name]
        for count in counts:
            clips = count // counts[0] if weak else 1
            tokens = clips * frames * SPACE
            flops = (
                3
                * shape.layers
                * (2 * tokens * shape.block_elements + 4 * tokens * shape.hidden * (frames + SPACE))
            )
            tensor = tokens * shape.hidden * 2
            link = machine.inside if count <= machine.devices_per_node else machine.across
            row: Row = {"model": name, "frames": frames, "devices": count, "clips": clips}
            for method in METHODS:
                if method in ("ulysses", "megatron-sp", "megatron-lm") and count > shape.heads:
                    row[method] = None
                    continue
                sent = sum(formula(method, count)) * tensor * shape.layers
                messages = {"dsp": 4, "ulysses": 4, "ring": 3 * (count - 1)}.get(method, 16)
                wire_s = link.seconds(sent, messages * shape.layers) if count > 1 else 0.0
                row[method] = flops / (peak * UTILISATION * count) + wire_s
            found.append(row)
    return found


def figures(strong: Sequence[Row], weak: Sequence[Row]) -> list[Row]:
    """What the paper says of its Figures 6 and 7, beside the same of the rows."""

    def ahead(row: Row) -> float:
        rest = [row[m] for m in METHODS[1:] if row[m] is not None]
        return min(rest) / row["dsp"] - 1

    def kept(rows: Sequence[Row], model: str, first: int, last: int, frames: int) -> float:
        """The throughput of each device at the last count beside that at the first."""
        each = {
            r["devices"]: r["clips"] / r["dsp"] / r["devices"]
            for r in rows
            if (r["model"], r["frames"]) == (model, frames)
        }
        return each[last] / each[first]

    several = [r for r in weak if r["devices"] > 1]
    return [
        {
            "what": "weak: DSP ahead of the next, least",
            "paper": "80.7 %",
            "here": f"{min(map(ahead, several)):.1%}",
        },
        {
            "what": "weak: DSP ahead of the next, most",
            "paper": "",
            "here": f"{max(map(ahead, several)):.1%}",
        },
        {
            "what": "weak: lost of each device from 8 to 64, 720m",
            "paper": "15 %",
            "here": f"{1 - kept(weak, '720m', 8, 64, 256):.1%}",
        },
        {
            "what": "strong: kept of each device from 1 to 8, 720m",
            "paper": "linear",
            "here": f"{kept(strong, '720m', 1, 8, 64):.1%}",
        },
        {
            "what": "strong: kept of each device from 1 to 4, 3b",
            "paper": "linear",
            "here": f"{kept(strong, '3b', 1, 4, 16):.1%}",
        },
    ]


def on_ranks(ranks: int, work: Callable[[], Any]) -> Any:
    """What the first of some ranks found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"

        def main(world: World) -> int:
            found = work()
            if world.rank == 0:
                result.write_text(json.dumps(found))
            return 0

        code = start(main, ranks=ranks, threads=1)
        if code:
            raise SystemExit(code)
        return json.loads(result.read_text())


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=120, highlight=False).print(table)
    print()


def print_all(found: Row) -> None:
    """Print what was found."""
    show(
        "bytes per layer and rank, in tensors M = b t s h",
        ("method", "ranks", "forward", "formula", "backward", "formula", "paper"),
        [
            (
                r["method"],
                str(r["ranks"]),
                *(
                    f"{v / r['tensor']:.4f}"
                    for pair in zip(r["sent"], r["formula"], strict=True)
                    for v in pair
                ),
                PAPER[r["method"]],
            )
            for r in found["bytes"]
        ],
    )
    first = {r["ranks"]: r for r in found["steps"] if r["method"] == "dsp"}
    show(
        "forward and backward",
        ("method", "ranks", "ms", "beside dsp", "peak MiB"),
        [
            (
                r["method"],
                str(r["ranks"]),
                f"{r['seconds'] * 1e3:.1f}",
                f"{r['seconds'] / first[r['ranks']]['seconds']:.2f}",
                f"{r['peak_bytes'] / 2**20:.1f}",
            )
            for r in found["steps"]
        ],
    )
    show(
        "one switch",
        ("frames x patches x features", "ranks", "switch ms", "padded ms", "faster"),
        [
            (
                " x ".join(map(str, r["shape"])),
                str(r["ranks"]),
                f"{r['switch'] * 1e3:.2f}",
                f"{r['padded'] * 1e3:.2f}",
                f"{r['padded'] / r['switch']:.2f}x",
            )
            for r in found["switch"]
        ],
    )
    show(
        "heads for tokens and back",
        ("tokens x heads x features", "ranks", "ms", "of three dims ms", "faster"),
        [
            (
                " x ".join(map(str, r["shape"])),
                str(r["ranks"]),
                f"{r['switch'] * 1e3:.2f}",
                f"{r['plain'] * 1e3:.2f}",
                f"{r['plain'] / r['switch']:.2f}x",
            )
            for r in found["heads"]
        ],
    )
    for kind, rows in (("strong", found["scaling"]), ("weak", found["weak_scaling"])):
        show(
            f"predicted seconds of a step, {kind} scaling",
            ("model", "frames", "clips", "devices", *METHODS, "beside the next"),
            [
                (
                    r["model"],
                    str(r["frames"]),
                    str(r["clips"]),
                    str(r["devices"]),
                    *("-" if r[m] is None else f"{r[m]:.3f}" for m in METHODS),
                    f"{min(r[m] for m in METHODS[1:] if r[m] is not None) / r['dsp']:.2f}x",
                )
                for r in rows
            ],
        )
    show(
        "beside what the paper says of its Figures 6 and 7",
        ("", "paper", "here"),
        [(r["what"], r["paper"], r["here"]) for r in found["figures"]],
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Seconds of every method over the devices."""
    import altair as alt
    import vl_convert

    values = [
        {
            "model": f"{r['model']}, {r['frames']} frames",
            "devices": r["devices"],
            "method": m,
            "seconds": r[m],
        }
        for r in rows
        for m in METHODS
        if r[m] is not None
    ]
    chart = (
        alt.Chart(alt.Data(values=values))
        .mark_line(point=True)
        .encode(
            x=alt.X("devices:Q", scale=alt.Scale(type="log", base=2)),
            y=alt.Y("seconds:Q", scale=alt.Scale(type="log"), title="seconds of a step, predicted"),
            color=alt.Color("method:N", sort=list(METHODS)),
        )
        .properties(width=220, height=200)
        .facet("model:N", columns=2)
        .resolve_scale(x="independent", y="independent")
    )
    path.write_text(vl_convert.vegalite_to_svg(chart.to_dict()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--patches", type=int, default=PATCHES)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(arguments)
    found: Row = {
        "machine": machine_facts("cpu"),
        "hardware": given.hardware,
        "utilisation": UTILISATION,
        "bytes": [],
        "steps": [],
        "switch": [],
        "heads": [],
    }
    for ranks in given.ranks:
        tell(f"{ranks} ranks")
        found["bytes"] += on_ranks(ranks, lambda: bytes_rows(given.frames, given.patches))
        found["steps"] += on_ranks(
            ranks, lambda: step_rows(given.frames, given.patches, given.rounds)
        )
        found["switch"] += on_ranks(ranks, lambda: switch_rows(given.rounds))
        found["heads"] += on_ranks(ranks, lambda: heads_rows(given.rounds))
    found["scaling"] = scaling_rows(given.hardware)
    found["weak_scaling"] = scaling_rows(given.hardware, weak=True)
    found["figures"] = figures(found["scaling"], found["weak_scaling"])
    machine = found["machine"]
    print(f"{machine['host_cpu']}, {machine['cores']} cores, torch {machine['torch']}\n")
    print_all(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.picture is not None:
        draw(found["scaling"], given.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
