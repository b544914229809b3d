"""One exchange: a dim that is spread over ranks becomes whole, another one is spread instead.

Shape legend, over R ranks: a tensor of any number of dims, of whose ``from_dim`` rank r holds
``sizes[r]`` places in turn, and of whose ``to_dim`` it will hold the places ``columns.of[r]``.
Nothing is padded, sizes may be zero, and one message goes to each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from headrace.comm.collectives import Arriving, issue_all_to_all
from headrace.layouts.intervals import split_sizes
from headrace.ops.index import index_tensor

__all__ = ["Columns", "Coming", "Resharding"]

_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which of ``total`` places of a dim each rank takes, in the order in which it wants them.

    Lists may overlap: what several ranks take is copied on the way out, and added in rank order on
    the way back.
    """

    total: int
    of: tuple[Sequence[int], ...]

    @classmethod
    def even(cls, total: int, ranks: int) -> Columns:
        """Neighbours for each rank, as even as can be."""
        return cls.consecutive(split_sizes(total, ranks))

    @classmethod
    def consecutive(cls, sizes: Sequence[int]) -> Columns:
        """``sizes[r]`` neighbours for rank r."""
        ends = list(accumulate(sizes))
        spans = zip(ends, sizes, strict=True)
        return cls(total=sum(sizes), of=tuple(range(end - size, end) for end, size in spans))

    @property
    def in_turn(self) -> bool:
        """Whether every place is taken once, in the order of the ranks."""
        ends = [0, *(part.stop for part in self.of if isinstance(part, range))]
        return (
            len(ends) == len(self.of) + 1
            and ends[-1] == self.total
            and all(
                part == range(start, stop)
                for part, start, stop in zip(self.of, ends, ends[1:], strict=False)
            )
        )

    def index(self, rank: int, device: torch.device) -> torch.Tensor:
        """The places of one rank as an index tensor."""
        return index_tensor(tuple(self.of[rank]), device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """Places that all ranks take alike: rank r, from place ``at`` of its own on, the ``count``
    neighbours from ``start + r // share * count`` on."""

    at: int
    start: int
    count: int
    share: int


@lru_cache(maxsize=256)
def _sections(columns: Columns) -> tuple[_Section, ...]:
    """Sections that cover every place of ``columns``, so that one copy serves all ranks; none where
    ranks take too unlike ones."""
    ranks, mine = len(columns.of), len(columns.of[0])
    if not mine or any(len(own) != mine for own in columns.of):
        return ()
    found = list[_Section]()
    for at, stop in pairwise(_cuts(columns)):
        starts, count = [own[at] for own in columns.of], stop - at
        share = next((r for r in range(1, ranks) if starts[r] != starts[0]), ranks)
        if ranks % share or any(s != starts[0] + r // share * count for r, s in enumerate(starts)):
            return ()
        found.append(_Section(at=at, start=starts[0], count=count, share=share))
    reached = 0
    for section in sorted(found, key=lambda section: section.start):
        if section.start != reached:
            return ()
        reached += ranks // section.share * section.count
    return tuple(found) if reached == columns.total else ()


def _cuts(columns: Columns) -> list[int]:
    """Where, of what a rank takes, some rank's next place is not the neighbour of the last."""
    mine = len(columns.of[0])
    if all(isinstance(own, range) and own.step == 1 for own in columns.of):
        return [0, mine]
    within = (j for j in range(1, mine) if any(own[j] != own[j - 1] + 1 for own in columns.of))
    return [0, *within, mine]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coming:
    """An exchange under way: what comes is put into ``out``, ``in_place`` where it lies like it."""

    arriving: Arriving
    out: torch.Tensor
    in_place: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """The exchange between two dims of a tensor, and its adjoint.

        out        [.., sizes[r], .., total, ..] -> [.., sum(sizes), .., |columns.of[r]|, ..]
        back       the other way; places that several ranks held are added

    The dims may stand in any order.
    """

    from_dim: int
    to_dim: int
    sizes: tuple[int, ...]
    columns: Columns
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This one, of the group."""
        return dist.get_rank(self.group)

    def out(self, x: torch.Tensor) -> torch.Tensor:
        """Each rank its places."""
        return self.joined(self.issue_out(x))

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """The adjoint."""
        return self.added(self.issue_back(x))

    def issue_out(self, x: torch.Tensor) -> Coming:
        """:meth:`out`, sent; :meth:`joined` makes the result."""
        mine = len(self.columns.of[self.rank])
        parts = [self._shape(x, self.sizes[self.rank], len(own)) for own in self.columns.of]
        if self.columns.in_turn and _leads(x.shape, self.to_dim) and x.is_contiguous():
            sent = x.reshape(-1)
        elif sections := _sections(self.columns):
            sent = x.new_empty((len(parts), *parts[0]))
            for section in sections:
                into, places = self._alike(section, sent, x)
                into.copy_(places[:, None])
            sent = sent.view(-1)
        else:
            sent = _flat(x, parts, self._take)
        shapes = [self._shape(x, size, mine) for size in self.sizes]
        whole = self._shape(x, sum(self.sizes), mine)
        return self._sent(sent, parts, shapes, whole, in_place=_leads(whole, self.from_dim))

    def joined(self, coming: Coming) -> torch.Tensor:
        """What came, as one tensor."""
        flat, out = coming.arriving.wait(), coming.out
        if coming.in_place:
            return out
        if len(set(self.sizes)) == 1:
            places = _apart(out, self.from_dim, len(self.sizes))
            places.copy_(flat.view(places.shape))
            return out
        at, start = 0, 0
        for size in self.sizes:
            place = out.narrow(self.from_dim, start, size)
            place.copy_(flat[at : at + place.numel()].view(place.shape))
            at, start = at + place.numel(), start + size
        return out

    def issue_back(self, x: torch.Tensor) -> Coming:
        """:meth:`back`, sent; :meth:`added` makes the result."""
        held, own = self.columns.of[self.rank], self.sizes[self.rank]
        parts = [self._shape(x, size, len(held)) for size in self.sizes]
        if _leads(x.shape, self.from_dim) and x.is_contiguous():
            sent = x.reshape(-1)
        elif len(set(self.sizes)) == 1:
            sent = _apart(x, self.from_dim, len(parts)).reshape(-1)
        else:
            sent = _flat(x, parts, self._take_back)
        shapes = [self._shape(x, own, len(some)) for some in self.columns.of]
        whole = self._shape(x, own, self.columns.total)
        in_place = self.columns.in_turn and _leads(whole, self.to_dim)
        return self._sent(sent, parts, shapes, whole, in_place=in_place)

    def added(self, coming: Coming) -> torch.Tensor:
        """What came back, every place in its own."""
        flat, out = coming.arriving.wait(), coming.out
        if coming.in_place:
            return out
        shapes = [self._shape(out, out.shape[self.from_dim], len(own)) for own in self.columns.of]
        if sections := _sections(self.columns):
            came = flat.view(len(shapes), *shapes[0])
            for section in sections:
                of_ranks, places = self._alike(section, came, out)
                places.copy_(of_ranks[:, 0])
                for turn in range(1, section.share):
                    places.add_(of_ranks[:, turn])
            return out
        if not self.columns.in_turn:
            out.zero_()
        parts = flat.split(list(map(_count, shapes)))
        for rank, (own, shape) in enumerate(zip(self.columns.of, shapes, strict=True)):
            part = parts[rank].view(shape)
            if self.columns.in_turn:
                out.narrow(self.to_dim, own[0] if own else 0, len(own)).copy_(part)
            else:
                out.index_add_(self.to_dim, self.columns.index(rank, flat.device), part)
        return out

    def _alike(
        self, section: _Section, of_ranks: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of what is for each rank [R, ...] and of ``x``: [R / share, share, ...] and
        [R / share, ...]."""
        blocks = len(of_ranks) // section.share
        theirs = of_ranks.narrow(self.to_dim + 1, section.at, section.count)
        places = x.narrow(self.to_dim, section.start, blocks * section.count)
        return theirs.unflatten(0, (blocks, section.share)), _apart(places, self.to_dim, blocks)

    def _sent(
        self,
        sent: torch.Tensor,
        parts: Sequence[_Shape],
        shapes: Sequence[_Shape],
        whole: _Shape,
        *,
        in_place: bool,
    ) -> Coming:
        out = sent.new_empty(whole)
        arriving = issue_all_to_all(
            sent,
            _counts(parts),
            _counts(shapes),
            self.group,
            out=out.view(-1) if in_place else None,
        )
        return Coming(arriving=arriving, out=out, in_place=in_place)

    def _take_back(self, x: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        out.copy_(x.narrow(self.from_dim, sum(self.sizes[:rank]), self.sizes[rank]))

    def _take(self, x: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        own = self.columns.of[rank]
        if isinstance(own, range) and own.step == 1:
            out.copy_(x.narrow(self.to_dim, own.start, len(own)))
        else:
            torch.index_select(x, self.to_dim, self.columns.index(rank, x.device), out=out)

    def _shape(self, x: torch.Tensor, size: int, count: int) -> _Shape:
        """That of ``x`` with other numbers of places in both dims."""
        shape = list(x.shape)
        shape[self.from_dim], shape[self.to_dim] = size, count
        return tuple(shape)


def _flat(
    x: torch.Tensor,
    parts: Sequence[_Shape],
    take: Callable[[torch.Tensor, int, torch.Tensor], None],
) -> torch.Tensor:
    """The parts for all ranks one behind the other."""
    flat, at = x.new_empty(sum(_counts(parts))), 0
    for rank, shape in enumerate(parts):
        count = _count(shape)
        if count:
            take(x, rank, flat[at : at + count].view(shape))
        at += count
    return flat


def _apart(x: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """[.., blocks n, ..] as [blocks, .., n, ..]: a view."""
    return x.unflatten(dim, (blocks, x.shape[dim] // blocks)).movedim(dim, 0)


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Whether places of a dim lie one behind the other."""
    return all(size == 1 for size in shape[:dim])


def _count(shape: _Shape) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _counts(shapes: Sequence[_Shape]) -> list[int]:
    return [_count(shape) for shape in shapes]
