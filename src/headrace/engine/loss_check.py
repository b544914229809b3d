"""Whether a loss is what a plan needs: a sum over labels, divided by those of the whole step.

Any other loss weighs samples by whom they were packed with, and it cannot be told from the number
alone. So the loop computes the loss of a micro-batch under changes whose effect is known:

    doubled     twice the targets: half the loss
    even, odd   every other label ignored: losses that add up to the whole one

A loss that asked for sums of sequences is no sum over labels. It is a sum over sequences, each with
its share, beside a sum over labels, and has other halves:

    even, odd   every other sequence has a share of 0, and twice the targets: losses that add up to
                the whole one, of which no gradient reaches the sequences without a share

A mean, by whatever formula, does not halve. A term that knows no token (a penalty on weights) is
counted once in each. What is drawn at random and what a forward leaves in buffers is put back
before each of them, so that nothing else differs; gradients of these calls are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from headrace.adopt.spread_model import BatchPart
from headrace.errors import ModelError
from headrace.ops.loss import IGNORED

__all__ = ["LossCheck", "Trial", "require_loss", "set_aside"]

Trial = Literal["doubled", "even", "odd"]
"""A second loss of the same micro-batch: as of a step with twice the targets, or with every
other target (or sequence) left out."""

_TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative differences that sums in another order may have; 3 % in half types."""


def require_loss(loss: torch.Tensor) -> None:
    """Raise ModelError for what is no single number with a gradient."""
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        without = isinstance(loss, torch.Tensor) and not loss.requires_grad
        raise ModelError(
            "loss of a micro-batch",
            got=f"shape {shape}{' without gradient' if without else ''}",
            wanted="a single number with a gradient",
        )


