"""A run summed up: the numbers of which cards, captions and the text for the terminal are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, nan

import numpy as np
import numpy.typing as npt

from headrace.report.records import PlanMetrics, Run

__all__ = ["RunSummary", "finite", "known", "mean", "median", "share_text", "summed_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run and its numbers; NaN where the run does not say.

    The first step, which pays for warming up, is left out of rates and errors when there are
    others. ``loss`` is that of the first step and the median of the last tenth. ``peak`` is the
    highest peak of a rank in bytes, and the rank. ``error`` is the median distance of
    predicted / measured seconds from 1, ``gap`` the median gap to the lower bound.
    ``against_static`` is the predicted seconds of the best static plan of each step that was
    compared, most often ``best_static``, over those of the plans that ran. Runs of earlier versions
    say the seconds of every group size: there it is ``best_static`` in all steps (``one_static``).
    ``strategies`` are their names, shares of the steps and median seconds of a step, the most
    frequent first; they changed ``changes`` times.
    """

    run: Run
    tokens_per_s: float
    step_s: float
    idle: float
    mfu: float
    loss: tuple[float, float]
    peak: tuple[float, int]
    planning_s: float
    waited_s: float
    error: float
    gap: float
    against_static: float
    best_static: str
    one_static: bool
    changes: int
    strategies: tuple[tuple[str, float, float], ...]


def summed_up(run: Run) -> RunSummary:
    """Sum up the steps of a run in means, medians and the highest peak."""
    steps = run.warm
    seconds = [step.step_s for step in steps]
    planned = [step.planned for step in steps]
    peaks = [(peak, rank) for s in run.steps for rank, peak in enumerate(s.peak_bytes)]
    best_static, static_s, one_static = _static(planned)
    both = [  # predicted seconds of (best static plan, plan that ran), where both are known
        (static, own.predicted_s)
        for static, own in zip(static_s, planned, strict=True)
        if isfinite(static) and isfinite(own.predicted_s)
    ]
    names = [step.planned.strategy for step in run.steps]
    losses = finite(step.loss for step in run.steps)
    counted = Counter(names).most_common()
    return RunSummary(
        run=run,
        tokens_per_s=sum(s.tokens for s in steps) / sum(seconds),
        step_s=median(seconds),
        idle=mean([s.idle for s in steps], seconds),
        mfu=mean([s.mfu for s in steps], seconds),
        loss=(float(losses[0]), median(losses[-max(1, losses.size // 10) :]))
        if losses.size
        else (nan, nan),
        peak=max(((p, r) for p, r in peaks if isfinite(p)), default=(nan, 0)),
        planning_s=median(p.planning_s for p in planned),
        waited_s=median(p.waited_s for p in planned),
        error=median(abs(step.ratio - 1) for step in steps),
        gap=median(p.gap for p in planned),
        against_static=sum(static for static, _ in both) / (sum(plan for _, plan in both) or nan),
        best_static=best_static,
        one_static=one_static,
        changes=sum(one != other for one, other in pairwise(names)),
        strategies=tuple(
            (
                name,
                count / len(run.steps),
                median(s.step_s for s in run.steps if s.planned.strategy == name),
            )
            for name, count in counted
        ),
    )


def _static(planned: Sequence[PlanMetrics]) -> tuple[str, list[float], bool]:
    """The static choice that plans are compared with: (its name, its predicted seconds in each
    step, whether it is one group size for all steps). With several sizes the name is that of the
    most frequent one."""
    common = set[str].intersection(*(set(p.static_s) for p in planned))
    if common:
        best = min(sorted(common), key=lambda name: sum(p.static_s[name] for p in planned))
        return best, [p.static_s[best] for p in planned], True
    names = Counter(p.best_static for p in planned if isfinite(p.best_static_s))
    most = names.most_common(1)[0][0] if names else "unknown"
    return most, [p.best_static_s for p in planned], False


def finite(values: Iterable[float]) -> npt.NDArray[np.float64]:
    """The finite values, in order."""
    array = np.fromiter(values, dtype=np.float64)
    return array[np.isfinite(array)]


def median(values: Iterable[float]) -> float:
    """The median of the finite values, NaN when there is none."""
    kept = finite(values)
    return float(np.median(kept)) if kept.size else nan


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean over the finite values, NaN when their weights sum to nothing."""
    value, weight = np.asarray(values, dtype=float), np.asarray(weights, dtype=float)
    kept = np.isfinite(value) & np.isfinite(weight)
    total = float(weight[kept].sum())
    return float((value[kept] * weight[kept]).sum()) / total if total > 0 else nan


def known(value: float, text: Callable[[float], str], otherwise: str = "-") -> str:
    """``text(value)``, or ``otherwise`` for NaN and infinities."""
    return text(value) if isfinite(value) else otherwise


def share_text(fraction: float) -> str:
    """A fraction in percent with two digits at most: ``41 %``, ``2.8 %``, ``0.3 %``."""
    percent = 100 * fraction  # 9.95 is the first that one decimal would write as 10.0
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or percent == 0 else f"{percent:.1f} %"
