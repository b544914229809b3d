"""One sentence under each figure that says what to see in it, with this run's numbers."""

from __future__ import annotations

from itertools import takewhile
from math import isfinite

import numpy as np

from headrace.report.layer_use import layer_use
from headrace.report.records import CorpusStatistics, Run
from headrace.report.run_summary import RunSummary, finite, known, median, share_text
from headrace.units import bytes_text, count_text, seconds_text

__all__ = [
    "cost_fit_caption",
    "gantt_caption",
    "gap_caption",
    "layers_caption",
    "lengths_caption",
    "lengths_text",
    "loss_caption",
    "memory_caption",
    "options_caption",
    "placement_caption",
    "ratio_caption",
    "scatter_caption",
    "strategies_caption",
    "throughput_caption",
    "tokens_share",
]


def tokens_share(corpus: CorpusStatistics) -> list[float]:
    """The share of all tokens in each bin of the histogram of lengths."""
    edges = np.asarray(corpus.edges, dtype=float)
    # A document counts as long as the middle of its bin.
    tokens = np.asarray(corpus.counts, dtype=float) * (edges[:-1] + edges[1:]) / 2
    shares: list[float] = (tokens / (tokens.sum() or 1)).tolist()
    return shares


def gantt_caption(summary: RunSummary) -> str:
    """The recorded step: what it took against its prediction and the best static plan."""
    run, recorded = summary.run, summary.run.recorded
    if recorded is None:
        return ""
    measured, predicted = recorded.measured.seconds, recorded.predicted.seconds
    step = next((s for s in run.steps if s.step == recorded.step), None)
    text = f"Step {recorded.step}"
    if step is not None:
        text += f" with a sequence of {step.longest:,} tokens, plan {step.planned.strategy},"
    text += f" took {seconds_text(measured)}, {seconds_text(predicted)} were predicted"
    if recorded.static is not None and predicted > 0:
        ratio = recorded.static.seconds / predicted
        text += f"; the best static plan would take {ratio:.2f}x as long"
    return text + ". Grey is waiting; drag to move, shift and scroll to zoom."


def lengths_caption(summary: RunSummary) -> str:
    """Which share of the tokens lies in the longest tenth of the documents."""
    return lengths_text(summary.run.facts.corpus)


def lengths_text(corpus: CorpusStatistics, noun: str = "document") -> str:
    """Which share of the tokens lies in the longest tenth of the documents, or of other things
    with lengths, which ``noun`` names."""
    counts = np.asarray(corpus.counts, dtype=float)
    before = (np.cumsum(counts) - counts) / counts.sum()  # share of documents in shorter bins
    share = float(np.asarray(tokens_share(corpus))[before >= 0.9].sum())  # of the tokens
    long = float(counts[before >= 0.9].sum() / counts.sum())  # of the documents
    text = f"Half of the {noun}s are shorter than {known(corpus.median, count_text)} tokens"
    if long > 0 and share > 0:
        return f"{text}, yet the longest {share_text(long)} hold {share_text(share)} of them all."
    return f"{text}; the longest has {known(corpus.max, count_text)}."


def placement_caption(summary: RunSummary) -> str:
    """Up to which length most sequences ran in the smallest groups, such as on one rank, and from
    which on in the largest."""
    run = summary.run
    bins = sorted({b for b, _ in run.assigned})
    sizes = sorted({size for _, size in run.assigned})
    if len(sizes) == 1:
        return f"Every sequence ran on {'one rank' if sizes[0] == 1 else f'{sizes[0]} ranks'}."
    # The shortest and the longest bins in which most sequences ran in the smallest or the largest
    # groups; bin b has lengths up to 2^b.
    small = list(takewhile(lambda b: _share(run, b, sizes[0]) >= 0.5, bins))
    large = list(takewhile(lambda b: _share(run, b, sizes[-1]) >= 0.5, reversed(bins)))
    parts = []
    if small:
        rank = "one rank" if sizes[0] == 1 else f"groups of {sizes[0]}"
        parts.append(f"up to {2 ** small[-1]:,} tokens most sequences ran on {rank}")
    if large:
        parts.append(f"beyond {2 ** (large[-1] - 1):,} tokens most ran on {sizes[-1]} ranks")
    text = ", ".join(parts) or f"groups of {', '.join(map(str, sizes))} shared every length"
    return text[0].upper() + text[1:] + "."


def _share(run: Run, length_bin: int, size: int) -> float:
    """The share of the sequences in a bin of lengths that ran in groups of ``size`` ranks."""
    total = sum(count for (other, _), count in run.assigned.items() if other == length_bin)
    return run.assigned.get((length_bin, size), 0) / total if total else 0.0


