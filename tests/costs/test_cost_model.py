"""The cost model: seconds, bytes, and its file."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.costs import (
    FORMULA_METHODS,
    CostModel,
    ExchangeCost,
    Linear,
    OptionCost,
    Quadratic,
    fingerprint_difference,
    fingerprint_of,
    synthetic_costs,
)
from headrace.costs.cost_model import MOST_TOKENS
from headrace.errors import CostError
from headrace.spec import Architecture, Cluster, LayerOption, LayerPlan

NONE, FULL = LayerOption.of("local"), LayerOption.of("local", "full")


MODEL = Architecture(layers=2, hidden=4, heads=2, kv_heads=2, ffn=4, vocabulary=10)


def by_hand(**changes: Any) -> CostModel:
    """Two layers on one rank, with numbers that can be added by hand."""
    fields: dict[str, Any] = {
        "shape": MODEL.shape,
        "cluster": Cluster(devices=1, memory_bytes=10_000),
        "fingerprint": fingerprint_of(device="none"),
        "options": {
            1: {
                "local": OptionCost(
                    forward=Quadratic(a=1, b=2, c=3),
                    backward=Quadratic(a=2, b=4, c=6),
                    kept=Linear(slope=10, constant=1),
                    transient=Linear(slope=5),
                ),
                "local+full": OptionCost(
                    forward=Quadratic(a=1, b=2, c=3),
                    backward=Quadratic(a=3, b=6, c=9),
                    kept=Linear(slope=1),
                    transient=Linear(slope=20),
                ),
            }
        },
        "ends": {
            1: OptionCost(
                forward=Quadratic(b=1),
                backward=Quadratic(b=2),
                kept=Linear(slope=2),
                transient=Linear(slope=7),
            )
        },
        "exchange_s": ExchangeCost(pull_s=1.0, push_s=2.0, update_s=3.0),
        "state_bytes": 100,
        "working_bytes": {1: {"replicated": 50, "sharded": 50}},
    }
    return CostModel(**(fields | changes))


def plan_of(*options: LayerOption) -> LayerPlan:
    return LayerPlan(options=options)


def test_seconds_add_layers_and_ends() -> None:
    """Catches forgetting the ends, the recomputation or the scale."""
    costs = by_hand()
    assert costs.layer_seconds([2, 3], 1, NONE) == (13 + 10 + 3, 26 + 20 + 6)
    assert costs.micro_batch_s([2, 3], 1, plan_of(FULL, NONE)) == (
        2 * 26 + 5,
        (26 + 20 + 6) + (39 + 30 + 9) + 10,
    )
    doubled = costs.replace(scale=2.0)
    assert (
        doubled.micro_batch_s([5], 1, plan_of(NONE, NONE))[0]
        == 2 * (costs.micro_batch_s([5], 1, plan_of(NONE, NONE))[0])
    )


def test_peak_adds_what_is_kept_and_not_what_passes() -> None:
    """Catches summing transients, forgetting the ends, and ignoring the order of the layers."""
    costs = by_hand()
    fixed = 100 + 50 + 2 * 10
    full_first = max(10 + 200, 10 + (101 + 50), 10 + 101 + 70)
    none_first = max(101 + 50, 101 + 10 + 200, 101 + 10 + 70)
    assert costs.micro_batch_bytes(10, 1, plan_of(FULL, NONE)) == fixed + full_first
    assert costs.micro_batch_bytes(10, 1, plan_of(NONE, FULL)) == fixed + none_first


@given(
    memory=st.integers(100, 20_000),
    margin=st.sampled_from([0.0, 0.1, 0.5]),
    options=st.lists(st.sampled_from([NONE, FULL]), min_size=2, max_size=2),
)
def test_most_tokens_is_the_largest_that_fits(
    memory: int, margin: float, options: list[LayerOption]
) -> None:
    """Catches an answer that is off by one token, or that ignores the margin."""
    costs = by_hand(cluster=Cluster(devices=1, memory_bytes=memory), memory_margin=margin)
    layers = plan_of(*options)
    tokens = costs.max_tokens(1, layers)
    if tokens:
        assert costs.micro_batch_bytes(tokens, 1, layers) <= costs.capacity_bytes
    assert costs.micro_batch_bytes(tokens + 1, 1, layers) > costs.capacity_bytes


def test_memory_that_does_not_grow_has_no_limit() -> None:
    """Catches a division by a slope of zero."""
    free = OptionCost(
        forward=Quadratic(c=1), backward=Quadratic(), kept=Linear(), transient=Linear()
    )
    costs = by_hand(options={1: {"local": free}}, ends={1: free})
    assert costs.max_tokens(1, plan_of(NONE, NONE)) == MOST_TOKENS


def test_a_rank_holds_the_shards_of_all_its_sizes() -> None:
    """Catches counting only the shard of the group that runs."""
    costs = synthetic_costs(8)
    shard = {p: costs.working_bytes[p]["sharded"] for p in costs.group_sizes}
    whole = costs.working_bytes[1]["replicated"]
    assert costs.held_bytes({8}, "sharded") == shard[8]
    assert costs.held_bytes({4, 8}, "sharded") == shard[4] + shard[8]
    assert costs.held_bytes({1, 8}, "sharded") == whole
    assert costs.held_bytes(costs.group_sizes, "replicated") == whole
    assert costs.held_bytes((), "replicated") == costs.held_bytes((), "sharded") == 0
    layers = LayerPlan.uniform(LayerOption.of("ulysses_z"), 4)
    alone = costs.micro_batch_bytes(1000, 8, layers, "sharded")
    mixed = costs.micro_batch_bytes(1000, 8, layers, "sharded", {4})
    assert mixed - alone == shard[4]


def test_sharded_weights_pay_their_gathers() -> None:
    """Catches a gather that is charged once per micro-batch instead of per layer."""
    costs = synthetic_costs(2, layers=3)
    layers = LayerPlan.uniform(LayerOption.of("ulysses_z"), 3)
    whole = costs.micro_batch_s([100], 2, layers)
    sharded = costs.micro_batch_s([100], 2, layers, "sharded")
    gather = costs.gather_s[2]
    assert sharded[0] - whole[0] == pytest.approx(3 * gather[0])
    assert sharded[1] - whole[1] == pytest.approx(3 * gather[1])
    one = costs.layer_seconds([100], 2, LayerOption.of("ulysses_z"), "sharded")
    assert one[0] - costs.layer_seconds([100], 2, LayerOption.of("ulysses_z"))[0] == (
        pytest.approx(gather[0])
    )


def test_unknown_options_and_layer_plans_are_named() -> None:
    """Catches a KeyError from the depths."""
    costs = by_hand()
    with pytest.raises(CostError, match=r"metp on cp1.*known are local"):
        costs.layer_seconds([3], 1, LayerOption.of("metp"))
    with pytest.raises(CostError, match=r"local on cp4.*sizes \(1,\)"):
        costs.option(4, NONE)
    with pytest.raises(CostError, match=r"3 layers, wanted 2"):
        costs.micro_batch_s([3], 1, plan_of(NONE, NONE, NONE))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"options": {}}, "no group size"),
        ({"options": {1: {}}}, "no layer option"),
        ({"ends": {}}, "wanted ends"),
        ({"working_bytes": {1: {"replicated": 3}}}, "replicated and sharded"),
        ({"working_bytes": {1: {"replicated": -3, "sharded": 1}}}, "whole number >= 0"),
        ({"state_bytes": 1.5}, "whole number >= 0"),
        ({"gather_s": {1: (1.0, -1.0)}}, "gather seconds"),
        ({"scale": 0.0}, "scale"),
        ({"memory_margin": 1.0}, "memory margin"),
    ],
)
def test_parts_that_do_not_belong_together(changes: dict[str, Any], text: str) -> None:
    """Catches a profile with holes that would fail in the middle of planning."""
    with pytest.raises(CostError, match=text):
        by_hand(**changes)


def with_methods() -> CostModel:
    """Two ranks on which one feed-forward is everybody's and another is apart."""
    each = by_hand().options[1]["local"]
    zigzag = replace(each, order="zigzag")
    return by_hand(
        cluster=Cluster(devices=2, memory_bytes=10_000),
        options={
            1: by_hand().options[1],
            2: {
                "ulysses_z": each,
                "metp": zigzag,
                "metp/ulysses_z": zigzag,
                "ring": zigzag,
                "ulysses_z/metp": replace(each, fetched=0.25),
            },
        },
        ends={1: by_hand().ends[1], 2: by_hand().ends[1]},
        working_bytes={1: {"replicated": 50, "sharded": 50}, 2: {"replicated": 50, "sharded": 25}},
        gather_s={2: (0.5, 1.0)},
        feed_forwards={"ring": "ulysses_z", "local": "ulysses_z"},
    )


