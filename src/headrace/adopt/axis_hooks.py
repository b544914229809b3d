"""The hooks of a model with stages: which axis is sharded in each, and where it is switched.

A hook on a stage that mixes the sharded axis shards another axis first, by one all-to-all. The
order of stages is recorded in the first forward; later forwards use the axes of :func:`plan_axes`.
Where the model checkpoints activations, recomputed stages use the shards of their first forward;
switches stand outside of the checkpoints, so recompute repeats no traffic.

A *switch* is an all-to-all after which another axis is sharded; *places* are the indices of an
axis; the model is *spread* while its forwards work on shards, and *plain* otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.weak import WeakIdKeyDictionary

from headrace.adopt.axis_shards import AxisShards, Dims
from headrace.adopt.axis_stages import AxisStage, modules_of
from headrace.adopt.call_arguments import plain_arguments
from headrace.adopt.joint_attention import JointAttention
from headrace.adopt.operators import ModelSlot
from headrace.adopt.own_hooks import hook_after, hook_before, in_checkpoint, tensors_among
from headrace.adopt.replaced_calls import modules_run_as_written
from headrace.errors import DataError, ModelError, SpecError
from headrace.ops.traced_switch import GroupSlot, traced_switch
from headrace.spec.axes import AxisChoice, MixingStage, plan_axes
from headrace.spec.method_facts import Members

__all__ = [
    "ArgumentCut",
    "RouteSwitch",
    "HookManager",
    "HookMode",
    "StageRoute",
    "route",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSwitch:
    """A planned switch of a tensor of ``dims`` from shards of ``from_dim`` to shards of ``to_dim``,
    both dims of the unflattened tensor. ``here`` are the places of its axes on this rank before the
    switch, ``sizes`` and ``to_sizes`` the places on each rank of the axes that are sharded before
    and after it. ``handle`` finds the group in a graph; ``rank`` is this rank's index in it."""

    dims: Dims
    here: Mapping[str, int]
    from_dim: int
    to_dim: int
    sizes: tuple[int, ...]
    to_sizes: tuple[int, ...]
    handle: int
    rank: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Switch ``x``, this rank's part with ``from_dim`` sharded; returns its part with
        ``to_dim`` sharded. Collective."""
        opened = self.dims.opened(x, self.here)
        moved = traced_switch(
            opened, self.from_dim, self.to_dim, self.sizes, self.to_sizes, self.handle, self.rank
        )
        return self.dims.closed(moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentCut:
    """The cut of a stage's argument, a tensor of ``dims`` with the places of all ranks, to this
    rank's part: ``count`` places from index ``start`` on along dim ``at`` of the unflattened
    tensor. ``totals`` are the sizes of the axes on all ranks."""

    dims: Dims
    totals: Mapping[str, int]
    at: int
    start: int
    count: int

    def of(self, x: torch.Tensor, known: Mapping[str, int]) -> torch.Tensor:
        """This rank's part of ``x``, which has the places of all ranks or is this rank's part
        already: its shape tells which. ``known`` are sizes of names that are not in ``totals``.
        Raises DataError for a shape that fits neither or both."""
        sizes = {**known, **self.totals}
        axis = self.dims.flat[self.at]
        dim, names = next(
            (dim, names) for dim, names in enumerate(self.dims.names) if axis in names
        )
        size, total = x.shape[dim], sizes[axis]
        others = math.prod([sizes[name] for name in names if name in sizes and name != axis])
        if any(name not in sizes for name in names):  # a name that has any size
            whole, part = size % (total * others) == 0, size % (self.count * others) == 0
        else:
            whole, part = size == total * others, size == self.count * others
        if whole == part and total != self.count:
            raise DataError(
                f"argument of dims {self.dims}",
                got=f"{list(x.shape)}" + (", which may be either" if whole else ""),
                wanted=f"{self.count} or {total} places of {axis}",
            )
        if not whole:
            return x
        return self.dims.closed(self.dims.opened(x, sizes).narrow(self.at, self.start, self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoute:
    """What is done before and after one call of a stage in a traced forward, planned in advance.

    The stage's first argument, a tensor of ``dims``, is switched by ``enter`` (None: not at all)
    and then has ``here`` places of each axis on this rank; its first result is switched by
    ``leave``. By position or name of other arguments, ``counts`` are the numbers that replace whole
    numbers of places, ``cuts`` what cuts tensors to this rank."""

    dims: Dims | None = None
    here: Mapping[str, int] = field(default_factory=dict)
    enter: RouteSwitch | None = None
    leave: RouteSwitch | None = None
    counts: Mapping[int | str, int] = field(default_factory=dict)
    cuts: Mapping[int | str, ArgumentCut] = field(default_factory=dict)

    def arguments(self, args: Any, named: Any) -> tuple[Any, Any]:
        """The arguments for this rank, (positional, keyword), made from those given: the first one
        switched, others cut, counts of places replaced."""
        given = {**dict(enumerate(args)), **named}
        first = next(iter(given))
        if self.enter is not None:
            given[first] = self.enter.of(given[first])
        # sizes of dims that are no axes, such as channels, which cuts need, too
        known: dict[str, int] = {}
        if self.cuts and self.dims is not None:
            known = self.dims.sizes_of(given[first], self.here)
        for side, cut in self.cuts.items():
            value = given.get(side)
            if isinstance(value, torch.Tensor):
                given[side] = cut.of(value, known)
        for name, places in self.counts.items():
            if type(given.get(name)) is int:
                given[name] = places
        return tuple([given[at] for at in range(len(args))]), {k: given[k] for k in named}

    def result(self, out: Any) -> Any:
        """The result of the stage after the switch back, where there is one."""
        if self.leave is None:
            return out
        if isinstance(out, tuple):
            return (self.leave.of(out[0]), *out[1:])
        return self.leave.of(out)


def _route_switch(shards: AxisShards, dims: Dims, axis: str, slot: GroupSlot) -> RouteSwitch:
    """Plan the switch of a tensor of ``dims`` from the axis that is sharded to ``axis``, among the
    group of ``slot``. Nothing is sent, but ``shards.axis`` is ``axis`` afterwards, so that what
    follows is planned from there."""
    planned = RouteSwitch(
        dims=dims,
        here=shards.here(),
        from_dim=dims.dim_of(shards.axis),
        to_dim=dims.dim_of(axis),
        sizes=shards.sizes(shards.axis),
        to_sizes=shards.sizes(axis),
        handle=slot.handle,
        rank=slot.rank,
    )
    shards.axis = axis
    return planned


def _cuts(stage: AxisStage, shards: AxisShards) -> dict[int | str, ArgumentCut]:
    """The cut to this rank's part of each argument in ``stage.sides`` that has places of the axis
    that is sharded now; by the argument's position or name."""
    sizes = shards.sizes(shards.axis)
    cuts: dict[int | str, ArgumentCut] = {}
    for side, text in stage.sides.items():
        dims = Dims.parse(text)
        if shards.axis in dims:
            cuts[side] = ArgumentCut(
                dims=dims,
                totals=dict(shards.totals),
                at=dims.dim_of(shards.axis),
                start=sum(sizes[: shards.rank]),
                count=sizes[shards.rank],
            )
    return cuts


