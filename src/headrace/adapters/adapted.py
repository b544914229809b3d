"""Multi-dimensional models on shards of their axes, with nothing changed in them (DSP).

    run = headrace.adapt(model)                      # or with stages of one's own
    shard = run.shard({"hidden_states": video, "timestep": t})
    out = run(**shard)                               # axes are switched where a stage mixes them
    loss = ((out.sample - run.local(target, "b c t h w")) ** 2).sum() / target.numel()
    run.backward(loss); run.add_up(loss)             # gradients of all ranks

An axis is in shards in which the stage at work mixes nothing; where the next one does, one
all-to-all between the modules puts another one in shards. The objective is the sum of all ranks'
losses: what all ranks compute alike is divided by their number (``alike=True``), what those with
the same samples do by ``mates``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from headrace.adapters.dims import Dims
from headrace.adapters.shards import AxisShards
from headrace.adapters.stages import AxisStage, modules_of
from headrace.comm.collectives import agree
from headrace.comm.mesh import Groups, groups_here
from headrace.errors import DataError, ModelError, SpecError
from headrace.layouts.intervals import split_sizes
from headrace.ops.switch import gather
from headrace.passes.gradients import add_plainly, add_up, is_wrapped, summed_loss
from headrace.passes.shard import fingerprint
from headrace.planning.axes import plan_axes, split_batch
from headrace.spec.axes import MixingStage

__all__ = ["Adapted"]

Sizes = Callable[[Mapping[str, torch.Tensor]], Mapping[str, int]] | None
"""Places of axes by name, for inputs by name."""

_LINK_BYTES_S = 1e11
"""Only ratios count where all links are alike."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a tensor was met: on which shards, with which axis, before which module of a stage."""

    shards: AxisShards
    axis: str
    position: int
    module: torch.nn.Module | None = None


