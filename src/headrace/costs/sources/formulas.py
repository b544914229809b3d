"""What one layer costs by formulas: every method's attention and feed-forward, on p > 1 ranks.

Per rank, for a pack of T tokens (h hidden, g key-value heads of d features, k = g d / h, f features
of the feed-forward, m = 3 matrices of it when gated, else 2, e bytes of an element, u = T h e / p
bytes of one local activation, w = f / h):

    linear FLOPs      4 h (h + g d) T / p and 2 m h f T / p
    idle outputs      what the last wave of a product leaves idle, on average; they cost a multiply
                      and an add for each of its inner features, forward 2 h and h + f, to the
                      gradients of inputs 2 h + 2 g d and h + (m - 1) f, whatever the tokens; those
                      of gradients of weights, as many for each token, are in the attained rate
    attention FLOPs   4 h l^2 / p of every sequence of l tokens, half of it when causal; counted as
                      kernels run them 2 h (l^2 + l) / p when causal
    backward          twice the FLOPs of the forward (counted attention: 5/2), plus what is
                      recomputed: attention: the first product of each branch; full: the forward
    touched           bytes read and written once by what is not a product, in u, forward, backward
                      and when the first product runs again:
                      attention     7 + 4 k                10 + 4 k              4 + 4 k
                      feed-forward  5 + m w (gated)        8 + 5 w (else 3 w)    2 + m w
                      that is: norms, rotation into heads in order, activation, residual sums

Traffic, buffers, launches and what is kept are the method's own, in u
(:mod:`headrace.spec.known_methods`); the level full keeps u of the layer. In passing are the
buffers of both branches, and what was recomputed. Methods that keep tokens in place need them in
zigzag order to be even, which the costs of causal models take for granted. Collectives and hops
start after a latency.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite

from headrace.costs.cost_model import CostModel, ExchangeCost, OptionCost
from headrace.costs.quadratic import Linear, Quadratic
from headrace.errors import CostError, did_you_mean
from headrace.spec.architecture import Architecture, parameter_count, weight_table
from headrace.spec.cluster import Cluster
from headrace.spec.hardware import filled_nodes
from headrace.spec.known_methods import DEFAULT, FACTS, SINGLE_RANK
from headrace.spec.layer_plan import RECOMPUTE, LayerOption, Recompute
from headrace.spec.method_facts import BranchUse, MethodFacts, TrafficPattern
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS

__all__ = [
    "FORMULA_METHODS",
    "Speeds",
    "feed_forwards_of",
    "first_elements",
    "formula_model",
    "group_sizes_of",
    "inner_features",
    "layer_elements",
    "layer_options",
    "touched_units",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The constants of a device, by default of a made-up one; all are attained, not peaks.

    Attributes:
        flops_per_s: FLOPs per second of matrix products.
        link_bytes_per_s: Bytes per second that a device sends in one direction.
        memory_bytes_per_s: Bytes per second that the optimizer reads and writes.
        launch_s: Seconds to launch the forward of one layer.
        latency_s: Seconds to start a collective or a hop.
        element_bytes: Bytes of an element of activations and working weights.
        attention_flops_per_s: FLOPs per second of attention; those of products when left out.
        touched_bytes_per_s: Bytes per second of norms, rotations, activations, residual sums and
            the loss; by default they are free.
        across_bytes_per_s: As ``link_bytes_per_s``, between nodes.
        across_latency_s: As ``latency_s``, between nodes.
        devices_per_node: Devices that talk over the first link; groups that span nodes also talk
            over the second. All devices are one node when left out.
        counted: Whether attention has the operations that kernels run: the scores up to and on the
            diagonal, and five products in the backward for two in the forward. Else it has those
            that are usually called useful: half the square, and four for two.
        block_tokens: Side of the squares on the diagonal that a kernel of causal attention
            computes whole, where operations are counted.
        exposed: Fraction of the seconds of weights' gathers and gradients' scatters that is not
            hidden behind other work.
        idle_outputs: Outputs that the last wave of a product leaves idle, on average.

    Raises:
        CostError: For speeds that are not above zero, times below zero, and for only one of
            ``across_bytes_per_s`` and ``devices_per_node``.
    """

    flops_per_s: float = 1e14
    link_bytes_per_s: float = 1e11
    memory_bytes_per_s: float = 1e12
    launch_s: float = 50e-6
    latency_s: float = 15e-6
    element_bytes: int = 2
    attention_flops_per_s: float | None = None
    touched_bytes_per_s: float = inf
    across_bytes_per_s: float | None = None
    across_latency_s: float = 0.0
    devices_per_node: int | None = None
    counted: bool = False
    block_tokens: int = 1
    exposed: float = 1.0
    idle_outputs: float = 0.0

    def __post_init__(self) -> None:
        """Raise CostError for speeds, seconds or shares out of range, and for nodes without a link
        across them."""
        rates = (
            self.flops_per_s,
            self.link_bytes_per_s,
            self.memory_bytes_per_s,
            self.touched_bytes_per_s,
            self.core_flops_per_s,
            self.across_bytes_per_s or 1.0,
        )
        if not min(rates) > 0:  # seconds are amounts over rates, so rates may be infinite
            raise CostError("speeds", got=self, wanted="> 0")
        # What is added to seconds or outputs may be 0, but must be finite.
        added = (self.launch_s, self.latency_s, self.across_latency_s, self.idle_outputs)
        if not (min(added) >= 0 and isfinite(sum(added))) or self.element_bytes < 1:
            wanted = "times and idle outputs >= 0 and at least a byte"
            raise CostError("speeds", got=self, wanted=wanted)
        # Blocks have a side of a token at least; ``exposed`` is a fraction.
        if self.block_tokens < 1 or not 0 <= self.exposed <= 1:
            raise CostError("speeds", got=self, wanted="a block of a token, a fraction exposed")
        # Several nodes need a link across them, and such a link is of use between nodes only.
        if (self.devices_per_node is None) != (self.across_bytes_per_s is None):
            raise CostError("speeds", got=self, wanted="a link across for nodes, and nodes for it")

    @property
    def core_flops_per_s(self) -> float:
        """FLOPs per second of attention."""
        given = self.attention_flops_per_s
        return self.flops_per_s if given is None else given

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of what is summed over ranks: fp32, or wider where elements are."""
        return max(4, self.element_bytes)

    def sending(self, p: int, pattern: TrafficPattern) -> tuple[float, float]:
        """Seconds per byte that a rank of a group sends, and seconds to start.

        A group spans as few nodes as hold it, evenly. Of a gather each byte crosses to a node once
        and is spread inside it; of an all-to-all what is for ranks of other nodes crosses; hops are
        as slow as the one between two nodes.

        Args:
            p: Ranks of the group.
            pattern: How bytes travel: a gather, an all-to-all, or hops.

        Returns:
            Seconds per byte, seconds before the first byte.
        """
        inside = 1 / self.link_bytes_per_s
        if self.devices_per_node is None or self.across_bytes_per_s is None:
            return inside, self.latency_s
        nodes = -(-p // self.devices_per_node)
        if nodes == 1:
            return inside, self.latency_s
        # The fraction of the bytes sent (p - 1 parts) that goes to another node.
        crossing = {
            "gather": (nodes - 1) / (p - 1),
            "exchange": (p - p / nodes) / (p - 1),
            "hop": 1.0,
        }[pattern]
        byte_s = crossing / self.across_bytes_per_s + (1 - crossing) * inside
        return byte_s, self.across_latency_s


FORMULA_METHODS = tuple(facts.name for facts in FACTS.values() if facts.attention_use is not None)
"""Names of the methods that have formulas."""

_NOTHING = Quadratic()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """One branch of a layer on a group of ranks.

    Attributes:
        use: What its method uses: shares of FLOPs, traffic, bytes.
        linear: Seconds of its matrix products (forward, backward).
        first: Seconds of those of its products in the forward that come first: all but the last.
        core: Seconds of attention itself (forward, backward); none in a feed-forward.
        touched: Activations u that memory-bound operators read and write (forward, backward, when
            the first products run again).
    """

    use: BranchUse
    linear: tuple[Quadratic, Quadratic]
    first: Quadratic
    core: tuple[Quadratic, Quadratic] = (_NOTHING, _NOTHING)
    touched: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The architecture ``a`` on a group of ``p`` ranks with the speeds ``s``, and the seconds of
    what they do. Its k and its unit u are those of the module's docstring."""

    a: Architecture
    s: Speeds
    p: int

    @property
    def k(self) -> float:
        """k = g d / h: features of the keys over features of a token."""
        return self.a.kv_heads * self.a.head_features / self.a.hidden

    @property
    def r(self) -> float:
        """r: bytes of an element of sums (fp32) over bytes of an element of activations."""
        return self.s.sum_bytes / self.s.element_bytes

    @property
    def unit(self) -> float:
        """u of one token: bytes of its activation, over the ranks."""
        return self.a.hidden * self.s.element_bytes / self.p

    def products(
        self, weights: float, use: BranchUse, features: tuple[float, float, float], first: float
    ) -> tuple[tuple[Quadratic, Quadratic], Quadratic]:
        """Seconds of a branch's matrix products: ((forward, backward), those that come first).

        Its matrices have ``weights`` elements, the fraction ``first`` of them in the products that
        come first. ``features`` are the inner features of the products (forward, backward, first),
        for each of which the last wave's idle outputs cost a multiply and an add.
        """
        useful = Quadratic(b=2 * weights * use.linear / self.s.flops_per_s)
        idle, idle_back, idle_first = (
            Quadratic(c=2 * n * use.launches * self.s.idle_outputs / self.s.flops_per_s)
            for n in features
        )
        return (useful + idle, useful * 2 + idle_back), useful * first + idle_first

    def core(self, share: float) -> tuple[Quadratic, Quadratic]:
        """Seconds (forward, backward) of ``share`` of attention's FLOPs: 4 h l^2 in the forward,
        half of them when causal. Where FLOPs are counted as kernels run them, causal attention
        computes blocks on the diagonal whole, and the backward is 5/2 of the forward instead of
        2."""
        # hidden_s: seconds of h FLOPs of the share.
        s, hidden_s = self.s, self.a.hidden * share / self.s.core_flops_per_s
        if not s.counted:
            forward = Quadratic(a=(2 if self.a.causal else 4) * hidden_s)
            return forward, forward * 2
        if self.a.causal:  # 2 h l (l + block): each token's row of scores ends with its block
            forward = Quadratic(a=2 * hidden_s, b=2 * hidden_s * s.block_tokens)
        else:
            forward = Quadratic(a=4 * hidden_s)
        return forward, forward * 2.5

    def touch(self, units: float) -> Quadratic:
        """Seconds in which memory-bound operators read and write ``units`` activations u."""
        return Quadratic(b=units * self.unit / self.s.touched_bytes_per_s)

    def traffic(self, units: float, starts: int, pattern: TrafficPattern = "gather") -> Quadratic:
        """Seconds in which a rank sends ``units`` activations u in ``starts`` messages."""
        if self.p == 1:
            return _NOTHING
        byte_s, start_s = self.s.sending(self.p, pattern)
        return Quadratic(b=units * self.unit * byte_s, c=starts * start_s)


