"""Switch, split and gather a dim of a tensor of any number of dims (DSP, Table 2).

Shape legend: a tensor of any dims, one of them sharded over the R ranks of a group, ``sizes[r]``
places on rank r in turn; M values in all. The objective is the sum of all ranks' losses, so
gradients are true adjoints, and nothing is scaled:

    switch   [.., s_r, .., S, ..] -> [.., s, .., S_r, ..]   all-to-all, adjoint: switched back
    split    [.., S, ..]          -> [.., S_r, ..]          nothing sent, adjoint: zeros elsewhere
    gather   [.., S_r, ..]        -> [.., S, ..]            all-gather, adjoint: reduce-scatter

A switch sends M (R - 1) / R^2 values from each rank, not M / R as in Table 2, which leaves out that
a rank keeps its own. Backwards are made of these same operators, so gradients of gradients are
exact, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from headrace.comm.collectives import (
    Arriving,
    all_gather_rows,
    issue_all_to_all,
    reduce_scatter_rows,
)
from headrace.errors import SpecError
from headrace.layouts.partition import split_sizes
from headrace.ops.fused import index_tensor

__all__ = [
    "Columns",
    "Coming",
    "Resharding",
    "Switching",
    "dim_of",
    "gather",
    "issue_switch",
    "reordered",
    "shard_sizes",
    "split",
    "switch",
    "switch_heads_back",
    "switched_dims",
    "to_columns",
    "to_tokens",
    "whole_sizes",
]

_Shape = tuple[int, ...]
"""Sizes of all dims of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which of the ``total`` places (indices) of a dim each rank takes: rank r takes those in
    ``of[r]``, in that order.

    Lists may overlap, as when several ranks need the same key-value head: such a place is copied to
    each of these ranks by a switch, and what they return is added in rank order by the switch back.
    """

    total: int
    of: tuple[Sequence[int], ...]

    @classmethod
    def even(cls, total: int, ranks: int) -> Columns:
        """Consecutive places for each rank, as evenly as possible."""
        return cls.consecutive(split_sizes(total, ranks))

    @classmethod
    def consecutive(cls, sizes: Sequence[int]) -> Columns:
        """``sizes[r]`` neighbouring places for rank r, rank after rank."""
        stops = list(accumulate(sizes))
        spans = zip(stops, sizes, strict=True)
        return cls(total=sum(sizes), of=tuple(range(end - size, end) for end, size in spans))

    @property
    def in_turn(self) -> bool:
        """Whether the ranks' places are consecutive ranges, rank after rank, that cover the dim."""
        stops = [0, *(part.stop for part in self.of if isinstance(part, range))]
        # every rank has a range, each begins where the one before ends, and the last ends at
        # ``total``
        return (
            len(stops) == len(self.of) + 1
            and stops[-1] == self.total
            and all(
                part == range(start, stop)
                for part, start, stop in zip(self.of, stops, stops[1:], strict=False)
            )
        )

    def index(self, rank: int, device: torch.device) -> torch.Tensor:
        """The places of one rank as an int64 tensor on ``device``."""
        return index_tensor(tuple(self.of[rank]), device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """A part of each rank's list of places that follows a regular pattern, so that one strided copy
    serves all ranks; queries, keys and values are such parts.

    The entries ``at`` to ``at + count - 1`` of the list of rank r are the ``count`` consecutive
    places from ``start + r // share * count`` on: ``share`` neighbouring ranks take the same ones,
    as where several ranks need one key-value head."""

    at: int
    start: int
    count: int
    share: int


@lru_cache(maxsize=256)
def _sections(columns: Columns) -> tuple[_Section, ...]:
    """Sections that together have every place of ``columns`` once; empty where the lists of places
    do not follow their pattern."""
    ranks, own_count = len(columns.of), len(columns.of[0])
    if not own_count or any(len(places) != own_count for places in columns.of):
        return ()
    sections = list[_Section]()
    for at, stop in pairwise(_cuts(columns)):
        starts, count = [places[at] for places in columns.of], stop - at
        # how many ranks take the same places as rank 0: the first that differs ends them
        share = next((rank for rank in range(1, ranks) if starts[rank] != starts[0]), ranks)
        if ranks % share or any(
            start != starts[0] + rank // share * count for rank, start in enumerate(starts)
        ):
            return ()
        sections.append(_Section(at=at, start=starts[0], count=count, share=share))
    # no section may overlap another, and no place may be left out
    covered = 0
    for section in sorted(sections, key=lambda section: section.start):
        if section.start != covered:
            return ()
        covered += ranks // section.share * section.count
    return tuple(sections) if covered == columns.total else ()


def _cuts(columns: Columns) -> list[int]:
    """The indices at which the ranks' lists of places, which are equally long, are cut into
    sections: 0, each index at which some rank's place is not the one before plus 1, and the
    length."""
    own_count = len(columns.of[0])
    if all(isinstance(own, range) and own.step == 1 for own in columns.of):
        return [0, own_count]
    breaks = (i for i in range(1, own_count) if any(own[i] != own[i - 1] + 1 for own in columns.of))
    return [0, *breaks, own_count]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coming:
    """An all-to-all in flight, whose result will be in ``out``. ``arriving.wait()`` gives the
    received values as a flat tensor. Where they are received ``in_place`` that is a view of
    ``out``, else they are still to be copied there."""

    arriving: Arriving
    out: torch.Tensor
    in_place: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """The exchange between a tensor whose ``from_dim`` is sharded, ``sizes[r]`` places on rank r,
    and the same whose ``to_dim`` is, ``columns.of[r]`` on rank r; and its adjoint.

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
        """The index of this rank in the group."""
        return dist.get_rank(self.group)

    def out(self, x: torch.Tensor) -> torch.Tensor:
        """Shard ``to_dim`` in place of ``from_dim``: each rank gets its places of ``to_dim``."""
        return self.joined(self.issue_out(x))

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """The adjoint of :meth:`out`: shards of ``from_dim`` again, all places of ``to_dim``."""
        return self.added(self.issue_back(x))

    def issue_out(self, x: torch.Tensor) -> Coming:
        """Start :meth:`out`; :meth:`joined` returns its result."""
        own_size, own_count = self.sizes[self.rank], len(self.columns.of[self.rank])
        sent_shapes = [self._shape(x, own_size, len(places)) for places in self.columns.of]
        # what goes to each rank is adjacent in memory, rank after rank: nothing is copied
        if self.columns.in_turn and _is_outermost(x.shape, self.to_dim) and x.is_contiguous():
            sent = x.reshape(-1)
        # messages of equal size [R, ...]: one strided copy for each section, not for each rank
        elif sections := _sections(self.columns):
            by_rank = x.new_empty((len(sent_shapes), *sent_shapes[0]))
            for section in sections:
                messages, places = self._section_views(section, by_rank, x)
                messages.copy_(places[:, None])
            sent = by_rank.view(-1)
        else:
            sent = _flat(x, sent_shapes, self._copy_columns)
        received_shapes = [self._shape(x, size, own_count) for size in self.sizes]
        out_shape = self._shape(x, sum(self.sizes), own_count)
        in_place = _is_outermost(out_shape, self.from_dim)
        return self._issue(sent, sent_shapes, received_shapes, out_shape, in_place=in_place)

    def joined(self, coming: Coming) -> torch.Tensor:
        """The received values as one tensor; waits for them."""
        flat, out = coming.arriving.wait(), coming.out
        if coming.in_place:
            return out
        # equal sizes: one strided copy for what came from all ranks
        if len(set(self.sizes)) == 1:
            by_rank = _in_blocks(out, self.from_dim, len(self.sizes))
            by_rank.copy_(flat.view(by_rank.shape))
            return out
        offset, start = 0, 0
        for size in self.sizes:
            place = out.narrow(self.from_dim, start, size)
            place.copy_(flat[offset : offset + place.numel()].view(place.shape))
            offset, start = offset + place.numel(), start + size
        return out

    def issue_back(self, x: torch.Tensor) -> Coming:
        """Start :meth:`back`; :meth:`added` returns its result."""
        own_size, own_count = self.sizes[self.rank], len(self.columns.of[self.rank])
        sent_shapes = [self._shape(x, size, own_count) for size in self.sizes]
        if _is_outermost(x.shape, self.from_dim) and x.is_contiguous():
            sent = x.reshape(-1)
        elif len(set(self.sizes)) == 1:
            sent = _in_blocks(x, self.from_dim, len(sent_shapes)).reshape(-1)
        else:
            sent = _flat(x, sent_shapes, self._copy_shard)
        received_shapes = [self._shape(x, own_size, len(places)) for places in self.columns.of]
        out_shape = self._shape(x, own_size, self.columns.total)
        in_place = self.columns.in_turn and _is_outermost(out_shape, self.to_dim)
        return self._issue(sent, sent_shapes, received_shapes, out_shape, in_place=in_place)

    def added(self, coming: Coming) -> torch.Tensor:
        """The received values, summed at their places; waits for them."""
        flat, out = coming.arriving.wait(), coming.out
        if coming.in_place:
            return out
        own_size = out.shape[self.from_dim]
        shapes = [self._shape(out, own_size, len(places)) for places in self.columns.of]
        if sections := _sections(self.columns):
            by_rank = flat.view(len(shapes), *shapes[0])
            for section in sections:
                received, places = self._section_views(section, by_rank, out)
                places.copy_(received[:, 0])
                # what the other ranks with the same places sent is added, in rank order
                for sharer in range(1, section.share):
                    places.add_(received[:, sharer])
            return out
        # places that several ranks held are added up below
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

    def _section_views(
        self, section: _Section, by_rank: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two views of one section: of the messages of all ranks, ``by_rank`` [R, ...], as
        [R / share, share, ...], and of the tensor x that has all places of ``to_dim``, as
        [R / share, ...]. Entry i of both has the same places, which ``share`` ranks take."""
        blocks = len(by_rank) // section.share
        messages = by_rank.narrow(self.to_dim + 1, section.at, section.count)
        places = x.narrow(self.to_dim, section.start, blocks * section.count)
        return (
            messages.unflatten(0, (blocks, section.share)),
            _in_blocks(places, self.to_dim, blocks),
        )

    def _issue(
        self,
        sent: torch.Tensor,
        sent_shapes: Sequence[_Shape],
        received_shapes: Sequence[_Shape],
        out_shape: _Shape,
        *,
        in_place: bool,
    ) -> Coming:
        """Issue the all-to-all of the flat tensor ``sent``: a piece of ``sent_shapes[r]`` goes to
        rank r, one of ``received_shapes[r]`` comes from it. The result will have ``out_shape``.
        With ``in_place`` the received pieces follow each other in the memory of the result, so
        that they are received right there."""
        out = sent.new_empty(out_shape)
        arriving = issue_all_to_all(
            sent,
            _counts(sent_shapes),
            _counts(received_shapes),
            self.group,
            out=out.view(-1) if in_place else None,
        )
        return Coming(arriving=arriving, out=out, in_place=in_place)

    def _copy_shard(self, x: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        """Copy ``rank``'s shard of ``from_dim``, of which x has all places, into ``out``."""
        out.copy_(x.narrow(self.from_dim, sum(self.sizes[:rank]), self.sizes[rank]))

    def _copy_columns(self, x: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        """Copy the places of ``to_dim`` that ``rank`` takes, of which x has all, into ``out``."""
        own = self.columns.of[rank]
        if isinstance(own, range) and own.step == 1:
            out.copy_(x.narrow(self.to_dim, own.start, len(own)))
        else:
            torch.index_select(x, self.to_dim, self.columns.index(rank, x.device), out=out)

    def _shape(self, x: torch.Tensor, size: int, count: int) -> _Shape:
        """The shape of ``x`` with ``size`` places of ``from_dim`` and ``count`` of ``to_dim``."""
        shape = list(x.shape)
        shape[self.from_dim], shape[self.to_dim] = size, count
        return tuple(shape)


def _flat(
    x: torch.Tensor,
    shapes: Sequence[_Shape],
    copy: Callable[[torch.Tensor, int, torch.Tensor], None],
) -> torch.Tensor:
    """The parts of x for all ranks, of these ``shapes``, one after the other in a flat tensor;
    ``copy(x, rank, out)`` copies a rank's part into ``out``."""
    flat, offset = x.new_empty(sum(_counts(shapes))), 0
    for rank, shape in enumerate(shapes):
        count = _count(shape)
        if count:
            copy(x, rank, flat[offset : offset + count].view(shape))
        offset += count
    return flat


def _in_blocks(x: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """A view of x in which a dim is cut into ``blocks`` blocks of n places, with the blocks first:
    [.., blocks n, ..] as [blocks, .., n, ..]."""
    return x.unflatten(dim, (blocks, x.shape[dim] // blocks)).movedim(dim, 0)


def _is_outermost(shape: Sequence[int], dim: int) -> bool:
    """Whether all dims before ``dim`` have one place, so that consecutive places of ``dim`` are one
    piece of memory."""
    return all(size == 1 for size in shape[:dim])


def _count(shape: _Shape) -> int:
    """The number of elements of a shape."""
    total = 1
    for size in shape:
        total *= size
    return total


def _counts(shapes: Sequence[_Shape]) -> list[int]:
    """The number of elements of each shape."""
    return [_count(shape) for shape in shapes]


_Sizes = tuple[int, ...]
"""Places of the sharded dim on each rank, in rank order."""


def switch(
    x: torch.Tensor,
    from_dim: int,
    to_dim: int,
    group: dist.ProcessGroup | None,
    *,
    sizes: _Sizes | None = None,
    to_sizes: _Sizes | None = None,
) -> torch.Tensor:
    """Gather ``from_dim`` and shard ``to_dim`` instead: one all-to-all.

        x         [.., sizes[r], .., S, ..]
        returns   [.., sum(sizes), .., to_sizes[r], ..]
        backward  switch(grad, to_dim, from_dim)

    Where they are left out, ``sizes`` are the same on every rank, and ``to_sizes`` as even as can
    be. Raises SpecError for dims that are not there or the same, sizes that are not those of ``x``,
    and a group without this rank.
    """
    return issue_switch(x, from_dim, to_dim, group, sizes=sizes, to_sizes=to_sizes).wait()


def issue_switch(
    x: torch.Tensor,
    from_dim: int,
    to_dim: int,
    group: dist.ProcessGroup | None,
    *,
    sizes: _Sizes | None = None,
    to_sizes: _Sizes | None = None,
) -> Switching:
    """Start a :func:`switch`, whose result ``wait()`` returns: what is computed in between overlaps
    with it. The backward starts its exchange where the forward waited, and waits where the forward
    started."""
    sharded, whole = switched_dims(x, from_dim, to_dim)
    if group is None:
        return Switching(value=x)
    sizes = shard_sizes(x, sharded, group, sizes)
    to_sizes = whole_sizes(x, whole, group, to_sizes)
    resharding = Resharding(
        from_dim=sharded,
        to_dim=whole,
        sizes=sizes,
        columns=Columns.consecutive(to_sizes),
        group=group,
    )
    messages = _Messages(resharding=resharding)
    return Switching(value=_Issued.apply(x, messages), _messages=messages)


@dataclass(slots=True, kw_only=True)
class Switching:
    """A switch in flight; :meth:`wait` is called once. ``value`` is an empty tensor that connects
    the start with the end in autograd's graph, or the result itself where there is nothing to
    send."""

    value: torch.Tensor
    _messages: _Messages | None = None

    def wait(self) -> torch.Tensor:
        """The result, once it has arrived."""
        if self._messages is None:
            return self.value
        return _Waited.apply(self.value, self._messages)  # type: ignore[no-any-return]


@dataclass(slots=True, kw_only=True)
class _Messages:
    """The exchange of one switch, or of the switch back where it is the ``adjoint``. The autograd
    functions of its start and of its end share this object, as the tensor between them in the graph
    is empty; ``under_way`` holds the exchange from the one to the other."""

    resharding: Resharding
    adjoint: bool = False
    under_way: list[Coming] = field(default_factory=list)
    _reverse: _Messages | None = None

    @property
    def reverse(self) -> _Messages:
        """The exchange of the gradients, the other way: the same object at each call, so that its
        start and its end find each other."""
        if self._reverse is None:
            self._reverse = _Messages(resharding=self.resharding, adjoint=not self.adjoint)
        return self._reverse

    def issue(self, x: torch.Tensor) -> None:
        """Start to send x to the other ranks."""
        self.under_way.append(
            self.resharding.issue_back(x) if self.adjoint else self.resharding.issue_out(x)
        )

    def arrived(self) -> torch.Tensor:
        """Wait for what the other ranks sent; returns it as one tensor."""
        coming = self.under_way.pop()
        return self.resharding.added(coming) if self.adjoint else self.resharding.joined(coming)


class _Issued(torch.autograd.Function):
    """The first half of a switch: issues its messages; the backward waits for those of the
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, messages: _Messages) -> torch.Tensor:
        """Issue the messages of x, and return an empty tensor that autograd follows until they are
        waited for."""
        ctx.messages = messages
        messages.issue(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:  # type: ignore[override]
        """Wait for the gradient of x; ``token``, that of the empty tensor, is empty, too."""
        return _Waited.apply(token, ctx.messages.reverse), None


class _Waited(torch.autograd.Function):
    """The second half of a switch: waits for its messages; the backward issues those of the
    gradient."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, messages: _Messages) -> torch.Tensor:
        """Wait for the result of the switch; ``token`` is the empty tensor of :class:`_Issued`."""
        ctx.messages = messages
        return messages.arrived()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Start to send the gradient back; the gradient of the token is an empty tensor."""
        return _Issued.apply(grad, ctx.messages.reverse), None


def split(
    x: torch.Tensor, dim: int, group: dist.ProcessGroup | None, *, sizes: _Sizes | None = None
) -> torch.Tensor:
    """This rank's shard of a tensor that all ranks have alike.

    x         [.., S, ..]
    returns   [.., sizes[r], ..]   a view
    backward  the gradient in its place, zeros elsewhere: the gradients of all ranks add up
    """
    dim = dim_of(x, dim)
    if group is None:
        return x
    sizes = whole_sizes(x, dim, group, sizes)
    rank = dist.get_rank(group)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def gather(
    x: torch.Tensor, dim: int, group: dist.ProcessGroup | None, *, sizes: _Sizes | None = None
) -> torch.Tensor:
    """Gather the shards of all ranks.

    x         [.., sizes[r], ..]
    returns   [.., sum(sizes), ..]   on every rank
    backward  the sum of all ranks' gradients of this rank's shard
    """
    dim = dim_of(x, dim)
    if group is None:
        return x
    sizes = shard_sizes(x, dim, group, sizes)
    return _Gather.apply(x, dim, sizes, group)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    """Autograd of :func:`gather`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: _Sizes, group: Any) -> torch.Tensor:
        ctx.rest = (dim, sizes, group)
        return all_gather_rows(x.movedim(dim, 0), sizes, group).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Scatter.apply(grad, *ctx.rest), None, None, None


class _Scatter(torch.autograd.Function):
    """Reduce-scatter: the sum over ranks of x at this rank's places of a dim, the adjoint of
    :class:`_Gather`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: _Sizes, group: Any) -> torch.Tensor:
        ctx.rest = (dim, sizes, group)
        return reduce_scatter_rows(x.movedim(dim, 0), sizes, group).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Gather.apply(grad, *ctx.rest), None, None, None


def switched_dims(x: torch.Tensor, from_dim: int, to_dim: int) -> tuple[int, int]:
    """The two dims of a switch, counted from the front. Raises SpecError for dims that are not
    there, or the same."""
    sharded, whole = dim_of(x, from_dim), dim_of(x, to_dim)
    if sharded == whole:
        raise SpecError("switch", got=f"dim {from_dim} twice", wanted="two dims")
    return sharded, whole


def dim_of(x: torch.Tensor, dim: int) -> int:
    """A dim counted from the front. Raises SpecError for one that is not there."""
    if not -x.dim() <= dim < x.dim():
        raise SpecError("dim of a tensor", got=dim, wanted=f"one of {list(x.shape)}")
    return dim % x.dim()


def _ranks(group: dist.ProcessGroup) -> int:
    """The number of ranks of a group; raises SpecError where this rank is not in it."""
    if dist.get_rank(group) < 0:
        raise SpecError(
            "group of ranks", got="one of other ranks", wanted=f"one with rank {dist.get_rank()}"
        )
    return dist.get_world_size(group)


def shard_sizes(
    x: torch.Tensor, dim: int, group: dist.ProcessGroup, sizes: _Sizes | None
) -> _Sizes:
    """The places of a sharded ``dim`` on each rank, as many as here where they are left out. Raises
    SpecError unless ``sizes`` has a number for each rank, and x has this rank's."""
    ranks = _ranks(group)
    sizes = sizes or (x.shape[dim],) * ranks
    rank = dist.get_rank(group)
    if len(sizes) != ranks or sizes[rank] != x.shape[dim]:
        raise SpecError(
            f"dim {dim} of {list(x.shape)}",
            got=f"shards {list(sizes)}",
            wanted=f"one for each of {ranks} ranks, {x.shape[dim]} places on rank {rank}",
        )
    return sizes


def whole_sizes(
    x: torch.Tensor, dim: int, group: dist.ProcessGroup, sizes: _Sizes | None
) -> _Sizes:
    """The places of a whole ``dim`` for each rank, as even as can be where they are left out.
    Raises SpecError unless ``sizes`` has a number for each rank, and x has all of them."""
    ranks = _ranks(group)
    sizes = sizes or split_sizes(x.shape[dim], ranks)
    if len(sizes) != ranks or sum(sizes) != x.shape[dim]:
        raise SpecError(
            f"dim {dim} of {list(x.shape)}",
            got=f"shards {list(sizes)}",
            wanted=f"one for each of {ranks} ranks, {x.shape[dim]} places in all",
        )
    return sizes


def switch_heads(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Gather the tokens, shard the columns (heads): one all-to-all.

        x         [T_r, C, D]          this rank's tokens, all columns
        returns   [T, |columns[r]|, D] all tokens, this rank's columns
        backward  switch_heads_back(grad), columns held by several ranks added in rank order

    ``sizes[r]`` is T_r. Raises SpecError when ``x`` disagrees with ``sizes`` or ``columns``.
    """
    if group is None:
        return x if _is_identity(columns) else x.index_select(1, columns.index(0, x.device))
    _check("switch_heads", x, sizes[dist.get_rank(group)], columns.total)
    return _Switch.apply(x, sizes, columns, group)  # type: ignore[no-any-return]


def switch_heads_back(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Gather the columns (heads), shard the tokens: one all-to-all.

    x         [T, |columns[r]|, D] all tokens, this rank's columns
    returns   [T_r, C, D]          this rank's tokens, all columns; columns held by several
                                   ranks are added in rank order
    backward  switch_heads(grad)
    """
    if group is None:
        assert _is_identity(columns), "a single rank holds all columns in order"
        return x
    _check("switch_heads_back", x, sum(sizes), len(columns.of[dist.get_rank(group)]))
    return _SwitchBack.apply(x, sizes, columns, group)  # type: ignore[no-any-return]


def reordered(x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """The rows of x in another order, under autograd.

    x         [T, ...]
    returns   x[order], ``order`` [T] a permutation and ``back`` its inverse
    backward  grad[back]
    """
    return _Reordered.apply(x, order, back)  # type: ignore[no-any-return]


class _Reordered(torch.autograd.Function):
    """Autograd of :func:`reordered`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.orders = (back, order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Reordered.apply(grad, *ctx.orders), None, None


class _Switch(torch.autograd.Function):
    """Autograd of :func:`switch_heads`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: Any, columns: Any, group: Any) -> torch.Tensor:
        ctx.rest = (sizes, columns, group)
        return to_columns(x, sizes, columns, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _SwitchBack.apply(grad, *ctx.rest), None, None, None


class _SwitchBack(torch.autograd.Function):
    """Autograd of :func:`switch_heads_back`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: Any, columns: Any, group: Any) -> torch.Tensor:
        ctx.rest = (sizes, columns, group)
        return to_tokens(x, sizes, columns, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Switch.apply(grad, *ctx.rest), None, None, None


def to_columns(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup
) -> torch.Tensor:
    """:func:`switch_heads` without autograd: tokens to columns."""
    return _resharding(sizes, columns, group).out(x)


def to_tokens(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup
) -> torch.Tensor:
    """:func:`switch_heads_back` without autograd: columns to tokens."""
    return _resharding(sizes, columns, group).back(x)


def _resharding(sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup) -> Resharding:
    """The exchange from tokens (dim 0) to columns (dim 1)."""
    return Resharding(from_dim=0, to_dim=1, sizes=sizes, columns=columns, group=group)


def _is_identity(columns: Columns) -> bool:
    """Whether a single rank takes all columns, in order."""
    return columns.of == (tuple(range(columns.total)),)


def _check(what: str, x: torch.Tensor, rows: int, count: int) -> None:
    """Raise SpecError unless x is [``rows``, ``count``, D]."""
    if x.dim() != 3 or x.shape[0] != rows or x.shape[1] != count:
        raise SpecError(what, got=f"a tensor {list(x.shape)}", wanted=f"[{rows}, {count}, D]")
