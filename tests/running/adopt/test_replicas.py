"""Replicas beside shards: several batches at once, each on some of the ranks."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.adopt.axis_examples import ltx, wan
from headrace.adopt.placement import bit_sums
from headrace.errors import PlanMismatch, SpecError
from ranks import run_ranks
from running.adopt.axial import stages, table
from running.adopt.test_adapted import EXACT, adapted, alone, drawn, gradients
from running.engine.loops import llama
from spread import whole


def of_axes(replicas: int, alike: bool) -> tuple[float, float]:
    """How far gradients and the loss of several batches are from one process'."""
    batches = [drawn(at, 1, 5 - at % 2, 4, 6) for at in range(replicas)]
    mine = dist.get_rank() * replicas // dist.get_world_size()
    model = table()
    run = adapted(model)
    part = run.shard({"x": batches[mine]}, replicas=replicas)
    assert part.targets == sum(x.numel() // x.shape[-1] for x in batches)
    out = run(**part)
    if alike:
        out = run.collect(out, "b i j k c")
    loss = out.square().sum()
    run.backward(loss, alike=alike)
    total = run.add_up(loss, alike=alike)
    plain = table()
    wanted = alone(plain, batches)
    whole_loss = sum(float(plain(x).square().sum()) for x in batches)
    off = float((gradients(model) - wanted).abs().max() / wanted.abs().max())
    return off, abs(float(total) / whole_loss - 1)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), whole(4, 4), whole(3, 3), whole(2, 1)])
def test_replicas_of_axes(ranks: int, replicas: int, alike: bool) -> None:
    """Catches a replica that is given the batch of another, sums over one replica alone, and what
    is alike in a replica that counts once in all."""
    for found in run_ranks(ranks, of_axes, replicas, alike):
        assert max(found) <= EXACT


def of_tokens(replicas: int, wrapped: bool) -> tuple[float, float]:
    """The same for a model of tokens, whose batches have other numbers of labels."""
    batches = []
    for at in range(replicas):
        ids = torch.randint(0, 61, (2, 13 + at), generator=torch.Generator().manual_seed(at))
        labels = ids.clone()
        labels[:, : 3 * at] = -100
        batches.append({"input_ids": ids, "labels": labels})
    mine = dist.get_rank() * replicas // dist.get_world_size()
    model, plain = llama(), llama()
    run = hr.compile(DistributedDataParallel(model) if wrapped else model)
    part = run.shard(batches[mine], replicas=replicas)
    loss = run(**part.inputs).loss
    run.backward(loss)
    total = float(run.add_up(loss))
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    assert part.targets == sum(counts)
    losses = [plain(**b).loss * n / sum(counts) for b, n in zip(batches, counts, strict=True)]
    sum(losses).backward()  # type: ignore[union-attr]
    wanted = gradients(plain)
    off = float((gradients(model) - wanted).abs().max() / wanted.abs().max())
    return off, abs(total / float(sum(losses)) - 1)


@pytest.mark.parametrize("wrapped", [False, whole(True)])
@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), whole(2, 2), whole(3, 3)])
def test_replicas_of_tokens(ranks: int, replicas: int, wrapped: bool) -> None:
    """Catches means over the labels of one replica, and replicas that have each other's tokens."""
    pytest.importorskip("transformers")
    for found in run_ranks(ranks, of_tokens, replicas, wrapped):
        assert max(found) < 1e-6  # norms of transformers are single precision


def uneven() -> None:
    with pytest.raises(SpecError, match="replicas: got 2, wanted a divisor of the 3 ranks"):
        adapted(table()).shard({"x": drawn(0, 1, 5, 4, 6)}, replicas=2)


def test_ranks_are_divided_evenly() -> None:
    """Catches ranks that no replica has."""
    run_ranks(3, uneven)


class Wire:
    """Counts what ``dist`` sends to other ranks; operators of headrace hide it from a mode."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._exchange, self._send = dist.all_to_all_single, dist.isend

    def __enter__(self) -> Self:
        dist.all_to_all_single, dist.isend = self.exchange, self.send  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_to_all_single, dist.isend = self._exchange, self._send

    def exchange(
        self, out: Any, sent: Any, receive: Any, send: Any, *, group: Any, **rest: Any
    ) -> Any:
        here = dist.get_rank(group)
        rows = sum(count for rank, count in enumerate(send) if rank != here)
        self.sent_bytes += rows * sent[:1].nbytes
        return self._exchange(out, sent, receive, send, group=group, **rest)

    def send(self, x: torch.Tensor, *given: Any, **named: Any) -> Any:
        self.sent_bytes += x.nbytes
        return self._send(x, *given, **named)


def joint_bytes(name: str) -> list[int]:
    """Bytes that attention over all places sends in a forward, as counted and as told."""
    made = {"wan": wan, "ltx": ltx}[name](samples=1)
    run = hr.adapt(made.model, check=False)
    part = run.shard(made.inputs)
    with torch.no_grad(), Wire() as wire:
        run(**part)
    assert "sent by" in str(run)
    return [wire.sent_bytes, sum(move.sent_bytes for move in run.moves)]


@pytest.mark.parametrize(("name", "ranks"), [("wan", 2), ("ltx", 3), whole("wan", 3), ("wan", 4)])
def test_bytes_of_attention_over_all_places_are_counted(name: str, ranks: int) -> None:
    """Catches Ulysses and rings that are said to send nothing, heads that are not divided evenly,
    and the blocks of other ranks that a ring passes on."""
    pytest.importorskip("diffusers")
    for counted, told in run_ranks(ranks, joint_bytes, name, timeout_s=100):
        assert counted == told > 0


def differing(compare: bool) -> str:
    model = table()
    run = hr.adapt(
        model,
        stages=stages(returns=False),
        inputs={"x": "b i j k c"},
        axis="i",
        batch="b",
        compare=compare,
    )
    try:
        run.shard({"x": drawn(dist.get_rank(), 1, 5, 4, 6)})
    except PlanMismatch as error:
        return str(error)
    return ""


def test_inputs_are_compared_unless_told_otherwise() -> None:
    """Catches ranks that work on other inputs, and a comparison that cannot be left out."""
    assert all("inputs: got" in text for text in run_ranks(2, differing, True))
    assert run_ranks(2, differing, False) == ["", ""]


def test_sums_of_bits_know_places() -> None:
    """Catches a hash made on devices that is blind to the order of values, to a bit, or to what
    lies beyond its first part."""
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    found = {tuple(bit_sums(x).tolist())}
    for other in (x.flip(0), x.clone().view(7, 5).t().contiguous(), x.double()):
        found.add(tuple(bit_sums(other).tolist()))
    changed = x.clone()
    changed.view(torch.int32)[4, 6] ^= 1
    found.add(tuple(bit_sums(changed).tolist()))
    assert len(found) == 5
    long = torch.zeros(9 << 20, dtype=torch.uint8)
    before = bit_sums(long)
    long[-1] = 1
    assert not torch.equal(before, bit_sums(long))
    assert torch.equal(bit_sums(x[:, ::2]), bit_sums(x[:, ::2].contiguous()))
