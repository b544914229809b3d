"""The rules of programs again, as a graph: apart from the checker, so that they can disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from headrace.spec import (
    Action,
    Backward,
    Exchange,
    Forward,
    Message,
    Plan,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    Update,
    compile_plan,
)
from headrace.spec.program import pushes_of

__all__ = ["sound"]


def atoms(action: Action) -> list[Action]:
    """What an action is made of, in order."""
    if isinstance(action, Exchange):
        return [action.send, action.recv]
    if isinstance(action, Backward):
        pushes = (Push(bucket=bucket) for bucket in action.pushes)
        return [replace(action, pushes=()), *pushes]
    return [action]


def sound(plan: Plan, programs: Sequence[Program], buckets: int) -> bool:
    """The rules again: an action that several ranks share, and a message, is one node of a graph
    without circles. A forward comes after the pulls of all ranks. In a second graph a push is one
    node of all ranks, and a backward one for each bucket."""
    for program, model in zip(programs, compile_plan(plan, buckets), strict=True):
        if _world(program) != _world(model):
            return False
        found = [atom for action in program.actions for atom in atoms(action)]
        wanted = [atom for action in model.actions for atom in atoms(action)]
        own = _buckets(plan, model, buckets)
        if Counter(found) != Counter(wanted) or not _in_local_order(program, own, found, buckets):
            return False
    pulls = {(program.rank, Pull(bucket=b)) for program in programs for b in range(buckets)}
    issued = {p.rank: [_nodes(action, p.rank) for action in p.actions] for p in programs}
    posted = {p.rank: [n for a in p.actions for n in _posted(a, p.rank, buckets)] for p in programs}
    return all(_without_circles(chains, pulls) for chains in (issued, posted))


def _without_circles(chains: dict[int, list[list[object]]], pulls: set[object]) -> bool:
    graph: dict[object, set[object]] = {}
    for chain in chains.values():
        for before, after in pairwise(chain):
            for node in after:
                graph.setdefault(node, set()).update(before)
                if isinstance(node, str) and "F" in node:
                    graph[node] |= pulls
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


def _posted(action: Action, rank: int, buckets: int) -> list[list[object]]:
    """Sets of nodes, one after the other."""
    if isinstance(action, Push):
        return [[("push", action.bucket)]]
    if not isinstance(action, Backward):
        return [_nodes(action, rank)]
    found: list[list[object]] = []
    for bucket in reversed(range(buckets)):
        found.append([(str(replace(action, pushes=())), bucket)])
        if bucket in action.pushes:
            found.append([("push", bucket)])
    return [*found, _nodes(action, rank)]


def _buckets(plan: Plan, model: Program, buckets: int) -> tuple[int, ...]:
    """Those of the stage in which a rank has its last backward."""
    last = next((a for a in reversed(model.actions) if isinstance(a, Backward)), None)
    if last is None:
        return ()
    pipeline = plan.pipelines[plan.micro_batches[last.micro_batch].pipeline]
    return pipeline.stage_of(model.rank, buckets - 2).buckets


def _world(program: Program) -> list[Action]:
    found = [atom for action in program.actions for atom in atoms(action)]
    return [atom for atom in found if isinstance(atom, Pull | Push | Update)]


def _nodes(action: Action, rank: int) -> list[object]:
    """Nodes of an action; those of a message are the same on both of its ranks."""

    def node(atom: Action) -> object:
        match atom:
            case Forward() | Backward() | Update():
                return str(atom)
            case Send(message=m):
                return (rank, m.peer, m.what, m.micro_batch)
            case Recv(message=m):
                return (m.peer, rank, m.what, m.micro_batch)
        return (rank, atom)

    # A push within a backward is issued on the way: it is no meeting.
    parts = atoms(action)
    return [node(part) for part in (parts[:1] if isinstance(action, Backward) else parts)]


def _in_local_order(
    program: Program, own: tuple[int, ...], found: list[Action], buckets: int
) -> bool:
    at = {atom: place for place, atom in enumerate(found)}
    backwards = [atom for atom in found if isinstance(atom, Backward)]
    used = set(own) | ({0} if buckets - 1 in own else set())
    for atom in found:
        match atom:
            case Forward():
                if any(at[atom] < at[Pull(bucket=bucket)] for bucket in range(buckets)):
                    return False
            case Backward(stage=stage, micro_batch=index, group=group):
                if at[atom] < at[Forward(stage=stage, micro_batch=index, group=group)]:
                    return False
            case Push(bucket=bucket) if bucket in used:
                if any(at[atom] < at[backward] for backward in backwards):
                    return False
            case Send(message=message) | Recv(message=message):
                if not _fits(isinstance(atom, Send), message, at[atom], at):
                    return False
    pushed = [pushes_of(a) for a in program.actions if isinstance(a, Backward)]
    in_order = all(set(p) <= set(own) and list(p) == sorted(p)[::-1] for p in pushed)
    return in_order and found[-1] == Update()


def _fits(sends: bool, message: Message, place: int, at: dict[Action, int]) -> bool:
    """Activations leave after the forward and arrive before it; gradients do at the backward."""
    kind = Forward if message.what == "a" else Backward
    (work,) = (
        p for a, p in at.items() if isinstance(a, kind) and a.micro_batch == message.micro_batch
    )
    return place > work if sends else place < work
