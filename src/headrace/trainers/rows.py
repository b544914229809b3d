"""Rows of a collated batch as samples, and what a model made of samples as rows again.

Shape legend: a batch of b rows of S columns; a sample has n of the columns of one row.

    collator([item])    one row, perhaps of several documents, with padding
    samples_of(batch)   its samples: the columns of each document, without padding
    columns_of(values)  values [n, ...] of samples at their columns, [b, S, ...]
    rows_of(samples)    a row for each sample, with padding behind it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.adopt.placement import documents_of
from headrace.errors import DataError
from headrace.ops.loss import IGNORED

__all__ = ["RowSample", "columns_of", "rows_of", "samples_of"]

_DERIVED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""Fields that say where the documents of a row end, as position ids do too; they are left out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSample:
    """One document of a batch.

    Attributes:
        row: The row that it is in.
        columns: Its columns there, [n], in their order.
        fields: Its values, [n, ...] each.
    """

    row: int
    columns: torch.Tensor
    fields: dict[str, torch.Tensor]


def samples_of(batch: Mapping[str, Any], tokens: str, what: str) -> list[RowSample]:
    """The samples of a collated batch: the documents of its rows, without padding. Documents whose
    first token has a label stay in one sample, as the token before predicts it.

    ``tokens`` is the name of the field with token numbers [b, S], ``what`` that of the batch in
    errors. Raises DataError for a batch without this field, for a field that has not a value of
    each token, and for a mask that hides more than padding on either side of a row.
    """
    ids = batch.get(tokens)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise DataError(
            f"{what} as the data collator gives it",
            got=f"fields {', '.join(map(str, batch))}",
            wanted=f"{tokens} [b, S]",
        )
    if not ids.shape[1]:  # an item without tokens
        return []
    mask = batch.get("attention_mask")
    fields = dict[str, torch.Tensor]()
    for name, value in batch.items():
        if name in _DERIVED or name == "attention_mask" or value is None:
            continue
        fits = isinstance(value, torch.Tensor) and value.shape[:2] == ids.shape
        if not fits:
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise DataError(
                f"{name} of {what}",
                got=f"shape {shape}" if isinstance(shape, list) else shape,
                wanted=f"[b, S, ...] as {tokens}: a value of each token",
                hint="leave out the columns that the model does not use",
            )
        fields[name] = value
    if mask is not None and mask.shape != ids.shape:
        raise DataError(
            f"attention_mask of {what}", got=f"shape {list(mask.shape)}", wanted="[b, S]"
        )
    if mask is not None:
        documents_of({tokens: ids, "attention_mask": mask}, tokens)  # raises where it has holes
    samples = list[RowSample]()
    for row in range(len(ids)):
        kept = torch.arange(ids.shape[1]) if mask is None else mask[row].nonzero()[:, 0].cpu()
        for columns in _documents(fields, row, kept):
            values = {k: v[row, columns.to(v.device)] for k, v in fields.items()}
            samples.append(RowSample(row=row, columns=columns, fields=values))
    return samples


def _documents(
    fields: Mapping[str, torch.Tensor], row: int, kept: torch.Tensor
) -> Sequence[torch.Tensor]:
    """The columns of each document of a row, of those that are ``kept``, which are not padding. A
    document begins where position ids begin at 0 again; without them the row is one document."""
    positions, labels = fields.get("position_ids"), fields.get("labels")
    if positions is None or len(kept) < 2:
        return [kept] if len(kept) else []
    starts = (positions[row].cpu()[kept] == 0).nonzero()[:, 0]
    starts = starts[starts > 0]
    # A first token with a label is predicted by the document before: they cannot be separated.
    if labels is not None and bool((labels[row].cpu()[kept[starts]] != IGNORED).any()):
        return [kept]
    return torch.tensor_split(kept, starts)


def columns_of(
    values: Sequence[torch.Tensor], samples: Sequence[RowSample], shape: tuple[int, int]
) -> torch.Tensor:
    """A batch [b, S, ...] with the values [n, ...] of each sample at its columns, and zeros
    elsewhere; ``shape`` is (b, S)."""
    out = values[0].new_zeros(*shape, *values[0].shape[1:])
    for value, sample in zip(values, samples, strict=True):
        out[sample.row, sample.columns.to(out.device)] = value
    return out


def rows_of(samples: Sequence[RowSample]) -> dict[str, torch.Tensor]:
    """The fields of samples in a row each, [b, S, ...], with padding behind them and an attention
    mask."""
    counts = [len(sample.columns) for sample in samples]
    shape = (len(samples), max(counts))
    moved = [
        RowSample(row=at, columns=torch.arange(count), fields=sample.fields)
        for at, (sample, count) in enumerate(zip(samples, counts, strict=True))
    ]
    found = {
        name: columns_of([sample.fields[name] for sample in moved], moved, shape)
        for name in moved[0].fields
    }
    mask = (torch.arange(shape[1]) < torch.tensor(counts)[:, None]).to(found["input_ids"])
    found["attention_mask"] = mask
    if "labels" in found:
        found["labels"] = found["labels"].masked_fill(mask == 0, IGNORED)
    return found
