"""Problems."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from headrace.costs import FORMULA_METHODS, CostModel, published, synthetic_costs
from headrace.costs.library import roofline
from headrace.errors import InfeasiblePlan, SpecError
from headrace.planning import Problem, plan
from headrace.spec import Architecture, LayerPlan, Lengths, Strategy
from headrace.units import GIB


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"semantics": "locked"}, "did you mean 'lockstep'"),
        ({"planner": "adaptve"}, "did you mean 'adaptive'"),
        ({"static_size": 2}, "planner 'static' with it"),
        ({"stages": "no"}, "stages: got 'no', wanted True or False"),
        ({"holding": "replicated"}, "holding: got 'replicated', wanted a tuple"),
        ({"holding": ("shard",)}, "holding: got 'shard', wanted replicated or sharded"),
        ({"holding": ()}, "holding: got none, wanted replicated or sharded"),
        ({"holding": None}, "holding: got None, wanted a tuple"),
        ({"recompute": "full"}, "recompute: got 'full', wanted a tuple of levels"),
        ({"recompute": ("ful",)}, "recompute: got 'ful'.*did you mean 'full'"),
        ({"sizes": (2.0,)}, "group size: got 2.0, wanted a whole number"),
        ({"sizes": 2}, "sizes: got 2, wanted a tuple of whole numbers"),
        ({"devices": 4.0}, "devices: got 4.0, wanted a whole number"),
        ({"smoothing": "0.1"}, "smoothing: got '0.1'"),
        ({"planner": "static", "static_size": 8}, "static_size: got 8, wanted one of 1, 2"),
        ({"planner": "static", "static_size": "2"}, "static_size: got '2', wanted one of 1"),
        ({"planner": "static", "static_size": 4, "sizes": (1, 2)}, "wanted one of 1, 2$"),
        ({"strategies": ("4*cp1",)}, r"strategy: got '4\*cp1'.*hr.Strategy.parse"),
        ({"devices": 3}, "got 3, wanted 4"),
        ({"sizes": (1, 9)}, "one with costs"),
        ({"methods": ("ulyses_z",)}, "did you mean 'ulysses_z'"),
        ({"methods": ("metp",)}, "known are local, ulysses_z"),
        ({"methods": ()}, "at least one layer option"),
        ({"recompute": ()}, "at least one layer option"),
        ({"smoothing": 1.0}, "smoothing: got 1.0"),
        ({"methods": ("local",), "layers": ("local",)}, "methods and layers: got both"),
        ({"layers": ("local", "local", "local")}, "layers: got 3 entries, wanted 1 or 4"),
        ({"layers": ("ulyses_z",)}, "did you mean 'ulysses_z'"),
        ({"layers": ("ulysses_z/metp",)}, "got 'metp'.*known are local, ulysses_z"),
        ({"layers": ("ulysses_z+some",)}, "recompute level: got 'some'"),
        (
            {"layers": ("ulysses_z+full",), "recompute": ("none",)},
            r"layer 0 cannot run ulysses_z\+full on cp1",
        ),
        (
            {"layers": ("ulysses_z", "local", "local", "local"), "sizes": (2, 4)},
            "layer 1 cannot run local on cp2, layer 1 cannot run local on cp4",
        ),
    ],
)
def test_choices_that_do_not_exist(changes: dict[str, Any], text: str) -> None:
    """Catches accepting what is then ignored."""
    fields: dict[str, Any] = {"costs": synthetic_costs(4), "devices": 4}
    with pytest.raises(SpecError, match=text):
        Problem(**(fields | changes))


@pytest.mark.parametrize("name", ["flexsp-7b-a100", "hydraulis-7b"])
@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": (2,)},
        {"strategies": (Strategy.parse("1*cp2"),)},
        {"methods": ("ulysses_z",)},
        {"recompute": ("none",)},
        {"holding": ("sharded",)},
        {"stages": False},
        {"smoothing": -7.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_published_costs_refuse_what_they_do_not_know(name: str, changes: dict[str, Any]) -> None:
    """Catches a restriction that is taken and not obeyed."""
    with pytest.raises(SpecError, match=f"^{next(iter(changes))}: got .* with published costs"):
        Problem(costs=published(name), devices=8, **changes)


def test_strategies_have_no_stages_where_there_are_none() -> None:
    """Catches ``stages=False`` that holds for what is searched and not for what is given."""
    strategies = (Strategy.parse("2*pp2"),)
    problem = Problem(costs=several(), stages=False, strategies=strategies)
    with pytest.raises(InfeasiblePlan, match="no pipelines with several stages"):
        plan(problem, Lengths.of([900, 200]))


def test_whole_numbers_of_arrays_are_taken() -> None:
    """Catches sizes out of an array that crash where bits are counted."""
    sizes = tuple(np.array([1, 2]))
    assert Problem(costs=several(), sizes=sizes) == Problem(costs=several(), sizes=(1, 2))


def test_costs_without_a_small_enough_size() -> None:
    """Catches an empty search in place of an error."""
    costs = synthetic_costs(2, sizes=(4,))
    with pytest.raises(SpecError, match=r"one of at most 2"):
        Problem(costs=costs, devices=2)


def test_restrictions_are_kept() -> None:
    """Catches a restriction that only some of the planner's parts know."""
    costs = synthetic_costs(4, layers=8, memory_bytes=12 * 2**30)
    lengths = Lengths.of([30_000, 20_000, 700, 600, 20])
    problem = Problem(costs=costs, devices=4, sizes=(2, 4), recompute=("full",))
    made = plan(problem, lengths)
    assert {len(p.ranks) for p in made.pipelines} <= {2, 4}
    assert {o.recompute for m in made.micro_batches for o in m.layers.options} == {"full"}
    local = plan(Problem(costs=costs, devices=4, methods=("local",)), Lengths.of([900, 30]))
    assert {len(p.ranks) for p in local.pipelines} == {1}


