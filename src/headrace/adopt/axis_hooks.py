"""The hooks of a model with stages: which axis is sharded in each, and where it is switched.

A hook on a stage that mixes the sharded axis shards another axis first, by one all-to-all. The
order of stages is recorded in the first forward; later forwards use the axes of :func:`plan_axes`.
Where the model checkpoints activations, recomputed stages use the shards of their first forward;
switches stand outside of the checkpoints, so recompute repeats no traffic.
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
from headrace.adopt.joint_attention import JointAttention
from headrace.adopt.operators import ModelSlot
from headrace.adopt.own_hooks import hook_after, hook_before
from headrace.errors import ModelError, SpecError
from headrace.ops.traced_switch import GroupSlot, traced_switch
from headrace.spec.axes import AxisChoice, MixingStage, plan_axes
from headrace.spec.method_facts import Members

__all__ = [
    "RouteSwitch",
    "HookManager",
    "HookMode",
    "StageRoute",
    "route",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSwitch:
    """A switch of a tensor with dims ``dims`` from shards of ``from_dim`` to shards of ``to_dim``.
    ``here`` are the local sizes of its axes before the switch."""

    dims: Dims
    here: Mapping[str, int]
    from_dim: int
    to_dim: int
    sizes: tuple[int, ...]
    to_sizes: tuple[int, ...]
    handle: int
    rank: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Switch ``x``: the local tensor with ``to_dim`` sharded."""
        opened = self.dims.opened(x, self.here)
        moved = traced_switch(
            opened, self.from_dim, self.to_dim, self.sizes, self.to_sizes, self.handle, self.rank
        )
        return self.dims.closed(moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoute:
    """The switches before and after a stage. ``cuts`` tells which other arguments are cut to this
    rank's part, as (dims, full sizes of the axes, the cut dim, first index, count);
    ``counts`` are whole numbers among them."""

    dims: Dims | None = None
    here: Mapping[str, int] = field(default_factory=dict)
    enter: RouteSwitch | None = None
    leave: RouteSwitch | None = None
    counts: Mapping[int | str, int] = field(default_factory=dict)
    cuts: Mapping[int | str, tuple[Dims, Mapping[str, int], int, int, int]] = field(
        default_factory=dict
    )

    def arguments(self, args: Any, named: Any) -> tuple[Any, Any]:
        """The arguments of the stage after the switch and the cuts: (positional, keyword)."""
        given = {**dict(enumerate(args)), **named}
        key = next(iter(given))
        if self.enter is not None:
            given[key] = self.enter.of(given[key])
        known: dict[str, int] = {}
        if self.cuts and self.dims is not None:
            known = self.dims.sizes_of(given[key], self.here)
        for side, (dims, totals, at, start, count) in self.cuts.items():
            value = given.get(side)
            if isinstance(value, torch.Tensor):
                given[side] = _cut(value, dims, {**known, **totals}, at, start, count)
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


def _cut(
    x: torch.Tensor, dims: Dims, totals: Mapping[str, int], at: int, start: int, count: int
) -> torch.Tensor:
    """This rank's part of an argument that has all places of the axis; any other argument is
    returned unchanged."""
    name = dims.flat[at]
    inside = next(i for i, names in enumerate(dims.names) if name in names)
    known = math.prod([totals[n] for n in dims.names[inside] if n in totals])
    if x.shape[inside] % known:
        return x
    return dims.closed(dims.opened(x, totals).narrow(at, start, count))


def _route_switch(shards: AxisShards, dims: Dims, axis: str, slot: GroupSlot) -> RouteSwitch:
    """The switch from the sharded axis to ``axis``; ``shards.axis`` is ``axis`` afterwards."""
    found = RouteSwitch(
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
    return found


def _cuts(
    stage: AxisStage, shards: AxisShards
) -> dict[int | str, tuple[Dims, Mapping[str, int], int, int, int]]:
    """The arguments of ``stage`` to cut to this rank's part, as in :class:`StageRoute`."""
    sizes = shards.sizes(shards.axis)
    found: dict[int | str, tuple[Dims, Mapping[str, int], int, int, int]] = {}
    for side, text in stage.sides.items():
        dims = Dims.parse(text)
        if shards.axis in dims:
            at = dims.dim_of(shards.axis)
            found[side] = (
                dims,
                dict(shards.totals),
                at,
                sum(sizes[: shards.rank]),
                sizes[shards.rank],
            )
    return found


def route(
    stages: Sequence[tuple[AxisStage, str]], shards: AxisShards, slot: GroupSlot
) -> list[StageRoute]:
    """The switches around each stage, given as (stage, the axis that is sharded while it runs) in
    calling order. ``shards`` is unchanged afterwards."""
    begun, found = shards.axis, list[StageRoute]()
    for stage, axis in stages:
        before = shards.axis
        enter = None if axis == before else _route_switch(shards, stage.layout, axis, slot)
        own, here = _cuts(stage, shards), shards.here()
        counts = {name: shards.counted(axis) for name, axis in stage.counts.items()}
        leave = None
        if stage.returns and shards.axis != before:
            leave = _route_switch(shards, stage.layout, before, slot)
        found.append(
            StageRoute(
                dims=stage.layout, here=here, enter=enter, leave=leave, counts=counts, cuts=own
            )
        )
    shards.axis = begun
    return found


_adapted: WeakSet[torch.nn.Module] = WeakSet()
"""Models that have hooks."""

_LINK_BYTES_S = 1e11
"""Bandwidth of a link. Its value does not matter: all links are alike, so plans depend on ratios of
times only."""


def _is_cast(x: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether ``x`` has the values of ``own``, perhaps in a narrower dtype."""
    if x.shape != own.shape or x.device != own.device:
        return False
    return x.data_ptr() == own.data_ptr() or torch.equal(x, own.to(x.dtype))


def _backward_at_work() -> int:
    """The number of the backward that this runs in, -1 in none."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learnt:
    """Facts from the last forward on some ranks: the axes that each stage mixed, the modules of the
    stages in calling order, and the heads of attention over all places. All ranks that work
    together have the same record."""

    order: tuple[tuple[str, ...], ...] = ()
    modules: tuple[torch.nn.Module, ...] = ()
    heads: int | None = None


class HookMode(Enum):
    """What the hooks of a model do at the moment."""

    PLAIN = auto()
    """Nothing: the model is the user's own."""
    SWITCHING = auto()
    """Switch axes as stages are reached, and learn the order of stages."""
    TRACED = auto()
    """Call the switches that were planned before: a compiler traces the forward."""
    RECOMPUTED = auto()
    """Nothing, as a checkpoint computes or recomputes this part: its switches stand outside of the
    checkpoint."""


class HookManager:
    """Owns the hooks of ``model`` and the ``shards`` of the current batch; a forward begins with
    ``axis`` sharded. ``mode`` says what the hooks do."""

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
        # The model: its stages by their modules, and the names of its axes.
        self.model, self.axis = model, axis
        self.stages = modules_of(model, tuple(stages))
        self.axes = {axis, *(name for stage in stages for name in stage.mixed)}
        # Other sequences that attention sees, in shards beside the axis.
        self.beside = tuple(dict.fromkeys(name for stage in stages for name in stage.beside))
        for stage in stages:
            if stage.beside and not self.axes <= set(stage.mixed):
                raise SpecError(
                    f"stage {stage.modules}, whose attention sees {' '.join(stage.beside)}",
                    got=f"mixes {stage.mixes}",
                    wanted=f"all axes, {' '.join(sorted(self.axes))}",
                    hint="along one axis it would see the words of one rank: give the text whole",
                )
        # Axes that hooks of an adapter put in shards.
        self.switched: tuple[str, ...] = ()
        # The batch: whether the model is spread, its shards, and shards given for the next forward.
        self.spread = False
        self.shards: AxisShards | None = None
        self._next_shards: AxisShards | None = None
        self.inputs: tuple[torch.Tensor, ...] = ()  # of the micro-batch of a loop
        # The current forward: stages that have begun and not ended, and all stages called so far.
        self._entered = list[str]()
        self._called = list[torch.nn.Module]()
        self._recomputing_now = False
        # The backward at work: what was before it, and the axes that its forwards ended with.
        self._resumed: dict[Any, Any] = {}
        self._slot = ModelSlot()
        # Earlier forwards: their records, plans made from these, and the context of each tensor.
        self._learnt: dict[Members, _Learnt] = {}
        self._plans: dict[Any, tuple[AxisChoice, ...]] = {}
        self._known: MutableMapping[torch.Tensor, AxisShards] = WeakIdKeyDictionary()
        # Tracing: whether a compiler is asked for, and the switches of the forward that it traces.
        self.traced, self.routes = False, dict[int, StageRoute]()
        self.last_axis = axis
        self._group_slot: GroupSlot | None = None
        self._hooks, self._outside = ExitStack(), ExitStack()
        _adapted.add(model)
        self._hooks.callback(_adapted.discard, model)
        self._hooks.callback(hook_before(model, self._begin, named=True))
        self._hooks.callback(hook_after(model, self._end, always=True))
        for number, (module, stage) in enumerate(self.stages.items()):
            if self.axes <= set(stage.mixed):
                self._hooks.callback(partial(setattr, module, "forward", module.forward))
                module.forward = partial(self._jointly, stage, module, module.forward)
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
    def _record_here(self) -> _Learnt:
        """The record of the ranks that share the current batch. Records of other groups do not
        count: not all of these ranks have them, so their plans would differ."""
        return self._learnt.get(self.at_work.members, _Learnt())

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
        """Leave no trace of a forward on shards of ranks that are not there."""
        self._next_shards = None
        self._learnt.pop(shards.members, None)
        self._entered.clear()
        self._called.clear()
        self._outside.close()

    def forget(self) -> None:
        """Drop the records of earlier forwards, as not all ranks may have run the last one."""
        self._learnt.clear()

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
        own = ExitStack()
        if before is not None:

            def enter(at: Any, args: Any, named: Any) -> Any:
                """Call ``before`` while the model is spread, on the shards that the module's first
                forward had."""
                if not self.spread:
                    return None
                if not torch.compiler.is_compiling():
                    self._meet(at, own)
                return before(args, named)

            own.callback(hook_before(module, enter, named=True))
        if after is not None:

            def leave(at: Any, args: Any, out: Any) -> Any:
                return after(args, out) if self.spread else None

            own.callback(hook_after(module, leave, always=always))
        self._hooks.callback(own.close)
        return own.close

    def fewest(self, totals: Mapping[str, int]) -> int:
        """The most ranks that there are places for on every axis that will be in shards: the first
        one, those that hooks of an adapter switch to, and for each stage the longest of those that
        it does not mix."""
        found = [totals[name] for name in (self.axis, *self.switched)]
        for stage in self.stages.values():
            free = [n for n in stage.layout.flat if n in self.axes and n not in stage.mixed]
            if free and all(name in totals for name in free):
                found.append(max(totals[name] for name in free))
        return min(found)

    def know(self, x: torch.Tensor, shards: AxisShards) -> None:
        """``x`` is an input on ``shards``."""
        self._known[x] = shards

    def shards_of(self, given: Sequence[Any]) -> AxisShards | None:
        """The shards of the first input that is known; None where none is known."""
        tensors = (x for x in given if isinstance(x, torch.Tensor))
        known = (self._known.get(x) for x in tensors)
        return next((shards for shards in known if shards is not None), None)

    def take(self, shards: AxisShards) -> None:
        """Work on shards from here on: the next forward, whatever wrappers made of its inputs, or
        stages that are called by hand."""
        self._next_shards = shards
        if _backward_at_work() < 0:
            self.end_backward()  # one that failed
        self.shards = shards.begun(self.axis, _backward_at_work())
        self._entered.clear()  # a forward that failed left some
        self._called.clear()
        self.routes = self._routes() if self.traced else {}

    def _routes(self) -> dict[int, StageRoute]:
        """The switches of the next forward by stage number; empty while the calling order of stages
        is not known. Raises ModelError for stages that cannot be traced."""
        shards, modules = self.at_work, self._record_here.modules
        if not modules:
            return {}
        if shards.group is None:
            return {number: StageRoute() for number in range(len(self.stages))}
        found = [self.stages[module] for module in modules]
        several = len(set(modules)) < len(modules)
        if several or any(self.axes <= set(stage.mixed) for stage in found):
            raise ModelError(
                "compiled model",
                wanted="stages that can be traced",
                got="a stage that runs twice" if several else "a stage that mixes all axes",
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
        axis, wanted = shards.axis, list[tuple[AxisStage, str]]()
        for at, stage in enumerate(found):
            during = self._choose_axis(stage, at, shards).axis if axis in stage.mixed else axis
            wanted.append((stage, during))
            axis = axis if stage.returns else during
        numbers = {module: number for number, module in enumerate(self.stages)}
        routes = route(wanted, shards, self._group_slot)
        self.last_axis = axis
        return dict(zip((numbers[module] for module in modules), routes, strict=True))

    def _begin(self, module: Any, args: Any, named: Any) -> None:
        """The hook before the model: starts a spread forward, or refuses parts of a batch that the
        plain model is given."""
        if self.mode is HookMode.PLAIN:
            self._refuse_sharded(args, named)
        elif self.mode is not HookMode.TRACED:
            self._begin_forward(args, named)

    # Compilers break their graphs here: only at run time is it known which axis is sharded.
    @torch.compiler.disable
    def _begin_forward(self, args: Any, named: Any) -> None:
        """Take the shards that the arguments of the model belong to and start its forward; raises
        ModelError for inputs that were not sharded."""
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
        self._outside.enter_context(self._recomputing(self.at_work))

    def _require_own(self, values: tuple[Any, ...]) -> None:
        """Raise ModelError for an evaluation within a micro-batch that is given none of its inputs,
        whatever a wrapper has cast them to: it would be taken for a part of the batch."""
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
        """Raise ModelError where the plain model receives a part of a batch."""
        if self.shards_of((*args, *named.values())) is not None:
            raise ModelError(
                "inputs of shard() given to the model itself",
                got=f"{type(self.model).__name__}(...)",
                wanted="run(**shard)",
                hint="outside of it the model is the plain one, for whole batches",
            )

    def _end(self, module: Any, _: Any, out: Any) -> None:
        if self.mode not in (HookMode.PLAIN, HookMode.TRACED):
            self._note_stage_order(failed=out is None)

    @torch.compiler.disable
    def _note_stage_order(self, *, failed: bool) -> None:
        """Keep in which order the stages were called and what they mixed, unless the forward
        raised."""
        self._outside.close()
        if self.shards is not None and not failed:
            self._learnt[self.shards.members] = replace(
                self._record_here, order=tuple(self.shards.passed), modules=tuple(self._called)
            )

    def _enter(self, number: int, stage: AxisStage, module: Any, args: Any, named: Any) -> Any:
        """The hook before a stage: arguments (positional, keyword) on the axis that the stage needs
        in shards, or None to leave them."""
        mode = self.mode
        if mode is HookMode.TRACED:
            return self.routes[number].arguments(args, named)
        if mode is HookMode.SWITCHING:
            return self._enter_stage(stage, module, args, named)
        return None

    @torch.compiler.disable
    def _enter_stage(self, stage: AxisStage, module: Any, args: Any, named: Any) -> Any:
        """Switch the first tensor of a stage's arguments to an axis that it does not mix, cut side
        arguments to this rank and set counts of places to this rank's."""
        given = {**dict(enumerate(args)), **named}
        key = next(iter(given), None)
        first = given.get(key)
        if not isinstance(first, torch.Tensor):
            raise ModelError(
                f"stage {stage.modules}",
                got=f"{type(first).__name__} as its first argument",
                wanted=f"a tensor of dims {stage.dims}",
            )
        self._meet(module, module)
        shards = self.at_work
        at = shards.pass_stage(stage.mixed)
        if at == len(self._called):
            self._called.append(module)
        self._entered.append(shards.axis)
        if shards.group is not None and shards.axis in stage.mixed:
            shards.learn(first, stage.layout, self.axes)
            axis = self._next(stage, at).axis
            if axis != shards.axis:
                given[key] = shards.switched(first, stage.layout, axis)
        known = stage.layout.sizes_of(given[key], shards.here()) if stage.sides else {}
        for side, text in stage.sides.items():
            if isinstance(given.get(side), torch.Tensor):
                given[side] = shards.cut(given[side], Dims.parse(text), known)
        for count, axis in stage.counts.items():
            if type(given.get(count)) is int:
                given[count] = shards.counted(axis)
        return tuple(given[at] for at in range(len(args))), {k: given[k] for k in named}

    def _meet(self, module: torch.nn.Module, hook: Any) -> None:
        """Note where the forward comes to a hook of a module; what a checkpoint computes
        again, in a backward, goes on from there. Raises ModelError where it came there several
        times."""
        shards = self.at_work
        if _backward_at_work() == shards.task:
            shards.entries.setdefault(hook, []).append((shards.axis, shards.position))
            return
        entries = shards.entries.get(hook, [])
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

    def resume(self, shards: AxisShards, at_end: Callable[[Callable[[], None]], None]) -> None:
        """Be spread and on the shards of a forward whose backward begins, until it has ended."""
        if not self._resumed:
            self._resumed[None] = self.spread, self.shards
            at_end(self.end_backward)
        self._resumed.setdefault(shards, shards.axis)
        self.spread, self.shards = True, shards

    def end_backward(self) -> None:
        """What was before a backward is again."""
        if self._resumed:
            self.spread, self.shards = self._resumed.pop(None)
        for shards, axis in self._resumed.items():
            shards.axis = axis
        self._resumed.clear()

    def _leave(self, number: int, stage: AxisStage, module: Any, _: Any, out: Any) -> Any:
        """The hook after a stage: its result ``out`` on the axis that was in shards before, where
        the stage is declared to return to it; None to leave it."""
        mode = self.mode
        if mode is HookMode.TRACED:
            return self.routes[number].result(out)
        return self._leave_stage(stage, out) if mode is HookMode.SWITCHING else None

    @torch.compiler.disable
    def _leave_stage(self, stage: AxisStage, out: Any) -> Any:
        """Switch the first tensor of a stage's result back to the axis that was in shards before,
        for a stage with ``returns``."""
        shards, before = self.at_work, self._entered.pop()
        if not stage.returns or shards.axis == before or shards.group is None:
            return out
        first, *rest = out if isinstance(out, tuple) else (out,)
        first = shards.switched(first, stage.layout, before)
        return (first, *rest) if isinstance(out, tuple) else first

    def _jointly(
        self, stage: AxisStage, module: Any, forward: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        """Run the forward of a stage that mixes all axes, so that one of them is sharded: its
        attention meets the places of other ranks (:class:`JointAttention`)."""
        shards = self.shards
        plain = not self.spread or module not in self.stages
        if plain or shards is None or shards.group is None:
            return forward(*args, **named)
        chosen = shards.chosen.get(shards.position - 1)
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
        self._learnt[shards.members] = replace(self._record_here, heads=joint.heads)
        return out

    def _next(self, stage: AxisStage, at: int) -> AxisChoice:
        """The axis to shard from stage number ``at`` on; a choice of an earlier forward is kept
        unless it cannot run this stage.
        """
        shards = self.at_work
        known = shards.chosen.get(at)
        if known is None or (known.axis in stage.mixed and known.method == "none"):
            shards.chosen[at] = self._choose_axis(stage, at, shards)
        return shards.chosen[at]

    def _choose_axis(self, stage: AxisStage, at: int, shards: AxisShards) -> AxisChoice:
        """The axis in shards from stage number ``at`` on: by the plan of all stages where their
        order is known from an earlier forward, else the longest that the stage leaves free."""
        everything = self.axes <= set(stage.mixed)
        sized = self.axes <= shards.totals.keys()
        known = self._record_here
        planned = known.heads or not everything
        if sized and planned and not stage.returns and known.order[at : at + 1] == (stage.mixed,):
            key = known.order, known.heads, tuple(shards.totals.items()), shards.ranks
            if key not in self._plans:
                self._plans[key] = self._plan_choices()
            return self._plans[key][at]
        if everything:
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
        """One choice for each stage in calling order, with the fewest bytes sent by switches over a
        whole forward."""
        shards = self.at_work
        sizes = {name: n for name, n in shards.totals.items() if name in self.axes}
        plan = plan_axes(
            [MixingStage(mixes=mixed) for mixed in self._record_here.order],
            sizes,
            shards.ranks,
            tensor_bytes=1.0,
            transfer_s=lambda sent: sent / _LINK_BYTES_S,
            entry=self.axis,
            exit_=self.axis,
            heads=self._record_here.heads,
        )
        return plan.choices

    @contextmanager
    def _recomputing(self, shards: AxisShards) -> Iterator[None]:
        """Context in which the model's own activation checkpoints switch outside of the part that
        they recompute."""
        name = "_gradient_checkpointing_func"
        found = [module for module in self.model.modules() if name in module.__dict__]
        kept = [getattr(module, name) for module in found]
        for module, function in zip(found, kept, strict=True):
            setattr(module, name, partial(self._run_checkpoint, shards, function))
        try:
            yield
        finally:
            for module, function in zip(found, kept, strict=True):
                setattr(module, name, function)

    def _run_checkpoint(
        self,
        shards: AxisShards,
        recompute: Callable[..., Any],
        function: Any,
        *args: Any,
        **named: Any,
    ) -> Any:
        """Take the place of a model's checkpoint function: switch before and after the part that is
        computed again, so that its recompute communicates nothing."""
        stage = self.stages.get(function) if isinstance(function, torch.nn.Module) else None
        if stage is None:
            return recompute(
                partial(self._on_shards_of, shards, shards.axis, function), *args, **named
            )
        args, _ = self._enter_stage(stage, function, args, {})
        there = shards, shards.axis, shards.position
        out = recompute(partial(self._silent, there, function), *args, **named)
        return self._leave_stage(stage, out)

    def _silent(
        self, there: tuple[AxisShards, str, int], function: Callable[..., Any], *args: Any
    ) -> Any:
        """Run ``function`` in mode RECOMPUTED, in the first forward and in the recompute."""
        shards, axis, position = there
        before, self._recomputing_now, last = self._recomputing_now, True, shards.position
        shards.position = position
        try:
            return self._on_shards_of(shards, axis, function, *args)
        finally:
            self._recomputing_now, shards.position = before, last

    def _on_shards_of(
        self, shards: AxisShards, axis: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Run ``function`` on the shards of its first forward; the model may have other current
        shards by now."""
        before, last = self.shards, shards.axis
        self.shards, shards.axis = shards, axis
        try:
            return function(*args)
        finally:
            self.shards, shards.axis = before, last
