"""What predicted seconds mean: tokens a second, utilisation, and what the prediction assumes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from headrace.spec.architecture import Architecture
from headrace.units import bytes_text, percent_text, rate_text

__all__ = ["Assumed", "Rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a prediction is of.

    Attributes:
        devices: How many there are.
        hardware: Devices and links, or what the costs were measured on.
        implementation: The kernels that run; ``measured`` where costs were measured, ``made-up``
            where they are of a made-up device, ``modelled`` where they are a roofline of hardware
            that the configuration does not name.
        precision: Type of activations and working weights, by torch's name.
        optimizer: Whose states are held.
        peak_flops_per_s: Of one device in this precision; None where no data sheet is known.
        memory_bytes: Bytes of one device that a rank may use.
        kept_free_bytes: Bytes of these that plans leave free.
    """

    devices: int
    hardware: str
    implementation: str
    precision: str
    optimizer: str
    peak_flops_per_s: float | None
    memory_bytes: int
    kept_free_bytes: int

    def __str__(self) -> str:
        """Devices, kernels, precision, optimizer and memory in one line."""
        free = f"{bytes_text(self.kept_free_bytes)} of {bytes_text(self.memory_bytes)} kept free"
        kernels = f"{self.implementation} kernels in {self.precision}, {self.optimizer}"
        return f"{self.devices} x {self.hardware}, {kernels}, {free}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of a predicted step.

    Attributes:
        tokens: Tokens of the step, over all devices.
        seconds: What it is predicted to take.
        model_flops: FLOPs of its tokens (:meth:`headrace.spec.Architecture.flops_per_token`,
            those of causal attention halved).
        assumed: What the prediction is of.
    """

    tokens: int
    seconds: float
    model_flops: float
    assumed: Assumed

    @classmethod
    def of(
        cls, lengths: Iterable[int], seconds: float, model: Architecture, assumed: Assumed
    ) -> Rates:
        """The rates of a batch of sequences of ``lengths`` tokens that takes ``seconds``."""
        tokens = tuple(lengths)
        flops = sum(n * model.flops_per_token(n) for n in tokens)
        return cls(tokens=sum(tokens), seconds=seconds, model_flops=flops, assumed=assumed)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that one device trains in a second."""
        return self.tokens / self.seconds / self.assumed.devices

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: model FLOPs a second over the peak of all devices; None where no
        peak is known."""
        peak = self.assumed.peak_flops_per_s
        if peak is None:
            return None
        return self.model_flops / self.seconds / (peak * self.assumed.devices)

    def to_json(self) -> dict[str, Any]:
        """The rates and what they assume, as JSON."""
        return {
            "tokens_per_s_per_device": self.tokens_per_s,
            "mfu": self.mfu,
            "assumed": asdict(self.assumed),
        }

    def __str__(self) -> str:
        """Tokens a second for a device, and the share of its peak where that is known."""
        text = f"{rate_text(self.tokens_per_s)} tokens/s a device"
        if self.mfu is not None and self.assumed.peak_flops_per_s is not None:
            peak = f"{self.assumed.peak_flops_per_s / 1e12:.3g} TFLOP/s"
            text += f", MFU {percent_text(self.mfu)} (causal FLOPs of {peak})"
        return text
