"""Samples of a user's data set: their lengths, and their tokens when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import DataError
from headrace.loop.model import Item, SampleReader
from headrace.passes.labels import Labels, predicted

__all__ = ["LengthSource", "Samples", "TokenReader", "is_numbers", "packed", "sample_of"]

LengthSource = Sequence[int] | NDArray[Any] | str | Callable[[Any], int] | None
"""Lengths in tokens: a number for each item, the name of a column, a function of an item, or
nothing, where every item is read once to count its tokens."""

_COLUMNS = ("length", "lengths", "num_tokens")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """A map-style data set whose items have ``lengths`` [n] tokens; what a sampler asks of a
    corpus, and :meth:`read`."""

    dataset: Any
    lengths: NDArray[np.int64]
    reader: SampleReader
    name: str
    fingerprint: str

    @classmethod
    def of(cls, dataset: Any, lengths: LengthSource, reader: SampleReader) -> Samples:
        """Look at a data set. Raises DataError for one without items or with lengths that cannot
        be its own."""
        count = len(dataset)
        found = np.asarray(_lengths(dataset, lengths, reader), dtype=np.int64).reshape(-1)
        if not count or len(found) != count:
            raise DataError(
                "lengths of the data set",
                got=f"{len(found):,} of {count:,} items",
                wanted="one for each item, in tokens",
            )
        if found.min() < 1:
            at = int(found.argmin())
            raise DataError(f"length of item {at}", got=int(found[at]), wanted=">= 1 token")
        digest = hashlib.sha256(found.tobytes()).hexdigest()
        return cls(
            dataset=dataset,
            lengths=found,
            reader=reader,
            name=type(dataset).__name__,
            fingerprint=digest,
        )

    def read(self, index: int) -> Item:
        """One sample. Raises DataError when it is not as long as was said."""
        item = self.reader.read(self.dataset[index], f"item {index}")
        have, told = self.reader.length(item), int(self.lengths[index])
        if have != told:
            raise DataError(
                f"item {index} of {self.name}",
                got=f"{have} tokens",
                wanted=f"{told}, as its length says",
                hint="lengths count the tokens of an item without padding",
            )
        return item


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReader:
    """Reads items with token numbers in the field ``tokens``, and labels of a ``kind``."""

    tokens: str
    kind: Labels
    label_name: str = "labels"

    def read(self, item: Any, what: str) -> Item:
        """Its tokens and labels."""
        if isinstance(item, Mapping) and self.label_name in item and self.label_name != "labels":
            item = {("labels" if k == self.label_name else k): v for k, v in item.items()}
        return sample_of(item, self.tokens, self.kind, what)

    def length(self, sample: Item) -> int:
        """Its tokens."""
        return len(sample[self.tokens])


def sample_of(item: Any, tokens: str, kind: Labels, what: str) -> Item:
    """An item of a data set as tensors [n, ...] without padding: a mapping, (tokens, labels), or
    tokens. Labels, the tokens themselves where there are none, are moved to the places that predict
    them. Raises DataError for other things."""
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
    found = {name: x for name, x in found.items() if x.dim() and len(x) == count}
    mask = found.pop("attention_mask", None)
    if mask is not None:
        found = {name: x[mask != 0] for name, x in found.items()}
    labels = found.pop("labels", found[tokens]).long()
    found["labels"] = predicted(labels[None], kind)[0]
    return found


def packed(samples: Sequence[Item]) -> Item:
    """Samples in one row [1, t, ...], with places that begin again at 0 with each."""
    row = {name: torch.cat([sample[name] for sample in samples])[None] for name in samples[0]}
    if "position_ids" not in row:
        counts = [torch.arange(len(sample["labels"])) for sample in samples]
        row["position_ids"] = torch.cat(counts)[None]
    return row


def _lengths(dataset: Any, lengths: LengthSource, reader: SampleReader) -> Any:
    if lengths is None:
        names = getattr(dataset, "column_names", None) or ()
        lengths = next((name for name in _COLUMNS if name in names), None)
    if isinstance(lengths, str):
        try:
            return list(dataset[lengths])
        except (KeyError, IndexError, TypeError, ValueError):
            raise DataError(
                "lengths of the data set", got=f"no column {lengths!r}", wanted="a column of it"
            )
    if callable(lengths):
        return [lengths(dataset[i]) for i in range(len(dataset))]
    if lengths is not None:
        return lengths
    return [reader.length(reader.read(dataset[i], f"item {i}")) for i in range(len(dataset))]


def is_numbers(value: Any) -> bool:
    """Whether a field of an item is a tensor, or several numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return True
    plain = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return plain and isinstance(value[0], int | float | bool)
