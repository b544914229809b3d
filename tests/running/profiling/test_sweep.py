"""Sweeps of layers that are none of ours: measured, fitted and priced without a native model."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from headrace.comm.mesh import Groups
from headrace.costs.sources.measured import costs_from_profile
from headrace.planning import Problem, plan
from headrace.profiling.probe import ChainProbe, Probe
from headrace.profiling.sweep import Sweep, Sweeper, SweepOptions, first_of_each_node_first
from headrace.spec import Cluster, Lengths
from headrace.spec.model_shape import ModelShape
from headrace.spec.profile import ENDS, Profile, ProfilePoint
from ranks import run_ranks

WIDTH = 16


class Mixer(nn.Module):
    """A layer that someone else wrote: features of every token are mixed, twice as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.relu(self.wide(self.norm(x))))


def _mixers(groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...]) -> Probe:
    tokens = sum(lengths) // len(ranks)
    return ChainProbe(lambda: torch.randn(tokens, WIDTH), [Mixer(), Mixer()])


def _swept(lengths: tuple[int, ...] = ()) -> list[ProfilePoint]:
    groups = Groups()
    options = SweepOptions(longest=512, repeats=1, lengths=lengths)
    sweeper = Sweeper(groups, options)
    sweeps = [Sweep(p=p, option=f"mixer{p}", probe=_mixers) for p in range(1, groups.ranks + 1)]
    sweeper.prepare(sweeps)
    assert not sweeper.not_fitting
    return [point for sweep in sweeps for point in sweeper.points(sweep)]


@pytest.fixture(scope="module")
def swept() -> list[list[ProfilePoint]]:
    return run_ranks(2, _swept)


def test_a_foreign_layer_is_measured_alike_on_all_ranks(swept: list[list[ProfilePoint]]) -> None:
    """Would catch a sweep that needs a native model, and numbers of one rank alone."""
    one, other = swept
    assert one == other
    assert {point.option for point in one} == {"mixer1", "mixer2"}
    assert all(point.forward_s > 0 and point.backward_s > 0 for point in one)


def test_its_bytes_are_those_that_autograd_keeps(swept: list[list[ProfilePoint]]) -> None:
    """Would catch bytes of the layer before, or of the weights: kept are what the products and
    norms save and the layer's own result, in fp32."""
    counted = [point for point in swept[0] if point.kept_bytes is not None]
    assert {point.p for point in counted} == {1, 2}
    for point in counted:
        tokens = sum(point.lengths) // point.p
        # the normed input, the wide features after the relu, the result, two statistics each
        assert point.kept_bytes == pytest.approx(4 * tokens * (4 * WIDTH + 2), rel=0.3)
        assert (point.transient_bytes or 0) > 0


def test_documents_that_are_asked_for_are_measured() -> None:
    """Would catch packs chosen here in the place of those asked for."""
    (points,) = run_ranks(1, _swept, (7, 70, 300))
    assert [point.lengths for point in points] == [(7,), (70,), (300,)]
    assert all(point.kept_bytes is not None for point in points)


def _in_turns() -> tuple[float, float]:
    spans = list[float]()

    def work() -> None:
        spans.append(time.monotonic())
        time.sleep(0.05)
        spans.append(time.monotonic())

    first_of_each_node_first(Groups(node_sizes=(2, 2)), work)
    begin, end = spans
    return begin, end


def test_the_first_rank_of_a_node_compiles_for_the_others() -> None:
    """Catches kernels that every rank of a node compiles at once, and a rank that runs nothing."""
    spans = run_ranks(4, _in_turns)
    assert max(spans[0][1], spans[2][1]) <= min(spans[1][0], spans[3][0])


def _exhausted() -> Any:
    groups = Groups()
    sweeper = Sweeper(groups, SweepOptions(longest=4096, repeats=1), room_bytes=400_000)
    points = sweeper.points(Sweep(p=1, option="mixer", probe=_mixers))
    return [sum(point.lengths) for point in points], sweeper.not_fitting


def test_memory_is_not_exceeded() -> None:
    """Would catch a pack that is tried although its bytes cannot be there."""
    ((tokens, over),) = run_ranks(1, _exhausted)
    assert [pack.option for pack in over] == ["mixer"]
    assert max(tokens) < over[0].tokens <= 4096


def test_a_foreign_model_is_priced_and_planned(swept: list[list[ProfilePoint]]) -> None:
    """Would catch costs or plans that ask a model for heads, features or a vocabulary."""
    shape = ModelShape(
        name="mixers",
        layers=3,
        hidden=WIDTH,
        split_elements=(0, 1024, 1024, 1024, 0),
        whole_elements=(0, 80, 80, 80, 0),
        longest=4096,
    )
    layers = [point for point in swept[0] if point.p == 1]
    profile = Profile(
        fingerprint="made=here",
        shape=shape,
        cluster=Cluster(devices=2, memory_bytes=10**7),
        points=tuple(_named(point, name) for name in ("mixer1", ENDS) for point in layers),
        exchange_s={"pull_s": 0.0, "push_s": 0.0, "update_s": 0.0},
        state_bytes=20_000,
        working_bytes={1: {"replicated": 10_000, "sharded": 10_000}},
    )
    costs = costs_from_profile(Profile.from_json(profile.to_json()))
    made = plan(Problem(costs=costs, devices=2), Lengths.of([500, 200, 200, 100]))
    assert made.predicted_s > 0
    assert {str(micro.layers) for micro in made.micro_batches} == {"3*mixer1"}
    assert {len(pipeline.ranks) for pipeline in made.pipelines} == {1}


def _named(point: ProfilePoint, option: str) -> ProfilePoint:
    return replace(point, option=option)
