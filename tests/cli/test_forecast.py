"""``headrace forecast``, and what plans and simulations say of their predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.test_hardware import LENGTHS, call, config
from headrace.costs import roofline_costs
from headrace.costs.measured_device import measured_device, save_device
from headrace.engine import robustness
from headrace.spec import Architecture
from headrace.spec.hardware import DEVICES, Hardware

__all__ = ["config"]


def test_a_layout_is_forecast(capsys) -> None:
    """Catches a command that forecasts something else than asked, and assumptions left out."""
    words = ("forecast", "llama-8b", "--hardware", "h100-96g-500w", "--layout", "FSDP 8")
    more = ("--local-batch", "2", "--recompute", "selective", "--implementation", "compiled")
    code, out, err = call(capsys, *words, *more, "--json")
    assert (code, err) == (0, "")
    value = json.loads(out)
    assert value["tokens"] == 8 * 2 * 8192
    assert value["tokens_per_s_per_device"] == pytest.approx(6667, rel=0.1)  # as published
    assert value["memory_bytes"]["peak"] == pytest.approx(77.0 * 2**30, rel=0.1)
    code, text, _ = call(capsys, *words, *more)
    assert code == 0
    for word in ("tokens/s a device", "MFU", "h100-96g-500w+nvlink4", "compiled kernels", "FSDP 8"):
        assert word in text


def test_a_configuration_is_forecast(config: Path, capsys) -> None:
    """Catches a configuration's model, hardware, kernels and context that are not read."""
    changes = ("--set", "devices.hardware=h200", "--set", "devices.implementation=fused")
    code, out, err = call(capsys, "forecast", config, "--layout", "FSDP 4", "--json", *changes)
    assert code == 0, err
    value = json.loads(out)
    assert value["tokens"] == 4 * 65536
    assert value["assumed"]["implementation"] == "fused"
    assert value["assumed"]["hardware"].startswith("h200")


