"""The sources of costs as ``hr.costs``: a roofline, a profile, a file, published measurements."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from headrace.costs.cost_model import CostModel
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.costs.sources.roofline import roofline_costs
from headrace.errors import CostError, did_you_mean
from headrace.spec.architecture import Architecture
from headrace.spec.hardware import Hardware

__all__ = ["load", "memory_margin_of", "profile", "published", "roofline"]

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_PUBLISHED = files("headrace.costs") / "published"


def roofline(
    model: Architecture,
    hardware: Hardware | str,
    *,
    devices: int,
    dtype: str = "bfloat16",
    memory_bytes: int | None = None,
    memory_margin: float | None = None,
) -> CostModel:
    """Costs of a model on ``devices`` of hardware that is not at hand, by data sheets and formulas.

    ``hardware`` is DEVICE[+INSIDE][+ACROSS], such as ``"h100"`` or ``"a100-80g+pcie4"``; ``dtype``
    that of activations and working weights; ``memory_bytes`` what a rank may use, all of the device
    when left out, of which plans leave the fraction ``memory_margin`` free. Raises SpecError for
    hardware that is not known, CostError for a dtype without formulas.
    """
    if dtype not in _ELEMENT_BYTES:
        raise CostError("dtype", got=repr(dtype), wanted=f"one of {', '.join(_ELEMENT_BYTES)}")
    known = Hardware.parse(hardware) if isinstance(hardware, str) else hardware
    margin = memory_margin_of(known.device.name) if memory_margin is None else memory_margin
    return roofline_costs(
        known, devices, model, element_bytes=_ELEMENT_BYTES[dtype], memory_bytes=memory_bytes
    ).replace(memory_margin=margin)


def profile(config: object, *, fresh: bool = False) -> NoReturn:
    """Renamed: raises CostError, which says that ``hr.profile(config)`` measures costs."""
    raise CostError("hr.costs.profile", got="its former name", wanted="hr.profile(config)")


def load(path: str | Path) -> CostModel | PipelineCosts | GroupCosts:
    """The costs in a JSON file: a cost model (``headrace profile --json``, ``rehearse --costs``,
    :meth:`CostModel.save`), or published costs of the kinds ``pipelines`` and ``groups``. Raises
    CostError when it cannot be read or is malformed."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CostError(f"costs {path}", got=error.strerror, wanted="a readable file")
    except (ValueError, RecursionError) as error:
        raise CostError(f"costs {path}", got=f"no JSON ({error})")
    return _costs(value)


def published(name: str) -> PipelineCosts | GroupCosts:
    """Costs that others measured and published, by name: ``hydraulis-7b``, ``hydraulis-7b-a100``,
    ``hydraulis-13b``, ``hydraulis-32b`` (pipelines), ``flexsp-7b-a100`` (groups). Each names its
    source. Raises CostError for another name."""
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
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "pipelines":
        return PipelineCosts.from_json(value)
    return GroupCosts.from_json(value) if kind == "groups" else CostModel.from_json(value)
