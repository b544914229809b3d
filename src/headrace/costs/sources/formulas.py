"""What one layer costs by formulas: every method's attention and feed-forward, on p > 1 ranks.

Per rank, for a pack of T tokens (h hidden, g key-value heads of d features, k = g d / h, f features
of the feed-forward, m = 3 matrices of it when gated, else 2, e bytes of an element, u = T h e / p
bytes of one local activation, w = f / h):

    linear FLOPs      4 h (h + g d) T / p and 2 m h f T / p
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

from headrace.costs.option import OptionCost
from headrace.costs.quadratic import Linear, Quadratic
from headrace.costs.sources.speeds import Speeds
from headrace.spec.architecture import Architecture
from headrace.spec.known_methods import DEFAULT, FACTS, SINGLE_RANK
from headrace.spec.method import RECOMPUTE, LayerOption, Recompute
from headrace.spec.method_facts import BranchUse, MethodFacts, TrafficPattern

__all__ = ["FORMULA_METHODS", "feed_forwards_of", "layer_options"]

FORMULA_METHODS = tuple(facts.name for facts in FACTS.values() if facts.attention_use is not None)
"""Methods with formulas."""

_NOTHING = Quadratic()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """One branch: what its method uses, FLOPs-seconds of its products, of the first of them, of
    its attention forward and backward; units of u that the rest touches forward, backward and with
    the first product."""

    use: BranchUse
    linear: Quadratic
    first: Quadratic
    core: tuple[Quadratic, Quadratic] = (_NOTHING, _NOTHING)
    touched: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """An architecture on p ranks of some speeds."""

    a: Architecture
    s: Speeds
    p: int

    @property
    def k(self) -> float:
        """Key-value features for each feature."""
        return self.a.kv_heads * self.a.head_features / self.a.hidden

    @property
    def r(self) -> float:
        """Elements that one fp32 sum takes the place of."""
        return self.s.sum_bytes / self.s.element_bytes

    @property
    def unit(self) -> float:
        """u of one token: bytes of its activation, over the ranks."""
        return self.a.hidden * self.s.element_bytes / self.p

    def gemms(self, weights: float, share: float) -> Quadratic:
        """``share`` of the FLOPs of all tokens through matrices of ``weights`` elements."""
        return Quadratic(b=2 * weights * share / self.s.flops_per_s)

    def core(self, share: float) -> tuple[Quadratic, Quadratic]:
        """``share`` of attention's FLOPs forward and backward."""
        s, each = self.s, self.a.hidden * share / self.s.core_flops_per_s
        if not s.counted:
            forward = Quadratic(a=(2 if self.a.causal else 4) * each)
            return forward, forward * 2
        forward = Quadratic(a=2 * each, b=2 * each) if self.a.causal else Quadratic(a=4 * each)
        return forward, forward * 2.5

    def touch(self, units: float) -> Quadratic:
        """Seconds to read and write ``units`` u."""
        return Quadratic(b=units * self.unit / self.s.touched_bytes_per_s)

    def traffic(self, units: float, starts: int, pattern: TrafficPattern = "gather") -> Quadratic:
        """Seconds to send ``units`` u in ``starts`` messages."""
        if self.p == 1:
            return _NOTHING
        each, start = self.s.sending(self.p, pattern)
        return Quadratic(b=units * self.unit * each, c=starts * start)


def feed_forwards_of(methods: Iterable[str]) -> dict[str, str]:
    """Of ``methods`` those without a feed-forward of their own, with the method whose they use."""
    return {m: FACTS[m].owner for m in methods if FACTS[m].owner != m}


def layer_options(
    a: Architecture, s: Speeds, p: int, methods: tuple[str, ...] | None
) -> dict[str, OptionCost]:
    """The layer options of a group size by their names, at every recompute level: those of one
    rank's method on one rank; without ``methods`` those of the usual one, whatever its rule."""
    group = _Group(a=a, s=s, p=p)
    if p == 1 or methods is None:
        facts = [FACTS[SINGLE_RANK if p == 1 else DEFAULT]]
    else:
        facts = [FACTS[name] for name in methods if FACTS[name].rule("attention", a, p) is None]
    owners = [FACTS[name] for name in dict.fromkeys(f.owner for f in facts)]
    found: dict[str, OptionCost] = {}
    for attention in facts:
        for owner in (f for f in owners if f.rule("feed_forward", a, p) is None):
            follower = attention.name if owner.name == attention.owner else owner.name
            parts = _attention(group, attention), _feed_forward(group, owner)
            for level in RECOMPUTE:
                option = LayerOption(
                    attention=attention.name, feed_forward=follower, recompute=level
                )
                found[str(option)] = _layer(group, attention, owner, *parts, level)
    return found


def _attention(g: _Group, facts: MethodFacts) -> _Branch:
    assert facts.attention_use is not None, "the method has formulas"
    a, k, use = g.a, g.k, facts.attention_use(g.a, g.p, g.r)
    weights = 2 * a.hidden * a.hidden * (1 + k)
    projected = (1 + 2 * k) / (2 + 2 * k)
    return _Branch(
        use=use,
        linear=g.gemms(weights, use.linear),
        core=g.core(use.core),
        first=g.gemms(weights * projected, use.linear),
        touched=(7 + 4 * k, 10 + 4 * k, 4 + 4 * k),
    )


def _feed_forward(g: _Group, facts: MethodFacts) -> _Branch:
    assert facts.feed_forward_use is not None, "the method has formulas"
    a, use = g.a, facts.feed_forward_use(g.a, g.p, g.r)
    matrices = 3 if a.gated else 2
    wide = a.ffn / a.hidden
    active = matrices * wide
    linear = g.gemms(matrices * a.hidden * a.ffn, use.linear)
    return _Branch(
        use=use,
        linear=linear,
        first=linear * ((matrices - 1) / matrices),
        touched=(5 + active, 8 + (5 if a.gated else 3) * wide, 2 + active),
    )


def _layer(
    g: _Group,
    method: MethodFacts,
    owner: MethodFacts,
    attention: _Branch,
    follower: _Branch,
    level: Recompute,
) -> OptionCost:
    forward, backward = Quadratic(), Quadratic()
    kept, most, buffers = 0.0, 0.0, 0.0
    for part in (attention, follower):
        use = part.use
        launch = Quadratic(c=use.launches * g.s.launch_s / 2)
        there, back, again = map(g.touch, part.touched)
        core, core_back = part.core
        once = part.linear + core + g.traffic(use.sent, use.messages, use.pattern) + there + launch
        sent_back = g.traffic(use.sent_back, use.messages_back, use.pattern)
        forward += once
        backward += part.linear * 2 + core_back + sent_back + back + launch * 2
        if use.recomputes:
            backward += part.first + again
        elif level == "attention" and use.kept > use.kept_attention:
            backward += part.first + again + launch * 0.5
        if level == "full":
            backward += once
        most += use.kept
        kept += use.kept if level == "none" else use.kept_attention
        buffers += use.buffers
    kept = 1.0 if level == "full" else kept
    share, shards = g.a.attention_share, g.a.tensor_ranks
    return OptionCost(
        forward=forward,
        backward=backward,
        kept=Linear(slope=kept * g.unit),
        transient=Linear(slope=(buffers + most - kept) * g.unit),
        order=method.order if g.a.causal else "natural",
        fetched=share * method.fetched(g.p, shards) + (1 - share) * owner.fetched(g.p, shards),
    )
