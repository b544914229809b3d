"""Whether a loss is what a plan needs: a sum over labels, divided by those of the whole step.

Any other loss, such as a mean over the micro-batch, weighs samples by what they were packed with,
which the number alone does not show. So the loop computes the loss of a micro-batch under changes
whose effect is known:

    doubled     twice the targets: half the loss
    even, odd   every other label ignored: losses that add up to the whole one

A loss that asked for sums of sequences is no sum over labels. It is a sum over sequences, each with
its share, beside a sum over labels, and has other halves:

    even, odd   every other sequence has a share of 0, and twice the targets: losses that add up to
                the whole one, of which no gradient reaches the sequences without a share

A model of several axes has a trial of its own, as ranks may have some of its results alike, each
adding a term of them:

    uneven      shares (``micro.share``) that differ by rank: a term of what ranks have alike, with
                the same gradient on all of them, is multiplied by no share

Labels that are no classes cannot be ignored, so no halves of them are tried: a sum over places that
is divided by their number besides (``error.square().mean() / micro.targets``) is not found.

In a half, the model's results of tokens without a label are changed, too, which changes nothing but
what is worked out of all tokens together. The gradients of the results say more than the losses: a
token whose label is left has the gradient that it has in the whole, and others have none. A loss
that is multiplied or divided by a number of its micro-batch alone, which has no gradient itself,
shows there. And the graph of the loss is looked at once (:mod:`headrace.adopt.own_losses`), for
tokens that are picked by their places, as a loss does that shifts its labels once more.

A mean does not halve with twice the targets, however it is computed. A term that depends on no
token (a penalty on weights) is whole in each of these losses, so they add up to too much. Random
generators and buffers are restored after each of these calls, so that nothing else differs, and
gradients of these calls are dropped.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from headrace.adopt.spread_model import BatchPart, Watcher
from headrace.errors import ModelError
from headrace.ops.loss import IGNORED

__all__ = ["LossCheck", "Trial", "require_loss", "scaled_error", "set_aside", "share_factor"]

Trial = Literal["doubled", "even", "odd", "uneven"]
"""A second loss of the same micro-batch: as of a step with twice the targets, with every other
target (or sequence) left out, or with shares that differ by rank."""

_UNEVEN = (5**0.5 - 1) / 2
"""How much more of its share each rank has than the one before it, in the trial ``uneven``: no
ratio of places makes up for it."""

_FEW = 16
"""Labelled tokens whose gradients are compared: at least so many, where there are, and fewer than
three times as many, as each keeps a row of logits in three forwards."""

_LAST = 4
"""The last functions of a loss that are looked at for a GradScaler."""

_TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative differences that sums in another order may have; 3 % in half types."""


def share_factor(trial: Trial | None, rank: int) -> float:
    """The factor by which the share of places is larger on a rank in a trial; 1 without one (None).
    Halves of the labels have half the share each, and ``doubled`` has it by its targets."""
    if trial == "uneven":
        return 1 + _UNEVEN * rank
    return 0.5 if trial in ("even", "odd") else 1.0


def require_loss(loss: torch.Tensor) -> None:
    """Raise ModelError unless ``loss`` is a tensor without dims that has a gradient."""
    is_tensor = isinstance(loss, torch.Tensor)
    if is_tensor and not loss.dim() and loss.requires_grad:
        return
    shape = list(loss.shape) if is_tensor else type(loss).__name__
    without_gradient = is_tensor and not loss.requires_grad
    raise ModelError(
        "loss of a micro-batch",
        got=f"shape {shape}{' without gradient' if without_gradient else ''}",
        wanted="a single number with a gradient",
        hint="a model without labels gives none: hr.SampleOptions(label_name=...) names the field "
        "of samples and the model's argument"
        if loss is None
        else None,
    )


def scaled_error(loss: torch.Tensor) -> ModelError | None:
    """The error for a loss [] that a GradScaler of torch has multiplied; None for any other. Takes
    a while for one that is multiplied by a tensor of a single number."""
    node: Any = loss.grad_fn
    for _ in range(_LAST):
        factor = getattr(node, "_saved_other", None)
        if isinstance(factor, torch.Tensor) and factor.numel() == 1 and _is_of_scaler(factor):
            return ModelError(
                "loss of a micro-batch",
                got=f"{float(factor):g} times a loss, by GradScaler.scale(loss)",
                wanted="the loss: nobody divides the gradients again",
                hint="leave the scaler out, or give it enabled=False: a step whose loss or "
                "gradient is not finite is refused in any case; bf16 needs none",
            )
        node = next((parent for parent, _ in getattr(node, "next_functions", ())), None)
    return None


