"""``benchmarks/methods.py``: as a script on two ranks, and its arithmetic."""

from __future__ import annotations

from typing import Any

import methods
import pytest

from benchmarks.scripts import Ran, run
from headrace.spec import Architecture, weight_table
from headrace.spec.known_methods import FACTS

TOKENS, HIDDEN, HEADS, ELEMENT = 32, 32, 4, 4
ROW = {
    "name",
    "kind",
    "held",
    "torch",
    "ranks",
    "error",
    "sent_bytes",
    "kept_bytes",
    "peak_bytes",
    "wall_s",
    "cpu_s",
}


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(
        "methods.py",
        "--ranks",
        2,
        "--cases",
        "block",
        "--tokens",
        TOKENS,
        "--hidden",
        HIDDEN,
        "--heads",
        HEADS,
        "--rounds",
        1,
        json_in=tmp_path_factory.mktemp("methods"),
    )


def _sent(row: dict[str, Any], a: Architecture) -> float:
    """Elements that one of two ranks sends forward and backward, as methods.md says."""
    kv = a.kv_heads * a.head_features
    activations = {
        "local": 0.0,
        "ulysses_z": 2 * 0.5 * (2 * a.hidden + 2 * kv) * TOKENS / 2,
        "megatron_ts": 10 * 0.5 * a.hidden * TOKENS,
    }.get(row["name"], 6 * 0.5 * kv * TOKENS)
    gathered = row["held"] == "sharded" and row["name"] != "megatron_ts"
    weights = sum(w.elements for w in weight_table(a) if w.bucket == 1 and w.unit is not None)
    return activations + (3 * 0.5 * weights if gathered else 0.0)


def test_every_method_sends_what_its_formula_says(block: Ran) -> None:
    """Would catch a benchmark that counts only some of the traffic of headrace's sides, or runs
    another way to hold the weights than it says."""
    assert block.code == 0, block.err
    assert block.numbers is not None
    (case,) = block.numbers["cases"]
    a = Architecture.from_json(case["architecture"])
    ours = [row for row in case["sides"] if not row["torch"]]
    usable = {name for name, m in FACTS.items() if m.supports(a, 2) is None} | {"local"}
    held = {(name, how) for name in usable - {"local"} for how in ("replicated", "sharded")}
    assert {(row["name"], row["held"]) for row in ours} == held | {("local", "")}
    for row in ours:
        assert row["sent_bytes"] == ELEMENT * _sent(row, a), row["name"]


def test_torch_sides_are_there_and_send_what_they_must(block: Ran) -> None:
    """Would catch a torch side that fell back to one process, or whose traffic the counter does
    not see: a ring of two cannot send less, and torch's sends at most a third more."""
    assert block.numbers is not None
    (case,) = block.numbers["cases"]
    a = Architecture.from_json(case["architecture"])
    rows = {(row["name"], row["held"]): row for row in case["sides"] if row["torch"]}
    assert set(rows) == {
        ("one process", ""),
        ("DTensor TP + SP", "shards"),
        ("CP allgather", "replicated"),
        ("CP alltoall", "replicated"),
        ("CP allgather + FSDP2", "sharded"),
        ("CP alltoall + FSDP2", "sharded"),
    }
    activation = ELEMENT * TOKENS * HIDDEN
    every_weight = ELEMENT * sum(w.elements for w in weight_table(a) if w.bucket == 1)
    for (name, held), row in rows.items():
        gathers = 1.5 * every_weight if held == "sharded" else 0
        least = {"one process": 0, "DTensor TP + SP": 4}.get(name, 3) * activation + gathers
        assert least <= row["sent_bytes"] <= 4 / 3 * least, name


def test_the_numbers_are_complete(block: Ran) -> None:
    """Would catch a field lost, a side that is not exact but reported, a side never timed."""
    assert block.numbers is not None
    assert {"machine", "rounds", "tolerance", "cases"} == set(block.numbers)
    assert block.numbers["machine"]["host_cpu"]
    (case,) = block.numbers["cases"]
    assert (case["case"], case["ranks"], case["tokens"]) == ("block", 2, TOKENS)
    for row in case["sides"]:
        assert set(row) == ROW
        assert 0 <= row["error"] <= block.numbers["tolerance"] == methods.TOLERANCE
        assert len(row["wall_s"]) == len(row["cpu_s"]) == block.numbers["rounds"] == 1
        assert row["wall_s"][0] > 0
        assert row["cpu_s"][0] > 0
        assert row["peak_bytes"] >= row["kept_bytes"] > 0
    assert case["sides"][0]["name"] == "one process"
    compared = {(row["name"], row["held"]) for row in case["against_torch"]}
    assert compared == {(row["name"], row["held"]) for row in case["sides"] if not row["torch"]}


def test_tables_go_to_stdout_and_progress_to_stderr(block: Ran) -> None:
    """Would catch progress in a piped table, and a table without its machine or its ratios."""
    assert "threads per rank" not in block.err
    assert "block on 2 ranks: gpt 1x32" in block.out
    assert "of torch's best of the kind" in block.out
    assert "medians of 1 rounds" in block.out
    assert "torch: CP allgather + FSDP2" in block.out
    assert "checking" not in block.out
    assert "2 ranks, block: checking 1/" in block.err
    assert "2 ranks, block: round 1/1" in block.err
    assert "─" not in block.err


