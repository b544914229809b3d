"""Costs of forwards alone: log-probabilities, values and scores, where nothing is trained.

Beside the costs of a step they have no backward and no exchange of gradients, and a layer keeps
nothing when it has run. So groups hold longer packs, and nothing is computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from headrace.costs.cost_model import CostModel, OptionCost
from headrace.costs.quadratic import Linear, Quadratic
from headrace.spec.layer_plan import LayerOption

__all__ = ["forward_costs"]


def forward_costs(costs: CostModel) -> CostModel:
    """Derive the costs of forwards without gradients from those of training steps.

    A layer needs the least bytes that any of its recompute levels needs while one layer runs, as
    its forward is the same at all levels. The ends of the model keep their bytes, as the logits are
    the result. Options with recompute stay listed, for configurations that allow no others; where
    weights are held sharded their costs still count a second fetch.

    Args:
        costs: Seconds and bytes of steps.

    Returns:
        The costs of the same model on the same devices, of forwards alone.
    """
    return costs.replace(
        options={p: _forwards(options) for p, options in costs.options.items()},
        ends={p: replace(ends, backward=Quadratic()) for p, ends in costs.ends.items()},
        exchange_s=replace(costs.exchange_s, push_s=0.0, update_s=0.0),
        gather_s={p: (forward, 0.0) for p, (forward, _) in costs.gather_s.items()},
    )


def _forwards(options: Mapping[str, OptionCost]) -> dict[str, OptionCost]:
    """The costs of forwards alone for the layer options of one group size, by the option's text.
    Nothing is kept; ``transient`` is the least over the recompute levels of the same methods."""
    # By methods, the bytes that a layer needs at each recompute level.
    levels: defaultdict[LayerOption, list[Linear]] = defaultdict(list)
    for text, cost in options.items():
        levels[_without_level(text)].append(_at_work(cost))
    return {
        text: replace(
            cost,
            backward=Quadratic(),
            kept=Linear(),
            transient=min(
                levels[_without_level(text)], key=lambda line: (line.slope, line.constant)
            ),
        )
        for text, cost in options.items()
    }


def _without_level(text: str) -> LayerOption:
    """The layer option of a text, with its recompute level set to ``none``."""
    return replace(LayerOption.parse(text), recompute="none")


def _at_work(cost: OptionCost) -> Linear:
    """Bytes of one layer while it runs, as a line over tokens: what it keeps and what it needs in
    passing."""
    return Linear(
        slope=cost.kept.slope + cost.transient.slope,
        constant=cost.kept.constant + cost.transient.constant,
    )
