"""``headrace plan`` from files alone: plan files that a checker can read, and clear refusals."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.engine.planned_iterations import planner_names
from headrace.planning import Problem

SCHEMES = [
    {
        "scheme": "tp2",
        "tensor": 2,
        "pipeline": 1,
        "devices": 2,
        "a_s": 2e-9,
        "b_s": 2e-4,
        "c_s": 0.02,
        "max_length": {"8": 4000},
        "util_length": 500,
    },
    {
        "scheme": "tp4-pp2",
        "tensor": 4,
        "pipeline": 2,
        "devices": 8,
        "a_s": 5e-10,
        "b_s": 4e-5,
        "c_s": 0.02,
        "max_length": {"8": 30000},
        "util_length": 900,
    },
]
PIPELINES = {
    "kind": "pipelines",
    "name": "small",
    "model": "a model",
    "device": "a device",
    "source": "made up",
    "meaning": "",
    "schemes": SCHEMES,
    "architecture": {"layers": 4, "hidden": 64, "vocabulary": 100},
}
GROUPS = {
    "kind": "groups",
    "name": "small",
    "model": "a model",
    "device": "a device",
    "source": "made up",
    "meaning": "",
    "a_s": 5e-9,
    "b_s": 2e-4,
    "c_s": 0.02,
    "cap_tokens": 8000,
    "kappa_s": {"1": 0.0, "2": 1e-5, "4": 2e-5},
}
PIPELINE_PLANNERS = planner_names(Problem(costs=PipelineCosts.from_json(PIPELINES), devices=8))
GROUP_PLANNERS = planner_names(Problem(costs=GroupCosts.from_json(GROUPS), devices=8))
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
            (s, ids)
            for s, pipeline in zip(used, item["pipelines"], strict=True)
            for ids in pipeline["micro_batches"]
        ]
        assert Counter(i for _, ids in packs for i in ids) == Counter(range(len(lengths)))
        for scheme, ids in packs:
            assert sum(lengths[i] for i in ids) <= scheme["max_length"]["8"]
        assert item["lower_bound_s"] <= item["predicted_s"] * (1 + 1e-9)


@pytest.mark.parametrize("semantics", ["free", "lockstep"])
def test_groups_are_planned_under_both_semantics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], semantics: str
) -> None:
    """Catches semantics that are not passed on, and ranks used twice in a launch."""
    code, out, err = call(
        capsys, "plan", *files(tmp_path, GROUPS), "--devices", 4, "--semantics", semantics, "--json"
    )
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
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    costs: dict[str, Any],
    lengths: Any,
    text: str,
) -> None:
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
        ({"schemes": [{**SCHEMES[0], "a_s": float("nan")}]}, "a_s of tp2: got nan"),
        ({"schemes": [{**SCHEMES[0], "c_s": 1e308}]}, "costs.json, tp2: got 1e+308 s for 1 tokens"),
        ({"schemes": [{**SCHEMES[0], "b_s": 10**400}]}, "a number of 401 digits"),
        ({"schemes": [{**SCHEMES[0], "c_s": "0"}]}, "c_s of tp2: got '0'"),
        ({"schemes": [{**SCHEMES[0], "max_length": {"8": 1.5}}]}, "max_length of tp2 at 8 devices"),
        ({"schemes": [{**SCHEMES[0], "max_length": [4000]}]}, "scheme 0"),
        ({"schemes": [{**SCHEMES[0], "max_length": {"8": -1}}]}, "no scheme fits the devices"),
        ({"schemes": [{**SCHEMES[0], "scheme": "tp"}]}, "scheme 0"),
        ({"schemes": [5]}, "scheme 0"),
        ({"kind": ["groups"]}, "kind: got ['groups']"),
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"a_s": float("inf")}, "a_s: got inf"),
        ({"b_s": 1e308}, "costs.json, groups of 1: got 1e+308 s for 1 tokens"),
        ({"c_s": 10**400}, "a number of 401 digits"),
        ({"cap_tokens": 0}, "cap_tokens: got 0"),
        ({"kappa_s": {}}, "at least one group size"),
        ({"kappa_s": {"2": -1e-5}}, "kappa_s of 2: got -1e-05"),
        ({"kappa_s": {"two": 0}}, "group size: got 'two'"),
        ({"kappa_s": {"9" * 5000: 0.0}}, "costs.json"),
        ({"kappa_s": {"16": 0.0}}, "devices: got 4, wanted at least 16"),
        ({"kapa_s": {}}, "did you mean 'kappa_s'"),
    ],
)
def test_bad_costs_of_groups_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], text: str
) -> None:
    """Catches a traceback where a number is too large to be summed, and sizes that are none."""
    code, out, err = call(capsys, "plan", *files(tmp_path, {**GROUPS, **change}), "--devices", 4)
    assert (code, out) == (2, "")
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize("which", ["--costs", "--lengths"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff\xfe\x80", b'{"kind": "groups",', b"[" * 100_000, None],
    ids=["empty", "binary", "cut off", "deep", "folder"],
)
def test_files_that_are_no_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str, content: bytes | None
) -> None:
    """Catches a traceback of the decoder or of the file system."""
    named = files(tmp_path, GROUPS)
    bad = tmp_path / "bad.json"
    if content is None:
        bad.mkdir()
    else:
        bad.write_bytes(content)
    named[named.index(which) + 1] = bad
    code, out, err = call(capsys, "plan", *named, "--devices", 4)
    assert (code, out) == (2, "")
    assert f"file {bad}" in err
    assert "Traceback" not in err


def test_a_sequence_that_fits_nowhere_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an error that says which sequence, and of which iteration it does not."""
    for costs, devices, text in (
        (PIPELINES, 8, "iteration 1, sequence 1 fits no scheme: got 90,000 tokens"),
        (GROUPS, 4, "iteration 1, sequence 1 of 90,000 tokens"),
    ):
        named = files(tmp_path, costs, {"iterations": [[5], [7, 90_000]]})
        code, out, err = call(capsys, "plan", *named, "--devices", devices)
        assert (code, out) == (2, "")
        assert text in " ".join(err.split())


