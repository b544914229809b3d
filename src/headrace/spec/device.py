"""One device and one link: what a vendor promises, and how much of it is attained.

Peaks are those of data sheets: dense FLOPs (no sparsity), and of links the bytes that one device
sends in one direction. What a program attains of a peak is a fraction beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from headrace.errors import SpecError

__all__ = ["Device", "Link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, as one rank uses it.

    ``flops_per_s`` are peaks by the name of torch's dtype (``bfloat16``, ``float32``, ...),
    ``memory_bytes`` what a process can have, ``memory_bytes_per_s`` the peak of reads and writes
    together, ``launch_s`` the seconds to launch one kernel. ``attained_matmul``,
    ``attained_attention`` and ``attained_memory`` are the fractions of the peaks that large
    matrix products, attention kernels and element-wise kernels reach. ``source`` says where the
    numbers are from.
    """

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float
    attained_matmul: float
    attained_attention: float
    attained_memory: float
    source: str

    def __post_init__(self) -> None:
        if not self.flops_per_s or not min(self.flops_per_s.values()) > 0:
            raise SpecError(f"FLOPs of {self.name}", got=dict(self.flops_per_s), wanted="> 0")
        if self.memory_bytes < 1 or not self.memory_bytes_per_s > 0:
            got = f"{self.memory_bytes} bytes at {self.memory_bytes_per_s} a second"
            raise SpecError(f"memory of {self.name}", got=got, wanted="> 0")
        if not self.launch_s >= 0:
            raise SpecError(f"launch of {self.name}", got=self.launch_s, wanted="seconds >= 0")
        for field in fields(self):
            if field.name.startswith("attained"):
                _check_attained(self.name, field.name, getattr(self, field.name))

    def peak(self, dtype: str) -> float:
        """FLOPs per second of a dtype. Raises SpecError when the data sheet has none."""
        if dtype not in self.flops_per_s:
            known = f"known are {', '.join(self.flops_per_s)}"
            raise SpecError(f"FLOPs of {self.name}", got=repr(dtype), hint=known)
        return self.flops_per_s[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a device sends over.

    ``bytes_per_s`` is the peak of one device in one direction, ``latency_s`` the seconds before
    the first byte of a message or of a collective, ``attained`` the fraction of the peak that
    large messages reach. ``source`` says where the numbers are from.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    attained: float
    source: str

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):
            got = f"{self.bytes_per_s} bytes a second after {self.latency_s} s"
            raise SpecError(f"link {self.name}", got=got, wanted="> 0 after >= 0 s")
        _check_attained(self.name, "attained", self.attained)

    def seconds(self, sent_bytes: float, messages: int = 1) -> float:
        """Seconds in which a device sends ``sent_bytes`` in all, in ``messages`` one after the
        other."""
        return messages * self.latency_s + sent_bytes / (self.bytes_per_s * self.attained)


def _check_attained(name: str, what: str, fraction: float) -> None:
    if not 0 < fraction <= 1:
        wanted = "a fraction of the peak, 0 < fraction <= 1"
        raise SpecError(f"{what} of {name}", got=fraction, wanted=wanted)
