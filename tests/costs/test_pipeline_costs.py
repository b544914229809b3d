"""Costs of pipelines: what is read, what is refused, what is between the listed clusters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.costs.pipeline_costs import PipelineCosts, SchemeCost
from headrace.errors import CostError
from headrace.spec import Scheme

PUBLISHED = sorted((Path(__file__).parents[2] / "benchmarks" / "published").glob("hydraulis-*"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_costs_are_read_and_written(path: Path) -> None:
    """Catches a field lost on the way, and names that change (``tp1-pp4``)."""
    costs = PipelineCosts.load(path)
    assert PipelineCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs
    written = json.loads(path.read_text())
    assert [entry["scheme"] for entry in written["schemes"]] == [s.name for s in costs.schemes]
    assert costs.facts["device"] == written["device"]
    cost, entry = costs.schemes[0], written["schemes"][0]
    assert cost.micro_batch_s([100, 50]) == pytest.approx(
        entry["a_s"] * (100**2 + 50**2) + entry["b_s"] * 150 + entry["c_s"]
    )


def test_rooms_between_listed_clusters_follow_the_shared_state() -> None:
    """Catches lines in the number of devices: room is A - B / N, so at 48 of 32 and 96 it is in
    the middle; and promises below the smallest cluster."""
    cost = SchemeCost(
        scheme=Scheme(tensor=2), a_s=0.0, b_s=1.0, c_s=0.0, max_length={32: -1280, 96: 6400}
    )
    assert cost.most_tokens(48) == 2560
    assert cost.most_tokens(32) == -1280
    assert cost.most_tokens(4096) == 6400
    assert cost.most_tokens(31) is None


def entry(**changes: Any) -> dict[str, Any]:
    """A valid entry of a scheme, changed; None leaves a field out."""
    whole: dict[str, Any] = {
        "scheme": "tp2-pp2",
        "tensor": 2,
        "pipeline": 2,
        "devices": 4,
        "a_s": 1e-9,
        "b_s": 1e-4,
        "c_s": 0.1,
        "max_length": {"8": 4096},
        "util_length": 512,
    }
    return {name: value for name, value in {**whole, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"a_s": -1e-9}, "scheme 0 of the costs: a_s of tp2-pp2: got -1e-09"),
        ({"b_s": float("nan")}, "b_s of tp2-pp2: got nan"),
        ({"c_s": "fast"}, "c_s of tp2-pp2: got 'fast'"),
        ({"c_s": True}, "c_s of tp2-pp2: got True"),
        ({"a_s": 0.0, "b_s": 0.0}, "costs of tp2-pp2: got a_s = b_s = 0"),
        ({"b_s": None}, "scheme 0 of the costs: got no 'b_s'"),
        ({"scheme": None}, "scheme 0 of the costs: got no 'scheme'"),
        ({"scheme": "big"}, "wanted tpN"),
        ({"scheme": 7}, "scheme 0 of the costs"),
        ({"devices": 8}, "devices of tp2-pp2: got 8, wanted 4"),
        ({"tensor": 4}, "tensor of tp2-pp2: got 4, wanted 2"),
        ({"max_length": {}}, "max_length of tp2-pp2: got none"),
        ({"max_length": {"8": 10.5}}, "max_length of tp2-pp2 at 8 devices: got 10.5"),
        ({"max_length": {"many": 5}}, "scheme 0 of the costs"),
        ({"max_length": [5]}, "scheme 0 of the costs"),
        ({"util_length": -1}, "util_length of tp2-pp2: got -1"),
    ],
)
def test_a_bad_entry_is_named(changes: dict[str, Any], text: str) -> None:
    """Catches costs that are taken as they come, and tracebacks of json."""
    with pytest.raises(CostError) as caught:
        PipelineCosts.from_json({"kind": "pipelines", "schemes": [entry(**changes)]})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"kind": "groups"}, "kind of the costs: got 'groups', wanted 'pipelines'"),
        ([1], "kind of the costs: got 'list'"),
        ({"kind": "pipelines"}, "schemes of the costs: got NoneType"),
        ({"kind": "pipelines", "schemes": []}, "schemes of the costs: got none"),
        ({"kind": "pipelines", "schemes": [3]}, "scheme 0 of the costs: got int"),
        ({"kind": "pipelines", "schemes": [entry(), entry()]}, "costs of tp2-pp2: got two"),
    ],
)
def test_bad_costs_are_named(value: Any, text: str) -> None:
    """Catches files of another kind, and schemes that are missing or listed twice."""
    with pytest.raises(CostError) as caught:
        PipelineCosts.from_json(value)
    assert text in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Catches tracebacks for a missing file, a folder, and text that is no JSON."""
    for path, text in ((tmp_path / "none.json", "No such file"), (tmp_path, "directory")):
        with pytest.raises(CostError, match=text):
            PipelineCosts.load(path)
    broken = tmp_path / "broken.json"
    for content in (b"{", b"\xff\xfe\x00", b"[" * 100_000):
        broken.write_bytes(content)
        with pytest.raises(CostError, match="no JSON"):
            PipelineCosts.load(broken)


def test_context_parallel_schemes_are_derived_by_the_rule_of_their_file() -> None:
    """Catches sequences that are split for nothing, schemes that were measured and are derived all
    the same, and files that derive twice when they are written and read again."""
    measured = entry(scheme="tp2-cp2-pp2", context=2, devices=8, b_s=0.5)
    value = {
        "kind": "pipelines",
        "schemes": [entry(), measured],
        "context": {"degrees": [2, 4], "more": 0.1},
    }
    costs = PipelineCosts.from_json(value)
    assert [cost.name for cost in costs.schemes] == ["tp2-pp2", "tp2-cp2-pp2", "tp2-cp4-pp2"]
    base, by_hand, derived = costs.schemes
    assert by_hand.b_s == 0.5
    assert derived.scheme.devices == 4 * base.scheme.devices
    assert derived.a_s == base.a_s / 4
    assert derived.b_s == pytest.approx(base.b_s * 1.075 / 4)
    assert derived.c_s == base.c_s
    assert derived.most_tokens(8) == 4 * (base.most_tokens(8) or 0)
    assert derived.util_length == 4 * base.util_length
    assert costs.facts == {"derived": {"degrees": [2, 4], "more": 0.1}}
    assert PipelineCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs


@pytest.mark.parametrize(
    ("context", "text"),
    [
        ([2], "context of the costs: got [2]"),
        ({"degrees": 2, "more": 0.1}, "context of the costs"),
        ({"degrees": [2]}, "context of the costs"),
        ({"degrees": [], "more": 0.1}, "context degrees: got none"),
        ({"degrees": [1], "more": 0.1}, "context degree: got 1"),
        ({"degrees": [True], "more": 0.1}, "context degree: got True"),
        ({"degrees": [2], "more": -1}, "more of context: got -1"),
        ({"degrees": [2], "more": "0.1"}, "more of context: got '0.1'"),
    ],
)
def test_a_bad_rule_is_named(context: Any, text: str) -> None:
    """Catches rules that are taken as they come."""
    with pytest.raises(CostError) as caught:
        PipelineCosts.from_json({"kind": "pipelines", "schemes": [entry()], "context": context})
    assert text in str(caught.value)
