"""Which layers of a run used what, in tokens that passed them (token-layers when summed)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headrace.report.records import Run, StepMetrics
from headrace.spec import LayerOption, LayerPlan

__all__ = ["LayerUse", "Span", "layer_use", "spans"]

_Methods = tuple[str, str]
"""(attention, feed-forward) of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUse:
    """What the layers of a run used.

    ``tokens[i][option]`` tokens passed layer i with ``option``. ``between_layers`` counts, over
    all micro-batches, neighbouring layers whose methods differ; ``between_steps`` counts the
    steps in which some layer ran other methods than in the step before. Recomputation is not part
    of the methods. Empty when the run did not write its layer plans.
    """

    tokens: tuple[Mapping[LayerOption, int], ...] = ()
    between_layers: int = 0
    between_steps: int = 0

    @property
    def shares(self) -> dict[LayerOption, float]:
        """The share of all token-layers of each option, the largest first."""
        sums: Counter[LayerOption] = Counter()
        for tokens in self.tokens:
            sums.update(tokens)
        total = sums.total() or 1
        return {option: count / total for option, count in _largest_first(sums)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Token-layers by option over the steps ``first`` to ``last``."""

    first: int
    last: int
    token_layers: Mapping[LayerOption, int]


def layer_use(run: Run) -> LayerUse:
    """Sum up which options the layers of a run used, and how often methods changed."""
    tokens, micro_batches = _tokens(run, run.steps), Counter[str]()
    for step in run.steps:
        micro_batches.update(micro.layers for micro in step.micro_batches)
    plans = {text: run.layer_plans[text] for text in tokens}
    depth = max((len(plan.options) for plan in plans.values()), default=0)
    layers: list[Counter[LayerOption]] = [Counter() for _ in range(depth)]
    for text, plan in plans.items():
        for sums, option in zip(layers, plan.options, strict=False):
            sums[option] += tokens[text]
    switches = sum(micro_batches[text] * _switches(plan) for text, plan in plans.items())
    return LayerUse(
        tokens=tuple(layers), between_layers=switches, between_steps=_changed_steps(run)
    )


def spans(run: Run, limit: int) -> list[Span]:
    """The token-layers of each step; where there are more than ``limit`` steps, of ``limit`` spans
    of about equally many neighbouring steps."""
    edges = np.linspace(0, len(run.steps), min(limit, len(run.steps)) + 1).astype(int)
    result = []
    for low, high in pairwise(edges):
        steps, sums = run.steps[low:high], Counter[LayerOption]()
        for text, tokens in _tokens(run, steps).items():
            for option, layers in run.layer_plans[text].counts:
                sums[option] += layers * tokens
        result.append(Span(first=steps[0].step, last=steps[-1].step, token_layers=dict(sums)))
    return result


def _tokens(run: Run, steps: Sequence[StepMetrics]) -> Counter[str]:
    """The tokens of these steps by the text of the layer plan that they ran with. Micro-batches
    whose layer plan the run did not write are left out."""
    tokens: Counter[str] = Counter()
    for step in steps:
        for micro in step.micro_batches:
            if micro.tokens and micro.layers in run.layer_plans:
                tokens[micro.layers] += micro.tokens
    return tokens


def _largest_first(sums: Counter[LayerOption]) -> list[tuple[LayerOption, int]]:
    """Pairs (option, count), the largest count first; equal ones in the order of options, so that a
    report is reproducible."""
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))


def _switches(plan: LayerPlan) -> int:
    """How many layers run other methods than the layer before."""
    return sum(_methods(a) != _methods(b) for a, b in pairwise(plan.options))


def _methods(option: LayerOption) -> _Methods:
    """The methods of an option, without its recompute level."""
    return option.attention, option.feed_forward


def _changed_steps(run: Run) -> int:
    """The number of steps whose layers ran other methods than in the step before. Steps that say
    nothing of their layers are left out."""
    # The methods of each layer by the texts of a step's layer plans: steps mostly repeat them.
    known: dict[frozenset[str], tuple[frozenset[_Methods], ...]] = {}
    ran = []  # the methods of each layer, by step
    for step in run.steps:
        texts = frozenset(m.layers for m in step.micro_batches if m.layers in run.layer_plans)
        if texts:
            if texts not in known:
                known[texts] = _by_layer([run.layer_plans[text] for text in texts])
            ran.append(known[texts])
    return sum(a != b for a, b in pairwise(ran))


def _by_layer(plans: Iterable[LayerPlan]) -> tuple[frozenset[_Methods], ...]:
    """The set of methods that each layer runs with in some of the plans, which may have different
    numbers of layers."""
    sets: list[set[_Methods]] = []
    for plan in plans:
        sets += [set() for _ in range(len(plan.options) - len(sets))]
        for methods, option in zip(sets, plan.options, strict=False):
            methods.add(_methods(option))
    return tuple(map(frozenset, sets))
