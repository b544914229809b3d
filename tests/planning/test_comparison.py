"""Planners compared over several batches: the numbers are those of their plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import headrace as hr
from headrace.costs import synthetic_costs
from headrace.engine.compared_planners import compare_plans
from headrace.planners import PLANNERS
from headrace.planning import plan as plan_batch
from headrace.spec.comparison import Comparison, PlannedBatch, PlannerResult

NAMES = ("headrace", "best static of each batch", "best static", "bucket", "packed")
MODEL = hr.Architecture.preset("llama-tiny")
GIB = 2**30
GUIDE = Path(__file__).parents[2] / "docs/guides/simulate.md"


@pytest.fixture(scope="module")
def problem() -> hr.Problem:
    return hr.Problem(costs=hr.costs.roofline(MODEL, "h100", devices=8))


@pytest.fixture(scope="module")
def batches() -> tuple[hr.Lengths, ...]:
    """Batches of which the best group size differs: of one long sequence, and of short ones."""
    drawn = hr.lengths.batches("lognormal:median=900,sigma=1.5,max=32Ki", 3, tokens="64Ki")
    return (hr.Lengths.of([200_000, 30]), *drawn, hr.Lengths.of([64] * 64))


@pytest.fixture(scope="module")
def found(problem: hr.Problem, batches: tuple[hr.Lengths, ...]) -> Comparison:
    return hr.compare(batches, problem)


def test_numbers_are_those_of_the_plans(
    problem: hr.Problem, batches: tuple[hr.Lengths, ...], found: Comparison
) -> None:
    """Catches seconds of another batch or planner, a fixed size that is not the best in all or
    changes between batches, and ratios turned upside down."""
    assert tuple(result.name for result in found.results) == NAMES
    own = [hr.plan(lengths, problem).predicted_s for lengths in batches]
    assert found.results[0].seconds == tuple(own)
    sizes = [hr.baselines(lengths, problem) for lengths in batches]
    best = [min(plan.predicted_s for plan in each.values()) for each in sizes]
    assert found.result("best static of each batch").seconds == pytest.approx(best)
    in_all = {
        size: [each[f"static-cp{size}"].predicted_s for each in sizes]
        for size in problem.static_sizes
        if all(f"static-cp{size}" in each for each in sizes)
    }
    fixed = min(in_all, key=lambda size: sum(in_all[size]))
    assert found.static_size == fixed
    assert found.result("best static").seconds == pytest.approx(in_all[fixed])
    assert sum(in_all[fixed]) > 1.01 * sum(best), "one size is worse than the best of each batch"
    for name, seconds in (("best static", in_all[fixed]), ("best static of each batch", best)):
        each = [other / mine for other, mine in zip(seconds, own, strict=True)]
        ratios = found.ratios(name)
        assert ratios is not None
        assert (ratios.least, ratios.most) == pytest.approx((min(each), max(each)))
        assert ratios.mean == pytest.approx(sum(each) / len(each))
        assert ratios.least >= 1 - 1e-9
    for name in ("bucket", "packed"):
        named = problem.replace(planner=name)
        wanted = [plan_batch(named, b, generators=PLANNERS[name]).predicted_s for b in batches]
        assert found.result(name).seconds == tuple(wanted)
    tokens = sum(lengths.total for lengths in batches)
    assert found.tokens_per_s("headrace") == pytest.approx(tokens / sum(own) / 8)
    assert found.gap == pytest.approx(sum(own) / sum(found.bounds_s) - 1)


def test_nobody_is_far_behind_where_all_sequences_are_short(problem: hr.Problem) -> None:
    """Catches a gain over bucket parallel that comes from batches that nobody would choose: with
    launches of one sequence each headrace was 150 times as fast."""
    found = hr.compare([[64] * 4096], problem)
    ratios = found.ratios("bucket")
    assert ratios is not None
    assert 1 - 1e-9 <= ratios.most < 1.1


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_idle_shares_are_those_of_the_clock(scale: float) -> None:
    """Catches shares that forget the update, the costs' scale, or that a stage has only some of
    its pipeline's ranks."""
    costs = synthetic_costs(4, 12, memory_bytes=int(2.3 * GIB)).replace(scale=scale)
    problem = hr.Problem(costs=costs, holding=("replicated",))
    batches = [[10_000, 10, 10], [1000, 1000, 500, 20]]
    found = hr.compare(batches, problem)
    assert any(scheme.pipeline > 1 for scheme, _ in found.plans[0].strategy.counts)
    for plan, batch in zip(found.plans, found.results[0].batches, strict=True):
        assert batch is not None
        assert batch.idle == pytest.approx(hr.simulate(plan, problem).idle, abs=1e-9)


def test_a_planner_that_cannot_hold_a_batch_has_no_numbers_there() -> None:
    """Catches means and ratios over batches that were left out, a fixed size that holds some of the
    batches only, and an exception where only rivals fail."""
    costs = synthetic_costs(4, 12, memory_bytes=int(2.3 * GIB))
    problem = hr.Problem(costs=costs, holding=("replicated",))
    batches = [[1000, 1000, 500, 20], [10_000, 10, 10]]
    found = hr.compare(batches, problem)
    assert found.results[0].held == (0, 1)
    each = found.result("best static of each batch")
    assert each.held == (0,)
    assert each.batches[1] is None
    assert each.seconds[1] is None
    assert each.mean_s == each.seconds[0]
    assert found.tokens_per_s(each.name) == pytest.approx(2520 / (each.mean_s or 0) / 4)
    ratios = found.ratios(each.name)
    assert ratios is not None
    assert ratios.least == ratios.mean == ratios.most
    assert found.static_size is None
    fixed = found.result("best static")
    assert fixed.held == ()
    assert (fixed.mean_s, fixed.idle) == (None, None)
    assert found.ratios("best static") is None
    assert found.tokens_per_s("best static") is None
    told = str(found)
    assert "0 of 2" in told
    assert "1 of 2" in told
    [nothing] = [one for one in found.to_json()["planners"] if one["name"] == "best static"]
    assert nothing["seconds"] == nothing["strategies"] == nothing["idle"] == [None, None]
    assert nothing["ratios"] is None


