"""Calibration: what steps that ran say about the costs they were planned with.

No plan follows from it but through the memory margin: a factor for each option, learnt while
training, would make the plans of a run depend on the load of its machine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.costs.cost_model import CostModel
from headrace.costs.saving import save_whole, sealed, unsealed
from headrace.errors import CostError
from headrace.spec.layer_plan import LayerPlan
from headrace.spec.plan import MicroBatch, Plan

__all__ = [
    "Calibration",
    "Estimate",
    "LEAST_MARGIN",
    "MOST_MARGIN",
    "Peaks",
    "Residual",
    "common_factor",
    "micro_batch_residuals",
    "raised_margin",
    "rank_differences",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One micro-batch: seconds of its forward and backward together, predicted and measured.

    ``shares`` are the parts of the predicted seconds of its layers by option key,
    ``cp2 megatron_cz+full``; they sum to one.
    """

    ranks: tuple[int, ...]
    predicted_s: float
    measured_s: float
    shares: Mapping[str, float]

    @property
    def log(self) -> float:
        """The natural logarithm of measured over predicted seconds: 0 where they agree."""
        return math.log(self.measured_s / self.predicted_s)


def micro_batch_residuals(
    plan: Plan, predicted: Sequence[float], measured: Mapping[int, float], costs: CostModel
) -> tuple[Residual, ...]:
    """The residuals of a step's micro-batches, in the plan's order.

    ``predicted`` and ``measured`` are seconds of forward and backward together, without waiting, by
    the index of the micro-batch. A micro-batch without measured or predicted seconds is left out.
    """
    shares = _Shares(plan, costs)
    return tuple(
        Residual(
            ranks=plan.pipelines[micro.pipeline].ranks,
            predicted_s=predicted[index],
            measured_s=measured[index],
            shares=shares.of(micro),
        )
        for index, micro in enumerate(plan.micro_batches)
        if predicted[index] > 0 and measured.get(index, 0.0) > 0
    )


