"""The journal: what it holds after a run, after a crash, after going back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.record import Journal
from headrace.errors import HeadraceError

NAMES = ("metrics", "plans", "timelines")


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def _write(journal: Journal, steps: range) -> None:
    for step in steps:
        journal.metrics({"step": step, "loss": step / 3})
        journal.plan({"step": step, "hash": "a\u2028\u00e9\nb"})
        if step % 2 == 0:
            journal.timelines({"step": step})


def test_one_line_per_step_and_file(tmp_path: Path) -> None:
    """Would catch rows in the wrong file, a line break inside a row, and lines that reach the
    disk only when the run ends."""
    journal = Journal(tmp_path / "a" / "run", 0)
    journal.facts({"name": "first"})
    _write(journal, range(3))
    folder = tmp_path / "a" / "run"  # read while it is open, as after a kill
    assert _lines(folder, "metrics") == [{"step": s, "loss": s / 3} for s in range(3)]
    assert [row["step"] for row in _lines(folder, "timelines")] == [0, 2]
    assert {row["hash"] for row in _lines(folder, "plans")} == {"a\u2028\u00e9\nb"}
    journal.facts({"name": "second"})
    assert json.loads((folder / "run.json").read_text()) == {"name": "second"}
    journal.close()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["run.json", *(f"{name}.jsonl" for name in NAMES)]
    )


def test_a_run_that_begins_anew_keeps_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch hours of metrics that a resume without a checkpoint writes over, and the second
    time over the first."""
    for number in range(3):
        journal = Journal(tmp_path, 0)
        assert _lines(tmp_path, "metrics") == []
        said = capsys.readouterr().err
        assert (f"is kept in {tmp_path / f'before-{number}'}" in said) == (number > 0)
        journal.facts({"name": f"run {number}"})
        _write(journal, range(4 + number))
        journal.close()
    for number in (1, 2):
        former = tmp_path / f"before-{number}"
        assert len(_lines(former, "metrics")) == len(_lines(former, "plans")) == 3 + number
        assert json.loads((former / "run.json").read_text()) == {"name": f"run {number - 1}"}


@pytest.mark.parametrize("first_step", [0, 2, 5, 9])
def test_going_on_from_a_step_drops_what_comes_after(tmp_path: Path, first_step: int) -> None:
    """Would catch a step told twice after a resume, or a step before it lost."""
    journal = Journal(tmp_path, 0)
    _write(journal, range(5))
    journal.close()
    journal = Journal(tmp_path, first_step)
    assert [row["step"] for row in _lines(tmp_path, "metrics")] == list(range(min(5, first_step)))
    _write(journal, range(first_step, 7))
    journal.close()
    for name in ("metrics", "plans"):
        wanted = [*range(min(5, first_step)), *range(first_step, 7)]
        assert [row["step"] for row in _lines(tmp_path, name)] == wanted
    assert all(not path.name.endswith(".part") for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "torn",
    ['{"step": 3, "los', '{"ste', "5", "[1]", '{"loss": 1}', "\0\0\0", '{"step": [3'],
)
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    """Would catch a run that cannot be resumed after a kill, or whose next line is glued to the
    torn one."""
    journal = Journal(tmp_path, 0)
    _write(journal, range(3))
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    journal = Journal(tmp_path, 3)
    _write(journal, range(3, 4))
    journal.close()
    assert [row["step"] for row in _lines(tmp_path, "metrics")] == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [b"\xff\xfe\x80", b'{"step": null}', b'{"step": "3"}'])
def test_damaged_lines_are_dropped(tmp_path: Path, torn: bytes) -> None:
    """Would catch a traceback from the depths for a line that a bad disk left."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + torn)
    Journal(tmp_path, 3).close()
    assert _lines(tmp_path, "metrics") == [{"step": 0}]


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    """Would catch an OSError from the depths where the folder's name is a file."""
    (tmp_path / "a").touch()
    with pytest.raises(HeadraceError, match="journal"):
        Journal(tmp_path / "a", 0)


def test_a_full_disk_is_told_as_such() -> None:
    """Would catch an OSError without the name of the file or what to do, and one at the end, when
    what was not written is tried again, that takes its place."""

    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self.write("")

    journal = object.__new__(Journal)
    journal.folder, journal._files = Path("runs/a"), {"metrics": Full()}
    with pytest.raises(HeadraceError, match=r"runs/a/metrics\.jsonl: got No space left on device"):
        journal.metrics({"step": 0})
    journal.close()
