"""AutoSP (ICLR 2026): its Table 1, its lengths of 1B to 13B, and its breakdown beside headrace's.

    lengths of Table 1    GH200, four assumed, Llama 3.2 1B. Ours by the roofline, loss in chunks,
                          Ulysses with weights sharded; and the paper's own two systems forecast as
                          they are described: compiled, logits of all tokens of a rank at once
    gains of 3B to 13B    eight A100-80GB: what autosp_memory.py counted with fake tensors, the same
                          model of transformers under all contenders; GH200 and MI250: ours by the
                          roofline over DS-Ulysses forecast. ZeRO-3 checkpoints its layers
    step times            by the roofline, eager kernels and the least that attention takes
    breakdown             bytes that the two branches of a 1B layer keep (autosp_branches.py), and
                          DeepSpeed's long-context pass over the same graph (autosp_memory.py)
    hand-written Ulysses  autosp_speed.py, two ranks over gloo

Numbers of autosp_memory.py and autosp_speed.py are read from ``benchmarks/results``, not measured
again; those scripts do.

The paper was read as summarised. Its table of eight A100s has three models and two numbers in each
row: they are taken to be of 8B and 13B, since the text calls the gain largest at 8B and less at
13B. GH200's and MI250's are of 1B and 3B; MI250s are taken to be eight dies.

Errors of the paper, as summarised:

* Table 1 is of a "Llama-3.1 1B"; the 1B is Llama 3.2's.
* The share of linear work has d both as the model's features and as a head's: with h heads of d
  features products take 8 b s (h d)^2, h times what is printed; with d the model's features
  attention takes 2 b s^2 d, without the h. A gated feed-forward has 6 b s d d_ffn, not 4.
* Optimizer states are said to take about half of the memory at 13B: 12 bytes a parameter over eight
  ranks are a quarter of 80 GB, 16 (with weights and gradients) less than a third.

examples:
    headrace papers autosp --quick
    python benchmarks/paper_autosp.py --json autosp.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autosp_branches import kept_bytes
from claims import Claim, finish, options
from roofline import longest_forecast

from headrace.cli.display import tell
from headrace.costs import CostModel, roofline_costs
from headrace.costs.forecast import Recomputed
from headrace.costs.sources.formulas import first_elements
from headrace.spec import Architecture, LayerOption, LayerPlan
from headrace.spec.architecture import parameter_count
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import IMPLEMENTATIONS
from headrace.units import GIB

RESULTS = Path(__file__).parent / "results"

MODELS = {
    "1B": Architecture(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocabulary=128256),
    "3B": Architecture(layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192, vocabulary=128256),
    "8B": Architecture(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, tied=False
    ),
    "13B": Architecture(
        layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocabulary=32000, tied=False
    ),
}

TABLE_1: dict[str, tuple[int, float, Recomputed]] = {
    "DS-Ulysses": (81_000, 1.06, "none"),
    "AutoSP, SP pass": (77_000, 1.09, "none"),
    "AutoSP, SP and SAC passes": (128_000, 1.19, "selective"),
}
"""Table 1: the longest sequence, seconds of a step, and the recompute level that is nearest."""

STEP_TOKENS = 77_000
"""Tokens of Table 1's steps, which it does not name: what all of its rows hold."""

GAINS = {
    "ZeRO-3": {"8B": 5.6, "13B": 2.5},
    "DS-Ulysses": {"8B": 2.14, "13B": 1.88},
    "RingAttention": {"8B": 2.14, "13B": 1.6},
}
"""Eight A100-80GB: AutoSP's longest sequence over others', by model."""

COUNTED = {"ZeRO-3": "ZeRO-3, block checkpoint", "DS-Ulysses": "Ulysses", "RingAttention": "ring"}
"""What autosp_memory.py calls them. ZeRO-3 checkpoints its layers: only so is the gain that is
forecast of AutoSP near the published one."""

NODES = {
    "GH200": ("gh200", 4, {"1B": 1.58, "3B": 2.7}),
    "MI250": ("mi250", 8, {"1B": 2, "3B": 2.5}),
}
"""Section "Portability": hardware, devices, AutoSP's longest sequence over DS-Ulysses'."""

BREAKDOWN = {"attention": 13.03, "MLP": 2.22}
BACKWARD, OF_MANUAL = 1.14, 0.97
"""Section "Operator Breakdown", and the share of manual Ulysses' throughput on NVIDIA's."""

LAYER_1B = (2048, 8192, 32, 8)

