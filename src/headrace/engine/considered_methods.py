"""Which methods a run considers, and on which group sizes."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config.model import PlannerConfig
from headrace.costs import group_sizes_of
from headrace.engine.plans import listed_methods
from headrace.errors import ConfigError
from headrace.spec.architecture import Architecture
from headrace.spec.known_methods import (
    SINGLE_RANK,
    automatic_methods,
    facts_of,
    methods_for,
)
from headrace.spec.layer_plan import BRANCHES, Branch, LayerOption
from headrace.spec.strategy import Strategy

__all__ = ["considered", "methods_by_size"]

_Names = Mapping[Branch, set[str]]
"""The names of the methods that are considered for each branch."""


def considered(
    options: PlannerConfig, a: Architecture, ranks: int, *, gpu: bool = False
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The group sizes and the names of the methods that a run on ``ranks`` ranks has to measure,
    for the architecture ``a``; ``gpu`` says whether the ranks are GPUs.

    Where the configuration fixes methods, a size must be able to run all of them, else at least one
    for each branch. Raises SpecError for an unknown method, ConfigError when no group of more than
    one rank can run what is fixed.
    """
    listed = listed_methods(options)
    names = _methods_in(listed) if listed else _possible_methods(options, gpu=gpu)
    methods = tuple(sorted(set().union(*names.values())))
    if methods == (SINGLE_RANK,):
        return (1,), methods
    wanted = _sizes(options, ranks)
    broken_by_size = {p: _broken_rules(names, a, p, fixed=bool(listed)) for p in wanted}
    sizes = (1, *(p for p, broken in broken_by_size.items() if not broken))
    if broken_by_size and len(sizes) == 1:  # larger groups were wanted, and none can run
        smallest = min(broken_by_size)
        would_do = dict.fromkeys(n for part in BRANCHES for n in methods_for(a, smallest, part))
        raise ConfigError(
            "planner.methods",
            got=", ".join(listed or methods),
            wanted=broken_by_size[smallest][0],
            hint=f"on groups of {smallest} these would do: {', '.join(would_do)}",
        )
    return sizes, methods


def _sizes(options: PlannerConfig, ranks: int) -> tuple[int, ...]:
    """The group sizes of two ranks and more that plans may use, in ascending order: those that the
    configuration names, else the widths of the schemes in its strategies, else those that are
    worth measuring on so many ranks."""
    named = set(options.group_sizes)
    if not named:
        for text in options.strategies:
            named |= {scheme.width for scheme, _ in Strategy.parse(text).counts}
    sizes = sorted(named) if named else group_sizes_of(ranks)
    return tuple(p for p in sizes if 1 < p <= ranks)


def methods_by_size(names: tuple[str, ...], a: Architecture, ranks: int) -> dict[int, list[str]]:
    """For every group size up to ``ranks`` those methods of ``names`` that can run both branches of
    a layer of the architecture ``a`` on it, without the sizes that have none. A single rank always
    has the method of one rank."""
    found = {
        p: [name for name in names if facts_of(name).supports(a, p) is None]
        for p in range(2, ranks + 1)
    }
    return {1: [SINGLE_RANK]} | {p: some for p, some in found.items() if some}


def _possible_methods(options: PlannerConfig, *, gpu: bool) -> _Names:
    """The methods that the planner may use in either branch: the configured candidates, or those
    that are fit for the device."""
    names = options.candidates or automatic_methods(gpu=gpu)
    found = {facts_of(name).name for name in names}
    return {part: found for part in BRANCHES}


def _methods_in(texts: tuple[str, ...]) -> _Names:
    """The attention and feed-forward methods in texts such as ``ulysses+full``; raises SpecError
    for an unknown one."""
    layers = [LayerOption.parse(text) for text in texts]
    for option in layers:  # facts_of raises for a name that it does not know
        facts_of(option.attention), facts_of(option.feed_forward)
    return {
        "attention": {option.attention for option in layers},
        "feed_forward": {option.feed_forward for option in layers},
    }


def _broken_rules(names: _Names, a: Architecture, p: int, *, fixed: bool) -> list[str]:
    """Texts of the methods' rules that a group of ``p`` ranks breaks and that keep it from running
    the architecture ``a``; empty where it can run it. Where methods are ``fixed`` it must run all
    methods in ``names``, else at least one for each branch."""
    broken: list[str] = []
    for branch, methods in names.items():
        # A rule is None where it holds, and else says what is broken.
        rules = (facts_of(name).rule(branch, a, p) for name in sorted(methods))
        of_branch = [rule for rule in rules if rule]
        if of_branch and (fixed or len(of_branch) == len(methods)):
            broken += of_branch
    return broken
