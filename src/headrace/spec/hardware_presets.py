"""Named devices and links.

Peaks are those of the vendors' data sheets. Bytes of memory are what torch reports as total on such
a device where known, else what the data sheet says. Attained fractions are what is usual of cuBLAS
(or rocBLAS), of flash attention 2 and of collectives of tens of megabytes; those of A100 and A800
are calibrated (``benchmarks/roofline.py`` says against what, and how far off the rest is then).
``cpu``, one core of a common server, is measured, not promised.

Links between nodes count one port for each device: where devices share a port, divide.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.spec.device import Device, Link
from headrace.units import GIB, MIB

__all__ = ["DEVICES", "LINKS", "USUAL", "Usual"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """What a device is usually built into: links inside a node and across nodes, devices of one."""

    links: tuple[str, str]
    devices_per_node: int


def _nvidia(
    name: str,
    flops: float,
    plain: float,
    memory_bytes: int,
    memory_bytes_per_s: float,
    attained_attention: float,
    source: str,
) -> Device:
    """``flops`` of the tensor cores in 16 bits, ``plain`` in fp32 without TF32 and in fp64."""
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        flops_per_s={"bfloat16": flops, "float16": flops, "float32": plain, "float64": plain},
        launch_s=5e-6,
        attained_matmul=0.7,
        attained_attention=attained_attention,
        attained_memory=0.8,
        source=source,
    )


_DEVICES = (
    _nvidia(
        "a100-80g",
        312e12,
        19.5e12,
        81_252 * MIB,
        2.039e12,
        0.59,
        "NVIDIA A100 data sheet (SXM 80 GB); memory as torch reports it",
    ),
    _nvidia(
        "a100-40g",
        312e12,
        19.5e12,
        40_536 * MIB,
        1.555e12,
        0.59,
        "NVIDIA A100 data sheet (SXM 40 GB); memory as torch reports it",
    ),
    _nvidia(
        "a800",
        312e12,
        19.5e12,
        81_252 * MIB,
        2.039e12,
        0.59,
        "NVIDIA A800 data sheet (SXM 80 GB); memory as torch reports it",
    ),
    _nvidia(
        "h100",
        989e12,
        67e12,
        81_000 * MIB,
        3.35e12,
        0.4,
        "NVIDIA H100 data sheet (SXM 80 GB, dense); memory as torch reports it, rounded",
    ),
    _nvidia("h200", 989e12, 67e12, 141 * 10**9, 4.8e12, 0.4, "NVIDIA H200 data sheet (SXM, dense)"),
    _nvidia(
        "gh200",
        990e12,
        67e12,
        96 * 10**9,
        4.0e12,
        0.4,
        "NVIDIA GH200 data sheet (96 GB HBM3, dense); the CPU's memory is not counted",
    ),
    Device(
        name="mi250",
        flops_per_s={"bfloat16": 181e12, "float16": 181e12, "float32": 45.3e12, "float64": 45.3e12},
        memory_bytes=64 * GIB,
        memory_bytes_per_s=1.638e12,
        launch_s=8e-6,
        attained_matmul=0.6,
        attained_attention=0.35,
        attained_memory=0.75,
        source="AMD Instinct MI250 data sheet, matrix peaks; one of its two dies (a GCD), as torch "
        "shows it",
    ),
    Device(
        name="cpu",
        flops_per_s={"bfloat16": 236e9, "float32": 118e9, "float64": 59e9},
        memory_bytes=4 * GIB,
        memory_bytes_per_s=48e9,
        launch_s=4e-6,
        attained_matmul=0.85,
        attained_attention=0.5,
        attained_memory=0.65,
        source="measured: one core of a two-core x86 server with AVX-512 at 3.7 GHz, one thread, "
        "torch's own products, attention, copies and calls; memory: half of a small machine",
    ),
)

DEVICES: dict[str, Device] = {device.name: device for device in _DEVICES}

_NVLINK = "data sheet: half of the sum of both directions; NCCL's usual share of it and latency"
_PORT = "line rate of one port for each device; NCCL's usual share of it and latency"

_LINKS = (
    Link(
        name="nvlink3",
        bytes_per_s=300e9,
        latency_s=15e-6,
        attained=0.75,
        source=f"NVIDIA A100 {_NVLINK}",
    ),
    Link(
        name="nvlink-a800",
        bytes_per_s=200e9,
        latency_s=15e-6,
        attained=0.8,
        source=f"NVIDIA A800 {_NVLINK}",
    ),
    Link(
        name="nvlink4",
        bytes_per_s=450e9,
        latency_s=15e-6,
        attained=0.8,
        source=f"NVIDIA H100 {_NVLINK}",
    ),
    Link(
        name="nvlink-c2c",
        bytes_per_s=450e9,
        latency_s=5e-6,
        attained=0.8,
        source="NVIDIA GH200 data sheet, CPU to GPU: half of the sum of both directions",
    ),
    Link(
        name="xgmi",
        bytes_per_s=50e9,
        latency_s=25e-6,
        attained=0.75,
        source="AMD Instinct MI250 data sheet: one Infinity Fabric link, the slowest of a ring",
    ),
    Link(
        name="pcie4",
        bytes_per_s=31.5e9,
        latency_s=20e-6,
        attained=0.65,
        source="PCI Express 4.0, 16 lanes; usual share without switches between the devices",
    ),
    Link(
        name="pcie5",
        bytes_per_s=63e9,
        latency_s=20e-6,
        attained=0.65,
        source="PCI Express 5.0, 16 lanes; usual share without switches between the devices",
    ),
    Link(
        name="infiniband-hdr",
        bytes_per_s=25e9,
        latency_s=30e-6,
        attained=0.85,
        source=f"InfiniBand HDR, 200 Gb/s: {_PORT}",
    ),
    Link(
        name="infiniband-ndr",
        bytes_per_s=50e9,
        latency_s=30e-6,
        attained=0.85,
        source=f"InfiniBand NDR, 400 Gb/s: {_PORT}",
    ),
    Link(
        name="ethernet-100g",
        bytes_per_s=12.5e9,
        latency_s=50e-6,
        attained=0.7,
        source=f"Ethernet, 100 Gb/s: {_PORT}",
    ),
    Link(
        name="ethernet-400g",
        bytes_per_s=50e9,
        latency_s=50e-6,
        attained=0.7,
        source=f"Ethernet, 400 Gb/s: {_PORT}",
    ),
    Link(
        name="shared-memory",
        bytes_per_s=3.2e9,
        latency_s=200e-6,
        attained=0.5,
        source="measured: gloo between two processes on a two-core x86 server, all-to-all and "
        "all-reduce of 2 to 32 MiB",
    ),
)

LINKS: dict[str, Link] = {link.name: link for link in _LINKS}

USUAL: dict[str, Usual] = {
    "a100-80g": Usual(links=("nvlink3", "infiniband-hdr"), devices_per_node=8),
    "a100-40g": Usual(links=("nvlink3", "infiniband-hdr"), devices_per_node=8),
    "a800": Usual(links=("nvlink-a800", "infiniband-hdr"), devices_per_node=8),
    "h100": Usual(links=("nvlink4", "infiniband-ndr"), devices_per_node=8),
    "h200": Usual(links=("nvlink4", "infiniband-ndr"), devices_per_node=8),
    "gh200": Usual(links=("nvlink4", "infiniband-ndr"), devices_per_node=4),
    "mi250": Usual(links=("xgmi", "infiniband-hdr"), devices_per_node=8),
    "cpu": Usual(links=("shared-memory", "ethernet-100g"), devices_per_node=2),
}
"""By the device's name."""
