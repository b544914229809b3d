"""How far to trust the predictions: what the steps of a run taught about its costs."""

from __future__ import annotations

import math

from headrace.costs.learning.memory_margin import Estimate
from headrace.report.records import Run
from headrace.report.wording import share_text

__all__ = ["TRUST_HEADING", "trust_rows", "trust_text"]

TRUST_HEADING = "How far to trust the predictions"
"""The section of the page that holds the figures on predictions, and the rows."""

_ROWS = 30
_FEWEST, _REMEMBERED = 15, 50  # values to speak of a rank; values that an estimate remembers


def trust_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """What was predicted, in how many steps, how far off it was usually, and how much that
    scattered: all micro-batches of a step first, then the options used most, relative to their
    steps."""
    learnt = run.calibration
    if learnt is None or not learnt.whole.count:
        return []
    options = sorted(learnt.options.items(), key=lambda item: (-item[1].count, item[0]))
    return [_row("all of a step", learnt.whole)] + [_row(*item) for item in options[:_ROWS]]


def _row(name: str, estimate: Estimate) -> tuple[str, str, str, str]:
    usual, spread = math.expm1(estimate.mean), math.expm1(estimate.spread)
    sign = "" if usual < 0 else "+"
    return name, f"{estimate.count:,}", f"{sign}{share_text(usual)}", f"\u00b1 {share_text(spread)}"


def _sure(estimate: Estimate) -> bool:
    """Whether a rank was slower by more than its mean may be off."""
    seen = min(estimate.count, _REMEMBERED)
    error = estimate.spread / math.sqrt(max(1, seen))
    return seen >= _FEWEST and estimate.mean > max(math.log(1.05), 3 * error)


def trust_text(run: Run) -> str:
    """One sentence on memory and ranks; empty when nothing was learnt of them."""
    learnt, parts = run.calibration, list[str]()
    if learnt is None:
        return ""
    if learnt.peaks.usual.count:
        usual, high = learnt.peaks.usual.mean, learnt.peaks.high
        parts.append(f"peak memory was usually {usual:.2f} and seldom over {high:.2f} of predicted")
    sure = [item for item in learnt.ranks.items() if _sure(item[1])]
    slowest = max(sure, key=lambda item: item[1].mean, default=None)
    if slowest is not None:
        parts.append(
            f"rank {slowest[0]} was {math.exp(slowest[1].mean):.2f}x slower than the others"
        )
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""
