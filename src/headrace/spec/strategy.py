"""The schemes of all pipelines of one plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.errors import SpecError
from headrace.spec.scheme import Scheme

__all__ = ["Strategy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How many pipelines of each scheme, written ``1*cp4 + 4*cp1``, largest scheme first.

    The pipelines stand side by side when their ranks sum to at most the cluster's; a plan whose
    ranks work in pipelines of several sizes one after the other lists them all.
    """

    counts: tuple[tuple[Scheme, int], ...]

    def __post_init__(self) -> None:
        for scheme, count in self.counts:
            if count < 1:
                raise SpecError(f"pipelines of {scheme}", got=count, wanted=">= 1")
        if len({scheme for scheme, _ in self.counts}) < len(self.counts):
            raise SpecError("strategy", got="a scheme twice", wanted="each scheme once")

    @classmethod
    def of(cls, schemes: Iterable[Scheme]) -> Strategy:
        """Count schemes, largest first."""
        counted = Counter(schemes)
        order = sorted(counted, key=lambda scheme: (-scheme.devices, scheme))
        return cls(counts=tuple((scheme, counted[scheme]) for scheme in order))

    @property
    def devices(self) -> int:
        """Sum of the devices of all pipelines."""
        return sum(scheme.devices * count for scheme, count in self.counts)

    def __str__(self) -> str:
        return " + ".join(f"{count}*{scheme}" for scheme, count in self.counts) or "none"

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The inverse of ``str``."""
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
