"""The walk: who moves, who waits for ever."""

from __future__ import annotations

from itertools import permutations

import pytest

from headrace.spec import Program
from headrace.spec.program import parse_action
from headrace.spec.walk import meeting, messages_of, waiting


def left(*lists: str) -> list[str]:
    """Where the ranks of these lists wait for ever."""
    programs = [Program.parse(f"rank {rank}: {text}") for rank, text in enumerate(lists)]
    return [f"{rank} {action}" for rank, action in waiting(programs)]


RUNS = {
    "nothing to do": ("", ""),
    "pulls and pushes wait for nobody": ("P0 P1 G0", "G1"),
    "a forward waits for pulls that others issue later": (
        "P0 P1 0F0[0]",
        "Sg0>2*1 P0 P1",
        "Rg0<1*1 P0 P1",
    ),
    "a pull that no forward works with": ("P0 0F0[0] Sa0>1*4", "P0 Ra0<0*4 P1"),
    "a message": ("Sa0>1*4", "Ra0<0*4"),
    "a message along a line": ("Sa0>1*4", "Ra0<0*4 Sa0>2*4", "Ra0<1*4"),
    "messages one after the other": ("Sa0>1*4 Sa1>1*2", "Ra0<0*4 Ra1<0*2"),
    "an exchange with an exchange": ("X(Sa1>1*4,Rg0<1*2)", "X(Sg0>0*2,Ra1<0*4)"),
    "an exchange with its parts": ("X(Sa1>1*4,Rg0<1*2)", "Sg0>0*2 Ra1<0*4"),
    "an exchange with its parts, turned": ("X(Sa1>1*4,Rg0<1*2)", "Ra1<0*4 Sg0>0*2"),
    "parts that face each other": ("Sa1>1*4 Rg0<1*2", "Ra1<0*4 Sg0>0*2"),
    "groups that overlap": ("0F0[0,1] 0F1[0,2]", "0F0[0,1]", "0F1[0,2]"),
    "pushes within the backward of one rank": ("0B0[0,1]{2,1,0} U", "0B0[0,1] G2 G1 G0 U"),
    "the update": ("U", "U", "U"),
}

