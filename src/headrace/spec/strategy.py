"""The schemes of all pipelines of one plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.errors import SpecError

__all__ = [
    "Scheme",
    "Stage",
    "Strategy",
    "share_layers",
]

_PART = re.compile(r"^(tp|cp|pp)([1-9][0-9]*)$")
_FIELDS = {"tp": "tensor", "cp": "context", "pp": "pipeline"}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Scheme:
    """The degrees of one pipeline, written ``tp4-cp2-pp2`` (Hydraulis, "parallel scheme").

    Degrees of one are left out of the text; a pipeline of a single device is ``cp1``.

    Attributes:
        tensor: Neighbouring ranks of a stage that hold the rows of a weight together.
        context: Blocks of such ranks among which the tokens are split.
        pipeline: Stages, each with some of the layers.

    Raises:
        SpecError: For a degree below one.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in _FIELDS.values():
            if getattr(self, name) < 1:
                raise SpecError(f"{name} degree", got=getattr(self, name), wanted=">= 1")

    @property
    def devices(self) -> int:
        """The number of devices of one pipeline, the product of its degrees."""
        return self.tensor * self.context * self.pipeline

    @property
    def width(self) -> int:
        """The number of ranks of one stage, the tensor times the context degree."""
        return self.tensor * self.context

    def parts(self, *, sharded: bool) -> int:
        """The number of parts into which the ranks of a stage cut the rows of a weight. Where
        weights are ``sharded`` each rank has a part of its own; otherwise the tensor ranks cut
        them, and the blocks of tensor ranks are replicas of each other."""
        return self.width if sharded else self.tensor

    def __str__(self) -> str:
        degrees = {"tp": self.tensor, "cp": self.context, "pp": self.pipeline}
        text = "-".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
        return text or "cp1"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """The inverse of ``str``; degrees of one may be written out, order is free."""
        fields: dict[str, int] = {}
        for part in text.strip().split("-"):
            found = _PART.match(part)
            if not found or _FIELDS[found[1]] in fields:
                raise SpecError("scheme", got=repr(text), wanted="tpN, cpN, ppN joined by '-'")
            fields[_FIELDS[found[1]]] = int(found[2])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How many pipelines of each scheme a plan has, written ``1*cp4 + 4*cp1``.

    The pipelines stand side by side when their ranks sum to at most the cluster's; a plan whose
    ranks work in pipelines of several sizes one after the other lists them all.

    Attributes:
        counts: Each scheme with the number of its pipelines, the largest scheme first.

    Raises:
        SpecError: For a count below one, and for a scheme that is listed twice.

    Example:
        >>> hr.Strategy.parse("1*tp2-pp2 + 4*cp1").devices
        8
    """

    counts: tuple[tuple[Scheme, int], ...]

    def __post_init__(self) -> None:
        """Raise SpecError for a scheme without pipelines and for a scheme that comes twice."""
        for scheme, count in self.counts:
            if count < 1:
                raise SpecError(f"pipelines of {scheme}", got=count, wanted=">= 1")
        if len({scheme for scheme, _ in self.counts}) < len(self.counts):
            raise SpecError("strategy", got="a scheme twice", wanted="each scheme once")

    @classmethod
    def of(cls, schemes: Iterable[Scheme]) -> Strategy:
        """Count schemes.

        Args:
            schemes: The scheme of every pipeline.

        Returns:
            The strategy, the largest scheme first.
        """
        counted = Counter(schemes)
        order = sorted(counted, key=lambda scheme: (-scheme.devices, scheme))
        return cls(counts=tuple((scheme, counted[scheme]) for scheme in order))

    @property
    def devices(self) -> int:
        """The number of devices of all pipelines together."""
        return sum(scheme.devices * count for scheme, count in self.counts)

    def __str__(self) -> str:
        return " + ".join(f"{count}*{scheme}" for scheme, count in self.counts) or "none"

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read a strategy as ``str`` writes it.

        Args:
            text: Terms ``COUNT*SCHEME``, or a scheme for one pipeline, joined by ``+``.

        Returns:
            The strategy.

        Raises:
            SpecError: For a term that is malformed.
        """
        if text.strip() == "none":
            return cls(counts=())
        schemes: list[Scheme] = []
        for term in text.split("+"):
            count, star, scheme = term.strip().partition("*")
            if not star:
                count, scheme = "1", term.strip()
            if not count.isdecimal() or int(count) < 1:
                raise SpecError("strategy", got=repr(term), wanted="COUNT*SCHEME + ...")
            schemes += [Scheme.parse(scheme)] * int(count)
        return cls.of(schemes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage ``index`` of ``count``: the layers [start, stop) of a model on ``ranks``.

    ``ranks`` rise: member m of the stage is ``ranks[m]``. The first stage embeds, the last one
    has the head.
    """

    index: int
    count: int
    ranks: tuple[int, ...]
    start: int
    stop: int

    @property
    def first(self) -> bool:
        """Whether the stage is the first, which embeds the tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the stage is the last, which has the head and the loss."""
        return self.index == self.count - 1

    @property
    def buckets(self) -> tuple[int, ...]:
        """The weight buckets of the stage in the order of the forward: 0 for the embedding, i + 1
        for layer i, and L + 1 for the last norm and the head, which follow L layers."""
        embedding = (0,) if self.first else ()
        ends = 1 if self.last else 0
        return embedding + tuple(range(self.start + 1, self.stop + 1 + ends))


def share_layers(layers: int, stages: int) -> tuple[int, ...]:
    """The number of layers of each stage, as even as can be. Layers that are left over go to stages
    in the middle, one each, as the first stage has the embedding and the last one the head. Raises
    SpecError for fewer layers than stages."""
    if layers < stages:
        raise SpecError(
            "stages of a pipeline",
            got=f"{stages} for {layers} layers",
            wanted="at least one layer in each",
        )
    each, left = divmod(layers, stages)
    # From the middle outwards; of two equally far the earlier, as the head is the heavier end.
    order = sorted(range(stages), key=lambda s: (abs(2 * s - (stages - 1)), s))
    extra = set(order[:left])
    return tuple(each + (stage in extra) for stage in range(stages))