THEIRS, OURS = "compiled", "headrace"
"""Implementations: AutoSP's and its baselines', which Inductor compiles; ours."""

HOPPER = IMPLEMENTATIONS[OURS].on["hopper"]
"""What cuBLAS's products and FlashAttention-2 attain of the peak."""


def costs_of(hardware: str, devices: int, model: str, implementation: str = OURS) -> CostModel:
    """The roofline of one group of all devices."""
    return roofline_costs(
        Hardware.parse(hardware),
        devices,
        MODELS[model],
        sizes=(devices,),
        implementation=IMPLEMENTATIONS[implementation],
    )


def plan_of(model: str, recompute: str, method: str = "ulysses_z") -> LayerPlan:
    """All layers by one method."""
    return LayerPlan.uniform(LayerOption.of(method, recompute), MODELS[model].layers)


def longest(hardware: str, devices: int, model: str, recompute: str) -> int:
    """headrace's longest sequence by Ulysses."""
    costs = costs_of(hardware, devices, model)
    return costs.max_tokens(devices, plan_of(model, recompute), "sharded")


def parts_s(implementation: str, recompute: str) -> tuple[float, float]:
    """Seconds of the forward and of the backward of Table 1's step."""
    costs = costs_of("gh200", 4, "1B", implementation)
    return costs.micro_batch_s([STEP_TOKENS], 4, plan_of("1B", recompute), "sharded")


def step_s(implementation: str, recompute: str) -> float:
    """Seconds of Table 1's step."""
    update = costs_of("gh200", 4, "1B", implementation).exchange_s.update_s
    return sum(parts_s(implementation, recompute)) + update


def table_1() -> Iterator[Claim]:
    """Lengths: ours, and how far the forecast of their own systems is off."""
    costs = "roofline of 4 GH200, kernels headrace, Ulysses"
    theirs = {name: row[0] for name, row in TABLE_1.items()}
    for name, level in zip(theirs, ("none", "none", "attention"), strict=True):
        ours = longest("gh200", 4, "1B", level)
        own = longest_forecast(MODELS["1B"], "gh200", "CP 4", TABLE_1[name][2], THEIRS)
        yield Claim(
            where=f"Table 1, {name}",
            what=f"longest sequence, recompute {level}, loss in chunks",
            unit="tokens",
            theirs=theirs[name],
            ours=ours,
            how="simulated",
            costs=costs,
            why=f"no memory kept free; over a forecast of theirs {ours / own:.1f}x",
        )
        yield Claim(
            where=f"Table 1, {name}",
            what="their own system: forecast over published length",
            unit="times",
            theirs=None,
            ours=own / theirs[name],
            how="simulated",
            costs=f"forecast of 4 GH200, kernels {THEIRS}, logits whole",
            why="a check of the forecast: the allocator and masks are not in it",
        )


def steps() -> Iterator[Claim]:
    """Seconds of Table 1, and what each pass costs."""
    bound = attention_bound_s()
    for name, level in (
        ("DS-Ulysses", "none"),
        ("AutoSP, SP pass", "none"),
        ("AutoSP, SP and SAC passes", "attention"),
    ):
        best = step_s("fused", level)
        yield Claim(
            where=f"Table 1, {name}",
            what=f"a step of {STEP_TOKENS:,} tokens",
            unit="s",
            theirs=TABLE_1[name][1],
            ours=step_s(OURS, level),
            how="simulated",
            costs="roofline of 4 GH200, kernels headrace",
            less=True,
            why=f"FlashAttention-2 alone takes {bound:.2f} s at {HOPPER.attention:.0%} of the "
            f"peak; in theirs attention attains {attained(name):.1%} at least if products attain "
            f"{HOPPER.products:.1%} and all else takes no time: another kernel, or more than four "
            f"devices. With cuDNN's attention (kernels fused) {best:.2f} s",
        )
    none, again = step_s(OURS, "none"), step_s(OURS, "attention")
    yield Claim(
        where="Table 1",
        what="step with recompute over step without",
        unit="times",
        theirs=TABLE_1["AutoSP, SP and SAC passes"][1] / TABLE_1["AutoSP, SP pass"][1],
        ours=again / none,
        how="simulated",
        costs="roofline of 4 GH200, kernels headrace",
        less=True,
    )
    yield Claim(
        where="Operator Breakdown",
        what="backward with recompute over backward without",
        unit="times",
        theirs=BACKWARD,
        ours=parts_s(OURS, "attention")[1] / parts_s(OURS, "none")[1],
        how="simulated",
        costs="roofline of 4 GH200, kernels headrace",
        less=True,
    )


