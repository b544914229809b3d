"""The process groups that plans need."""

from __future__ import annotations

from headrace.methods.registry import branch
from headrace.spec.architecture import Architecture
from headrace.spec.known_methods import subgroups
from headrace.spec.method import LayerPlan
from headrace.spec.plan import Pipeline, Plan, Working
from headrace.spec.scheme import Scheme

__all__ = ["PlanGroups"]

Ranks = tuple[int, ...]


class PlanGroups:
    """The groups of plans of one model: worked out once for every pipeline and layer plan."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._layers: dict[LayerPlan, int] = {}
        self._plans: list[LayerPlan] = []
        self._members: dict[tuple[Scheme, Ranks, int, Working], frozenset[Ranks]] = {}
        self._known: dict[tuple[Pipeline, int, Working], frozenset[Ranks]] = {}

    def of(self, plan: Plan) -> set[Ranks]:
        """The groups of all stages, of their tensor blocks, and those that methods need. Raises
        SpecError for a method that a stage cannot run."""
        wanted = set[Ranks]()
        # By identity: hashing the layers of all micro-batches takes longer than the repetitions.
        pairs = {(micro.pipeline, id(micro.layers)): micro.layers for micro in plan.micro_batches}
        plans = {id(layers): layers for layers in pairs.values()}
        numbers = {layers_id: self._number(layers) for layers_id, layers in plans.items()}
        for index, layers_id in pairs:
            pipeline = plan.pipelines[index]
            key = pipeline, numbers[layers_id], plan.working
            if key not in self._known:
                self._known[key] = self._groups(*key)
            wanted |= self._known[key]
        return wanted

    def _number(self, layers: LayerPlan) -> int:
        if layers not in self._layers:
            self._layers[layers] = len(self._plans)
            self._plans.append(layers)
        return self._layers[layers]

    def _groups(self, pipeline: Pipeline, layers: int, working: Working) -> frozenset[Ranks]:
        """Of its members those that meet, by their ranks."""
        kind = pipeline.scheme, pipeline.shares, layers, working
        if kind not in self._members:
            self._members[kind] = self._met(pipeline, self._plans[layers], working)
        width = pipeline.scheme.width
        ranks = [
            rank
            for first in range(0, len(pipeline.ranks), width)
            for rank in sorted(pipeline.ranks[first : first + width])
        ]
        return frozenset(tuple(ranks[member] for member in met) for met in self._members[kind])

    def _met(self, pipeline: Pipeline, layers: LayerPlan, working: Working) -> frozenset[Ranks]:
        """The groups of a pipeline, by the places of their members in its stages."""
        a, wanted = self._architecture, set[Ranks]()
        parts, width = pipeline.scheme.parts(sharded=working == "sharded"), pipeline.scheme.width
        for stage in pipeline.stages(a.layers):
            first = stage.index * width
            wanted.add(tuple(range(first, first + width)))
            for size in {parts, pipeline.scheme.tensor}:
                wanted |= {
                    tuple(range(at, min(at + size, first + width)))
                    for at in range(first, first + width, size)
                }
            for option in set(layers.options[stage.start : stage.stop]):
                branch(option.attention, "attention", a, width)
                branch(option.feed_forward, "feed_forward", a, width)
                for members in subgroups(option, a, width, pipeline.scheme.tensor):
                    wanted.add(tuple(first + member for member in members))
        return frozenset(wanted)
