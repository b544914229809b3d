"""What is to be planned: costs, ranks and which choices are open, with everything that does not
depend on a batch worked out once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

from headrace.costs import CostModel
from headrace.errors import SpecError, did_you_mean
from headrace.planning.layers import Frontier, layer_frontier
from headrace.spec import LayerOption
from headrace.spec.method import RECOMPUTE, Recompute
from headrace.spec.plan import Semantics, Working

__all__ = ["Arena", "Problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """A way to hold weights and the group sizes that may be mixed under it.

    ``frontiers[p]`` are the layer plans of size p when its ranks work in all ``sizes``; sizes
    that cannot hold a single token are left out. Seconds are without the costs' ``scale``.
    """

    working: Working
    sizes: tuple[int, ...]
    frontiers: dict[int, Frontier]

    @property
    def most_tokens(self) -> int:
        """The longest sequence that some group can take."""
        return max((frontier.most_tokens for frontier in self.frontiers.values()), default=0)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Planning for ``devices`` equal ranks with ``costs``.

    ``semantics``: this planner makes plans whose groups start when their ranks are free.
    ``sizes``, ``methods``, ``recompute`` and ``holding`` restrict the group sizes, the layers'
    methods, what they may recompute and how groups may hold weights; everything with costs by
    default. One problem serves many batches: it keeps what it has worked out. Raises SpecError
    for choices that do not exist.
    """

    costs: CostModel
    devices: int
    semantics: Semantics = "free"
    sizes: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    recompute: tuple[Recompute, ...] = RECOMPUTE
    holding: tuple[Working, ...] = ("whole", "sharded")
    _arenas: dict[tuple[Working, tuple[int, ...], bool], Arena] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _frontiers: dict[tuple[int, Working, int], Frontier] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.semantics != "free":
            raise SpecError(
                "semantics", got=repr(self.semantics), wanted="'free'",
                hint="lockstep plans are not supported by this planner",
            )  # fmt: skip
        if self.devices != self.costs.cluster.devices:
            raise SpecError(
                "devices of a problem", got=self.devices, wanted=self.costs.cluster.devices,
                hint="costs hold for one number of devices, as the stored state is split over them",
            )  # fmt: skip
        for p in self.sizes or ():
            if p not in self.costs.group_sizes:
                known = ", ".join(map(str, self.costs.group_sizes))
                raise SpecError("group size", got=p, wanted=f"one with costs: {known}")
        if min(self.sizes or self.costs.group_sizes) > self.devices:
            known = ", ".join(map(str, self.costs.group_sizes))
            raise SpecError("group sizes", got=known, wanted=f"one of at most {self.devices} ranks")
        known_methods = {m for p in self.costs.group_sizes for m in self._methods(p)}
        for method in self.methods or ():
            if method not in known_methods:
                known = f"known are {', '.join(sorted(known_methods))}"
                hint = did_you_mean(method, known_methods) or known
                raise SpecError("method", got=repr(method), wanted="one with costs", hint=hint)
        if not self.group_sizes:
            raise SpecError(
                "choices of a problem", got=f"methods {self.methods}, recompute {self.recompute}",
                wanted="at least one layer option with costs",
            )  # fmt: skip

    def _methods(self, p: int) -> set[str]:
        options = map(LayerOption.parse, self.costs.options[p])
        return {method for o in options for method in (o.attention, o.feed_forward)}

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Group sizes that may be used, smallest first."""
        return tuple(p for p, options in self.options.items() if options)

    @cached_property
    def options(self) -> dict[int, tuple[LayerOption, ...]]:
        """Layer options that may be used on every size of at most all devices."""
        methods = None if self.methods is None else set(self.methods)
        return {
            p: tuple(
                option
                for option in map(LayerOption.parse, self.costs.options[p])
                if option.recompute in self.recompute
                and (methods is None or {option.attention, option.feed_forward} <= methods)
            )
            for p in sorted(set(self.sizes or self.costs.group_sizes))
            if p <= self.devices
        }

    def rescaled(self, scale: float) -> Problem:
        """The same problem with another ``scale`` of its seconds; what is worked out is kept, as
        it does not depend on the scale."""
        other = replace(self, costs=self.costs.replace(scale=scale))
        for kept in ("_arenas", "_frontiers"):
            object.__setattr__(other, kept, getattr(self, kept))
        return other

    def frontier(self, p: int, working: Working, sizes: Collection[int] = ()) -> Frontier:
        """Layer plans of size p on ranks that also work in groups of ``sizes``."""
        held = self.costs.held_bytes({p, *sizes}, working)
        key = (p, working, held)
        if key not in self._frontiers:
            unscaled = self.costs.replace(scale=1.0)
            self._frontiers[key] = layer_frontier(unscaled, p, working, sizes, self.options[p])
        return self._frontiers[key]

    def arena(self, working: Working, sizes: tuple[int, ...], *, mixed: bool = True) -> Arena:
        """The arena in which ranks work in groups of all ``sizes``, or, not ``mixed``, of one of
        them only, which leaves more memory."""
        key = (working, sizes, mixed)
        if key not in self._arenas:
            allowed = sizes if working in self.holding else ()
            found = {p: self.frontier(p, working, sizes if mixed else ()) for p in allowed}
            fits = {p: frontier for p, frontier in found.items() if frontier.most_tokens}
            self._arenas[key] = Arena(working=working, sizes=tuple(fits), frontiers=fits)
        return self._arenas[key]
