"""Placements: where the tokens of one batch are, and how its attention is computed.

Shape legend: a batch [b, S] of rows; t_r tokens of it on rank r of R; N query and G key-value
heads of D features.

A rank's part of a batch is a tensor [b, s_r], t_r = b s_r: the same tokens of every row. What a
model does to each token alone needs no other rank; attention meets them in one of four exchanges:

    ulysses  heads for tokens, and back (DeepSpeed Ulysses)
    ring     keys and values travel from rank to rank (ring attention)
    gather   keys and values are gathered (Llama 3)
    2d       heads for tokens inside blocks of neighbours, a ring across them (USP)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from headrace.errors import SpecError
from headrace.layouts.intervals import Rows
from headrace.layouts.tokens import TokenPlan
from headrace.methods.switched import SwitchedCore
from headrace.ops.core import Core, Heads, PackCore
from headrace.ops.gathered import GatheredCore
from headrace.ops.ring import Ring, RingCore
from headrace.spec.blocks import Block
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder
from headrace.spec.rank_blocks import RankBlocks, largest_divisor

__all__ = ["EXCHANGES", "Exchange", "Placement", "group_parts", "placed_rows"]

Exchange = Literal["ulysses", "ring", "gather", "2d"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)

_serials = count(1)


def placed_rows(documents: tuple[tuple[int, ...], ...], ranks: int, order: TokenOrder) -> TokenPlan:
    """The tokens of rows, each given as the lengths of its documents: one row as a pack, of
    several the same tokens of each."""
    if len(documents) == 1:
        return TokenPlan(lengths=documents[0], ranks=ranks, order=order)
    width = sum(documents[0])
    one = TokenPlan(lengths=(width,), ranks=ranks, order=order).parts
    return TokenPlan(
        lengths=tuple(length for row in documents for length in row),
        ranks=ranks,
        given=tuple(
            tuple(
                Rows(at * width + part.start, at * width + part.stop)
                for at in range(len(documents))
                for part in parts
            )
            for parts in one
        ),
    )


def group_parts(ranks: Members) -> list[Members]:
    """A group, and the blocks and rings of all meshes that it may be."""
    found = [ranks]
    for inner in (d for d in range(2, len(ranks)) if len(ranks) % d == 0):
        mesh = RankBlocks(ranks=len(ranks), inner=inner)
        found += [tuple(ranks[m] for m in some) for some in (*mesh.blocks, *mesh.rings)]
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """One batch on a group of ranks, of which this one is ``member``.

    ``tokens`` say who holds what of ``rows`` rows; ``subgroup(members)`` is the group of some of
    the ranks. ``targets`` is how many tokens of the whole step have a loss, None where
    nobody knows; ``places`` [S] are the tokens' own where they are not counted from 0.
    """

    tokens: TokenPlan
    rows: int
    member: int
    group: dist.ProcessGroup | None
    exchange: Exchange
    targets: int | None
    places: np.ndarray | None = None
    subgroup: Callable[[Members], dist.ProcessGroup | None] = lambda members: None
    serial: int = field(default_factory=lambda: next(_serials))
    _cores: dict[tuple[Heads, bool, int, torch.device], Core] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def width(self) -> int:
        """s_r."""
        return self.tokens.sizes[self.member] // self.rows

    def index(self) -> np.ndarray:
        """[s_r] int64: which tokens of each row are here."""
        return self.tokens.index(self.member)[: self.width]

    def positions(self) -> np.ndarray:
        """[s_r] int64: their places, as the model counts them."""
        return self.index() if self.places is None else self.places[self.index()]

    def core(self, heads: Heads, causal: bool, window: int, device: torch.device) -> Core:
        """The attention of this rank over heads like these; ``window`` 0 is none."""
        key = (heads, causal, window, device)
        if key not in self._cores:
            self._cores[key] = self._core(heads, causal, window or None, device)
        return self._cores[key]

    def _core(self, heads: Heads, causal: bool, window: int | None, device: torch.device) -> Core:
        tokens, ranks = self.tokens, self.tokens.ranks
        everyone = tuple(range(ranks))

        def seen(queries: Members, keys: Members) -> tuple[Block, ...]:
            return tokens.blocks(queries, keys, causal, window)

        if ranks == 1:
            return PackCore(heads=heads, blocks=seen(everyone, everyone))
        if self.exchange == "ring":
            ring = Ring(sizes=tokens.sizes, member=self.member, group=self.group)
            return RingCore(
                heads=heads, ring=ring, blocks=lambda source: seen((self.member,), (source,))
            )
        if self.exchange == "gather":
            order, back = self._order(everyone, device)
            return GatheredCore(
                heads=heads,
                sizes=tokens.sizes,
                group=self.group,
                blocks=seen((self.member,), everyone),
                order=order,
                back=back,
            )
        mesh = RankBlocks(ranks=ranks, inner=self._inner(heads))
        block = mesh.blocks[self.member // mesh.inner]
        sizes = tuple(tokens.sizes[m] for m in block)
        order, back = self._order(block, device)
        switched = SwitchedCore(
            heads=heads,
            core=PackCore(heads=heads, blocks=()),
            sizes=sizes,
            member=self.member % mesh.inner,
            group=self.group if len(block) == ranks else self.subgroup(block),
            order=order,
            back=back,
        )
        inner = switched.inner
        if len(block) == ranks:
            core: Core = PackCore(heads=inner, blocks=seen(everyone, everyone))
        else:
            ring = Ring(
                sizes=[sum(tokens.sizes[m] for m in other) for other in mesh.blocks],
                member=self.member // mesh.inner,
                group=self.subgroup(mesh.rings[self.member % mesh.inner]),
            )
            core = RingCore(heads=inner, ring=ring, blocks=lambda at: seen(block, mesh.blocks[at]))
        return SwitchedCore(
            heads=heads,
            core=core,
            sizes=sizes,
            member=switched.member,
            group=switched.group,
            order=order,
            back=back,
        )

    def _inner(self, heads: Heads) -> int:
        """Ranks of a block that exchange heads."""
        ranks = self.tokens.ranks
        if self.exchange == "ulysses":
            return ranks
        found = largest_divisor(ranks, heads.keys) or largest_divisor(ranks, heads.queries)
        if found is None:
            raise SpecError(
                f"exchange 2d on {ranks} ranks of {heads.queries} heads",
                got="no block",
                wanted="ranks that a number of heads divides",
                hint="use ulysses, ring or gather",
            )
        return found

    def _order(
        self, members: Members, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        order = self.tokens.held(members).order
        if order is None:
            return None, None
        back = np.argsort(order, kind="stable")
        return torch.from_numpy(order).to(device), torch.from_numpy(back).to(device)
