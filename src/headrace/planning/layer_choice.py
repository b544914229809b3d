"""Which methods the layers of a micro-batch use and what they recompute.

Data        options o (attention method, feed-forward method, recompute level) with seconds t_o,
            kept bytes k_o and transient bytes x_o of one layer, all functions of the pack; L equal
            layers; capacity M.
Variables   n_o >= 0, layers that take option o, and the order of the layers.
Constraint  sum_o n_o = L; at every moment what is kept so far, what this layer keeps and what it
            needs in passing fit: max_i (sum_{j <= i} k_j + x_i) <= M, and likewise at the ends.
Objective   minimise sum_o n_o t_o.

Kept bytes add and transient ones do not (ParaDySe's Algorithm 1 adds both). Swapping two
neighbours so that the larger transient comes first never raises the peak, so the order is settled
by the counts, and equal options stand together. Which option has the larger transient may change
with the tokens of the pack; then every order of the options is tried.

Solved for all packs at once: the mixtures of at most three options make one frontier per group
size. It is exact for mixtures of three while no more than six thousand are to be tried and no more
than three hundred compared; beyond that :mod:`headrace.planning.mixtures` says what is tried and
:mod:`headrace.planning.priced` what is kept. Measured on one core with 45 options of 32 layers,
their costs made up but as uneven as measured ones (30 are not beaten by another): 0.04 to 0.1 s,
and over random packs 0.05 % slower on average than the best mixture of three, 1.3 % at worst.

Options are taken to cost what they cost wherever they stand: a change of method between two
layers moves nothing, and what is quickest in natural token order is hardly slower in zigzag.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headrace.costs import CostModel
from headrace.planning.mixtures import Table, mixed_frontier
from headrace.planning.priced import Frontier
from headrace.spec import LayerOption, LayerPlan
from headrace.spec.plan import Working

__all__ = ["best_layers", "layer_frontier", "layer_table"]


def best_layers(
    costs: CostModel, lengths: Iterable[int], p: int, working: Working = "replicated"
) -> LayerPlan | None:
    """The quickest layer plan for one micro-batch. Whoever asks often keeps the frontier instead.

    Args:
        costs: The model's costs.
        lengths: Tokens of the micro-batch's sequences.
        p: Ranks of the group.
        working: How the group holds weights.

    Returns:
        The layer plan; None when not even the thriftiest fits.
    """
    frontier, tokens = layer_frontier(costs, p, working), tuple(lengths)
    best = frontier.best(sum(length * length for length in tokens), sum(tokens))
    if best is None:
        return None
    _, row = best
    return frontier.layer_plan(row)


def layer_frontier(
    costs: CostModel,
    p: int,
    working: Working = "replicated",
    sizes: Collection[int] = (),
    options: Collection[LayerOption] | None = None,
) -> Frontier:
    """The layer plans worth having on one group size.

    Args:
        costs: The model's costs.
        p: Ranks of the group.
        working: How the group holds weights.
        sizes: Other group sizes in which the same ranks work in the step, and hold weights for.
        options: The layer options to choose from; all that have costs when left out.

    Returns:
        The frontier, in seconds and tokens of a micro-batch.
    """
    allowed = [
        option
        for option in map(LayerOption.parse, costs.options[p])
        if options is None or option in options
    ]
    return mixed_frontier(layer_table(costs, p, working, sizes, allowed), costs.shape.layers)


def layer_table(
    costs: CostModel,
    p: int,
    working: Working,
    sizes: Collection[int],
    options: Iterable[LayerOption],
) -> Table:
    """Seconds and bytes of layers with the given ``options`` on groups of ``p`` ranks, and the
    memory that is left beside the weights of this and all other ``sizes`` in which the ranks
    work."""
    room = costs.capacity_bytes - costs.state_bytes - costs.held_bytes({p, *sizes}, working)
    return Table.of(costs, p, working, tuple(options), room)
