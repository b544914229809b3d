"""More choices are never worse: a plan is as quick as the plans of the same problem with less
allowed, within a search's luck."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import headrace as hr
from headrace.costs import published
from headrace.planning import GENERATORS, Nested, Problem, plan
from planning.worlds import LLAMA_32B
from spread import whole

_LUCK = 0.003
SHORT = "bins:edges=1024/2048/4096/8192/16384/32768/65536/131072,shares=64/16/9/5/3/2/1"


@cache
def problem_of_32b(devices: int) -> Problem:
    return Problem(costs=hr.costs.roofline(LLAMA_32B, "h100", devices=devices))


@pytest.mark.parametrize(
    ("law", "tokens", "seed", "before"),
    [
        ("commoncrawl-like", "1600K", 1, 0.0234),
        whole("github-code", "4M", 2, 0.0492),
        ("chatqa2-sft", "1M", 1, 0.0),
    ],
)
def test_sizes_that_are_no_powers_of_two(law: str, tokens: str, seed: int, before: float) -> None:
    """Catches a filling that more group sizes mislead: with powers of two alone plans were quicker
    by the share ``before``."""
    problem, lengths = problem_of_32b(64), hr.lengths.draw(law, tokens=tokens, seed=seed)
    fewer = plan(powers_of_two(problem), lengths)
    assert plan(problem, lengths).predicted_s <= fewer.predicted_s * (1 + _LUCK)


def powers_of_two(problem: Problem) -> Problem:
    return problem.replace(sizes=tuple(p for p in problem.group_sizes if p & (p - 1) == 0))


@pytest.mark.parametrize(
    ("model", "devices", "law", "tokens", "seed", "before"),
    [
        ("70b", 64, "github-code", "2M", 12, 0.059),
        whole("32b", 48, "github-code", "2M", 11, 0.0104),
        whole("32b", 64, "github-code", "2M", 11, 0.0102),
        whole("32b", 64, SHORT, "2M", 11, 0.0166),
    ],
)
def test_schemes_that_crowd_others_out_of_exchanges(
    model: str, devices: int, law: str, tokens: str, seed: int, before: float
) -> None:
    """Catches exchanges of pipelines in which only the eight most promising schemes of all take
    part, or that begin from what was filled alone: with powers of two alone plans were quicker by
    the share ``before``."""
    shape = LLAMA_32B if model == "32b" else hr.Architecture.preset("llama-70b")
    problem = Problem(costs=hr.costs.roofline(shape, "h100", devices=devices))
    lengths = hr.lengths.draw(law, tokens=tokens, seed=seed)
    fewer = plan(powers_of_two(problem), lengths)
    assert plan(problem, lengths).predicted_s <= fewer.predicted_s * (1 + _LUCK)


@pytest.mark.parametrize("change", [{"stages": False}, {"holding": ("sharded",)}])
def test_stages_and_how_weights_are_held(change: dict[str, Any]) -> None:
    """Catches schemes with stages, or replicated weights, that take the place of better ones."""
    problem, lengths = problem_of_32b(48), hr.lengths.draw("chatqa2-sft", tokens="1M", seed=1)
    fewer = plan(problem.replace(**change), lengths)
    assert plan(problem, lengths).predicted_s <= fewer.predicted_s * (1 + _LUCK)


@pytest.mark.parametrize("seed", range(6))
def test_long_tails_on_few_devices(seed: int) -> None:
    """Catches generators that are left out by the number of sequences, where a plan is far above
    the bound: it cost up to 2 %, and 14 % on other draws."""
    problem = Problem(costs=published("flexsp-7b-a100"), devices=8)
    law = "lognormal:median=700,sigma=1.5,max=131072,tail=0.03,alpha=1.1"
    lengths = hr.lengths.draw(law, tokens="128K", seed=seed)
    more = [
        Nested(worth=-1.0) if isinstance(one, Nested) else one for one in GENERATORS["adaptive"]
    ]
    thorough = plan(problem, lengths, generators=more)
    assert plan(problem, lengths).predicted_s <= thorough.predicted_s * (1 + 5e-4)


def test_pipelines_of_thousands_of_sequences_are_exchanged() -> None:
    """Catches a budget of exchanges that a few fillings of a large batch use up: the plan was 6.5 %
    above its bound."""
    problem = Problem(costs=published("hydraulis-32b"), devices=64)
    law = "lognormal:median=700,sigma=1.05,min=16,max=32768"
    made = plan(problem, hr.lengths.draw(law, tokens="15M", seed=0))
    assert made.gap <= 0.05


def test_stages_with_sharded_weights_are_not_missed() -> None:
    """Catches drafts of one table that promise too much, so that another's are never made: such a
    plan of a 70B model was 6 % slower than four equal pipelines."""
    shares = "64/16/4/1/0.25/0.0625/0.015625"
    law = f"bins:edges=1024/2048/4096/8192/16384/32768/65536/131072,shares={shares}"
    lengths = hr.lengths.draw(law, tokens="2M", seed=0)
    costs = hr.costs.roofline(hr.Architecture.preset("llama-70b"), "h100", devices=64)
    problem = Problem(costs=costs)
    equal = hr.Strategy.parse("4*cp8-pp2")
    given = plan(problem.replace(strategies=(equal,), holding=("sharded",)), lengths)
    made = plan(problem, lengths)
    assert made.lower_bound_s <= made.predicted_s <= given.predicted_s * (1 + 1e-9)
    assert given.predicted_s / made.predicted_s > 1.02


def octaves(*shares: float) -> str:
    """Lengths from 1,024 to 128Ki, a share for each octave."""
    edges = "/".join(str(1024 << octave) for octave in range(8))
    return f"bins:edges={edges},shares={'/'.join(map(str, shares))}"


def test_pipelines_run_by_one_plan_each() -> None:
    """Catches fillings of pipelines that price every sequence by the plan that is best for it, as
    packing does not: with tensor blocks and nothing computed again the step was 2.4 % quicker."""
    lengths = hr.lengths.draw("rollouts", tokens="2Mi", seed=2)
    fewer = problem_of_32b(64).replace(methods=("local", "megatron_ts"), recompute=("none",))
    made = plan(problem_of_32b(64), lengths)
    assert made.predicted_s <= plan(fewer, lengths).predicted_s * (1 + _LUCK)


@pytest.mark.parametrize(
    ("law", "devices", "seed", "before"),
    [
        ("commoncrawl-like", 64, 3, 0.0103),
        (octaves(64, 16, 4, 1, 0.25, 0.0625, 0.015625), 256, 0, 0.0055),
    ],
)
def test_methods_that_are_left_out(law: str, devices: int, seed: int, before: float) -> None:
    """Catches drafts of one kind that crowd the others out before any is packed, and a local search
    that ends after few steps as there are many sequences: with Ulysses alone plans were quicker by
    the share ``before``."""
    drawn = hr.lengths.draw(law, tokens=devices << 15, seed=seed)
    lengths = hr.Lengths.of([min(tokens, 1 << 17) for tokens in drawn.tokens])
    costs = hr.costs.roofline(hr.Architecture.preset("llama-8b"), "h100", devices=devices)
    fewer = Problem(costs=costs, methods=("local", "ulysses_z"), stages=False)
    made = plan(Problem(costs=costs), lengths)
    assert made.predicted_s <= plan(fewer, lengths).predicted_s * (1 + _LUCK)
