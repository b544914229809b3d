"""The pieces of a model that are measured by themselves: a branch of a layer, and the ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from headrace.runtime.clocks import Clock, HostClock
from headrace.runtime.counted import ByteCounter, DeviceBytes
from headrace.runtime.micro_batch import MicroBatchRun
from headrace.spec.method import Branch, LayerOption

__all__ = [
    "BranchPiece",
    "EndsPiece",
    "Piece",
    "count",
    "measure",
]

Passed = Callable[[], None]
Segment = tuple[torch.Tensor, torch.Tensor]


class Piece(Protocol):
    """Something with a forward and a backward of ``segments`` equal parts, of which the last to
    go forward and the last to go backward count: the first warms up."""

    segments: int

    def forward(self, passed: Passed) -> None:
        """Run forward; ``passed`` before the first segment and after each."""

    def backward(self, passed: Passed) -> None:
        """Run backward; ``passed`` after each segment."""


@dataclass(slots=True)
class BranchPiece:
    """The same branch of two layers, one after the other, as a micro-batch would run it."""

    run: MicroBatchRun
    part: Branch
    option: LayerOption
    segments: int = 2
    _done: list[Segment] | None = None

    def forward(self, passed: Passed) -> None:
        """Both branches forward."""
        context, done = self.run.context, list[Segment]()
        shape = (len(self.run.ids), context.architecture.hidden)
        x = torch.randn(shape, dtype=context.place.dtype, device=self.run.ids.device)
        passed()
        for index in range(self.segments):
            entry = x.detach().requires_grad_()
            inner = replace(context, recompute=self.option.recompute, layer=index)
            state = self.run.states[index]
            x = self.run.model.branch(entry, self.part, self.option, state, inner)
            done.append((entry, x))
            passed()
        self._done = done

    def backward(self, passed: Passed) -> None:
        """Both branches backward."""
        done, self._done = self._done or [], None
        grad = torch.randn_like(done[-1][1])
        while done:
            entry, out = done.pop()
            out.backward(grad)
            grad = entry.grad if entry.grad is not None else grad
            del entry, out
            passed()


@dataclass(slots=True)
class EndsPiece:
    """Embedding, last norm, head and loss of a micro-batch, without its layers."""

    run: MicroBatchRun
    segments: int = 1
    _done: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    _last: torch.Tensor | None = None

    def forward(self, passed: Passed) -> None:
        """Embedding, then head and loss with its gradient."""
        run = self.run
        passed()
        x = run.model.embedding(run.ids, run.weights, run.context)
        entry = x.detach().requires_grad_()
        ending, labels = run.model.ending(entry, run.labels, run.weights)
        _, self._last = run.model.head(ending.detach(), labels, run.weights, run.scale, run.context)
        self._done = (x, entry, ending)
        passed()

    def backward(self, passed: Passed) -> None:
        """The same backward."""
        assert self._done is not None
        x, entry, ending = self._done
        self._done = None
        ending.backward(self._last)
        del ending
        self._last = None
        x.backward(entry.grad)
        passed()


def observe(
    piece: Piece, clock: Clock, counter: ByteCounter | DeviceBytes | None = None
) -> tuple[list[float], list[int]]:
    """([forward, backward] seconds, [kept, transient] bytes) of the segments that count.

    Kept is what is alive after a segment's forward and was not before; transient what was alive on
    top of it while the segment ran forward or backward. Without a counter both are 0; with one the
    seconds are those of the counting too, unless the clock is a model.
    """
    marks: list[Any] = []
    seen: list[tuple[int, int]] = []

    def passed() -> None:
        marks.append(clock.mark())
        if counter is not None:
            seen.append(counter.look())

    with counter or nullcontext():
        piece.forward(passed)
        forward_s = clock.between(marks[-2], marks[-1])
        start_bytes = counter.look()[0] if counter is not None else 0
        marks.append(clock.mark())
        piece.backward(passed)
    seconds = [forward_s, clock.between(marks[-2], marks[-1])]
    if not seen:
        return seconds, [0, 0]
    # Going backward the last segment is the first, and everything kept is alive as it starts.
    before, after = seen[piece.segments - 1], seen[piece.segments]
    first_back = seen[piece.segments + 1]
    transient = max(after[1] - after[0], first_back[1] - start_bytes)
    return seconds, [max(0, after[0] - before[0]), max(0, transient)]


def measure(piece: Piece, clock: Clock) -> list[float]:
    """[forward, backward] seconds of the segments that count."""
    return observe(piece, clock)[0]


def count(
    piece: Piece, counter: Callable[[], ByteCounter | DeviceBytes], times: int = 1
) -> list[int]:
    """[kept, transient] bytes of the segments that count: of several ``times`` the middle one of
    what is kept, and the least in passing, as buffers that are let go late come on top."""
    seen = [observe(piece, HostClock(), counter())[1] for _ in range(times)]
    return [sorted(kept for kept, _ in seen)[times // 2], min(passing for _, passing in seen)]
