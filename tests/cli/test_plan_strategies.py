"""``headrace plan`` and ``headrace simulate`` with strategies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.spec import Plan, Strategy

TEXTS = ("1*tp2 + 2*cp1", "1*tp2-pp2")
CONFIG = """
[data]
paths = ["corpus"]
patterns = ["*.txt"]
context = 4096
batch_tokens = 16384
cache = "{cache}"
[model]
layers = 4
hidden = 256
heads = 4
kv_heads = 2
[devices]
ranks = 4
[planner]
name = "strategies"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A job of four ranks over documents of many lengths."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(30):
        (corpus / f"{i:02d}.txt").write_text("race " * (10 + 25 * i))
    path = tmp_path / "job.toml"
    path.write_text(CONFIG.format(cache=tmp_path / "cache"))
    return path


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_pipelines_side_by_side_are_planned(config: Path, capsys) -> None:
    """Catches a planner of strategies that is configured and not asked."""
    code, out, err = call(capsys, "plan", config, "--json")
    assert code == 0, err
    [plan] = [Plan.from_json(item) for item in json.loads(out)["plans"]]
    assert plan.planner == "strategies"
    assert plan.semantics == "free"
    code, out, err = call(capsys, "plan", config)
    assert code == 0, err
    assert str(plan.strategy) in " ".join(out.split())


def test_listed_strategies_take_turns(config: Path, capsys) -> None:
    """Catches turns that a look ahead does not take."""
    changes = ["--set", f"planner.strategies={list(TEXTS)}", "--set", "planner.rotate=true"]
    code, out, err = call(capsys, "plan", config, "--json", "--batches", 3, *changes)
    assert code == 0, err
    plans = [Plan.from_json(item) for item in json.loads(out)["plans"]]
    for plan, text in zip(plans, (*TEXTS, TEXTS[0]), strict=True):
        allowed = {scheme for scheme, _ in Strategy.parse(text).counts}
        assert {pipeline.scheme for pipeline in plan.pipelines} <= allowed
    code, out, err = call(capsys, "simulate", config, "--batches", 2, *changes)
    assert code == 0, err
    assert "programs checked" in out
    assert "1*tp2-pp2" in out


def test_a_strategy_without_costs_is_named(config: Path, capsys) -> None:
    """Catches a traceback where a scheme needs a method that is not considered."""
    changes = ["--set", "planner.strategies=['1*tp2-cp2']"]
    code, out, err = call(capsys, "plan", config, *changes)
    assert (code, out) == (2, "")
    assert "tp2-cp2" in err


def test_a_narrow_layer_is_not_a_matter_of_methods(config: Path, capsys) -> None:
    """Catches a hint to methods where the feed-forward has too few blocks of rows."""
    changes = ["--set", "planner.strategies=['1*tp4']", "--set", "model.ffn=128"]
    code, _, err = call(capsys, "plan", config, *changes)
    assert code == 2
    assert "at most 2 ranks: model.ffn is too narrow" in " ".join(err.split())
