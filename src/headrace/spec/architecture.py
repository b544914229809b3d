"""What the planner and the methods know of a model: its shape, never its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from headrace.errors import SpecError, did_you_mean
from headrace.spec.given import of_kind
from headrace.spec.model_shape import ModelShape

__all__ = [
    "Architecture",
    "PRESETS",
    "WeightSpec",
    "bucket_count",
    "buckets",
    "parameter_count",
    "shape_of",
    "stored_shape",
    "weight_table",
]

_MOST = 2**31 - 1  # token ids have 32 bits, and no dimension is larger
_MOST_LAYERS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A Transformer of equal layers.

    The ``kind`` fixes the block: ``llama`` is RMSNorm, SwiGLU, rotary positions and no biases;
    ``gpt`` is LayerNorm, GELU (tanh), learned positions and biases; ``bert`` is the same with exact
    GELU and the norms after the residual sums, is bidirectional, and learns to guess masked tokens
    instead of the next one.

    Attributes:
        layers: Layers of the model.
        hidden: Features h of a token between layers.
        heads: Query heads n, each of d = h / n features.
        kv_heads: Key-value heads g: n for MHA, 1 for MQA.
        ffn: Features f of the feed-forward.
        vocabulary: Token ids, 0 to ``vocabulary - 1``.
        kind: The block, ``llama``, ``gpt`` or ``bert``.
        tied: Whether the head's matrix is the embedding's.
        causal: Whether a token sees only itself and earlier ones.
        positions: Tokens of the longest sequence that learned positions can take; unused by
            ``llama``.
        rope_theta: Base of the rotary positions of ``llama``.
        norm_eps: What norms add to a mean square or variance.
        dropout: The fraction that is dropped, 0 <= dropout < 1.
        mask_id: The token that stands in the place of masked ones, for ``bert``.
        gate_block: Rows of a block, where blocks of gate and up are interleaved; as many as
            :attr:`ffn_block` chooses when left out. Weights that were stored may need others.

    Raises:
        SpecError: For numbers out of range, and for values that contradict each other.

    Example:
        >>> hr.Architecture.preset("gpt2").longest
        1024
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    kind: Literal["llama", "gpt", "bert"] = "llama"
    tied: bool = True
    causal: bool = True
    positions: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    mask_id: int | None = None
    gate_block: int | None = None

    def __post_init__(self) -> None:
        """Raise SpecError for sizes out of range, heads that do not divide the features, or fields
        that do not fit the kind."""
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary"):
            value, most = getattr(self, name), _MOST_LAYERS if name == "layers" else _MOST
            if not isinstance(value, int) or not 1 <= value <= most:
                raise SpecError(f"model.{name}", got=repr(value), wanted=f">= 1, at most {most:,}")
        if self.kind not in ("llama", "gpt", "bert"):
            raise SpecError("model.kind", got=repr(self.kind), wanted="'llama', 'gpt' or 'bert'")
        if self.hidden % self.heads:
            raise SpecError("model.hidden", got=self.hidden, wanted=f"a multiple of {self.heads}")
        if self.heads % self.kv_heads:
            raise SpecError("model.heads", got=self.heads, wanted=f"a multiple of {self.kv_heads}")
        if self.kind == "llama" and self.head_features % 2:
            raise SpecError("features of a head", got=self.head_features, wanted="an even number")
        if self.learned_positions and self.positions < 1:
            wanted = f">= 1 for kind '{self.kind}'"
            raise SpecError("model.positions", got=self.positions, wanted=wanted)
        self._check_objective()
        block = 1 if self.gate_block is None else self.gate_block
        if block < 1 or self.ffn % block:
            wanted = f"a divisor of {self.ffn}"
            raise SpecError("rows of a gate's block", got=block, wanted=wanted)
        if not 0 <= self.dropout < 1:
            raise SpecError("model.dropout", got=self.dropout, wanted="0 <= dropout < 1")

    def _check_objective(self) -> None:
        """Raise SpecError unless ``bert`` has the id of a mask token and sees both sides, and other
        kinds have no mask token."""
        if not self.masked:
            if self.mask_id is not None:
                wanted = f"none for kind '{self.kind}'"
                raise SpecError("model.mask_id", got=self.mask_id, wanted=wanted)
            return
        if self.causal:
            hint = "a token is guessed from both sides"
            raise SpecError("model.causal", got=True, wanted="False for kind 'bert'", hint=hint)
        if self.mask_id is None or not 0 <= self.mask_id < self.vocabulary:
            got = "none" if self.mask_id is None else self.mask_id
            wanted = f"an id below {self.vocabulary} for kind 'bert'"
            raise SpecError("model.mask_id", got=got, wanted=wanted)

    @property
    def head_features(self) -> int:
        """d, the features of one head."""
        return self.hidden // self.heads

    @property
    def group_heads(self) -> int:
        """m = n / g, the query heads that share one key-value head."""
        return self.heads // self.kv_heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate, as SwiGLU has with its three matrices."""
        return self.kind == "llama"

    @property
    def biased(self) -> bool:
        """Whether linear layers and norms have biases."""
        return self.kind != "llama"

    @property
    def gelu(self) -> Literal["tanh", "none"]:
        """How GELU is approximated where there is no gate, by tanh or not at all."""
        return "tanh" if self.kind == "gpt" else "none"

    @property
    def norm_first(self) -> bool:
        """Whether each branch of a layer begins with its norm; else norms follow the sums."""
        return self.kind != "bert"

    @property
    def learned_positions(self) -> bool:
        """Whether positions are rows of a table instead of rotations."""
        return self.kind != "llama"

    @property
    def masked(self) -> bool:
        """Whether the model guesses masked tokens; else each token predicts the next."""
        return self.kind == "bert"

    @property
    def head_share(self) -> float:
        """The fraction of tokens that the head is run for: the 15 % that BERT masks and guesses,
        or all tokens."""
        return 0.15 if self.masked else 1.0

    @property
    def ffn_block(self) -> int:
        """Rows B of the feed-forward that stay on one rank, in which gate and up are interleaved:
        the largest power of two <= 64 in f that leaves a block for each key-value head."""
        if self.gate_block is not None:
            return self.gate_block
        block = min(64, self.ffn & -self.ffn)  # f & -f is the largest power of two that divides f
        while block > 1 and self.ffn // block < self.kv_heads:
            block //= 2
        return block

    @property
    def tensor_ranks(self) -> int:
        """The most ranks that can share a layer's matrices, as each needs a key-value head and a
        block of the feed-forward."""
        return min(self.kv_heads, self.ffn // self.ffn_block)

    @property
    def attention_share(self) -> float:
        """The fraction of the elements of a layer's matrices that belong to its attention."""
        # Elements per hidden feature: queries and output projection, keys and values.
        attention = 2 * (self.hidden + self.kv_heads * self.head_features)
        feed_forward = (3 if self.gated else 2) * self.ffn
        return attention / (attention + feed_forward)

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model that costs, planners and the simulator need."""

        return shape_of(self)

    @property
    def longest(self) -> int | None:
        """The longest sequence in tokens that the model itself can take, None for no limit."""
        return self.positions if self.learned_positions else None

    def flops_per_token(self, length: int) -> float:
        """FLOPs of forward and backward of one token.

        They are three times those of the forward: 2 per weight, and 4 h per key seen (half of the
        keys when causal).

        Args:
            length: Tokens of the sequence that the token is part of.

        Returns:
            FLOPs, averaged over the tokens of the sequence.
        """
        h, kv = self.hidden, self.kv_heads * self.head_features
        layer_weights = 2 * h * h + 2 * h * kv + (3 if self.gated else 2) * h * self.ffn
        keys_seen = length / 2 if self.causal else length
        # BERT's head has a dense layer of h x h before the vocabulary.
        head_weights = h * self.vocabulary + (h * h if self.masked else 0)
        layer_flops = 2 * layer_weights + 4 * h * keys_seen
        return 3.0 * (self.layers * layer_flops + 2 * head_weights * self.head_share)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Architecture:
        """A model by its name, with any field changed.

        Args:
            name: ``llama-tiny``, ``gpt-tiny``, ``bert-tiny``, ``gpt2``, ``gpt3-175b``,
                ``bert-large``, ``llama-8b``, ``llama-70b``, ``paradyse-bert``, ``paradyse-llama``
                or ``paradyse-gpt``.
            changes: Fields to change, by their names.

        Returns:
            The architecture.

        Raises:
            SpecError: For a name that is not known, and for changes that do not fit together.

        Example:
            >>> hr.Architecture.preset("llama-8b", layers=16).layers
            16
        """
        if name not in PRESETS:
            hint = did_you_mean(name, PRESETS) or f"known are {', '.join(PRESETS)}"
            raise SpecError("architecture", got=repr(name), hint=hint)
        return replace(PRESETS[name], **changes)

    @classmethod
    def of(cls, value: Architecture | str) -> Architecture:
        """A model by its name, or as it is.

        Args:
            value: A name of :meth:`preset`, or an architecture.

        Returns:
            The architecture.

        Raises:
            SpecError: For a name that is not known, and for anything else.
        """
        return cls.preset(value) if isinstance(value, str) else of_kind("model", value, cls)

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.layers}x{self.hidden}, {self.heads}/{self.kv_heads} heads, "
            f"ffn {self.ffn}, vocabulary {self.vocabulary}{', tied' if self.tied else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        """The architecture as JSON.

        Returns:
            An object that :meth:`from_json` reads back.
        """
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Architecture:
        """Read what :meth:`to_json` gave.

        Args:
            value: The JSON object.

        Returns:
            The architecture.

        Raises:
            SpecError: When the object is malformed.
        """
        try:
            read = cls(**value)
            if read.gated and "gate_block" not in value:
                # Files without the key are older than it: their weights are interleaved in the
                # largest blocks, whatever the number of key-value heads.
                read = replace(read, gate_block=min(64, read.ffn & -read.ffn))
            # A block that `ffn_block` would choose by itself is not kept, so that equal models are
            # equal values.
            default_block = read.gate_block == replace(read, gate_block=None).ffn_block
            return replace(read, gate_block=None) if default_block else read
        except TypeError as error:
            raise SpecError("architecture", got=str(error), wanted="its JSON form")


PRESETS: dict[str, Architecture] = {
    "llama-tiny": Architecture(
        layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocabulary=4096, kind="llama"
    ),
    "gpt-tiny": Architecture(
        layers=4,
        hidden=128,
        heads=4,
        kv_heads=4,
        ffn=512,
        vocabulary=4096,
        kind="gpt",
        positions=16384,
    ),
    "bert-tiny": Architecture(
        layers=4,
        hidden=128,
        heads=4,
        kv_heads=4,
        ffn=512,
        vocabulary=4096,
        kind="bert",
        causal=False,
        positions=16384,
        norm_eps=1e-12,
        mask_id=4095,
    ),
    "gpt2": Architecture(
        layers=12,
        hidden=768,
        heads=12,
        kv_heads=12,
        ffn=3072,
        vocabulary=50257,
        kind="gpt",
        positions=1024,
    ),
    "gpt3-175b": Architecture(
        layers=96,
        hidden=12288,
        heads=96,
        kv_heads=96,
        ffn=49152,
        vocabulary=50257,
        kind="gpt",
        positions=2048,
    ),
    "bert-large": Architecture(
        layers=24,
        hidden=1024,
        heads=16,
        kv_heads=16,
        ffn=4096,
        vocabulary=30522,
        kind="bert",
        causal=False,
        positions=512,
        norm_eps=1e-12,
        mask_id=103,
    ),
    "llama-8b": Architecture(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocabulary=128256,
        tied=False,
        rope_theta=500000.0,
    ),
    "llama-70b": Architecture(
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        ffn=28672,
        vocabulary=128256,
        tied=False,
        rope_theta=500000.0,
    ),
    # ParaDySe, Table 4: h, n, and the layers of one node (of 80 and 96 of the whole LLaMA and GPT),
    # which are what it trains; every head has its own keys and values (Table 2). Positions are for
    # the 624K tokens of its longest sequence, the vocabulary is GPT-2's, as GitHubCode is read. The
    # features of LLaMA's feed-forward give its three matrices the elements of Table 2's two.
    "paradyse-bert": Architecture(
        layers=24,
        hidden=1024,
        heads=16,
        kv_heads=16,
        ffn=4096,
        vocabulary=50258,
        kind="bert",
        causal=False,
        positions=624 * 1024,
        norm_eps=1e-12,
        mask_id=50257,
    ),
    "paradyse-llama": Architecture(
        layers=8,
        hidden=8192,
        heads=64,
        kv_heads=64,
        ffn=22016,
        vocabulary=50257,
        tied=False,
    ),
    "paradyse-gpt": Architecture(
        layers=8,
        hidden=12288,
        heads=96,
        kv_heads=96,
        ffn=49152,
        vocabulary=50257,
        kind="gpt",
        positions=624 * 1024,
    ),
}


def stored_shape(value: Mapping[str, Any]) -> ModelShape:
    """The model shape in the JSON object of costs or of a profile. Older files hold the whole
    architecture under ``architecture`` instead of a ``shape``."""
    if "architecture" in value:
        return Architecture.from_json(value["architecture"]).shape
    return ModelShape.from_json(value["shape"])


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """The name and shape of one weight. Ranks can share its rows in multiples of ``unit`` rows, or
    hold it whole where that is None. ``bucket`` is the group of weights that it is pulled and
    pushed with: 0 the embedding, 1 to L the layers, L + 1 what follows them (last norm, head).
    ``also`` is a second bucket that uses it: a tied embedding is the head's matrix too."""

    name: str
    shape: tuple[int, ...]
    unit: int | None
    bucket: int
    also: int | None = None

    def used_in(self, buckets: Collection[int]) -> bool:
        """Whether a model segment with one of these ``buckets`` uses this weight."""
        return self.bucket in buckets or self.also in buckets

    @property
    def rows(self) -> int:
        """Length of the first dim of the weight."""
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
        """Append one weight to the table."""
        table.append(WeightSpec(name=name, shape=shape, unit=unit, bucket=bucket, also=also))

    def add_norm(bucket: int, name: str) -> None:
        """Append the weight of a norm, and its bias where the model has biases."""
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
    # Rows of one key-value head with its query heads, its key and its value.
    group = (a.group_heads + 2) * a.head_features
    gates = 2 if a.gated else 1  # gate and up are one matrix, interleaved
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
    """The number of elements of all weights."""
    return sum(weight.elements for weight in weight_table(architecture))


@lru_cache(maxsize=64)
def shape_of(architecture: Architecture) -> ModelShape:
    """The shape of a model. Elements are counted by bucket from its weight table: weights whose
    rows ranks can share (those with a unit) apart from weights that each rank holds whole."""
    a = architecture
    split, whole = [0] * bucket_count(a), [0] * bucket_count(a)
    for weight in weight_table(a):
        elements_of_buckets = whole if weight.unit is None else split
        elements_of_buckets[weight.bucket] += weight.elements
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
