"""Checkpoints: one safetensors file per rank, and a table of the rows in them.

    root/step-000120/rank00000.safetensors ... index.json

Files hold no pickle, and any number of ranks loads what any other number has saved. All ranks
must see the same folder. What is damaged is refused.

A checkpoint is *whole* once it has its index and its name. While it is written or deleted its
folder ends in ".part"; one that is being replaced by another of the same step ends in ".old".
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from headrace.errors import CheckpointError, DamagedCheckpoint, SpecError
from headrace.native.shard_files import (
    DTYPES,
    INDEX,
    FileInfo,
    FilePiece,
    Index,
    StoredShard,
    check_file,
    check_header,
    fsync_folder,
    join_tables,
    read_pieces,
    require_json,
    table_of,
    write_shards,
    write_text,
)

__all__ = [
    "BackgroundWriter",
    "Gather",
    "StoredShard",
    "Writing",
    "extra_of",
    "latest",
    "load",
    "names",
    "newest_first",
    "part_of",
    "prepare",
    "previous",
    "prune",
    "put_in_place",
    "read_all",
    "read_whole",
    "require_json",
    "save",
    "step_folder",
    "step_of",
    "verify",
    "whole_folders",
]

_STEP = re.compile(r"step-([0-9]{6,})(\.old|\.part)?")


def step_folder(root: Path, step: int) -> Path:
    """The folder of the complete checkpoint of a step."""
    return root / f"step-{step:06d}"


def part_of(folder: Path) -> Path:
    """The temporary folder of a checkpoint whose folder is ``folder``, in which it is written or
    deleted."""
    return folder.with_name(folder.name.removesuffix(".old") + ".part")


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder, which may end in ".old" or ".part"; None for
    other names."""
    found = _STEP.fullmatch(folder.name)
    return int(found[1]) if found else None


def whole_folders(root: Path) -> dict[int, Path]:
    """The folders of all whole checkpoints in ``root``, by step. Raises CheckpointError when
    ``root`` cannot be read."""
    whole: dict[int, Path] = {}
    try:
        # In reverse order "step-000120" comes after "step-000120.old", and so replaces it below.
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
    """The folder of the highest step whose checkpoint is whole; None when there is none.

    Raises CheckpointError when ``root`` cannot be read.
    """
    whole = whole_folders(Path(root))
    return whole[max(whole)] if whole else None


