"""``headrace profile``: what a layer costs here, and how well the fits agree."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from headrace.cli.display import out_console
from headrace.cli.flags import ProfileFlags, overrides
from headrace.cli.profile_tables import fits_table, hybrid_table, limits_table
from headrace.comm.launch import World
from headrace.config import Config
from headrace.costs import CostModel
from headrace.costs.measured_device import measured_device, save_device
from headrace.costs.paradyse import HybridModel, fit_hybrid, need_scikit_learn
from headrace.costs.sources.measured import fit_parts, not_fitting_notes
from headrace.engine.measured_costs import measured_costs
from headrace.engine.rank import Rank, launch, open_rank
from headrace.errors import ConfigError
from headrace.native.machine import copied_bytes_per_s, matmul_flops_per_s
from headrace.spec.hardware import MEASURED, Device
from headrace.spec.profile import Profile
from headrace.units import bytes_text, seconds_text

__all__ = ["profile"]


def profile(config_path: Path, flags: ProfileFlags) -> int:
    """Measure (or read the cached profile) and print the fits, or the cost model as JSON.

    ``--efficiency`` also writes what one device attains, for rooflines of many.
    ``--hybrid`` fits hybrid costs too: a table of their own, or the key "hybrid" of the JSON.
    Returns the exit code. Raises, before anything is measured, MissingExtra when hybrid costs
    cannot be fitted here, and ConfigError when the file of ``--efficiency`` cannot be written.
    """
    if flags.hybrid:
        need_scikit_learn()
    path = flags.efficiency
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        wanted = "a file in a folder that exists"
        raise ConfigError("--efficiency", got=path, wanted=wanted)
    config = Config.load(config_path, *overrides(flags.changes, {"devices.ranks": flags.ranks}))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            """Measure the costs on this rank; the first one writes costs and profile as JSON for
            the process that started it."""
            rank = open_rank(world, config)
            costs, measured = measured_costs(rank, fresh=flags.fresh)
            if rank.first:
                result.write_text(json.dumps([costs.to_json(), measured.to_json()]))
                if flags.efficiency is not None:
                    save_device(flags.efficiency, _device(rank, costs))
                    rank.say(f"--hardware {MEASURED}{flags.efficiency} plans for such devices")
            return 0

        code = launch(config, main)
        if code != 0 or not result.exists():
            return code
        costs_json, profile_json = json.loads(result.read_text())
    measured = Profile.from_json(profile_json)
    model = fit_hybrid(measured) if flags.hybrid else None
    if flags.json:
        extra = {} if model is None else {"hybrid": model.to_json()}
        print(json.dumps({**costs_json, **extra}))
    else:
        _print(CostModel.from_json(costs_json), measured, model)
    return 0


def _device(rank: Rank, costs: CostModel) -> Device:
    """What the device of ``rank`` attains, by its ``costs`` and by a product and a copy that are
    timed now, while the other ranks wait."""
    device, dtype = rank.world.device, rank.dtype
    return measured_device(
        costs,
        rank.storage.architecture,
        name=rank.cluster.device,
        dtype=str(dtype).removeprefix("torch."),
        element_bytes=dtype.itemsize,
        product_flops_per_s=matmul_flops_per_s(device, dtype),
        copied_bytes_per_s=copied_bytes_per_s(device),
    )


def _print(costs: CostModel, measured: Profile, model: HybridModel | None = None) -> None:
    """Print how well the fits agree, the speeds of links, the limits of memory, the hybrid costs
    where a ``model`` of them was fitted, and the seconds that every step takes beside its
    layers."""
    out = out_console()
    out.print(f"{measured.shape} on {costs.cluster}")
    fits = fit_parts(measured)
    out.print(fits_table(fits))
    for fit in fits:
        for note in fit.notes:
            out.print(f"flagged: {note}", soft_wrap=True)
    for note in not_fitting_notes(measured):
        out.print(f"memory: {note}", soft_wrap=True)
    for p, (start_s, speed) in measured.links.items():
        out.print(
            f"link in groups of {p}: {seconds_text(start_s)} + bytes at {bytes_text(speed)}/s"
        )
    out.print()
    out.print(limits_table(costs))
    out.print()
    if model is not None:
        out.print("forests of single documents, and the polynomials beyond them")
        out.print(hybrid_table(model))
        out.print()
    exchange = costs.exchange_s
    out.print(
        f"each step: pull {seconds_text(exchange.pull_s)}, push {seconds_text(exchange.push_s)}, "
        f"update {seconds_text(exchange.update_s)}; a rank stores {bytes_text(costs.state_bytes)}; "
        f"measured in {seconds_text(measured.measured_in_s)}"
    )
