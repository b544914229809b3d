"""ParaDySe (AAAI 2026): its Figure 2, Table 5 and Case Study beside headrace's choice of layers.

Three models of Table 4 on one node of eight A100-80GB, one sequence a step, lengths by the shares
of Table 3 in the paper's order, short to long. By the roofline of eager PyTorch 2.5 with
FlashAttention-2, no memory kept free; nobody has run it.

    alone        all layers by one method, nothing recomputed: the paper's four baselines, and
                 colossal_z, its fifth strategy, which it leaves out: its scores grow with the
                 square of the tokens, and are priced here for each length
    algorithm 1  as printed (memory of layers added), and with the true peak
    exact        the quickest mixture of the four methods that fits
    plan         headrace's planner: any group size, method of each branch, recompute level

What a method or a mixture saves depends on how slow the others are: the paper says "up to", over
the slowest. Its Figure 2 is a picture; numbers of it are those of its text.

Errors of the paper:

* Algorithm 1 as printed does not set ``strategies`` back for each k, so only neighbours mix (the
  published code starts each pair anew, but passes over pairs whose slower half does not fit alone);
  after the break of line 10 its options are empty, and line 29 undoes the early end; line 33,
  smoothing, is blank; and (6) adds what layers need in passing to what they keep, though layers run
  one after the other. The published code averages the peaks of whole models instead, which is less
  than a mixture needs: its peak is that of the layer that needs most.
* Table 3: the shares of GRCh38 add up to 99.1 %.
* Table 5: a set of strategies without UlyssesZ, MegatronCZ or MegatronTS trains 300,032 tokens, the
  whole set 329,728. No mixture holds more than METP everywhere, which is in all of them, so this is
  the spacing of the tried lengths. Likewise 112,128 tokens without METP are less than the 117,248
  of which the 181.22 % of the text are (329,728 / 2.8122), if that is one of the other three.
* Five strategies are "converted into 4-dimensional one-hot encoded features".

examples:
    headrace papers paradyse --quick
    python benchmarks/paper_paradyse.py --lengths 200 --json paradyse.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from claims import Claim, finish, options
from paradyse_models import (
    COLOSSAL_Z,
    DATA,
    DEVICES,
    METHODS,
    MODELS,
    Node,
    Trained,
    lengths_of,
    longest_of,
)
from switching_tables import PAPER as RESET

from headrace.cli.display import tell
from headrace.costs.paradyse import fit_pair, fit_polynomial
from headrace.costs.quadratic import fit_quadratic
from headrace.native.machine import machine_facts

RESULTS = Path(__file__).parent / "results"
COSTS = "roofline of 8 A100-80GB, eager kernels"

SAVED = {("BERT", "GitHubCode"): 0.8929, ("BERT", "GRCh38"): 0.5801}
LONGER = {("GPT", "GitHubCode"): 1.4416, ("GPT", "GRCh38"): 1.8122}
"""Section "Overall Experiment": seconds saved, and sequences longer by, each by up to so much."""

TRAINED = {
    ("BERT", "GitHubCode"): 309 * 1024,
    ("BERT", "GRCh38"): 624 * 1024,
    ("GPT", "GRCh38"): 329_728,
}
"""The longest sequences: of BERT the longest of each data set, by the text; of GPT Table 5."""

ABLATED = {
    "MegatronTS": (300_032, 3173.80 / 2799.45),
    "MegatronCZ": (300_032, 2795.91 / 2799.45),
    "UlyssesZ": (300_032, 2813.13 / 2799.45),
    "METP": (112_128, 1741.99 / 1724.13),
}
"""Table 5: without a strategy, the longest sequence, and seconds over those with all."""

POLYNOMIALS, UNSMOOTHED = 2657.04 / 2622.89, 2800.49 / 2799.45
"""Table 5, likewise without the forests and without smoothing."""

GAMMA = 0.05
"""The smoothing's ratio (section "Ablation Study")."""

_NOISE = 0.03
"""Relative, of one timed sequence, from which cost models are fitted; the paper's is not known."""

_CURVE = tuple(4096 << power for power in range(7))
"""Tokens at which the cumulative seconds are kept."""