def test_equal_options_have_one_name() -> None:
    """Catches an option without costs although the same one was measured under another name."""
    costs = with_methods()

    def named(text: str) -> str:
        return str(costs.named(LayerOption.parse(text)))

    assert named("metp/ring+full") == "metp/ulysses_z+full"
    assert named("ulysses_z/ring") == "ulysses_z"
    assert named("ring/ulysses_z") == named("ring") == "ring"
    assert named("ring/metp") == "ring/metp"
    assert costs.option(2, LayerOption.parse("metp/ring")) is costs.options[2]["metp/ulysses_z"]
    with pytest.raises(CostError, match="costs of ring/metp on cp2"):
        costs.option(2, LayerOption.parse("ring/metp"))


def test_one_layer_in_zigzag_asks_for_it() -> None:
    """Catches uneven ranks where most layers do not care about the order."""
    costs, ulysses, metp = with_methods(), LayerOption.of("ulysses_z"), LayerOption.of("metp")
    assert costs.order_of(2, plan_of(ulysses, ulysses)) == "natural"
    assert costs.order_of(2, plan_of(ulysses, metp)) == "zigzag"
    assert costs.order_of(1, plan_of(NONE, NONE)) == "natural"


def test_shards_are_fetched_as_far_as_a_method_needs_them() -> None:
    """Catches tensor methods that pay for weights which never move."""
    costs = with_methods()
    assert costs.gather_seconds(2, LayerOption.of("ulysses_z"), "sharded") == (0.5, 1.0)
    assert costs.gather_seconds(2, LayerOption.of("ulysses_z", "none"), "replicated") == (0.0, 0.0)
    part = LayerOption.parse("ulysses_z/metp")
    assert costs.gather_seconds(2, part, "sharded") == (0.125, 0.25)


