"""``headrace profile``: what it adds to the fits."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace

import pytest

from headrace.cli import main
from headrace.costs import CostModel
from headrace.costs.fingerprint import is_of_hybrid
from headrace.costs.paradyse import HybridModel, fit_hybrid
from headrace.costs.sources.measured import costs_from_profile
from profiles import made_up
from running.cli.jobs import losses, run, write_job

# In the package this name is the command.
profile = importlib.import_module("headrace.cli.profile_layers")


def test_limits_and_flagged_points_are_shown(capsys) -> None:
    """Catches notes that nobody sees, and a profile that ends before its limits."""
    measured = made_up()
    points = list(measured.points)
    points[5] = replace(points[5], forward_s=1e-6)
    profile._print(costs_from_profile(measured), replace(measured, points=tuple(points)))
    out = capsys.readouterr().out
    assert "flagged: cp1 ends forward: seconds of" in out
    assert "MaxLen replicated" in out
    for level in ("", "+attention", "+full"):
        assert f"cp1    local{level} " in out
    assert "forest" not in out


def test_hybrid_costs_are_shown(capsys) -> None:
    """Catches a table that only JSON has."""
    pytest.importorskip("sklearn")
    measured = made_up()
    profile._print(costs_from_profile(measured), measured, fit_hybrid(measured))
    assert "forest to" in capsys.readouterr().out


def test_without_scikit_learn(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Catches minutes of measuring before a package is missed."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["profile", str(tmp_path / "none.toml"), "--hybrid"]) == 2
    err = capsys.readouterr().err
    assert "scikit-learn" in err
    assert "headrace[forest]" in err


@pytest.mark.long
def test_hybrid_costs_of_a_job(tmp_path) -> None:
    """Catches JSON from which costs or hybrid costs cannot be read, and pairs left out."""
    pytest.importorskip("sklearn")
    command = ["profile", write_job(tmp_path), "--hybrid", "--ranks", 1]
    command += ["--set", "profile.rung_s=2"]
    code, out, err = run(*command, "--json")
    assert code == 0, err
    value = json.loads(out)
    costs, model = CostModel.from_json(value), HybridModel.from_json(value["hybrid"])
    assert model.fingerprint == costs.fingerprint
    assert set(model.pairs) == {1}
    assert {option.partition("+")[0] for option in model.pairs[1]} == {
        "ends",
        "attention:local",
        "feed_forward:local",
    }
    code, out, err = run(*command)
    assert code == 0, err
    assert "forest to" in out


def test_hybrid_costs_are_planned_with(tmp_path) -> None:
    """Catches planner.costs that is ignored: where nothing is measured it is refused, a profile
    then gives the costs, and runs with quadratics do not get them."""
    pytest.importorskip("sklearn")
    job = write_job(tmp_path)
    hybrid = ("--set", "planner.costs=hybrid")
    code, out, err = run("plan", job, "--ranks", 1, "--json", *hybrid)
    assert (code, out) == (2, "")
    assert "planner.costs" in err
    assert "headrace profile" in err
    code, out, err = run("profile", job, "--ranks", 1, "--json", *hybrid)
    assert code == 0, err
    assert "off by" in err
    costs = CostModel.from_json(json.loads(out))
    assert is_of_hybrid(costs.fingerprint)
    code, out, err = run("plan", job, "--ranks", 1, "--json", *hybrid)
    assert code == 0, err
    assert json.loads(out)["costs"] == costs.fingerprint
    code, out, err = run("plan", job, "--ranks", 1, "--json")
    assert code == 0, err
    assert "by formula" in json.loads(out)["costs"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_hybrid_costs_trains(tmp_path) -> None:
    """Catches ranks that fit other forests than the first, and costs that a run cannot plan
    with."""
    pytest.importorskip("sklearn")
    job = write_job(tmp_path, steps=2)
    hybrid = ("--set", "planner.costs=hybrid")
    code, _, err = run("train", job, "--out", tmp_path / "run", *hybrid)
    assert code == 0, err
    assert "hybrid costs: quadratics fitted" in err
    assert len(losses(tmp_path / "run")) == 2


def test_a_rehearsal_has_no_hybrid_costs(tmp_path, capsys) -> None:
    """Catches a choice that is ignored where nothing is measured for it."""
    job = write_job(tmp_path)
    assert main(["rehearse", str(job), "--set", "planner.costs=hybrid"]) == 2
    assert "planner.costs" in capsys.readouterr().err
