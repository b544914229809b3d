"""Calibration: what steps that ran say about the costs they were planned with.

No plan follows from it but through the memory margin: a factor for each option, learnt while
training, would make the plans of a run depend on the load of its machine.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.costs.residuals import Residual, rank_differences
from headrace.errors import CostError

__all__ = ["LEAST_MARGIN", "MOST_MARGIN", "Calibration", "Estimate", "Peaks", "raised_margin"]

FORMAT = 1
LEAST_MARGIN, MOST_MARGIN = 0.05, 0.6

_KEEP = 0.98  # of what was known, at each step: a step counts half after 34 others
_SAFETY = 1.1  # what peaks may exceed the largest that was learnt by
_SPREADS = 3.0  # that a peak may lie above the mean
_ENOUGH = 20  # steps with peaks worth learning from, before less than the prior is believed
_NOTICEABLE = 0.25  # of the memory: smaller peaks count as this much
_GRID = 20  # margins are multiples of 1 / _GRID, so that runs alike start with the same one


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and a variance that forget: of ``count`` values, the last some fifty matter."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise CostError("count of an estimate", got=repr(self.count), wanted="an int >= 0")
        for name, value in (("mean", self.mean), ("variance", self.variance)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CostError(f"{name} of an estimate", got=repr(value), wanted="a number")
            if not math.isfinite(value) or (name == "variance" and value < 0):
                raise CostError(f"{name} of an estimate", got=value, wanted="finite, variance >= 0")

    @property
    def spread(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)

    def after(self, value: float, within: float = 0.0) -> Estimate:
        """With one more ``value``, itself a mean of values of variance ``within``.

            a         = max(1 - keep, 1 / count)
            mean'     = mean + a (value - mean)
            variance' = (1 - a) (variance + a (value - mean)^2) + a within
        """  # fmt: skip
        a = max(1 - _KEEP, 1 / (self.count + 1))
        away = value - self.mean
        return Estimate(
            count=self.count + 1, mean=self.mean + a * away,
            variance=(1 - a) * (self.variance + a * away * away) + a * within,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Measured over predicted peak bytes, of the worst rank of each step that says something:
    what is ``usual``, and the ``largest``, whose distance to the usual is forgotten at the same
    pace."""

    usual: Estimate = Estimate()
    largest: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.largest, bool) or not isinstance(self.largest, int | float):
            raise CostError("largest ratio of peaks", got=repr(self.largest), wanted="a number")
        if not math.isfinite(self.largest) or self.largest < 0:
            raise CostError("largest ratio of peaks", got=self.largest, wanted="finite, >= 0")

    def after(self, ratio: float) -> Peaks:
        """With the ratio of one more step."""
        usual = self.usual.after(ratio)
        faded = usual.mean + _KEEP * (self.largest - usual.mean)
        return Peaks(usual=usual, largest=max(ratio, faded))

    @property
    def high(self) -> float:
        """What ratios seldom exceed: max(largest, mean + 3 spreads)."""
        return max(self.largest, self.usual.mean + _SPREADS * self.usual.spread)


