"""Forecasts of fixed layouts against published runs: forecast over published, errors and all.

Rows stand in ``benchmarks/published/training``, each file with its source and what was assumed.
Those marked as fitted gave the numbers of the implementations
(:mod:`headrace.spec.implementation`); the others are the check.

    llm-foundry   GPT-like models of 125M to 70B on A100s and H100s, 512 to 65,536 tokens
    torchtitan    Llama 3.1 on H100s of 500 W: FSDP, with tensor parallelism; memory
    fms-fsdp      Llama 2 of 7B to 70B on A100s and H100s, compiled
    nvidia        Llama 3.1 by NeMo on H100s: tensors, context, stages; memory
    trl           8B on 1M to 4M tokens in a ring

Seconds are compared as tokens/s of a device, memory as its peak. The column of ``ideal`` kernels
is what a plain roofline says of the same rows.

examples:
    python benchmarks/forecasts.py
    python benchmarks/forecasts.py --all --json forecasts.json
    python benchmarks/forecasts.py --calibrate
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.costs.forecast import Forecast, forecast
from headrace.spec import Architecture
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import IMPLEMENTATIONS, Efficiency, Implementation
from headrace.units import GIB, percent_text

FOLDER = Path(__file__).parent / "published" / "training"

FITTED = {
    # What --calibrate moves, by implementation and family; the rest is measured elsewhere.
    ("eager-2023", "hopper"): ("products", "attention", "passes", "exposed"),
    ("eager-2023", "ampere"): ("products", "attention", "passes", "exposed"),
    ("eager", "hopper"): ("passes",),
    ("compiled", "hopper"): ("passes",),
    ("compiled", "ampere"): ("passes",),
    ("fused", "hopper"): ("attention", "passes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run."""

    source: str
    implementation: str
    model: str
    architecture: Architecture
    hardware: Hardware
    layout: str
    sequence: int
    batch: int
    accumulation: int
    recompute: Any
    fitted: bool
    tokens_per_s: float | None
    peak_bytes: int | None

    def forecast(self, implementation: Implementation | None = None) -> Forecast:
        """What is forecast of it, with kernels of its own implementation or another."""
        return forecast(
            self.architecture,
            self.hardware,
            self.layout,
            sequence_tokens=self.sequence,
            local_batch=self.batch,
            accumulation=self.accumulation,
            recompute=self.recompute,
            implementation=implementation or self.implementation,
        )

    def __str__(self) -> str:
        return (
            f"{self.model} {self.hardware.device.name} {self.layout}, "
            f"{self.batch} x {self.sequence:,} x {self.accumulation}, {self.recompute}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One published number and what is forecast of it."""

    run: Run
    what: str
    published: float
    predicted: float
    ideal: float

    @property
    def ratio(self) -> float:
        """Forecast over published."""
        return self.predicted / self.published

    @property
    def error(self) -> float:
        """|ratio - 1|."""
        return abs(self.ratio - 1)


def runs() -> tuple[list[Run], dict[str, str]]:
    """All published runs, and where each source's numbers are from."""
    found, sources = list[Run](), dict[str, str]()
    for path in sorted(FOLDER.glob("*.json")):
        data = json.loads(path.read_text())
        sources[data["name"]] = f"{data['source']}; assumed: {data['assumed']}"
        for row in data["rows"]:
            run = Run(
                source=data["name"],
                implementation=row.get("implementation") or data["implementation"],
                model=row["model"],
                architecture=Architecture(**data["models"][row["model"]]),
                hardware=Hardware.parse(row["hardware"]),
                layout=row["layout"],
                sequence=row["sequence"],
                batch=row["batch"],
                accumulation=row["accumulation"],
                recompute=row["recompute"],
                fitted=row["fitted"],
                tokens_per_s=row["tokens_per_s"],
                peak_bytes=row.get("peak_bytes"),
            )
            found.append(run)
    return found, sources


def compare(found: Iterable[Run]) -> list[Comparison]:
    """Every published number beside its forecast."""
    ideal = IMPLEMENTATIONS["ideal"]
    rows: list[Comparison] = []
    for run in found:
        ours = run.forecast()
        if run.tokens_per_s is not None:
            rows.append(
                Comparison(
                    run=run,
                    what="tokens/s",
                    published=run.tokens_per_s,
                    predicted=ours.tokens_per_s,
                    ideal=run.forecast(ideal).tokens_per_s,
                )
            )
        if run.peak_bytes is not None:
            rows.append(
                Comparison(
                    run=run,
                    what="memory",
                    published=run.peak_bytes,
                    predicted=ours.memory.peak,
                    ideal=run.forecast(ideal).memory.peak,
                )
            )
    return rows


def groups(rows: Iterable[Comparison]) -> dict[tuple[str, str, str, bool], list[Comparison]]:
    """Comparisons by source, kernels on a family of devices, kind of number, and whether fitted:
    memory is not fitted anywhere."""
    found: dict[tuple[str, str, str, bool], list[Comparison]] = {}
    for row in rows:
        kernels = f"{row.run.implementation}, {row.run.hardware.device.family}"
        fitted = row.run.fitted and row.what == "tokens/s"
        found.setdefault((row.run.source, kernels, row.what, fitted), []).append(row)
    return dict(sorted(found.items(), key=lambda item: (item[0][2] == "memory", item[0])))


def calibrated(implementation: str, family: str, found: Sequence[Run]) -> Efficiency:
    """The efficiency that agrees best with the fitted runs of an implementation on a family: the
    least sum of |log ratio|, found by steps that become smaller."""
    known = IMPLEMENTATIONS[implementation]
    chosen = [
        run
        for run in found
        if run.fitted
        and run.tokens_per_s
        and run.implementation == implementation
        and run.hardware.device.family == family
    ]

    def loss(efficiency: Efficiency) -> float:
        tried = replace(known, on={family: efficiency})
        return sum(
            abs(math.log(run.forecast(tried).tokens_per_s / (run.tokens_per_s or 1.0)))
            for run in chosen
        )

    best, step = known.on[family], 1.2
    least = loss(best)
    while step > 1.002:
        moved = False
        for name in FITTED[implementation, family]:
            for factor in (step, 1 / step):
                value = getattr(best, name) * factor
                value = max(1.0, value) if name == "passes" else min(1.0, value)
                tried = replace(best, **{name: value})
                if (worse := loss(tried)) < least - 1e-9:
                    best, least, moved = tried, worse, True
        if not moved:
            step = math.sqrt(step)
    return best


def show(rows: list[Comparison], *, every: bool) -> None:
    """Tables: every number when asked, and one row for each source and implementation."""
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    if every:
        table = Table(box=None, pad_edge=False)
        for column in ("source", "run", "what", "published", "forecast", "ratio", "fitted"):
            left = column in "source run what fitted"
            table.add_column(column, justify="left" if left else "right")
        for row in rows:
            scale = GIB if row.what == "memory" else 1
            table.add_row(
                row.run.source,
                str(row.run),
                row.what,
                f"{row.published / scale:,.1f}",
                f"{row.predicted / scale:,.1f}",
                f"{row.ratio:.2f}",
                "fitted" if row.run.fitted and row.what == "tokens/s" else "",
            )
        out.print(table)
    table = Table(box=None, pad_edge=False)
    names = ("source", "kernels", "what", "rows", "median off", "most", "least ratio")
    for column in (*names, "most ratio", "ideal: median off", "most"):
        left = column in ("source", "kernels", "what", "rows")
        table.add_column(column, justify="left" if left else "right")
    for (source, kernels, what, fitted), group in groups(rows).items():
        ratios = [row.ratio for row in group]
        ideals = [abs(row.ideal / row.published - 1) for row in group]
        table.add_row(
            source,
            kernels,
            what,
            f"{len(group)} {'fitted' if fitted else 'others'}",
            percent_text(median(row.error for row in group)),
            percent_text(max(row.error for row in group)),
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            percent_text(median(ideals)),
            percent_text(max(ideals)),
        )
    out.print(table)
    for what in ("tokens/s", "memory"):
        others = [r for r in rows if r.what == what and not (r.run.fitted and what == "tokens/s")]
        worst = max(others, key=lambda row: row.error)
        print(
            f"{what} of {len(others)} rows that were not fitted: median "
            f"{percent_text(median(row.error for row in others))} off, most "
            f"{percent_text(worst.error)} ({worst.run.source} {worst.run})"
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="print every number")
    parser.add_argument("--json", type=Path, help="write every number to a file")
    parser.add_argument("--calibrate", action="store_true", help="fit the implementations again")
    options = parser.parse_args(arguments)
    found, sources = runs()
    if options.calibrate:
        for implementation, family in FITTED:
            print(f"{implementation} on {family}: {calibrated(implementation, family, found)}")
        return 0
    rows = compare(found)
    show(rows, every=options.all)
    if options.json is not None:
        value = {
            "sources": sources,
            "rows": [
                {
                    "source": row.run.source,
                    "run": str(row.run),
                    "implementation": row.run.implementation,
                    "what": row.what,
                    "fitted": row.run.fitted and row.what == "tokens/s",
                    "published": row.published,
                    "forecast": row.predicted,
                    "ratio": row.ratio,
                    "ideal": row.ideal / row.published,
                }
                for row in rows
            ],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(value, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
