"""Data-Centric Parallel's claims beside headrace, by simulation, and a real loop on two ranks.

The paper's method is a sampler: group sizes, batches and accumulation steps decide which samples an
iteration holds. So it is held beside headrace in two ways, always with the same costs and devices.

    its own flow   bucket parallel, inter and intra draw their iterations; headrace plans the very
                   samples that intra drew for each, and random batches of as many tokens
                   (dcp_flows.py)
    given batches  all planners get the same batches at several sizes of a step, as a loop has them
                   whose batch is fixed by the recipe; there inter and intra must cut what is given
                   into rounds (dcp_problems.py says which planners)

The paper has numbers in its text alone; its figures, its data sets and G_min and G_max are pictures
or missing. Published numbers stand in ``theirs``; where ``theirs`` is of the method as built here,
the row says so. Rows of its flow are of buckets whose longest sample is 2^(1/4) of the shortest and
of 2 to 5 accumulation steps, which serve it best.

The real loop (--loop, dcp_loop.py) trains a small Llama of transformers with each planner.

examples:
    python benchmarks/paper_dcp.py --quick
    python benchmarks/paper_dcp.py --json benchmarks/results/papers/dcp.json --loop
"""

from __future__ import annotations

import ast
import difflib
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from claims import Claim, finish, options
from dcp_flows import Flow, bucket_idle, flow, given_rows, random_batches, replanned
from dcp_loop import looped
from dcp_problems import (
    EXPONENTS,
    FULL,
    LEVELS,
    MEMORY_BYTES,
    METHODS,
    MODEL,
    priced_by,
    problem_of,
)
from rich.console import Console
from rich.table import Table

import headrace as hr
from headrace.planners.drawn_iterations import IterationDrawer
from headrace.spec.draw_options import DrawOptions
from headrace.spec.hardware import Hardware
from headrace.units import percent_text

