"""Clocks: what marks moments of the work of this rank, on its host or its device."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "EventClock", "HostClock"]


class Clock(Protocol):
    """What marks moments and tells the seconds between them."""

    def mark(self) -> Any:
        """Now."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one."""


class HostClock:
    """The host's clock, for work that is done when its call returns."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        """Seconds from one mark to a later one."""
        return end - start


class EventClock:
    """Events on the current CUDA stream: the device's own time, without the host's waits."""

    def mark(self) -> torch.cuda.Event:
        """An event after all work issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from one event to a later one, once it has happened."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3
