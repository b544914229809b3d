"""The devices a plan is made for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import SpecError
from headrace.spec.given import whole
from headrace.units import bytes_text

__all__ = ["MOST_DEVICES", "Cluster"]

MOST_DEVICES = 1_000_000
"""The most devices that anything is planned or forecast for; plans of more would take for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal devices, one for each rank.

    Attributes:
        devices: How many there are.
        memory_bytes: Bytes of each that a rank may use.
        device: What they are called, such as ``cpu`` or ``h100``.

    Raises:
        SpecError: For fewer than one device or one byte, and for more than a million devices.
    """

    devices: int
    memory_bytes: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Make ints of whole numbers of any kind; raises SpecError for other values."""
        devices = whole("devices of a cluster", self.devices, least=1, most=MOST_DEVICES)
        memory_bytes = whole("memory of a device", self.memory_bytes, least=1)
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "memory_bytes", memory_bytes)

    def __str__(self) -> str:
        return f"{self.devices} x {self.device} with {bytes_text(self.memory_bytes)}"

    def to_json(self) -> dict[str, Any]:
        """The cluster as JSON.

        Returns:
            An object that :meth:`from_json` reads back.
        """
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Cluster:
        """Read what :meth:`to_json` gave.

        Args:
            value: The JSON object.

        Returns:
            The cluster.

        Raises:
            SpecError: When the object is malformed.
        """
        try:
            return cls(**value)
        except TypeError as error:
            raise SpecError("cluster", got=str(error), wanted="its JSON form")
