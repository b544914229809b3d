"""Bad programs: what the checker lets pass is sound and runs to its end; what is sound passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from attacks.attack import Attack, Case, Outcome
from faults import late, parted, refusal
from headrace.costs import CostModel
from headrace.errors import ProgramError
from headrace.simulator import simulate
from headrace.spec import Exchange, Forward, Lengths, Plan, Program, Recv, Send, compile_plan
from headrace.spec.layer_plan import RECOMPUTE, LayerOption
from headrace.spec.program import Action, Backward
from headrace.spec.random_plans import random_plan
from plans import random_staged_plan
from references.soundness import sound
from simulator.unit_world import unit_costs

__all__ = ["PROGRAMS", "attack_with"]

_LAYERS = 3
_BUCKETS = _LAYERS + 2

Refusal = Callable[[Sequence[Program], Plan, int], str]
"""What a checker says of programs; nothing when it accepts them."""


def attack_with(checker: Refusal) -> Attack:
    """The attack on a checker."""

    @contextmanager
    def begin(folder: Path) -> Iterator[Case]:
        yield partial(_case, checker)

    return Attack(
        name="programs",
        about="changed programs are refused, or sound and simulated to their end",
        begin=begin,
        limit_s=20,
        few=300,
    )


def _case(checker: Refusal, rng: np.random.Generator) -> Outcome:
    plan = _plan(rng)
    programs = list(compile_plan(plan, _BUCKETS))
    if rng.random() < 0.3:
        programs = [late(program) for program in programs]
    if rng.random() < 0.1:  # where it matters, neighbours deadlock at their sends
        first = bool(rng.random() < 0.5)
        programs = [parted(program, receive_first=first) for program in programs]
    for _ in range(int(rng.integers(0, 3))):
        rank = int(rng.integers(plan.devices))
        programs[rank] = _changed(rng, programs, rank)
    said, right = checker(programs, plan, _BUCKETS), sound(plan, programs, _BUCKETS)
    if bool(said) == right:
        words = f"{said or 'accepted'}, but it is {'sound' if right else 'not'}:\n" + "\n".join(
            map(str, programs)
        )
        return Outcome(verdict="misjudged", survived=False, words=words)
    if said:
        return Outcome(verdict="refused", words=said)
    if all(pipeline.scheme.width <= 2 for pipeline in plan.pipelines):
        try:
            simulate(programs, plan, _costs(plan.devices))
        except ProgramError as error:
            return Outcome(verdict="stuck", survived=False, words=f"the simulator: {error}")
    return Outcome(verdict="sound")


def _costs(devices: int) -> CostModel:
    costs = unit_costs(devices, _LAYERS)
    options = {
        width: {str(LayerOption.of("local", level)): known["local"] for level in RECOMPUTE}
        for width, known in costs.options.items()
    }
    return costs.replace(options=options)


def _plan(rng: np.random.Generator) -> Plan:
    devices = int(rng.integers(1, 9))
    if rng.random() < 0.6:
        return random_staged_plan(rng, devices, _LAYERS, int(rng.integers(1, 9)))
    lengths = Lengths.of(rng.integers(1, 99, size=int(rng.integers(1, 14))).tolist())
    only = {width: ["local"] for width in (1, 2) if width <= devices}
    return random_plan(lengths, devices, _LAYERS, rng, methods=only)


def _changed(rng: np.random.Generator, programs: Sequence[Program], rank: int) -> Program:
    """A rank's program with one thing about it changed."""
    actions = list(programs[rank].actions)
    i, j = (int(n) for n in rng.integers(len(actions), size=2))
    match str(rng.choice(_CHANGES)):
        case "drop":
            del actions[i]
        case "double":
            actions.insert(j, actions[i])
        case "move":
            actions.insert(j, actions.pop(i))
        case "near":  # many of these are sound
            actions.insert(max(0, i + int(rng.integers(-3, 4))), actions.pop(i))
        case "swap":
            actions[i], actions[j] = actions[j], actions[i]
        case "other":
            other = programs[int(rng.integers(len(programs)))].actions
            actions[i] = other[j % len(other)]
        case "blocks":  # micro-batches change places: fine on one rank, perhaps not together
            for at in range(_BUCKETS, len(actions) - _BUCKETS - 3, 2):
                if rng.random() < 0.5:
                    actions[at : at + 4] = [*actions[at + 2 : at + 4], *actions[at : at + 2]]
        case "order":  # two messages change places
            at = [n for n, one in enumerate(actions) if isinstance(one, Send | Recv | Exchange)]
            if len(at) > 1:
                n, m = (int(one) for one in rng.choice(at, size=2, replace=False))
                actions[n], actions[m] = actions[m], actions[n]
        case "message":
            at = [n for n, one in enumerate(actions) if isinstance(one, Send | Recv | Exchange)]
            if at:
                n = int(rng.choice(at))
                actions[n] = _other_message(rng, actions[n])
        case "work":
            at = [n for n, one in enumerate(actions) if isinstance(one, Forward | Backward)]
            if at:
                n = int(rng.choice(at))
                actions[n] = _other_work(rng, actions[n], len(programs))
        case "pulls":  # rank by rank they may begin with what they receive
            first = _BUCKETS - int(rng.integers(1, _BUCKETS + 1))
            place = _BUCKETS + int(rng.integers(1, 4))
            actions[first:place] = [*actions[_BUCKETS:place], *actions[first:_BUCKETS]]
    return Program(rank=rank, actions=tuple(actions))


_CHANGES = (
    "drop",
    "double",
    "move",
    "near",
    "swap",
    "other",
    "blocks",
    "blocks",
    "order",
    "order",
    "message",
    "work",
    "pulls",
)


def _other_message(rng: np.random.Generator, action: Action) -> Action:
    """The same with another micro-batch, peer or number of rows."""
    if isinstance(action, Exchange):
        name = str(rng.choice(["send", "recv"]))
        inner = _other_message(rng, getattr(action, name))
        same = inner.message.peer == getattr(action, name).message.peer
        return replace(action, **{name: inner}) if same else action
    if not isinstance(action, Send | Recv):
        return action
    name = str(rng.choice(["micro_batch", "peer", "rows"]))
    value = max(0, getattr(action.message, name) + int(rng.choice([-1, 1])))
    return replace(action, message=replace(action.message, **{name: value}))


def _other_work(rng: np.random.Generator, action: Action, devices: int) -> Action:
    """The same of another stage or micro-batch, or with other ranks."""
    if not isinstance(action, Forward | Backward):
        return action
    step = int(rng.choice([-1, 1]))
    match str(rng.choice(["stage", "micro_batch", "group"])):
        case "stage":
            return replace(action, stage=max(0, action.stage + step))
        case "micro_batch":
            return replace(action, micro_batch=max(0, action.micro_batch + step))
    ranks = {*action.group} ^ {int(rng.integers(devices))}
    return replace(action, group=tuple(sorted(ranks)) or action.group)


PROGRAMS = attack_with(refusal)