def attention_flops() -> float:
    """Causal FLOPs of attention of a device in Table 1's step, 5/2 as many backward."""
    a = MODELS["1B"]
    return a.layers * 3.5 * 2 * a.hidden * STEP_TOKENS**2 / 4


def product_flops(*, again: bool) -> float:
    """Of products of a device in the same step; ``again`` with the first of both branches computed
    again in the backward."""
    a = MODELS["1B"]
    more = 2 * a.layers * first_elements(a) if again else 0.0
    return (6 * parameter_count(a) + more) * STEP_TOKENS / 4


def attention_bound_s() -> float:
    """The least seconds of Table 1's step that FlashAttention-2 takes."""
    return attention_flops() / (HOPPER.attention * Hardware.parse("gh200").device.peak("bfloat16"))


def attained(name: str) -> float:
    """The share of the peak that attention must attain for the published step, if products run as
    cuBLAS's do and all else takes no time."""
    peak = Hardware.parse("gh200").device.peak("bfloat16")
    _, seconds, level = TABLE_1[name]
    products = product_flops(again=level != "none") / HOPPER.products
    return attention_flops() / (seconds * peak - products)


def counted_gains(found: Sequence[Mapping[str, Any]]) -> Iterator[Claim]:
    """Eight A100-80GB: lengths over those of the same model under other ways, counted."""
    at = {(row["model"].split()[-1], row["way"]): row["longest"] for row in found}
    layer = {(row["model"].split()[-1], row["way"]): row["layer_bytes"] for row in found}
    ours = {
        "same logits": "headrace, recompute",
        "no logits": "headrace, recompute, no logits",
        "no logits, recompute full": "headrace, full, no logits",
    }
    costs = "fake tensors, 8 ranks of 80 GiB (results/autosp_memory.json)"
    for other, published in GAINS.items():
        for model, gain in published.items():
            base = at[model, COUNTED[other]]
            least = at[model, ours["no logits, recompute full"]] / base
            for how, way in ours.items():
                found_gain = at[model, way] / base
                yield Claim(
                    where=f"8 A100, {model}, over {other}",
                    what=f"longest sequence, {how}",
                    unit="times",
                    theirs=gain,
                    ours=found_gain,
                    how="counted",
                    costs=costs,
                    why=f"of a layer it keeps {layer[model, way]:,.0f} bytes a token, attention's "
                    f"result among them, the baseline {layer[model, COUNTED[other]]:,.0f}, its "
                    f"input; with as few, and no logits, {least:.1f}x"
                    if found_gain < gain
                    else "",
                )
    for model in MODELS:
        yield Claim(
            where=f"8 A100, {model}",
            what="longest sequence, recompute attention to full, no logits",
            unit="tokens",
            theirs=None,
            ours=(
                at[model, "headrace, recompute, no logits"],
                at[model, "headrace, full, no logits"],
            ),
            how="counted",
            costs=costs,
        )


def forecast_gains() -> Iterator[Claim]:
    """Their own gains, forecast, and seconds of ours at eight A100s; and other hardware."""
    ways: tuple[tuple[str, Recomputed, str], ...] = (
        ("ZeRO-3", "full", "FSDP 8"),
        ("DS-Ulysses", "none", "CP 8"),
    )
    for other, level, layout in ways:
        for model, gain in GAINS[other].items():
            own = longest_forecast(MODELS[model], "a100-80g", "CP 8", "selective", THEIRS)
            base = longest_forecast(MODELS[model], "a100-80g", layout, level, THEIRS)
            yield Claim(
                where=f"8 A100, {model}, over {other}",
                what="AutoSP's own gain: forecast over published",
                unit="times",
                theirs=None,
                ours=own / base / gain,
                how="simulated",
                costs=f"forecast of 8 A100-80GB, kernels {THEIRS}, logits whole",
                why="a check of the forecast",
            )
    for model in MODELS:
        tokens = longest_forecast(MODELS[model], "a100-80g", "CP 8", "selective", THEIRS)
        costs = costs_of("a100-80g", 8, model)
        taken = [
            sum(costs.micro_batch_s([tokens], 8, plan_of(model, "attention", method), "sharded"))
            + costs.exchange_s.update_s
            for method in ("ulysses_z", "megatron_cz")
        ]
        yield Claim(
            where=f"8 A100, {model}",
            what=f"a step of {tokens:,} tokens, recompute attention, Ulysses and ring",
            unit="s",
            theirs=None,
            ours=(taken[0], taken[1]),
            how="simulated",
            costs="roofline of 8 A100-80GB, kernels headrace",
        )
    for name, (hardware, devices, gains) in NODES.items():
        for model, gain in gains.items():
            base = longest_forecast(MODELS[model], hardware, f"CP {devices}", "none", THEIRS)
            yield Claim(
                where=f"{devices} {name}, {model}, over DS-Ulysses",
                what="longest sequence, recompute attention, loss in chunks",
                unit="times",
                theirs=gain,
                ours=longest(hardware, devices, model, "attention") / base,
                how="simulated",
                costs=f"roofline, kernels headrace, over a forecast of kernels {THEIRS}",
            )


