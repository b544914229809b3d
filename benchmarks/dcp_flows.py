"""Steps of Transformer-1D and -2D in the paper's data flow, and on batches that are given.

In the paper's flow a sampler fills the devices and what fills them is the step
(headrace.planners.drawn_iterations). A pool of samples is drawn once through; of its iterations,
evenly spaced ones are simulated. Those after the first 95 % of the samples are left out, as the
last ones of an epoch leave ranks without work, and a longer epoch has as few of them.

Beside these flows headrace plans the very samples that another flow chose for each of its
iterations, and random batches of as many tokens. The iterations that are simulated hold other
samples than the pool, shorter ones in one flow and longer ones in another. So speed is work per
second, where a sample's work is what it takes one rank that computes nothing again; times the
pool's tokens over its work this is the tokens per second of the whole pool.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from dcp_problems import PLANNERS, drawn_lengths, lengths_of, problem_of
from numpy.typing import NDArray

import headrace as hr
from headrace.cli.display import tell
from headrace.planners.draw_bias import DrawBias, draw_bias
from headrace.planners.drawn_iterations import DrawnIteration, IterationDrawer
from headrace.spec.draw_options import DrawOptions

__all__ = ["Flow", "bucket_idle", "flow", "given_rows", "pool_of", "random_batches", "replanned"]

TRAINED = 0.95
RANDOM_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What steps of one kind come to.

    Attributes:
        model: ``1d`` or ``2d``.
        devices: Their number.
        data: The data set.
        name: The planner or sampler.
        tokens_per_s: Of all devices together, for samples as those of the pool.
        idle: The mean share of the devices' time in which they wait.
        step_tokens: Mean tokens of a step.
        planning_s: The median of a plan's processor time, once the problem is warm.
        bound: Tokens per second that no plan of these samples beats, with the recompute levels and
            group sizes that it may use; of a flow that draws, those of its settings if no rank ever
            waited and gradients took no time.
        pool: The samples that it draws from.
        drawn: The iterations that were simulated.
        bias: How far the iterations of the whole epoch are from random batches.
    """

    model: str
    devices: int
    data: str
    name: str
    tokens_per_s: float
    idle: float
    step_tokens: float
    planning_s: float
    bound: float
    pool: NDArray[np.int64] | None = None
    drawn: tuple[DrawnIteration, ...] = ()
    bias: DrawBias | None = None

    def row(self) -> dict[str, Any]:
        """Its numbers as JSON."""
        row: dict[str, Any] = {
            "model": self.model,
            "devices": self.devices,
            "data": self.data,
            "planner": self.name,
            "tokens_per_s": self.tokens_per_s,
            "idle": self.idle,
            "step_tokens": self.step_tokens,
            "planning_s": self.planning_s,
        }
        if self.bias is not None:
            row["bias"] = {
                "distance": self.bias.distance,
                "random_distance": self.bias.random_distance,
                "step_tokens": list(self.bias.tokens),
                "step_tokens_deviation": self.bias.tokens_deviation,
                "buckets": [
                    {"longest": b.longest, "samples": b.samples, "position": b.position}
                    for b in self.bias.buckets
                ],
            }
        return row


@cache
def pool_of(data: str, tokens: int) -> NDArray[np.int64]:
    """The lengths of a data set of about so many tokens."""
    return np.array(lengths_of(data, tokens, 0).tokens, dtype=np.int64)


@cache
def _work_of_tokens(model: str, devices: int) -> tuple[float, float]:
    """Seconds (a, b) of one rank for a sample of l tokens, a l^2 + b l, without recompute."""
    groups = problem_of("headrace", devices, model).pricing.groups("replicated")
    a, b, _ = next(group for group in groups if group.devices == 1).frontier.rows[0]
    return a, b


def _work(model: str, devices: int, lengths: NDArray[np.int64]) -> float:
    """The work of some samples in seconds of one rank."""
    a, b = _work_of_tokens(model, devices)
    values = lengths.astype(np.float64)
    return float(((a * values + b) * values).sum())


def powers_of_two(problem: hr.Problem) -> hr.Problem:
    """The same with groups of powers of two ranks only, as the paper's."""
    sizes = tuple(p for p in problem.group_sizes if p & (p - 1) == 0)
    return problem.replace(sizes=sizes)


def flow(model: str, devices: int, data: str, name: str, *, tokens: int, most: int) -> Flow:
    """One of the paper's flows (``bucket``, ``best bucket``, ``inter``, ``intra``) through a pool
    of ``tokens``; at most so many of its iterations are simulated."""
    tell(f"{model}, {devices} devices, {data}: {name} draws its samples")
    pool = pool_of(data, tokens)
    problem = powers_of_two(problem_of("intra" if name == "intra" else "inter", devices, model))
    if name == "bucket":
        return _flow(model, data, name, problem, pool, DrawOptions(flow="bucket"), most)
    if name == "best bucket":
        tried = [
            _flow(model, data, name, problem, pool, DrawOptions(flow="bucket", width=p), most)
            for p in problem.group_sizes
            if _holds(problem, p, int(pool.max()))
        ]
        return max(tried, key=lambda one: one.tokens_per_s)
    return _flow(model, data, name, problem, pool, DrawOptions(), most)


def _holds(problem: hr.Problem, p: int, longest: int) -> bool:
    """Whether a group of p ranks holds a sample."""
    groups = problem.pricing.groups("replicated")
    return any(g.devices == p and g.most_tokens >= longest for g in groups)


