"""What stands in a model's place where a trainer computes its loss.

    PartOfModel   a micro-batch of a planned step: the trainer's compute_loss on the local tokens
    WholeModel    a whole batch: planned forwards on all ranks, and their results on each of them

A trainer shifts labels itself, by cutting off the last column of logits and the first of labels.
On one rank's part of a batch this would lose the token at the border of the part. So the labels of
a part, which are already at the places that predict them, get one more column in front, and its
logits one more at the end: after the trainer's shift exactly the part's own pairs of logits and
labels are left.

Shape legend: s_r local tokens of a micro-batch; V tokens in a vocabulary; a batch of b rows of S
columns; n tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from headrace.engine.attach import Attached
from headrace.errors import DataError, ModelError
from headrace.ops.loss import IGNORED
from headrace.trainers.rows import RowSample, columns_of, samples_of

__all__ = [
    "REPORTED",
    "ModelStandIn",
    "Outcome",
    "PartInputs",
    "PartOfModel",
    "Sums",
    "WholeModel",
    "fused_head",
]

_FUSED = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""The values of each token with a label that TRL's models return."""

REPORTED = ("log_probs", "entropy", "is_top1", "label_mask")
"""What SFTTrainer's metrics are made of, values of tokens: the log-probability, the entropy of the
prediction, whether the likeliest token is right, and whether the token counts."""


@dataclass(slots=True, kw_only=True)
class Sums:
    """Sums over the tokens of a step on this rank, of what TRL's trainers report.

    Attributes:
        values: The sum of each of :data:`REPORTED`.
    """

    values: list[float] = field(default_factory=lambda: [0.0] * len(REPORTED))

    def add(self, outputs: Any) -> None:
        """Add the sums over the local tokens of a model's outputs."""
        fields = [getattr(outputs, name) for name in REPORTED]
        self.values = [
            total + float(values.detach().double().sum())
            for total, values in zip(self.values, fields, strict=True)
        ]


class ModelStandIn:
    """A callable in the place of the model ``stands_for``, whose attributes it has."""

    def __init__(self, stands_for: Any) -> None:
        self.stands_for = stands_for

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model, as it is not one of the stand-in."""
        return getattr(self.stands_for, name)


class PartInputs(dict[str, Any]):
    """What a trainer's ``compute_loss`` gets for a part of a batch. Reading a field ``beside``
    these, which samples have and the model does not take, raises DataError: of such a field a part
    would need other columns than it has of tokens or of labels. The attention mask is not among
    what ``inputs`` lists, as a part has no padding; who asks for it gets the ``mask`` of ones."""

    def __init__(
        self, inputs: Mapping[str, Any], beside: Iterable[str], mask: torch.Tensor
    ) -> None:
        super().__init__(inputs)
        self._beside = frozenset(beside) - inputs.keys()
        self._mask = mask

    def __getitem__(self, name: str) -> Any:
        """The value of a field."""
        self._require_given(name)
        return self._mask if name == "attention_mask" else super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        """Whether there is a field of this name."""
        self._require_given(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or the default."""
        self._require_given(name)
        return self._mask if name == "attention_mask" else super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        """The value of a field, which is taken out, or the default."""
        self._require_given(name)
        return self._mask if name == "attention_mask" else super().pop(name, *default)

    def _require_given(self, name: object) -> None:
        """Raise DataError for a field that samples have beside what the model takes."""
        if name in self._beside:
            raise DataError(
                f"{name} in compute_loss",
                got="a column of tokens that the model does not take",
                wanted="a loss of the model's outputs and of labels",
                hint="leave it out in the data collator; a loop of hr.attach has it in micro.rest",
            )


