"""The clock beside the executor: the same programs with predicted seconds and bytes."""

from headrace.simulator.clock import step_s
from headrace.simulator.draw import draw
from headrace.simulator.memory import peak_bytes
from headrace.simulator.simulate import simulate

__all__ = ["draw", "peak_bytes", "simulate", "step_s"]