def feed_forwards_of(methods: Iterable[str]) -> dict[str, str]:
    """For each of ``methods`` without a feed-forward of its own, the method whose feed-forward it
    uses."""
    return {name: FACTS[name].owner for name in methods if FACTS[name].owner != name}


def layer_options(
    a: Architecture, s: Speeds, p: int, methods: tuple[str, ...] | None
) -> dict[str, OptionCost]:
    """The costs of the layer options on p ranks by their text: every attention of ``methods`` that
    runs on p ranks with every feed-forward, at every recompute level. One rank has its own method;
    where ``methods`` is None several ranks have the default one, without a look at its rule."""
    group = _Group(a=a, s=s, p=p)
    if p == 1 or methods is None:
        facts = [FACTS[SINGLE_RANK if p == 1 else DEFAULT]]
    else:
        facts = [FACTS[name] for name in methods if FACTS[name].rule("attention", a, p) is None]
    owners = [FACTS[name] for name in dict.fromkeys(f.owner for f in facts)]
    found: dict[str, OptionCost] = {}
    for attention in facts:
        for owner in (f for f in owners if f.rule("feed_forward", a, p) is None):
            # A feed-forward that the attention's method uses anyway goes by that method's name.
            feed_forward = attention.name if owner.name == attention.owner else owner.name
            attention_branch = _attention(group, attention)
            feed_forward_branch = _feed_forward(group, owner)
            for level in RECOMPUTE:
                option = LayerOption(
                    attention=attention.name, feed_forward=feed_forward, recompute=level
                )
                found[str(option)] = _layer(
                    group, attention, owner, attention_branch, feed_forward_branch, level
                )
    return found