KI, MI = 1 << 10, 1 << 20
DEVICES = 32
SPEEDUPS = {"1d": 2.70, "2d": 1.68}
"""Inter over bucket parallel at most, by the paper's text."""
INTRA = 2.88
"""Intra over bucket parallel at most, on either model."""
GAIN = (1.20, 1.25)
"""Intra over inter below 200 thousand tokens, by the paper's text."""
BELOW = 200_000
LINES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything is run.

    Attributes:
        models: Models of the flows.
        data: Data sets of the flows.
        pool: Tokens of a data set.
        most: Simulated iterations of each flow.
        scaled: Numbers of devices of the weak scaling, and their data set.
        budgets: Tokens of given batches.
        given: Data sets of given batches.
        steps: Given batches of each size.
        sets: Data sets of Figure 4.
        lengths: Lengths of Figures 5 and 10.
    """

    models: tuple[str, ...] = ("1d", "2d")
    data: tuple[str, ...] = tuple(EXPONENTS)
    pool: int = 512 << 20
    most: int = 12
    scaled: tuple[int, ...] = (8, 32, 128)
    budgets: tuple[int, ...] = (512 << 10, 2 << 20, 4 << 20)
    given: tuple[str, ...] = (*EXPONENTS, "corpus")
    steps: int = 3
    sets: int = 140
    lengths: tuple[int, ...] = (4 * KI, 8 * KI, 16 * KI, 32 * KI, 64 * KI, 128 * KI, 192 * KI)


QUICK = Sizes(
    data=("balanced",),
    pool=64 << 20,
    most=3,
    scaled=(8, 32),
    budgets=(1 << 20,),
    given=("balanced",),
    steps=1,
    sets=6,
    lengths=(8 * KI, 64 * KI),
)

Key = tuple[str, int, str, str]
Flows = dict[Key, Flow]


def drawn_flows(sizes: Sizes) -> Flows:
    """All flows by model, devices, data set and name."""
    found: Flows = {}
    for model in sizes.models:
        for data in sizes.data:
            for name in ("bucket", "best bucket", "inter", "intra"):
                found[model, DEVICES, data, name] = flow(
                    model, DEVICES, data, name, tokens=sizes.pool, most=sizes.most
                )
            intra = found[model, DEVICES, data, "intra"]
            found[model, DEVICES, data, "headrace"] = replanned(intra)
            found[model, DEVICES, data, "random"] = random_batches(intra)
        for devices in sizes.scaled:
            if devices == DEVICES:
                continue
            for name in ("bucket", "intra"):
                found[model, devices, "balanced", name] = flow(
                    model, devices, "balanced", name, tokens=sizes.pool, most=sizes.most // 2
                )
            intra = found[model, devices, "balanced", "intra"]
            found[model, devices, "balanced", "headrace"] = replanned(intra)
    return found


def figure_4(sizes: Sizes) -> Iterator[Claim]:
    """Idle time of bucket parallel on many data sets."""
    pairs = bucket_idle(sizes.sets, DEVICES, iterations=2)
    theirs, ours = (sorted(own) for own in zip(*pairs, strict=True))
    where, costs = f"Figure 4, {sizes.sets} data sets", priced_by("1d")
    yield Claim(
        where=where,
        what="idle share of bucket parallel, least to most",
        unit="fraction",
        theirs=None,
        ours=(theirs[0], theirs[-1]),
        how="simulated",
        costs=costs,
        less=True,
        why="the paper's data sets are a picture; ours have exponents from 0.5 to 3.5 and a "
        "longest sample from 16 Ki to 128 Ki tokens",
    )
    yield Claim(
        where=where,
        what="mean idle share on the same samples, bucket parallel and headrace",
        unit="fraction",
        theirs=statistics.mean(theirs),
        ours=statistics.mean(ours),
        how="simulated",
        costs=costs,
        less=True,
        why="theirs as built here",
    )


def figure_5(sizes: Sizes, flows: Flows) -> Iterator[Claim]:
    """The share of communication in a layer's time by group size, and in steps."""
    costs, free = _costs(), _costs(_without_links())
    for p in (2, 4, 8, 16, 32):
        shares = [_sent_share(costs, free, p, length) for length in sizes.lengths]
        yield Claim(
            where="Figure 5",
            what=f"communication of {p} ranks, {max(sizes.lengths) // KI} to "
            f"{min(sizes.lengths) // KI} Ki tokens",
            unit="fraction",
            theirs=None,
            ours=(min(shares), max(shares)),
            how="simulated",
            costs=priced_by("1d"),
            less=True,
            why="the paper has a picture",
        )
    one = flows["1d", DEVICES, sizes.data[0], "bucket"]
    yield Claim(
        where=f"Figure 5, {sizes.data[0]}",
        what="seconds for each Mi tokens that sending adds to the steps of bucket parallel, and of "
        "headrace on its samples",
        unit="s",
        theirs=_sent_s(one, drawn=True),
        ours=_sent_s(one, drawn=False),
        how="simulated",
        costs=priced_by("1d"),
        less=True,
        why="theirs as built here",
    )


def _costs(hardware: Hardware | str = "h200", *, positions: int = 1 << 18) -> hr.CostModel:
    """Costs of Transformer-1D with positions for all lengths of the figures."""
    model = replace(MODEL, positions=positions)
    return hr.costs.roofline(model, hardware, devices=DEVICES, memory_bytes=MEMORY_BYTES)


def _without_links() -> Hardware:
    """An H200 among which bytes travel in no time."""
    machine = Hardware.parse("h200")
    inside = replace(machine.inside, bytes_per_s=1e30, latency_s=0.0)
    across = replace(machine.across, bytes_per_s=1e30, latency_s=0.0)
    return replace(machine, inside=inside, across=across)


def _sent_share(costs: hr.CostModel, free: hr.CostModel, p: int, length: int) -> float:
    """Share of a layer's forward and backward that a group of p ranks spends on sending."""
    real_s, ideal_s = (
        (own.options[p]["ulysses_z"].forward + own.options[p]["ulysses_z"].backward)([length])
        for own in (costs, free)
    )
    return 1 - ideal_s / real_s


