"""Costs kept between runs: measured profiles and what runs learnt about them; no torch here.

Files stand in the folder ``profiles`` of ``data.cache``, named by what was measured:
``HASH.json`` is a profile, ``calibration-HASH.json`` what runs of one configuration learnt about
its costs, ``latest-HASH.json`` the costs last used for a model on a number of ranks. All have a
checksum, and what is damaged counts as not there.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from headrace.config import Config
from headrace.costs import CostModel, fingerprint_difference
from headrace.costs.calibration import Calibration
from headrace.costs.fingerprint import is_of_hybrid
from headrace.costs.library import memory_margin_of
from headrace.costs.saving import save_whole, sealed, unsealed
from headrace.engine.setup import formula_costs
from headrace.errors import CostError
from headrace.spec.architecture import Architecture
from headrace.spec.hardware import MEASURED
from headrace.spec.model_shape import ModelShape
from headrace.units import counted

__all__ = [
    "calibration_path",
    "costs_at_hand",
    "newest_costs",
    "profile_path",
    "remember_costs",
]


def profile_path(config: Config, fingerprint: str) -> Path:
    """The file in which the profile of a fingerprint is cached, whether it exists or not."""
    name = hashlib.sha256(fingerprint.encode()).hexdigest()[:24]
    return _folder(config) / f"{name}.json"


def calibration_path(config: Config, fingerprint: str) -> Path:
    """The file with the calibration that runs like this one made for the costs of a fingerprint.

    Peaks depend on what fills the memory, so a run of another planner, optimizer, budget or memory
    learns for itself.
    """
    left_out = {"ahead", "memory_margin"}
    if config.planner.costs == "quadratic":
        left_out.add("costs")  # files older than this key keep their names
    planner = config.planner.model_dump(mode="json", exclude=left_out)
    batch_keys = {"context", "batch_tokens", "batch_sequences"}
    if config.data.iterations is not None:
        batch_keys.add("iterations")  # only where set, likewise to keep the names of older files
    batch = config.data.model_dump(include=batch_keys)
    like = {  # what is alike in runs that share a calibration
        "planner": planner,
        "batch": batch,
        "memory": config.devices.memory,
        "optimizer": config.optimizer.name,
    }
    profile = profile_path(config, f"{fingerprint} {json.dumps(like, sort_keys=True)}")
    return profile.with_name(f"calibration-{profile.name}")


def newest_costs(config: Config, architecture: Architecture, ranks: int) -> CostModel | None:
    """The costs last measured for this model on as many ranks, on this machine, with the memory
    and the margin of this configuration; None if never."""
    try:
        hybrid = config.planner.costs == "hybrid"
        text = _latest(config, architecture.shape, ranks, hybrid=hybrid).read_text()
        costs = CostModel.from_json(unsealed(text))
    except (OSError, ValueError, CostError):
        return None
    memory = config.devices.memory_bytes or costs.cluster.memory_bytes
    margin = config.planner.memory_margin
    if margin is None:
        margin = _learnt_margin(config, costs)
    cluster = replace(costs.cluster, memory_bytes=memory)
    return costs.replace(cluster=cluster, memory_margin=margin)


def _learnt_margin(config: Config, costs: CostModel) -> float:
    """The memory margin, a fraction of a rank's memory, that runs of this configuration learned;
    the initial one of the device where none did."""
    prior = memory_margin_of(costs.cluster.device)
    path = calibration_path(config, costs.fingerprint)
    try:
        return Calibration.load(path, fingerprint=costs.fingerprint).peaks.margin(prior)
    except CostError:
        return prior


def remember_costs(config: Config, costs: CostModel) -> None:
    """Write costs to the file that :func:`newest_costs` reads. Raises CostError when it cannot be
    written."""
    hybrid = is_of_hybrid(costs.fingerprint)
    path = _latest(config, costs.shape, costs.cluster.devices, hybrid=hybrid)
    save_whole(path, sealed(costs.to_json()), "profile")


def costs_at_hand(
    config: Config, architecture: Architecture, path: Path | None = None
) -> tuple[CostModel, str]:
    """The costs to plan a configuration with, and a remark where they were not measured.

    Those in the file ``path``; else the roofline of devices.hardware; else the ones last measured
    here; else a formula. Raises CostError for a file of another model or number of ranks.
    """
    ranks = config.devices.ranks
    if path is not None:
        costs = CostModel.load(path)
        theirs, ours = costs.shape, architecture.shape
        if theirs != ours:
            other = fingerprint_difference(theirs.fingerprint, ours.fingerprint)
            raise CostError(f"costs {path}", got=f"a model {theirs} ({other})", wanted=ours)
        if costs.cluster.devices != ranks:
            raise CostError(
                f"costs {path}", got=counted(costs.cluster.devices, "rank"), wanted=ranks
            )
        return costs, ""
    options = config.devices
    if options.hardware is not None:
        what = f"roofline of {options.hardware}"
        if options.hardware.startswith(MEASURED):
            remark = f"costs: {what}: one device measured, its links and traffic by data sheets"
        else:
            what += f", {options.implementation} kernels in {options.planned_dtype}"
            remark = f"costs: {what}, by data sheets and formulas, not measured"
        return formula_costs(config, architecture, ranks), remark
    measured = newest_costs(config, architecture, ranks)
    if measured is not None:
        return measured, ""
    remark = "costs by formula, not measured: headrace profile measures them on these devices"
    return formula_costs(config, architecture, ranks), remark


def _folder(config: Config) -> Path:
    """The folder of cached profiles, calibrations and costs."""
    return config.data.cache_folder / "profiles"


def _latest(config: Config, shape: ModelShape, ranks: int, *, hybrid: bool) -> Path:
    """The file with the costs last used for a model of this shape on so many ranks. ``hybrid`` says
    whether they were fitted to a hybrid (ParaDySe), as these have a file of their own."""
    model = json.dumps(shape.to_json(), sort_keys=True)
    of = f"{model} {ranks}{' hybrid' if hybrid else ''}"
    digest = hashlib.sha256(of.encode()).hexdigest()[:16]
    return _folder(config) / f"latest-{digest}.json"
