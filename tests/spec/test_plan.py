"""Plans: JSON, hash, text, and what contradicts itself."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import (
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Scheme,
    Stage,
    Strategy,
)
from plans import random_plan, random_staged_plan

GOLDEN = Path(__file__).parents[1] / "golden"
TWO = LayerPlan.parse("2*local")


def pipe(*ranks: int) -> Pipeline:
    return Pipeline(scheme=Scheme(context=len(ranks)), ranks=ranks)


def staged(*ranks: int, shares: tuple[int, ...] = (), width: int = 1) -> Pipeline:
    scheme = Scheme(tensor=width, pipeline=len(ranks) // width)
    return Pipeline(scheme=scheme, ranks=ranks, shares=shares)


def micro(pipeline: int, *sequences: int) -> MicroBatch:
    return MicroBatch(pipeline=pipeline, sequences=sequences, layers=TWO)


def by_hand(**changes: Any) -> Plan:
    """Three sequences on three ranks: the longest on two of them, the others on the third."""
    fields: dict[str, Any] = {
        "lengths": Lengths(tokens=(40, 900, 50)),
        "devices": 3,
        "pipelines": (pipe(0, 1), pipe(2), pipe(0)),
        "micro_batches": (micro(0, 1), micro(1, 2, 0)),
        "predicted_s": 1.25,
        "lower_bound_s": 1.0,
        "why": ("one long sequence", "the rest is short"),
    }
    return Plan(**(fields | changes))


@st.composite
def drawn(draw: st.DrawFn) -> Plan:
    lengths = Lengths.of(draw(st.lists(st.integers(1, 9999), min_size=1, max_size=20)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    devices, layers = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    if draw(st.booleans()):
        plan = random_staged_plan(rng, devices, layers, draw(st.integers(1, 9)))
    else:
        plan = random_plan(lengths, devices, layers, rng)
    return plan.replace(predicted_s=draw(st.floats(0, 9)), why=("a", "b"), seed=7)


@settings(deadline=None)
@given(drawn())
def test_json_reads_back(plan: Plan) -> None:
    """Catches a decision that the hash and the journal would miss."""
    back = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert back == plan
    assert back.hash == plan.hash


@settings(deadline=None)
@given(drawn())
def test_bytes_read_back(plan: Plan) -> None:
    """Catches a decision, or what is said of it, that other ranks would not get."""
    back = Plan.from_bytes(plan.to_bytes())
    assert back == plan
    assert back.hash == plan.hash


@pytest.mark.parametrize("cut", [0, 1, 40, -8, -1])
def test_bytes_that_are_no_plan_are_refused(cut: int) -> None:
    """Catches a traceback for what was cut on its way, and a plan of what was left."""
    with pytest.raises(SpecError, match="plan: got "):
        Plan.from_bytes(by_hand().to_bytes()[:cut])


def test_bytes_say_layers_once() -> None:
    """Catches what every rank reads growing with the layers of every micro-batch."""
    many = by_hand(
        lengths=Lengths.of([7] * 300), micro_batches=tuple(micro(i % 3, i) for i in range(300))
    )
    deep = LayerPlan.parse("30*local 30*local+full")
    deeper = tuple(replace(one, layers=deep) for one in many.micro_batches)
    assert len(many.replace(micro_batches=deeper).to_bytes()) < len(many.to_bytes()) + 99
    assert len(many.to_bytes()) < 300 * 8 * 8


def test_the_hash_is_over_decisions_only() -> None:
    """Catches ranks that refuse each other over a prediction."""
    plan = by_hand()
    for same in (
        {"predicted_s": 9.0},
        {"lower_bound_s": 0.1},
        {"why": ()},
        {"planner": "static"},
        {"seed": 5},
    ):
        assert plan.replace(**same).hash == plan.hash, same


OTHERS: list[dict[str, Any]] = [
    {"lengths": Lengths(tokens=(40, 901, 50))},
    {"lengths": Lengths(tokens=(40, 900, 50), ids=(3, 1, 2))},
    {"devices": 4},
    {"pipelines": (pipe(1, 0), pipe(2), pipe(0))},
    {"pipelines": (pipe(1, 2), pipe(2), pipe(0))},
    {"pipelines": (staged(0, 1), pipe(2))},
    {"pipelines": (staged(0, 1, shares=(1, 1)), pipe(2))},
    {"micro_batches": (micro(0, 1), micro(1, 0, 2))},
    {"micro_batches": (micro(1, 2, 0), micro(0, 1))},
    {"micro_batches": (micro(0, 1), micro(2, 2, 0))},
    {"micro_batches": (micro(0, 1), micro(1, 2), micro(1, 0))},
    {
        "micro_batches": (
            micro(0, 1),
            MicroBatch(
                pipeline=1, sequences=(2, 0), layers=LayerPlan.parse("1*local 1*local+full")
            ),
        )
    },
    {"micro_batches": (micro(0, 1), replace(micro(1, 2, 0), order="zigzag"))},
    {"working": "sharded"},
    {"semantics": "lockstep"},
]


@pytest.mark.parametrize("changes", OTHERS, ids=lambda changes: next(iter(changes)))
def test_the_hash_is_over_every_decision(changes: dict[str, Any]) -> None:
    """Catches ranks that run different plans and hang."""
    assert by_hand(**changes).hash != by_hand().hash


def test_shares_alone_change_the_hash() -> None:
    """Catches ranks that hold other layers than their neighbours send them activations for."""
    plans = [
        by_hand(pipelines=(staged(0, 1, shares=shares), pipe(2))) for shares in ((), (1, 2), (2, 1))
    ]
    assert len({plan.hash for plan in plans}) == 3


def test_what_a_plan_says_of_itself() -> None:
    """Catches pipelines without work in the strategy, and lengths in corpus order."""
    plan = by_hand()
    assert plan.strategy == Strategy.parse("1*cp2 + 1*cp1")
    assert plan.gap == pytest.approx(0.25)
    assert by_hand(lower_bound_s=0.0).gap == 0
    assert plan.tokens_of(plan.micro_batches[1]) == (50, 40)
    assert plan.explain() == "one long sequence\nthe rest is short"


def test_the_printed_plan(request: pytest.FixtureRequest) -> None:
    """Catches a changed table that nobody looked at; --update-golden writes it anew."""
    path, text = GOLDEN / "printed-plan.txt", f"{by_hand()}\n"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a sequence missing": (
        {"micro_batches": (micro(0, 1), micro(1, 2))},
        "got 2 (1 missing), wanted each of 3 exactly once",
    ),
    "a sequence twice": (
        {"micro_batches": (micro(0, 1), micro(1, 2, 0), micro(1, 2))},
        "got 4 (0 missing)",
    ),
    "a sequence of another batch": (
        {"micro_batches": (micro(0, 1), micro(1, 2, 0, 3))},
        "got 4 (0 missing)",
    ),
    "another sequence instead": (
        {"micro_batches": (micro(0, 1), micro(1, 2, 2))},
        "got 3 (1 missing)",
    ),
    "no micro-batch": ({"micro_batches": ()}, "got 0 (3 missing)"),
    "a rank beyond": ({"devices": 2}, "rank: got 2, wanted < 2"),
    "a pipeline beyond": (
        {"micro_batches": (micro(0, 1), micro(3, 2, 0))},
        "pipeline of a micro-batch: got 3, wanted 0 to 2",
    ),
    "a negative pipeline": (
        {"micro_batches": (micro(0, 1), micro(-1, 2, 0))},
        "pipeline of a micro-batch: got -1",
    ),
    "an empty micro-batch": (
        {"micro_batches": (micro(0, 1), micro(1, 2, 0), micro(1))},
        "micro-batch: got no sequences",
    ),
    "a shared rank of a staged pipeline": (
        {"pipelines": (Pipeline(scheme=Scheme(pipeline=2), ranks=(0, 1)), pipe(2), pipe(0))},
        "rank 0: got in pipelines 0 and 2, wanted one pipeline",
    ),
    "a staged pipeline on a shared rank": (
        {"pipelines": (pipe(0, 1), pipe(2), Pipeline(scheme=Scheme(pipeline=2), ranks=(2, 1)))},
        "rank 2: got in pipelines 1 and 2",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_contradictions_are_refused(case: str) -> None:
    """Catches a plan that would train on a sequence twice or never, or on a rank nobody is."""
    changes, text = BAD[case]
    with pytest.raises(SpecError) as caught:
        by_hand(**changes)
    assert text in str(caught.value)


def test_ranks_of_a_pipeline() -> None:
    """Catches a group that is smaller than its scheme, or meets itself."""
    with pytest.raises(SpecError, match="ranks of a cp2 pipeline: got 1, wanted 2"):
        Pipeline(scheme=Scheme(context=2), ranks=(0,))
    for ranks in ((1, 1), (0, -1)):
        with pytest.raises(SpecError, match="distinct ranks >= 0"):
            Pipeline(scheme=Scheme(context=2), ranks=ranks)


@pytest.mark.parametrize("shares", [(1,), (1, 1, 1), (2, 0), (3, -1)], ids=str)
def test_shares_are_one_count_for_each_stage(shares: tuple[int, ...]) -> None:
    """Catches a stage without layers, and layers without a stage."""
    with pytest.raises(SpecError, match=r"layers of the stages of a pp2 pipeline: got \("):
        staged(0, 1, shares=shares)


def test_stages_of_a_pipeline() -> None:
    """Catches layers that two stages hold, and ranks of a stage that are not neighbours in the
    pipeline's list. Members stand by rank: every rank of a group lists it in one order."""
    pipeline = staged(5, 1, 0, 4, 2, 3, width=2)
    first, middle, last = pipeline.stages(7)
    assert first == Stage(index=0, count=3, ranks=(1, 5), start=0, stop=2)
    assert middle == Stage(index=1, count=3, ranks=(0, 4), start=2, stop=5)
    assert last == Stage(index=2, count=3, ranks=(2, 3), start=5, stop=7)
    assert pipeline.stage_of(4, 7) == middle
    with pytest.raises(SpecError, match="rank 6: got outside the pipeline"):
        pipeline.stage_of(6, 7)
    assert pipe(3, 1).stages(2) == (Stage(index=0, count=1, ranks=(1, 3), start=0, stop=2),)


