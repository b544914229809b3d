"""``benchmarks/costs.py``: as a script on one and two ranks, and its parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cost_errors import layered, without_held
from cost_runs import ladder_of
from held_out import MODELS

from benchmarks.scripts import Ran, run
from headrace.costs.paradyse import TARGETS
from headrace.costs.sources.measured import costs_from_profile
from headrace.spec.profile import ENDS
from profiles import LENGTHS, made_up

SMALL = (
    "--methods",
    "ulysses_z",
    "--shortest",
    16,
    "--longest",
    192,
    "--lengths",
    6,
    "--hidden",
    32,
    "--heads",
    2,
    "--kv-heads",
    2,
    "--layers",
    3,
    "--repeats",
    1,
    "--steps",
    1,
    "--step-tokens",
    150,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    pytest.importorskip("sklearn")
    return run("costs.py", *SMALL, json_in=tmp_path_factory.mktemp("costs"))


@pytest.mark.long
def test_every_model_is_compared_for_every_target(small: Ran) -> None:
    """Would catch a model or a place left out, and models that are shown what they are asked:
    bytes are lines, which only a forest misses."""
    assert small.code == 0, small.err
    assert small.numbers is not None
    one, two = small.numbers["worlds"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    for world in (one, two):
        found = {(row["target"], row["model"], row["where"]): row for row in world["errors"]}
        assert set(found) == {
            (target, model, where)
            for target in TARGETS
            for model in (*MODELS, "hybrid, shared", "formulas")
            for where in ("inside", "beyond")
        }
        kept = {model: found["kept_bytes", model, "beyond"]["median"] for model in MODELS}
        assert kept["quadratic"] < 0.1 < kept["forest"]
        assert kept["hybrid"] == kept["polynomial"] < 0.1
        assert len(world["lengths"]) == 6


@pytest.mark.long
def test_whole_steps_are_predicted_from_two_layers(small: Ran) -> None:
    """Would catch bytes of two layers given for all three, weights counted as activations, and a
    level that is not run: bytes are counted, so they do not depend on the machine's mood."""
    assert small.numbers is not None
    for world in small.numbers["worlds"]:
        levels = {row["option"].partition("+")[2]: row for row in world["steps"]}
        assert set(levels) == {"", "attention", "full"}
        for row in levels.values():
            assert row["tokens"] == 150
            assert row["quadratic_bytes"] == pytest.approx(row["bytes"], rel=0.25)
            assert row["hybrid_bytes"] == pytest.approx(row["bytes"], rel=0.5)
            assert 0 < row["micro_batch_s"] < row["step_s"]
            assert min(row["quadratic_s"], row["hybrid_s"]) > 0
        assert levels["full"]["bytes"] < levels["attention"]["bytes"] < levels[""]["bytes"]


@pytest.mark.long
def test_what_is_printed(small: Ran) -> None:
    """Would catch progress in a piped table, a paper's number passed off as measured, and
    predictions as slow as the library's."""
    assert small.numbers is not None
    for text in (
        "errors on 1 rank: llama 3x32",
        "errors on 2 ranks",
        "whole steps of 3 layers",
        "quoted: ParaDySe, Table 5",
        "log length",
    ):
        assert text in small.out
    assert "profile cp2" in small.err
    assert "profile cp2" not in small.out
    for world in small.numbers["worlds"]:
        spent = world["predict_us"]
        assert spent["hybrid, all at once"] < 10
        assert spent["hybrid, one at a time"] < spent["scikit-learn, one at a time"]
    shares = small.numbers["importances"]["kept_bytes"]
    assert sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.long
def test_profiles_can_be_given(tmp_path: Path) -> None:
    """Would catch a second profile that replaces the first, and ranks started for nothing."""
    pytest.importorskip("sklearn")
    files = [tmp_path / "narrow.json", tmp_path / "wide.json"]
    for file, hidden in zip(files, (64, 256), strict=True):
        file.write_text(json.dumps(made_up(hidden=hidden).to_json()))
    ended = run("costs.py", "--profile", files[0], "--profile", files[1], json_in=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.numbers is not None
    widths = ["x64," in world["model"] for world in ended.numbers["worlds"]]
    assert widths == [True, False]
    assert all(world["steps"] == [] for world in ended.numbers["worlds"])
    assert "profile cp" not in ended.err
    files[0].write_text("{}")
    ended = run("costs.py", "--profile", files[0])
    assert ended.code == 2
    assert "profile" in ended.err
    assert "Traceback" not in ended.err


def test_branches_become_layers() -> None:
    """Would catch transient bytes that add up, a level beside another's feed-forward, and bytes
    that were not counted taken for zero: the quadratics' layers are the measure."""
    profile = made_up()
    costs = costs_from_profile(profile)
    found = layered(profile)
    assert {x.option for x in found.points} == {ENDS, "local", "local+attention"}
    for x in found.points:
        cost = costs.ends[1] if x.option == ENDS else costs.options[1][x.option]
        assert x.forward_s == pytest.approx(cost.forward(x.lengths))
        assert x.backward_s == pytest.approx(cost.backward(x.lengths))
        assert x.kept_bytes == pytest.approx(cost.kept(x.lengths[0]))
        assert x.transient_bytes == pytest.approx(cost.transient(x.lengths[0]))
    bare = [replace(x, kept_bytes=None) if "feed" in x.option else x for x in profile.points]
    layers = [x for x in layered(replace(profile, points=tuple(bare))).points if x.option != ENDS]
    assert all(x.kept_bytes is None and x.transient_bytes is not None for x in layers)


def test_what_is_held_out_is_not_fitted() -> None:
    """Would catch a shared forest that has seen the answers."""
    rest = {x.lengths[0] for x in without_held(layered(made_up())).points}
    assert rest < set(LENGTHS)
    assert max(rest) == LENGTHS[-3]


def test_ladders_have_whole_lengths() -> None:
    """Would catch a length twice, and a last one that is rounded away."""
    assert ladder_of(64, 4096, 7) == (64, 128, 256, 512, 1024, 2048, 4096)
    close = ladder_of(16, 40, 24)
    assert (close[0], close[-1]) == (16, 40)
    assert list(close) == sorted(set(close))
