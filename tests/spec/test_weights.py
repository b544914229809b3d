"""The weight table: names, shapes, units and buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.spec import Architecture, weight_table
from headrace.spec.architecture import bucket_count, buckets, parameter_count


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    kv_heads, group, head = (draw(st.integers(1, 4)) for _ in range(3))
    kind = draw(st.sampled_from(["llama", "gpt", "bert"]))
    return Architecture(
        layers=draw(st.integers(1, 4)),
        hidden=kv_heads * group * 2 * head,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        ffn=draw(st.integers(1, 300)),
        vocabulary=draw(st.integers(1, 99)),
        kind=kind,
        causal=kind != "bert",
        tied=draw(st.booleans()),
        positions=draw(st.integers(1, 99)),
        mask_id=0 if kind == "bert" else None,
    )


@given(architectures())
def test_parameters_by_the_formula(a: Architecture) -> None:
    """Catches a weight that is missing, doubled or of another shape."""
    h, f, v, kv = a.hidden, a.ffn, a.vocabulary, a.kv_heads * a.head_features
    qkv, proj = (h + 2 * kv) * h, h * h
    head = 0 if a.tied else v * h
    if a.kind == "llama":
        wanted = v * h + a.layers * (qkv + proj + 3 * f * h + 2 * h) + h + head
    else:
        biases = (h + 2 * kv) + h + f + h
        layer = qkv + proj + 2 * f * h + biases + 4 * h
        last = 2 * h if a.kind == "gpt" else h * h + h + 2 * h + v
        types = 0 if a.kind == "gpt" else 2 * h + 2 * h
        wanted = v * h + a.positions * h + types + a.layers * layer + last + head
    assert parameter_count(a) == wanted


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt3-175b", 174_604_259_328),
        # transformers: BertForMaskedLM of bert-large-uncased
        ("bert-large", 335_174_458),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_published_models_have_their_published_size(preset: str, count: int) -> None:
    """Catches a formula that is wrong in the same way as the table."""
    assert parameter_count(Architecture.preset(preset)) == count


@given(architectures())
def test_units_divide_rows_and_vectors_are_whole(a: Architecture) -> None:
    """Catches a cut through a KV group or a gate/up block, and a norm that would be cut."""
    for weight in weight_table(a):
        assert weight.elements == weight.rows * weight.row_elements
        assert (weight.unit is None) == (len(weight.shape) == 1), weight.name
        if weight.unit is not None:
            assert weight.rows % weight.unit == 0, weight.name
    by_name = {weight.name: weight for weight in weight_table(a)}
    for kind, units in (
        ("qkv", a.kv_heads),
        ("proj", a.kv_heads),
        ("in", a.ffn // a.ffn_block),
        ("out", a.ffn // a.ffn_block),
    ):
        weight = by_name[f"layers.0.{kind}.weight"]
        assert weight.unit is not None
        assert weight.rows // weight.unit == units, "cuts of in and out, qkv and proj must agree"


@given(architectures())
def test_buckets_are_the_table_in_order(a: Architecture) -> None:
    """Catches a weight outside its layer's bucket, and buckets out of order."""
    table, grouped = weight_table(a), buckets(a)
    assert len(grouped) == bucket_count(a) == a.layers + 2
    assert sum(grouped, ()) == table
    assert len({weight.name for weight in table}) == len(table)
    for number, bucket in enumerate(grouped[1:-1]):
        assert {weight.name.split(".")[1] for weight in bucket} == {str(number)}
    assert all(grouped), "an empty bucket would be a collective about nothing"


def test_a_llama_by_hand() -> None:
    """Catches shapes transposed, and the interleaving of gate and up forgotten."""
    a = Architecture(layers=1, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61, tied=False)
    table = [(w.name, w.shape, w.unit, w.bucket) for w in weight_table(a)]
    assert table == [
        ("embed.weight", (61, 32), 1, 0),
        ("layers.0.norm1.weight", (32,), None, 1),
        ("layers.0.qkv.weight", (64, 32), 32, 1),
        ("layers.0.proj.weight", (32, 32), 16, 1),
        ("layers.0.norm2.weight", (32,), None, 1),
        ("layers.0.in.weight", (96, 32), 32, 1),
        ("layers.0.out.weight", (48, 32), 16, 1),
        ("norm.weight", (32,), None, 2),
        ("head.weight", (61, 32), 1, 2),
    ]


def test_a_gpt_by_hand() -> None:
    """Catches a bias left out, and positions in another bucket than the embedding."""
    a = Architecture(
        layers=1, hidden=12, heads=4, kv_heads=4, ffn=24, vocabulary=9, kind="gpt", positions=7
    )
    table = [(w.name, w.shape, w.unit, w.bucket) for w in weight_table(a)]
    assert table == [
        ("embed.weight", (9, 12), 1, 0),
        ("positions.weight", (7, 12), 1, 0),
        ("layers.0.norm1.weight", (12,), None, 1),
        ("layers.0.norm1.bias", (12,), None, 1),
        ("layers.0.qkv.weight", (36, 12), 9, 1),
        ("layers.0.proj.weight", (12, 12), 3, 1),
        ("layers.0.norm2.weight", (12,), None, 1),
        ("layers.0.norm2.bias", (12,), None, 1),
        ("layers.0.in.weight", (24, 12), 4, 1),
        ("layers.0.out.weight", (24, 12), 4, 1),
        ("layers.0.qkv.bias", (36,), None, 1),
        ("layers.0.proj.bias", (12,), None, 1),
        ("layers.0.in.bias", (24,), None, 1),
        ("layers.0.out.bias", (12,), None, 1),
        ("norm.weight", (12,), None, 2),
        ("norm.bias", (12,), None, 2),
    ]


def test_a_bert_by_hand() -> None:
    """Catches a last norm that BERT lacks, and a head without its own dense layer or bias."""
    a = Architecture(
        layers=1,
        hidden=12,
        heads=4,
        kv_heads=4,
        ffn=24,
        vocabulary=9,
        kind="bert",
        causal=False,
        positions=7,
        mask_id=8,
    )
    table = [(w.name, w.shape, w.unit, w.bucket) for w in weight_table(a)]
    assert [row[0].removeprefix("layers.0.") for row in table if row[3] == 1] == [
        "norm1.weight",
        "norm1.bias",
        "qkv.weight",
        "proj.weight",
        "norm2.weight",
        "norm2.bias",
        "in.weight",
        "out.weight",
        "qkv.bias",
        "proj.bias",
        "in.bias",
        "out.bias",
    ]
    assert [row for row in table if row[3] != 1] == [
        ("embed.weight", (9, 12), 1, 0),
        ("positions.weight", (7, 12), 1, 0),
        ("types.weight", (2, 12), 1, 0),
        ("embed_norm.weight", (12,), None, 0),
        ("embed_norm.bias", (12,), None, 0),
        ("head_dense.weight", (12, 12), 1, 2),
        ("head_dense.bias", (12,), None, 2),
        ("head_norm.weight", (12,), None, 2),
        ("head_norm.bias", (12,), None, 2),
        ("head.bias", (9,), None, 2),
    ]
