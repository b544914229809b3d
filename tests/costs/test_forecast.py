"""Forecasts of fixed layouts: parts worked out by hand, and what each choice must change."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import headrace as hr
from headrace.errors import CostError, SpecError
from headrace.spec.architecture import parameter_count
from headrace.spec.fixed_layout import FixedLayout
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import Efficiency, Implementation

LLAMA = hr.Architecture.preset("llama-8b")
H100 = Hardware.parse("h100")


def made_up(**changes: float) -> Implementation:
    """Kernels for which all but what is asked for is next to free."""
    numbers = {"products": 1.0, "attention": 1.0, "passes": 1.0, "exposed": 0.0} | changes
    return Implementation(
        name="made-up", what="", on={"hopper": Efficiency(**numbers)}, logit_bytes=16, source=""
    )


def quick(**slow: float) -> Hardware:
    """An H100 where everything but what is asked for takes no time."""
    device = replace(
        H100.device,
        flops_per_s={"bfloat16": slow.get("flops", 1e30)},
        memory_bytes_per_s=slow.get("memory", 1e30) / H100.device.attained_memory,
        launch_s=slow.get("launch", 0.0),
        multiprocessors=int(slow.get("multiprocessors", 0)),
    )
    inside = replace(H100.inside, bytes_per_s=slow.get("inside", 1e30), latency_s=0.0, attained=1.0)
    across = replace(H100.across, bytes_per_s=slow.get("across", 1e30), latency_s=0.0, attained=1.0)
    return replace(H100, device=device, inside=inside, across=across)


def seconds(hardware: Hardware, layout: str, length: int = 4096, **options: object) -> float:
    """Seconds of a step of one sequence with kernels that attain everything."""
    return hr.forecast(
        LLAMA,
        hardware,
        layout,
        sequence_tokens=length,
        **{"implementation": made_up(exposed=1.0)} | options,
    ).step_s


@pytest.mark.parametrize("text", ["FSDP 8", "FSDP 32 x TP 8", "TP 4 x CP 2 x PP 4 x VP 5", "DP 2"])
def test_layouts_are_read_and_written(text: str) -> None:
    """Catches a part that is read as another, or that gets lost on its way."""
    layout = FixedLayout.parse(text)
    assert FixedLayout.parse(str(layout)) == layout
    sizes = [int(part.split()[1]) for part in text.split(" x ") if not part.startswith("VP")]
    product = 1
    for size in sizes:
        product *= size
    assert layout.devices == product


@pytest.mark.parametrize(
    "text",
    [
        *("", "FSDP", "XP 8", "TP 2 x TP 4", "TP 0", "TP -2", "8"),
        *("FSDP 4 x ZERO1 2", "ZERO1 4 x ZERO2 2", "ZERO2 2 x FSDP 8", "VP 2", "VP 2 x TP 4"),
    ],
)
def test_layouts_that_say_nothing_are_refused(text: str) -> None:
    """Catches a word that is dropped or does nothing, a part that counts twice, and two that say
    otherwise how states are spread."""
    with pytest.raises(SpecError, match="layout"):
        FixedLayout.parse(text)


def test_products_and_attention_by_hand() -> None:
    """Catches a product that is counted twice or not, scores above the diagonal, and recompute
    that computes nothing."""
    length, h, k = 4096, 4096, 0.25
    layer = 2 * h * h * (1 + k) + 3 * h * 14336
    linear = 2 * length * (32 * layer + h * 128256)
    scores = 2 * h * length * (length + 128) * 32
    found = seconds(quick(flops=1e12), "DP 1", length)
    assert found == pytest.approx((3 * linear + 3.5 * scores) / 1e12, rel=1e-9)
    again = seconds(quick(flops=1e12), "DP 1", length, recompute="full") - found
    assert again == pytest.approx((2 * length * 32 * layer + scores) / 1e12, rel=1e-9)
    first = 2 * length * 32 * (h * h * (1 + 2 * k) + 2 * h * 14336)
    part = seconds(quick(flops=1e12), "DP 1", length, recompute="selective") - found
    assert part == pytest.approx(first / 1e12, rel=1e-9)


def test_last_waves_by_hand() -> None:
    """Catches half a wave that grows with the tokens or is not paid by each micro-batch, tensors
    that are cut and counted whole, and recompute without it."""
    h, f, keys, v = 4096, 14336, 2048, 128256
    rate, idle = 1e12, 2 * 64 * 128 * 128 / 2 / 1e12

    def waves(layout: str = "DP 1", **how: Any) -> float:
        waved = seconds(quick(flops=rate, multiprocessors=64), layout, **how)
        return (waved - seconds(quick(flops=rate), layout, **how)) / idle

    forward, backward, ends = 3 * h + f, 2 * h + keys + 2 * f + h, h + v
    assert waves() == pytest.approx(32 * (forward + backward) + ends, rel=1e-6)
    assert waves(accumulation=3) == pytest.approx(3 * waves(), rel=1e-6)
    assert waves(local_batch=2) == pytest.approx(waves(), rel=1e-6)
    full, some = (waves(recompute=level) - waves() for level in ("full", "selective"))
    assert full == pytest.approx(32 * forward, rel=1e-6)
    assert some == pytest.approx(32 * 2 * h, rel=1e-6)
    cut = 2 * h + (h + f) / 8 + (h + keys + 2 * f) / 8 + 2 * h
    assert waves("TP 8") == pytest.approx(32 * cut + h + v / 8, rel=1e-6)


def test_traffic_by_hand() -> None:
    """Catches bytes that cross to a node once for each of its devices, weights gathered once, keys
    that travel with all heads, and what attention hides charged twice."""
    layer = 2 * 4096 * 4096 * 1.25 + 3 * 4096 * 14336
    found = seconds(quick(inside=1e9), "FSDP 8")
    assert found == pytest.approx(32 * 3 * 2 * layer * 7 / 8 / 1e9, rel=1e-9)
    half = seconds(quick(inside=1e9), "FSDP 8", implementation=made_up(exposed=0.5))
    assert half == pytest.approx(found / 2, rel=1e-9)
    crossing = seconds(quick(across=1e9), "FSDP 16")
    assert crossing == pytest.approx(32 * 3 * 2 * layer / 2 / 8 / 1e9, rel=1e-9)
    unit = 4096 * 4096 * 2 / 8
    tensor = seconds(quick(inside=1e9), "TP 8")
    assert tensor == pytest.approx(32 * (4 + 6) * 7 * unit / 1e9, rel=1e-9)
    none = made_up(exposed=0.0)
    ring = seconds(quick(inside=1e9), "CP 8", implementation=none)
    assert ring == pytest.approx(32 * (2 + 6) * 7 * 0.25 * unit / 1e9, rel=1e-9)
    core = 2 * 4096 * 512 * (4096 + 128)
    rate = core / (2 * 7 * 0.25 * unit / 1e9)  # attention takes what its keys take
    hidden = seconds(quick(inside=1e9, flops=rate), "CP 8", implementation=none)
    bare = seconds(quick(flops=rate), "CP 8", implementation=none)
    assert hidden - bare == pytest.approx(32 * (6 - 5) * 7 * 0.25 * unit / 1e9, rel=1e-6)


def test_stages_wait_for_each_other() -> None:
    """Catches bubbles that are forgotten, and interleaving that does not shrink them."""
    alone = seconds(quick(launch=1e-6), "DP 1", accumulation=8)
    ends = 8 * 3 * 35e-6
    for text, bubbles in (("PP 4", 3.0), ("PP 4 x VP 2", 1.5)):
        found = seconds(quick(launch=1e-6), text, accumulation=8)
        each = (alone - ends) / 8 / 4 + ends / 8
        assert found == pytest.approx((8 + bubbles) * each, rel=1e-9), text


def test_memory_by_hand() -> None:
    """Catches states that are not spread, logits forgotten, and layers that keep what they
    compute again."""
    count = parameter_count(LLAMA)

    def memory(layout: str, recompute: str = "none", implementation: object = None):
        return hr.forecast(
            LLAMA,
            "h100",
            layout,
            sequence_tokens=8192,
            recompute=recompute,
            implementation=implementation or made_up(),
        ).memory

    assert memory("DP 8").states == 16 * count
    assert memory("FSDP 8").states == 2 * count
    assert memory("ZERO1 8").states == pytest.approx(12 * count / 8, rel=1e-9)
    assert memory("ZERO1 8").working == 4 * count
    assert memory("ZERO2 8").working == 2 * count
    assert memory("FSDP 8 x TP 2").states == count
    assert memory("CP 8").states == memory("FSDP 8").states
    full = memory("FSDP 8", "full")
    assert full.activations == 32 * 8192 * 4096 * 2
    assert full.passing == 16 * 8192 * 128256
    chunks = memory("FSDP 8", implementation="headrace")
    assert chunks.passing == 4 * 2048 * 128256
    assert chunks.activations < memory("FSDP 8").activations
    assert full.peak == full.states + full.working + full.activations + full.passing


@pytest.mark.parametrize(
    ("text", "weights", "gradients", "states"),
    [
        ("DP 8", 1, 1, 1),
        ("DP 2 x CP 4", 1, 1, 1),  # replicas beside context hold everything
        ("DP 2 x FSDP 4", 4, 4, 4),
        ("DP 2 x FSDP 4 x CP 2", 8, 8, 8),
        ("ZERO1 4 x CP 2", 1, 1, 8),
        ("ZERO2 4 x CP 2", 1, 8, 8),
        ("FSDP 3 x CP 5", 15, 15, 15),
        ("CP 8", 8, 8, 8),
        ("FSDP 4 x TP 2 x PP 2", 4, 4, 4),
    ],
)
def test_what_a_layout_spreads(text: str, weights: int, gradients: int, states: int) -> None:
    """Catches states that are spread over ranks that hold all weights and gradients, a context that
    counts in one of the three only, and weights that nobody holds."""
    layout = FixedLayout.parse(text)
    assert layout.weight_shards == weights
    assert layout.gradient_shards == gradients
    assert layout.state_shards == states
    found = hr.forecast(LLAMA, "h100", text, sequence_tokens=512, implementation=made_up()).memory
    count = parameter_count(LLAMA) / (layout.tensor * layout.stages)
    spread = 12 if layout.states > 1 else 16
    assert found.states == pytest.approx(spread * count / states, rel=1e-6)
    if weights == 1:  # copies of 16 bits where states are spread, of gradients where these are not
        copies = (0 if states == 1 else 2) + (2 if layout.states > 1 else 0)
        assert found.working == pytest.approx(copies * count, rel=1e-6)


def test_gradients_of_replicas_are_summed_once_a_step() -> None:
    """Catches a sum over too few ranks where replicas share sequences, and one in every
    micro-batch."""
    link = quick(inside=1e9)
    bare = seconds(link, "CP 2", implementation=made_up(exposed=0.0))
    found = seconds(link, "DP 2 x CP 2") - bare
    assert found == pytest.approx(2 * 2 * parameter_count(LLAMA) * 3 / 4 / 1e9, rel=1e-6)
    more = seconds(link, "DP 2 x CP 2", accumulation=3)
    alone = seconds(link, "CP 2", accumulation=3, implementation=made_up(exposed=0.0))
    assert more - alone == pytest.approx(found, rel=1e-6)


def test_rates_and_what_they_assume_are_told() -> None:
    """Catches tokens of one device for those of all, utilisation without the causal half, and an
    assumption that is not named."""
    found = hr.forecast(
        LLAMA, "h100", "FSDP 8", sequence_tokens=8192, local_batch=2, implementation="compiled"
    )
    tokens = 8 * 2 * 8192
    assert found.rates.tokens == tokens
    assert found.tokens_per_s == pytest.approx(tokens / 8 / found.step_s)
    flops = 6 * (parameter_count(LLAMA) - 128256 * 4096 - 65 * 4096) + 6 * 8192 * 4096 * 32
    assert found.rates.mfu == pytest.approx(found.tokens_per_s * flops / 989e12, rel=1e-3)
    value = json.loads(json.dumps(found.to_json()))
    assert value["assumed"]["implementation"] == "compiled"
    assert value["assumed"]["hardware"] == "h100+nvlink4+infiniband-ndr"
    assert value["memory_bytes"]["peak"] == found.memory.peak
    for word in ("compiled", "bfloat16", "AdamW", "FSDP 8", "MFU", "989", "tokens/s"):
        assert word in str(found)
    assert found.fits == (found.memory.peak <= H100.device.memory_bytes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "PP 3"}, "in every part"),
        ({"layout": "PP 4 x VP 3"}, "in every part"),
        ({"layout": "PP 4 x VP 2", "accumulation": 6}, "got 6, wanted a multiple of 4"),
        ({"layout": "TP 16"}, "key-value head"),
        ({"layout": "TP 7"}, "key-value head"),
        ({"local_batch": 0}, "local_batch: got 0, wanted a whole number >= 1"),
        ({"local_batch": 1.5}, "local_batch: got 1.5"),
        ({"local_batch": float("nan")}, "local_batch: got nan"),
        ({"accumulation": 2**63}, "accumulation: got"),
        ({"sequence_tokens": "8Ki"}, "sequence_tokens: got '8Ki'"),
        ({"memory_bytes": -1}, "memory_bytes: got -1"),
        ({"memory_bytes": "80GiB"}, "memory_bytes: got '80GiB'"),
        ({"layout": "FSDP 99999999999999999999"}, "layout: got"),
        ({"layout": "FSDP 1000 x TP 2000"}, "devices of a layout: got 2000000"),
        ({"layout": "DP 999999999"}, "replicas of a layout: got 999999999"),
        ({"layout": None}, "layout of a forecast: got None"),
        ({"hardware": None}, "hardware: got None"),
        ({"implementation": 5}, "implementation: got 5"),
        ({"recompute": "some"}, "none or selective or full"),
        ({"implementation": "eagre"}, "did you mean 'eager'"),
        ({"hardware": "h1000"}, "did you mean 'h100'"),
    ],
)
def test_bad_input_is_refused_by_name(options: dict[str, object], message: str) -> None:
    """Catches a forecast of what cannot run, and a traceback from the depths."""
    given = {"hardware": "h100", "layout": "DP 1", "sequence_tokens": 64} | options
    with pytest.raises((SpecError, CostError), match=message):
        hr.forecast(LLAMA, **given)


def test_large_counts_take_no_longer() -> None:
    """Catches work or memory for each of the sequences of a step, which are all alike."""
    counts = {"local_batch": 10**9, "accumulation": 2 * 10**9}
    found = hr.forecast("llama-tiny", "h100", "DP 1000000", sequence_tokens=64, **counts)
    assert found.rates.tokens == 64 * 10**6 * 10**9 * 2 * 10**9
    one = hr.forecast("llama-tiny", "h100", "DP 1000000", sequence_tokens=64, local_batch=10**9)
    assert found.rates.model_flops == pytest.approx(one.rates.model_flops * 2e9)