def layers_caption(summary: RunSummary) -> str:
    """Between which two layers the share of tokens of an option differs most, and how often methods
    change between the layers of a micro-batch."""
    use = layer_use(summary.run)
    shares = [  # of the tokens of each layer, by option
        {option: count / sum(tokens.values()) for option, count in tokens.items()}
        for tokens in use.tokens
    ]
    if len(use.shares) == 1:
        return f"Every layer used {next(iter(use.shares))} for all of its tokens."
    by_option = {option: [layer.get(option, 0.0) for layer in shares] for option in use.shares}
    option, by_layer = max(by_option.items(), key=lambda item: max(item[1]) - min(item[1]))
    low, high = min(by_layer), max(by_layer)
    text = "All layers used the same mix"
    if high - low >= 0.005:
        text = (
            f"Layers differ most in {option}: {share_text(low)} of the tokens in layer "
            f"{by_layer.index(low)}, {share_text(high)} in layer {by_layer.index(high)}"
        )
    times = {0: "never changed", 1: "changed once"}
    changed = times.get(use.between_layers, f"changed {use.between_layers:,} times")
    return f"{text}; methods {changed} between layers of a micro-batch."


def options_caption(summary: RunSummary) -> str:
    """Which option did most of the work, and how often steps changed methods."""
    use = layer_use(summary.run)
    option, share = next(iter(use.shares.items()))
    text = f"{option} did {share_text(share)} of all token-layers (tokens times layers)"
    if len(summary.run.steps) == 1:
        return text + "."
    return (
        f"{text}; in {use.between_steps:,} of {len(summary.run.steps) - 1:,} steps after the first "
        "some layer ran other methods than in the step before."
    )


def loss_caption(summary: RunSummary) -> str:
    """Where the loss began and where it ended."""
    first, last = summary.loss
    if not isfinite(first):
        return "The loss was never a number."
    if len(summary.run.steps) == 1:
        return f"One step, with a loss of {first:.3f}."
    return (
        f"From {first:.3f} in the first step to {last:.3f} at the end "
        "(dots: steps; line: smoothed)."
    )


def throughput_caption(summary: RunSummary) -> str:
    """Median speed and idle share."""
    return (
        f"{known(summary.tokens_per_s, count_text)} tokens/s over all ranks; they wait or move "
        f"weights {known(summary.idle, share_text)} of the time."
    )


def strategies_caption(summary: RunSummary) -> str:
    """The strategies that ran most, and how long their steps took."""
    texts = [
        f"{name} {share_text(share)} of the steps, {seconds_text(took)} each"
        for name, share, took in summary.strategies[:3]
    ]
    more = len(summary.strategies) - len(texts)
    return "; ".join(texts) + (f"; {more} more" if more else "") + " (medians)."


def gap_caption(summary: RunSummary) -> str:
    """The median gaps of the plans and of the best static plans."""
    planned = [s.planned for s in summary.run.warm if s.planned.lower_bound_s > 0]
    static = median(p.best_static_s / p.lower_bound_s - 1 for p in planned)
    text = f"Plans lie {known(summary.gap, share_text)} above the lower bound of their batch"
    if isfinite(static):
        text += f", the best static plans {share_text(static)} (medians)"
    return text + "; nothing can lie below zero."


def memory_caption(summary: RunSummary) -> str:
    """The highest peak against what was predicted for it and the capacity."""
    (peak, rank), capacity = summary.peak, summary.run.facts.capacity_bytes
    predicted = finite(p for s in summary.run.steps for p in s.planned.peak_bytes)
    text = f"The highest peak is {known(peak, bytes_text)} on rank {rank}"
    if predicted.size:
        text += f", {bytes_text(predicted.max())} were predicted"
    if isfinite(capacity):
        text += f"; a rank may use {bytes_text(capacity)}"
    return text + "."


def scatter_caption(summary: RunSummary) -> str:
    """The share of the steps whose measured seconds are within 10 % of the predicted ones."""
    ratios = finite(step.ratio for step in summary.run.warm)
    close = float((np.abs(ratios - 1) <= 0.1).mean()) if ratios.size else 0.0
    return (
        f"{share_text(close)} of the steps took what was predicted within 10 % (band); "
        "above the diagonal they took longer."
    )


def ratio_caption(summary: RunSummary) -> str:
    """Whether a typical step is predicted too short, too long, or about right."""
    ratio = median(step.ratio for step in summary.run.warm)
    if not isfinite(ratio):
        return "No step was predicted."
    verdict = "too short" if ratio < 0.98 else "too long" if ratio > 1.02 else "about right"
    return (
        f"A typical step is predicted at {ratio:.2f} of what it takes: {verdict} (band: within "
        "10 %; the line is smoothed)."
    )


def cost_fit_caption(summary: RunSummary) -> str:
    """The median relative error of the fits over the profiled points, and how to read the
    figure."""
    points = summary.run.facts.costs.points
    error = median(abs(p.predicted_s / p.measured_s - 1) for p in points if p.measured_s > 0)
    return (
        f"Lines are the fits the planner trusts, {known(error, share_text)} off at a typical one "
        f"of {len(points)} profiled points (dots; hollow: packs of short sequences; ends: "
        "embedding and loss)."
    )
