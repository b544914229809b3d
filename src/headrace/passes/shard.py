"""Shards of batches: a rank's tokens of every row, with what they need to know of the whole.

Shape legend: a batch of b rows of S tokens; s_r of every row on rank r.

Sliced outside the model, tokens keep what a slice alone would lose: their places, the label of the
token after a border, which document they are of, and how many tokens of all ranks have a loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.errors import DataError, SpecError
from headrace.passes.labels import Labels, predicted
from headrace.passes.placement import Placement

__all__ = [
    "LocalBatch",
    "declared_places",
    "documents_of",
    "fingerprint",
    "local_inputs",
    "require_tokens",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalBatch:
    """This rank's part of a batch: what the model is given, labels [b, s_r] with a loss, one for
    each place, and where the tokens are."""

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None
    placement: Placement

    @property
    def targets(self) -> int:
        """Tokens of the step that have a loss, those of other ranks too; 0 where nobody knows."""
        return self.placement.targets or 0


def require_tokens(batch: Mapping[str, torch.Tensor], tokens: str) -> None:
    """Raise SpecError without token numbers, and DataError for tensors that are not of tokens."""
    if tokens not in batch or batch[tokens].dim() != 2:
        raise SpecError("batch", got=", ".join(batch) or "nothing", wanted=f"{tokens} [b, S]")
    rows, width = batch[tokens].shape
    for name, value in batch.items():
        one = name == "position_ids" and tuple(value.shape) == (1, width)
        if tuple(value.shape[:2]) != (rows, width) and not one:
            raise DataError(
                f"input {name}",
                got=f"{list(value.shape)}",
                wanted=f"[{rows}, {width}, ...]",
                hint="inputs have one value for each token; others are for the model itself",
            )


def documents_of(batch: Mapping[str, torch.Tensor], tokens: str) -> tuple[tuple[int, ...], ...]:
    """The lengths of the documents of every row: places that begin again at 0 begin one, and
    padding is one of its own. Raises DataError for masks that are no padding."""
    rows, width = batch[tokens].shape
    begins = np.zeros((rows, width), dtype=bool)
    begins[:, 0] = True
    mask = batch.get("attention_mask")
    if mask is not None:
        if mask.dim() != 2:
            raise DataError(
                "attention_mask",
                got=f"{list(mask.shape)}",
                wanted=f"{[rows, width]}, 1 or 0",
                hint="documents are told by position_ids that begin again at 0",
            )
        seen = mask.cpu().numpy() != 0
        change = seen[:, 1:] != seen[:, :-1]
        if ((seen[:, 1:] & change).sum(axis=1) + seen[:, 0] > 1).any():
            raise DataError(
                "attention_mask",
                got="ones on both sides of zeros",
                wanted="one run of ones in every row",
                hint="only padding is masked",
            )
        begins[:, 1:] |= change
    places = batch.get("position_ids")
    if places is not None:
        wide = np.broadcast_to(places.cpu().numpy(), (rows, width))
        begins[:, 1:] |= np.diff(wide, axis=1) != 1
    return tuple(tuple(np.diff([*np.flatnonzero(row).tolist(), width]).tolist()) for row in begins)


def declared_places(batch: Mapping[str, torch.Tensor]) -> np.ndarray | None:
    """[S] the places that a batch gives its tokens, for models that count tokens themselves; None
    where it gives none. Raises DataError where rows differ."""
    places = batch.get("position_ids")
    if places is None:
        return None
    if not bool((places == places[:1]).all()):
        raise DataError(
            "position_ids",
            got="rows that differ",
            wanted="the same in every row",
            hint="the model does not take position_ids: it counts the tokens of all rows alike",
        )
    return places[0].cpu().numpy()


def local_inputs(
    batch: Mapping[str, torch.Tensor],
    tokens: str,
    placement: Placement,
    kind: Labels,
    *,
    first: int | None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """(what the model is given, labels of the local places); with ``position_ids`` from ``first``
    where the model takes them."""
    rows = batch[tokens].shape[0]
    index = torch.from_numpy(placement.index()).to(batch[tokens].device)
    found: dict[str, torch.Tensor] = {}
    labels: torch.Tensor | None = None
    for name, value in batch.items():
        if name == "labels":
            labels = predicted(value, kind).index_select(1, index)
        elif name != "attention_mask" and (name != "position_ids" or first is not None):
            found[name] = value.index_select(1, index)
    if first is not None and "position_ids" not in found:
        found["position_ids"] = (index + first)[None].repeat(rows, 1)
    return found, labels


def fingerprint(batch: Mapping[str, torch.Tensor], extra: Sequence[object]) -> str:
    """A hash of what ranks of a group must see alike."""
    digest = hashlib.blake2b(repr([sorted(batch), *extra]).encode(), digest_size=16)
    for name in sorted(batch):
        digest.update(f"{list(batch[name].shape)} {batch[name].dtype}".encode())
        digest.update(batch[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
