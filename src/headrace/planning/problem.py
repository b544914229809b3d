"""What is to be planned: costs, devices and which choices are open, with everything that does not
depend on a batch worked out once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.costs import CostModel
from headrace.costs.cost_model import held_bytes
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import InfeasiblePlan, SpecError, did_you_mean
from headrace.planning.batch import prices
from headrace.planning.fixed_methods import listed_frontier
from headrace.planning.layer_choice import layer_frontier, layer_table
from headrace.planning.method_list import ListedLayer, parse_layers
from headrace.planning.mixtures import Table, mixed_frontier
from headrace.planning.priced import (
    Frontier,
    LayerTable,
    Least,
    PricedScheme,
    StageCosts,
    shares_of,
)
from headrace.planning.published import priced
from headrace.planning.tolerances import CLOSE
from headrace.spec import LayerOption, LayerPlan, Pipeline, Scheme, Strategy
from headrace.spec.given import number, whole
from headrace.spec.known_methods import block_ranks
from headrace.spec.layer_plan import RECOMPUTE, Recompute
from headrace.spec.plan import Semantics, Working
from headrace.units import counted

__all__ = [
    "Costs",
    "Pricing",
    "Problem",
    "Slots",
]

Slots = tuple[tuple[LayerOption, ...], ...]
"""The options of each layer, or one tuple for all layers where they are free."""

_MOST_TENSOR = 8
"""Largest tensor degree that is proposed, the ranks of a usual machine."""

_LENGTHS = 40
"""Number of lengths for which schemes are compared, up to the longest that one holds."""


class Pricing:
    """Prices the schemes of a problem with a model's costs, each when first asked for. Prices are
    without the costs' scale, so they serve all of them.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.costs: CostModel = problem.model.replace(scale=1.0)
        # Caches of the methods below, by their arguments.
        self._priced: dict[tuple[Scheme, Working], PricedScheme | None] = {}
        self._kinds: dict[tuple[str, Working], tuple[PricedScheme, ...]] = {}
        self._lockstep: dict[str, tuple[PricedScheme, ...]] = {}
        self._nested: dict[tuple[Working, tuple[int, ...]], tuple[PricedScheme, ...]] = {}

    def groups(self, weights: Working) -> tuple[PricedScheme, ...]:
        """Priced schemes of one stage without tensor parallelism, one for each group size on which
        at least one token fits into memory."""
        schemes = [Scheme(context=p) for p in self.problem.group_sizes]
        return self._price_all("groups", weights, schemes)

    def _price_all(
        self, cache_name: str, weights: Working, schemes: Iterable[Scheme]
    ) -> tuple[PricedScheme, ...]:
        """Price ``schemes`` and leave out those in whose memory not even one token fits. The result
        is cached by ``cache_name`` and ``weights``."""
        if (cache_name, weights) not in self._kinds:
            prices = (self.price(scheme, weights) for scheme in schemes)
            self._kinds[cache_name, weights] = tuple(
                priced for priced in prices if priced is not None
            )
        return self._kinds[cache_name, weights]

    def lockstep(self) -> tuple[PricedScheme, ...]:
        """Groups of every size for steps in lockstep. Each rank holds one shard of the weights, cut
        over the whole world, and gathers every layer from all ranks, which costs seconds."""
        if "lockstep" not in self._lockstep:
            groups = (self._in_lockstep(p) for p in self.problem.group_sizes)
            self._lockstep["lockstep"] = tuple(group for group in groups if group.most_tokens)
        return self._lockstep["lockstep"]

    def _in_lockstep(self, p: int) -> PricedScheme:
        """A group of ``p`` ranks in lockstep, priced by its best layer plans."""
        table, slots = self.lockstep_table(p, self.problem.options[p]), self.problem.slots[p]
        if len(slots) == 1:  # all layers choose from the same options
            frontier = mixed_frontier(table, self.costs.shape.layers)
        else:
            frontier = listed_frontier(table, slots)
        return PricedScheme(scheme=Scheme(context=p), frontier=frontier, weights="sharded")

    def lockstep_table(self, p: int, options: Sequence[LayerOption]) -> Table:
        """Seconds and bytes of layers with the given options on a group of ``p`` ranks in lockstep,
        where every layer's weights are gathered from the whole world."""
        costs, world = self.costs, max(self.costs.working_bytes)
        room = costs.capacity_bytes - costs.state_bytes - costs.held_bytes({world}, "sharded")
        # No gather within the group is charged: the gather from the world replaces it.
        table = Table.of(costs, p, "replicated", options, room)
        seconds = table.seconds.copy()
        # Each layer's constant (column 2; the last row is no layer) grows by the gathers of its
        # forward and backward. Recomputing costs no third one: the backward gathers anyway.
        seconds[:-1, 2] += sum(costs.gather_s.get(world, (0.0, 0.0)))
        return replace(table, seconds=seconds)

    def nested(self, weights: Working, sizes: Sequence[int]) -> tuple[PricedScheme, ...]:
        """Groups of each of ``sizes``, priced for ranks that work in groups of all these sizes
        within one step, and so hold the weight shards of every size. Sizes on which no token fits
        into memory are left out; there are none where the problem does not allow ``weights``."""
        key = (weights, tuple(sizes))
        if key not in self._nested:
            schemes = list[PricedScheme]()
            for p in sizes if weights in self.problem.holding else ():
                frontier = self.problem.frontier(p, weights, sizes)
                if frontier.most_tokens:
                    scheme = Scheme(context=p)
                    schemes.append(PricedScheme(scheme=scheme, frontier=frontier, weights=weights))
            self._nested[key] = tuple(schemes)
        return self._nested[key]

    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes that may be priced: groups of one stage, and those with tensor blocks or
        stages."""
        return (*(Scheme(context=p) for p in self.problem.group_sizes), *self._deeper())

    def deeper(self, weights: Working) -> tuple[PricedScheme, ...]:
        """Schemes with tensor blocks or several stages, which leave more memory for activations.
        Their tensor and pipeline degrees are powers of two. Schemes that never pay are left out."""
        if ("paying", weights) not in self._kinds:
            groups = [group for held in self.problem.holding for group in self.groups(held)]
            self._kinds["paying", weights] = _paying(self._all_deeper(weights), groups)
        return self._kinds["paying", weights]

    def unlikely(self, weights: Working) -> tuple[PricedScheme, ...]:
        """Schemes that :meth:`deeper` leaves out: no search looks at them, but bounds count them,
        as that they never pay is not proved of every batch."""
        if ("unlikely", weights) not in self._kinds:
            paying = self.deeper(weights)
            self._kinds["unlikely", weights] = tuple(
                scheme for scheme in self._all_deeper(weights) if scheme not in paying
            )
        return self._kinds["unlikely", weights]

    def _all_deeper(self, weights: Working) -> tuple[PricedScheme, ...]:
        """All schemes with tensor blocks or several stages in whose memory a token fits."""
        return self._price_all("deeper", weights, self._deeper())

    def _deeper(self) -> Iterator[Scheme]:
        """All schemes with tensor blocks or several stages that the costs support, by stage width,
        then by tensor degree, then by depth."""
        devices = self.problem.devices
        layers = self.costs.shape.layers if self.problem.stages else 1
        for width in self.problem.group_sizes:
            for tensor in (t for t in _powers(min(width, _MOST_TENSOR)) if width % t == 0):
                for depth in _powers(min(layers, devices // width)):
                    scheme = Scheme(tensor=tensor, context=width // tensor, pipeline=depth)
                    if scheme != Scheme(context=width) and self.slots(scheme):
                        yield scheme

    def slots(self, scheme: Scheme) -> Slots:
        """The options of each layer, or one tuple for all where they are free; empty when the costs
        do not support the scheme."""
        width, problem = scheme.width, self.problem
        most = self.costs.shape.layers if problem.stages else 1
        if width not in problem.group_sizes or scheme.pipeline > most:
            return ()
        slots = problem.slots[width]
        if scheme.tensor > 1:
            slots = tuple(
                tuple(o for o in slot if self._uses_block_shards(scheme, o)) for slot in slots
            )
        return slots if all(slots) else ()

    def _uses_block_shards(self, scheme: Scheme, option: LayerOption) -> bool:
        """Whether a layer option computes directly with the weight shards of one tensor block of
        the scheme, without gathering them from other ranks."""
        return block_ranks(option, scheme.width, self.costs.shape.tensor_ranks) == scheme.tensor

    def price(self, scheme: Scheme, weights: Working) -> PricedScheme | None:
        """A scheme with weights held one way; None when no token fits it."""
        # Without ranks to shard weights over, both ways to hold them are the same.
        one_rank = scheme.context == 1
        key: tuple[Scheme, Working] = (scheme, "replicated" if one_rank else weights)
        if key not in self._priced:
            held_so = weights in self.problem.holding or one_rank
            priced = self._price_uncached(*key) if held_so and self.slots(scheme) else None
            self._priced[key] = priced if priced is not None and priced.most_tokens else None
        return self._priced[key]

    def strategy(self, strategy: Strategy, weights: Working) -> tuple[PricedScheme, ...] | None:
        """The schemes of a strategy, priced with the working weights held one way; None where
        memory leaves one of them no room for a token."""
        prices = [self.price(scheme, weights) for scheme, _ in strategy.counts]
        holding = tuple(price for price in prices if price is not None)
        return holding if len(holding) == len(prices) else None

    def require(self, strategy: Strategy) -> None:
        """Raise InfeasiblePlan for a strategy that this problem's ranks or costs do not
        support, whatever their memory."""
        if strategy.devices > self.problem.devices or not strategy.counts:
            raise InfeasiblePlan(
                f"strategy {strategy}",
                got=counted(strategy.devices, "rank"),
                wanted=f"1 to {self.problem.devices}",
            )
        for scheme, _ in strategy.counts:
            if not self.slots(scheme):
                raise InfeasiblePlan(
                    f"{scheme} of strategy {strategy}",
                    got="no layer option that can run in it",
                    wanted="a scheme with costs",
                    hint=self._lacking(scheme),
                )

    def _lacking(self, scheme: Scheme) -> str:
        """What a scheme that the costs do not support lacks, in words."""
        width, layers = scheme.width, self.costs.shape.layers
        if scheme.pipeline > 1 and not self.problem.stages:
            return "this problem has no pipelines with several stages (stages=False)"
        if scheme.pipeline > layers:
            return f"the model has {layers} layers, and each stage needs one"
        if width not in self.problem.group_sizes:
            return f"costs are of {', '.join(map(str, self.problem.group_sizes))} ranks in a stage"
        most = self.costs.shape.tensor_ranks
        if scheme.tensor > most:
            few = counted(most, "rank")
            return f"a layer's weights can be cut for at most {few}: model.ffn is too narrow"
        of = f"blocks of {scheme.tensor}" if scheme.context > 1 else counted(scheme.tensor, "rank")
        return (
            f"no measured method shares a layer's weights among {of}; planner.candidates names "
            "what is measured"
        )

    def layer_plans(self, scheme: Scheme) -> list[LayerPlan]:
        """Layer plans in which all layers take one option, one plan for each option; where methods
        are given layer by layer, plans in which all layers take one recompute level."""
        slots = self.slots(scheme)
        if len(slots) == 1:
            return [LayerPlan.uniform(o, self.costs.shape.layers) for o in slots[0]]
        return [
            plan
            for plan in self.problem.uniform_layers(scheme.width)
            if slots and all(o in slot for o, slot in zip(plan.options, slots, strict=True))
        ]

    def _price_uncached(self, scheme: Scheme, weights: Working) -> PricedScheme | None:
        """:meth:`price` without the cache and without the checks whether the scheme is
        supported."""
        if scheme.pipeline > 1:
            return self._staged(scheme, weights)
        return PricedScheme(scheme=scheme, frontier=self._mixed(scheme, weights), weights=weights)

    def _mixed(self, scheme: Scheme, weights: Working) -> Frontier:
        """The frontier of layer plans of a scheme with one stage, within the memory that the
        scheme's weights leave."""
        width, slots = scheme.width, self.slots(scheme)
        if scheme.tensor == 1:
            return self.problem.frontier(width, weights)
        pipeline = Pipeline(scheme=scheme, ranks=tuple(range(scheme.devices)))
        (held,) = held_bytes(self.costs, pipeline, weights)  # by weights on a rank of its one stage
        # Gathers are charged only where all ranks of the stage cut the weights among them: the
        # options that a narrower tensor block allows work on its shards and gather nothing.
        gathered_as: Working = "replicated"
        if scheme.parts(sharded=weights == "sharded") == width:
            gathered_as = "sharded"
        options = list(dict.fromkeys(option for slot in slots for option in slot))
        room = self.costs.capacity_bytes - self.costs.state_bytes - held
        table = Table.of(self.costs, width, gathered_as, options, room)
        if len(slots) == 1:
            return mixed_frontier(table, self.costs.shape.layers)
        return listed_frontier(table, slots)

    def _staged(self, scheme: Scheme, weights: Working) -> PricedScheme | None:
        """A scheme with several stages, priced so that all micro-batches in flight fit with the
        same layer plan. Its layers are split so that the slowest stage is quickest for short
        sequences, where the head weighs most; if then nothing fits, so that the most tokens fit."""
        table = LayerTable.of(self.costs, scheme, weights, self.layer_plans(scheme))
        splits = list[StageCosts]()
        for layer_counts in shares_of(self.costs.shape.layers, scheme.pipeline):
            split = StageCosts(
                costs=self.costs, scheme=scheme, shares=layer_counts, working=weights, table=table
            )
            if splits and split.pace_s >= splits[-1].pace_s:
                break  # fewer layers in the last stage no longer help
            splits.append(split)
        best = splits[-1]
        if max(best.caps) < 1:  # not one token fits with any layer plan
            best = max(splits, key=lambda split: max(split.caps))
        stages = best.mixed()
        if not len(stages.table):
            return None
        return PricedScheme(scheme=scheme, frontier=stages.frontier, weights=weights, stages=stages)


