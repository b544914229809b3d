"""Searches the least time in which a filling succeeds: steps up, then halving.

A filling (:mod:`headrace.planning.side_by_side`, :mod:`headrace.planning.nested`) answers whether
everything ends within a guessed time, and if not, about which part of the work found no place. From
a bound upwards the time grows by that part until a filling succeeds; every second part is guessed
from the one before, as a filling that is not measured may end sooner. Then the time is halved
between what failed and what did not. Effort is counted in fillings, never in time, so that plans do
not depend on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

__all__ = ["Effort", "Searched", "least_time"]

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

_NEXT = 0.4  # After an unmeasured probe, assume 40 % of the last shortfall is left.


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard a search tries.

    A time grows by ``growth`` times the part that found no place, at least by ``least``, which is
    ``wider`` times as much each time; then it is halved until it is known to ``close``, or
    ``halvings`` are done. A search with a ``probe`` ends where not so much is gained at once.
    """

    least: float = 2e-3
    wider: float = 1.0
    growth: float = 0.7
    steps: int = 16
    halvings: int = 5
    close: float = 1e-3
    probe: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched(Generic[Result]):
    """What a filling gave, and the time in which it succeeded."""

    seconds: float
    result: Result


class Fill(Protocol[Result_co]):
    """Places all sequences within ``tau`` seconds."""

    def __call__(self, tau: float, *, measured: bool = True) -> Result_co | float:
        """What was placed; else, as a float, the share of the work that found no place, which is
        any number unless ``measured``."""
        ...


def least_time(
    fill: Fill[Result], low_s: float, high_s: float, effort: Effort
) -> Searched[Result] | None:
    """The least time found between ``low_s``, which nothing beats, and ``high_s`` in which ``fill``
    succeeds; None when none is below ``high_s``."""
    best: Searched[Result] | None = None
    if effort.probe:
        tau = high_s * (1 - effort.probe)
        result = 0.0 if tau < low_s else fill(tau, measured=False)
        if isinstance(result, float):
            return None
        best, high_s = Searched(seconds=tau, result=result), tau
    tau, lacks, least = low_s * (1 + 1e-9), 0.0, effort.least
    for step in range(effort.steps):
        tau = min(tau, high_s)
        if best is not None and tau >= high_s:
            break
        result = fill(tau, measured=step % 2 == 0)  # unmeasured probes are quicker
        if not isinstance(result, float):
            best, high_s = Searched(seconds=tau, result=result), tau
            break
        if tau >= high_s:
            return None
        low_s = tau
        lacks = lacks * _NEXT if step % 2 else result
        reached = tau * (1 + lacks) >= high_s  # even high_s may fail
        tau = high_s if reached else tau * (1 + max(least, effort.growth * lacks))
        least *= effort.wider
    for _ in range(effort.steps if best is None else 0):  # none of the steps succeeded
        tau = min(high_s, 2 * low_s)
        result = fill(tau, measured=False)
        if not isinstance(result, float):
            best, high_s = Searched(seconds=tau, result=result), tau
            break
        if tau >= high_s:
            return None
        low_s = tau
    for _ in range(effort.halvings if best is not None else 0):
        if high_s <= low_s * (1 + effort.close):
            break
        tau = (low_s + high_s) / 2
        result = fill(tau, measured=False)
        if isinstance(result, float):
            low_s = tau
        else:
            best, high_s = Searched(seconds=tau, result=result), tau
    return best