def _flow(
    model: str,
    data: str,
    name: str,
    problem: hr.Problem,
    pool: NDArray[np.int64],
    options: DrawOptions,
    most: int,
) -> Flow:
    """A flow through a pool, and what it comes to."""
    drawer = IterationDrawer(problem, pool, options)
    epoch = list(drawer.epoch())
    early = [
        one for one in epoch if one.after.epoch == 0 and sum(one.after.taken) <= TRAINED * len(pool)
    ]
    chosen = _spaced(early or epoch[:1], most)
    busy_s = sum(
        setting.width * setting.mean_s * count / setting.batch
        for setting, count in zip(drawer.settings, _counts(pool, drawer), strict=True)
    )
    found = _timed(model, data, name, problem, chosen, [[one] for one in chosen], pool)
    bias = draw_bias([one.lengths for one in epoch])
    bound = float(pool.sum()) * problem.devices / busy_s
    return replace(found, pool=pool, drawn=tuple(chosen), bias=bias, bound=bound)


def _counts(pool: NDArray[np.int64], drawer: IterationDrawer) -> list[int]:
    """Samples of each bucket of a drawer."""
    edges = np.searchsorted(np.sort(pool), drawer.borders, side="right")
    return np.diff(np.append(0, edges)).tolist()


def _spaced(items: Sequence[DrawnIteration], most: int) -> list[DrawnIteration]:
    """At most so many of some iterations, evenly spaced."""
    at = np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).astype(int))
    return [items[i] for i in at]


def _timed(
    model: str,
    data: str,
    name: str,
    problem: hr.Problem,
    batches: Sequence[DrawnIteration | hr.Lengths],
    generators: Sequence[Any],
    pool: NDArray[np.int64] | None = None,
) -> Flow:
    """What the simulated steps of some batches come to, planned by what ``generators`` has for
    each; with ``pool``, for samples as those of the pool."""
    seconds, bound_s, idle, total, work = 0.0, 0.0, list[float](), 0, 0.0
    planning = list[float]()
    for batch, own in zip(batches, generators, strict=True):
        lengths = batch if isinstance(batch, hr.Lengths) else batch.lengths
        start_s = time.process_time()
        plan = hr.plan(lengths, problem, generators=own)
        planning.append(time.process_time() - start_s)
        seconds, total = seconds + plan.predicted_s, total + lengths.total
        bound_s += plan.lower_bound_s
        work += _work(model, problem.devices, np.array(lengths.tokens))
        idle.append(hr.simulate(plan, problem.model).idle)
    of_pool = 1.0
    if pool is not None:
        of_pool = float(pool.sum()) / _work(model, problem.devices, pool) * work / total
    return Flow(
        model=model,
        devices=problem.devices,
        data=data,
        name=name,
        tokens_per_s=of_pool * total / seconds,
        bound=of_pool * total / bound_s,
        idle=statistics.mean(idle),
        step_tokens=total / len(batches),
        planning_s=statistics.median(planning),
    )


def replanned(drawn: Flow) -> Flow:
    """Headrace on the very samples of each iteration that a flow drew."""
    tell(f"{drawn.model}, {drawn.devices} devices, {drawn.data}: headrace, {drawn.name}'s samples")
    problem, name = problem_of("headrace", drawn.devices, drawn.model), f"headrace, {drawn.name}'s"
    nothing = [None] * len(drawn.drawn)
    return _timed(drawn.model, drawn.data, name, problem, drawn.drawn, nothing, drawn.pool)


def random_batches(drawn: Flow, *, most: int = RANDOM_BATCHES) -> Flow:
    """Headrace on random batches of as many tokens as a flow's iterations have on average."""
    tell(f"{drawn.model}, {drawn.devices} devices, {drawn.data}: headrace, random batches")
    problem = problem_of("headrace", drawn.devices, drawn.model)
    seeds = range(1, 1 + min(most, len(drawn.drawn)))
    batches = [lengths_of(drawn.data, int(drawn.step_tokens), seed) for seed in seeds]
    nothing = [None] * len(batches)
    return _timed(
        drawn.model, drawn.data, "headrace, random", problem, batches, nothing, drawn.pool
    )


def given_rows(
    model: str, devices: int, data: Sequence[str], budgets: Sequence[int], steps: int
) -> Iterator[Flow]:
    """Every planner on the same given batches, for each data set and tokens of a step."""
    for name in data:
        for budget in budgets:
            batches = [lengths_of(name, budget, seed) for seed in range(steps)]
            for planner in PLANNERS:
                tell(f"{model}, {devices} devices, {name}, {budget:,} tokens: {planner}")
                problem = problem_of(planner, devices, model)
                found = _timed(model, name, planner, problem, batches, [None] * steps)
                yield replace(found, step_tokens=float(budget))


def bucket_idle(sets: int, devices: int, *, iterations: int) -> list[tuple[float, float]]:
    """Idle shares of bucket parallel and of headrace on the same samples, on so many data sets:
    exponents from 0.5 to 3.5, the longest sample from 16 Ki to 128 Ki tokens."""
    found = list[tuple[float, float]]()
    rng = np.random.default_rng(0)
    problem, own = powers_of_two(problem_of("inter", devices)), problem_of("headrace", devices)
    for number in range(sets):
        exponent, longest = rng.uniform(0.5, 3.5), int(2 ** rng.uniform(14, 17))
        tell(f"bucket parallel on data set {number + 1} of {sets}")
        pool = drawn_lengths(exponent, 16 << 20, number, longest=longest)
        drawer = IterationDrawer(problem, pool, DrawOptions(flow="bucket"))
        drawn = [drawer.draw() for _ in range(iterations)]
        theirs = _timed("1d", "", "bucket", problem, drawn, [[one] for one in drawn])
        ours = _timed("1d", "", "headrace", own, drawn, [None] * iterations)
        found.append((theirs.idle, ours.idle))
    return found
