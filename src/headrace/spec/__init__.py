"""Frozen values: what flows between the wing that plans and the wing that runs."""

from headrace.spec.architecture import Architecture
from headrace.spec.checker import check_programs
from headrace.spec.cluster import Cluster
from headrace.spec.compiler import compile_plan, compile_rank
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Row, Timeline
from headrace.spec.method import LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.program import Action, Backward, Forward, Program, Pull, Push, Update
from headrace.spec.scheme import Scheme
from headrace.spec.strategy import Strategy
from headrace.spec.weights import WeightSpec, weight_table

__all__ = [
    "Action",
    "Architecture",
    "Backward",
    "Cluster",
    "Forward",
    "LayerOption",
    "LayerPlan",
    "Lengths",
    "MicroBatch",
    "Pipeline",
    "Plan",
    "Program",
    "Pull",
    "Push",
    "Row",
    "Scheme",
    "Strategy",
    "Timeline",
    "Update",
    "WeightSpec",
    "check_programs",
    "compile_plan",
    "compile_rank",
    "weight_table",
]
