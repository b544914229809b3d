"""headrace trains Transformers on sequences of wildly different lengths: for every batch it looks
at the lengths and decides which devices work on which sequences, and how.

The names below plan and simulate without torch; they are imported when first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.costs import CostModel, synthetic_costs
    from headrace.data import draw_batches, parse_distribution
    from headrace.planning import Problem, plan, static_plan
    from headrace.simulator import draw, peak_bytes, simulate
    from headrace.spec import Architecture, Cluster, Lengths, Plan, Strategy, compile_plan

__all__ = [
    "Architecture",
    "Cluster",
    "CostModel",
    "Lengths",
    "Plan",
    "Problem",
    "Strategy",
    "__version__",
    "compile_plan",
    "draw",
    "draw_batches",
    "parse_distribution",
    "peak_bytes",
    "plan",
    "simulate",
    "static_plan",
    "synthetic_costs",
]

__version__ = "0.1.0"

_HOMES = {
    "headrace.costs": ("CostModel", "synthetic_costs"),
    "headrace.data": ("draw_batches", "parse_distribution"),
    "headrace.planning": ("Problem", "plan", "static_plan"),
    "headrace.simulator": ("draw", "peak_bytes", "simulate"),
    "headrace.spec": ("Architecture", "Cluster", "Lengths", "Plan", "Strategy", "compile_plan"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