def prepare(folder: Path) -> None:
    """Clean up what interrupted saves have left next to ``folder``, and make its empty temporary
    folder. Temporary folders are deleted; a former checkpoint (".old") is deleted where the one
    that replaces it is whole, else it gets its name back."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkpoints = [path for path in folder.parent.iterdir() if step_of(path) is not None]
    for unfinished in (path for path in checkpoints if path.suffix == ".part"):
        shutil.rmtree(unfinished)
    for former in (path for path in checkpoints if path.suffix == ".old"):
        target = former.with_suffix("")
        if (target / INDEX).exists():
            _discard(former)
        elif not target.exists():
            former.rename(target)
    part_of(folder).mkdir()


def put_in_place(folder: Path) -> None:
    """Rename the temporary folder of a checkpoint to ``folder``. A former checkpoint of that name
    is moved aside first, and deleted only once the new one is in place."""
    part, former = part_of(folder), folder.with_suffix(".old")
    fsync_folder(part)
    replaces = folder.exists()
    if replaces:
        folder.rename(former)
    try:
        part.rename(folder)
    except OSError:
        if replaces:
            former.rename(folder)
        raise
    fsync_folder(folder.parent)
    if replaces:
        _discard(former)


def prune(root: Path, step: int, keep: int) -> None:
    """Delete all whole checkpoints of steps up to ``step`` except the last ``keep``. Checkpoints of
    later steps, which there are where a run was resumed from an earlier step, stay."""
    whole = whole_folders(root)
    for old_step in sorted(s for s in whole if s <= step)[:-keep]:
        _discard(whole[old_step])


def _discard(folder: Path) -> None:
    """Delete a checkpoint's folder. It is renamed first, so that a crash leaves no folder that
    looks like a whole checkpoint; where it cannot be deleted there is a warning."""
    try:
        shutil.rmtree(folder.rename(part_of(folder)))
    except OSError as error:  # the new checkpoint is complete: no reason to stop a run
        text = f"{folder} cannot be deleted: {error.strerror}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


#: Every rank calls it together; returns every rank's payload in rank order.
Gather = Callable[[bytes], list[bytes]]

_NAMED_RANKS = 4
"""Failed ranks that an error names; it counts the others."""


class Writing:
    """The save of one checkpoint in three steps: :meth:`prepare` the folder, :meth:`write` the
    ranks' files, :meth:`publish` the checkpoint. The first and the last are collective; in between
    each rank writes by itself.
    """

    def __init__(
        self, root: Path, step: int, extra: Mapping[str, Any], *, rank: int, keep: int
    ) -> None:
        """The checkpoint, after ``step`` updates, in ``root``; this is rank ``rank``. ``extra`` are
        values to save beside tensors. Of the checkpoints up to ``step`` the last ``keep`` stay."""
        if step < 0 or keep < 1:
            raise SpecError(
                "checkpoint", got=f"step {step}, keep {keep}", wanted="step >= 0, keep >= 1"
            )
        self.root, self.step, self.rank, self.keep = Path(root), step, rank, keep
        self.extra = dict(extra)
        self.folder = step_folder(self.root, step)

    def prepare(self, gather: Gather) -> None:
        """Make an empty temporary folder. Raises CheckpointError as :func:`save`. Collective."""
        with self._removing_when_failed(gather):
            self._on_rank_0(gather, lambda: prepare(self.folder))

    def write(self, shards: Sequence[StoredShard]) -> dict[str, Any]:
        """Write this rank's file; returns its table, as JSON (:func:`table_of`)."""
        path = part_of(self.folder) / f"rank{self.rank:05d}.safetensors"
        return table_of(shards, write_shards(path, shards))

    def publish(self, gather: Gather, written: Callable[[], dict[str, Any]]) -> Path:
        """Call ``written``, which returns the table of this rank's file once that is written; then
        rank 0 writes the index, gives the checkpoint its name and deletes old ones. Returns its
        folder. Raises CheckpointError as :func:`save`. Collective."""
        part = part_of(self.folder)

        def put(tables: Sequence[Any]) -> None:
            """On rank 0: write the index, joined from all ranks' tables, and rename the folder."""
            index = join_tables(tables, step=self.step, extra=self.extra)
            write_text(part / INDEX, index.to_text())
            put_in_place(self.folder)

        with self._removing_when_failed(gather):
            tables = self._on_all_ranks(gather, written)
            self._on_rank_0(gather, lambda: put(tables))
        if self.rank == 0:
            prune(self.root, self.step, self.keep)
        return self.folder

    def _on_all_ranks(self, gather: Gather, action: Callable[[], Any]) -> list[Any]:
        """Run ``action`` on every rank. Returns all results in rank order; where it fails on any
        rank, raises CheckpointError on all. Collective."""
        return _on_all_ranks(f"checkpoint {self.folder} was not written", gather, action)

    def _on_rank_0(self, gather: Gather, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 alone; where it fails, all ranks raise CheckpointError.
        Collective."""
        self._on_all_ranks(gather, action if self.rank == 0 else lambda: None)

    @contextmanager
    def _removing_when_failed(self, gather: Gather) -> Generator[None, None, None]:
        """Context of a collective action. Where it raises CheckpointError, which it does on all
        ranks alike, rank 0 removes what was written before any rank goes on with the error."""
        try:
            yield
        except CheckpointError:
            part = part_of(self.folder)
            self._on_rank_0(gather, lambda: shutil.rmtree(part, ignore_errors=True))
            raise


class BackgroundWriter:
    """Writes checkpoints of one rank in a thread while training goes on, one after the other. All
    ranks make the same calls."""

    def __init__(self) -> None:
        """A writer with nothing under way."""
        # copies of shards in host memory, by (tensor name, first row)
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._writing: Writing | None = None
        self._thread: Thread | None = None
        self._table: dict[str, Any] = {}
        self._failed: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is not published yet."""
        return self._writing is not None

    def begin(
        self,
        root: Path,
        step: int,
        shards: Sequence[StoredShard],
        extra: Mapping[str, Any],
        *,
        rank: int,
        gather: Gather,
        keep: int,
    ) -> None:
        """Begin a checkpoint, as :func:`headrace.native.checkpoint.save` writes it, of the tensors
        as they are now: they are copied before this returns. The checkpoint before is finished
        first. Raises as :func:`save`. Collective."""
        self.finish(gather)
        writing = Writing(root, step, extra, rank=rank, keep=keep)
        writing.prepare(gather)
        self._writing, self._failed = writing, None
        try:
            copies = self._copies(shards)
            writing.extra = deepcopy(writing.extra)
        except Exception as error:  # such as a lack of host memory: raised on all ranks later
            self._failed = error
            return
        self._thread = Thread(target=self._write, args=(writing, copies), daemon=True)
        self._thread.start()

    def look(self, gather: Gather) -> Path | None:
        """Publish the checkpoint if all ranks have written it; returns its folder then. Raises as
        :func:`headrace.native.checkpoint.save`. Collective while :attr:`busy`."""
        if not self.busy:
            return None
        # b"1" where this rank's thread has ended
        done = b"0" if self._thread is not None and self._thread.is_alive() else b"1"
        return self.finish(gather) if all(flag == b"1" for flag in gather(done)) else None

    def finish(self, gather: Gather) -> Path | None:
        """Wait for the checkpoint and publish it; returns its folder, None where none was begun.
        Raises as :func:`headrace.native.checkpoint.save`. Collective while :attr:`busy`."""
        writing, self._writing = self._writing, None
        return None if writing is None else writing.publish(gather, self._finished_table)

    def _write(self, writing: Writing, copies: Sequence[StoredShard]) -> None:
        """The work of the thread: write this rank's file, and keep its table, or the error."""
        try:
            self._table = writing.write(copies)
        except Exception as error:  # raised on all ranks by ``look`` or ``finish``
            self._failed = error

    def _finished_table(self) -> dict[str, Any]:
        """Wait for the thread; returns the table of this rank's file. Raises what failed in the
        thread, or before it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            raise self._failed
        return self._table

    def _copies(self, shards: Sequence[StoredShard]) -> list[StoredShard]:
        """Copy the shards to host memory; returns once all bytes are there."""
        copies, devices = list[StoredShard](), set[torch.device]()
        for shard in shards:
            key, tensor = (shard.name, shard.first_row), shard.tensor.detach()
            # Buffers are kept for the next checkpoint; one of another shape or type is made anew.
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                pinned = tensor.device.type == "cuda"
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                self._buffers[key] = buffer
            buffer.copy_(tensor, non_blocking=True)
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
            copies.append(
                StoredShard(
                    name=shard.name, first_row=shard.first_row, tensor=buffer, shape=shard.shape
                )
            )
        # copies from a GPU are asynchronous, and must have ended before training changes the
        # tensors
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _on_all_ranks(what: str, gather: Gather, action: Callable[[], Any]) -> list[Any]:
    """Run ``action``, which returns JSON, on every rank. Returns all results in rank order; where
    it raises on any rank, all ranks raise the same CheckpointError, which begins with ``what`` and
    names the failed ranks. Collective."""
    try:
        own_answer = {"value": action()}
    except Exception as error:  # whatever it is, the other ranks wait for an answer
        own_answer = {"error": _cause(error)}
    answers = [json.loads(payload) for payload in gather(json.dumps(own_answer).encode())]
    failed = [
        f"rank {rank}: {answer['error']}"
        for rank, answer in enumerate(answers)
        if "error" in answer
    ]
    if failed:
        if len(failed) > _NAMED_RANKS:
            failed[_NAMED_RANKS:] = [f"{len(failed) - _NAMED_RANKS} more ranks"]
        hint = "the checkpoints before it are as they were"
        raise CheckpointError(what, got=", ".join(failed), hint=hint)
    return [answer["value"] for answer in answers]


def _cause(error: Exception) -> str:
    """An error in a few words, for the message of another one."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


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
    """Write a checkpoint of all ranks' ``shards``, which together hold every row; returns its
    folder.

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

    Each rank calls it for itself. Only files that hold its rows are opened, and the checksum of all
    of each is verified first. Rows of one tensor may come from several files. Raises
    CheckpointError when a tensor is unknown or of another shape or type (nothing is converted), and
    DamagedCheckpoint when anything is missing, damaged or malformed; the hint then names the
    previous good checkpoint. After an error the tensors hold no meaning.
    """
    path = Path(path)
    with _naming_another(path):
        index = _index(path)
    _check_wanted(path, index, wanted)
    with _naming_another(path):
        reads_by_file: dict[str, list[tuple[StoredShard, FilePiece]]] = defaultdict(list)
        for shard, pieces in zip(wanted, index.pieces([s.interval for s in wanted]), strict=True):
            for piece in pieces:
                reads_by_file[piece.file.file].append((shard, piece))
        # Only the files that are read; before anything is written to the tensors.
        _check_files(path, [file for file in index.files if file.file in reads_by_file])
        for name, reads in reads_by_file.items():
            read_pieces(path / name, reads)
    return dict(index.extra)


def _index(path: Path) -> Index:
    """The index of the checkpoint at ``path``. Raises CheckpointError where it is missing,
    malformed or of another step than the folder's name says."""
    index, step = Index.read(path), step_of(path)
    if step not in (None, index.step):
        raise CheckpointError(
            f"checkpoint {path}", got=f"the index of step {index.step}", wanted=f"step {step}"
        )
    return index


def _check_wanted(path: Path, index: Index, wanted: Sequence[StoredShard]) -> None:
    """Raise CheckpointError for a ``wanted`` tensor that the checkpoint at ``path`` does not have,
    or has with another shape or type."""
    for shard in wanted:
        info = index.info(shard.name)
        if info != shard.info:
            what, hint = f"{path}: {shard.name}", "the checkpoint is of another model or precision"
            raise CheckpointError(what, got=info, wanted=shard.info, hint=hint)


def _check_files(path: Path, files: Sequence[FileInfo]) -> None:
    """Raise CheckpointError for the first file that is missing, or differs in size or checksum."""
    for file in files:  # sizes of all first: that is quick, checksums are not
        check_file(path, file, checksum=False)
    for file in files:
        check_file(path, file, checksum=True)


@contextmanager
def _naming_another(path: Path) -> Generator[None, None, None]:
    """Context that turns a CheckpointError into a DamagedCheckpoint, whose hint names an earlier
    checkpoint to use instead of ``path``, if there is one."""
    try:
        yield
    except CheckpointError as error:
        hints = [hint for hint in (error.hint, _hint_of_another(path)) if hint]
        raise DamagedCheckpoint(
            error.what, got=error.got, wanted=error.wanted, hint="; ".join(hints)
        ) from None


def _hint_of_another(path: Path) -> str | None:
    """A hint, for an error on the checkpoint at ``path``, that names another one: the last whole
    checkpoint of an earlier step, else the last one within the folder ``path``, which may be the
    folder of all checkpoints; None where there is neither."""
    try:
        before, inside = previous(path), latest(path)
    except CheckpointError:  # no hint is worth hiding the first error
        return None
    if before:
        return f"the previous good checkpoint is {before}"
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
    """The folders of all whole checkpoints in ``root``, highest step first. Raises CheckpointError
    when it cannot be read."""
    whole = whole_folders(Path(root))
    return [whole[step] for step in sorted(whole, reverse=True)]


def verify(path: Path) -> None:
    """Check a checkpoint: that every row of every tensor is in a file, and the size, checksum and
    header of every file. Raises CheckpointError, which names the first that is bad."""
    path = Path(path)
    with _naming_another(path):
        index = _index(path)
        index.check_whole(index.tensors)
        _check_files(path, index.files)
        for file in index.files:
            check_header(path, file, index.tensors)


def names(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(global shape, type) of every tensor of a checkpoint, by the tensor's name. Raises
    CheckpointError like :func:`load`."""
    with _naming_another(Path(path)):
        tensors = _index(Path(path)).tensors
    return {name: (info.shape, DTYPES[info.dtype]) for name, info in tensors.items()}


def extra_of(path: Path) -> dict[str, Any]:
    """The values beside tensors, by their names, that were saved as ``extra``; no tensor is read.
    Raises DamagedCheckpoint."""
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
    """Read the tensors whose names ``choose(index)`` gives, each with all its rows; returns them by
    name. Raises CheckpointError like :func:`load`."""
    with _naming_another(path):
        index = _index(path)
    chosen = {name: index.info(name) for name in choose(index)}
    with _naming_another(path):
        index.check_whole(chosen)  # before memory is allocated for what the index claims
    tensors = {n: torch.empty(t.shape, dtype=DTYPES[t.dtype]) for n, t in chosen.items()}
    load(
        path,
        [
            StoredShard(name=n, first_row=0, tensor=t, shape=tuple(t.shape))
            for n, t in tensors.items()
        ],
    )
    return tensors
