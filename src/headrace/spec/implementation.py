"""Implementations: which kernels run a model, and what they attain of a device's peaks.

A data sheet says what a device could do. What it does depends on the kernels, so a forecast names
the implementation that it is of. One implementation on one family of devices is four numbers:

    products    fraction of the peak FLOPs that large matrix products reach
    attention   the same of attention's kernel, forward and backward together, causal FLOPs
    passes      how often memory-bound operators (norms, activations, rotations, residual sums,
                casts, dropout) move the bytes that fused ones would move once
    exposed     share of the seconds of gathering weights and scattering gradients that nothing
                hides

``benchmarks/forecasts.py`` compares forecasts with published runs and prints which of them each
number was fitted to; ``--calibrate`` fits them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.errors import SpecError, did_you_mean
from headrace.spec.given import of_kind
from headrace.spec.hardware import Device

__all__ = ["DEFAULT_IMPLEMENTATION", "Efficiency", "IMPLEMENTATIONS", "Implementation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What an implementation attains on a family of devices.

    Attributes:
        products: Fraction of the peak FLOPs that large matrix products reach.
        attention: Fraction of the peak FLOPs that attention reaches, causal FLOPs counted.
        passes: Bytes that memory-bound operators move, over those that fused ones would move.
        exposed: Fraction of the seconds of weights' gathers and gradients' scatters that is not
            hidden behind other work.
        block_tokens: Side of the square of scores that attention computes whole on the diagonal.

    Raises:
        SpecError: For fractions outside of 0 to 1, and for fewer passes than one.
    """

    products: float
    attention: float
    passes: float
    exposed: float
    block_tokens: int = 128

    def __post_init__(self) -> None:
        """Raise SpecError for attained fractions outside 0 to 1 and for fewer than one pass."""
        for name in ("products", "attention", "exposed"):
            value = getattr(self, name)
            # Costs are divided by the others; ``exposed`` may be 0, where all traffic is hidden.
            if not 0 <= value <= 1 or (value == 0 and name != "exposed"):
                wanted = "a fraction, 0 < fraction <= 1"
                raise SpecError(f"{name} of an efficiency", got=value, wanted=wanted)
        if not self.passes >= 1:
            raise SpecError("passes of an efficiency", got=self.passes, wanted=">= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """Kernels that run a model.

    Attributes:
        name: Its key in :data:`IMPLEMENTATIONS`.
        what: Which kernels, in a line.
        on: What it attains, by the family of devices; a device of another family is taken to
            attain the fractions of its own preset (:class:`headrace.spec.hardware.Device`).
        logit_bytes: Bytes that the loss holds for each logit at its peak, where the logits of all
            tokens of a rank are there at once; None for a loss in chunks, and layers that keep
            what headrace's keep.
        tile_outputs: Outputs of a matrix product that a multiprocessor computes at once; 0 where
            the seconds of a product are taken from its FLOPs alone, whatever its size.
        source: Where the numbers are from.
    """

    name: str
    what: str
    on: Mapping[str, Efficiency]
    logit_bytes: float | None = None
    tile_outputs: int = 128 * 128
    source: str

    @classmethod
    def named(cls, name: str) -> Implementation:
        """The implementation of a name.

        Args:
            name: A key of :data:`IMPLEMENTATIONS`.

        Returns:
            The implementation.

        Raises:
            SpecError: For a name that is not known.

        Example:
            >>> hr.Implementation.named("eager").on["hopper"].passes > 1
            True
        """
        if name not in IMPLEMENTATIONS:
            hint = did_you_mean(name, IMPLEMENTATIONS) or f"known are {', '.join(IMPLEMENTATIONS)}"
            raise SpecError("implementation", got=repr(name), hint=hint)
        return IMPLEMENTATIONS[name]

    @classmethod
    def of(cls, value: Implementation | str) -> Implementation:
        """An implementation of its name, or as it is.

        Args:
            value: A name, or an implementation.

        Returns:
            The implementation.

        Raises:
            SpecError: For a name that is not known, and for anything else.
        """
        return cls.named(value) if isinstance(value, str) else of_kind("implementation", value, cls)

    def on_device(self, device: Device) -> Efficiency:
        """What the implementation attains on a device.

        Args:
            device: The device.

        Returns:
            The efficiency on its family; on another one, what the device's own preset says.
        """
        found = self.on.get(device.family)
        if found is not None:
            return found
        return Efficiency(
            products=device.attained_matmul,
            attention=device.attained_attention,
            passes=1.0,
            exposed=1.0,
            block_tokens=1,
        )

    def applied(self, device: Device) -> Device:
        """A copy of a device with the attained fractions of this implementation.

        Args:
            device: The device.

        Returns:
            The device with other fractions of its peaks; those of FLOPs are lower where its clock
            is limited.
        """
        efficiency = self.on_device(device)
        return replace(
            device,
            attained_matmul=efficiency.products * device.clock,
            attained_attention=efficiency.attention * device.clock,
            # Moving bytes several times is as slow as memory of a fraction of the speed.
            attained_memory=device.attained_memory / efficiency.passes,
        )

    def __str__(self) -> str:
        return self.name


_PRODUCTS_HOPPER, _PRODUCTS_AMPERE = 0.785, 0.905
"""Of large products in 16 bits by cuBLAS, whatever calls it: fitted to llm-foundry's runs."""

_FLASH_2_HOPPER, _FLASH_2_AMPERE = 0.35, 0.59
"""Of FlashAttention-2: 335 of 989 TFLOP/s and up to 225 of 312, forward and backward, by its paper
(A100: FlexSP's fit, benchmarks/roofline.py)."""

_EAGER = {
    "hopper": Efficiency(
        products=_PRODUCTS_HOPPER, attention=_FLASH_2_HOPPER, passes=5.7, exposed=0.93
    ),
    "ampere": Efficiency(
        products=_PRODUCTS_AMPERE, attention=_FLASH_2_AMPERE, passes=3.6, exposed=1.0
    ),
}

_KNOWN = (
    Implementation(
        name="headrace",
        what="headrace's own kernels: products by cuBLAS, FlashAttention-2, fused element-wise "
        "operators, a loss in chunks",
        on=_EAGER,
        source="not measured on a device yet: taken to attain what eager PyTorch does",
    ),
    Implementation(
        name="eager",
        what="PyTorch one operator at a time, FlashAttention-2, FSDP2",
        on=_EAGER,
        logit_bytes=18,
        source="torchtitan, December 2024: one of two rows fitted; Ampere: passes as compiled, "
        "times what eager takes more on Hopper",
    ),
    Implementation(
        name="eager-2023",
        what="PyTorch one operator at a time, FlashAttention of 2023 in Triton, FSDP1",
        on={
            "hopper": Efficiency(
                products=_PRODUCTS_HOPPER, attention=0.182, passes=3.0, exposed=0.93
            ),
            "ampere": Efficiency(
                products=_PRODUCTS_AMPERE, attention=0.318, passes=2.9, exposed=1.0
            ),
        },
        logit_bytes=18,
        source="llm-foundry: every other row fitted",
    ),
    Implementation(
        name="compiled",
        what="PyTorch with torch.compile, FlashAttention-2, FSDP2",
        on={
            "hopper": Efficiency(
                products=_PRODUCTS_HOPPER, attention=_FLASH_2_HOPPER, passes=3.75, exposed=0.5
            ),
            "ampere": Efficiency(
                products=_PRODUCTS_AMPERE, attention=_FLASH_2_AMPERE, passes=2.4, exposed=0.5
            ),
        },
        logit_bytes=16,
        source="torchtitan and fms-fsdp: three of ten rows fitted",
    ),
    Implementation(
        name="fused",
        what="Transformer Engine's fused kernels in BF16, attention by cuDNN, Megatron's overlap",
        on={
            "hopper": Efficiency(
                products=_PRODUCTS_HOPPER, attention=0.514, passes=2.4, exposed=0.3
            ),
        },
        logit_bytes=8,
        source="NVIDIA's recipes for Llama 3.1, TRL's longest sequences: three of 15 rows fitted",
    ),
    Implementation(
        name="ideal",
        what="every kernel at the fraction of the peak that its device's preset says, each byte "
        "moved once, no traffic of weights hidden",
        on={},
        tile_outputs=0,
        source="data sheets and FlexSP's fit (benchmarks/roofline.py): faster than what is "
        "published of long sequences",
    ),
)

IMPLEMENTATIONS: dict[str, Implementation] = {known.name: known for known in _KNOWN}
"""Implementations by their names."""

DEFAULT_IMPLEMENTATION = "headrace"
"""What forecasts are of unless told."""
