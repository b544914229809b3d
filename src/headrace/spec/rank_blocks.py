"""Groups of ranks as blocks of neighbours, for methods over two mesh axes."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.spec.architecture import Architecture
from headrace.spec.method_facts import Members

__all__ = ["RankBlocks", "largest_divisor", "tensor_blocks", "ulysses_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlocks:
    """R ranks as blocks of ``inner`` neighbours, for methods over two mesh axes."""

    ranks: int
    inner: int

    @property
    def blocks(self) -> tuple[Members, ...]:
        """The members of each block."""
        return tuple(
            tuple(range(start, start + self.inner)) for start in range(0, self.ranks, self.inner)
        )

    @property
    def rings(self) -> tuple[Members, ...]:
        """The members with the same place in all blocks."""
        return tuple(tuple(range(place, self.ranks, self.inner)) for place in range(self.inner))


def largest_divisor(ranks: int, most: int) -> int | None:
    """The largest proper divisor of ``ranks`` above one and at most ``most``."""
    return next((d for d in range(min(most, ranks - 1), 1, -1) if ranks % d == 0), None)


def ulysses_blocks(a: Architecture, ranks: int, tensor: int = 1) -> RankBlocks | None:
    """Blocks that exchange heads: of the most ranks that divide the group and have a key-value
    head each, or else a query head; None where there are none."""
    inner = largest_divisor(ranks, a.kv_heads) or largest_divisor(ranks, a.heads)
    return None if inner is None else RankBlocks(ranks=ranks, inner=inner)


def tensor_blocks(a: Architecture, ranks: int, tensor: int = 1) -> RankBlocks | None:
    """Blocks that share a layer's weights: of the ``tensor`` ranks that hold them together, else
    of the most ranks that divide the group; None where a rank would have no shard."""
    most = a.tensor_ranks
    inner = largest_divisor(ranks, most) if tensor == 1 else tensor if tensor <= most else None
    return None if inner is None else RankBlocks(ranks=ranks, inner=inner)
