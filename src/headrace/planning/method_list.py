"""Methods that are given layer by layer, as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.costs import CostModel
from headrace.errors import SpecError, did_you_mean
from headrace.spec import LayerOption

__all__ = ["ListedLayer", "parse_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLayer:
    """The methods that a user gives for one layer, with a recompute level or with any.

    Attributes:
        option: The methods and the recompute level.
        levelled: Whether the user gave the recompute level; else any level is allowed, and that of
            ``option`` says nothing.
    """

    option: LayerOption
    levelled: bool

    def allows(self, option: LayerOption, costs: CostModel, p: int) -> bool:
        """Whether a layer of this description may take ``option`` (of ``costs``) on groups of ``p``
        ranks. On a single rank only the recompute level counts, as there is nothing to spread and
        all methods are alike."""
        if self.levelled and option.recompute != self.option.recompute:
            return False
        listed, asked = costs.named(self.option), costs.named(option)
        same = (listed.attention, listed.feed_forward) == (asked.attention, asked.feed_forward)
        return p == 1 or same

    def __str__(self) -> str:
        text = str(self.option)  # which leaves out the level ``none``
        return f"{text}+none" if self.levelled and self.option.recompute == "none" else text


def parse_layers(
    texts: Sequence[str], layers: int, known: Collection[str]
) -> tuple[ListedLayer, ...]:
    """Parse the description of every layer of ``layers`` layers from ``texts``: one for each layer,
    or one that holds for all.

    Raises SpecError for another number of them, for unreadable text, and for a method that is
    not ``known``.
    """
    if len(texts) not in (1, layers):
        raise SpecError("layers", got=f"{len(texts)} entries", wanted=f"1 or {layers}")
    found = tuple(_parsed(text, known) for text in texts)
    return found * layers if len(found) == 1 else found


def _parsed(text: str, known: Collection[str]) -> ListedLayer:
    """Parse the description of one layer. Raises SpecError for a method that is not ``known``."""
    option = LayerOption.parse(text)
    for method in (option.attention, option.feed_forward):
        if method not in known:
            hint = did_you_mean(method, known) or f"known are {', '.join(sorted(known))}"
            raise SpecError(
                f"method of layer {text!r}", got=repr(method), wanted="one with costs", hint=hint
            )
    return ListedLayer(option=option, levelled="+" in text)
