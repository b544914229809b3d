"""Costs of groups: the formula, the file, and every entry that can be wrong."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from headrace.costs.group_costs import GroupCosts
from headrace.errors import CostError

_PUBLISHED = Path(__file__).parents[2] / "benchmarks/published/flexsp-7b-a100.json"


def good() -> dict[str, Any]:
    return {
        "kind": "groups",
        "name": "some",
        "a_s": 1e-8,
        "b_s": 2e-4,
        "c_s": 0.02,
        "cap_tokens": 1000,
        "kappa_s": {"1": 0, "3": 1e-5},
    }


def test_a_launch_adds_work_communication_and_one_constant() -> None:
    """Would catch a constant that is shared, a kappa per sequence, or squares of sums."""
    costs = GroupCosts.from_json(good())
    wanted = (1e-8 * (100**2 + 50**2) + 2e-4 * 150 + 1e-5 * 150) / 3 + 0.02
    assert costs.seconds([100, 50], 3) == pytest.approx(wanted, rel=1e-14)
    assert costs.seconds([], 1) == 0.02
    with pytest.raises(CostError, match="group size: got 2, wanted one of 1, 3"):
        costs.seconds([100], 2)


def test_published_costs_are_read_and_written() -> None:
    """Would catch a field that is lost, and sizes sorted as text."""
    costs = GroupCosts.load(_PUBLISHED)
    assert costs.sizes == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert costs.to_json() == json.loads(_PUBLISHED.read_text())
    assert GroupCosts.from_json(costs.to_json()) == costs
    assert pickle.loads(pickle.dumps(costs)) == costs
    assert costs.most_tokens(9) == 8 * 16384
    assert costs.most_tokens(0) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "pipelines"}, "kind of costs: got 'pipelines', wanted 'groups'"),
        ({"a_s": -1e-9}, "a_s: got -1e-09, wanted a finite number >= 0"),
        ({"b_s": "fast"}, "b_s: got 'fast'"),
        ({"c_s": float("nan")}, "c_s: got nan"),
        ({"c_s": True}, "c_s: got True"),
        ({"cap_tokens": 0}, "cap_tokens: got 0, wanted a whole number >= 1"),
        ({"cap_tokens": 1.5}, "cap_tokens: got 1.5"),
        ({"kappa_s": {}}, "kappa_s: got {}, wanted at least one group size"),
        ({"kappa_s": [1]}, "kappa_s: got list"),
        ({"kappa_s": {"1": -1}}, "kappa_s of 1: got -1"),
        ({"kappa_s": {"0": 1e-5}}, "kappa_s, group size: got 0"),
        ({"kappa_s": {"two": 1e-5}}, "kappa_s, group size: got 'two'"),
        ({"cap_token": 5}, "costs, cap_token: got an unknown entry; did you mean 'cap_tokens'"),
    ],
)
def test_a_wrong_entry_is_named(change: dict[str, Any], text: str) -> None:
    """Would catch a traceback, or a plan from nonsense."""
    with pytest.raises(CostError) as caught:
        GroupCosts.from_json(good() | change)
    assert str(caught.value).startswith(text)


def test_a_missing_entry_is_named() -> None:
    """Would catch a default in place of what was forgotten."""
    for name in ("a_s", "b_s", "c_s", "cap_tokens", "kappa_s"):
        value = good()
        del value[name]
        with pytest.raises(CostError, match=f"costs: got no {name}"):
            GroupCosts.from_json(value)


def test_a_file_is_named(tmp_path: Path) -> None:
    """Would catch errors that leave open which file is meant."""
    with pytest.raises(CostError, match=r"absent.json: got No such file"):
        GroupCosts.load(tmp_path / "absent.json")
    path = tmp_path / "bad.json"
    for text, wanted in (("{", "no JSON"), ("[]", "kind of costs: got list")):
        path.write_text(text)
        with pytest.raises(CostError, match=rf"bad.json.*{wanted}"):
            GroupCosts.load(path)