def touched_units(a: Architecture) -> tuple[float, float, float]:
    """Activations u that memory-bound operators of a layer read and write, each once: forward,
    backward, and when the first products of both branches run again."""
    k, wide = a.kv_heads * a.head_features / a.hidden, a.ffn / a.hidden
    attention, feed_forward = _attention_units(k), _feed_forward_units(a.gated, wide)
    forward, backward, again = (sum(pair) for pair in zip(attention, feed_forward, strict=True))
    return forward, backward, again


def layer_elements(a: Architecture) -> int:
    """Elements of the matrices of a layer."""
    return _attention_elements(a) + _feed_forward_elements(a)


def first_elements(a: Architecture) -> float:
    """Elements of the matrices that come first in both branches: those to q, k and v, and those to
    the features of the feed-forward."""
    attention, feed_forward = _first_shares(a)
    return attention * _attention_elements(a) + feed_forward * _feed_forward_elements(a)


def inner_features(a: Architecture, cut: int = 1) -> tuple[float, float, float]:
    """Sums of the inner (contracted) dimensions over a layer's matrix products on one of ``cut``
    tensor-parallel ranks: in the forward, in the backward towards the inputs, and of the forward
    products that come first in both branches. Tensor parallelism cuts the inner dimension of a
    branch's last product, and the outputs of its first."""
    pairs = zip(_attention_features(a, cut), _feed_forward_features(a, cut), strict=True)
    forward, backward, again = (sum(pair) for pair in pairs)
    return forward, backward, again


