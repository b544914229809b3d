"""How much memory the control groups of this process leave it: containers, Slurm and systemd set
limits there, on any level above the process, in version 1 or 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["memory_left"]

# Version, names of the files: limit, taken, and the entry of memory.stat that can be had back.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_MOUNTS = {"": (".", "unified"), "memory": ("memory",)}


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes until the nearest limit; None without one. ``root`` is the root of the file system."""
    found = []
    for kind, group in _groups(root / "proc/self/cgroup"):
        limit_name, taken_name, cached_name = _FILES[kind]
        for folder in _levels(root / "sys/fs/cgroup", kind, group):
            limit, taken = _number(folder / limit_name), _number(folder / taken_name)
            if limit is not None:
                cached = _entry(folder / "memory.stat", cached_name)
                found.append(max(0, limit - max(0, (taken or 0) - cached)))
    return min(found, default=None)


def _groups(path: Path) -> Iterator[tuple[str, str]]:
    """The controller ("" is version 2) and group of each line that has to do with memory."""
    for line in _text(path).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            yield "", group
        elif "memory" in controllers.split(","):
            yield "memory", group


def _levels(top: Path, kind: str, group: str) -> Iterator[Path]:
    """The folders of a group and of all above it, as far as they are seen from here: a container
    sees its own as the top."""
    parts = [name for name in group.split("/") if name and ".." not in group]
    for mount in _MOUNTS[kind]:
        for depth in range(len(parts), -1, -1):
            yield top / mount / Path(*parts[:depth])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _entry(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0