def several(memory_gib: float = 40, layers: int = 4) -> CostModel:
    return synthetic_costs(
        4, layers, memory_bytes=int(memory_gib * GIB), methods=FORMULA_METHODS, sizes=(1, 2, 4)
    )


def test_allowed_methods_are_allowed_to_either_branch() -> None:
    """Catches a shared feed-forward that is refused because its owner is not in the set, and one
    that is taken although no allowed method has it."""
    problem = Problem(costs=several(), devices=4, methods=("megatron_cz", "megatron_ts"))
    methods = {(o.attention, o.feed_forward) for o in problem.options[2]}
    assert methods == {
        ("megatron_cz", "megatron_cz"),
        ("megatron_cz", "megatron_ts"),
        ("megatron_ts", "megatron_ts"),
        ("megatron_ts", "ulysses_z"),
    }
    assert problem.group_sizes == (2, 4), "one rank is local, which is not in the set"


@pytest.mark.parametrize(
    ("text", "methods"),
    [
        ("metp", ("metp", "metp")),
        ("megatron_ts/metp", ("megatron_ts", "metp")),
        ("metp/megatron_cz", ("metp", "ulysses_z")),
        ("megatron_cz/ulysses_z", ("megatron_cz", "megatron_cz")),
    ],
)
def test_one_entry_is_for_all_layers(text: str, methods: tuple[str, str]) -> None:
    """Catches an entry that one layer takes, levels that are no longer open, and a feed-forward
    without costs because they stand under another name."""
    problem = Problem(costs=several(), devices=4, layers=(text,))
    for p in (2, 4):
        assert {(o.attention, o.feed_forward) for o in problem.options[p]} == {methods}
        assert len(problem.options[p]) == 3
    assert {str(o) for o in problem.options[1]} == {"local", "local+attention", "local+full"}
    fixed = Problem(costs=several(), devices=4, layers=(f"{text}+full",))
    assert [o.recompute for o in fixed.options[4]] == ["full"]
    assert [str(o) for o in fixed.options[1]] == ["local+full"]


def test_every_layer_runs_what_the_list_says() -> None:
    """Catches a list in another order, and recomputation that ignores what the list fixes."""
    listed = ("metp", "ulysses_z+attention", "megatron_ts/metp", "metp")
    problem = Problem(costs=several(3), devices=4, layers=listed, sizes=(2, 4))
    made = plan(problem, Lengths.of([35_000, 9000, 9000, 300]))
    for micro in made.micro_batches:
        texts = [str(option) for option in micro.layers.options]
        assert [text.partition("+")[0] for text in texts] == [
            "metp",
            "ulysses_z",
            "megatron_ts/metp",
            "metp",
        ]
        assert texts[1] == "ulysses_z+attention"
        assert micro.order == "zigzag"


def test_a_size_that_cannot_run_every_layer_is_not_used() -> None:
    """Catches a group that refuses its first forward."""
    costs = several()
    without = {text: c for text, c in costs.options[4].items() if not text.startswith("metp")}
    costs = costs.replace(options={**costs.options, 4: without})
    problem = Problem(costs=costs, devices=4, layers=("ulysses_z", "metp") * 2)
    assert problem.group_sizes == (1, 2)
    made = plan(problem, Lengths.of([30_000, 5000]))
    assert {len(p.ranks) for p in made.pipelines} <= {1, 2}


def test_which_layers_a_micro_batch_may_have() -> None:
    """Catches layers of an earlier plan that are kept although the choices are others now."""
    free = Problem(costs=several(), devices=4, recompute=("none", "full"))
    listed = Problem(costs=several(), devices=4, layers=("metp", "ulysses_z") * 2)
    mixed = LayerPlan.parse("1*metp+full 1*ulysses_z 1*metp 1*ulysses_z")
    assert free.allows(2, mixed)
    assert listed.allows(2, mixed)
    assert not listed.allows(2, LayerPlan.parse("1*ulysses_z 1*metp 1*ulysses_z 1*metp"))
    assert not free.allows(2, LayerPlan.parse("4*metp+attention"))
    assert not free.allows(2, LayerPlan.parse("3*metp"))
    assert not free.allows(3, LayerPlan.parse("4*metp"))
    assert free.allows(2, LayerPlan.parse("4*metp/megatron_cz")), "by its other name"


@pytest.mark.parametrize("devices", [1, 2])
def test_devices_that_would_do_are_named(devices: int) -> None:
    """Catches ``a smaller model`` said to someone who has more devices, and a number far off."""
    model = Architecture.preset("llama-70b")

    def planned(count: int) -> None:
        costs = roofline(model, "h100", devices=count, dtype="float32")
        plan(Problem(costs=costs, devices=count), Lengths.of([4096]))

    with pytest.raises(InfeasiblePlan) as caught:
        planned(devices)
    found = re.search(r"about ([0-9,]+) devices, or a smaller model", str(caught.value))
    assert found, str(caught.value)
    named = int(found[1].replace(",", ""))
    assert named > devices
    planned(2 * named)
