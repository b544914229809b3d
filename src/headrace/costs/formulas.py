"""What one layer costs by formulas: every method's attention and feed-forward, on p > 1 ranks.

Per rank, for a pack of T tokens (h hidden, n heads of d features, g key-value heads, k = g / n,
f features of the feed-forward, m = 3 matrices of it when gated, else 2, e bytes of an element,
r = 4 / e for what is summed in fp32, V = (p - 1) / p, u = T h e / p bytes of one local activation,
w = f / h):

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

    attention           bytes sent forward      backward            buffers / u
    ulysses_z           V (2 + 2 k) u           the same            2 (1 + 2 k)
    megatron_ts         2 V p u                 3 V p u             2 + 2 (1 + 2 k)
    megatron_cz         2 V p k u               2 (1 + r) V p k u   4 k + r (1 + 4 k)
    megatron_cz_gather  2 V p k u               2 (1 + r) V p k u   2 (1 + r) p k
    metp                2 V p k u               2 (1 + r) V p k u   2 r + (2 + 8 k + 4 k r) / p

    feed-forward                                                    buffers / u
    gathered (all but two) nothing              nothing             2 f / h
    megatron_ts         2 V p u                 3 V p u             2 + 2 f / h
    metp                nothing                 nothing             r + 2 m f / (h p)

    kept     none: (3 + 2 k) u and (1 + m f / h) u; attention: 2 u and u; full: u of the layer.
             metp never keeps more than attention does: its first products run again in every
             backward; megatron_ts keeps q, k and v at attention, or would gather again, and
             ulysses_z (4 + 2 k) u at both, the heads before and after they are switched back
    passing  the buffers of both branches, and what was recomputed

By heads: the busiest rank of ulysses_z has ceil(n / p) of n heads, of megatron_ts ceil(g / p) of
g groups, so a size that does not divide them costs more; metp deals out groups as well. Methods
that keep tokens in place need them in zigzag order to be even, which the costs of causal models
take for granted. Collectives and hops start after a latency; metp launches p times as much.

Left out: colossal_z, whose scores grow with the square of the tokens, which a line cannot say;
composites, whose groups are a choice of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.costs.branches import attention_share
from headrace.costs.option import OptionCost
from headrace.costs.quadratic import Linear, Quadratic
from headrace.costs.speeds import Pattern, Speeds
from headrace.spec.architecture import Architecture
from headrace.spec.method import RECOMPUTE, LayerOption, Recompute
from headrace.spec.plan import TokenOrder

__all__ = ["FORMULA_METHODS", "feed_forwards_of", "layer_options"]

FORMULA_METHODS = (
    "local", "ulysses_z", "megatron_ts", "megatron_cz", "megatron_cz_gather", "metp",
)  # fmt: skip
"""Methods with formulas."""

_NOTHING = Quadratic()
_GATHERED = "ulysses_z"
_IN_PLACE = ("megatron_cz", "megatron_cz_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One branch: seconds of its GEMMs, of the first of them, of its attention forward and
    backward, of its traffic forward and backward; units of u that the rest touches forward,
    backward and with the first GEMM, that are kept and that are in passing; launches. What
    ``folds`` runs its first GEMM again in every backward."""

    linear: Quadratic
    first: Quadratic
    core: Quadratic = _NOTHING
    core_back: Quadratic = _NOTHING
    sent: Quadratic = _NOTHING
    back: Quadratic = _NOTHING
    touched: tuple[float, float, float]
    folds: bool = False
    kept: float
    kept_attention: float
    buffers: float
    launches: int = 1
    order: TokenOrder = "natural"
    fetched: float = 1.0


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

    def traffic(self, units: float, starts: int, pattern: Pattern = "gather") -> Quadratic:
        """Seconds to send ``units`` u in ``starts`` messages."""
        if self.p == 1:
            return _NOTHING
        each, start = self.s.sending(self.p, pattern)
        return Quadratic(b=units * self.unit * each, c=starts * start)


def feed_forwards_of(methods: Iterable[str]) -> dict[str, str]:
    """Of ``methods`` those without a feed-forward of their own, with the method whose they use."""
    return {method: _GATHERED for method in methods if method in _IN_PLACE}


def layer_options(
    a: Architecture, s: Speeds, p: int, methods: tuple[str, ...] | None
) -> dict[str, OptionCost]:
    """The layer options of a group size by their names, at every recompute level; those of
    ``local`` on one rank, of ``ulysses_z`` without ``methods``."""
    group = _Group(a=a, s=s, p=p)
    if p == 1:
        attentions, owners = ["local"], ["local"]
    elif methods is None:
        attentions, owners = [_GATHERED], [_GATHERED]
    else:
        shared = feed_forwards_of(methods)
        attentions = [m for m in methods if _supports(m, a, p)]
        owners = list(dict.fromkeys(shared.get(m, m) for m in methods if m != "local"))
        owners = [m for m in owners if m == _GATHERED or _supports(m, a, p)]
    found: dict[str, OptionCost] = {}
    for attention in attentions:
        for owner in owners:
            own = owner == (_GATHERED if attention in _IN_PLACE else attention)
            for level in RECOMPUTE:
                option = LayerOption(
                    attention=attention,
                    feed_forward=attention if own else owner,
                    recompute=level,
                )
                parts = _attention(group, attention), _feed_forward(group, owner)
                found[str(option)] = _layer(group, *parts, level)
    return found


