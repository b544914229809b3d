"""A whole cost model by formulas: layers, the ends of the model, weights, the optimizer.

Beside the layers (:mod:`headrace.costs.sources.formulas`):

    state       fp32 master weights, gradients and two moments, a share on each device
    working     replicated: weights and gradients; sharded: a p-th of them, and one gathered layer
    step        weights gathered, gradients summed, either as elements of activations, each once
                between two nodes; the state read and written
    ends        the head's products, and what the loss, the last norm and the embedding touch
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.costs.cost_model import CostModel
from headrace.costs.option import ExchangeCost, OptionCost
from headrace.costs.quadratic import Linear, Quadratic
from headrace.costs.sources.formulas import FORMULA_METHODS, feed_forwards_of, layer_options
from headrace.costs.sources.speeds import Speeds
from headrace.errors import CostError, did_you_mean
from headrace.spec.architecture import Architecture
from headrace.spec.cluster import Cluster
from headrace.spec.method_facts import TrafficPattern
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS
from headrace.spec.weights import parameter_count

__all__ = ["formula_model", "group_sizes_of"]

_ROOMY = 1 / 8
"""The part of the memory that the logits of a chunk may take, to be counted whatever the tokens."""

_OPTIMIZER_BYTES = 16  # fp32 master weight, gradient and two moments


def group_sizes_of(devices: int) -> tuple[int, ...]:
    """Group sizes worth costs on ``devices`` ranks: all up to 8, then powers of two and all."""
    sizes = {p for p in range(1, devices + 1) if p <= 8 or p & (p - 1) == 0} | {devices}
    return tuple(sorted(sizes))


def formula_model(
    architecture: Architecture,
    cluster: Cluster,
    speeds: Speeds,
    *,
    fingerprint: str,
    sizes: Iterable[int] | None = None,
    methods: tuple[str, ...] | None = None,
) -> CostModel:
    """Costs of an architecture on a cluster of these speeds.

    ``sizes`` defaults to :func:`group_sizes_of`; ``methods`` as
    :func:`headrace.costs.sources.formulas.layer_options` takes them. Raises CostError for a method
    without formulas, and when no size has an option.
    """
    for method in methods or ():
        if method not in FORMULA_METHODS:
            known = f"known are {', '.join(FORMULA_METHODS)}"
            hint = did_you_mean(method, FORMULA_METHODS) or known
            raise CostError("formulas of a method", got=repr(method), hint=hint)
    a, s, devices = architecture, speeds, cluster.devices
    wanted = sizes or group_sizes_of(devices)
    options = {p: found for p in wanted if (found := layer_options(a, s, p, methods))}
    weights = parameter_count(a)
    return CostModel(
        shape=a.shape,
        cluster=cluster,
        fingerprint=fingerprint,
        options=options,
        ends={p: _ends(a, s, p, cluster.memory_bytes) for p in options},
        exchange_s=_exchange(s, weights, devices),
        state_bytes=_OPTIMIZER_BYTES * weights // devices,
        working_bytes={
            p: {
                "replicated": weights * (s.element_bytes + s.sum_bytes),
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
    each = s.element_bytes + s.sum_bytes
    if p == 1:
        return weights * each
    return -(-weights // p) * each + _layer_weights(a) * each


def _gather_s(a: Architecture, s: Speeds, p: int) -> tuple[float, float]:
    """Forward gathers a layer; backward gathers it again and scatters its fp32 gradient."""
    each, start = s.sending(p, "gather")
    rows = _layer_weights(a) * (p - 1) / p * each
    return rows * s.element_bytes + start, rows * (s.element_bytes + s.sum_bytes) + 2 * start


def _exchange(s: Speeds, weights: int, devices: int) -> ExchangeCost:
    """Over all devices; nothing moves on one. Where nodes are not full rows cross once a device."""
    node = s.devices_per_node or devices
    pattern: TrafficPattern = "gather" if devices <= node or devices % node == 0 else "exchange"
    each, _ = s.sending(devices, pattern) if devices > 1 else (0.0, 0.0)
    moved_s = weights * s.element_bytes * (devices - 1) / devices * each
    return ExchangeCost(
        pull_s=moved_s,
        push_s=moved_s,
        update_s=2 * _OPTIMIZER_BYTES * weights / devices / s.memory_bytes_per_s,
    )


def _ends(a: Architecture, s: Speeds, p: int, memory_bytes: int) -> OptionCost:
    """Embedding, last norm, head and loss of whole tokens on each rank. Logits are of the type of
    activations, read forward, read and written backward; they and their gradient live together,
    those of a pack's tokens, but of no more than a chunk: either is a bound, and the chunk is
    taken where it leaves most of the memory."""
    dense = a.hidden if a.masked else 0
    head = Quadratic(b=2 * a.hidden * (a.vocabulary + dense) * a.head_share / p / s.flops_per_s)
    words = a.vocabulary * s.element_bytes
    most = 2 * HEAD_CHUNK_TOKENS * words
    roomy = most <= _ROOMY * memory_bytes
    unit, logits = a.hidden * s.element_bytes / p, words * a.head_share / p
    there = Quadratic(b=(4 * unit + logits) / s.touched_bytes_per_s)
    back = Quadratic(b=(7 * unit + 2 * logits) / s.touched_bytes_per_s)
    return OptionCost(
        forward=head + there + Quadratic(c=s.launch_s),
        backward=head * 2 + back + Quadratic(c=2 * s.launch_s),
        kept=Linear(slope=unit),
        transient=Linear(constant=most) if roomy else Linear(slope=2 * logits),
    )
