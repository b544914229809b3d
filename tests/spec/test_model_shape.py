"""The shape of a model against its weight table, and by hand."""

from __future__ import annotations

import json

import pytest

from headrace.errors import SpecError
from headrace.spec import Architecture
from headrace.spec.architecture import WeightSpec, weight_table
from headrace.spec.model_shape import ModelShape

MODELS = {
    name: Architecture.preset(name) for name in ("llama-tiny", "gpt-tiny", "bert-tiny", "llama-8b")
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_a_stage_holds_its_part_of_the_weight_table(model: str, parts: int) -> None:
    """Catches a tied embedding counted twice or not at all, and norms that are cut."""
    a, table = MODELS[model], weight_table(MODELS[model])
    shape, end = a.shape, a.layers + 1
    assert shape.elements == sum(weight.elements for weight in table)
    assert sum(shape.bucket_shares) == pytest.approx(1)

    def held(weight: WeightSpec) -> float:
        return weight.elements / (parts if weight.unit else 1)

    for buckets in ((0, 1), (1, 2), (a.layers, end), tuple(range(end + 1))):
        wanted = sum(held(weight) for weight in table if weight.used_in(buckets))
        assert shape.held_share(buckets, parts) == pytest.approx(wanted / shape.elements)


def test_a_foreign_model_by_hand() -> None:
    """Catches a model that is none of ours and yet needs heads, features or a vocabulary."""
    shape = ModelShape(
        name="mixer",
        layers=2,
        hidden=8,
        split_elements=(40, 20, 20, 10),
        whole_elements=(0, 4, 4, 2),
        longest=512,
    )
    assert (shape.elements, shape.bucket_count, str(shape)) == (100, 4, "mixer")
    assert shape.bucket_shares == (0.4, 0.24, 0.24, 0.12)
    assert shape.held_share((2, 3), 2) == pytest.approx(0.21)
    assert ModelShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


@pytest.mark.parametrize(
    "fault", [{"layers": 3}, {"hidden": 0}, {"attention_share": 2}, {"colour": 1}, {"name": None}]
)
def test_a_shape_that_cannot_be_is_refused(fault: dict[str, object]) -> None:
    """Catches buckets that do not belong to the layers, found only when a step is timed."""
    value = MODELS["llama-tiny"].shape.to_json() | fault
    if fault == {"name": None}:
        del value["name"]
    with pytest.raises(SpecError):
        ModelShape.from_json(value)
