"""Where the seconds of an iteration go (Hydraulis, Table 1), with what moves computed exactly.

The paper's 32B on 64 A800 in nodes of 8, CommonCrawl, 32K. It does not say how many tokens Table 1
has an iteration; its appendix F gives the same 5.5 s for 200K, so 200K it is. The model is theirs
in layers, width and vocabulary; heads (64) and feed-forward (17,920) are chosen to make 32B.

P, propagation   predicted: homogeneous is the best static strategy that holds the context, with
                 two-stage assignment; heterogeneous is our plan of each iteration. (Theirs,
                 tp8-cp2, has no published costs; what it moves is computed beside.)
O, optimization  0.02 s, theirs.
O-P              parameters W are stored in N parts, one a device. Before the propagation a device
                 pulls the rows that it works with, after it it pushes their gradients back, 2 bytes
                 a parameter both ways. Appendix B.1: V_recv <= W / TP for W of the device's stage,
                 V_send = W / N x M for M devices that read the part. Here both are summed over the
                 weight table by intersecting intervals of rows. Homogeneous: the parts lie within
                 the rows that their owner works with, so pulling is an all-gather and pushing a
                 reduce-scatter. Heterogeneous: parts are cut regardless of the strategy.

    T = max over devices of max(in, out) / 400 GB/s inside a node, and over
        devices of max(in, out) / 200 GB/s between nodes (``a device``), or
        nodes of max(in, out) of their devices together / 200 GB/s (``a node``)

Both readings are given: appendix B.2 has 200 GB/s for a device, which is what eight cards of
200 Gbit/s give a whole node. T has no latencies, conversions and copies in it, and no other traffic
slows it down. Without overlap O-P is 2 T. With overlap (section 5.3, Figure 11), arrivals being
even over T in the order of a stage's layers: in the first stage layer i waits for its rows and for
layer i - 1 of the first micro-batch,

    e_0 = 0,  e_i = max(e_(i-1), T x share of the bytes up to layer i) + f / layers,

so e - f is what is not hidden; in stage s all rows must be there after s f. Pushing is the same
backwards, with the backward of the last micro-batch; f is a third of a micro-batch, the backward
two thirds. O-P is what the longest pipeline takes with that beyond P.

Appendix B.2: a layer is hidden if a micro-batch has at least TP x F / B tokens. The paper computes
F / B with F = 19.5 TFLOPS, the device's rate in fp32; in bf16 it has 312 TFLOPS. Both are counted,
for both readings of B.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from hetero_scenarios import WORKLOADS, Scenario, holding
from numpy.typing import NDArray
from rich.table import Table

from headrace.cli.display import tell
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.engine.planned_iterations import OWN, plan_iterations
from headrace.layouts import Partition, Rows, group_shards, link, split_rows, storage_partition
from headrace.planning import Problem
from headrace.spec.architecture import Architecture, WeightSpec, buckets
from headrace.spec.plan import Pipeline
from headrace.spec.strategy import Scheme, Stage

__all__ = ["Links", "Moved", "breakdown", "breakdown_tables", "exposed_s", "moved", "placed"]

PAPER = {
    "homogeneous": {"P": 6.78, "O": 0.02, "O-P": 1.11, "E2E": 7.91},
    "without overlap": {"P": 4.29, "O": 0.02, "O-P": 1.71, "E2E": 6.02},
    "with overlap": {"P": 4.29, "O": 0.02, "O-P": 1.18, "E2E": 5.49},
}
OPTIMIZATION_S = 0.02
FLOPS = {"19.5 TFLOPS": 19.5e12, "312 TFLOPS": 312e12}
HEADS, FFN = 64, 17_920
THEIRS = "tp8-cp2"
"""What the paper's homogeneous strategy is made of (Table 3: four of them)."""
_BYTES = 2
_FORWARD = 1 / 3

