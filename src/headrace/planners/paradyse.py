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
    # The cache: what was selected for each (sum(l^2), sum(l)).
    _selected: dict[tuple[int, int], Selection] = field(default_factory=dict, init=False)
    _before: LayerPlan | None = field(default=None, init=False)  # the layers of the call before

    def __post_init__(self) -> None:
        """Raise SpecError for another memory rule and for a negative gamma."""
        if self.memory not in get_args(MemoryRule):
            raise SpecError("memory rule", got=repr(self.memory), wanted="sum or peak")
        if self.gamma < 0:
            raise SpecError("gamma", got=self.gamma, wanted=">= 0")

    def select(self, lengths: Iterable[int]) -> Selection:
        """The layers for a micro-batch of sequences of ``lengths`` tokens: from the cache where a
        batch of the same sums had its layers chosen, else searched and smoothed."""
        pack = tuple(lengths)
        key = sum(length * length for length in pack), sum(pack)
        if key not in self._selected:
            self._selected[key] = self._searched(pack)
            selection = self._smoothed(pack, self._selected[key])
        else:  # not smoothed, as printed
            selection = self._selected[key]
        self._before = selection.layers
        return selection

    def strategies(self, lengths: Iterable[int]) -> Strategies:
        """Line 1 of the algorithm: the layer options that no other beats in both time and memory,
        fastest first."""
        pack = tuple(lengths)
        tokens = sum(pack)
        rated = []  # (seconds, bytes, option)
        for text, cost in self.costs.options[self.p].items():
            option = LayerOption.parse(text)
            if self.options is not None and option not in self.options:
                continue
            seconds = sum(self.costs.layer_seconds(pack, self.p, option, self.working))
            rated.append((seconds, cost.kept(tokens) + cost.transient(tokens), option))
        unbeaten: Strategies = []
        least_bytes = float("inf")
        for _, bytes_held, option in sorted(rated):
            if bytes_held < least_bytes:
                unbeaten.append(option)
                least_bytes = bytes_held
        return unbeaten

    def _searched(self, pack: tuple[int, ...]) -> Selection:
        """Lines 5 to 30: the quickest choice of layers that fits; the thriftiest where none
        does."""
        strategies = self.strategies(pack)
        fastest = self._selection(pack, strategies[:1] * self._layers)
        if fastest.fits:
            return fastest
        selections = [self._selection(pack, chosen) for chosen in self._tried(pack, strategies)]
        if selections:
            return min(selections, key=lambda selection: selection.seconds)
        return self._selection(pack, strategies[-1:] * self._layers)

    def _tried(self, pack: tuple[int, ...], sorted_strategies: Strategies) -> Iterator[Strategies]:
        """Lines 6 to 25: the lists of layer options, one for each layer, that are tried and fit;
        ``sorted_strategies`` are options, fastest first."""
        for i, first in enumerate(sorted_strategies):
            strategies = [first] * self._layers
            if self._fits(pack, strategies):
                yield list(strategies)
                continue
            for other in sorted_strategies[i + 1 :]:
                # Layers are replaced one by one. The next option goes on from where this one ends:
                # as printed, the list is not set back to ``first``.
                for _ in range(self._layers):
                    strategies.pop(0)
                    strategies.append(other)
                    if self._fits(pack, strategies):
                        yield list(strategies)

    def _smoothed(self, pack: tuple[int, ...], best: Selection) -> Selection:
        """Line 33: the layers of the call before, where they fit and take at most 1 + gamma times
        the seconds of ``best``; else ``best``."""
        if self._before is None or self.gamma == 0:
            return best
        before = self._selection(pack, list(self._before.options))
        close_enough = before.seconds <= (1 + self.gamma) * best.seconds
        return before if before.fits and close_enough else best

    @property
    def _layers(self) -> int:
        """How many layers the model has."""
        return self.costs.shape.layers

    def _selection(self, pack: tuple[int, ...], strategies: Strategies) -> Selection:
        """The selection that gives the layers, in order, these ``strategies``: seconds for a
        micro-batch of sequences of ``pack`` tokens, and whether it fits."""
        layers = LayerPlan(options=tuple(strategies))
        seconds = sum(self.costs.micro_batch_s(pack, self.p, layers, self.working))
        return Selection(layers=layers, seconds=seconds, fits=self._fits(pack, strategies))

    def _fits(self, pack: tuple[int, ...], strategies: Strategies) -> bool:
        """Whether a micro-batch of sequences of ``pack`` tokens fits into memory, by the selector's
        memory rule, if the layers in order have these ``strategies``."""
        costs, tokens = self.costs, sum(pack)
        if self.memory == "peak":
            layers = LayerPlan(options=tuple(strategies))
            needed = costs.micro_batch_bytes(tokens, self.p, layers, self.working)
            return needed <= costs.capacity_bytes
        # The rule ``sum`` adds up what all layers keep and what all need in passing.
        ends = costs.ends[self.p]
        room = costs.capacity_bytes - costs.state_bytes
        room -= costs.held_bytes({self.p}, self.working)
        free_bytes = room - ends.kept(tokens) - ends.transient(tokens)
        for option in strategies:
            if free_bytes < -_ROUNDING_BYTES:
                return False
            cost = costs.option(self.p, option)
            free_bytes -= cost.kept(tokens) + cost.transient(tokens)
        return free_bytes >= -_ROUNDING_BYTES
