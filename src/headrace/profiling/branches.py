"""Targets of measurement in a native model: the branches of its layers, and its ends.

Attention is measured for every method, a feed-forward that several methods share once, a level
that changes nothing not again, and the level ``full`` never: it follows from ``none``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.errors import SpecError
from headrace.profiling.sweep import SweepOptions
from headrace.spec.architecture import Architecture
from headrace.spec.known_methods import FACTS, SINGLE_RANK, automatic_methods, methods_for
from headrace.spec.layer_plan import RECOMPUTE, Branch, LayerOption, Recompute
from headrace.spec.plan import TokenOrder
from headrace.spec.profile import ENDS, ProfilePoint

__all__ = ["BranchTarget", "ProfileOptions", "targets", "with_equal_levels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to measure: group sizes, methods (those that a size supports), recompute levels, the
    longest pack in tokens.

    ``point_s``, ``repeats`` and ``lengths`` as in
    :class:`headrace.profiling.sweep.SweepOptions`.
    """

    sizes: tuple[int, ...]
    longest: int
    methods: tuple[str, ...] = automatic_methods()
    levels: tuple[Recompute, ...] = RECOMPUTE
    point_s: float = 1.0
    repeats: int = 2
    lengths: tuple[int, ...] = ()

    @property
    def sweep(self) -> SweepOptions:
        """On which packs to measure."""
        return SweepOptions(
            longest=self.longest, point_s=self.point_s, repeats=self.repeats, lengths=self.lengths
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTarget:
    """What one sweep measures: a branch of a method at a recompute level, or the ends (``part``
    None), on groups of ``p`` ranks."""

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
        """The text by which its profile points name it, such as ``attention:METHOD``."""
        return ENDS if self.part is None else f"{self.part}:{self.option}"

    def order(self, a: Architecture) -> TokenOrder:
        """The order of tokens to measure in: the method's own where contiguous parts would give
        ranks uneven work, which is causal attention on several ranks; else the natural one."""
        uneven = self.p > 1 and self.part == "attention" and a.causal
        return FACTS[self.method].order if uneven else "natural"

    def fetched(self, a: Architecture) -> float:
        """The share of the weights' rows that a rank fetches where they are held sharded."""
        return FACTS[self.method].fetched(self.p, a.tensor_ranks)


def targets(a: Architecture, p: int, options: ProfileOptions) -> list[BranchTarget]:
    """The ends, the attention of every method, and every feed-forward once, on groups of p.

    Raises SpecError when the size is supported by none of the methods.
    """
    wanted = (SINGLE_RANK,) if p == 1 else options.methods
    attention_methods = [name for name in methods_for(a, p, "attention") if name in wanted]
    feed_forward_methods = [name for name in methods_for(a, p, "feed_forward") if name in wanted]
    owners = dict.fromkeys(FACTS[name].owner for name in feed_forward_methods)
    if not attention_methods or not owners:
        broken_rules = [FACTS[name].supports(a, p) for name in wanted]
        rules = "; ".join(rule for rule in broken_rules if rule is not None)
        raise SpecError(f"methods on groups of {p}", got=", ".join(wanted), wanted=rules)
    levels = [level for level in RECOMPUTE[:-1] if level in {"none", *options.levels}]
    methods_of_branch: tuple[tuple[Branch, list[str]], ...] = (
        ("attention", attention_methods),
        ("feed_forward", list(owners)),
    )
    ends = BranchTarget(p=p, part=None, method=attention_methods[0], level="none")
    return [ends] + [
        BranchTarget(p=p, part=part, method=name, level=level)
        for part, names in methods_of_branch
        for name in names
        for level in levels
        if level == "none" or part not in FACTS[name].unlevelled
    ]


def with_equal_levels(
    target: BranchTarget, points: list[ProfilePoint], options: ProfileOptions
) -> list[ProfilePoint]:
    """The points of a target, followed by copies of them as points of the level ``attention`` where
    its branch does the same at that level, which was not measured."""
    same = target.part is not None and target.part in FACTS[target.method].unlevelled
    if not same or "attention" not in {"none", *options.levels}:
        return points
    attention_level = replace(target, level="attention").text
    return points + [replace(point, option=attention_level) for point in points]
