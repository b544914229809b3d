"""A plan of pipelines for some iterations: a value with a JSON form that any checker can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.bounds import Relaxed
from headrace.planning.pipelines.choose import Chosen
from headrace.planning.pipelines.solution import Solution
from headrace.planning.pipelines.world import Counts, World
from headrace.units import count_text, percent_text, seconds_text

__all__ = ["Iteration", "PipelinePlan", "PlannedPipeline", "iteration_of", "reasons"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPipeline:
    """One pipeline: its scheme, its micro-batches as numbers of sequences in the iteration's
    list, what it takes, and in which phase it runs (only strategies that switch have several)."""

    scheme: str
    micro_batches: tuple[tuple[int, ...], ...]
    seconds: float
    phase: int = 0

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        value: dict[str, Any] = {
            "scheme": self.scheme, "micro_batches": [list(own) for own in self.micro_batches],
        }  # fmt: skip
        return {**value, "phase": self.phase} if self.phase else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The plan of one iteration. ``switch_s`` is the part of ``predicted_s`` that changing the
    strategy within the iteration takes, ``phases`` are then the plans that run one after the
    other; ``why`` is for people."""

    strategy: str
    pipelines: tuple[PlannedPipeline, ...]
    predicted_s: float
    lower_bound_s: float
    planning_s: float = field(default=0.0, compare=False)
    switch_s: float = 0.0
    why: tuple[str, ...] = ()
    phases: tuple[Iteration, ...] = ()

    @property
    def gap(self) -> float:
        """How far above the bound, as a fraction of it."""
        return self.predicted_s / self.lower_bound_s - 1

    def timed(self, planning_s: float) -> Iteration:
        """The same plan, made in so many seconds."""
        return replace(self, planning_s=planning_s)

    def to_json(self) -> dict[str, Any]:
        """Its JSON form."""
        value: dict[str, Any] = {
            "strategy": self.strategy,
            "pipelines": [pipeline.to_json() for pipeline in self.pipelines],
            "predicted_s": self.predicted_s,
            "lower_bound_s": self.lower_bound_s,
            "planning_s": self.planning_s,
            "why": list(self.why),
        }
        return {**value, "switch_s": self.switch_s} if self.switch_s else value


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Plans of iterations on one cluster, and what was thought of in advance: ``candidates`` are
    the strategies proposed for all of them."""

    devices: int
    iterations: tuple[Iteration, ...]
    planner: str
    seed: int = 0
    candidates: tuple[str, ...] = ()
    proposal_s: float = field(default=0.0, compare=False)

    @property
    def mean_s(self) -> float:
        """Mean predicted seconds of an iteration."""
        return sum(item.predicted_s for item in self.iterations) / len(self.iterations)

    def to_json(self) -> dict[str, Any]:
        """The JSON form; sequences by their number in the iteration's list of lengths."""
        return {
            "kind": "pipelines",
            "planner": self.planner,
            "seed": self.seed,
            "devices": self.devices,
            "candidates": list(self.candidates),
            "proposal_s": self.proposal_s,
            "iterations": [item.to_json() for item in self.iterations],
        }


def iteration_of(
    batch: Batch, solution: Solution, bound: Relaxed, *, why: Sequence[str] = ()
) -> Iteration:
    """The plan of a solution."""
    world = batch.world
    pipelines = tuple(
        PlannedPipeline(
            scheme=world.pipes[k].name, seconds=seconds,
            micro_batches=tuple(tuple(batch.order[i] for i in own) for own in bins),
        )
        for k, bins, seconds in zip(
            solution.pipes, solution.micro_batches, solution.each_s, strict=True
        )
    )  # fmt: skip
    return Iteration(
        strategy=world.text(solution.counts),
        pipelines=pipelines,
        predicted_s=solution.seconds,
        lower_bound_s=min(bound.seconds, solution.seconds),
        why=tuple(why),
    )


def reasons(batch: Batch, chosen: Chosen) -> tuple[str, ...]:
    """Why this strategy: what binds, who is last, what the next best would have cost."""
    world, solution, bound = batch.world, chosen.solution, chosen.bound
    gap = percent_text(solution.seconds / bound.seconds - 1)
    if bound.by_longest:
        quickest = min(
            (pipe for pipe in world.pipes if pipe.cap >= batch.tokens[0]),
            key=lambda pipe: pipe.alone_s(batch.tokens[0]),
        )
        binds = (
            f"the longest sequence, {count_text(batch.tokens[0])} tokens, alone takes "
            f"{seconds_text(bound.longest_s)} on {quickest.name}"
        )
    else:
        binds = (
            f"all sequences on the schemes that need the fewest devices keep {world.devices} "
            f"devices busy for {seconds_text(bound.seconds)}"
        )
    last = max(range(len(solution.each_s)), key=solution.each_s.__getitem__)
    held = [i for own in solution.micro_batches[last] for i in own]
    pipe = world.pipes[solution.pipes[last]]
    texts = [
        f"bound {seconds_text(bound.seconds)}, {gap} above it: {binds}",
        f"last is a {pipe.name} with {len(held)} sequences in "
        f"{len(solution.micro_batches[last])} micro-batches, the longest of "
        f"{count_text(batch.tokens[min(held)])} tokens",
    ]
    if chosen.runner_up is not None:
        texts.append(_beside(world, solution, *chosen.runner_up))
    idle = world.devices - world.used(solution.counts)
    if idle:
        texts.append(f"{idle} devices are idle: no scheme that helps is small enough")
    return tuple(texts)


def _beside(world: World, solution: Solution, seconds: float, counts: Counts) -> str:
    over = percent_text(max(0.0, seconds / solution.seconds - 1))
    return f"next of the candidates, {world.text(counts)}: {seconds_text(seconds)}, {over} more"
