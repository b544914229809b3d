"""Cost models side by side: how far each is off at lengths that it was not fitted to.

A profile of a small model is measured on 1 and on 2 ranks, at many lengths (and many more than
``headrace profile`` climbs). The two longest are held out, and of the others every third; each
model is fitted to the rest and asked for both, "beyond" and "inside" the profiled lengths.

    quadratic       a l^2 + b l + c with a, b, c >= 0, bytes a line (Hydraulis); what headrace uses
    polynomial      degree 1 to 3 by AIC
    forest          50 random trees of depth 10
    hybrid          the forest within, the polynomial beyond (ParaDySe)
    hybrid, shared  one forest for all options and profiles, the polynomials beyond
    formulas        of a made-up device, made as fast as this one by two factors for all seconds

Then whole steps of the whole model (all its layers, embedding, loss, weights pulled and pushed,
AdamW) against what the profile of two layers says, and what a prediction takes.

examples:
    python benchmarks/costs.py                                # 1 and 2 ranks
    python benchmarks/costs.py --ranks 2 --longest 8192 --methods ulysses_z megatron_ts
    python benchmarks/costs.py --profile ~/.cache/headrace/profiles/FILE.json --json costs.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from cost_errors import SHARED, against_step, all_errors, layered, microseconds
from cost_runs import runs_on
from held_out import MODELS, HeldOut, error_of
from rich.console import Console
from rich.table import Table
from shared_forest import SharedForest

from headrace.cli.display import tell
from headrace.costs.paradyse import TARGETS, fit_hybrid, need_scikit_learn
from headrace.costs.sources.measured import costs_from_profile, fit_parts
from headrace.errors import HeadraceError
from headrace.native.machine import machine_facts
from headrace.spec import Architecture
from headrace.spec.profile import Profile
from headrace.units import bytes_text, percent_text, seconds_text

NAMES = (*MODELS, SHARED, "formulas")
PAPER = {
    "where": "ParaDySe, Table 5 (GPT on GRCh38, their GPUs)",
    "without": "without the forest (polynomials alone): up to 270,336 tokens, 2657.04 s",
    "with": "with it: up to 329,728 tokens, and 2622.89 s to reach 270,336: 1.29 % saved",
    "compared": "seconds of training, not errors of prediction, which the paper does not give",
}


def examined(run: dict[str, Any], rows: list[HeldOut]) -> dict[str, Any]:
    """Everything to report of one profile; ``run`` has its steps."""
    profile = Profile.from_json(run["profile"])
    costs, hybrid = costs_from_profile(profile), fit_hybrid(profile)
    lengths = sorted({x.lengths[0] for x in profile.points if len(x.lengths) == 1})
    return {
        "ranks": profile.cluster.devices,
        "model": str(profile.shape),
        "layers": profile.shape.layers,
        "lengths": lengths,
        "measured_in_s": profile.measured_in_s,
        "flagged": [note for fit in fit_parts(profile) for note in fit.notes],
        "errors": summary(rows),
        "each": [asdict(row) for row in rows],
        "boundaries": [asdict(row) for row in hybrid.boundaries()],
        "steps": [against_step(profile, costs, hybrid, step) for step in run["steps"]],
        "predict_us": microseconds(
            layered(profile), np.linspace(lengths[0], 2 * lengths[-1], 100_000)
        ),
    }


def summary(rows: list[HeldOut]) -> list[dict[str, Any]]:
    """Median and worst of each target, model and place."""
    found = []
    for target in TARGETS:
        for model in NAMES:
            for where in ("inside", "beyond"):
                own = [x for x in rows if (x.target, x.model, x.where) == (target, model, where)]
                if own:
                    error = asdict(error_of(own))
                    found.append({"target": target, "model": model, "where": where, **error})
    return found


def errors_table(found: dict[str, Any]) -> Table:
    lengths = found["lengths"]
    table = Table(
        title=f"errors on {_ranks(found)}: {found['model']}; "
        f"{len(lengths)} lengths of {lengths[0]:,} to {lengths[-1]:,} tokens",
        title_justify="left",
    )
    for name in ("of", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("inside: median", "worst", "beyond: median", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    by = {(row["target"], row["model"], row["where"]): row for row in found["errors"]}
    for target in TARGETS:
        for i, model in enumerate(NAMES):
            pair = [by.get((target, model, where)) for where in ("inside", "beyond")]
            if any(pair):
                texts = [
                    percent_text(row[name]) if row else "-"
                    for row in pair
                    for name in ("median", "worst")
                ]
                table.add_row("" if i else target, model, *texts)
        table.add_section()
    return table


def steps_table(found: dict[str, Any]) -> Table:
    layers = found["layers"]
    table = Table(
        title=f"whole steps of {layers} layers on {_ranks(found)}, predicted from two",
        title_justify="left",
    )
    table.add_column("all layers", no_wrap=True)
    for name in ("tokens", "step", "quadratic", "hybrid", "bytes", "line", "hybrid"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["steps"]:
        seconds, count = row["step_s"], row["bytes"]
        table.add_row(
            row["option"],
            f"{row['tokens']:,}",
            seconds_text(seconds),
            *(_off(row[f"{name}_s"], seconds) for name in ("quadratic", "hybrid")),
            bytes_text(count),
            *(_off(row[f"{name}_bytes"], count) for name in ("quadratic", "hybrid")),
        )
    return table


def _ranks(found: dict[str, Any]) -> str:
    return f"{found['ranks']} rank{'s' * (found['ranks'] > 1)}"


def _off(predicted: float, measured: float) -> str:
    share = predicted / measured - 1
    return f"{'+' if share >= 0 else ''}{percent_text(share)}"


def closing_lines(worlds: list[dict[str, Any]], shared: SharedForest) -> list[str]:
    """Prediction times, what the shared forest looks at, switches, the paper's number."""
    lines = ["a prediction takes, in us per length:"]
    for name in worlds[0]["predict_us"]:
        spent = median(world["predict_us"][name] for world in worlds)
        lines.append(f"  {name:<28} {spent:9.3f}")
    importances = shared.importances("forward_s")
    options = sum(importances[name] for name in shared.options)
    shares = {
        "option": options,
        **{k: v for k, v in importances.items() if k not in shared.options},
    }
    lines.append("the shared forest's seconds forward follow from:")
    lines.append("  " + ", ".join(f"{name} {percent_text(x)}" for name, x in shares.items()))
    for world in worlds:
        degrees = [row["degree"] for row in world["boundaries"] if row["target"].endswith("_s")]
        counts = ", ".join(f"{degrees.count(n)} of degree {n}" for n in (1, 2, 3))
        jump = median(abs(row["jump"]) for row in world["boundaries"])
        lines.append(
            f"{_ranks(world)}: polynomials of seconds {counts}; where forests end, "
            f"polynomials begin {percent_text(jump)} off (median); "
            f"{len(world['flagged'])} measurements flagged as falling"
        )
    return [
        *lines,
        "",
        f"quoted: {PAPER['where']}",
        f"  {PAPER['without']}",
        f"  {PAPER['with']}",
        f"  ({PAPER['compared']})",
    ]


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", help="ranks, each in its turn (1 2; none with --profile)")
    add(
        "--profile",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a profile that was measured before; may be given again",
    )
    add(
        "--methods",
        nargs="+",
        default=["ulysses_z", "megatron_cz", "megatron_ts"],
        help="methods of groups (ulysses_z megatron_cz megatron_ts)",
    )
    add("--shortest", type=int, default=64, help="tokens of the shortest document (64)")
    add("--longest", type=int, default=4096, help="tokens of the longest document (4096)")
    add("--lengths", type=int, default=24, help="lengths from the one to the other (24)")
    add("--hidden", type=int, default=128, help="features of the model (128)")
    add("--heads", type=int, default=4, help="query heads (4)")
    add("--kv-heads", type=int, default=2, help="key-value heads (2)")
    add("--layers", type=int, default=4, help="layers of the model (4)")
    add("--repeats", type=int, default=3, help="times that a length is timed (3)")
    add("--steps", type=int, default=3, help="times that a whole step is timed (3)")
    add(
        "--step-tokens",
        type=int,
        nargs="*",
        default=[512, 3000],
        help="tokens of whole steps (512 3000)",
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    o = parser.parse_args(arguments)
    o.ranks = ([] if o.profile else [1, 2]) if o.ranks is None else o.ranks
    if min([1, *o.ranks]) < 1 or min(o.repeats, o.steps, o.layers, o.shortest) < 1:
        parser.error("--ranks, --repeats, --steps, --layers, --shortest: at least 1")
    if o.lengths < 6 or o.longest - o.shortest < o.lengths:
        parser.error("--lengths: at least 6, with as many tokens from --shortest to --longest")
    return o


def main(arguments: list[str] | None = None) -> int:
    o = options(arguments)
    facts = machine_facts("cpu")
    a = Architecture(
        layers=o.layers,
        hidden=o.hidden,
        heads=o.heads,
        kv_heads=o.kv_heads,
        ffn=3 * o.hidden,
        vocabulary=1024,
    )
    try:
        need_scikit_learn()
        runs = [{"profile": json.loads(file.read_text()), "steps": []} for file in o.profile]
        runs += [{**runs_on(ranks, a, o), "model": a} for ranks in o.ranks]
        tell("fitting")
        profiles = [layered(Profile.from_json(run["profile"])) for run in runs]
        errors, shared = all_errors(profiles, [run.get("model") for run in runs])
        worlds = [examined(run, rows) for run, rows in zip(runs, errors, strict=True)]
    except (HeadraceError, OSError, ValueError) as error:
        tell(str(error))
        return 2
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(
        f"{facts['host_cpu']}, {facts['cores']} cores, torch {facts['torch']}, fp32, one thread "
        "per rank\n"
    )
    for world in worlds:
        console.print(errors_table(world))
        if world["steps"]:
            console.print(steps_table(world))
    for line in closing_lines(worlds, shared):
        console.print(line, soft_wrap=True)
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        importances = {target: shared.importances(target) for target in shared.forests}
        o.json.write_text(
            json.dumps(
                {"machine": facts, "paper": PAPER, "worlds": worlds, "importances": importances},
                indent=1,
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
