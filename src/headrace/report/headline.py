"""What a run did at a glance: cards for the page, lines for the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from headrace.report.facts import started_text
from headrace.report.layer_use import layer_use
from headrace.report.run_reader import read_run
from headrace.report.run_summary import RunSummary, known, share_text, summed_up
from headrace.report.warnings import warnings
from headrace.units import bytes_text, count_text, seconds_text

__all__ = ["Card", "cards", "summary_text"]

_NAMED = 3
"""Layer options that are named; the rest is told in one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One headline figure: a number, what it is, and a remark. ``name`` heads its line on the
    terminal."""

    name: str
    value: str
    label: str
    remark: str = ""


def cards(summary: RunSummary) -> list[Card]:
    """The headline figures of a run; a number that it does not know is shown as a dash."""
    peak, rank = summary.peak
    capacity = summary.run.facts.capacity_bytes
    memory = [
        known(peak, lambda _: f"rank {rank}", ""),
        known(peak / capacity, lambda s: f"{share_text(s)} of {bytes_text(capacity)}", ""),
    ]
    speed = [
        known(summary.step_s, lambda s: f"{seconds_text(s)} a step", ""),
        known(summary.mfu, lambda mfu: f"MFU {share_text(mfu)}", ""),
    ]
    chosen = (
        f"{summary.best_static} in every step"
        if summary.one_static
        else f"the best size of each step, mostly {summary.best_static}"
    )
    static = known(summary.against_static, lambda _: f"{chosen}, both predicted", "")
    waited = known(summary.waited_s, lambda s: f"training waited {seconds_text(s)}", "")
    return [
        Card(
            name="gain",
            value=known(summary.against_static, lambda ratio: f"{ratio:.2f}"),
            label="times as fast as the best static choice",
            remark=static,
        ),
        Card(
            name="speed",
            value=known(summary.tokens_per_s, count_text),
            label="tokens/s",
            remark=", ".join(filter(None, speed)),
        ),
        Card(
            name="idle",
            value=known(summary.idle, share_text),
            label="idle",
            remark="ranks wait or move weights",
        ),
        Card(
            name="memory",
            value=known(peak, bytes_text),
            label="peak memory",
            remark=", ".join(filter(None, memory)),
        ),
        Card(
            name="planner",
            value=known(summary.planning_s, seconds_text),
            label="to plan a step",
            remark=waited,
        ),
        Card(
            name="predictions",
            value=known(summary.error, share_text),
            label="off in a typical step",
            remark="predicted against measured",
        ),
    ]


def summary_text(run: Path) -> str:
    """What the run in a folder did, in about eleven lines of a name and a text; needs no extra
    package. Raises DataError when the folder cannot be read."""
    summary = summed_up(read_run(run))
    facts, corpus, steps = summary.run.facts, summary.run.facts.corpus, len(summary.run.steps)
    strategy, share, _ = summary.strategies[0]
    first, last = summary.loss
    rows = [
        (
            "run",
            f"{facts.name}  {_count(steps, 'step')} on {_count(facts.ranks, 'rank')} "
            f"({facts.machine.device})  {started_text(summary.run)}",
        ),
        (
            "corpus",
            f"{corpus.name}  {corpus.documents:,} documents  {count_text(corpus.tokens)} "
            f"tokens  median {known(corpus.median, count_text)}  "
            f"p99 {known(corpus.p99, count_text)}  longest {known(corpus.max, count_text)}",
        ),
        ("loss", f"{first:.3f} -> {last:.3f}" if isfinite(first) else "never a number"),
        (
            "plans",
            f"changed {_count(summary.changes, 'time')}  most often {strategy} "
            f"({share_text(share)} of steps)  "
            f"gap to the bound {known(summary.gap, share_text)}",
        ),
        ("methods", _methods(summary)),
        *[
            (card.name, f"{card.value} {card.label}{card.remark and f' ({card.remark})'}")
            for card in cards(summary)
        ],
        *[("warning" if i == 0 else "", text) for i, text in enumerate(warnings(summary.run))],
    ]
    return "\n".join(f"{name:<14}{text}" for name, text in rows)


def _count(number: int, noun: str) -> str:
    """A number with its noun in the plural where it is not one: ``1 step``, ``2 switches``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def _methods(summary: RunSummary) -> str:
    """The layer options with the largest shares as text, and how often methods changed between
    layers and between steps."""
    use = layer_use(summary.run)
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
