"""The keys of the planner of strategies."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import Config
from headrace.errors import ConfigError

BASE = """
[data]
paths = ["python:stdlib"]
batch_tokens = 1000
[model]
kind = "llama"
layers = 2
hidden = 16
heads = 2
[devices]
ranks = 4
[planner]
name = "strategies"
"""


def loaded(folder: Path, text: str, *changes: str) -> Config:
    path = folder / "job.toml"
    path.write_text(BASE + text)
    return Config.load(path, *changes)


def test_strategies_are_read_as_they_write_themselves(tmp_path: Path) -> None:
    """Catches two spellings of one strategy that later count as two."""
    config = loaded(tmp_path, 'strategies = ["2*cp1 + tp2", "pp2-tp2"]\nrotate = true')
    assert config.planner.strategies == ("1*tp2 + 2*cp1", "1*tp2-pp2")
    assert config.planner.rotate
    assert Config.model_validate(config.to_json()) == config


def test_strategies_need_no_list(tmp_path: Path) -> None:
    """Catches a planner that cannot do without an explicit list."""
    assert loaded(tmp_path, "").planner.strategies == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('strategies = ["2*tq2"]', "strategies.0: scheme.*2\\*tq2|tq2.*wanted tpN"),
        ('strategies = ["x*tp2"]', "strategies.0: .*x\\*tp2"),
        ('strategies = ["2*tp2", "3*tp2"]', "'3\\*tp2' needs 6 ranks of 4"),
        ('strategies = ["none"]', "'none' needs 0 ranks of 4"),
        ("strategies = [2]", "strategies.0: .*string"),
        ("rotate = true", "rotate takes turns among strategies, and none are given"),
        ('name = "adaptive"\nstrategies = ["4*cp1"]', "by planner 'strategies'"),
        ("smoothing = 0.1", "does not smooth"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, text: str, said: str) -> None:
    """Catches a wrong strategy that is found out only when ranks are running."""
    base = BASE.replace('name = "strategies"\n', "") if text.startswith("name") else BASE
    path = tmp_path / "job.toml"
    path.write_text(base + text)
    with pytest.raises(ConfigError, match=said) as refused:
        Config.load(path)
    assert "\n  :" not in str(refused.value)


def test_fewer_ranks_than_a_strategy_needs(tmp_path: Path) -> None:
    """Catches --ranks that leaves strategies behind."""
    text = 'strategies = ["1*tp2 + 2*cp1"]'
    loaded(tmp_path, text)
    with pytest.raises(ConfigError, match="needs 4 ranks of 2"):
        loaded(tmp_path, text, "devices.ranks=2")
