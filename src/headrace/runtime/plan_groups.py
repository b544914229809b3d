"""The process groups that plans need."""

from __future__ import annotations

from headrace.methods.registry import branch
from headrace.spec.architecture import Architecture
from headrace.spec.known_methods import subgroups
from headrace.spec.method import LayerPlan
from headrace.spec.plan import Pipeline, Plan, Working

__all__ = ["PlanGroups"]

Ranks = tuple[int, ...]


class PlanGroups:
    """The groups of plans of one model: worked out once for every pipeline and layer plan."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._layers: dict[LayerPlan, int] = {}
        self._known: dict[tuple[Pipeline, int, Working], frozenset[Ranks]] = {}

    def of(self, plan: Plan) -> set[Ranks]:
        """The groups of all stages, of their tensor blocks, and those that methods need. Raises
        SpecError for a method that a stage cannot run."""
        wanted = set[Ranks]()
        # By identity: hashing the layers of all micro-batches takes longer than the repetitions.
        pairs = {(micro.pipeline, id(micro.layers)): micro.layers for micro in plan.micro_batches}
        layers = {id(layers): layers for layers in pairs.values()}
        numbers = {
            known: self._layers.setdefault(options, len(self._layers))
            for known, options in layers.items()
        }
        for (index, layers_id), options in pairs.items():
            pipeline = plan.pipelines[index]
            key = pipeline, numbers[layers_id], plan.working
            if key not in self._known:
                self._known[key] = frozenset(self._groups(pipeline, options, plan.working))
            wanted |= self._known[key]
        return wanted

    def _groups(self, pipeline: Pipeline, layers: LayerPlan, working: Working) -> set[Ranks]:
        a, wanted = self._architecture, set[Ranks]()
        parts = pipeline.scheme.parts(sharded=working == "sharded")
        for stage in pipeline.stages(a.layers):
            ranks = stage.ranks
            wanted.add(ranks)
            for size in {parts, pipeline.scheme.tensor}:
                wanted |= {ranks[at : at + size] for at in range(0, len(ranks), size)}
            for option in set(layers.options[stage.start : stage.stop]):
                branch(option.attention, "attention", a, len(ranks))
                branch(option.feed_forward, "feed_forward", a, len(ranks))
                for members in subgroups(option, a, len(ranks), pipeline.scheme.tensor):
                    wanted.add(tuple(ranks[member] for member in members))
        return wanted
