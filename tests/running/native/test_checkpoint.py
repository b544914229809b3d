from __future__ import annotations

import json
import os
import resource
import shutil
import threading
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from headrace.comm.collectives import gather_bytes
from headrace.errors import CheckpointError, DamagedCheckpoint, SpecError
from headrace.layouts.partition import Partition
from headrace.native import checkpoint
from headrace.native.checkpoint import Gather, StoredShard
from ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def alone(payload: bytes) -> list[bytes]:
    return [payload]


def whole(name: str, tensor: torch.Tensor) -> StoredShard:
    return StoredShard(name=name, first_row=0, tensor=tensor, shape=tuple(tensor.shape))


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows that few rank counts divide, one row, no rows, odd bytes, vectors and a cube."""
    g = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(13, 5, generator=g),
        "b.weight": torch.randn(7, 3, generator=g).bfloat16(),
        "b.bias": torch.randn(7, generator=g).bfloat16(),
        "one": torch.randn(1, 4, generator=g).double(),
        "none": torch.empty(0, 4),
        "thin": torch.empty(3, 0),
        "cube": torch.randint(9, (5, 2, 3), generator=g),
        "mask": torch.randint(2, (11,), generator=g).bool(),
    }


def shards_of(tensors: dict[str, torch.Tensor], rank: int, ranks: int) -> list[StoredShard]:
    """A rank's rows of every tensor, split evenly."""
    shards = []
    for name, tensor in tensors.items():
        rows = Partition.even(len(tensor), ranks).parts[rank]
        part = tensor[rows.start : rows.stop].clone()
        shards.append(
            StoredShard(name=name, first_row=rows.start, tensor=part, shape=tuple(tensor.shape))
        )
    return shards


def blanks(shards: list[StoredShard]) -> list[StoredShard]:
    return [
        StoredShard(
            name=s.name, first_row=s.first_row, tensor=torch.zeros_like(s.tensor), shape=s.shape
        )
        for s in shards
    ]


def save_one(root: Path, step: int, tensors: dict[str, torch.Tensor], **options: Any) -> Path:
    shards = [whole(name, tensor) for name, tensor in tensors.items()]
    return checkpoint.save(root, step, shards, {"step": step}, rank=0, gather=alone, **options)


