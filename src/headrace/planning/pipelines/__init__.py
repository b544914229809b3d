"""Plans for tensor x context x pipeline worlds: which pipelines, and which sequences on each."""

from headrace.planning.pipelines.phases import phases_apart
from headrace.planning.pipelines.plan import Iteration, PipelinePlan, PlannedPipeline
from headrace.planning.pipelines.planner import PLANNERS, plan_pipelines

__all__ = [
    "PLANNERS", "Iteration", "PipelinePlan", "PlannedPipeline", "phases_apart", "plan_pipelines",
]  # fmt: skip
