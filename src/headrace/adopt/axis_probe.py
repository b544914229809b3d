"""Tests whether a model can be run on shards of its axes, by runs of the model in one process.

The model is run on a small batch as it is, and once more with its hooks, where one simulated rank
has all places: the whole tensor that comes to each switch is kept. Then it is run for each of a few
simulated ranks: what arrives at a switch must be this rank's part of the tensor that was kept, and
what leaves it is taken from there. So nothing is communicated, and an error shows at the first
switch behind it. Where one does, the runs are repeated, with what every module is given and returns
recorded, to name the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch.distributed.fsdp import FSDPModule

from headrace.adopt.axis_hooks import HookManager
from headrace.adopt.axis_shards import AxisShards, Dims
from headrace.adopt.held_still import Draws, buffers_kept, held_still
from headrace.adopt.labels import result_tensors
from headrace.errors import InfeasiblePlan, ModelError
from headrace.layouts.partition import split_sizes

__all__ = ["WholeFails", "mixes_batch", "probe_axes", "refuse_batch_norms"]

_MIXES_THE_BATCH = (
    torch.nn.modules.batchnorm._BatchNorm,  # noqa: SLF001
    torch.nn.modules.instancenorm._InstanceNorm,  # noqa: SLF001
)
_RANKS = (2, 3)
"""Numbers of ranks that are simulated."""
_DYNAMO = "torch._dynamo"
_TINY = 1e-3
"""Parameters whose values are all smaller, such as gates of zeros, may hide differences in what
they are multiplied with: a probe replaces them by random numbers."""

_HINT = (
    "something mixes places of the axis, or counts them, outside of the stages that mix it: name "
    "it as a stage (AxisStage), give positions as inputs with dims, or hr.adapt(..., check=False)"
)

_SUSPECTS = (
    "input {} has no dims, and one as long as the axis: hr.adapt(..., inputs=...) tells its dims; "
) + _HINT


def mixes_batch(model: torch.nn.Module) -> bool:
    """Whether a model has BatchNorm or InstanceNorm, in whatever mode."""
    return any(isinstance(module, _MIXES_THE_BATCH) for module in model.modules())


def refuse_batch_norms(model: torch.nn.Module) -> None:
    """Raise ModelError for BatchNorm and InstanceNorm in training: they take statistics over all
    places, of which a rank has only some."""
    for name, module in model.named_modules():
        if isinstance(module, _MIXES_THE_BATCH) and module.training:
            raise ModelError(
                f"module {name}",
                got=f"{type(module).__name__} in training",
                wanted="norms of single places",
                hint="its statistics are those of one rank's places: LayerNorm, or module.eval()",
            )


class WholeFails(ModelError):
    """The plain model raises on a whole batch."""


class _Differs(Exception):
    """Raised where a simulated rank has other values at a switch than its part of the whole
    tensor."""


@dataclass(slots=True, kw_only=True, eq=False)
class ProbeShards(AxisShards):
    """Shards of a simulated rank: number ``part`` of ``parts``.

    With ``part`` None the rank has all places, and the tensor that is given to each switch or
    gather is appended to ``kept``. Other ranks compare what they have with ``kept``, in order;
    ``compared`` is the number of tensors that were. ``prefer`` are all axes: stages shard the first
    of them that they can. ``axes_met`` are the axes that were switched to."""

    prefer: tuple[str, ...]
    parts: int = min(_RANKS)
    part: int | None = None
    kept: list[torch.Tensor] = field(default_factory=list)
    compared: int = 0
    axes_met: list[str] = field(default_factory=list)

    simulated: ClassVar[bool] = True

    @property
    def ranks(self) -> int:
        """The number of simulated ranks."""
        return self.parts

    @property
    def rank(self) -> int:
        """The index of the simulated rank; 0 where it has all places."""
        return self.part or 0

    def begun(self, axis: str, task: int) -> Self:
        """This object itself, reset to the beginning of a forward; it is not copied, so that the
        probe finds in it what was kept."""
        self.axis, self.task, self.position, self.compared = axis, task, 0, 0
        self.passed.clear()
        self.chosen.clear()
        self.entries.clear()
        return self

    def sizes(self, axis: str) -> tuple[int, ...]:
        """The number of places of ``axis`` on each rank; without a part the first one has all."""
        if self.part is None:
            return (self.totals[axis], *(0,) * (self.parts - 1))
        return split_sizes(self.totals[axis], self.parts)

    def span(self, axis: str) -> tuple[int, int]:
        """(index of this rank's first place of ``axis``, number of its places)."""
        sizes = self.sizes(axis)
        return sum(sizes[: self.rank]), sizes[self.rank]

    def best(self, free: Sequence[str]) -> str:
        """The axis of ``free`` that comes first in ``prefer`` and has places for all ranks; where
        none has, the first of all."""
        order = sorted(free, key=self.prefer.index)
        return next((n for n in order if self.totals.get(n, self.parts) >= self.parts), order[0])

    def local(
        self, x: torch.Tensor, dims: Dims, known: Mapping[str, int] | None = None
    ) -> torch.Tensor:
        """This rank's part of ``x``, a tensor of ``dims`` with all places; ``known`` are sizes of
        names that are not in ``totals``."""
        if not (sharded := self.sharded_dims(dims)):
            return x
        part = dims.opened(x, {**(known or {}), **self.totals})
        for at, name in sharded:
            part = part.narrow(at, *self.span(name))
        return dims.closed(part)

    def whole(self, x: torch.Tensor, dims: Dims) -> torch.Tensor:
        """Stand in for a gather of ``x``, this rank's part: the tensor with all places that was
        kept. Raises _Differs where ``x`` is not this rank's part of it."""
        if not (sharded := self.sharded_dims(dims)):
            return x
        (at, name), *_ = sharded  # the dim and name of the axis, or of a sequence beside it
        return dims.closed(self._keep_or_compare(dims.opened(x, self.here()), at, name))

    def switched(self, x: torch.Tensor, dims: Dims, axis: str) -> torch.Tensor:
        """Stand in for a switch of ``x``, this rank's part before it: this rank's part, with
        ``axis`` sharded, of the tensor with all places that was kept. Raises _Differs where ``x``
        is not this rank's part of it."""
        opened, at = dims.opened(x, self.here()), dims.dim_of(axis)
        self.totals[axis] = opened.shape[at]
        self.require_places(axis)
        kept = self._keep_or_compare(opened, dims.dim_of(self.axis), self.axis)
        self.axis = axis
        self.axes_met.append(axis)
        return dims.closed(kept.narrow(at, *self.span(axis)))

    def _keep_or_compare(self, part: torch.Tensor, at: int, name: str) -> torch.Tensor:
        """The tensor with all places at the current switch, unflattened. Where this rank has all
        places it is ``part`` itself, which is kept for other ranks. Else it is the next one of
        ``kept``, and ``part`` is compared with this rank's places of ``name`` in its dim ``at``;
        raises _Differs where they are not equal."""
        if self.part is None:
            self.kept.append(part)
            return part
        kept, self.compared = self.kept[self.compared], self.compared + 1
        if not _alike(part, kept.narrow(at, *self.span(name))):
            raise _Differs
        return kept

    def is_part(self, part: torch.Tensor, kept: torch.Tensor) -> bool:
        """Whether ``part`` is what this rank should have of ``kept``, a tensor with all places
        whose dims nobody declared. Either both are equal, or their sizes differ in one dim: this is
        a sharded axis, perhaps flattened with others as (outer, axis, inner), perhaps behind some
        entries that every rank has, such as class tokens."""
        if part.shape == kept.shape:
            return _alike(part, kept)
        if part.dim() != kept.dim():
            return False
        different = [dim for dim, size in enumerate(kept.shape) if size != part.shape[dim]]
        if len(different) != 1:
            return False
        (dim,) = different
        if any(self._is_part_of(name, dim, part, kept) for name in self.sharded):
            return True
        return any(self._is_part_beside(name, dim, part, kept) for name in self.beside)

    def _is_part_beside(self, name: str, dim: int, part: torch.Tensor, kept: torch.Tensor) -> bool:
        """Whether ``part`` is this rank's part of ``kept`` where dim ``dim`` is a concatenation of
        the sequence ``name``, such as a text, and the places of the axis, in either order."""
        (start, count), total = self.span(name), self.totals[name]
        # What is left of the dim besides the sequence: the places of the axis.
        part_rest, kept_rest = part.shape[dim] - count, kept.shape[dim] - total
        if min(part_rest, kept_rest) < 0:
            return False
        # Where the sequence begins, in both tensors: at index 0, or behind the rest.
        for part_at, kept_at in ((0, 0), (part_rest, kept_rest)):
            own = part.narrow(dim, part_at, count)
            if _alike(own, kept.narrow(dim, kept_at + start, count)) and self._is_part_of(
                self.axis,
                dim,
                part.narrow(dim, 0 if part_at else count, part_rest),
                kept.narrow(dim, 0 if kept_at else total, kept_rest),
            ):
                return True
        return False

    def _is_part_of(self, name: str, dim: int, part: torch.Tensor, kept: torch.Tensor) -> bool:
        """Whether ``part`` is this rank's part of ``kept`` where dim ``dim`` has the places of
        ``name``, as :meth:`is_part` describes."""
        (start, count), total = self.span(name), self.totals[name]
        if total == count:  # not sharded: it cannot be why the sizes differ
            return False
        # Dim ``dim`` has ``first`` entries that all ranks have, then ``each`` for every place of
        # ``name``. Its sizes tell both numbers: first + each count, and first + each total.
        each, rest = divmod(kept.shape[dim] - part.shape[dim], total - count)
        first = kept.shape[dim] - each * total
        if rest or first < 0 or not _alike(part.narrow(dim, 0, first), kept.narrow(dim, 0, first)):
            return False
        behind = part.narrow(dim, first, part.shape[dim] - first)
        kept_behind = kept.narrow(dim, first, kept.shape[dim] - first)
        # The axis may lie at any depth of a flattened dim (outer, axis, inner): every divisor of
        # ``each`` is tried as the size of outer.
        for outer in (divisor for divisor in range(1, each + 1) if each % divisor == 0):
            own = behind.unflatten(dim, (outer, count, each // outer))
            whole = kept_behind.unflatten(dim, (outer, total, each // outer))
            if _alike(own, whole.narrow(dim + 1, start, count)):
                return True
        return False


def _alike(part: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and the same values, up to rounding in the dtype of
    ``part``: 2 % of the largest value for half types, else 0.01 %."""
    if part.shape != kept.shape:
        return False
    if not part.numel():
        return True
    values, wanted = part.double(), kept.double()
    is_half = part.dtype in (torch.float16, torch.bfloat16)
    finite = wanted[wanted.isfinite()].abs()
    limit = (2e-2 if is_half else 1e-4) * (float(finite.max()) if finite.numel() else 0.0)
    return bool(torch.isclose(values, wanted, rtol=0, atol=limit, equal_nan=True).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One call of module ``name``: the tensors that it was given and returned, and the axis that
    was sharded when it returned."""

    name: str
    given: Sequence[torch.Tensor]
    out: Sequence[torch.Tensor]
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Probe:
    """What all runs of a probe share: ``manager`` has the model and its hooks; ``totals`` are the
    sizes of the axes in the batch; ``placed`` gives the inputs cut to some shards; ``suspects`` are
    the names of inputs without declared dims that may have places of the axis, for errors."""

    manager: HookManager
    totals: Mapping[str, int]
    placed: Callable[[AxisShards], Mapping[str, Any]]
    suspects: Sequence[str]

    def run(self, shards: ProbeShards) -> Any:
        """Run the model, spread, on simulated shards; returns its result. The manager's state is
        restored afterwards."""
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
        """Shards with all places, on which a run keeps the tensors of its switches. Stages shard
        the first axis of ``prefer`` that they can."""
        return ProbeShards(
            axis=self.manager.axis,
            totals=dict(self.totals),
            group=_NOBODY,
            members=(-1,),  # no real rank: its records are not taken for those of ranks
            beside=self.manager.beside,
            prefer=prefer,
        )

    def part(self, whole: ProbeShards, part: int, parts: int) -> ProbeShards:
        """Shards of rank ``part`` of ``parts``, on which a run is compared with what the run on
        ``whole`` kept."""
        shards = self.shards(whole.prefer)
        shards.kept, shards.part, shards.parts = whole.kept, part, parts
        return shards


_NOBODY: Any = object()
"""Stands for the process group of simulated ranks: with None the model would not be sharded."""


@torch.no_grad()
def probe_axes(
    manager: HookManager,
    batch: Mapping[str, Any],
    totals: Mapping[str, int],
    placed: Callable[[AxisShards], Mapping[str, Any]],
    *,
    training: bool,
    suspects: Sequence[str] = (),
) -> dict[bool, tuple[bool, ...]]:
    """Compare a model on shards of a ``batch`` with the model on the whole of it, in this process:
    in evaluation mode and, where ``training`` asks for it, in training mode. The latter is left out
    where the whole batch has the same results in both, and where the model draws random numbers in
    training, as those of ranks differ.

    It is tried once for every axis, which stages then shard wherever they do not mix it, and with
    each number of simulated ranks. ``totals`` are the sizes of the axes in the batch, ``placed``
    takes shards and gives the inputs cut to them, and ``suspects`` are names of inputs without dims
    that may have places of the axis. Returns by mode, for each tensor that the model returns,
    whether every rank has the whole of it. Raises ModelError, naming the module, where results
    differ, and WholeFails where the plain model raises."""
    probe = _Probe(manager=manager, totals=totals, placed=placed, suspects=suspects)
    with _leaving_untouched(manager.model, training=False):
        evaluated = _whole_result(manager, batch)
        alike = {False: _try_axes(probe, evaluated)}
    if not training:
        return alike
    with _leaving_untouched(manager.model, training=True):
        draws = Draws.now(manager.model)
        trained = _whole_result(manager, batch)
        same = len(trained) == len(evaluated) and all(map(torch.equal, trained, evaluated))
        if not same and draws.same(Draws.now(manager.model)):
            alike[True] = _try_axes(probe, trained)
        elif len(trained) == len(evaluated):
            alike[True] = alike[False]
    return alike


def _try_axes(probe: _Probe, wanted: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """Run the model with each axis in shards where stages let it, and compare its results with
    ``wanted``, those of the plain model. Returns for each whether every rank has the whole of
    it."""
    axis = probe.manager.axis
    axes = [axis, *sorted(probe.manager.axes - {axis})]
    tried_orders, alike = list[tuple[str, ...]](), [True] * len(wanted)
    for at in range(len(axes)):
        shards = probe.shards((*axes[at:], *axes[:at]))
        try:
            out = probe.run(shards)
        except InfeasiblePlan:  # this axis has too few places in this batch
            continue
        order = tuple(shards.axes_met)
        if order in tried_orders:  # another first axis that led to the same switches
            continue
        tried_orders.append(order)
        if not _results_alike(list(result_tensors(out)), wanted):
            raise ModelError(
                f"{type(probe.manager.model).__name__} with its stages",
                got="another result than without",
                wanted="the same where nothing is in shards",
            )
        for parts in _RANKS:
            now_alike = _try_parts(probe, shards, parts, wanted)
            alike = [one and other for one, other in zip(alike, now_alike, strict=True)]
    return tuple(alike)


def _results_alike(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether there are as many ``results`` as ``wanted``, of equal values up to rounding."""
    return len(results) == len(wanted) and all(map(_alike, results, wanted))


def _whole_result(manager: HookManager, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the plain model returns for the whole batch. Raises WholeFails where it
    raises."""
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
    probe: _Probe, kept: ProbeShards, parts: int, wanted: Sequence[torch.Tensor]
) -> list[bool]:
    """Run the model for each of ``parts`` simulated ranks, and compare its results with ``wanted``,
    those of the plain model. ``kept`` has the tensors of the switches of a run with all places.
    Returns for each result whether every rank has the whole of it; where the batch has too few
    places for ``parts`` ranks nothing is tried, and all count as whole. Raises ModelError where a
    rank's result is no part of the whole one. A single number may also be a part of a sum: it is an
    error where those of all ranks do not add up to the whole one either."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in wanted]
    are_parts, are_whole = [True for _ in wanted], [True for _ in wanted]
    if kept.totals[probe.manager.axis] < parts:
        return are_whole
    for part in range(parts):
        shards = probe.part(kept, part, parts)
        try:
            results = list(result_tensors(probe.run(shards)))
        except InfeasiblePlan:
            return are_whole
        except _Differs:
            raise _first_error(probe, kept, shards) from None
        except Exception as error:
            raise _first_error(probe, kept, shards, error) from error
        if len(results) != len(wanted):
            raise _first_error(probe, kept, shards)
        for at, (mine, whole) in enumerate(zip(results, wanted, strict=True)):
            are_parts[at] = are_parts[at] and shards.is_part(mine, whole)
            are_whole[at] = are_whole[at] and are_parts[at] and mine.shape == whole.shape
            if mine.dim() == 0:  # judged below, when those of all ranks are added
                sums[at] += mine.double().cpu()
            elif not are_parts[at]:
                raise _first_error(probe, kept, shards)
    for total, is_part, whole in zip(sums, are_parts, wanted, strict=True):
        if not is_part and not _alike(total, whole.cpu().double()):
            raise ModelError(
                f"number that {type(probe.manager.model).__name__} returns",
                got=f"{float(total):.6g}, all ranks' together",
                wanted=f"{float(whole):.6g}, that of the whole",
                hint="a mean over places is another one on each rank: return places, and take the "
                "sum over run.local(...) by their number in the whole batch",
            )
    return are_whole


def _first_error(
    probe: _Probe, kept: ProbeShards, failed: ProbeShards, error: Exception | None = None
) -> ModelError:
    """The error for a run on shards ``failed`` that gave another result than the run with all
    places, on ``kept``, or that raised ``error``. Both runs are repeated, with a record of every
    module, to name the first one at which they differ."""
    model, axis = probe.manager.model, failed.axis
    found = "its result" if error is None else f"{type(error).__name__}: {error}"
    if not isinstance(model, FSDPModule):  # its modules cannot be run again after an error
        whole_shards = probe.shards(kept.prefer)
        part_shards = probe.part(kept, failed.rank, failed.parts)
        with _watched(model, whole_shards) as whole:
            probe.run(whole_shards)
        with _watched(model, part_shards) as mine, suppress(Exception):
            probe.run(part_shards)
        difference = _first_difference(part_shards, whole, mine)
        if difference is not None:
            text, axis = difference
            found = text if error is None else f"{text}; {found}"
    return ModelError(
        f"{type(model).__name__} on shards of axis {axis}",
        got=f"another result than on the whole: {found}" if error is None else found,
        wanted="this rank's part of the whole",
        hint=_HINT if not probe.suspects else _SUSPECTS.format(", ".join(probe.suspects)),
    )


def _first_difference(
    shards: ProbeShards, whole: Sequence[_Seen], mine: Sequence[_Seen]
) -> tuple[str, str] | None:
    """Find the first call of a module that ``mine``, the calls of a run on ``shards``, and
    ``whole``, those of the run with all places, do not have in common: one whose input or output is
    no part of the whole one. Returns (this module in words, the axis that was sharded there); None
    where ``mine`` is empty."""
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
    """Context that gives a list, to which each call of a module without submodules is appended, in
    the order in which they return; ``shards`` tell the axis that is sharded then."""
    seen = list[_Seen]()

    def recorder(name: str) -> Callable[..., None]:
        """A hook that records what module ``name`` is given and returns, and the axis of
        ``shards``."""

        def after(_: Any, args: Any, named: Any, out: Any) -> None:
            given = list(result_tensors((args, named)))
            seen.append(
                _Seen(name=name, given=given, out=list(result_tensors(out)), axis=shards.axis)
            )

        return after

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if next(module.children(), None) is None and name:
                handle = module.register_forward_hook(recorder(name), with_kwargs=True)
                hooks.callback(handle.remove)
        yield seen


@contextmanager
def _leaving_untouched(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Context for runs of a model, in ``training`` or evaluation mode, that are to leave no trace:
    dropout drops nothing, weights that are all tiny (``_TINY``) have random values, and compiled
    modules run eagerly. Afterwards weights, buffers, modes and the states of all random generators
    are as before."""
    drawn = list[tuple[torch.Tensor, torch.Tensor]]()  # (weight, its values before)
    eager = torch.compiler.set_stance("force_eager") if _DYNAMO in sys.modules else nullcontext()
    kept = buffers_kept(model) if training else nullcontext()
    with held_still(model, training=training), eager, kept:
        try:
            for number, parameter in enumerate(model.parameters()):
                values = _tiny_values(parameter)
                if values is not None:
                    drawn.append((values, values.clone()))
                    values.copy_(_draw(values, number))
            _reshard(model)
            yield
        finally:
            for now, before in drawn:
                now.copy_(before)
            _reshard(model)


def _reshard(model: torch.nn.Module) -> None:
    """Have FSDP2 free the weights that it has gathered, so that the next forward gathers them anew,
    with the values that the shards have now."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _tiny_values(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The values of a parameter on this rank (its shard under FSDP2) if all are below ``_TINY`` in
    magnitude; else None."""
    values: torch.Tensor = getattr(parameter.data, "to_local", lambda: parameter.data)()
    if not values.is_floating_point() or not values.numel():
        return None
    return values if float(values.abs().max()) < _TINY else None


def _draw(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Random numbers in the shape, dtype and device of ``like``, and of the size of usual weights;
    the same ones on every rank."""
    generator = torch.Generator().manual_seed(seed)
    # a vector: a gate or a norm; a matrix: 1 / sqrt(fan in), which keeps variances
    scale = 0.5 if like.dim() < 2 else like[0].numel() ** -0.5
    return (torch.randn(like.shape, generator=generator) * scale).to(like)
