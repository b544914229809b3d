"""What a micro-batch costs: seconds and bytes for (group size, layer options, lengths).

A pure value: it is measured, fitted or computed elsewhere, stored as a small JSON file, and asked
by planners and simulators. Group size p is the number of ranks that work on one micro-batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.costs.fingerprint import fingerprint_difference
from headrace.costs.quadratic import Linear, Quadratic
from headrace.costs.saving import load_costs, save_whole
from headrace.errors import CostError, HeadraceError
from headrace.spec.architecture import stored_shape
from headrace.spec.cluster import Cluster
from headrace.spec.given import number, shown, whole
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.model_shape import ModelShape
from headrace.spec.plan import Pipeline, Plan, TokenOrder, Working
from headrace.spec.profile import stored_working_bytes
from headrace.spec.strategy import Scheme, Stage

__all__ = [
    "CostModel",
    "ExchangeCost",
    "FORMAT",
    "MOST_TOKENS",
    "OptionCost",
    "held_bytes",
    "kept_line",
    "message_s",
    "moments",
    "segment_rows",
    "segment_seconds",
    "stage_gather",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCost:
    """One layer of one option on one group size, or the ends of the model.

    Attributes:
        forward: Seconds of the forward.
        backward: Seconds of the backward, recomputation included.
        kept: Bytes that a rank keeps from forward to backward, by tokens of the whole group's pack.
        transient: Bytes that it needs only while the layer runs forward or backward, likewise.
        order: The token order for which the seconds hold.
        fetched: The share of the layer's weights that a rank fetches where they are held sharded.

    Raises:
        CostError: For an order that is not known, and for a share outside of 0 to 1.
    """

    forward: Quadratic
    backward: Quadratic
    kept: Linear
    transient: Linear
    order: TokenOrder = "natural"
    fetched: float = 1.0

    def __post_init__(self) -> None:
        """Raise CostError for an unknown token order and for a fetched share outside 0 to 1."""
        if self.order not in get_args(TokenOrder):
            wanted = " or ".join(get_args(TokenOrder))
            raise CostError("token order of an option", got=repr(self.order), wanted=wanted)
        if not 0 <= self.fetched <= 1:
            raise CostError("fetched share of an option", got=self.fetched, wanted="0 to 1")

    def to_json(self) -> dict[str, Any]:
        """The costs as JSON.

        Returns:
            An object that :meth:`from_json` reads back.
        """
        return {
            "forward": self.forward.to_json(),
            "backward": self.backward.to_json(),
            "kept": self.kept.to_json(),
            "transient": self.transient.to_json(),
            "order": self.order,
            "fetched": self.fetched,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OptionCost:
        """Read what :meth:`to_json` gave. Objects of older files lack ``order`` (natural) and
        ``fetched`` (all weights).

        Args:
            value: The JSON object.

        Returns:
            The costs.
        """
        (fa, fb, fc), (ba, bb, bc) = _numbers(value, "forward"), _numbers(value, "backward")
        kept_slope, kept_constant = _numbers(value, "kept")
        transient_slope, transient_constant = _numbers(value, "transient")
        return cls(
            forward=Quadratic(a=fa, b=fb, c=fc),
            backward=Quadratic(a=ba, b=bb, c=bc),
            kept=Linear(slope=kept_slope, constant=kept_constant),
            transient=Linear(slope=transient_slope, constant=transient_constant),
            order=value.get("order", "natural"),
            fetched=value.get("fetched", 1.0),
        )


def _numbers(value: Mapping[str, Any], name: str) -> list[float]:
    """The list of numbers under a name of a JSON object, as floats. Raises CostError for others."""
    return [number(f"{name} of an option", each, error=CostError) for each in value[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """Seconds that a step pays once.

    Attributes:
        pull_s: Seconds in which all weights are pulled before the first forward.
        push_s: Seconds in which all gradients are pushed after the last backward.
        update_s: Seconds in which the weights are updated.
        sharded_share: The fraction of the pull's and the push's seconds that is left where a plan's
            only group spans all devices and shards the weights. Its ranks work with the rows that
            they store, so only rows that another rank stores have to move.

    Raises:
        CostError: For seconds that are negative or not finite.
    """

    pull_s: float = 0.0
    push_s: float = 0.0
    update_s: float = 0.0
    sharded_share: float = 1.0

    def __post_init__(self) -> None:
        """Raise CostError for seconds or a share that are negative or not finite."""
        for name, value in asdict(self).items():
            # Of most plans a share is made anew, of numbers that are right.
            if type(value) is not float or not 0 <= value < math.inf:
                number(f"exchange.{name}", value, least=0, error=CostError)

    @property
    def total_s(self) -> float:
        """Seconds of pull, push and update together."""
        return self.pull_s + self.push_s + self.update_s

    def of_share(self, share: float) -> ExchangeCost:
        """The costs where only a share of the weights is pulled and pushed.

        Args:
            share: The share of pull and push, from 0 to 1.

        Returns:
            The seconds.
        """
        return replace(self, pull_s=self.pull_s * share, push_s=self.push_s * share)


FORMAT = 3
MOST_TOKENS = 2**40
"""What :meth:`CostModel.max_tokens` answers when memory does not grow with tokens."""

# Peaks are sums of floats: this many bytes are forgiven as rounding.
_ROUNDING_BYTES = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What micro-batches of one model cost on one cluster, in seconds and bytes.

    Group size p is the number of ranks that work on one micro-batch.

    Attributes:
        shape: The shape of the model: layers, features, elements of its weights.
        cluster: The devices and the bytes of each.
        fingerprint: What the costs are of, as ``key=value`` facts.
        options: ``options[p][text]`` is one layer of the layer option ``text`` on p ranks.
        ends: ``ends[p]`` is embedding, head and loss together on p ranks.
        exchange_s: Seconds of pull, push and update of every step.
        state_bytes: Bytes that a rank always holds: stored weights, optimizer, gradients.
        working_bytes: ``working_bytes[p]["replicated" | "sharded"]`` are bytes that a rank holds in
            addition to work in groups of p.
        gather_s: ``gather_s[p]`` are the seconds that ``sharded`` adds to one layer's forward and
            backward without recompute, where it fetches all weights; nothing where absent.
        feed_forwards: For every method without a feed-forward of its own, the method whose
            feed-forward it uses. Options that differ in nothing but the names of such methods cost
            the same, and ``options`` lists one of them (:meth:`named`).
        scale: What all seconds are multiplied by: a correction learnt while training, which cannot
            change which plan is best.
        memory_margin: The fraction of the memory that plans leave free.

    Raises:
        CostError: When the parts do not belong together.
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
        """Raise CostError unless every group size has layer options, ends, and working bytes of
        both layouts."""
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
        """Raise CostError for bytes, seconds, scale or margin out of range."""
        held = [count for pair in self.working_bytes.values() for count in pair.values()]
        for count in (self.state_bytes, *held):
            whole("state or working bytes", count, error=CostError)
        for p, (forward_s, backward_s) in self.gather_s.items():
            for seconds in (forward_s, backward_s):
                number(f"gather seconds of cp{p}", seconds, least=0, error=CostError)
        if number("scale of the costs", self.scale, error=CostError) <= 0:
            raise CostError("scale of the costs", got=self.scale, wanted="> 0")
        if not 0 <= number("memory margin", self.memory_margin, error=CostError) < 1:
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
        """The costs of one layer.

        Args:
            p: Ranks of the group.
            option: The method and recompute level of the layer.

        Returns:
            Its seconds and bytes, without ``scale``.

        Raises:
            CostError: When the option has no costs on p ranks.
        """
        options = self.options.get(p, {})
        found = options.get(str(option)) or options.get(str(self.named(option)))
        if found is None:
            known = ", ".join(options) or f"sizes {self.group_sizes}"
            raise CostError(f"costs of {option} on cp{p}", got="none", hint=f"known are {known}")
        return found

    def named(self, option: LayerOption) -> LayerOption:
        """Find the listed option whose costs an option has.

        Several methods may share one feed-forward, so that a layer option has several names. The
        listed one names the feed-forward like the attention where that method uses the same
        feed-forward, else by the method that owns it.

        Args:
            option: Any option of a layer.

        Returns:
            The option of equal costs that is listed.
        """
        owners = self.feed_forwards
        owner = owners.get(option.feed_forward, option.feed_forward)
        used_by_attention = owners.get(option.attention, option.attention) == owner
        return replace(option, feed_forward=option.attention if used_by_attention else owner)

    def order_of(self, p: int, layers: LayerPlan) -> TokenOrder:
        """The token order of a micro-batch: zigzag when any of its layers is fastest in it, as the
        other layers hardly care.

        Args:
            p: Ranks of the group.
            layers: The option of every layer.

        Returns:
            ``natural`` or ``zigzag``.

        Raises:
            CostError: When an option has no costs on p ranks.
        """
        if p == 1:
            return "natural"
        orders = {self.option(p, option).order for option, _ in layers.counts}
        return "zigzag" if "zigzag" in orders else "natural"

    def gather_seconds(self, p: int, option: LayerOption, working: Working) -> tuple[float, float]:
        """Seconds that sharded weights add to one layer. A layer that is computed again in the
        backward gathers its weights once more.

        Args:
            p: Ranks of the group.
            option: The method and recompute level of the layer.
            working: How the group holds weights.

        Returns:
            Seconds of (forward, backward), without ``scale``.

        Raises:
            CostError: When the option has no costs on p ranks.
        """
        if working == "replicated" or p not in self.gather_s:
            return 0.0, 0.0
        forward, backward = self.gather_s[p]
        again = forward if option.recompute != "none" else 0.0
        fetched = self.option(p, option).fetched
        return forward * fetched, (backward + again) * fetched

    def layer_seconds(
        self, lengths: Iterable[int], p: int, option: LayerOption, working: Working = "replicated"
    ) -> tuple[float, float]:
        """Seconds of one layer over a pack.

        Args:
            lengths: Tokens of each sequence of the pack.
            p: Ranks of the group.
            option: The method and recompute level of the layer.
            working: How the group holds weights.

        Returns:
            Seconds of (forward, backward).

        Raises:
            CostError: When the option has no costs on p ranks.
        """
        cost, tokens = self.option(p, option), tuple(lengths)
        gather = self.gather_seconds(p, option, working)
        return (
            (cost.forward(tokens) + gather[0]) * self.scale,
            (cost.backward(tokens) + gather[1]) * self.scale,
        )

    def micro_batch_s(
        self, lengths: Iterable[int], p: int, layers: LayerPlan, working: Working = "replicated"
    ) -> tuple[float, float]:
        """Seconds of a micro-batch: all layers and the ends of the model.

        Args:
            lengths: Tokens of each of its sequences.
            p: Ranks of the group.
            layers: The option of every layer.
            working: How the group holds weights.

        Returns:
            Seconds of (forward, backward).

        Raises:
            CostError: For another number of layers than the model's, and for an option without
                costs on p ranks.
        """
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
        """Bytes of the working weights of a rank.

        Weights are pulled once per step. Replicated weights serve every group size; shards of
        several sizes are different rows, so they add up, to at most all the weights.

        Args:
            sizes: All group sizes in which the rank works in one step.
            working: How the groups hold weights.

        Returns:
            Bytes, gradients included.
        """
        replicated = max((self.working_bytes[p]["replicated"] for p in sizes), default=0)
        if working == "replicated":
            return replicated
        shards = [self.working_bytes[p]["sharded"] for p in sizes]
        # At most all the weights, but never less than the largest shard.
        return max(max(shards, default=0), min(sum(shards), replicated))

    def micro_batch_bytes(
        self,
        tokens: int,
        p: int,
        layers: LayerPlan,
        working: Working = "replicated",
        sizes: Collection[int] = (),
    ) -> int:
        """Peak bytes of a rank while a micro-batch runs.

        state + working + kept of the ends + the larger of max over layers (kept of this and all
        earlier layers + transient of this layer) and (kept of all layers + transient of the ends).
        A layer's backward meets the same earlier layers as its forward.

        Args:
            tokens: Tokens of the whole group's pack.
            p: Ranks of the group.
            layers: The option of every layer.
            working: How the group holds weights.
            sizes: All group sizes in which the rank works in this step; p is among them anyway.

        Returns:
            Bytes.

        Raises:
            CostError: For another number of layers than the model's, and for an option without
                costs on p ranks.
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
        """The most tokens of a micro-batch that fit into the memory of a rank.

        Args:
            p: Ranks of the group.
            layers: The option of every layer.
            working: How the group holds weights.
            sizes: All group sizes in which the rank works in this step; p is among them anyway.

        Returns:
            Tokens of the whole group's pack: 0 when none fits, 2^40 when memory sets no limit.

        Raises:
            CostError: For another number of layers than the model's, and for an option without
                costs on p ranks.
        """
        room = self.capacity_bytes - self.state_bytes - self.held_bytes({p, *sizes}, working)
        most = float(MOST_TOKENS)
        for line in self._moments(p, layers):
            free = room - line.constant
            if free < 0:
                return 0
            if line.slope > 0:
                most = min(most, free / line.slope)
        tokens = math.floor(most)
        # The division may have been rounded down below a whole number that fits.
        if tokens < MOST_TOKENS:
            peak = max(line(tokens + 1) for line in self._moments(p, layers))
            if peak <= room:
                return tokens + 1
        return tokens

    def _moments(self, p: int, layers: LayerPlan) -> list[Linear]:
        """Bytes of activations at every moment that can be the peak, as lines over the tokens of a
        pack: what is kept up to the last layer of each run of equal options, plus what this layer
        needs in passing; then the same of the ends."""
        self._check_layers(layers)
        ends = self.ends[p]
        # Bytes kept so far, as a line over tokens; what the ends keep is there all the time.
        slope, constant, lines = ends.kept.slope, ends.kept.constant, list[Linear]()
        for option, count in layers.counts:
            cost = self.option(p, option)
            slope += count * cost.kept.slope
            constant += count * cost.kept.constant
            lines.append(_plus(slope, constant, cost.transient))
        lines.append(_plus(slope, constant, ends.transient))
        return lines

    def _check_layers(self, layers: LayerPlan) -> None:
        """Raise CostError for another number of layers than the model's."""
        if len(layers.options) != self.shape.layers:
            raise CostError(
                "layer plan", got=f"{len(layers.options)} layers", wanted=self.shape.layers
            )

    def replace(self, **changes: Any) -> CostModel:
        """Copy the costs with some fields changed.

        Args:
            changes: The new values by the names of fields.

        Returns:
            The copy.

        Raises:
            CostError: As for new costs.
        """
        return replace(self, **changes)

    def check(self, fingerprint: str) -> None:
        """Refuse costs of another set-up.

        Args:
            fingerprint: The fingerprint that these costs should have.

        Raises:
            CostError: When they have another one; it names what differs.
        """
        if fingerprint != self.fingerprint:
            raise CostError(
                "profile of another set-up",
                got=fingerprint_difference(self.fingerprint, fingerprint) or self.fingerprint,
                wanted="the same fingerprint",
                hint="profile again",
            )

    def to_json(self) -> dict[str, Any]:
        """The costs as JSON.

        Returns:
            An object that :meth:`from_json` reads back.
        """
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
        """Read what :meth:`to_json` gave.

        Args:
            value: The JSON object.
            fingerprint: The fingerprint that the costs should have; any when left out.

        Returns:
            The costs.

        Raises:
            CostError: When the object is malformed, of another format, or of another set-up.
        """
        # Costs of format 2 have the whole architecture in the place of its shape, those of
        # format 1 name no feed-forwards either.
        if isinstance(value, Mapping) and value.get("format") in (1, 2):
            value = {"feed_forwards": {}, **value, "format": FORMAT}
        if isinstance(value, Mapping) and "kind" in value:
            raise CostError(
                "costs of a model",
                got=f"published costs of kind {shown(value['kind'])}",
                wanted="those that headrace profile --json writes",
                hint="published ones are planned with without a CONFIG, or read by hr.costs.load",
            )
        if not isinstance(value, Mapping) or value.get("format") != FORMAT:
            got = repr(value.get("format")) if isinstance(value, Mapping) else type(value).__name__
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

    def save(self, path: str | Path) -> None:
        """Write the costs to a file as JSON, whole or not at all.

        Args:
            path: The file; its folder is made when there is none.

        Raises:
            CostError: When the file cannot be written.
        """
        save_whole(path, json.dumps(self.to_json(), indent=1) + "\n", "profile")

    @classmethod
    def load(cls, path: str | Path, *, fingerprint: str | None = None) -> CostModel:
        """Read a file of :meth:`save`.

        Args:
            path: The file.
            fingerprint: The fingerprint that the costs should have; any when left out.

        Returns:
            The costs.

        Raises:
            CostError: When the file is missing, is no JSON, or holds what :meth:`from_json`
                refuses.
        """
        make = partial(cls.from_json, fingerprint=fingerprint)
        return load_costs(path, make, "headrace profile makes one")