def _attention_features(a: Architecture, cut: int) -> tuple[float, float, float]:
    """:func:`inner_features` of the attention alone: h of the product to q, k and v, and h / cut of
    the one behind attention; in the backward the outputs of these products."""
    h, keys = a.hidden, 2 * a.kv_heads * a.head_features
    return h + h / cut, (h + keys) / cut + h, h


def _feed_forward_features(a: Architecture, cut: int) -> tuple[float, float, float]:
    """:func:`inner_features` of the feed-forward alone: h of the product to gate and up, and
    f / cut of the one to the output; in the backward the outputs of these products."""
    h, wide = a.hidden, (2 if a.gated else 1) * a.ffn
    return h + a.ffn / cut, wide / cut + h, h


def _first_shares(a: Architecture) -> tuple[float, float]:
    """The fractions (attention, feed-forward) of a branch's elements that are in the matrices that
    come first: those to q, k and v, and those to the inner features."""
    k, matrices = a.kv_heads * a.head_features / a.hidden, 3 if a.gated else 2
    # Attention has 2 h (h + g d) = (2 + 2 k) h^2 elements, of which (1 + 2 k) h^2 lead to q, k and
    # v. The matrices of a feed-forward have equal sizes, and all but the last come first.
    return (1 + 2 * k) / (2 + 2 * k), (matrices - 1) / matrices


def _attention_elements(a: Architecture) -> int:
    """Elements of the matrices to q, k and v, and of the one behind attention."""
    return 2 * a.hidden * (a.hidden + a.kv_heads * a.head_features)


def _feed_forward_elements(a: Architecture) -> int:
    """Elements of the matrices of the feed-forward: two, and a third for a gate."""
    return (3 if a.gated else 2) * a.hidden * a.ffn


def _attention_units(k: float) -> tuple[float, float, float]:
    """Units u that the attention's memory-bound operators touch: forward, backward, and when the
    first product runs again (the module's table ``touched``)."""
    return 7 + 4 * k, 10 + 4 * k, 4 + 4 * k


