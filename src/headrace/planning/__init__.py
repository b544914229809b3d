"""From the lengths of a batch to a plan, with a lower bound of every other plan."""

from headrace.planning.baselines import max_length_static, static_plan
from headrace.planning.layers import best_layers
from headrace.planning.planner import plan
from headrace.planning.problem import Problem
from headrace.planning.selection import StrategySelector

__all__ = ["Problem", "StrategySelector", "best_layers", "max_length_static", "plan", "static_plan"]