@pytest.mark.long
def test_several_layers_and_llama_are_compared_too(tmp_path_factory) -> None:
    """Would catch a case that only works with one layer, replicated weights or layer norms."""
    ran = run(
        "methods.py",
        "--ranks",
        2,
        "--cases",
        "model",
        "llama",
        "--tokens",
        16,
        "--hidden",
        32,
        "--heads",
        4,
        "--layers",
        2,
        "--rounds",
        1,
        json_in=tmp_path_factory.mktemp("more"),
    )
    assert ran.code == 0, ran.err
    assert ran.numbers is not None
    model, llama = ran.numbers["cases"]
    assert {row["held"] for row in model["sides"]} == {"", "sharded", "shards"}
    assert {row["name"] for row in llama["sides"] if row["torch"]} == {"one process"}
    assert [row["name"] for row in llama["against_torch"]] == ["local"]
    for case in ran.numbers["cases"]:
        assert all(row["error"] <= methods.TOLERANCE for row in case["sides"])


@pytest.mark.long
def test_four_ranks_have_composites_of_both(tmp_path_factory) -> None:
    """Would catch a composite that is compared with a plain side of torch's."""
    ran = run(
        "methods.py",
        "--ranks",
        4,
        "--cases",
        "block",
        "--tokens",
        32,
        "--hidden",
        64,
        "--heads",
        4,
        "--rounds",
        1,
        json_in=tmp_path_factory.mktemp("four"),
    )
    assert ran.code == 0, ran.err
    assert ran.numbers is not None
    (case,) = ran.numbers["cases"]
    compared = {(row["name"], row["held"]): row["torch"] for row in case["against_torch"]}
    assert compared["tensor_ring", "replicated"] in ("TP x CP allgather", "TP x CP alltoall")
    assert "+ FSDP2" in compared["tensor_ring", "sharded"]
    assert compared["ulysses_ring", "replicated"].startswith("CP ")


def _side(name: str, kind: str, held: str, by_torch: bool, **rest: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "held": held,
        "torch": by_torch,
        "cpu_s": [1.0, 1.0, 1.0],
        "wall_s": [1.0, 1.0, 1.0],
        "sent_bytes": 6.0,
        "peak_bytes": 8.0,
        **rest,
    }


SIDES = [
    _side("one process", "one process", "", True, sent_bytes=0.0),
    _side("local", "one process", "", False, sent_bytes=0.0),
    _side("ring", "context", "replicated", False, cpu_s=[1.0, 2.0, 9.0], wall_s=[2.0, 9.0, 3.0]),
    _side("ring", "context", "sharded", False),
    _side("tensor", "tensor", "replicated", False),
    _side("both", "tensor x context", "replicated", False),
    _side("slow", "context", "replicated", True, cpu_s=[3.0, 4.0, 0.1]),
    _side(
        "fast",
        "context",
        "replicated",
        True,
        cpu_s=[2.0, 2.0, 3.0],
        wall_s=[1.0, 3.0, 3.0],
        sent_bytes=12.0,
        peak_bytes=2.0,
    ),
    _side("fully sharded", "context", "sharded", True),
    _side("DTensor", "tensor", "shards", True),
]


def test_a_side_is_compared_with_the_best_that_does_the_same() -> None:
    """Would catch replicated weights compared with sharded ones, another kind, one of headrace's
    own sides, or the fastest single round taken for the fastest side."""
    found = {(row["name"], row["held"]): row["torch"] for row in methods.against_torch(SIDES)}
    assert found == {
        ("local", ""): "one process",
        ("ring", "replicated"): "fast",
        ("ring", "sharded"): "fully sharded",
        ("tensor", "replicated"): "DTensor",
    }
    assert methods.counterpart(SIDES[5], SIDES) is None


def test_ratios_pair_the_rounds() -> None:
    """Would catch a ratio of medians (2.0 / 2.0 here), which a busy machine moves, and a ratio
    upside down."""
    row = methods.against_torch(SIDES)[1]
    assert row["cpu_ratio"] == 1.0
    assert row["wall_ratio"] == 2.0
    assert row["sent_ratio"] == 0.5
    assert row["peak_ratio"] == 4.0
    assert methods.against_torch(SIDES)[0]["sent_ratio"] is None


@pytest.mark.parametrize("error", [1e-3, float("nan"), float("inf")])
def test_what_is_not_exact_is_not_reported(
    error: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch timings of a wrong result."""
    sides = [
        {"name": "a", "held": "replicated", "error": 0.0},
        {"name": "b", "held": "", "error": error},
    ]
    case = {"case": "block", "ranks": 2, "sides": sides}
    monkeypatch.setattr(methods, "on_ranks", lambda ranks, o: [case])
    assert methods.main(["--ranks", "2"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert "b  differs from one process by" in err
    assert "a whole" not in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "1"], "--ranks: at least 2"),
        (["--rounds", "0"], "--rounds: at least 1"),
        (["--cases", "blocks"], "invalid choice: 'blocks'"),
        (["--ranks", "4", "--tokens", "12"], "--tokens a multiple of 8"),
        (["--ranks", "3", "--tokens", "12"], "--heads of 3"),
        (["--hidden", "20"], "--hidden of --heads"),
        (["--token", "many"], "invalid int value: 'many'"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a wrong size found out by ranks that crash."""
    with pytest.raises(SystemExit) as left:
        methods.options(options)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert said in err
    assert not out


def test_the_script_refuses_before_it_starts() -> None:
    """Would catch an exit code that does not reach the shell."""
    ran = run("methods.py", "--ranks", 0)
    assert (ran.code, ran.out) == (2, "")
    assert "--ranks: at least 2" in ran.err
    assert "Traceback" not in ran.err
