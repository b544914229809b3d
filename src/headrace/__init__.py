"""headrace trains Transformers on sequences of wildly different lengths: for every batch it looks
at the lengths and decides which devices work on which sequences, and how.

    import headrace as hr

    costs = hr.costs.roofline(hr.Architecture.preset("llama-8b"), "h100", devices=64)
    lengths = hr.lengths.draw("lognormal:median=2000,sigma=1.4,max=128Ki", tokens="4M")
    print(hr.plan(lengths, costs))
    run = hr.train(hr.Config.load("my.toml"), on_step=lambda step: print(step.loss))

All names are imported when first asked for; only ``train`` and ``costs.profile`` need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace import costs, errors, lengths
    from headrace.adapters.adapt import adapt
    from headrace.adapters.examples import AxisExample
    from headrace.adapters.stages import AxisStage
    from headrace.config import Config
    from headrace.costs import CostModel
    from headrace.loop.attach import attach
    from headrace.passes.adopted import compile
    from headrace.passes.recompute import recomputed
    from headrace.planning import Problem
    from headrace.simulator import draw, peak_bytes
    from headrace.spec import Architecture, Cluster, Lengths, Plan, Strategy, Timeline
    from headrace.training.planning import baselines, plan, simulate
    from headrace.training.run_folder import TrainingRun
    from headrace.training.train import train

__all__ = [
    "Architecture",
    "AxisExample",
    "AxisStage",
    "Cluster",
    "Config",
    "CostModel",
    "Lengths",
    "Plan",
    "Problem",
    "Strategy",
    "Timeline",
    "TrainingRun",
    "__version__",
    "adapt",
    "attach",
    "baselines",
    "compile",
    "costs",
    "draw",
    "errors",
    "lengths",
    "peak_bytes",
    "plan",
    "recomputed",
    "simulate",
    "train",
]

__version__ = "0.1.0"

_HOMES = {
    "headrace.adapters.adapt": ("adapt",),
    "headrace.adapters.examples": ("AxisExample",),
    "headrace.adapters.stages": ("AxisStage",),
    "headrace.config": ("Config",),
    "headrace.costs": ("CostModel",),
    "headrace.loop.attach": ("attach",),
    "headrace.passes.adopted": ("compile",),
    "headrace.passes.recompute": ("recomputed",),
    "headrace.planning": ("Problem",),
    "headrace.simulator": ("draw", "peak_bytes"),
    "headrace.spec": ("Architecture", "Cluster", "Lengths", "Plan", "Strategy", "Timeline"),
    "headrace.training.planning": ("baselines", "plan", "simulate"),
    "headrace.training.run_folder": ("TrainingRun",),
    "headrace.training.train": ("train",),
}
_MODULES = ("costs", "errors", "lengths")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"headrace.{name}")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(_imported(module, name), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _imported(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "psutil", "safetensors"):
            raise
        missing = importlib.import_module("headrace.errors").MissingExtra
        raise missing(package, extra="train", needed_for=f"headrace.{name}") from None