STUCK = {
    "nobody receives": (("Sa0>1*4 U", "U"), ["0 Sa0>1*4", "1 U"]),
    "nobody sends": (("Ra0<1*4", ""), ["0 Ra0<1*4"]),
    "two sends that face each other": (
        ("Sa1>1*4 Rg0<1*2", "Sg0>0*2 Ra1<0*4"),
        ["0 Sa1>1*4", "1 Sg0>0*2"],
    ),
    "two receives that face each other": (
        ("Rg0<1*2 Sa1>1*4", "Ra1<0*4 Sg0>0*2"),
        ["0 Rg0<1*2", "1 Ra1<0*4"],
    ),
    "half an exchange": (("X(Sa1>1*4,Rg0<1*2)", "Ra1<0*4"), ["0 X(Sa1>1*4,Rg0<1*2)"]),
    "messages in different orders": (
        ("Sa0>1*4 Sa1>1*4", "Ra1<0*4 Ra0<0*4"),
        ["0 Sa0>1*4", "1 Ra1<0*4"],
    ),
    "activations for gradients": (("Sa0>1*4", "Rg0<0*4"), ["0 Sa0>1*4", "1 Rg0<0*4"]),
    "a ring of sends": (
        ("Sa0>1*1 Ra2<2*1", "Sa1>2*1 Ra0<0*1", "Sa2>0*1 Ra1<1*1"),
        ["0 Sa0>1*1", "1 Sa1>2*1", "2 Sa2>0*1"],
    ),
    "a group that is not complete": (("0F0[0,1] U", "U"), ["0 0F0[0,1]", "1 U"]),
    "a stranger in a group": (("0F0[0,1]", "", "0F0[0,1]"), ["0 0F0[0,1]", "2 0F0[0,1]"]),
    "a pull after what a forward sends": (
        ("P0 P1 0F0[0] Sa0>1*4 U", "P0 Ra0<0*4 P1 1F0[1] U"),
        ["0 0F0[0]", "1 Ra0<0*4"],
    ),
    "a pull after what a group sends": (
        ("P0 0F0[0,1] Sa0>2*4", "P0 0F0[0,1]", "Ra0<0*4 P0"),
        ["0 0F0[0,1]", "2 Ra0<0*4", "1 0F0[0,1]"],
    ),
    "forward against backward": (("0F0[0,1]", "0B0[0,1]"), ["0 0F0[0,1]", "1 0B0[0,1]"]),
    "another micro-batch": (("0F0[0,1]", "0F1[0,1]"), ["0 0F0[0,1]", "1 0F1[0,1]"]),
    "a peer that does not exist": (("Sa0>7*4", ""), ["0 Sa0>7*4"]),
    "a meeting once more": (("0F0[0,1] 0F0[0,1]", "0F0[0,1]"), ["0 0F0[0,1]"]),
    "a rank that stops early": (("U", "U", ""), ["0 U", "1 U"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_lists_that_run_to_their_end(name: str) -> None:
    """Catches a wait that no transport has: a plan that is fine would be refused."""
    assert left(*RUNS[name]) == []


@pytest.mark.parametrize("name", STUCK)
def test_lists_that_do_not(name: str) -> None:
    """Catches a meeting without all its members, a send without its receiver, and a walk that
    goes round in circles between two who wait for each other."""
    lists, wanted = STUCK[name]
    assert left(*lists) == wanted


def test_the_cause_comes_first() -> None:
    """Catches a message that names only ranks which wait for the update, or for those that wait
    for each other."""
    lists = ["U", "U", "Ra0<3*1 U", "Sg0>4*1 Sa0>2*1 U", "Sa1>3*1 Rg0<3*1 U"]
    wanted = ["3 Sg0>4*1", "4 Sa1>3*1", "0 U", "1 U", "2 Ra0<3*1"]
    assert left(*lists) == wanted


def test_it_does_not_depend_on_the_numbers_of_the_ranks() -> None:
    """Catches a rank that is not looked at again when the one it waited for moved later."""
    for a, b, c, d in permutations(range(4)):
        lists = {
            a: f"0F0[{a},{b}] Sa0>{c}*4 Rg0<{c}*4 0B0[{a},{b}] U",
            b: f"0F0[{a},{b}] Sa0>{d}*4 Rg0<{d}*4 0B0[{a},{b}] U",
            c: f"Ra0<{a}*4 1F0[{c},{d}] 1B0[{c},{d}] Sg0>{a}*4 U",
            d: f"Ra0<{b}*4 1F0[{c},{d}] 1B0[{c},{d}] Sg0>{b}*4 U",
        }
        assert left(*(lists[rank] for rank in range(4))) == []
        lists[d] = f"Ra0<{b}*4 1F0[{c},{d}] Sg0>{b}*4 1B0[{c},{d}] U"
        assert left(*(lists[rank] for rank in range(4))) == []
        lists[d] = f"1F0[{c},{d}] Ra0<{b}*4 1B0[{c},{d}] Sg0>{b}*4 U"
        lists[b] = f"Sa0>{d}*4 0F0[{a},{b}] Rg0<{d}*4 0B0[{a},{b}] U"
        assert len(left(*(lists[rank] for rank in range(4)))) == 4


def test_what_actions_meet_and_send() -> None:
    """Catches an exchange of which only one half is seen, and an update without the world."""
    world = (0, 1, 2)
    assert meeting(parse_action("1B4[0,2]{3}"), 2, world) == (0, 2)
    assert meeting(parse_action("U"), 2, world) == world
    for text in ("P0", "G0", "Sa0>1*4", "X(Sa1>1*4,Rg0<1*2)"):
        assert meeting(parse_action(text), 2, world) == (2,)
    send, recv = messages_of(parse_action("X(Sa1>1*4,Rg0<1*2)"))
    assert (send.sends, send.what, send.micro_batch, send.peer, send.rows) == (True, "a", 1, 1, 4)
    assert (recv.sends, recv.what, recv.micro_batch, recv.peer, recv.rows) == (False, "g", 0, 1, 2)
    assert messages_of(parse_action("0F0[0]")) == ()


def test_both_ends_of_a_message_have_one_key() -> None:
    """Catches a message that is never delivered."""
    (send,) = messages_of(parse_action("Sa3>1*4"))
    (recv,) = messages_of(parse_action("Ra3<0*4"))
    assert send.key(0) == recv.key(1) == (0, 1, "a", 3)
    assert send.key(1) != recv.key(1)
