"""Whole steps on this machine's devices: what was measured, beside what was predicted.

Trains as a configuration says, prints tokens a second and utilisation, and for seconds and peak
bytes the ratio of what was measured to what was predicted, step by step. The first steps, in which
kernels are compiled, are left out of the medians.

Examples:
    python benchmarks/gpu_step.py                                   # examples/one-gpu.toml
    python benchmarks/gpu_step.py --set run.deterministic=true --json out.json
    python benchmarks/gpu_step.py --config examples/python-sources.toml --set devices.device=cpu
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import headrace as hr
from headrace.config import Config
from headrace.native.machine import machine_facts

ONE_GPU = Path(__file__).parents[1] / "examples" / "one-gpu.toml"
FIRST = 3
"""Steps that are left out of medians, where there are twice as many."""


def steps_of(config: Config) -> list[dict[str, Any]]:
    """The metrics of each step of a run in a folder that does not stay."""

    def say(step: hr.Step) -> None:
        print(f"step {step.number}: {step.seconds:.2f} s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run = hr.train(config, out=Path(folder) / "run", on_step=say)
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "step_s" in row]


def ratios(step: dict[str, Any]) -> tuple[float, float]:
    """Measured to predicted: seconds, and bytes of the rank that came nearest to its prediction,
    or exceeded it most."""
    predicted = step["predicted_peak_bytes"] or [float("nan")]
    pairs = zip(step["peak_bytes"], predicted, strict=False)
    return step["step_s"] / step["predicted_s"], max(peak / most for peak, most in pairs)


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and the range of the ratios."""
    counted = steps[FIRST:] if len(steps) >= 2 * FIRST else steps
    seconds, peaks = zip(*map(ratios, counted), strict=True)
    return {
        "tokens_per_s": median(s["tokens_per_s"] for s in counted),
        "utilisation": median(s["mfu"] or 0.0 for s in counted),
        "seconds_ratio": [min(seconds), median(seconds), max(seconds)],
        "peak_ratio": [min(peaks), median(peaks), max(peaks)],
        "losses": [steps[0]["loss"], steps[-1]["loss"]],
        "out_of_memory": sum(s["out_of_memory"] for s in steps),
    }


def table(steps: list[dict[str, Any]]) -> Table:
    made = Table(
        "step",
        "longest",
        "micro-batches",
        "seconds",
        "of predicted",
        "peak GB",
        "of predicted",
        "tokens/s",
        "of the peak",
    )
    for step in steps:
        seconds, peak = ratios(step)
        made.add_row(
            str(step["step"]),
            f"{step['longest']:,}",
            str(len(step["micro_batches"])),
            f"{step['step_s']:.3f}",
            f"{seconds:.2f}",
            f"{max(step['peak_bytes']) / 1e9:.2f}",
            f"{peak:.2f}",
            f"{step['tokens_per_s']:,.0f}",
            f"{step['mfu'] or 0:.1%}",
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=ONE_GPU, help="what to train (one-gpu.toml)")
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key of it; may be given often",
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    o = parser.parse_args(arguments)
    config = Config.load(o.config, *o.changes)
    steps = steps_of(config)
    found = summary(steps)
    facts = machine_facts("cpu" if config.devices.device == "cpu" else _device())
    print(f"{facts['device']}, {facts['host_cpu']}, torch {facts['torch']}")
    Console(width=None if sys.stdout.isatty() else 120).print(table(steps))
    low, middle, high = found["seconds_ratio"]
    print(
        f"{found['tokens_per_s']:,.0f} tokens/s, {found['utilisation']:.1%} of the peak; seconds "
        f"{middle:.2f} of predicted ({low:.2f} to {high:.2f}), peak bytes "
        f"{found['peak_ratio'][1]:.2f} (to {found['peak_ratio'][2]:.2f})"
    )
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps({"machine": facts, **found, "steps": steps}, indent=1) + "\n")
    return 0


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
