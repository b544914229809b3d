"""``headrace plan`` from files alone: plan files that a checker can read, and clear refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main

SCHEMES = [
    {"scheme": "tp2", "tensor": 2, "pipeline": 1, "devices": 2, "a_s": 2e-9, "b_s": 2e-4,
     "c_s": 0.02, "max_length": {"8": 4000}, "util_length": 500},
    {"scheme": "tp4-pp2", "tensor": 4, "pipeline": 2, "devices": 8, "a_s": 5e-10, "b_s": 4e-5,
     "c_s": 0.02, "max_length": {"8": 30000}, "util_length": 900},
]  # fmt: skip
PIPELINES = {
    "kind": "pipelines", "name": "small", "model": "a model", "device": "a device",
    "source": "made up", "meaning": "", "schemes": SCHEMES,
    "architecture": {"layers": 4, "hidden": 64, "vocabulary": 100},
}  # fmt: skip
GROUPS = {
    "kind": "groups", "name": "small", "model": "a model", "device": "a device",
    "source": "made up", "meaning": "", "a_s": 5e-9, "b_s": 2e-4, "c_s": 0.02,
    "cap_tokens": 8000, "kappa_s": {"1": 0.0, "2": 1e-5, "4": 2e-5},
}  # fmt: skip
LENGTHS = [[300, 2000, 40, 700, 700, 1500], [3000, 10, 10], [5]]


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def files(folder: Path, costs: dict[str, Any], lengths: Any = None) -> list[object]:
    """The options that name a costs and a lengths file."""
    value = {"iterations": LENGTHS} if lengths is None else lengths
    (folder / "costs.json").write_text(json.dumps(costs))
    (folder / "lengths.json").write_text(json.dumps(value))
    return ["--costs", folder / "costs.json", "--lengths", folder / "lengths.json"]


def test_pipelines_are_planned_and_every_sequence_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan file that a checker refuses: lost sequences, too many devices or tokens."""
    code, out, err = call(capsys, "plan", *files(tmp_path, PIPELINES), "--devices", 8, "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["kind"], plan["devices"]) == ("pipelines", 8)
    schemes = {s["scheme"]: s for s in SCHEMES}
    for lengths, item in zip(LENGTHS, plan["iterations"], strict=True):
        used = [schemes[pipeline["scheme"]] for pipeline in item["pipelines"]]
        assert sum(s["devices"] for s in used) <= 8
        packs = [
            (s, ids) for s, pipeline in zip(used, item["pipelines"], strict=True)
            for ids in pipeline["micro_batches"]
        ]  # fmt: skip
        assert Counter(i for _, ids in packs for i in ids) == Counter(range(len(lengths)))
        for scheme, ids in packs:
            assert sum(lengths[i] for i in ids) <= scheme["max_length"]["8"]
        assert item["lower_bound_s"] <= item["predicted_s"] * (1 + 1e-9)


@pytest.mark.parametrize("semantics", ["free", "lockstep"])
def test_groups_are_planned_under_both_semantics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], semantics: str
) -> None:
    """Catches semantics that are not passed on, and ranks used twice in a launch."""
    code, out, err = call(capsys, "plan", *files(tmp_path, GROUPS), "--devices", 4, "--semantics",
                          semantics, "--json")  # fmt: skip
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["kind"], plan["semantics"]) == ("groups", semantics)
    for lengths, item in zip(LENGTHS, plan["iterations"], strict=True):
        held = [i for launch in item["launches"] for i in launch["sequences"]]
        assert sorted(held) == list(range(len(lengths)))
        for launch in item["launches"]:
            assert len(set(launch["ranks"])) == len(launch["ranks"])
            assert set(launch["ranks"]) <= set(range(4))


def test_people_get_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches JSON where a table was asked for, and one without the bound."""
    for costs, devices in ((PIPELINES, 8), (GROUPS, 4)):
        code, out, err = call(capsys, "plan", *files(tmp_path, costs), "--devices", devices)
        assert code == 0, err
        assert "bound" in out
        assert "mean " in out
        assert "{" not in out


def test_the_same_seed_gives_the_same_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan that follows from the clock."""
    words = ("plan", *files(tmp_path, PIPELINES), "--devices", 8, "--seed", 3, "--json")
    plans = [json.loads(call(capsys, *words)[1]) for _ in range(2)]
    for plan in plans:
        plan.pop("proposal_s")
        for item in plan["iterations"]:
            item.pop("planning_s")
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ({}, "wanted {"),
        ({"iterations": []}, "wanted {"),
        ({"iterations": [[1, 2], []]}, "iteration 1: got [], wanted a list of lengths"),
        ({"iterations": [[1, 0]]}, "iteration 0, sequence 1: got 0, wanted a whole number >= 1"),
        ({"iterations": [[1, -4]]}, "iteration 0, sequence 1: got -4"),
        ({"iterations": [[True]]}, "sequence 0: got True"),
        ({"iterations": [["12"]]}, "sequence 0"),
        ({"iterations": [[10**6]]}, "1,000,000"),
    ],
)
@pytest.mark.parametrize("costs", [PIPELINES, GROUPS], ids=["pipelines", "groups"])
def test_bad_lengths_name_the_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], costs: dict[str, Any], lengths: Any,
    text: str,
) -> None:  # fmt: skip
    """Catches a traceback, and a plan without a sequence that is there."""
    devices = 8 if costs is PIPELINES else 4
    code, out, err = call(capsys, "plan", *files(tmp_path, costs, lengths), "--devices", devices)
    assert (code, out) == (2, "")
    assert text in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "profile"}, "'pipelines' or 'groups'"),
        ({"schemes": []}, "schemes"),
        ({"schemes": [{**SCHEMES[0], "a_s": -1.0}]}, "a_s"),
        ({"schemes": [{k: v for k, v in SCHEMES[0].items() if k != "b_s"}]}, "b_s"),
    ],
)
def test_bad_costs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], text: str
) -> None:
    """Catches coefficients that would make sequences free, or costs of another kind."""
    words = files(tmp_path, {**PIPELINES, **change})
    code, out, err = call(capsys, "plan", *words, "--devices", 8)
    assert (code, out) == (2, "")
    assert text in err
    assert "Traceback" not in err


def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches options that are read and not obeyed."""
    named = files(tmp_path, PIPELINES)
    for words, text in (
        (("plan", *named), "wanted a CONFIG, or all of --costs, --lengths and --devices"),
        (("plan", *named, "--devices", 0), "--devices"),
        (("plan", *named, "--devices", 8, "--semantics", "lockstep"), "--semantics"),
        (("plan", *named, "--devices", 8, "--planner", "hydralis"), "did you mean 'hydraulis'"),
        (("plan", "job.toml", "--devices", 8), "--devices: got '8', wanted no configuration"),
        (("plan", "--costs", tmp_path / "no.json", *named[2:], "--devices", 8), "no.json"),
    ):
        code, out, err = call(capsys, *words)
        assert (code, out) == (2, ""), words
        assert text in " ".join(err.split()), err
