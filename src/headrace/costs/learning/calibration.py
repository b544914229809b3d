"""Calibration: what steps that ran say about the costs they were planned with.

No plan follows from it but through the memory margin: a factor for each option, learnt while
training, would make the plans of a run depend on the load of its machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.costs.learning.memory_margin import Estimate, Peaks
from headrace.costs.learning.residuals import Residual, rank_differences
from headrace.costs.saving import save_whole, sealed, unsealed
from headrace.errors import CostError

__all__ = ["Calibration"]

FORMAT = 1


@dataclass(slots=True, kw_only=True)
class Calibration:
    """What was learnt about the costs of one ``fingerprint``.

    ``whole`` estimates the factor common to all micro-batches of a step, the logarithm of measured
    over predicted seconds. ``options[key]`` estimates the same of micro-batches with layers of an
    option, ``cp2 megatron_cz+full``, after that factor is removed; of a micro-batch with several
    options each has the share of its predicted layer seconds. ``ranks[r]`` estimates how much
    slower rank r is than the others, ``peaks`` the peak bytes.
    """

    fingerprint: str
    whole: Estimate = field(default_factory=Estimate)
    options: dict[str, Estimate] = field(default_factory=dict)
    ranks: dict[int, Estimate] = field(default_factory=dict)
    peaks: Peaks = field(default_factory=Peaks)

    def observe(self, residuals: Sequence[Residual]) -> None:
        """Take the micro-batches of one step.

            common = sum_i w_i e_i / sum_i w_i    e_i = log(measured_i / predicted_i)
                                                  w_i = predicted_i x ranks_i
            value of option o = sum_i w_i s_io (e_i - common) / sum_i w_i s_io    s_io its share

        The only micro-batch of a step cannot be told from the common factor.
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