@dataclass(slots=True, kw_only=True)
class Calibration:
    """What was learnt about the costs of one ``fingerprint``.

    ``options[key]`` estimates the logarithm of measured over predicted seconds of micro-batches
    with layers of an option, ``cp2 megatron_cz+full``, after the factor common to the step is
    removed; of a micro-batch with several options each has the share of its predicted layer
    seconds. ``ranks[r]`` estimates how much slower rank r is than the others, ``peaks`` the peak
    bytes. ``steps`` counts what was observed.
    """

    fingerprint: str
    steps: int = 0
    options: dict[str, Estimate] = field(default_factory=dict)
    ranks: dict[int, Estimate] = field(default_factory=dict)
    peaks: Peaks = field(default_factory=Peaks)

    def observe(self, residuals: Sequence[Residual]) -> None:
        """Take the micro-batches of one step.

            common = sum_i w_i e_i / sum_i w_i    e_i = log(measured_i / predicted_i)
                                                  w_i = predicted_i x ranks_i
            value of option o = sum_i w_i s_io (e_i - common) / sum_i w_i s_io    s_io its share
        """  # fmt: skip
        weights = [residual.predicted_s * len(residual.ranks) for residual in residuals]
        if not weights:
            return
        self.steps += 1
        logs = [residual.log for residual in residuals]
        common = sum(w * e for w, e in zip(weights, logs, strict=True)) / sum(weights)
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

    def observe_peaks(
        self, predicted: Sequence[int], measured: Sequence[int], memory_bytes: int
    ) -> None:
        """Take the peak bytes of all ranks of one step; the worst rank counts."""
        ratios = [
            _ratio(p, m, memory_bytes)
            for p, m in zip(predicted, measured, strict=True)
            if max(p, m) > _NOTICEABLE * memory_bytes
        ]
        if ratios:
            self.peaks = self.peaks.after(max(ratios))

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
        """  # fmt: skip
        count = self.peaks.usual.count
        if count == 0:
            return prior
        found = _margin_for(self.peaks.high)
        return found if count >= _ENOUGH else max(prior, found)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "steps": self.steps,
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
            fingerprint, steps, peaks = value["fingerprint"], value["steps"], value["peaks"]
            if not isinstance(fingerprint, str):
                raise TypeError("a fingerprint that is no text")
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
                raise TypeError(f"{steps!r} steps")
            return cls(
                fingerprint=fingerprint, steps=steps,
                options={str(key): Estimate(**known) for key, known in value["options"].items()},
                ranks={int(rank): Estimate(**known) for rank, known in value["ranks"].items()},
                peaks=Peaks(usual=Estimate(**peaks["usual"]), largest=peaks["largest"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CostError("calibration", got=f"{type(error).__name__}: {error}")

    def save(self, path: Path) -> None:
        """Write the JSON form to ``path``: whole, or not at all. Raises CostError when it cannot
        be written."""
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.to_json()) + "\n")
            os.replace(part, path)
        except OSError as error:
            raise CostError(f"calibration {path}", got=error.strerror, wanted="a writable file")

    @classmethod
    def load(cls, path: Path, *, fingerprint: str) -> Calibration:
        """Read what :meth:`save` wrote; a calibration that knows nothing when there is no file.
        Raises CostError when it is damaged or belongs to other costs."""
        try:
            found = cls.from_json(json.loads(path.read_text()))
        except FileNotFoundError:
            return cls(fingerprint=fingerprint)
        except (OSError, ValueError, RecursionError) as error:
            raise CostError(f"calibration {path}", got=f"no JSON ({error})")
        if found.fingerprint != fingerprint:
            raise CostError(
                f"calibration {path}", got=found.fingerprint[:60], wanted=fingerprint[:60]
            )
        return found


def raised_margin(
    margin: float, predicted: Sequence[int], measured: Sequence[int], memory_bytes: int
) -> float:
    """The margin after a step, given the peak bytes of all ranks: ``margin`` unless a peak came
    nearer to the memory than the safety of :meth:`Calibration.margin` allows, above
    memory / 1.1; then at least what that peak's ratio asks for.

    It follows from this step alone, so that a resumed run goes on with the margin in force.
    """
    for p, m in zip(predicted, measured, strict=True):
        if m > memory_bytes / _SAFETY:
            margin = max(margin, _margin_for(_ratio(p, m, memory_bytes)))
    return margin


def _ratio(predicted: int, measured: int, memory_bytes: int) -> float:
    least = _NOTICEABLE * memory_bytes
    return max(measured, least) / max(predicted, least)


def _margin_for(ratio: float) -> float:
    margin = min(MOST_MARGIN, max(LEAST_MARGIN, 1 - 1 / (_SAFETY * max(ratio, 1 / _SAFETY))))
    return math.ceil(margin * _GRID - 1e-9) / _GRID
