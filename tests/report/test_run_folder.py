"""Reading what runs leave behind, whole or damaged."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.report.run_reader import length_bin, read_run
from report.fake_run import fake_run, layered_run

FILES = ("run.json", "metrics.jsonl", "plans.jsonl", "timelines.jsonl")
TIMELINE = {
    "source": "measured",
    "devices": 1,
    "rows": [{"rank": 1, "action": "U", "kind": "update", "start_s": 0, "end_s": 1}],
}
"""Of a rank that does not exist."""

FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_values_are_those_of_the_files(folder: Path) -> None:
    """Catches fields read under a wrong key or from the wrong step."""
    run, rows = read_run(folder), lines_of(folder / "metrics.jsonl")
    assert [s.step for s in run.steps] == list(range(40))
    for step, row in zip(run.steps, rows, strict=True):
        assert (step.loss, step.step_s, step.idle) == (row["loss"], row["step_s"], row["idle"])
        assert step.planned.best_static_s == row["best_static_s"]
        assert step.planned.peak_bytes == tuple(row["predicted_peak_bytes"])
        assert step.peak_bytes == tuple(row["peak_bytes"])
        assert step.largest_group == max(m["ranks"] for m in row["micro_batches"])
        assert isnan(step.mfu)
    facts = json.loads((folder / "run.json").read_text())
    assert run.facts.corpus.counts == tuple(facts["corpus"]["histogram"]["counts"])
    assert run.facts.costs.points[3].measured_s == facts["costs"]["points"][3]["measured_s"]
    assert run.notes == ()


def test_layers_and_orders_are_those_of_the_micro_batches(folder: Path) -> None:
    """Catches plans swapped between micro-batches, and a plan under the text of another."""
    run, rows = read_run(folder), lines_of(folder / "metrics.jsonl")
    for step, row in zip(run.steps, rows, strict=True):
        read = [(m.layers, m.order, m.tokens) for m in step.micro_batches]
        assert read == [(m["layers"], m["order"], m["tokens"]) for m in row["micro_batches"]]
    texts = {m["layers"] for row in rows for m in row["micro_batches"]}
    assert run.layer_plans.keys() == texts
    assert all(str(plan) == text for text, plan in run.layer_plans.items())
    orders = {m.order for step in run.steps for m in step.micro_batches}
    assert orders == {"natural", "zigzag"}


def test_a_run_without_layer_plans_can_be_read(tmp_path: Path) -> None:
    """Catches a report that refuses runs of before layers were written, or parses 'unknown'."""
    run = read_run(layered_run(tmp_path / "run", [(None, 7)], [("2*local", 5), (None, 7)]))
    assert list(run.layer_plans) == ["2*local"]
    said = [[(m.layers, m.order) for m in step.micro_batches] for step in run.steps]
    unknown = ("unknown", "unknown")
    assert said == [[unknown], [("2*local", "natural"), unknown]]


def test_assignments_and_recompute_are_counted_by_brute_force(folder: Path) -> None:
    """Catches a bin off by one, or layers counted once per micro-batch instead of per sequence."""
    run = read_run(folder)
    assigned: Counter[tuple[int, int]] = Counter()
    for row in lines_of(folder / "metrics.jsonl"):
        assigned.update((length_bin(tokens), p) for tokens, p in row["assignment"])
    assert run.assigned == assigned
    layers = 0
    for plan in lines_of(folder / "plans.jsonl"):
        layers += 8 * len(plan["lengths"]["tokens"])
    assert sum(run.recomputed.values()) == layers


@given(st.integers(1, 10**9))
def test_a_length_lies_in_its_bin(tokens: int) -> None:
    """Catches powers of two in the bin above."""
    b = length_bin(tokens)
    assert tokens <= 2**b
    assert b == 0 or tokens > 2 ** (b - 1)


def test_the_longest_step_is_explained_and_drawn(folder: Path) -> None:
    """Catches a plan or timeline of another step, and the warm-up step being drawn."""
    run = read_run(folder)
    longest = max(lines_of(folder / "metrics.jsonl"), key=lambda row: (row["longest"], row["step"]))
    assert run.plan is not None
    assert run.plan.hash.startswith(longest["plan_hash"])
    lengths = {s.step: s.longest for s in run.steps}
    recorded = [row["step"] for row in lines_of(folder / "timelines.jsonl")]
    assert run.recorded is not None
    assert lengths[run.recorded.step] == max(lengths[step] for step in recorded if step)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_a_missing_file_is_named_with_what_writes_it(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """Catches a bare FileNotFoundError."""
    there = copy(folder, tmp_path)
    (there / name).unlink()
    with pytest.raises(DataError, match=f"no {name}.*headrace train"):
        read_run(there)


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no folder"):
        read_run(tmp_path / "absent")


@pytest.mark.parametrize("name", ["plans.jsonl", "timelines.jsonl"])
def test_the_other_files_may_be_missing(folder: Path, tmp_path: Path, name: str) -> None:
    """Catches a report that cannot be made of an old or thinned run."""
    there = copy(folder, tmp_path)
    (there / name).unlink()
    run = read_run(there)
    assert any(name in note for note in run.notes)
    assert (run.plan is None) == (name == "plans.jsonl")
    assert (run.recorded is None) == (name == "timelines.jsonl")


@settings(FUZZ, max_examples=30)
@given(share=st.floats(0.02, 1))
def test_a_file_cut_anywhere_keeps_its_whole_lines(
    folder: Path, tmp_path: Path, share: float
) -> None:
    """Catches a killed run whose last half line hides the rest, or counts as a step."""
    text = (folder / "metrics.jsonl").read_text()
    cut = text[: round(share * len(text))]
    there = tmp_path / "cut"
    there.mkdir(exist_ok=True)
    shutil.copy(folder / "run.json", there)
    (there / "metrics.jsonl").write_text(cut)
    whole = cut.count("\n") + (cut.endswith("}") and share < 1 and _is_json(cut))
    if whole == 0:
        with pytest.raises(DataError, match="no complete step"):
            read_run(there)
        return
    run = read_run(there)
    assert len(run.steps) == whole
    assert any("cut short" in note for note in run.notes) == (whole * 1.0 < len(cut.splitlines()))


def _is_json(text: str) -> bool:
    try:
        json.loads(text.splitlines()[-1])
    except ValueError:
        return False
    return True


def test_a_damaged_line_between_others_is_noted_by_number(folder: Path, tmp_path: Path) -> None:
    """Catches the half line in the middle that a resumed run leaves behind."""
    there = copy(folder, tmp_path)
    path = there / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], '{"step": 3, "lo', *lines[3:]]))
    run = read_run(there)
    assert [s.step for s in run.steps] == [i for i in range(40) if i != 3]
    assert run.notes == ("metrics.jsonl: line 4 cut short or damaged, skipped",)


def test_a_step_run_again_counts_once(folder: Path, tmp_path: Path) -> None:
    """Catches steps doubled after a resume, and the stale one of two being kept."""
    there = copy(folder, tmp_path)
    rows = lines_of(there / "metrics.jsonl")
    rewrite(there / "metrics.jsonl", [*rows[:30], {**rows[28], "loss": 1.5}, *rows[29:]])
    run = read_run(there)
    assert [s.step for s in run.steps] == list(range(40))
    assert run.steps[28].loss == 1.5
    assert "run again" in run.notes[0]


@pytest.mark.parametrize("loss", [None, float("nan")])
def test_a_lost_loss_is_nan(folder: Path, tmp_path: Path, loss: float | None) -> None:
    """Catches null as zero, and the word NaN as a damaged line."""
    there = copy(folder, tmp_path)
    rows = lines_of(there / "metrics.jsonl")
    rewrite(there / "metrics.jsonl", [{**rows[0], "loss": loss}])
    assert isnan(read_run(there).steps[0].loss)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("run.json", {"format": 2}, "format: got 2, wanted 1"),
        ("run.json", {"ranks": "four"}, "run.json, ranks: got 'four', wanted a valid integer"),
        ("run.json", {"ranks": 0}, "ranks: got 0, wanted greater than or equal to 1"),
        ("run.json", {"architecture": {"layers": 1}}, "architecture, hidden: got nothing"),
        ("run.json", {"corpus": {"histogram": {"edges": [1], "counts": [1]}}}, "1 edges for 1"),
        ("run.json", {"corpus": {"histogram": {"edges": [2, 1], "counts": [1]}}}, "growing"),
        ("metrics.jsonl", {"step": None}, "line 1, step: got None"),
        ("metrics.jsonl", {"step_s": "a"}, "line 1, step_s: got 'a', wanted a valid number"),
        ("metrics.jsonl", {"step_s": None}, "line 1, step_s: got nan, wanted above 0"),
        ("metrics.jsonl", {"tokens_per_s": -1}, "line 1, tokens_per_s: got -1, wanted >= 0"),
        ("metrics.jsonl", {"assignment": [[4]]}, "assignment: got .* wanted"),
        ("metrics.jsonl", {"micro_batches": [3]}, "line 1, micro_batches, 0: got 3"),
        ("metrics.jsonl", {"micro_batches": [{"ranks": 1, "layers": "0*a"}]}, "a count >= 1"),
        ("metrics.jsonl", {"micro_batches": [{"ranks": 1, "layers": ["8*a"]}]}, "0, layers: got"),
        ("plans.jsonl", {"micro_batches": None}, "plans.jsonl line 1"),
        ("timelines.jsonl", {"measured": TIMELINE | {"rows": 1}}, "line 1, measured, rows"),
        ("timelines.jsonl", {"measured": TIMELINE}, "rank 1 of 1 from 0.0 to 1.0 s"),
    ],
)
def test_a_wrong_field_is_named(
    tmp_path: Path, file: str, change: dict[str, Any], said: str
) -> None:
    """Catches tracebacks from the depths."""
    there = fake_run(tmp_path / "run", steps=1)
    rows = lines_of(there / file)
    rewrite(there / file, [{**rows[0], **change}])
    with pytest.raises(DataError, match=said):
        read_run(there)


leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3)
json_values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(FUZZ, max_examples=200)
@given(data=st.data(), value=json_values)
def test_any_value_anywhere_is_read_or_refused(
    folder: Path, tmp_path: Path, data: st.DataObject, value: Any
) -> None:
    """Catches a field whose wrong type escapes as a TypeError."""
    there = tmp_path / "run"
    there.mkdir(exist_ok=True)
    for name in FILES:
        with (folder / name).open() as file:
            (there / name).write_text(file.readline())
    name = data.draw(st.sampled_from(FILES))
    row = json.loads((there / name).read_text())
    at = row
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not (isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans())):
            break
        at = at[key]
    at[key] = value
    rewrite(there / name, [row])
    try:
        run = read_run(there)
    except DataError:
        return
    assert len(run.steps) == 1
