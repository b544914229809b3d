"""The devices a plan is made for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import SpecError
from headrace.units import bytes_text

__all__ = ["Cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``devices`` equal devices with ``memory_bytes`` each that a rank may use."""

    devices: int
    memory_bytes: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise SpecError("devices of a cluster", got=self.devices, wanted=">= 1")
        if self.memory_bytes < 1:
            raise SpecError("memory of a device", got=self.memory_bytes, wanted=">= 1 byte")

    def __str__(self) -> str:
        return f"{self.devices} x {self.device} with {bytes_text(self.memory_bytes)}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Cluster:
        """The inverse of :meth:`to_json`. Raises SpecError when it is malformed."""
        try:
            return cls(**value)
        except TypeError as error:
            raise SpecError("cluster", got=str(error), wanted="its JSON form")
