"""Items of a user's data set as tensors, for models of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.adopt.labels import Labels, predicted
from headrace.adopt.placement import require_documents
from headrace.adopt.spread_model import Item
from headrace.errors import DataError
from headrace.ops.loss import IGNORED

__all__ = ["LabelPlace", "TokenReader", "named_labels", "numbers_of", "packed", "sample_of"]


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

    def read(self, item: Any, what: str, *, labelled: bool = True) -> Item:
        """The tensors [n, ...] of an item by name, without padding, with labels at the places that
        predict them; ``what`` names the item in errors. An item that need not be ``labelled``
        and has no labels gets its tokens, or IGNORED where the model predicts the same place.
        Raises DataError for items without tokens, without the labels that ``label_name``
        names, with labels that are not of its tokens, with values that are neither of tokens nor of
        samples, or with other fields than the first."""
        if isinstance(item, Mapping):
            item = named_labels(item, self.label_name, what)
            if labelled and self.label_name != "labels" and "labels" not in item:
                raise DataError(
                    f"fields of {what}",
                    got=", ".join(map(str, item)),
                    wanted=f"a field {self.label_name!r} with labels",
                )
            if not labelled and self.kind == "same" and "labels" not in item:
                item = {**item, "labels": _ignored(item.get(self.tokens))}
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
    whose texts and other things that are no numbers are left out, a pair (tokens, labels), or
    tokens alone, which are their own labels where the model predicts the next token. A value of the
    whole sample is repeated for each of its tokens. Labels are moved to the places that predict
    them; a single label of the sample stays at the token that ``label_place`` says. ``what`` names
    the item in errors.

    Raises DataError for items without tokens, for labels that are not of the tokens, for values
    that are neither of tokens nor of the sample, and for masks of more than padding.
    """
    if not isinstance(item, Mapping):
        values = item if isinstance(item, tuple) else (item,)
        if len(values) > 2:
            raise DataError(
                what,
                got=f"a tuple of {len(values)}",
                wanted=f"(tokens, labels), or a dict such as {{{tokens!r}: ..., 'labels': ...}}",
                hint="which of them are labels cannot be seen",
            )
        item = dict(zip((tokens, "labels"), values, strict=False))
    if tokens not in item:
        raise DataError(
            what,
            got=f"fields {', '.join(map(str, item)) or 'none'}",
            wanted=f"a field {tokens!r}",
            hint="say which field has the token numbers: samples=hr.SampleOptions(tokens=...)",
        )
    read = {name: numbers_of(value, f"{name} of {what}") for name, value in item.items()}
    found = {name: value for name, value in read.items() if value is not None}
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
    if "position_ids" in found and found["position_ids"].dim() == 1:
        require_documents(found, what)
    mask = found.pop("attention_mask", None)
    if mask is not None:  # drop padding
        kept = _kept_by_mask(mask, what)
        found = {name: x[kept] for name, x in found.items()}
        labels = labels[kept]
    if of_sample:
        place = 0 if label_place == "first" else len(labels) - 1
        found["labels"] = torch.full_like(labels, IGNORED)
        found["labels"][place] = labels[place]
    else:
        found["labels"] = predicted(labels[None], kind)[0]
    return found


def _kept_by_mask(mask: torch.Tensor, what: str) -> torch.Tensor:
    """Whether each token is no padding, [n], by the attention mask of an item. Raises DataError for
    a mask that says more than which tokens on either side are padding."""
    got = f"shape {list(mask.shape)}"
    if mask.dim() == 1:
        kept = mask != 0
        runs = int(kept[0]) + int((kept[1:] & ~kept[:-1]).sum())
        if runs == 1:
            return kept
        got = "ones on both sides of zeros" if runs else "zeros alone"
    raise DataError(
        f"attention_mask of {what}",
        got=got,
        wanted=f"[{len(mask)}], one run of ones: some ones, and zeros for padding on either side",
        hint="only padding is masked; documents are told by position_ids that begin again at 0",
    )


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
    if given is not None and given.is_floating_point() and not torch.equal(given, given.trunc()):
        raise DataError(
            f"labels of {what}",
            got="fractions",
            wanted="whole numbers: classes, or IGNORED (-100)",
            hint="give values to be fitted as a column of another name: it comes in micro.rest, "
            "and labels say which tokens have a loss",
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


def named_labels(
    values: Mapping[str, Any], label_name: str, what: str = "the batch"
) -> dict[str, Any]:
    """A copy of ``values`` in which the labels, which stand under ``label_name``, are called
    ``labels``. Raises DataError where there is another field of that name; ``what`` names the
    values."""
    if label_name != "labels" and label_name in values and "labels" in values:
        raise DataError(
            f"fields of {what}",
            got=f"{label_name!r}, which has the labels, and 'labels'",
            wanted="one field with labels",
            hint="leave out the other column, or give it another name",
        )
    return {("labels" if name == label_name else name): x for name, x in values.items()}


def _ignored(tokens: Any) -> list[int]:
    """Labels without a loss for each of ``tokens``; none where these are no list of numbers."""
    return [IGNORED] * len(tokens) if hasattr(tokens, "__len__") else []


def numbers_of(value: Any, what: str) -> torch.Tensor | None:
    """A field of an item as a tensor: a number, an array or a tensor, or a list of these that may
    be nested. None for texts and other things that are no numbers, and for empty lists. ``what``
    names the field in errors. Raises DataError for lists whose parts differ in size."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return _of_array(value)
    leaf = value
    while isinstance(leaf, Sequence) and not isinstance(leaf, str | bytes) and len(leaf):
        leaf = leaf[0]
    if not isinstance(leaf, int | float | np.generic | np.ndarray | torch.Tensor):
        return None
    try:
        if isinstance(leaf, torch.Tensor):
            return _stacked(value)
        found = _of_array(np.asarray(value))
    except (ValueError, RuntimeError):
        found = None
    if found is None and isinstance(value, Sequence):
        raise DataError(
            what,
            got="lists of several lengths, or of numbers and other things",
            wanted="numbers, or lists of equal length",
            hint="leave out the columns that the loop does not use",
        )
    # Numbers of Python are of torch's default type, as in torch.tensor.
    return (
        found.to(torch.get_default_dtype()) if type(leaf) is float and found is not None else found
    )


def _stacked(value: Any) -> torch.Tensor:
    """Nested lists of tensors of one shape as one tensor."""
    return value if isinstance(value, torch.Tensor) else torch.stack([_stacked(x) for x in value])


def _of_array(array: NDArray[Any]) -> torch.Tensor | None:
    """An array of numbers or truth values as a tensor; None for other arrays. Unsigned numbers, for
    which torch has few operators, become signed where they fit."""
    wide = array.dtype.kind == "u" and array.itemsize > 1
    if wide and (array.itemsize < 8 or not (array > np.iinfo(np.int64).max).any()):
        array = array.astype(np.int64)
    return torch.as_tensor(array) if array.dtype.kind in "biuf" else None
