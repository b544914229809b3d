"""Quality against what earlier planners found, in ``goldens.json``: by the mean of a kind of
problem, and by its worst batch, as a search is a lottery. Each batch is not held to what luck once
found; ``benchmarks/worlds.py`` has the table over many more worlds."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from headrace.costs import published
from headrace.planning import Problem, plan
from headrace.spec import Lengths

_HERE = Path(__file__).parent
_FIXTURES = _HERE.parents[1] / "benchmarks" / "fixtures"
_GOLDENS = json.loads((_HERE / "goldens.json").read_text())
_WORST, _MEAN = 0.02, 0.003


def iterations(name: str) -> list[Lengths]:
    found = json.loads((_FIXTURES / f"{name}.json").read_text())["iterations"]
    return [Lengths(tokens=tuple(tokens)) for tokens in found]


@pytest.mark.parametrize(
    "cell", _GOLDENS["pipelines"], ids=lambda c: f"{c['costs']} {c['devices']} {c['lengths']}"
)
def test_pipelines_are_no_slower_than_before(cell: dict[str, Any]) -> None:
    """Catches a search that loses what an earlier one found, and a bound that falls."""
    problem = Problem(costs=published(cell["costs"]), devices=cell["devices"])
    made = [plan(problem, lengths) for lengths in iterations(cell["lengths"])]
    for one, before_s, bound_s in zip(made, cell["steps_s"], cell["bounds_s"], strict=True):
        assert one.predicted_s <= before_s * (1 + _WORST)
        assert one.lower_bound_s >= bound_s * (1 - 2e-5)
    assert fmean(one.predicted_s for one in made) <= fmean(cell["steps_s"]) * (1 + _MEAN)


@pytest.mark.parametrize(
    "cell", _GOLDENS["groups"], ids=lambda c: f"{c['tokens']} {c['devices']} {c['semantics']}"
)
def test_groups_are_no_slower_than_before(cell: dict[str, Any]) -> None:
    """Catches the same under both semantics."""
    problem = Problem(
        costs=published("flexsp-7b-a100"), devices=cell["devices"], semantics=cell["semantics"]
    )
    made = [plan(problem, lengths) for lengths in iterations(f"longtail-32k-{cell['tokens']}")]
    for one, before_s in zip(made, cell["steps_s"], strict=True):
        assert one.predicted_s <= before_s * (1 + _WORST)
    assert fmean(one.predicted_s for one in made) <= fmean(cell["steps_s"]) * (1 + _MEAN)
