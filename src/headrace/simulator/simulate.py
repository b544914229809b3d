"""Runs the programs of a plan on a clock instead of on devices.

The same programs that the ranks execute are walked, with predicted seconds, so that prediction
and measurement have the same rows:

    pull              the weights arrive bucket by bucket from time 0, in shares of ``pull_s`` by
                      their elements; no forward starts before the last one
    forward, backward start when all ranks of the group are free
    push              starts when the rank arrives and ends when all ranks have arrived and the
                      bucket is moved, in shares of ``push_s``
    update            ``update_s`` after the last push, on all ranks together
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.costs.cost_model import CostModel
from headrace.errors import ProgramError
from headrace.simulator.clock import micro_batch_seconds
from headrace.spec.measurement import Row, Timeline
from headrace.spec.plan import Plan
from headrace.spec.program import Action, Backward, Forward, Program, Pull, Push
from headrace.spec.weights import buckets

__all__ = ["simulate"]


def simulate(programs: Sequence[Program], plan: Plan, costs: CostModel) -> Timeline:
    """The predicted timeline of ``programs``, which were compiled from ``plan``.

    Rows stand rank by rank in program order. Raises ProgramError when the programs are not those
    of the plan's ranks, name a bucket or micro-batch that does not exist, or deadlock; CostError
    when ``costs`` lack a scheme or option of the plan.
    """
    if [program.rank for program in programs] != list(range(plan.devices)):
        raise ProgramError("programs", got=len(programs), wanted=f"one for each of {plan.devices}")
    return _Walk(programs, plan, costs).run()


class _Walk:
    """Every rank stands at one action; whoever can move moves. The times do not depend on who
    moves first, because every action waits for fixed partners only."""

    def __init__(self, programs: Sequence[Program], plan: Plan, costs: CostModel) -> None:
        self.programs, self.plan, self.costs = programs, plan, costs
        self.world = tuple(range(plan.devices))
        self.seconds = micro_batch_seconds(plan, costs)
        self.tokens = [sum(plan.tokens_of(micro)) for micro in plan.micro_batches]
        elements = [sum(w.elements for w in bucket) for bucket in buckets(costs.architecture)]
        self.shares = [count / sum(elements) * costs.scale for count in elements]
        self.heads = [0] * plan.devices
        self.clock = [0.0] * plan.devices
        self.rows: list[list[Row]] = [[] for _ in self.world]

    def run(self) -> Timeline:
        waiting = list(reversed(self.world))
        while waiting:
            rank = waiting.pop()
            while (action := self._head(rank)) is not None:
                group = self._group(action, rank)
                if any(self._head(other) != action for other in group):
                    break
                self._act(action, group)
                waiting += [other for other in group if other != rank]
        for rank in self.world:
            if (action := self._head(rank)) is not None:
                raise ProgramError("programs deadlock", got=f"rank {rank} waits at {action}")
        rows = tuple(row for rank_rows in self.rows for row in rank_rows)
        return Timeline(source="predicted", rows=rows, devices=self.plan.devices)

    def _head(self, rank: int) -> Action | None:
        actions = self.programs[rank].actions
        return actions[self.heads[rank]] if self.heads[rank] < len(actions) else None

    def _group(self, action: Action, rank: int) -> tuple[int, ...]:
        if isinstance(action, Forward | Backward):
            return action.group
        return (rank,) if isinstance(action, Pull) else self.world

    def _act(self, action: Action, group: tuple[int, ...]) -> None:
        """All ranks of ``group`` do ``action``; those that meet end together."""
        seconds, tokens = self._cost(action)
        text, kind, ranks = str(action), action.kind, len(group)
        meets = max(self.clock[rank] for rank in group)
        end = meets + seconds
        for rank in group:
            # A push is issued on arrival; nothing else can begin before its group is complete.
            start = self.clock[rank] if kind == "push" else meets
            row = Row(
                rank=rank, action=text, kind=kind, start_s=start, end_s=end, tokens=tokens,
                ranks=self.plan.devices if kind == "pull" else ranks,
            )  # fmt: skip
            self.rows[rank].append(row)
            self.clock[rank] = end
            self.heads[rank] += 1

    def _cost(self, action: Action) -> tuple[float, int]:
        """Seconds and tokens of one action."""
        exchange = self.costs.exchange_s
        match action:
            case Pull(bucket=bucket) | Push(bucket=bucket):
                if bucket >= len(self.shares):
                    raise ProgramError(
                        f"bucket of {action}", got=bucket, wanted=f"< {len(self.shares)}"
                    )
                total_s = exchange.pull_s if isinstance(action, Pull) else exchange.push_s
                return self.shares[bucket] * total_s, 0
            case Forward(micro_batch=index) | Backward(micro_batch=index):
                if index >= len(self.seconds):
                    raise ProgramError(
                        f"micro-batch of {action}", got=index, wanted=f"< {len(self.seconds)}"
                    )
                return self.seconds[index][isinstance(action, Backward)], self.tokens[index]
            case _:
                return exchange.update_s * self.costs.scale, 0
