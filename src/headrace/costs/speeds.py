"""The constants of a made-up device."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import CostError

__all__ = ["Speeds"]


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