class Adapted:
    """A model, its stages, and the shards of the batch at work (``shards``).

    ``inputs`` are the dims of its inputs by name, those with places of ``axis``, which is in shards
    where no stage says otherwise; ``batch`` names samples that may be worked on apart. ``sizes``
    tells places of axes that the model makes of its inputs.
    """

    def __init__(
        self, model: torch.nn.Module, *, stages: Sequence[AxisStage], inputs: Mapping[str, str],
        axis: str, batch: str | None = None, sizes: Sizes = None, groups: Groups | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._stages = modules_of(self.inner, tuple(stages))
        self._inputs = {name: Dims.parse(text) for name, text in inputs.items()}
        self.axis, self._batch = axis, batch
        self._axes = {axis, *(name for stage in stages for name in stage.mixed)}
        self._sizes = sizes
        if sizes is None and not any(axis in dims for dims in self._inputs.values()):
            raise SpecError("axis of the inputs", got=axis, wanted="one of an input's dims")
        self._groups = groups or groups_here()
        self.shards: AxisShards | None = None
        self._order: tuple[tuple[str, ...], ...] = ()
        self._plans: dict[Any, tuple[str, ...]] = {}
        self._quiet = False
        self._known: MutableMapping[torch.Tensor, _Place] = WeakIdKeyDictionary()
        self._hooks = ExitStack()
        for module, stage in self._stages.items():
            enter = module.register_forward_pre_hook(partial(self._enter, stage), with_kwargs=True)
            leave = module.register_forward_hook(partial(self._leave, stage))
            self._hooks.callback(enter.remove)
            self._hooks.callback(leave.remove)
        self._entered = list[str]()

    @property
    def ranks(self) -> int:
        """All of them."""
        return self._groups.ranks if self._groups is not None else 1

    @property
    def mates(self) -> int:
        """Ranks that work on the same samples: what they have alike counts once for all of them."""
        return self._at_work.ranks

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of inputs that all ranks have alike: its places of ``axis``, and its
        samples where the axis has fewer places than there are ranks. Collective.

        Raises DataError for inputs of other dims, InfeasiblePlan where there are more ranks than
        samples and places together, and PlanMismatch where ranks have other inputs.
        """
        tensors = {name: batch[name] for name in self._inputs if batch.get(name) is not None}
        totals = self._totals(tensors)
        samples = totals.get(self._batch, 1) if self._batch else 1
        parts = split_batch(samples, totals[self.axis], self.ranks)
        group, part = self._group(parts)
        if self._groups is not None:
            agree("inputs", fingerprint(tensors, (parts,)), self._groups.world)
        sizes = split_sizes(samples, parts)
        if self._batch is not None:
            totals[self._batch] = sizes[part]
        self.shards = AxisShards(
            axis=self.axis,
            totals=totals,
            group=group,
            samples=(sum(sizes[:part]), sizes[part], samples),
        )
        found = dict(batch)
        for name, value in tensors.items():
            found[name] = self.local(value, str(self._inputs[name]))
            self._known[found[name]] = _Place(self.shards, self.axis, 0)
        return found

    def local(self, x: torch.Tensor, dims: str) -> torch.Tensor:
        """This rank's part of another tensor of the batch that all ranks have alike, as the axis in
        shards is now: after a forward as in its result."""
        layout, shards = Dims.parse(dims), self._at_work
        if self._batch is not None and self._batch in layout:
            if (self._batch,) not in layout.names:
                raise SpecError("dims", got=dims, wanted=f"a dim of its own for {self._batch}")
            x = x.narrow(layout.names.index((self._batch,)), *shards.samples[:2])
        return shards.local(x, layout)

    def collect(self, x: torch.Tensor, dims: str) -> torch.Tensor:
        """The whole of a result, on every rank: a loss of it is ``alike`` on all of them.
        Collective."""
        layout, shards = Dims.parse(dims), self._at_work
        whole = shards.whole(x, layout)
        if self._batch is None or (self._batch,) not in layout.names or self._groups is None:
            return whole
        each = shards.ranks
        mine = self._groups.get(tuple(range(self._groups.rank % each, self.ranks, each)))
        sizes = split_sizes(shards.samples[2], self.ranks // each)
        return gather(whole, layout.names.index((self._batch,)), mine, sizes=sizes)

    def __call__(self, **inputs: Any) -> Any:
        """The model's result for what :meth:`shard` returned; call it again for another forward of
        the same batch. Raises ModelError for other inputs."""
        given = (value for value in inputs.values() if isinstance(value, torch.Tensor))
        places = [place for x in given if (place := self._known.get(x)) is not None]
        if not places:
            raise ModelError(
                "inputs of the model", got="others than were sharded", wanted="what shard() gave"
            )
        shards = self.shards = places[0].shards
        shards.begin(self.axis)
        self._entered.clear()  # a forward that failed left some
        if is_wrapped(self.model):
            add_plainly(self.model)
        with self._outside(shards):
            out = self.model(**inputs)
        self._order = tuple(shards.passed)
        return out

    def backward(self, loss: torch.Tensor, *, alike: bool = False) -> None:
        """Add gradients of this rank's part of the loss; one that all ranks have ``alike``, as that
        of a collected result, counts once."""
        part, shards = loss / self.ranks if alike else loss, self.shards
        axis = self._at_work.axis
        summed_loss(self.model, part).backward()
        self.shards, self._at_work.axis = shards, axis  # checkpoints go back to others

    def add_up(self, loss: torch.Tensor, *, alike: bool = False) -> torch.Tensor:
        """The loss of all ranks together, once gradients are there: after the last
        :meth:`backward` of a step. Collective."""
        whole = loss.detach().clone() / (self.ranks if alike else 1)
        if self._groups is not None:
            dist.all_reduce(whole)
            if not is_wrapped(self.model):
                add_up(self.model.parameters())
        return whole

    def detach(self) -> None:
        """Take the hooks away."""
        self._hooks.close()

    def on(
        self, module: torch.nn.Module, before: Any = None, after: Any = None, *,
        always: bool = False,
    ) -> None:  # fmt: skip
        """More hooks, of those who know the model: ``before(args, named)`` gives them anew,
        ``after(args, result)`` the result; ``always`` after a forward that failed, too."""
        if before is not None:

            def enter(_: Any, args: Any, named: Any) -> Any:
                return before(args, named)

            self._hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        if after is not None:

            def leave(_: Any, args: Any, out: Any) -> Any:
                return after(args, out)

            self._hooks.callback(module.register_forward_hook(leave, always_call=always).remove)

    @property
    def _at_work(self) -> AxisShards:
        if self.shards is None:
            raise ModelError("shards", got="none", wanted="a call of shard() before")
        return self.shards

    def _totals(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The places of every name in the inputs. Raises DataError where they differ."""
        found: dict[str, int] = {}
        for name, x in tensors.items():
            dims = self._inputs[name]
            if x.dim() != len(dims.names):
                raise DataError(f"input {name}", got=list(x.shape), wanted=f"dims {dims}")
            for names, size in zip(dims.names, x.shape, strict=True):
                if len(names) == 1 and found.setdefault(names[0], size) != size:
                    raise DataError(
                        f"input {name}", got=f"{size} places of {names[0]}",
                        wanted=f"{found[names[0]]}, as in others",
                    )  # fmt: skip
        found |= self._sizes(tensors) if self._sizes is not None else {}
        if self.axis not in found:
            raise DataError("inputs", got=", ".join(tensors) or "none", wanted="those with axes")
        return {name: found[name] for name in found if name in self._axes or name == self._batch}

    def _group(self, parts: int) -> tuple[dist.ProcessGroup | None, int]:
        """The ranks of this rank's samples, and which samples these are."""
        if self._groups is None:
            return None, 0
        each = self.ranks // parts
        blocks = [tuple(range(at, at + each)) for at in range(0, self.ranks, each)]
        across = [tuple(range(at, self.ranks, each)) for at in range(each)]
        self._groups.prepare([*blocks, *across])
        part = self._groups.rank // each
        return self._groups.get(blocks[part]), part

    # Compilers break their graphs here: what is in shards is known when a stage runs.
    @torch.compiler.disable
    def _enter(self, stage: AxisStage, module: Any, args: Any, named: Any) -> Any:
        if self._quiet:
            return args, named
        given = {**dict(enumerate(args)), **named}
        key = next(iter(given), None)
        first = given.get(key)
        if not isinstance(first, torch.Tensor):
            raise ModelError(
                f"stage {stage.modules}", got=f"{type(first).__name__} as its first argument",
                wanted=f"a tensor of dims {stage.dims}",
            )  # fmt: skip
        place = self._known.get(first)
        if place is not None and place.module is module:  # what a checkpoint computes again
            self.shards = place.shards
            place.shards.axis, place.shards.position = place.axis, place.position
        shards = self._at_work
        at = shards.pass_stage(stage.mixed)
        self._known[first] = _Place(shards, shards.axis, at, module)
        self._entered.append(shards.axis)
        if shards.group is not None and shards.axis in stage.mixed:
            shards.learn(first, stage.layout, self._axes)
            given[key] = shards.switched(first, stage.layout, self._next_axis(stage, at))
        for side, text in stage.sides.items():
            if isinstance(given.get(side), torch.Tensor):
                given[side] = shards.cut(given[side], Dims.parse(text))
        return tuple(given[at] for at in range(len(args))), {k: given[k] for k in named}

    @torch.compiler.disable
    def _leave(self, stage: AxisStage, _: Any, __: Any, out: Any) -> Any:
        if self._quiet:
            return out
        shards, before = self._at_work, self._entered.pop()
        if not stage.returns or shards.axis == before or shards.group is None:
            return out
        first, *rest = out if isinstance(out, tuple) else (out,)
        first = shards.switched(first, stage.layout, before)
        return (first, *rest) if isinstance(out, tuple) else first

    def _next_axis(self, stage: AxisStage, at: int) -> str:
        """The axis in shards from this stage on: as planned from the order that stages had before;
        at first, and where stages return, the one of most places."""
        shards = self._at_work
        known = shards.chosen.get(at)
        if known is None or known in stage.mixed:
            shards.chosen[at] = self._chosen(stage, at, shards)
        return shards.chosen[at]

    def _chosen(self, stage: AxisStage, at: int, shards: AxisShards) -> str:
        told = self._axes <= shards.totals.keys()
        if told and not stage.returns and self._order[at : at + 1] == (stage.mixed,):
            key = self._order, tuple(shards.totals.items()), shards.ranks
            if key not in self._plans:
                self._plans[key] = self._planned()
            return self._plans[key][at]
        free = [n for n in stage.layout.flat if n in self._axes and n not in stage.mixed]
        if not free:
            raise ModelError(
                f"stage {stage.modules}", got=f"dims {stage.dims}, of which it mixes every axis",
                wanted="an axis that it does not mix",
                hint="attention over all tokens at once is spread by headrace.compile",
            )  # fmt: skip
        return max(free, key=lambda name: shards.totals.get(name, 0))

    def _planned(self) -> tuple[str, ...]:
        shards = self._at_work
        sizes = {name: n for name, n in shards.totals.items() if name in self._axes}
        plan = plan_axes(
            [MixingStage(mixes=mixed) for mixed in self._order], sizes, shards.ranks,
            tensor_bytes=1.0, transfer_s=lambda sent: sent / _LINK_BYTES_S, entry=self.axis,
            exit_=self.axis,
        )  # fmt: skip
        return tuple(choice.axis for choice in plan.choices)

    @contextmanager
    def _outside(self, shards: AxisShards) -> Iterator[None]:
        """Have checkpoints of the model's own switch outside of what they compute again."""
        name = "_gradient_checkpointing_func"
        found = [module for module in self.inner.modules() if name in module.__dict__]
        kept = [getattr(module, name) for module in found]
        for module, function in zip(found, kept, strict=True):
            setattr(module, name, partial(self._recomputed, shards, function))
        try:
            yield
        finally:
            for module, function in zip(found, kept, strict=True):
                setattr(module, name, function)

    def _recomputed(
        self, shards: AxisShards, recompute: Callable[..., Any], function: Any, *args: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        stage = self._stages.get(function) if isinstance(function, torch.nn.Module) else None
        if stage is None:
            return recompute(partial(self._again, shards, shards.axis, function), *args, **named)
        args, _ = self._enter(stage, function, args, {})
        out = recompute(partial(self._silent, function), *args, **named)
        return self._leave(stage, function, args, out)

    def _silent(self, function: Callable[..., Any], *args: Any) -> Any:
        """Without switches, at first and again."""
        before, self._quiet = self._quiet, True
        try:
            return function(*args)
        finally:
            self._quiet = before

    def _again(
        self, shards: AxisShards, axis: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        """On the shards that it was first computed on: others may be at work by now."""
        before, last = self.shards, shards.axis
        self.shards, shards.axis = shards, axis
        try:
            return function(*args)
        finally:
            self.shards, shards.axis = before, last
