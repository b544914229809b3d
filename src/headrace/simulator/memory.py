"""Predicted peak bytes of every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.costs.cost_model import CostModel, held_bytes, kept_line, moments
from headrace.simulator.step_clock import check_costs
from headrace.spec.plan import Pipeline, Plan
from headrace.spec.program import Backward, Forward, compile_rank
from headrace.units import bytes_text

__all__ = ["PeakParts", "peak_bytes", "peak_parts"]

# Peaks are sums of floats: this many bytes are forgiven as rounding.
_ROUNDING_BYTES = 1e-3


def peak_bytes(plan: Plan, costs: CostModel) -> tuple[int, ...]:
    """Predict the peak bytes of each rank over one step.

    A rank holds its state always, from the pull to the push the working weights of every stage in
    which it works, and from forward to backward the activations of its micro-batches: of one at a
    time without stages, of as many as are in flight with them. A rank without work holds its state.

    Args:
        plan: The plan of the step.
        costs: What it costs, of a model.

    Returns:
        Bytes of each rank.

    Raises:
        CostError: For a scheme or a layer option without costs.
    """
    check_costs(plan, costs)
    used: list[set[int]] = [set() for _ in range(plan.devices)]
    for index in {micro.pipeline for micro in plan.micro_batches}:
        for rank in plan.pipelines[index].ranks:
            used[rank].add(index)
    peaks = [costs.state_bytes] * plan.devices
    flat: dict[tuple[int, ...], list[int]] = {}
    alike: dict[tuple[tuple[int, ...], int], int] = {}
    activations = _Activations(plan, costs)
    for rank, indices in enumerate(used):
        mine = tuple(sorted(indices))
        pipelines = [plan.pipelines[index] for index in mine]
        if all(pipeline.scheme.context == len(pipeline.ranks) for pipeline in pipelines):
            sizes = tuple(sorted({len(pipeline.ranks) for pipeline in pipelines}))
            flat.setdefault(sizes, []).append(rank)
        else:
            # Members of a stage run the same micro-batches; a staged pipeline shares no rank.
            kind = mine, pipelines[0].stage_of(rank, costs.shape.layers).index
            if kind not in alike:
                passing = math.ceil(activations.peak(rank) - _ROUNDING_BYTES)
                alike[kind] = _held(plan, costs, rank, pipelines) + passing
            peaks[rank] += alike[kind]
    for sizes, ranks in flat.items():
        _flat(plan, costs, sizes, ranks, peaks)
    return tuple(peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakParts:
    """What fills the rank that holds the most.

    Attributes:
        rank: The rank.
        states_bytes: Stored weights, gradients and optimizer states.
        working_bytes: Weights that are worked with, and their gradients.
        activations_bytes: Activations that are kept, and what is needed in passing.
        free_bytes: What is left of the memory that plans may use.
        kept_free_bytes: What plans do not use: fragments of the allocator, buffers of collectives
            and the device's context lie there.
    """

    rank: int
    states_bytes: int
    working_bytes: int
    activations_bytes: int
    free_bytes: int
    kept_free_bytes: int

    def __str__(self) -> str:
        parts = {
            "weights, gradients and optimizer stored": self.states_bytes,
            "worked with": self.working_bytes,
            "activations": self.activations_bytes,
            "free": self.free_bytes,
            "kept for allocator and collectives": self.kept_free_bytes,
        }
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())


def peak_parts(plan: Plan, costs: CostModel, peaks: Sequence[int]) -> PeakParts:
    """What fills the rank that holds the most, of ranks with these ``peaks`` in bytes."""
    rank = max(range(len(peaks)), key=lambda r: peaks[r])
    used = {m.pipeline for m in plan.micro_batches if rank in plan.pipelines[m.pipeline].ranks}
    pipelines = [plan.pipelines[index] for index in sorted(used)]
    if all(pipeline.scheme.context == len(pipeline.ranks) for pipeline in pipelines):
        held = costs.held_bytes({len(p.ranks) for p in pipelines}, plan.working) if used else 0
    else:
        held = _held(plan, costs, rank, pipelines)
    return PeakParts(
        rank=rank,
        states_bytes=costs.state_bytes,
        working_bytes=held,
        activations_bytes=peaks[rank] - costs.state_bytes - held,
        free_bytes=costs.capacity_bytes - peaks[rank],
        kept_free_bytes=costs.cluster.memory_bytes - costs.capacity_bytes,
    )


def _flat(
    plan: Plan, costs: CostModel, sizes: tuple[int, ...], ranks: Sequence[int], peaks: list[int]
) -> None:
    """Raise ``peaks``, bytes by rank, for ``ranks`` that work in groups of all ``sizes``, neither
    in tensor blocks nor in stages: by weights and the largest micro-batch."""
    for rank in ranks:
        peaks[rank] += costs.held_bytes(sizes, plan.working)
    for micro in plan.micro_batches:
        members = plan.pipelines[micro.pipeline].ranks
        here = [rank for rank in ranks if rank in members]
        if here:
            tokens = sum(plan.tokens_of(micro))
            peak = costs.micro_batch_bytes(tokens, len(members), micro.layers, plan.working, sizes)
            for rank in here:
                peaks[rank] = max(peaks[rank], peak)


def _held(plan: Plan, costs: CostModel, rank: int, pipelines: Sequence[Pipeline]) -> int:
    """Bytes of the working weights of a rank that works in ``pipelines``: shards of several kinds
    add up, to at most all the weights."""
    found: dict[tuple[int, int], int] = {}
    for pipeline in pipelines:
        stage = pipeline.stage_of(rank, costs.shape.layers)
        kind = len(stage.ranks), pipeline.scheme.parts(sharded=plan.working == "sharded")
        found[kind] = held_bytes(costs, pipeline, plan.working)[stage.index]
    replicated = max(costs.working_bytes[width]["replicated"] for width, _ in found)
    return max(*found.values(), min(sum(found.values()), replicated))


class _Activations:
    """Bytes of activations, worked out once for every micro-batch and stage."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self._plan, self._costs = plan, costs
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def peak(self, rank: int) -> float:
        """The most that a rank holds at once, walking its program: every micro-batch in flight
        keeps something, the running one needs more in passing, forward and backward alike."""
        kept: dict[int, float] = {}
        most = 0.0
        for action in compile_rank(self._plan, rank, self._costs.shape.bucket_count).actions:
            if isinstance(action, Forward | Backward):
                own, passing = self._of(action)
                kept.pop(action.micro_batch, None)
                most = max(most, sum(kept.values()) + passing)
                if isinstance(action, Forward):
                    kept[action.micro_batch] = own
        return most

    def _of(self, action: Forward | Backward) -> tuple[float, float]:
        """(bytes that a micro-batch keeps in a stage, bytes at its own peak there)."""
        key = action.micro_batch, action.stage
        if key not in self._known:
            plan, costs = self._plan, self._costs
            micro = plan.micro_batches[action.micro_batch]
            stages = plan.pipelines[micro.pipeline].stages(costs.shape.layers)
            stage, tokens = stages[action.stage], sum(plan.tokens_of(micro))
            kept = kept_line(costs, stage, micro.layers)(tokens)
            self._known[key] = kept, max(m(tokens) for m in moments(costs, stage, micro.layers))
        return self._known[key]
