"""Architectures: presets, derived sizes, JSON, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.costs.sources.formulas import layer_elements
from headrace.data.drawn_lengths import PRESETS as DISTRIBUTIONS
from headrace.errors import SpecError
from headrace.spec import Architecture, weight_table
from headrace.spec.architecture import PRESETS
from headrace.spec.known_methods import FACTS

SMALL = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
BERT: dict[str, Any] = {"kind": "bert", "causal": False, "positions": 8, "mask_id": 60}


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    kv_heads, group, head = (draw(st.integers(1, 4)) for _ in range(3))
    kind = draw(st.sampled_from(["llama", "gpt", "bert"]))
    vocabulary = draw(st.integers(1, 99))
    masked = kind == "bert"
    return Architecture(
        layers=draw(st.integers(1, 4)),
        hidden=kv_heads * group * 2 * head,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        ffn=draw(st.integers(1, 300)),
        vocabulary=vocabulary,
        kind=kind,
        tied=draw(st.booleans()),
        causal=not masked and draw(st.booleans()),
        positions=draw(st.integers(1, 99)),
        rope_theta=draw(st.floats(1, 1e6)),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        mask_id=draw(st.integers(0, vocabulary - 1)) if masked else None,
    )


@given(architectures())
def test_json_reads_back(architecture: Architecture) -> None:
    """Catches a field that JSON does not carry."""
    value = json.loads(json.dumps(architecture.to_json()))
    assert Architecture.from_json(value) == architecture


def test_json_of_before_reads_back() -> None:
    """Catches a new field that stored profiles, plans and checkpoints lack and must have."""
    stored = {
        "layers": 3,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 48,
        "vocabulary": 61,
        "kind": "llama",
        "tied": True,
        "causal": True,
        "positions": 0,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "dropout": 0.0,
    }
    assert Architecture.from_json(stored) == SMALL


@given(architectures(), st.integers(1, 1000))
def test_flops_are_those_of_the_weights_and_of_attention(a: Architecture, length: int) -> None:
    """Catches a matrix that is not counted; the weight table is the independent count."""
    matrices = [w for w in weight_table(a) if len(w.shape) == 2 and w.name.startswith("layers")]
    head = a.hidden * a.vocabulary
    head += sum(w.elements for w in weight_table(a) if w.name == "head_dense.weight")
    weights = sum(w.elements for w in matrices) + head * (0.15 if a.kind == "bert" else 1)
    # Scores and their product with the values: n d multiply-adds each, for every key seen.
    attention = a.layers * 2 * (2 * a.heads * a.head_features) * length
    if a.causal:
        attention /= 2
    assert a.flops_per_token(length) == pytest.approx(3 * (2 * weights + attention))


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_a_narrow_feed_forward_is_spread_over_all_key_value_heads(kind: str) -> None:
    """Catches blocks of 64 rows that keep 64 features on one rank."""
    a = Architecture.preset(f"{kind}-tiny", ffn=64, kv_heads=4)
    assert (a.ffn_block, a.tensor_ranks) == (16, 4)
    assert FACTS["megatron_ts"].supports(a, 4) is None
    assert Architecture.preset(f"{kind}-tiny").ffn_block == 64


def test_stored_weights_keep_their_blocks() -> None:
    """Catches a checkpoint of old whose gates would be read as its ups."""
    a = Architecture.preset("llama-tiny", ffn=64, kv_heads=4)
    stored = a.to_json()
    assert Architecture.from_json(stored) == a
    del stored["gate_block"]
    old = Architecture.from_json(stored)
    assert (old.ffn_block, old == a) == (64, False)
    assert Architecture.from_json(old.to_json()) == old
    wide = Architecture.preset("llama-tiny").to_json()
    del wide["gate_block"]
    assert Architecture.from_json(wide) == Architecture.preset("llama-tiny")
    with pytest.raises(SpecError, match="rows of a gate's block: got 3, wanted a divisor of 64"):
        Architecture.preset("llama-tiny", ffn=64, gate_block=3)


@given(architectures())
def test_derived_sizes(a: Architecture) -> None:
    """Catches a block that does not divide f, and head counts that do not multiply up."""
    assert a.head_features * a.heads == a.hidden
    assert a.group_heads * a.kv_heads == a.heads
    assert a.ffn % a.ffn_block == 0
    assert a.ffn_block <= 64
    assert a.ffn_block & (a.ffn_block - 1) == 0
    larger = 2 * a.ffn_block
    needless = larger <= 64 and a.ffn % larger == 0 and a.ffn // larger >= a.kv_heads
    assert not needless, "a larger block would do"
    assert a.ffn_block == 1 or a.ffn // a.ffn_block >= a.kv_heads, "a rank of its own for each head"
    assert (a.gated, a.biased) == (a.kind == "llama", a.kind != "llama")
    assert (a.norm_first, a.masked) == (a.kind != "bert", a.kind == "bert")
    assert a.kind == "llama" or a.gelu == {"gpt": "tanh", "bert": "none"}[a.kind]
    assert a.longest == (None if a.kind == "llama" else a.positions)


BAD: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: 0}, f"model.{name}: got 0, wanted >= 1")
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
    ),
    ({"layers": -1}, "model.layers: got -1"),
    ({"kind": "bart"}, "model.kind: got 'bart', wanted 'llama', 'gpt' or 'bert'"),
    ({"hidden": 30}, "model.hidden: got 30, wanted a multiple of 4"),
    ({"heads": 8, "kv_heads": 3}, "model.heads: got 8, wanted a multiple of 3"),
    ({"heads": 2, "kv_heads": 4}, "model.heads: got 2, wanted a multiple of 4"),
    ({"hidden": 12}, "features of a head: got 3, wanted an even number"),
    ({"kind": "gpt"}, "model.positions: got 0, wanted >= 1 for kind 'gpt'"),
    (BERT | {"positions": 0}, "model.positions: got 0, wanted >= 1 for kind 'bert'"),
    (BERT | {"causal": True}, "model.causal: got True, wanted False for kind 'bert'"),
    (BERT | {"mask_id": None}, "model.mask_id: got none, wanted an id below 61 for kind 'bert'"),
    (BERT | {"mask_id": 61}, "model.mask_id: got 61, wanted an id below 61"),
    (BERT | {"mask_id": -1}, "model.mask_id: got -1, wanted an id below 61"),
    ({"mask_id": 3}, "model.mask_id: got 3, wanted none for kind 'llama'"),
    ({"dropout": 1.0}, "model.dropout: got 1.0"),
    ({"dropout": -0.1}, "model.dropout: got -0.1"),
]


@pytest.mark.parametrize(("changes", "text"), BAD)
def test_shapes_that_contradict_themselves_are_refused(changes: dict, text: str) -> None:
    """Catches a check that is missing, or that names another key."""
    with pytest.raises(SpecError) as caught:
        Architecture.from_json(SMALL.to_json() | changes)
    assert str(caught.value).startswith(text)


def test_odd_head_features_are_fine_without_rotary_positions() -> None:
    """Catches llama's rule applied to gpt."""
    changes: dict[str, Any] = {"kind": "gpt", "hidden": 12, "positions": 8}
    assert Architecture.from_json(SMALL.to_json() | changes).head_features == 3


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "layers"),
    [
        ("paradyse-bert", 1024, 16, 24),
        ("paradyse-llama", 8192, 64, 8),
        ("paradyse-gpt", 12288, 96, 8),
    ],
)
def test_models_of_paradyse_are_those_of_its_table_4(
    name: str, hidden: int, heads: int, layers: int
) -> None:
    """Catches fewer key-value heads, another feed-forward than the 12 h^2 elements of a layer of
    Table 2, and a model that is too short for the longest sequence of GRCh38."""
    a = Architecture.preset(name)
    assert (a.hidden, a.heads, a.kv_heads, a.layers) == (hidden, heads, heads, layers)
    assert layer_elements(a) == pytest.approx(12 * hidden**2, rel=0.01)
    longest = DISTRIBUTIONS["grch38-3mer"].longest
    assert longest == 624 * 1024
    assert a.longest is None or a.longest >= longest


