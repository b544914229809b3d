"""Frozen values: what flows between the side that plans and the side that runs."""

from headrace.spec.architecture import Architecture, WeightSpec, weight_table
from headrace.spec.checker import check_programs
from headrace.spec.cluster import Cluster
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Row, Timeline
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.program import (
    Action,
    Backward,
    Exchange,
    Forward,
    Message,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    Update,
    compile_plan,
    compile_rank,
)
from headrace.spec.strategy import Scheme, Stage, Strategy

__all__ = [
    "Action",
    "Architecture",
    "Backward",
    "Cluster",
    "Exchange",
    "Forward",
    "LayerOption",
    "LayerPlan",
    "Lengths",
    "Message",
    "MicroBatch",
    "Pipeline",
    "Plan",
    "Program",
    "Pull",
    "Push",
    "Recv",
    "Row",
    "Scheme",
    "Send",
    "Stage",
    "Strategy",
    "Timeline",
    "Update",
    "WeightSpec",
    "check_programs",
    "compile_plan",
    "compile_rank",
    "weight_table",
]
