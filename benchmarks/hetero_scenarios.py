"""Strategies of several schemes beside what others do (Hydraulis, Figure 13).

Everything is predicted from the coefficients that Hydraulis' authors measured: a step is the
longest pipeline's sum_j t_j + (P - 1) max_j t_j, propagation alone.

From the paper (Hydraulis, section 8, appendices G and H): models and clusters (7B on 8 and 16
A800, 13B on 16 and 32, 32B on 32 and 64), CommonCrawl and GitHub, 100K tokens an iteration unless
told, contexts of 16K (F1) and 32K (F2, F3), longer sequences truncated to the context, static
strategies that must hold the context, HotSPa's ranges of lengths and the seconds of its changes.
Chosen here, because the paper gives pictures only: F1 and F2 have 100K tokens an iteration, F3 has
200K; lengths are drawn from the laws ``commoncrawl-like`` and ``github-code`` (ParaDySe's table of
that corpus; Hydraulis has none); 20 iterations, not 100. The scenarios on A100-40GB with 8K are not
in the paper, and count for no goal.

    megatron-like   packs as long as the context, dealt out evenly; the best strategy of one scheme
                    that holds the context, and the quicker of packing as they come and first-fit
                    decreasing (appendix A.2)
    deepspeed-like  the same with one-stage schemes only: data x sequence parallel with sharded
                    states; no cost of Ulysses' all-to-alls is published, those of tensor parallel
                    stand in for them, so it is never quicker than megatron-like
    hotspa-like     strategies of one scheme in turn, changes included, for the paper's ranges: to
                    4K and 16K (F1), to 4K, 16K and 32K (F2, F3)
    switching       the same with the ranges that are best here, often a single one: then it is
    static          one strategy of one scheme that holds the context, dispatched by cost
    token-balance   the same, dispatched by tokens
    hydraulis       the paper's planner as its authors' code has it: a new strategy of several
                    schemes in every iteration
    hydraulis-tuned the same idea without what that code gives away (headrace.planners.hydraulis):
                    constants shared by the tokens of a micro-batch, strategies of one scheme among
                    its candidates, the longest sequence first; in no iteration behind ``static``
    headrace        ours, the same kind of plan

The first three are the paper's baselines, configured as there. The next three are no published
system but what is left of Hydraulis and ours without their strategies; ours dispatches for them,
as for hotspa-like (HotSPa does not balance by cost). What is static is tuned on the very
iterations that count. No scheme of the cost files splits sequences (context parallel), which the
paper's static strategies of 32B use; tp16 takes its place. The section ``context`` derives such
schemes, of 2 and 4 ranks, for everybody: nobody has measured them.

Five numbers sum up a scenario:

    over best              mean step of the best of the paper's baselines over ours
    over homogeneous       the same for the best of all six that have strategies of one scheme
    over hydraulis         mean step of the paper's planner over ours, with the same costs
    over hydraulis-tuned   the same for its stronger form
    of bound               the share of what the bound allows: the mean of the lower bounds of all
                           plans of one strategy an iteration, over ours; ``at_most``, in JSON, is
                           what plans at that bound would have over the best of the paper's
                           baselines
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, geometric_mean, pstdev
from typing import Any

import numpy as np
from given_strategies import dispatched, table_of
from numpy.typing import NDArray
from rich.table import Table

from headrace.cli.display import tell
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.data.distributions import Distribution, LogNormal
from headrace.data.drawn_lengths import PRESETS, draw_batches
from headrace.engine.planned_iterations import OWN, plan_iterations
from headrace.planners.homogeneous import best_scheme, by_length
from headrace.planners.switching import switch_s
from headrace.planning import Problem
from headrace.planning.batch import PriceTable
from headrace.planning.schedule import Assignment, placed
from headrace.planning.side_by_side import Counts
from headrace.planning.static import static_schedule
from headrace.units import percent_text

__all__ = [
    "BASELINES",
    "WORKLOADS",
    "Make",
    "Scenario",
    "best_static",
    "by_equation_1",
    "context_scenarios",
    "dealt",
    "holding",
    "in_turn",
    "max_length_ways",
    "only",
    "packed_to_context",
    "scenario_list",
    "scenario_tables",
    "scenarios",
]

HERE = Path(__file__).parent
GOAL = 1.32
PAPER = "Hydraulis, Figure 13: 1.32 to 2.66 times the throughput of the best baseline"
BASELINES = ("megatron-like", "deepspeed-like", "hotspa-like")
STRONGER = ("switching", "static", "token-balance")
RANGES = {
    16_384: (4096, 16_384),
    32_768: (4096, 16_384, 32_768),
    8192: (4096, 8192),
    65_536: (4096, 16_384, 65_536),
    131_072: (4096, 16_384, 131_072),
}
"""Upper ends of the ranges of lengths that run in turn, by context: those of 16K and 32K by
Hydraulis, appendix G; beyond 32K three as well, as it says that more do not pay."""
THEIRS = ("hydraulis", "hydraulis-tuned")
PLANNERS = (*THEIRS, OWN)
RATIOS = {
    "over_best": "over best",
    "over_homogeneous": "over homogeneous",
    "over_hydraulis": "over hydraulis",
    "over_hydraulis_tuned": "over hydraulis-tuned",
    "of_bound": "of bound",
}
"""The numbers that sum up a scenario, by key."""

CLUSTERS = (("7b", (8, 16)), ("13b", (16, 32)), ("32b", (32, 64)))
CORPORA = {"CommonCrawl": "commoncrawl-like", "GitHub": "github-code"}
WORKLOADS = {"F1": (16_384, 100_000), "F2": (32_768, 100_000), "F3": (32_768, 200_000)}
"""Context, and tokens of an iteration."""

DEGREES = (2, 4)
"""Context-parallel ranks of derived schemes."""

_CLOSE = 1e-9

Make = Callable[[PriceTable, int], Assignment | None]
"""What a batch takes on pipelines of one scheme of its table; None where they do not hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Lengths of a law, longer ones truncated to the context."""

    law: Distribution
    longest: int

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        return np.minimum(self.law.draw(count, generator), self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model on a cluster, and what it is trained on."""

    costs: str
    devices: int
    corpus: str
    workload: str
    context: int
    tokens: int

    def __str__(self) -> str:
        model = self.costs.removeprefix("hydraulis-")
        return f"{self.corpus} {model} on {self.devices}, {self.workload}"

    def costs_of(self) -> PipelineCosts:
        return PipelineCosts.load(HERE / "published" / f"{self.costs}.json")

    def lengths(self, iterations: int, seed: int) -> list[list[int]]:
        law = PRESETS[CORPORA[self.corpus]]
        if isinstance(law, LogNormal) and law.max < self.context:
            law = replace(law, max=self.context)
        law = Cut(law=law, longest=self.context)
        return [list(own.tokens) for own in draw_batches(law, self.tokens, iterations, seed)]


