"""What one device attains, from a profile of it: a device for rooflines of many.

    products    the rate of large matrix products, measured apart; it is taken as the peak
    attention   7 h T^2 causal FLOPs (10 h and twice as many when not) over the part of a layer's
                seconds that grows with the square of the tokens
    memory      bytes that fused operators would move over the rest of the seconds a token, once
                products are subtracted; as a fraction of the rate of a plain copy
    launches    a layer's constant seconds, over the kernels of its forward and backward

Links, and what of their traffic is hidden, are not measured on one device: they are assumed.
"""

from __future__ import annotations

import json
from pathlib import Path

from headrace.costs.cost_model import CostModel
from headrace.costs.saving import save_whole
from headrace.costs.sources.formulas import layer_elements, touched_units
from headrace.costs.sources.roofline import KERNELS
from headrace.errors import CostError
from headrace.spec.architecture import Architecture
from headrace.spec.hardware import Device
from headrace.spec.known_methods import SINGLE_RANK
from headrace.spec.layer_plan import LayerOption

__all__ = ["measured_device", "save_device"]


def measured_device(
    costs: CostModel,
    model: Architecture,
    *,
    name: str,
    dtype: str,
    element_bytes: int,
    product_flops_per_s: float,
    copied_bytes_per_s: float,
) -> Device:
    """Derive the attained fractions of a device from a profile of one rank; the module's docstring
    says how.

    Args:
        costs: What was measured, on one rank at least.
        model: The model whose layer was measured.
        name: What the device is called.
        dtype: Type of activations and working weights, by torch's name.
        element_bytes: Bytes of an element of it.
        product_flops_per_s: Rate of large products, measured.
        copied_bytes_per_s: Bytes read and written by a plain copy in a second, measured.

    Returns:
        The device; its ``source`` says what is measured and of which model.

    Raises:
        CostError: When costs have no layer on one rank.
    """
    if 1 not in costs.options:
        wanted = "a profile of groups of one rank"
        raise CostError("efficiencies of a device", got=f"sizes {costs.group_sizes}", wanted=wanted)
    layer = costs.option(1, LayerOption.of(SINGLE_RANK))
    curve = layer.forward + layer.backward  # a T^2 + b T + c seconds over T tokens
    h = model.hidden
    # Attention has 4 h T^2 FLOPs in the forward, half of them when causal, and 5/2 of these in the
    # backward: (7 or 14) h T^2 together, in a T^2 seconds.
    attention_flops = (7 if model.causal else 14) * h
    attention_flops_per_s = attention_flops / curve.a if curve.a > 0 else product_flops_per_s
    # Causal attention runs T^2 + T scores in the place of T^2, as each token sees itself: a T more.
    diagonal_s = curve.a if model.causal else 0.0
    # Seconds of a token that are neither products (6 FLOPs a weight) nor attention: memory-bound.
    rest_s = curve.b - 6 * layer_elements(model) / product_flops_per_s - diagonal_s
    touched_bytes = sum(touched_units(model)[:2]) * h * element_bytes  # of forward and backward
    moved_bytes_per_s = touched_bytes / rest_s if rest_s > 0 else copied_bytes_per_s
    return Device(
        name=name,
        flops_per_s={dtype: product_flops_per_s},
        memory_bytes=costs.cluster.memory_bytes,
        memory_bytes_per_s=copied_bytes_per_s,
        launch_s=curve.c / (3 * KERNELS),  # a backward has twice the kernels of a forward
        attained_matmul=1.0,
        attained_attention=min(1.0, attention_flops_per_s / product_flops_per_s),
        attained_memory=min(1.0, moved_bytes_per_s / copied_bytes_per_s),
        family="cpu" if name == "cpu" else "",
        source=f"measured with a layer of {model} in {dtype}; links are assumed",
    )


def save_device(path: Path, device: Device) -> None:
    """Write a device to a file that ``--hardware measured:FILE`` reads. Raises CostError when it
    cannot."""
    save_whole(path, json.dumps(device.to_json(), indent=1) + "\n", "device")
