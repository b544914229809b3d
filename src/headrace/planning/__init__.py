"""From the lengths of a batch to a plan, with a lower bound of every other plan."""

from headrace.planning.planner import plan
from headrace.planning.problem import Problem

__all__ = ["Problem", "plan"]
