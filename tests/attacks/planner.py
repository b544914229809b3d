"""Random problems: plans are valid, never below their bound, never behind a static plan, and behind
other planners' by a search's luck at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from attacks.attack import Attack, Case, Outcome
from headrace.costs import FORMULA_METHODS, CostModel, Speeds, synthetic_costs
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import InfeasiblePlan, ProgramError
from headrace.planners import BASELINES, PLANNERS
from headrace.planning import Problem, plan
from headrace.planning.batch import SortedBatch
from headrace.planning.formula_source import bounded, formula_table
from headrace.planning.wave_bounds import wave_bound_s
from headrace.simulator import peak_bytes, step_s
from headrace.spec import Lengths, Plan, check_programs, compile_plan
from headrace.units import GIB
from planning.pipeline_worlds import published, tiny_world
from planning.worlds import log_normal, statics

__all__ = ["PLANNER"]

Rng = np.random.Generator

_ROUNDING = 1e-9
_LUCK = 0.02


@contextmanager
def _begin(folder: Path) -> Iterator[Case]:
    yield _case


def _case(rng: Rng) -> Outcome:
    draw = (_of_model, _of_groups, _of_pipelines, _of_published)[int(rng.integers(4))]
    problem, lengths = draw(rng)
    seed = int(rng.integers(4))
    try:
        made = plan(problem, lengths, seed=seed, generators=PLANNERS["adaptive"])
    except InfeasiblePlan as error:
        others = _others(problem, lengths, seed)
        words = f"{error}; but {others} hold it" if others else str(error)
        return Outcome(verdict="infeasible", survived=not others, words=words)
    wrong, others = _wrong(problem, made), _others(problem, lengths, seed)
    wrong += _bounds(problem, made)
    behind = max((made.predicted_s / seconds - 1 for seconds in others.values()), default=0.0)
    quicker = [
        f"{name} is quicker: {seconds:.9g} s, {made.predicted_s:.9g} s"
        for name, seconds in others.items()
        if made.predicted_s > seconds * (1 + (_ROUNDING if "static" in name else _LUCK))
    ]
    verdict = "invalid" if wrong else "behind" if quicker else "planned"
    told = "; ".join([*wrong, *quicker])
    words = f"{told}\n{draw.__name__} {problem} {lengths}"[:1500] if told else ""
    return Outcome(verdict=verdict, survived=not told, error=max(0.0, behind), words=words)


def _wrong(problem: Problem, made: Plan) -> list[str]:
    """What no plan may be."""
    wrong = []
    held = Counter(i for micro in made.micro_batches for i in micro.sequences)
    if held != Counter(range(len(made.lengths))):
        wrong.append("sequences are missing or doubled")
    if made.lower_bound_s > made.predicted_s * (1 + _ROUNDING):
        wrong.append(f"the bound {made.lower_bound_s} s is above the plan's {made.predicted_s} s")
    costs = problem.costs
    if made.semantics == "free" and isinstance(costs, CostModel):
        if max(peak_bytes(made, costs)) > costs.capacity_bytes:
            wrong.append("memory is exceeded")
        if abs(made.predicted_s - step_s(made, costs)) > _ROUNDING * made.predicted_s:
            wrong.append("the simulator says otherwise")
        try:
            buckets = costs.shape.bucket_count
            check_programs(compile_plan(made, buckets), made, buckets)
        except ProgramError as error:
            wrong.append(f"its programs are refused: {error}")
    return wrong


def _bounds(problem: Problem, made: Plan) -> list[str]:
    """Bounds by the formula above the plan, as what it says of its bound is never above it."""
    costs, limit_s = problem.costs, made.predicted_s * (1 + _ROUNDING)
    if isinstance(costs, CostModel):
        if made.semantics == "free":
            return []
        limit_s = limit_s / costs.scale - costs.exchange_s.update_s
    table = formula_table(problem, SortedBatch.of(made.lengths))
    found = {"bound": bounded(table).seconds}
    if made.semantics == "lockstep":
        found["bound of waves"] = wave_bound_s(table, 0.0, 3 * limit_s)
    return [f"the {name} is {seconds} s" for name, seconds in found.items() if seconds > limit_s]


def _others(problem: Problem, lengths: Lengths, seed: int) -> dict[str, float]:
    """The seconds of all that others plan, those that draw with the same seed."""
    if isinstance(problem.costs, CostModel):
        return {f"static {made.strategy}": made.predicted_s for made in statics(problem, lengths)}
    try:
        table = formula_table(problem, SortedBatch.of(lengths))
    except InfeasiblePlan:
        return {}
    return {
        name: found.seconds
        for name, baseline in BASELINES.items()
        if baseline.staged == isinstance(problem.costs, PipelineCosts)
        if (found := baseline.schedules(table, problem.semantics, seed)) is not None
        if found.semantics == problem.semantics
        if not found.phases  # changing pipelines within a step is free here, and nobody's plan
    }


def _lengths(rng: Rng, most: int, longest: int) -> Lengths:
    count = int(rng.integers(1, most + 1))
    if rng.random() < 0.4:
        return log_normal(count, int(rng.integers(2**31)), longest=longest)
    kinds = rng.integers(3, size=count)
    drawn = [
        (int(rng.integers(1, 201)), int(rng.integers(1, longest + 1)), 1024)[kind]
        for kind in kinds.tolist()
    ]
    return Lengths.of(drawn)


def _of_model(rng: Rng) -> tuple[Problem, Lengths]:
    devices = int(rng.choice([*range(1, 10), 16, 32]))
    speeds = Speeds(
        launch_s=float(rng.choice([0.0, 5e-5, 1e-3])),
        link_bytes_per_s=float(rng.choice([1e11, 5e9])),
    )
    methods = (None, FORMULA_METHODS, ("local", "metp", "megatron_cz"))[int(rng.integers(3))]
    costs = synthetic_costs(
        devices,
        int(rng.choice([1, 2, 5, 24])),
        speeds=speeds,
        methods=methods,
        memory_bytes=int(float(rng.choice([0.8, 1.5, 3, 10, 40])) * GIB),
    ).replace(memory_margin=float(rng.choice([0.0, 0.07])))
    semantics = str(rng.choice(["free", "free", "lockstep"]))
    problem = Problem(costs=costs, devices=devices, semantics=semantics)
    return problem, _lengths(rng, 40, 200_000)


def _of_groups(rng: Rng) -> tuple[Problem, Lengths]:
    choices = ((1, 2, 4, 8, 16), tuple(range(1, 18)), (1, 2, 3, 4, 6, 8, 12), (1,), (2, 5))
    sizes = choices[int(rng.integers(len(choices)))]
    link = float(rng.choice([0.0, 2e-5, 4e-4]))
    costs = GroupCosts(
        a_s=float(rng.choice([0.0, 5e-9])),
        b_s=float(rng.choice([2e-4, 1e-5])),
        c_s=float(rng.choice([0.0, 0.02, 0.5])),
        cap_tokens=int(rng.choice([70_000, 200_000, 1_000_000, 2_000_000])),
        kappa_s={p: link * (1 - 1 / p) * (1 + 4 * (p > 8)) for p in sizes},
    )
    devices = int(rng.integers(min(sizes), 33))
    semantics = str(rng.choice(["free", "lockstep"]))
    problem = Problem(costs=costs, devices=devices, semantics=semantics)
    return problem, _lengths(rng, 40, 1_000_000)


def _of_pipelines(rng: Rng) -> tuple[Problem, Lengths]:
    costs, devices, lengths = tiny_world(int(rng.integers(2**31)), devices=12, sequences=40)
    return Problem(costs=costs, devices=devices), Lengths.of(lengths)


def _of_published(rng: Rng) -> tuple[Problem, Lengths]:
    costs = published(f"hydraulis-{rng.choice(['7b', '13b', '32b'])}")
    devices = int(rng.choice([32, 48, 64]))
    return Problem(costs=costs, devices=devices), _lengths(rng, 100, 16_384)


PLANNER = Attack(
    name="planner",
    about="plans of random problems are valid, above their bound, best of all",
    begin=_begin,
    limit_s=60,
    few=16,
)