_MARGIN = 0.1
"""Share of a device's memory that a first run keeps free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model on a data set, trained in every way."""

    model: str
    data: str
    node: Node
    alone: dict[str, Trained]
    printed: Trained
    peaked: Trained
    exact: Trained
    plan: Trained

    @classmethod
    def of(cls, node: Node, data: str, count: int) -> Cell:
        lengths, exact = lengths_of(data, count), node.longest_exact()
        planned = node.longest_planned()
        return cls(
            model=node.model,
            data=data,
            node=node,
            alone=dict(node.singles(lengths)),
            printed=node.trained(lengths, node.algorithm_1("sum"), exact),
            peaked=node.trained(lengths, node.algorithm_1("peak"), exact),
            exact=node.trained(lengths, node.exact(), exact),
            plan=node.trained(lengths, node.planned(), planned),
        )

    @property
    def where(self) -> str:
        """The cell of the figure."""
        return f"Figure 2, {self.model} on {self.data}"

    def held(self, trained: Trained) -> int:
        """The longest sequence of the data set that is held."""
        return min(trained.longest, longest_of(self.data))

    def most_saved(self, trained: Trained) -> tuple[float, str]:
        """The largest share of a method's seconds that is saved, and the method."""
        return max((trained.saved(each), name) for name, each in self.alone.items())

    @property
    def curves(self) -> dict[str, Any]:
        """Seconds of all sequences up to some length, as the figure has them; None from where one
        does not fit."""
        ways = self.alone | {
            "Algorithm 1 as printed": self.printed,
            "Algorithm 1 with the peak": self.peaked,
            "exact mixture": self.exact,
            "plan": self.plan,
        }
        tokens = [*_CURVE, longest_of(self.data)]
        return {
            "model": self.model,
            "data": self.data,
            "tokens": tokens,
            "longest": {name: way.longest for name, way in ways.items()},
            "seconds": {
                name: [way.until(n) if n <= way.longest else None for n in tokens]
                for name, way in ways.items()
            },
        }

    def bound(self, name: str) -> float:
        """What no plan saves more of a method's seconds: all but its products and attention."""
        other = self.alone[name]
        least = sum(self.node.products_s(n) for n in other.lengths if n <= other.longest)
        return 1 - least / other.until(other.longest)


def simulated(**row: Any) -> Claim:
    """A row that the roofline gives."""
    return Claim(how="simulated", costs=COSTS, **row)


def figure_2(cell: Cell) -> Iterator[Claim]:
    """Longest sequences, then seconds saved."""
    key, where = (cell.model, cell.data), cell.where
    for name, trained in (("exact mixture", cell.exact), ("plan", cell.plan)):
        yield simulated(
            where=where,
            what=f"longest sequence, {name}",
            unit="tokens",
            theirs=TRAINED.get(key),
            ours=cell.held(trained),
            why=_held(cell, trained) if key in TRAINED else "",
        )
    shortest = min(cell.held(each) for each in cell.alone.values())
    for name, trained in (("exact mixture", cell.exact), ("plan", cell.plan)):
        longer = cell.held(trained) / shortest - 1
        if key in LONGER:
            yield simulated(
                where=where,
                what=f"longer than the shortest method alone by, {name}",
                unit="fraction",
                theirs=LONGER[key],
                ours=longer,
                why=f"{cell.held(trained):,} against {shortest:,} tokens",
            )
    yield from seconds_saved(cell)


def seconds_saved(cell: Cell) -> Iterator[Claim]:
    """What is saved of the seconds of single methods, of the sequences that these hold."""
    theirs = SAVED.get((cell.model, cell.data))
    for name, trained in (("exact mixture", cell.exact), ("plan", cell.plan)):
        most, slowest = cell.most_saved(trained)
        each = {method: trained.saved(other) for method, other in cell.alone.items()}
        why = ", ".join(f"{method} {share:.1%}" for method, share in each.items())
        if theirs is not None:
            first = 1 - _first_s(trained) / _first_s(cell.alone[slowest])
            why += (
                f"; of {slowest} no plan saves more than {cell.bound(slowest):.1%} with such "
                f"kernels, the rest being products and attention, which all methods share evenly; "
                f"of the shortest sequence alone {first:.1%} are saved"
            )
        yield simulated(
            where=cell.where,
            what=f"seconds saved by up to, {name}",
            unit="fraction",
            theirs=theirs,
            ours=most,
            why=why,
        )