@dataclass(slots=True, kw_only=True, eq=False)
class LossCheck:
    """The losses of one part of a batch, of the tokens that one rank has.

    Attributes:
        part: What the rank has.
        losses: The loss under each trial, and ``whole``.
        by_sequence: Whether the loss asked for sums of sequences.
        leaks: The gradients that reached sequences without a share.
    """

    part: BatchPart
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    by_sequence: bool = False
    leaks: list[torch.Tensor] = field(default_factory=list)

    @property
    def trials(self) -> Iterator[Trial]:
        """The changes to try: labels that are not classes of tokens cannot be ignored. The loss of
        the first says what the others are."""
        yield "doubled"
        labels = self.part.labels
        classes = labels is not None and not labels.is_floating_point() and labels.dim() == 2
        if classes or self.by_sequence:
            yield "even"
            yield "odd"

    def times(self, trial: Trial | None) -> int:
        """How many times as many targets a trial has."""
        return 2 if trial == "doubled" or (trial is not None and self.by_sequence) else 1

    def share_of(self, at: int, trial: Trial | None) -> float:
        """What the share of the sequences that are planned as the ``at``-th of a micro-batch is
        multiplied by in a trial."""
        if trial is None or trial == "doubled":
            return 1.0 if trial is None else 0.5
        return 1.0 if not self.by_sequence or at % 2 == (trial == "odd") else 0.0

    def changed(self, part: BatchPart, trial: Trial) -> BatchPart:
        """A part of the same tokens, as a trial has it: labels that it leaves out are IGNORED, and
        other values of their tokens that the model does not take are 0."""
        labels = part.labels
        if trial == "doubled" or labels is None or self.by_sequence:
            return part
        counted = (labels != IGNORED).cumsum(1) % 2 == (1 if trial == "even" else 0)
        few = torch.where(counted, labels, IGNORED)
        inputs = {name: few if value is labels else value for name, value in part.inputs.items()}
        rest = {name: _where_counted(value, counted) for name, value in part.rest.items()}
        return replace(part, labels=few, inputs=inputs, rest=rest)

    def error(self) -> ModelError | None:
        """What is wrong with the loss, by its numbers. Waits for the device."""
        loss = self.losses["whole"]
        whole, doubled = float(loss), 2 * float(self.losses["doubled"])
        halves = [float(self.losses[name]) for name in ("even", "odd") if name in self.losses]
        total = sum(halves) if halves else whole
        most = max(abs(whole), abs(doubled), *map(abs, halves))
        if not math.isfinite(whole):  # the step says so itself
            return None
        limit = _TOLERANCES.get(loss.dtype, 3e-2) * most
        if self.by_sequence:
            return self._error_of_sequences(whole, doubled, total, limit)
        if abs(doubled - whole) <= limit and abs(total - whole) <= limit:
            return None
        what = "loss of a micro-batch"
        if abs(doubled - 2 * whole) <= limit:
            return ModelError(
                what,
                got=f"{whole:.6g} whatever micro.targets is",
                wanted="a sum over the labels, divided by micro.targets",
                hint="a mean over one micro-batch weighs samples by their company: use "
                'reduction="sum" and divide by micro.targets, or micro.loss(logits)',
            )
        apart = doubled - whole
        if halves and abs(total - whole - apart) <= limit:
            return ModelError(
                what,
                got=f"{apart:.6g} of {whole:.6g} that is not divided by micro.targets",
                wanted="a sum over the labels, divided by micro.targets",
                hint="every micro-batch of every rank adds such a term: write micro.loss(logits) + "
                "micro.share * penalty, as the shares of a step add up to 1",
            )
        if abs(doubled - whole) > limit:
            got = f"{doubled / 2:.6g} with twice the micro.targets, {whole:.6g} without"
            return ModelError(what, got=got, wanted="half as much")
        return ModelError(
            what,
            got=f"{halves[0]:.6g} and {halves[1]:.6g} for two halves of the labels",
            wanted=f"parts that add up to {whole:.6g}",
            hint="a loss is a sum over tokens whose label is not IGNORED (-100)",
        )

    def _error_of_sequences(
        self, whole: float, doubled: float, total: float, limit: float
    ) -> ModelError | None:
        """What is wrong with a loss of sequences."""
        wanted = "losses of sequences, each times its micro.sequence_share"
        hint = (
            "write (losses * micro.sequence_share).sum(), beside sums over labels divided by "
            "micro.targets; samples that a loss compares belong together (run.step(samples, "
            "together=...)), or to two passes (run.map and run.backward)"
        )
        what, leak = "loss of a micro-batch", max((float(x) for x in self.leaks), default=0.0)
        if abs(doubled - whole) > limit:
            got = f"{doubled / 2:.6g} with half the shares and twice the targets, not half of"
            return ModelError(what, got=f"{got} {whole:.6g}", wanted=wanted, hint=hint)
        if leak > 0:
            got = f"a gradient of {leak:.3g} of a sequence without a share"
            return ModelError(what, got=got, wanted=wanted, hint=hint)
        if abs(total - whole) > limit:
            got = f"{total:.6g} for the two halves of the sequences, {whole:.6g} for all"
            return ModelError(what, got=got, wanted=wanted, hint=hint)
        return None


def _where_counted(value: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Values of tokens [b, s, ...] where they are counted, else 0."""
    if value.shape[:2] != counted.shape:
        return value
    where = counted.view(*counted.shape, *[1] * (value.dim() - 2))
    return torch.where(where, value, torch.zeros_like(value))


@contextmanager
def set_aside(model: torch.nn.Module, device: str) -> Iterator[None]:
    """Leave gradients, buffers and the state of generators as they were before the block."""
    gradients = {p: p.grad for p in model.parameters()}
    for parameter in gradients:
        parameter.grad = None
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    drawn = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.startswith("cuda") else None
    try:
        yield
    finally:
        # FSDP2's parameters are others, with gradients of their own, once a backward is done.
        for parameter in model.parameters():
            parameter.grad = gradients.get(parameter)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.set_rng_state(drawn)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