def test_stages_follow_the_shares() -> None:
    """Catches shares that are stored but not used, or used for another model."""
    pipeline = staged(0, 1, 2, shares=(1, 4, 2))
    assert [(s.start, s.stop) for s in pipeline.stages(7)] == [(0, 1), (1, 5), (5, 7)]
    with pytest.raises(SpecError, match=r"got \(1, 4, 2\), wanted 8 in sum"):
        pipeline.stages(8)
    with pytest.raises(SpecError, match="stages of a pipeline: got 3 for 2 layers"):
        staged(0, 1, 2).stages(2)


def test_a_pipeline_without_shares_is_stored_as_before() -> None:
    """Catches a hash that changes for plans without stages, and plans of old that do not open."""
    for stored in by_hand().to_json()["pipelines"]:
        assert set(stored) == {"scheme", "ranks"}
    stored = by_hand(pipelines=(staged(0, 1, shares=(2, 1)), pipe(2))).to_json()["pipelines"][0]
    assert stored == {"scheme": "pp2", "ranks": [0, 1], "shares": [2, 1]}


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:1]):
        found.append((*at, key))
        if isinstance(inner, dict | list):
            found += _paths(inner, (*at, key))
    return found


PATHS = _paths(by_hand().to_json())


@pytest.mark.parametrize(
    "path", [p for p in PATHS if isinstance(p[-1], str) and p[-1] != "order"], ids=str
)
def test_a_missing_key_is_named(path: tuple[Any, ...]) -> None:
    """Catches a KeyError where half a journal line was read."""
    value = by_hand().to_json()
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    with pytest.raises(SpecError, match=path[-1]):
        Plan.from_json(value)


