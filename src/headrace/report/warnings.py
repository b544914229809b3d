"""What a reader of a report must be warned of."""

from __future__ import annotations

from math import isfinite

from headrace.report.records import Run
from headrace.report.run_summary import finite, known, share_text
from headrace.units import bytes_text, seconds_text

__all__ = ["warnings"]

_BADLY = 0.25
"""A step is predicted badly when predicted and measured seconds differ by more than this."""

_TOLD = 6
"""Notices that are listed; the earlier ones are counted."""


def warnings(run: Run) -> list[str]:
    """Sentences that a reader must know before trusting the figures, the most serious first."""
    texts = [_lost_losses(run), _over_capacity(run), _bad_predictions(run), _bad_fits(run)]
    texts += [run.facts.costs.compared, *_notices(run), _skipped_text(run), _waits(run)]
    return [text for text in texts if text] + list(run.notes)


def _lost_losses(run: Run) -> str:
    """A sentence about steps whose loss was not finite; empty where there are none."""
    bad = [s.step for s in run.steps if not isfinite(s.loss)]
    return f"the loss is not a number in {_steps_text(bad)}" if bad else ""


def _over_capacity(run: Run) -> str:
    """A sentence about steps whose peak memory was above the capacity; empty where there are
    none."""
    over = [s.step for s in run.steps if max(s.peak_bytes, default=0) > run.facts.capacity_bytes]
    capacity = known(run.facts.capacity_bytes, bytes_text)
    return f"peak memory exceeded the capacity of {capacity} in {_steps_text(over)}" if over else ""


def _bad_predictions(run: Run) -> str:
    """A sentence about steps whose predicted seconds were far from the measured ones; empty where
    there are none."""
    bad = [s for s in run.warm if isfinite(s.ratio) and abs(s.ratio - 1) > _BADLY]
    if not bad:
        return ""
    worst = max(bad, key=lambda s: abs(s.ratio - 1))
    where = "" if len(bad) == 1 else f"; worst in step {worst.step}"
    return (
        f"predicted more than {share_text(_BADLY)} off in {_steps_text([s.step for s in bad])}"
        f"{where}: predicted {seconds_text(worst.planned.predicted_s)}, "
        f"measured {seconds_text(worst.step_s)}"
    )


def _bad_fits(run: Run) -> str:
    """A sentence about fits of costs with large errors; empty where there are none."""
    fits = [
        (f"{part} {case}", fit.worst)
        for part, cases in run.facts.costs.errors.items()
        for case, fit in cases.items()
    ]
    bad = [f"{name} ({share_text(worst)})" for name, worst in fits if worst > _BADLY]
    return f"the cost model's worst errors are large: {', '.join(bad[:6])}" if bad else ""


def _notices(run: Run) -> list[str]:
    """Notices on drift and memory that the run gave while it trained, the latest first; the oldest
    are only counted where there are many."""
    told = list(reversed(run.notices))
    more = len(told) - _TOLD
    return told[:_TOLD] + ([f"{more:,} earlier notices are in metrics.jsonl"] if more > 0 else [])


def _skipped_text(run: Run) -> str:
    """A sentence about documents that were skipped; empty where there are none."""
    count = run.facts.corpus.skipped
    plural = "documents were" if count > 1 else "document was"
    return f"{count:,} {plural} skipped when the corpus was read" if count else ""


def _waits(run: Run) -> str:
    """A sentence about seconds in which training waited for plans; empty up to one percent."""
    waited = float(finite(s.planned.waited_s for s in run.warm).sum())
    share = waited / sum(s.step_s for s in run.warm)
    if share <= 0.01:
        return ""
    return f"training waited {seconds_text(waited)} for plans ({share_text(share)} of its time)"


def _steps_text(steps: list[int]) -> str:
    """Steps in text: their number and the first five."""
    shown = ", ".join(map(str, steps[:5]))
    if len(steps) == 1:
        return f"step {shown}"
    return f"{len(steps):,} steps ({shown}{', ...' if len(steps) > 5 else ''})"
