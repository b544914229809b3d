"""Checkpoints that threads write while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import CheckpointError
from headrace.native import checkpoint
from headrace.native import checkpoint as checkpoint_writing
from headrace.native.checkpoint import BackgroundWriter
from headrace.native.shard_files import StoredShard
from running.native.test_checkpoint import alone, blanks, model, shards_of, together


def begun(
    writer: BackgroundWriter,
    root: Path,
    step: int,
    shards: list[StoredShard],
    rank: int = 0,
    gather: Callable[[bytes], list[bytes]] = alone,
    keep: int = 3,
) -> None:
    writer.begin(root, step, shards, {"step": step}, rank=rank, gather=gather, keep=keep)


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before the event is set."""
    gate, write = threading.Event(), checkpoint_writing.write_shards

    def later(*arguments: Any) -> Any:
        assert gate.wait(20)
        return write(*arguments)

    monkeypatch.setattr(checkpoint_writing, "write_shards", later)
    return gate


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_is_saved_is_what_was_when_it_began(ranks: int, tmp_path: Path) -> None:
    """Catches tensors that are written after the next step has changed them, and buffers that the
    next checkpoint takes while this one is written."""
    tensors = model()

    def fn(rank: int, gather: Callable[[bytes], list[bytes]]) -> bool:
        mine, writer = shards_of(tensors, rank, ranks), BackgroundWriter()
        begun(writer, tmp_path, 1, mine, rank, gather)
        for shard in mine:
            shard.tensor.zero_()
        begun(writer, tmp_path, 2, mine, rank, gather)
        assert writer.finish(gather) == tmp_path / "step-000002"
        assert not writer.busy
        return writer.finish(gather) is None

    assert together(ranks, fn) == [True] * ranks
    for step, factor in ((1, 1), (2, 0)):
        wanted = shards_of(tensors, 0, 1)
        got = blanks(wanted)
        assert checkpoint.load(tmp_path / f"step-{step:06d}", got) == {"step": step}
        for here, there in zip(got, wanted, strict=True):
            assert torch.equal(here.tensor, there.tensor * factor)
    checkpoint.verify(tmp_path / "step-000001")


def test_it_is_published_when_all_ranks_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a checkpoint that is there before it is whole, one that nobody publishes, and
    training that waits for it."""
    gate, tensors = held_up(monkeypatch), model()

    def fn(rank: int, gather: Callable[[bytes], list[bytes]]) -> list[Any]:
        writer = BackgroundWriter()
        begun(writer, tmp_path, 5, shards_of(tensors, rank, 2), rank, gather)
        early = writer.look(gather)
        there = checkpoint.latest(tmp_path)
        gather(b"")
        gate.set()
        path = None
        while path is None:
            path = writer.look(gather)
        return [early, there, path]

    assert together(2, fn) == [[None, None, tmp_path / "step-000005"]] * 2


def test_a_disk_that_fails_is_told_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a thread that fails without a word, and files that nobody clears away."""
    write = checkpoint_writing.write_shards

    def full(path: Path, shards: Any) -> Any:
        if path.name == "rank00001.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, shards)

    tensors = model()

    def fn(rank: int, gather: Callable[[bytes], list[bytes]]) -> str:
        writer, mine = BackgroundWriter(), shards_of(tensors, rank, 2)
        begun(writer, tmp_path, 1, mine, rank, gather)
        writer.finish(gather)
        gather(b"")
        monkeypatch.setattr(checkpoint_writing, "write_shards", full)
        begun(writer, tmp_path, 2, mine, rank, gather)
        with pytest.raises(CheckpointError) as caught:
            writer.finish(gather)
        assert not writer.busy
        return str(caught.value)

    texts = together(2, fn)
    assert texts[0] == texts[1]
    assert "rank 1: No space left on device" in texts[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_old_ones_go_when_new_ones_are_there(tmp_path: Path) -> None:
    """Catches checkpoints that pile up, and one that is deleted before the next is whole."""
    writer, (shard, *_) = BackgroundWriter(), shards_of(model(), 0, 1)
    for step in range(1, 5):
        begun(writer, tmp_path, step, [shard], keep=2)
        kept = sorted(path.name for path in tmp_path.iterdir() if not path.suffix)
        assert kept == [f"step-{n:06d}" for n in range(max(1, step - 2), step)]
    writer.finish(alone)
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == [
        "step-000004",
        "step-000003",
    ]