def scenario_list(*, quick: bool) -> list[Scenario]:
    """All of Figure 13's grid and one on smaller devices, or four of them."""
    found = [
        Scenario(
            costs=f"hydraulis-{model}",
            devices=devices,
            corpus=corpus,
            workload=name,
            context=context,
            tokens=tokens,
        )
        for model, clusters in CLUSTERS
        for devices in clusters
        for corpus in CORPORA
        for name, (context, tokens) in WORKLOADS.items()
    ]
    found += [
        Scenario(
            costs="hydraulis-7b-a100",
            devices=8,
            corpus=corpus,
            workload="8K",
            context=8192,
            tokens=100_000,
        )
        for corpus in CORPORA
    ]
    return [found[0], found[15], found[23], found[31]] if quick else found


def holding(costs: PipelineCosts, devices: int, context: int) -> PipelineCosts:
    """The schemes that hold a sequence as long as the context."""
    kept = [cost for cost in costs.schemes if (cost.most_tokens(devices) or 0) >= context]
    return replace(costs, schemes=tuple(kept))


def only(table: PriceTable, k: int) -> Counts:
    """The strategy of as many pipelines of scheme k as the devices have room for."""
    return tuple(table.devices // table.width[k] if j == k else 0 for j in range(len(table)))


def best_static(tables: Sequence[PriceTable], *ways: Make) -> tuple[str, list[Assignment]]:
    """The strategy of one scheme with the least seconds over all batches, and its schedules, in
    the best of some ways."""
    found = [(*best_scheme(tables, make), make) for make in ways]
    _, k, make = min(found, key=lambda one: one[0])
    assert k is not None, "some scheme holds the context"
    made = [schedule for table in tables if (schedule := make(table, k)) is not None]
    return f"{tables[0].devices // tables[0].width[k]}*{tables[0].schemes[k]}", made


def dealt(table: PriceTable, k: int, context: int) -> Assignment | None:
    """Packs of up to ``context`` tokens by first-fit decreasing, dealt out evenly to pipelines of
    scheme k; None where it does not hold them."""
    if context > table.schemes[k].most_tokens:
        return None
    packs, count = _first_fit(table.tokens, range(len(table.tokens)), context), only(table, k)[k]
    ranks = [own for _, own, _ in placed(table, [(k, []) for _ in range(count)])]
    bins = [(k, own, packs[q::count]) for q, own in enumerate(ranks)]
    return Assignment.of_bins(table, bins, "dealt")


def packed_to_context(table: PriceTable, k: int, context: int) -> Assignment | None:
    """Sequences dispatched by cost, then packed to the context by first-fit decreasing."""
    found = by_equation_1(table, k)
    if found is None or context > table.schemes[k].most_tokens:
        return None
    bins = [
        (k, ranks, _first_fit(table.tokens, sorted(members), context))
        for _, ranks, members in found.groups
    ]
    return Assignment.of_bins(table, bins, "packed to the context")


def _first_fit(tokens: Sequence[int], members: Sequence[int], context: int) -> list[list[int]]:
    parts, room = list[list[int]](), list[int]()
    for i in members:
        at = next((j for j, left in enumerate(room) if left >= tokens[i]), len(parts))
        if at == len(parts):
            parts.append([])
            room.append(context)
        parts[at].append(i)
        room[at] -= tokens[i]
    return parts


def by_equation_1(table: PriceTable, k: int) -> Assignment | None:
    """Sequences dispatched by cost and packed by equation 1."""
    return dispatched(table, only(table, k))


def max_length_ways(context: int) -> tuple[Make, Make]:
    """How packs of max-length packing may be made."""
    return (
        lambda table, k: by_length(table, k, context),
        lambda table, k: dealt(table, k, context),
    )


def steps_of(
    scenario: Scenario, iterations: int, seed: int, more: float | None = None
) -> dict[str, dict[str, Any]]:
    """Seconds of every iteration, and the strategies, by who plans."""
    costs, devices, context = scenario.costs_of(), scenario.devices, scenario.context
    if more is not None:
        costs = costs.with_context(DEGREES, more)
    lengths = scenario.lengths(iterations, seed)
    static = holding(costs, devices, context)
    staged = [cost for cost in static.schemes if cost.scheme.pipeline == 1]
    found = dict[str, dict[str, Any]]()
    for name, own in zip(
        BASELINES[:2], (static, replace(static, schemes=tuple(staged))), strict=True
    ):
        problem = Problem(costs=own, devices=devices)
        tables = [table_of(problem, tokens) for tokens in lengths]
        strategy, made = best_static(tables, *max_length_ways(context))
        found[name] = {"steps_s": [one.seconds for one in made], "strategies": [strategy]}
    found["hotspa-like"] = in_turn(costs, devices, lengths, RANGES[context])
    # What runs in turn must hold the context too: one more iteration, which does not count.
    for name, own, given in (
        ("switching", costs, [*lengths, [context]]),
        *((name, static, lengths) for name in STRONGER[1:]),
        *((name, costs, lengths) for name in PLANNERS),
    ):
        problem = Problem(costs=own, devices=devices)
        planned = plan_iterations(problem, given, planner=name, seed=seed)[: len(lengths)]
        found[name] = {
            "steps_s": [item.plan.predicted_s for item in planned],
            "strategies": list(dict.fromkeys(item.strategy for item in planned)),
        }
        if name == OWN:
            found[name]["bounds_s"] = [item.plan.lower_bound_s for item in planned]
    return found


def in_turn(
    costs: PipelineCosts, devices: int, lengths: Sequence[Sequence[int]], ends: Sequence[int]
) -> dict[str, Any]:
    """One strategy of one scheme for each range of lengths, the best that holds it; those that
    have sequences in an iteration run one after the other."""
    steps, phases = [0.0] * len(lengths), [0] * len(lengths)
    strategies = list[str]()
    for low, high in pairwise((0, *ends)):
        kept = Problem(costs=holding(costs, devices, high), devices=devices)
        parts = [[x for x in tokens if low < x <= high] for tokens in lengths]
        with_some = [i for i, part in enumerate(parts) if part]
        if not with_some:
            continue
        tables = [table_of(kept, parts[i]) for i in with_some]
        strategy, made = best_static(tables, static_schedule)
        strategies.append(strategy)
        for i, schedule in zip(with_some, made, strict=True):
            steps[i] += schedule.seconds
            phases[i] += 1
    change_s = switch_s(Problem(costs=costs, devices=devices).parameters)
    return {
        "steps_s": [s + change_s * (n - 1) for s, n in zip(steps, phases, strict=True)],
        "strategies": strategies,
        "change_s": change_s,
    }


def scenarios(o: argparse.Namespace) -> dict[str, Any]:
    """The section of Figure 13."""
    return _scenarios(o, None)


def context_scenarios(o: argparse.Namespace) -> dict[str, Any]:
    """The same where sequences may be split over ranks."""
    return _scenarios(o, o.more) | {"degrees": list(DEGREES), "more": o.more}


def _scenarios(o: argparse.Namespace, more: float | None) -> dict[str, Any]:
    rows = list[dict[str, Any]]()
    for scenario in scenario_list(quick=o.quick):
        tell(f"scenario {scenario}{', context parallel' if more is not None else ''}")
        found = steps_of(scenario, o.iterations, o.seed, more)
        rows.append(row_of(scenario, found))
    return {"paper": PAPER, "iterations": o.iterations, "rows": rows, **summary(rows)}


def row_of(scenario: Scenario, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A scenario with what all planners make of it, and the numbers that sum it up."""
    mean = {name: fmean(own["steps_s"]) for name, own in found.items()}
    ours, bounds = found[OWN]["steps_s"], found[OWN]["bounds_s"]
    best = min(BASELINES, key=mean.__getitem__)
    over_best = mean[best] / mean[OWN]
    over_homogeneous = min(mean[name] for name in (*BASELINES, *STRONGER)) / mean[OWN]
    return {
        "scenario": str(scenario),
        "in_paper": scenario.workload in WORKLOADS,
        "costs": scenario.costs,
        "devices": scenario.devices,
        "corpus": scenario.corpus,
        "workload": scenario.workload,
        "context": scenario.context,
        "tokens": scenario.tokens,
        "mean_s": mean,
        "deviation_s": {n: pstdev(x["steps_s"]) for n, x in found.items()},
        "planned": found,
        "best_baseline": best,
        "over_best": over_best,
        "over_homogeneous": over_homogeneous,
        "over_hydraulis": mean["hydraulis"] / mean[OWN],
        "over_hydraulis_tuned": mean["hydraulis-tuned"] / mean[OWN],
        "of_bound": fmean(bounds) / mean[OWN],
        "at_most": mean[best] / fmean(bounds),
        "goal_met": over_best >= GOAL,
        "goal_met_over_homogeneous": over_homogeneous >= GOAL,
        "behind": {
            name: sum(
                own > theirs * (1 + _CLOSE)
                for own, theirs in zip(ours, found[name]["steps_s"], strict=True)
            )
            for name in THEIRS
        },
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """In how many of the paper's scenarios goals are met, and the least, most and geometric mean of
    every number over them; the rest counts for no goal."""
    own = [row for row in rows if row["in_paper"]]
    ratios = {key: [row[key] for row in own] for key in RATIOS}
    return {
        "goal": GOAL,
        "scenarios": len(own),
        "met": sum(row["goal_met"] for row in own),
        "out_of_reach": sum(row["at_most"] < GOAL for row in own),
        "met_over_homogeneous": sum(row["goal_met_over_homogeneous"] for row in own),
        "ratios": {
            key: {"least": min(x), "most": max(x), "geometric_mean": geometric_mean(x)}
            for key, x in ratios.items()
        },
        "iterations_behind": {n: sum(row["behind"][n] for row in own) for n in THEIRS},
        "scenarios_behind": {
            n: sum(row["mean_s"][OWN] > row["mean_s"][n] * (1 + _CLOSE) for row in own)
            for n in THEIRS
        },
        "behind_static": {
            n: sum(row["mean_s"][n] > row["mean_s"]["static"] * (1 + _CLOSE) for row in own)
            for n in PLANNERS
        },
    }


def scenario_tables(found: dict[str, Any]) -> list[Table]:
    """Mean steps and ratios, and in how many scenarios goals are met."""
    many, title = found["scenarios"], "scenarios: mean step in seconds"
    if "degrees" in found:
        title += f", with context parallelism of {found['degrees']}, tokens {found['more']:+.0%}"
    ranges = "; ".join(
        f"{text}: {own['least']:.2f} to {own['most']:.2f}, geometric mean "
        f"{own['geometric_mean']:.3f}"
        for text, own in zip(RATIOS.values(), found["ratios"].values(), strict=True)
    )
    behind = ", ".join(f"{name} {count}" for name, count in found["behind_static"].items())
    slower = ", ".join(f"{name} {count}" for name, count in found["iterations_behind"].items())
    caption = (
        f"{ranges}\n"
        f"goal {found['goal']} over best met in {found['met']} of {many} scenarios of the paper, "
        f"out of reach by the bound in {found['out_of_reach']}; over homogeneous met in "
        f"{found['met_over_homogeneous']}\n"
        f"scenarios with a longer mean step than static: {behind}\n"
        f"iterations of {many * found['iterations']} in which ours is behind: {slower}"
    )
    table = Table(
        title=title, title_justify="left", caption=caption, caption_justify="left", pad_edge=False
    )
    table.add_column("scenario", no_wrap=True)
    names = (*BASELINES, *STRONGER, *PLANNERS)
    for name in (*names, *RATIOS.values()):
        title = name.replace("-", " ").replace(" ", "\n")
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("goal", no_wrap=True)
    for row in found["rows"]:
        ratios = [f"{row[key]:.2f}" for key in RATIOS if key != "of_bound"]
        table.add_row(
            row["scenario"],
            *(f"{row['mean_s'][name]:.2f}" for name in names),
            *ratios,
            percent_text(row["of_bound"]),
            "met" if row["goal_met"] else "not met",
        )
    return [table]
