"""Costs of hardware by data sheets; counts are compared with real layers elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.costs import FORMULA_METHODS, CostModel, Speeds, roofline_costs
from headrace.costs.sources.roofline import KERNELS, speeds_of
from headrace.errors import CostError, SpecError
from headrace.spec import Architecture, LayerOption, LayerPlan
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import Implementation

LLAMA = Architecture(
    layers=2, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocabulary=32000, tied=False
)
H100 = Hardware.parse("h100")


def _made_up(**rates: float) -> Hardware:
    """Hardware on which everything is free but what is given: flops, attention, memory, inside,
    across in units per second; launch, latency in seconds."""
    never = 1e60
    device = replace(
        H100.device,
        family="",
        flops_per_s={"bfloat16": 1e30},
        memory_bytes_per_s=rates.get("memory", never),
        attained_matmul=min(1.0, rates.get("flops", 1e30) / 1e30),
        attained_attention=min(1.0, rates.get("attention", 1e30) / 1e30),
        attained_memory=1.0,
        launch_s=rates.get("launch", 0.0),
        multiprocessors=int(rates.get("multiprocessors", 0)),
    )
    inside, across = (
        replace(link, bytes_per_s=rates.get(name, never), attained=1.0, latency_s=latency)
        for name, link, latency in (
            ("inside", H100.inside, rates.get("latency", 0.0)),
            ("across", H100.across, 2 * rates.get("latency", 0.0)),
        )
    )
    return Hardware(device=device, inside=inside, across=across, devices_per_node=8)


def _cost(hardware: Hardware, p: int, text: str, **changes: Any):
    architecture = replace(LLAMA, **changes)
    return roofline_costs(hardware, max(p, 8), architecture, sizes=(p,)).options[p][text]


def test_products_and_attention_have_rates_of_their_own() -> None:
    """Catches attention at the rate of products, and a backward of twice instead of two and a half
    times its forward; causal counts the diagonal, document by document."""
    pack, h = (1000, 24), LLAMA.hidden
    linear = 2 * (4 * h * h + 3 * h * LLAMA.ffn) * sum(pack)
    products = _cost(_made_up(flops=1e12), 1, "local")
    assert products.forward(pack) == pytest.approx(linear / 1e12, rel=1e-9)
    assert products.backward(pack) == pytest.approx(2 * linear / 1e12, rel=1e-9)
    for causal in (True, False):
        scores = sum(n * (n + 1) // 2 if causal else n * n for n in pack)
        core = _cost(_made_up(attention=1e12), 1, "local", causal=causal)
        assert core.forward(pack) == pytest.approx(4 * h * scores / 1e12, rel=1e-9)
        assert core.backward(pack) == pytest.approx(10 * h * scores / 1e12, rel=1e-9)


def test_what_is_no_product_is_bound_by_memory() -> None:
    """Catches bytes counted in elements, and work that does not get less on more ranks: two norms,
    heads put in order, two sums and the activation, each input read and each output written."""
    tokens, row = 512, LLAMA.hidden * 2
    wide = LLAMA.ffn * 2
    once = 2 * 2 * row + 2 * 3 * row + 2 * 3 * row + 3 * wide
    cost = _cost(_made_up(memory=1e9), 1, "local")
    assert cost.forward([tokens]) == pytest.approx(tokens * once / 1e9, rel=1e-9)
    assert 1.3 < cost.backward([tokens]) / cost.forward([tokens]) < 2
    spread = _cost(_made_up(memory=1e9), 4, "ulysses_z")
    assert spread.forward([tokens]) == pytest.approx(cost.forward([tokens]) / 4, rel=1e-9)


def test_launches_and_latencies_are_paid_once_for_a_pack() -> None:
    """Catches launches that grow with tokens, and a latency for each sequence of a pack."""
    cost = _cost(_made_up(launch=1e-6), 1, "local")
    assert cost.forward((5, 7)) == pytest.approx(KERNELS * 1e-6, rel=1e-9)
    assert cost.backward((5, 7)) == pytest.approx(2 * KERNELS * 1e-6, rel=1e-9)
    for p, each in ((4, 1e-3), (16, 2e-3)):
        hardware = _made_up(latency=1e-3)
        assert _cost(hardware, p, "megatron_ts").forward((5, 7)) == pytest.approx(4 * each)
        assert _cost(hardware, p, "megatron_cz").forward((5, 7)) == pytest.approx((p - 1) * each)
        assert _cost(hardware, p, "ulysses_z").forward((5, 7)) == pytest.approx(2 * each)


def _bytes(p: int, text: str, link: str) -> float:
    """Bytes of a token's activation that a rank sends forward over a link."""
    return _cost(_made_up(**{link: 1.0}), p, text).forward((1,)) / (LLAMA.hidden * 2)