def _held(cell: Cell, trained: Trained) -> str:
    """What memory holds, whatever the data set; of the methods also with a margin."""
    text = f"memory holds {trained.longest:,}"
    if trained is cell.plan:
        return text
    kept_free = _longest(cell.node, METHODS.values(), memory_margin=_MARGIN)
    return f"{text}, or {kept_free:,} where {_MARGIN:.0%} of it is kept free"


def _longest(node: Node, methods: Iterable[str], **changes: Any) -> int:
    """The longest sequence of the best of some methods alone, with some of the costs changed."""
    costs = node.costs.replace(**changes)
    return max(costs.max_tokens(DEVICES, node.uniform(method), "sharded") for method in methods)


def _first_s(trained: Trained) -> float:
    first = trained.seconds[0]
    assert first is not None, "the shortest sequence fits"
    return first


def over_the_best_method(cells: Sequence[Cell]) -> Iterator[Claim]:
    """Whether a mixture holds what the method with the longest sequence does."""
    for node in {cell.model: cell.node for cell in cells}.values():
        best = _longest(node, METHODS.values())
        yield simulated(
            where=f"section Overall Experiment, {node.model}",
            what="longest sequence over the best method's, exact mixture and plan",
            unit="times",
            theirs=None,
            ours=(node.longest_exact() / best, node.longest_planned() / best),
            why="the paper's mixture slightly trails here" if node.model == "LLaMA" else "",
        )


def _worst(trained: Trained, other: Trained) -> float:
    """The most times another's seconds that a sequence takes."""
    pairs = zip(trained.seconds, other.seconds, strict=True)
    return max(one / best for one, best in pairs if one is not None and best is not None)


def choices(cell: Cell) -> Iterator[Claim]:
    """Algorithm 1, the exact choice and the plan, over the same sequences."""
    for name, trained in (("as printed", cell.printed), ("with the true peak", cell.peaked)):
        yield simulated(
            where=f"Algorithm 1, {cell.model} on {cell.data}",
            what=f"seconds above the exact mixture's, {name}, of all and at worst",
            unit="fraction",
            theirs=None,
            ours=(1 / (1 - cell.exact.saved(trained)) - 1, _worst(trained, cell.exact) - 1),
        )
    over = 1 / (1 - cell.plan.saved(cell.exact))
    yield simulated(
        where=f"Algorithm 1, {cell.model} on {cell.data}",
        what="exact mixture of its strategies, seconds over the plan's",
        unit="times",
        theirs=1.0,
        ours=over,
        why=f"{over:.4f}",
    )


def colossal(node: Node, lengths: Sequence[int]) -> Iterator[Claim]:
    """The fifth strategy."""
    longest = node.longest_by_colossal_z()
    short = [n for n in lengths if n <= longest]
    chosen = [node.quickest_with_colossal_z(n) for n in short]
    used = sum(
        layers is not None and any(COLOSSAL_Z in str(option) for option, _ in layers.counts)
        for layers in chosen
    )
    yield simulated(
        where="section Baselines",
        what=f"{node.model}: longest sequence of ColossalZ alone",
        unit="tokens",
        theirs=None,
        ours=longest,
        why=f"in the best mixture of five of {used} of {len(short)} sequences up to there; the "
        "paper leaves it out of its experiments",
    )


