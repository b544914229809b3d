"""The constants of a device and of its links, from which formulas make seconds."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from headrace.errors import CostError
from headrace.spec.method_facts import TrafficPattern

__all__ = ["Speeds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The constants of a device, by default of a made-up one; all are attained, not peaks.

    ``flops_per_s`` are those of matrix products and, without ``attention_flops_per_s``, of
    attention. ``link_bytes_per_s`` is what a device sends in one direction, ``latency_s`` the
    seconds to start a collective or a hop. ``memory_bytes_per_s`` bounds the optimizer,
    ``touched_bytes_per_s`` norms, rotations, activations, residual sums and the loss (by default
    they are free). ``launch_s`` is the seconds to launch one layer's forward, ``element_bytes``
    the size of an element of activations and working weights.

    Ranks of one node, ``devices_per_node`` of them, talk over that link; groups that span nodes
    also over one of ``across_bytes_per_s`` and ``across_latency_s``.

    ``counted`` attention has the operations that kernels run: the scores up to and on the
    diagonal, and five products in the backward for two in the forward. Otherwise it has those that
    are usually called useful: half the square, and four for two.
    """

    flops_per_s: float = 1e14
    link_bytes_per_s: float = 1e11
    memory_bytes_per_s: float = 1e12
    launch_s: float = 50e-6
    latency_s: float = 15e-6
    element_bytes: int = 2
    attention_flops_per_s: float | None = None
    touched_bytes_per_s: float = inf
    across_bytes_per_s: float | None = None
    across_latency_s: float = 0.0
    devices_per_node: int | None = None
    counted: bool = False

    def __post_init__(self) -> None:
        rates = (
            self.flops_per_s,
            self.link_bytes_per_s,
            self.memory_bytes_per_s,
            self.touched_bytes_per_s,
            self.core_flops_per_s,
            self.across_bytes_per_s or 1.0,
        )
        if not min(rates) > 0:
            raise CostError("speeds", got=self, wanted="> 0")
        times = (self.launch_s, self.latency_s, self.across_latency_s)
        if not (min(times) >= 0 and isfinite(sum(times))) or self.element_bytes < 1:
            raise CostError("speeds", got=self, wanted="times >= 0 and at least a byte")
        if (self.devices_per_node is None) != (self.across_bytes_per_s is None):
            raise CostError("speeds", got=self, wanted="a link across for nodes, and nodes for it")

    @property
    def core_flops_per_s(self) -> float:
        """FLOPs per second of attention."""
        given = self.attention_flops_per_s
        return self.flops_per_s if given is None else given

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of what is summed over ranks: fp32, or wider where elements are."""
        return max(4, self.element_bytes)

    def sending(self, p: int, pattern: TrafficPattern) -> tuple[float, float]:
        """Seconds per byte that a rank of a group of p sends, and seconds to start.

        A group spans as few nodes as hold it, evenly. Of a gather each byte crosses to a node once
        and is spread inside it; of an all-to-all what is for ranks of other nodes crosses; hops
        are as slow as the one between two nodes.
        """
        inside = 1 / self.link_bytes_per_s
        if self.devices_per_node is None or self.across_bytes_per_s is None:
            return inside, self.latency_s
        nodes = -(-p // self.devices_per_node)
        if nodes == 1:
            return inside, self.latency_s
        crossing = {
            "gather": (nodes - 1) / (p - 1),
            "exchange": (p - p / nodes) / (p - 1),
            "hop": 1.0,
        }[pattern]
        each = crossing / self.across_bytes_per_s + (1 - crossing) * inside
        return each, self.across_latency_s
