"""What is worked out of a pack once for all layers, against the pack written out."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from headrace.layouts.token_plan import TokenPlan
from headrace.methods.context import Context, Place
from headrace.ops.random import DropoutKey
from headrace.ops.rotary import rotary_tables
from headrace.spec import Architecture
from headrace.spec.plan import TokenOrder

LLAMA = Architecture(layers=1, hidden=24, heads=4, kv_heads=2, ffn=40, vocabulary=5)
OTHERS = {
    "gpt": replace(LLAMA, kind="gpt", kv_heads=4, positions=600),
    "bert": replace(LLAMA, kind="bert", kv_heads=4, positions=600, causal=False, mask_id=4),
}
PACK = (3, 520, 1, 31)  # of four ranks the second document is folded
ORDERS: tuple[TokenOrder, ...] = ("natural", "zigzag")
SUBSETS = [m for n in range(1, 5) for m in permutations(range(4), n) if n < 3 or m[0] == 2]


def _place(order: TokenOrder, ranks: int = 4, member: int = 1, **rest: Any) -> Place:
    tokens = TokenPlan(lengths=PACK, ranks=ranks, order=order)
    values: dict[str, Any] = {"architecture": LLAMA, "dtype": torch.float64, "group": None}
    return Place(tokens=tokens, member=member, **(values | rest))


@pytest.mark.parametrize("order", ORDERS)
def test_tables_are_those_of_the_rows_in_the_order_of_the_pack(order: TokenOrder) -> None:
    """Would catch positions of the pack or of this rank instead of the members', and tables in the
    order of the ranks: queries and keys would be turned by the angles of other tokens."""
    place = _place(order)
    for members in SUBSETS:
        places = np.sort(np.concatenate([place.tokens.index(m) for m in members]))
        positions = np.concatenate([np.arange(n) for n in PACK])[places]
        wanted = rotary_tables(torch.from_numpy(positions), 6, LLAMA.rope_theta, torch.float64)
        tables = place.tables(members)
        assert tables is not None
        for got, one in zip(tables, wanted, strict=True):
            assert torch.equal(got, one), members


@pytest.mark.parametrize("order", ORDERS)
def test_orders_take_rows_into_the_order_of_the_pack_and_back(order: TokenOrder) -> None:
    """Would catch the two index tensors exchanged, and rows copied that are in order."""
    place = _place(order)
    for members in SUBSETS:
        rows = torch.from_numpy(np.concatenate([place.tokens.index(m) for m in members]))
        in_order = rows.sort().values
        orders = place.order(members)
        assert (orders is None) == torch.equal(rows, in_order)
        if orders is not None:
            there, back = orders
            assert torch.equal(rows[there], in_order), members
            assert torch.equal(rows[there][back], rows), members


def test_everything_is_worked_out_once() -> None:
    """Would catch tables made anew for each layer: a sine of every token on every layer. Those of
    one set of members must not be given for another, nor those of one pack for another."""
    place, other = _place("zigzag"), _place("zigzag")
    for members in ((1,), (0, 1, 2, 3), (2, 3)):
        assert place.tables(members) is place.tables(members)
        assert place.order(members) is place.order(members)
        assert place.tables(members) is not other.tables(members)
    one, all_of_them = place.tables((1,)), place.tables((0, 1, 2, 3))
    assert one is not None
    assert all_of_them is not None
    assert (len(one[0]), len(all_of_them[0])) == (place.tokens.sizes[1], sum(PACK))
    shorter = replace(place, tokens=TokenPlan(lengths=(5,), ranks=4)).tables((0, 1, 2, 3))
    assert shorter is not None
    assert len(shorter[0]) == 5


@pytest.mark.parametrize("kind", OTHERS)
def test_learned_positions_have_no_tables(kind: str) -> None:
    """Would catch positions added in the embedding and turned in again in each layer."""
    assert _place("zigzag", architecture=OTHERS[kind]).tables((0, 1)) is None


def test_tables_are_in_the_type_of_the_activations() -> None:
    """Would catch half-type activations widened by their rotation."""
    tables = _place("natural", dtype=torch.bfloat16).tables((0,))
    assert tables is not None
    assert {table.dtype for table in tables} == {torch.bfloat16}


def test_ranks_without_tokens() -> None:
    """Would catch a concatenation of nothing on a rank that only keeps its group company."""
    place = _place("zigzag")
    place = replace(place, tokens=TokenPlan(lengths=(1,), ranks=4, order="zigzag"))
    tables = place.tables((2, 3))
    assert tables is not None
    assert tables[0].shape == (0, 3)
    assert place.order((2, 3)) is None


def test_a_context_says_where_it_is() -> None:
    """Would catch a member counted in the world instead of the group, and a level that keeps what
    it should make again."""
    place = _place("natural", ranks=3, member=2)
    key = DropoutKey(seed=0, step=0, samples=torch.zeros(1), positions=torch.zeros(1))
    context = Context(place=place, dropout=key)
    assert place.everyone == (0, 1, 2)
    assert (context.member, context.ranks, context.group) == (2, 3, None)
    assert context.architecture is LLAMA
    assert context.tokens is place.tokens
    assert [
        replace(context, recompute=level).keeps_linear for level in ("none", "attention", "full")
    ] == [True, False, True]
