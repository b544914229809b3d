"""What a micro-batch costs: seconds and bytes for (group size, layer options, lengths).

A pure value: it is measured, fitted or computed elsewhere, stored as a small JSON file, and asked
by planners and simulators. Group size p is the number of ranks that work on one micro-batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.costs.fingerprint import fingerprint_difference
from headrace.costs.option import ExchangeCost, OptionCost
from headrace.costs.quadratic import Linear
from headrace.costs.saving import save_whole
from headrace.errors import CostError, HeadraceError
from headrace.spec.architecture import stored_shape
from headrace.spec.cluster import Cluster
from headrace.spec.method import LayerOption, LayerPlan
from headrace.spec.model_shape import ModelShape
from headrace.spec.plan import TokenOrder, Working
from headrace.spec.profile import stored_working_bytes

__all__ = ["FORMAT", "MOST_TOKENS", "CostModel"]

FORMAT = 3
MOST_TOKENS = 2**40
"""What :meth:`CostModel.max_tokens` answers when memory does not grow with tokens."""

# Peaks are sums of floats: this many bytes are forgiven as rounding.
_ROUNDING_BYTES = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of one model on one cluster.

    ``options[p][text]`` is one layer of :class:`LayerOption` ``text`` on p ranks; ``ends[p]`` is
    embedding, head and loss together. ``state_bytes`` is what a rank always holds (stored weights,
    optimizer, gradients); ``working_bytes[p]["replicated" | "sharded"]`` what it holds in
    addition to work in groups of p. ``gather_s[p]`` is what ``sharded`` adds to one layer's
    (forward, backward) seconds without recompute where it fetches all weights, nothing where
    absent.
    ``feed_forwards`` names for every method without a feed-forward of its own the method whose it
    uses: of equal options only one is listed.

    ``scale`` multiplies all seconds: a correction learnt while training, which cannot change which
    plan is best. ``memory_margin`` is the fraction of the memory kept free.
    Raises CostError when the parts do not belong together.
    """

    shape: ModelShape
    cluster: Cluster
    fingerprint: str
    options: Mapping[int, Mapping[str, OptionCost]]
    ends: Mapping[int, OptionCost]
    exchange_s: ExchangeCost
    state_bytes: int
    working_bytes: Mapping[int, Mapping[Working, int]]
    gather_s: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    feed_forwards: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0
    memory_margin: float = 0.0

    def __post_init__(self) -> None:
        if not self.options:
            raise CostError("costs", got="no group size", wanted="at least one")
        for p, options in self.options.items():
            if not options:
                raise CostError(f"costs of cp{p}", got="no layer option", wanted="at least one")
            if p not in self.ends or set(self.working_bytes.get(p, ())) != {
                "replicated",
                "sharded",
            }:
                raise CostError(
                    f"costs of cp{p}", wanted="ends, and working bytes for replicated and sharded"
                )
        self._check_numbers()

    def _check_numbers(self) -> None:
        held = [count for pair in self.working_bytes.values() for count in pair.values()]
        for count in (self.state_bytes, *held):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise CostError("state or working bytes", got=repr(count), wanted="an int >= 0")
        for p, pair in self.gather_s.items():
            if len(pair) != 2 or not all(math.isfinite(s) and s >= 0 for s in pair):
                raise CostError(f"gather seconds of cp{p}", got=pair, wanted="two numbers >= 0")
        if not math.isfinite(self.scale) or self.scale <= 0:
            raise CostError("scale of the costs", got=self.scale, wanted="> 0")
        if not 0 <= self.memory_margin < 1:
            raise CostError("memory margin", got=self.memory_margin, wanted="0 <= margin < 1")

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The group sizes with costs, smallest first."""
        return tuple(sorted(self.options))

    @property
    def capacity_bytes(self) -> int:
        """Bytes of one device that a plan may use."""
        return math.floor(self.cluster.memory_bytes * (1 - self.memory_margin))

    def option(self, p: int, option: LayerOption) -> OptionCost:
        """The costs of one layer. Raises CostError when it has not been measured."""
        options = self.options.get(p, {})
        found = options.get(str(option)) or options.get(str(self.named(option)))
        if found is None:
            known = ", ".join(options) or f"sizes {self.group_sizes}"
            raise CostError(f"costs of {option} on cp{p}", got="none", hint=f"known are {known}")
        return found

    def named(self, option: LayerOption) -> LayerOption:
        """The name under which the costs of an option are listed: a feed-forward that several
        methods share is called after the option's attention, or else after its owner."""
        own = self.feed_forwards
        owner = own.get(option.feed_forward, option.feed_forward)
        same = own.get(option.attention, option.attention) == owner
        return replace(option, feed_forward=option.attention if same else owner)

    def order_of(self, p: int, layers: LayerPlan) -> TokenOrder:
        """The token order of a micro-batch with these layers on p ranks: zigzag when any of them
        is fastest in it, as others hardly care."""
        if p == 1:
            return "natural"
        orders = {self.option(p, option).order for option, _ in layers.counts}
        return "zigzag" if "zigzag" in orders else "natural"

    def gather_seconds(self, p: int, option: LayerOption, working: Working) -> tuple[float, float]:
        """What holding weights sharded adds to one layer's (forward, backward): a layer that is
        computed again in the backward gathers its weights once more."""
        if working == "replicated" or p not in self.gather_s:
            return 0.0, 0.0
        forward, backward = self.gather_s[p]
        again = forward if option.recompute != "none" else 0.0
        fetched = self.option(p, option).fetched
        return forward * fetched, (backward + again) * fetched

    def layer_seconds(
        self, lengths: Iterable[int], p: int, option: LayerOption, working: Working = "replicated"
    ) -> tuple[float, float]:
        """Seconds of one layer's (forward, backward) over a pack of ``lengths``."""
        cost, tokens = self.option(p, option), tuple(lengths)
        gather = self.gather_seconds(p, option, working)
        return (
            (cost.forward(tokens) + gather[0]) * self.scale,
            (cost.backward(tokens) + gather[1]) * self.scale,
        )

    def micro_batch_s(
        self, lengths: Iterable[int], p: int, layers: LayerPlan, working: Working = "replicated"
    ) -> tuple[float, float]:
        """Seconds of a micro-batch's (forward, backward): all layers and the ends."""
        tokens = tuple(lengths)
        self._check_layers(layers)
        squares, total, ends = sum(n * n for n in tokens), sum(tokens), self.ends[p]
        forward, backward = (
            ends.forward.of_sums(squares, total),
            ends.backward.of_sums(squares, total),
        )
        for option, count in layers.counts:
            cost, gather = self.option(p, option), self.gather_seconds(p, option, working)
            forward += count * (cost.forward.of_sums(squares, total) + gather[0])
            backward += count * (cost.backward.of_sums(squares, total) + gather[1])
        return forward * self.scale, backward * self.scale

    def held_bytes(self, sizes: Collection[int], working: Working) -> int:
        """Bytes of working weights of a rank that works in groups of all ``sizes`` in one step.

        Weights are pulled once per step. Replicated weights serve every size; shards of several
        sizes are different rows, so they add up, to at most all the weights.
        """
        replicated = max((self.working_bytes[p]["replicated"] for p in sizes), default=0)
        if working == "replicated":
            return replicated
        shards = [self.working_bytes[p]["sharded"] for p in sizes]
        return max(max(shards, default=0), min(sum(shards), replicated))

    def micro_batch_bytes(
        self,
        tokens: int,
        p: int,
        layers: LayerPlan,
        working: Working = "replicated",
        sizes: Collection[int] = (),
    ) -> int:
        """Peak bytes of a rank while a micro-batch of ``tokens`` runs on p ranks.

        state + working + kept of the ends + the larger of
        max over layers (kept of this and all earlier layers + transient of this layer) and
        (kept of all layers + transient of the ends). A layer's backward meets the same earlier
        layers as its forward. ``sizes``: all group sizes in which the rank works in this step.
        """
        fixed = self.state_bytes + self.held_bytes({p, *sizes}, working)
        peak = max(line(tokens) for line in self._moments(p, layers))
        return fixed + math.ceil(peak - _ROUNDING_BYTES)

    def max_tokens(
        self,
        p: int,
        layers: LayerPlan,
        working: Working = "replicated",
        sizes: Collection[int] = (),
    ) -> int:
        """The most tokens of a micro-batch that fit, 0 when none, MOST_TOKENS without limit."""
        room = self.capacity_bytes - self.state_bytes - self.held_bytes({p, *sizes}, working)
        most = float(MOST_TOKENS)
        for line in self._moments(p, layers):
            free = room - line.constant
            if free < 0:
                return 0
            if line.slope > 0:
                most = min(most, free / line.slope)
        tokens = math.floor(most)
        if tokens < MOST_TOKENS and max(x(tokens + 1) for x in self._moments(p, layers)) <= room:
            return tokens + 1
        return tokens

    def _moments(self, p: int, layers: LayerPlan) -> list[Linear]:
        """Bytes of activations at every moment that can be the peak, as lines over tokens."""
        self._check_layers(layers)
        ends = self.ends[p]
        slope, constant, lines = ends.kept.slope, ends.kept.constant, list[Linear]()
        for option, count in layers.counts:
            cost = self.option(p, option)
            slope += count * cost.kept.slope
            constant += count * cost.kept.constant
            lines.append(_plus(slope, constant, cost.transient))
        lines.append(_plus(slope, constant, ends.transient))
        return lines

    def _check_layers(self, layers: LayerPlan) -> None:
        if len(layers.options) != self.shape.layers:
            raise CostError(
                "layer plan", got=f"{len(layers.options)} layers", wanted=self.shape.layers
            )

    def replace(self, **changes: Any) -> CostModel:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def check(self, fingerprint: str) -> None:
        """Raise CostError, naming what differs, when these are costs of something else."""
        if fingerprint != self.fingerprint:
            raise CostError(
                "profile of another set-up",
                got=fingerprint_difference(self.fingerprint, fingerprint) or self.fingerprint,
                wanted="the same fingerprint",
                hint="profile again",
            )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "shape": self.shape.to_json(),
            "cluster": self.cluster.to_json(),
            "options": {
                str(p): {text: cost.to_json() for text, cost in options.items()}
                for p, options in self.options.items()
            },
            "ends": {str(p): cost.to_json() for p, cost in self.ends.items()},
            "exchange_s": asdict(self.exchange_s),
            "state_bytes": self.state_bytes,
            "working_bytes": {str(p): dict(held) for p, held in self.working_bytes.items()},
            "gather_s": {str(p): list(seconds) for p, seconds in self.gather_s.items()},
            "feed_forwards": dict(self.feed_forwards),
            "scale": self.scale,
            "memory_margin": self.memory_margin,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, fingerprint: str | None = None) -> CostModel:
        """The inverse of :meth:`to_json`.

        Raises CostError when the value is malformed, of another format, or, where ``fingerprint``
        is given, of another set-up.
        """
        # Costs of format 2 have the whole architecture in the place of its shape, those of
        # format 1 name no feed-forwards either.
        if isinstance(value, Mapping) and value.get("format") in (1, 2):
            value = {"feed_forwards": {}, **value, "format": FORMAT}
        if not isinstance(value, Mapping) or value.get("format") != FORMAT:
            got = value.get("format") if isinstance(value, Mapping) else type(value).__name__
            raise CostError("format of a profile", got=got, wanted=FORMAT, hint="profile again")
        try:
            costs = cls(
                shape=stored_shape(value),
                cluster=Cluster.from_json(value["cluster"]),
                fingerprint=value["fingerprint"],
                options={
                    int(p): {
                        str(LayerOption.parse(text)): OptionCost.from_json(cost)
                        for text, cost in options.items()
                    }
                    for p, options in value["options"].items()
                },
                ends={int(p): OptionCost.from_json(cost) for p, cost in value["ends"].items()},
                exchange_s=ExchangeCost(**value["exchange_s"]),
                state_bytes=value["state_bytes"],
                working_bytes=stored_working_bytes(value),
                gather_s={int(p): (f, b) for p, (f, b) in value["gather_s"].items()},
                feed_forwards=dict(value["feed_forwards"]),
                scale=value["scale"],
                memory_margin=value["memory_margin"],
            )
        except CostError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, HeadraceError) as error:
            raise CostError("profile", got=f"{type(error).__name__}: {error}", hint="profile again")
        if fingerprint is not None:
            costs.check(fingerprint)
        return costs

    def save(self, path: Path) -> None:
        """Write the JSON form to ``path``: whole, or not at all. Raises CostError when it cannot
        be written."""
        save_whole(path, json.dumps(self.to_json(), indent=1) + "\n", "profile")

    @classmethod
    def load(cls, path: Path, *, fingerprint: str | None = None) -> CostModel:
        """Read what :meth:`save` wrote. Raises CostError as :meth:`from_json`, or when the file
        is missing or is not JSON."""
        try:
            value = json.loads(path.read_text())
        except OSError as error:
            raise CostError(f"profile {path}", got=error.strerror, hint="make it by profiling")
        except ValueError as error:
            raise CostError(f"profile {path}", got=f"no JSON ({error})", hint="profile again")
        return cls.from_json(value, fingerprint=fingerprint)


def _plus(slope: float, constant: float, line: Linear) -> Linear:
    return Linear(slope=slope + line.slope, constant=constant + line.constant)
