"""Probes: a few equal layers whose forward and backward are timed and whose bytes are counted.

A probe runs its segments one after the other; the last to go forward and the last to go backward
count, as the first warms up (DCP, section 3.5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from headrace.native.counted import ByteCounter, DeviceBytes, SavedBytes
from headrace.native.spans import Clock, HostClock

__all__ = ["ChainProbe", "Counter", "Passed", "Probe", "bytes_of", "observe", "seconds_of"]

Counter = ByteCounter | DeviceBytes | SavedBytes

Passed = Callable[[], None]
"""A function that a probe calls between its segments."""


class Probe(Protocol):
    """Something with a forward and a backward of ``segments`` equal parts."""

    segments: int

    def forward(self, passed: Passed) -> None:
        """Run forward; call ``passed`` before the first segment and after each."""

    def backward(self, passed: Passed) -> None:
        """Run backward; call ``passed`` after each segment."""


class ChainProbe:
    """Functions of one tensor, such as a model's layers, each fed with what the one before made.

    Functions are taken to be equal, so that each one's costs are the last one's.
    """

    def __init__(
        self,
        entry: Callable[[], torch.Tensor],
        layers: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> None:
        """A probe of layers that follow each other; ``entry`` makes the first one's input."""
        self.segments = len(layers)
        self._entry, self._layers = entry, layers
        self._done: list[tuple[torch.Tensor, torch.Tensor]] = []  # each layer's input and output

    def forward(self, passed: Passed) -> None:
        """Run all functions forward, each on an input of its own that is cut from the graph."""
        x, done = self._entry(), list[tuple[torch.Tensor, torch.Tensor]]()
        passed()
        for layer in self._layers:
            entry = x.detach().requires_grad_()
            x = layer(entry)
            done.append((entry, x))
            passed()
        self._done = done

    def backward(self, passed: Passed) -> None:
        """Run all functions backward, the last one first, from a random gradient; each frees what
        it kept."""
        done = self._done
        self._done = list[tuple[torch.Tensor, torch.Tensor]]()
        grad = torch.randn_like(done[-1][1])
        while done:
            entry, out = done.pop()
            out.backward(grad)
            grad = entry.grad if entry.grad is not None else grad
            del entry, out
            passed()


def observe(
    probe: Probe, clock: Clock, counter: Counter | None = None
) -> tuple[list[float], list[int]]:
    """([forward, backward] seconds, [kept, transient] bytes) of the segments that count.

    Kept is what is alive after a segment's forward and was not before; transient what was alive on
    top of it while the segment ran forward or backward. Without a counter both are 0; with one the
    seconds are those of the counting too, unless the clock is a model.
    """
    marks: list[Any] = []
    seen: list[tuple[int, int]] = []  # (bytes alive, their peak since the last look)

    def passed() -> None:
        """Note the time and, with a counter, the bytes between two segments."""
        marks.append(clock.mark())
        if counter is not None:
            seen.append(counter.look())

    with counter or nullcontext():
        probe.forward(passed)
        forward_s = clock.between(marks[-2], marks[-1])
        start_bytes = counter.look()[0] if counter is not None else 0
        marks.append(clock.mark())
        probe.backward(passed)
    seconds = [forward_s, clock.between(marks[-2], marks[-1])]
    if not seen:
        return seconds, [0, 0]
    # The last segment is the first that goes backward, and everything kept is alive as it starts.
    alive_before, _ = seen[probe.segments - 1]
    alive_after, forward_peak = seen[probe.segments]
    _, backward_peak = seen[probe.segments + 1]
    transient = max(forward_peak - alive_after, backward_peak - start_bytes)
    return seconds, [max(0, alive_after - alive_before), max(0, transient)]


def seconds_of(probe: Probe, clock: Clock) -> list[float]:
    """[forward, backward] seconds of the segments that count."""
    return observe(probe, clock)[0]


def bytes_of(probe: Probe, counter: Callable[[], Counter], times: int = 1) -> list[int]:
    """[kept, transient] bytes of the segments that count, from ``times`` runs, each with a counter
    of its own: the median of what is kept, and the least of what is transient, as buffers that are
    freed late come on top."""
    seen = [observe(probe, HostClock(), counter())[1] for _ in range(times)]
    kept = sorted(kept for kept, _ in seen)
    return [kept[times // 2], min(transient for _, transient in seen)]
