"""Bytes that weights and gradients send between nodes each step: in one step, and in two.

For a model on nodes of eight ranks, and for layouts that plans have: every rank with whole weights
(short sequences, or any groups that hold them whole), groups of a node that cut them, groups of
half a node. Counted from the layouts that the runtime exchanges, and the seconds that the slowest
rank's share takes over the links of data sheets, inside and across one after the other.

Examples:
    python benchmarks/crossing.py
    python benchmarks/crossing.py --nodes 2 16 128 --hardware a100-80g --json crossing.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.errors import SpecError
from headrace.layouts.partition import storage_partitions, working_partitions
from headrace.layouts.two_steps import crossing_rows, taken
from headrace.spec import Architecture, LayerOption, LayerPlan, Lengths, MicroBatch, Pipeline, Plan
from headrace.spec.architecture import weight_table
from headrace.spec.hardware import Hardware, filled_nodes
from headrace.spec.strategy import Scheme

_LAYOUTS = {"whole": 1, "cut by 4": 4, "cut by 8": 8}
_BYTES = 2  # bf16 on the wire


def layout_of(devices: int, parts: int, layers: int) -> Plan:
    """Groups of neighbours that hold a part of the weights each, all with work."""
    count = devices // parts
    option = LayerPlan.uniform(LayerOption.of("local" if parts == 1 else "megatron_ts"), layers)
    return Plan(
        lengths=Lengths(tokens=(parts,) * count),
        devices=devices,
        pipelines=tuple(
            Pipeline(scheme=Scheme(tensor=parts), ranks=tuple(range(i * parts, (i + 1) * parts)))
            for i in range(count)
        ),
        micro_batches=tuple(
            MicroBatch(pipeline=i, sequences=(i,), layers=option) for i in range(count)
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def crossing(a: Architecture, nodes: int, node_ranks: int) -> Iterator[dict[str, Any]]:
    """Of each layout: bytes that cross to each node in a pull, in one step and in two, and whether
    the runtime takes two."""
    devices, table = nodes * node_ranks, weight_table(a)
    sizes = filled_nodes(devices, node_ranks)
    owners = storage_partitions(table, devices, sizes)
    for name, parts in _LAYOUTS.items():
        readers = working_partitions(table, layout_of(devices, parts, a.layers))
        known: dict[tuple[int, int], tuple[int, int]] = {}
        once = twice = 0
        for w in table:
            kind = id(owners[w.name]), id(readers[w.name])
            if kind not in known:
                known[kind] = crossing_rows(owners[w.name], readers[w.name], sizes)
            once += known[kind][0] * w.row_elements
            twice += known[kind][1] * w.row_elements
        yield {
            "nodes": nodes,
            "layout": name,
            "one_step_bytes": once * _BYTES // nodes,
            "two_steps_bytes": twice * _BYTES // nodes,
            "two_steps": taken([table], owners, readers, sizes),
        }


def seconds(crossing_bytes: float, inside_bytes: float, hardware: Hardware) -> float:
    """Of a pull whose bytes cross to each node over the links of all its ranks, and move inside."""
    ranks = hardware.devices_per_node
    inside, across = hardware.inside, hardware.across
    across_s = crossing_bytes / ranks / (across.bytes_per_s * across.attained)
    return across_s + inside_bytes / ranks / (inside.bytes_per_s * inside.attained)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 32], help="(2 8 32)")
    parser.add_argument("--model", default="llama-8b", help="a preset (llama-8b)")
    parser.add_argument("--hardware", default="h100", help="whose links (h100)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    o = parser.parse_args(arguments)
    if min(o.nodes) < 2:
        parser.error("wanted --nodes of at least 2")
    try:
        a, hardware = Architecture.preset(o.model), Hardware.parse(o.hardware)
    except SpecError as error:
        parser.error(str(error))
    hardware = replace(hardware, devices_per_node=8)
    table = Table(
        "nodes", "weights", "GB to a node: one step", "two", "seconds: one step", "two", "taken"
    )
    rows = []
    for row in (row for nodes in o.nodes for row in crossing(a, nodes, 8)):
        parts = _LAYOUTS[row["layout"]]
        read = 8 * sum(w.elements for w in weight_table(a)) * _BYTES / parts
        row["one_step_s"] = seconds(row["one_step_bytes"], read - row["one_step_bytes"], hardware)
        row["two_steps_s"] = seconds(row["two_steps_bytes"], read, hardware)
        rows.append(row)
        table.add_row(
            str(row["nodes"]),
            row["layout"],
            f"{row['one_step_bytes'] / 1e9:.1f}",
            f"{row['two_steps_bytes'] / 1e9:.1f}",
            f"{row['one_step_s']:.3f}",
            f"{row['two_steps_s']:.3f}",
            "two" if row["two_steps"] else "one",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(
            json.dumps({"model": o.model, "hardware": str(hardware), "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
