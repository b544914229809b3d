"""Collectives against rows that carry their own address, and against their transposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.comm.collectives import (
    Arriving,
    _padded_gather,
    agree,
    all_gather_rows,
    all_to_all_rows,
    from_first,
    gather_bytes,
    gather_floats,
    gather_to_first,
    issue_all_gather,
    issue_all_to_all,
    issue_reduce_scatter,
    issue_shift,
    reduce_scatter_rows,
)
from headrace.comm.fake_world import fake_world
from headrace.errors import PlanMismatch
from headrace.native.counted import TrafficCounter
from ranks import run_ranks

SIZES = {1: [(3,)], 2: [(2, 2), (3, 1), (0, 4), (0, 0)], 3: [(2, 2, 2), (3, 0, 1), (0, 0, 5)]}


def _matrices(ranks: int) -> list[np.ndarray]:
    """counts[sender, receiver]: random, with zeros, with a silent rank, with nothing at all."""
    rng = np.random.default_rng(ranks)
    drawn = [rng.integers(0, 4, size=(ranks, ranks)) for _ in range(4)]
    drawn[1][0] = 0
    drawn[2][:, -1] = 0
    return [*drawn, np.zeros((ranks, ranks), dtype=np.int64)]


def _tagged(rank: int, send: list[int], dtype: torch.dtype) -> torch.Tensor:
    """[sum(send), 2, 3], every row saying from whom, to whom and which."""
    rows = [100 * rank + 10 * to + i for to, n in enumerate(send) for i in range(n)]
    flat = torch.tensor(rows, dtype=torch.float64).view(len(rows), 1, 1).to(dtype)
    return flat.expand(len(rows), 3, 2).transpose(1, 2)  # not contiguous


def _exchange(ranks: int) -> list[np.ndarray]:
    rank, group = dist.get_rank(), dist.group.WORLD
    out = []
    for counts in _matrices(ranks):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            send, receive = counts[rank].tolist(), counts[:, rank].tolist()
            got = all_to_all_rows(_tagged(rank, send, dtype), send, receive, group)
            assert got.dtype == dtype
            out.append(got.double().numpy())
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_arrive_where_they_were_sent(ranks: int) -> None:
    """Would catch send and receive counts exchanged, or a buffer read past its strides."""
    results = run_ranks(ranks, _exchange, ranks)
    for rank, got in enumerate(results):
        for case, counts in enumerate(_matrices(ranks)):
            wanted = [
                100 * sender + 10 * rank + i
                for sender in range(ranks)
                for i in range(counts[sender, rank])
            ]
            for rows in got[3 * case : 3 * case + 3]:
                assert rows.shape == (len(wanted), 2, 3)
                # 221 needs 8 bits: whatever the type, no address is rounded.
                np.testing.assert_array_equal(rows, np.tile(np.reshape(wanted, (-1, 1, 1)), (2, 3)))


def _gather_and_scatter(ranks: int) -> list[tuple[np.ndarray, ...]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    out = []
    for sizes in SIZES[ranks]:
        torch.manual_seed(17 * rank + sum(sizes))
        x = torch.randn(sizes[rank], 3, dtype=torch.float64)
        y = torch.randn(sum(sizes), 3, dtype=torch.float64)
        gathered = all_gather_rows(x, sizes, group)
        scattered = reduce_scatter_rows(y, sizes, group)
        out.append(tuple(t.numpy() for t in (x, y, gathered, scattered)))
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_gather_concatenates_and_scatter_adds(ranks: int) -> None:
    """Would catch an uneven gather padded to the longest, or a sum that leaves out a rank."""
    results = run_ranks(ranks, _gather_and_scatter, ranks)
    for case, sizes in enumerate(SIZES[ranks]):
        x, y, gathered, scattered = zip(*(r[case] for r in results), strict=True)
        starts = np.cumsum([0, *sizes])
        for rank in range(ranks):
            np.testing.assert_array_equal(gathered[rank], np.concatenate(x))
            part = slice(starts[rank], starts[rank + 1])
            np.testing.assert_allclose(scattered[rank], sum(y)[part], atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gather_and_scatter_are_adjoint(ranks: int) -> None:
    """<gather x, y> = <x, scatter y>: would catch a scale (a mean) in one of the two."""
    results = run_ranks(ranks, _gather_and_scatter, ranks)
    for case in range(len(SIZES[ranks])):
        left = sum(float((r[case][2] * r[case][1]).sum()) for r in results)
        right = sum(float((r[case][0] * r[case][3]).sum()) for r in results)
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def _there_and_back(ranks: int) -> list[tuple[float, float]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(rank)
    out = []
    for counts in _matrices(ranks):
        send, receive = counts[rank].tolist(), counts[:, rank].tolist()
        x = torch.randn(sum(send), 2, dtype=torch.float64)
        y = torch.randn(sum(receive), 2, dtype=torch.float64)
        forward = all_to_all_rows(x, send, receive, group)
        backward = all_to_all_rows(y, receive, send, group)
        out.append((float((forward * y).sum()), float((x * backward).sum())))
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_to_all_with_counts_exchanged_is_its_adjoint(ranks: int) -> None:
    """Would catch an exchange whose way back delivers rows in another order."""
    results = run_ranks(ranks, _there_and_back, ranks)
    for case in range(len(_matrices(ranks))):
        left, right = (sum(r[case][side] for r in results) for side in (0, 1))
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def _under_way(ranks: int) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """For each case the results of all collectives, one after the other and all at once."""
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(rank)
    out = []
    for sizes, counts in zip(SIZES[ranks], _matrices(ranks), strict=False):
        send, receive = counts[rank].tolist(), counts[:, rank].tolist()
        x = torch.randn(sum(send), 3, 2, dtype=torch.float64).transpose(1, 2)
        mine, whole = (torch.randn(n, 3, dtype=torch.float64) for n in (sizes[rank], sum(sizes)))
        one_by_one = [
            all_to_all_rows(x, send, receive, group),
            all_gather_rows(mine, sizes, group),
            reduce_scatter_rows(whole, sizes, group),
            all_gather_rows(2 * mine, sizes, group),
        ]
        coming = [
            issue_all_to_all(x, send, receive, group),
            issue_all_gather(mine, sizes, group),
            issue_reduce_scatter(whole, sizes, group),
            issue_all_gather(2 * mine, sizes, group),
        ]
        order = [(2, 0, 3, 1), (3, 2, 1, 0), (1, 3, 0, 2)][rank]  # each rank waits in its own
        arrived = {i: coming[i].wait() for i in order}
        out.append(([t.numpy() for t in one_by_one], [arrived[i].numpy() for i in range(4)]))
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_under_way_are_those_waited_for_at_once(ranks: int) -> None:
    """Would catch results that belong to the order of the waits instead of that of the issues,
    and a sum over ranks taken before all of them are there."""
    for cases in run_ranks(ranks, _under_way, ranks):
        assert len(cases) == len(SIZES[ranks])
        for one_by_one, at_once in cases:
            for wanted, got in zip(one_by_one, at_once, strict=True):
                np.testing.assert_array_equal(got, wanted)


def _dropped_buffers() -> bool:
    rank, group = dist.get_rank(), dist.group.WORLD
    rows, coming = 20_000, []
    for i in range(8):
        x = torch.full((3, rows), float(10 * rank + i)).t()  # a copy is sent, which we never see
        coming.append(issue_shift(x, rows, group))
        del x
        torch.full((rows, 3), -1.0)  # takes the place of what is freed
    before = 10 * ((rank - 1) % 2)
    return all(bool((c.wait() == before + i).all()) for i, c in enumerate(coming))


def test_what_is_sent_lives_until_it_is_sent() -> None:
    """Would catch a message whose buffer is freed under way: gloo loses or garbles it."""
    assert run_ranks(2, _dropped_buffers) == [True, True]


def _shifted(ranks: int) -> list[tuple[np.ndarray, ...]]:
    """x, what came, and its transpose: rows like those that came, sent the other way."""
    rank, group = dist.get_rank(), dist.group.WORLD
    out = []
    for sizes in SIZES[ranks]:
        torch.manual_seed(rank + 3 * sum(sizes))
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        x = torch.randn(sizes[rank], 3, 2, dtype=torch.float64)
        came = issue_shift(x, sizes[before], group).wait()
        y = torch.randn_like(came)
        send, receive = [0] * ranks, [0] * ranks
        send[before], receive[after] = len(y), len(x)
        back = all_to_all_rows(y, send, receive, group)
        out.append(tuple(t.numpy() for t in (x, came, y, back)))
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_shift_is_one_hop_of_the_ring(ranks: int) -> None:
    """Would catch a ring that turns the other way (the same on two ranks), a hop of two, and rows
    cut to the size of the receiver; and that the way back is its transpose."""
    results = run_ranks(ranks, _shifted, ranks)
    for case in range(len(SIZES[ranks])):
        for rank in range(ranks):
            np.testing.assert_array_equal(results[rank][case][1], results[rank - 1][case][0])
        left = sum(float((r[case][1] * r[case][2]).sum()) for r in results)
        right = sum(float((r[case][0] * r[case][3]).sum()) for r in results)
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def _half_sums() -> list[tuple[torch.dtype, list[float]]]:
    """Sums of 256 (2048), 1 and 1: 258 (2050) is a value of bf16 (fp16), 257 (2049) is none."""
    group, out = dist.group.WORLD, []
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        x = torch.full((4, 1), large if dist.get_rank() == 0 else 1.0, dtype=dtype)
        got = reduce_scatter_rows(x, (2, 1, 1), group)
        out.append((got.dtype, got.flatten().tolist()))
    return out


def test_half_types_are_summed_in_single_precision() -> None:
    """Would catch a sum kept in bf16: both ones would be rounded away, one after the other."""
    for rank, got in enumerate(run_ranks(3, _half_sums)):
        count = (2, 1, 1)[rank]
        assert got == [(torch.bfloat16, [258.0] * count), (torch.float16, [2050.0] * count)]


def _summed() -> tuple[np.ndarray, np.ndarray]:
    x = _uneven_magnitudes()[dist.get_rank()]
    first = reduce_scatter_rows(x, (4, 2, 2), dist.group.WORLD)
    second = reduce_scatter_rows(x, (4, 2, 2), dist.group.WORLD)
    return first.numpy(), second.numpy()


def _uneven_magnitudes() -> torch.Tensor:
    """[3, 8, 16] fp32 whose sums over the first dim depend on the order."""
    generator = torch.Generator().manual_seed(0)
    scale = 10.0 ** torch.randint(-4, 5, (3, 8, 16), generator=generator)
    return torch.randn(3, 8, 16, generator=generator) * scale


def test_sums_are_taken_in_rank_order() -> None:
    """Would catch a sum in order of arrival or by a tree: equal plans would differ in bits."""
    x = _uneven_magnitudes()
    in_order, reversed_order = (x[0] + x[1]) + x[2], (x[2] + x[1]) + x[0]
    assert not torch.equal(in_order, reversed_order)
    results = run_ranks(3, _summed)
    for again in (0, 1):
        got = np.concatenate([r[again] for r in results])
        np.testing.assert_array_equal(got, in_order.numpy())


def _in_a_subgroup() -> list[Any]:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return []
    member = dist.get_rank(group)
    x = torch.full((2 - member, 1), float(dist.get_rank()))
    y = torch.arange(3.0)[:, None] + 10 * dist.get_rank()
    gathered = all_gather_rows(x, (2, 1), group).flatten().tolist()
    scattered = reduce_scatter_rows(y, (2, 1), group).flatten().tolist()
    payloads = gather_bytes(str(dist.get_rank()).encode(), group)
    return [gathered, scattered, payloads, gather_floats([member], group)]


def test_places_are_counted_within_the_group() -> None:
    """Would catch a rank of the world used as a place in a group."""
    first, outside, second = run_ranks(3, _in_a_subgroup)
    assert outside == []
    for got, scattered in ((first, [20.0, 22.0]), (second, [24.0])):
        assert got == [[0, 0, 2], scattered, [b"0", b"2"], [[0.0], [1.0]]]


PAYLOADS = [
    (b"", b"\0\xff\xfe", "\u00e9".encode() * 1000),
    (b"", b"", b""),
    (b"same", b"size", b"here"),
]
FLOATS = [[0.1, -0.0, 1e308], [float("inf"), 2.0**-1074, 3.0], [1 / 3, float("nan"), -7.5]]


def _payloads() -> tuple[list[list[bytes]], list[list[float]]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    return [gather_bytes(p[rank], group) for p in PAYLOADS], gather_floats(FLOATS[rank], group)


def test_bytes_and_floats_come_back_unchanged() -> None:
    """Would catch payloads cut at a zero byte or padded, and floats sent in single precision."""
    for payloads, floats in run_ranks(3, _payloads):
        assert payloads == [list(p) for p in PAYLOADS]
        assert np.array(floats).tobytes() == np.array(FLOATS).tobytes()


MEMBERS = [(0, 1, 2, 3), (3, 1), (1, 2, 3), (2,)]
SAID = [b"", b"\0", b"\0\xffplan\0", bytes(range(256)) * 20_000]


def _said() -> list[list[bytes]]:
    """What each group of this rank hears; only its first rank has what was to be said."""
    rank, found = dist.get_rank(), []
    for members in MEMBERS:
        group = dist.new_group(list(members))  # places by rank: (3, 1) has rank 1 first
        if rank in members:
            other = [b"", b"x" * 9, b"longer than what the first says"][rank % 3]
            first = rank == min(members)
            found.append([from_first(text if first else other, group) for text in SAID])
    return found


def test_all_hear_what_the_first_says() -> None:
    """Would catch a payload cut at a zero byte or to the size of a listener's own, rank 0 of the
    world taken for the first of its group, and a broadcast of nothing, which hangs."""
    for rank, heard in enumerate(run_ranks(4, _said)):
        assert len(heard) == sum(rank in members for members in MEMBERS)
        assert all(said == SAID for said in heard)


def _agreed(values: list[tuple[str, str, str]]) -> list[str]:
    out = []
    for value in values:
        try:
            agree("hash of the plan", value[dist.get_rank()], dist.group.WORLD)
            out.append("agreed")
        except PlanMismatch as error:
            out.append(str(error))
    return out


def test_disagreement_is_told_on_every_rank() -> None:
    """Would catch an error on the odd rank alone: the others would wait for it for ever."""
    values = [("aa", "aa", "aa"), ("aa", "aa", "b"), ("", "x", ""), ("a" * 64, "a" * 64, "a" * 64)]
    results = run_ranks(3, _agreed, values)
    assert results[0] == results[1] == results[2]
    same, last_differs, middle_differs, long = results[0]
    assert (same, long) == ("agreed", "agreed")
    assert last_differs.startswith("hash of the plan: got b on rank 2, wanted aa as on rank 0")
    assert "x on rank 1" in middle_differs


def test_a_single_rank_communicates_nothing() -> None:
    """Would catch a collective that needs a process group where there is none."""
    x = torch.randn(3, 2)
    assert all_to_all_rows(x, [3], [3], None) is x
    assert all_gather_rows(x, [3], None) is x
    assert reduce_scatter_rows(x, [3], None) is x
    assert issue_all_to_all(x, [3], [3], None).wait() is x
    assert issue_all_gather(x, [3], None).wait() is x
    assert issue_reduce_scatter(x, [3], None).wait() is x
    assert issue_shift(x, 3, None).wait() is x
    assert Arriving.there(x).wait() is x
    assert gather_bytes(b"me", None) == [b"me"]
    assert from_first(b"me", None) == b"me"
    assert gather_floats((1.5, 2.5), None) == [[1.5, 2.5]]
    agree("anything", "alone", None)


def _gathered() -> list[Any]:
    rank, group = dist.get_rank(), dist.group.WORLD
    payloads = [b"", b"\0" * rank, bytes([rank]) * (5 - rank), b"x" if rank == 2 else b""]
    return [gather_to_first(payload, group) for payload in payloads]


def test_the_first_rank_gets_what_all_say() -> None:
    """Would catch padding taken for what was said, zeros cut off, and ranks that get what only the
    first needs."""
    first, *others = run_ranks(3, _gathered)
    assert first == [
        [b""] * 3,
        [b"", b"\0", b"\0\0"],
        [b"\0" * 5, b"\1" * 4, b"\2" * 3],
        [b"", b"", b"x"],
    ]
    assert others == [[None] * 4] * 2
    assert gather_to_first(b"alone", None) == [b"alone"]


def _gathered_on_a_device(sizes: tuple[int, ...], rank: int) -> tuple[list[int], int]:
    """The shape of a gather of tensors without contents, and the bytes that it sends."""
    dist.destroy_process_group()
    with fake_world(rank, len(sizes)) as groups, TrafficCounter() as wire:
        x = torch.empty(sizes[rank], 3, device="meta")
        return list(all_gather_rows(x, sizes, groups.world).shape), wire.sent_bytes


@pytest.mark.parametrize(
    ("sizes", "rows"), [((4, 4, 4), 4), ((5, 4, 4), 5), ((4, 5, 5), 5), ((7, 4, 4), None)]
)
def test_devices_gather_as_many_rows_from_each(sizes: tuple[int, ...], rows: int | None) -> None:
    """Catches padding that stays in the result, and a rank that takes another size than others."""
    for rank in range(3):
        ((shape, sent),) = run_ranks(1, _gathered_on_a_device, sizes, rank)
        assert shape == [sum(sizes), 3]
        assert sent == 2 * 12 * (rows or sizes[rank])


def _padded(sizes: tuple[int, ...]) -> tuple[bool, bool]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    x = torch.arange(3.0 * sizes[rank]).view(-1, 3) + 100 * rank
    wanted = all_gather_rows(x, sizes, group)
    coming = _padded_gather(x, sizes, group)
    return torch.equal(coming.wait(), wanted), len(x) == sizes[rank]


@pytest.mark.parametrize("sizes", [(5, 4, 4), (4, 5, 5), (1, 0, 1), (0, 1, 0)])
def test_padding_does_not_come_back(sizes: tuple[int, ...]) -> None:
    """Catches rows of one rank where another's belong."""
    assert run_ranks(3, _padded, sizes) == [(True, True)] * 3
