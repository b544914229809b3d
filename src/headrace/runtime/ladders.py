"""Ladders: what is measured of a model, on which packs.

A ladder is one branch of one method at one recompute level, or the ends, on groups of one size;
its rungs are packs of growing length. Attention is measured for every method, a feed-forward that
several methods share once, a level that changes nothing not again, and the level ``full`` never: it
follows from ``none``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headrace.errors import SpecError
from headrace.spec.architecture import Architecture
from headrace.spec.known_methods import FACTS, SINGLE_RANK, methods_for
from headrace.spec.method import RECOMPUTE, Branch, LayerOption, Recompute
from headrace.spec.plan import TokenOrder
from headrace.spec.profile import ENDS, ProfilePoint

__all__ = ["Ladder", "ProfileOptions", "climb", "ladders", "with_twins"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to measure: group sizes, methods (those that a size supports), recompute levels, the
    longest pack in tokens.

    ``rung_s`` ends a ladder: no rung is climbed that is expected to take longer (seconds of one
    forward and backward of two layers). ``repeats`` timings per point, the least counts.
    """

    sizes: tuple[int, ...]
    longest: int
    methods: tuple[str, ...] = tuple(m.name for m in FACTS.values() if m.automatic)
    levels: tuple[Recompute, ...] = RECOMPUTE
    rung_s: float = 1.0
    repeats: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """One branch of one method and level, or the ends (``part`` None), on groups of p."""

    p: int
    part: Branch | None
    method: str
    level: Recompute

    @property
    def option(self) -> LayerOption:
        """The layer option whose branch is measured."""
        return LayerOption.of(self.method, self.level)

    @property
    def text(self) -> str:
        """The option text of its points."""
        return ENDS if self.part is None else f"{self.part}:{self.option}"

    def order(self, a: Architecture) -> TokenOrder:
        """How the tokens lie while it is measured: only causal work is uneven otherwise."""
        uneven = self.p > 1 and self.part == "attention" and a.causal
        return FACTS[self.method].order if uneven else "natural"

    def fetched(self, a: Architecture) -> float:
        """The share of the weights' rows that a rank fetches where they are held sharded."""
        return FACTS[self.method].fetched(self.p, a.tensor_ranks)


def ladders(a: Architecture, p: int, options: ProfileOptions) -> list[Ladder]:
    """The ends, the attention of every method, and every feed-forward once, on groups of p.

    Raises SpecError when the size is supported by none of the methods.
    """
    wanted = (SINGLE_RANK,) if p == 1 else options.methods
    attention = [n for n in methods_for(a, p, "attention") if n in wanted]
    feed = [n for n in methods_for(a, p, "feed_forward") if n in wanted]
    owners = dict.fromkeys(FACTS[name].owner for name in feed)
    if not attention or not owners:
        rules = "; ".join(
            rule for name in wanted if (rule := FACTS[name].supports(a, p)) is not None
        )
        raise SpecError(f"methods on groups of {p}", got=", ".join(wanted), wanted=rules)
    levels = [level for level in RECOMPUTE[:-1] if level in {"none", *options.levels}]
    parts: tuple[tuple[Branch, list[str]], ...] = (
        ("attention", attention), ("feed_forward", list(owners))
    )  # fmt: skip
    return [Ladder(p=p, part=None, method=attention[0], level="none")] + [
        Ladder(p=p, part=part, method=name, level=level)
        for part, names in parts for name in names for level in levels
        if level == "none" or part not in FACTS[name].unlevelled
    ]  # fmt: skip


def with_twins(
    ladder: Ladder, points: list[ProfilePoint], options: ProfileOptions
) -> list[ProfilePoint]:
    """The points of a ladder, and the same as those of level ``attention`` where its branch does
    the same there."""
    same = ladder.part is not None and ladder.part in FACTS[ladder.method].unlevelled
    if not same or "attention" not in {"none", *options.levels}:
        return points
    twin = replace(ladder, level="attention").text
    return points + [replace(point, option=twin) for point in points]


def _packs(p: int, longest: int) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Single documents of growing length, the first rungs also as packs of eight short ones;
    and whether to count bytes there."""
    length, rung = max(1, min(64 * p, longest // 16)), 0
    while length < longest:
        yield (length,), 2 <= rung < 5
        if 2 <= rung < 6 and length >= 16:
            yield (length // 8,) * 8, False
        length, rung = 2 * length, rung + 1
    yield (longest,), rung < 5


def climb(
    p: int, options: ProfileOptions,
    measured: Callable[[tuple[int, ...], bool], ProfilePoint | None],
) -> list[ProfilePoint]:  # fmt: skip
    """The points of a ladder: ``measured(pack, counting bytes)``, rung after rung until it
    answers None."""
    points = list[ProfilePoint]()
    counted, last_s, last_tokens = 0, 0.0, 1
    for lengths, counting in _packs(p, options.longest):
        growth = sum(lengths) / last_tokens
        slow = last_s * growth * max(1.0, growth) > options.rung_s
        if counted >= 2 and slow:
            break
        point = measured(lengths, counting)
        if point is None:
            break
        points.append(point)
        counted += counting
        last_s = 2 * (points[-1].forward_s + points[-1].backward_s)
        last_tokens = sum(lengths)
    return points
