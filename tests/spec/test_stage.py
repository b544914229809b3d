"""Stages: how layers are shared out, and which weights each stage works with."""

from __future__ import annotations

from itertools import accumulate, chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec.strategy import Stage, share_layers


@st.composite
def shared(draw: st.DrawFn) -> tuple[int, int]:
    layers = draw(st.integers(1, 40))
    return layers, draw(st.integers(1, layers))


@given(shared())
def test_shares_are_even_and_the_middle_takes_what_is_left(pair: tuple[int, int]) -> None:
    """Catches layers that are lost, and an embedding or a head on the stage with most layers."""
    layers, stages = pair
    shares = share_layers(layers, stages)
    assert len(shares) == stages
    assert sum(shares) == layers
    assert max(shares) - min(shares) <= 1

    def off(stage: int) -> float:
        return abs(stage - (stages - 1) / 2)

    larger = [off(s) for s in range(stages) if shares[s] > min(shares)]
    smaller = [off(s) for s in range(stages) if shares[s] == min(shares)]
    assert not larger or max(larger) <= min(smaller)
    assert shares[-1] <= shares[0], "the head is the heavier end"


@pytest.mark.parametrize(
    ("layers", "shares"),
    [
        (1, (1,)),
        (2, (1, 1)),
        (5, (3, 2)),
        (7, (2, 3, 2)),
        (8, (3, 3, 2)),
        (6, (1, 2, 2, 1)),
        (32, (8, 8, 8, 8)),
    ],
)
def test_shares_by_hand(layers: int, shares: tuple[int, ...]) -> None:
    """Catches shares that are as even but lie elsewhere: profiles and plans name them."""
    assert share_layers(layers, len(shares)) == shares


def test_a_stage_without_layers_is_refused() -> None:
    """Catches a stage that would send on what it received."""
    with pytest.raises(SpecError, match="stages of a pipeline: got 3 for 2 layers, wanted at"):
        share_layers(2, 3)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_stages_work_with_every_bucket_once(shares: list[int]) -> None:
    """Catches a bucket between two stages that none pulls, and an end that the stage before
    claims."""
    stops = list(accumulate(shares))
    stages = [
        Stage(index=i, count=len(shares), ranks=(i,), start=stop - share, stop=stop)
        for i, (share, stop) in enumerate(zip(shares, stops, strict=True))
    ]
    assert list(chain(*(stage.buckets for stage in stages))) == list(range(sum(shares) + 2))
    assert [stage.first for stage in stages] == [i == 0 for i in range(len(stages))]
    assert [stage.last for stage in stages] == [i + 1 == len(stages) for i in range(len(stages))]
    for stage in stages:
        assert set(stage.buckets) >= {layer + 1 for layer in range(stage.start, stage.stop)}
