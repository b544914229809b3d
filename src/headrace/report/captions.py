"""One sentence under each figure that says what to see in it, with this run's numbers."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from math import isfinite

import numpy as np

from headrace.report.headline import headline, warm
from headrace.report.layer_use import layer_use
from headrace.report.records import Corpus, Run
from headrace.report.series import finite, median
from headrace.report.wording import known, share_text
from headrace.units import bytes_text, count_text, seconds_text

__all__ = [
    "cost_fit_caption",
    "gantt_caption",
    "gap_caption",
    "layers_caption",
    "lengths_caption",
    "loss_caption",
    "memory_caption",
    "options_caption",
    "placement_caption",
    "ratio_caption",
    "scatter_caption",
    "throughput_caption",
    "tokens_share",
]


def tokens_share(corpus: Corpus) -> list[float]:
    """The share of all tokens in each bin of the histogram, by the middles of the bins."""
    edges = np.asarray(corpus.edges, dtype=float)
    weight = np.asarray(corpus.counts, dtype=float) * (edges[:-1] + edges[1:]) / 2
    shares: list[float] = (weight / (weight.sum() or 1)).tolist()
    return shares


def gantt_caption(run: Run) -> str:
    """The recorded step: what it took against its prediction and the best static plan."""
    recorded = run.recorded
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


def lengths_caption(run: Run) -> str:
    """Which share of the tokens lies in the longest tenth of the documents."""
    corpus = run.facts.corpus
    counts = np.asarray(corpus.counts, dtype=float)
    before = (np.cumsum(counts) - counts) / counts.sum()
    share = float(np.asarray(tokens_share(corpus))[before >= 0.9].sum())
    long = float(counts[before >= 0.9].sum() / counts.sum())
    text = f"Half of the documents are shorter than {known(corpus.median, count_text)} tokens"
    if long > 0 and share > 0:
        return f"{text}, yet the longest {share_text(long)} hold {share_text(share)} of them all."
    return f"{text}; the longest has {known(corpus.max, count_text)}."


def placement_caption(run: Run) -> str:
    """Up to which length most sequences stayed on one rank."""
    bins = sorted({b for b, _ in run.assigned})
    sizes = sorted({size for _, size in run.assigned})
    if len(sizes) == 1:
        return f"Every sequence ran on {'one rank' if sizes[0] == 1 else f'{sizes[0]} ranks'}."
    alone = list(takewhile(lambda b: _share(run, b, sizes[0]) >= 0.5, bins))
    most = list(takewhile(lambda b: _share(run, b, sizes[-1]) >= 0.5, reversed(bins)))
    parts = []
    if alone:
        rank = "one rank" if sizes[0] == 1 else f"groups of {sizes[0]}"
        parts.append(f"up to {2 ** alone[-1]:,} tokens most sequences ran on {rank}")
    if most:
        parts.append(f"beyond {2 ** (most[-1] - 1):,} tokens most ran on {sizes[-1]} ranks")
    text = ", ".join(parts) or f"groups of {', '.join(map(str, sizes))} shared every length"
    return text[0].upper() + text[1:] + "."


def _share(run: Run, b: int, size: int) -> float:
    total = sum(count for (at, _), count in run.assigned.items() if at == b)
    return run.assigned.get((b, size), 0) / total if total else 0.0


def layers_caption(run: Run) -> str:
    """In which option the layers differ most, and how often a micro-batch changes methods."""
    use = layer_use(run)
    shares = [{o: n / sum(tokens.values()) for o, n in tokens.items()} for tokens in use.tokens]
    if len(use.shares) == 1:
        return f"Every layer used {next(iter(use.shares))} for all of its tokens."
    by_option = {o: [layer.get(o, 0.0) for layer in shares] for o in use.shares}
    option, found = max(by_option.items(), key=lambda item: max(item[1]) - min(item[1]))
    low, high = min(found), max(found)
    text = "All layers used the same mix"
    if high - low >= 0.005:
        text = (
            f"Layers differ most in {option}: {share_text(low)} of the tokens in layer "
            f"{found.index(low)}, {share_text(high)} in layer {found.index(high)}"
        )
    times = {0: "never changed", 1: "changed once"}
    changed = times.get(use.between_layers, f"changed {use.between_layers:,} times")
    return f"{text}; methods {changed} between layers of a micro-batch."


def options_caption(run: Run) -> str:
    """Which option did most of the work, and how often steps changed methods."""
    use = layer_use(run)
    option, share = next(iter(use.shares.items()))
    text = f"{option} did {share_text(share)} of all token-layers (tokens times layers)"
    if len(run.steps) == 1:
        return text + "."
    return (
        f"{text}; in {use.between_steps:,} of {len(run.steps) - 1:,} steps after the first some "
        "layer ran other methods than in the step before."
    )


def loss_caption(run: Run) -> str:
    """Where the loss began and where it ended."""
    losses = finite(step.loss for step in run.steps)
    if not losses.size:
        return "The loss was never a number."
    if losses.size == 1:
        return f"One step, with a loss of {losses[0]:.3f}."
    last = max(1, losses.size // 10)
    return (
        f"From {losses[0]:.3f} in the first step to {np.median(losses[-last:]):.3f} at the end "
        "(dots: steps; line: smoothed)."
    )


def throughput_caption(run: Run) -> str:
    """Median speed and idle share."""
    top = headline(run)
    return (
        f"{known(top.tokens_per_s, count_text)} tokens/s over all ranks; they wait or move "
        f"weights {known(top.idle, share_text)} of the time."
    )


def strategies_caption(run: Run) -> str:
    """The strategies that ran most, and how long their steps took."""
    counted = Counter(step.planned.strategy for step in run.steps)
    took = {
        name: median(s.step_s for s in run.steps if s.planned.strategy == name) for name in counted
    }
    texts = [
        f"{name} {share_text(count / len(run.steps))} of the steps, {seconds_text(took[name])} each"
        for name, count in counted.most_common(3)
    ]
    more = len(counted) - len(texts)
    return "; ".join(texts) + (f"; {more} more" if more else "") + " (medians)."


def gap_caption(run: Run) -> str:
    """The median gaps of the plans and of the best static plans."""
    steps = warm(run)
    bounds = [s.planned.lower_bound_s for s in steps]
    pairs = zip(steps, bounds, strict=True)
    static = median(s.planned.best_static_s / b - 1 for s, b in pairs if b > 0)
    text = f"Plans lie {known(headline(run).gap, share_text)} above the lower bound of their batch"
    if isfinite(static):
        text += f", the best static plans {share_text(static)} (medians)"
    return text + "; nothing can lie below zero."


def memory_caption(run: Run) -> str:
    """The highest peak against what was predicted for it and the capacity."""
    top, capacity = headline(run), run.facts.capacity_bytes
    predicted = [p for s in run.steps for p in s.planned.peak_bytes if isfinite(p)]
    text = f"The highest peak is {known(top.peak_bytes, bytes_text)} on rank {top.peak_rank}"
    if predicted:
        text += f", {bytes_text(max(predicted))} were predicted"
    if isfinite(capacity):
        text += f"; a rank may use {bytes_text(capacity)}"
    return text + "."


def scatter_caption(run: Run) -> str:
    """How many steps lie within the band."""
    ratios = finite(step.ratio for step in warm(run))
    close = float((np.abs(ratios - 1) <= 0.1).mean()) if ratios.size else 0.0
    return (
        f"{share_text(close)} of the steps took what was predicted within 10 % (band); "
        "above the diagonal they took longer."
    )


def ratio_caption(run: Run) -> str:
    """Whether predictions lean to one side."""
    ratio = median(step.ratio for step in warm(run))
    if not isfinite(ratio):
        return "No step was predicted."
    verdict = "too short" if ratio < 0.98 else "too long" if ratio > 1.02 else "about right"
    return (
        f"A typical step is predicted at {ratio:.2f} of what it takes: {verdict} (band: within "
        "10 %; the line is smoothed)."
    )


def cost_fit_caption(run: Run) -> str:
    """The median error of the fits."""
    points = run.facts.costs.points
    error = median(abs(p.predicted_s / p.measured_s - 1) for p in points if p.measured_s > 0)
    return (
        f"Lines are the fits the planner trusts, {known(error, share_text)} off at a typical one "
        f"of {len(points)} profiled points (dots; hollow: packs of short sequences; ends: "
        "embedding and loss)."
    )
