"""headrace trains Transformers on sequences of wildly different lengths: for every batch it looks
at the lengths and decides which devices work on which sequences, and how.

    import headrace as hr

    costs = hr.costs.roofline(hr.Architecture.preset("llama-8b"), "h100", devices=64)
    lengths = hr.lengths.draw("lognormal:median=2000,sigma=1.4,max=128Ki", tokens="4M")
    print(hr.plan(lengths, costs))
    run = hr.train(hr.Config.load("my.toml"), on_step=lambda step: print(step.loss))

All names are imported when first asked for; planning needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace import costs, errors, lengths
    from headrace.adopt.axis_examples import AxisExample
    from headrace.adopt.axis_stages import AxisStage
    from headrace.adopt.block_recompute import recomputed
    from headrace.adopt.known_models import adapt
    from headrace.adopt.token_model import compile
    from headrace.config import Config
    from headrace.config.planner_config import PlannerConfig
    from headrace.costs import CostModel
    from headrace.costs.forecast import Forecast, forecast
    from headrace.engine.attach import attach
    from headrace.engine.attach_options import MeasureOptions, SampleOptions, SpreadOptions
    from headrace.engine.compared_planners import compare
    from headrace.engine.plans import baselines, draw, peak_bytes, plan, simulate
    from headrace.engine.training import profile, train
    from headrace.engine.training_run import TrainingRun
    from headrace.ops.dynamic_primitives import gather, split, switch
    from headrace.planning import Problem
    from headrace.spec import Architecture, Cluster, Lengths, Plan, Strategy, Timeline
    from headrace.spec.comparison import Comparison
    from headrace.spec.draw_options import DrawOptions
    from headrace.spec.fixed_layout import FixedLayout
    from headrace.spec.implementation import Implementation
    from headrace.trainers.planned_trainer import trainer

__all__ = [
    "Architecture",
    "AxisExample",
    "AxisStage",
    "Cluster",
    "Comparison",
    "Config",
    "CostModel",
    "DrawOptions",
    "FixedLayout",
    "Forecast",
    "Implementation",
    "Lengths",
    "MeasureOptions",
    "Plan",
    "PlannerConfig",
    "Problem",
    "SampleOptions",
    "SpreadOptions",
    "Strategy",
    "Timeline",
    "TrainingRun",
    "__version__",
    "adapt",
    "attach",
    "baselines",
    "compare",
    "compile",
    "costs",
    "draw",
    "errors",
    "forecast",
    "gather",
    "lengths",
    "peak_bytes",
    "plan",
    "profile",
    "recomputed",
    "simulate",
    "split",
    "switch",
    "train",
    "trainer",
]

__version__ = "0.1.0"

_HOMES = {
    "headrace.adopt.known_models": ("adapt",),
    "headrace.adopt.axis_examples": ("AxisExample",),
    "headrace.adopt.axis_stages": ("AxisStage",),
    "headrace.config": ("Config",),
    "headrace.costs": ("CostModel",),
    "headrace.costs.forecast": ("Forecast", "forecast"),
    "headrace.spec.comparison": ("Comparison",),
    "headrace.spec.fixed_layout": ("FixedLayout",),
    "headrace.spec.implementation": ("Implementation",),
    "headrace.config.planner_config": ("PlannerConfig",),
    "headrace.engine.attach": ("attach",),
    "headrace.engine.attach_options": ("MeasureOptions", "SampleOptions", "SpreadOptions"),
    "headrace.adopt.token_model": ("compile",),
    "headrace.adopt.block_recompute": ("recomputed",),
    "headrace.ops.dynamic_primitives": ("gather", "split", "switch"),
    "headrace.spec.draw_options": ("DrawOptions",),
    "headrace.planning": ("Problem",),
    "headrace.spec": ("Architecture", "Cluster", "Lengths", "Plan", "Strategy", "Timeline"),
    "headrace.engine.compared_planners": ("compare",),
    "headrace.engine.plans": ("baselines", "draw", "peak_bytes", "plan", "simulate"),
    "headrace.engine.training_run": ("TrainingRun",),
    "headrace.engine.training": ("profile", "train"),
    "headrace.trainers.planned_trainer": ("trainer",),
}
"""Public names by the module that defines them."""

_MODULES = ("costs", "errors", "lengths")
"""Modules that are public names themselves."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name in _MODULES:
        return importlib.import_module(f"headrace.{name}")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(_imported(module, name), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _imported(module: str, name: str) -> Any:
    """Import the module of the public ``name``. Where a package of the extra ``train`` is missing,
    such as torch, MissingExtra says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "psutil", "safetensors"):
            raise
        # Imported here, as importing headrace imports none of its modules.
        missing = importlib.import_module("headrace.errors").MissingExtra
        raise missing(package, extra="train", needed_for=f"headrace.{name}") from None
