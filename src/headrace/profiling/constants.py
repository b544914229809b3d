"""Costs of steps and layers that do not depend on lengths: pulls, gathers, links, weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.comm.collectives import all_to_all_rows
from headrace.comm.mesh import Groups
from headrace.layouts.partition import group_shards, storage_partition, storage_partitions
from headrace.native.executor import Executor
from headrace.native.spans import Clock
from headrace.native.storage import Storage
from headrace.profiling.sweep import block, slowest
from headrace.profiling.two_layers import TwoLayers
from headrace.spec.architecture import Architecture, parameter_count, weight_table
from headrace.spec.known_methods import SINGLE_RANK
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.lengths import Lengths
from headrace.spec.plan import MicroBatch, Pipeline, Plan, Working
from headrace.spec.strategy import Scheme

__all__ = ["StepConstants", "working_bytes"]

_MESSAGES = (1 << 14, 1 << 18, 1 << 22)
"""Bytes to each partner with which a link is measured."""

_ROOMY = 0.5
"""The fraction of the memory up to which the exchange of the full model is measured directly."""


def working_bytes(a: Architecture, ranks: int, p: int, dtype: torch.dtype) -> dict[Working, int]:
    """Bytes of working weights and gradients of a rank that works in groups of p among ``ranks``.

    ``replicated``: a value and a gradient of every weight. ``sharded``: those of this rank's shards
    of all weights, and in passing those of one layer's whole matrices, which are gathered when the
    layer runs. A weight that the rank both stores and works with needs less, as on a single rank,
    and where the shards of a group of all ranks are the stored ones: its gradient goes into the
    stored one, and the stored value is used, or a copy of it in the working type.
    """
    # Bytes of an element's value and gradient; gradients are of fp32 at least. Weights are stored
    # in fp32 at least: where the rank stores the element, only a copy in a narrower type takes
    # bytes.
    both_bytes = dtype.itemsize + max(4, dtype.itemsize)
    stored_bytes = dtype.itemsize if dtype.itemsize < 4 else 0
    replicated = shards = gathered = 0
    for weight in weight_table(a):
        replicated += (stored_bytes if ranks == 1 else both_bytes) * weight.elements
        # A weight with a unit is cut between groups of so many rows; others are never cut.
        is_sharded = p > 1 and weight.unit is not None
        parts = group_shards(weight, p)  # the rows of each rank of the group
        stores_them = p == ranks and parts == storage_partition(weight, ranks).parts
        if not stores_them:
            shard_bytes = both_bytes
        elif is_sharded:  # a stored shard is cast only while its layer is gathered: counted there
            shard_bytes = 0
        else:
            shard_bytes = stored_bytes
        shards += shard_bytes * max(map(len, parts)) * weight.row_elements
        # Matrices of the first layer, bucket 1: all layers are alike, and one is there at a time.
        if is_sharded and weight.bucket == 1:
            gathered += both_bytes * weight.elements
    # Of one layer or few, what is gathered is nearly all of the model, beside its shards: more than
    # a replica, which the rank then needs at most.
    return {"replicated": replicated, "sharded": min(replicated, shards + gathered)}


def sharded_share(a: Architecture, ranks: int, node_sizes: Sequence[int] | None) -> float:
    """What a rank receives in a pull, or sends in a push, where one group of all ``ranks`` shards
    weights, as a share of what it would where they are replicated. ``node_sizes`` are the ranks of
    each node, None where all are on one."""
    if ranks == 1:
        return 1.0
    table = list(weight_table(a))
    stored = storage_partitions(table, ranks, node_sizes)
    most_rows: dict[tuple[int, int | None], int] = {}  # that a rank receives, by kind of weight
    received = elements = 0
    for weight in table:
        kind = weight.rows, weight.unit
        if kind not in most_rows:
            parts = zip(group_shards(weight, ranks), stored[weight.name].parts, strict=True)
            most_rows[kind] = max(len(shard) - len(shard.meet(own)) for shard, own in parts)
        received += most_rows[kind] * weight.row_elements
        elements += weight.elements
    return received / (elements * (ranks - 1) / ranks)


class StepConstants:
    """Measures what does not depend on lengths on the ranks of ``groups``, with the weights of
    ``storage`` and of ``layers``; every rank gets the same numbers."""

    def __init__(self, storage: Storage, layers: TwoLayers, groups: Groups, clock: Clock) -> None:
        """Measurements on this rank, by ``clock``."""
        self._storage, self._two = storage, layers  # the whole model's weights, and two layers
        self._groups, self._clock = groups, clock

    def exchange(self, memory_bytes: int) -> dict[str, float]:
        """Seconds of pull, push and update of the whole model (``pull_s``, ``push_s``,
        ``update_s``), from two nearly empty steps: of two layers, scaled by their weights, where a
        rank of ``memory_bytes`` cannot hold the whole model. Weights are left as they were, the
        optimizer's state is reset. Collective."""
        dtype, device = self._two.dtype, self._two.device
        architecture, ranks = self._storage.architecture, self._groups.ranks
        replicated_bytes = working_bytes(architecture, ranks, 1, dtype)["replicated"]
        storage, scale = self._storage, 1.0
        if self._storage.bytes_held() + replicated_bytes > _ROOMY * memory_bytes:
            storage = Storage(
                self._two.two,
                self._groups,
                seed=0,
                dtype=storage.dtype,
                working_dtype=dtype,
                device=device,
            )
            scale = parameter_count(architecture) / parameter_count(self._two.two)
        saved = {name: master.clone() for name, master in storage.masters.items()}
        best = self._nearly_empty_steps(storage)
        for name, master in storage.masters.items():
            master.copy_(saved[name])
        storage.reset_optimizer()
        return {name: seconds * scale for name, seconds in best.items()}

    def _nearly_empty_steps(self, storage: Storage) -> dict[str, float]:
        """Seconds of pull, push and update in steps with one token on each rank, as
        :meth:`exchange` names them: those of the slowest rank, the less of two steps each.
        Collective."""
        executor = Executor(storage, self._groups, seed=0, device=self._two.device)
        plan = self._plan_of_lone_ranks(storage.architecture.layers)
        tokens = tuple(np.zeros(1, np.int32) for _ in range(self._groups.ranks))
        kinds = ("pull", "push", "update")
        best = [float("inf")] * len(kinds)
        for _ in range(2):
            rows = executor.run(plan, tokens, step=0, lr=0.0).rows
            local = [sum(row.seconds for row in rows if row.kind == kind) for kind in kinds]
            agreed = slowest(self._groups, local)
            best = [min(pair) for pair in zip(best, agreed, strict=True)]
        return {f"{kind}_s": seconds for kind, seconds in zip(kinds, best, strict=True)}

    def _seconds(self, work: Callable[[], Any]) -> float:
        """The seconds that ``work`` takes on this rank."""
        start = self._clock.mark()
        work()
        return self._clock.between(start, self._clock.mark())

    def gather(self, p: int) -> tuple[float, float]:
        """(forward, backward) seconds that sharded weights add to one layer on groups of p: a
        gather forward; a gather and a reduce-scatter backward. The slowest rank's, the less of two
        runs each. Collective."""
        group_ranks = block(self._groups, p)
        shards = self._two.shards(self._groups, group_ranks) if group_ranks else []
        best = [float("inf")] * 2
        for _ in range(2):
            gather_s = sum(self._seconds(shard.rows) for shard in shards)
            wholes = [
                torch.zeros(
                    (shard.shards[-1].stop, *shard.value.shape[1:]),
                    dtype=self._two.dtype,
                    device=self._two.device,
                )
                for shard in shards
            ]
            scatter_s = sum(
                self._seconds(lambda shard=shard, whole=whole: shard.add(whole))
                for shard, whole in zip(shards, wholes, strict=True)
            )
            agreed = slowest(self._groups, [gather_s, scatter_s])
            best = [min(pair) for pair in zip(best, agreed, strict=True)]
        return best[0], best[0] + best[1]

    def link(self, p: int) -> tuple[float, float]:
        """(seconds to start, bytes per second) of an all-to-all within groups of p, all of them at
        the same time: bytes are those that leave a rank. The slowest rank's, the least of four
        runs. Collective."""
        group_ranks = block(self._groups, p)
        group = self._groups.get(group_ranks) if group_ranks else None
        seconds = []
        for size in _MESSAGES:
            x = torch.zeros(p * size, dtype=torch.uint8, device=self._two.device)
            times = [float("inf")]
            for _ in range(4):  # the first makes connections
                sizes = [size] * p
                local = self._seconds(
                    lambda x=x, sizes=sizes: all_to_all_rows(x, sizes, sizes, group)
                )
                times.append(slowest(self._groups, [local if group_ranks else 0.0])[0])
            seconds.append(min(times))
        return _latency_and_speed([(p - 1) * size for size in _MESSAGES], seconds)

    def _plan_of_lone_ranks(self, layers: int) -> Plan:
        """A plan in which every rank runs one token alone and holds all weights."""
        ranks = self._groups.ranks
        pipelines = tuple(Pipeline(scheme=Scheme(), ranks=(rank,)) for rank in range(ranks))
        layer_plan = LayerPlan.uniform(LayerOption.of(SINGLE_RANK), layers)
        return Plan(
            lengths=Lengths(tokens=(1,) * ranks),
            devices=ranks,
            pipelines=pipelines,
            micro_batches=tuple(
                MicroBatch(pipeline=rank, sequences=(rank,), layers=layer_plan)
                for rank in range(ranks)
            ),
            predicted_s=0.0,
            lower_bound_s=0.0,
        )


def _latency_and_speed(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """(latency in seconds, bytes per second) from the ``seconds`` of messages of ``sizes`` bytes.
    The speed is that between the least and the largest message; the latency the least that any
    message took beyond its bytes."""
    # At least 1e-15, as noise may make the largest message the quickest.
    s_per_byte = max((seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]), 1e-15)
    latencies = [s - s_per_byte * size for size, s in zip(sizes, seconds, strict=True)]
    return max(0.0, min(latencies)), 1 / s_per_byte