def _feed_forward_units(gated: bool, wide: float) -> tuple[float, float, float]:
    """Units u that the feed-forward's memory-bound operators touch: forward, backward, and when the
    first product runs again (the module's table ``touched``); ``wide`` is f / h."""
    activation = (3 if gated else 2) * wide  # its factors are read, its result is written
    return 5 + activation, 8 + (5 if gated else 3) * wide, 2 + activation


def _attention(group: _Group, facts: MethodFacts) -> _Branch:
    """The costs of a method's attention on the busiest rank of a group. The query-key-value product
    is ``first``, the part that recompute runs again."""
    assert facts.attention_use is not None, "the method has formulas"
    a, use = group.a, facts.attention_use(group.a, group.p, group.r)
    features, (first_share, _) = _attention_features(a, use.cut), _first_shares(a)
    linear, first = group.products(_attention_elements(a), use, features, first_share)
    return _Branch(
        use=use,
        linear=linear,
        core=group.core(use.core),
        first=first,
        touched=_attention_units(group.k),
    )


def _feed_forward(group: _Group, facts: MethodFacts) -> _Branch:
    """The costs of a method's feed-forward on a group: all products but the last are ``first``, the
    part that recompute runs again."""
    assert facts.feed_forward_use is not None, "the method has formulas"
    a, use = group.a, facts.feed_forward_use(group.a, group.p, group.r)
    features, (_, first_share) = _feed_forward_features(a, use.cut), _first_shares(a)
    linear, first = group.products(_feed_forward_elements(a), use, features, first_share)
    return _Branch(
        use=use,
        linear=linear,
        first=first,
        touched=_feed_forward_units(a.gated, a.ffn / a.hidden),
    )


def _layer(
    group: _Group,
    method: MethodFacts,
    owner: MethodFacts,
    attention: _Branch,
    feed_forward: _Branch,
    level: Recompute,
) -> OptionCost:
    """The costs of a layer at a recompute level: the sums over its two branches. ``method`` and
    ``attention`` are the facts and the costs of its attention, ``owner`` and ``feed_forward`` those
    of its feed-forward."""
    forward, backward = Quadratic(), Quadratic()
    kept, kept_at_none, buffers = 0.0, 0.0, 0.0  # in units u
    for branch in (attention, feed_forward):
        use = branch.use
        launch = Quadratic(c=use.launches * group.s.launch_s / 2)  # half of a layer's launches
        touch, touch_back, touch_again = map(group.touch, branch.touched)
        core, core_back = branch.core
        linear, linear_back = branch.linear
        sent = group.traffic(use.sent, use.messages, use.pattern)
        branch_forward = linear + core + sent + touch + launch
        sent_back = group.traffic(use.sent_back, use.messages_back, use.pattern)
        forward += branch_forward
        backward += linear_back + core_back + sent_back + touch_back + launch * 2
        # What the backward runs again: the first products where the method always does so, or where
        # the level ``attention`` keeps less than ``none``; at ``full`` the whole forward.
        if use.recomputes:
            backward += branch.first + touch_again
        elif level == "attention" and use.kept > use.kept_attention:
            backward += branch.first + touch_again + launch * 0.5
        if level == "full":
            backward += branch_forward
        kept_at_none += use.kept
        kept += use.kept if level == "none" else use.kept_attention
        buffers += use.buffers
    kept = 1.0 if level == "full" else kept  # the layer's input alone
    share, shards = group.a.attention_share, group.a.tensor_ranks
    return OptionCost(
        forward=forward,
        backward=backward,
        kept=Linear(slope=kept * group.unit),
        # In its backward the layer has all that the level none would have kept.
        transient=Linear(slope=(buffers + kept_at_none - kept) * group.unit),
        order=method.order if group.a.causal else "natural",
        fetched=share * method.fetched(group.p, shards)
        + (1 - share) * owner.fetched(group.p, shards),
    )


_ROOMY = 1 / 8
"""The fraction of the memory that the logits of a whole chunk may take. Up to it they are charged
to every pack as a constant, above it by the tokens of the pack."""