@pytest.mark.parametrize(
    ("costs", "devices", "planner"),
    [(PIPELINES, 64, name) for name in PIPELINE_PLANNERS]
    + [(GROUPS, devices, name) for name in GROUP_PLANNERS for devices in (3, 64)],
)
def test_every_planner_plans_few_sequences_on_many_devices(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    costs: dict[str, Any],
    devices: int,
    planner: str,
) -> None:
    """Catches lost or doubled sequences where there are more pipelines or groups than sequences,
    or devices are left over."""
    lengths = [[2000], [7, 7], [3000, 1, 1]]
    named = files(tmp_path, costs, {"iterations": lengths})
    words = ("plan", *named, "--devices", devices, "--planner", planner)
    code, out, err = call(capsys, *words, "--json")
    assert code == 0, err
    for own, item in zip(lengths, json.loads(out)["iterations"], strict=True):
        held = [ids for pipeline in item.get("pipelines", ()) for ids in pipeline["micro_batches"]]
        held += [launch["sequences"] for launch in item.get("launches", ())]
        assert sorted(i for ids in held for i in ids) == list(range(len(own)))
        assert item["lower_bound_s"] <= item["predicted_s"] * (1 + 1e-9)


def test_reasons_are_what_binds_and_the_runner_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan without an explanation, in the table or in the plan file."""
    lengths = {"iterations": [[300, 2000, 40, 700, 700, 1500]]}
    for costs, devices, texts in (
        (PIPELINES, 8, ("bound ", "the busiest pipeline is ")),
        (GROUPS, 4, ("bound ", "the best static plan", "next strategy: ")),
    ):
        words = ("plan", *files(tmp_path, costs, lengths), "--devices", devices)
        table = call(capsys, *words)[1]
        [item] = json.loads(call(capsys, *words, "--json")[1])["iterations"]
        for text in texts:
            assert f"iteration 0: {text}" in table
            assert any(reason.startswith(text) for reason in item["why"]), text


@pytest.mark.parametrize("free", [False, True], ids=["costs", "costs nothing"])
def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], free: bool) -> None:
    """Catches a picture of another iteration than the longest, and one divided by a bound of 0."""
    pytest.importorskip("altair")
    nothing = {"a_s": 0, "b_s": 0, "c_s": 0, "kappa_s": {"1": 0, "4": 0}} if free else {}
    picture = tmp_path / "plan.json"
    words = ("--devices", 4, "--picture", picture)
    code, _, err = call(capsys, "plan", *files(tmp_path, {**GROUPS, **nothing}), *words)
    assert code == 0, err
    [gantt, where] = json.loads(picture.read_text())["vconcat"]
    assert gantt["title"].startswith("iteration 0: ")
    assert where["mark"]["type"] == "tick"


def test_places_for_pictures_are_looked_at_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan that takes minutes and then cannot be drawn."""
    pytest.importorskip("altair")
    (tmp_path / "folder.svg").mkdir()
    for name, text in (
        ("plan.gif", "ending '.gif'"),
        ("no/plan.svg", "no such folder"),
        ("folder.svg", "got a folder"),
    ):
        words = ("--costs", tmp_path / "no.json", "--lengths", "no.json", "--devices", 4)
        code, out, err = call(capsys, "plan", *words, "--picture", tmp_path / name)
        assert (code, out) == (2, ""), name
        assert text in " ".join(err.split())


