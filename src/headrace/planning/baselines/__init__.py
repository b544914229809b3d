"""Others' planners, over the tables that ours reads."""

from headrace.planning.baselines.registry import BASELINES, Baseline

__all__ = ["BASELINES", "Baseline"]
