"""Actions and programs: each prints and reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import (
    Action,
    Backward,
    Exchange,
    Forward,
    Message,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    Update,
)
from headrace.spec.program import parse_action, pushes_of

number = st.integers(0, 1200)
group = st.lists(number, min_size=1, max_size=5, unique=True).map(tuple)
buckets = st.lists(number, max_size=5, unique=True).map(tuple)


def messages(peer: st.SearchStrategy[int] = number) -> st.SearchStrategy[Message]:
    """Messages to or from a peer."""
    what = st.sampled_from(["a", "g"])
    return st.builds(Message, what=what, micro_batch=number, peer=peer, rows=number)


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    pair = messages(st.just(draw(number)))
    return Exchange(send=Send(message=draw(pair)), recv=Recv(message=draw(pair)))


actions = st.one_of(
    st.builds(Pull, bucket=number),
    st.builds(Push, bucket=number),
    st.just(Update()),
    st.builds(Forward, stage=number, micro_batch=number, group=group),
    st.builds(Backward, stage=number, micro_batch=number, group=group, pushes=buckets),
    st.builds(Send, message=messages()),
    st.builds(Recv, message=messages()),
    exchanges(),
)
programs = st.builds(Program, rank=number, actions=st.lists(actions, max_size=20).map(tuple))

ACTIVATIONS = Message(what="a", micro_batch=4, peer=2, rows=128)
GRADIENTS = Message(what="g", micro_batch=3, peer=2, rows=96)

BY_HAND: dict[str, tuple[Action, str]] = {
    "P3": (Pull(bucket=3), "pull"),
    "G0": (Push(bucket=0), "push"),
    "0F4[0,1]": (Forward(stage=0, micro_batch=4, group=(0, 1)), "forward"),
    "2B10[7]": (Backward(stage=2, micro_batch=10, group=(7,)), "backward"),
    "2B10[7]{6,5}": (Backward(stage=2, micro_batch=10, group=(7,), pushes=(6, 5)), "backward"),
    "Sa4>2*128": (Send(message=ACTIVATIONS), "send"),
    "Ra4<2*128": (Recv(message=ACTIVATIONS), "recv"),
    "Sg3>2*96": (Send(message=GRADIENTS), "send"),
    "Rg3<2*96": (Recv(message=GRADIENTS), "recv"),
    "X(Sa4>2*128,Rg3<2*96)": (
        Exchange(send=Send(message=ACTIVATIONS), recv=Recv(message=GRADIENTS)),
        "exchange",
    ),
    "U": (Update(), "update"),
}


@given(actions)
def test_an_action_reads_back(action: Action) -> None:
    """Catches a field that the text leaves out: programs are compared by their texts."""
    assert parse_action(str(action)) == action


@given(programs)
def test_a_program_reads_back(program: Program) -> None:
    """Catches a rank or an action lost between the print-out and the checker."""
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize("text", BY_HAND)
def test_actions_by_hand(text: str) -> None:
    """Catches stage and micro-batch swapped, and a kind the timeline does not know."""
    action, kind = BY_HAND[text]
    assert str(action) == text
    assert action.kind == kind
    assert parse_action(text) == action


def test_pushes_of_an_action() -> None:
    """Catches pushes within a backward that the order of the world's collectives misses."""
    assert pushes_of(Push(bucket=3)) == (3,)
    assert pushes_of(parse_action("0B1[0]{2,1,0}")) == (2, 1, 0)
    for text in ("P3", "0F1[0]", "0B1[0]", "Sa4>2*128", "U"):
        assert pushes_of(parse_action(text)) == ()


def test_an_exchange_is_with_one_neighbour() -> None:
    """Catches a rank that would wait for two at once: no transport pairs the two messages."""
    with pytest.raises(SpecError, match="exchange: got ranks 2 and 3, wanted one neighbour"):
        parse_action("X(Sa4>2*128,Rg3<3*96)")


def test_a_program_by_hand() -> None:
    """Catches a text that differs from the one the docs promise."""
    text = "rank 0: P0 P1 P2 0F0[0] 0B0[0]{2,1} G0 U"
    program = Program.parse(text)
    assert str(program) == text
    assert program.rank == 0
    assert program.actions[3] == Forward(stage=0, micro_batch=0, group=(0,))
    assert len(program.actions) == 7
    assert Program.parse("rank 3:") == Program(rank=3, actions=())


BAD = [
    "",
    "P",
    "X3",
    "P-1",
    "p3",
    "U1",
    "F4[0]",
    "0F[0]",
    "0F4",
    "0F4[]",
    "0F4[a]",
    "0F4[0",
    "0X4[0]",
    "P3\n",
    "0F4[0]{1}",
    "0B4[0]{}",
    "0B4{1}",
    "0B4{1}[0]",
    "Sa4<2*128",
    "Ra4>2*128",
    "Sx4>2*128",
    "Sa>2*128",
    "Sa4>2",
    "Sa4>2*",
    "Sa4>2*1.5",
    "Sa4>-2*128",
    "X()",
    "X(Sa4>2*128)",
    "X(Ra4<2*128,Sg3>2*96)",
    "X(Sa4>2*128,Sg3>2*96)",
    "X(Sa4>2*128,Rg3<2*96",
    "X(Sa4>2*128,Rg3<2*96,Rg4<2*96)",
    "X(Sa4<2*128,Rg3<2*96)",
    "X(X(Sa4>2*128,Rg3<2*96),Rg3<2*96)",
]


@pytest.mark.parametrize("text", BAD)
def test_malformed_actions_are_refused(text: str) -> None:
    """Catches a text that is taken as some other action."""
    with pytest.raises(SpecError, match=r"wanted P3, 0F4\[0,1\], .*X\(S..,R..\), G3, I2 or U"):
        parse_action(text)


@pytest.mark.parametrize("text", ["", "P0 U", "rank: U", "rank x: U", "node 0: U", "rank 0 U"])
def test_programs_without_a_rank_are_refused(text: str) -> None:
    """Catches a list of actions that belongs to nobody."""
    with pytest.raises(SpecError, match="wanted 'rank N: ACTIONS'"):
        Program.parse(text)


def test_a_malformed_action_of_a_program_is_named() -> None:
    """Catches a program read up to its first mistake."""
    with pytest.raises(SpecError, match="action: got 'Q1'"):
        Program.parse("rank 0: P0 Q1 U")


@pytest.mark.parametrize("text", ["0F4[,]", "0F4[0,]", "0B4[0,,1]"])
def test_groups_with_holes_are_refused(text: str) -> None:
    """Catches a traceback of int()."""
    with pytest.raises(SpecError):
        parse_action(text)
