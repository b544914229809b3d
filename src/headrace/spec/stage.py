"""Stages: the parts of a pipeline, each some layers on some of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import SpecError

__all__ = ["Stage", "share_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage ``index`` of ``count``: the layers [start, stop) of a model on ``ranks``.

    ``ranks`` rise: member m of the stage is ``ranks[m]``. The first stage embeds, the last one
    has the head.
    """

    index: int
    count: int
    ranks: tuple[int, ...]
    start: int
    stop: int

    @property
    def first(self) -> bool:
        """Whether it embeds."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it has the head and the loss."""
        return self.index == self.count - 1

    @property
    def buckets(self) -> tuple[int, ...]:
        """The weight buckets of its segments, in the order of the forward: 0 the embedding,
        i + 1 layer i, then what follows the last layer."""
        ends = 1 if self.last else 0
        return (0,) * self.first + tuple(range(self.start + 1, self.stop + 1 + ends))


def share_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as can be; what is left over goes to stages in the middle, as
    the first embeds and the last has the head. Raises SpecError for fewer layers than stages."""
    if layers < stages:
        raise SpecError(
            "stages of a pipeline",
            got=f"{stages} for {layers} layers",
            wanted="at least one layer in each",
        )
    each, left = divmod(layers, stages)
    # From the middle outwards; of two equally far the earlier, as the head is the heavier end.
    order = sorted(range(stages), key=lambda s: (abs(2 * s - (stages - 1)), s))
    extra = set(order[:left])
    return tuple(each + (stage in extra) for stage in range(stages))
