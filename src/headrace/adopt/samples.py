"""Items of a user's data set as tensors, for models of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from headrace.adopt.labels import Labels, predicted
from headrace.adopt.spread_model import Item
from headrace.errors import DataError
from headrace.ops.loss import IGNORED

__all__ = ["LabelPlace", "TokenReader", "is_numbers", "is_value", "packed", "sample_of"]


LabelPlace = Literal["first", "last"]
"""The token of a sample that has the sample's label."""


@dataclass(slots=True, kw_only=True)
class TokenReader:
    """Makes samples, tensors of tokens by name, of the items of a data set.

    Attributes:
        tokens: The field with token ids.
        kind: Whether the model predicts the label of the ``next`` or of the ``same`` place.
        label_name: The field with labels.
        label_place: Which token has the label of a sample with a single one; None where samples
            must have one label for each token.
        fields: The fields of the first item that was read, which all others must have.
    """

    tokens: str
    kind: Labels
    label_name: str = "labels"
    label_place: LabelPlace | None = None
    fields: frozenset[str] | None = None

    def read(self, item: Any, what: str) -> Item:
        """The tensors [n, ...] of an item by name, without padding, with labels at the places that
        predict them; ``what`` names the item in errors. Raises DataError for items without tokens,
        with labels that are not of its tokens, with values that are neither of tokens nor of
        samples, or with other fields than the first."""
        if isinstance(item, Mapping) and self.label_name in item and self.label_name != "labels":
            item = {("labels" if k == self.label_name else k): v for k, v in item.items()}
        found = sample_of(item, self.tokens, self.kind, what, label_place=self.label_place)
        # Labels that were made of the tokens are no field of a mapping.
        names = item if isinstance(item, Mapping) else found
        fields = frozenset(name for name in names if name in found)
        if self.fields is None:
            self.fields = fields
        elif self.fields != fields:
            raise DataError(
                f"fields of {what}",
                got=", ".join(sorted(fields)),
                wanted=f"{', '.join(sorted(self.fields))}, as of the first item",
                hint="every item has the same columns",
            )
        return found

    def forget_fields(self) -> None:
        """Let the samples that follow have other fields than those before."""
        self.fields = None

    def length(self, sample: Item) -> int:
        """How many tokens a sample has."""
        return len(sample[self.tokens])


def sample_of(
    item: Any, tokens: str, kind: Labels, what: str, *, label_place: LabelPlace | None = None
) -> Item:
    """An item of a data set as tensors [n, ...] by name, without padding. The item is a mapping,
    a pair (tokens, labels), or tokens alone, which are their own labels where the model predicts
    the next token. A value of the whole sample is repeated for each of its tokens. Labels are
    moved to the places that predict them; a single label of the sample stays at the token that
    ``label_place`` says. ``what`` names the item in errors.

    Raises DataError for items without tokens, for labels that are not of the tokens, and for values
    that are neither of tokens nor of the sample.
    """
    if not isinstance(item, Mapping):
        pair = item if isinstance(item, tuple) else (item,)
        item = dict(zip((tokens, "labels"), pair, strict=False))
    if tokens not in item:
        raise DataError(
            what,
            got=f"fields {', '.join(map(str, item)) or 'none'}",
            wanted=f"a field {tokens!r}",
            hint="say which field has the token numbers: samples=hr.SampleOptions(tokens=...)",
        )
    found = {name: torch.as_tensor(x) for name, x in item.items() if is_value(x)}
    if tokens not in found or found[tokens].dim() != 1 or not len(found[tokens]):
        shape = list(found[tokens].shape) if tokens in found else type(item[tokens]).__name__
        raise DataError(
            f"{tokens} of {what}",
            got=f"shape {shape}",
            wanted="[n], n >= 1",
            hint="an item is one sample: a DataLoader gives single ones with batch_size=None",
        )
    count = len(found[tokens])
    labels, of_sample = _labels(item, found, count, tokens, kind, what, label_place)
    for name, value in found.items():
        if not value.dim():
            found[name] = value.repeat(count)
        elif len(value) != count:
            raise DataError(
                f"{name} of {what}",
                got=f"shape {list(value.shape)}",
                wanted=f"[{count}, ...], a value of each token, or one number of the sample",
                hint="leave out the columns that the loop does not use",
            )
    mask = found.pop("attention_mask", None)
    if mask is not None:  # drop padding
        found = {name: x[mask != 0] for name, x in found.items()}
        labels = labels[mask != 0]
        if not len(labels):
            raise DataError(f"attention_mask of {what}", got="zeros alone", wanted="some ones")
    if of_sample:
        place = 0 if label_place == "first" else len(labels) - 1
        found["labels"] = torch.full_like(labels, IGNORED)
        found["labels"][place] = labels[place]
    else:
        found["labels"] = predicted(labels[None], kind)[0]
    return found


def _labels(
    item: Mapping[Any, Any],
    found: Item,
    count: int,
    tokens: str,
    kind: Labels,
    what: str,
    place: LabelPlace | None,
) -> tuple[torch.Tensor, bool]:
    """(labels [count] int64 of an ``item`` with ``count`` tokens, whether these are a single label
    of the sample, repeated for each token). The labels are removed from ``found``, the item's
    tensors by name. Where the item has none, the token ids are the labels for a model that predicts
    the next token. Raises DataError for labels of another shape."""
    given = found.pop("labels", None)
    if "labels" not in item:
        if kind == "next":
            return found[tokens].long(), False
        raise DataError(
            f"labels of {what}",
            got="none",
            wanted=f"[{count}], one for each token",
            hint="a model that predicts the next token learns from tokens alone: say "
            'samples=hr.SampleOptions(labels="next")',
        )
    if given is not None and given.numel() == 1 and (count > 1 or not given.dim()):
        if place is None:
            raise DataError(
                f"labels of {what}",
                got="one for the sample",
                wanted=f"[{count}], one for each token",
                hint="say which token has a sample's label: "
                'samples=hr.SampleOptions(label_place="last"), or "first"',
            )
        return given.reshape(1).expand(count).long(), True
    if given is None or given.dim() != 1 or len(given) != count:
        raise DataError(
            f"labels of {what}",
            got="no numbers" if given is None else f"shape {list(given.shape)}",
            wanted=f"[{count}], one for each token",
            hint="shift none by hand; IGNORED (-100) is where there is no loss",
        )
    return given.long(), False


def packed(samples: Sequence[Item]) -> Item:
    """The samples, each with tensors [n, ...] by name, one after another in a single row: tensors
    [1, t, ...] by name. Position ids start at 0 in each sample where the samples have none."""
    row = {name: torch.cat([sample[name] for sample in samples])[None] for name in samples[0]}
    if "position_ids" not in row:
        counts = [torch.arange(len(sample["labels"])) for sample in samples]
        row["position_ids"] = torch.cat(counts)[None]
    return row


def is_value(value: Any) -> bool:
    """Whether a field of an item is a number, a list of numbers, or a tensor."""
    return is_numbers(value) or isinstance(value, int | float | np.number)


def is_numbers(value: Any) -> bool:
    """Whether a field of an item is a tensor, an array or a list of numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return True
    filled = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return filled and isinstance(value[0], int | float | bool)