@pytest.mark.parametrize("name", PRESETS)
def test_presets_take_changes(name: str) -> None:
    """Catches changes that are ignored or written into the preset itself."""
    before = PRESETS[name]
    changed = Architecture.preset(name, layers=7)
    assert changed.layers == 7
    assert changed != before
    assert Architecture.preset(name) == before == PRESETS[name]


def test_an_unknown_preset_gets_a_suggestion_or_the_list() -> None:
    """Catches a KeyError for a typing error."""
    with pytest.raises(SpecError, match=r"'llama-tinny'; did you mean 'llama-tiny'\?"):
        Architecture.preset("llama-tinny")
    with pytest.raises(SpecError, match="known are llama-tiny, gpt-tiny, bert-tiny, gpt2"):
        Architecture.preset("qqq")


def test_it_prints_its_shape() -> None:
    """Catches a text that leaves out what fingerprints and cache names are made of."""
    assert str(SMALL) == "llama 3x32, 4/2 heads, ffn 48, vocabulary 61, tied"
    untied = Architecture.from_json(SMALL.to_json() | {"tied": False})
    assert str(untied) == "llama 3x32, 4/2 heads, ffn 48, vocabulary 61"


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocabulary", 2**31), ("hidden", 2**62), ("layers", 2**17), ("ffn", 64.0), ("heads", "4")],
)
def test_dimensions_fit_a_machine(name: str, value: object) -> None:
    """Catches token ids that wrap around, and a count of weights that never ends."""
    with pytest.raises(SpecError, match=f"model.{name}"):
        Architecture.preset("llama-tiny", **{name: value})