def _sent_s(one: Flow, *, drawn: bool) -> float:
    """Seconds for each Mi tokens of a flow, or of headrace on its samples, that would not be there
    if nothing had to be sent."""
    problem = problem_of("inter" if drawn else "headrace", DEVICES)
    free, sent_s, tokens = _costs(_without_links(), positions=MODEL.positions), 0.0, 0
    for iteration in one.drawn[:3]:
        plan = hr.plan(iteration.lengths, problem, generators=[iteration] if drawn else None)
        sent_s += plan.predicted_s - hr.simulate(plan, free).seconds
        tokens += plan.lengths.total
    return sent_s / tokens * MI


def figure_8(sizes: Sizes, flows: Flows) -> Iterator[Claim]:
    """Throughput and idle time on three data sets."""
    for model in sizes.models:
        of = {data: _cell(flows, model, data) for data in sizes.data}
        yield from _most(model, of)
        for data, cell in of.items():
            yield from _cells(model, data, cell)


def _cell(flows: Flows, model: str, data: str, devices: int = DEVICES) -> dict[str, Flow]:
    """The flows of one model and data set by name."""
    return {key[3]: one for key, one in flows.items() if key[:3] == (model, devices, data)}


def _most(model: str, of: dict[str, dict[str, Flow]]) -> Iterator[Claim]:
    """The speedups over bucket parallel that the text has as the most of all data sets."""
    for name, theirs in (("inter", SPEEDUPS[model]), ("intra", INTRA)):
        if name == "intra" and model == "2d":
            continue  # the text does not say of which model the most is; it is of the quicker one
        for ours in (name, "headrace"):
            ratios = {
                data: cell[ours].tokens_per_s / cell["bucket"].tokens_per_s
                for data, cell in of.items()
            }
            bounds = {
                data: cell[ours].bound / cell["bucket"].tokens_per_s for data, cell in of.items()
            }
            data = max(ratios, key=ratios.__getitem__)
            yield Claim(
                where=f"Figure 8, {model.upper()}",
                what=f"{name} over bucket parallel, at most",
                unit="times",
                theirs=theirs,
                ours=ratios[data],
                how="simulated",
                costs=priced_by(model),
                why=f"of {data}; " + _reached(name, ours, ratios, bounds, of),
            )


def _reached(
    name: str,
    ours: str,
    ratios: dict[str, float],
    bounds: dict[str, float],
    of: dict[str, dict[str, Flow]],
) -> str:
    """Who reached a speedup, and how much more there is to reach on each data set."""
    if ours == name:
        text = "as built here; if no rank ever waited and gradients took no time it would be"
    else:
        text = "headrace on the samples that intra drew; no plan of them is above"
    each = ", ".join(
        f"{data} {bounds[data]:.2f} (bucket parallel idles {percent_text(cell['bucket'].idle)})"
        for data, cell in of.items()
    )
    return f"{text} {each}; the paper's data sets are pictures"


def _cells(model: str, data: str, cell: dict[str, Flow]) -> Iterator[Claim]:
    """Speeds of one model and data set in the paper's flow."""
    where, costs = f"Figure 8, {model.upper()}, {data}", priced_by(model)
    bucket, headrace = cell["bucket"], cell["headrace"]
    for name in ("best bucket", "inter", "intra"):
        one = cell[name]
        of = f", {one.drawn[0].launches[0].ranks[-1] + 1} ranks a group" if "best" in name else ""
        speed = one.tokens_per_s / bucket.tokens_per_s
        yield Claim(
            where=where,
            what=f"tokens/s of headrace on intra's samples beside {name} in its own flow",
            unit="tokens",
            theirs=one.tokens_per_s,
            ours=headrace.tokens_per_s,
            how="simulated",
            costs=costs,
            why=f"theirs as built here: {speed:.2f} times bucket parallel{of}, "
            f"{one.step_tokens / MI:.1f} Mi tokens a step",
        )
    yield Claim(
        where=where,
        what="tokens/s of headrace on random batches of as many tokens beside intra's own flow",
        unit="tokens",
        theirs=cell["intra"].tokens_per_s,
        ours=cell["random"].tokens_per_s,
        how="simulated",
        costs=costs,
        why="theirs as built here",
    )
    yield Claim(
        where=where,
        what="idle share of headrace on intra's samples beside intra",
        unit="fraction",
        theirs=cell["intra"].idle,
        ours=headrace.idle,
        how="simulated",
        costs=costs,
        less=True,
        why=f"theirs as built here; bucket parallel {percent_text(bucket.idle)}, inter "
        f"{percent_text(cell['inter'].idle)}",
    )