Storage = Literal["aligned", "even"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bytes a second; rank r is of node r // ``node``. ``shared``: what is between nodes is one
    link of a node, else each device has one."""

    node: int = 8
    inside: float = 400e9
    between: float = 200e9
    shared: bool = False

    def seconds(self, moved: Moved) -> float:
        """Of a pull or a push."""
        inside = np.maximum(moved.received[0], moved.sent[0]).max() / self.inside
        received, sent = (self._of_links(side[1]) for side in (moved.received, moved.sent))
        return float(max(inside, np.maximum(received, sent).max() / self.between))

    def _of_links(self, of_ranks: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self.shared:
            return of_ranks
        return np.add.reduceat(of_ranks, range(0, len(of_ranks), self.node))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes of a pull, each an array [2, ranks]: inside nodes, between them. A push is the same
    the other way."""

    received: NDArray[np.float64]
    sent: NDArray[np.float64]


def placed(schemes: Sequence[Scheme]) -> tuple[Pipeline, ...]:
    """Pipelines on neighbouring ranks, in this order."""
    pipelines, start = list[Pipeline](), 0
    for scheme in schemes:
        ranks = tuple(range(start, start + scheme.devices))
        pipelines.append(Pipeline(scheme=scheme, ranks=ranks))
        start += scheme.devices
    return tuple(pipelines)


def moved(
    architecture: Architecture,
    pipelines: Sequence[Pipeline],
    ranks: int,
    node: int,
    storage: Storage,
) -> Moved:
    """What every rank receives and sends when all pipelines pull, by intersecting what it works
    with and what the others store. Layers that lie alike are computed once."""
    stages = [
        (stage, own.scheme.tensor) for own in pipelines for stage in own.stages(architecture.layers)
    ]
    alike = defaultdict[tuple[Any, ...], list[tuple[WeightSpec, ...]]](list)
    for number, weights in enumerate(buckets(architecture)):
        users = tuple(i for i, (stage, _) in enumerate(stages) if number in stage.buckets)
        alike[users, tuple(weight.shape for weight in weights)].append(weights)
    received, sent = np.zeros((2, ranks)), np.zeros((2, ranks))
    for same in alike.values():
        for weight in same[0]:
            readers = _readers(weight, stages, ranks)
            owners = _aligned(readers) if storage == "aligned" else storage_partition(weight, ranks)
            for piece in link(owners, readers):
                if piece.owner != piece.reader:
                    count = len(piece.rows) * weight.row_elements * _BYTES * len(same)
                    far = int(piece.owner // node != piece.reader // node)
                    received[far, piece.reader] += count
                    sent[far, piece.owner] += count
    return Moved(received=received, sent=sent)


def _readers(weight: WeightSpec, stages: Sequence[tuple[Stage, int]], ranks: int) -> Partition:
    parts = [Rows(0, 0)] * ranks
    for stage, tensor in stages:
        if weight.used_in(stage.buckets):
            shards = group_shards(weight, tensor)
            for member, rank in enumerate(stage.ranks):
                parts[rank] = shards[member % tensor]
    return Partition(rows=weight.rows, parts=tuple(parts))


def _aligned(readers: Partition) -> Partition:
    """Storage of a homogeneous strategy: ranks that work with the same rows store a part of them
    each."""
    alike = defaultdict[Rows, list[int]](list)
    for rank, rows in enumerate(readers.parts):
        if len(rows):
            alike[rows].append(rank)
    parts = [Rows(0, 0)] * len(readers.parts)
    for rows, ranks in alike.items():
        for rank, own in zip(ranks, split_rows(len(rows), len(ranks)), strict=True):
            parts[rank] = Rows(rows.start + own.start, rows.start + own.stop)
    return Partition(rows=readers.rows, parts=tuple(parts))


def exposed_s(transfer_s: float, shares: Sequence[Sequence[float]], part_s: float) -> float:
    """What pulling adds to a pipeline. ``shares[s]``: bytes of each bucket of stage s that holds
    layers, ``part_s``: the forward of the first micro-batch on a stage. For pushing, the backward
    of the last one."""
    first, total = shares[0], sum(shares[0])
    end = arrived = 0.0
    for share in first:
        arrived += share
        end = max(end, transfer_s * arrived / total) + part_s / len(first)
    late = [transfer_s - stage * part_s for stage in range(1, len(shares))]
    return max(end - part_s, *late, 0.0)


def layer_shares(architecture: Architecture, pipeline: Pipeline) -> list[list[float]]:
    """Bytes of each layer of each stage; the embedding's count with the first layer's, those of
    the end with the last one's."""
    sizes = [sum(float(w.elements) for w in weights) for weights in buckets(architecture)]
    sizes[1] += sizes[0]
    sizes[-2] += sizes[-1]
    stages = pipeline.stages(architecture.layers)
    return [sizes[stage.start + 1 : stage.stop + 1] for stage in stages]


def architecture_of(costs: PipelineCosts) -> Architecture:
    """The model of the cost file, with heads and feed-forward chosen."""
    facts = costs.facts["architecture"]
    return Architecture(
        layers=facts["layers"],
        hidden=facts["hidden"],
        heads=HEADS,
        kv_heads=HEADS,
        ffn=FFN,
        vocabulary=facts["vocabulary"],
        tied=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Used:
    """A pipeline of one iteration: its scheme, seconds and the tokens of its micro-batches."""

    scheme: str
    seconds: float
    parts: tuple[tuple[int, ...], ...]


def breakdown(o: argparse.Namespace) -> dict[str, Any]:
    """The section of Table 1."""
    context, tokens = WORKLOADS["F3"]
    scenario = Scenario(
        costs="hydraulis-32b",
        devices=64,
        corpus="CommonCrawl",
        workload="F3",
        context=context,
        tokens=tokens,
    )
    tell(f"breakdown {scenario}")
    costs, lengths = scenario.costs_of(), scenario.lengths(o.iterations, o.seed)
    architecture = architecture_of(costs)
    roomy = holding(costs, scenario.devices, scenario.context)
    static = plans_of(roomy, scenario.devices, lengths, "static", o.seed)
    dynamic = plans_of(costs, scenario.devices, lengths, OWN, o.seed)
    memo = dict[tuple[Any, ...], Moved]()

    def moved_by(plan: Sequence[_Used], storage: Storage) -> tuple[tuple[Pipeline, ...], Moved]:
        schemes = [Scheme.parse(used.scheme) for used in plan]
        pipelines, key = placed(schemes), (storage, *schemes)
        if key not in memo:
            tell(f"what moves, {len(schemes)} pipelines, {storage} parts")
            memo[key] = moved(architecture, pipelines, scenario.devices, Links().node, storage)
        return pipelines, memo[key]

    readings, theirs_s = dict[str, Any](), dict[str, float]()
    theirs = moved(
        architecture, placed([Scheme.parse(THEIRS)] * 4), scenario.devices, Links().node, "aligned"
    )
    for name, links in (("a device", Links()), ("a node", Links(shared=True))):
        theirs_s[name] = 2 * links.seconds(theirs)
        rows: dict[str, list[tuple[float, float]]] = {key: [] for key in PAPER}
        for plan in static:
            _, pulled = moved_by(plan, "aligned")
            rows["homogeneous"].append((_longest_s(plan), 2 * links.seconds(pulled)))
        for plan in dynamic:
            pipelines, pulled = moved_by(plan, "even")
            transfer_s, longest_s = links.seconds(pulled), _longest_s(plan)
            rows["without overlap"].append((longest_s, 2 * transfer_s))
            end_s = max(
                used.seconds + _not_hidden_s(costs, architecture, pipeline, used, transfer_s)
                for used, pipeline in zip(plan, pipelines, strict=True)
            )
            rows["with overlap"].append((longest_s, end_s - longest_s))
        readings[name] = {key: _means(own) for key, own in rows.items()}
    homogeneous, mixed = (
        moved_by(static[0], "aligned")[1],
        [moved_by(plan, "even")[1] for plan in dynamic],
    )
    most = {"homogeneous": _most(homogeneous), "heterogeneous": fmean(map(_most, mixed))}
    weights_bytes = _BYTES * sum(w.elements for own in buckets(architecture) for w in own)
    return {
        "paper": PAPER,
        "scenario": str(scenario),
        "iterations": o.iterations,
        "strategies": {
            "homogeneous": _text(static[0]),
            "heterogeneous": sorted({_text(plan) for plan in dynamic}),
        },
        "weights_bytes": weights_bytes,
        "most_bytes": most,
        "readings": readings,
        "their_static": {"strategy": f"4*{THEIRS}", "most_bytes": _most(theirs), "O-P": theirs_s},
        "paper_bytes_per_s": {
            "homogeneous": 2 * _most(theirs) / PAPER["homogeneous"]["O-P"],
            "heterogeneous": 2 * most["heterogeneous"] / PAPER["without overlap"]["O-P"],
        },
        "enough_tokens": enough_tokens(dynamic),
    }


def plans_of(
    costs: PipelineCosts, devices: int, lengths: Sequence[Sequence[int]], planner: str, seed: int
) -> list[list[_Used]]:
    """A planner's pipelines of every iteration, largest first; those without work pull
    nothing."""
    by_scheme = {cost.scheme: cost for cost in costs.schemes}
    plans, problem = list[list[_Used]](), Problem(costs=costs, devices=devices)
    for item in plan_iterations(problem, lengths, planner=planner, seed=seed):
        used = list[_Used]()
        for number, pipeline in enumerate(item.plan.pipelines):
            cost = by_scheme[pipeline.scheme]
            parts = tuple(
                item.plan.tokens_of(micro)
                for micro in item.plan.micro_batches
                if micro.pipeline == number
            )
            each_s = [cost.micro_batch_s(part) for part in parts]
            seconds = sum(each_s) + (pipeline.scheme.pipeline - 1) * max(each_s)
            used.append(_Used(scheme=cost.name, seconds=seconds, parts=parts))
        plans.append(sorted(used, key=lambda own: (-Scheme.parse(own.scheme).devices, own.scheme)))
    return plans


def enough_tokens(plans: Sequence[Sequence[_Used]]) -> dict[str, float]:
    """The part of first micro-batches that have the tokens of appendix B.2, by F and B."""
    firsts = [
        (sum(used.parts[0]), Scheme.parse(used.scheme).tensor) for plan in plans for used in plan
    ]
    rates = {"a device": Links().between, "a node": Links().between / Links().node}
    return {
        f"{name}, {reading}": fmean(tokens >= tensor * flops / rate for tokens, tensor in firsts)
        for name, flops in FLOPS.items()
        for reading, rate in rates.items()
    }


def _not_hidden_s(
    costs: PipelineCosts,
    architecture: Architecture,
    pipeline: Pipeline,
    used: _Used,
    transfer_s: float,
) -> float:
    cost = next(cost for cost in costs.schemes if cost.name == used.scheme)
    shares = layer_shares(architecture, pipeline)
    first_s, last_s = (cost.micro_batch_s(used.parts[at]) for at in (0, -1))
    pull_s = exposed_s(transfer_s, shares, first_s * _FORWARD)
    backwards = [own[::-1] for own in shares]
    return pull_s + exposed_s(transfer_s, backwards, last_s * (1 - _FORWARD))


def _longest_s(plan: Sequence[_Used]) -> float:
    return max(used.seconds for used in plan)


def _most(of: Moved) -> float:
    return float(max(of.received.sum(axis=0).max(), of.sent.sum(axis=0).max()))


def _text(plan: Sequence[_Used]) -> str:
    names = [used.scheme for used in plan]
    return " + ".join(f"{names.count(name)}*{name}" for name in dict.fromkeys(names))


def _means(rows: Sequence[tuple[float, float]]) -> dict[str, float]:
    propagation, between = (fmean(row[i] for row in rows) for i in (0, 1))
    return {
        "P": propagation,
        "O": OPTIMIZATION_S,
        "O-P": between,
        "E2E": propagation + OPTIMIZATION_S + between,
    }


def breakdown_tables(found: Mapping[str, Any]) -> list[Table]:
    """Seconds beside the paper's, by reading of the link between nodes."""
    most, rates, theirs = found["most_bytes"], found["paper_bytes_per_s"], found["their_static"]
    met = "; ".join(f"{name}: {100 * part:.0f} %" for name, part in found["enough_tokens"].items())
    caption = "\n".join(
        [
            f"{found['weights_bytes'] / 1e9:.1f} GB of parameters; a device moves at most "
            f"{most['homogeneous'] / 1e9:.2f} GB (homogeneous, "
            f"{found['strategies']['homogeneous']}), {most['heterogeneous'] / 1e9:.2f} GB "
            "(heterogeneous, mean), each way",
            f"theirs, {theirs['strategy']}: {theirs['most_bytes'] / 1e9:.2f} GB each way, O-P "
            + ", ".join(f"{s:.3f} s ({name})" for name, s in theirs["O-P"].items()),
            "over the paper's O-P, theirs and heterogeneous, a device moves "
            f"{rates['homogeneous'] / 1e9:.1f} and {rates['heterogeneous'] / 1e9:.1f} GB/s",
            f"first micro-batches with the tokens of appendix B.2: {met}",
        ]
    )
    table = Table(
        title="breakdown: seconds of an iteration",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    table.add_column("200 GB/s are of", no_wrap=True)
    table.add_column("")
    for title in PAPER:
        table.add_column(title, justify="right")
    for name, columns in {**found["readings"], "paper, measured": found["paper"]}.items():
        for part in ("P", "O", "O-P", "E2E"):
            base = columns["homogeneous"][part]
            table.add_row(
                name if part == "P" else "",
                part,
                *(f"{own[part]:.3f} ({base / own[part]:.2f}x)" for own in columns.values()),
            )
        table.add_section()
    return [table]
