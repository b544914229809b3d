"""Static checks of programs: what would hang, repeat or be lost is found before it runs.

Rules, over the programs of all ranks of one plan:

1. every rank issues the world's collectives (pulls, pushes, update) in one order;
2. every group meets in the same sequence of actions on all its ranks;
3. local order: a forward after all pulls, a backward after its forward, a push after the last
   backward, the update last;
4. every action exactly once, and every micro-batch of the plan forward and backward on each rank
   of its pipeline;
5. the lists run to their end when every meeting waits for all its members (the strict mode: a
   sender waits for its receiver).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace.errors import ProgramError
from headrace.spec.plan import Plan
from headrace.spec.program import Action, Backward, Forward, Program, Pull, Push, Update

__all__ = ["check_programs"]


def check_programs(programs: Sequence[Program], plan: Plan, bucket_count: int) -> None:
    """Raise ProgramError at the first rule that ``programs`` break for ``plan``."""
    if [program.rank for program in programs] != list(range(plan.devices)):
        raise ProgramError(
            "ranks of the programs", got=[program.rank for program in programs],
            wanted=f"0 to {plan.devices - 1}",
        )  # fmt: skip
    for program in programs:
        _check_once(program, plan, bucket_count)
        _check_local_order(program)
    _check_world_order(programs)
    _check_runs_to_end(programs)


def _check_once(program: Program, plan: Plan, bucket_count: int) -> None:
    wanted: Counter[str] = Counter()
    for bucket in range(bucket_count):
        wanted[str(Pull(bucket=bucket))] += 1
        wanted[str(Push(bucket=bucket))] += 1
    for index, micro in enumerate(plan.micro_batches):
        group = plan.pipelines[micro.pipeline].ranks
        if program.rank in group:
            wanted[str(Forward(stage=0, micro_batch=index, group=group))] += 1
            wanted[str(Backward(stage=0, micro_batch=index, group=group))] += 1
    wanted[str(Update())] += 1
    got = Counter(map(str, program.actions))
    for action in sorted(wanted.keys() | got.keys()):
        if got[action] != wanted[action]:
            raise ProgramError(
                f"rule 4, rank {program.rank}, action {action}", got=f"{got[action]} times",
                wanted=f"{wanted[action]}",
            )  # fmt: skip


def _check_local_order(program: Program) -> None:
    def broken(action: Action, wanted: str) -> ProgramError:
        return ProgramError(f"rule 3, rank {program.rank}, action {action}", wanted=wanted)

    pulls_open = sum(isinstance(action, Pull) for action in program.actions)
    backwards_open = sum(isinstance(action, Backward) for action in program.actions)
    done: set[int] = set()
    for index, action in enumerate(program.actions):
        match action:
            case Pull():
                pulls_open -= 1
            case Forward():
                if pulls_open:
                    raise broken(action, "all pulls before it")
                done.add(action.micro_batch)
            case Backward():
                if action.micro_batch not in done:
                    raise broken(action, "its forward before it")
                backwards_open -= 1
            case Push():
                if backwards_open:
                    raise broken(action, "all backwards before it")
            case Update():
                if index != len(program.actions) - 1:
                    raise broken(action, "nothing after it")


def _check_world_order(programs: Sequence[Program]) -> None:
    def world(program: Program) -> list[str]:
        return [str(a) for a in program.actions if isinstance(a, Pull | Push | Update)]

    first = world(programs[0])
    for program in programs[1:]:
        for here, there in zip(first, world(program), strict=True):
            if here != there:
                raise ProgramError(
                    "rule 1, order of the world's collectives",
                    got=f"{here} on rank 0 against {there} on rank {program.rank}",
                    wanted="one order on all ranks",
                )


def _check_runs_to_end(programs: Sequence[Program]) -> None:
    """Rules 2 and 5: move any rank whose head can run, until nothing moves."""
    heads = [0] * len(programs)

    def head(rank: int) -> Action | None:
        actions = programs[rank].actions
        return actions[heads[rank]] if heads[rank] < len(actions) else None

    def members(action: Action, rank: int) -> tuple[int, ...]:
        match action:
            case Forward(group=group) | Backward(group=group):
                return group
            case Update():
                return tuple(range(len(programs)))
        return (rank,)

    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        while (action := head(rank)) is not None:
            group = members(action, rank)
            if any(head(other) != action for other in group):
                break
            for other in group:
                heads[other] += 1
            ready += [other for other in group if other != rank]
    stuck = [rank for rank in range(len(programs)) if head(rank) is not None]
    if stuck:
        waits = "; ".join(f"rank {rank} waits at {head(rank)}" for rank in stuck[:4])
        raise ProgramError("rule 5, the programs deadlock", got=waits)
