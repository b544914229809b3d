"""``headrace forecast``, and what plans and simulations say of their predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_hardware import LENGTHS, call, config

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-8b", "--layout", "FSDP 8"), "--hardware: got none"),
        (("llama-9b", "--layout", "FSDP 8", "--hardware", "h100"), "did you mean 'llama-8b'"),
        (("llama-8b", "--layout", "FSTP 8", "--hardware", "h100"), "parts such as FSDP 8"),
        (("llama-8b", "--layout", "DP 1", "--hardware", "h100", "--set", "a=1"), "--set: got"),
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
    for word in ("tokens/s a device", "MFU", "kept free", "headrace kernels in bfloat16", "robust"):
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
