"""Samples that live on different ranks, and how they come to where a plan needs them.

Each rank gives its own samples; the batch has those of rank 0 first, then those of rank 1, ... All
ranks know how long every sample is, so all know a plan alike: who works on which samples, and who
has them. Before the work of a plan every rank sends each other one what it needs, whole and once:
the ranks of a group cut a sample by themselves, as they do where all have it.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrace.adopt.spread_model import Item
from headrace.comm.collectives import exchange_bytes
from headrace.comm.mesh import Groups
from headrace.spec.plan import Plan

__all__ = ["OwnSamples", "field_types"]


@dataclass(slots=True, kw_only=True, eq=False)
class OwnSamples:
    """The samples of a batch of which each rank gave some. Several that stay together count as one
    sample here: its tokens one behind the other.

    Attributes:
        given: The samples of this rank by their number in the batch, each as a list: its fields,
            then the tensors that go with it (one dict for each of those that stay together).
        starts: The number of the first sample of each rank, then the count of all samples.
        lengths: Tokens of each sample of the batch.
        groups: The groups of this rank.
    """

    given: Mapping[int, Sequence[Item]]
    starts: Sequence[int]
    lengths: Sequence[int]
    groups: Groups
    # As ``given``, for the samples that this rank has: its own, and after `bring` those it needs.
    _here: dict[int, Sequence[Item]] = field(default_factory=dict, init=False)

    def bring(self, plan: Plan) -> None:
        """Exchange samples with all ranks, so that this rank has those that it works on in a plan.
        Collective."""
        me, ranks = self.groups.rank, self.groups.ranks
        needed_by_rank = [self._needed(plan, rank) for rank in range(ranks)]
        payloads = list[bytes]()  # the samples to send to each rank
        for rank, needed in enumerate(needed_by_rank):
            numbers = self._numbers_sent(needed, source=me, target=rank)
            payloads.append(_to_bytes([self.given[i] for i in numbers]) if numbers else b"")
        received = exchange_bytes(payloads, self.groups.world)
        self._here = dict(self.given)
        for rank in range(ranks):
            numbers = self._numbers_sent(needed_by_rank[me], source=rank, target=me)
            self._here |= zip(numbers, _from_bytes(received[rank]), strict=True)

    def _numbers_sent(self, needed: Sequence[int], *, source: int, target: int) -> list[int]:
        """Of the samples that the rank ``target`` needs, the numbers of those that ``source`` gave
        and sends to it; none where both are the same rank."""
        if source == target:
            return []
        return [number for number in needed if self.owner(number) == source]

    def owner(self, number: int) -> int:
        """The rank that gave the sample of a number."""
        return bisect_right(self.starts, number) - 1

    def read(self, number: int) -> Item:
        """The fields of a sample that this rank works on, by its number in the batch. Call
        :meth:`bring` before."""
        return self._here[number][0]

    def beside(self, number: int) -> Sequence[Item]:
        """The tensors that go with a sample that this rank works on: one dict for each of those
        that stay together in it, perhaps empty."""
        return self._here[number][1:]

    def like(self) -> Item:
        """The shortest sample that this rank has, as an example of their fields. A rank that gave
        none has the shortest of the batch (:meth:`bring` sees to that)."""
        return self._here[self._shortest(self._here)][0]

    def _needed(self, plan: Plan, rank: int) -> list[int]:
        """The numbers of the samples that a rank works on in a plan, in order. A rank that gave no
        samples has the shortest of the batch too: in a turn in which it has no work it runs two
        tokens of that one without a loss, as all ranks meet at every layer of a turn."""
        numbers = {
            number
            for micro in plan.micro_batches
            if rank in plan.pipelines[micro.pipeline].ranks
            for number in micro.sequences
        }
        gave_none = self.starts[rank] == self.starts[rank + 1]
        if gave_none:
            numbers.add(self._shortest(range(len(self.lengths))))
        return sorted(numbers)

    def _shortest(self, numbers: Iterable[int]) -> int:
        """The number of the sample with the fewest tokens, the first of several."""
        return min(numbers, key=lambda number: (self.lengths[number], number))


def field_types(item: Item) -> dict[str, str]:
    """The type of each field of a sample by its name, as text (``"int64"``): ranks must give fields
    of the same types."""
    return {name: str(value.dtype).removeprefix("torch.") for name, value in sorted(item.items())}


def _to_bytes(samples: Sequence[Sequence[Item]]) -> bytes:
    """The bytes of samples, each a list of dicts of tensors: a line of JSON that has (name, type,
    shape) of each tensor in lists as the samples are, then the values of all tensors in order."""
    header = list[list[list[tuple[str, str, list[int]]]]]()
    values = list[bytes]()
    for items in samples:
        header_of_sample = list[list[tuple[str, str, list[int]]]]()
        for item in items:
            fields = list[tuple[str, str, list[int]]]()
            for name, value in item.items():
                flat = value.detach().cpu().contiguous().view(-1)
                dtype = str(value.dtype).removeprefix("torch.")
                fields.append((name, dtype, list(value.shape)))
                values.append(flat.view(torch.uint8).numpy().tobytes())
            header_of_sample.append(fields)
        header.append(header_of_sample)
    return json.dumps(header).encode() + b"\n" + b"".join(values)


def _from_bytes(data: bytes) -> list[list[Item]]:
    """The samples of which :func:`_to_bytes` made ``data``; no samples for empty ``data``."""
    header, _, values = data.partition(b"\n")
    samples, start = list[list[Item]](), 0
    for fields_of_items in json.loads(header) if header else ():
        items = list[Item]()
        for fields in fields_of_items:
            item = Item()
            for name, dtype_name, shape in fields:
                dtype = getattr(torch, dtype_name)
                stop = start + dtype.itemsize * math.prod(shape)
                item[name] = _tensor_of(values[start:stop], dtype, shape)
                start = stop
            items.append(item)
        samples.append(items)
    return samples


def _tensor_of(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of a type and shape whose values are the bytes ``data``."""
    if not data:  # frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
