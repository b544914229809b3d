"""Nodes of devices: which link a group of ranks talks over, and hardware by its name.

Ranks of one node reach each other over the link ``inside``, groups that span nodes over the link
``across``. Named devices and links stand in :mod:`headrace.spec.hardware_presets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headrace.errors import SpecError, did_you_mean
from headrace.spec.device import Device, Link
from headrace.spec.hardware_presets import DEVICES, LINKS, USUAL

__all__ = ["DEVICES", "LINKS", "Device", "Hardware", "Link"]

_Preset = TypeVar("_Preset", Device, Link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Nodes of ``devices_per_node`` equal devices; rank r is of node r // devices_per_node.

    Text form: ``DEVICE[+INSIDE][+ACROSS]``: ``h100``, ``a100-80g+pcie4``,
    ``h100+nvlink4+ethernet-100g``. Links left out, and the devices of a node, are the usual ones of
    the device.
    """

    device: Device
    inside: Link
    across: Link
    devices_per_node: int

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise SpecError("devices of a node", got=self.devices_per_node, wanted=">= 1")

    def link(self, ranks: Sequence[int]) -> Link:
        """The link that a group of ranks talks over: the slower one when any pair needs it."""
        nodes = {rank // self.devices_per_node for rank in ranks}
        return self.inside if len(nodes) <= 1 else self.across

    def gather_s(self, ranks: int, total_bytes: float) -> float:
        """Seconds in which each of the first ``ranks`` gets all of ``total_bytes``, of which it has
        an even part: each byte crosses to a node once, and is spread inside; once for each rank
        where nodes are not full."""
        if ranks == 1:
            return 0.0
        each, full = total_bytes / ranks, ranks % self.devices_per_node == 0
        crossing = -(-ranks // self.devices_per_node) - 1
        if crossing and not full:
            crossing = ranks - self.devices_per_node
        inside_s = self.inside.seconds(each * (ranks - 1 - crossing))
        return inside_s + (self.across.seconds(each * crossing) if crossing else 0.0)

    @classmethod
    def parse(cls, text: str) -> Hardware:
        """The inverse of ``str``. Raises SpecError for a name that is no preset."""
        names = [name.strip() for name in text.strip().lower().split("+")]
        if len(names) > 3:
            raise SpecError("hardware", got=repr(text), wanted="DEVICE[+INSIDE][+ACROSS]")
        device = _preset("device of the hardware", names[0], DEVICES)
        usual = USUAL[device.name]
        links = [
            _preset("link of the hardware", name, LINKS)
            for name in (*names[1:], *usual.links[len(names) - 1 :])
        ]
        return cls(
            device=device, inside=links[0], across=links[1], devices_per_node=usual.devices_per_node
        )

    def __str__(self) -> str:
        return f"{self.device.name}+{self.inside.name}+{self.across.name}"


def _preset(what: str, name: str, presets: Mapping[str, _Preset]) -> _Preset:
    if name not in presets:
        longer = [known for known in presets if name and known.startswith(name)]
        several = f"which one: {', '.join(longer)}?" if len(longer) > 1 else None
        hint = several or did_you_mean(name, presets)
        raise SpecError(what, got=repr(name), hint=hint or f"known are {', '.join(presets)}")
    return presets[name]
