"""Costs from formulas alone: for tests, for planning without a profile, for trying sizes out.

Not a roofline and not a measurement. Compute is FLOPs over one constant rate, traffic is bytes
over one constant speed, nothing overlaps, and every layer pays a fixed launch time. The formulas
per layer and rank (h hidden, n heads, g key-value heads, d features of a head, f features of the
feed-forward, l tokens of a sequence, p ranks, V = (p - 1) / p, e bytes of an element,
u = tokens h e / p bytes of one local activation):

    linear FLOPs      2 (2 h^2 + 2 h g d + m h f) l / p             m = 3 when gated, else 2
    attention FLOPs   4 h l^2 / p, half of it when causal, by the busiest rank's heads: the share
                      is ceil(n / p) / n, so a size that does not divide the heads costs more
    switch bytes      V (2 h + 2 g d) e l / p                    q, k, v out, the result back
    backward          twice the FLOPs and the switch of the forward, plus what is recomputed:
                      attention: the linear FLOPs; full: the whole forward without its last switch
    kept              none: (4 + 2 g / n + m f / h) u; attention: 3 u; full: u
    transient         2 (1 + 2 g / n) u of switch buffers, the gradients of the widest activations,
                      and what was recomputed
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.costs.cost_model import CostModel
from headrace.costs.fingerprint import fingerprint_of
from headrace.costs.option import Exchange, OptionCost
from headrace.costs.quadratic import Linear, Quadratic
from headrace.errors import CostError
from headrace.spec.architecture import Architecture
from headrace.spec.cluster import Cluster
from headrace.spec.method import RECOMPUTE, LayerOption, Recompute
from headrace.spec.weights import parameter_count
from headrace.units import GIB

__all__ = ["Speeds", "group_sizes_of", "synthetic_costs"]

_OPTIMIZER_BYTES = 16  # fp32 master weight, gradient and two moments
_GRADIENT_BYTES = 4  # gradients are summed in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The constants of the made-up device: useful FLOPs per second, bytes per second between
    ranks and in memory, seconds to launch one layer's forward and to start one collective, bytes
    of one element of activations and working weights."""

    flops_per_s: float = 1e14
    link_bytes_per_s: float = 1e11
    memory_bytes_per_s: float = 1e12
    launch_s: float = 50e-6
    latency_s: float = 15e-6
    element_bytes: int = 2

    def __post_init__(self) -> None:
        if min(self.flops_per_s, self.link_bytes_per_s, self.memory_bytes_per_s) <= 0:
            raise CostError("speeds", got=self, wanted="> 0")
        if min(self.launch_s, self.latency_s) < 0 or self.element_bytes < 1:
            raise CostError("speeds", got=self, wanted="times >= 0 and at least a byte")


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
) -> CostModel:
    """A cost model of ``devices`` equal made-up devices by the formulas of this module.

    ``architecture`` defaults to a Llama of ``layers`` layers of 1024 features; ``sizes`` to
    :func:`group_sizes_of`. Group size 1 is the method ``local``, others are ``ulysses_z``.
    """
    if architecture is None:
        architecture = Architecture(
            layers=layers, hidden=1024, heads=16, kv_heads=4, ffn=4096, vocabulary=32000
        )
    a, s = architecture, speeds or Speeds()
    sizes = sizes or group_sizes_of(devices)
    weights = parameter_count(a)
    return CostModel(
        architecture=a,
        cluster=Cluster(devices=devices, memory_bytes=memory_bytes, device=device),
        fingerprint=fingerprint_of(source="synthetic", device=device, devices=devices),
        options={p: _options(a, s, p) for p in sizes},
        ends={p: _ends(a, s, p) for p in sizes},
        exchange_s=_exchange(s, weights, devices),
        state_bytes=_OPTIMIZER_BYTES * weights // devices,
        working_bytes={
            p: {
                "whole": weights * (s.element_bytes + _GRADIENT_BYTES),
                "sharded": _sharded_bytes(a, s, weights, p),
            }
            for p in sizes
        },
        gather_s={p: _gather_s(a, s, p) for p in sizes if p > 1},
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


def _options(a: Architecture, s: Speeds, p: int) -> dict[str, OptionCost]:
    method = "local" if p == 1 else "ulysses_z"
    return {str(LayerOption.of(method, level)): _layer(a, s, p, level) for level in RECOMPUTE}


def _layer(a: Architecture, s: Speeds, p: int, level: Recompute) -> OptionCost:
    spread = (p - 1) / p
    kv = a.kv_heads * a.head_features
    linear = Quadratic(b=2 * _layer_weights(a) / p / s.flops_per_s)
    share = -(-a.heads // p) / a.heads
    attention = Quadratic(a=(2 if a.causal else 4) * a.hidden * share / s.flops_per_s)
    out, back = a.hidden + 2 * kv, a.hidden
    bytes_per_s = s.link_bytes_per_s / s.element_bytes
    start_s = 0.0 if p == 1 else s.latency_s
    there = Quadratic(b=spread * out / p / bytes_per_s, c=start_s)
    home = Quadratic(b=spread * back / p / bytes_per_s, c=start_s)
    forward = linear + attention + there + home + Quadratic(c=s.launch_s)
    backward = (linear + attention) * 2 + there + home + Quadratic(c=2 * s.launch_s)
    if level == "attention":
        backward = backward + linear + Quadratic(c=s.launch_s / 2)
    elif level == "full":
        backward = backward + linear + attention + there + Quadratic(c=s.launch_s)
    unit = a.hidden * s.element_bytes / p
    wide = (3 if a.gated else 2) * a.ffn / a.hidden
    all_kept = 4 + 2 * kv / a.hidden + wide
    kept = {"none": all_kept, "attention": 3.0, "full": 1.0}[level]
    passing = 2 * (1 + 2 * kv / a.hidden) + 2 * a.ffn / a.hidden + all_kept - kept
    return OptionCost(
        forward=forward, backward=backward,
        kept=Linear(slope=kept * unit), transient=Linear(slope=passing * unit),
    )  # fmt: skip


def _ends(a: Architecture, s: Speeds, p: int) -> OptionCost:
    """Embedding, last norm, head and loss of whole tokens on each rank; fp32 logits and their
    gradient live together."""
    head = Quadratic(b=2 * a.hidden * a.vocabulary / p / s.flops_per_s)
    return OptionCost(
        forward=head + Quadratic(c=s.launch_s),
        backward=head * 2 + Quadratic(c=2 * s.launch_s),
        kept=Linear(slope=a.hidden * s.element_bytes / p),
        transient=Linear(slope=8 * a.vocabulary / p),
    )