@pytest.mark.parametrize(
    ("text", "sent", "crossing"),
    [
        # 16 ranks on two nodes of 8; in rows of h elements of one token
        ("megatron_ts", 4 * 15 / 16, 4 / 16),  # each of 8 brings an eighth of the other node's
        ("ulysses_z", 4 * 15 / 16 / 16, 4 * 8 / 16 / 16),  # 8 of 15 peers are there
        ("megatron_cz", 2 * 15 / 16, 2 * 15 / 16),  # a ring waits for its slowest hop
        ("megatron_cz_gather", 2 * 15 / 16, 2 / 16),
    ],
)
def test_groups_across_nodes(text: str, sent: float, crossing: float) -> None:
    """Catches a gather that crosses to a node once for each of its devices, rings that are faster
    than their slowest hop, and bytes that are sent over both links or neither."""
    assert _bytes(16, text, "across") == pytest.approx(crossing, rel=1e-9)
    assert _bytes(16, text, "inside") == pytest.approx(sent - crossing, rel=1e-9, abs=1e-12)
    assert _bytes(8, text, "across") < 1e-20
    assert _bytes(8, text, "inside") > 0


def test_a_step_of_the_optimizer() -> None:
    """Catches a state that each device reads whole, gradients that travel in 32 bits, and weights
    that cross nodes once for each device."""
    weights = sum(
        (2 * 32000 + 1) * 4096 if x == 0 else 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
        for x in range(3)
    )
    exchange = roofline_costs(_made_up(memory=1e9), 16, LLAMA).exchange_s
    assert exchange.update_s == pytest.approx(weights / 16 * 32 / 1e9, rel=1e-9)
    exchange = roofline_costs(_made_up(across=1e9), 16, LLAMA).exchange_s
    assert exchange.pull_s == pytest.approx(weights / 16 * 2 / 1e9, rel=1e-9)
    assert exchange.push_s == exchange.pull_s
    for devices, last in ((12, 4), (15, 7), (17, 1)):  # a last node with fewer devices
        exchange = roofline_costs(_made_up(across=1e9), devices, LLAMA).exchange_s
        received = weights * 2 * (devices - last) / devices / last
        assert exchange.pull_s == pytest.approx(received / 1e9, rel=1e-9)
    assert roofline_costs(H100, 1, LLAMA).exchange_s.pull_s == 0


def test_the_pulls_of_the_guide_on_nodes_that_are_not_full() -> None:
    """Catches other ratios than docs/concepts/strategies.md says."""
    model = hr.Architecture.preset("llama-8b")
    pull_s = {
        devices: hr.costs.roofline(model, "h100", devices=devices).exchange_s.pull_s
        for devices in (63, 64, 65)
    }
    page = Path(__file__).parents[2] / "docs" / "concepts" / "strategies.md"
    said = " ".join(page.read_text(encoding="utf-8").split())
    assert f"on 63 devices takes {pull_s[63] / pull_s[64]:.2f} times that on 64" in said
    assert f"({pull_s[65] / pull_s[64]:.1f} times on 65)" in said