def _plus(slope: float, constant: float, line: Linear) -> Linear:
    """The sum of the line ``slope`` x tokens + ``constant`` and another one."""
    return Linear(slope=slope + line.slope, constant=constant + line.constant)


Floats = NDArray[np.float64]


def stage_gather(
    costs: CostModel, scheme: Scheme, option: LayerOption, working: Working
) -> tuple[float, float]:
    """Seconds (forward, backward) that fetching weights adds to one layer of a stage.

    Ranks of a tensor block hold a layer's weights together. A method that computes with its own
    shard needs no more than those; others are charged what a group of the whole stage would fetch,
    which is the most it can be.
    """
    width = scheme.width
    parts = scheme.parts(sharded=working == "sharded")
    if parts == 1 or width not in costs.options:
        return 0.0, 0.0
    # Tensor blocks: a method that fetches less than all weights computes with its own shard.
    if parts < width and costs.option(width, option).fetched < 1:
        return 0.0, 0.0
    return costs.gather_seconds(width, option, "sharded")


def segment_seconds(
    costs: CostModel,
    tokens: Sequence[int],
    pipeline: Pipeline,
    stage: Stage,
    layers: LayerPlan,
    working: Working,
) -> tuple[tuple[float, float], ...]:
    """Seconds of (forward, backward) of every segment of a stage for a pack of ``tokens``, in the
    order of ``stage.buckets``. Embedding, head and loss together are charged to the head's segment.

    Raises CostError when the costs lack the width or an option.
    """
    width, segments = len(stage.ranks), list[tuple[float, float]]()
    squares, total = sum(n * n for n in tokens), sum(tokens)
    of_option: dict[LayerOption, tuple[float, float]] = {}  # equal layers are computed once
    for bucket in stage.buckets:
        if bucket == 0:  # the embedding, which is charged to the head
            segments.append((0.0, 0.0))
        elif bucket > stage.stop:  # the head, behind the last layer
            ends = costs.ends[width]
            forward_s = ends.forward.of_sums(squares, total)
            backward_s = ends.backward.of_sums(squares, total)
            segments.append((forward_s * costs.scale, backward_s * costs.scale))
        else:  # layers are counted from bucket 1
            option = layers.options[bucket - 1]
            if option not in of_option:
                cost = costs.option(width, option)
                gather = stage_gather(costs, pipeline.scheme, option, working)
                of_option[option] = (
                    (cost.forward.of_sums(squares, total) + gather[0]) * costs.scale,
                    (cost.backward.of_sums(squares, total) + gather[1]) * costs.scale,
                )
            segments.append(of_option[option])
    return tuple(segments)


