"""Programs changed by hand, as texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.errors import ProgramError
from headrace.spec import Backward, Exchange, Plan, Program, Push, Update, check_programs
from headrace.spec.program import Action, parse_action

__all__ = ["Change", "changed", "drop", "late", "move", "parted", "put", "refusal", "swap"]

Change = Callable[[list[str]], None]


def changed(programs: Sequence[Program], rank: int, change: Change) -> tuple[Program, ...]:
    """``programs`` with the actions of one rank changed as texts."""
    words = [str(action) for action in programs[rank].actions]
    change(words)
    found = list(programs)
    found[rank] = Program(rank=rank, actions=tuple(map(parse_action, words)))
    return tuple(found)


def swap(one: str, other: str) -> Change:
    """The two change places."""

    def change(words: list[str]) -> None:
        i, j = words.index(one), words.index(other)
        words[i], words[j] = words[j], words[i]

    return change


def move(word: str, before: str) -> Change:
    """``word`` to the place in front of ``before``."""

    def change(words: list[str]) -> None:
        words.remove(word)
        words.insert(words.index(before), word)

    return change


def put(old: str, new: str) -> Change:
    """Some neighbouring actions as others, perhaps more or fewer."""

    def change(words: list[str]) -> None:
        gone, come = old.split(), new.split()
        at = words.index(gone[0])
        assert words[at : at + len(gone)] == gone, "the fault is planted elsewhere"
        words[at : at + len(gone)] = come

    return change


def drop(word: str) -> Change:
    """Without ``word``."""
    return put(word, "")


def late(program: Program) -> Program:
    """All pushes after the last backward: as sound as within it."""
    actions: list[Action] = [
        replace(action, pushes=()) if isinstance(action, Backward) else action
        for action in program.actions
        if not isinstance(action, Push | Update)
    ]
    buckets = sum(action.kind == "pull" for action in actions)
    pushes = (Push(bucket=bucket) for bucket in reversed(range(buckets)))
    return replace(program, actions=(*actions, *pushes, Update()))


def parted(program: Program, *, receive_first: bool = False) -> Program:
    """Every exchange as a send and a receive."""
    actions: list[Action] = []
    for action in program.actions:
        if isinstance(action, Exchange):
            pair = (action.send, action.recv)
            actions += pair[::-1] if receive_first else pair
        else:
            actions.append(action)
    return replace(program, actions=tuple(actions))


def refusal(programs: Sequence[Program], plan: Plan, buckets: int) -> str:
    """What the checker says; empty when it accepts."""
    try:
        check_programs(programs, plan, buckets)
    except ProgramError as error:
        return str(error)
    return ""
