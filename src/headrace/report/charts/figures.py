"""The figures of the page in their order, each with its sentence and when it can be drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from headrace.report import captions
from headrace.report.charts import layer_chart, length_charts, predictions, step_charts
from headrace.report.charts.gantt import gantt
from headrace.report.charts.theme import Drawing
from headrace.report.layer_use import layer_use
from headrace.report.records import Run
from headrace.report.run_summary import RunSummary

__all__ = ["FIGURES", "TRUST_HEADING", "Figure"]

TRUST_HEADING = "How far to trust the predictions"
"""The section that holds the figures on predictions, and the table of what was learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the page. ``name`` is its id in the page and the name of its picture;
    ``wide`` figures stand alone in their row; ``known`` says whether a run can fill it."""

    name: str
    title: str
    section: str
    draw: Callable[[Run], Drawing]
    caption: Callable[[RunSummary], str]
    known: Callable[[Run], bool]
    wide: bool = False


def _always(run: Run) -> bool:
    return bool(run.steps)


def _has_predictions(run: Run) -> bool:
    return any(isfinite(step.ratio) for step in run.steps)


def _has_layers(run: Run) -> bool:
    return bool(layer_use(run).shares)


def _gantt(run: Run) -> Drawing:
    """The timelines of the recorded step; the run has one."""
    recorded = run.recorded
    assert recorded is not None, "drawn only when a step was recorded"
    static_names = {step.step: step.planned.best_static for step in run.steps}
    return gantt(recorded, static_names.get(recorded.step, ""))


_STEP, _DATA = "One step, every rank", "The data and where it ran"
_LAYERS = "Which layers used what"
_SPEED = "How the run went"

FIGURES: tuple[Figure, ...] = (
    Figure(
        name="gantt",
        title="Measured over predicted",
        section=_STEP,
        draw=_gantt,
        wide=True,
        caption=captions.gantt_caption,
        known=lambda run: run.recorded is not None,
    ),
    Figure(
        name="lengths",
        title="Lengths of the documents",
        section=_DATA,
        draw=lambda run: length_charts.length_histogram(run.facts.corpus),
        caption=captions.lengths_caption,
        known=lambda run: sum(run.facts.corpus.counts) > 0,
    ),
    Figure(
        name="placement",
        title="Which lengths ran on how many ranks",
        section=_DATA,
        draw=length_charts.placement_map,
        caption=captions.placement_caption,
        known=lambda run: bool(run.assigned),
    ),
    Figure(
        name="layers",
        title="Layer options",
        section=_LAYERS,
        draw=layer_chart.layer_options,
        caption=captions.layers_caption,
        known=_has_layers,
    ),
    Figure(
        name="options",
        title="Layer options, step by step",
        section=_LAYERS,
        draw=layer_chart.options_over_steps,
        caption=captions.options_caption,
        known=_has_layers,
    ),
    Figure(
        name="throughput",
        title="Speed and idle time",
        section=_SPEED,
        draw=step_charts.throughput,
        caption=captions.throughput_caption,
        known=_always,
    ),
    Figure(
        name="loss",
        title="Loss",
        section=_SPEED,
        draw=step_charts.loss_curve,
        caption=captions.loss_caption,
        known=_always,
    ),
    Figure(
        name="strategies",
        title="Strategies, step by step",
        section=_SPEED,
        draw=step_charts.strategies_over_steps,
        caption=captions.strategies_caption,
        known=lambda run: len({step.planned.strategy for step in run.steps}) > 1,
    ),
    Figure(
        name="gap",
        title="Above the lower bound",
        section=_SPEED,
        draw=step_charts.gap_to_bound,
        caption=captions.gap_caption,
        known=lambda run: any(step.planned.lower_bound_s > 0 for step in run.steps),
    ),
    Figure(
        name="memory",
        title="Peak memory by rank",
        section=_SPEED,
        draw=predictions.memory_by_rank,
        caption=captions.memory_caption,
        known=lambda run: any(step.peak_bytes for step in run.steps),
    ),
    Figure(
        name="scatter",
        title="Seconds of a step, predicted and measured",
        section=TRUST_HEADING,
        draw=predictions.predicted_against_measured,
        caption=captions.scatter_caption,
        known=_has_predictions,
    ),
    Figure(
        name="ratio",
        title="Predicted over measured, step by step",
        section=TRUST_HEADING,
        draw=step_charts.ratio_over_steps,
        caption=captions.ratio_caption,
        known=_has_predictions,
    ),
    Figure(
        name="costs",
        title="The cost model against its profile",
        section=TRUST_HEADING,
        wide=True,
        draw=predictions.cost_fit,
        caption=captions.cost_fit_caption,
        known=lambda run: bool(run.facts.costs.points),
    ),
)