def test_a_batch_that_headrace_cannot_hold_is_named() -> None:
    """Catches an error that does not say which of twenty batches it is."""
    problem = hr.Problem(costs=synthetic_costs(2, 12, memory_bytes=2 * GIB))
    with pytest.raises(hr.errors.InfeasiblePlan, match=r"^batch 1, sequence 0 of 9,000,000"):
        hr.compare([[100], [9_000_000]], problem)


@pytest.mark.parametrize("semantics", ["free", "lockstep"])
def test_published_costs_of_groups(semantics) -> None:
    """Catches planners that compare under other semantics than those of the problem."""
    costs = hr.costs.published("flexsp-7b-a100")
    problem = hr.Problem(costs=costs, devices=8, semantics=semantics)
    batches = hr.lengths.batches("lognormal:median=2000,sigma=1.5,max=32Ki", 2, tokens="128Ki")
    found = hr.compare(batches, problem)
    assert {plan.semantics for plan in found.plans} == {semantics}
    assert found.results[0].seconds == tuple(hr.plan(b, problem).predicted_s for b in batches)
    for result in found.results:
        assert result.held == (0, 1)
        for batch in result.batches:
            assert batch is not None
            assert batch.idle is not None
            assert 0 <= batch.idle < 1


def test_lockstep_of_a_model_has_no_idle_share() -> None:
    """Catches a share of seconds in which gathers of weights would count as idle."""
    costs = hr.costs.roofline(MODEL, "h100", devices=4)
    found = hr.compare([[4000, 200, 100]], hr.Problem(costs=costs, semantics="lockstep"))
    assert found.results[0].idle is None
    assert found.results[0].mean_s == found.plans[0].predicted_s
    assert found.rows()[0][3] == "-"


def test_pipelines_are_refused_by_name() -> None:
    """Catches a comparison with groups of costs that have none."""
    problem = hr.Problem(costs=hr.costs.published("hydraulis-7b"), devices=32)
    with pytest.raises(hr.errors.SpecError, match="published costs of pipelines"):
        hr.compare([[1000]], problem)


def test_plans_of_another_planner_are_not_called_headrace(problem: hr.Problem) -> None:
    """Catches a configuration's bucket parallel under the name of headrace."""
    chosen = problem.replace(planner="bucket")
    lengths = hr.Lengths.of([3000, 100, 100])
    made = hr.plan(lengths, chosen)
    found = compare_plans([made], chosen)
    assert [result.name for result in found.results] == ["planner bucket", *NAMES[1:]]
    assert found.result("planner bucket").seconds == found.result("bucket").seconds


def test_texts_and_json(found: Comparison, batches: tuple[hr.Lengths, ...]) -> None:
    """Catches a planner or batch that the table or the JSON leaves out."""
    lines = str(found).splitlines()
    assert len(lines) == len(NAMES) + 2
    assert [line.split("  ")[0] for line in lines[1:-1]] == [*map(found.label, NAMES)]
    assert str(found.static_size) in found.label("best static")
    value = json.loads(json.dumps(found.to_json()))
    assert [batch["tokens"] for batch in value["batches"]] == [b.total for b in batches]
    assert [batch["longest"] for batch in value["batches"]] == [b.longest for b in batches]
    assert [one["name"] for one in value["planners"]] == list(NAMES)
    for one in value["planners"]:
        result = found.result(one["name"])
        assert tuple(one["seconds"]) == result.seconds
        assert one["mean_s"] == result.mean_s
        assert one["tokens_per_s_per_device"] == found.tokens_per_s(one["name"])


def test_malformed_comparisons() -> None:
    """Catches batches that are silently dropped, and a name that finds nothing."""
    plan = hr.plan([100, 20], hr.Problem(costs=synthetic_costs(2)))
    one = PlannedBatch(seconds=1.0, strategy="2*cp1", idle=0.0)
    short = PlannerResult(name="headrace", batches=())
    with pytest.raises(hr.errors.SpecError, match="batches of planner headrace: got 0, wanted 1"):
        Comparison(devices=2, plans=(plan,), results=(short,), static_size=None)
    with pytest.raises(hr.errors.SpecError, match="none"):
        hr.compare([], synthetic_costs(2))
    whole = PlannerResult(name="headrace", batches=(one,))
    found = Comparison(devices=2, plans=(plan,), results=(whole,), static_size=None)
    with pytest.raises(hr.errors.SpecError, match="did you mean 'headrace'"):
        found.result("hedrace")


def test_progress_is_told(problem: hr.Problem) -> None:
    """Catches a long comparison that says nothing, and one that never says it is done."""
    told = list[tuple[str, int, int]]()
    batches = [[100, 20], [300], [50, 50]]
    hr.compare(batches, problem, progress=lambda *parts: told.append(parts))
    for what in ("planned batches", "compared batches"):
        assert [(done, of) for named, done, of in told if named == what] == [(1, 3), (2, 3), (3, 3)]


def test_the_guide_compares(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a line of the guide that does not run."""
    [code] = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    values: dict[str, object] = {}
    exec(code, values)
    found = values["found"]
    assert isinstance(found, Comparison)
    assert len(found.plans) == 4
    assert str(found) in capsys.readouterr().out