def _paying(
    deeper: Sequence[PricedScheme], groups: Sequence[PricedScheme]
) -> tuple[PricedScheme, ...]:
    """The ``deeper`` schemes, which have stages or tensor blocks, without those that never pay: for
    every length that such a scheme holds, one of ``groups``, which have neither, is as quick and
    takes clearly fewer device-seconds."""
    longest = max((scheme.most_tokens for scheme in deeper), default=1)
    lengths = np.geomspace(longest, 1, _LENGTHS).round()
    with np.errstate(invalid="ignore"):
        group_prices = [(g.devices, prices(g.frontier, lengths)) for g in groups]
        paying = list[PricedScheme]()
        for scheme in deeper:
            alone_s, _, spread_s = prices(scheme.frontier, lengths)  # of the slowest stage
            as_quick_s = _through_s(scheme, lengths) * (1 + CLOSE)
            device_s = scheme.devices * spread_s
            beaten = ~np.isfinite(alone_s)
            for devices, (group_alone_s, _, group_spread_s) in group_prices:
                beaten |= (group_alone_s <= as_quick_s) & (
                    devices * group_spread_s <= device_s * (1 - CLOSE)
                )
            if not beaten.all():
                paying.append(scheme)
    return tuple(paying)


def _through_s(scheme: PricedScheme, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least seconds of sequences of ``lengths`` tokens alone through all stages [sequences]."""
    alone = scheme.frontier if scheme.stages is None else scheme.stages.least.alone
    through_s: NDArray[np.float64] = prices(alone, lengths)[0]
    return through_s


def _powers(most: int) -> list[int]:
    """Powers of two up to ``most``."""
    return [1 << power for power in range(most.bit_length())]


Costs = CostModel | PipelineCosts | GroupCosts

_OTHERS = (
    "bucket",
    "packed",
    "dcp",
    "flexsp",
    "hydraulis",
    "hydraulis-tuned",
    "paradyse",
    "karmarkar-karp",
    "dp-balanced",
    "hybrid-cp",
    "max-length",
    "token-balance",
)
"""Planners of others, by their names in ``headrace.planners.PLANNERS``."""

_PLANNERS = ("adaptive", "static", "strategies", *_OTHERS)
_LISTS = {
    "strategies": "Strategy objects",
    "sizes": "whole numbers",
    "methods": "methods",
    "layers": "methods",
    "recompute": "levels",
    "holding": "ways to hold weights",
}
"""Fields that list choices, and what of."""

_OF_A_MODEL = (
    "strategies",
    "sizes",
    "methods",
    "layers",
    "recompute",
    "holding",
    "stages",
    "smoothing",
)
"""Fields that restrict plans with the costs of a model; published costs know none of it."""

# Caches that another problem may share, and the fields on which what they hold depends.
_KEPT = ("_frontiers", "_ideals", "_pricings")
_PRICED_BY = ("costs", "sizes", "methods", "layers", "recompute", "holding", "stages")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is planned for: costs, devices, and which choices are open.

    One problem serves many batches: it keeps what it has worked out. On one rank there is nothing
    to spread, so of ``methods`` and ``layers`` only the recompute levels count there.

    Attributes:
        costs: What work costs: of a model (profiled, by formula, rehearsed), or published ones of
            pipelines or of groups.
        devices: Equal ranks to plan for; costs of a model know their devices.
        semantics: When micro-batches start: ``free`` as soon as their ranks are free, ``lockstep``
            in waves, as all ranks meet at every layer.
        planner: What plans may be: ``adaptive`` anything, ``strategies`` pipelines side by side,
            ``static`` one group size. To compare with, the others are what papers and frameworks
            do, such as ``bucket``, ``packed``, ``dcp``, ``flexsp``, ``hydraulis`` and
            ``paradyse`` (``headrace.planners.PLANNERS``).
        static_size: The group size of ``static``; the best one when left out.
        strategies: All strategies that may be chosen, if there are any.
        sizes: Group sizes that may be used; all with costs when left out.
        methods: Methods of layers that may be used; all with costs when left out.
        layers: The methods of every layer in the place of ``methods``: one entry for each layer or
            one for all, ``METHOD`` or ``ATTENTION/FEED_FORWARD``; ``+LEVEL`` fixes what it
            recomputes too.
        recompute: Recompute levels that may be used.
        holding: How groups may hold weights.
        stages: Whether pipelines may have several stages; not for models that run in one piece.
        smoothing: The share of a micro-batch's seconds that may be lost to keep the layers of the
            step before.

    Raises:
        SpecError: For choices that do not exist.

    Example:
        >>> costs = hr.costs.published("flexsp-7b-a100")
        >>> problem = hr.Problem(costs=costs, devices=8)
        >>> hr.plan([4000, 1000], problem).devices
        8
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
        """Fill in the devices that a model's costs are for, and raise SpecError for choices that do
        not exist or exclude each other."""
        self._check_words()
        self._check_kinds()
        if not isinstance(self.costs, CostModel):
            self._check_published()
            self._check_static_size()
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
            raise SpecError("group sizes", got=known, wanted=f"one of at most {self.devices}")
        if not 0 <= self.smoothing < 1:
            raise SpecError("smoothing", got=self.smoothing, wanted="0 <= smoothing < 1")
        if self.methods is not None and self.layers is not None:
            raise SpecError("methods and layers", got="both", wanted="one of them")
        for method in self.methods or ():
            if method not in self._known_methods:
                known = f"known are {', '.join(sorted(self._known_methods))}"
                hint = did_you_mean(method, self._known_methods) or known
                raise SpecError("method", got=repr(method), wanted="one with costs", hint=hint)
        if not self.group_sizes:
            raise SpecError(
                "choices of a problem",
                got=self._choices,
                hint=self._missing(),
                wanted="at least one layer option with costs"
                + (" for every layer" if self.layers else ""),
            )
        self._check_static_size()

    def _check_published(self) -> None:
        """Raise SpecError for restrictions of a model's layers, memory or pipelines, which
        published costs do not know, and for no devices."""
        whole("devices", self.devices, least=1)
        for name in _OF_A_MODEL:
            given = getattr(self, name)
            if given != type(self).__dataclass_fields__[name].default:
                got = ", ".join(map(str, given)) if isinstance(given, tuple) else given
                wanted = "costs of a model with it"
                raise SpecError(name, got=f"{got} with published costs", wanted=wanted)

    def _check_static_size(self) -> None:
        """Raise SpecError for a group size of static plans that the costs or devices lack."""
        size = self.static_size
        if size is not None and (type(size) is not int or size not in self.static_sizes):
            known = ", ".join(map(str, self.static_sizes))
            raise SpecError("static_size", got=repr(size), wanted=f"one of {known}")

    def _check_words(self) -> None:
        """Raise SpecError for unknown semantics or planner, and for a static size without the
        planner ``static``."""
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

    def _check_kinds(self) -> None:
        """Raise SpecError for fields that are not of their kind, which would be taken for others:
        texts in the place of lists, and a text in the place of True or False."""
        if not isinstance(self.stages, bool):
            raise SpecError("stages", got=repr(self.stages), wanted="True or False")
        number("smoothing", self.smoothing)
        for name, of in _LISTS.items():
            given = getattr(self, name)
            left_out = given is None and name in ("sizes", "methods", "layers")
            is_list = isinstance(given, Collection) and not isinstance(given, (str, np.ndarray))
            if not left_out and not is_list:
                raise SpecError(name, got=repr(given), wanted=f"a tuple of {of}")
        self._check_entries("recompute", RECOMPUTE)
        self._check_entries("holding", get_args(Working))
        if not self.holding:
            raise SpecError("holding", got="none", wanted=" or ".join(get_args(Working)))
        # Numbers of arrays would not be hashed or counted in bits as whole numbers are.
        object.__setattr__(self, "devices", whole("devices", self.devices))
        if self.sizes is not None:
            sizes = tuple(whole("group size", p) for p in self.sizes)
            object.__setattr__(self, "sizes", sizes)
        for strategy in self.strategies:
            if not isinstance(strategy, Strategy):
                hint = "hr.Strategy.parse(text)"
                raise SpecError("strategy", got=repr(strategy), wanted="a Strategy", hint=hint)

    def _check_entries(self, name: str, known: Sequence[str]) -> None:
        """Raise SpecError for an entry of the field ``name`` that is none of the ``known`` ones."""
        for got in getattr(self, name):
            if got not in known:
                hint = did_you_mean(str(got), known)
                raise SpecError(name, got=repr(got), wanted=" or ".join(known), hint=hint)

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
        """The model's parameters if published costs say how many layers of what width h it has,
        else None. A layer has 12 h^2: 4 h^2 in attention and 8 h^2 in the feed-forward."""
        facts = getattr(self.published, "facts", {}).get("architecture")
        if not isinstance(facts, Mapping):
            return None
        layers, hidden = facts.get("layers"), facts.get("hidden")
        known = isinstance(layers, int) and isinstance(hidden, int)
        return 12 * layers * hidden**2 if known else None

    @property
    def others(self) -> str | None:
        """The planner's name where it is a baseline taken from a paper or framework; None for this
        library's own planners."""
        return self.planner if self.planner in _OTHERS else None

    @property
    def nests(self) -> bool:
        """Whether ranks may work in groups of several sizes one after the other, each group inside
        a larger one: for the adaptive planner, unless costs are of whole pipelines."""
        return self.planner == "adaptive" and not isinstance(self.costs, PipelineCosts)

    @property
    def apart(self) -> bool:
        """Whether every pipeline keeps its devices for the whole step and shares them with no
        other, as with published costs of pipelines."""
        return isinstance(self.costs, PipelineCosts) and self.semantics == "free"

    @property
    def pricing(self) -> Pricing:
        """The prices of the schemes of a model's costs, cached with the problem."""
        if "pricing" not in self._pricings:
            self._pricings["pricing"] = Pricing(self)
        return self._pricings["pricing"]

    @property
    def ideals(self) -> dict[int, Least]:
        """Cache, by group width, of the least that a whole model takes if memory is unlimited;
        :mod:`headrace.planning.model_source` fills it."""
        return self._ideals

    @property
    def _choices(self) -> str:
        """What may be chosen, in words for errors."""
        chosen = f"layers {self.layers}" if self.layers else f"methods {self.methods}"
        return f"{chosen}, recompute {self.recompute}"

    def _missing(self) -> str:
        """For errors: which layer of the listed ones cannot run on which group size, at most
        four."""
        texts = []
        for p, slots in self.slots.items() if self.layers else ():
            layer = next(i for i, slot in enumerate(slots) if not slot)
            texts.append(f"layer {layer} cannot run {self._listed_layers[layer]} on cp{p}")
        return ", ".join(texts[:4])

    @cached_property
    def _known_methods(self) -> set[str]:
        """Names of all methods with costs on some group size."""
        names = set(self.model.feed_forwards)
        for p in self.model.group_sizes:
            for option in map(LayerOption.parse, self.model.options[p]):
                names |= {option.attention, option.feed_forward}
        return names

    @cached_property
    def _listed_layers(self) -> tuple[ListedLayer, ...]:
        """The methods and recompute level that ``layers`` gives for each layer of the model."""
        return parse_layers(self.layers or (), self.model.shape.layers, self._known_methods)

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes that may be used, smallest first."""
        return tuple(p for p, options in self.options.items() if options)

    @cached_property
    def options(self) -> dict[int, tuple[LayerOption, ...]]:
        """The layer options that may be used, by group size; empty for a size on which some layer
        cannot run at all."""
        return {
            p: tuple(dict.fromkeys(option for slot in slots for option in slot))
            if all(slots)
            else ()
            for p, slots in self.slots.items()
        }

    @cached_property
    def slots(self) -> dict[int, tuple[tuple[LayerOption, ...], ...]]:
        """By group size, the options of each layer, or one tuple for all layers where they are
        free."""
        sizes = [p for p in sorted(set(self.sizes or self.model.group_sizes)) if p <= self.devices]
        return {p: self._slots_of(p, self._allowed_options(p)) for p in sizes}

    def _allowed_options(self, p: int) -> tuple[LayerOption, ...]:
        """All options with costs on ``p`` ranks whose recompute level the problem allows."""
        options = map(LayerOption.parse, self.model.options[p])
        return tuple(option for option in options if option.recompute in self.recompute)

    def _slots_of(
        self, p: int, options: tuple[LayerOption, ...]
    ) -> tuple[tuple[LayerOption, ...], ...]:
        """For each layer, those of ``options`` that it may take on ``p`` ranks; one tuple for all
        layers where they have the same choice."""
        if self.layers is not None:
            slots = tuple(
                tuple(o for o in options if listed.allows(o, self.model, p))
                for listed in self._listed_layers
            )
            # Where all layers have the same choice one tuple stands for all.
            return slots[:1] if len(set(slots)) == 1 else slots
        if self.methods is None:
            return (options,)
        # A method without a feed-forward of its own uses that of another, its owner.
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
        """Pose the same costs with other restrictions; what was worked out is kept where it still
        holds.

        Args:
            changes: The new values by the names of fields.

        Returns:
            The other problem.

        Raises:
            SpecError: As for a new problem.
        """
        other = replace(self, **changes)
        if all(getattr(other, name) == getattr(self, name) for name in _PRICED_BY):
            for kept in _KEPT:
                object.__setattr__(other, kept, getattr(self, kept))
        return other

    def rescaled(self, scale: float) -> Problem:
        """Pose the same problem with another scale; what was worked out is kept, as it does not
        depend on it.

        Args:
            scale: What all seconds of the costs are multiplied by.

        Returns:
            The other problem.

        Raises:
            SpecError: For published costs.
            CostError: For a scale that is not above zero.
        """
        other = replace(self, costs=self.model.replace(scale=scale))
        for kept in _KEPT:
            object.__setattr__(other, kept, getattr(self, kept))
        return other

    def frontier(self, p: int, working: Working, sizes: Collection[int] = ()) -> Frontier:
        """The layer plans worth having on one group size, with seconds and tokens of a micro-batch.

        Args:
            p: Ranks of the group.
            working: How groups hold weights.
            sizes: Other group sizes in which the same ranks work in the step.

        Returns:
            The frontier, in seconds without the costs' scale.

        Raises:
            SpecError: For published costs.
        """
        # Other sizes matter only by the bytes of weights that they make ranks hold.
        held = self.model.held_bytes({p, *sizes}, working)
        key = (p, working, held)
        if key not in self._frontiers:
            self._frontiers[key] = self._frontier_uncached(p, working, sizes)
        return self._frontiers[key]

    def _frontier_uncached(self, p: int, working: Working, sizes: Collection[int]) -> Frontier:
        """:meth:`frontier` without the cache."""
        unscaled, options = self.model.replace(scale=1.0), self.options[p]
        if len(self.slots[p]) == 1:
            return layer_frontier(unscaled, p, working, sizes, options)
        table = layer_table(unscaled, p, working, sizes, options)
        return listed_frontier(table, self.slots[p])

    def uniform_layers(self, p: int) -> list[LayerPlan]:
        """Plans of equal layers, or of one recompute level where methods are given: the thriftiest
        plan keeps about as much as the thriftiest of them.

        Args:
            p: Ranks of the group.

        Returns:
            A plan for each option, or for each recompute level.
        """
        slots = self.slots[p]
        if len(slots) == 1:
            return [LayerPlan.uniform(o, self.model.shape.layers) for o in slots[0]]
        return [
            LayerPlan(options=tuple(_at_level(slot, level) for slot in slots))
            for level in self.recompute
        ]

    def allows(self, p: int, layers: LayerPlan) -> bool:
        """Whether a micro-batch may have some layers, memory aside.

        Args:
            p: Ranks of the group.
            layers: The option of every layer.

        Returns:
            False, too, for another number of layers than the model's.
        """
        slots, number = self.slots.get(p, ()), self.model.shape.layers
        if len(layers.options) != number:
            return False
        each = slots * number if len(slots) == 1 else slots
        named = map(self.model.named, layers.options)
        return bool(each) and all(o in slot for o, slot in zip(named, each, strict=True))


def _at_level(slot: tuple[LayerOption, ...], level: Recompute) -> LayerOption:
    """The first option of a layer's ``slot`` that has a recompute level; the first of all where
    none has it."""
    return next((option for option in slot if option.recompute == level), slot[0])
