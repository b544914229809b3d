"""The checker beside the rules again, as a graph, on plans and changes drawn at random."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from faults import late, parted, refusal
from headrace.spec import (
    Action,
    Backward,
    Forward,
    Lengths,
    Plan,
    Program,
    Recv,
    Send,
    compile_plan,
)
from headrace.spec.program import connected
from plans import random_plan, random_staged_plan
from references.soundness import sound

LAYERS = 3
BUCKETS = LAYERS + 2
Programs = tuple[Program, ...]


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Plan, Programs]:
    """Groups of any sizes that share ranks, without stages; pushes after the backwards."""
    tokens = draw(st.lists(st.integers(1, 99), min_size=1, max_size=14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    plan = random_plan(Lengths.of(tokens), draw(st.integers(1, 9)), LAYERS, rng)
    return plan, tuple(map(late, compile_plan(plan, BUCKETS)))


@st.composite
def staged(draw: st.DrawFn) -> tuple[Plan, Programs]:
    """Pipelines of any stages, and groups beside them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    plan = random_staged_plan(rng, draw(st.integers(1, 8)), LAYERS, draw(st.integers(1, 9)))
    programs = compile_plan(plan, BUCKETS)
    return plan, tuple(map(late, programs)) if draw(st.booleans()) else programs


@settings(deadline=None)
@given(st.one_of(grouped(), staged()))
def test_compiled_plans_pass(pair: tuple[Plan, Programs]) -> None:
    """Catches a rule that is too strict, in worlds that are no powers of two."""
    plan, programs = pair
    assert refusal(programs, plan, BUCKETS) == ""
    assert sound(plan, programs, BUCKETS)
    assert refusal(compile_plan(plan, BUCKETS), plan, BUCKETS) == ""


@settings(deadline=None)
@given(grouped(), st.randoms(use_true_random=False))
def test_any_common_order_of_micro_batches_passes(pair: tuple[Plan, Programs], random) -> None:
    """Catches a checker that wants the compiler's own order."""
    plan, programs = pair
    order = list(range(len(plan.micro_batches)))
    random.shuffle(order)
    changed = []
    for program in programs:
        runs = [a for a in program.actions if isinstance(a, Forward | Backward)]
        runs.sort(key=lambda action: (order[action.micro_batch], action.kind == "backward"))
        actions = (*program.actions[:BUCKETS], *runs, *program.actions[-BUCKETS - 1 :])
        changed.append(replace(program, actions=actions))
    assert refusal(changed, plan, BUCKETS) == ""


@settings(deadline=None, max_examples=200)
@given(staged(), st.booleans())
def test_sends_beside_receives_deadlock_in_every_pipeline(
    pair: tuple[Plan, Programs], receive_first: bool
) -> None:
    """Catches a walk in which a send runs ahead of its receiver, and a compiler that exchanges
    where it need not: with two micro-batches in two stages it must."""
    plan, programs = pair
    runs = Counter(micro.pipeline for micro in plan.micro_batches)
    must = any(count > 1 and plan.pipelines[p].scheme.pipeline > 1 for p, count in runs.items())
    text = refusal(
        [parted(program, receive_first=receive_first) for program in programs], plan, BUCKETS
    )
    assert text.startswith("rule 5") == must == bool(text)
    if must:
        letter = "R" if receive_first else "S"
        first, second = text.partition("got ")[2].split("; ")[:2]
        assert f" waits at {letter}" in first
        assert f" waits at {letter}" in second


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Plan, Programs]:
    plan, programs = draw(st.one_of(grouped(), staged()))
    rank = draw(st.integers(0, plan.devices - 1))
    actions = list(programs[rank].actions)
    index = st.integers(0, len(actions) - 1)
    i, j = draw(index), draw(index)
    kinds = [
        "drop",
        "double",
        "move",
        "near",
        "swap",
        "other",
        "blocks",
        "part",
        "message",
        "pulls",
    ]
    match draw(st.sampled_from(kinds)):
        case "drop":
            del actions[i]
        case "double":
            actions.insert(j, actions[i])
        case "move":
            actions.insert(j, actions.pop(i))
        case "near":
            # Many of these are sound.
            actions.insert(i + draw(st.integers(-3, 3)), actions.pop(i))
        case "swap":
            actions[i], actions[j] = actions[j], actions[i]
        case "other":
            other = programs[draw(st.integers(0, plan.devices - 1))].actions
            actions[i] = other[j % len(other)]
        case "blocks":
            # Neighbouring micro-batches change places: fine on one rank, perhaps not together.
            middle = range(BUCKETS, len(actions) - BUCKETS - 1 - 2, 2)
            for at in middle:
                if draw(st.booleans()):
                    actions[at : at + 4] = [*actions[at + 2 : at + 4], *actions[at : at + 2]]
        case "part":
            first = draw(st.booleans())
            actions = list(parted(programs[rank], receive_first=first).actions)
        case "pulls":
            # Rank by rank they may begin with what they receive.
            first = BUCKETS - draw(st.integers(1, BUCKETS))
            place = BUCKETS + draw(st.integers(1, 3))
            actions[first:place] = [*actions[BUCKETS:place], *actions[first:BUCKETS]]
        case "message":
            actions[i] = _other_message(draw, actions[i])
    changed = list(programs)
    changed[rank] = Program(rank=rank, actions=tuple(actions))
    return plan, tuple(changed)


def _other_message(draw: st.DrawFn, action: Action) -> Action:
    """A send or receive of one thing more or less."""
    if not isinstance(action, Send | Recv):
        return action
    message = action.message
    name = draw(st.sampled_from(["micro_batch", "peer", "rows"]))
    value = max(0, getattr(message, name) + draw(st.sampled_from([-1, 1])))
    return replace(action, message=replace(message, **{name: value}))


@settings(deadline=None, max_examples=600)
@given(mutated())
def test_the_checker_agrees_with_a_graph(pair: tuple[Plan, Programs]) -> None:
    """Catches any fault that slips through, and any sound program that is refused."""
    plan, programs = pair
    assert (refusal(programs, plan, BUCKETS) == "") == sound(plan, programs, BUCKETS)


@settings(deadline=None, max_examples=300)
@given(mutated())
def test_ranks_that_depend_on_each_other_check_for_all(pair: tuple[Plan, Programs]) -> None:
    """Catches a fault that none of the ranks sees which check what concerns them, sound programs
    that are refused for want of the others, and ranks left out that a program waits for."""
    plan, programs = pair
    parts = {connected(plan, rank) for rank in range(plan.devices)}
    assert sorted(rank for ranks in parts for rank in ranks) == list(range(plan.devices))
    for micro in plan.micro_batches:
        assert any(set(plan.pipelines[micro.pipeline].ranks) <= set(ranks) for ranks in parts)
    refused = [refusal([programs[rank] for rank in ranks], plan, BUCKETS) for ranks in parts]
    assert any(refused) == (not sound(plan, programs, BUCKETS)), refused
