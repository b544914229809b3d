"""Which places of which axis this rank has, for one batch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from headrace.errors import DataError, InfeasiblePlan, SpecError
from headrace.layouts.partition import split_sizes
from headrace.ops.switch import gather, split, switch
from headrace.spec.axes import AxisChoice, AxisMove
from headrace.spec.method_facts import Members

__all__ = ["AxisShards", "Dims", "Entry"]


@dataclass(frozen=True, slots=True)
class Dims:
    """The axis names in each dim of a tensor. A dim that flattens several axes has several names,
    the outermost first: ``(b s) t c`` is ``(("b", "s"), ("t",), ("c",))``."""

    names: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Dims:
        """Parse a text such as ``(b s) t c``. Raises SpecError for names that stand twice, and
        brackets in brackets."""
        return _parse(text)

    @property
    def flat(self) -> tuple[str, ...]:
        """All names, one after the other."""
        return tuple(name for names in self.names for name in names)

    def __contains__(self, name: str) -> bool:
        """Whether a tensor of these dims has the axis ``name``, flattened or not."""
        return name in self.flat

    def __str__(self) -> str:
        """The text that :meth:`parse` reads."""
        texts = (names[0] if len(names) == 1 else f"({' '.join(names)})" for names in self.names)
        return " ".join(texts)

    def opened(self, x: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        """``x`` unflattened: one dim for each name. ``sizes`` are the sizes that names have in
        ``x``; one name of each dim may be missing there, as its size follows from that of the dim.
        Raises DataError for a tensor of other dims or sizes."""
        if x.dim() != len(self.names):
            self._refuse(x, sizes)
        shape: list[int] = []
        for size, names in zip(x.shape, self.names, strict=True):
            known = math.prod([sizes[name] for name in names if name in sizes])
            unknown = [name for name in names if name not in sizes]
            rest = size // known if known else 0  # the size of the one unknown name
            if len(unknown) > 1 or rest * known != size or (not unknown and known != size):
                self._refuse(x, sizes)
            shape += [sizes.get(name, rest) for name in names]
        return x.reshape(shape)

    def fits(self, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
        """Whether a tensor of ``shape`` may have these dims. ``sizes`` are the sizes of names in
        it, as far as they are known."""
        known = [math.prod(sizes.get(name, 1) for name in names) for names in self.names]
        whole = [all(name in sizes for name in names) for names in self.names]
        return len(shape) == len(known) and all(
            size == wanted if exactly else size % wanted == 0
            for size, wanted, exactly in zip(shape, known, whole, strict=True)
        )

    def sizes_of(self, x: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, int]:
        """The size in ``x`` of every name, given the ``sizes`` of those that are known, as for
        :meth:`opened`."""
        return dict(zip(self.flat, self.opened(x, sizes).shape, strict=True))

    def closed(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`opened`: ``x``, which has one dim for each name, with the dims of
        names in one bracket flattened to one."""
        shape: list[int] = []
        at = 0  # the first dim of ``x`` that is not in ``shape`` yet
        for names in self.names:
            shape.append(math.prod(x.shape[at : at + len(names)]))
            at += len(names)
        return x.reshape(shape)

    def dim_of(self, name: str) -> int:
        """The index of an axis's dim in an unflattened tensor (:meth:`opened`). Raises SpecError
        where it has no such axis."""
        if name not in self:
            raise SpecError("axis of a tensor", got=name, wanted=f"one of {self}")
        return self.flat.index(name)

    def _refuse(self, x: torch.Tensor, sizes: Mapping[str, int]) -> None:
        """Raise DataError for a tensor whose shape does not fit the dims."""
        known = ", ".join(f"{name} {sizes[name]}" for name in self.flat if name in sizes)
        raise DataError(
            f"tensor of dims {self}",
            got=f"{list(x.shape)}",
            wanted=f"{len(self.names)} dims, {known} on this rank",
        )


@lru_cache(maxsize=256)
def _parse(text: str) -> Dims:
    """Dims from text such as ``(b s) t c``: for each dim the names of its axes; raises SpecError
    for other text and for a name that comes twice."""
    names: list[tuple[str, ...]] = []
    # A piece is a flattened dim in brackets, a name, or a bracket without its other one (an error).
    pieces: Sequence[str] = re.findall(r"\([^()]*\)|[^\s()]+|[()]", text)
    for piece in pieces:
        inside = piece[1:-1].split() if piece.startswith("(") else [piece]
        if not inside or not all(re.fullmatch(r"\w+", name) for name in inside):
            raise SpecError("dims", got=repr(text), wanted="names, flattened ones in brackets")
        names.append(tuple(inside))
    found = Dims(tuple(names))
    if len(set(found.flat)) != len(found.flat) or not names:
        raise SpecError("dims", got=repr(text), wanted="names, each once")
    return found