def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches options that are read and not obeyed."""
    named = files(tmp_path, PIPELINES)
    for words, text in (
        (("plan", *named), "wanted a CONFIG, or all of --costs, --lengths and --devices"),
        (("plan", *named, "--devices", 0), "--devices: got 0, wanted 1 to 1,000,000"),
        (("plan", *named, "--devices", 10**9), "--devices: got 1000000000"),
        (("plan", *named, "--devices", 3), "devices: got 3, wanted at least 8"),
        (("plan", *named, "--devices", 8, "--seed", -1), "--seed: got -1"),
        (("plan", *named, "--devices", 8, "--planner", ""), "planner: got ''"),
        (("plan", *named, "--devices", 8, "--ranks", 8), "--ranks: got '8', wanted a CONFIG"),
        (("plan", *named, "--devices", 8, "--set", "run.seed=1"), "--set"),
        (("plan", *named, "--devices", 8, "--semantics", "lockstep"), "--semantics"),
        (("plan", *named, "--devices", 8, "--planner", "hydralis"), "did you mean 'hydraulis'"),
        (("plan", "job.toml", "--devices", 8), "--devices: got '8', wanted no configuration"),
        (("plan", "--costs", tmp_path / "no.json", *named[2:], "--devices", 8), "no.json"),
    ):
        code, out, err = call(capsys, *words)
        assert (code, out) == (2, ""), words
        assert text in " ".join(err.split()), err


def test_misspelt_words_for_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches names that are refused without saying which are known."""
    named = files(tmp_path, GROUPS)
    for words, text in (
        (("--semantics", "lock-step"), "did you mean 'lockstep'?"),
        (("--semantics", ""), "--semantics: got '', wanted free or lockstep"),
        (("--planner", "best_static"), "did you mean 'best-static'?"),
        (("--planner", "nobody"), "wanted one of headrace, static, best-static"),
        (("--planner", "paradyse"), "planner 'paradyse': got published costs"),
    ):
        code, out, err = call(capsys, "plan", *named, "--devices", 4, *words)
        assert (code, out) == (2, ""), words
        assert text in " ".join(err.split()), err


def test_help_names_every_planner(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a planner that nobody can find."""
    code, out, _ = call(capsys, "plan", "--help")
    assert code == 0
    for name in {*PIPELINE_PLANNERS, *GROUP_PLANNERS}:
        assert name in out, name


ROOT = Path(__file__).parents[2]
SHOWN = re.findall(
    r"^\$ (headrace plan --costs .+)$", (ROOT / "README.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("line", SHOWN)
def test_what_the_first_page_shows_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    """Catches files that have moved, on the page that a newcomer copies from."""
    monkeypatch.chdir(ROOT)
    code, out, err = call(capsys, *shlex.split(line)[1:])
    assert code == 0, err
    assert "bound" in out


def test_the_first_page_shows_both_kinds() -> None:
    """Catches a change of the page's form, after which the test above would run nothing."""
    assert {"--json" in line for line in SHOWN} == {True, False}