def together(ranks: int, fn: Callable[[int, Gather], Any]) -> list[Any]:
    """``fn(rank, gather)`` on threads that meet in ``gather``; results or errors in rank order."""
    barrier = threading.Barrier(ranks, timeout=20)
    sent: list[bytes] = [b""] * ranks
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        def gather(payload: bytes) -> list[bytes]:
            sent[rank] = payload
            barrier.wait()
            answer = list(sent)
            barrier.wait()
            return answer

        try:
            results[rank] = fn(rank, gather)
        except CheckpointError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def save_together(root: Path, step: int, tensors: dict[str, torch.Tensor], ranks: int) -> Path:
    def fn(rank: int, gather: Gather) -> Path:
        mine = shards_of(tensors, rank, ranks)
        return checkpoint.save(root, step, mine, {"rank": rank}, rank=rank, gather=gather)

    (path,) = set(together(ranks, fn))
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index and sign it again, as an attacker would."""
    body = json.loads((path / "index.json").read_text())
    del body["crc32"]
    change(body)
    body = {"crc32": zlib.crc32(json.dumps(body).encode()), **body}
    (path / "index.json").write_text(json.dumps(body))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


# Saving and loading


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (4, 2), (3, 1), (1, 4), (3, 3)])
def test_any_number_of_ranks_loads_it(tmp_path: Path, before: int, after: int) -> None:
    """Alone catches rows cut at the wrong place when the number of ranks changes."""
    tensors = model()
    path = save_together(tmp_path, 120, tensors, before)
    assert path == tmp_path / "step-000120"
    for rank in range(after):
        wanted = shards_of(tensors, rank, after)
        got = blanks(wanted)
        assert checkpoint.load(path, got) == {"rank": 0}
        assert all(same(g.tensor, w.tensor) for g, w in zip(got, wanted, strict=True))


def _save_and_load_on_gloo(root: str) -> bool:
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def gather(payload: bytes) -> list[bytes]:
        return gather_bytes(payload, dist.group.WORLD)

    wanted = shards_of(model(), rank, ranks)
    path = checkpoint.save(Path(root), 7, wanted, {}, rank=rank, gather=gather)
    got = blanks(wanted)
    checkpoint.load(path, got)
    return all(same(g.tensor, w.tensor) for g, w in zip(got, wanted, strict=True))


def test_processes_meet_through_gather_bytes(tmp_path: Path) -> None:
    """Alone catches a payload that the real collective cannot carry."""
    assert run_ranks(3, _save_and_load_on_gloo, str(tmp_path)) == [True] * 3


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_partition_to_any_interval(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Alone catches a wrong row offset: several intervals per rank, overlaps, any cut."""
    root = tmp_path_factory.mktemp("any")
    rows = data.draw(st.integers(1, 12))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = torch.arange(rows * 3).view(rows, 3).to(dtype)
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=4))})
    intervals = list(pairwise(cuts))
    a, b = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    more = [(a, b)] if a < b and a not in cuts else []
    owner = [data.draw(st.integers(0, 1)) for _ in intervals + more]

    def fn(rank: int, gather: Gather) -> Path:
        mine = [
            StoredShard(name="x", first_row=i, tensor=tensor[i:j], shape=(rows, 3))
            for (i, j), r in zip(intervals + more, owner, strict=True)
            if r == rank
        ]
        return checkpoint.save(root, 0, mine, {}, rank=rank, gather=gather)

    path = together(2, fn)[0]
    got = torch.zeros_like(tensor[a:b])
    checkpoint.load(path, [StoredShard(name="x", first_row=a, tensor=got, shape=(rows, 3))])
    assert same(got, tensor[a:b])
    assert same(checkpoint.read_whole(path, "x"), tensor)


def test_only_needed_files_are_opened(tmp_path: Path) -> None:
    """Alone catches a load that reads, or checks, what another rank's rows need."""
    tensors = {"w": torch.randn(4, 2)}
    path = save_together(tmp_path, 1, tensors, 2)
    (path / "rank00001.safetensors").unlink()
    got = torch.zeros(2, 2)
    checkpoint.load(path, [StoredShard(name="w", first_row=0, tensor=got, shape=(4, 2))])
    assert same(got, tensors["w"][:2])
    with pytest.raises(CheckpointError, match=r"rank00001\.safetensors: missing"):
        checkpoint.verify(path)


def test_into_and_from_views_and_parameters(tmp_path: Path) -> None:
    """Alone catches writes into a copy of a strided tensor, and shared memory that is refused."""
    base = torch.randn(6, 4)
    path = save_one(tmp_path, 0, {"t": base.t(), "again": base, "slice": base[::2]})
    target = torch.zeros(6, 4, requires_grad=True)
    strided = torch.zeros(6, 8)[:, ::2]
    checkpoint.load(path, [whole("again", target)])
    checkpoint.load(path, [whole("again", strided)])
    assert same(target.detach(), base)
    assert same(strided, base)
    assert same(checkpoint.read_whole(path, "t"), base.t())
    assert same(checkpoint.read_whole(path, "slice"), base[::2])


def test_names_and_read_all(tmp_path: Path) -> None:
    """Alone catches an export that leaves out a tensor, or gives its local shape."""
    tensors = model()
    path = save_together(tmp_path, 3, tensors, 3)
    assert checkpoint.names(path) == {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}
    got = checkpoint.read_all(path, "b.")
    assert set(got) == {"b.weight", "b.bias"}
    assert all(same(t, tensors[n]) for n, t in checkpoint.read_all(path).items())


