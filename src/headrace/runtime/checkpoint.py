"""Checkpoints: one safetensors file per rank, and a table of the rows in them.

    root/step-000120/rank00000.safetensors ... index.json

Files hold no pickle, and any number of ranks loads what any other number has saved. All ranks
must see the same folder. What is damaged is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headrace.errors import CheckpointError, DamagedCheckpoint
from headrace.runtime.checkpoint_folders import latest, step_of, whole_folders
from headrace.runtime.checkpoint_writing import Gather, Writing
from headrace.runtime.shard_files import check_file, check_header, read_pieces
from headrace.runtime.shard_index import Index, require_json
from headrace.runtime.shards import DTYPES, FileInfo, FilePiece, StoredShard

__all__ = [
    "Gather",
    "StoredShard",
    "facts",
    "latest",
    "load",
    "names",
    "newest_first",
    "previous",
    "read_all",
    "read_whole",
    "require_json",
    "save",
    "verify",
]


def save(
    root: Path,
    step: int,
    shards: Sequence[StoredShard],
    extra: Mapping[str, Any],
    *,
    rank: int,
    gather: Gather,
    keep: int = 3,
) -> Path:
    """Write a checkpoint of all ranks' ``shards``, which together hold every row; its folder.

    All ranks call it together, with the same arguments but their own ``shards`` and ``rank``.
    ``extra`` is a JSON object (keys become text, tuples become lists), taken from rank 0. Of the
    checkpoints up to ``step`` the last ``keep`` stay.

    Raises SpecError for bad arguments. When any rank fails (disk full, no permission, rows that
    no rank holds) every rank raises the same CheckpointError with the ranks and their causes;
    what was there before is as it was.
    """
    writing = Writing(root, step, extra, rank=rank, keep=keep)
    writing.prepare(gather)
    return writing.publish(gather, lambda: writing.write(shards))


def load(path: Path, wanted: Sequence[StoredShard]) -> dict[str, Any]:
    """Fill the tensors of ``wanted`` in place from the checkpoint at ``path``; returns ``extra``.

    Each rank calls it for itself: only files that hold its rows are opened, and these are checked
    whole against their checksums. Rows may come from several files. Raises CheckpointError when a
    tensor is unknown or of another shape or type (nothing is converted), and DamagedCheckpoint
    when anything is missing, damaged or malformed; the hint then names the previous good
    checkpoint. After an error the tensors hold no meaning.
    """
    path = Path(path)
    with _naming_another(path):
        index = _index(path)
    _check_wanted(path, index, wanted)
    with _naming_another(path):
        jobs: dict[str, list[tuple[StoredShard, FilePiece]]] = defaultdict(list)
        for shard, pieces in zip(wanted, index.pieces([s.interval for s in wanted]), strict=True):
            for piece in pieces:
                jobs[piece.file.file].append((shard, piece))
        _check_files(path, [file for file in index.files if file.file in jobs])
        for name, job in jobs.items():
            read_pieces(path / name, job)
    return dict(index.extra)


def _index(path: Path) -> Index:
    """The index of a checkpoint, which is that of the step after which its folder is named."""
    index, step = Index.read(path), step_of(path)
    if step not in (None, index.step):
        raise CheckpointError(
            f"checkpoint {path}", got=f"the index of step {index.step}", wanted=f"step {step}"
        )
    return index


def _check_wanted(path: Path, index: Index, wanted: Sequence[StoredShard]) -> None:
    for shard in wanted:
        info = index.info(shard.name)
        if info != shard.info:
            what, hint = f"{path}: {shard.name}", "the checkpoint is of another model or precision"
            raise CheckpointError(what, got=info, wanted=shard.info, hint=hint)


def _check_files(path: Path, files: Sequence[FileInfo]) -> None:
    for file in files:  # sizes of all first: that is quick, checksums are not
        check_file(path, file, checksum=False)
    for file in files:
        check_file(path, file, checksum=True)


@contextmanager
def _naming_another(path: Path) -> Generator[None, None, None]:
    """Errors from within name the checkpoint to take instead, if there is one."""
    try:
        yield
    except CheckpointError as error:
        hints = [hint for hint in (error.hint, _another(path)) if hint]
        raise DamagedCheckpoint(
            error.what, got=error.got, wanted=error.wanted, hint="; ".join(hints)
        ) from None


def _another(path: Path) -> str | None:
    try:
        good, inside = previous(path), latest(path)
    except CheckpointError:  # no hint is worth hiding the first error
        return None
    if good:
        return f"the previous good checkpoint is {good}"
    return f"did you mean {inside}?" if inside else None


def previous(path: Path) -> Path | None:
    """The last whole checkpoint before the one at ``path`` (which may be damaged or missing).

    Its index and the sizes of its files are checked, their checksums are not. Raises
    CheckpointError when the folder around ``path`` cannot be read.
    """
    path = Path(path)
    step = step_of(path)
    if step is None:
        return None
    whole = whole_folders(path.parent)
    for other in sorted((s for s in whole if s < step), reverse=True):
        try:
            for file in _index(whole[other]).files:
                check_file(whole[other], file, checksum=False)
        except CheckpointError:
            continue
        return whole[other]
    return None


def newest_first(root: Path) -> list[Path]:
    """All checkpoints in a folder, by the steps in their names. Raises CheckpointError when it
    cannot be read."""
    whole = whole_folders(Path(root))
    return [whole[step] for step in sorted(whole, reverse=True)]


def verify(path: Path) -> None:
    """Check that every row of every tensor is there, and size, checksum and header of every file;
    raises CheckpointError naming the first that is bad."""
    path = Path(path)
    with _naming_another(path):
        index = _index(path)
        index.check_whole(index.tensors)
        _check_files(path, index.files)
        for file in index.files:
            check_header(path, file, index.tensors)


def names(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and type of every tensor. Raises CheckpointError like :func:`load`."""
    with _naming_another(Path(path)):
        tensors = _index(Path(path)).tensors
    return {name: (info.shape, DTYPES[info.dtype]) for name, info in tensors.items()}


def facts(path: Path) -> dict[str, Any]:
    """The ``extra`` that was saved, without a look at the tensors. Raises DamagedCheckpoint."""
    with _naming_another(Path(path)):
        return dict(_index(Path(path)).extra)


def read_whole(path: Path, name: str) -> torch.Tensor:
    """One tensor with all its rows. Raises CheckpointError like :func:`load`.

    Each call checks the files it reads: for many tensors use :func:`read_all`.
    """
    return _read(Path(path), lambda _: [name])[name]


def read_all(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors whose names begin with ``prefix``, whole, each file checked once.

    Raises CheckpointError like :func:`load`.
    """
    return _read(Path(path), lambda index: [n for n in index.tensors if n.startswith(prefix)])


def _read(path: Path, choose: Callable[[Index], Iterable[str]]) -> dict[str, torch.Tensor]:
    with _naming_another(path):
        index = _index(path)
    chosen = {name: index.info(name) for name in choose(index)}
    with _naming_another(path):
        index.check_whole(chosen)  # before memory is asked for what the index claims
    empty = {n: torch.empty(t.shape, dtype=DTYPES[t.dtype]) for n, t in chosen.items()}
    load(
        path,
        [
            StoredShard(name=n, first_row=0, tensor=t, shape=tuple(t.shape))
            for n, t in empty.items()
        ],
    )
    return empty