Entry = tuple[str, int]
"""What a forward found when it came to a hook: (the axis that was sharded, the number of stages
that had begun)."""


@dataclass(slots=True, kw_only=True, eq=False)
class AxisShards:
    """How one batch is sharded on this rank, and the state of the forward that runs on it.

    Of the places of ``axis`` each rank of ``group`` has a consecutive run, of about equal length;
    of sequences in ``beside``, such as a text, too. Every rank of the group has all places of all
    other axes. The ranks of ``across`` have the same places of other samples; ``members`` are all
    ranks that share the batch.

    ``totals`` are the sizes of axes, as far as they are known, on all ranks of the group together;
    for the axis of samples, the group's samples. ``samples`` is (index of the group's first sample,
    its number of samples, that of the whole batch).

    Of the forward: ``passed`` are the axes that each stage mixed, in calling order; ``position`` is
    the number of the next stage; ``chosen`` is the axis chosen for each stage, by number; ``moves``
    are the exchanges so far. ``entries`` lists by hook, for each time that the forward came to it,
    what a recompute has to begin with. ``task`` is the number that autograd gave the backward
    within which the forward ran, -1 for none. ``joint`` caches placements for attention over the
    places of all axes.
    """

    axis: str
    totals: dict[str, int]
    group: dist.ProcessGroup | None
    across: dist.ProcessGroup | None = None
    members: Members = (0,)
    beside: tuple[str, ...] = ()
    samples: tuple[int, int, int] = (0, 1, 1)
    passed: list[tuple[str, ...]] = field(default_factory=list)
    position: int = 0
    chosen: dict[int, AxisChoice] = field(default_factory=dict)
    joint: dict[Any, Any] = field(default_factory=dict)
    entries: dict[Any, list[Entry]] = field(default_factory=dict)
    task: int = -1
    moves: list[AxisMove] = field(default_factory=list)

    simulated: ClassVar[bool] = False

    @property
    def ranks(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group) if self.group is not None else 1

    @property
    def rank(self) -> int:
        """The index of this rank in its group."""
        return dist.get_rank(self.group) if self.group is not None else 0

    def sizes(self, axis: str) -> tuple[int, ...]:
        """The number of places of ``axis`` on each rank of the group while it is sharded."""
        return split_sizes(self.totals[axis], self.ranks)

    def joint_sizes(self, parts: Dims) -> tuple[int, ...]:
        """The number of places on each rank of several sequences together. Each dim of ``parts``
        names the axes of one sequence, of which one is sharded: a sequence ``t s`` with ``t``
        sharded has the local size of t times the size of s."""
        places_by_rank = [0] * self.ranks
        for names in parts.names:
            sharded = next(name for name in names if name in self.sharded)
            others = math.prod(self.totals[name] for name in names if name != sharded)
            for rank, size in enumerate(self.sizes(sharded)):
                places_by_rank[rank] += size * others
        return tuple(places_by_rank)

    def begun(self, axis: str, task: int) -> Self:
        """A copy in the state before a forward that begins with ``axis`` sharded, within backward
        number ``task`` (-1 for none). Each forward has its own, as its backward may recompute parts
        after other forwards have run."""
        return replace(
            self,
            axis=axis,
            task=task,
            totals=dict(self.totals),
            position=0,
            passed=[],
            chosen={},
            entries={},
            moves=[],
        )

    def pass_stage(self, mixed: tuple[str, ...]) -> int:
        """Count a stage that begins, and return its number. The axes that it mixes are appended to
        ``passed``, except in a recompute, whose forward has done so."""
        if self.position == len(self.passed):
            self.passed.append(mixed)
        self.position += 1
        return self.position - 1

    @property
    def sharded(self) -> tuple[str, ...]:
        """The names of the axis and the sequences that are sharded now."""
        return (self.axis, *self.beside)

    def sharded_dims(self, dims: Dims) -> list[tuple[int, str]]:
        """(dim, name) of each name of ``dims`` that is sharded now; the dim is that of the
        unflattened tensor."""
        return [(dims.dim_of(name), name) for name in self.sharded if name in dims]

    def here(self) -> dict[str, int]:
        """The number of places on this rank of every axis whose size is known, by name."""
        known = [name for name in self.sharded if name in self.totals]
        return self.totals | {name: self.sizes(name)[self.rank] for name in known}

    def best(self, free: Sequence[str]) -> str:
        """The axis to shard where no plan is known: of the axes ``free``, which a stage does not
        mix, the one with the most places."""
        return max(free, key=lambda name: self.totals.get(name, 0))

    def local(
        self, x: torch.Tensor, dims: Dims, known: Mapping[str, int] | None = None
    ) -> torch.Tensor:
        """This rank's part of ``x``, a tensor of ``dims`` with the places of all ranks. ``known``
        are sizes of names that are not in ``totals``."""
        sharded = self.sharded_dims(dims)
        if not sharded or self.group is None:
            return x
        part = dims.opened(x, {**(known or {}), **self.totals})
        for at, name in sharded:
            part = split(part, at, self.group, sizes=self.sizes(name))
        return dims.closed(part)

    def whole(self, x: torch.Tensor, dims: Dims) -> torch.Tensor:
        """The tensor with the places of all ranks, gathered from ``x``, this rank's part of it,
        of ``dims``. Collective."""
        sharded = self.sharded_dims(dims)
        if not sharded or self.group is None:
            return x
        whole = dims.opened(x, self.here())
        for at, name in sharded:
            whole = gather(whole, at, self.group, sizes=self.sizes(name))
        return dims.closed(whole)

    def learn(self, x: torch.Tensor, dims: Dims, axes: Collection[str]) -> None:
        """Record in ``totals`` the sizes of ``axes`` that a tensor ``x`` on this rank shows: of all
        but the sharded one, of which it has only a part."""
        sizes = zip(dims.flat, dims.opened(x, self.here()).shape, strict=True)
        self.totals |= {name: n for name, n in sizes if name in axes and name != self.axis}

    def require_places(self, axis: str) -> None:
        """Raise InfeasiblePlan where an axis has fewer places than the group has ranks."""
        if self.totals[axis] < self.ranks:
            raise InfeasiblePlan(
                f"axis {axis}",
                got=f"{self.totals[axis]} places for {self.ranks} ranks",
                wanted="a place for each",
                hint="fewer ranks for each sample",
            )

    def switched(self, x: torch.Tensor, dims: Dims, axis: str) -> torch.Tensor:
        """Shard ``axis`` instead of the current one, by one all-to-all: from ``x``, this rank's
        part with the current axis sharded, to its part with ``axis`` sharded, which is returned.
        Records the exchange in ``moves``, and ``axis`` as the sharded one. Raises InfeasiblePlan
        where ranks would be left without places. Collective."""
        part = dims.opened(x, self.here())
        # All places of ``axis`` are here still, so this is its size, which nobody may have known.
        self.totals[axis] = part.shape[dims.dim_of(axis)]
        self.require_places(axis)
        # The places of ``axis`` that this rank will have stay here, all others are sent.
        kept_share = self.sizes(axis)[self.rank] / self.totals[axis]
        sent_bytes = round(part.nbytes * (1 - kept_share))
        self.moves.append(AxisMove(before=self.axis, after=axis, sent_bytes=sent_bytes))
        moved = switch(
            part,
            dims.dim_of(self.axis),
            dims.dim_of(axis),
            self.group,
            sizes=self.sizes(self.axis),
            to_sizes=self.sizes(axis),
        )
        self.axis = axis
        return dims.closed(moved)

    def counted(self, axis: str) -> int:
        """The number of places of an axis on this rank. Raises SpecError for an axis whose size is
        not known."""
        here = self.here()
        if axis not in here:
            raise SpecError("axis that is counted", got=axis, wanted=f"one of {', '.join(here)}")
        return here[axis]

    def cut(
        self, x: torch.Tensor, dims: Dims, known: Mapping[str, int] | None = None
    ) -> torch.Tensor:
        """This rank's part of ``x``, an argument of a stage, which has the places of all ranks or
        is this rank's part already: its shape tells which. ``known`` are sizes of names that are
        not in ``totals``. Raises DataError for a shape that fits neither or both."""
        if self.axis not in dims or self.group is None:
            return x
        others = {name: n for name, n in (known or {}).items() if name != self.axis}
        fitting = list[tuple[bool, torch.Tensor]]()  # (whether it is this rank's part, unflattened)
        for sizes, is_part in ((self.here(), True), (self.totals, False)):
            with suppress(DataError):
                fitting.append((is_part, dims.opened(x, {**others, **sizes})))
        here, total = self.here()[self.axis], self.totals[self.axis]
        if not fitting or (len(fitting) > 1 and here != total):
            raise DataError(
                f"argument of dims {dims}",
                got=f"{list(x.shape)}" + (", which may be either" if fitting else ""),
                wanted=f"{here} or {total} places of {self.axis}",
            )
        is_part, opened = fitting[0]
        if is_part:
            return dims.closed(opened)
        return self.local(dims.closed(opened), dims, others)
