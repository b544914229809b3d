"""How close is close: the shares and limits by which all of planning compares seconds."""

from __future__ import annotations

__all__ = ["CLOSE", "GAIN", "NEAR", "NEVER", "ROUNDING"]

ROUNDING = 1e-9
"""Relative difference of seconds that is rounding."""

GAIN = 1e-6
"""Relative gain of seconds below which a change of a schedule is not worth making."""

CLOSE = 1e-3
"""A least time is known closely enough to this share."""

NEAR = 0.01
"""What is up to this share above the best may still win."""

NEVER = 1e200
"""Stands for infinite where numbers are multiplied by zero or interpolated."""
