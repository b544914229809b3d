"""``benchmarks/hetero.py``: its quick sections, and its arithmetic by hand."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import hetero
import hetero_ablation
import hetero_breakdown
import hetero_ranks
import hetero_scenarios
import numpy as np
import pytest
from given_strategies import table_of

from benchmarks.scripts import run
from headrace.costs.pipeline_costs import PipelineCosts, SchemeCost
from headrace.planning import Problem
from headrace.spec import Architecture, Scheme
from headrace.spec.architecture import parameter_count

TINY = Architecture(layers=2, hidden=8, heads=4, kv_heads=4, ffn=256, vocabulary=16, tied=False)
NORMS = (2 * 2 + 1) * 8
MATRICES = 2 * (4 * 8 * 8 + 3 * 8 * 256) + 2 * 16 * 8


QUICK: argparse.Namespace = hetero.options(["--quick", "--iterations", "2"])


def costs_of(**caps: int) -> PipelineCosts:
    """Schemes that hold so many tokens; of several devices each is slower by a fifth."""
    return PipelineCosts(
        schemes=tuple(
            SchemeCost(
                scheme=Scheme.parse(name),
                a_s=0.0,
                b_s=1e-3 if name == "cp1" else 0.6e-3,
                c_s=0.01,
                max_length={4: cap},
            )
            for name, cap in caps.items()
        )
    )


def test_split_sequences_help_and_are_planned_no_worse() -> None:
    """Would catch schemes with context parallelism that nobody is offered, or that break a
    planner."""
    one = hetero_scenarios.scenario_list(quick=True)[2]
    plain = hetero_scenarios.steps_of(one, 1, 0)
    split = hetero_scenarios.steps_of(one, 1, 0, 0.05)
    for name in ("headrace", "static"):
        assert split[name]["steps_s"][0] <= plain[name]["steps_s"][0] * (1 + 1e-9), name
    assert split["headrace"]["steps_s"][0] <= split["hydraulis"]["steps_s"][0] * (1 + 1e-9)
    assert "cp" in " ".join(split["headrace"]["strategies"])


def test_ours_is_never_behind_and_ahead_where_strategies_matter() -> None:
    """Would catch a planner that falls behind either form of Hydraulis' or a baseline, a stronger
    form that is behind static or the weaker one, a bound that a plan beats, and a goal that is said
    to be met where it is not."""
    found = hetero_scenarios.scenarios(QUICK)
    assert len(found["rows"]) == found["scenarios"] == 4
    assert set(found["scenarios_behind"].values()) == {0}
    assert found["behind_static"]["hydraulis"] > found["behind_static"]["hydraulis-tuned"] == 0
    for row in found["rows"]:
        planned, mean = row["planned"], row["mean_s"]
        assert {len(own["steps_s"]) for own in planned.values()} == {found["iterations"]}
        for mine, theirs, tuned, bound_s in zip(
            planned["headrace"]["steps_s"],
            planned["hydraulis"]["steps_s"],
            planned["hydraulis-tuned"]["steps_s"],
            planned["headrace"]["bounds_s"],
            strict=True,
        ):
            assert bound_s * (1 - 1e-9) <= mine <= tuned * (1 + 1e-4), row["scenario"]
            assert tuned <= theirs * (1 + 1e-9), row["scenario"]
        baselines = [mean[name] for name in hetero_scenarios.BASELINES]
        assert row["over_best"] == pytest.approx(min(baselines) / mean["headrace"])
        assert 1 < row["over_best"] <= row["at_most"] * (1 + 1e-9)
        assert row["of_bound"] == pytest.approx(row["over_best"] / row["at_most"])
        assert 1 - 1e-9 <= row["over_homogeneous"] <= row["over_best"]
        assert row["over_hydraulis_tuned"] <= row["over_homogeneous"] * (1 + 1e-9)
        assert row["goal_met"] == (row["over_best"] >= 1.32)
        assert mean["deepspeed-like"] >= mean["megatron-like"] * (1 - 1e-9)
    assert found["met"] == sum(row["goal_met"] for row in found["rows"]) >= 2
    most = found["ratios"]["over_best"]["most"]
    assert max(row["over_best"] for row in found["rows"]) == most > 1.6
    (table,) = hetero_scenarios.scenario_tables(found)
    assert [column.header for column in table.columns][-6:-1] == [
        "over\nbest",
        "over\nhomogeneous",
        "over\nhydraulis",
        "over\nhydraulis\ntuned",
        "of\nbound",
    ]


def test_every_idea_of_the_ablation_adds() -> None:
    """Would catch a step of the ablation that is slower than the one before it, and a strategy that
    is searched so badly that several schemes gain nothing."""
    for row in hetero_ablation.ablation(QUICK)["rows"]:
        ratios = [row["throughput"][name] for name in ("base", "a", "b", "c", "d, filled", "d")]
        assert all(after >= before * 0.99 for before, after in pairwise(ratios)), ratios
        assert ratios[0] == 1
        assert ratios[3] > 1.1 * ratios[2]
        assert ratios[5] > 1.5


def test_the_breakdown_adds_up() -> None:
    """Would catch overlap that costs seconds, bytes beyond the bound W / TP of each device, and
    rows that are no sums."""
    found = hetero_breakdown.breakdown(QUICK)
    for columns in (*found["readings"].values(), found["paper"]):
        for own in columns.values():
            assert own["E2E"] == pytest.approx(own["P"] + own["O"] + own["O-P"], abs=0.006)
    for own in found["readings"].values():
        assert 0 < own["with overlap"]["O-P"] < own["without overlap"]["O-P"]
        assert own["homogeneous"]["O-P"] < own["without overlap"]["O-P"]
        assert own["homogeneous"]["P"] > own["without overlap"]["P"]
    most, whole = found["most_bytes"], found["weights_bytes"]
    assert whole == pytest.approx(2 * 32.5e9, rel=0.01)
    assert most["homogeneous"] == pytest.approx(whole / 16 * 3 / 4, rel=0.03)
    assert most["heterogeneous"] <= whole / 4 * 1.1
    assert found["their_static"]["most_bytes"] == pytest.approx(whole / 8 * 7 / 8, rel=0.03)


def test_bytes_of_a_pull_by_hand() -> None:
    """Would catch own rows that are counted, a replica that is not, and nodes taken for one."""
    assert parameter_count(TINY) == NORMS + MATRICES
    pipelines = hetero_breakdown.placed([Scheme(tensor=2), Scheme(), Scheme()])
    found = hetero_breakdown.moved(TINY, pipelines, 4, 2, "even")
    # All weights are stored in four equal parts. Ranks 0 and 1 work with one half of the matrices
    # each, which ranks 0, 1 and 2, 3 store, and all norms; ranks 2 and 3 with everything.
    quarter, norm = MATRICES // 4, NORMS // 4
    received = [
        [quarter + norm, norm, quarter + norm, quarter + norm],
        [2 * norm, 2 * quarter + 2 * norm, 2 * quarter + 2 * norm, 2 * quarter + 2 * norm],
    ]
    sent = [
        [norm, quarter + norm, quarter + norm, quarter + norm],
        [2 * quarter + 2 * norm, 2 * quarter + 2 * norm, quarter + 2 * norm, quarter + 2 * norm],
    ]
    assert found.received.tolist() == (2.0 * np.array(received)).tolist()
    assert found.sent.tolist() == (2.0 * np.array(sent)).tolist()
    assert found.received.sum() == found.sent.sum()


def test_a_homogeneous_pull_is_an_all_gather() -> None:
    """Would catch parts that do not lie within their owner's rows: each rank gets what the other
    replicas of its own rows store, and nothing of other stages."""
    scheme = Scheme(tensor=2, pipeline=2)
    pipelines = hetero_breakdown.placed([scheme, scheme])
    found = hetero_breakdown.moved(TINY, pipelines, 8, 4, "aligned")
    layer = 4 * 8 * 8 + 3 * 8 * 256
    first = (layer + 16 * 8) / 2 / 2 + 16 * 3 / 4
    last = (layer + 16 * 8) / 2 / 2 + 24 * 3 / 4
    everything = found.received.sum(axis=0) / 2
    assert everything.tolist() == [first, first, last, last] * 2
    assert found.sent.sum(axis=0).tolist() == found.received.sum(axis=0).tolist()


def test_seconds_of_links() -> None:
    """Would catch links of a node taken for links of its devices, and sides that are added."""
    moved = hetero_breakdown.Moved(
        received=np.array([[4.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]]),
        sent=np.array([[0.0, 2.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]]),
    )
    links = hetero_breakdown.Links(node=2, inside=4.0, between=2.0)
    assert links.seconds(moved) == 1.5
    shared = hetero_breakdown.Links(node=2, inside=4.0, between=1.0, shared=True)
    assert shared.seconds(moved) == 3.0
    assert hetero_breakdown.Links(node=2, inside=1.0, between=2.0).seconds(moved) == 4.0


def test_what_is_not_hidden() -> None:
    """Would catch a first layer that is hidden behind nothing, and stages that do not wait in
    their bubble."""
    exposed_s = hetero_breakdown.exposed_s
    assert exposed_s(2.0, [[1.0] * 4], 8.0) == pytest.approx(0.5)
    # Slower than the computation: everything but the last layer's computation is exposed.
    assert exposed_s(8.0, [[1.0] * 4], 2.0) == pytest.approx(8.0 + 0.5 - 2.0)
    assert exposed_s(2.0, [[1.0], [1.0]], 0.5) == pytest.approx(2.0)
    assert exposed_s(2.0, [[1.0] * 4, [1.0] * 4], 1.8) == pytest.approx(0.65)
    assert exposed_s(0.0, [[1.0] * 4, [1.0] * 4], 1.0) == 0.0


def test_packs_to_the_context_hold_everything_once() -> None:
    """Would catch a sequence that is lost or doubled, packs beyond the context, and seconds
    without the constants of each pack."""
    table = table_of(Problem(costs=costs_of(cp1=100, tp2=200), devices=4), [60, 50, 40, 30, 20, 10])
    k = list(map(str, table.schemes)).index("tp2")
    for make in (hetero_scenarios.packed_to_context, hetero_scenarios.dealt):
        found = make(table, k, 80)
        assert found is not None
        parts = [part for own in found.packs for part in own.bins]
        assert sorted(i for part in parts for i in part) == list(range(6))
        assert all(sum(table.tokens[i] for i in part) <= 80 for part in parts)
        each_s = sum(own.seconds for own in found.packs)
        assert each_s == pytest.approx(210 * 0.6e-3 + 0.01 * len(parts))
        assert make(table, k, 201) is None


def test_strategies_in_turn_pay_for_their_changes() -> None:
    """Would catch a change that costs nothing, or that is paid where one range has no sequence."""
    costs = costs_of(cp1=5000, tp2=20_000)
    found = hetero_scenarios.in_turn(costs, 4, [[100] * 8, [100] * 8 + [9000]], (4096, 16_384))
    assert found["strategies"] == ["4*cp1", "2*tp2"]
    short_s = 2 * 0.1 + 0.01
    assert found["steps_s"][0] == pytest.approx(short_s)
    assert found["steps_s"][1] == pytest.approx(short_s + 5.4 + 0.01 + found["change_s"])
    assert found["change_s"] > 0.5


def test_lengths_are_truncated_to_the_context() -> None:
    """Would catch scenarios whose longest sequences are beyond what static strategies hold, and
    draws that change from run to run."""
    for scenario in hetero_scenarios.scenario_list(quick=False):
        lengths = scenario.lengths(2, 0)
        assert lengths == scenario.lengths(2, 0)
        assert max(map(max, lengths)) <= scenario.context
        assert max(map(sum, lengths)) <= scenario.tokens
        kept = hetero_scenarios.holding(scenario.costs_of(), scenario.devices, scenario.context)
        assert kept.schemes
    assert len(hetero_scenarios.scenario_list(quick=False)) == 38
    assert len(hetero_scenarios.scenario_list(quick=True)) == 4


@pytest.mark.long
def test_strategies_are_measured_on_ranks(tmp_path: Path) -> None:
    """Would catch a strategy that is not run, and a step without its parts."""
    ended = run("hetero.py", "--quick", "--only", "ranks", json_in=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.numbers is not None
    assert ended.numbers["machine"]["cores"] >= 1
    for count, strategies in hetero_ranks.STRATEGIES.items():
        own = ended.numbers["ranks"][str(count)]["strategies"]
        assert list(own) == list(strategies)
        for one in own.values():
            assert min(one["measured_s"] + one["predicted_s"]) > 0
            assert list(one["overlap"]) == list(one["apart"]) == ["E2E", "P", "O", "O-P"]