_OPTIMIZER_BYTES = 16  # fp32 master weight, gradient and two moments


def group_sizes_of(devices: int) -> tuple[int, ...]:
    """Group sizes that are worth costs: all up to 8, then powers of two and all devices.

    Args:
        devices: How many devices there are.

    Returns:
        The sizes, smallest first.
    """
    sizes = {p for p in range(1, devices + 1) if p <= 8 or p & (p - 1) == 0} | {devices}
    return tuple(sorted(sizes))


def formula_model(
    architecture: Architecture,
    cluster: Cluster,
    speeds: Speeds,
    *,
    fingerprint: str,
    sizes: Iterable[int] | None = None,
    methods: tuple[str, ...] | None = None,
) -> CostModel:
    """Compute the costs of an architecture on a cluster of devices with these speeds, by the
    formulas in the module's docstring.

    ``sizes`` defaults to :func:`group_sizes_of`; ``methods`` as
    :func:`headrace.costs.sources.formulas.layer_options` takes them. Raises CostError for a method
    without formulas, and when no size has an option.
    """
    for method in methods or ():
        if method not in FORMULA_METHODS:
            known = f"known are {', '.join(FORMULA_METHODS)}"
            hint = did_you_mean(method, FORMULA_METHODS) or known
            raise CostError("formulas of a method", got=repr(method), hint=hint)
    a, s, devices = architecture, speeds, cluster.devices
    wanted = sizes or group_sizes_of(devices)
    # Sizes on which no method runs are left out.
    options = {p: found for p in wanted if (found := layer_options(a, s, p, methods))}
    weights = parameter_count(a)
    return CostModel(
        shape=a.shape,
        cluster=cluster,
        fingerprint=fingerprint,
        options=options,
        ends={p: _ends(a, s, p, cluster.memory_bytes) for p in options},
        exchange_s=_exchange(a, s, devices),
        state_bytes=_OPTIMIZER_BYTES * weights // devices,
        working_bytes={
            p: {
                "replicated": weights * _working_bytes(s, in_place=devices == 1),
                "sharded": _sharded_bytes(a, s, weights, p, devices),
            }
            for p in options
        },
        gather_s={p: _gather_s(a, s, p) for p in options if p > 1},
        feed_forwards=feed_forwards_of(methods or ()),
    )


def _working_bytes(s: Speeds, *, in_place: bool) -> int:
    """Bytes that a weight's working copy and its gradient take besides the stored weight.

    Where a rank works with the weights that it stores (``in_place``), the gradient needs no bytes
    of its own, nor does the working copy if it has the type of the stored weight.
    """
    if not in_place:
        return s.element_bytes + s.sum_bytes
    # Stored weights have the type of sums, so only narrower ones are copied.
    return s.element_bytes if s.element_bytes < s.sum_bytes else 0


