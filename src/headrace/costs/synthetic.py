"""Costs from formulas alone: for tests, for planning without a profile, for trying sizes out.

Not a roofline and not a measurement. Compute is FLOPs over one constant rate, traffic is bytes
over one constant speed, nothing overlaps, and every layer pays a fixed launch time. What a layer
costs stands in :mod:`headrace.costs.formulas`.
"""

from __future__ import annotations

from headrace.costs.cost_model import CostModel
from headrace.costs.fingerprint import fingerprint_of
from headrace.costs.formulas import FORMULA_METHODS, feed_forwards_of, layer_options
from headrace.costs.option import Exchange, OptionCost
from headrace.costs.quadratic import Linear, Quadratic
from headrace.costs.speeds import Speeds
from headrace.errors import CostError, did_you_mean
from headrace.spec.architecture import Architecture
from headrace.spec.cluster import Cluster
from headrace.spec.weights import parameter_count
from headrace.units import GIB

__all__ = ["group_sizes_of", "synthetic_costs"]

_OPTIMIZER_BYTES = 16  # fp32 master weight, gradient and two moments
_GRADIENT_BYTES = 4  # gradients are summed in fp32


def group_sizes_of(devices: int) -> tuple[int, ...]:
    """Group sizes worth costs on ``devices`` ranks: all up to 8, then powers of two and all."""
    sizes = {p for p in range(1, devices + 1) if p <= 8 or p & (p - 1) == 0} | {devices}
    return tuple(sorted(sizes))


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
    """A cost model of ``devices`` equal made-up devices by the formulas of this module.

    ``architecture`` defaults to a Llama of ``layers`` layers of 1024 features; ``sizes`` to
    :func:`group_sizes_of`. Group size 1 is the method ``local``. Larger ones have ``methods`` (of
    :data:`headrace.costs.formulas.FORMULA_METHODS`) as far as the architecture supports them, in
    all pairs of attention and feed-forward; without ``methods`` they have ``ulysses_z``, even
    where ranks outnumber heads. Raises CostError for a method without formulas, and when no size
    has an option.
    """
    for method in methods or ():
        if method not in FORMULA_METHODS:
            known = f"known are {', '.join(FORMULA_METHODS)}"
            hint = did_you_mean(method, FORMULA_METHODS) or known
            raise CostError("formulas of a method", got=repr(method), hint=hint)
    if architecture is None:
        architecture = Architecture(
            layers=layers, hidden=1024, heads=16, kv_heads=4, ffn=4096, vocabulary=32000
        )
    a, s = architecture, speeds or Speeds()
    options = {p: layer_options(a, s, p, methods) for p in sizes or group_sizes_of(devices)}
    options = {p: found for p, found in options.items() if found}
    weights = parameter_count(a)
    return CostModel(
        architecture=a,
        cluster=Cluster(devices=devices, memory_bytes=memory_bytes, device=device),
        fingerprint=fingerprint_of(source="synthetic", device=device, devices=devices),
        options=options,
        ends={p: _ends(a, s, p) for p in options},
        exchange_s=_exchange(s, weights, devices),
        state_bytes=_OPTIMIZER_BYTES * weights // devices,
        working_bytes={
            p: {
                "whole": weights * (s.element_bytes + _GRADIENT_BYTES),
                "sharded": _sharded_bytes(a, s, weights, p),
            }
            for p in options
        },
        gather_s={p: _gather_s(a, s, p) for p in options if p > 1},
        feed_forwards=feed_forwards_of(methods or ()),
    )


def _layer_weights(a: Architecture) -> int:
    kv = a.kv_heads * a.head_features
    return 2 * a.hidden * (a.hidden + kv) + (3 if a.gated else 2) * a.hidden * a.ffn


def _sharded_bytes(a: Architecture, s: Speeds, weights: int, p: int) -> int:
    """A p-th of weights and gradients, and one gathered layer with its gradient."""
    each = s.element_bytes + _GRADIENT_BYTES
    if p == 1:
        return weights * each
    return -(-weights // p) * each + _layer_weights(a) * each


def _gather_s(a: Architecture, s: Speeds, p: int) -> tuple[float, float]:
    """Forward gathers a layer; backward gathers it again and scatters its fp32 gradient."""
    rows = _layer_weights(a) * (p - 1) / p / s.link_bytes_per_s
    return (
        rows * s.element_bytes + s.latency_s,
        rows * (s.element_bytes + _GRADIENT_BYTES) + 2 * s.latency_s,
    )


def _exchange(s: Speeds, weights: int, devices: int) -> Exchange:
    moved = weights * (devices - 1) / devices / s.link_bytes_per_s
    return Exchange(
        pull_s=moved * s.element_bytes,
        push_s=moved * _GRADIENT_BYTES,
        update_s=2 * _OPTIMIZER_BYTES * weights / devices / s.memory_bytes_per_s,
    )


def _ends(a: Architecture, s: Speeds, p: int) -> OptionCost:
    """Embedding, last norm, head and loss of whole tokens on each rank; fp32 logits and their
    gradient live together."""
    head = Quadratic(b=2 * a.hidden * a.vocabulary * a.head_share / p / s.flops_per_s)
    return OptionCost(
        forward=head + Quadratic(c=s.launch_s),
        backward=head * 2 + Quadratic(c=2 * s.launch_s),
        kept=Linear(slope=a.hidden * s.element_bytes / p),
        transient=Linear(slope=8 * a.vocabulary * a.head_share / p),
    )
