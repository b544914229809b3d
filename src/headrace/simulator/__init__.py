"""The clock beside the executor: the same programs with predicted seconds and bytes."""

from headrace.simulator.clock import micro_batch_seconds, step_s
from headrace.simulator.draw import draw
from headrace.simulator.exchange import exposed_s
from headrace.simulator.memory import peak_bytes
from headrace.simulator.seconds import check_costs
from headrace.simulator.simulate import simulate
from headrace.simulator.waits import exposed_exchange_s, without_waits

__all__ = [
    "check_costs",
    "draw",
    "exposed_exchange_s",
    "exposed_s",
    "micro_batch_seconds",
    "peak_bytes",
    "simulate",
    "step_s",
    "without_waits",
]
