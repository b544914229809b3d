"""Reward models: a score of each sequence, that of its last token which is not the padding token.

A model of transformers for sequences returns the score of that token of each row. This is wrong
for a row into which several sequences are packed, and for a part of a row on one rank. So while it
is spread it returns the score of every token, and that of each sequence is picked once all ranks
have the scores. The padding token is often that at the end of texts, too, and then the score is
that of the token before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headrace.engine.attach import Attached
from headrace.errors import DataError, ModelError
from headrace.trainers.rows import RowSample, samples_of
from headrace.trainers.stand_ins import ModelStandIn, Outcome

__all__ = ["ScoredModel", "scores_by_token", "scores_of_tokens", "without_labels"]


@contextmanager
def scores_of_tokens(
    model: Any, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[None]:
    """Within the block a model for sequences gives the score of every token, [b, S, 1], under DDP
    and FSDP2 as alone; ``around`` is entered in each forward. Raises ModelError for a model that is
    no stack of layers with a linear ``score``."""
    inner = getattr(model, "module", model)
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not hasattr(inner, "score") or not hasattr(inner, inner.base_model_prefix):
        raise ModelError(
            f"reward model {type(inner).__name__}",
            got="no layer named score",
            wanted="a model of transformers for sequences (AutoModelForSequenceClassification)",
        )

    def forward(
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        """The scores [b, S, 1] of tokens [b, S]; labels are ignored."""
        with around():
            stack = getattr(inner, inner.base_model_prefix)
            hidden = stack(input_ids=input_ids, position_ids=position_ids, **rest).last_hidden_state
            scores: torch.Tensor = inner.score(hidden)
        return scores

    # The instance may have a forward of its own: Accelerate sets one for mixed precision.
    former = vars(inner).get("forward")
    inner.forward = forward
    try:
        yield
    finally:
        if former is None:
            del inner.forward
        else:
            inner.forward = former


class ScoredModel(ModelStandIn):
    """Stands in for a reward model that a trainer calls on whole batches, which all ranks have
    alike: they run the batch together, by planned forwards. Collective.

    Args:
        run: The attached run of the model.
        model: The model in whose place it is called.
        around: Makes a context in which each forward runs.
        outcomes: A list to which the scores of each call are added for the loss to be computed of,
            where gradients are enabled; None where no loss is computed.
    """

    def __init__(
        self,
        run: Attached,
        model: Any,
        *,
        around: Callable[[], AbstractContextManager[Any]],
        outcomes: list[Outcome] | None,
    ) -> None:
        super().__init__(model)
        self._run, self._around, self._outcomes = run, around, outcomes

    def __call__(self, **named: Any) -> Any:
        """The scores of all rows as logits [b, 1], on every rank."""
        for name in ("use_cache", "return_dict", "margin"):
            named.pop(name, None)
        samples = samples_of(named, "input_ids", "a batch")
        given = [_unlabelled(sample) for sample in samples]
        with scores_of_tokens(self.stands_for, self._around):
            by_sample = self._run.map(given, scores_by_token)
        places = _scored_places(named["input_ids"], samples, _padding_of(self.stands_for))
        # [b]: every row is one sample, whose score is that of one of its tokens.
        picked = [tokens[place] for tokens, place in zip(by_sample, places, strict=True)]
        scores = torch.stack(picked).to(named["input_ids"].device)
        if self._outcomes is not None and torch.is_grad_enabled():
            scores = scores.clone().requires_grad_()
            self._outcomes.append(_ScoredToken(leaf=scores, samples=samples, places=places))
        from transformers.modeling_outputs import SequenceClassifierOutput

        return SequenceClassifierOutput(logits=scores[:, None])


def _padding_of(model: Any) -> int | None:
    """The number of the padding token that a model passes over to find the token with the score."""
    return getattr(model.config.get_text_config(), "pad_token_id", None)


def _scored_places(
    ids: torch.Tensor, samples: Sequence[RowSample], padding: int | None
) -> list[int]:
    """The place in each sample of the token whose score is that of its row of ``ids`` [b, S]: as
    models of transformers find it, the rightmost that is no ``padding``, or the first column where
    all are. Raises DataError where that is in the padding of the row."""
    if padding is None:
        return [len(sample.columns) - 1 for sample in samples]
    columns = torch.arange(ids.shape[1], device=ids.device)
    chosen = torch.where(ids == padding, 0, columns).max(dim=1).values.tolist()
    places = list[int]()
    for sample in samples:
        place = (sample.columns == chosen[sample.row]).nonzero()
        if not len(place):
            raise DataError(
                f"row {sample.row} of a batch",
                got=f"its score at column {chosen[sample.row]}, which is padding",
                wanted=f"padding of {padding}, the model's pad_token_id, after the last token",
                hint="pad by the data collator with the token that the model's config names",
            )
        places.append(int(place))
    return places


@dataclass(frozen=True, kw_only=True, eq=False)
class _ScoredToken(Outcome):
    """The outputs of a reward model for a batch: ``leaf`` [b] is the score of each sample, that of
    the token at its place in ``places``."""

    places: list[int]

    def gradients(self) -> list[torch.Tensor]:
        """For each sample the gradient of the loss by the score of each of its tokens, [n]: only
        that of one token is not 0."""
        gradients = list[torch.Tensor]()
        for at, (sample, place) in enumerate(zip(self.samples, self.places, strict=True)):
            gradient = torch.zeros(len(sample.columns))
            if self.leaf.grad is not None:
                gradient[place] = self.leaf.grad[at]
            gradients.append(gradient)
        return gradients

    def given(self) -> list[dict[str, torch.Tensor]]:
        """The samples as :meth:`Attached.backward` takes them: the fields of each by name."""
        return [_unlabelled(sample) for sample in self.samples]


def _unlabelled(sample: RowSample) -> dict[str, torch.Tensor]:
    """The fields of a sample with labels of zeros, which are not used, but which a run requires."""
    return without_labels(sample.fields["input_ids"], sample.fields)


def without_labels(ids: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The fields of a sample with tokens ``ids`` [n] and labels of zeros, which are not used."""
    return {**fields, "input_ids": ids, "labels": torch.zeros_like(ids)}


def scores_by_token(outputs: torch.Tensor, micro: Any) -> torch.Tensor:
    """The score of each local token, [1, s_r], in single precision."""
    return outputs[..., 0].float()
