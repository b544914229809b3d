"""Which tests CI leaves out."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from choose_slow import ALWAYS, chosen


def times(folder: Path, *more: tuple[str, float]) -> Path:
    """A file of times: a second for each test that always runs, and of some tests of a file."""
    suite = ElementTree.Element("testsuite")
    always = [(name, 1.0) for name in ALWAYS.split("\n") if name]
    for name, seconds in [*always, *((f"test_any.py::{name}", s) for name, s in more)]:
        file, _, test = name.partition("::")
        folder_of_tests = f"tests.{file.removesuffix('.py').replace('/', '.')}"
        attributes = {"classname": folder_of_tests, "name": test, "time": str(seconds)}
        ElementTree.SubElement(suite, "testcase", attributes)
    path = folder / "times.xml"
    ElementTree.ElementTree(suite).write(path)
    return path


def test_one_long_variant_stays_and_all_short_ones(tmp_path: Path) -> None:
    """Of variants on 1 to 4 ranks the longest that CI has time for says the most."""
    variants = [("test_it[1]", 0.5), ("test_it[2]", 1.0), ("test_it[3]", 1.5), ("test_it[4]", 9.0)]
    found = chosen(times(tmp_path, *variants, ("test_other", 5.0)))
    assert found == [
        "test_any.py::test_it[2]",
        "test_any.py::test_it[4]",
        "test_any.py::test_other",
    ]


def test_the_shortest_stays_where_all_are_long(tmp_path: Path) -> None:
    """Would catch a function of which no variant runs although one is not that long."""
    found = chosen(times(tmp_path, ("test_it[1]", 2.0), ("test_it[2]", 2.9)))
    assert found == ["test_any.py::test_it[2]"]


def test_what_did_not_run_stays_as_it_is_listed(tmp_path: Path) -> None:
    """Times of what CI runs are enough to leave out more of it."""
    listed = ["test_any.py::test_it[4]", "test_any.py::test_quick"]
    found = chosen(times(tmp_path, ("test_it[1]", 0.1), ("test_quick", 0.1)), listed)
    assert found == ["test_any.py::test_it[4]"]


def test_what_always_runs_is_never_left_out(tmp_path: Path) -> None:
    assert chosen(times(tmp_path)) == []
