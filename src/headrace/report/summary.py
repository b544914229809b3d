"""A run summed up for the terminal."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import numpy as np

from headrace.report.facts import started_text
from headrace.report.headline import Headline, headline, warnings
from headrace.report.layer_use import layer_use
from headrace.report.records import Run
from headrace.report.run_folder import read_run
from headrace.report.series import finite
from headrace.report.wording import known, share_text
from headrace.units import bytes_text, count_text, seconds_text

__all__ = ["summary_text"]

_NAMED = 3
"""Layer options that are named; the rest is told in one number."""


def summary_text(run: Path) -> str:
    """What the run in a folder did, in about eleven lines of a name and a text; needs no extra
    package. Raises DataError when the folder cannot be read."""
    return _summary(read_run(run))


def _summary(run: Run) -> str:
    top = headline(run)
    rows = [
        ("run", f"{run.facts.name}  {_count(len(run.steps), 'step')} on "
                f"{_count(run.facts.ranks, 'rank')} ({run.facts.machine.device})  "
                f"{started_text(run)}"),
        ("corpus", _corpus(run)),
        ("loss", _loss(run)),
        ("speed", f"{known(top.tokens_per_s, count_text)} tokens/s  "
                  f"{known(top.step_s, seconds_text)}/step  idle {known(top.idle, share_text)}"
                  + known(top.mfu, lambda mfu: f"  MFU {share_text(mfu)}", "")),
        ("plans", f"most often {top.strategy} ({share_text(top.strategy_share)} of steps)  "
                  f"gap to the bound {known(top.gap, share_text)}"),
        ("methods", _methods(run)),
        ("best static", _static(top)),
        ("predictions", f"{known(top.error, share_text)} off in a typical step"),
        ("memory", _memory(run, top)),
        ("planner", f"{known(top.planning_s, seconds_text)}/step  training waited "
                    f"{known(top.waited_s, seconds_text)}"),
    ]  # fmt: skip
    rows += [("warning" if i == 0 else "", text) for i, text in enumerate(warnings(run))]
    return "\n".join(f"{name:<14}{text}" for name, text in rows)


def _count(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def _corpus(run: Run) -> str:
    c = run.facts.corpus
    return (
        f"{c.name}  {c.documents:,} documents  {count_text(c.tokens)} tokens  median "
        f"{known(c.median, count_text)}  p99 {known(c.p99, count_text)}  longest "
        f"{known(c.max, count_text)}"
    )


def _loss(run: Run) -> str:
    losses = finite(step.loss for step in run.steps)
    if not losses.size:
        return "never a number"
    last = float(np.median(losses[-max(1, losses.size // 10) :]))
    return f"{losses[0]:.3f} -> {last:.3f}"


def _methods(run: Run) -> str:
    use = layer_use(run)
    if not use.shares:
        return "not recorded"
    shares = list(use.shares.items())
    parts = [f"{option} {share_text(share)}" for option, share in shares[:_NAMED]]
    if len(shares) > _NAMED:
        rest = sum(share for _, share in shares[_NAMED:])
        parts.append(f"{_count(len(shares) - _NAMED, 'other')} {share_text(rest)}")
    layers, steps = use.between_layers, use.between_steps
    switches = f"{_count(layers, 'switch')} between layers, {steps:,} between steps"
    return f"{', '.join(parts)} of token-layers; {switches if layers + steps else 'no switches'}"


def _static(top: Headline) -> str:
    if not isfinite(top.against_static):
        return "not predicted"
    return f"{top.best_static}: {top.against_static:.2f}x the time of these plans (predicted)"


def _memory(run: Run, top: Headline) -> str:
    if not isfinite(top.peak_bytes):
        return "not measured"
    text = f"peak {bytes_text(top.peak_bytes)} (rank {top.peak_rank})"
    return text + known(run.facts.capacity_bytes, lambda size: f" of {bytes_text(size)}", "")
