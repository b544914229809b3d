"""Random worlds and batches for the planner's tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from headrace.costs import FORMULA_METHODS, CostModel, Speeds, synthetic_costs
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem, plan
from headrace.spec import Architecture, Lengths, Plan
from headrace.units import GIB

__all__ = ["LLAMA_32B", "batches", "log_normal", "statics", "worlds"]

LLAMA_32B = Architecture(
    kind="llama", layers=60, hidden=6656, heads=52, kv_heads=52, ffn=17_920, vocabulary=32_000
)
"""A model whose memory asks for stages on 80 GB (Hydraulis' 32B)."""


@st.composite
def worlds(draw: st.DrawFn) -> CostModel:
    """Synthetic costs of 1 to 9 ranks, from plenty of memory to hardly any, with launches and
    links from free to dear, of one method for every size or of several."""
    memory = draw(st.sampled_from([0.8, 1.5, 3, 10, 40]))
    speeds = Speeds(
        launch_s=draw(st.sampled_from([0.0, 5e-5, 1e-3])),
        link_bytes_per_s=draw(st.sampled_from([1e11, 5e9])),
    )
    return synthetic_costs(
        draw(st.integers(1, 9)),
        draw(st.sampled_from([1, 2, 5])),
        memory_bytes=int(memory * GIB),
        speeds=speeds,
        methods=draw(st.sampled_from([None, FORMULA_METHODS, ("local", "metp", "megatron_cz")])),
    ).replace(memory_margin=draw(st.sampled_from([0.0, 0.07])))


def batches(most: int = 30, longest: int = 200_000) -> st.SearchStrategy[Lengths]:
    """Batches of short, long and equal sequences."""
    length = st.one_of(st.integers(1, 200), st.integers(1, longest), st.just(1024))
    return st.lists(length, min_size=1, max_size=most).map(Lengths.of)


def log_normal(sequences: int, seed: int, longest: int = 200_000) -> Lengths:
    """A long-tailed batch: median 700 tokens, sigma 1.5."""
    draws = np.random.default_rng(seed).normal(np.log(700), 1.5, sequences)
    return Lengths.of(np.clip(np.exp(draws), 16, longest).round())


def statics(problem: Problem, lengths: Lengths) -> list[Plan]:
    """The static plans of all sizes that fit."""
    plans = []
    for p in problem.group_sizes:
        try:
            plans.append(plan(problem.replace(planner="static", static_size=p), lengths))
        except InfeasiblePlan:
            continue
    return plans