def _sharded_bytes(a: Architecture, s: Speeds, weights: int, p: int, devices: int) -> int:
    """Working bytes of a rank of p that hold ``weights`` elements sharded: its p-th of weights and
    gradients, and one gathered layer with its gradient."""
    if p == 1:
        return weights * _working_bytes(s, in_place=devices == 1)
    # A group of all devices works with the shards as they are stored, without a copy.
    copies = _working_bytes(s, in_place=False)
    shard_bytes = 0 if p == devices and _in_order(s, devices) else copies
    return -(-weights // p) * shard_bytes + layer_elements(a) * copies


def _gather_s(a: Architecture, s: Speeds, p: int) -> tuple[float, float]:
    """Seconds (forward, backward) that sharded weights add to a layer on p ranks: the forward
    gathers the layer, the backward gathers it again and scatters its fp32 gradient. Only the
    fraction that is not hidden counts."""
    byte_s, start_s = s.sending(p, "gather")
    # Seconds in which a rank sends one byte of each element that others lack.
    elements_s = layer_elements(a) * (p - 1) / p * byte_s
    forward = elements_s * s.element_bytes + start_s
    backward = elements_s * (s.element_bytes + s.sum_bytes) + 2 * start_s
    return forward * s.exposed, backward * s.exposed


def _exchange(a: Architecture, s: Speeds, devices: int) -> ExchangeCost:
    """Seconds of pull, push and update of a step over all devices; a single one moves nothing. Each
    row crosses to a node once, and ranks of the smallest node, the last, receive the most."""
    fewest, weights = min(filled_nodes(devices, s.devices_per_node or devices)), parameter_count(a)
    # Of all weights: what a rank receives from other nodes, and inside of its own.
    crossing = (devices - fewest) / (devices * fewest)
    inside = (devices - 1) / devices - crossing
    moved_s = weights * s.element_bytes * inside / s.link_bytes_per_s
    if crossing and s.across_bytes_per_s is not None:
        moved_s += weights * s.element_bytes * crossing / s.across_bytes_per_s
    return ExchangeCost(
        pull_s=moved_s,
        push_s=moved_s,
        # The optimizer reads and writes all states.
        update_s=2 * _OPTIMIZER_BYTES * weights / devices / s.memory_bytes_per_s,
        sharded_share=_sharded_share(a, s, devices),
    )


def _sharded_share(a: Architecture, s: Speeds, devices: int) -> float:
    """What a plan pulls whose one group of all devices shards weights, as a fraction of a pull of
    all weights: the elements of a rank's working shard that it does not store.

    A rank lacks nothing of a weight whose working shards are the stored ones. They differ where a
    weight has fewer units (heads, blocks) than there are devices, as working shards are whole
    units, and where rows are stored in another order.
    """
    if devices == 1:
        return 1.0
    lacked = 0.0  # elements, over all weights
    for weight in weight_table(a):
        units = weight.rows // (weight.unit or weight.rows)  # 1 for a weight that is never cut
        if units < devices or not _in_order(s, devices):
            shard = 1 / min(units, devices)  # the fraction of the weight that a rank works with
            lacked += weight.elements * (shard if units > 1 else 1 - 1 / devices)
    all_lacked = parameter_count(a) * (devices - 1) / devices  # in a pull of all weights
    return min(1.0, lacked / all_lacked)


def _in_order(s: Speeds, devices: int) -> bool:
    """Whether the shards that ranks store follow each other in the order of the ranks, so that one
    group of all ranks works with them in place. Over several nodes of several ranks they do not:
    stored rows are ordered by the rank's place in its node first."""
    node = s.devices_per_node or devices
    return devices <= node or node == 1


def _ends(a: Architecture, s: Speeds, p: int, memory_bytes: int) -> OptionCost:
    """The costs of embedding, last norm, head and loss on one of p ranks, each with whole tokens.

    Logits have the type of activations; they are read in the forward, read and written in the
    backward. Logits and their gradient are alive together, for the tokens of a pack but never for
    more than a chunk. Both are upper bounds of their bytes: the chunk is taken where it leaves most
    of the memory.
    """
    dense = a.hidden if a.masked else 0  # BERT's dense layer before the vocabulary
    head = Quadratic(b=2 * a.hidden * (a.vocabulary + dense) * a.head_share / p / s.flops_per_s)
    token_logit_bytes = a.vocabulary * s.element_bytes
    chunk_bytes = 2 * HEAD_CHUNK_TOKENS * token_logit_bytes
    roomy = chunk_bytes <= _ROOMY * memory_bytes
    # Bytes of a token on a rank: of an activation, and of logits.
    unit, logit_bytes = a.hidden * s.element_bytes / p, token_logit_bytes * a.head_share / p
    # Embedding and last norm read and write 4 activations in the forward, 7 in the backward.
    touch = Quadratic(b=(4 * unit + logit_bytes) / s.touched_bytes_per_s)
    touch_back = Quadratic(b=(7 * unit + 2 * logit_bytes) / s.touched_bytes_per_s)
    idle_s = 2 * s.idle_outputs / s.flops_per_s
    return OptionCost(
        forward=head + touch + Quadratic(c=s.launch_s + a.hidden * idle_s),
        backward=head * 2 + touch_back + Quadratic(c=2 * s.launch_s + a.vocabulary * idle_s),
        kept=Linear(slope=unit),
        transient=Linear(constant=chunk_bytes) if roomy else Linear(slope=2 * logit_bytes),
    )