def test_files_are_safetensors(tmp_path: Path) -> None:
    """Alone catches a header that other readers of the format refuse, or no alignment."""
    tensors = model()
    path = save_one(tmp_path, 3, tensors)
    data = (path / "rank00000.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    for key, entry in json.loads(data[8 : 8 + size]).items():
        if key != "__metadata__":
            assert entry["data_offsets"][0] % tensors[key[:-2]].element_size() == 0
    with safe_open(path / "rank00000.safetensors", framework="pt") as file:
        assert set(file.keys()) == {f"{n}@0" for n, t in tensors.items() if len(t)}
        assert all(same(file.get_tensor(k), tensors[k[:-2]]) for k in file.keys())  # noqa: SIM118


def test_extra_is_any_json(tmp_path: Path) -> None:
    """Alone catches a checksum of the index that its own text does not give."""
    extra = {
        "seed": 2**70,
        "loss": 0.1 + 0.2,
        "text": "\u00e9\ud800",
        "deep": [{"x": [None, True]}],
    }
    path = checkpoint.save(tmp_path, 0, [], {**extra, 3: (1, 2)}, rank=0, gather=alone)
    assert checkpoint.load(path, []) == {**extra, "3": [1, 2]}


@pytest.mark.parametrize("bad", [{"x": {1, 2}}, {"loss": float("nan")}, {"t": torch.ones(1)}])
def test_extra_that_is_not_json(tmp_path: Path, bad: dict[str, Any]) -> None:
    """Alone catches an index that no other reader of JSON takes."""
    with pytest.raises(CheckpointError, match="wanted a JSON object"):
        checkpoint.save(tmp_path, 0, [], bad, rank=0, gather=alone)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_plain_files_are_opened(tmp_path: Path, kind: str) -> None:
    """Alone catches a load that waits for a writer for ever, or reads a device without end."""
    path = save_one(tmp_path, 3, model())
    for name in ("rank00000.safetensors", "index.json"):
        (path / name).unlink()
        if kind == "pipe":
            os.mkfifo(path / name)
        elif kind == "device":
            (path / name).symlink_to("/dev/zero")
        else:
            (path / name).mkdir()
        with pytest.raises(CheckpointError, match=f"{name}.*wanted a plain file"):
            checkpoint.verify(path)


def test_a_folder_named_after_another_step(tmp_path: Path) -> None:
    """Alone catches a copy under another name that is the newest for ever."""
    save_one(tmp_path, 3, model())
    save_one(tmp_path, 5, model()).rename(tmp_path / "step-000900")
    with pytest.raises(DamagedCheckpoint, match=r"index of step 5.*good checkpoint is .*-000003"):
        checkpoint.load(tmp_path / "step-000900", [])
    with pytest.raises(DamagedCheckpoint, match="index of step 5"):
        checkpoint.verify(tmp_path / "step-000900")
    (tmp_path / "step-000900").rename(tmp_path / "best")
    checkpoint.verify(tmp_path / "best")


def _drop_rows(body: dict[str, Any]) -> None:
    body["files"][1]["rows"] = body["files"][1]["rows"][1:]


def _drop_file(body: dict[str, Any]) -> None:
    del body["files"][1]


@pytest.mark.parametrize("change", [_drop_rows, _drop_file])
def test_verify_misses_rows(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alone catches ``whole`` said of an index that leaves out what nobody can load."""
    path = save_together(tmp_path, 3, model(), 2)
    rewrite(path, change)
    with pytest.raises(CheckpointError, match="none for row"):
        checkpoint.verify(path)


def test_verify_reads_headers(tmp_path: Path) -> None:
    """Alone catches ``whole`` said of a file whose checksum agrees and that no rank can read."""
    path = save_one(tmp_path, 3, {"x": torch.ones(3)})
    file = path / "rank00000.safetensors"
    raw = file.read_bytes().replace(b"x@0", b"y@0")
    file.write_bytes(raw)
    rewrite(path, lambda body: body["files"][0].update(crc32=zlib.crc32(raw)))
    with pytest.raises(CheckpointError, match="wanted the tensors of the index"):
        checkpoint.verify(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_no_json(tmp_path: Path, number: str) -> None:
    """Alone catches an index whose extra brings NaN into a run."""
    path = checkpoint.save(tmp_path, 0, [], {"ratio": 7.5}, rank=0, gather=alone)
    (path / "index.json").write_text((path / "index.json").read_text().replace("7.5", number))
    with pytest.raises(DamagedCheckpoint, match="is no JSON"):
        checkpoint.load(path, [])


# Folders


def test_keep_and_latest(tmp_path: Path) -> None:
    """Alone catches deletion of the newest, or of a later run's."""
    assert checkpoint.latest(tmp_path / "absent") is None
    for step in (5, 1_000_000, 10, 20):
        save_one(tmp_path, step, {}, keep=2)
    assert {p.name for p in tmp_path.iterdir()} == {"step-000010", "step-000020", "step-1000000"}
    (tmp_path / "step-2000000").mkdir()  # no index: not a checkpoint
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000000"
    save_one(tmp_path, 15, {}, keep=1)
    assert {p.name for p in tmp_path.iterdir() if p.name < "step-1"} == {
        "step-000015",
        "step-000020",
    }


def test_same_step_again(tmp_path: Path) -> None:
    """Alone catches stale files of more ranks in a checkpoint that is replaced."""
    save_together(tmp_path, 4, model(0), 3)
    path = save_together(tmp_path, 4, model(1), 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]
    names = sorted(p.name for p in path.iterdir())
    assert names == ["index.json", "rank00000.safetensors", "rank00001.safetensors"]
    assert same(checkpoint.read_whole(path, "a.weight"), model(1)["a.weight"])


def _crash_at(count: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every operation on files but the first ``count`` end the process."""
    calls = [0]

    def counted(fn: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] > count:
                raise KeyboardInterrupt
            return fn(*args, **kwargs)

        return inner

    for owner, names in ((os, ("fsync",)), (Path, ("rename", "mkdir")), (os, ("unlink", "rmdir"))):
        for name in names:
            monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return calls


@pytest.mark.parametrize("step", [10, 20])
def test_crash_at_every_operation(tmp_path: Path, step: int) -> None:
    """Alone catches any moment at which a crash loses the checkpoint before, or shows half of
    a new one; step 10 replaces the one before."""
    for count in range(100):
        root = tmp_path / str(count)
        save_one(root, 5, {"x": torch.full((3,), 5.0)})
        save_one(root, 10, {"x": torch.full((3,), 10.0)}, keep=2)
        with pytest.MonkeyPatch.context() as patch:
            _crash_at(count, patch)
            try:
                save_one(root, step, {"x": torch.full((3,), 99.0)}, keep=2)
                ended = True
            except KeyboardInterrupt:
                ended = False
        path = checkpoint.latest(root)
        assert path is not None
        checkpoint.verify(path)
        value = checkpoint.read_whole(path, "x")[0].item()
        assert value in ({99.0} if ended else {10.0, 99.0})
        save_one(root, 30, {"x": torch.full((3,), 30.0)}, keep=2)  # clears away what is left
        expected = {step, 30} if value == 99.0 else {10, 30}
        assert {p.name for p in root.iterdir()} == {f"step-{s:06d}" for s in expected}
        if ended:
            break
    assert 8 < count < 99


def test_rank_that_dies_leaves_only_part(tmp_path: Path) -> None:
    """Alone catches a name without .part before all ranks are done."""
    save_one(tmp_path, 1, {"x": torch.ones(1)})

    def dies(payload: bytes) -> list[bytes]:
        if b"rank00000" in payload:
            raise RuntimeError("connection closed by peer")
        return [payload]

    with pytest.raises(RuntimeError, match="closed by peer"):
        checkpoint.save(tmp_path, 2, [whole("x", torch.ones(1))], {}, rank=0, gather=dies)
    assert {p.name for p in tmp_path.iterdir()} == {"step-000001", "step-000002.part"}
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000001"
    save_one(tmp_path, 3, {})
    assert {p.name for p in tmp_path.iterdir()} == {"step-000001", "step-000003"}


def test_old_that_cannot_be_deleted_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches a run that stops because an old checkpoint stays."""
    save_one(tmp_path, 1, {})
    monkeypatch.setattr(shutil, "rmtree", _no_permission)
    with pytest.warns(RuntimeWarning, match="step-000001 cannot be deleted: Permission denied"):
        path = save_one(tmp_path, 2, {}, keep=1)
    assert checkpoint.latest(tmp_path) == path


def _no_permission(path: Path, **_: Any) -> None:
    raise PermissionError(13, "Permission denied", str(path))


# Failures while saving


def _save_with_limit(root: str) -> str:
    rank = dist.get_rank()
    if rank in (1, 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    shards = shards_of({"w": torch.zeros(4096, 8)}, rank, 3)

    def gather(payload: bytes) -> list[bytes]:
        return gather_bytes(payload, dist.group.WORLD)

    try:
        checkpoint.save(Path(root), 2, shards, {}, rank=rank, gather=gather)
    except CheckpointError as error:
        return f"{error} {sorted(os.listdir(root))}"
    return "saved"


def test_failing_ranks_are_named_on_every_rank(tmp_path: Path) -> None:
    """Alone catches survivors that hang, or say something else, when a rank cannot write."""
    save_one(tmp_path, 1, {})
    texts = run_ranks(3, _save_with_limit, str(tmp_path))
    assert len(set(texts)) == 1
    part = tmp_path / "step-000002.part"
    assert texts[0].startswith(
        f"checkpoint {tmp_path / 'step-000002'} was not written: got rank 1: "
    )
    assert "rank 1: File too large" in texts[0]
    assert "rank 2: File too large" in texts[0]
    assert "rank 0:" not in texts[0]
    assert texts[0].endswith("['step-000001']")
    assert not part.exists()


def test_root_that_is_a_file(tmp_path: Path) -> None:
    """Alone catches an error of the first step that only rank 0 sees."""
    root = tmp_path / "file"
    root.write_text("")
    errors = together(
        3, lambda rank, gather: checkpoint.save(root, 0, [], {}, rank=rank, gather=gather)
    )
    assert {type(e) for e in errors} == {CheckpointError}
    assert len({str(e) for e in errors}) == 1
    assert "rank 0: File exists" in str(errors[0])


def test_many_failing_ranks_are_counted(tmp_path: Path) -> None:
    """Alone catches a text as long as the number of ranks."""
    gather = lambda _: [b'{"error": "No space left on device"}'] * 9  # noqa: E731
    with pytest.raises(CheckpointError, match="rank 3: No space left on device, 5 more ranks;"):
        checkpoint.save(tmp_path, 0, [], {}, rank=0, gather=gather)


BAD_SAVES = {
    "rows .*none for row 2": ([(0, (2, 3), (5, 3))], [(3, (2, 3), (5, 3))]),
    "one type and shape": ([(0, (2, 3), (2, 3))], [(0, (2, 4), (2, 4))]),
    "two at row 0": ([(0, (2, 3), (2, 3)), (0, (2, 3), (2, 3))], []),
}


@pytest.mark.parametrize("text", BAD_SAVES)
def test_shards_that_contradict_are_not_written(tmp_path: Path, text: str) -> None:
    """Alone catches a checkpoint that could never be loaded."""

    def fn(rank: int, gather: Gather) -> Path:
        mine = [
            StoredShard(name="x", first_row=first, tensor=torch.zeros(size), shape=shape)
            for first, size, shape in BAD_SAVES[text][rank]
        ]
        return checkpoint.save(tmp_path, 0, mine, {}, rank=rank, gather=gather)

    for error in together(2, fn):
        with pytest.raises(CheckpointError, match=text):
            raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("first_row", "tensor", "shape"),
    [
        (0, torch.zeros(2, 3), (2, 4)),
        (0, torch.zeros(2), (2, 1)),
        (0, torch.zeros(()), ()),
        (-1, torch.zeros(2), (4,)),
        (3, torch.zeros(2), (4,)),
        (0, torch.zeros(2, dtype=torch.complex64), (4,)),
    ],
)
def test_shards_that_are_refused(first_row: int, tensor: torch.Tensor, shape: Any) -> None:
    """Alone catches rows outside of their tensor before they reach a file."""
    with pytest.raises(SpecError, match="shard of x"):
        StoredShard(name="x", first_row=first_row, tensor=tensor, shape=shape)
    with pytest.raises(SpecError, match="keep 0"):
        checkpoint.save(Path("unused"), 0, [], {}, rank=0, gather=alone, keep=0)


# Failures while loading


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A good checkpoint of step 1 and one of step 2, of two ranks, to be damaged."""
    save_together(tmp_path, 1, {"w": torch.randn(64, 8)}, 2)
    return save_together(tmp_path, 2, {"w": torch.randn(64, 8), "x.bias": torch.randn(5)}, 2)


def refused(path: Path, text: str) -> str:
    """Load, read and verify give one error, with ``text``, that names the checkpoint before."""
    with pytest.raises(CheckpointError, match=text) as one:
        checkpoint.load(path, [whole("w", torch.zeros(64, 8))])
    with pytest.raises(CheckpointError, match=text):
        checkpoint.read_whole(path, "w")
    assert f"the previous good checkpoint is {path.parent / 'step-000001'}" in str(one.value)
    return str(one.value)


def test_damaged_files(saved: Path) -> None:
    """Alone catches a damaged file that loads: truncated, one bit flipped, too long, missing."""
    file = saved / "rank00001.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[: len(good) // 2])
    text = f"got {len(good) // 2} bytes, wanted {len(good)}; the file is truncated"
    refused(saved, rf"rank00001\.safetensors: {text}")
    for at in (0, 9, len(good) - 70):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        refused(saved, r"rank00001\.safetensors: checksum differs")
        with pytest.raises(CheckpointError, match="checksum differs"):
            checkpoint.verify(saved)
    file.write_bytes(good + b"\0")
    refused(saved, "the file is too long")
    file.unlink()
    refused(saved, r"rank00001\.safetensors: missing")
    file.mkdir()
    refused(saved, r"rank00001\.safetensors")


def test_checkpoint_before_must_be_good(saved: Path) -> None:
    """Alone catches a hint that leads to another damaged checkpoint."""
    first = saved.parent / "step-000001"
    (first / "rank00000.safetensors").write_bytes(b"short")
    assert checkpoint.previous(saved) is None
    (saved / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"got no index\.json, wanted a whole one$"):
        checkpoint.load(saved, [])


def test_folder_around_the_checkpoints(saved: Path) -> None:
    """Alone catches a bare 'not found' for the usual mistake of one folder too high."""
    with pytest.raises(CheckpointError, match=f"did you mean {saved}"):
        checkpoint.verify(saved.parent)


def test_another_model(saved: Path) -> None:
    """Alone catches silent conversion of types, and rows of another shape."""
    for tensor in (torch.zeros(63, 8), torch.zeros(64, 9), torch.zeros(64, 8).double()):
        with pytest.raises(CheckpointError, match=r"w: got F32 \(64, 8\), wanted F") as caught:
            checkpoint.load(saved, [whole("w", tensor)])
        assert "another model" in str(caught.value)
    for load in (
        lambda: checkpoint.load(saved, [whole("x.bia", torch.zeros(5))]),
        lambda: checkpoint.read_whole(saved, "x.bia"),
    ):
        with pytest.raises(CheckpointError, match=r"no tensor 'x.bia' .*did you mean 'x.bias'"):
            load()


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": 1}', b"[" * 100_000, b"9" * 5000],
)
def test_index_that_is_no_index(saved: Path, text: bytes) -> None:
    """Alone catches a traceback from the depths for a text that is not ours."""
    (saved / "index.json").write_bytes(text)
    refused(saved, r"index\.json: got")


def test_index_with_one_digit_changed(saved: Path) -> None:
    """Alone catches a seed, or a row, that changed on disk."""
    path = saved / "index.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    refused(saved, r"index\.json: got a checksum that differs")


def _set(*keys: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = keys

    def change(body: Any) -> None:
        for key in way:
            body = body[key]
        body[last] = value

    return change


HOSTILE: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_set("format", 2), "got format 2, wanted format 1"),
    (_set("files", 0, "file", "/etc/passwd"), "file name '/etc/passwd'"),
    (_set("files", 0, "file", "../step-000001/rank00000.safetensors"), "file name"),
    (_set("files", 0, "file", "rank00000.safetensors/../x"), "file name"),
    (_set("files", 0, "file", "rank00001.safetensors"), "named twice"),
    (_set("files", 0, "bytes", -1), "bytes -1"),
    (_set("files", 0, "bytes", True), "bytes = True"),
    (_set("files", 0, "bytes", 10), "of 10 bytes with"),
    (_set("files", 0, "rows", 0, 1, -8), "first row -8"),
    (_set("files", 0, "rows", 0, 2, 2**40), "of no tensor"),
    (_set("files", 0, "rows", 0, 0, "y"), "of no tensor"),
    (_set("files", 0, "rows", 0, ["w", 0]), "name, first row, rows"),
    (_set("files", {}), "wanted a list"),
    (_set("tensors", "w", "shape", [2**40, 8]), "none for row 64"),
    (_set("tensors", "w", "shape", [2**62, 8]), "one that fits a machine"),
    (_set("tensors", "w", "shape", []), "one that fits a machine"),
    (_set("tensors", "w", "shape", ["64", 8]), "a shape of '64'"),
    (_set("tensors", "w", "dtype", "object"), "the type 'object'"),
    (_set("extra", None), "extra = None"),
    (_set("files", 0, "rows", 0, 1, 1), "none for row 0"),
]


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_hostile_index(saved: Path, case: int) -> None:
    """Alone catches a signed index that opens other files, asks for memory without end, or ends
    in a traceback; where the error comes late, reading (which believes the index) gives it."""
    change, text = HOSTILE[case]
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=text):
        checkpoint.read_whole(saved, "w")


def test_index_that_does_not_fit_its_files(saved: Path) -> None:
    """Alone catches rows read from a file that holds others than the index says."""
    for change in (
        _set("files", 0, "rows", 0, 2, 31),
        _set("tensors", "w", {"shape": [64, 8], "dtype": "I32"}),
    ):
        index = (saved / "index.json").read_text()
        rewrite(saved, change)
        with pytest.raises(CheckpointError, match=r"got|none"):
            checkpoint.read_whole(saved, "w")
        (saved / "index.json").write_text(index)
    for file in saved.glob("rank*"):
        file.write_bytes(b"\xff" * 64)
    body = [{"bytes": 64, "crc32": zlib.crc32(b"\xff" * 64), "rows": []}, {}]
    rewrite(saved, lambda b: [f.update(body[0]) for f in b["files"]])
    rewrite(saved, _set("tensors", "w", {"shape": [2, 1], "dtype": "U8"}))
    rewrite(saved, _set("files", 0, "rows", [["w", 0, 2]]))
    with pytest.raises(CheckpointError, match="wanted the tensors of the index"):
        checkpoint.read_whole(saved, "w")