def table_5(cell: Cell) -> Iterator[Claim]:
    """What each strategy adds, of GPT on GRCh38."""
    node = cell.node
    for name, (tokens, over) in ABLATED.items():
        rest = [method for other, method in METHODS.items() if other != name]
        without = node.trained(cell.exact.lengths, node.exact(rest), node.longest_exact(rest))
        yield simulated(
            where=f"Table 5, without {name}",
            what="longest sequence, exact mixture",
            unit="tokens",
            theirs=tokens,
            ours=without.longest,
            why=_memory_of(node, rest) if without.longest < tokens else "",
        )
        yield simulated(
            where=f"Table 5, without {name}",
            what="seconds over those with all strategies, exact mixture",
            unit="times",
            theirs=over,
            ours=1 / (1 - cell.exact.saved(without)),
            why="both mixtures are exact, so the ratio is that of the costs, not of the choice, "
            "and one strategy more never slows them",
        )
    rest = [method for name, method in METHODS.items() if name != "METP"]
    yield simulated(
        where="Table 5, without METP",
        what="longest sequence, plan",
        unit="tokens",
        theirs=ABLATED["METP"][0],
        ours=node.longest_planned(rest),
        why="layers may be computed again",
    )
    learnt = Node.of(cell.model, positions=True)
    yield simulated(
        where="Table 5, all strategies",
        what="longest sequence, plan, with learned positions up to 624K",
        unit="tokens",
        theirs=TRAINED["GPT", "GRCh38"],
        ours=learnt.longest_planned(),
        why="the published code has no positions",
    )


