"""Sequence-parallel sizing for data-parallel worlds: groups of any size, whole batches packed."""

from headrace.planning.groups.plan import GroupPlan, Launch, plans_to_json
from headrace.planning.groups.planner import GROUP_PLANNERS, plan_groups

__all__ = ["GROUP_PLANNERS", "GroupPlan", "Launch", "plan_groups", "plans_to_json"]
