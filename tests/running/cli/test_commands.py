"""``profile``, ``verify``, ``export`` and ``doctor`` as a user runs them."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from headrace.costs import CostModel
from headrace.spec import Plan
from headrace.spec.known_methods import FACTS
from headrace.spec.profile import Profile
from running.cli.jobs import run, write_job
from spread import whole

# In the package these names are the commands.
profile = importlib.import_module("headrace.cli.profile_layers")
verify = importlib.import_module("headrace.cli.verify")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """A configuration, and the folder of a run of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_job(folder, steps=4, candidates=())
    code, _, err = run("train", config, "--out", folder / "run", "--set", "profile.longest=64")
    assert code == 0, err
    assert "measuring costs on 2 ranks" in err
    return config, folder / "run"


def test_a_profile_is_kept_and_used(trained: tuple[Path, Path]) -> None:
    """Catches words among the JSON, costs of another model or of no options, a profile that is
    measured again each time, and one that planning does not find."""
    config, _ = trained
    code, out, err = run("profile", config, "--json", "--set", "profile.longest=64")
    assert code == 0, err
    assert "measuring" not in err
    costs = CostModel.from_json(json.loads(out))
    assert costs.cluster.devices == 2
    assert costs.shape.layers == 2
    assert set(costs.options) == {1, 2}
    assert {option.partition("+")[2] for option in costs.options[2]} == {"", "attention", "full"}
    code, out, err = run("plan", config, "--json")
    assert (code, err) == (0, ""), "no remark about formulas"
    value = json.loads(out)
    assert value["costs"] == costs.fingerprint
    assert Plan.from_json(value["plans"][0]).devices == 2


def test_the_table_of_a_profile(trained: tuple[Path, Path], capsys, monkeypatch) -> None:
    """Catches an option that is measured and not shown, or that cannot be read."""
    monkeypatch.setenv("COLUMNS", "80")
    cache = trained[0].parent / "cache" / "profiles"
    [latest] = cache.glob("latest-*.json")
    [measured] = set(cache.glob("*.json")) - {latest, *cache.glob("calibration-*.json")}
    profile._print(CostModel.load(latest), Profile.from_json(json.loads(measured.read_text())))
    out = capsys.readouterr().out
    assert re.search(r"^each step: pull .* push .* update .* a rank stores ", out, re.MULTILINE)
    for group, option in (
        ("cp1", "attention:local"),
        ("cp2", "feed_forward:ulysses_z+attention"),
        ("cp2", "attention:metp+attention"),
        ("cp2", "ends"),
    ):
        for part in ("forward", "backward"):
            assert re.search(rf"^{group} +{re.escape(option)} {part} .* %", out, re.MULTILINE)


@pytest.mark.parametrize("methods", [["metp"], whole(["ulysses_z", "metp"]), whole(["all"])])
def test_native_runs_are_exact(methods: list[str]) -> None:
    """Catches a runtime that is off, a verdict that does not follow from the numbers, a method that
    is named and not run, and one that no group of the ranks can run and is called exact all the
    same."""
    code, out, err = run("verify", "native", "--methods", *methods, "--ranks", 1, 2, "--steps", 1)
    assert code == 0, out + err
    assert "tolerance 1e-10: all exact" in out
    rows = [line.split() for line in out.splitlines() if re.search(r"e[-+]\d+ +exact$", line)]
    for row in rows:
        assert all(float(word) <= 1e-10 for word in row[-3:-1])
    named = Counter((row[-5], row[-4]) for row in rows)
    models = len(verify._MODELS)
    for always in ("mixed", "strategies"):
        assert {ranks: named[ranks, always] for ranks in "12"} == {"1": models, "2": models}
    assert {name for ranks, name in named if ranks == "2"} >= {
        name for name in (FACTS if methods == ["all"] else methods) if "_ring" not in name
    }
    assert not {name for _, name in named if "_ring" in name}, "they need four ranks"


def test_a_method_that_does_not_exist_is_refused() -> None:
    """Catches a verification of nothing."""
    code, out, err = run("verify", "native", "--methods", "metpp", "--ranks", 2)
    assert (code, out) == (2, "")
    assert "did you mean 'metp'?" in err


def test_what_is_not_exact_fails(capsys) -> None:
    """Catches an exit code of success for a wrong gradient, or for ranks that gave no answer."""
    case = verify._Case(model="gpt", ranks=2, steps=1, seed=0, methods=("mixed",))
    good = {"mixed": {"loss": 0.0, "gradient": 1e-12}}
    wrong = {"metp": {"loss": 0.0, "gradient": 2e-10}, **good}
    for rows, code, word in (
        ([good], 0, "all exact"),
        ([good, wrong], 1, "WRONG"),
        ([None, good], 1, "FAILED"),
    ):
        assert verify._print([(case, found) for found in rows], 1e-10) == code
        assert word in capsys.readouterr().out


def test_a_whole_checkpoint_and_a_damaged_one(trained: tuple[Path, Path], tmp_path: Path) -> None:
    """Catches a check that does not read the files."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained[1] / "checkpoints", folder)
    code, out, err = run("verify", "checkpoint", folder)
    assert code == 0, err
    assert "whole" in out
    assert "step-000004" in out
    assert run("verify", "checkpoint", tmp_path)[1] == out, "of the run's folder"
    victim = max(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-3] ^= 1
    victim.write_bytes(content)
    code, out, err = run("verify", "checkpoint", folder / "step-000004")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert victim.name in err
    assert "Traceback" not in err


def test_an_export_has_the_names_and_shapes_of_hugging_face(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """Catches a weight left out, one of the optimizer's among them, a row order of our own."""
    code, out, err = run("export", trained[1], "--out", tmp_path / "model")
    assert code == 0, err
    assert out.strip() == str(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 2)
    shapes = {
        name: value.shape for name, value in load_file(tmp_path / "model/model.safetensors").items()
    }
    vocabulary = config["vocab_size"]
    wanted = {"model.embed_tokens.weight": (vocabulary, 32), "model.norm.weight": (32,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        wanted |= {
            f"{layer}input_layernorm.weight": (32,),
            f"{layer}post_attention_layernorm.weight": (32,),
            f"{layer}self_attn.q_proj.weight": (32, 32),
            f"{layer}self_attn.k_proj.weight": (16, 32),
            f"{layer}self_attn.v_proj.weight": (16, 32),
            f"{layer}self_attn.o_proj.weight": (32, 32),
            f"{layer}mlp.gate_proj.weight": (64, 32),
            f"{layer}mlp.up_proj.weight": (64, 32),
            f"{layer}mlp.down_proj.weight": (32, 64),
        }
    assert {name: shape for name, shape in shapes.items() if name != "lm_head.weight"} == wanted


def test_the_doctor_lets_two_ranks_talk() -> None:
    """Catches a verdict about training that was never tried."""
    code, out, err = run("doctor", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["links"]["gloo_works"]
    assert 0 < found["links"]["gloo_latency_s"] < 1
    assert found["links"]["gloo_bytes_per_s"] > 1e6
    assert found["works"]["train on this machine"]["ok"]
    assert found["versions"]["torch"]
