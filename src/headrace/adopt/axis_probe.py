"""Whether a model can be run on shards of its axes: asked of the model, in one process.

The model is run on a small batch as it is, and once more with its hooks, which keep the whole
tensor of every switch. Then it is run for each of a few ranks that are not there: what arrives at a
switch must be this rank's part of the tensor that was kept, and what leaves it is taken from there.
So no rank waits for another, and an error shows at the first switch behind it. Where one does, the
runs are repeated with all that single modules are given and return, to name the module.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from headrace.adopt.axis_hooks import HookManager
from headrace.adopt.axis_shards import AxisShards, Dims
from headrace.adopt.labels import result_tensors
from headrace.errors import InfeasiblePlan, ModelError
from headrace.layouts.partition import split_sizes

__all__ = ["WholeFails", "probe_axes", "refuse_batch_norms"]

_MIXES_THE_BATCH = (
    torch.nn.modules.batchnorm._BatchNorm,  # noqa: SLF001
    torch.nn.modules.instancenorm._InstanceNorm,  # noqa: SLF001
)
_RANKS = (2, 3)
_DYNAMO = "torch._dynamo"
_TINY = 1e-3
"""Parameters without a larger value may hide what they are multiplied with."""

_HINT = (
    "something mixes places of the axis, or counts them, outside of the stages that mix it: name "
    "it as a stage (AxisStage), give positions as inputs with dims, or hr.adapt(..., check=False)"
)

_SUSPECTS = (
    "input {} has no dims, and one as long as the axis: hr.adapt(..., inputs=...) tells its dims; "
) + _HINT


def refuse_batch_norms(model: torch.nn.Module) -> None:
    """Raise ModelError for norms whose statistics are those of one rank's places."""
    for name, module in model.named_modules():
        if isinstance(module, _MIXES_THE_BATCH) and module.training:
            raise ModelError(
                f"module {name}",
                got=f"{type(module).__name__} in training",
                wanted="norms of single places",
                hint="its statistics are those of one rank's places: LayerNorm, or module.eval()",
            )


class WholeFails(ModelError):
    """The model does not run on a whole batch as it stands."""


class _Differs(Exception):
    """What a rank has is not its part of the whole."""