def states() -> Claim:
    """The share of memory that states of 13B take."""
    share = 16 * parameter_count(MODELS["13B"]) / 8 / (80 * GIB)
    return Claim(
        where="section Model Size Scaling, 13B",
        what="share of a device's memory that weights, gradients and optimizer states take",
        unit="fraction",
        theirs=0.5,
        ours=share,
        how="counted",
        costs="16 bytes a parameter over 8 ranks of 80 GiB",
        less=True,
    )


def breakdown(tokens: int) -> Iterator[Claim]:
    """Bytes of branches of a layer: torch's partition over ours."""
    for branch, gain in BREAKDOWN.items():
        tell(f"bytes of {branch}")
        kept = kept_bytes(branch, LAYER_1B, tokens)
        why = ""
        if branch == "attention":
            most = kept.torch / (kept.headrace - kept.input)
            why = (
                f"torch's partition keeps {kept.torch / kept.input:.2f} activations of it: no pass "
                f"that does not compute attention again, and so keeps its result, gains more than "
                f"{most:.1f}x; theirs started from {gain:.0f} activations at least"
            )
        yield Claim(
            where=f"Operator Breakdown, {branch}",
            what="bytes kept by torch.compile over ours, a layer of 1B",
            unit="times",
            theirs=gain,
            ours=kept.torch / kept.headrace,
            how="counted",
            costs=f"fake tensors, {tokens:,} tokens, bfloat16",
            why=why,
        )


def pass_of_deepspeed(found: Sequence[Mapping[str, Any]], version: str) -> Iterator[Claim]:
    """Its long-context pass and ours, over the graph of one model."""
    at = {(row["tokens"], row["contender"]): row for row in found}
    costs = f"fake tensors, DeepSpeed {version} (results/autosp_memory.json)"
    for tokens in sorted({row["tokens"] for row in found}):
        own, other = at[tokens, "headrace, compiled"], at[tokens, "DeepSpeed SAC"]
        yield Claim(
            where=f"SAC pass as published in DeepSpeed, {tokens:,} tokens",
            what="most bytes of the backward",
            unit="bytes",
            theirs=other["peak_bytes"],
            ours=own["peak_bytes"],
            how="counted",
            costs=costs,
            less=True,
        )
        yield Claim(
            where=f"SAC pass as published in DeepSpeed, {tokens:,} tokens",
            what="FLOPs of a step over those without recompute",
            unit="times",
            theirs=1 + other["more_flops"],
            ours=1 + own["more_flops"],
            how="counted",
            costs=costs,
            less=True,
        )


def beside_manual(found: Sequence[Mapping[str, Any]]) -> Iterator[Claim]:
    """The share of hand-written Ulysses' throughput that hr.compile attains."""
    for row in found:
        if row["contender"].startswith("headrace"):
            yield Claim(
                where="Throughput, SP pass only",
                what=f"share of hand-written Ulysses, {row['model']}, {row['contender']}",
                unit="fraction",
                theirs=OF_MANUAL,
                ours=row["speed"],
                how="measured",
                costs="2 ranks over gloo, 4,096 tokens (results/autosp_speed.json)",
            )


def main(arguments: Sequence[str]) -> int:
    """Make the rows."""
    o = options(__doc__).parse_args(arguments)
    memory = json.loads((RESULTS / "autosp_memory.json").read_text())
    speed = json.loads((RESULTS / "autosp_speed.json").read_text())
    claims = [
        *table_1(),
        *steps(),
        *counted_gains(memory["longest"]),
        *forecast_gains(),
        states(),
        *breakdown(1024 if o.quick else 16384),
        *pass_of_deepspeed(memory["recompute"], memory["deepspeed"]),
        *beside_manual(speed["rows"]),
    ]
    folded = {name: value["machine"] for name, value in (("memory", memory), ("speed", speed))}
    return finish("AutoSP", claims, o, folded_from=folded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