def _is_of_scaler(factor: torch.Tensor) -> bool:
    """Whether a tensor is the factor that a GradScaler keeps."""
    holders = gc.get_referrers(factor)
    # An object holds its attributes itself, or in a dict.
    holders += gc.get_referrers(*(one for one in holders if isinstance(one, dict)))
    return any(isinstance(owner, torch.amp.GradScaler) for owner in holders)


@dataclass(slots=True, kw_only=True, eq=False)
class LossCheck:
    """The losses of one micro-batch on one rank under each trial, and what they show.

    Attributes:
        part: This rank's part of the micro-batch.
        losses: The loss [] under each trial by its name, and the one that counts as ``whole``.
        by_sequence: Whether the loss was made of sums by sequence (``micro.per_sequence``).
        leaks: The largest gradient [] that reached a sequence without a share, for each sum in each
            trial.
        seen: What the loss' graph shows to be wrong, and of a term that ranks have alike its
            gradients, in the trial ``looked_at``.
        gradients: Those of a few tokens, [k, ...], for each result of the model in its order, by
            trial; None for a result that the loss does not use.
        sources: For each of these results the numbers of others that it is made of, as logits are
            of hidden states.
    """

    part: BatchPart
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    by_sequence: bool = False
    leaks: list[torch.Tensor] = field(default_factory=list)
    seen: ModelError | None = None
    gradients: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    sources: list[set[int]] = field(default_factory=list)

    @property
    def trials(self) -> Iterator[Trial]:
        """The trials to run, one after the other: ``doubled``, then both halves where labels are
        classes of tokens, which can be ignored, or where the first trial has shown that the loss is
        one of sequences; at the end ``uneven`` for a model of several axes."""
        yield "doubled"
        if self._classes is not None or self.by_sequence:
            yield "even"
            yield "odd"
        if self.part.by_places:
            yield "uneven"

    @property
    def looked_at(self) -> Trial:
        """The trial in which the graph of the loss is looked at."""
        return "uneven" if self.part.by_places else "doubled"

    @property
    def _classes(self) -> torch.Tensor | None:
        """The labels [b, s_r] where they are classes of tokens, which can be ignored."""
        labels = self.part.labels
        are_classes = labels is not None and not labels.is_floating_point() and labels.dim() == 2
        return labels if are_classes else None

    def watching(self, trial: Trial | None) -> Watcher:
        """Return what keeps the gradients of a few tokens of the model's results in a trial; of the
        loss itself without one (None). In ``even`` and ``odd`` it changes the results of tokens
        whose labels are left out."""
        labels, kept = self._classes, self.gradients.setdefault(trial or "whole", [])
        tokens = None if labels is None else _few_labelled(labels)
        counted = None
        if labels is not None and trial in ("even", "odd") and not self.by_sequence:
            counted = _counted(labels, trial)

        def keep(at: int, is_value: torch.Tensor, gradient: torch.Tensor | None) -> None:
            """Keep the gradient [b, s_r, ...] of a result at these tokens, where it is not 0 there:
            a model that was given labels may return losses, which are 0 without one. Of a result
            that is used where no gradient flows there is none."""
            if gradient is not None:
                kept[at] = gradient.detach().flatten(0, 1)[tokens] * is_value

        def look(results: Sequence[torch.Tensor]) -> None:
            """Hook the results [b, s_r, ...] of tokens."""
            if labels is None:
                return
            plain = [x for x in results if x.shape[:2] == labels.shape and type(x) is torch.Tensor]
            of_tokens = [x for x in plain if x.grad_fn is not None]
            if trial is None:
                self.sources += _sources(of_tokens, first=len(kept))
            for x in of_tokens:
                is_value = x.detach().flatten(0, 1)[tokens] != 0
                x.register_hook(partial(keep, len(kept), is_value))
                kept.append(None)
                if counted is not None and 0 not in x.stride():
                    _shrink_others(x, counted)

        return look

    def times(self, trial: Trial | None) -> int:
        """The factor by which ``micro.targets`` is larger in a trial; 1 without one (None).

        Halves by sequence keep all labels, so only with twice the targets do the sums over labels
        of both halves add up to the whole one.
        """
        halves_sequences = trial in ("even", "odd") and self.by_sequence
        return 2 if trial == "doubled" or halves_sequences else 1

    def share_of(self, at: int, trial: Trial | None) -> float:
        """The factor by which a sequence's share changes in a trial; 1 without one (None). ``at``
        is the index of the sequence within the planned micro-batch, in which samples that stay
        together are one sequence."""
        if trial is None:
            return 1.0
        if trial == "doubled":
            return 0.5
        if not self.by_sequence or trial == "uneven":
            return 1.0
        kept_remainder = 1 if trial == "odd" else 0
        return 1.0 if at % 2 == kept_remainder else 0.0

    def changed(self, part: BatchPart, trial: Trial) -> BatchPart:
        """Return ``part`` as it is in a trial. In ``even`` and ``odd`` of a loss of labels every
        other label is IGNORED, and fields that the model does not take are 0 at these tokens."""
        labels = part.labels
        if trial in ("doubled", "uneven") or labels is None or self.by_sequence:
            return part
        counted = _counted(labels, trial)
        half = torch.where(counted, labels, IGNORED)
        inputs = {name: half if value is labels else value for name, value in part.inputs.items()}
        rest = {name: _where_counted(value, counted) for name, value in part.rest.items()}
        return replace(part, labels=half, inputs=inputs, rest=rest)

    def error(self) -> ModelError | None:
        """What is wrong with the loss, judged by its values in the trials; None where nothing is,
        or where it is not finite. Waits for the device."""
        loss = self.losses["whole"]
        whole, doubled = float(loss), 2 * float(self.losses["doubled"])
        halves = [float(self.losses[name]) for name in ("even", "odd") if name in self.losses]
        total = sum(halves) if halves else whole
        largest = max(abs(whole), abs(doubled), *map(abs, halves))
        if not math.isfinite(whole):  # the step says so itself
            return None
        tolerance = _TOLERANCES.get(loss.dtype, 3e-2) * largest
        if self.by_sequence:
            return self._error_of_sequences(whole, doubled, total, tolerance) or self.seen
        error = self._error_of_labels(whole, doubled, halves, tolerance)
        return error or self.seen or self._error_of_gradients()

    def _error_of_gradients(self) -> ModelError | None:
        """What is wrong with a loss whose tokens have other gradients where other labels are left
        out; None where nothing is. What a result has by way of others is not the loss' own doing,
        and goes through layers that mix tokens: such results are left out."""
        whole, labels = self.gradients.get("whole", []), self._classes
        if labels is None:
            return None
        pairs = zip(self.sources, whole, strict=True)
        passed = set[int]().union(*(sources for sources, one in pairs if one is not None))
        tokens = _few_labelled(labels)
        for trial in ("even", "odd"):
            found, counted = self.gradients[trial], _counted(labels, trial).flatten()[tokens]  # [k]
            if len(found) != len(whole):  # the loop has called the model more or less often
                continue
            for at, (one, other) in enumerate(zip(whole, found, strict=True)):
                if one is None or other is None or not one.numel() or at in passed:
                    continue
                if not bool(one.isfinite().all()):  # the step says so itself
                    continue
                wanted = _where_counted(one, counted)
                largest = max(float(one.abs().max()), float(other.abs().max()))
                off = float((other - wanted).abs().max())
                if off > _TOLERANCES.get(one.dtype, 3e-2) * largest:
                    return ModelError(
                        "loss of a micro-batch",
                        got=f"another gradient of a token, by {off / largest:.2g} of the largest, "
                        "where other labels are left out",
                        wanted="a sum over tokens, whose parts depend on one token each",
                        hint="what is worked out of a micro-batch, such as a mean or a deviation "
                        "that its tokens are weighed by, is not that of the step: run.map(samples, "
                        "fn) gives values of all samples before",
                    )
        return None

    def _error_of_labels(
        self, whole: float, doubled: float, halves: Sequence[float], tolerance: float
    ) -> ModelError | None:
        """What is wrong with a loss of labels; None where nothing is. ``whole`` is the loss,
        ``doubled`` twice the one with twice the targets, which should be the same, ``halves`` those
        of every other label, none where these were not tried. Values within ``tolerance`` count as
        equal."""
        total = sum(halves) if halves else whole
        if abs(doubled - whole) <= tolerance and abs(total - whole) <= tolerance:
            return None
        what = "loss of a micro-batch"
        if abs(doubled - 2 * whole) <= tolerance:
            return ModelError(
                what,
                got=f"{whole:.6g} whatever micro.targets is",
                wanted="a sum over the labels, divided by micro.targets",
                hint="a mean over one micro-batch weighs samples by their company: use "
                'reduction="sum" and divide by micro.targets, or micro.loss(logits)',
            )
        # A term that is not divided by the targets is counted twice in ``doubled`` and ``total``.
        undivided = doubled - whole
        if halves and abs(total - whole - undivided) <= tolerance:
            return ModelError(
                what,
                got=f"{undivided:.6g} of {whole:.6g} that is not divided by micro.targets",
                wanted="a sum over the labels, divided by micro.targets",
                hint="every micro-batch of every rank adds such a term: write micro.loss(logits) + "
                "micro.share * penalty, as the shares of a step add up to 1",
            )
        if abs(doubled - whole) > tolerance:
            got = f"{doubled / 2:.6g} with twice the micro.targets, {whole:.6g} without"
            return ModelError(
                what,
                got=got,
                wanted="half as much",
                hint="divide sums by micro.targets, and write micro.share * penalty for a term of "
                "no place, as the shares of a step add up to 1",
            )
        return self.seen or ModelError(
            what,
            got=f"{halves[0]:.6g} and {halves[1]:.6g} for two halves of the labels",
            wanted=f"parts that add up to {whole:.6g}",
            hint="a loss is a sum over tokens whose label is not IGNORED (-100)",
        )

    def _error_of_sequences(
        self, whole: float, doubled: float, total: float, tolerance: float
    ) -> ModelError | None:
        """What is wrong with a loss of sequences; None where nothing is. ``whole`` is the loss,
        ``doubled`` twice the one with half the shares and twice the targets, ``total`` the sum of
        those of every other sequence: all three should be the same, within ``tolerance``."""
        wanted = "losses of sequences, each times its micro.sequence_share"
        hint = (
            "write (losses * micro.sequence_share).sum(), beside sums over labels divided by "
            "micro.targets; samples that a loss compares belong together (run.step(samples, "
            "together=...)), or to two passes (run.map and run.backward)"
        )
        what = "loss of a micro-batch"
        leak = max((float(gradient) for gradient in self.leaks), default=0.0)
        if abs(doubled - whole) > tolerance:
            got = f"{doubled / 2:.6g} with half the shares and twice the targets, not half of"
            return ModelError(what, got=f"{got} {whole:.6g}", wanted=wanted, hint=hint)
        if leak > 0:
            got = f"a gradient of {leak:.3g} of a sequence without a share"
            return ModelError(what, got=got, wanted=wanted, hint=hint)
        if abs(total - whole) > tolerance:
            got = f"{total:.6g} for the two halves of the sequences, {whole:.6g} for all"
            return ModelError(what, got=got, wanted=wanted, hint=hint)
        return None


