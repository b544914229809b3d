"""The clock beside the executor: the same programs with predicted seconds and bytes."""

from headrace.simulator.drawing import draw, exposed_exchange_s, without_waits
from headrace.simulator.memory import peak_bytes
from headrace.simulator.staged_clock import StagedPipeline
from headrace.simulator.step_clock import (
    check_costs,
    exposed_s,
    micro_batch_seconds,
    simulate,
    staged_pipeline,
    staged_steps_s,
    step_s,
)

__all__ = [
    "StagedPipeline",
    "check_costs",
    "draw",
    "exposed_exchange_s",
    "exposed_s",
    "micro_batch_seconds",
    "peak_bytes",
    "simulate",
    "staged_pipeline",
    "staged_steps_s",
    "step_s",
    "without_waits",
]
