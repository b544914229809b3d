"""Others' plans beside ours, with a model's costs."""

from __future__ import annotations

import pytest

from headrace.costs import synthetic_costs
from headrace.lengths import draw
from headrace.planning import Problem, plan
from headrace.planning.rivals import rival_plan
from headrace.simulator import step_s
from headrace.spec import Architecture, Lengths

SHAPE = Architecture(layers=4, hidden=128, heads=8, kv_heads=8, ffn=512, vocabulary=1000)
COSTS = synthetic_costs(8, architecture=SHAPE, memory_bytes=1 << 30)


@pytest.mark.parametrize("name", ["bucket", "packed"])
def test_a_rival_takes_every_sequence_on_one_size_and_is_never_quicker(name: str) -> None:
    """Catches sequences lost between launches, a pipeline for every launch, seconds of another
    clock than ours, and a size that another would beat."""
    problem = Problem(costs=COSTS)
    lengths = draw("lognormal:median=400,sigma=1.5,max=8192", tokens="64Ki", seed=3)
    made, ours = rival_plan(problem, lengths, name), plan(problem, lengths)
    assert made is not None
    done = sorted(i for micro in made.micro_batches for i in micro.sequences)
    assert done == list(range(len(lengths)))
    assert len({str(pipeline.scheme) for pipeline in made.pipelines}) == 1
    assert len({pipeline.ranks for pipeline in made.pipelines}) == len(made.pipelines)
    assert made.predicted_s == pytest.approx(step_s(made, COSTS))
    assert made.predicted_s >= ours.predicted_s * (1 - 1e-9)
    scaled = rival_plan(problem.rescaled(2.0), lengths, name)
    assert scaled is not None
    assert scaled.predicted_s == pytest.approx(2 * made.predicted_s)


def test_what_fits_nowhere_has_no_rival() -> None:
    """Catches a crash where others cannot hold the batch."""
    small = Problem(costs=COSTS, sizes=(1,))
    assert rival_plan(small, Lengths.of([1 << 22]), "packed") is None
