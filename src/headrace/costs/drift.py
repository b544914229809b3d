"""Drift: a rank, or the whole machine, that is no longer as fast as it was."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from headrace.costs.calibration import Residual, common_factor, rank_differences

__all__ = ["Drift"]

_WINDOW = 15  # values whose median is tested
_PAST = 64  # values before them that say how much it scatters
_LEAST_PAST = 32  # of those, before anything is tested
_SPREADS = 2.5  # a median farther than so many standard deviations from the level is a change
_LEAST = math.log(1.15)  # smaller changes, in logarithms, are not worth a word
_NAMED = 8  # ranks in one sentence
_TO_SIGMA = 1.4826  # standard deviations of normal noise per median absolute deviation


@dataclass(slots=True, kw_only=True)
class _Track:
    """One series of logarithms, and the ``level`` about which its values were last found to lie.

    A level of None becomes the median of the first values. ``window`` has the last values as
    (step, value), ``past`` those before.
    """

    level: float | None
    past: deque[float] = field(default_factory=lambda: deque(maxlen=_PAST))
    window: deque[tuple[int, float]] = field(default_factory=deque)

    def add(self, step: int, value: float) -> int | None:
        """Add the value of a step. Returns the step since which the series lies about another
        level, which becomes its ``level``; None while there is no change."""
        self.window.append((step, value))
        if len(self.window) > _WINDOW:
            self.past.append(self.window.popleft()[1])
        if len(self.past) < _LEAST_PAST:
            return None
        values = [value for _, value in self.window]
        if self.level is None:
            self.level = median([*self.past, *values])
        if abs(median(values) - self.level) <= max(_LEAST, _SPREADS * self._sigma()):
            return None
        at = self._change(values)
        self.level = median(values[at:])
        return self.window[at][0]

    def _sigma(self) -> float:
        """A robust standard deviation of the past values, by their median absolute deviation."""
        middle = median(self.past)
        return _TO_SIGMA * median(abs(value - middle) for value in self.past)

    def _change(self, values: Sequence[float]) -> int:
        """The index in the window from which on ``values`` lie about the new level: the cut that
        makes the sum of absolute distances least, to the old level before it and the new after."""
        assert self.level is not None
        old, new = self.level, median(values)
        # The least sum is where the values after the cut are nearer to the new level by the most.
        gains = [abs(value - old) - abs(value - new) for value in values]
        sums = [sum(gains[at:]) for at in range(len(values))]
        return max(range(len(values)), key=sums.__getitem__)


class Drift:
    """Notices ranks that became slower than the others, and a machine that became slower or faster
    than it was.

    Watched are, for every rank, :func:`rank_differences` of each step, whose normal level is 0, and
    for the machine :func:`common_factor`, whose normal level is the median of its first 47 values.
    Both are logarithms of measured over predicted seconds. A series has changed when the median of
    its last 15 values is farther from the level it was last found on than

        max(log 1.15, 2.5 sigma)  sigma = 1.4826 x the median absolute deviation of the 32 to 64
                                  values before these 15

    and its new level is then the median of the values after the best cut of the window in two. A
    change well above that is found 8 steps after it began, whatever single steps do. The median of
    15 normal values has a standard deviation of 0.32 sigma, so a false alarm takes a sigma that was
    much underestimated. Without the floor of log 1.15, none of 1,000 simulated series of 2,000
    normal values about a known level raised one, none of 500 about a level that had to be learnt,
    and none of 500 of Student's t with 3 degrees of freedom (with 2 sigma: 1, 7 and 4).

    A process begins anew: what was before a resume is not compared with.
    """

    def __init__(self) -> None:
        """Begin without any step: no rank is known to be slow."""
        self._ranks: dict[int, _Track] = {}  # the series of each rank
        self._all = _Track(level=None)  # the series of the whole machine
        self._start: float | None = None  # the machine's first level
        self._slow: set[int] = set()  # ranks that were found slow and have not recovered
        self._changed = False  # whether the machine was last found away from its first level

    def observe(
        self, step: int, residuals: Sequence[Residual], scale: float = 1.0
    ) -> tuple[str, ...]:
        """Add the residuals of a step whose predicted seconds were multiplied by ``scale``. Returns
        a sentence for each change that was noticed; empty while nothing changes."""
        if not residuals:
            return ()
        slower: dict[int, int] = {}  # ranks that became slow, with the step since which they are
        recovered: dict[int, int] = {}  # ranks that are as fast as the others again, likewise
        for rank, difference in rank_differences(residuals).items():
            track = self._ranks.setdefault(rank, _Track(level=0.0))
            since = track.add(step, difference)
            if since is not None and (track.level or 0.0) > _LEAST:
                slower[rank] = since
            elif since is not None and rank in self._slow:
                recovered[rank] = since
        self._slow = (self._slow | set(slower)) - set(recovered)
        sentences = (
            self._slower_text(slower),
            _recovered_text(recovered),
            # The scale is taken out again: the machine is compared with uncorrected predictions.
            self._machine_text(step, common_factor(residuals) + math.log(scale)),
        )
        return tuple(text for text in sentences if text)

    def _slower_text(self, ranks: Mapping[int, int]) -> str:
        """A sentence about ``ranks``, each with the step since which it is slow, and by what
        factor; empty for none."""
        if not ranks:
            return ""
        factor = math.exp(median(self._ranks[rank].level or 0.0 for rank in ranks))
        return (
            f"{_ranks_text(ranks)} been {factor:.2f}x slower than the others "
            f"since step {min(ranks.values())}"
        )

    def _machine_text(self, step: int, factor: float) -> str:
        """Add the logarithm of the factor common to all ranks in a step. Returns a sentence where
        the whole machine became slower or faster than at the start, or as fast again; else an empty
        text."""
        since = self._all.add(step, factor)
        if self._start is None:
            self._start = self._all.level
        if since is None or self._all.level is None or self._start is None:
            return ""
        away = self._all.level - self._start
        was_changed, self._changed = self._changed, abs(away) > _LEAST
        if self._changed:
            word = "slower" if away > 0 else "faster"
            return (
                f"all ranks have been {math.exp(abs(away)):.2f}x {word} than at the start "
                f"since step {since}"
            )
        if not was_changed:
            return ""
        return f"all ranks have been as fast as at the start since step {since}"


def _recovered_text(ranks: Mapping[int, int]) -> str:
    """A sentence about ``ranks``, each with the step since which it is as fast as the others again;
    empty for none."""
    if not ranks:
        return ""
    return f"{_ranks_text(ranks)} been as fast as the others since step {min(ranks.values())}"


def _ranks_text(ranks: Mapping[int, int]) -> str:
    """``rank 1 has``, ``ranks 1, 2 and 5 have``, ``ranks 0, 1, ... and 4 more have``."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]} has"
    if len(names) > _NAMED:
        return f"ranks {', '.join(names[:_NAMED])} and {len(names) - _NAMED} more have"
    return f"ranks {', '.join(names[:-1])} and {names[-1]} have"
