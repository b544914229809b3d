"""Items of a user's data set as tensors, for models of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.adopt.labels import Labels, predicted
from headrace.adopt.spread_model import Item
from headrace.errors import DataError

__all__ = ["TokenReader", "is_numbers", "packed", "sample_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReader:
    """Reads items whose field ``tokens`` has token ids, with labels of the kind ``kind``."""

    tokens: str
    kind: Labels
    label_name: str = "labels"

    def read(self, item: Any, what: str) -> Item:
        """The tensors of an item: tokens, labels and other fields."""
        if isinstance(item, Mapping) and self.label_name in item and self.label_name != "labels":
            item = {("labels" if k == self.label_name else k): v for k, v in item.items()}
        return sample_of(item, self.tokens, self.kind, what)

    def length(self, sample: Item) -> int:
        """The number of tokens of a sample."""
        return len(sample[self.tokens])


def sample_of(item: Any, tokens: str, kind: Labels, what: str) -> Item:
    """An item of a data set as tensors [n, ...] without padding; it is a mapping, (tokens, labels),
    or tokens. Labels (the tokens themselves where there are none) are shifted to the places that
    predict them. Raises DataError for other items."""
    if not isinstance(item, Mapping):
        pair = item if isinstance(item, tuple) else (item,)
        item = dict(zip((tokens, "labels"), pair, strict=False))
    if tokens not in item:
        raise DataError(
            what,
            got=f"fields {', '.join(map(str, item)) or 'none'}",
            wanted=f"a field {tokens!r}",
            hint="say which field has the token numbers: tokens=...",
        )
    found = {name: torch.as_tensor(value) for name, value in item.items() if is_numbers(value)}
    count = len(found[tokens]) if found[tokens].dim() == 1 else 0
    if not count:
        raise DataError(
            f"{tokens} of {what}", got=f"shape {list(found[tokens].shape)}", wanted="[n], n >= 1"
        )
    given = found.get("labels")
    if "labels" in item and (given is None or given.dim() != 1 or len(given) != count):
        raise DataError(
            f"labels of {what}",
            got="no numbers" if given is None else f"shape {list(given.shape)}",
            wanted=f"[{count}], one for each token",
            hint="shift none by hand; IGNORED (-100) is where there is no loss",
        )
    found = {name: x for name, x in found.items() if x.dim() and len(x) == count}
    mask = found.pop("attention_mask", None)
    if mask is not None:
        found = {name: x[mask != 0] for name, x in found.items()}
    labels = found.pop("labels", found[tokens]).long()
    found["labels"] = predicted(labels[None], kind)[0]
    return found


def packed(samples: Sequence[Item]) -> Item:
    """Samples concatenated in one row [1, t, ...], with position ids that start at 0 in each."""
    row = {name: torch.cat([sample[name] for sample in samples])[None] for name in samples[0]}
    if "position_ids" not in row:
        counts = [torch.arange(len(sample["labels"])) for sample in samples]
        row["position_ids"] = torch.cat(counts)[None]
    return row


def is_numbers(value: Any) -> bool:
    """Whether a field of an item is a tensor, or several numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return True
    plain = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return plain and isinstance(value[0], int | float | bool)
