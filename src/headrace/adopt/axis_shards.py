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
    """The axis names in each dim of a tensor; a dim that flattens several axes has several
    names."""

    names: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Dims:
        """Read a text. Raises SpecError for names that stand twice, and brackets in brackets."""
        return _parse(text)

    @property
    def flat(self) -> tuple[str, ...]:
        """All names, one after the other."""
        return tuple(name for names in self.names for name in names)

    def __contains__(self, name: str) -> bool:
        return name in self.flat

    def __str__(self) -> str:
        texts = (names[0] if len(names) == 1 else f"({' '.join(names)})" for names in self.names)
        return " ".join(texts)

    def opened(self, x: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        """``x`` unflattened: one dim for each name, where ``sizes`` are the local sizes of the
        axes. Raises DataError for a tensor of other dims or sizes."""
        if x.dim() != len(self.names):
            self._refuse(x, sizes)
        shape: list[int] = []
        for size, names in zip(x.shape, self.names, strict=True):
            known = math.prod([sizes[name] for name in names if name in sizes])
            open_ = [name for name in names if name not in sizes]
            rest = size // known if known else 0
            if len(open_) > 1 or rest * known != size or (not open_ and known != size):
                self._refuse(x, sizes)
            shape += [sizes.get(name, rest) for name in names]
        return x.reshape(shape)

    def sizes_of(self, x: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, int]:
        """The places of every name in a tensor, ``sizes`` being those of the axes here."""
        return dict(zip(self.flat, self.opened(x, sizes).shape, strict=True))

    def closed(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`opened`: flattens the dims of names that share one."""
        shape: list[int] = []
        at = 0
        for names in self.names:
            shape.append(math.prod(x.shape[at : at + len(names)]))
            at += len(names)
        return x.reshape(shape)

    def dim_of(self, name: str) -> int:
        """The dim of an axis in an unflattened tensor. Raises SpecError where it has no such
        axis."""
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
"""The axis in shards at a hook, and how many stages were before."""


@dataclass(slots=True, kw_only=True, eq=False)
class AxisShards:
    """The places of ``axis`` are sharded over the ranks of ``group``, all other axes are not; those
    of ``beside``, other sequences such as a text, always are. Ranks of ``across`` have other
    samples; ``members`` are all ranks that share the batch.

    ``totals`` are the places of each name that is known, for the samples of this group; ``samples``
    are the first one, how many, and of how many. ``passed`` are the axes that the stages of the
    forward mixed, ``position`` the number of the next one; ``chosen`` are the axes that they were
    given, by number. ``joint`` keeps what attention over all places needs; ``entries`` tells where
    the forward came to each hook, and ``task`` the backward in which it ran, -1 where in none;
    ``moves`` are the exchanges of the forward.
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
        """Number of ranks in the group."""
        return dist.get_world_size(self.group) if self.group is not None else 1

    @property
    def rank(self) -> int:
        """The number of this rank in its group."""
        return dist.get_rank(self.group) if self.group is not None else 0

    def sizes(self, axis: str) -> tuple[int, ...]:
        """The places of each rank while ``axis`` is sharded."""
        return split_sizes(self.totals[axis], self.ranks)

    def joint_sizes(self, parts: Dims) -> tuple[int, ...]:
        """The places of each rank over several sequences one after the other, in each of which a
        name is sharded."""
        found = [0] * self.ranks
        for names in parts.names:
            shared = next(name for name in names if name in self.sharded)
            others = math.prod(self.totals[name] for name in names if name != shared)
            for rank, size in enumerate(self.sizes(shared)):
                found[rank] += size * others
        return tuple(found)

    def begun(self, axis: str, task: int) -> Self:
        """The same places for a forward that begins. Each has shards of its own: its backward may
        compute parts again when others have been run since."""
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
        """The number of the stage that begins; ``mixed`` is kept the first time it is reached."""
        if self.position == len(self.passed):
            self.passed.append(mixed)
        self.position += 1
        return self.position - 1

    @property
    def sharded(self) -> tuple[str, ...]:
        """The names whose places are sharded now."""
        return (self.axis, *self.beside)

    def sharded_dims(self, dims: Dims) -> list[tuple[int, str]]:
        """The dims, unflattened, of a tensor that are sharded now, and their names."""
        return [(dims.dim_of(name), name) for name in self.sharded if name in dims]

    def here(self) -> dict[str, int]:
        """The local size of every axis."""
        known = [name for name in self.sharded if name in self.totals]
        return self.totals | {name: self.sizes(name)[self.rank] for name in known}

    def best(self, free: Sequence[str]) -> str:
        """Which of several axes to take where no plan is known: that of most places."""
        return max(free, key=lambda name: self.totals.get(name, 0))

    def local(
        self, x: torch.Tensor, dims: Dims, known: Mapping[str, int] | None = None
    ) -> torch.Tensor:
        """This rank's part of a tensor that is whole. ``known`` are places of other names."""
        sharded = self.sharded_dims(dims)
        if not sharded or self.group is None:
            return x
        part = dims.opened(x, {**(known or {}), **self.totals})
        for at, name in sharded:
            part = split(part, at, self.group, sizes=self.sizes(name))
        return dims.closed(part)

    def whole(self, x: torch.Tensor, dims: Dims) -> torch.Tensor:
        """The full tensor on every rank, gathered from this rank's part. Collective."""
        sharded = self.sharded_dims(dims)
        if not sharded or self.group is None:
            return x
        whole = dims.opened(x, self.here())
        for at, name in sharded:
            whole = gather(whole, at, self.group, sizes=self.sizes(name))
        return dims.closed(whole)

    def learn(self, x: torch.Tensor, dims: Dims, axes: Collection[str]) -> None:
        """Record the full sizes of those of ``axes`` that are not sharded in ``x``."""
        sizes = zip(dims.flat, dims.opened(x, self.here()).shape, strict=True)
        self.totals |= {name: n for name, n in sizes if name in axes and name != self.axis}

    def require_places(self, axis: str) -> None:
        """Raise InfeasiblePlan where ranks would be left without places of an axis."""
        if self.totals[axis] < self.ranks:
            raise InfeasiblePlan(
                f"axis {axis}",
                got=f"{self.totals[axis]} places for {self.ranks} ranks",
                wanted="a place for each",
                hint="fewer ranks for each sample",
            )

    def switched(self, x: torch.Tensor, dims: Dims, axis: str) -> torch.Tensor:
        """Another axis in shards from here on. Raises InfeasiblePlan where ranks would be left
        without places."""
        part = dims.opened(x, self.here())
        self.totals[axis] = part.shape[dims.dim_of(axis)]
        self.require_places(axis)
        stays = self.sizes(axis)[self.rank] / self.totals[axis]
        self.moves.append(
            AxisMove(before=self.axis, after=axis, sent_bytes=round(part.nbytes * (1 - stays)))
        )
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
        """The places of an axis on this rank. Raises SpecError for one that nothing tells."""
        here = self.here()
        if axis not in here:
            raise SpecError("axis that is counted", got=axis, wanted=f"one of {', '.join(here)}")
        return here[axis]

    def cut(
        self, x: torch.Tensor, dims: Dims, known: Mapping[str, int] | None = None
    ) -> torch.Tensor:
        """What a stage needs of another argument: this rank's places where it has all of them.
        ``known`` are places of other names. Raises DataError for one that has neither all nor
        these, or may have either."""
        if self.axis not in dims or self.group is None:
            return x
        others = {name: n for name, n in (known or {}).items() if name != self.axis}
        found = list[tuple[bool, torch.Tensor]]()
        for sizes, done in ((self.here(), True), (self.totals, False)):
            with suppress(DataError):
                found.append((done, dims.opened(x, {**others, **sizes})))
        here, total = self.here()[self.axis], self.totals[self.axis]
        if not found or (len(found) > 1 and here != total):
            raise DataError(
                f"argument of dims {dims}",
                got=f"{list(x.shape)}" + (", which may be either" if found else ""),
                wanted=f"{here} or {total} places of {self.axis}",
            )
        done, opened = found[0]
        if done:
            return dims.closed(opened)
        return self.local(dims.closed(opened), dims, others)
