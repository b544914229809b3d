"""Files of ready tokens."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.corpus import Corpus
from headrace.data.opening import open_corpus
from headrace.data.source import Source
from headrace.data.token_files import flat_table
from headrace.data.tokens import make_tokenizer
from headrace.errors import DataError
from megatron_files import CODES, write_megatron


def opened(tmp_path: Path, *names: str, tokenizer: str = "ids:100:9", **more: Any) -> Corpus:
    source = Source(kind="memmap", paths=tuple(str(tmp_path / name) for name in names), **more)
    return open_corpus(source, make_tokenizer(tokenizer), cache=tmp_path / "cache")


def documents(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(i).tolist() for i in range(len(corpus))]


@pytest.mark.parametrize("dtype", CODES)
def test_megatron(tmp_path: Path, dtype: str) -> None:
    """Catches offsets taken for tokens, sequences taken for documents, empty documents kept."""
    write_megatron(tmp_path / "a", [[[1, 2], [3]], [], [[]], [[4, 5, 6]], [[7], [], [8]]], dtype)
    wanted = [[1, 2, 3], [4, 5, 6], [7, 8]]
    for name in ("a", "a.bin"):
        corpus = opened(tmp_path, name)
        assert documents(corpus) == wanted
        assert corpus.lengths.tolist() == [3, 3, 2]
    assert documents(opened(tmp_path, "a")) == wanted  # from the cache


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"X"), (9, b"\2"), (17, b"\6"), (18, b"\xff"), (34, b"\xff"), (-8, b"\1"), (46, b"\1")],
)
def test_damaged_index(tmp_path: Path, at: int, value: bytes) -> None:
    """Catches each field of a damaged index read as if it were right."""
    write_megatron(tmp_path / "a", [[[1, 2], [3]], [[4]]])
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    raw[at : at + 1 or None] = value + (b"" if at != -8 else bytes(raw[-7:]))
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.(idx|bin)"):
        opened(tmp_path, "a")


@pytest.mark.parametrize(("at", "value"), [(34 + 8, 2**63 - 2), (34 + 24 + 8, -(2**63))])
def test_an_index_that_overflows(tmp_path: Path, at: int, value: int) -> None:
    """Catches an offset or border so large that sums of it are negative, and pass."""
    write_megatron(tmp_path / "a", [[[1, 2]], [[4]]])
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<q", raw, at, value)
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.(idx|bin)"):
        opened(tmp_path, "a")


@pytest.mark.parametrize("files", [1, 300])
def test_a_file_that_shrinks_meanwhile(tmp_path: Path, files: int) -> None:
    """Catches the signal that ends a process which reads a mapped file past its end; with many
    files, more open ones than a process may have."""
    for i in range(files):
        np.arange(99, dtype="<u2").tofile(tmp_path / f"{i:03d}.bin")
    corpus = opened(tmp_path, "*.bin")
    assert corpus.tokens(len(corpus) - 1).tolist() == list(range(10, 99))
    with open(tmp_path / f"{files - 1:03d}.bin", "r+b") as stream:
        stream.truncate(40)
    with pytest.raises(DataError, match="shrunk"):
        corpus.tokens(len(corpus) - 1)


def test_documents_that_are_torn(tmp_path: Path) -> None:
    """Catches a document read through a gap between its sequences."""
    write_megatron(tmp_path / "a", [[[1, 2], [3, 4]], [[5]]])
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    raw[46 + 8 : 46 + 16] = struct.pack("<q", 2)  # the second sequence, one token early
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(DataError, match="do not follow"):
        opened(tmp_path, "a")


@pytest.mark.parametrize("victim", ["a.idx", "a.bin"])
def test_truncated_megatron(tmp_path: Path, victim: str) -> None:
    """Catches reading past the end of either file."""
    write_megatron(tmp_path / "a", [[[1, 2, 3]], [[4]]])
    path = tmp_path / victim
    for keep in (-1, 5):
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(DataError, match=victim.replace(".", r"\.")):
            opened(tmp_path, "a")


def test_flat_files(tmp_path: Path) -> None:
    """Catches documents that run over from one file into the next, or a lost last one."""
    np.array([1, 2, 9, 3, 9, 4], dtype="<u2").tofile(tmp_path / "a.bin")
    np.array([9, 5], dtype="<u2").tofile(tmp_path / "b.bin")
    (tmp_path / "c.bin").touch()
    corpus = opened(tmp_path, "a.bin", "b.bin", "c.bin")
    assert documents(corpus) == [[1, 2, 9], [3, 9], [4], [9], [5]]
    assert [item.reason for item in corpus.skipped] == ["empty"]
    assert documents(opened(tmp_path, "a.bin", end_id=3)) == [[1, 2, 9, 3], [9, 4]]


def test_flat_of_four_bytes_and_with_a_header(tmp_path: Path) -> None:
    """Catches a header read as tokens."""
    np.array([70000, 9, 1], dtype="<u4").tofile(tmp_path / "a.bin")
    corpus = opened(tmp_path, "a.bin", dtype="uint32", tokenizer="ids:80000:9")
    assert documents(corpus) == [[70000, 9], [1]]
    head = np.zeros(256, dtype="<i4")
    head[:3] = 20240520, 1, 3
    (tmp_path / "b.bin").write_bytes(head.tobytes() + np.array([1, 9, 2], dtype="<u2").tobytes())
    assert documents(opened(tmp_path, "b.bin")) == [[1, 9], [2]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=50))
def test_flat_table_against_a_walk(ids: list[int]) -> None:
    """Catches a chunk's border taken for a document's."""
    from headrace.data import token_files

    old, token_files.CHUNK_TOKENS = token_files.CHUNK_TOKENS, 7
    try:
        table = flat_table(
            np.array(ids), end_id=0, vocabulary=4, label="x", progress=lambda done: None
        )
    finally:
        token_files.CHUNK_TOKENS = old
    expected, start = [], 0
    for i, token in enumerate(ids):
        if token == 0 or i == len(ids) - 1:
            expected.append([start, i + 1 - start])
            start = i + 1
    assert table.tolist() == expected


def test_bad_flat_files(tmp_path: Path) -> None:
    """Catches a wrong dtype, a foreign vocabulary, an end nobody named."""
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="uint16 ids"):
        opened(tmp_path, "odd.bin")
    np.array([1, 2, 300], dtype="<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="token id 300"):
        opened(tmp_path, "a.bin")
    with pytest.raises(DataError, match="end_id"):
        opened(tmp_path, "a.bin", tokenizer="ids:1000")
    corpus = opened(tmp_path, "a.bin", tokenizer="ids:1000:9")
    assert "one document" in corpus.notes[0]


def test_foreign_ids_in_megatron(tmp_path: Path) -> None:
    """Catches an id past the embedding, which is looked at when a document is read."""
    write_megatron(tmp_path / "a", [[[1, 2]], [[3, 500]]])
    corpus = opened(tmp_path, "a")
    assert corpus.tokens(0).tolist() == [1, 2]
    with pytest.raises(DataError, match=r"document 1 of .*token id 500"):
        corpus.tokens(1)


def test_changed_files_are_read_anew(tmp_path: Path) -> None:
    """Catches a table of the old index used with the new one."""
    write_megatron(tmp_path / "a", [[[1, 2], [3]]])
    assert documents(opened(tmp_path, "a")) == [[1, 2, 3]]
    write_megatron(tmp_path / "a", [[[1, 2]], [[3]]])
    assert documents(opened(tmp_path, "a")) == [[1, 2], [3]]