def _sources(results: Sequence[torch.Tensor], first: int) -> list[set[int]]:
    """For each of the results the numbers of others that autograd reaches from it without passing
    a further one, counted from ``first``."""
    numbers = {x.grad_fn: at for at, x in enumerate(results, first)}
    found = list[set[int]]()
    for x in results:
        assert x.grad_fn is not None, "results have gradients"
        own, seen, stack = set[int](), set[object](), [*x.grad_fn.next_functions]
        while stack:
            node, _ = stack.pop()
            if node in numbers:
                own.add(numbers[node])
            elif node is not None and node not in seen:
                seen.add(node)
                stack += node.next_functions
        found.append(own)
    return found


def _shrink_others(x: torch.Tensor, counted: torch.Tensor) -> None:
    """Multiply the result [b, s, ...] of all tokens that are not ``counted`` [b, s] by -1/2, in its
    own memory, as a copy of logits may not fit. What made it may need the former values in its
    backward; the gradients of a trial are dropped."""
    factor = torch.where(counted, 1.0, -0.5).to(x.dtype)
    x.data.mul_(factor.view(*counted.shape, *[1] * (x.dim() - 2)))


def _few_labelled(labels: torch.Tensor) -> torch.Tensor:
    """The numbers [k], in the flattened labels [b, s], of some tokens that have a label."""
    found = (labels.flatten() != IGNORED).nonzero()[:, 0]
    step = max(1, len(found) // _FEW)
    return found[:: step - 1 + step % 2]  # an odd step, which picks labels of both halves


def _counted(labels: torch.Tensor, trial: str) -> torch.Tensor:
    """Which labels [b, s] are left in the trial ``even`` or ``odd``, every other one of a row."""
    label_numbers = (labels != IGNORED).cumsum(1)  # [b, s]: counts labels from 1
    return label_numbers % 2 == (1 if trial == "even" else 0)


def _where_counted(value: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Values of tokens, 0 where ``counted``, of their first dims, is False. Values of another shape
    are not of tokens and returned as they are."""
    if value.shape[: counted.dim()] != counted.shape:
        return value
    trailing_dims = [1] * (value.dim() - counted.dim())
    mask = counted.view(*counted.shape, *trailing_dims)
    return torch.where(mask, value, torch.zeros_like(value))


@contextmanager
def set_aside(model: torch.nn.Module, device: str) -> Iterator[None]:
    """Set the gradients of a model aside: the block begins without any, and after it gradients,
    buffers and the states of torch's random generators are as they were before."""
    gradients = {p: p.grad for p in model.parameters()}
    for parameter in gradients:
        parameter.grad = None
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.startswith("cuda") else None
    try:
        yield
    finally:
        # After a backward under FSDP2 the model may have other parameters than before, with
        # gradients of their own, which are dropped.
        for parameter in model.parameters():
            parameter.grad = gradients.get(parameter)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
