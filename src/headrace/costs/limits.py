"""How long documents can be and should be on a group: MaxLen and UtilLen (Hydraulis, appendices C
and D).

    MaxLen(P)     the most tokens of a micro-batch that fit into memory
    UtilLen(P)    the least tokens with which P works at 0.85 of its best tokens per second

Between them lie the packs worth making: V micro-batches of U documents with
sum(l) / MaxLen <= V <= sum(l) / UtilLen. What fills a rank's memory there is told part by part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.costs.cost_model import MOST_TOKENS, CostModel
from headrace.costs.quadratic import Quadratic
from headrace.errors import CostError
from headrace.spec.layer_plan import RECOMPUTE, LayerOption, LayerPlan, Recompute
from headrace.spec.plan import Working

__all__ = [
    "THRESHOLD",
    "Limits",
    "MemoryParts",
    "fastest_option",
    "limits_of",
    "max_length",
    "memory_parts",
    "util_length",
    "util_tokens",
    "whole_curve",
]

THRESHOLD = 0.85
"""Hydraulis' share of the best tokens per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """MaxLen and UtilLen, in tokens, of groups of ``p`` ranks whose layers all take ``option``.
    ``max_length`` is 0 where nothing fits, MOST_TOKENS where memory sets no limit; ``util_length``
    is None where nothing fits."""

    p: int
    option: LayerOption
    working: Working
    max_length: int
    util_length: int | None


def max_length(costs: CostModel, p: int, layers: LayerPlan, working: Working = "replicated") -> int:
    """MaxLen: the longest document that fits on p ranks, as :meth:`CostModel.max_tokens`."""
    return costs.max_tokens(p, layers, working)


def util_length(
    costs: CostModel,
    p: int,
    layers: LayerPlan,
    working: Working = "replicated",
    *,
    threshold: float = THRESHOLD,
) -> int | None:
    """UtilLen: the least tokens of a document that p ranks train at ``threshold`` of the most
    tokens per second that they reach with any document that fits; None when none does."""
    longest = max_length(costs, p, layers, working)
    if longest < 1:
        return None
    return util_tokens(whole_curve(costs, p, layers, working), threshold, longest=longest)


def util_tokens(
    curve: Quadratic, threshold: float = THRESHOLD, *, longest: int = MOST_TOKENS
) -> int:
    """The least l of 1 to ``longest`` with l / T(l) >= threshold * the largest l / T(l).

    With T(l) = a l^2 + b l + c a token takes f(l) = T(l) / l = a l + b + c / l, which is convex
    and least at l* = sqrt(c / a). So of whole lengths the best is l* rounded down or up, or
    ``longest`` when that comes first; let g be f there. Wanted is the least l with
    f(l) <= g / threshold, which is

        a l^2 - h l + c <= 0,    h = g / threshold - b > 0.

    The lengths that satisfy it are those between the two roots, and the best length is one of
    them, so the least whole length is the smaller root, rounded up:

        l = 2 c / (h + sqrt(h^2 - 4 a c)),

    written so that nothing cancels and a = 0 needs no case of its own. Raises CostError unless
    0 < threshold <= 1 and longest >= 1.
    """
    if not 0 < threshold <= 1:
        raise CostError("share of the best speed", got=threshold, wanted="0 < share <= 1")
    if longest < 1:
        raise CostError("longest document", got=longest, wanted=">= 1 token")
    a, b, c = curve.a, curve.b, curve.c
    if c == 0:
        return 1  # f only rises, so one token is best
    best = min(longest, MOST_TOKENS if a == 0 else max(1, math.floor(math.sqrt(c / a))))
    g = min(_token_s(curve, tokens) for tokens in {best, min(best + 1, longest)})
    h = g / threshold - b
    # For a threshold of 1 on a curve that hardly bends, h is lost in rounding.
    root = 2 * c / (h + math.sqrt(max(0.0, h * h - 4 * a * c))) if h > 0 else best
    tokens = min(max(1, math.ceil(root)), best)
    # The root is a rounded number: one step back or on may be due.
    enough = g / threshold * (1 + 1e-12)
    if tokens > 1 and _token_s(curve, tokens - 1) <= enough:
        return tokens - 1
    if tokens < longest and _token_s(curve, tokens) > enough:
        return tokens + 1
    return tokens


def _token_s(curve: Quadratic, tokens: int) -> float:
    """f(l): seconds per token of a document of ``tokens`` tokens."""
    return curve.a * tokens + curve.b + curve.c / tokens


def whole_curve(
    costs: CostModel, p: int, layers: LayerPlan, working: Working = "replicated"
) -> Quadratic:
    """T(l, P): seconds of forward and backward together of a micro-batch of one document on p
    ranks, all layers and the ends, as a quadratic in its tokens l."""
    ends = costs.ends[p]
    curve = ends.forward + ends.backward
    for option, count in layers.counts:
        cost, gather = costs.option(p, option), costs.gather_seconds(p, option, working)
        # Gathering weights takes as long for any document, so it is part of the constant.
        curve += (cost.forward + cost.backward + Quadratic(c=sum(gather))) * count
    return curve * costs.scale


def fastest_option(costs: CostModel, p: int, recompute: Recompute, tokens: int) -> str | None:
    """The text of the layer option with this recompute level that is fastest on p ranks for a
    document of ``tokens``; None where no option has the level."""
    texts = [text for text in costs.options[p] if LayerOption.parse(text).recompute == recompute]
    return min(
        texts,
        key=lambda text: sum(costs.layer_seconds([tokens], p, LayerOption.parse(text))),
        default=None,
    )


def limits_of(
    costs: CostModel,
    working: Working = "replicated",
    *,
    tokens: int = 4096,
    threshold: float = THRESHOLD,
) -> list[Limits]:
    """MaxLen and UtilLen for every group size and recompute level, all layers by the option of that
    level that is fastest for a document of ``tokens``."""
    found: list[Limits] = []
    for p in costs.group_sizes:
        for level in RECOMPUTE:
            text = fastest_option(costs, p, level, tokens)
            if text is None:
                continue
            option = LayerOption.parse(text)
            layers = LayerPlan.uniform(option, costs.shape.layers)
            found.append(
                Limits(
                    p=p,
                    option=option,
                    working=working,
                    max_length=max_length(costs, p, layers, working),
                    util_length=util_length(costs, p, layers, working, threshold=threshold),
                )
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank at the peak of a micro-batch; ``free`` of what a plan may use is negative
    when it does not fit."""

    stored: int
    working: int
    layers: int
    ends: int
    passing: int
    free: int

    @property
    def peak(self) -> int:
        """Bytes of all parts together, the peak of the micro-batch."""
        return self.stored + self.working + self.layers + self.ends + self.passing


def memory_parts(
    costs: CostModel, tokens: int, p: int, layers: LayerPlan, working: Working
) -> MemoryParts:
    """Split the peak bytes of a rank (:meth:`CostModel.micro_batch_bytes`) by what they are of.

    stored    masters, gradient sums, optimizer state
    working   weights that are worked with, and their gradients
    layers    activations that the layers keep for the backward
    ends      what embedding, head and loss keep
    passing   what is needed on top at the peak
    """
    peak = costs.micro_batch_bytes(tokens, p, layers, working)
    held = costs.held_bytes((p,), working)
    kept = sum(count * costs.option(p, option).kept(tokens) for option, count in layers.counts)
    ends = round(costs.ends[p].kept(tokens))
    passing = peak - costs.state_bytes - held - round(kept) - ends
    return MemoryParts(
        stored=costs.state_bytes,
        working=held,
        layers=round(kept),
        ends=ends,
        passing=max(0, passing),  # parts are rounded, so it may be a byte below 0
        free=costs.capacity_bytes - peak,
    )
