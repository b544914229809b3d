"""Predicted peak bytes of every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
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
    In lockstep each rank works with one shard of the weights, cut over all ranks.

    Args:
        plan: The plan of the step.
        costs: What it costs, of a model.

    Returns:
        Bytes of each rank.

    Raises:
        CostError: For costs of other devices, and a scheme or a layer option without costs.
    """
    check_costs(plan, costs)
    pipelines_of: list[set[int]] = [set() for _ in range(plan.devices)]
    for index in {micro.pipeline for micro in plan.micro_batches}:
        for rank in plan.pipelines[index].ranks:
            pipelines_of[rank].add(index)
    peaks = [costs.state_bytes] * plan.devices
    ranks_of_sizes: dict[tuple[int, ...], list[int]] = {}
    staged_bytes: dict[tuple[tuple[int, ...], int], int] = {}
    activations = _Activations(plan, costs)
    for rank, indices in enumerate(pipelines_of):
        numbers = tuple(sorted(indices))
        pipelines = [plan.pipelines[index] for index in numbers]
        # Neither stages nor tensor parallel: ranks with groups of the same sizes hold the same.
        if all(pipeline.scheme.context == len(pipeline.ranks) for pipeline in pipelines):
            sizes = tuple(sorted({len(pipeline.ranks) for pipeline in pipelines}))
            ranks_of_sizes.setdefault(sizes, []).append(rank)
        else:
            # Ranks of a stage run the same micro-batches, so they hold the same bytes; pipelines
            # with stages share no rank.
            stage_key = numbers, pipelines[0].stage_of(rank, costs.shape.layers).index
            if stage_key not in staged_bytes:
                activation_bytes = math.ceil(activations.peak(rank) - _ROUNDING_BYTES)
                staged_bytes[stage_key] = _held(plan, costs, rank, pipelines) + activation_bytes
            peaks[rank] += staged_bytes[stage_key]
    for sizes, ranks in ranks_of_sizes.items():
        _raise_unstaged(plan, costs, sizes, ranks, peaks)
    return tuple(peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakParts:
    """What fills the memory of the rank that holds the most.

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
    """What fills the memory of the rank that holds the most; ``peaks`` are the predicted peak bytes
    of each rank, as :func:`peak_bytes` gives them."""
    rank = max(range(len(peaks)), key=lambda r: peaks[r])
    used = {m.pipeline for m in plan.micro_batches if rank in plan.pipelines[m.pipeline].ranks}
    pipelines = [plan.pipelines[index] for index in sorted(used)]
    if all(pipeline.scheme.context == len(pipeline.ranks) for pipeline in pipelines):
        sizes = {len(pipeline.ranks) for pipeline in pipelines}
        weight_bytes = _unstaged_held(plan, costs, sizes) if used else 0
    else:
        weight_bytes = _held(plan, costs, rank, pipelines)
    return PeakParts(
        rank=rank,
        states_bytes=costs.state_bytes,
        working_bytes=weight_bytes,
        activations_bytes=peaks[rank] - costs.state_bytes - weight_bytes,
        free_bytes=costs.capacity_bytes - peaks[rank],
        kept_free_bytes=costs.cluster.memory_bytes - costs.capacity_bytes,
    )


def _raise_unstaged(
    plan: Plan, costs: CostModel, sizes: tuple[int, ...], ranks: Sequence[int], peaks: list[int]
) -> None:
    """Raise the ``peaks`` of ``ranks``, bytes that so far are those of their state, in place. They
    work in groups of all ``sizes`` without tensor parallel or stages. First the bytes of their
    working weights are added, then each peak is raised to that of the largest micro-batch."""
    held = _unstaged_held(plan, costs, sizes)
    for rank in ranks:
        peaks[rank] += held
    for micro in plan.micro_batches:
        group = plan.pipelines[micro.pipeline].ranks
        working = [rank for rank in ranks if rank in group]
        if working:
            tokens = sum(plan.tokens_of(micro))
            peak = costs.micro_batch_bytes(tokens, len(group), micro.layers, plan.working, sizes)
            peak += held - costs.held_bytes({len(group), *sizes}, plan.working)
            for rank in working:
                peaks[rank] = max(peaks[rank], peak)


def _unstaged_held(plan: Plan, costs: CostModel, sizes: Collection[int]) -> int:
    """Bytes of the working weights of a rank that works in groups of all ``sizes`` without tensor
    parallel or stages."""
    if plan.semantics == "lockstep":
        sizes = {max(costs.working_bytes)} if sizes else ()
    return costs.held_bytes(sizes, plan.working)


def _held(plan: Plan, costs: CostModel, rank: int, pipelines: Sequence[Pipeline]) -> int:
    """Bytes of the working weights of a rank that works in ``pipelines``. Different shards of the
    weights add up, to at most the bytes of all the weights."""
    bytes_of: dict[tuple[int, int], int] = {}
    for pipeline in pipelines:
        stage = pipeline.stage_of(rank, costs.shape.layers)
        # Pipelines with equal stages and parts share the rank's shard of the weights.
        shard = len(stage.ranks), pipeline.scheme.parts(sharded=plan.working == "sharded")
        bytes_of[shard] = held_bytes(costs, pipeline, plan.working)[stage.index]
    replicated = max(costs.working_bytes[width]["replicated"] for width, _ in bytes_of)
    return max(*bytes_of.values(), min(sum(bytes_of.values()), replicated))


class _Activations:
    """Bytes of activations of a plan, worked out once for every micro-batch and stage."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self._plan, self._costs = plan, costs
        # Cache of :meth:`_of`, by (micro-batch, stage).
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def peak(self, rank: int) -> float:
        """The most bytes of activations that a rank holds at once. Its program is walked: every
        micro-batch in flight keeps some bytes, and the one that runs, forward or backward, needs
        more in passing."""
        in_flight: dict[int, float] = {}
        most_bytes = 0.0
        for action in compile_rank(self._plan, rank, self._costs.shape.bucket_count).actions:
            if isinstance(action, Forward | Backward):
                kept_bytes, own_peak_bytes = self._of(action)
                in_flight.pop(action.micro_batch, None)
                most_bytes = max(most_bytes, sum(in_flight.values()) + own_peak_bytes)
                if isinstance(action, Forward):
                    in_flight[action.micro_batch] = kept_bytes
        return most_bytes

    def _of(self, action: Forward | Backward) -> tuple[float, float]:
        """(bytes that the micro-batch of an action keeps in the action's stage until its backward,
        bytes at its own peak there)."""
        key = action.micro_batch, action.stage
        if key not in self._known:
            plan, costs = self._plan, self._costs
            micro = plan.micro_batches[action.micro_batch]
            stages = plan.pipelines[micro.pipeline].stages(costs.shape.layers)
            stage, tokens = stages[action.stage], sum(plan.tokens_of(micro))
            kept = kept_line(costs, stage, micro.layers)(tokens)
            lines = moments(costs, stage, micro.layers)
            self._known[key] = kept, max(bytes_of(tokens) for bytes_of in lines)
        return self._known[key]
