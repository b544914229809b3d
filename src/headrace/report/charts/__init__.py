"""The figures of a report: plain functions from a run to an Altair chart.

Importing this package needs the packages of the extra ``report``.
"""

from headrace.report.charts.gantt import gantt
from headrace.report.charts.layers import layer_options, options_over_steps
from headrace.report.charts.lengths import length_histogram, placement_map
from headrace.report.charts.predictions import (
    cost_fit,
    memory_by_rank,
    predicted_against_measured,
)
from headrace.report.charts.steps import (
    gap_to_bound,
    loss_curve,
    ratio_over_steps,
    strategies_over_steps,
    throughput,
)

__all__ = [
    "cost_fit",
    "gantt",
    "gap_to_bound",
    "layer_options",
    "length_histogram",
    "loss_curve",
    "memory_by_rank",
    "options_over_steps",
    "placement_map",
    "predicted_against_measured",
    "ratio_over_steps",
    "strategies_over_steps",
    "throughput",
]