@pytest.mark.parametrize("version", [1, 2])
def test_costs_of_earlier_formats_are_read(version: int) -> None:
    """Catches a run that cannot go on because its costs were kept by an earlier version."""
    value = by_hand().to_json() | {"format": version, "architecture": MODEL.to_json()}
    del value["shape"]
    if version == 2:
        assert CostModel.from_json(value) == by_hand()
        return
    del value["feed_forwards"]
    for by_option in (*value["options"].values(), value["ends"]):
        for cost in by_option.values():
            del cost["order"], cost["fetched"]
    assert CostModel.from_json(value) == by_hand()


def test_costs_of_old_say_what_replicated_weights_take() -> None:
    """Catches costs, in files, caches and checkpoints, that are lost for the word of before."""
    path = Path(__file__).parents[1] / "golden" / "weights-whole" / "costs.json"
    assert CostModel.load(path) == by_hand()


def test_orders_and_shares_are_checked() -> None:
    """Catches a word or a number that means nothing."""
    each = by_hand().options[1]["local"]
    with pytest.raises(CostError, match="token order of an option: got 'zig'"):
        replace(each, order="zig")  # type: ignore[arg-type]
    with pytest.raises(CostError, match="fetched share of an option"):
        replace(each, fetched=1.5)


def test_exchange_seconds_are_checked() -> None:
    """Catches negative seconds of the exchange."""
    with pytest.raises(CostError, match=r"exchange\.push_s"):
        ExchangeCost(push_s=-1.0)
    assert ExchangeCost(pull_s=1, push_s=2, update_s=3).total_s == 6


