"""Methods as a configuration asks for them: what is measured, refused, run and resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config.model import PlannerConfig
from headrace.costs import FORMULA_METHODS, synthetic_costs
from headrace.engine.considered_methods import considered, methods_by_size
from headrace.engine.run_planner import RunPlanner
from headrace.errors import ConfigError, SpecError
from headrace.spec import Architecture, Lengths
from headrace.spec.known_methods import FACTS
from headrace.spec.layer_plan import LayerPlan
from running.cli.jobs import metrics, run, write_job

MODEL = Architecture(layers=4, hidden=64, heads=8, kv_heads=2, ffn=192, vocabulary=50)


def _planner(**keys: object) -> PlannerConfig:
    return PlannerConfig.model_validate(keys)


def test_auto_considers_every_size_and_the_automatic_methods() -> None:
    """Would catch a size left out because one method of many cannot run on it, and methods that
    are for comparison only in every profile."""
    sizes, methods = considered(_planner(), MODEL, 4)
    assert sizes == (1, 2, 3, 4)
    assert set(methods) == {name for name, m in FACTS.items() if m.automatic}
    assert not {"colossal_z", "ulysses_ring", "tensor_ring"} & set(methods)
    assert considered(_planner(candidates=["metp"]), MODEL, 4) == ((1, 2), ("metp",))


def test_methods_of_many_kernels_are_not_for_devices() -> None:
    """Catches a device that launches thousands of kernels a layer, of a method nobody named."""
    _, here = considered(_planner(), MODEL, 4)
    _, there = considered(_planner(), MODEL, 4, gpu=True)
    assert set(here) - set(there) == {"metp"}
    assert considered(_planner(candidates=["metp"]), MODEL, 4, gpu=True)[1] == ("metp",)


def test_what_is_fixed_must_run_in_every_layer() -> None:
    """Would catch a size on which one layer of the list cannot run, and a feed-forward that is
    judged by the attention's rule."""
    fixed = _planner(methods=["ulysses_z", "megatron_ts", "metp/ulysses_z", "megatron_cz+full"])
    sizes, methods = considered(fixed, MODEL, 4)
    assert sizes == (1, 2)
    assert methods == ("megatron_cz", "megatron_ts", "metp", "ulysses_z")
    assert considered(_planner(methods="megatron_cz/megatron_ts"), MODEL, 4)[0] == (1, 2, 3)
    assert considered(_planner(methods="local"), MODEL, 4) == ((1,), ("local",))
    assert considered(_planner(methods="megatron_ts"), MODEL, 1)[0] == (1,)


@pytest.mark.parametrize(
    ("keys", "ranks", "wanted"),
    [
        ({"group_sizes": [2]}, 4, (1, 2)),
        ({"group_sizes": [4, 2]}, 4, (1, 2, 4)),
        ({"group_sizes": [1]}, 4, (1,)),
        ({"group_sizes": [2, 8]}, 4, (1, 2)),
        ({"group_sizes": [12]}, 24, (1, 12)),
        ({"name": "strategies"}, 4, (1, 2, 3, 4)),
        ({"name": "strategies", "strategies": ["1*tp2 + 2*cp1"]}, 4, (1, 2)),
        ({"name": "strategies", "strategies": ["1*pp2 + 2*cp1", "4*cp1"]}, 4, (1,)),
        ({"name": "strategies", "strategies": ["1*tp2-cp2-pp2", "2*cp3-pp1"]}, 8, (1, 3, 4)),
        ({"name": "strategies", "strategies": ["1*tp2-cp2"], "group_sizes": [2]}, 4, (1, 2)),
    ],
)
def test_only_sizes_that_plans_may_use_are_measured(
    keys: dict[str, object], ranks: int, wanted: tuple[int, ...]
) -> None:
    """Would catch minutes spent on sizes that no plan is allowed, a stage's width taken for all
    ranks of its pipeline, a tensor block that counts without its sequence ranks, and a size left
    out that some strategy needs."""
    sizes, methods = considered(
        _planner(candidates=["ulysses_z", "megatron_cz"], **keys), MODEL, ranks
    )
    assert sizes == wanted
    assert methods == ("megatron_cz", "ulysses_z")


