"""Clocks: what marks moments of the work of this rank, on its host or its device."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "EventClock", "HostClock", "StepClock", "clock_of"]


class Clock(Protocol):
    """What marks moments and tells the seconds between them."""

    def mark(self) -> Any:
        """Now, in the order of the work: on a device, when what was issued so far has been done."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one, for which it waits."""


class StepClock(Clock, Protocol):
    """A clock whose marks may be of moments to come."""

    def past(self, mark: Any) -> bool:
        """Whether a moment has come."""

    def reach(self, mark: Any) -> None:
        """Wait until a moment has come."""


class HostClock:
    """The host's clock, for work that is done when its call returns."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def past(self, mark: float) -> bool:
        """It has come."""
        return True

    def reach(self, mark: float) -> None:
        """It has come."""

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

    def past(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has come to an event."""
        return mark.query()

    def reach(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has."""
        mark.synchronize()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from one event to a later one, once it has happened."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: str) -> StepClock:
    """The clock of a rank that works on ``device``."""
    return HostClock() if device == "cpu" else EventClock()