@pytest.mark.parametrize("multiprocessors", [108, 132])
def test_half_a_wave_is_the_mean_of_all_sizes(multiprocessors: int) -> None:
    """Catches a tail of last waves that is off: over many sizes of packs products take as long as
    counted waves of tiles do, and a small pack takes more for each of its tokens."""
    flops, tile, h, f = 1e12, 128, LLAMA.hidden, LLAMA.ffn
    device = {"flops": flops, "multiprocessors": multiprocessors}
    layer = _cost(_made_up(**device), 1, "local")
    shapes = ((3 * h, h), (h, h), (2 * f, h), (h, f))  # outputs and inner features

    def counted(tokens: int) -> float:
        tiles = (-(-tokens // tile) * -(-outputs // tile) for outputs, _ in shapes)
        waves = [-(-each // multiprocessors) * multiprocessors for each in tiles]
        inner = [features for _, features in shapes]
        return sum(2 * n * tile**2 * k for n, k in zip(waves, inner, strict=True)) / flops

    sizes = range(tile, 16384, tile)
    mean = sum(map(counted, sizes)) / len(sizes)
    assert sum(layer.forward((n,)) for n in sizes) / len(sizes) == pytest.approx(mean, rel=0.01)
    plain = _cost(_made_up(flops=flops), 1, "local")
    small, large = (layer.forward((n,)) / plain.forward((n,)) for n in (512, 16384))
    assert small > 1.15 > 1.02 > large > 1


def test_methods_that_cut_weights_have_smaller_last_waves() -> None:
    """Catches half a wave of whole products where ranks hold parts of them, of a shard that comes
    many times counted once, and none when the first products run again."""
    h, f, p = LLAMA.hidden, LLAMA.ffn, 4

    def waves(text: str, backward: bool = False) -> float:
        found = [_cost(_made_up(flops=1e12, multiprocessors=n), p, text) for n in (100, 0)]
        first, second = ((c.backward if backward else c.forward).c for c in found)
        return (first - second) / (2 * 100 * 128 * 128 / 2 / 1e12)

    assert waves("ulysses_z") == pytest.approx(3 * h + f)
    assert waves("ulysses_z", backward=True) == pytest.approx(5 * h + 2 * f)
    assert waves("ulysses_z+attention", True) == pytest.approx(5 * h + 2 * f + h)
    assert waves("ulysses_z+full", True) == pytest.approx(8 * h + 3 * f)
    assert waves("megatron_ts") == pytest.approx(2 * h + (h + f) / p)
    assert waves("megatron_ts", True) == pytest.approx(2 * h + (3 * h + 2 * f) / p)
    assert waves("metp") == pytest.approx(p * (2 * h + (h + f) / p))


def test_the_head_has_last_waves() -> None:
    """Catches a head without half a wave, and one whose gradient has that of its forward."""
    some, none = (
        roofline_costs(_made_up(flops=1e12, multiprocessors=n), 8, LLAMA, sizes=(2,)).ends[2]
        for n in (100, 0)
    )
    idle_s = 100 * 128 * 128 / 1e12
    assert some.forward.c - none.forward.c == pytest.approx(LLAMA.hidden * idle_s)
    assert some.backward.c - none.backward.c == pytest.approx(LLAMA.vocabulary * idle_s)


def test_preset_to_speeds() -> None:
    """Catches peaks where fractions are attained, and 16 bits where products run in 32."""
    ideal = Implementation.named("ideal")
    speeds, device = speeds_of(H100, implementation=ideal), H100.device
    assert speeds.flops_per_s == 989e12 * device.attained_matmul
    assert speeds.core_flops_per_s == 989e12 * device.attained_attention
    assert speeds.touched_bytes_per_s == 3.35e12 * device.attained_memory
    assert speeds.link_bytes_per_s == 450e9 * H100.inside.attained
    single = speeds_of(H100, 4, ideal)
    assert single.flops_per_s == 67e12 * device.attained_matmul
    assert (single.element_bytes, single.sum_bytes) == (4, 4)
    assert speeds_of(H100, 8).sum_bytes == 8
    assert speeds.idle_outputs == 0 < speeds_of(H100).idle_outputs == 132 * 128 * 128 / 2


@pytest.mark.parametrize("name", ["headrace", "eager", "eager-2023", "compiled", "fused"])
def test_kernels_have_rates_of_their_own(name: str) -> None:
    """Catches an implementation that is named and not obeyed: each rate that costs are made of is
    its own, and a device of a lower limit of power is slower."""
    kernels = Implementation.named(name)
    attained, speeds = kernels.on["hopper"], speeds_of(H100, implementation=kernels)
    ideal = speeds_of(H100, implementation=Implementation.named("ideal"))
    assert speeds.flops_per_s == 989e12 * attained.products
    assert speeds.core_flops_per_s == 989e12 * attained.attention
    assert speeds.touched_bytes_per_s == ideal.touched_bytes_per_s / attained.passes
    assert speeds.memory_bytes_per_s == ideal.memory_bytes_per_s
    limited = speeds_of(Hardware.parse("h100-96g-500w"), implementation=kernels)
    assert limited.flops_per_s == pytest.approx(speeds.flops_per_s * (5 / 7) ** (1 / 3))
    own = kernels.applied(H100.device)
    assert own.attained_matmul * 989e12 == pytest.approx(speeds.flops_per_s)
    assert own.attained_memory * 3.35e12 == pytest.approx(speeds.touched_bytes_per_s)
    few, many = (
        roofline_costs(H100, 8, LLAMA, sizes=(8,), implementation=k).gather_s[8]
        for k in (kernels, Implementation.named("ideal"))
    )
    assert few == pytest.approx([second * attained.exposed for second in many])


def test_a_cost_model_like_any_other() -> None:
    """Catches a source that cannot be told from another's, methods left out, and a file that does
    not read back."""
    costs = roofline_costs(H100, 16, LLAMA)
    assert "roofline of h100+nvlink4+infiniband-ndr" in costs.fingerprint
    assert costs.fingerprint != roofline_costs(Hardware.parse("h200"), 16, LLAMA).fingerprint
    attentions = {LayerOption.parse(text).attention for text in costs.options[8]}
    assert attentions == set(FORMULA_METHODS) - {"local"}
    assert CostModel.from_json(costs.to_json()) == costs
    assert costs.cluster.memory_bytes == H100.device.memory_bytes
    assert roofline_costs(H100, 2, LLAMA, memory_bytes=7).cluster.memory_bytes == 7
    few = roofline_costs(H100, 4, LLAMA, methods=("ulysses_z",), sizes=(2, 4))
    assert few.group_sizes == (2, 4)


def test_better_hardware_is_never_slower() -> None:
    """Catches a rate used upside down: for every option and length a step gets quicker with each
    constant by itself."""
    base = Hardware.parse("a100-80g")
    newer = Hardware.parse("h100")
    mixed = [
        replace(base, inside=newer.inside),
        replace(base, across=newer.across),
        replace(base, device=newer.device),
    ]
    for better in mixed:
        for p in (1, 4, 16):
            old, new = (roofline_costs(h, 16, LLAMA, sizes=(p,)) for h in (base, better))
            for text in old.options[p]:
                layers = LayerPlan.uniform(LayerOption.parse(text), 2)
                for pack in ([512] * 4, [32768]):
                    times = [sum(c.micro_batch_s(pack, p, layers)) for c in (new, old)]
                    assert times[0] <= times[1] * (1 + 1e-12), (text, p)


def test_no_memory_is_not_all_memory() -> None:
    """Catches a memory of 0 bytes that counts as left out."""
    with pytest.raises(SpecError, match="memory of a device: got 0"):
        roofline_costs(H100, 2, LLAMA, memory_bytes=0)


def test_what_cannot_be_is_said() -> None:
    """Catches a KeyError for an odd size, and a method without formulas left out in silence."""
    with pytest.raises(CostError, match="bytes of an element: got 3, wanted 2 or 4 or 8"):
        roofline_costs(H100, 2, LLAMA, element_bytes=3)
    with pytest.raises(CostError, match="formulas of a method: got 'colossal_z'"):
        roofline_costs(H100, 2, LLAMA, methods=("colossal_z",))
    half = replace(H100, device=replace(H100.device, flops_per_s={"float32": 1e12}))
    with pytest.raises(SpecError, match="FLOPs of h100: got 'bfloat16'"):
        roofline_costs(half, 2, LLAMA)
    for wrong in (
        {"touched_bytes_per_s": 0.0},
        {"attention_flops_per_s": 0.0},
        {"devices_per_node": 8},
        {"across_bytes_per_s": 1.0},
        {"idle_outputs": -1.0},
    ):
        with pytest.raises(CostError, match="speeds"):
            Speeds(**wrong)