def test_a_size_that_is_named_and_cannot_run_is_refused() -> None:
    """Would catch a run whose only sizes are dropped in silence, and that trains on single
    ranks."""
    with pytest.raises(ConfigError, match=r"planner\.methods.*on groups of 4 these would do"):
        considered(_planner(candidates=["metp"], group_sizes=[4]), MODEL, 4)
    fits = considered(_planner(candidates=["metp"], group_sizes=[2, 4]), MODEL, 4)
    assert fits == ((1, 2), ("metp",))
    strategies = {"name": "strategies", "strategies": ["1*cp4"]}
    with pytest.raises(ConfigError, match="on groups of 4"):
        considered(_planner(candidates=["metp"], **strategies), MODEL, 4)


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ({"methods": "ulyses_z"}, SpecError, "did you mean 'ulysses_z'"),
        ({"candidates": ["metpp"]}, SpecError, "did you mean 'metp'"),
        (
            {"methods": "ulysses_ring"},
            ConfigError,
            "on groups of 2 these would do: ulysses_z, mega",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(keys: dict[str, object], error: type, text: str) -> None:
    """Would catch a profile of hours that ends in a plan without groups."""
    with pytest.raises(error, match=text):
        considered(_planner(**keys), MODEL, 3)


def test_methods_by_size_are_those_of_both_branches() -> None:
    """Would catch a plan drawn with a method that its group cannot run."""
    found = methods_by_size(tuple(FACTS), MODEL, 4)
    assert found[1] == ["local"]
    assert "megatron_ts" in found[2]
    assert "megatron_ts" not in found[3]
    assert "tensor_ring" in found[4]
    assert methods_by_size(("tensor_ring",), MODEL, 3) == {1: ["local"]}


def test_smoothed_plans_go_on_where_a_run_stopped() -> None:
    """Would catch a resumed run that forgets the plan before and chooses other layers."""
    costs = synthetic_costs(4, architecture=MODEL, methods=FORMULA_METHODS, memory_bytes=2**24)
    online = RunPlanner(costs=costs, options=_planner(smoothing=0.9))
    batches = [Lengths.of(range(1, 400, step)) for step in (3, 7, 5)]
    plans = [online.plan(batch).plan for batch in batches[:2]]
    other = RunPlanner(costs=costs, options=_planner(smoothing=0.9))
    other.restore(online.state())
    assert online.plan(batches[2]).plan == other.plan(batches[2]).plan
    fresh = RunPlanner(costs=costs, options=_planner())
    assert "before" not in fresh.state()
    assert fresh.plan(batches[0]).plan.hash == plans[0].hash


@pytest.mark.long
def test_a_run_uses_the_methods_of_its_list(tmp_path: Path) -> None:
    """Would catch a list that is read and not obeyed, a method that trains to another loss, and a
    report that says nothing of it."""
    config = write_job(tmp_path, steps=3, candidates=())
    common = ("--set", "model.ffn=96", "--set", "planner.group_sizes=[2]")
    listed = ("--set", 'planner.methods=["megatron_ts+none", "metp/ulysses_z"]')
    code, _, err = run("train", config, "--out", tmp_path / "listed", *common, *listed)
    assert code == 0, err
    code, _, err = run(
        "train",
        config,
        "--out",
        tmp_path / "auto",
        *common,
        "--set",
        'planner.candidates=["megatron_cz"]',
        "--set",
        "run.check_finite=true",
    )
    assert code == 0, err
    used = {m["layers"] for row in metrics(tmp_path / "listed") for m in row["micro_batches"]}
    for text in used:
        first, second = LayerPlan.parse(text).options
        assert str(first) == "megatron_ts"
        assert (second.attention, second.feed_forward) == ("metp", "ulysses_z")
    losses = [[row["loss"] for row in metrics(tmp_path / name)] for name in ("listed", "auto")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # In an interpreter of its own: what draws may hang in a fork of a process that has drawn.
    command = [sys.executable, "-m", "headrace", "report", str(tmp_path / "listed")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert said.returncode == 0, said.stderr
    assert "megatron_ts" in said.stdout + (tmp_path / "listed" / "report.html").read_text()


def test_a_method_that_no_group_can_run_is_told_at_once(tmp_path: Path) -> None:
    """Would catch a traceback of a rank, or training on single ranks without a word."""
    config = write_job(tmp_path, steps=3, candidates=())
    code, out, err = run(
        "train",
        config,
        "--out",
        tmp_path / "run",
        "--set",
        'planner.methods="megatron_ts"',
        "--set",
        "model.kv_heads=1",
    )
    assert (code, out) == (2, "")
    assert "planner.methods: got megatron_ts, wanted megatron_ts runs on at most 1 rank," in err
    assert "these would do" in err
    assert "Traceback" not in err
