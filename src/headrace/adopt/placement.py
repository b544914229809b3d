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
from collections import deque
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
    "require_documents",
    "require_tokens",
]

Exchange = Literal["ulysses", "ring", "gather", "2d"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)

_serials = count(1)

_MEANS = 16
"""Mean losses of a model's own, of one forward, whose labels are counted."""


def placed_rows(documents: tuple[tuple[int, ...], ...], ranks: int, order: TokenOrder) -> TokenPlan:
    """Plan which of ``ranks`` holds which tokens of some rows; ``documents`` are the lengths in
    tokens of the documents of each row. A single row is divided as a pack of documents; of several
    rows every rank gets the same range of tokens in each."""
    if len(documents) == 1:
        return TokenPlan(lengths=documents[0], ranks=ranks, order=order)
    width = sum(documents[0])
    ranges_in_one_row = TokenPlan(lengths=(width,), ranks=ranks, order=order).parts
    # Tokens are counted through all rows, one after another.
    ranges_in_all_rows = tuple(
        tuple(
            Rows(row * width + part.start, row * width + part.stop)
            for row in range(len(documents))
            for part in parts_of_rank
        )
        for parts_of_rank in ranges_in_one_row
    )
    return TokenPlan(
        lengths=tuple(length for row in documents for length in row),
        ranks=ranks,
        given=ranges_in_all_rows,
    )


def group_parts(ranks: Members) -> list[Members]:
    """The groups of ranks that exchanges over ``ranks`` may need: all of them, and for ``2d`` the
    blocks and rings of every mesh, for each size of a block that divides the number of ranks."""
    groups = [ranks]
    for block_size in range(2, len(ranks)):
        if len(ranks) % block_size == 0:
            mesh = RankBlocks(ranks=len(ranks), inner=block_size)
            for members in (*mesh.blocks, *mesh.rings):  # indices of ranks
                groups.append(tuple(ranks[member] for member in members))
    return groups


