"""ParaDySe's models on its node, and what trains a sequence there: one method, a mixture, a plan.

Seconds are of one step with one sequence: its layers, the ends of the model, and the update. A
node's eight ranks hold weights sharded over all of them, as the strategies of the paper do, so
weights lie where they are used and are neither pulled nor pushed. Plans may hold them otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

import headrace as hr
from headrace.costs import CostModel, Linear, OptionCost, roofline_costs
from headrace.costs.sources.formulas import layer_elements
from headrace.costs.sources.roofline import speeds_of
from headrace.data.distributions import Bins
from headrace.data.drawn_lengths import PRESETS as LAWS
from headrace.errors import InfeasiblePlan
from headrace.planners.paradyse import MemoryRule, StrategySelector
from headrace.planning.layer_choice import layer_frontier
from headrace.planning.priced import Frontier
from headrace.spec import Architecture, LayerOption, LayerPlan
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import Implementation

__all__ = [
    "COLOSSAL_Z",
    "DATA",
    "DEVICES",
    "METHODS",
    "MODELS",
    "Node",
    "Trained",
    "lengths_of",
    "longest_of",
]

HARDWARE, DEVICES = Hardware.parse("a100-80g"), 8
KERNELS = Implementation.named("eager")
"""The paper's software is PyTorch 2.5.1 with FlashAttention-2."""

MODELS = {"BERT": "paradyse-bert", "LLaMA": "paradyse-llama", "GPT": "paradyse-gpt"}
DATA = {"GitHubCode": "github-code", "GRCh38": "grch38-3mer"}
METHODS = {
    "MegatronTS": "megatron_ts",
    "MegatronCZ": "megatron_cz",
    "UlyssesZ": "ulysses_z",
    "METP": "metp",
}
"""The strategies of the paper's experiments, by the names that they have there."""

COLOSSAL_Z = "colossal_z"

_SCORES_FORWARD, _SCORES_BACKWARD = 4, 6
"""How often the scores are written or read: by the product, the softmax (twice) and the product
with the values; their gradient written, read with them, written, and read by two products, and the
scores read for the values' gradient."""

_SCORES_IN_PASSING = 2
"""Scores that are alive beside those that are kept: those before the softmax, or two gradients."""

_CORE = 1 + 2.5
"""Attention's products forward and backward, over those forward."""

Seconds = Callable[[int], float | None]
"""Seconds of a step with one sequence of so many tokens; None where it does not fit."""


def lengths_of(data: str, count: int) -> tuple[int, ...]:
    """So many lengths of a data set by its table, shortest first as the paper's curriculum has
    them: quantiles at even distances."""
    law = _law(data)
    borders = np.cumsum([0.0, *law.shares]) / sum(law.shares)
    quantiles = (np.arange(count) + 0.5) / count
    found = np.exp(np.interp(quantiles, borders, np.log(law.edges))).astype(int)
    return tuple(int(tokens) for tokens in found)


def longest_of(data: str) -> int:
    """Tokens of the longest sequence of a data set."""
    return _law(data).longest