def test_a_configurations_memory_is_what_there_is(config: Path, capsys) -> None:
    """Catches devices.memory that is ignored for that of the data sheet."""
    words = ("forecast", config, "--layout", "FSDP 4", "--hardware", "h100")
    memory = ("--set", "devices.memory=1GiB")
    code, out, err = call(capsys, *words, *memory)
    assert code == 0, err
    assert " of 1 GiB, " in out
    assert "too much" in out
    assert not json.loads(call(capsys, *words, *memory, "--json")[1])["fits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-8b", "--layout", "FSDP 8"), "--hardware: got none"),
        (("llama-9b", "--layout", "FSDP 8", "--hardware", "h100"), "did you mean 'llama-8b'"),
        (("llama-8b", "--layout", "FSTP 8", "--hardware", "h100"), "parts such as FSDP 8"),
        (("llama-8b", "--layout", "DP 1", "--hardware", "h100", "--set", "a=1"), "--set: got"),
        (
            ("llama-8b", "--layout", "DP 1", "--hardware", "h100", "--length", "1.5"),
            "count: got '1.5', wanted a whole number",
        ),
        (
            ("gpt2", "--layout", "DP 1", "--hardware", "h100", "--length", "1025"),
            "got 1,025 tokens, wanted at most 1,024",
        ),
    ],
)
def test_mistakes_are_one_message(capsys, arguments: tuple[str, ...], message: str) -> None:
    """Catches a traceback, and an error that names no way."""
    code, out, err = call(capsys, "forecast", *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_plan_says_what_it_assumes(config: Path, capsys) -> None:
    """Catches a prediction without rates, utilisation, memory kept free or what it is of."""
    code, out, err = call(capsys, "plan", config, *LENGTHS, "--hardware", "h100")
    assert code == 0, err
    doubts = "for 4 plans of other efficiencies"
    kernels = "headrace kernels in bfloat16"
    for word in ("tokens/s a device", "MFU", "kept free", kernels, "robust", doubts):
        assert word in out, word
    whole = json.loads(call(capsys, "plan", config, *LENGTHS, "--json", "--hardware", "h100")[1])
    [plan] = whole["plans"]
    rates = plan["forecast"]
    assert rates["assumed"]["hardware"] == "h100+nvlink4+infiniband-ndr"
    tokens = sum(plan["lengths"]) if isinstance(plan["lengths"], list) else None
    if tokens:
        expected = tokens / plan["predicted_s"] / 4
        assert rates["tokens_per_s_per_device"] == pytest.approx(expected)
    assert 0 < rates["mfu"] < 0.7
    assert plan["robustness"]["regret"] >= -1e-9
    code, out, _ = call(capsys, "simulate", config, *LENGTHS, "--hardware", "h100")
    assert code == 0
    assert "tokens/s a device" in out
    assert "assumed: 4 x h100" in out


def test_kernels_change_a_plan_s_seconds(config: Path, capsys) -> None:
    """Catches a flag that does nothing: fused kernels are quicker than eager ones."""
    seconds = {}
    for name in ("eager", "fused"):
        words = ("plan", config, *LENGTHS, "--json", "--hardware", "h100")
        code, out, err = call(capsys, *words, "--implementation", name)
        assert code == 0, err
        [plan] = json.loads(out)["plans"]
        seconds[name] = plan["predicted_s"]
    assert seconds["fused"] < 0.8 * seconds["eager"]


def test_a_plan_for_the_worst(config: Path, capsys) -> None:
    """Catches a pessimistic plan that is told with the seconds of a doubt, and one that is taken
    where nothing is in doubt."""
    words = ("plan", config, *LENGTHS, "--json", "--hardware", "h100")
    usual = json.loads(call(capsys, *words)[1])["plans"][0]
    code, out, err = call(capsys, *words, "--pessimistic")
    assert code == 0, err
    worst = json.loads(out)["plans"][0]
    assert worst["predicted_s"] >= usual["predicted_s"] * (1 - 1e-9)
    assert worst["lower_bound_s"] == pytest.approx(usual["lower_bound_s"])
    code, out, err = call(capsys, "plan", config, *LENGTHS, "--pessimistic")
    assert (code, out) == (2, "")
    assert "--pessimistic" in err


@pytest.mark.parametrize("how", ["alone", "pessimistic"])
def test_other_processes_make_the_same_plans(config: Path, capsys, monkeypatch, how: str) -> None:
    """Catches plans under doubts that are of another batch or another doubt where processes make
    them, as for many devices."""
    flags = ["--pessimistic"] if how == "pessimistic" else []
    words = ("plan", config, *LENGTHS, "--json", "--hardware", "h100", "--batches", "2", *flags)
    told = list[list[dict[str, Any]]]()
    for many in (1, 1_000):
        monkeypatch.setattr(robustness, "_MANY", many)
        code, out, err = call(capsys, *words)
        assert code == 0, err
        told.append([{**each, "planning_s": 0.0} for each in json.loads(out)["plans"]])
    by_processes, alone = told
    assert by_processes == alone
    assert len({each["robustness"]["regret"] for each in alone}) == 2


def test_a_measured_device_is_planned_for(config: Path, tmp_path: Path, capsys) -> None:
    """Catches a profile of one device that plans for many do not follow: attention measured four
    times slower makes plans slower, links are those asked for, and it is said what was measured."""
    a = Architecture(layers=2, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocabulary=257)
    peak = 5e13
    ideal = replace(DEVICES["h100"], family="", flops_per_s={"bfloat16": peak}, multiprocessors=0)
    for name, attained in (("quick", 0.4), ("slow", 0.1)):
        device = replace(ideal, attained_attention=attained, attained_matmul=1.0)
        hardware = replace(Hardware.parse("h100"), device=device)
        measured = measured_device(
            roofline_costs(hardware, 1, a),
            a,
            name="h100",
            dtype="bfloat16",
            element_bytes=2,
            product_flops_per_s=peak,
            copied_bytes_per_s=device.memory_bytes_per_s,
        )
        # What a roofline was made with is what is found in its costs.
        assert measured.attained_attention == pytest.approx(attained, rel=1e-6)
        assert measured.launch_s == pytest.approx(device.launch_s, rel=1e-6)
        assert measured.attained_memory == pytest.approx(device.attained_memory, rel=0.01)
        save_device(tmp_path / f"{name}.json", measured)
    seconds = {}
    for name in ("quick", "slow"):
        text = f"measured:{tmp_path / name}.json+nvlink3"
        code, out, err = call(capsys, "plan", config, *LENGTHS, "--json", "--hardware", text)
        assert code == 0, err
        value = json.loads(out)
        assert "one device measured" in value["costs"]
        [plan] = value["plans"]
        seconds[name] = plan["predicted_s"]
        assumed = plan["forecast"]["assumed"]
        assert assumed["hardware"] == f"{text}+infiniband-ndr"
        assert (assumed["implementation"], assumed["precision"]) == ("measured", "bfloat16")
        memory = {name: size for name, size in plan["memory"].items() if name != "rank"}
        assert memory["free_bytes"] >= 0
        assert memory["kept_free_bytes"] == assumed["kept_free_bytes"] > 0
        assert sum(memory.values()) == assumed["memory_bytes"]
    assert seconds["slow"] > 1.2 * seconds["quick"]


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "device"}', '{"kind": "device", "name": 3}'])
def test_a_damaged_measurement_is_refused(config: Path, tmp_path: Path, capsys, text: str) -> None:
    """Catches a traceback, and a file that counts as another device."""
    path = tmp_path / "device.json"
    path.write_text(text)
    code, out, err = call(capsys, "plan", config, *LENGTHS, "--hardware", f"measured:{path}")
    assert (code, out) == (2, "")
    assert "measured" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["nowhere/device.json", "."])
