"""The facts of a run as rows of text, for the tables of the page and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from math import isfinite
from typing import Any

from headrace.report.records import Run, Step
from headrace.report.wording import known
from headrace.units import bytes_text, count_text, seconds_text

__all__ = ["config_rows", "fact_groups", "plan_rows", "started_text"]

Rows = list[tuple[str, str]]


def started_text(run: Run) -> str:
    """``21 Nov 2026, 07:10``; the text itself when it is no ISO time."""
    try:
        when = datetime.fromisoformat(run.facts.started)
    except ValueError:
        return run.facts.started
    return f"{when.day} {when:%b %Y, %H:%M} {when.tzname() or ''}".rstrip()


def fact_groups(run: Run) -> list[tuple[str, Rows]]:
    """Groups of facts, each a heading and rows of name and text."""
    return [("Run", _run(run)), ("Machine", _machine(run)), ("Model", _model(run)),
            ("Corpus", _corpus(run))]  # fmt: skip


def _run(run: Run) -> Rows:
    facts, steps = run.facts, run.steps
    took = sum(step.step_s for step in steps)
    return [
        ("started", started_text(run)),
        ("steps", f"{len(steps):,} ({steps[0].step:,} to {steps[-1].step:,})"),
        ("time in steps", seconds_text(took)),
        ("tokens seen", count_text(sum(step.tokens for step in steps))),
        ("ranks", str(facts.ranks)),
        ("rank memory", known(facts.capacity_bytes, bytes_text, "not given")),
        ("seed", str(facts.seed)),
        ("headrace", facts.version),
    ]


def _machine(run: Run) -> Rows:
    machine = run.facts.machine
    return [
        ("device", machine.device),
        ("host", f"{machine.host_cpu}, {machine.cores} cores"),
        ("host memory", bytes_text(machine.memory_bytes)),
        ("PyTorch", machine.torch),
        ("Python", machine.python),
    ]


def _model(run: Run) -> Rows:
    a = run.facts.architecture
    rows = [("parameters", count_text(run.facts.parameters))]
    if a is None:
        return rows
    return [
        ("kind", f"{a.kind}, {'causal' if a.causal else 'bidirectional'}"),
        *rows,
        ("layers", f"{a.layers} of {a.hidden:,} features"),
        ("heads", f"{a.heads} of {a.head_features}, {a.kv_heads} for keys and values"),
        ("feed-forward", f"{a.ffn:,}"),
        ("vocabulary", f"{a.vocabulary:,}{', tied' if a.tied else ''}"),
    ]


def _corpus(run: Run) -> Rows:
    c = run.facts.corpus
    lengths = [("median", c.median), ("p90", c.p90), ("p99", c.p99), ("longest", c.max)]
    return [
        ("name", c.name),
        ("documents", f"{c.documents:,}"),
        ("tokens", count_text(c.tokens)),
        *[(name, f"{at:,.0f} tokens") for name, at in lengths if isfinite(at)],
        ("context", known(c.context, lambda at: f"{at:,.0f} tokens")),
        ("skipped", f"{c.skipped:,}"),
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


def plan_rows(step: Step, limit: int = 40) -> list[tuple[str, ...]]:
    """The micro-batches of a step, longest first: ranks, sequences, longest, tokens, order,
    layers."""
    order = sorted(step.micro_batches, key=lambda m: (-m.longest, -m.tokens))
    return [
        (str(m.ranks), f"{m.sequences:,}", f"{m.longest:,}", f"{m.tokens:,}", m.order, m.layers)
        for m in order[:limit]
    ]