def test_a_plan_of_old_has_its_tokens_in_natural_order() -> None:
    """Catches a journal that no longer opens because it was written before there was a choice."""
    value = by_hand().to_json()
    for micro_batch in value["micro_batches"]:
        del micro_batch["order"]
    assert Plan.from_json(value) == by_hand()


def test_a_plan_of_old_whose_weights_are_whole_has_them_replicated() -> None:
    """Catches a plan, a journal or a checkpoint that no longer opens for the word of before."""
    assert Plan.load(GOLDEN / "weights-whole" / "plan.json") == by_hand()
    with pytest.raises(SpecError, match="got 'whole', wanted replicated or sharded"):
        by_hand(working="whole")


def test_an_unknown_token_order_is_refused() -> None:
    """Catches a word that the ranks would read as the other order: scores of other tokens."""
    with pytest.raises(SpecError, match="token order of a micro-batch: got 'zig', wanted natural"):
        replace(micro(0, 1), order="zig")  # type: ignore[arg-type]


def edited(path: tuple[Any, ...], junk: Any) -> dict[str, Any]:
    """A plan in JSON with ``junk`` at the place that ``path`` leads to."""
    value = holder = by_hand().to_json()
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = junk
    return value


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_value_of_another_type_is_no_traceback(path: tuple[Any, ...]) -> None:
    """Catches an error of Python's own where a file was edited by hand."""
    for junk in (None, 3.5, -1, "x", [[]], {"a": 1}):
        with contextlib.suppress(SpecError):
            Plan.from_json(edited(path, junk))