def _supports(method: str, a: Architecture, p: int) -> bool:
    """Whether a group of p > 1 can run a method's attention."""
    heads = {"ulysses_z": a.heads, "megatron_ts": a.kv_heads, "metp": a.kv_heads}
    return method != "local" and p <= heads.get(method, p)


def _attention(g: _Group, method: str) -> _Part:
    a, p, k, r = g.a, g.p, g.k, g.r
    spread = (p - 1) / p
    weights = 2 * a.hidden * a.hidden * (1 + k)
    projected = (1 + 2 * k) / (2 + 2 * k)
    core, core_back = g.core(1 / p)
    even = _Part(
        linear=g.gemms(weights, 1 / p), first=g.gemms(weights * projected, 1 / p), core=core,
        core_back=core_back, touched=(7 + 4 * k, 10 + 4 * k, 4 + 4 * k), kept=3 + 2 * k,
        kept_attention=2.0, buffers=0.0,
    )  # fmt: skip
    if method in ("local", _GATHERED):
        core, core_back = g.core(-(-a.heads // p) / a.heads)
        switch = g.traffic(spread * (2 + 2 * k), 2, "exchange")
        kept = (even.kept, even.kept_attention) if p == 1 else (4 + 2 * k, 4 + 2 * k)
        return replace(
            even, core=core, core_back=core_back, sent=switch, back=switch,
            kept=kept[0], kept_attention=kept[1], buffers=2 * (1 + 2 * k),
        )  # fmt: skip
    if method == "megatron_ts":
        by_groups = -(-a.kv_heads // p) / a.kv_heads
        core, core_back = g.core(by_groups)
        return replace(
            even, linear=g.gemms(weights, by_groups),
            first=g.gemms(weights * projected, by_groups), core=core, core_back=core_back,
            sent=g.traffic(2 * (p - 1), 2), back=g.traffic(3 * (p - 1), 3),
            kept_attention=even.kept, buffers=2 + 2 * (1 + 2 * k), fetched=0.0,
        )  # fmt: skip
    rings = p if method == "metp" else 1
    pattern: Pattern = "gather" if method == "megatron_cz_gather" else "hop"
    hops = 1 if pattern == "gather" else rings * (p - 1)
    moved = 2 * spread * p * k
    placed = replace(
        even, sent=g.traffic(moved, hops, pattern),
        back=g.traffic((1 + r) * moved, 2 * hops, pattern),
        order="zigzag" if a.causal else "natural",
    )  # fmt: skip
    if method == "megatron_cz_gather":
        return replace(placed, buffers=2 * (1 + r) * p * k)
    if method == "megatron_cz":
        return replace(placed, buffers=4 * k + r * (1 + 4 * k))
    return replace(
        placed, folds=True, kept=2.0, launches=p, buffers=2 * r + (2 + 8 * k + 4 * k * r) / p
    )


def _feed_forward(g: _Group, owner: str) -> _Part:
    a, p = g.a, g.p
    matrices = 3 if a.gated else 2
    wide = a.ffn / a.hidden
    active = matrices * wide
    linear = g.gemms(matrices * a.hidden * a.ffn, 1 / p)
    gathered = _Part(
        linear=linear, first=linear * ((matrices - 1) / matrices), buffers=2 * wide,
        touched=(5 + active, 8 + (5 if a.gated else 3) * wide, 2 + active),
        kept=1 + active, kept_attention=1.0,
    )  # fmt: skip
    if owner == "megatron_ts":
        return replace(
            gathered, sent=g.traffic(2 * (p - 1), 2), back=g.traffic(3 * (p - 1), 3),
            buffers=2 + 2 * wide, fetched=0.0,
        )  # fmt: skip
    if owner == "metp":
        return replace(
            gathered, folds=True, kept=1.0, launches=p, buffers=g.r + 2 * active / p
        )  # fmt: skip
    return gathered


def _layer(g: _Group, attention: _Part, follower: _Part, level: Recompute) -> OptionCost:
    forward, backward = Quadratic(), Quadratic()
    kept, most, buffers = 0.0, 0.0, 0.0
    for part in (attention, follower):
        launch = Quadratic(c=part.launches * g.s.launch_s / 2)
        there, back, again = map(g.touch, part.touched)
        once = part.linear + part.core + part.sent + there + launch
        forward += once
        backward += part.linear * 2 + part.core_back + part.back + back + launch * 2
        if part.folds:
            backward += part.first + again
        elif level == "attention" and part.kept > part.kept_attention:
            backward += part.first + again + launch * 0.5
        if level == "full":
            backward += once
        most += part.kept
        kept += part.kept if level == "none" else part.kept_attention
        buffers += part.buffers
    kept = 1.0 if level == "full" else kept
    share = attention_share(g.a)
    return OptionCost(
        forward=forward, backward=backward,
        kept=Linear(slope=kept * g.unit), transient=Linear(slope=(buffers + most - kept) * g.unit),
        order=attention.order,
        fetched=share * attention.fetched + (1 - share) * follower.fetched,
    )  # fmt: skip
