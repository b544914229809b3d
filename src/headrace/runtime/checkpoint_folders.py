"""The folders of checkpoints: which are whole, how one takes its place, which are deleted.

[Note: what a crash leaves] A checkpoint is written aside (``step-000120.part``) and renamed when
every byte of it is on the disk, so a folder without that ending is whole. Where a step is saved
again the folder before it is set aside (``step-000120.old``) and deleted last; between the two
renames only that one exists, hence :func:`latest` takes it too. The next save removes or restores
what a crash left.
"""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

from headrace.errors import CheckpointError
from headrace.runtime.shard_files import fsync_folder
from headrace.runtime.shard_index import INDEX

__all__ = [
    "latest",
    "part_of",
    "prepare",
    "prune",
    "put_in_place",
    "step_folder",
    "step_of",
    "whole_folders",
]

_STEP = re.compile(r"step-([0-9]{6,})(\.old|\.part)?")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies once it is whole."""
    return root / f"step-{step:06d}"


def part_of(folder: Path) -> Path:
    """Where a checkpoint lies while it is written or deleted."""
    return folder.with_name(folder.name.removesuffix(".old") + ".part")


def step_of(folder: Path) -> int | None:
    """The step of a folder of a checkpoint; None when its name is of another kind."""
    found = _STEP.fullmatch(folder.name)
    return int(found[1]) if found else None


def whole_folders(root: Path) -> dict[int, Path]:
    """All whole checkpoints by step. Raises CheckpointError when ``root`` cannot be read."""
    whole: dict[int, Path] = {}
    try:
        # In this order "step-000120" replaces "step-000120.old".
        for folder in sorted(root.iterdir() if root.exists() else [], reverse=True):
            step = step_of(folder)
            if step is not None and folder.suffix != ".part" and (folder / INDEX).exists():
                whole[step] = folder
    except NotADirectoryError:
        return {}
    except OSError as error:
        raise CheckpointError(str(root), got=error.strerror, wanted="a readable folder")
    return whole


def latest(root: Path) -> Path | None:
    """The folder of the highest step that was written whole; None when there is none.

    Raises CheckpointError when ``root`` cannot be read.
    """
    whole = whole_folders(Path(root))
    return whole[max(whole)] if whole else None


def prepare(folder: Path) -> None:
    """Clear away or restore what crashes left, and make an empty folder to write aside in."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    ours = [path for path in folder.parent.iterdir() if step_of(path) is not None]
    for part in (path for path in ours if path.suffix == ".part"):
        shutil.rmtree(part)
    for old in (path for path in ours if path.suffix == ".old"):
        place = old.with_suffix("")
        if (place / INDEX).exists():
            _discard(old)
        elif not place.exists():
            old.rename(place)
    part_of(folder).mkdir()


def put_in_place(folder: Path) -> None:
    """Give what was written aside its name, in place of what had that name before."""
    part, old = part_of(folder), folder.with_suffix(".old")
    fsync_folder(part)
    replaces = folder.exists()
    if replaces:
        folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        if replaces:
            old.rename(folder)
        raise
    fsync_folder(folder.parent)
    if replaces:
        _discard(old)


def prune(root: Path, step: int, keep: int) -> None:
    """Delete all whole checkpoints up to ``step`` but the last ``keep``.

    Later ones belong to a run that was gone back from; they are left alone.
    """
    whole = whole_folders(root)
    for old in sorted(s for s in whole if s <= step)[:-keep]:
        _discard(whole[old])


def _discard(folder: Path) -> None:
    """Delete a folder such that no crash leaves half of it under its name."""
    try:
        shutil.rmtree(folder.rename(part_of(folder)))
    except OSError as error:  # the new checkpoint is whole: nothing to stop a run for
        text = f"{folder} cannot be deleted: {error.strerror}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
