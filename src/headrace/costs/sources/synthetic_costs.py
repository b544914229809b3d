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
    """Costs of equal made-up devices, by formulas.

    Group size 1 has the method ``local``. Larger ones have ``methods`` as far as the architecture
    supports them, in all pairs of attention and feed-forward.

    Args:
        devices: How many devices there are.
        layers: Layers of the model, where no architecture is given.
        architecture: The model; a Llama with 1024 features when left out.
        memory_bytes: Bytes of a device that a rank may use.
        speeds: Constants of the devices.
        sizes: Group sizes; those of :func:`group_sizes_of` when left out.
        device: What the devices are called.
        methods: Some of :data:`headrace.costs.FORMULA_METHODS`; ``ulysses_z`` when left out, even
            where ranks outnumber heads.

    Returns:
        The costs.

    Raises:
        CostError: For a method without formulas, and when no size has an option.
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