def figure_9(sizes: Sizes, flows: Flows) -> Iterator[Claim]:
    """Tokens per second and device that remain with more devices."""
    least = min(sizes.scaled)
    for model in sizes.models:
        for devices in sizes.scaled:
            if devices == least:
                continue
            kept = {
                name: flows[model, devices, "balanced", name].tokens_per_s
                * least
                / (flows[model, least, "balanced", name].tokens_per_s * devices)
                for name in ("bucket", "intra", "headrace")
            }
            own = {many: _cell(flows, model, "balanced", many) for many in (least, devices)}
            over = {
                many: one["headrace"].tokens_per_s / one["intra"].tokens_per_s
                for many, one in own.items()
            }
            near = {
                many: percent_text(one["headrace"].tokens_per_s / one["headrace"].bound)
                for many, one in own.items()
            }
            yield Claim(
                where=f"Figure 9, {model.upper()}, balanced",
                what=f"tokens/s of a device that {devices} keep of those of {least}, intra and "
                "headrace on its samples",
                unit="fraction",
                theirs=kept["intra"],
                ours=kept["headrace"],
                how="simulated",
                costs=priced_by(model),
                why=f"theirs as built here; bucket parallel keeps {percent_text(kept['bucket'])}; "
                f"headrace has {over[least]:.2f} times intra's tokens/s on {least} and "
                f"{over[devices]:.2f} times on {devices}, {near[least]} and {near[devices]} of "
                "what no plan beats",
            )


def figure_10(sizes: Sizes) -> Iterator[Claim]:
    """What less recompute gains, by length."""
    gains = {length: _gain(length) for length in sizes.lengths if length < BELOW}
    found = tuple(gains.values())
    per_length = ", ".join(f"{length // KI} Ki {gain:.2f}" for length, gain in gains.items())
    yield Claim(
        where="Figure 10, 1D",
        what="intra over inter below 200 thousand tokens",
        unit="times",
        theirs=GAIN,
        ours=(min(found), max(found)),
        how="simulated",
        costs=priced_by("1d"),
        why=f"{per_length}; the best group size and batch of each; a forward computed again is a "
        "quarter of the step, so 1.33 is the most that leaving it out gains",
    )


def _gain(length: int) -> float:
    """Tokens per device-second of a bucket of samples of one length with as little recompute as
    memory allows, over those with all."""
    costs = _costs()
    device_s = list[float]()
    for levels in (FULL, LEVELS):
        problem = hr.Problem(
            costs=costs,
            planner="dcp",
            recompute=levels,
            holding=("replicated",),
            stages=False,
            methods=METHODS["1d"],
            sizes=(1, 2, 4, 8, 16, 32),
        )
        (setting,) = IterationDrawer(problem, [length] * 512, DrawOptions()).settings
        device_s.append(setting.width * setting.mean_s / setting.batch)
    return device_s[0] / device_s[1]


