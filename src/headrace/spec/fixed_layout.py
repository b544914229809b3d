"""Fixed layouts: how a run that does not adapt spreads a model, as others publish theirs."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from headrace.errors import SpecError
from headrace.spec.cluster import MOST_DEVICES
from headrace.spec.given import whole

__all__ = ["FixedLayout"]

_WORDS = {
    "dp": "replicas",
    "ddp": "replicas",
    "zero1": "states",
    "zero2": "gradients",
    "fsdp": "shards",
    "zero3": "shards",
    "tp": "tensor",
    "cp": "context",
    "pp": "stages",
    "vp": "virtual_stages",
}
_PART = re.compile(r"([a-z]+[123]?)[ =-]?([1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLayout:
    """How devices share the work of a run, the same in every step.

    Text form: parts joined by ``x``, such as ``FSDP 8``, ``FSDP 32 x TP 8``, ``CP 8`` or
    ``TP 4 x PP 4 x VP 5 x CP 2 x ZERO1 2``. Neighbouring devices share tensors, then context,
    then data; stages are furthest apart.

    Attributes:
        replicas: Data parallelism, each replica with all weights and optimizer states (``DP``).
        states: Data parallelism with optimizer states spread over the replicas (``ZERO1``).
        gradients: The same with gradients spread too; weights are gathered once for forward and
            backward (``ZERO2``).
        shards: Data parallelism with weights, gradients and states spread (``FSDP``).
        tensor: Ranks that share each product (``TP``).
        context: Ranks that share each sequence; weights are spread over them too where
            ``shards`` or nothing else says how (``CP``).
        stages: Pipeline stages (``PP``).
        virtual_stages: Parts of the layers that each stage holds, for an interleaved schedule
            (``VP``).

    Raises:
        SpecError: For sizes below one, for more than a million devices, for more than one of
            ``ZERO1``, ``ZERO2`` and ``FSDP``, and for ``VP`` without ``PP``.
    """

    replicas: int = 1
    states: int = 1
    gradients: int = 1
    shards: int = 1
    tensor: int = 1
    context: int = 1
    stages: int = 1
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        """Raise SpecError for sizes below one and for parts that exclude or need each other."""
        for part in fields(self):
            size = getattr(self, part.name)
            whole(f"{part.name} of a layout", size, least=1, most=MOST_DEVICES)
        whole("devices of a layout", self.devices, least=1, most=MOST_DEVICES)
        if sum(size > 1 for size in (self.states, self.gradients, self.shards)) > 1:
            raise SpecError(
                "layout",
                got=str(self),
                wanted="one of ZERO1, ZERO2 and FSDP",
                hint="DP beside one of them says how many times there is everything",
            )
        if self.virtual_stages > 1 and self.stages == 1:
            raise SpecError("layout", got=str(self), wanted="VP beside PP")

    @property
    def devices(self) -> int:
        """Devices that the layout takes."""
        return self.data * self.group * self.stages

    @property
    def data(self) -> int:
        """Groups of ranks with micro-batches of their own."""
        return self.replicas * self.states * self.gradients * self.shards

    @property
    def group(self) -> int:
        """Ranks that work on one micro-batch in one stage."""
        return self.tensor * self.context

    @property
    def weight_shards(self) -> int:
        """The number of shards of a weight (of one tensor rank's part of it): the FSDP ranks, times
        the context ranks where there is FSDP or no data parallelism at all."""
        no_data_parallelism = self.data == 1
        return self.shards * (self.context if no_data_parallelism or self.shards > 1 else 1)

    @property
    def gradient_shards(self) -> int:
        """The number of shards of a weight's gradients after each micro-batch."""
        if self.gradients > 1:
            return self.gradients * self.context
        return self.weight_shards

    @property
    def state_shards(self) -> int:
        """The number of shards of a weight's optimizer states; 1 where every replica has all of
        them."""
        if self.states > 1:
            return self.states * self.context
        return self.gradient_shards

    @classmethod
    def parse(cls, text: str) -> FixedLayout:
        """Read the text form.

        Args:
            text: Such as ``FSDP 32 x TP 8``.

        Returns:
            The layout.

        Raises:
            SpecError: For words that name no part, and for a part that is named twice.

        Example:
            >>> hr.FixedLayout.parse("FSDP 32 x TP 8").devices
            256
        """
        sizes: dict[str, int] = {}
        for part in re.split(r"\s*[x*,]\s*", text.strip().lower()):
            found = _PART.fullmatch(part)
            name = _WORDS.get(found[1]) if found else None
            if found is None or name is None or name in sizes:
                wanted = "parts such as FSDP 8, joined by x, each once"
                hint = f"parts are {', '.join(word.upper() for word in _WORDS)}"
                raise SpecError("layout", got=repr(text), wanted=wanted, hint=hint)
            sizes[name] = int(found[2])
        return cls(**sizes)

    def __str__(self) -> str:
        # Reversed, so that of two words for a field the first one is kept: DP, not DDP.
        words = {name: word.upper() for word, name in reversed(_WORDS.items())}
        sizes = [(words[part.name], getattr(self, part.name)) for part in fields(self)]
        return " x ".join(f"{word} {size}" for word, size in sizes if size > 1) or "1 device"
