"""The weights' way to the ranks and the gradients' way back, bucket by bucket.

Pulls are issued when the step begins and move one after the other; each takes its share of
``pull_s`` by its elements. So do pushes of ``push_s``, each once all ranks have issued it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from headrace.costs.cost_model import CostModel

__all__ = ["arrivals", "exposed_s", "push_ends"]


def arrivals(costs: CostModel) -> tuple[float, ...]:
    """When the weights of each bucket are there, in seconds since the step began."""
    pull_s = costs.exchange_s.pull_s * costs.scale
    return tuple(accumulate(share * pull_s for share in costs.shape.bucket_shares))


def push_ends(costs: CostModel, issued: Iterable[tuple[int, float]]) -> list[float]:
    """When the push of each bucket ends, given (bucket, when the last rank issued it) in the order
    of the pushes."""
    shares, push_s = costs.shape.bucket_shares, costs.exchange_s.push_s * costs.scale
    ends, end_s = list[float](), 0.0
    for bucket, ready_s in issued:
        end_s = max(end_s, ready_s) + shares[bucket] * push_s
        ends.append(end_s)
    return ends


def exposed_s(costs: CostModel) -> float:
    """Seconds of pull and push, without the costs' scale, that no computation hides.

    Before the first layer all ranks wait for its weights and the embedding's; the gradients of
    both are complete when the last rank has nothing left to compute.
    """
    first = sum(costs.shape.bucket_shares[:2])
    return first * (costs.exchange_s.pull_s + costs.exchange_s.push_s)