class PartOfModel(ModelStandIn):
    """A model as a trainer's ``compute_loss`` calls it for the ``inputs`` of a micro-batch, whose
    ``labels`` [1, s_r] are at the places that predict them. If ``shifts``, the trainer shifts
    labels itself, so labels and logits get one more column each, which its shift cuts off; logits
    beside a loss of the model's own only where they are ``read``. What TRL reports of the tokens is
    added to ``sums``. ``items`` [] is the number that the trainer was given to divide losses by,
    ``share`` of which are the targets of the step: by these the model divides its loss."""

    def __init__(
        self,
        model: Any,
        inputs: Mapping[str, torch.Tensor],
        labels: torch.Tensor,
        *,
        shifts: bool,
        sums: Sums | None = None,
        items: torch.Tensor | None = None,
        share: float = 1.0,
        read: bool = False,
    ) -> None:
        super().__init__(model)
        self._labels, self._shifts, self._sums = labels, shifts, sums
        self._items, self._share, self._read = items, share, read
        before = labels.new_full((labels.shape[0], 1), IGNORED)
        self._given = torch.cat([before, labels], dim=1) if shifts else labels
        self.mask = torch.ones_like(self._given)
        self.inputs = {**inputs, "labels": self._given}

    def __call__(self, **named: Any) -> Any:
        """The outputs of the model for the local tokens. Raises ModelError for other labels than
        or mask than those in ``inputs``, as the local ones could not be found in them, and for
        another number of items."""
        labels, items = named.pop("labels", None), named.pop("num_items_in_batch", None)
        self._require_items(items)
        self._require_own("labels", labels, self._given)
        self._require_own("attention_mask", named.pop("attention_mask", None), self.mask)
        if named.get("fused_lm_head"):
            named["shift_labels"] = self._labels
            outputs = self.stands_for(**named)
            if self._sums is not None:
                self._sums.add(outputs)
            return outputs
        if labels is not None:
            named["labels"] = self._labels
        outputs = self.stands_for(**named)
        if labels is not None and items is not None and self._share != 1:
            outputs.loss = outputs.loss * self._share
        # Without labels the trainer computes the loss of the logits itself.
        reads = self._shifts and (labels is None or self._read)
        if reads and getattr(outputs, "logits", None) is not None:
            logits = outputs.logits
            outputs.logits = torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1)
        return outputs

    @staticmethod
    def _require_own(name: str, value: Any, own: torch.Tensor) -> None:
        """Raise ModelError for a ``value`` of the field ``name`` that is given, but not the ``own``
        one of ``inputs``."""
        if value is not None and value is not own:
            raise ModelError(
                f"{name} in compute_loss",
                got="another tensor than that of inputs",
                wanted=f'inputs["{name}"], as the trainer gave it',
                hint=f"change {name} in the data set or the data collator",
            )

    def _require_items(self, items: Any) -> None:
        """Raise ModelError where the model is to divide its loss by another number than that of the
        step's targets; only another tensor than the trainer's is read."""
        if items is None or items is self._items or self._items is None:
            return
        if float(items) != float(self._items):
            raise ModelError(
                "num_items_in_batch in compute_loss",
                got=float(items),
                wanted=f"{float(self._items)}, as the trainer gave it",
                hint="scale the loss itself",
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A model's outputs for a batch, from which the trainer computes its loss: ``leaf``,
    [b, S - 1, ...] (or [b] for scores), is a leaf tensor whose ``grad`` is filled by the loss's
    backward, and ``samples`` are those of the batch."""

    leaf: torch.Tensor
    samples: list[RowSample]

    def given(self) -> list[dict[str, torch.Tensor]]:
        """The samples as :meth:`Attached.backward` takes them: the fields of each by name."""
        return [sample.fields for sample in self.samples]

    def gradients(self) -> list[torch.Tensor]:
        """For each sample the gradient of the loss by the value of each of its tokens, [n, ...]."""
        gradient = self.leaf.grad
        if gradient is None:
            gradient = torch.zeros_like(self.leaf)
        # The leaf has no column for the last token, which predicts nothing.
        wide = torch.cat([gradient, torch.zeros_like(gradient[:, :1])], dim=1)
        return [wide[s.row, s.columns.to(wide.device)] for s in self.samples]


class WholeModel(ModelStandIn):
    """Stands in for a model that a trainer calls on whole batches, which all ranks have alike: they
    run the batch together, by planned forwards. Collective.

    Args:
        run: The attached run.
        model: The model in whose place it is called.
        spread: The model to run, where it is not that of the run.
        around: Makes a context in which forwards run, such as one that disables an adapter.
        shifts: Whether the logits of a column predict the label of the next one, not of its own.
        makes_logits: Whether logits are wanted where there are labels too.
        outcomes: A list to which the values of each call are added for the loss to be computed of,
            where gradients are enabled; None where no loss is computed.
    """

    def __init__(
        self,
        run: Attached,
        model: Any,
        *,
        spread: Any = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        shifts: bool = True,
        makes_logits: bool = True,
        outcomes: list[Outcome] | None = None,
    ) -> None:
        super().__init__(model)
        self._run, self._spread, self._around, self._shifts = run, spread, around, shifts
        self._makes_logits, self._outcomes = makes_logits, outcomes

    def __call__(self, **named: Any) -> Any:
        """The outputs of the model for all rows, on every rank: a loss and logits where there are
        labels, logits alone without; or TRL's values of tokens when ``fused_lm_head`` is given."""
        fused = named.pop("fused_lm_head", False)
        items = named.pop("num_items_in_batch", None)
        for name in ("use_cache", "return_dict", "output_router_logits"):
            named.pop(name, None)
        labels, ids = named.get("labels"), named["input_ids"]
        samples = samples_of(named, "input_ids", "a batch")
        if fused:
            return self._fused(named, samples)
        shape = (ids.shape[0], ids.shape[1])
        if labels is not None and not self._makes_logits:
            values = self._mapped(samples, _token_losses)
            return _outputs(
                loss=self._mean(columns_of(values, samples, shape).sum(), labels, items)
            )
        values = self._mapped(samples, _logits)
        logits = columns_of(values, samples, shape).to(ids.device)
        if labels is None:
            return _outputs(logits=logits)
        # Logits of a column predict the label of the next one when the model shifts.
        first_label, end = (1, -1) if self._shifts else (0, None)
        flat, targets = logits[:, :end].flatten(0, 1).float(), labels[:, first_label:].flatten()
        total = cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
        return _outputs(loss=self._mean(total, labels, items), logits=logits)

    def _mean(self, total: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
        """The loss of a batch: the sum ``total`` over its tokens, divided by the number ``items``
        that the trainer has counted or, where that is None, by the number of labels."""
        if items is None:
            items = (labels[:, int(self._shifts) :] != IGNORED).sum()
        return total.to(labels.device) / items

    def _fused(self, named: Mapping[str, Any], samples: list[RowSample]) -> Any:
        """The outputs that TRL's models have for a batch: the values _FUSED of its tokens,
        [b, S - 1] each. Where gradients are enabled, log-probabilities are a leaf for the loss."""
        ids, labels = named["input_ids"], named["labels"]

        def values(outputs: Any, micro: Any) -> torch.Tensor:
            """The values of the local tokens, [1, s_r, len(_FUSED)]; 0 for those that a model does
            not compute."""
            parts = [getattr(outputs, name) for name in _FUSED]
            return torch.stack(
                [torch.zeros_like(parts[0]) if p is None else p.to(parts[0]) for p in parts], -1
            ).float()

        by_sample = self._mapped(samples, values, more=fused_head)
        # [b, S - 1, len(_FUSED)]: the last column predicts nothing.
        batch_values = columns_of(by_sample, samples, tuple(ids.shape)).to(ids.device)[:, :-1]
        fields = dict(zip(_FUSED, batch_values.unbind(-1), strict=True))
        if self._outcomes is not None and torch.is_grad_enabled():
            leaf = fields["log_probs"] = fields["log_probs"].clone().requires_grad_()
            self._outcomes.append(Outcome(leaf=leaf, samples=samples))
        mask = labels[:, 1:] != IGNORED
        fields["is_top1"] = fields["is_top1"].bool() & mask
        return SimpleNamespace(**fields, label_mask=mask, aux_loss=None)

    def _mapped(self, samples: list[RowSample], fn: Any, more: Any = None) -> list[torch.Tensor]:
        """For each sample the values of its tokens, [n, ...], that ``fn(outputs, micro)`` makes of
        planned forwards; ``more(micro)`` gives further arguments of the model."""
        given = [sample.fields for sample in samples]
        with self._around():
            return self._run.map(given, fn, model=self._spread, more=more)


def fused_head(micro: Any) -> dict[str, Any]:
    """The arguments by which TRL's models give values of tokens instead of logits."""
    return {"fused_lm_head": True, "shift_labels": micro.labels}


def _logits(outputs: Any, micro: Any) -> torch.Tensor:
    """The logits of each local token, [1, s_r, V]."""
    logits: torch.Tensor = outputs.logits
    return logits


def _token_losses(outputs: Any, micro: Any) -> torch.Tensor:
    """The cross entropy of each local token, [1, s_r], 0 where it has no label."""
    flat = outputs.logits.flatten(0, -2).float()
    losses = cross_entropy(flat, micro.labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses[None]


def _outputs(**named: torch.Tensor) -> Any:
    """The named values as outputs of a causal language model of transformers."""
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(**named)