class _Shares:
    """The fraction of a micro-batch's predicted layer seconds that each of its layer options takes.
    Coefficients of the seconds are cached for each pair of a group width and a layer plan."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        """Shares of the micro-batches of ``plan``, by the seconds of ``costs``."""
        self._plan, self._costs = plan, costs
        # By (group width, id of the layer plan), then by option key: coefficients (a, b, c).
        self._cached: dict[tuple[int, int], dict[str, tuple[float, float, float]]] = {}

    def of(self, micro: MicroBatch) -> dict[str, float]:
        """The shares of a micro-batch by option key (``cp2 megatron_cz+full``); they sum to one.
        Seconds of an option are a sum_i l_i^2 + b sum_i l_i + c over lengths l_i."""
        width = self._plan.pipelines[micro.pipeline].scheme.width
        lengths = self._plan.tokens_of(micro)
        squares, tokens = sum(n * n for n in lengths), sum(lengths)
        seconds = {
            key: a * squares + b * tokens + c
            for key, (a, b, c) in self._rows(width, micro.layers).items()
        }
        total = sum(seconds.values())
        return {key: s / total if total > 0 else 1 / len(seconds) for key, s in seconds.items()}

    def _rows(self, width: int, layers: LayerPlan) -> dict[str, tuple[float, float, float]]:
        """Coefficients (a, b, c) of the seconds of all layers of each option, by option key. They
        are cached by the identity of the layer plan, as hashing one for every micro-batch would be
        slow."""
        rows = self._cached.get((width, id(layers)))
        if rows is None:
            rows = dict[str, tuple[float, float, float]]()
            self._cached[width, id(layers)] = rows
            for option, count in Counter(layers.options).items():
                cost = self._costs.option(width, option)
                gather_s = sum(self._costs.gather_seconds(width, option, self._plan.working))
                curves = cost.forward, cost.backward
                rows[f"cp{width} {option}"] = (
                    count * sum(curve.a for curve in curves),
                    count * sum(curve.b for curve in curves),
                    count * (sum(curve.c for curve in curves) + gather_s),
                )
        return rows


def rank_differences(residuals: Sequence[Residual]) -> dict[int, float]:
    """How much slower each rank was than the others, by rank: the logarithm of its measured over
    predicted seconds minus the (lower) median of those of the other ranks.

    Each rank is judged by its micro-batches in the smallest groups it worked in, and against others
    in groups of that size, so that a group size which is predicted badly says nothing about a rank.
    Ranks of one group cannot be told apart: a slow one makes all of them slow. A rank without work,
    or alone in groups of its size, is left out.
    """
    by_size: dict[int, list[tuple[int, float]]] = defaultdict(list)  # (rank, log) by group size
    smallest: dict[int, int] = {}  # the smallest group size of each rank
    for (rank, size), value in _by_rank(residuals).items():
        by_size[size].append((rank, value))
        smallest[rank] = min(size, smallest.get(rank, size))
    differences = {}
    for size, values in by_size.items():
        ordered = sorted(value for _, value in values)
        for rank, value in values:
            if smallest[rank] == size and len(ordered) > 1:
                differences[rank] = value - _median_of_others(ordered, value)
    return differences


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """The lower median of the ascending ``ordered`` after one ``value`` in it is taken out."""
    middle = (len(ordered) - 2) // 2  # the index of the lower median among the others
    removed = bisect_left(ordered, value)
    # From the removed value on, the others stand one place further in ``ordered``.
    return ordered[middle if middle < removed else middle + 1]


def _by_rank(residuals: Sequence[Residual]) -> dict[tuple[int, int], float]:
    """The logarithm of measured over predicted seconds by (rank, size of its groups), over all
    micro-batches of the rank in groups of that size."""
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for residual in residuals:
        for rank in residual.ranks:
            key = rank, len(residual.ranks)
            measured_s, predicted_s = sums.get(key, (0.0, 0.0))
            sums[key] = measured_s + residual.measured_s, predicted_s + residual.predicted_s
    return {key: math.log(measured / predicted) for key, (measured, predicted) in sums.items()}


def common_factor(residuals: Sequence[Residual]) -> float:
    """The logarithm of measured over predicted seconds of the whole step: the lower median of its
    ranks' values, so that one slow rank of two does not look like a slow machine. 0 without
    residuals."""
    sums: dict[int, tuple[float, float]] = {}
    for residual in residuals:
        for rank in residual.ranks:
            measured_s, predicted_s = sums.get(rank, (0.0, 0.0))
            sums[rank] = measured_s + residual.measured_s, predicted_s + residual.predicted_s
    ordered = sorted(math.log(measured / predicted) for measured, predicted in sums.values())
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


LEAST_MARGIN, MOST_MARGIN = 0.05, 0.6

_SAFETY = 1.1  # the factor by which peaks may exceed the largest ratio that was learnt
_SPREADS = 3.0  # standard deviations that a ratio of peaks may lie above the mean
_ENOUGH = 20  # steps with peaks worth learning from, before a margin below the prior is believed
_NOTICEABLE = 0.25  # of the memory: smaller peaks count as this much
_GRID = 20  # margins are multiples of 1 / _GRID, so that runs alike start with the same one

KEEP = 0.98
"""The weight of the mean so far when a value is added: a value counts half after 34 others, as
0.98^34 is about 1/2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An exponentially weighted mean and variance of ``count`` values, of which about the last
    fifty matter."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def __post_init__(self) -> None:
        """Raise CostError for a count, mean or variance that is no finite number, or negative where
        it cannot be."""
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise CostError("count of an estimate", got=repr(self.count), wanted="an int >= 0")
        for name, value in (("mean", self.mean), ("variance", self.variance)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CostError(f"{name} of an estimate", got=repr(value), wanted="a number")
            if not math.isfinite(value) or (name == "variance" and value < 0):
                raise CostError(f"{name} of an estimate", got=value, wanted="finite, variance >= 0")

    @property
    def spread(self) -> float:
        """The standard deviation of the values."""
        return math.sqrt(self.variance)

    def after(self, value: float, within: float = 0.0) -> Estimate:
        """The estimate with one more ``value``, which is itself a mean of values whose variance is
        ``within``. The first values count alike, so that the mean starts as their plain mean; later
        ones are averaged exponentially, with the weight a of the new value:

        a         = max(1 - keep, 1 / count)    count: of values, the new one included
        mean'     = mean + a (value - mean)
        variance' = (1 - a) (variance + a (value - mean)^2) + a within
        """
        a = max(1 - KEEP, 1 / (self.count + 1))
        away = value - self.mean
        return Estimate(
            count=self.count + 1,
            mean=self.mean + a * away,
            variance=(1 - a) * (self.variance + a * away * away) + a * within,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What was learnt of the ratio of measured over predicted peak bytes, of which every step gives
    that of its worst rank, unless all its peaks are small.

    ``usual`` has mean and variance of the ratios. ``largest`` is the largest ratio so far, which
    decays exponentially towards the mean."""

    usual: Estimate = field(default_factory=Estimate)
    largest: float = 0.0

    def __post_init__(self) -> None:
        """Raise CostError for a largest ratio that is no finite number or is negative."""
        if isinstance(self.largest, bool) or not isinstance(self.largest, int | float):
            raise CostError("largest ratio of peaks", got=repr(self.largest), wanted="a number")
        if not math.isfinite(self.largest) or self.largest < 0:
            raise CostError("largest ratio of peaks", got=self.largest, wanted="finite, >= 0")

    def after(self, predicted: Sequence[int], measured: Sequence[int], memory_bytes: int) -> Peaks:
        """The ratios with one more step, given its peak bytes by rank: the rank with the largest
        ratio counts. Unchanged where all peaks are below a quarter of the memory."""
        ratios = [
            _ratio(p, m, memory_bytes)
            for p, m in zip(predicted, measured, strict=True)
            if max(p, m) > _NOTICEABLE * memory_bytes
        ]
        if not ratios:
            return self
        usual = self.usual.after(max(ratios))
        faded = usual.mean + KEEP * (self.largest - usual.mean)
        return Peaks(usual=usual, largest=max(*ratios, faded))

    @property
    def high(self) -> float:
        """What ratios seldom exceed: max(largest, mean + 3 spreads)."""
        return max(self.largest, self.usual.mean + _SPREADS * self.usual.spread)

    def margin(self, prior: float) -> float:
        """The fraction of a rank's memory that plans leave free.

            margin = 1 - 1 / (1.1 high)    high = max(largest, mean + 3 spreads) of the ratios
                                           measured over predicted peak of the worst rank of a step

        rounded up to a multiple of 0.05, and at least 0.05, at most 0.6: then a predicted peak of
        (1 - margin) memory times ``high`` and a safety of 1.1 stays within the memory. Peaks below
        a quarter of the memory count as a quarter, and steps that stay below altogether not at
        all: what a process needs anyway would look like a large error of a small prediction.
        ``prior`` holds until something was learnt, and is a lower bound for the first 20 steps
        worth learning from.
        """
        if self.usual.count == 0:
            return prior
        found = _margin_for(self.high)
        return found if self.usual.count >= _ENOUGH else max(prior, found)


def raised_margin(
    margin: float, predicted: Sequence[int], measured: Sequence[int], memory_bytes: int
) -> float:
    """The margin after a step, given the peak bytes of all ranks: ``margin`` unless a peak came
    nearer to the memory than the safety of :meth:`Peaks.margin` allows, above
    memory / 1.1; then at least what that peak's ratio asks for.

    It follows from this step alone, so that a resumed run goes on with the margin in force.
    """
    for p, m in zip(predicted, measured, strict=True):
        if m > memory_bytes / _SAFETY:
            margin = max(margin, _margin_for(_ratio(p, m, memory_bytes)))
    return margin


def _ratio(predicted: int, measured: int, memory_bytes: int) -> float:
    """Measured over predicted peak bytes, where peaks below a quarter of the memory count as a
    quarter: small ones say little about large ones."""
    least = _NOTICEABLE * memory_bytes
    return max(measured, least) / max(predicted, least)


def _margin_for(ratio: float) -> float:
    """The fraction of the memory to leave free where measured peaks are ``ratio`` times the
    predicted ones: 1 - 1 / (1.1 ratio), within the limits, rounded up to the grid."""
    free = 1 - 1 / (_SAFETY * max(ratio, 1 / _SAFETY))
    margin = min(MOST_MARGIN, max(LEAST_MARGIN, free))
    return math.ceil(margin * _GRID - 1e-9) / _GRID  # 1e-9 forgives rounding at a grid point


FORMAT = 1


@dataclass(slots=True, kw_only=True)
class Calibration:
    """What was learnt about the costs of one ``fingerprint``.

    ``whole`` estimates the logarithm of measured over predicted seconds that all micro-batches of a
    step have in common. ``options[key]`` estimates what is left of it, with the common part
    subtracted, for micro-batches with layers of an option, such as ``cp2 megatron_cz+full``; a
    micro-batch with several options counts for each by the option's share of its predicted layer
    seconds. ``ranks[r]`` estimates how much slower rank r is than the others (the logarithm of the
    factor), ``peaks`` the ratios of measured over predicted peak bytes.
    """

    fingerprint: str
    whole: Estimate = field(default_factory=Estimate)
    options: dict[str, Estimate] = field(default_factory=dict)
    ranks: dict[int, Estimate] = field(default_factory=dict)
    peaks: Peaks = field(default_factory=Peaks)

    def observe(self, residuals: Sequence[Residual]) -> None:
        """Update all estimates but the peaks with the micro-batches of one step.

            common = sum_i w_i e_i / sum_i w_i    e_i = log(measured_i / predicted_i)
                                                  w_i = predicted_i x ranks_i
            value of option o = sum_i w_i s_io (e_i - common) / sum_i w_i s_io    s_io its share

        Each estimate gets one value, a weighted mean over the step's micro-batches. Where a step
        has a single micro-batch, its deviation is the common part, so nothing is learnt of options
        and ranks.
        """
        weights = [residual.predicted_s * len(residual.ranks) for residual in residuals]
        if not weights:
            return
        logs = [residual.log for residual in residuals]
        common = sum(w * e for w, e in zip(weights, logs, strict=True)) / sum(weights)
        self.whole = self.whole.after(common)
        if len(residuals) < 2:
            return
        values: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for residual, weight, log in zip(residuals, weights, logs, strict=True):
            for key, share in residual.shares.items():
                if share > 0:
                    values[key].append((weight * share, log - common))
        for key, weighted in values.items():
            total = sum(w for w, _ in weighted)
            mean = sum(w * e for w, e in weighted) / total
            within = sum(w * (e - mean) ** 2 for w, e in weighted) / total
            self.options[key] = self.options.get(key, Estimate()).after(mean, within)
        for rank, difference in rank_differences(residuals).items():
            self.ranks[rank] = self.ranks.get(rank, Estimate()).after(difference)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "whole": asdict(self.whole),
            "options": {key: asdict(estimate) for key, estimate in self.options.items()},
            "ranks": {str(rank): asdict(estimate) for rank, estimate in self.ranks.items()},
            "peaks": asdict(self.peaks),
        }

    @classmethod
    def from_json(cls, value: Any) -> Calibration:
        """The inverse of :meth:`to_json`. Raises CostError when the value is malformed."""
        if not isinstance(value, Mapping) or value.get("format") != FORMAT:
            got = value.get("format") if isinstance(value, Mapping) else type(value).__name__
            raise CostError("format of a calibration", got=got, wanted=FORMAT)
        try:
            fingerprint, peaks = value["fingerprint"], value["peaks"]
            if not isinstance(fingerprint, str):
                raise TypeError("a fingerprint that is no text")
            return cls(
                fingerprint=fingerprint,
                whole=Estimate(**value["whole"]),
                options={str(key): Estimate(**known) for key, known in value["options"].items()},
                ranks={int(rank): Estimate(**known) for rank, known in value["ranks"].items()},
                peaks=Peaks(usual=Estimate(**peaks["usual"]), largest=peaks["largest"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CostError("calibration", got=f"{type(error).__name__}: {error}")

    def save(self, path: Path) -> None:
        """Write the JSON form to ``path``: whole, or not at all. Raises CostError when it cannot
        be written."""
        save_whole(path, sealed(self.to_json()), "calibration")

    @classmethod
    def load(cls, path: Path, *, fingerprint: str) -> Calibration:
        """Read what :meth:`save` wrote; a calibration that knows nothing when there is no file.
        Raises CostError when it is damaged or belongs to other costs."""
        try:
            found = cls.from_json(unsealed(path.read_text()))
        except FileNotFoundError:
            return cls(fingerprint=fingerprint)
        except (OSError, ValueError) as error:
            raise CostError(f"calibration {path}", got=f"nothing readable ({error})")
        if found.fingerprint != fingerprint:
            raise CostError(
                f"calibration {path}", got=found.fingerprint[:60], wanted=fingerprint[:60]
            )
        return found