def segment_rows(
    costs: CostModel, scheme: Scheme, layers: LayerPlan, working: Working
) -> tuple[Floats, Floats]:
    """Coefficients of the seconds of every segment of a pipeline of one stage: an array of the
    forwards and one of the backwards, each [buckets, 3] with rows (a, b, c) of
    a sum_i l_i^2 + b sum_i l_i + c. The seconds are those of :func:`segment_seconds`."""
    width = scheme.width
    forward_rows, backward_rows = [(0.0, 0.0, 0.0)], [(0.0, 0.0, 0.0)]  # bucket 0 is free
    for option, count in layers.counts:
        cost = costs.option(width, option)
        forward, backward = cost.forward, cost.backward
        forward_gather_s, backward_gather_s = stage_gather(costs, scheme, option, working)
        forward_rows += [(forward.a, forward.b, forward.c + forward_gather_s)] * count
        backward_rows += [(backward.a, backward.b, backward.c + backward_gather_s)] * count
    ends = costs.ends[width]
    forward_rows.append((ends.forward.a, ends.forward.b, ends.forward.c))
    backward_rows.append((ends.backward.a, ends.backward.b, ends.backward.c))
    return np.array(forward_rows) * costs.scale, np.array(backward_rows) * costs.scale


def exchange_of(costs: CostModel, plan: Plan) -> ExchangeCost:
    """Seconds of pull, push and update in the step of a plan. They are less where the plan shards
    weights and every pipeline with work spans all devices, as then only a share of the weights has
    to move."""
    exchange = costs.exchange_s
    if exchange.sharded_share == 1 or plan.working != "sharded":
        return exchange
    used = {micro.pipeline for micro in plan.micro_batches}
    if any(plan.pipelines[n].scheme.width < plan.devices for n in used):
        return exchange
    return exchange.of_share(exchange.sharded_share)


