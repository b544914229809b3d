"""Numbers as words of the report: fewer digits than a log, a dash for what is not known."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

__all__ = ["known", "share_text"]


def known(value: float, text: Callable[[float], str], otherwise: str = "-") -> str:
    """``text(value)``, or ``otherwise`` for NaN and infinities."""
    return text(value) if isfinite(value) else otherwise


def share_text(fraction: float) -> str:
    """``41 %``, ``2.8 %``, ``0.3 %``: two digits at most, for people who read along."""
    percent = 100 * fraction
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or percent == 0 else f"{percent:.1f} %"
