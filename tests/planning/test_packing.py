"""Packs of one block."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import Speeds, synthetic_costs
from headrace.planning.batch import Packed, PriceTable, SortedBatch
from headrace.planning.layer_choice import layer_frontier
from headrace.planning.packing import pack as pack_group
from headrace.planning.priced import Frontier, PricedScheme
from headrace.spec import Lengths, Scheme
from headrace.units import GIB
from planning.brute_force import partitions


def frontier_of(memory_gib: float, launch_s: float) -> Frontier:
    costs = synthetic_costs(
        1, layers=4, memory_bytes=int(memory_gib * GIB), speeds=Speeds(launch_s=launch_s)
    )
    return layer_frontier(costs, 1)


def pack(tokens: list[int], frontier: Frontier) -> Packed:
    """The micro-batches of all sequences on one rank."""
    scheme = PricedScheme(scheme=Scheme(), frontier=frontier)
    table = PriceTable(SortedBatch.of(Lengths.of(tokens)), [scheme], 1)
    return pack_group(table, 0, range(len(tokens)))


FRONTIERS = [frontier_of(m, launch_s) for m in (3, 4, 8, 40) for launch_s in (0.0, 1e-3)]


@settings(deadline=None)
@given(
    frontier=st.sampled_from(FRONTIERS),
    lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=40),
)
def test_every_sequence_once_within_memory(frontier: Frontier, lengths: list[int]) -> None:
    """Catches lost sequences, packs over the capacity, and a wrong sum of seconds."""
    tokens = sorted((min(n, frontier.most_tokens) for n in lengths), reverse=True)
    packed = pack(tokens, frontier)
    assert sorted(i for bin_ in packed.bins for i in bin_) == list(range(len(tokens)))
    seconds = 0.0
    for bin_, index in zip(packed.bins, packed.rows, strict=True):
        total = sum(tokens[i] for i in bin_)
        assert total <= frontier.caps[index]
        a, b, c = frontier.rows[index]
        seconds += a * sum(tokens[i] ** 2 for i in bin_) + b * total + c
    assert abs(packed.seconds - seconds) <= 1e-9 * seconds


@settings(max_examples=150, deadline=None)
@given(
    frontier=st.sampled_from(FRONTIERS),
    lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=6),
)
def test_close_to_the_best_partition(frontier: Frontier, lengths: list[int]) -> None:
    """Catches a choice of the number of micro-batches that wastes constants or recomputation."""
    tokens = sorted((min(n, frontier.most_tokens) for n in lengths), reverse=True)
    best = float("inf")
    for parts in partitions(tuple(tokens)):
        found = [frontier.best(sum(n * n for n in part), sum(part)) for part in parts]
        if all(found):
            best = min(best, sum(pair[0] for pair in found if pair))
    assert best * (1 - 1e-9) <= pack(tokens, frontier).seconds <= best * 1.05


def test_what_fits_is_one_micro_batch() -> None:
    """Catches paying the constant more than once for nothing."""
    frontier = frontier_of(40, 1e-3)
    packed = pack([5000] * 20, frontier)
    assert packed.bins == (tuple(range(20)),)
    assert packed.rows == (0,)


def test_pipelines_of_equal_lengths_share_a_pack() -> None:
    """Catches packs of other sequences than a pipeline's own where lengths repeat, and each of many
    alike pipelines packed anew."""
    lengths = Lengths.of([70] * 40 + [30] * 200)
    scheme = PricedScheme(scheme=Scheme(), frontier=FRONTIERS[0])
    table = PriceTable(SortedBatch.of(lengths), [scheme], 1)
    parts = [[*range(first, 40, 4), *range(40 + first, 240, 4)] for first in range(4)]
    packs = [pack_group(table, 0, members) for members in parts]
    assert len(table.alike_packs) == 1
    for members, packed in zip(parts, packs, strict=True):
        assert sorted(i for held in packed.bins for i in held) == members
        fresh = PriceTable(SortedBatch.of(lengths), [scheme], 1)
        assert pack_group(fresh, 0, members) == packed