def replica_blocks(ranks: int, replicas: int) -> list[Members]:
    """The ranks of each replica: blocks of neighbouring ranks, of one size. Raises SpecError where
    ``replicas`` does not divide the number of ``ranks``."""
    if replicas < 1 or ranks % replicas:
        raise SpecError("replicas", got=replicas, wanted=f"a divisor of the {ranks} ranks")
    size = ranks // replicas
    return [tuple(range(first, first + size)) for first in range(0, ranks, size)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Where the tokens of one batch are on a group of ranks, of which this rank has the index
    ``member``, and how attention reaches those of other ranks.

    ``tokens`` tells which rank holds which tokens of ``rows`` rows. ``group`` is the process group
    of all ranks, None for one process; ``subgroup(members)`` that of some of them by their indices.
    ``exchange`` is how ranks meet in attention. ``targets`` is the number of tokens of the whole
    step that have a loss, None where it is not known. ``places`` [S] are position ids of a row's
    tokens, None where they are counted from 0. ``serial`` is the placement's unique number: an
    operator's backward finds the placement of its forward by it. ``counted`` has, for the last mean
    losses of the model's own, how many [] of the labels that this rank gave them have a loss.
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
    counted: deque[torch.Tensor] = field(
        default_factory=lambda: deque(maxlen=_MEANS), init=False, repr=False
    )
    _cores: dict[tuple[Heads, bool, int, torch.device], Core] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def width(self) -> int:
        """s_r: tokens of each row on this rank."""
        return self.tokens.sizes[self.member] // self.rows

    def index(self) -> np.ndarray:
        """[s_r] int64: indices in a row of the tokens on this rank, the same in every row."""
        return self.tokens.index(self.member)[: self.width]

    def positions(self) -> np.ndarray:
        """[s_r] int64: position ids of the tokens on this rank."""
        return self.index() if self.places is None else self.places[self.index()]

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Gather a tensor x [b, s_r, ...] of the tokens of each rank: [b, S, ...] on every rank, in
        the order of the tokens in their rows. Without a gradient. Collective."""
        widths, index = self._rank_by_rank()
        gathered = all_gather_rows(x.detach().transpose(0, 1).contiguous(), widths, self.group)
        ordered = torch.empty_like(gathered)  # [S, b, ...]
        ordered[torch.from_numpy(index).to(x.device)] = gathered
        return ordered.transpose(0, 1).contiguous()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Like :meth:`whole`, with a gradient: in the backward, that of this rank's x is the sum
        over all ranks of their gradients of its tokens. Collective."""
        widths, index = self._rank_by_rank()
        # Gathered tokens lie rank by rank; the inverse permutation puts them in order.
        back = torch.from_numpy(np.argsort(index, kind="stable")).to(x.device)
        return gather(x, 1, self.group, sizes=tuple(widths)).index_select(1, back)

    def _rank_by_rank(self) -> tuple[list[int], np.ndarray]:
        """(widths, index): how many tokens of each row every rank holds, and [S] the indices in a
        row of the tokens as they lie rank by rank."""
        ranks = range(self.tokens.ranks)
        widths = [self.tokens.sizes[rank] // self.rows for rank in ranks]
        indices = [self.tokens.index(r)[:n] for r, n in zip(ranks, widths, strict=True)]
        return widths, np.concatenate(indices)

    def core(self, heads: Heads, causal: bool, window: int, device: torch.device) -> Core:
        """The object that computes attention of this rank's tokens over the group, for layers with
        these ``heads``; it is made once for equal layers. A ``window`` above 0 is a sliding window
        in tokens, 0 is none, and -n means chunks of n tokens."""
        key = (heads, causal, window, device)
        if key not in self._cores:
            self._cores[key] = self._make_core(heads, causal, window, device)
        return self._cores[key]

    def _in_chunks(self, size: int) -> TokenPlan:
        """The same tokens on the same ranks, with every document cut into documents of ``size``
        tokens: attention that stays within documents then stays within chunks."""
        chunk_lengths = tuple(
            min(size, length - start)
            for length in self.tokens.lengths
            for start in range(0, length, size)
        )
        return TokenPlan(lengths=chunk_lengths, ranks=self.tokens.ranks, given=self.tokens.parts)

    def _make_core(self, heads: Heads, causal: bool, window: int, device: torch.device) -> Core:
        """Make the attention core: of one rank alone, a ring, a gather, or Ulysses within blocks of
        ranks and a ring across the blocks (``2d``; plain Ulysses is the case of one block).
        ``window`` is as for :meth:`core`."""
        tokens, ranks = self.tokens, self.tokens.ranks
        everyone = tuple(range(ranks))
        documents = self._in_chunks(-window) if window < 0 else tokens
        band = window if window > 0 else None

        def mask_blocks(queries: Members, keys: Members) -> tuple[Block, ...]:
            """The blocks of the attention mask for queries on some ranks and keys on others."""
            return documents.blocks(queries, keys, causal, band)

        if ranks == 1:
            return PackCore(heads=heads, blocks=mask_blocks(everyone, everyone))
        if self.exchange == "ring":
            ring = Ring(sizes=tokens.sizes, member=self.member, group=self.group)
            return RingCore(
                heads=heads, ring=ring, blocks=lambda source: mask_blocks((self.member,), (source,))
            )
        if self.exchange == "gather":
            order, back = self._row_order(everyone, device)
            return GatheredCore(
                heads=heads,
                sizes=tokens.sizes,
                group=self.group,
                blocks=mask_blocks((self.member,), everyone),
                order=order,
                back=back,
            )
        return self._switched_core(heads, mask_blocks, device)

    def _switched_core(
        self,
        heads: Heads,
        mask_blocks: Callable[[Members, Members], tuple[Block, ...]],
        device: torch.device,
    ) -> Core:
        """The core that switches from all heads of a rank's tokens to some heads of all tokens of
        its block of ranks (Ulysses), with a ring across the blocks where there are several (2d).
        ``mask_blocks(queries, keys)`` gives the blocks of the attention mask for queries and keys
        on these ranks."""
        tokens, ranks = self.tokens, self.tokens.ranks
        everyone = tuple(range(ranks))
        mesh = RankBlocks(ranks=ranks, inner=self._block_size(heads))
        block = mesh.blocks[self.member // mesh.inner]
        sizes = tuple(tokens.sizes[m] for m in block)
        order, back = self._row_order(block, device)
        # This one is made only to learn ``inner``, the heads of this rank after the switch, which
        # the inner core needs before the core to return can be made.
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
            core: Core = PackCore(heads=inner, blocks=mask_blocks(everyone, everyone))
        else:
            ring = Ring(
                sizes=[sum(tokens.sizes[m] for m in members) for members in mesh.blocks],
                member=self.member // mesh.inner,
                group=self.subgroup(mesh.rings[self.member % mesh.inner]),
            )
            core = RingCore(
                heads=inner,
                ring=ring,
                blocks=lambda source: mask_blocks(block, mesh.blocks[source]),
            )
        return SwitchedCore(
            heads=heads,
            core=core,
            sizes=sizes,
            member=switched.member,
            group=switched.group,
            order=order,
            back=back,
        )

    def _block_size(self, heads: Heads) -> int:
        """The number of ranks in a block, within which heads are exchanged for tokens: all for
        ``ulysses``; for ``2d`` the largest divisor of the number of ranks that divides the number
        of key heads, or else that of query heads. Raises SpecError where there is none."""
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

    def _row_order(
        self, members: Members, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(order, back), both int64 [tokens of the members]: indices that bring tokens gathered
        rank by rank into the order of the row, and the inverse; (None, None) where they lie in
        order."""
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
    if not rows or not width:
        raise DataError(f"input {tokens}", got=f"[{rows}, {width}]", wanted="a token or more")
    for name, value in batch.items():
        shared = name == "position_ids" and tuple(value.shape) == (1, width)  # by all rows
        if tuple(value.shape[:2]) != (rows, width) and not shared:
            raise DataError(
                f"input {name}",
                got=f"{list(value.shape)}",
                wanted=f"[{rows}, {width}, ...]",
                hint="inputs have one value for each token; others are for the model itself",
            )


def require_documents(batch: Mapping[str, torch.Tensor], what: str = "the batch") -> None:
    """Raise DataError for position ids that skip or repeat within a row, as such a document cannot
    be told from two: a document goes on by one, and the next one goes back, or repeats the lowest
    of the row, at which documents of one token begin. Padding may have any."""
    places, mask = batch.get("position_ids"), batch.get("attention_mask")
    if places is None:
        return
    given = places.cpu().numpy()
    unmasked = np.ones(given.shape, dtype=bool)
    if mask is not None and mask.shape == places.shape:
        unmasked = mask.cpu().numpy() != 0
    lowest = np.where(unmasked, given, np.inf).min(axis=-1, keepdims=True)
    steps = np.diff(given, axis=-1)
    skips = (steps > 1) | ((steps == 0) & (given[..., 1:] != lowest))
    skips &= unmasked[..., 1:] & unmasked[..., :-1]
    if skips.any():
        at = tuple(np.argwhere(skips)[0].tolist())
        before, after = given[at], given[..., 1:][at]
        raise DataError(
            f"position_ids of {what}",
            got=f"{after} after {before}",
            wanted=f"{before + 1}, or 0 where another document begins",
            hint="tokens see each other within a document only, and documents are told by places "
            "that begin again: give one that begins elsewhere a row or an item of its own",
        )


def documents_of(batch: Mapping[str, torch.Tensor], tokens: str) -> tuple[tuple[int, ...], ...]:
    """The lengths in tokens of the documents of every row. A document starts where a position id is
    not one more than the one before; padding is a document of its own. Raises DataError for a mask
    that hides more than padding on either side of a row."""
    rows, width = batch[tokens].shape
    begins = np.zeros((rows, width), dtype=bool)  # whether a document begins at this token
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
        unmasked = mask.cpu().numpy() != 0
        change = unmasked[:, 1:] != unmasked[:, :-1]  # [b, S - 1]
        # Runs of ones in a row: those that begin after its first token, and one that begins there.
        runs = (unmasked[:, 1:] & change).sum(axis=1) + unmasked[:, 0]
        if (runs > 1).any():
            raise DataError(
                "attention_mask",
                got="ones on both sides of zeros",
                wanted="one run of ones in every row",
                hint="only padding is masked",
            )
        begins[:, 1:] |= change
    places = batch.get("position_ids")
    if places is not None:
        of_every_row = np.broadcast_to(places.cpu().numpy(), (rows, width))
        begins[:, 1:] |= np.diff(of_every_row, axis=1) != 1
    lengths = []
    for begins_of_row in begins:
        # Lengths are the differences of the beginnings, with the end of the row behind them.
        starts = np.flatnonzero(begins_of_row).tolist()
        lengths.append(tuple(np.diff([*starts, width]).tolist()))
    return tuple(lengths)


def declared_places(batch: Mapping[str, torch.Tensor]) -> np.ndarray | None:
    """The position ids [S] that all rows of the batch share, for models that take none and count
    tokens themselves; None where the batch has none. Raises DataError where rows differ."""
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
    """Cut a batch to this rank's tokens: (inputs [b, s_r, ...] by name, labels [b, s_r] or None).
    Its ``labels`` are already shifted to the places that predict them; the attention mask is left
    out. ``first`` is the position id of a row's first token, None for models without position ids;
    where the batch has none, they are counted from there."""
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
    """A hash of what the ranks of a group must have in common: the tensors of a batch and ``extra``
    values. Of tensors on a device only two checksums each are read, in one copy for all."""
    digest = hashlib.blake2b(repr([sorted(batch), *extra]).encode(), digest_size=16)
    on_device = list[torch.Tensor]()  # checksums [2] of each tensor that is not in host memory
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
"""Bytes of a tensor that are converted to int64 at once, to bound memory."""


def bit_sums(x: torch.Tensor) -> torch.Tensor:
    """Two checksums of a tensor's bytes, int64 [2], computed on its device. Tensors that differ in
    their bytes or in the order of these have different checksums, but for a chance of about 1 in
    2^60."""
    octets = x.contiguous().reshape(-1).view(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=x.device)
    for start in range(0, len(octets), _SUMMED):
        chunk = octets[start : start + _SUMMED].to(torch.int64) + 1  # zero bytes count, too
        index = torch.arange(start, start + len(chunk), device=x.device)
        for which, factor in enumerate((0x9E3779B97F4A7C1, 0xBF58476D1CE4E5B)):
            # Each byte is weighted by a hash of its index: multiply and xor-shift (splitmix64).
            mixed = (index + 1) * factor
            mixed = (mixed ^ (mixed >> 29)) * factor
            sums[which] += (chunk * (mixed ^ (mixed >> 32))).sum()
    return sums
