"""The same training by one strategy always and by another one every step: is it the same loss?

Two runs of examples/heterogeneous.toml on four ranks, with the same seed and batches: dynamic takes
the example's strategies in turn, static works in groups of one. Losses are compared step by step:
the plans add the same numbers in another order, so they differ by the rounding of fp32, which
training multiplies.

examples:
    python benchmarks/convergence.py
    python benchmarks/convergence.py --steps 20 --json convergence.json --picture convergence.svg
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.native.machine import machine_facts

EXAMPLE = Path(__file__).parents[1] / "examples" / "heterogeneous.toml"
SIDES = {
    "dynamic": (),
    "static": (
        "planner.strategies=[]",
        "planner.rotate=false",
        "planner.name=static",
        "planner.static_size=1",
    ),
}


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=200, help="of both runs (200)")
    add("--batch-tokens", default="2Ki", help="of every step (2Ki)")
    add("--json", type=Path, metavar="FILE", help="write all losses to a file")
    add("--picture", type=Path, metavar="FILE", help="draw both curves (.svg, .png, .html)")
    return parser.parse_args(arguments)


def losses(o: argparse.Namespace, folder: Path, changes: Sequence[str]) -> list[float]:
    """The loss of every step of one run."""
    command = [
        sys.executable,
        "-m",
        "headrace",
        "train",
        str(EXAMPLE),
        "--steps",
        str(o.steps),
        "--out",
        str(folder),
        "--set",
        f"data.batch_tokens={o.batch_tokens}",
        "--set",
        "data.context=1Ki",
        "--set",
        "report.html=false",
    ]
    for change in changes:
        command += ["--set", change]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def compared(curves: dict[str, list[float]]) -> dict[str, Any]:
    """How far the curves are apart, relative, by step."""
    pairs = list(zip(curves["dynamic"], curves["static"], strict=True))
    apart = [abs(one - other) / other for one, other in pairs]
    return {"first": apart[0], "half": max(apart[: max(1, len(apart) // 2)]), "worst": max(apart)}


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Both curves in one figure."""
    import altair as alt

    rows = [
        {"step": step, "loss": loss, "run": name}
        for name, several in curves.items()
        for step, loss in enumerate(several)
    ]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(opacity=0.7)
        .encode(
            x="step:Q",
            y=alt.Y("loss:Q", scale=alt.Scale(zero=False)),
            color="run:N",
            strokeDash="run:N",
        )
    )
    chart.properties(width=560, height=300).save(str(path))


def main(arguments: Sequence[str]) -> int:
    o = options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: losses(o, Path(folder) / name, sets) for name, sets in SIDES.items()}
    found = {"machine": machine_facts("cpu"), "apart": compared(curves), "losses": curves}
    table = Table(title=f"loss over {o.steps} steps of {o.batch_tokens} tokens", box=None)
    for name in ("step", *curves, "apart"):
        table.add_column(name, justify="right")
    for step in sorted({0, o.steps // 4, o.steps // 2, o.steps - 1}):
        one, other = curves["dynamic"][step], curves["static"][step]
        table.add_row(str(step), f"{one:.6f}", f"{other:.6f}", f"{abs(one - other) / other:.1e}")
    Console(highlight=False).print(table)
    if o.json:
        o.json.write_text(json.dumps(found, indent=1) + "\n")
    if o.picture:
        draw(curves, o.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
