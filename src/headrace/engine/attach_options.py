"""Options of :func:`headrace.attach`, as values; no torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.costs import CostModel
from headrace.errors import SpecError
from headrace.spec.draw_options import DrawOptions

if TYPE_CHECKING:
    from headrace.adopt.first_step import FirstStep
    from headrace.adopt.labels import Labels
    from headrace.adopt.placement import Exchange
    from headrace.adopt.samples import LabelPlace

__all__ = ["LengthSource", "MeasureOptions", "SampleOptions", "SpreadOptions", "refuse_former"]

LengthSource = Sequence[int] | NDArray[np.int64] | str | Callable[[Any], int] | None
"""Lengths in tokens: a number for each item, the name of a column, a function of an item, or
None: every item is read once to count its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleOptions:
    """How samples are read and drawn.

    Attributes:
        lengths: Tokens of each item: numbers, a column's name, or a function of an item. Where it
            is None, every item is read once.
        shuffle: Whether samples are drawn at random; else they come in their order, as those of a
            stream do.
        tokens: The field with token numbers, the model's first argument where it is None.
        labels: Whether labels are of the ``next`` token or of the ``same`` place; known for models
            of transformers.
        label_name: The field with labels.
        label_place: The token that has the label of a sample with a single one: its ``first`` or
            its ``last``. Where it is None, every token has a label.
        longest: Tokens of the longest sample of a stream (``"128Ki"``); those of its first one
            where it is None.
        workers: Processes of each rank that read the samples of the coming steps, of a data set by
            number; a stream may be a ``DataLoader`` with workers of its own.
        own: Whether each rank gives samples of its own, as many as it has, in the place of all
            giving the same: without a data set. They travel to the ranks that work on them, and
            ``run.map`` gives each rank the values of its own.
        iterations: How steps choose their own samples, after Data-Centric Parallel, in the place of
            ``batch_tokens``: devices are filled with groups until they end together, and what fills
            them is the step. Its samples and tokens follow from ranks and costs, and vary.
    """

    lengths: LengthSource = None
    shuffle: bool = True
    tokens: str | None = None
    labels: Labels | None = None
    label_name: str = "labels"
    label_place: LabelPlace | None = None
    longest: int | str | None = None
    workers: int = 0
    own: bool = False
    iterations: DrawOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadOptions:
    """How a model of tokens is spread over ranks.

    Attributes:
        backend: The backend of torch.compile; not compiled where it is None.
        exchange: How attention meets other ranks' tokens; the quickest measured where it is None.
        logits: Where False, models of transformers give a loss and no logits, which take more
            memory than layers that are computed again.
        check: ``"first step"`` compares loss and gradients of a sample on all ranks, and of a pack
            of two, with those of the plain model on each alone, before the loop.
    """

    backend: str | None = None
    exchange: Exchange | None = None
    logits: bool = True
    check: FirstStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """How the costs of a model on these ranks are measured.

    Attributes:
        memory: What a rank may use (``"8GiB"``); 80 % of what is free where it is None.
        costs: Of the model on these ranks, as ``run.found.costs`` of another loop; measured where
            it is None.
        cache: The folder in which measured costs are kept; that of all runs where it is None.
    """

    memory: str | None = None
    costs: CostModel | None = None
    cache: str | Path | None = None


_FORMER: Mapping[str, str] = {
    **dict.fromkeys(
        ("lengths", "shuffle", "tokens", "labels", "label_name", "longest"),
        "samples=hr.SampleOptions({name}=...)",
    ),
    **dict.fromkeys(("backend", "exchange", "logits"), "spread=hr.SpreadOptions({name}=...)"),
    **dict.fromkeys(("memory", "costs", "cache"), "measure=hr.MeasureOptions({name}=...)"),
    **dict.fromkeys(
        ("static_size", "recompute", "memory_margin", "ahead"),
        "planner=hr.PlannerConfig({name}=...)",
    ),
    "sizes": "planner=hr.PlannerConfig(group_sizes=...)",
}
"""Former arguments of ``attach``, each with the text of the one that takes its place, in which
``{name}`` stands for the same name."""


def refuse_former(given: Mapping[str, Any]) -> None:
    """Raise SpecError for a former argument, with its new name, and TypeError for an unknown
    one."""
    for name in given:
        if name not in _FORMER:
            raise TypeError(f"attach() got an unexpected keyword argument {name!r}")
        wanted = _FORMER[name].format(name=name)
        raise SpecError(f"attach({name}=...)", got="a former name", wanted=wanted)