def test_a_folder_for_the_measurement_is_asked_for_first(
    name: str, config: Path, tmp_path: Path, capsys
) -> None:
    """Catches minutes of measuring whose result cannot be written."""
    path = tmp_path / name
    code, out, err = call(capsys, "profile", config, "--efficiency", path)
    assert (code, out) == (2, "")
    assert "--efficiency" in err
    assert "folder that exists" in err


def test_a_cpu_that_was_measured_is_a_cpu(config: Path, tmp_path: Path, capsys) -> None:
    """Catches a measured CPU with the links, the type or the free memory of a GPU."""
    a = Architecture(layers=2, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocabulary=257)
    cpu = Hardware.parse("cpu")
    made = measured_device(
        roofline_costs(cpu, 1, a, element_bytes=4),
        a,
        name="cpu",
        dtype="float32",
        element_bytes=4,
        product_flops_per_s=1e11,
        copied_bytes_per_s=4e10,
    )
    save_device(tmp_path / "device.json", made)
    text = f"measured:{tmp_path}/device.json"
    code, out, err = call(capsys, "plan", config, *LENGTHS, "--json", "--hardware", text)
    assert code == 0, err
    assumed = json.loads(out)["plans"][0]["forecast"]["assumed"]
    assert assumed["hardware"] == f"{text}+shared-memory+ethernet-100g"
    assert assumed["precision"] == "float32"
    free, memory = assumed["kept_free_bytes"], assumed["memory_bytes"]
    assert free / memory == pytest.approx(0.3, abs=0.01)


@pytest.mark.slow
def test_one_rank_s_profile_writes_its_device(tmp_path: Path, capsys) -> None:
    """Catches a flag that writes nothing, or what cannot be read back."""
    (tmp_path / "text.txt").write_text("some words of a text to read\n" * 400)
    config = tmp_path / "some.toml"
    config.write_text(
        f'[data]\npaths = ["{tmp_path}/text.txt"]\ncontext = 512\nbatch_tokens = 2048\n'
        f'cache = "{tmp_path}/cache"\n[model]\nlayers = 2\nhidden = 64\nheads = 4\n'
        '[devices]\nranks = 1\nmemory = "1GiB"\n'
    )
    path = tmp_path / "device.json"
    code, _, err = call(capsys, "profile", config, "--efficiency", path)
    assert code == 0, err
    device = Hardware.parse(f"measured:{path}").device
    assert device.flops_per_s["float32"] > 1e8
    assert 0 < device.attained_attention <= 1
    assert 0 < device.attained_memory <= 1
    assert "measured with a layer of" in device.source