def route(
    stages: Sequence[tuple[AxisStage, str]], shards: AxisShards, slot: GroupSlot
) -> list[StageRoute]:
    """Plan a traced forward: one route for each call of a stage. ``stages`` are (stage, the axis
    that is sharded while it runs) in calling order, ``shards`` the state before the first of them,
    unchanged afterwards; the switches run among the group of ``slot``."""
    axis_at_start, routes = shards.axis, list[StageRoute]()
    for stage, axis in stages:
        before = shards.axis
        enter = None if axis == before else _route_switch(shards, stage.layout, axis, slot)
        cuts, here = _cuts(stage, shards), shards.here()
        counts = {name: shards.counted(axis) for name, axis in stage.counts.items()}
        leave = None
        if stage.returns and shards.axis != before:
            leave = _route_switch(shards, stage.layout, before, slot)
        routes.append(
            StageRoute(
                dims=stage.layout, here=here, enter=enter, leave=leave, counts=counts, cuts=cuts
            )
        )
    shards.axis = axis_at_start
    return routes


class _OwnForward:
    """Takes the place of a module's ``forward``, and calls ``around(forward, ...)``. In its deep
    copies and pickles ``forward`` itself stands, as a copied model is the user's plain one."""

    def __init__(self, forward: Callable[..., Any], around: Callable[..., Any]) -> None:
        self._forward, self._around = forward, around

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The result of the module."""
        return self._around(self._forward, *args, **named)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Callable[..., Any]]]:
        return _itself, (self._forward,)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is given, where a pickle is read."""
    return forward


_adapted: WeakSet[torch.nn.Module] = WeakSet()
"""Models that have hooks of a :class:`HookManager`."""

_LINK_BYTES_S = 1e11
"""Bandwidth of a link, in bytes per second. Its value does not matter: all links are alike, so
plans depend on ratios of times only."""


