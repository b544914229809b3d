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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrace.adopt.spread_model import Item
from headrace.comm.collectives import exchange_bytes
from headrace.comm.mesh import Groups
from headrace.spec.plan import Plan

__all__ = ["OwnSamples", "field_types"]


@dataclass(slots=True, kw_only=True, eq=False)
class OwnSamples:
    """The samples of a batch of which this rank has some.

    Attributes:
        given: What this rank gave, by the number in the batch: a sample, and what goes with it.
        starts: The number of the first sample of each rank, then that of all samples.
        lengths: Tokens of each sample of the batch.
        groups: The groups of this rank.
    """

    given: Mapping[int, Sequence[Item]]
    starts: Sequence[int]
    lengths: Sequence[int]
    groups: Groups
    _here: dict[int, Sequence[Item]] = field(default_factory=dict, init=False)

    def bring(self, plan: Plan) -> None:
        """Have the samples here that this rank works on. Collective."""
        me, ranks = self.groups.rank, self.groups.ranks
        needed = [self._needed(plan, rank) for rank in range(ranks)]
        going = [[i for i in own if self.owner(i) == me != rank] for rank, own in enumerate(needed)]
        payloads = [_to_bytes([self.given[i] for i in own]) if own else b"" for own in going]
        found = exchange_bytes(payloads, self.groups.world)
        self._here = dict(self.given)
        for rank in range(ranks):
            coming = [i for i in needed[me] if self.owner(i) == rank != me]
            self._here |= zip(coming, _from_bytes(found[rank]), strict=True)

    def owner(self, number: int) -> int:
        """The rank that gave a sample."""
        return bisect_right(self.starts, number) - 1

    def read(self, number: int) -> Item:
        """A sample that this rank works on."""
        return self._here[number][0]

    def beside(self, number: int) -> Sequence[Item]:
        """What goes with a sample that this rank works on."""
        return self._here[number][1:]

    def like(self) -> Item:
        """A sample with the fields of all: the shortest one, which all have that gave none."""
        return self._here[min(self._here, key=lambda i: (self.lengths[i], i))][0]

    def _needed(self, plan: Plan, rank: int) -> list[int]:
        """The samples that a rank works on, and one where it has none of its own: its turns without
        work take two tokens of it."""
        found = {
            i
            for micro in plan.micro_batches
            if rank in plan.pipelines[micro.pipeline].ranks
            for i in micro.sequences
        }
        if self.starts[rank] == self.starts[rank + 1]:
            found.add(min(range(len(self.lengths)), key=lambda i: (self.lengths[i], i)))
        return sorted(found)


def field_types(item: Item) -> dict[str, str]:
    """The type of each field, which must be the same on all ranks."""
    return {name: str(value.dtype).removeprefix("torch.") for name, value in sorted(item.items())}


def _to_bytes(samples: Sequence[Sequence[Item]]) -> bytes:
    """Samples with what goes with them: a line of JSON that says names, types and shapes, then the
    values."""
    heads, body = list[list[list[tuple[str, str, list[int]]]]](), list[bytes]()
    for parts in samples:
        heads.append([])
        for item in parts:
            heads[-1].append([])
            for name, value in item.items():
                flat = value.detach().cpu().contiguous().view(-1)
                dtype = str(value.dtype).removeprefix("torch.")
                heads[-1][-1].append((name, dtype, list(value.shape)))
                body.append(flat.view(torch.uint8).numpy().tobytes())
    return json.dumps(heads).encode() + b"\n" + b"".join(body)


def _from_bytes(data: bytes) -> list[list[Item]]:
    """What :func:`_to_bytes` wrote; nothing of no bytes."""
    head, _, body = data.partition(b"\n")
    found, start = list[list[Item]](), 0
    for parts in json.loads(head) if head else ():
        found.append([])
        for fields in parts:
            item = Item()
            for name, text, shape in fields:
                dtype = getattr(torch, text)
                stop = start + dtype.itemsize * math.prod(shape)
                part = bytearray(body[start:stop])
                item[name] = (
                    torch.frombuffer(part, dtype=dtype).view(shape)
                    if part
                    else torch.empty(shape, dtype=dtype)
                )
                start = stop
            found[-1].append(item)
    return found
