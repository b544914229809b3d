"""What each rank does of a plan, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.spec.method_facts import Members
from headrace.spec.plan import Plan
from headrace.spec.program import Forward

__all__ = ["Turn", "members_of", "turns_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a rank does at once: micro-batch ``index`` with ``ranks``, or nothing
    (None), where other ranks must be met at every layer."""

    index: int | None
    ranks: Members

    @property
    def action(self) -> Forward:
        """Its forward, as programs write it."""
        return Forward(stage=0, micro_batch=self.index or 0, group=self.ranks)


def turns_of(plan: Plan, rank: int) -> tuple[Turn, ...]:
    """What a rank does of a plan, turn by turn. In lockstep all ranks have as many turns."""
    counts = [0] * plan.devices
    own = dict[int, Turn]()
    for index in range(len(plan.micro_batches)):
        members = members_of(plan, index)
        at = max(counts[r] for r in members)
        for r in members:
            counts[r] = at + 1
        if rank in members:
            own[at] = Turn(index=index, ranks=members)
    if plan.semantics == "free":
        return tuple(own[at] for at in sorted(own))
    idle = Turn(index=None, ranks=(rank,))
    return tuple(own.get(at, idle) for at in range(max(counts)))


def members_of(plan: Plan, index: int) -> Members:
    """The ranks that run a micro-batch: those of its pipeline."""
    return plan.pipelines[plan.micro_batches[index].pipeline].ranks
