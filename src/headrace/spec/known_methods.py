"""The facts of all methods by name, and questions about them.

Per rank, for a pack of T tokens on p ranks (h hidden, g key-value heads of d features, f features
of the feed-forward, m = 3 matrices of it when gated, else 2; k = g d / h, r elements in the place
of one fp32 sum, V = (p - 1) / p, u bytes of one local activation):

    attention           sent forward        backward            buffers / u
    ulysses_z           V (2 + 2 k) u       the same            2 (1 + 2 k)
    megatron_ts         2 V p u             3 V p u             2 + 2 (1 + 2 k)
    megatron_cz         2 V p k u           2 (1 + r) V p k u   4 k + r (1 + 4 k)
    megatron_cz_gather  2 V p k u           4 V p k u           2 (1 + r) p k
    metp                2 V p k u           2 (1 + r) V p k u   2 r + (2 + 8 k + 4 k r) / p

    feed-forward
    gathered (most)     nothing             nothing             2 f / h
    megatron_ts         2 V p u             3 V p u             2 + 2 f / h
    metp                nothing             nothing             r + 2 m f / (h p)

    kept     none: (3 + 2 k) u and (1 + m f / h) u; attention: 2 u and u.
             metp never keeps more than attention does: its first products run again in every
             backward; megatron_ts keeps q, k and v at attention, or would gather again, and
             ulysses_z (4 + 2 k) u at both, the heads before and after they are switched back

By heads: the busiest rank of ulysses_z has ceil(n / p) of n heads, of megatron_ts ceil(g / p) of
g groups, so a size that does not divide them costs more; metp deals out groups as well and
launches p times as much. No formulas: colossal_z, whose scores grow with the square of the tokens,
which a line cannot say; composites, whose groups are a choice of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headrace.errors import SpecError, did_you_mean
from headrace.spec.architecture import Architecture
from headrace.spec.layer_plan import Branch, LayerOption
from headrace.spec.method_facts import (
    BranchUse,
    Members,
    MethodFacts,
    RankBlocks,
    SupportRule,
    largest_divisor,
    tensor_blocks,
    ulysses_blocks,
)
from headrace.units import counted

__all__ = [
    "COLOSSAL_Z",
    "DEFAULT",
    "FACTS",
    "LOCAL",
    "MEGATRON_CZ",
    "MEGATRON_CZ_GATHER",
    "MEGATRON_TS",
    "METP",
    "SINGLE_RANK",
    "TENSOR_RING",
    "ULYSSES_RING",
    "ULYSSES_Z",
    "automatic_methods",
    "block_ranks",
    "facts_of",
    "methods_for",
    "subgroups",
]


# Functions below that return a BranchUse are the formulas of the table above: for a model, p ranks,
# and r elements of an activation in the place of one fp32 sum. What is sent, kept or buffered is in
# units of u bytes, those of one activation of the rank's own tokens.


def _any_group(architecture: Architecture, ranks: int) -> str | None:
    """The rule of a branch that runs on any number of ranks: it is never broken."""
    return None


def _one_each(name: str, part: str, count: Callable[[Architecture], int]) -> SupportRule:
    """The rule of a method in which each rank needs at least one of the model's ``count`` parts,
    such as key-value heads."""

    def rule(architecture: Architecture, ranks: int) -> str | None:
        """None where there are parts for all ranks, else what is broken, in words."""
        most = count(architecture)
        if ranks <= most:
            return None
        return f"{name} runs on at most {counted(most, 'rank')}, one per {part}"

    return rule


def _a_group_each(name: str) -> SupportRule:
    """The rule of a method in which each rank needs a key-value head."""
    return _one_each(name, "key-value head", lambda a: a.kv_heads)


def _a_block_each(name: str) -> SupportRule:
    """The rule of a method in which each rank needs a block of the feed-forward's features."""
    return _one_each(name, "block of the feed-forward", lambda a: a.ffn // a.ffn_block)


def _kv(a: Architecture) -> float:
    """k = g d / h, the features of all keys over the features of a token."""
    return a.kv_heads * a.head_features / a.hidden


def _even_attention(a: Architecture, p: int) -> BranchUse:
    """What attention uses on one of ``p`` ranks with an even share of the FLOPs, before anything is
    sent or buffered."""
    # Kept are the input, queries, keys, values and the result; at the level ``attention`` the first
    # and the last.
    return BranchUse(linear=1 / p, core=1 / p, kept=3 + 2 * _kv(a), kept_attention=2.0, buffers=0.0)


def _local_feed_forward(a: Architecture, p: int, r: float) -> BranchUse:
    """What the feed-forward uses on one of ``p`` ranks that runs its own tokens through the whole
    weights; ``r`` has no part in it."""
    # Inner features kept for the backward over h: gate, up and product, or GELU's input and output.
    active = (3 if a.gated else 2) * (a.ffn / a.hidden)
    return BranchUse(
        linear=1 / p, kept=1 + active, kept_attention=1.0, buffers=2 * (a.ffn / a.hidden)
    )


def _local(a: Architecture, p: int, r: float) -> BranchUse:
    """What attention on a single rank uses, which sends nothing."""
    return replace(_even_attention(a, p), buffers=2 * (1 + 2 * _kv(a)))


LOCAL = MethodFacts(
    name="local",
    owner="local",
    attention_rule=lambda a, ranks: None if ranks == 1 else f"local runs on 1 rank, not {ranks}",
    feed_forward_rule=lambda a, ranks: None if ranks == 1 else f"local runs on 1 rank, not {ranks}",
    attention_use=_local,
    feed_forward_use=_local_feed_forward,
)


def _switched_heads(a: Architecture, p: int, r: float) -> BranchUse:
    """What Ulysses uses on the busiest of ``p`` ranks, which has ceil(heads / p) heads: in each
    direction one all-to-all of queries, keys and values, and one of the results."""
    k = _kv(a)
    units = (p - 1) / p * (2 + 2 * k)  # queries and results 1 each, keys and values k each
    return replace(
        _even_attention(a, p),
        core=-(-a.heads // p) / a.heads,
        sent=units,
        sent_back=units,
        messages=2,
        messages_back=2,
        pattern="exchange",
        kept=4 + 2 * k,
        kept_attention=4 + 2 * k,
        buffers=2 * (1 + 2 * k),
    )


ULYSSES_Z = MethodFacts(
    name="ulysses_z",
    owner="ulysses_z",
    feed_forward_rule=_any_group,
    attention_rule=_one_each("ulysses_z", "query head", lambda a: a.heads),
    unlevelled=("attention",),
    attention_use=_switched_heads,
    feed_forward_use=_local_feed_forward,
)


def _ring(a: Architecture, p: int, r: float) -> BranchUse:
    """What ring attention uses on one of ``p`` ranks: keys and values are passed on in p - 1 hops,
    in the backward with the sums of their gradients, whose elements are ``r`` times as large as
    those of activations."""
    k = _kv(a)
    units = 2 * ((p - 1) / p) * p * k  # keys and values, k each, in p - 1 hops
    return replace(
        _even_attention(a, p),
        sent=units,
        sent_back=(1 + r) * units,
        messages=p - 1,
        messages_back=2 * (p - 1),
        pattern="hop",
        buffers=4 * k + r * (1 + 4 * k),
    )


def _keys_gathered(a: Architecture, p: int, r: float) -> BranchUse:
    """What context parallelism by an all-gather uses on one of ``p`` ranks: as much is sent as in a
    ring, but in one message, and the buffers hold the keys and values of all ranks."""
    buffers = 2 * (1 + r) * p * _kv(a)
    ring = _ring(a, p, 1)  # gradients are sent in the type of activations
    return replace(ring, messages=1, messages_back=2, pattern="gather", buffers=buffers)


MEGATRON_CZ = MethodFacts(
    name="megatron_cz",
    owner="ulysses_z",
    attention_rule=_any_group,
    feed_forward_rule=_any_group,
    order="zigzag",
    attention_use=_ring,
    feed_forward_use=_local_feed_forward,
)
MEGATRON_CZ_GATHER = replace(MEGATRON_CZ, name="megatron_cz_gather", attention_use=_keys_gathered)
COLOSSAL_Z = replace(MEGATRON_CZ, name="colossal_z", attention_use=None, automatic=False)


def _shard_of_heads(a: Architecture, p: int, r: float) -> BranchUse:
    """What tensor-parallel attention uses on the busiest of ``p`` ranks, which has the weights of
    ceil(g / p) key-value heads: an all-gather of the tokens before, a reduce-scatter of the results
    after."""
    share = -(-a.kv_heads // p) / a.kv_heads
    even = _even_attention(a, p)
    return replace(
        even,
        linear=share,
        core=share,
        sent=2 * (p - 1),
        sent_back=3 * (p - 1),
        messages=2,
        messages_back=3,
        kept_attention=even.kept,
        buffers=2 + 2 * (1 + 2 * _kv(a)),
        cut=p,
    )


def _shard_of_features(a: Architecture, p: int, r: float) -> BranchUse:
    """What a tensor-parallel feed-forward uses on one of ``p`` ranks, which has the weights of some
    inner features: an all-gather of the tokens before, a reduce-scatter of the results after."""
    return replace(
        _local_feed_forward(a, p, r),
        sent=2 * (p - 1),
        sent_back=3 * (p - 1),
        messages=2,
        messages_back=3,
        buffers=2 + 2 * (a.ffn / a.hidden),
        cut=p,
    )


MEGATRON_TS = MethodFacts(
    name="megatron_ts",
    owner="megatron_ts",
    attention_rule=_a_group_each("megatron_ts"),
    feed_forward_rule=_a_block_each("megatron_ts"),
    block=lambda ranks, most: ranks,
    unlevelled=("attention",),
    attention_use=_shard_of_heads,
    feed_forward_use=_shard_of_features,
)


def _ring_of_shards(a: Architecture, p: int, r: float) -> BranchUse:
    """What METP's attention uses on one of ``p`` ranks: the weights of p shards of the heads arrive
    one after the other, and each shard runs a ring of its own. That is p times the messages of a
    ring, with buffers for one shard."""
    k = _kv(a)
    ring = _ring(a, p, r)
    return replace(
        ring,
        messages=p * ring.messages,
        messages_back=p * ring.messages_back,
        kept=2.0,
        buffers=2 * r + (2 + 8 * k + 4 * k * r) / p,
        launches=p,
        cut=p,
        recomputes=True,
    )


def _shards_pass(a: Architecture, p: int, r: float) -> BranchUse:
    """What METP's feed-forward uses on one of ``p`` ranks: the weights of p shards of the inner
    features arrive one after the other, each is run on the local tokens, and the results are summed
    in elements ``r`` times as large as activations."""
    active = (3 if a.gated else 2) * (a.ffn / a.hidden)
    return replace(
        _local_feed_forward(a, p, r),
        kept=1.0,
        buffers=r + 2 * active / p,
        launches=p,
        cut=p,
        recomputes=True,
    )


METP = MethodFacts(
    name="metp",
    owner="metp",
    attention_rule=_a_group_each("metp"),
    feed_forward_rule=_a_block_each("metp"),
    order="zigzag",
    unlevelled=("attention", "feed_forward"),
    attention_use=_ring_of_shards,
    feed_forward_use=_shards_pass,
    many_kernels=True,
)


_Blocks = Callable[[Architecture, int, int], RankBlocks | None]
"""(architecture, ranks, tensor degree) to the blocks of a method over two mesh axes; None where it
has none."""


def _in_blocks(name: str, blocks: _Blocks) -> SupportRule:
    """The rule of a method that splits its group into equal blocks of ranks: broken where
    ``blocks`` finds no way to do so."""

    def rule(a: Architecture, ranks: int) -> str | None:
        """None where the ranks can be split into blocks, else what is broken, in words."""
        if blocks(a, ranks, 1) is not None:
            return None
        return f"{name} runs on ranks that are blocks of at least 2 with a head each, not {ranks}"

    return rule


def _two_axes(name: str, blocks: _Blocks) -> Callable[..., tuple[Members, ...]]:
    """A function that lists the process groups of a method over two mesh axes: the ranks of each
    block, and the ranks with the same index in all blocks. It raises SpecError without blocks."""

    def groups(a: Architecture, ranks: int, tensor: int) -> tuple[Members, ...]:
        """The groups of ``ranks`` ranks, as their indices, with weights sharded over blocks of
        ``tensor`` ranks."""
        found = blocks(a, ranks, tensor)
        if found is None:
            raise SpecError(
                f"{name} in blocks of {tensor}",
                got=f"{a.kv_heads} key-value heads",
                wanted="at least a key-value head for each rank",
            )
        return found.blocks + found.rings

    return groups


ULYSSES_RING = MethodFacts(
    name="ulysses_ring",
    owner="ulysses_z",
    feed_forward_rule=_any_group,
    order="zigzag",
    attention_rule=_in_blocks("ulysses_ring", ulysses_blocks),
    attention_groups=_two_axes("ulysses_ring", ulysses_blocks),
    unlevelled=("attention",),
    automatic=False,
)
TENSOR_RING = MethodFacts(
    name="tensor_ring",
    owner="tensor_ring",
    order="zigzag",
    attention_rule=_in_blocks("tensor_ring", tensor_blocks),
    feed_forward_rule=_in_blocks("tensor_ring", tensor_blocks),
    attention_groups=_two_axes("tensor_ring", tensor_blocks),
    feed_forward_groups=_two_axes("tensor_ring", tensor_blocks),
    block=lambda ranks, most: largest_divisor(ranks, most) or ranks,
    unlevelled=("attention",),
    automatic=False,
)

FACTS: dict[str, MethodFacts] = {
    facts.name: facts
    for facts in (
        LOCAL,
        ULYSSES_Z,
        MEGATRON_TS,
        MEGATRON_CZ,
        MEGATRON_CZ_GATHER,
        METP,
        COLOSSAL_Z,
        ULYSSES_RING,
        TENSOR_RING,
    )
}
"""The facts of every method by its name."""

SINGLE_RANK = LOCAL.name
"""The method of one rank alone."""

DEFAULT = ULYSSES_Z.name
"""The method of several ranks where nobody names one."""


def automatic_methods(*, gpu: bool = False) -> tuple[str, ...]:
    """Names of the methods that the planner considers when the choice is left to it; for a ``gpu``
    without those that launch too many small kernels."""
    return tuple(m.name for m in FACTS.values() if m.automatic and not (gpu and m.many_kernels))


def facts_of(name: str) -> MethodFacts:
    """The facts of method ``name``. Raises SpecError for an unknown name."""
    found = FACTS.get(name)
    if found is None:
        hint = did_you_mean(name, FACTS) or f"known are {', '.join(FACTS)}"
        raise SpecError("method", got=repr(name), hint=hint)
    return found


def methods_for(architecture: Architecture, ranks: int, branch: Branch) -> tuple[str, ...]:
    """The methods that can run a branch on a group of ``ranks``."""
    return tuple(f.name for f in FACTS.values() if f.rule(branch, architecture, ranks) is None)


def subgroups(
    option: LayerOption, architecture: Architecture, ranks: int, tensor: int = 1
) -> tuple[Members, ...]:
    """The process groups within a group of ``ranks`` that a layer option needs, each as ranks
    counted within that group; blocks of ``tensor`` neighbours hold the weights together. Raises
    SpecError when the option cannot run in such blocks."""
    attention, feed_forward = facts_of(option.attention), facts_of(option.feed_forward)
    return (
        *attention.attention_groups(architecture, ranks, tensor),
        *feed_forward.feed_forward_groups(architecture, ranks, tensor),
    )


def block_ranks(option: LayerOption, ranks: int, most: int) -> int:
    """How many neighbours of a group of ``ranks`` share a layer's weights as tensor parallelism
    does: each computes with its own shard, and no weights are gathered. Weights can be cut into at
    most ``most`` shards.

    The number is 1 (weights are gathered) where a branch needs whole weights, where the branches
    have blocks of different sizes, and for a user's methods, of which nothing is known.
    """
    sizes = {
        FACTS[name].block(ranks, most) if name in FACTS else 1
        for name in (option.attention, option.feed_forward)
    }
    return sizes.pop() if len(sizes) == 1 else 1
