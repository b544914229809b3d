"""Which files a source names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headrace.data.files import find_files
from headrace.data.source import Source
from headrace.errors import ConfigError, DataError


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")


def labels(*paths: str, **options: object) -> list[str]:
    source = Source(kind="text", paths=paths, **options)  # type: ignore[arg-type]
    return [file.label for file in find_files(source).files]


def test_folder_in_sorted_order(tmp_path: Path) -> None:
    """Catches an order that follows the file system, and hidden or cached files taken."""
    root = tmp_path / "root"
    write(root, "b.txt", "a/z.py", "a.txt", "__pycache__/x.pyc", ".git/config", "a/.hidden/y")
    assert labels(str(root)) == ["root/a.txt", "root/a/z.py", "root/b.txt"]
    assert labels(str(root), patterns=("*.py",)) == ["root/a/z.py"]
    assert labels(str(root), patterns=("a/*",)) == ["root/a/z.py"]


def test_files_globs_and_doubles(tmp_path: Path) -> None:
    """Catches a file taken twice when a path and a glob both name it."""
    write(tmp_path, "b.txt", "a.txt", "deep/c.txt")
    glob = str(tmp_path / "**" / "*.txt")
    assert labels(str(tmp_path / "b.txt"), glob) == ["b.txt", "a.txt", "c.txt"]


def test_what_is_passed_over(tmp_path: Path) -> None:
    """Catches a pipe being opened (it would hang), and files dropped in silence."""
    write(tmp_path, "good")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    found = find_files(Source(kind="text", paths=(str(tmp_path),)))
    assert [file.path.name for file in found.files] == ["good"]
    reasons = {Path(item.path).name: item.reason for item in found.skipped}
    assert reasons == {
        "dangling": "No such file or directory",
        "empty": "empty",
        "pipe": "not a plain file",
    }


@pytest.mark.parametrize(
    "path", ["no/such/file", "nothing-*.txt", "python:other", "package:no_such_package_at_all"]
)
def test_paths_that_name_nothing(path: str, tmp_path: Path) -> None:
    """Catches an empty corpus where a path is mistyped, also beside a good one."""
    write(tmp_path, "good")
    for paths in ((path,), (str(tmp_path), path)):
        with pytest.raises(DataError, match="data path"):
            find_files(Source(kind="text", paths=paths))


def test_folder_without_a_match(tmp_path: Path) -> None:
    """Catches a pattern that matches nothing going unnoticed."""
    write(tmp_path, "a.txt")
    with pytest.raises(DataError, match=r"\*\.md"):
        find_files(Source(kind="text", paths=(str(tmp_path),), patterns=("*.md",)))


def test_standard_library() -> None:
    """Catches site-packages in it, or compiled files."""
    found = find_files(Source(kind="text", paths=("python:stdlib",)))
    names = [file.label for file in found.files]
    assert "python:stdlib/os.py" in names
    assert names == sorted(names)
    assert not [name for name in names if "-packages/" in name or not name.endswith(".py")]
    assert ("python:stdlib/test/test_os.py" in names) != any("Lib/test" in n for n in found.notes)


def test_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a package being imported only to find its files."""
    write(tmp_path, "headrace_probe/sub/data.txt")
    (tmp_path / "headrace_probe" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "headrace_alone.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert labels("package:headrace_probe") == ["package:headrace_probe/__init__.py"]
    assert labels("package:headrace_probe", patterns=("*",)) == labels("package:headrace_probe")
    assert labels("package:headrace_alone") == ["package:headrace_alone/headrace_alone.py"]
    assert "headrace_probe" not in sys.modules
    for bad in ("package:os.path", "package:sys", "package:"):
        with pytest.raises(DataError, match="data path"):
            labels(bad)


def test_bad_sources() -> None:
    """Catches a misspelt option that is accepted."""
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        Source(kind="json", paths=("a",))  # type: ignore[arg-type]
    for paths in ((), "a", ("",)):
        with pytest.raises(ConfigError, match=r"data\.paths"):
            Source(kind="text", paths=paths)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data\.dtype"):
        Source(kind="memmap", paths=("a",), dtype="int8")  # type: ignore[arg-type]


def test_source_reads_back() -> None:
    """Catches a field that JSON loses."""
    source = Source(kind="jsonl", paths=("a", "b"), patterns=("*.x",), field="code", end_id=3)
    assert Source.from_json(source.to_json()) == source
    assert source.name == "a + b"
