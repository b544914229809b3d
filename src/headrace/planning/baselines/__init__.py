"""Others' planners, over the tables that ours reads."""

from headrace.planning.baselines.all_baselines import BASELINES, Baseline

__all__ = ["BASELINES", "Baseline"]
