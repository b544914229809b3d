"""Nodes of devices: which link a group of ranks talks over, and hardware by its name.

Ranks of one node reach each other over the link ``inside``, groups that span nodes over the link
``across``. Named devices and links stand in :data:`DEVICES` and :data:`LINKS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from headrace.errors import SpecError, did_you_mean
from headrace.spec.given import of_kind, read_json
from headrace.units import GIB, MIB

__all__ = [
    "DEVICES",
    "Device",
    "Hardware",
    "LINKS",
    "Link",
    "MEASURED",
    "USUAL",
    "Usual",
    "filled_nodes",
]


def filled_nodes(ranks: int, each: int) -> tuple[int, ...]:
    """The ranks of each node where nodes take ``each`` one after the other, the last one what is
    left."""
    rest = ranks % each
    return (each,) * (ranks // each) + ((rest,) if rest else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, as one rank uses it.

    ``flops_per_s`` are peaks by the name of torch's dtype (``bfloat16``, ``float32``, ...),
    ``memory_bytes`` what a process can have, ``memory_bytes_per_s`` the peak of reads and writes
    together, ``launch_s`` the seconds to launch one kernel. ``attained_matmul``,
    ``attained_attention`` and ``attained_memory`` are the fractions of the peaks that large
    matrix products, attention kernels and element-wise kernels reach. ``family`` names the devices
    on which kernels attain the same fractions
    (:class:`headrace.spec.implementation.Implementation`), ``power_w`` is the power limit in watts,
    ``clock`` the fraction of the peak FLOPs that it leaves. Each of the ``multiprocessors``
    computes one tile of a product at a time, so the last round of tiles leaves some of them idle;
    0 where this is not counted, as on measured devices, whose ``launch_s`` includes it. ``source``
    says where the numbers are from.
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
    family: str = ""
    power_w: int = 0
    clock: float = 1.0
    multiprocessors: int = 0

    def __post_init__(self) -> None:
        """Raise SpecError for speeds and sizes that are not above zero and attained shares out of
        range."""
        if not self.flops_per_s or not min(self.flops_per_s.values()) > 0:
            raise SpecError(f"FLOPs of {self.name}", got=dict(self.flops_per_s), wanted="> 0")
        if self.memory_bytes < 1 or not self.memory_bytes_per_s > 0:
            got = f"{self.memory_bytes} bytes at {self.memory_bytes_per_s} a second"
            raise SpecError(f"memory of {self.name}", got=got, wanted="> 0")
        if not self.launch_s >= 0:
            raise SpecError(f"launch of {self.name}", got=self.launch_s, wanted="seconds >= 0")
        if self.multiprocessors < 0:
            got = self.multiprocessors
            raise SpecError(f"multiprocessors of {self.name}", got=got, wanted=">= 0")
        for field in fields(self):
            if field.name.startswith("attained"):
                _check_attained(self.name, field.name, getattr(self, field.name))

    @property
    def is_cpu(self) -> bool:
        """Whether this is a CPU, or was measured on one."""
        return self.family == "cpu"

    def to_json(self) -> dict[str, Any]:
        """The device as JSON, which :meth:`from_json` reads back."""
        return asdict(self) | {"kind": "device"}

    @classmethod
    def from_json(cls, value: Any) -> Device:
        """The inverse of :meth:`to_json`. Raises SpecError when it is malformed."""
        if not isinstance(value, Mapping) or value.get("kind") != "device":
            wanted = "what headrace profile --efficiency wrote"
            raise SpecError("measured device", got=type(value).__name__, wanted=wanted)
        try:
            return cls(**{name: part for name, part in value.items() if name != "kind"})
        except (TypeError, AttributeError) as error:
            raise SpecError("measured device", got=str(error), wanted="its JSON form")

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
    """Raise SpecError unless the ``fraction`` that device or link ``name`` attains is in (0, 1]."""
    if not 0 < fraction <= 1:
        wanted = "a fraction of the peak, 0 < fraction <= 1"
        raise SpecError(f"{what} of {name}", got=fraction, wanted=wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """The node that a device is usually built into: its two ``links``, inside a node and across
    nodes, and the number of devices in a node."""

    links: tuple[str, str]
    devices_per_node: int


def _nvidia(
    name: str,
    flops_16_bits: float,
    flops_32_bits: float,
    memory_bytes: int,
    memory_bytes_per_s: float,
    attained_attention: float,
    source: str,
    family: str,
    power_w: int,
    clock: float = 1.0,
) -> Device:
    """An NVIDIA device by the peaks of its data sheet. ``flops_16_bits`` per second are those of
    the tensor cores, ``flops_32_bits`` those without TF32, which fp64 has too; the attained
    fractions of products and memory and the launch time are the same for all devices."""
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        flops_per_s={
            "bfloat16": flops_16_bits,
            "float16": flops_16_bits,
            "float32": flops_32_bits,
            "float64": flops_32_bits,
        },
        launch_s=5e-6,
        attained_matmul=0.7,
        attained_attention=attained_attention,
        attained_memory=0.8,
        source=source,
        family=family,
        power_w=power_w,
        clock=clock,
        multiprocessors={"ampere": 108, "hopper": 132}[family],
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
        "ampere",
        400,
    ),
    _nvidia(
        "a100-40g",
        312e12,
        19.5e12,
        40_536 * MIB,
        1.555e12,
        0.59,
        "NVIDIA A100 data sheet (SXM 40 GB); memory as torch reports it",
        "ampere",
        400,
    ),
    _nvidia(
        "a800",
        312e12,
        19.5e12,
        81_252 * MIB,
        2.039e12,
        0.59,
        "NVIDIA A800 data sheet (SXM 80 GB); memory as torch reports it",
        "ampere",
        400,
    ),
    _nvidia(
        "h100",
        989e12,
        67e12,
        81_000 * MIB,
        3.35e12,
        0.4,
        "NVIDIA H100 data sheet (SXM 80 GB, dense); memory as torch reports it, rounded",
        "hopper",
        700,
    ),
    _nvidia(
        "h100-96g-500w",
        989e12,
        67e12,
        95_000 * MIB,
        2.4e12,
        0.4,
        "torchtitan's benchmarks, December 2024: 96 GB of HBM2e and a limit of 500 W; the clock is "
        "the cube root of 500 / 700, as power grows with its third power",
        "hopper",
        500,
        clock=(500 / 700) ** (1 / 3),
    ),
    _nvidia(
        "h200",
        989e12,
        67e12,
        141 * 10**9,
        4.8e12,
        0.4,
        "NVIDIA H200 data sheet (SXM, dense)",
        "hopper",
        700,
    ),
    _nvidia(
        "gh200",
        990e12,
        67e12,
        96 * 10**9,
        4.0e12,
        0.4,
        "NVIDIA GH200 data sheet (96 GB HBM3, dense); the CPU's memory is not counted",
        "hopper",
        700,
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
        multiprocessors=104,
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
        family="cpu",
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
    "h100-96g-500w": Usual(links=("nvlink4", "infiniband-ndr"), devices_per_node=8),
    "h200": Usual(links=("nvlink4", "infiniband-ndr"), devices_per_node=8),
    "gh200": Usual(links=("nvlink4", "infiniband-ndr"), devices_per_node=4),
    "mi250": Usual(links=("xgmi", "infiniband-hdr"), devices_per_node=8),
    "cpu": Usual(links=("shared-memory", "ethernet-100g"), devices_per_node=2),
}
"""Links and devices of a node that a device usually comes with, by its name."""


_Preset = TypeVar("_Preset", Device, Link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Nodes of ``devices_per_node`` equal devices; rank r is of node r // devices_per_node.

    Text form: ``DEVICE[+INSIDE][+ACROSS]``: ``h100``, ``a100-80g+pcie4``,
    ``h100+nvlink4+ethernet-100g``. Links left out, and the devices of a node, are the usual ones of
    the device. ``measured:FILE`` is the device that ``headrace profile --efficiency FILE`` wrote.
    """

    device: Device
    inside: Link
    across: Link
    devices_per_node: int

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise SpecError("devices of a node", got=self.devices_per_node, wanted=">= 1")

    def link(self, ranks: Sequence[int]) -> Link:
        """The link that a group of ranks communicates over: ``across`` as soon as the ranks are on
        more than one node."""
        nodes = {rank // self.devices_per_node for rank in ranks}
        return self.inside if len(nodes) <= 1 else self.across

    def gather_s(self, ranks: int, total_bytes: float) -> float:
        """Seconds of an all-gather over the first ``ranks``, after which each has ``total_bytes``.

        What other nodes have crosses to a node once, a part of it to each of its ranks, and is
        passed on inside; those of the smallest node, the last, receive the most.
        """
        if ranks == 1:
            return 0.0
        fewest = min(filled_nodes(ranks, self.devices_per_node))
        shard_bytes = total_bytes / ranks
        crossing = (ranks - fewest) / fewest  # shards that a rank receives across
        inside_s = self.inside.seconds(shard_bytes * (ranks - 1 - crossing))
        return inside_s + (self.across.seconds(shard_bytes * crossing) if crossing else 0.0)

    def node_sizes(self, ranks: int) -> tuple[int, ...] | None:
        """The ranks of each node where the first ``ranks`` are on several, else None."""
        sizes = filled_nodes(ranks, self.devices_per_node)
        return sizes if len(sizes) > 1 else None

    @classmethod
    def of(cls, value: Hardware | str) -> Hardware:
        """Hardware of its text, or as it is. Raises SpecError for a name that is no preset, and for
        anything else."""
        return cls.parse(value) if isinstance(value, str) else of_kind("hardware", value, cls)

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """The inverse of ``str``. Raises SpecError for a name that is no preset."""
        names = [name.strip() for name in text.strip().split("+")]
        if len(names) > 3:
            raise SpecError("hardware", got=repr(text), wanted="DEVICE[+INSIDE][+ACROSS]")
        names[1:] = [name.lower() for name in names[1:]]
        if names[0].startswith(MEASURED):
            device = _device_of_file(names[0])
            # A measured device has no usual node of its own: it is that of a CPU, or of an H100.
            usual = USUAL["cpu" if device.is_cpu else "h100"]
        else:
            device = _preset("device of the hardware", names[0].lower(), DEVICES)
            usual = USUAL[device.name]
        # The links that are named, then the usual ones for those that are left out.
        links = [
            _preset("link of the hardware", name, LINKS)
            for name in (*names[1:], *usual.links[len(names) - 1 :])
        ]
        return cls(
            device=device, inside=links[0], across=links[1], devices_per_node=usual.devices_per_node
        )

    def __str__(self) -> str:
        return f"{self.device.name}+{self.inside.name}+{self.across.name}"


MEASURED = "measured:"
"""What the name of a device begins with that a file describes."""


def _device_of_file(name: str) -> Device:
    """The measured device of ``name``, which is ``measured:FILE``, and is the device's name too.
    Raises SpecError for a file that cannot be read or is malformed."""
    value = read_json(name.removeprefix(MEASURED), f"hardware {name}")
    return replace(Device.from_json(value), name=name)


def _preset(what: str, name: str, presets: Mapping[str, _Preset]) -> _Preset:
    """The preset of this name. Raises SpecError for an unknown name, with the presets that begin
    with it, or the most similar one, as a hint."""
    if name not in presets:
        longer = [known for known in presets if name and known.startswith(name)]
        several = f"which one: {', '.join(longer)}?" if len(longer) > 1 else None
        hint = several or did_you_mean(name, presets)
        raise SpecError(what, got=repr(name), hint=hint or f"known are {', '.join(presets)}")
    return presets[name]
