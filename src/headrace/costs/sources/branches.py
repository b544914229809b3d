"""Costs of whole layers from those of their two branches.

Attention and feed-forward are measured apart, each method and level once, and every pair of one
level makes a layer option:

    seconds    add
    kept       adds
    transient  the larger of the two, coefficient by coefficient: one branch runs at a time
    order      zigzag when the attention is fastest in it (a feed-forward does not care)
    fetched    by the branches' shares of the layer's weights

The level ``full`` keeps the layer's input x alone, of T / p tokens (one more where p does not
divide T), and runs the layer again before its backward. It is derived from ``none``:

    backward   backward of none + forward of none
    kept       (T / p + 1) h e                              e bytes of an element
    transient  kept of none - kept of full + transient of none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.costs.option import OptionCost
from headrace.costs.quadratic import Linear
from headrace.errors import CostError
from headrace.spec.method import RECOMPUTE, Branch, LayerOption, Recompute
from headrace.spec.model_shape import ModelShape

__all__ = ["Branches", "composed", "recomputed"]

Branches = Mapping[Branch, Mapping[str, OptionCost]]
"""Costs of the branches of one group size by ``METHOD[+LEVEL]``."""


def composed(
    branches: Branches,
    feed_forwards: Mapping[str, str],
    shape: ModelShape,
    p: int,
    element_bytes: int,
) -> dict[str, OptionCost]:
    """The layer options of a group size by their names: all pairs of branches of one level, and
    ``full`` of each pair that was measured without recomputing.

    ``feed_forwards`` names for a method the one whose feed-forward it uses. Raises CostError when
    a branch is missing or claims the level ``full``.
    """
    attentions, followers = (_by_level(branches, name, p) for name in ("attention", "feed_forward"))
    share = shape.attention_share
    found: dict[str, OptionCost] = {}
    for (method, level), attention in attentions.items():
        for (other, other_level), follower in followers.items():
            if level != other_level:
                continue
            own = feed_forwards.get(method, method) == feed_forwards.get(other, other)
            option = LayerOption(
                attention=method, feed_forward=method if own else other, recompute=level
            )
            found[str(option)] = _joined(attention, follower, share)
            if level == "none":
                again = replace(option, recompute="full")
                found[str(again)] = recomputed(found[str(option)], shape.hidden, p, element_bytes)
    return found


def recomputed(none: OptionCost, hidden: int, p: int, element_bytes: int) -> OptionCost:
    """The level ``full`` of a layer from what it costs without recomputing anything."""
    row = hidden * element_bytes
    kept = Linear(slope=row / p, constant=0.0 if p == 1 else row)
    return replace(
        none,
        backward=none.backward + none.forward,
        kept=kept,
        transient=Linear(
            slope=max(0.0, none.kept.slope - kept.slope) + none.transient.slope,
            constant=max(0.0, none.kept.constant - kept.constant) + none.transient.constant,
        ),
    )


def _by_level(branches: Branches, name: Branch, p: int) -> dict[tuple[str, Recompute], OptionCost]:
    found: dict[tuple[str, Recompute], OptionCost] = {}
    for text, cost in branches.get(name, {}).items():
        option = LayerOption.parse(text)
        if option.attention != option.feed_forward or option.recompute == "full":
            wanted = f"METHOD[+LEVEL], of the levels {' and '.join(RECOMPUTE[:-1])}"
            raise CostError(f"{name} of cp{p}", got=text, wanted=wanted, hint="profile again")
        found[option.attention, option.recompute] = cost
    if not found:
        raise CostError(f"profile of cp{p}", got=f"no {name}", hint="profile again")
    return found


def _joined(attention: OptionCost, follower: OptionCost, share: float) -> OptionCost:
    kept, other = attention.kept, follower.kept
    passing, behind = attention.transient, follower.transient
    return OptionCost(
        forward=attention.forward + follower.forward,
        backward=attention.backward + follower.backward,
        kept=Linear(slope=kept.slope + other.slope, constant=kept.constant + other.constant),
        transient=Linear(
            slope=max(passing.slope, behind.slope),
            constant=max(passing.constant, behind.constant),
        ),
        order=attention.order,
        fetched=share * attention.fetched + (1 - share) * follower.fetched,
    )