def _is_cast(x: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether ``x`` has the values of ``own``, perhaps cast to another dtype."""
    if x.shape != own.shape or x.device != own.device:
        return False
    return x.data_ptr() == own.data_ptr() or torch.equal(x, own.to(x.dtype))


def _backward_at_work() -> int:
    """The number that autograd gives the backward in which this is called; -1 outside of one."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardRecord:
    """What the last forward on some ranks has shown: for each call of a stage, in order, the axes
    that it mixed (``order``) and its module (``modules``). ``heads`` is the number of query heads
    of attention over the places of all axes, None where no such attention has run. All ranks that
    work together have the same record."""

    order: tuple[tuple[str, ...], ...] = ()
    modules: tuple[torch.nn.Module, ...] = ()
    heads: int | None = None


class HookMode(Enum):
    """What the hooks of a model do at the moment."""

    PLAIN = auto()
    """Nothing: the model is the user's plain one."""
    SWITCHING = auto()
    """Switch axes as stages are reached, and learn the order of stages."""
    TRACED = auto()
    """Call the switches that were planned before: a compiler traces the forward."""
    RECOMPUTED = auto()
    """Nothing, as a checkpoint computes or recomputes this part: its switches stand outside of the
    checkpoint."""


class HookManager:
    """Owns the hooks of ``model``, which switch axes around its stages, and the ``shards`` of the
    current batch. A forward begins with ``axis`` sharded. The hooks act only while ``spread`` is
    set; ``mode`` says how."""

    def __init__(self, model: torch.nn.Module, stages: Sequence[AxisStage], axis: str) -> None:
        """Hook the forward of the model and of the modules of each stage; raises ModelError for a
        model that has such hooks already."""
        if model in _adapted:
            raise ModelError(
                f"{type(model).__name__} to adapt",
                got="a model that is adapted already",
                wanted="one that is not",
                hint="run.detach() of the first",
            )
        # Of the model: the stage of each module that belongs to one, and all axes that may be
        # sharded or mixed.
        self.model, self.axis = model, axis
        self.stages = modules_of(model, tuple(stages))
        self.axes = {axis, *(name for stage in stages for name in stage.mixed)}
        # Other sequences that attention sees, such as a text; they are sharded beside the axis.
        self.beside = tuple(dict.fromkeys(name for stage in stages for name in stage.beside))
        for stage in stages:
            if stage.beside and not self.axes <= set(stage.mixed):
                raise SpecError(
                    f"stage {stage.modules}, whose attention sees {' '.join(stage.beside)}",
                    got=f"mixes {stage.mixes}",
                    wanted=f"all axes, {' '.join(sorted(self.axes))}",
                    hint="along one axis it would see the words of one rank: give the text whole",
                )
        # Further axes that hooks of an adapter shard.
        self.switched: tuple[str, ...] = ()
        # Of the batch: whether the model is spread, the shards that it works on, and those that the
        # next forward is to begin on.
        self.spread = False
        self.shards: AxisShards | None = None
        self._next_shards: AxisShards | None = None
        self.inputs: tuple[torch.Tensor, ...] = ()  # of the micro-batch of a loop
        # Of the current forward: for each stage that has begun and not ended, the axis that was
        # sharded before it; the modules of all stages called so far; whether a checkpoint runs.
        self._axes_before = list[str]()
        self._called = list[torch.nn.Module]()
        self._recomputing_now = False
        self._has_checkpoints = False  # whether its author has stages computed again
        # Of the backward at work: (``spread``, ``shards``) from before it, None while there is
        # none; and, for the shards of each forward that it goes back to, the axis at that
        # forward's end.
        self._before_backward: tuple[bool, AxisShards | None] | None = None
        self._axis_at_end: dict[AxisShards, str] = {}
        # Where the operators of attention over all places look up what they work on.
        self._slot = ModelSlot()
        # Of earlier forwards: the last record by the ranks that shared the batch, and the axes
        # planned from such records.
        self._records: dict[Members, _ForwardRecord] = {}
        self._plans: dict[Any, tuple[AxisChoice, ...]] = {}
        # The shards of each input that was cut; an entry goes with its tensor.
        self._shards_of_input: MutableMapping[torch.Tensor, AxisShards] = WeakIdKeyDictionary()
        # Of tracing: whether the model is compiled; the routes of the traced forward by the number
        # of the stage, the axis that is sharded at its end, and the group of its switches.
        self.traced, self.routes = False, dict[int, StageRoute]()
        self.last_axis = axis
        self._group_slot: GroupSlot | None = None
        # What removes the hooks, and what ends the replacement of checkpoints in a forward.
        self._hooks, self._forward_context = ExitStack(), ExitStack()
        _adapted.add(model)
        self._hooks.callback(_adapted.discard, model)
        self._hooks.callback(hook_before(model, self._begin, named=True))
        self._hooks.callback(hook_after(model, self._end, always=True))
        for number, (module, stage) in enumerate(self.stages.items()):
            if self.axes <= set(stage.mixed):
                # No axis is left to shard: its attention runs over ranks.
                own = vars(module).get("forward")  # it may hide that of the class
                if own is None:
                    self._hooks.callback(vars(module).pop, "forward", None)
                else:
                    self._hooks.callback(setattr, module, "forward", own)
                module.forward = _OwnForward(module.forward, partial(self._jointly, stage))
            entering = partial(self._enter, number, stage)
            self._hooks.callback(hook_before(module, entering, named=True))
            self._hooks.callback(hook_after(module, partial(self._leave, number, stage)))

    @property
    def mode(self) -> HookMode:
        """The mode of the hooks at this moment."""
        if torch.compiler.is_compiling() and self.routes:
            return HookMode.TRACED
        if not self.spread:
            return HookMode.PLAIN
        return HookMode.RECOMPUTED if self._recomputing_now else HookMode.SWITCHING

    @property
    def _record_here(self) -> _ForwardRecord:
        """The record of the ranks that share the current batch. Records of other groups do not
        count: not all of these ranks have them, so their plans would differ."""
        return self._records.get(self.at_work.members, _ForwardRecord())

    @property
    def at_work(self) -> AxisShards:
        """The shards of the current batch. Raises ModelError where there are none."""
        if self.shards is None:
            raise ModelError("shards", got="none", wanted="a call of shard() before")
        return self.shards

    def __deepcopy__(self, memo: Any) -> HookManager:
        """Returns this object itself: a deep copy of the model shares it, and its forwards run as
        those of the plain model."""
        return self

    def close(self) -> None:
        """Remove all hooks from the model."""
        self._hooks.close()

    def drop(self, shards: AxisShards) -> None:
        """Undo what a forward on simulated ``shards`` left here, whether it ended or raised: the
        record of its stages, and the replacement of checkpoints."""
        self._next_shards = None
        self._records.pop(shards.members, None)
        self._axes_before.clear()
        self._called.clear()
        self._forward_context.close()

    def forget(self) -> None:
        """Drop the records of earlier forwards, as not all ranks may have run the last one."""
        self._records.clear()

    def on(
        self,
        module: torch.nn.Module,
        before: Any = None,
        after: Any = None,
        *,
        always: bool = False,
    ) -> Callable[[], None]:
        """Add hooks that act while the model is spread: ``before(args, named)`` returns new
        arguments, ``after(args, result)`` a new result; with ``always`` also after a forward that
        raised. Returns a function that removes them."""
        removers = ExitStack()
        if before is not None:

            def enter(hooked: Any, args: Any, named: Any) -> Any:
                """Call ``before`` while the model is spread; in a recompute on the shards of the
                first forward."""
                if not self.spread:
                    return None
                if not torch.compiler.is_compiling():
                    self._record_or_restore(hooked, key=removers)  # unique to these hooks
                return before(args, named)

            removers.callback(hook_before(module, enter, named=True))
        if after is not None:

            def leave(_: Any, args: Any, out: Any) -> Any:
                """Call ``after`` while the model is spread."""
                return after(args, out) if self.spread else None

            removers.callback(hook_after(module, leave, always=always))
        self._hooks.callback(removers.close)
        return removers.close

    def fewest(self, totals: Mapping[str, int]) -> int:
        """The size of the shortest axis that a forward will shard: no more ranks can share a
        sample. ``totals`` are the sizes of all axes. Sharded are the axis at the beginning, those
        that hooks of an adapter switch to, and in each stage the longest axis that it does not
        mix."""
        places = [totals[name] for name in (self.axis, *self.switched)]
        for stage in self.stages.values():
            free = [n for n in stage.layout.flat if n in self.axes and n not in stage.mixed]
            if free and all(name in totals for name in free):
                places.append(max(totals[name] for name in free))
        return min(places)

    def know(self, x: torch.Tensor, shards: AxisShards) -> None:
        """Record that the tensor ``x`` is an input that was cut to ``shards``: a forward that is
        given ``x`` runs on them."""
        self._shards_of_input[x] = shards

    def shards_of(self, given: Sequence[Any]) -> AxisShards | None:
        """The shards of the first value of ``given`` that is a recorded input (:meth:`know`); None
        where none is."""
        tensors = (x for x in given if isinstance(x, torch.Tensor))
        recorded = (self._shards_of_input.get(x) for x in tensors)
        return next((shards for shards in recorded if shards is not None), None)

    def take(self, shards: AxisShards) -> None:
        """Work on ``shards`` from here on, in a state as at the beginning of a forward. The next
        forward of the model runs on them even where a wrapper has replaced its inputs by copies, by
        which they could not be found."""
        self._next_shards = shards
        if _backward_at_work() < 0:
            self.end_backward()  # one that raised has not ended by itself
        self.shards = shards.begun(self.axis, _backward_at_work())
        self._axes_before.clear()  # a forward that raised has left some
        self._called.clear()
        self.routes = self._routes() if self.traced else {}

    def _routes(self) -> dict[int, StageRoute]:
        """The route of each stage in the next forward, which a compiler traces, by stage number;
        empty while no forward has shown the calling order of stages. Sets ``last_axis``, the axis
        that is sharded at its end. Raises ModelError for stages that cannot be traced."""
        shards, modules = self.at_work, self._record_here.modules
        if not modules:
            return {}
        if shards.group is None:
            return {number: StageRoute() for number in range(len(self.stages))}
        stages = [self.stages[module] for module in modules]
        repeats = len(set(modules)) < len(modules)
        if repeats or any(self.axes <= set(stage.mixed) for stage in stages):
            raise ModelError(
                "compiled model",
                wanted="stages that can be traced",
                got="a stage that runs twice" if repeats else "a stage that mixes all axes",
                hint="compile its blocks: block.compile()",
            )
        if missing := self.axes - shards.totals.keys():
            raise ModelError(
                "compiled model",
                got=f"inputs that do not tell axis {min(missing)}",
                wanted="places of all axes",
                hint="hr.adapt(model, sizes=...)",
            )
        if self._group_slot is None or self._group_slot.group is not shards.group:
            self._group_slot = GroupSlot(shards.group)
        # ``axis`` is sharded between stages, ``during`` in one: another only if the stage mixes it
        axis, stages_with_axis = shards.axis, list[tuple[AxisStage, str]]()
        for at, stage in enumerate(stages):
            during = self._choose_axis(stage, at, shards).axis if axis in stage.mixed else axis
            stages_with_axis.append((stage, during))
            axis = axis if stage.returns else during
        numbers = {module: number for number, module in enumerate(self.stages)}
        routes = route(stages_with_axis, shards, self._group_slot)
        self.last_axis = axis
        return dict(zip((numbers[module] for module in modules), routes, strict=True))

    def _begin(self, module: Any, args: Any, named: Any) -> Any:
        """The hook before the model: starts a spread forward, which is given plain tensors, or
        refuses parts of a batch that the plain model is given."""
        if self.mode is HookMode.PLAIN:
            self._refuse_sharded(args, named)
        elif self.mode is not HookMode.TRACED:
            self._begin_forward(args, named)
            return plain_arguments(args, named)
        return None

    # Compilers break their graphs here: only at run time is it known which axis is sharded.
    @torch.compiler.disable
    def _begin_forward(self, args: Any, named: Any) -> None:
        """Start a forward on the shards that its inputs were cut to, found by these tensors, or on
        those given to :meth:`take`. Raises ModelError for inputs that were not sharded."""
        values = (*args, *named.values())
        shards = self.shards_of(values)
        if shards is None and self.inputs and not torch.is_grad_enabled():
            self._require_own(values)
        shards = shards or self._next_shards
        if shards is None:
            raise ModelError(
                "inputs of the model", got="others than were sharded", wanted="what shard() gave"
            )
        self.take(shards)
        self._next_shards = None
        self._forward_context.enter_context(self._recomputing(self.at_work))

    def _require_own(self, values: tuple[Any, ...]) -> None:
        """Raise ModelError for a forward without gradients, within a micro-batch, none of whose
        ``values`` is an input of the micro-batch, perhaps cast by a wrapper. It is an evaluation of
        other data, which would be taken for a part of the batch."""
        given = [x for x in values if isinstance(x, torch.Tensor) and x.dim()]
        if not any(_is_cast(x, own) for x in given for own in self.inputs):
            raise ModelError(
                f"{type(self.model).__name__}(...) within a micro-batch, without gradients",
                got="none of the inputs of the micro-batch",
                wanted="model(**micro.inputs)",
                hint="evaluate before the micro-batch or after its backward, where the model is "
                "the plain one; give it the micro-batch's inputs, changed in place",
            )

    @torch.compiler.disable
    def _refuse_sharded(self, args: Any, named: Any) -> None:
        """Raise ModelError where the plain model is given inputs that were cut to shards."""
        if self.shards_of((*args, *named.values())) is not None:
            raise ModelError(
                "inputs of shard() given to the model itself",
                got=f"{type(self.model).__name__}(...)",
                wanted="run(**shard)",
                hint="outside of it the model is the plain one, for whole batches",
            )

    def _end(self, module: Any, _: Any, out: Any) -> None:
        """The hook after the model: ends a spread forward, whose result ``out`` is None where it
        raised."""
        if self.mode not in (HookMode.PLAIN, HookMode.TRACED):
            self._note_stage_order(failed=out is None)

    @torch.compiler.disable
    def _note_stage_order(self, *, failed: bool) -> None:
        """End a spread forward: restore the model's checkpoint functions and, unless it raised,
        record in which order its stages were called and what they mixed."""
        self._forward_context.close()
        if self.shards is not None and not failed:
            self._records[self.shards.members] = replace(
                self._record_here, order=tuple(self.shards.passed), modules=tuple(self._called)
            )

    def _enter(self, number: int, stage: AxisStage, module: Any, args: Any, named: Any) -> Any:
        """The hook before a module of a stage, the one of that ``number``: returns its arguments
        (positional, keyword) for this rank, or None to leave them as they are."""
        mode = self.mode
        if mode is HookMode.TRACED:
            return self.routes[number].arguments(args, named)
        if mode is HookMode.SWITCHING:
            if not self._has_checkpoints and in_checkpoint((*args, *named.values())):
                self._hook_backwards()
            return self._enter_stage(stage, module, args, named)
        return None

    @torch.compiler.disable
    def _enter_stage(self, stage: AxisStage, module: Any, args: Any, named: Any) -> Any:
        """Prepare the arguments of a stage that begins: its first one, a tensor, is switched to an
        axis that the stage does not mix, where the sharded one is mixed; its ``sides`` are cut to
        this rank's part, and its ``counts`` set to this rank's places. Returns the arguments,
        (positional, keyword)."""
        given = {**dict(enumerate(args)), **named}
        first_key = next(iter(given), None)
        first = given.get(first_key)
        if not isinstance(first, torch.Tensor):
            raise ModelError(
                f"stage {stage.modules}",
                got=f"{type(first).__name__} as its first argument",
                wanted=f"a tensor of dims {stage.dims}",
            )
        self._record_or_restore(module, key=module)
        shards = self.at_work
        stage_number = shards.pass_stage(stage.mixed)
        if stage_number == len(self._called):  # else it is recomputed, and was recorded before
            self._called.append(module)
        self._axes_before.append(shards.axis)
        if shards.group is not None and shards.axis in stage.mixed:
            shards.learn(first, stage.layout, self.axes)  # the choice needs the sizes of all axes
            axis = self._choice_for(stage, stage_number).axis
            if axis != shards.axis:
                given[first_key] = shards.switched(first, stage.layout, axis)
        known = stage.layout.sizes_of(given[first_key], shards.here()) if stage.sides else {}
        for side, text in stage.sides.items():
            if isinstance(given.get(side), torch.Tensor):
                given[side] = shards.cut(given[side], Dims.parse(text), known)
        for count, axis in stage.counts.items():
            if type(given.get(count)) is int:
                given[count] = shards.counted(axis)
        return tuple(given[at] for at in range(len(args))), {k: given[k] for k in named}

    def _record_or_restore(self, module: torch.nn.Module, key: Any) -> None:
        """Have a recompute, which a checkpoint runs within the backward, find the sharded axis and
        the number of stages begun as they were when the forward came to ``module``: a forward
        records both under ``key``, a recompute restores them. Raises ModelError for a
        recompute of a module that ran several times with different axes sharded, as it is not known
        which of these times is recomputed."""
        shards = self.at_work
        if _backward_at_work() == shards.task:  # the forward itself, not a recompute
            shards.entries.setdefault(key, []).append((shards.axis, shards.position))
            return
        entries = shards.entries.get(key, [])
        # (axis sharded before the module, choice made in it): recomputes have to repeat both
        ways = {(axis, shards.chosen.get(position)) for axis, position in entries}
        if len(ways) > 1:
            raise ModelError(
                f"{type(module).__name__}, computed again by a checkpoint",
                got=f"a module that runs {len(entries)} times, with other axes in shards",
                wanted="the same axis each time",
                hint="hr.AxisStage(..., returns=True), or no checkpoint around it",
            )
        if entries:
            shards.axis, shards.position = entries[-1]

    def _hook_backwards(self) -> None:
        """Have the backward of the results of all modules :meth:`resume`, as some are computed
        again by the model's author: a loss may be made of states that a user's hook kept, and not
        of the model's results."""
        self._has_checkpoints = True

        def after(_: Any, args: Any, out: Any) -> None:
            """The hook after each module."""
            if torch.compiler.is_compiling() or not self.spread or self.shards is None:
                return
            begin = partial(self.resume, self.shards)
            for value in tensors_among(out):
                if value.grad_fn is not None:
                    value.grad_fn.register_prehook(begin)

        for module in modules_run_as_written(self.model):
            self._hooks.callback(hook_after(module, after))

    def resume(self, shards: AxisShards, _: Any) -> None:
        """The hook before a node of autograd: spread the model again on the ``shards`` of an
        earlier forward, as its backward begins and may run parts of it again; until the backward
        ends."""
        if self._before_backward is None:
            self._before_backward = self.spread, self.shards
            queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
            queue(self.end_backward)
        self._axis_at_end.setdefault(shards, shards.axis)
        self.spread, self.shards = True, shards

    def end_backward(self) -> None:
        """Undo :meth:`resume`: restore whether the model is spread and on which shards, and for the
        shards of each forward the axis at that forward's end, which recomputes have changed. Does
        nothing where no backward is at work."""
        if self._before_backward is not None:
            self.spread, self.shards = self._before_backward
            self._before_backward = None
        for shards, axis in self._axis_at_end.items():
            shards.axis = axis
        self._axis_at_end.clear()

    def _leave(self, number: int, stage: AxisStage, module: Any, _: Any, out: Any) -> Any:
        """The hook after a module of a stage, the one of that ``number``: returns its result
        ``out``, switched back where the stage is declared to do that, or None to leave it."""
        mode = self.mode
        if mode is HookMode.TRACED:
            return self.routes[number].result(out)
        return self._leave_stage(stage, out) if mode is HookMode.SWITCHING else None

    @torch.compiler.disable
    def _leave_stage(self, stage: AxisStage, out: Any) -> Any:
        """The result of a stage that ends: its first tensor is switched back to the axis that was
        sharded before the stage where ``stage.returns`` asks for it, else it stays as it is."""
        shards, before = self.at_work, self._axes_before.pop()
        if not stage.returns or shards.axis == before or shards.group is None:
            return out
        first, *rest = out if isinstance(out, tuple) else (out,)
        first = shards.switched(first, stage.layout, before)
        return (first, *rest) if isinstance(out, tuple) else first

    def _jointly(
        self, stage: AxisStage, forward: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        """Take the place of ``forward`` of a module whose stage mixes all axes, so that one of them
        has to stay sharded: attention in it is spread over the ranks (:class:`JointAttention`), and
        its number of heads recorded. While the model is plain it is ``forward`` itself. Raises
        ModelError for a stage that calls no attention."""
        shards = self.shards
        if not self.spread or shards is None or shards.group is None:
            return forward(*args, **named)
        chosen = shards.chosen.get(shards.position - 1)  # this stage's: it has been counted
        method = None if chosen is None or chosen.method == "none" else chosen.method
        joint = JointAttention(shards, stage, self._slot, method)
        with joint:
            out = forward(*args, **named)
        if not joint.calls:
            raise ModelError(
                f"stage {stage.modules}",
                got="no call of scaled_dot_product_attention",
                wanted="attention that can be spread over ranks",
            )
        self._records[shards.members] = replace(self._record_here, heads=joint.heads)
        return out

    def _choice_for(self, stage: AxisStage, at: int) -> AxisChoice:
        """The axis to shard from stage number ``at`` on. It is chosen once in a forward, so that a
        recompute finds the same choice; only a choice of a mixed axis without a method, made while
        nothing was known of its heads, is made again."""
        shards = self.at_work
        known = shards.chosen.get(at)
        if known is None or (known.axis in stage.mixed and known.method == "none"):
            shards.chosen[at] = self._choose_axis(stage, at, shards)
        return shards.chosen[at]

    def _choose_axis(self, stage: AxisStage, at: int, shards: AxisShards) -> AxisChoice:
        """The axis to shard from stage number ``at`` on: by the plan of all stages where their
        order is known from an earlier forward, else the longest that the stage does not mix. Raises
        ModelError where there is none."""
        mixes_all = self.axes <= set(stage.mixed)
        has_all_sizes = self.axes <= shards.totals.keys()
        record = self._record_here
        has_heads = record.heads or not mixes_all
        recorded = record.order[at : at + 1] == (stage.mixed,)
        # A stage with ``returns`` is switched back anyway: there is no sequence of axes to plan.
        if has_all_sizes and has_heads and not stage.returns and recorded:
            key = record.order, record.heads, tuple(shards.totals.items()), shards.ranks
            if key not in self._plans:
                self._plans[key] = self._plan_choices()
            return self._plans[key][at]
        if mixes_all:
            return AxisChoice(axis=shards.axis)  # until its heads are known
        free = [n for n in stage.layout.flat if n in self.axes and n not in stage.mixed]
        if not free:
            raise ModelError(
                f"stage {stage.modules}",
                got=f"dims {stage.dims}, of which it mixes every axis",
                wanted="an axis that it does not mix",
            )
        return AxisChoice(axis=shards.best(free))

    def _plan_choices(self) -> tuple[AxisChoice, ...]:
        """Choose the axis of every recorded stage, in calling order, so that ranks send the fewest
        bytes in a whole forward, by switches and by attention over all places."""
        shards = self.at_work
        sizes = {name: n for name, n in shards.totals.items() if name in self.axes}
        plan = plan_axes(
            [MixingStage(mixes=mixed) for mixed in self._record_here.order],
            sizes,
            shards.ranks,
            tensor_bytes=1.0,  # only ratios of times matter
            transfer_s=lambda sent: sent / _LINK_BYTES_S,
            entry=self.axis,
            exit_=self.axis,
            heads=self._record_here.heads,
        )
        return plan.choices

    @contextmanager
    def _recomputing(self, shards: AxisShards) -> Iterator[None]:
        """Context of a forward on ``shards`` in which the functions by which modules of diffusers
        and transformers checkpoint activations are replaced by :meth:`_run_checkpoint`, so that
        switches stand outside of what is recomputed."""
        name = "_gradient_checkpointing_func"
        modules = [module for module in self.model.modules() if name in module.__dict__]
        checkpoints = [getattr(module, name) for module in modules]
        for module, checkpoint in zip(modules, checkpoints, strict=True):
            setattr(module, name, partial(self._run_checkpoint, shards, checkpoint))
        try:
            yield
        finally:
            for module, checkpoint in zip(modules, checkpoints, strict=True):
                setattr(module, name, checkpoint)

    def _run_checkpoint(
        self,
        shards: AxisShards,
        checkpoint: Callable[..., Any],
        function: Any,
        *args: Any,
        **named: Any,
    ) -> Any:
        """Take the place of ``checkpoint(function, *args, **named)``, a call in a forward on
        ``shards``. Where ``function`` is a module of a stage, switches are made before and after
        the checkpoint, not within it, so that its recompute repeats none. Any other ``function``
        may contain stages: its recompute begins with the axis sharded that is so now."""
        stage = self.stages.get(function) if isinstance(function, torch.nn.Module) else None
        if stage is None:
            return checkpoint(
                partial(self._on_shards_of, shards, shards.axis, function), *args, **named
            )
        args, _ = self._enter_stage(stage, function, args, {})
        state = shards, shards.axis, shards.position
        out = checkpoint(partial(self._run_checkpointed, state, function), *args, **named)
        return self._leave_stage(stage, out)

    def _run_checkpointed(
        self, state: tuple[AxisShards, str, int], function: Callable[..., Any], *args: Any
    ) -> Any:
        """Run ``function``, a module of a stage within a checkpoint, in mode RECOMPUTED, in the
        forward and in the recompute alike, from ``state``: (shards, sharded axis, number of stages
        begun). What was before is restored."""
        shards, axis, position = state
        recomputing_before, position_before = self._recomputing_now, shards.position
        self._recomputing_now, shards.position = True, position
        try:
            return self._on_shards_of(shards, axis, function, *args)
        finally:
            self._recomputing_now, shards.position = recomputing_before, position_before

    def _on_shards_of(
        self, shards: AxisShards, axis: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Run ``function`` on ``shards`` with ``axis`` sharded, and restore what was before. So a
        recompute runs as its forward did, though the model may work on other shards by now, or be
        plain."""
        before = self.spread, self.shards, shards.axis
        self.spread, self.shards, shards.axis = True, shards, axis
        try:
            return function(*args)
        finally:
            self.spread, self.shards, shards.axis = before
