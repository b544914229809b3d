"""Costs of hardware that is not at hand, from what its vendor promises: a roofline.

Every part of a step is bound by one thing, and takes what it needs of it over what is attained of
the peak (:class:`headrace.spec.hardware.Device` and ``Link``):

    products     FLOPs over the matrix units' rate, and half a wave for each product: every
                 multiprocessor computes a tile of the outputs, and the last wave of tiles is half
                 empty on average, so small micro-batches are slower a token
    attention    FLOPs as kernels run them (causal, document by document) over their rate
    the rest     bytes read and written once, over the memory's: norms, rotations, activations,
                 residual sums, the loss, the optimizer
    traffic      a latency, and the bytes a rank sends over its group's link: inside a node, or
                 inside and across where the group spans nodes
    launches     so many kernels of each layer, one after the other

What is attained depends on the kernels: it is that of a named implementation
(:mod:`headrace.spec.implementation`), which also says how often memory-bound operators move their
bytes and how much of the weights' traffic is hidden. Left out are imbalance and what the allocator
wastes. The counts stand in :mod:`headrace.costs.sources.formulas`; ``benchmarks/forecasts.py``
prints how far off published runs are, ``benchmarks/roofline.py`` published fits.
"""

from __future__ import annotations

from headrace.costs.cost_model import CostModel
from headrace.costs.fingerprint import fingerprint_of
from headrace.costs.sources.formulas import FORMULA_METHODS, Speeds, formula_model
from headrace.errors import CostError
from headrace.spec.architecture import Architecture
from headrace.spec.cluster import Cluster
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import (
    DEFAULT_IMPLEMENTATION,
    IMPLEMENTATIONS,
    Implementation,
)

__all__ = ["KERNELS", "roofline_costs", "speeds_of"]

KERNELS = 35
"""Kernels of a layer's forward as torch runs it, one operator at a time; twice as many in the
backward."""

_DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}


def roofline_costs(
    hardware: Hardware,
    devices: int,
    architecture: Architecture,
    *,
    sizes: tuple[int, ...] | None = None,
    methods: tuple[str, ...] | None = None,
    element_bytes: int = 2,
    memory_bytes: int | None = None,
    implementation: Implementation = IMPLEMENTATIONS[DEFAULT_IMPLEMENTATION],
) -> CostModel:
    """Costs of an architecture on some hardware, by data sheets and formulas.

    Args:
        hardware: The devices and their links.
        devices: How many devices there are.
        architecture: The model.
        sizes: Group sizes; those of :func:`headrace.costs.group_sizes_of` when left out.
        methods: Methods of layers; all that have formulas when left out.
        element_bytes: Bytes of an element of activations and working weights: 2, 4 or 8.
        memory_bytes: Bytes of a device that a rank may use; all when left out.
        implementation: The kernels that run.

    Returns:
        The costs.

    Raises:
        CostError: For a method without formulas, and for another size of an element.
        SpecError: For a dtype that the device does not know.
    """
    return formula_model(
        architecture,
        Cluster(
            devices=devices,
            memory_bytes=hardware.device.memory_bytes if memory_bytes is None else memory_bytes,
            device=hardware.device.name,
        ),
        speeds_of(hardware, element_bytes, implementation),
        fingerprint=fingerprint_of(
            source=f"roofline of {hardware}, {implementation}",
            devices=devices,
            element_bytes=element_bytes,
        ),
        sizes=sizes,
        methods=FORMULA_METHODS if methods is None else methods,
    )


def speeds_of(
    hardware: Hardware,
    element_bytes: int = 2,
    implementation: Implementation = IMPLEMENTATIONS[DEFAULT_IMPLEMENTATION],
) -> Speeds:
    """The speeds that an implementation attains on some hardware with elements of ``element_bytes``
    (2, 4 or 8). Raises CostError for another size."""
    device, inside, across = hardware.device, hardware.inside, hardware.across
    if element_bytes not in _DTYPES:
        wanted = " or ".join(map(str, _DTYPES))
        raise CostError("bytes of an element", got=element_bytes, wanted=wanted)
    peak = device.peak(_DTYPES[element_bytes]) * device.clock
    attained = implementation.on_device(device)
    memory_bytes_per_s = device.memory_bytes_per_s * device.attained_memory
    return Speeds(
        flops_per_s=peak * attained.products,
        attention_flops_per_s=peak * attained.attention,
        memory_bytes_per_s=memory_bytes_per_s,
        touched_bytes_per_s=memory_bytes_per_s / attained.passes,
        link_bytes_per_s=inside.bytes_per_s * inside.attained,
        latency_s=inside.latency_s,
        across_bytes_per_s=across.bytes_per_s * across.attained,
        across_latency_s=across.latency_s,
        devices_per_node=hardware.devices_per_node,
        launch_s=KERNELS * device.launch_s,
        element_bytes=element_bytes,
        counted=True,
        block_tokens=attained.block_tokens,
        exposed=attained.exposed,
        # The last wave of tiles, one on each multiprocessor, is half empty on average.
        idle_outputs=device.multiprocessors * implementation.tile_outputs / 2,
    )
