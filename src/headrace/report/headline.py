"""The few numbers that sum up a run, and what a reader must be warned of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isfinite, nan

from headrace.report.records import Run, Step
from headrace.report.series import finite, mean, median
from headrace.report.wording import known, share_text
from headrace.units import bytes_text, count_text, seconds_text

__all__ = ["BADLY", "Card", "Headline", "cards", "headline", "warm", "warnings"]

BADLY = 0.25
"""A step is predicted badly when predicted and measured seconds differ by more than this."""

_TOLD = 6
"""Notices that are listed; the earlier ones are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A run in numbers; NaN where the run does not say.

    The first step, which pays for warming up, is left out of rates and errors when there are
    others. ``against_static`` is the predicted seconds of the best static plans over those of
    the plans that ran; ``error`` is the median distance of predicted / measured from 1.
    """

    tokens_per_s: float
    idle: float
    mfu: float
    step_s: float
    against_static: float
    best_static: str
    peak_bytes: float
    peak_rank: int
    planning_s: float
    waited_s: float
    error: float
    gap: float
    strategy: str
    strategy_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One headline figure: a large number, what it is, and a remark."""

    value: str
    label: str
    remark: str = ""


def warm(run: Run) -> tuple[Step, ...]:
    """The steps without the first, when there are others."""
    return run.steps[1:] or run.steps


def headline(run: Run) -> Headline:
    """Sum up a run."""
    steps = warm(run)
    seconds = [step.step_s for step in steps]
    peaks = [(peak, rank) for s in run.steps for rank, peak in enumerate(s.peak_bytes)]
    peak, rank = max(((p, r) for p, r in peaks if isfinite(p)), default=(nan, 0))
    strategy, count = Counter(s.planned.strategy for s in run.steps).most_common(1)[0]
    static = Counter(s.planned.best_static for s in run.steps).most_common(1)[0][0]
    return Headline(
        tokens_per_s=sum(s.tokens for s in steps) / (sum(seconds) or nan),
        idle=mean([s.idle for s in steps], seconds), mfu=mean([s.mfu for s in steps], seconds),
        step_s=median(seconds), against_static=_against_static(steps), best_static=static,
        peak_bytes=peak, peak_rank=rank, planning_s=median(s.planned.planning_s for s in steps),
        waited_s=median(s.planned.waited_s for s in steps),
        error=median(abs(s.ratio - 1) for s in steps), gap=median(s.planned.gap for s in steps),
        strategy=strategy, strategy_share=count / len(run.steps),
    )  # fmt: skip


def _against_static(steps: tuple[Step, ...]) -> float:
    pairs = [(s.planned.best_static_s, s.planned.predicted_s) for s in steps]
    pairs = [pair for pair in pairs if all(map(isfinite, pair))]
    plans = sum(plan for _, plan in pairs)
    return sum(static for static, _ in pairs) / plans if plans > 0 else nan


def cards(run: Run, top: Headline) -> list[Card]:
    """The headline figures of a report; a number the run does not know is shown as a dash."""
    return [
        Card(
            value=known(top.tokens_per_s, count_text), label="tokens/s",
            remark=known(top.mfu, lambda mfu: f"MFU {share_text(mfu)}", ""),
        ),
        Card(value=known(top.idle, share_text), label="idle", remark="ranks wait or move weights"),
        Card(
            value=known(top.against_static, lambda ratio: f"{ratio:.2f}x"),
            label="the speed of the best static plan",
            remark=known(top.against_static, lambda _: f"{top.best_static}, both predicted", ""),
        ),
        Card(
            value=known(top.peak_bytes, bytes_text), label="peak memory",
            remark=_of_capacity(top, run.facts.capacity_bytes),
        ),
        Card(
            value=known(top.planning_s, seconds_text), label="to plan a step",
            remark=known(top.waited_s, lambda s: f"training waited {seconds_text(s)}", ""),
        ),
        Card(
            value=known(top.error, share_text), label="off in a typical step",
            remark="predicted against measured",
        ),
    ]  # fmt: skip


def _of_capacity(top: Headline, capacity: float) -> str:
    if not isfinite(top.peak_bytes) or not isfinite(capacity):
        return ""
    return f"{share_text(top.peak_bytes / capacity)} of {bytes_text(capacity)}"


def warnings(run: Run) -> list[str]:
    """What a reader must know before trusting the figures, most serious first."""
    found = [_lost_losses(run), _over_capacity(run), _bad_predictions(run), _bad_fits(run)]
    found += [*_notices(run), _skipped(run), _waits(run)]
    return [text for text in found if text] + list(run.notes)


def _lost_losses(run: Run) -> str:
    bad = [s.step for s in run.steps if not isfinite(s.loss)]
    return f"the loss is not a number in {_steps_text(bad)}" if bad else ""


def _over_capacity(run: Run) -> str:
    over = [s.step for s in run.steps if max(s.peak_bytes, default=0) > run.facts.capacity_bytes]
    capacity = known(run.facts.capacity_bytes, bytes_text)
    return f"peak memory exceeded the capacity of {capacity} in {_steps_text(over)}" if over else ""


def _bad_predictions(run: Run) -> str:
    steps = warm(run)
    bad = [s for s in steps if isfinite(s.ratio) and abs(s.ratio - 1) > BADLY]
    if not bad:
        return ""
    worst = max(bad, key=lambda s: abs(s.ratio - 1))
    where = "" if len(bad) == 1 else f"; worst in step {worst.step}"
    return (
        f"predicted more than {share_text(BADLY)} off in {_steps_text([s.step for s in bad])}"
        f"{where}: predicted {seconds_text(worst.planned.predicted_s)}, "
        f"measured {seconds_text(worst.step_s)}"
    )


def _bad_fits(run: Run) -> str:
    bad = [f"{part} {case} ({share_text(worst)})"
           for part, case, _, worst in run.facts.costs.errors if worst > BADLY]  # fmt: skip
    return f"the cost model's worst errors are large: {', '.join(bad[:6])}" if bad else ""


def _notices(run: Run) -> list[str]:
    """What the run told of drift and memory while it trained, the latest first."""
    told = list(reversed(run.notices))
    more = len(told) - _TOLD
    return told[:_TOLD] + ([f"{more:,} earlier notices are in metrics.jsonl"] if more > 0 else [])


def _skipped(run: Run) -> str:
    count = run.facts.corpus.skipped
    plural = "documents were" if count > 1 else "document was"
    return f"{count:,} {plural} skipped when the corpus was read" if count else ""


def _waits(run: Run) -> str:
    steps = warm(run)
    waited = float(finite(s.planned.waited_s for s in steps).sum())
    share = waited / (sum(s.step_s for s in steps) or nan)
    if not share > 0.01:
        return ""
    return f"training waited {seconds_text(waited)} for plans ({share_text(share)} of its time)"


def _steps_text(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return f"step {shown}" if len(steps) == 1 else (
        f"{len(steps):,} steps ({shown}{', ...' if len(steps) > 5 else ''})"
    )  # fmt: skip
