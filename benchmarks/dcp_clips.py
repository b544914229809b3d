"""Costs of Transformer-2D on clips, by formulas: for the benchmark of Data-Centric Parallel.

28 layers of 1152 features and 16 heads, the paper's "1.2B" (blocks over space and over time in
turn have 0.89 billion weights). A sequence of l places is a clip of l / S frames of S = 256
patches; a layer of two blocks takes, per place, 48 h^2 operations of matrices and 4 h (S + l / S)
of attention, so seconds are a quadratic of l. Groups switch axes twice a layer (DSP): each of p
ranks sends 2 (p - 1) / p^2 of the tensor forward, and as much backward. A layer keeps 40 elements
for each place and feature and needs 12 in passing, as counted on a small one; one that is computed
again keeps the inputs of its two blocks.
"""

from __future__ import annotations

from headrace.costs import CostModel
from headrace.costs.cost_model import ExchangeCost, OptionCost
from headrace.costs.quadratic import Linear, Quadratic
from headrace.spec.cluster import Cluster
from headrace.spec.hardware import Hardware
from headrace.spec.model_shape import ModelShape

__all__ = ["costs_of_clips"]

LAYERS, HIDDEN, PATCHES = 28, 1152, 256
WEIGHTS = 24 * HIDDEN**2
ELEMENT = 2
KEPT, PASSING, ENTRIES = 40, 12, 2
KERNELS_S = 80 * 4e-6


def costs_of_clips(hardware: str, devices: int, *, memory_bytes: int, longest: int) -> CostModel:
    """Costs on so many devices, in groups of all sizes up to eight and powers of two."""
    machine = Hardware.parse(hardware)
    sizes = [p for p in range(1, devices + 1) if p <= 8 or p & (p - 1) == 0 or p == devices]
    elements = LAYERS * WEIGHTS
    link = machine.inside if devices <= machine.devices_per_node else machine.across
    return CostModel(
        shape=ModelShape(
            name="Transformer-2D",
            layers=LAYERS,
            hidden=HIDDEN,
            split_elements=(0,) * (LAYERS + 2),
            whole_elements=(0, *[WEIGHTS] * LAYERS, 0),
            longest=longest,
        ),
        cluster=Cluster(devices=devices, memory_bytes=memory_bytes, device=machine.device.name),
        fingerprint=f"clips of Transformer-2D on {hardware}",
        options={p: _options(machine, p) for p in sizes},
        ends={p: _ends(machine, p) for p in sizes},
        exchange_s=ExchangeCost(push_s=link.seconds(2 * ELEMENT * elements, 1)),
        state_bytes=int(elements * (2 * ELEMENT + 12 / devices)),
        working_bytes={p: {"replicated": 0, "sharded": 0} for p in sizes},
    )


def _options(machine: Hardware, p: int) -> dict[str, OptionCost]:
    """One layer without recompute, and computed again."""
    device = machine.device
    peak = device.peak("bfloat16")
    link = machine.inside if p <= machine.devices_per_node else machine.across
    matrix = 2 * WEIGHTS / (peak * device.attained_matmul) / p
    attention = 4 * HIDDEN / (peak * device.attained_attention) / p
    touched = 60 * HIDDEN * ELEMENT / (device.memory_bytes_per_s * device.attained_memory) / p
    sent = 2 * (p - 1) / p**2 * HIDDEN * ELEMENT / (link.bytes_per_s * link.attained)
    start = KERNELS_S + (2 * link.latency_s if p > 1 else 0.0)
    forward = Quadratic(
        a=attention / PATCHES, b=matrix + attention * PATCHES + touched + sent, c=start
    )
    backward = Quadratic(
        a=2.5 * attention / PATCHES,
        b=2 * (matrix + touched) + 2.5 * attention * PATCHES + sent,
        c=2 * start,
    )
    place = HIDDEN * ELEMENT / p
    name = "local" if p == 1 else "dsp"
    return {
        name: OptionCost(
            forward=forward,
            backward=backward,
            kept=Linear(slope=KEPT * place, constant=0.0),
            transient=Linear(slope=PASSING * place, constant=0.0),
        ),
        f"{name}+full": OptionCost(
            forward=forward,
            backward=forward + backward,
            kept=Linear(slope=ENTRIES * place, constant=0.0),
            transient=Linear(slope=(KEPT + PASSING) * place, constant=0.0),
        ),
    }


def _ends(machine: Hardware, p: int) -> OptionCost:
    """Embedding and prediction, of which little is known: a few passes over the tensor."""
    device = machine.device
    touched = 8 * HIDDEN * ELEMENT / (device.memory_bytes_per_s * device.attained_memory) / p
    line = Linear(slope=2 * HIDDEN * ELEMENT / p, constant=0.0)
    curve = Quadratic(b=touched, c=KERNELS_S / 8)
    return OptionCost(forward=curve, backward=curve + curve, kept=line, transient=line)