def _law(data: str) -> Bins:
    law = LAWS[DATA[data]]
    assert isinstance(law, Bins), "the paper gives a table of both"
    return law


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What trains a data set.

    Attributes:
        lengths: Tokens of its sequences, shortest first.
        seconds: Of each sequence; None where it does not fit.
        longest: The most tokens of a sequence that fits.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float | None, ...]
    longest: int

    def until(self, tokens: float) -> float:
        """Seconds of all sequences of at most so many tokens, which must fit."""
        pairs = zip(self.lengths, self.seconds, strict=True)
        found = [each for length, each in pairs if length <= tokens]
        return sum(inf if each is None else each for each in found)

    def saved(self, other: Trained) -> float:
        """The share of the other's seconds that this one saves, of what both train."""
        most = min(self.longest, other.longest)
        return 1 - self.until(most) / other.until(most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of the paper's models on a node of eight A100s.

    Attributes:
        model: Its name in the paper.
        architecture: The model as it is priced.
        costs: The roofline of the node.
        problem: All that headrace's planner may choose: the size of the group, the method of each
            branch of each layer, and its recompute level.
    """

    model: str
    architecture: Architecture
    costs: CostModel
    problem: hr.Problem

    @classmethod
    def of(cls, model: str, *, positions: bool = False) -> Node:
        """A model of the paper, with ``positions`` or without.

        The published code has no positions, so that no sequence is too long for the model and no
        memory goes to a vector for each; and all its models see the tokens on both sides.
        """
        preset = Architecture.preset(MODELS[model])
        kept = preset.positions if positions else min(1, preset.positions)
        architecture = replace(preset, causal=False, positions=kept)
        costs = roofline_costs(
            HARDWARE,
            DEVICES,
            architecture,
            implementation=KERNELS,
            methods=tuple(METHODS.values()),
        )
        if not positions:
            costs = costs.replace(shape=replace(costs.shape, longest=None))
        return cls(
            model=model, architecture=architecture, costs=costs, problem=hr.Problem(costs=costs)
        )

    def step_s(self, tokens: int, layers: LayerPlan, costs: CostModel | None = None) -> float:
        """Seconds of a step with these layers, whatever its memory."""
        costs = costs or self.costs
        layers_s = sum(costs.micro_batch_s([tokens], DEVICES, layers, "sharded"))
        return layers_s + costs.exchange_s.update_s

    def uniform(self, method: str) -> LayerPlan:
        """All layers by one method, nothing recomputed."""
        return LayerPlan.uniform(LayerOption.of(method), self.costs.shape.layers)

    def by_method(self, method: str) -> Seconds:
        """One method for all layers."""
        layers, most = self.uniform(method), self.longest_by(method)
        return lambda tokens: self.step_s(tokens, layers) if tokens <= most else None

    def longest_by(self, method: str) -> int:
        """The longest sequence of one method, by its memory."""
        return self.costs.max_tokens(DEVICES, self.uniform(method), "sharded")

    def frontier(self, methods: Iterable[str]) -> Frontier:
        """The mixtures of some methods that are worth having."""
        options = [LayerOption.of(method) for method in methods]
        return layer_frontier(self.costs, DEVICES, "sharded", options=options)

    def exact(self, methods: Iterable[str] = tuple(METHODS.values())) -> Seconds:
        """The quickest mixture of some methods that fits."""
        frontier = self.frontier(methods)

        def seconds(tokens: int) -> float | None:
            found = frontier.best(tokens * tokens, tokens)
            return None if found is None else self.step_s(tokens, frontier.layer_plan(found[1]))

        return seconds

    def longest_exact(self, methods: Iterable[str] = tuple(METHODS.values())) -> int:
        """The longest sequence of any mixture of some methods."""
        return self.frontier(methods).most_tokens

    def selector(self, memory: MemoryRule, gamma: float = 0.0) -> StrategySelector:
        """Algorithm 1 with one rule of memory and some smoothing."""
        return StrategySelector(
            costs=self.costs,
            p=DEVICES,
            options=[LayerOption.of(method) for method in METHODS.values()],
            working="sharded",
            memory=memory,
            gamma=gamma,
        )

    def algorithm_1(self, memory: MemoryRule) -> Seconds:
        """Algorithm 1, which runs the thriftiest method where it finds that nothing fits: wrongly
        by the sum, so whether that fits is asked of the peak."""
        selector = self.selector(memory)

        def seconds(tokens: int) -> float | None:
            layers = selector.select([tokens]).layers
            needed = self.costs.micro_batch_bytes(tokens, DEVICES, layers, "sharded")
            return self.step_s(tokens, layers) if needed <= self.costs.capacity_bytes else None

        return seconds

    def planned(self) -> Seconds:
        """The plan of each sequence."""

        def seconds(tokens: int) -> float | None:
            try:
                return hr.plan([tokens], self.problem).predicted_s
            except InfeasiblePlan:
                return None

        return seconds

    def longest_planned(self, methods: Sequence[str] | None = None) -> int:
        """The longest sequence that a plan holds, with all methods or some."""
        allowed = None if methods is None else ("local", *methods)
        problem = self.problem.replace(methods=allowed)
        groups = [problem.pricing.groups(weights) for weights in problem.holding]
        return max(scheme.most_tokens for held in groups for scheme in held)

    def with_colossal_z(self, tokens: int) -> CostModel:
        """The costs of one sequence of so many tokens with the fifth strategy.

        Its scores are kept, n l^2 / p elements, which no line over the tokens can say; for one
        length they are a constant. Everything else is as of ``megatron_cz``, whose ring it has.
        """
        a, costs = self.architecture, self.costs
        speeds = speeds_of(HARDWARE, implementation=KERNELS)
        ring = costs.option(DEVICES, LayerOption.of("megatron_cz"))
        scores = a.heads * speeds.element_bytes / DEVICES  # bytes for a squared token
        products_s = 4 * a.hidden / DEVICES / speeds.flops_per_s
        touched_s = scores / speeds.touched_bytes_per_s
        own = OptionCost(
            forward=replace(ring.forward, a=products_s + _SCORES_FORWARD * touched_s),
            backward=replace(ring.backward, a=2 * products_s + _SCORES_BACKWARD * touched_s),
            kept=_more(ring.kept, scores * tokens**2),
            transient=_more(ring.transient, _SCORES_IN_PASSING * scores * tokens**2),
            order="natural",
            fetched=ring.fetched,
        )
        known = {**costs.options[DEVICES], COLOSSAL_Z: own}
        return costs.replace(options={**costs.options, DEVICES: known})

    def fits_colossal_z(self, tokens: int) -> bool:
        """Whether the fifth strategy holds a sequence in all layers."""
        costs = self.with_colossal_z(tokens)
        needed = costs.micro_batch_bytes(tokens, DEVICES, self.uniform(COLOSSAL_Z), "sharded")
        return needed <= costs.capacity_bytes

    def by_colossal_z(self, tokens: int) -> float | None:
        """The fifth strategy in all layers."""
        if not self.fits_colossal_z(tokens):
            return None
        return self.step_s(tokens, self.uniform(COLOSSAL_Z), self.with_colossal_z(tokens))

    def longest_by_colossal_z(self) -> int:
        """The longest sequence of the fifth strategy, by halving."""
        fits, beyond = 1, self.longest_by("megatron_cz") + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if self.fits_colossal_z(middle) else (fits, middle)
        return fits

    def quickest_with_colossal_z(self, tokens: int) -> LayerPlan | None:
        """The quickest mixture of all five strategies for one sequence."""
        options = [LayerOption.of(method) for method in (*METHODS.values(), COLOSSAL_Z)]
        costs = self.with_colossal_z(tokens)
        frontier = layer_frontier(costs, DEVICES, "sharded", options=options)
        found = frontier.best(tokens * tokens, tokens)
        return None if found is None else frontier.layer_plan(found[1])

    def trained(self, lengths: Sequence[int], seconds: Seconds, longest: int) -> Trained:
        """A data set by one way to train it."""
        return Trained(
            lengths=tuple(lengths),
            seconds=tuple(seconds(tokens) for tokens in lengths),
            longest=longest,
        )

    def singles(self, lengths: Sequence[int]) -> Mapping[str, Trained]:
        """A data set by each of the four methods alone."""
        return {
            name: self.trained(lengths, self.by_method(method), self.longest_by(method))
            for name, method in METHODS.items()
        }

    def products_s(self, tokens: int) -> float:
        """Seconds of the matrix products and the attention alone, evenly on all ranks: no plan that
        runs such kernels is quicker."""
        a, speeds = self.architecture, speeds_of(HARDWARE, implementation=KERNELS)
        head = a.hidden * (a.vocabulary + (a.hidden if a.masked else 0)) * a.head_share
        elements = a.layers * layer_elements(a) + head
        linear_s = 3 * 2 * elements * tokens / speeds.flops_per_s
        core_flops = _CORE * a.layers * 4 * a.hidden * tokens**2
        return (linear_s + core_flops / speeds.core_flops_per_s) / DEVICES


def _more(line: Linear, constant: float) -> Linear:
    return Linear(slope=line.slope, constant=line.constant + constant)
