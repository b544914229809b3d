"""Plans with several strategies in turn, written so that a checker of plain plans can read them.

The form of a plan knows pipelines that run at once. Where the strategy changes within an iteration
the same devices serve one phase after the other, which that form cannot say. But each phase is a
plan by itself, of some of the sequences: written as iterations, with their lengths beside them,
they are checked like any others, and an iteration takes the sum of its phases and changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.planning.pipelines.plan import Iteration, PipelinePlan

__all__ = ["phases_apart"]


def phases_apart(plan: PipelinePlan, lengths: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The JSON form of a plan of the iterations ``lengths``, with every phase an iteration.

    Beside ``iterations``, and as many as these: ``lengths``, as in a file of lengths, and
    ``phases``, which say of what iteration each is, which of its sequences it has (in the order
    of its lengths) and the seconds of the change before it.
    """
    iterations, parts, phases = list[Iteration](), list[list[int]](), list[dict[str, Any]]()
    for number, (item, own) in enumerate(zip(plan.iterations, lengths, strict=True)):
        made = item.phases or (item,)
        change_s = item.switch_s / max(1, len(made) - 1)
        for k, phase in enumerate(made):
            held = sorted(_sequences(phase))
            iterations.append(_renumbered(phase, held).timed(item.planning_s / len(made)))
            parts.append([own[i] for i in held])
            phases.append(
                {"iteration": number, "sequences": held, "switch_s": change_s if k else 0.0}
            )
    value = replace(plan, iterations=tuple(iterations)).to_json()
    return {**value, "lengths": {"iterations": parts}, "phases": phases}


def _sequences(item: Iteration) -> list[int]:
    return [i for own in item.pipelines for part in own.micro_batches for i in part]


def _renumbered(item: Iteration, held: Sequence[int]) -> Iteration:
    """The plan of a phase with its sequences by their place in ``held``."""
    place = {i: at for at, i in enumerate(held)}
    pipelines = tuple(
        replace(
            own, phase=0,
            micro_batches=tuple(tuple(place[i] for i in part) for part in own.micro_batches),
        )
        for own in item.pipelines
    )  # fmt: skip
    return replace(item, pipelines=pipelines)
