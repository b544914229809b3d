"""Lines of a run on a terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from headrace.cli import display
from headrace.cli.display import Terminal, step_line

METRICS = {
    "step": 1,
    "loss": 6.91,
    "tokens_per_s": 4100.0,
    "idle": 0.004,
    "strategy": "1*cp2",
    "predicted_s": 3.8,
    "step_s": 3.91,
}


def test_the_last_step_has_no_time_left() -> None:
    """Catches ``ETA 0 us``."""
    assert step_line(METRICS, steps=3, eta_s=4.0).endswith("measured 3.91 s  ETA 4 s")
    assert step_line(METRICS, steps=2, eta_s=0.0).endswith("measured 3.91 s")


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, stays_s: float = 60.0) -> str:
    """What a run of twenty quick steps writes to a terminal, or to a pipe."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    monkeypatch.setattr(display, "Console", lambda **_: console)
    monkeypatch.setattr(display.sys, "stderr", out)
    listener: Any = Terminal(stays_s=stays_s)
    monkeypatch.setattr(listener, "_tell", lambda text: out.write(text + "\n"))
    listener.begin(0, 20)
    for number in range(20):
        step = SimpleNamespace(metrics=METRICS | {"step": number})
        listener.step(cast("Any", step), ["watch out"] if number == 9 else [])
    listener.end()
    return out.getvalue()


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line for each of a million steps, and a notice that is lost among them."""
    for terminal in (True, False):
        text = shown(monkeypatch, terminal=terminal)
        lines = [line for line in text.splitlines() if "measured 3.91 s" in line]
        stay = [line for line in lines if "ETA" in line or "20/20" in line]
        assert text.count("watch out") == 1
        assert len([line for line in stay if line.lstrip("\r\x1b[2K1A").startswith("step")]) <= 3
        assert "step 20/20" in text
    often = shown(monkeypatch, terminal=True, stays_s=0.0)
    assert often.count("ETA") >= 19, "they stay as often as wanted"
