"""Costs of a made-up device: for tests, for planning without a profile, for trying sizes out.

Not a measurement and not the roofline of a device (:mod:`headrace.costs.sources.roofline`): compute
is FLOPs over one constant rate, traffic is bytes over one constant speed, nothing overlaps, and
every layer pays a fixed launch time. What a layer costs stands in
:mod:`headrace.costs.sources.formulas`.
"""

from __future__ import annotations

from headrace.costs.cost_model import CostModel
from headrace.costs.fingerprint import fingerprint_of
from headrace.costs.sources.formulas import Speeds, formula_model, group_sizes_of
from headrace.spec.architecture import Architecture
from headrace.spec.cluster import Cluster
from headrace.units import GIB

__all__ = ["group_sizes_of", "synthetic_costs"]


def synthetic_costs(
    devices: int,
    layers: int = 4,
    *,
    architecture: Architecture | None = None,
    memory_bytes: int = 40 * GIB,
    speeds: Speeds | None = None,
    sizes: tuple[int, ...] | None = None,
    device: str = "synthetic",
    methods: tuple[str, ...] | None = None,
) -> CostModel:
    """A cost model of ``devices`` equal made-up devices by formulas.

    ``architecture`` defaults to a Llama of ``layers`` layers of 1024 features; ``sizes`` to
    :func:`group_sizes_of`. Group size 1 is the method ``local``. Larger ones have ``methods`` (of
    :data:`headrace.costs.FORMULA_METHODS`) as far as the architecture supports them, in all pairs
    of attention and feed-forward; without ``methods`` they have ``ulysses_z``, even where ranks
    outnumber heads. Raises CostError for a method without formulas, and when no size has an option.
    """
    if architecture is None:
        architecture = Architecture(
            layers=layers, hidden=1024, heads=16, kv_heads=4, ffn=4096, vocabulary=32000
        )
    return formula_model(
        architecture,
        Cluster(devices=devices, memory_bytes=memory_bytes, device=device),
        speeds or Speeds(),
        fingerprint=fingerprint_of(source="synthetic", device=device, devices=devices),
        sizes=sizes,
        methods=methods,
    )