def _memory_of(node: Node, methods: Sequence[str]) -> str:
    """How many tokens other states leave to the best of some methods."""
    halved = _longest(node, methods, state_bytes=node.costs.state_bytes // 2)
    return (
        "16 bytes of states a parameter, fp32 masters and moments; with the 8 that the published "
        f"code reckons with one method holds {halved:,}"
    )


def predicted(cell: Cell, seeds: int) -> Iterator[Claim]:
    """Sequences by the method that a fitted cost model calls quickest: with polynomials alone, with
    forests within the profiled lengths, and with headrace's quadratics."""
    totals = np.mean([_chosen_s(cell, seed) for seed in range(seeds)], axis=0)
    polynomial, hybrid, quadratic, best = (float(each) for each in totals)
    yield simulated(
        where="Table 5, without RF",
        what="seconds by polynomials alone over those by headrace's quadratics",
        unit="times",
        theirs=POLYNOMIALS,
        ours=polynomial / quadratic,
        why=f"over those by forests {polynomial / hybrid:.4f}, by the true seconds, the most there "
        f"is, {polynomial / best:.4f}; fitted to {_NOISE:.0%} of noise, mean of {seeds} seeds",
    )


def _chosen_s(cell: Cell, seed: int) -> tuple[float, float, float, float]:
    """Seconds of all sequences by polynomials, hybrids, quadratics, and the true seconds."""
    generator, node = np.random.default_rng(seed), cell.node
    guesses = list[np.ndarray]()
    truth = list[np.ndarray]()
    lengths = np.array([n for n in cell.exact.lengths if n <= cell.exact.longest])
    for name, method in METHODS.items():
        held = lengths[lengths <= cell.alone[name].longest]
        seconds = np.array([node.step_s(int(n), node.uniform(method)) for n in held])
        noisy = seconds * np.exp(_NOISE * generator.standard_normal(len(held)))
        known = [int(n) for n in held]
        polynomial, _ = fit_polynomial(known, noisy.tolist())
        quadratic, _ = fit_quadratic(known, noisy.tolist())
        pair = fit_pair(known, noisy.tolist())
        found = np.stack([polynomial(held), pair(held), [quadratic((n,)) for n in known], seconds])
        beyond = np.full((len(found), len(lengths) - len(held)), np.inf)
        guesses.append(np.hstack([found, beyond]))
        truth.append(np.hstack([seconds, beyond[0]]))
    chosen = np.stack(guesses).argmin(axis=0)
    real = np.stack(truth)
    totals = [float(real[row, np.arange(len(lengths))].sum()) for row in chosen]
    return totals[0], totals[1], totals[2], totals[3]


def cost_errors() -> Iterator[Claim]:
    """Errors of cost models on lengths held out, measured on one rank of this machine."""
    found, machine = measured_here("costs", ["--ranks", "1", "--lengths", "8", "--longest", "1024"])
    (errors,) = (world["errors"] for world in found["worlds"] if world["ranks"] == 1)
    by = {(e["target"], e["model"], e["where"]): e["median"] for e in errors}
    for where in ("inside", "beyond"):
        pair = [by["forward_s", model, where] for model in ("hybrid", "quadratic")]
        yield Claim(
            where="Equation 9",
            what=f"median error {where} of the profiled lengths: hybrid fitted here, and ours",
            unit="fraction",
            theirs=pair[0],
            ours=pair[1],
            how="measured",
            costs=machine,
            less=True,
            why="seconds of a layer's forward; the paper gives no errors",
        )


def changes(cell: Cell) -> Iterator[Claim]:
    """What a change of method costs."""
    more = ["--ranks", "2", "--restarts", "2", "--methods", "ulysses_z", "megatron_cz"]
    found, machine = measured_here("switching", more)
    (two,) = (world["summary"] for world in found["worlds"] if world["ranks"] == 2)
    switch_s, restart_s = two["change_s"], two["restart_s"]
    yield Claim(
        where="Case Study",
        what="a change of method: their reset, which switching avoids, and ours",
        unit="s",
        theirs=float(RESET["seconds"]),
        ours=switch_s,
        how="measured",
        costs=machine,
        less=True,
        why=f"the paper times no switch; a restart of the small model takes {restart_s:.1f} s here",
    )
    node, gamma = cell.node, {}
    lengths = [n for n in cell.peaked.lengths if n <= cell.peaked.longest]
    for each in (0.0, GAMMA):
        selector = node.selector("peak", each)
        chosen = [selector.select([n]).layers for n in lengths]
        others = sum(a != b for a, b in pairwise(chosen))
        total = sum(node.step_s(n, k) for n, k in zip(lengths, chosen, strict=True))
        gamma[each] = others, total
    (count, total), (fewer, slower) = gamma[0.0], gamma[GAMMA]
    yield simulated(
        where="Table 5, without smoothing",
        what="share of the run that smoothing saves (theirs), that all changes take (ours)",
        unit="fraction",
        theirs=UNSMOOTHED - 1,
        ours=count * switch_s / total,
        less=True,
        why=f"{count} changes; smoothing leaves {fewer} and costs {slower / total - 1:.2%}",
    )


def measured_here(name: str, more: Sequence[str]) -> tuple[dict[str, Any], str]:
    """What a benchmark measured on such a machine, from its results or else by a small run now."""
    facts = machine_facts("cpu")
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    keys = ("host_cpu", "cores", "torch")
    machine = f"{facts['host_cpu']}, {facts['cores']} cores"
    if all(stored["machine"][key] == facts[key] for key in keys):
        return stored, f"{machine}, results/{name}.json"
    tell(f"{name}: stored results are of another machine, measuring")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        script = str(Path(__file__).with_name(f"{name}.py"))
        command = [sys.executable, script, *more, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text()), f"{machine}, now"


def rows(cells: Sequence[Cell], o: argparse.Namespace) -> Iterator[Claim]:
    """All rows, in the order of the paper."""
    for cell in cells:
        yield from figure_2(cell)
    yield from over_the_best_method(cells)
    for node, lengths in {cell.model: (cell.node, cell.exact.lengths) for cell in cells}.values():
        yield from colossal(node, lengths)
    for cell in cells:
        yield from choices(cell)
    ablated = next((cell for cell in cells if (cell.model, cell.data) == ("GPT", "GRCh38")), None)
    if ablated is not None:
        yield from table_5(ablated)
        yield from predicted(ablated, 2 if o.quick else 5)
        yield from changes(ablated)
    yield from cost_errors()


def main(arguments: Sequence[str]) -> int:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--lengths", type=int, help="sequences of a data set (300, quick 24)")
    o = parser.parse_args(arguments)
    count = o.lengths or (24 if o.quick else 300)
    if count < 8:
        parser.error("--lengths: at least 8, or cost models cannot be fitted")
    cells = list[Cell]()
    for model in o.models:
        node = Node.of(model)
        for data in o.data:
            tell(f"{model} on {data}")
            cells.append(Cell.of(node, data, count))
    return finish("ParaDySe", list(rows(cells, o)), o, cells=[cell.curves for cell in cells])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
