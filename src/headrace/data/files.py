"""The files a source names, in one fixed order."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from glob import glob, has_magic
from pathlib import Path

from headrace.data.corpus import Skipped
from headrace.data.source import PATTERNS, Kind, Source
from headrace.errors import DataError

__all__ = ["Found", "FoundFile", "find_files"]

# Packages beside the standard library are no part of it; Debian has its own name for them.
_NO_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file. Its ``label`` does not change when the folder that a source names is moved elsewhere;
    ``size`` in bytes and ``mtime_ns`` tell whether the file has changed."""

    path: Path
    label: str
    size: int
    mtime_ns: int


@dataclass(slots=True)
class Found:
    """Files in order, those that were skipped, and ``notes`` that a person should be told. Files
    are known by (device, inode) in ``seen``; ``named`` counts all files that paths led to."""

    files: list[FoundFile] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)
    named: int = 0

    def add(self, path: Path, label: str) -> None:
        """Take a file once, however often it is named. One that is empty, cannot be read or is not
        a plain file is skipped."""
        self.named += 1
        try:
            status = path.stat()
        except OSError as error:
            self.skipped.append(Skipped(path=label, reason=str(error.strerror)))
            return
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            self.skipped.append(Skipped(path=label, reason="not a plain file"))
        elif not status.st_size:
            self.skipped.append(Skipped(path=label, reason="empty"))
        elif (status.st_dev, status.st_ino) not in self.seen:
            self.seen.add((status.st_dev, status.st_ino))
            self.files.append(
                FoundFile(path=path, label=label, size=status.st_size, mtime_ns=status.st_mtime_ns)
            )

    def walk(self, root: Path, label: str, patterns: tuple[str, ...]) -> None:
        """Take the files under ``root`` that match one of the patterns, sorted by their path inside
        it, by which they are labelled after ``label``. Hidden folders are left out."""

        def unlisted(error: OSError) -> None:
            """Note a folder that cannot be listed as skipped."""
            self.skipped.append(Skipped(path=str(error.filename), reason=str(error.strerror)))

        inside: list[str] = []  # paths relative to the root
        for folder, subfolders, files in os.walk(root, onerror=unlisted):
            # ``os.walk`` goes into the subfolders that are left in its list.
            subfolders[:] = [
                name for name in subfolders if name not in _NO_FOLDERS and not name.startswith(".")
            ]
            inside += [os.path.relpath(os.path.join(folder, name), root) for name in files]
        for path in sorted(path for path in inside if _matches(path, patterns)):
            self.add(root / path, f"{label}/{path}")


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path matches a pattern: one with a slash is for the path, others for the name."""
    name = os.path.basename(path)
    return any(fnmatch(path if "/" in pattern else name, pattern) for pattern in patterns)


def find_files(source: Source) -> Found:
    """The files a source names; raises DataError when a path names none."""
    found = Found()
    for path in source.paths:
        named_before = found.named
        if path.startswith("python:"):
            _take_stdlib(path, source, found)
        elif path.startswith("package:"):
            _take_package(path, source, found)
        else:
            _take_path(path, source, found)
        if found.named == named_before:
            patterns = ", ".join(source.patterns or PATTERNS[source.kind])
            raise DataError(f"data path {path!r}", got="no files", wanted=f"files like {patterns}")
    return found


def _take_path(path: str, source: Source, found: Found) -> None:
    """Add a file, or all matching files of a folder, to ``found``; the path may have wildcards."""
    patterns = source.patterns or PATTERNS[source.kind]
    for place in _places(path, source.kind):
        if place.is_dir():
            found.walk(place, place.resolve().name, patterns)
        else:
            found.add(place, place.name)


def _places(path: str, kind: Kind) -> Iterator[Path]:
    """The files and folders that a path or glob names, sorted. Raises DataError for a path that
    does not exist."""
    expanded = os.path.expanduser(path)
    if os.path.lexists(expanded):
        yield Path(expanded)
    elif has_magic(expanded):
        yield from (Path(match) for match in sorted(glob(expanded, recursive=True)))
    elif kind == "memmap" and os.path.exists(f"{expanded}.bin"):  # Megatron names the prefix
        yield Path(f"{expanded}.bin")
    else:
        hint = f"looked in {os.getcwd()}" if not os.path.isabs(expanded) else None
        raise DataError("data path", got=repr(path), wanted="a file, folder or glob", hint=hint)


def _python_files(source: Source, root: Path, label: str, found: Found) -> None:
    """Add the .py files under ``root`` that match the source's patterns, if it has some, to
    ``found``."""
    # ``seen`` is shared with ``found``, so that no file is taken twice.
    taken = Found(seen=found.seen)
    taken.walk(root, label, source.patterns or ("*.py",))
    python = [file for file in taken.files if file.path.suffix == ".py"]
    found.files += python
    found.named += len(python) + len(taken.skipped)
    found.skipped += taken.skipped


def _take_stdlib(path: str, source: Source, found: Found) -> None:
    """Add the files of this Python's standard library."""
    if path != "python:stdlib":
        raise DataError("data path", got=repr(path), wanted="'python:stdlib'")
    root = Path(sysconfig.get_path("stdlib"))
    _python_files(source, root, path, found)
    if not (root / "test").is_dir():
        version = ".".join(str(number) for number in sys.version_info[:3])
        found.notes.append(
            f"this Python {version} comes without Lib/test: fewer and shorter documents"
        )


def _take_package(path: str, source: Source, found: Found) -> None:
    """Add the .py files of an installed package, which is not imported; raises DataError for one
    that is not there."""
    name = path.removeprefix("package:")
    if not name.isidentifier():  # finding a submodule would import its parent
        raise DataError("data path", got=repr(path), wanted="'package:NAME' without dots")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise DataError("data path", got=f"{path!r}, not installed", wanted="a package or folder")
    if spec.submodule_search_locations:
        for root in spec.submodule_search_locations:
            _python_files(source, Path(root), path, found)
    elif spec.origin and spec.origin.endswith(".py"):
        found.add(Path(spec.origin), f"{path}/{Path(spec.origin).name}")
    else:
        raise DataError("data path", got=f"{path!r}, without .py files", wanted="a Python package")
