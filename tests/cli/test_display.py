"""Lines of a run on a terminal."""

from __future__ import annotations

from headrace.cli.display import step_line

METRICS = {
    "step": 1, "loss": 6.91, "tokens_per_s": 4100.0, "idle": 0.004, "strategy": "1*cp2",
    "predicted_s": 3.8, "step_s": 3.91,
}  # fmt: skip


def test_the_last_step_has_no_time_left() -> None:
    """Catches ``ETA 0 us``."""
    assert step_line(METRICS, steps=3, eta_s=4.0).endswith("measured 3.91 s  ETA 4 s")
    assert step_line(METRICS, steps=2, eta_s=0.0).endswith("measured 3.91 s")
