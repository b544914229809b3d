"""``benchmarks/main_job.py``: what it asks of a configuration."""

from __future__ import annotations

from pathlib import Path

import main_job
import pytest

from headrace.config import Config

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["python-sources", "python-sources-64"])
def test_bytes_are_counted_with_one_method(name: str) -> None:
    """Would catch an example that the benchmark refuses after it has measured for minutes."""
    config = Config.load(EXAMPLES / f"{name}.toml", *main_job.ONE_METHOD, "devices.ranks=2")
    assert config.planner.methods == "auto"
    assert list(config.planner.candidates or ()) == ["ulysses_z"]
