"""Planners of others, over the tables that ours reads, and by name the generators of every
planner."""

from headrace.planners.by_name import BASELINES, PLANNERS, Baseline

__all__ = ["BASELINES", "PLANNERS", "Baseline"]
