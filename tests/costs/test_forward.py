"""Costs of forwards alone."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.costs.forward import forward_costs
from headrace.simulator import peak_bytes
from headrace.spec import LayerOption, LayerPlan

COSTS = hr.costs.roofline(hr.Architecture.preset("llama-tiny"), "h100", devices=4)


def test_seconds_are_those_of_a_steps_forward() -> None:
    """Catches a backward that is left, and a forward that is priced otherwise than a step's."""
    own = forward_costs(COSTS)
    assert own.group_sizes == COSTS.group_sizes
    assert own.exchange_s.pull_s == COSTS.exchange_s.pull_s
    assert own.exchange_s.push_s == own.exchange_s.update_s == 0
    for p, options in COSTS.options.items():
        for text in options:
            layers = LayerPlan.uniform(LayerOption.parse(text), COSTS.shape.layers)
            for held in ("replicated", "sharded"):
                forward, backward = own.micro_batch_s((900, 70), p, layers, held)
                assert forward == pytest.approx(COSTS.micro_batch_s((900, 70), p, layers, held)[0])
                if "+" not in text:  # others are there for configurations that allow nothing else
                    assert backward == 0


def test_bytes_are_of_one_layer_at_a_time() -> None:
    """Catches bytes that grow with layers, and a level that takes more than another: the forward is
    the same. What fits a step fits its forward."""
    own = forward_costs(COSTS)
    for p, options in COSTS.options.items():
        for text in options:
            option = LayerOption.parse(text)
            layers = LayerPlan.uniform(option, COSTS.shape.layers)
            assert own.micro_batch_bytes(5000, p, layers) <= COSTS.micro_batch_bytes(
                5000, p, layers
            )
            plain = (
                LayerOption.of(option.attention)
                if option.attention == option.feed_forward
                else None
            )
            if plain is not None:
                assert own.option(p, plain).transient == own.option(p, option).transient
            assert own.option(p, option).kept.slope == 0


def test_forwards_are_planned() -> None:
    """Catches costs that no plan can be made of, and plans beyond the memory."""
    own = forward_costs(COSTS.replace(cluster=COSTS.cluster))
    plan = hr.plan([9000, 800, 70, 60], own)
    assert 0 < plan.predicted_s < hr.plan([9000, 800, 70, 60], COSTS).predicted_s
    assert max(peak_bytes(plan, own)) <= own.capacity_bytes
