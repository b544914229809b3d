"""What costs, planners and the simulator ask of a model, native or anyone's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from headrace.errors import SpecError
from headrace.spec.given import number, whole

__all__ = ["HEAD_CHUNK_TOKENS", "ModelShape"]

HEAD_CHUNK_TOKENS = 2048
"""Tokens of a rank, or of ranks that share the vocabulary, whose logits are in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model of ``layers`` equal layers between an embedding and a head.

    Bucket 0 is the embedding, 1 to L are the layers, L + 1 is what follows them; a bucket is what
    is pulled and pushed at once. Of each bucket ``split_elements`` are elements of weights whose
    rows several ranks can share, ``whole_elements`` those that every rank at work holds whole;
    ``tied_elements`` of the embedding's serve the head as well. ``hidden`` features of a token
    travel from stage to stage. ``longest`` is the longest sequence in tokens that the model can
    take, None for no limit. ``tensor_ranks`` is the most ranks that can share a layer's weights,
    ``attention_share`` the attention's share of a layer's elements. ``name`` describes the model
    in a line, ``fingerprint`` tells it from others: ``key=value`` joined by ``"; "``.
    """

    name: str
    layers: int
    hidden: int
    split_elements: tuple[int, ...]
    whole_elements: tuple[int, ...]
    tied_elements: int = 0
    longest: int | None = None
    tensor_ranks: int = 1
    attention_share: float = 0.5
    fingerprint: str = ""
    elements: int = field(init=False, repr=False, compare=False)
    bucket_shares: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the elements of the whole model and each bucket's share of them; raises SpecError
        for counts out of range."""
        for name in ("layers", "hidden", "tensor_ranks"):
            whole(f"{name} of a model", getattr(self, name), least=1)
        for counts in (self.split_elements, self.whole_elements):
            if len(counts) != self.bucket_count:
                raise SpecError(
                    "elements of a model", got=counts, wanted=f"{self.bucket_count} counts"
                )
        for count in (*self.split_elements, *self.whole_elements, self.tied_elements):
            whole("elements of a model", count)
        if self.longest is not None:
            whole("longest sequence of a model", self.longest, least=1)
        number("attention's share", self.attention_share, least=0, most=1)
        counts = [sum(pair) for pair in zip(self.split_elements, self.whole_elements, strict=True)]
        if not sum(counts):
            raise SpecError("elements of a model", got=0, wanted=">= 1")
        object.__setattr__(self, "elements", sum(counts))
        object.__setattr__(self, "bucket_shares", tuple(count / sum(counts) for count in counts))

    @property
    def bucket_count(self) -> int:
        """Number of buckets of the model, those of the embedding, the layers and the end."""
        return self.layers + 2

    def held_share(self, buckets: Collection[int], parts: int) -> float:
        """The fraction of the model's elements that a rank holds to work in a stage of these
        ``buckets``, where ``parts`` ranks share the rows of a weight."""
        split = sum(self.split_elements[bucket] for bucket in buckets)
        if self.layers + 1 in buckets and 0 not in buckets:
            split += self.tied_elements  # the head of the last stage needs the embedding's table
        whole = sum(self.whole_elements[bucket] for bucket in buckets)
        return (split / parts + whole) / self.elements

    def __str__(self) -> str:
        return self.name

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.init}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return {**values, **lists}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelShape:
        """The inverse of :meth:`to_json`. Raises SpecError when it is malformed."""
        known: dict[str, Any] = dict(value)
        try:
            for name in ("split_elements", "whole_elements"):
                known[name] = tuple(known[name])
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise SpecError("shape of a model", got=str(error), wanted="its JSON form")