@dataclass(slots=True, kw_only=True, eq=False)
class ProbeShards(AxisShards):
    """Shards of a rank that is not there, ``part`` of ``parts``; of no part: all places, of which
    the tensors at switches are kept in ``script``. ``prefer`` are axes in the order in which stages
    take them."""

    prefer: tuple[str, ...]
    parts: int = min(_RANKS)
    part: int | None = None
    script: list[torch.Tensor] = field(default_factory=list)
    met: int = 0
    axes_met: list[str] = field(default_factory=list)

    simulated: ClassVar[bool] = True

    @property
    def ranks(self) -> int:
        """Of those that are not there."""
        return self.parts

    @property
    def rank(self) -> int:
        """The rank whose shard is being computed."""
        return self.part or 0

    def begun(self, axis: str, task: int) -> Self:
        """Itself, before its first switch."""
        self.axis, self.task, self.position, self.met = axis, task, 0, 0
        self.passed.clear()
        self.chosen.clear()
        self.entries.clear()
        return self

    def sizes(self, axis: str) -> tuple[int, ...]:
        """The places of each rank, or all on the first."""
        if self.part is None:
            return (self.totals[axis], *(0,) * (self.parts - 1))
        return split_sizes(self.totals[axis], self.parts)

    def span(self, axis: str) -> tuple[int, int]:
        """Where this rank's places begin, and how many they are."""
        sizes = self.sizes(axis)
        return sum(sizes[: self.rank]), sizes[self.rank]

    def best(self, free: Sequence[str]) -> str:
        """The first one that is preferred, of those with places for all ranks."""
        order = sorted(free, key=self.prefer.index)
        return next((n for n in order if self.totals.get(n, self.parts) >= self.parts), order[0])

    def local(
        self, x: torch.Tensor, dims: Dims, known: Mapping[str, int] | None = None
    ) -> torch.Tensor:
        """This rank's part of a tensor that is whole."""
        if not (sharded := self.sharded_dims(dims)):
            return x
        part = dims.opened(x, {**(known or {}), **self.totals})
        for at, name in sharded:
            part = part.narrow(at, *self.span(name))
        return dims.closed(part)

    def whole(self, x: torch.Tensor, dims: Dims) -> torch.Tensor:
        """The tensor that was kept, once the part was found right."""
        if not (sharded := self.sharded_dims(dims)):
            return x
        (at, name), *_ = sharded  # the axis, or one beside it
        return dims.closed(self._keep_or_compare(dims.opened(x, self.here()), at, name))

    def switched(self, x: torch.Tensor, dims: Dims, axis: str) -> torch.Tensor:
        """Another part of the tensor that was kept."""
        opened, at = dims.opened(x, self.here()), dims.dim_of(axis)
        self.totals[axis] = opened.shape[at]
        self.require_places(axis)
        kept = self._keep_or_compare(opened, dims.dim_of(self.axis), self.axis)
        self.axis = axis
        self.axes_met.append(axis)
        return dims.closed(kept.narrow(at, *self.span(axis)))

    def _keep_or_compare(self, part: torch.Tensor, at: int, name: str) -> torch.Tensor:
        """Keep the whole tensor of this switch, or compare ``part`` with its places of the kept one
        along dim ``at``, of an axis or another sequence, and return the kept one; raises
        _Differs."""
        if self.part is None:
            self.script.append(part)
            return part
        kept, self.met = self.script[self.met], self.met + 1
        if not _alike(part, kept.narrow(at, *self.span(name))):
            raise _Differs
        return kept

    def is_part(self, part: torch.Tensor, kept: torch.Tensor) -> bool:
        """Whether ``part`` is what this rank should have of ``kept``: both are equal, or they
        differ in one dim, which is the axis or has it flattened with others as (outer, axis,
        inner), behind first places, such as class tokens, that every rank has."""
        if part.shape == kept.shape:
            return _alike(part, kept)
        other = [
            d for d, n in enumerate(kept.shape) if part.dim() == kept.dim() and n != part.shape[d]
        ]
        if len(other) != 1:
            return False
        (dim,) = other
        if any(self._is_part_of(name, dim, part, kept) for name in self.sharded):
            return True
        return any(self._is_part_beside(name, dim, part, kept) for name in self.beside)

    def _is_part_beside(self, name: str, dim: int, part: torch.Tensor, kept: torch.Tensor) -> bool:
        """Whether tensors have another sequence in front of what :meth:`is_part` compares, or
        behind it."""
        (start, count), total = self.span(name), self.totals[name]
        own, whole = part.shape[dim] - count, kept.shape[dim] - total
        if min(own, whole) < 0:
            return False
        return any(
            _alike(part.narrow(dim, here, count), kept.narrow(dim, there + start, count))
            and self._is_part_of(
                self.axis,
                dim,
                part.narrow(dim, 0 if here else count, own),
                kept.narrow(dim, 0 if there else total, whole),
            )
            for here, there in ((0, 0), (own, whole))
        )

    def _is_part_of(self, name: str, dim: int, part: torch.Tensor, kept: torch.Tensor) -> bool:
        """:meth:`is_part`, where dim ``dim`` has the places of ``name``."""
        (start, count), total = self.span(name), self.totals[name]
        if total == count:
            return False
        each, rest = divmod(kept.shape[dim] - part.shape[dim], total - count)
        first = kept.shape[dim] - each * total
        if rest or first < 0 or not _alike(part.narrow(dim, 0, first), kept.narrow(dim, 0, first)):
            return False
        inside, outside = (x.narrow(dim, first, x.shape[dim] - first) for x in (part, kept))
        # The axis may lie at any depth of a flattened dim: try every number of outer places.
        return any(
            _alike(
                inside.unflatten(dim, (outer, count, each // outer)),
                outside.unflatten(dim, (outer, total, each // outer)).narrow(dim + 1, start, count),
            )
            for outer in range(1, each + 1)
            if each % outer == 0
        )


def _alike(part: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same values, up to the rounding of their kind."""
    if part.shape != kept.shape:
        return False
    if not part.numel():
        return True
    one, other = part.double(), kept.double()
    single = part.dtype in (torch.float16, torch.bfloat16)
    finite = other[other.isfinite()].abs()
    limit = (2e-2 if single else 1e-4) * (float(finite.max()) if finite.numel() else 0.0)
    return bool(torch.isclose(one, other, rtol=0, atol=limit, equal_nan=True).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What a module was given and returned, with the axis in shards meanwhile."""

    name: str
    given: Sequence[torch.Tensor]
    out: Sequence[torch.Tensor]
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Probe:
    """A model that is looked at, the places of its batch, and what puts inputs on shards."""

    manager: HookManager
    totals: Mapping[str, int]
    placed: Callable[[AxisShards], Mapping[str, Any]]
    suspects: Sequence[str]

    def run(self, shards: ProbeShards) -> Any:
        """Run the model on simulated shards; returns its result."""
        manager = self.manager
        before, spread = manager.shards, manager.spread
        try:
            inputs = self.placed(shards)
            manager.spread = True
            return manager.model(**inputs)
        finally:
            manager.spread, manager.shards = spread, before
            manager.drop(shards)

    def shards(self, prefer: tuple[str, ...]) -> ProbeShards:
        """All places, to keep what is met."""
        return ProbeShards(
            axis=self.manager.axis,
            totals=dict(self.totals),
            group=_NOBODY,
            members=(-1,),
            beside=self.manager.beside,
            prefer=prefer,
        )

    def part(self, of: ProbeShards, part: int, parts: int) -> ProbeShards:
        """A rank's, that meets what was kept."""
        found = self.shards(of.prefer)
        found.script, found.part, found.parts = of.script, part, parts
        return found


_NOBODY: Any = object()
"""The group of ranks that are not there."""


@torch.no_grad()
def probe_axes(
    manager: HookManager,
    batch: Mapping[str, Any],
    totals: Mapping[str, int],
    placed: Callable[[AxisShards], Mapping[str, Any]],
    *,
    suspects: Sequence[str] = (),
) -> tuple[bool, ...]:
    """Run a model on a ``batch`` and on shards of it, each axis being in shards where stages let
    it. ``placed`` takes shards and gives the inputs on them; ``suspects`` are inputs without dims
    that may have places of the axis. Returns which tensors of a result are alike on all shards.
    Raises ModelError, naming the module, where results differ, and WholeFails for what the plain
    model raises."""
    look = _Probe(manager=manager, totals=totals, placed=placed, suspects=suspects)
    names = [manager.axis, *sorted(manager.axes - {manager.axis})]
    with _leaving_untouched(manager.model):
        wanted = _whole_result(manager, batch)
        tried, alike = list[tuple[str, ...]](), [True] * len(wanted)
        for at in range(len(names)):
            kept = look.shards((*names[at:], *names[:at]))
            try:
                out = look.run(kept)
            except InfeasiblePlan:  # this axis has too few places in this batch
                continue
            if (way := tuple(kept.axes_met)) in tried:
                continue
            tried.append(way)
            if not _results_alike(list(result_tensors(out)), wanted):
                raise ModelError(
                    f"{type(manager.model).__name__} with its stages",
                    got="another result than without",
                    wanted="the same where nothing is in shards",
                )
            for parts in _RANKS:
                same = _try_parts(look, kept, parts, wanted)
                alike = [one and other for one, other in zip(alike, same, strict=True)]
    return tuple(alike)


def _results_alike(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return len(results) == len(wanted) and all(map(_alike, results, wanted))


def _whole_result(manager: HookManager, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """That of the user's plain model."""
    try:
        return list(result_tensors(manager.model(**batch)))
    except Exception as error:
        raise WholeFails(
            f"{type(manager.model).__name__} on a whole batch",
            got=f"{type(error).__name__}: {error}",
            wanted="a result, to compare shards with",
            hint="give shard() all inputs of the model, or hr.adapt(..., check=False)",
        ) from error


def _try_parts(
    look: _Probe, kept: ProbeShards, parts: int, wanted: Sequence[torch.Tensor]
) -> list[bool]:
    """Which results are alike on all of so many ranks. Raises ModelError where a rank's part of a
    result is another than that of the whole."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in wanted]
    alike, same = [True for _ in wanted], [True for _ in wanted]
    if kept.totals[look.manager.axis] < parts:
        return same
    for part in range(parts):
        shards = look.part(kept, part, parts)
        try:
            results = list(result_tensors(look.run(shards)))
        except InfeasiblePlan:
            return same
        except _Differs:
            raise _first_error(look, kept, shards) from None
        except Exception as error:
            raise _first_error(look, kept, shards, error) from error
        if len(results) != len(wanted):
            raise _first_error(look, kept, shards)
        for at, (mine, whole) in enumerate(zip(results, wanted, strict=True)):
            alike[at] = alike[at] and shards.is_part(mine, whole)
            same[at] = same[at] and alike[at] and mine.shape == whole.shape
            if mine.dim() == 0:  # the parts of a loss that is a sum add up
                sums[at] += mine.double().cpu()
            elif not alike[at]:
                raise _first_error(look, kept, shards)
    for total, found, whole in zip(sums, alike, wanted, strict=True):
        if not found and not _alike(total, whole.cpu().double()):
            raise ModelError(
                f"number that {type(look.manager.model).__name__} returns",
                got=f"{float(total):.6g}, all ranks' together",
                wanted=f"{float(whole):.6g}, that of the whole",
                hint="a mean over places is another one on each rank: return places, and take the "
                "sum over run.local(...) by their number in the whole batch",
            )
    return same


def _first_error(
    look: _Probe, kept: ProbeShards, failed: ProbeShards, error: Exception | None = None
) -> ModelError:
    """What is said of a part that differs: the first module at which it does."""
    model, axis = look.manager.model, failed.axis
    found = "its result" if error is None else f"{type(error).__name__}: {error}"
    if not isinstance(model, FSDPModule):  # its modules cannot be run again after an error
        first, second = look.shards(kept.prefer), look.part(kept, failed.rank, failed.parts)
        with _watched(model, first) as whole:
            look.run(first)
        with _watched(model, second) as mine, suppress(Exception):
            look.run(second)
        difference = _first_difference(second, whole, mine)
        if difference is not None:
            found, axis = (
                difference[0] if error is None else f"{difference[0]}; {found}",
                difference[1],
            )
    return ModelError(
        f"{type(model).__name__} on shards of axis {axis}",
        got=f"another result than on the whole: {found}" if error is None else found,
        wanted="this rank's part of the whole",
        hint=_HINT if not look.suspects else _SUSPECTS.format(", ".join(look.suspects)),
    )


def _first_difference(
    shards: ProbeShards, whole: Sequence[_Seen], mine: Sequence[_Seen]
) -> tuple[str, str] | None:
    """The first module whose input or output is no part of the whole, in words, and the axis."""
    for kept, seen in zip(whole, mine, strict=False):
        shards.axis = seen.axis
        if kept.name != seen.name:
            return f"module {seen.name} where the whole calls {kept.name}", seen.axis
        if not _all_parts(shards, seen.given, kept.given):
            return f"what module {seen.name} is given, by code in front of it", seen.axis
        if not _all_parts(shards, seen.out, kept.out):
            return f"module {seen.name}", seen.axis
    if len(mine) < len(whole):
        name = whole[len(mine)].name
        return f"in or in front of module {name}", shards.axis
    return ("code behind module " + mine[-1].name, shards.axis) if mine else None


def _all_parts(
    shards: ProbeShards, mine: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]
) -> bool:
    """Whether every tensor of ``mine`` is this rank's part of its whole one in ``kept``."""
    return len(mine) == len(kept) and all(map(shards.is_part, mine, kept))


@contextmanager
def _watched(model: torch.nn.Module, shards: ProbeShards) -> Iterator[list[_Seen]]:
    """What modules without others inside are given and return."""
    seen = list[_Seen]()

    def look(name: str) -> Callable[..., None]:
        """A hook that notes the tensors that module ``name`` is given and returns, and the axis
        that is in shards."""

        def after(_: Any, args: Any, named: Any, out: Any) -> None:
            given = list(result_tensors((args, named)))
            seen.append(
                _Seen(name=name, given=given, out=list(result_tensors(out)), axis=shards.axis)
            )

        return after

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if next(module.children(), None) is None and name:
                handle = module.register_forward_hook(look(name), with_kwargs=True)
                hooks.callback(handle.remove)
        yield seen


@contextmanager
def _leaving_untouched(model: torch.nn.Module) -> Iterator[None]:
    """A model that is run to look at it: nothing of it is left changed, and nothing is drawn."""
    training = [module for module in model.modules() if module.training]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    drawn = list[tuple[torch.Tensor, torch.Tensor]]()
    eager = torch.compiler.set_stance("force_eager") if _DYNAMO in sys.modules else nullcontext()
    with torch.random.fork_rng(devices), eager:
        model.eval()
        _reshard(model)
        try:
            for number, parameter in enumerate(model.parameters()):
                if (held := _small_values(parameter)) is not None:
                    drawn.append((held, held.clone()))
                    held.copy_(_draw(held, number))
            yield
        finally:
            for now, before in (*drawn, *buffers):
                now.data.copy_(before)
            _reshard(model)
            for module in training:
                module.training = True
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


def _reshard(model: torch.nn.Module) -> None:
    """Let FSDP2 forget weights that it has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _small_values(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Those of this rank, where they are so small that they hide what they are multiplied with."""
    held: torch.Tensor = getattr(parameter.data, "to_local", lambda: parameter.data)()
    hides = held.is_floating_point() and held.numel() and float(held.abs().max()) < _TINY
    return held if hides else None


def _draw(held: torch.Tensor, number: int) -> torch.Tensor:
    """Numbers of the size of usual weights, the same ones on every rank."""
    draw = torch.Generator().manual_seed(number)
    scale = 0.5 if held.dim() < 2 else held[0].numel() ** -0.5
    return (torch.randn(held.shape, generator=draw) * scale).to(held)
