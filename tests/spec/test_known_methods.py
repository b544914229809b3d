"""Facts of methods that no other test asks for."""

from __future__ import annotations

import pytest

from headrace.spec import Architecture
from headrace.spec.known_methods import FACTS, block_ranks
from headrace.spec.layer_plan import LayerOption

MODEL = Architecture(layers=2, hidden=64, heads=8, kv_heads=4, ffn=256, vocabulary=96)


@pytest.mark.parametrize(
    ("option", "ranks", "block"),
    [
        ("megatron_ts", 4, 4),
        ("tensor_ring", 8, 4),
        ("tensor_ring", 6, 3),
        ("tensor_ring", 5, 5),
        ("ulysses_z", 4, 1),
        ("megatron_cz", 4, 1),
        ("tensor_ring/megatron_ts", 8, 1),
        ("someone_elses", 4, 1),
    ],
)
def test_blocks_that_use_shards_as_they_lie(option: str, ranks: int, block: int) -> None:
    """Would catch a planner that gives a method shards which it cannot work with, or that takes
    two branches with blocks of different sizes for one of them."""
    assert MODEL.tensor_ranks == 4
    assert block_ranks(LayerOption.parse(option), ranks, MODEL.tensor_ranks) == block


def test_what_a_rank_fetches_follows_from_its_block() -> None:
    """Would catch weights charged to a method that never fetches them, or not to one that does."""
    assert FACTS["ulysses_z"].fetched(4, 4) == 1
    assert FACTS["megatron_ts"].fetched(4, 4) == 0
    assert FACTS["tensor_ring"].fetched(8, 4) == pytest.approx((1 / 4 - 1 / 8) / (1 - 1 / 8))
    assert {facts.fetched(1, 4) for facts in FACTS.values()} == {1}
