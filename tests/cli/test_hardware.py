"""Planning and simulating for hardware that is not at hand, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.config import Config
from headrace.costs import synthetic_costs
from headrace.data.tokens import make_tokenizer
from headrace.engine.cost_cache import remember_costs
from headrace.engine.setup import formula_costs
from headrace.spec import Architecture, Plan

CONFIG = """
[data]
paths = ["nowhere"]
context = 65536
batch_tokens = 100000
cache = "{cache}"
[model]
layers = 2
hidden = 1024
heads = 16
[devices]
ranks = 4
"""
LENGTHS = ("--lengths", "lognormal:median=2000,sigma=1.5,max=65536")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(CONFIG.format(cache=tmp_path / "cache"))
    return path


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def planned_s(out: str) -> float:
    [plan] = json.loads(out)["plans"]
    return Plan.from_json(plan).predicted_s


def test_a_plan_for_hardware_says_whose_roofline(config: Path, capsys) -> None:
    """Catches costs of a made-up device in place of those asked for, devices of other nodes that
    are as near as neighbours, and remarks among the data."""
    code, out, err = call(capsys, "plan", config, *LENGTHS, "--json", "--hardware", "H100")
    assert code == 0, err
    said = json.loads(out)["costs"]
    assert "roofline of h100+nvlink4+infiniband-ndr, headrace kernels in bfloat16" in said
    assert "not measured" in said
    assert said in " ".join(err.split())
    older = call(capsys, "plan", config, *LENGTHS, "--json", "--hardware", "a100-80g")[1]
    assert planned_s(older) > 1.5 * planned_s(out)


def test_the_configuration_can_name_it(config: Path, capsys) -> None:
    """Catches a flag that is not the key, and a key that is not used."""
    flag = call(capsys, "plan", config, *LENGTHS, "--json", "--hardware", "h200+pcie5")[1]
    key = ("--set", "devices.hardware=h200+pcie5")
    assert planned_s(call(capsys, "plan", config, *LENGTHS, "--json", *key)[1]) == planned_s(flag)
    assert planned_s(call(capsys, "plan", config, *LENGTHS, "--json")[1]) != planned_s(flag)


def test_it_takes_the_place_of_what_was_measured_here(config: Path, capsys) -> None:
    """Catches costs of this machine in a plan for another."""
    read = Config.load(config)
    tokenizer = make_tokenizer(read.data.tokenizer)
    a = read.model.architecture(tokenizer.vocabulary, read.data.context, tokenizer.mask_id)
    here = synthetic_costs(4, architecture=a).replace(scale=50.0, fingerprint="made=here")
    remember_costs(read, here)
    measured = call(capsys, "plan", config, *LENGTHS, "--json")[1]
    assert json.loads(measured)["costs"] == "made=here"
    other = call(capsys, "plan", config, *LENGTHS, "--json", "--hardware", "h100")[1]
    assert "roofline of h100" in json.loads(other)["costs"]
    assert planned_s(other) < planned_s(measured)


def test_it_is_simulated_too(config: Path, capsys) -> None:
    """Catches a flag that only one of the two commands has."""
    code, out, err = call(capsys, "simulate", config, *LENGTHS, "--json", "--hardware", "mi250")
    assert code == 0, err
    assert "roofline of mi250+xgmi+infiniband-hdr" in json.loads(out)["costs"]


def test_memory_and_precision_are_the_configuration_s(config: Path) -> None:
    """Catches a plan that fills an H100 where less was granted or to the last byte, and products
    in another precision than the run's."""
    a = Architecture(layers=2, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocabulary=257)
    base = ["devices.hardware=h100"]

    def costs(*changes: str):
        return formula_costs(Config.load(config, *base, *changes), a, 4)

    assert costs().cluster.memory_bytes == 81_000 * 2**20
    assert costs().memory_margin == 0.1
    assert costs("devices.memory=2GiB").cluster.memory_bytes == 2 * 2**30
    assert costs("planner.memory_margin=0.25").memory_margin == 0.25
    text = next(iter(costs().options[1]))
    single, double = (costs(*c).options[1][text] for c in ((), ("devices.dtype=float64",)))
    assert double.kept.slope == 4 * single.kept.slope, "bfloat16 unless told"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "h20"], "did you mean 'h200'?"),
        (["--hardware", "h100+nvlnik4"], "did you mean 'nvlink4'?"),
        (["--hardware", "a100"], "which one: a100-80g, a100-40g?"),
        (["--set", "devices.hardware=gaudi"], "known are a100-80g"),
        (["--hardware", "h100", "--costs", "some.json"], "--hardware: got --costs too"),
    ],
)
def test_mistakes_are_one_message(config: Path, capsys, arguments: list[str], message: str) -> None:
    """Catches a traceback, and names that are refused without saying which there are."""
    code, out, err = call(capsys, "plan", config, *LENGTHS, *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_devices_work_in_bfloat16_unless_told(config: Path, capsys) -> None:
    """Catches a plan and a rehearsal of one file in two precisions, and one that nobody names."""
    _, _, err = call(capsys, "plan", config, *LENGTHS, "--hardware", "h100")
    assert "roofline of h100" in err
    assert "in bfloat16" in err
    _, _, err = call(
        capsys, "plan", config, *LENGTHS, "--hardware", "h100", "--set", "devices.dtype=float32"
    )
    assert "in float32" in err
    for hardware, dtype in ((None, "float32"), ("cpu", "float32"), ("h100", "bfloat16")):
        changes = [f"devices.hardware={hardware}"] if hardware else []
        assert Config.load(config, *changes).devices.planned_dtype == dtype
