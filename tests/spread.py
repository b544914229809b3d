"""A spread of many cases in every run, and all of them under the marker ``slow``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["spread", "whole"]

Case = TypeVar("Case")


def spread(cases: Sequence[Case], every: int) -> list[Case]:
    """One of ``every`` cases, always the same ones; all for 1."""
    return random.Random(0).sample(list(cases), max(1, len(cases) // every))


def whole(*values: Any) -> Any:
    """A parameter set that runs under ``slow`` only."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
