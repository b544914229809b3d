"""Placements: where the tokens of one batch are, and how its attention is computed.

Shape legend: a batch [b, S] of rows; t_r tokens of it on rank r of R; N query and G key-value
heads of D features.

A rank's part of a batch is a tensor [b, s_r], t_r = b s_r: the same tokens of every row. Only
attention depends on tokens of other ranks; it reaches them by one of four exchanges:

    ulysses  all-to-all: all tokens of some heads, and back (DeepSpeed Ulysses)
    ring     keys and values travel from rank to rank (ring attention)
    gather   keys and values are gathered (Llama 3)
    2d       ulysses within blocks of neighbouring ranks, a ring across them (USP)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from headrace.comm.collectives import all_gather_rows
from headrace.errors import DataError, SpecError
from headrace.layouts.partition import Rows
from headrace.layouts.token_plan import TokenPlan
from headrace.methods.switched import SwitchedCore
from headrace.ops.core import Core, Heads, PackCore
from headrace.ops.gathered import GatheredCore
from headrace.ops.ring import Ring, RingCore
from headrace.ops.switch import gather
from headrace.spec.blocks import Block
from headrace.spec.method_facts import Members, RankBlocks, largest_divisor
from headrace.spec.plan import TokenOrder

__all__ = [
    "EXCHANGES",
    "Exchange",
    "Placement",
    "bit_sums",
    "declared_places",
    "documents_of",
    "fingerprint",
    "group_parts",
    "local_inputs",
    "placed_rows",
    "replica_blocks",
    "require_tokens",
]

Exchange = Literal["ulysses", "ring", "gather", "2d"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)

_serials = count(1)


def placed_rows(documents: tuple[tuple[int, ...], ...], ranks: int, order: TokenOrder) -> TokenPlan:
    """The token plan of rows, each given as the lengths of its documents: a single row is dealt out
    as a pack; of several rows every rank gets the same tokens of each."""
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
    """The groups that an exchange over ``ranks`` may need: all of them, and the blocks and rings of
    every mesh."""
    found = [ranks]
    for inner in (d for d in range(2, len(ranks)) if len(ranks) % d == 0):
        mesh = RankBlocks(ranks=len(ranks), inner=inner)
        found += [tuple(ranks[m] for m in some) for some in (*mesh.blocks, *mesh.rings)]
    return found


def replica_blocks(ranks: int, replicas: int) -> list[Members]:
    """The ranks of each replica, neighbours all. Raises SpecError where they cannot be divided."""
    if replicas < 1 or ranks % replicas:
        raise SpecError("replicas", got=replicas, wanted=f"a divisor of the {ranks} ranks")
    each = ranks // replicas
    return [tuple(range(at, at + each)) for at in range(0, ranks, each)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """One batch on a group of ranks, of which this one is ``member``.

    ``tokens`` tells which rank holds which tokens of ``rows`` rows; ``subgroup(members)`` is the
    group of some of the ranks. ``targets`` is how many tokens of the whole step have a loss, None
    where it is not known; ``places`` [S] are the tokens' own where they are not counted from 0.
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
        """s_r: tokens of each row on this rank."""
        return self.tokens.sizes[self.member] // self.rows

    def index(self) -> np.ndarray:
        """[s_r] int64: indices in a row of the tokens on this rank."""
        return self.tokens.index(self.member)[: self.width]

    def positions(self) -> np.ndarray:
        """[s_r] int64: position ids of the tokens on this rank."""
        return self.index() if self.places is None else self.places[self.index()]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """[b, S, ...] on every rank, in token order, of the local [b, s_r, ...]. Collective."""
        ranks = range(self.tokens.ranks)
        widths = [self.tokens.sizes[rank] // self.rows for rank in ranks]
        order = [self.tokens.index(r)[:n] for r, n in zip(ranks, widths, strict=True)]
        gathered = all_gather_rows(x.detach().transpose(0, 1).contiguous(), widths, self.group)
        found = torch.empty_like(gathered)
        found[torch.from_numpy(np.concatenate(order)).to(x.device)] = gathered
        return found.transpose(0, 1).contiguous()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """:meth:`whole` with its adjoint: the sum of all ranks' gradients of this rank's tokens."""
        ranks = range(self.tokens.ranks)
        widths = [self.tokens.sizes[rank] // self.rows for rank in ranks]
        order = np.concatenate(
            [self.tokens.index(r)[:n] for r, n in zip(ranks, widths, strict=True)]
        )
        back = torch.from_numpy(np.argsort(order, kind="stable")).to(x.device)
        return gather(x, 1, self.group, sizes=tuple(widths)).index_select(1, back)

    def core(self, heads: Heads, causal: bool, window: int, device: torch.device) -> Core:
        """The attention core of this rank for ``heads``; a ``window`` of 0 is no window, one below
        0 are chunks of so many tokens."""
        key = (heads, causal, window, device)
        if key not in self._cores:
            self._cores[key] = self._core(heads, causal, window, device)
        return self._cores[key]

    def _in_chunks(self, size: int) -> TokenPlan:
        """The same tokens on the same ranks, each document cut into chunks."""
        cut = tuple(
            min(size, length - start)
            for length in self.tokens.lengths
            for start in range(0, length, size)
        )
        return TokenPlan(lengths=cut, ranks=self.tokens.ranks, given=self.tokens.parts)

    def _core(self, heads: Heads, causal: bool, window: int, device: torch.device) -> Core:
        """The attention of this placement: one pack on one rank, a ring, a gather, or heads
        switched within blocks with a ring across them; a negative ``window`` is a chunk size."""
        tokens, ranks = self.tokens, self.tokens.ranks
        everyone = tuple(range(ranks))
        documents = self._in_chunks(-window) if window < 0 else tokens
        band = window if window > 0 else None

        def seen(queries: Members, keys: Members) -> tuple[Block, ...]:
            return documents.blocks(queries, keys, causal, band)

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
        """Ranks of a block that exchange heads, for the exchange ``2d``."""
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
        """Indices [tokens of the members] that put gathered tokens in the order of the row, and
        those that put them back; None where they lie in order."""
        order = self.tokens.held(members).order
        if order is None:
            return None, None
        back = np.argsort(order, kind="stable")
        return torch.from_numpy(order).to(device), torch.from_numpy(back).to(device)


def require_tokens(batch: Mapping[str, torch.Tensor], tokens: str) -> None:
    """Raise SpecError where the batch has no token ids, and DataError for tensors whose shape is
    not that of tokens."""
    if tokens not in batch or batch[tokens].dim() != 2:
        raise SpecError("batch", got=", ".join(batch) or "nothing", wanted=f"{tokens} [b, S]")
    rows, width = batch[tokens].shape
    for name, value in batch.items():
        one = name == "position_ids" and tuple(value.shape) == (1, width)
        if tuple(value.shape[:2]) != (rows, width) and not one:
            raise DataError(
                f"input {name}",
                got=f"{list(value.shape)}",
                wanted=f"[{rows}, {width}, ...]",
                hint="inputs have one value for each token; others are for the model itself",
            )


def documents_of(batch: Mapping[str, torch.Tensor], tokens: str) -> tuple[tuple[int, ...], ...]:
    """The lengths of the documents of every row. A document starts where position ids start again
    at 0; padding is a document of its own. Raises DataError for a mask that is no padding."""
    rows, width = batch[tokens].shape
    begins = np.zeros((rows, width), dtype=bool)
    begins[:, 0] = True
    mask = batch.get("attention_mask")
    if mask is not None:
        if mask.dim() != 2:
            raise DataError(
                "attention_mask",
                got=f"{list(mask.shape)}",
                wanted=f"{[rows, width]}, 1 or 0",
                hint="documents are told by position_ids that begin again at 0",
            )
        seen = mask.cpu().numpy() != 0
        change = seen[:, 1:] != seen[:, :-1]
        if ((seen[:, 1:] & change).sum(axis=1) + seen[:, 0] > 1).any():
            raise DataError(
                "attention_mask",
                got="ones on both sides of zeros",
                wanted="one run of ones in every row",
                hint="only padding is masked",
            )
        begins[:, 1:] |= change
    places = batch.get("position_ids")
    if places is not None:
        wide = np.broadcast_to(places.cpu().numpy(), (rows, width))
        begins[:, 1:] |= np.diff(wide, axis=1) != 1
    return tuple(tuple(np.diff([*np.flatnonzero(row).tolist(), width]).tolist()) for row in begins)


def declared_places(batch: Mapping[str, torch.Tensor]) -> np.ndarray | None:
    """[S] the position ids of the batch, for models that number tokens themselves; None where the
    batch has none. Raises DataError where rows differ."""
    places = batch.get("position_ids")
    if places is None:
        return None
    if not bool((places == places[:1]).all()):
        raise DataError(
            "position_ids",
            got="rows that differ",
            wanted="the same in every row",
            hint="the model does not take position_ids: it counts the tokens of all rows alike",
        )
    return places[0].cpu().numpy()


def local_inputs(
    batch: Mapping[str, torch.Tensor],
    tokens: str,
    placement: Placement,
    *,
    first: int | None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """(local model inputs, local labels) of a batch whose ``labels`` are already shifted to the
    places that predict them. Adds ``position_ids`` that start at ``first``, where that is no
    None."""
    rows = batch[tokens].shape[0]
    index = torch.from_numpy(placement.index()).to(batch[tokens].device)
    found: dict[str, torch.Tensor] = {}
    labels: torch.Tensor | None = None
    for name, value in batch.items():
        if name == "labels":
            labels = value.index_select(1, index)
        elif name != "attention_mask" and (name != "position_ids" or first is not None):
            found[name] = value.index_select(1, index)
    if first is not None and "position_ids" not in found:
        found["position_ids"] = (index + first)[None].repeat(rows, 1)
    return found, labels


def fingerprint(batch: Mapping[str, torch.Tensor], extra: Sequence[object]) -> str:
    """A hash of all that the ranks of a group must have in common. What is on a device stays there:
    two sums of its bits are read, once for all tensors."""
    digest = hashlib.blake2b(repr([sorted(batch), *extra]).encode(), digest_size=16)
    on_device = list[torch.Tensor]()
    for name in sorted(batch):
        digest.update(f"{list(batch[name].shape)} {batch[name].dtype}".encode())
        value = batch[name].detach()
        if value.device.type == "cpu":
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
        else:
            on_device.append(bit_sums(value))
    if on_device:
        digest.update(torch.stack(on_device).cpu().numpy().data)
    return digest.hexdigest()


_SUMMED = 1 << 22
"""Bytes that are widened at once."""


def bit_sums(x: torch.Tensor) -> torch.Tensor:
    """[2] int64, made on the device of ``x``: two numbers that differ where its bits or their order
    do, but for a chance of about 1 in 2^60."""
    words = x.contiguous().reshape(-1).view(torch.uint8)
    found = torch.zeros(2, dtype=torch.int64, device=x.device)
    for start in range(0, len(words), _SUMMED):
        part = words[start : start + _SUMMED].to(torch.int64) + 1
        at = torch.arange(start, start + len(part), device=x.device)
        for row, factor in enumerate((0x9E3779B97F4A7C1, 0xBF58476D1CE4E5B)):
            mixed = (at + 1) * factor
            mixed = (mixed ^ (mixed >> 29)) * factor
            found[row] += (part * (mixed ^ (mixed >> 32))).sum()
    return found