UNUSABLE: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("predicted_s",): (float("nan"), float("inf"), -1.0, "1", True),
    ("lower_bound_s",): (float("nan"), -float("inf"), -1.0, "1"),
    ("devices",): (4.0, 10**9, "4", True, 0),
    ("seed",): (1.5, "a", -1, None),
    ("planner",): (5, None),
    ("why",): ("abc", [1], {"a": 1}),
    ("pipelines", 0, "ranks"): ([0.0, 1.0], ["0", "1"], [0, True]),
    ("micro_batches", 0, "pipeline"): (0.0, "0", False),
    ("micro_batches", 0, "sequences"): ([0.0], ["0"]),
    ("lengths", "ids"): (["7", "8", "9"], [1.0, 2.0, 3.0]),
    ("lengths", "tokens"): ([100.0, 50.0, 40.0], ["100", "50", "40"]),
}


@pytest.mark.parametrize("path", UNUSABLE, ids=str)
def test_values_that_nothing_can_run_are_refused(path: tuple[Any, ...]) -> None:
    """Catches a plan that is read, and fails when it is printed, hashed or simulated."""
    for junk in UNUSABLE[path]:
        with pytest.raises(SpecError):
            Plan.from_json(edited(path, junk))


def test_files_that_are_no_plan_are_refused(tmp_path: Path) -> None:
    """Catches tracebacks of Python's own for files that are nested too deep, and for paths."""
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(SpecError, match=r"plan .*deep\.json: got no JSON \(nested too deep\)"):
        Plan.load(tmp_path / "deep.json")
    for nowhere in ("a\0b", None):
        with pytest.raises(SpecError, match="got the path"):
            by_hand().save(nowhere)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="got the path"):
            Plan.load(nowhere)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [[], "plan", None, 3], ids=str)
def test_what_is_no_object_is_refused(value: Any) -> None:
    """Catches a file that is JSON, but of something else."""
    with pytest.raises(SpecError, match="wanted its JSON form"):
        Plan.from_json(value)


@pytest.mark.parametrize("changes", [{"working": "half"}, {"semantics": "loose"}], ids=str)
def test_unknown_words_are_refused(changes: dict[str, Any]) -> None:
    """Catches a word of another version, which the ranks would read as one of two."""
    with pytest.raises(SpecError):
        Plan.from_json(by_hand().to_json() | changes)
