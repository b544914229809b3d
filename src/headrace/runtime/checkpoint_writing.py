"""Checkpoints on their way to the disk, some of them while training goes on.

In the background, what is saved is copied to the host's memory, from a device by way of pinned
buffers that the next checkpoint uses again, and a thread of every rank writes its file from there.
The ranks look after each step whether all have written, and then publish the checkpoint together:
before that there is none, as if the run had not come to it yet.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from headrace.errors import CheckpointError, SpecError
from headrace.runtime.checkpoint_folders import part_of, prepare, prune, put_in_place, step_folder
from headrace.runtime.shard_files import write_shards, write_text
from headrace.runtime.shard_index import INDEX, join_tables, table_of
from headrace.runtime.shards import StoredShard

__all__ = ["BackgroundWriter", "Gather", "Writing"]

#: Every rank calls it together; returns every rank's payload in rank order.
Gather = Callable[[bytes], list[bytes]]

_NAMED_RANKS = 4


class Writing:
    """A checkpoint on its way: prepared, then the ranks' files written, then published.

    All ranks take part in the first and the last, between which each writes for itself.
    """

    def __init__(
        self, root: Path, step: int, extra: Mapping[str, Any], *, rank: int, keep: int
    ) -> None:
        if step < 0 or keep < 1:
            raise SpecError(
                "checkpoint", got=f"step {step}, keep {keep}", wanted="step >= 0, keep >= 1"
            )
        self.root, self.step, self.rank, self.keep = Path(root), step, rank, keep
        self.extra = dict(extra)
        self.folder = step_folder(self.root, step)

    def prepare(self, gather: Gather) -> None:
        """Make room for the files. Raises CheckpointError as :func:`save`. Collective."""
        with self._cleared(gather):
            self._first(gather, lambda: prepare(self.folder))

    def write(self, shards: Sequence[StoredShard]) -> dict[str, Any]:
        """Write this rank's file; its table."""
        path = part_of(self.folder) / f"rank{self.rank:05d}.safetensors"
        return table_of(shards, write_shards(path, shards))

    def publish(self, gather: Gather, written: Callable[[], dict[str, Any]]) -> Path:
        """Give the checkpoint its name, once ``written`` gives every rank's table; its folder.
        Raises CheckpointError as :func:`save`. Collective."""
        part = part_of(self.folder)

        def put(tables: Sequence[Any]) -> None:
            index = join_tables(tables, step=self.step, extra=self.extra)
            write_text(part / INDEX, index.to_text())
            put_in_place(self.folder)

        with self._cleared(gather):
            tables = self._together(gather, written)
            self._first(gather, lambda: put(tables))
        if self.rank == 0:
            prune(self.root, self.step, self.keep)
        return self.folder

    def _together(self, gather: Gather, action: Callable[[], Any]) -> list[Any]:
        return _together(f"checkpoint {self.folder} was not written", gather, action)

    def _first(self, gather: Gather, action: Callable[[], None]) -> None:
        self._together(gather, action if self.rank == 0 else lambda: None)

    @contextmanager
    def _cleared(self, gather: Gather) -> Generator[None, None, None]:
        try:
            yield
        except CheckpointError:
            # The others raise only after rank 0 has cleared away what was written.
            part = part_of(self.folder)
            self._first(gather, lambda: shutil.rmtree(part, ignore_errors=True))
            raise


class BackgroundWriter:
    """Writes one checkpoint after the other for one rank. All ranks make the same calls."""

    def __init__(self) -> None:
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
        """Begin a checkpoint, as :func:`headrace.runtime.checkpoint.save` writes it, of the
        tensors as they are now; the one before is ended first. Raises as that. Collective."""
        self.finish(gather)
        writing = Writing(root, step, extra, rank=rank, keep=keep)
        writing.prepare(gather)
        self._writing, self._failed = writing, None
        try:
            copies = self._copied(shards)
            writing.extra = deepcopy(writing.extra)
        except Exception as error:  # no memory on the host, say: told where the ranks meet
            self._failed = error
            return
        self._thread = Thread(target=self._write, args=(writing, copies), daemon=True)
        self._thread.start()

    def look(self, gather: Gather) -> Path | None:
        """Publish the checkpoint if all ranks have written it; its folder then. Raises as
        :func:`headrace.runtime.checkpoint.save`. Collective while :attr:`busy`."""
        if not self.busy:
            return None
        done = b"0" if self._thread is not None and self._thread.is_alive() else b"1"
        return self.finish(gather) if all(one == b"1" for one in gather(done)) else None

    def finish(self, gather: Gather) -> Path | None:
        """Wait for the checkpoint and publish it; its folder, None where there is none. Raises as
        :func:`headrace.runtime.checkpoint.save`. Collective while :attr:`busy`."""
        writing, self._writing = self._writing, None
        return None if writing is None else writing.publish(gather, self._written)

    def _write(self, writing: Writing, copies: Sequence[StoredShard]) -> None:
        try:
            self._table = writing.write(copies)
        except Exception as error:  # told where the ranks meet
            self._failed = error

    def _written(self) -> dict[str, Any]:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            raise self._failed
        return self._table

    def _copied(self, shards: Sequence[StoredShard]) -> list[StoredShard]:
        """The shards as they are now, in the host's memory."""
        copies, devices = list[StoredShard](), set[torch.device]()
        for shard in shards:
            key, tensor = (shard.name, shard.first_row), shard.tensor.detach()
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
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _together(what: str, gather: Gather, action: Callable[[], Any]) -> list[Any]:
    """``action`` on every rank, all results; or the same CheckpointError on every rank."""
    try:
        answer = {"value": action()}
    except Exception as error:  # whatever it is, the other ranks wait for an answer
        answer = {"error": _cause(error)}
    answers = [json.loads(payload) for payload in gather(json.dumps(answer).encode())]
    failed = [f"rank {r}: {a['error']}" for r, a in enumerate(answers) if "error" in a]
    if failed:
        if len(failed) > _NAMED_RANKS:
            failed[_NAMED_RANKS:] = [f"{len(failed) - _NAMED_RANKS} more ranks"]
        hint = "the checkpoints before it are as they were"
        raise CheckpointError(what, got=", ".join(failed), hint=hint)
    return [a["value"] for a in answers]


def _cause(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
