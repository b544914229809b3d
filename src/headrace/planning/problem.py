"""What is to be planned: costs, devices and which choices are open, with everything that does not
depend on a batch worked out once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from headrace.costs import CostModel
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import SpecError, did_you_mean
from headrace.planning.fixed_methods import listed_frontier
from headrace.planning.frontier import Frontier
from headrace.planning.layers import layer_frontier, layer_table
from headrace.planning.method_list import ListedLayer, parse_layers
from headrace.planning.priced import PricedScheme
from headrace.planning.pricing import Pricing
from headrace.planning.published import priced
from headrace.planning.stages import Least
from headrace.spec import LayerOption, LayerPlan, Strategy
from headrace.spec.method import RECOMPUTE, Recompute
from headrace.spec.plan import Semantics, Working

__all__ = ["Costs", "Problem"]

Costs = CostModel | PipelineCosts | GroupCosts

_OTHERS = ("bucket", "packed", "dcp")
"""Baselines that plan groups, by their names in :mod:`headrace.planning.baselines`."""

_PLANNERS = ("adaptive", "static", "strategies", *_OTHERS)
_KEPT = ("_frontiers", "_ideals", "_pricings")
_PRICED_BY = ("costs", "sizes", "methods", "layers", "recompute", "holding", "stages")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Planning for ``devices`` equal ranks with ``costs``: a model's (profiled, by formula,
    rehearsed), or published ones of pipelines or of groups. A model's costs know their devices.

    ``semantics``: ``free`` groups start when their ranks are free; in ``lockstep`` all ranks meet
    at every layer, so that micro-batches run in waves. ``planner`` restricts the plans: to
    pipelines side by side (``strategies``), to one group size, ``static_size`` or the best
    (``static``), or not at all (``adaptive``); ``bucket``, ``packed`` and ``dcp`` are what others
    do (:mod:`headrace.planning.baselines`), to compare with. ``strategies`` are all that may be
    chosen, if there are any.

    Of a model's costs, ``sizes``, ``methods``, ``recompute`` and ``holding`` restrict the group
    sizes, the layers' methods, what they may recompute and how groups may hold weights; everything
    with costs by default. ``layers`` gives every layer's methods instead, as ``METHOD`` or
    ``ATTENTION/FEED_FORWARD``, with ``+LEVEL`` also what it recomputes: one entry for each layer
    or one for all. On one rank there is nothing to spread, so only the levels count there.
    Without ``stages`` no pipeline has several: for models that run in one piece. ``smoothing`` is
    the share of a micro-batch's seconds that may be lost to keep the layers of the step before. One
    problem serves many batches: it keeps what it has worked out. Raises SpecError for choices that
    do not exist.
    """

    costs: Costs
    devices: int = 0
    semantics: Semantics = "free"
    planner: str = "adaptive"
    static_size: int | None = None
    strategies: tuple[Strategy, ...] = ()
    sizes: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    layers: tuple[str, ...] | None = None
    recompute: tuple[Recompute, ...] = RECOMPUTE
    holding: tuple[Working, ...] = ("replicated", "sharded")
    stages: bool = True
    smoothing: float = 0.0
    _frontiers: dict[tuple[int, Working, int], Frontier] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _ideals: dict[int, Least] = field(default_factory=dict, init=False, repr=False, compare=False)
    _pricings: dict[str, Pricing] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self._check_words()
        if not isinstance(self.costs, CostModel):
            if (
                isinstance(self.devices, bool)
                or not isinstance(self.devices, int)
                or (self.devices < 1)
            ):
                raise SpecError("devices", got=repr(self.devices), wanted="a whole number >= 1")
            return
        if not self.devices:
            object.__setattr__(self, "devices", self.costs.cluster.devices)
        if self.devices != self.costs.cluster.devices:
            raise SpecError(
                "devices of a problem",
                got=self.devices,
                wanted=self.costs.cluster.devices,
                hint="costs hold for one number of devices, as the stored state is split over them",
            )
        for p in self.sizes or ():
            if p not in self.model.group_sizes:
                known = ", ".join(map(str, self.model.group_sizes))
                raise SpecError("group size", got=p, wanted=f"one with costs: {known}")
        if min(self.sizes or self.model.group_sizes) > self.devices:
            known = ", ".join(map(str, self.model.group_sizes))
            raise SpecError("group sizes", got=known, wanted=f"one of at most {self.devices} ranks")
        if not 0 <= self.smoothing < 1:
            raise SpecError("smoothing", got=self.smoothing, wanted="0 <= smoothing < 1")
        if self.methods is not None and self.layers is not None:
            raise SpecError("methods and layers", got="both", wanted="one of them")
        for method in self.methods or ():
            if method not in self._known:
                known = f"known are {', '.join(sorted(self._known))}"
                hint = did_you_mean(method, self._known) or known
                raise SpecError("method", got=repr(method), wanted="one with costs", hint=hint)
        if not self.group_sizes:
            raise SpecError(
                "choices of a problem",
                got=self._choices,
                hint=self._missing(),
                wanted="at least one layer option with costs"
                + (" for every layer" if self.layers else ""),
            )

    def _check_words(self) -> None:
        for name, got, known in (
            ("semantics", self.semantics, get_args(Semantics)),
            ("planner", self.planner, _PLANNERS),
        ):
            if got not in known:
                raise SpecError(
                    name,
                    got=repr(got),
                    wanted=" or ".join(known),
                    hint=did_you_mean(str(got), known),
                )
        if self.static_size is not None and self.planner != "static":
            raise SpecError("static_size", got=self.static_size, wanted="planner 'static' with it")

    @property
    def model(self) -> CostModel:
        """The costs of a model. Raises SpecError for published ones, which know no layers."""
        if not isinstance(self.costs, CostModel):
            raise SpecError("costs", got="published ones", wanted="those of a model")
        return self.costs

    @property
    def is_published(self) -> bool:
        """Whether the costs are published ones, of pipelines or of groups."""
        return not isinstance(self.costs, CostModel)

    @property
    def published(self) -> PipelineCosts | GroupCosts:
        """Published costs. Raises SpecError for those of a model."""
        if isinstance(self.costs, CostModel):
            raise SpecError("costs", got="those of a model", wanted="published ones")
        return self.costs

    @cached_property
    def published_schemes(self) -> tuple[PricedScheme, ...]:
        """The schemes of published costs that fit the devices. Raises CostError or InfeasiblePlan
        when there are none."""
        return priced(self.published, self.devices)

    @property
    def parameters(self) -> int | None:
        """The model's parameters, 12 h^2 a layer, if published costs say how many layers of what
        width."""
        facts = getattr(self.published, "facts", {}).get("architecture")
        if not isinstance(facts, Mapping):
            return None
        layers, hidden = facts.get("layers"), facts.get("hidden")
        known = isinstance(layers, int) and isinstance(hidden, int)
        return 12 * layers * hidden**2 if known else None

    @property
    def others(self) -> str | None:
        """The baseline that plans, where it is one."""
        return self.planner if self.planner in _OTHERS else None

    @property
    def nests(self) -> bool:
        """Whether groups may lie one in another: where costs are of groups."""
        return self.planner == "adaptive" and not isinstance(self.costs, PipelineCosts)

    @property
    def apart(self) -> bool:
        """Whether every pipeline has its devices for itself all the step: where costs are of
        pipelines."""
        return isinstance(self.costs, PipelineCosts) and self.semantics == "free"

    @property
    def pricing(self) -> Pricing:
        """The schemes of a model's costs."""
        if "pricing" not in self._pricings:
            self._pricings["pricing"] = Pricing(self)
        return self._pricings["pricing"]

    @property
    def ideals(self) -> dict[int, Least]:
        """Rows of whole models by width, for whoever works them out."""
        return self._ideals

    @property
    def _choices(self) -> str:
        chosen = f"layers {self.layers}" if self.layers else f"methods {self.methods}"
        return f"{chosen}, recompute {self.recompute}"

    def _missing(self) -> str:
        """What a list of layers lacks on every size."""
        texts = []
        for p, slots in self.slots.items() if self.layers else ():
            layer = next(i for i, slot in enumerate(slots) if not slot)
            texts.append(f"layer {layer} cannot run {self._listed[layer]} on cp{p}")
        return ", ".join(texts[:4])

    @cached_property
    def _known(self) -> set[str]:
        """Methods with costs on some size."""
        found = set(self.model.feed_forwards)
        for p in self.model.group_sizes:
            for option in map(LayerOption.parse, self.model.options[p]):
                found |= {option.attention, option.feed_forward}
        return found

    @cached_property
    def _listed(self) -> tuple[ListedLayer, ...]:
        return parse_layers(self.layers or (), self.model.shape.layers, self._known)

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes that may be used, smallest first."""
        return tuple(p for p, options in self.options.items() if options)

    @cached_property
    def options(self) -> dict[int, tuple[LayerOption, ...]]:
        """Layer options that may be used on every size of at most all devices; none where some
        layer cannot be run."""
        return {
            p: tuple(dict.fromkeys(option for slot in slots for option in slot))
            if all(slots)
            else ()
            for p, slots in self.slots.items()
        }

    @cached_property
    def slots(self) -> dict[int, tuple[tuple[LayerOption, ...], ...]]:
        """For every size the options of each layer, or of all layers in one where they are free."""
        sizes = [p for p in sorted(set(self.sizes or self.model.group_sizes)) if p <= self.devices]
        return {p: self._slots(p, self._levels(p)) for p in sizes}

    def _levels(self, p: int) -> tuple[LayerOption, ...]:
        options = map(LayerOption.parse, self.model.options[p])
        return tuple(option for option in options if option.recompute in self.recompute)

    def _slots(
        self, p: int, options: tuple[LayerOption, ...]
    ) -> tuple[tuple[LayerOption, ...], ...]:
        if self.layers is not None:
            slots = tuple(
                tuple(o for o in options if listed.allows(o, self.model, p))
                for listed in self._listed
            )
            return slots[:1] if len(set(slots)) == 1 else slots
        if self.methods is None:
            return (options,)
        owners = self.model.feed_forwards
        owned = {owners.get(method, method) for method in self.methods}
        return (
            tuple(
                o
                for o in options
                if o.attention in self.methods
                and owners.get(o.feed_forward, o.feed_forward) in owned
            ),
        )

    @property
    def static_sizes(self) -> tuple[int, ...]:
        """Sizes of groups that a static plan may have, smallest first."""
        if self.is_published:
            return tuple(sorted({s.devices for s in self.published_schemes if s.depth == 1}))
        return self.group_sizes

    def replace(self, **changes: Any) -> Problem:
        """The same costs under other restrictions; what is worked out of them is kept where it
        still holds."""
        other = replace(self, **changes)
        if all(getattr(other, name) == getattr(self, name) for name in _PRICED_BY):
            for kept in _KEPT:
                object.__setattr__(other, kept, getattr(self, kept))
        return other

    def rescaled(self, scale: float) -> Problem:
        """The same problem with another ``scale`` of its seconds; what is worked out is kept, as
        it does not depend on the scale."""
        other = replace(self, costs=self.model.replace(scale=scale))
        for kept in _KEPT:
            object.__setattr__(other, kept, getattr(self, kept))
        return other

    def frontier(self, p: int, working: Working, sizes: Collection[int] = ()) -> Frontier:
        """Layer plans of size p on ranks that also work in groups of ``sizes``."""
        held = self.model.held_bytes({p, *sizes}, working)
        key = (p, working, held)
        if key not in self._frontiers:
            self._frontiers[key] = self._frontier(p, working, sizes)
        return self._frontiers[key]

    def _frontier(self, p: int, working: Working, sizes: Collection[int]) -> Frontier:
        unscaled, options = self.model.replace(scale=1.0), self.options[p]
        if len(self.slots[p]) == 1:
            return layer_frontier(unscaled, p, working, sizes, options)
        table = layer_table(unscaled, p, working, sizes, options)
        return listed_frontier(table, self.slots[p])

    def uniform_layers(self, p: int) -> list[LayerPlan]:
        """Layer plans of size p of equal layers, or of one level where their methods are given:
        the thriftiest plan keeps about as much as the thriftiest of them."""
        slots = self.slots[p]
        if len(slots) == 1:
            return [LayerPlan.uniform(o, self.model.shape.layers) for o in slots[0]]
        return [
            LayerPlan(options=tuple(_at_level(slot, level) for slot in slots))
            for level in self.recompute
        ]

    def allows(self, p: int, layers: LayerPlan) -> bool:
        """Whether a micro-batch on p ranks may have these layers, memory aside."""
        slots, number = self.slots.get(p, ()), self.model.shape.layers
        if len(layers.options) != number:
            return False
        each = slots * number if len(slots) == 1 else slots
        named = map(self.model.named, layers.options)
        return bool(each) and all(o in slot for o, slot in zip(named, each, strict=True))


def _at_level(slot: tuple[LayerOption, ...], level: Recompute) -> LayerOption:
    return next((option for option in slot if option.recompute == level), slot[0])
