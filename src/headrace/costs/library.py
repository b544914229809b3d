"""The sources of costs as ``hr.costs``: a roofline, a profile, a file, published measurements."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from headrace.costs.cost_model import CostModel
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.costs.saving import load_costs
from headrace.costs.sources.roofline import roofline_costs
from headrace.errors import CostError, did_you_mean
from headrace.spec.architecture import Architecture
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import DEFAULT_IMPLEMENTATION, Implementation

__all__ = ["load", "memory_margin_of", "profile", "published", "roofline"]

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_PUBLISHED = files("headrace.costs") / "published"


def roofline(
    model: Architecture | str,
    hardware: Hardware | str,
    *,
    devices: int,
    dtype: str = "bfloat16",
    memory_bytes: int | None = None,
    memory_margin: float | None = None,
    implementation: Implementation | str = DEFAULT_IMPLEMENTATION,
) -> CostModel:
    """Costs of a model on hardware that is not at hand, by data sheets and formulas.

    Args:
        model: The model, or the name of a preset.
        hardware: ``DEVICE[+INSIDE][+ACROSS]``, such as ``"h100"`` or ``"a100-80g+pcie4"``: a
            device, its link inside a node and its link across nodes; or such hardware as a value.
        devices: How many devices there are.
        dtype: Of activations and working weights, by torch's name.
        memory_bytes: Bytes of a device that a rank may use; all when left out.
        memory_margin: The fraction of these that plans leave free; what is usual for the device
            when left out.
        implementation: The kernels that run, or their name: ``headrace`` as it runs today,
            ``eager``, ``compiled``, ``fused``, ... (:mod:`headrace.spec.implementation`).

    Returns:
        The costs, to plan and simulate with.

    Raises:
        SpecError: For a model, hardware or kernels that are not known, and for devices or bytes
            that are no counts.
        CostError: For a dtype without formulas, and for a margin outside of 0 to 1.

    Example:
        >>> model = hr.Architecture.preset("llama-8b")
        >>> costs = hr.costs.roofline(model, "h100", devices=4)
        >>> costs.group_sizes
        (1, 2, 3, 4)
    """
    if dtype not in _ELEMENT_BYTES:
        raise CostError("dtype", got=repr(dtype), wanted=f"one of {', '.join(_ELEMENT_BYTES)}")
    known = Hardware.of(hardware)
    kind = "cpu" if known.device.is_cpu else known.device.name
    margin = memory_margin_of(kind) if memory_margin is None else memory_margin
    return roofline_costs(
        known,
        devices,
        Architecture.of(model),
        element_bytes=_ELEMENT_BYTES[dtype],
        memory_bytes=memory_bytes,
        implementation=Implementation.of(implementation),
    ).replace(memory_margin=margin)


def profile(config: object, *, fresh: bool = False) -> NoReturn:
    """Renamed: use ``hr.profile(config)``.

    Args:
        config: As for ``hr.profile``.
        fresh: As for ``hr.profile``.

    Raises:
        CostError: Always; it names the new way.
    """
    raise CostError("hr.costs.profile", got="its former name", wanted="hr.profile(config)")


def load(path: str | Path) -> CostModel | PipelineCosts | GroupCosts:
    """Read costs from a JSON file.

    Args:
        path: A cost model (of ``headrace profile --json``, ``rehearse --costs`` or
            :meth:`CostModel.save`), or published costs of the kinds ``pipelines`` and ``groups``.

    Returns:
        The costs; published ones are planned with as ``hr.Problem(costs=..., devices=...)``.

    Raises:
        CostError: When the file cannot be read or is malformed.
    """
    return load_costs(path, _costs)


def published(name: str) -> PipelineCosts | GroupCosts:
    """Costs that others measured and published.

    Args:
        name: ``hydraulis-7b``, ``hydraulis-7b-a100``, ``hydraulis-13b`` or ``hydraulis-32b``, which
            are of pipelines, or ``flexsp-7b-a100``, which is of groups.

    Returns:
        The costs, which name their source; plan with them as ``hr.Problem(costs=...,
        devices=...)``.

    Raises:
        CostError: For another name.
    """
    names = sorted(file.name.removesuffix(".json") for file in _PUBLISHED.iterdir())
    if name not in names:
        hint = did_you_mean(name, names) or f"known are {', '.join(names)}"
        raise CostError("published costs", got=repr(name), hint=hint)
    found = _costs(json.loads((_PUBLISHED / f"{name}.json").read_text(encoding="utf-8")))
    assert not isinstance(found, CostModel), "published costs name their kind"
    return found


def memory_margin_of(device: str) -> float:
    """The fraction of the memory of a kind of device that plans leave free unless told."""
    return 0.3 if device == "cpu" else 0.1


def _costs(value: Any) -> CostModel | PipelineCosts | GroupCosts:
    """The costs of a JSON value, of the class that its ``kind`` names; a cost model has none.
    Raises CostError when it is malformed."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "pipelines":
        return PipelineCosts.from_json(value)
    return GroupCosts.from_json(value) if kind == "groups" else CostModel.from_json(value)