def message_s(costs: CostModel, rows: int) -> float:
    """Seconds of a message of ``rows`` rows (tokens) of activations to a neighbouring stage.

    The bandwidth is that of the measured pull, which moves (N - 1) / N of all weights to each
    of N ranks; 0 seconds where costs have no measured pull.
    """
    n, shape = costs.cluster.devices, costs.shape
    pulled_elements = shape.elements * (n - 1) / n
    if n == 1 or pulled_elements == 0:
        return 0.0
    return costs.exchange_s.pull_s * costs.scale * rows * shape.hidden / pulled_elements


def held_bytes(costs: CostModel, pipeline: Pipeline, working: Working) -> tuple[int, ...]:
    """Bytes of working weights and their gradients on a rank, for each stage of a pipeline.

    They are the bytes that the costs list for replicated weights, times the fraction of the model's
    elements that the rank works with. So they are 0 where the costs list none, as for a single rank
    that works with its stored weights.
    """
    scheme = pipeline.scheme
    width, parts = scheme.width, scheme.parts(sharded=working == "sharded")
    # A single stage whose ranks hold all rows, or one part each, is what the costs list.
    if scheme.pipeline == 1 and parts in (1, width):
        return (costs.working_bytes[width]["replicated" if parts == 1 else "sharded"],)
    replicated = costs.working_bytes[width]["replicated"]
    return tuple(
        round(replicated * costs.shape.held_share(stage.buckets, parts))
        for stage in pipeline.stages(costs.shape.layers)
    )


