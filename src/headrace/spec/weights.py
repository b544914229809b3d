"""The weight table of an architecture: names, shapes, and how their rows may be cut.

[Note: one storage layout] Every matrix is stored with the dim that tensor methods split first, so
that every layout of it is a partition of its rows into intervals (ParaDySe, section "Unified
Tensor Layout"; methods of Ulysses' kind gather the same rows):

    qkv   [(n + 2 g) d, h]   KV-group-major: for each group its m query heads, then its k, its v
    proj  [n d, h]           rows are input features, in head order
    in    [f, h] or [2 f, h] SwiGLU: gate and up interleaved in blocks of B rows (Architecture)
    out   [f, h]             rows are input features
    embed, head [V, h]       rows are ids; positions and types alike
    head_dense  [h, h]       rows are output features

A *unit* is the number of rows that must stay together: a KV group, a gate/up block. ``unit=None``
says that a rank which works on the layer holds the weight whole (norms and biases). Of a layer
whose norms follow the sums, norm1 is the one after the attention, norm2 after the feed-forward.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from headrace.spec.architecture import Architecture
from headrace.spec.model_shape import ModelShape

__all__ = ["WeightSpec", "bucket_count", "buckets", "parameter_count", "shape_of", "weight_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One weight. ``bucket`` is the unit of pull and push: 0 the embedding, 1..L the layers,
    L + 1 what follows them: the last norm, the head. ``also`` is the bucket of another segment
    that works with it: a tied embedding is the head's matrix."""

    name: str
    shape: tuple[int, ...]
    unit: int | None
    bucket: int
    also: int | None = None

    def used_in(self, buckets: Collection[int]) -> bool:
        """Whether any of these segments works with it."""
        return self.bucket in buckets or self.also in buckets

    @property
    def rows(self) -> int:
        """Length of the first dim."""
        return self.shape[0]

    @property
    def row_elements(self) -> int:
        """Elements of one row (1 for vectors)."""
        return prod(self.shape[1:])

    @property
    def elements(self) -> int:
        """Elements of the whole weight."""
        return prod(self.shape)


def weight_table(architecture: Architecture) -> tuple[WeightSpec, ...]:
    """All weights of a model in order of their buckets."""
    a = architecture
    table: list[WeightSpec] = []

    def add(
        bucket: int, name: str, *shape: int, unit: int | None = None, also: int | None = None
    ) -> None:
        table.append(WeightSpec(name=name, shape=shape, unit=unit, bucket=bucket, also=also))

    def add_norm(bucket: int, name: str) -> None:
        add(bucket, f"{name}.weight", a.hidden)
        if a.biased:
            add(bucket, f"{name}.bias", a.hidden)

    end = a.layers + 1
    add(0, "embed.weight", a.vocabulary, a.hidden, unit=1, also=end if a.tied else None)
    if a.learned_positions:
        add(0, "positions.weight", a.positions, a.hidden, unit=1)
    if a.kind == "bert":
        add(0, "types.weight", 2, a.hidden, unit=1)
        add_norm(0, "embed_norm")
    group = (a.group_heads + 2) * a.head_features
    gates = 2 if a.gated else 1
    for layer in range(a.layers):
        bucket, at = layer + 1, f"layers.{layer}"
        add_norm(bucket, f"{at}.norm1")
        add(bucket, f"{at}.qkv.weight", a.kv_heads * group, a.hidden, unit=group)
        add(bucket, f"{at}.proj.weight", a.hidden, a.hidden, unit=a.group_heads * a.head_features)
        add_norm(bucket, f"{at}.norm2")
        add(bucket, f"{at}.in.weight", gates * a.ffn, a.hidden, unit=gates * a.ffn_block)
        add(bucket, f"{at}.out.weight", a.ffn, a.hidden, unit=a.ffn_block)
        if a.biased:
            add(bucket, f"{at}.qkv.bias", a.kv_heads * group)
            add(bucket, f"{at}.proj.bias", a.hidden)
            add(bucket, f"{at}.in.bias", gates * a.ffn)
            add(bucket, f"{at}.out.bias", a.hidden)
    if a.norm_first:
        add_norm(end, "norm")
    if a.masked:
        add(end, "head_dense.weight", a.hidden, a.hidden, unit=1)
        add(end, "head_dense.bias", a.hidden)
        add_norm(end, "head_norm")
        add(end, "head.bias", a.vocabulary)
    if not a.tied:
        add(end, "head.weight", a.vocabulary, a.hidden, unit=1)
    return tuple(table)


def bucket_count(architecture: Architecture) -> int:
    """Buckets of a model: embedding, layers, end."""
    return architecture.layers + 2


def buckets(architecture: Architecture) -> tuple[tuple[WeightSpec, ...], ...]:
    """The weight table grouped by bucket."""
    table = weight_table(architecture)
    return tuple(
        tuple(weight for weight in table if weight.bucket == bucket)
        for bucket in range(bucket_count(architecture))
    )


def parameter_count(architecture: Architecture) -> int:
    """Elements of all weights."""
    return sum(weight.elements for weight in weight_table(architecture))


@lru_cache(maxsize=64)
def shape_of(architecture: Architecture) -> ModelShape:
    """The shape of a model, its elements counted from its weight table."""
    a = architecture
    split, whole = [0] * bucket_count(a), [0] * bucket_count(a)
    for weight in weight_table(a):
        (whole if weight.unit is None else split)[weight.bucket] += weight.elements
    return ModelShape(
        name=str(a),
        layers=a.layers,
        hidden=a.hidden,
        split_elements=tuple(split),
        whole_elements=tuple(whole),
        tied_elements=a.vocabulary * a.hidden if a.tied else 0,
        longest=a.longest,
        tensor_ranks=a.tensor_ranks,
        attention_share=a.attention_share,
        fingerprint="; ".join(f"{name}={value}" for name, value in sorted(a.to_json().items())),
    )
