"""The decisions of a plan as numbers: what is hashed, and what travels to other ranks.

    lengths        tokens and ids of all sequences
    pipelines      the scheme of each (by its place in ``schemes``), its count of shares; then the
                   ranks of all, and the shares of all
    micro-batches  pipeline, layer plan (by its place in ``layers``), order and count of sequences
                   of each; then the sequences of all

Words stand once, in ``texts``; JSON says each again for every micro-batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.spec.method import LayerPlan
    from headrace.spec.plan import Plan

__all__ = ["NumberReader", "numbers_of"]


@dataclass(slots=True)
class NumberReader:
    """Takes numbers one after the other. Raises ValueError when there are too few."""

    numbers: Sequence[int]
    at: int = 0

    def take(self, count: int) -> Sequence[int]:
        """The next ``count`` numbers."""
        self.at += count
        if count < 0 or self.at > len(self.numbers):
            raise ValueError(f"{len(self.numbers)} numbers are too few")
        return self.numbers[self.at - count : self.at]

    def parts(self, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """As many of the next numbers as each size says."""
        ends = list(accumulate(sizes, initial=0))
        taken = tuple(self.take(ends[-1]))
        return (taken[start:end] for start, end in pairwise(ends))


def numbers_of(plan: Plan, orders: Sequence[str]) -> tuple[dict[str, Any], array[int]]:
    """What of ``plan`` is no number, as JSON, and its numbers as int64."""
    schemes, layers = dict[str, int](), _Layers()
    pipelines, micros = plan.pipelines, plan.micro_batches
    found = array("q", plan.lengths.tokens)
    found.extend(plan.lengths.ids)
    found.extend(schemes.setdefault(str(p.scheme), len(schemes)) for p in pipelines)
    found.extend(len(p.shares) for p in pipelines)
    for pipeline in pipelines:
        found.extend(pipeline.ranks)
    for pipeline in pipelines:
        found.extend(pipeline.shares)
    found.extend(m.pipeline for m in micros)
    found.extend(layers.place(m.layers) for m in micros)
    found.extend(orders.index(m.order) for m in micros)
    found.extend(len(m.sequences) for m in micros)
    for micro in micros:
        found.extend(micro.sequences)
    texts = {
        "sequences": len(plan.lengths),
        "pipelines": len(pipelines),
        "micro_batches": len(micros),
        "schemes": list(schemes),
        "layers": list(layers.texts),
        "devices": plan.devices,
        "working": plan.working,
        "semantics": plan.semantics,
    }
    return texts, found


class _Layers:
    """Layer plans by their text. By identity first: the texts of all micro-batches' layers take
    longer than the few repetitions."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self._known: dict[int, int] = {}

    def place(self, layers: LayerPlan) -> int:
        """Where the text of ``layers`` stands."""
        if id(layers) not in self._known:
            self._known[id(layers)] = self.texts.setdefault(str(layers), len(self.texts))
        return self._known[id(layers)]
