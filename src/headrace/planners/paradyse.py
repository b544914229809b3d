"""ParaDySe's Algorithm 1 as printed: which layers take which strategy, by heuristic.

To compare with :mod:`headrace.planning.layer_choice`, which is exact where this is not. A
*strategy* is a layer option here. The algorithm, with its five optimizations:

    cache               a batch of the same sum(l^2) and sum(l) gets the same layers again
    pruning (line 1)    strategies that another beats in time and memory are dropped; the rest is
                        sorted from fast and large to slow and small
    early end (8)       the fastest everywhere, if it fits
    search (6 to 25)    each strategy everywhere if it fits; else its layers are replaced one by
                        one, from the front, by those of each slower strategy
    short circuit       what a layer plan needs is added up until it is too much
    smoothing (33)      the layers of the call before stay if they take at most 1 + gamma times
                        the seconds of the new ones, and still fit

What the paper leaves open, and how it is read:

* ``strategies`` is not set back for each k. So after the layers of P[i] have become P[i + 1], the
  next round mixes P[i + 1] with P[i + 2]: only neighbours mix, and never more than two at once.
  The optimum mixes up to three.
* After the break of line 10 the options are empty, and line 29 would replace the fastest plan by
  the thriftiest. The fastest is taken.
* When nothing fits, the thriftiest strategy is returned all the same (line 29); ``fits`` says so.
* What line 3 takes from the cache is not smoothed, as line 33 comes after line 31.
* Memories of layers are added. What a layer needs in passing is needed once, though: with the
  rule ``peak`` in place of ``sum`` the same search asks for the true peak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from headrace.costs import CostModel
from headrace.errors import SpecError
from headrace.spec import LayerOption, LayerPlan
from headrace.spec.plan import Working

__all__ = ["MemoryRule", "Selection", "StrategySelector"]

MemoryRule = Literal["sum", "peak"]

Strategies = list[LayerOption]
"""Layer options; as a layer plan those of the layers in order."""

_ROUNDING_BYTES = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The layers for one micro-batch, their seconds, and whether they fit by the rule."""

    layers: LayerPlan
    seconds: float
    fits: bool


@dataclass(slots=True, kw_only=True)
class StrategySelector:
    """Selects layers for micro-batches, one after the other. It keeps the cache and the layers of
    the call before.

    Args:
        costs: The model's costs.
        p: Ranks of the group.
        options: The layer options to choose from; all with costs when left out.
        working: How the group holds weights.
        gamma: The share of seconds that smoothing may lose; 0 for none.
        memory: What must stay within the device: the sum over all layers of what they keep and
            need in passing, as printed, or the peak.
    """

    costs: CostModel
    p: int
    options: Collection[LayerOption] | None = None
    working: Working = "replicated"
    gamma: float = 0.0
    memory: MemoryRule = "sum"
    _selected: dict[tuple[int, int], Selection] = field(default_factory=dict, init=False)
    _before: LayerPlan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.memory not in get_args(MemoryRule):
            raise SpecError("memory rule", got=repr(self.memory), wanted="sum or peak")
        if self.gamma < 0:
            raise SpecError("gamma", got=self.gamma, wanted=">= 0")

    def select(self, lengths: Iterable[int]) -> Selection:
        """The layers for a micro-batch of ``lengths``."""
        pack = tuple(lengths)
        key = sum(n * n for n in pack), sum(pack)
        if key not in self._selected:
            self._selected[key] = self._searched(pack)
            found = self._smoothed(pack, self._selected[key])
        else:
            found = self._selected[key]
        self._before = found.layers
        return found

    def strategies(self, lengths: Iterable[int]) -> Strategies:
        """Line 1: the options that no other beats in time and memory, fastest first."""
        pack = tuple(lengths)
        tokens = sum(pack)
        rated = []
        for text, cost in self.costs.options[self.p].items():
            option = LayerOption.parse(text)
            if self.options is not None and option not in self.options:
                continue
            seconds = sum(self.costs.layer_seconds(pack, self.p, option, self.working))
            rated.append((seconds, cost.kept(tokens) + cost.transient(tokens), option))
        left: Strategies = []
        least = float("inf")
        for _, held, option in sorted(rated):
            if held < least:
                left.append(option)
                least = held
        return left

    def _searched(self, pack: tuple[int, ...]) -> Selection:
        """The quickest choice of layers that fits: lines 5 to 30."""
        strategies = self.strategies(pack)
        fastest = self._selection(pack, strategies[:1] * self._layers)
        if fastest.fits:
            return fastest
        options = [self._selection(pack, chosen) for chosen in self._tried(pack, strategies)]
        if options:
            return min(options, key=lambda selection: selection.seconds)
        return self._selection(pack, strategies[-1:] * self._layers)

    def _tried(self, pack: tuple[int, ...], sorted_strategies: Strategies) -> Iterator[Strategies]:
        """Lines 6 to 25: the lists that fit."""
        for i, first in enumerate(sorted_strategies):
            strategies = [first] * self._layers
            if self._fits(pack, strategies):
                yield list(strategies)
                continue
            for other in sorted_strategies[i + 1 :]:
                for _ in range(self._layers):
                    strategies.pop(0)
                    strategies.append(other)
                    if self._fits(pack, strategies):
                        yield list(strategies)

    def _smoothed(self, pack: tuple[int, ...], best: Selection) -> Selection:
        """The layers of the step before, where they are nearly as quick: line 33."""
        if self._before is None or self.gamma == 0:
            return best
        before = self._selection(pack, list(self._before.options))
        near = before.seconds <= (1 + self.gamma) * best.seconds
        return before if before.fits and near else best

    @property
    def _layers(self) -> int:
        """How many layers the model has."""
        return self.costs.shape.layers

    def _selection(self, pack: tuple[int, ...], strategies: Strategies) -> Selection:
        """A layer plan, the strategy of each layer in order, for a micro-batch of these lengths."""
        layers = LayerPlan(options=tuple(strategies))
        seconds = sum(self.costs.micro_batch_s(pack, self.p, layers, self.working))
        return Selection(layers=layers, seconds=seconds, fits=self._fits(pack, strategies))

    def _fits(self, pack: tuple[int, ...], strategies: Strategies) -> bool:
        """Whether a micro-batch of these lengths fits with the strategy of each layer in order, by
        the memory rule."""
        costs, tokens = self.costs, sum(pack)
        if self.memory == "peak":
            layers = LayerPlan(options=tuple(strategies))
            needed = costs.micro_batch_bytes(tokens, self.p, layers, self.working)
            return needed <= costs.capacity_bytes
        ends = costs.ends[self.p]
        room = costs.capacity_bytes - costs.state_bytes
        room -= costs.held_bytes({self.p}, self.working)
        left = room - ends.kept(tokens) - ends.transient(tokens)
        for option in strategies:
            if left < -_ROUNDING_BYTES:
                return False
            cost = costs.option(self.p, option)
            left -= cost.kept(tokens) + cost.transient(tokens)
        return left >= -_ROUNDING_BYTES
