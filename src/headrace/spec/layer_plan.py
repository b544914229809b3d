"""Layer options and layer plans: how each layer of one micro-batch is spread and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

from headrace.errors import SpecError, did_you_mean

__all__ = ["BRANCHES", "RECOMPUTE", "Branch", "LayerOption", "LayerPlan", "Recompute"]

Recompute = Literal["none", "attention", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)

Branch = Literal["attention", "feed_forward"]
BRANCHES: tuple[Branch, ...] = get_args(Branch)

_MOST_LAYERS = 100_000
"""More in one run of a layer plan's text is a mistake: it would only fill memory."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LayerOption:
    """One layer's attention method, feed-forward method and recompute level.

    Text form: ``ulysses_z``, ``ulysses_z+full``, ``ulysses_z/local+attention``.
    """

    attention: str
    feed_forward: str
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        """Raise SpecError for an unknown recompute level."""
        if self.recompute not in RECOMPUTE:
            hint = did_you_mean(self.recompute, RECOMPUTE)
            raise SpecError(
                "recompute level",
                got=repr(self.recompute),
                wanted=" or ".join(RECOMPUTE),
                hint=hint,
            )

    @classmethod
    def of(cls, method: str, recompute: Recompute = "none") -> LayerOption:
        """The same method for attention and feed-forward."""
        return cls(attention=method, feed_forward=method, recompute=recompute)

    def __str__(self) -> str:
        both = self.attention == self.feed_forward
        text = self.attention if both else f"{self.attention}/{self.feed_forward}"
        return text if self.recompute == "none" else f"{text}+{self.recompute}"

    @classmethod
    def parse(cls, text: str) -> LayerOption:
        """Read an option as ``str`` writes it. Raises SpecError for a malformed text."""
        methods, _, recompute = text.partition("+")
        attention, _, feed_forward = methods.partition("/")
        if not attention:
            raise SpecError("layer option", got=repr(text), wanted="METHOD[/METHOD][+RECOMPUTE]")
        return cls(
            attention=attention,
            feed_forward=feed_forward or attention,
            recompute=recompute or "none",  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One option per layer, first layer first. Text form: ``2*ulysses_z+full 2*ulysses_z``. It is
    empty where costs have no layers; such a plan can be shown but not run."""

    options: tuple[LayerOption, ...] = ()

    @classmethod
    def uniform(cls, option: LayerOption, layers: int) -> LayerPlan:
        """The same option for every layer. Raises SpecError without layers."""
        if layers < 1:
            raise SpecError("there are no layers", got=layers, wanted="at least 1")
        return cls(options=(option,) * layers)

    @property
    def counts(self) -> tuple[tuple[LayerOption, int], ...]:
        """Runs of equal neighbouring options as pairs (option, number of layers), in order."""
        return tuple((option, len(list(run))) for option, run in groupby(self.options))

    def __str__(self) -> str:
        return " ".join(f"{count}*{option}" for option, count in self.counts)

    @classmethod
    def parse(cls, text: str) -> LayerPlan:
        """Read a layer plan as ``str`` writes it. Raises SpecError for a malformed text."""
        options: list[LayerOption] = []
        for word in text.split():
            count, star, option = word.partition("*")
            if not star or not count.isdecimal() or not 1 <= int(count) <= _MOST_LAYERS:
                wanted = f"COUNT*OPTION, a count >= 1 and <= {_MOST_LAYERS}"
                raise SpecError("layer plan", got=repr(word), wanted=wanted)
            options += [LayerOption.parse(option)] * int(count)
        return cls(options=tuple(options))
