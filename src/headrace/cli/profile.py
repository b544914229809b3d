"""``headrace profile``: what a layer costs here, and how well the fits agree."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.cli.ranks import launch, measured_costs, open_rank
from headrace.cli.wiring import read_config
from headrace.comm.launch import World
from headrace.costs import CostModel
from headrace.costs.from_profile import fit_parts
from headrace.spec.profile import Profile
from headrace.units import bytes_text, percent_text, seconds_text

__all__ = ["profile"]


def profile(
    config_path: Path, *, ranks: int | None, fresh: bool, as_json: bool, changes: list[str]
) -> int:
    """Measure (or read the cached profile) and print the fits, or the cost model as JSON."""
    config = read_config(config_path, changes, ranks=ranks)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            rank = open_rank(world, config)
            costs, measured = measured_costs(rank, fresh=fresh)
            if rank.first:
                result.write_text(json.dumps([costs.to_json(), measured.to_json()]))
            return 0

        code = launch(config, main)
        if code != 0 or not result.exists():
            return code
        costs_json, profile_json = json.loads(result.read_text())
    if as_json:
        print(json.dumps(costs_json))
    else:
        _print(CostModel.from_json(costs_json), Profile.from_json(profile_json))
    return 0


def _print(costs: CostModel, measured: Profile) -> None:
    # Rows are not cut where nobody's terminal sets the width.
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    out.print(f"{measured.architecture} on {costs.cluster}")
    table = Table(box=None, pad_edge=False)
    columns = ("group", "part", "1K tokens", "4K tokens", "error", "kept", "in passing")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < 2 else "right")
    for fit in fit_parts(measured):
        forward = fit.part == "forward"
        table.add_row(
            f"cp{fit.p}", f"{fit.option} {fit.part}",
            seconds_text(fit.curve([1024])), seconds_text(fit.curve([4096])),
            percent_text(fit.error.median),
            f"{bytes_text(fit.kept.slope)}/token" if forward else "",
            f"{bytes_text(fit.transient.slope)}/token" if forward else "",
        )  # fmt: skip
    out.print(table)
    s = costs.exchange_s
    out.print(
        f"each step: pull {seconds_text(s.pull_s)}, push {seconds_text(s.push_s)}, "
        f"update {seconds_text(s.update_s)}; a rank stores {bytes_text(costs.state_bytes)}; "
        f"measured in {seconds_text(measured.measured_in_s)}"
    )