def test_json_round_trip(tmp_path: Path) -> None:
    """Catches a field that is lost on the way to the file and back."""
    costs = synthetic_costs(3, layers=2, methods=FORMULA_METHODS)
    costs = costs.replace(scale=1.25, memory_margin=0.05)
    assert CostModel.from_json(json.loads(json.dumps(costs.to_json()))) == costs
    costs.save(tmp_path / "profile.json")
    assert CostModel.load(tmp_path / "profile.json", fingerprint=costs.fingerprint) == costs


def test_another_fingerprint_says_what_differs() -> None:
    """Catches planning with the costs of another machine, and an error that names nothing."""
    costs = by_hand(fingerprint=fingerprint_of(device="H100", torch="2.13", dtype="bf16"))
    wanted = fingerprint_of(device="H100", torch="2.12", cores=4)
    with pytest.raises(CostError) as caught:
        CostModel.from_json(costs.to_json(), fingerprint=wanted)
    text = str(caught.value)
    assert "torch is 2.13 instead of 2.12" in text
    assert "dtype is bf16 instead of absent" in text
    assert "cores is absent instead of 4" in text
    assert "device" not in text.replace("profile", "")
    assert fingerprint_difference(wanted, wanted) == ""
    with pytest.raises(CostError, match="no ';'"):
        fingerprint_of(device="a;b")


def test_large_whole_numbers_are_floats() -> None:
    """Catches a coefficient beyond 64 bits that arrays cannot hold."""
    value = by_hand().to_json()
    value["ends"]["1"]["kept"] = [10**30, 0]
    kept = CostModel.from_json(value).ends[1].kept
    assert (kept.slope, type(kept.slope)) == (1e30, float)


def test_files_are_named_by_texts_and_in_errors(tmp_path: Path) -> None:
    """Catches a text that is no path here, and an error that does not say which file, or which kind
    of costs it holds."""
    path = str(tmp_path / "costs.json")
    by_hand().save(path)
    assert CostModel.load(path) == by_hand()
    for text, told in (
        ('{"kind": "pipelines"}', r"costs\.json.*got published costs of kind 'pipelines'"),
        ("{}", r"costs\.json: format of a profile: got None, wanted 3"),
    ):
        Path(path).write_text(text)
        with pytest.raises(CostError, match=told):
            CostModel.load(path)
    for nowhere in ("a\0b", 5, None):
        for use in (CostModel.load, by_hand().save):
            with pytest.raises(CostError, match="got the path"):
                use(nowhere)  # type: ignore[arg-type]


def test_malformed_profiles_are_cost_errors(tmp_path: Path) -> None:
    """Catches a traceback from the depths for a damaged file."""
    good = by_hand().to_json()
    damaged: list[object] = [[], None, {**good, "format": 99}]
    for key in good:
        if key != "format":
            damaged.append({k: v for k, v in good.items() if k != key})
            damaged.append({**good, key: "nonsense"})
    wrong = copy.deepcopy(good)
    wrong["options"]["1"]["local"]["kept"] = [1]
    damaged.append(wrong)
    damaged.append({**good, "options": {"x": {}}})
    shape, cluster = good["shape"], good["cluster"]
    for elements in (float("nan"), 2.5, "7", 10**30):
        counts = [elements, *shape["split_elements"][1:]]
        damaged.append({**good, "shape": {**shape, "split_elements": counts}})
    for devices in (10**30, 1e308, 10**9, 4.0):
        damaged.append({**good, "cluster": {**cluster, "devices": devices}})
    wrong = copy.deepcopy(good)
    wrong["ends"]["1"]["kept"] = [True, "1"]
    damaged.append(wrong)
    for value in damaged:
        if isinstance(value, dict) and value.get("fingerprint") == "nonsense":
            continue  # any text is a fingerprint
        with pytest.raises(CostError):
            CostModel.from_json(value)  # type: ignore[arg-type]
    for text in ("{", "[" * 200_000, f"[{'9' * 400}]"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(CostError, match="no JSON"):
            CostModel.load(tmp_path / "bad.json")
    with pytest.raises(CostError, match=r"absent\.json"):
        CostModel.load(tmp_path / "absent.json")
    with pytest.raises(CostError, match="writable"):
        by_hand().save(tmp_path / "bad.json" / "costs.json")
    assert not list(tmp_path.glob("*.part"))