def own_lines() -> Iterator[Claim]:
    """Lines that a loop adds to its twin for one device."""
    folder = Path(__file__).parents[1] / "examples"
    for name in ("attach_plain", "attach_transformers", "attach_accelerate"):
        added = _added(folder / f"{name}_single.py", folder / f"{name}.py")
        yield Claim(
            where="Appendix D",
            what=f"lines that examples/{name}.py adds to its twin for one device",
            unit="lines",
            theirs=float(LINES),
            ours=float(added),
            how="counted",
            costs="a line for each statement",
            less=True,
            why="the model stays as it is; theirs changes its layers and exchanges too",
        )


def _added(before: Path, after: Path) -> int:
    """Statements of one file that another has not, without its text."""
    old, new = (
        ast.unparse(ast.Module(body=ast.parse(file.read_text()).body[1:], type_ignores=[]))
        for file in (before, after)
    )
    changes = difflib.ndiff(old.splitlines(), new.splitlines())
    return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in changes)


def given(flows: Sequence[Flow]) -> Iterator[Claim]:
    """Headrace beside the best of the others on the same given batches."""
    cells: dict[tuple[str, str, float], dict[str, Flow]] = {}
    for one in flows:
        cells.setdefault((one.model, one.data, one.step_tokens), {})[one.name] = one
    for (model, data, budget), cell in cells.items():
        best = max((own for own in cell.values() if own.name != "headrace"), key=_speed)
        yield Claim(
            where=f"given batches of {budget / MI:.1f} Mi tokens, {model.upper()}, {data}",
            what=f"tokens/s beside the best of the others, {best.name}",
            unit="tokens",
            theirs=best.tokens_per_s,
            ours=cell["headrace"].tokens_per_s,
            how="simulated",
            costs=priced_by(model),
            why="theirs as built here; over bucket parallel: "
            + ", ".join(
                f"{name} {own.tokens_per_s / cell['bucket'].tokens_per_s:.2f}"
                for name, own in cell.items()
                if name != "bucket"
            ),
        )


def _speed(one: Flow) -> float:
    return one.tokens_per_s


def show_bias(flows: Flows) -> None:
    """Print how far drawn iterations are from random batches."""
    table = Table(box=None, pad_edge=False, title="samples of drawn iterations")
    titles = ("model", "devices", "data", "flow", "Mi tokens a step", "deviation", "distance")
    for title in (*titles, "of random batches", "mean places of buckets"):
        table.add_column(title, justify="left" if title in titles[:4] else "right")
    for (model, devices, data, name), one in flows.items():
        if one.bias is None:
            continue
        often = [b.position for b in one.bias.buckets if b.samples >= _OFTEN]
        places = f"{min(often, default=inf):.2f} to {max(often, default=-inf):.2f}"
        table.add_row(
            model,
            str(devices),
            data,
            name,
            " to ".join(f"{tokens / MI:.1f}" for tokens in one.bias.tokens),
            percent_text(one.bias.tokens_deviation),
            f"{one.bias.distance:.3f}",
            f"{one.bias.random_distance:.3f}",
            places if often else "",
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


_OFTEN = 200
"""Samples of a bucket from which on its mean place in the epoch is shown: of 200 at random it is
off by 0.02."""


def main(arguments: Sequence[str]) -> int:
    parser = options(__doc__)
    parser.add_argument("--loop", action="store_true", help="train on two ranks here too")
    o = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sizes = QUICK if o.quick else Sizes()
    flows = drawn_flows(sizes)
    batches = [
        one
        for model in sizes.models
        for one in given_rows(model, DEVICES, sizes.given, sizes.budgets, sizes.steps)
    ]
    claims = [
        *figure_4(sizes),
        *figure_5(sizes, flows),
        *figure_8(sizes, flows),
        *figure_9(sizes, flows),
        *figure_10(sizes),
        *own_lines(),
        *given(batches),
    ]
    show_bias(flows)
    more: dict[str, Any] = {
        "flows": [one.row() for one in flows.values()],
        "given": [one.row() for one in batches],
    }
    if o.loop:
        more["loop"] = looped(12)
    return finish("Data-Centric Parallel", claims, o, **more)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