def kept_line(costs: CostModel, stage: Stage, layers: LayerPlan) -> Linear:
    """Bytes that a rank of a stage keeps of a micro-batch from its forward to its backward, as a
    line over the tokens of the pack."""
    width = len(stage.ranks)
    own_layers = layers.options[stage.start : stage.stop]
    lines = [costs.option(width, option).kept for option in own_layers]
    if stage.last:
        lines.append(costs.ends[width].kept)
    return Linear(
        slope=sum(line.slope for line in lines), constant=sum(line.constant for line in lines)
    )


def moments(costs: CostModel, stage: Stage, layers: LayerPlan) -> list[Linear]:
    """Bytes of a micro-batch's activations on a rank of a stage at every moment that can be its
    peak, as lines over the tokens of the pack: while each layer runs, then while the head runs. At
    each there is what has been kept so far and what the segment needs in passing."""
    width = len(stage.ranks)
    first = costs.ends[width].kept if stage.last else Linear()
    # Bytes kept so far, as a line over tokens; what the ends keep is there all the time.
    slope, constant, lines = first.slope, first.constant, list[Linear]()
    for option in layers.options[stage.start : stage.stop]:
        cost = costs.option(width, option)
        slope, constant = slope + cost.kept.slope, constant + cost.kept.constant
        lines.append(_plus(slope, constant, cost.transient))
    if stage.last:
        lines.append(_plus(slope, constant, costs.ends[width].transient))
    return lines
