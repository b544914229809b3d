"""Steps in lockstep: the i-th micro-batches of all ranks start together, as a wave.

All ranks meet at every layer, whose weights they gather from one another, so a wave takes as long
as its longest micro-batch, and a step all waves and the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from headrace.spec.measurement import Row, Timeline
from headrace.spec.plan import Plan
from headrace.spec.program import Action, Backward, Forward, Update

__all__ = ["wave_starts", "wave_timeline"]


def wave_starts(plan: Plan, times: Sequence[float]) -> tuple[list[float], float]:
    """When each micro-batch of a plan starts, and when the last wave ends.

    Args:
        plan: The plan.
        times: Seconds of each micro-batch.

    Returns:
        (seconds until each micro-batch starts, seconds of all waves).
    """
    # Waves that each rank has done, seconds of each wave, and the wave of each micro-batch.
    waves_done, wave_s, wave_of = [0] * plan.devices, list[float](), list[int]()
    for micro, taken_s in zip(plan.micro_batches, times, strict=True):
        ranks = plan.pipelines[micro.pipeline].ranks
        wave = max(waves_done[rank] for rank in ranks)
        if wave == len(wave_s):
            wave_s.append(0.0)
        wave_s[wave] = max(wave_s[wave], taken_s)
        wave_of.append(wave)
        for rank in ranks:
            waves_done[rank] = wave + 1
    begins = list(accumulate(wave_s, initial=0.0))
    return [begins[wave] for wave in wave_of], begins[-1]


def wave_timeline(
    plan: Plan, forward_s: Sequence[float], backward_s: Sequence[float], update_s: float
) -> Timeline:
    """The timeline of a plan in lockstep: of each rank a forward and a backward for each of its
    micro-batches, and the update.

    Args:
        plan: The plan.
        forward_s: Seconds of each micro-batch's forward.
        backward_s: Seconds of each micro-batch's backward.
        update_s: Seconds of the update.

    Returns:
        The timeline, its rows rank by rank.
    """
    both = [sum(pair) for pair in zip(forward_s, backward_s, strict=True)]
    starts, end_s = wave_starts(plan, both)
    rows: list[list[Row]] = [[] for _ in range(plan.devices)]
    for number, (micro, start_s) in enumerate(zip(plan.micro_batches, starts, strict=True)):
        ranks = plan.pipelines[micro.pipeline].ranks
        tokens, turn_s = sum(plan.tokens_of(micro)), start_s + forward_s[number]
        actions: tuple[tuple[Action, str, float, float], ...] = (
            (Forward(stage=0, micro_batch=number, group=ranks), "forward", start_s, turn_s),
            (
                Backward(stage=0, micro_batch=number, group=ranks),
                "backward",
                turn_s,
                start_s + both[number],
            ),
        )
        for rank in ranks:
            rows[rank] += [
                Row(
                    rank=rank,
                    action=str(action),
                    kind=kind,
                    start_s=from_s,
                    end_s=to_s,
                    tokens=tokens,
                    ranks=len(ranks),
                )
                for action, kind, from_s, to_s in actions
            ]
    for rank, own in enumerate(rows):
        own.append(
            Row(
                rank=rank,
                action=str(Update()),
                kind="update",
                start_s=end_s,
                end_s=end_s + update_s,
                ranks=plan.devices,
            )
        )
    return Timeline(
        source="predicted", rows=tuple(row for own in rows for row in own), devices=plan.devices
    )
