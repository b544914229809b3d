"""Writes a run folder of invented but plausible numbers, of any size and with any fault."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.spec import (
    Architecture,
    LayerOption,
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Row,
    Scheme,
    Timeline,
)
from headrace.spec.layer_plan import Recompute
from headrace.spec.plan import TokenOrder

__all__ = ["fake_run", "layered_run"]

_CONTEXT = 16384
_MODEL = Architecture.preset("llama-tiny", hidden=256, layers=8, heads=8, kv_heads=2, ffn=768)
_CAPACITY = 2 * 2**30
_RINGS = ("megatron_cz", "megatron_cz_gather", "ulysses_ring", "tensor_ring")
"""Methods that keep tokens in place, so that long documents lie in zigzag order."""


def fake_run(
    folder: Path,
    *,
    steps: int = 40,
    ranks: int = 4,
    seed: int = 0,
    name: str = "stories on four ranks",
    recorded: int = 4,
    plans: bool = True,
    nan_at: tuple[int, ...] = (),
    corpus: str = "stories",
    methods: tuple[str, ...] = ("ulysses_z", "megatron_cz"),
) -> Path:
    """Write ``steps`` steps on ``ranks`` ranks, timelines for ``recorded`` of them.

    Groups of several ranks run ``methods``: every third step the first layers take the next one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    documents = [_length(chance) for _ in range(4000)]
    run = _run_json(name, corpus, ranks, seed, documents)
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    every = max(1, steps // recorded) if recorded else 0
    with (
        (folder / "metrics.jsonl").open("w") as metrics,
        (folder / "timelines.jsonl").open("w") as timelines,
        (folder / "plans.jsonl").open("w") as planned,
    ):
        for step in range(steps):
            plan, metric, timeline = _step(step, steps, ranks, methods, chance, step in nan_at)
            metrics.write(json.dumps(metric) + "\n")
            if every and (step % every == every - 1 or steps == 1):
                timelines.write(json.dumps(timeline) + "\n")
            if plans:
                planned.write(json.dumps({"step": step} | plan.to_json()) + "\n")
    return folder


def layered_run(folder: Path, *steps: Sequence[tuple[str | None, int]]) -> Path:
    """Write a run of one rank whose steps have just these micro-batches, each a layer plan (None:
    the run did not write it) and tokens."""
    path = fake_run(folder, steps=len(steps), ranks=1, recorded=0, plans=False) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    with path.open("w") as metrics:
        for row, step in zip(rows, steps, strict=True):
            row["micro_batches"] = [
                {"ranks": 1, "tokens": tokens, "longest": tokens, "sequences": 1}
                | ({} if layers is None else {"layers": layers, "order": "natural"})
                for layers, tokens in step
            ]
            metrics.write(json.dumps(row) + "\n")
    return folder


def _length(chance: random.Random) -> int:
    return max(16, min(_CONTEXT, round(chance.lognormvariate(6.3, 1.15))))


def _seconds(tokens: int, p: int) -> float:
    """Forward of the whole model over a pack of one sequence."""
    return (2.2e-5 * tokens + 3.2e-9 * tokens**2) / p + (4e-4 if p == 1 else 6e-3 + 3e-6 * tokens)


def _groups(ranks: int) -> list[int]:
    return [p for p in (1, 2, 4, 8, 16, 32, 64) if p <= ranks and ranks % p == 0]


def _choose(tokens: int, ranks: int) -> int:
    fits = [p for p in _groups(ranks) if tokens / p <= 2600]
    return fits[0] if fits else _groups(ranks)[-1]


def _packs(lengths: list[int], ranks: int, choose: Any) -> list[tuple[tuple[int, ...], list[int]]]:
    """Micro-batches (group, sequences), large groups first, longest sequence to the least busy."""
    busy = [0.0] * ranks
    packs: list[tuple[tuple[int, ...], list[int]]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        p = choose(lengths[index])
        groups = [tuple(range(at, at + p)) for at in range(0, ranks, p)]
        group = min(groups, key=lambda g: max(busy[r] for r in g))
        end = max(busy[r] for r in group) + _seconds(lengths[index], p)
        for r in group:
            busy[r] = end
        for at, (other, members) in enumerate(packs):
            if other == group and sum(lengths[i] for i in members) + lengths[index] < 2600 * p:
                packs[at][1].append(index)
                break
        else:
            packs.append((group, [index]))
    return packs


def _layers(step: int, tokens: int, p: int, methods: tuple[str, ...]) -> LayerPlan:
    """The first three layers in the method of the step, the others in the first of ``methods``,
    whose feed-forward all layers of short packs take; long packs recompute from the front."""
    again = 0 if tokens / p < 1200 else 4 if tokens / p < 2200 else 8
    usual, turn = ("local", "local") if p == 1 else (methods[0], methods[step // 3 % len(methods)])
    attention = (turn,) * 3 + (usual,) * 5
    feed_forward = (usual,) * 8 if tokens / p < 1700 else attention
    level: Recompute = "attention" if again == 4 else "full"
    return LayerPlan(
        options=tuple(
            LayerOption(attention=a, feed_forward=f, recompute=level if i < again else "none")
            for i, (a, f) in enumerate(zip(attention, feed_forward, strict=True))
        )
    )


def _order(layers: LayerPlan) -> TokenOrder:
    rings = any(option.attention in _RINGS for option in layers.options)
    return "zigzag" if rings else "natural"


def _timeline(
    packs: list[tuple[tuple[int, ...], list[int]]],
    lengths: list[int],
    ranks: int,
    source: Any,
    noise: Any,
) -> Timeline:
    rows: list[Row] = []
    free = [0.0] * ranks
    for rank in range(ranks):
        for bucket in range(3):
            took = 1.1e-2 * noise()
            rows.append(_row(rank, f"P{bucket}", "pull", free[rank], free[rank] + took))
            free[rank] += took
    for index, (group, members) in enumerate(packs):
        tokens, p = sum(lengths[i] for i in members), len(group)
        seconds = sum(_seconds(lengths[i], p) for i in members)
        begin = max(free[r] for r in group)
        for kind, letter, factor in (("forward", "F", 1.0), ("backward", "B", 2.1)):
            end = begin + seconds * factor * noise()
            text = f"0{letter}{index}[{','.join(map(str, group))}]"
            rows += [_row(r, text, kind, begin, end, tokens, p) for r in group]
            begin = end
        for r in group:
            free[r] = begin
    meet = max(free)
    for rank in range(ranks):
        for bucket in (2, 1, 0):
            rows.append(_row(rank, f"G{bucket}", "push", meet, meet + 2.2e-2))
        rows.append(_row(rank, "U", "update", meet + 2.2e-2, meet + 3.4e-2))
    return Timeline(source=source, rows=tuple(rows), devices=ranks)


def _row(
    rank: int, action: str, kind: str, start: float, end: float, tokens: int = 0, ranks: int = 1
) -> Row:
    return Row(
        rank=rank, action=action, kind=kind, start_s=start, end_s=end, tokens=tokens, ranks=ranks
    )


def _plan(
    packs: Any,
    layers: list[LayerPlan],
    lengths: list[int],
    ranks: int,
    predicted: float,
    bound: float,
) -> Plan:
    groups = list(dict.fromkeys(group for group, _ in packs))
    return Plan(
        lengths=Lengths.of(lengths),
        devices=ranks,
        predicted_s=predicted,
        lower_bound_s=bound,
        pipelines=tuple(Pipeline(scheme=Scheme(context=len(g)), ranks=g) for g in groups),
        micro_batches=tuple(
            MicroBatch(
                pipeline=groups.index(group),
                sequences=tuple(members),
                layers=chosen,
                order=_order(chosen),
            )
            for (group, members), chosen in zip(packs, layers, strict=True)
        ),
        why=(
            f"the longest sequence ({max(lengths):,} tokens) does not fit fewer ranks",
            "shorter ones run where a token is cheapest",
        ),
    )


def _step(
    step: int, steps: int, ranks: int, methods: tuple[str, ...], chance: random.Random, lost: bool
) -> tuple[Plan, dict[str, Any], dict[str, Any]]:
    lengths = [_length(chance) for _ in range(4 * ranks)]
    packs = _packs(lengths, ranks, lambda tokens: _choose(tokens, ranks))
    slow = 1.6 if step == 0 else chance.gauss(1.03, 0.03) * (1.35 if chance.random() < 0.03 else 1)
    noise = lambda: slow * chance.gauss(1, 0.01)  # noqa: E731
    predicted = _timeline(packs, lengths, ranks, "predicted", lambda: 1.0)
    measured = _timeline(packs, lengths, ranks, "measured", noise)
    widest = max(_choose(max(lengths), ranks), 1)
    static_packs = _packs(lengths, ranks, lambda _: widest)
    static = _timeline(static_packs, lengths, ranks, "predicted", lambda: 1.0)
    bound = predicted.seconds * (1 - predicted.idle) + 2e-3
    layers = [_layers(step, sum(lengths[i] for i in m), len(g), methods) for g, m in packs]
    plan = _plan(packs, layers, lengths, ranks, predicted.seconds, min(bound, predicted.seconds))
    metric = _metric(
        step, steps, plan, measured, static.seconds, f"{ranks // widest}*cp{widest}", chance
    )
    metric["loss"] = float("nan") if lost else metric["loss"]
    timelines = {"measured": measured, "predicted": predicted, "static": static}
    return plan, metric, {"step": step} | {k: v.to_json() for k, v in timelines.items()}


def _metric(
    step: int,
    steps: int,
    plan: Plan,
    measured: Timeline,
    static_s: float,
    static: str,
    chance: random.Random,
) -> dict[str, Any]:
    lengths, seconds = plan.lengths, measured.seconds
    peak = [0] * plan.devices
    for micro in plan.micro_batches:
        group = plan.pipelines[micro.pipeline].ranks
        for rank in group:
            kept = 220e6 + 1.5e5 * sum(plan.tokens_of(micro)) / len(group)
            peak[rank] = max(peak[rank], round(kept))
    return {
        "step": step,
        "epoch": 0,
        "loss": 4.2 + 4.1 * 0.97 ** (step * 200 / steps) + chance.gauss(0, 0.09),
        "tokens": lengths.total,
        "sequences": len(lengths),
        "longest": lengths.longest,
        "lr": 3e-4 * min(1, (step + 1) / 10),
        "grad_norm": abs(chance.gauss(1, 0.2)),
        "step_s": seconds,
        "tokens_per_s": lengths.total / seconds,
        "idle": measured.idle,
        "mfu": None,
        "strategy": str(plan.strategy),
        "working": plan.working,
        "predicted_s": plan.predicted_s,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "planning_s": abs(chance.gauss(4e-3, 6e-4)),
        "waited_s": abs(chance.gauss(5e-5, 2e-5)),
        "plan_hash": plan.hash[:16],
        "peak_bytes": [round(p * chance.gauss(0.97, 0.01)) for p in peak],
        "predicted_peak_bytes": peak,
        "micro_batches": [
            {
                "ranks": len(plan.pipelines[m.pipeline].ranks),
                "tokens": sum(plan.tokens_of(m)),
                "longest": max(plan.tokens_of(m)),
                "sequences": len(m.sequences),
                "layers": str(m.layers),
                "order": m.order,
            }
            for m in plan.micro_batches
        ],
        "best_static_s": static_s,
        "best_static": static,
        "assignment": [
            [tokens, len(plan.pipelines[m.pipeline].ranks)]
            for m in plan.micro_batches
            for tokens in plan.tokens_of(m)
        ],
    }


def _run_json(
    name: str, corpus: str, ranks: int, seed: int, documents: list[int]
) -> dict[str, Any]:
    ordered = sorted(documents)
    at = lambda share: ordered[int(share * (len(ordered) - 1))]  # noqa: E731
    edges = [round(2 ** (4 + i / 3), 2) for i in range(31)]
    counts = [sum(low <= d < high for d in documents) for low, high in pairwise(edges)]
    return {
        "format": 1,
        "name": name,
        "started": "2026-11-21T07:10:00",
        "headrace": "0.1.0",
        "machine": {
            "host_cpu": "Example 7000",
            "cores": 8,
            "memory_bytes": 64 * 2**30,
            "device": "cpu",
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
        },
        "ranks": ranks,
        "seed": seed,
        "config": {
            "data": {"path": "stories.txt", "context": _CONTEXT},
            "train": {"steps": 40, "lr": 3e-4, "tokens": "16K"},
            "model": {"preset": "llama-tiny"},
        },
        "architecture": _MODEL.to_json(),
        "parameters": 7_400_000,
        "corpus": {
            "name": corpus,
            "documents": len(documents),
            "tokens": sum(documents),
            "median": at(0.5),
            "p90": at(0.9),
            "p99": at(0.99),
            "max": ordered[-1],
            "skipped": 3,
            "context": _CONTEXT,
            "histogram": {"edges": edges, "counts": counts},
        },
        "costs": _costs(ranks, seed),
        "memory": {"capacity_bytes": _CAPACITY},
    }


def _costs(ranks: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed + 1)
    points = []
    for p in _groups(ranks):
        for option in ("none", "full"):
            for part, factor in (("forward", 1.0), ("backward", 2.1 + (option == "full"))):
                for tokens in (256, 512, 1024, 2048, 4096, 8192, 16384):
                    fit = _seconds(tokens, p) * factor / 8
                    points.append(
                        {
                            "p": p,
                            "option": f"{'local' if p == 1 else 'ulysses_z'}"
                            + ("+full" if option == "full" else ""),
                            "part": part,
                            "tokens": tokens,
                            "measured_s": fit * chance.gauss(1, 0.05),
                            "predicted_s": fit,
                        }
                    )
    error = {
        part: {f"p{p} none": {"median": 0.03, "worst": 0.11} for p in _groups(ranks)}
        for part in ("forward", "backward")
    }
    return {"fingerprint": "3f9a1c77", "error": error, "points": points}
