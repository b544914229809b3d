"""Runs the programs of a plan on a clock instead of on devices.

The same programs that the ranks execute are walked, with predicted seconds, so that prediction
and measurement have the same rows:

    pull              the weights arrive bucket by bucket from time 0; the row is the wait for them:
                      of a forward when a segment first works with the bucket, before the first
                      backward and the update for what is still under way
    forward, backward start when all ranks of the group are there; a forward contains its waits for
                      weights, a backward issues pushes as its segments end
    send              is issued, and takes time only while the last message to that neighbour is
                      still under way
    recv, exchange    end when the neighbour's message is there
    push              moves once all ranks have issued it and the one before is over; the row is the
                      wait for it, when the rank has nothing else to do
    update            ``update_s`` after the last push, on all ranks together
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.costs.cost_model import CostModel
from headrace.errors import ProgramError
from headrace.simulator.walk import Walk
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.spec.program import Program

__all__ = ["simulate"]


def simulate(programs: Sequence[Program], plan: Plan, costs: CostModel) -> Timeline:
    """The predicted timeline of ``programs``, which were compiled from ``plan``.

    Rows stand rank by rank in program order. Raises ProgramError when the programs are not those
    of the plan's ranks, name a bucket, micro-batch or stage that does not exist, or deadlock;
    CostError when ``costs`` lack a stage's width or an option of the plan.
    """
    if [program.rank for program in programs] != list(range(plan.devices)):
        raise ProgramError("programs", got=len(programs), wanted=f"one for each of {plan.devices}")
    walk = Walk(programs, plan, costs)
    walk.run()
    rows = tuple(row for rank in range(plan.devices) for row in walk.rows[rank])
    return Timeline(source="predicted", rows=rows, devices=plan.devices)
