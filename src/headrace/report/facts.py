"""The tables of the page as rows of text: facts, configuration, a plan, what was learnt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from math import isfinite
from typing import Any

from headrace.costs.calibration import Estimate
from headrace.report.records import Run, StepMetrics
from headrace.report.run_summary import known, share_text
from headrace.units import bytes_text, count_text, seconds_text

__all__ = ["config_rows", "fact_groups", "plan_rows", "started_text", "trust_rows", "trust_text"]

Rows = list[tuple[str, str]]

_TRUST_ROWS = 30  # layer options that are listed at most
_FEWEST = 15  # values that an estimate of a rank needs before the report mentions it
_REMEMBERED = 50  # the latest values, about, that an exponentially weighted estimate averages over


def started_text(run: Run) -> str:
    """When the run started, such as ``21 Nov 2026, 07:10``; its own text when that is no ISO
    time."""
    try:
        when = datetime.fromisoformat(run.facts.started)
    except ValueError:
        return run.facts.started
    return f"{when.day} {when:%b %Y, %H:%M} {when.tzname() or ''}".rstrip()


def fact_groups(run: Run) -> dict[str, Rows]:
    """Rows (name, text) about the run, by the headings of the groups that they are in."""
    facts, steps, machine, c = run.facts, run.steps, run.facts.machine, run.facts.corpus
    lengths = [("median", c.median), ("p90", c.p90), ("p99", c.p99), ("longest", c.max)]
    return {
        "Run": [
            ("started", started_text(run)),
            ("steps", f"{len(steps):,} ({steps[0].step:,} to {steps[-1].step:,})"),
            ("time in steps", seconds_text(sum(step.step_s for step in steps))),
            ("tokens seen", count_text(sum(step.tokens for step in steps))),
            ("ranks", str(facts.ranks)),
            ("rank memory", known(facts.capacity_bytes, bytes_text, "not given")),
            ("seed", str(facts.seed)),
            ("headrace", facts.version),
        ],
        "Machine": [
            ("device", machine.device),
            ("host", f"{machine.host_cpu}, {machine.cores} cores"),
            ("host memory", bytes_text(machine.memory_bytes)),
            ("PyTorch", machine.torch),
            ("Python", machine.python),
        ],
        "Model": [("parameters", count_text(facts.parameters)), *_model(run)],
        "Corpus": [
            ("name", c.name),
            ("documents", f"{c.documents:,}"),
            ("tokens", count_text(c.tokens)),
            *[(name, f"{at:,.0f} tokens") for name, at in lengths if isfinite(at)],
            ("context", known(c.context, lambda at: f"{at:,.0f} tokens")),
            ("skipped", f"{c.skipped:,}"),
        ],
    }


def _model(run: Run) -> Rows:
    """Rows of (name, text) about the model's architecture; none where a run has no record of it."""
    a = run.facts.architecture
    if a is None:
        return []
    return [
        ("kind", f"{a.kind}, {'causal' if a.causal else 'bidirectional'}"),
        ("layers", f"{a.layers} of {a.hidden:,} features"),
        ("heads", f"{a.heads} of {a.head_features}, {a.kv_heads} for keys and values"),
        ("feed-forward", f"{a.ffn:,}"),
        ("vocabulary", f"{a.vocabulary:,}{', tied' if a.tied else ''}"),
    ]


def config_rows(config: Mapping[str, Any], prefix: str = "") -> Rows:
    """A configuration as rows of dotted key and value, in its own order."""
    rows: Rows = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            rows += config_rows(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", str(value)))
    return rows


def plan_rows(step: StepMetrics, limit: int = 40) -> list[tuple[str, ...]]:
    """The micro-batches of a step, longest first: ranks, sequences, longest, tokens, order,
    layers."""
    order = sorted(step.micro_batches, key=lambda m: (-m.longest, -m.tokens))
    return [
        (str(m.ranks), f"{m.sequences:,}", f"{m.longest:,}", f"{m.tokens:,}", m.order, m.layers)
        for m in order[:limit]
    ]


def trust_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """Rows (what was predicted, in how many steps, how much longer it usually took than predicted,
    how much that scattered): one for all micro-batches of a step, then those of the most used
    layer options, whose errors are relative to that of their step."""
    learnt = run.calibration
    if learnt is None or not learnt.whole.count:
        return []
    options = sorted(learnt.options.items(), key=lambda item: (-item[1].count, item[0]))
    return [_row("all of a step", learnt.whole)] + [_row(*item) for item in options[:_TRUST_ROWS]]


def _row(name: str, estimate: Estimate) -> tuple[str, str, str, str]:
    """A row (name, count, mean, spread) in percent. The estimate is of the logarithm of measured
    over predicted, so exp(x) - 1 is the relative error."""
    usual, spread = math.expm1(estimate.mean), math.expm1(estimate.spread)
    sign = "" if usual < 0 else "+"
    return name, f"{estimate.count:,}", f"{sign}{share_text(usual)}", f"\u00b1 {share_text(spread)}"


def trust_text(run: Run) -> str:
    """One sentence on how far off predictions of peak memory were and which rank was slowest; empty
    when nothing was learnt of either."""
    learnt, parts = run.calibration, list[str]()
    if learnt is None:
        return ""
    if learnt.peaks.usual.count:
        usual, high = learnt.peaks.usual.mean, learnt.peaks.high
        parts.append(f"peak memory was usually {usual:.2f} and seldom over {high:.2f} of predicted")
    sure = [item for item in learnt.ranks.items() if _sure(item[1])]
    slowest = max(sure, key=lambda item: item[1].mean, default=None)
    if slowest is not None:
        parts.append(
            f"rank {slowest[0]} was {math.exp(slowest[1].mean):.2f}x slower than the others"
        )
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""


def _sure(estimate: Estimate) -> bool:
    """Whether a rank was certainly slower than the others: by more than 5 % and by more than three
    standard errors of the mean."""
    # The estimate is of how many times as long as the others the rank takes, as a logarithm.
    seen = min(estimate.count, _REMEMBERED)
    error = estimate.spread / math.sqrt(max(1, seen))  # standard error of the mean
    return seen >= _FEWEST and estimate.mean > max(math.log(1.05), 3 * error)
