"""The devices a plan is made for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import SpecError
from headrace.units import bytes_text

__all__ = ["Cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal devices, one for each rank.

    Attributes:
        devices: How many there are.
        memory_bytes: Bytes of each that a rank may use.
        device: What they are called, such as ``cpu`` or ``h100``.

    Raises:
        SpecError: For fewer than one device or one byte.
    """

    devices: int
    memory_bytes: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 1 <= self.devices < math.inf:  # neither holds for NaN
            raise SpecError("devices of a cluster", got=self.devices, wanted=">= 1, and finite")
        if not 1 <= self.memory_bytes < math.inf:
            got, wanted = self.memory_bytes, ">= 1 byte, and finite"
            raise SpecError("memory of a device", got=got, wanted=wanted)

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
