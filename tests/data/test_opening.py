"""From files to tokens, and the cache between."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.data.corpus import Corpus
from headrace.data.opening import open_corpus
from headrace.data.source import Source
from headrace.data.token_reading import BLOCK_BYTES
from headrace.data.tokens import Tokenizer, make_tokenizer
from headrace.errors import DataError, MissingExtra

BYTES = make_tokenizer("bytes")


def opened(
    tmp_path: Path, kind: str, *names: str, tokenizer: Tokenizer = BYTES, **more: Any
) -> Corpus:
    paths = tuple(str(tmp_path / name) for name in names)
    source = Source(kind=kind, paths=paths, **more)  # type: ignore[arg-type]
    return open_corpus(source, tokenizer, cache=tmp_path / "cache")


def texts(corpus: Corpus) -> list[str]:
    return [bytes(corpus.tokens(i)[:-1].astype(np.uint8)).decode() for i in range(len(corpus))]


def reasons(corpus: Corpus) -> dict[str, str]:
    return {item.path: item.reason for item in corpus.skipped}


def folder(tmp_path: Path) -> Path:
    """Of text files: plain, marked, compressed, and three that cannot be read."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (root / "b.txt.gz").write_bytes(gzip.compress("zw\u00f6lf".encode()))
    (root / "c.txt").write_bytes(b"\xff\xfe")
    (root / "d.txt").touch()
    (root / "e.gz").write_bytes(b"not gzip")
    (root / "f.gz").write_bytes(gzip.compress(b"x" * 9999)[:-12])
    (root / "g.txt").write_bytes(b"last")
    (root / "h.gz").write_bytes(gzip.compress(b""))
    return root


def test_text(tmp_path: Path) -> None:
    """Catches a mark or a newline changed, an order lost, a bad file that stops all others."""
    folder(tmp_path)
    corpus = opened(tmp_path, "text", "root")
    assert texts(corpus) == ["one\r\n", "zw\u00f6lf", "last"]
    assert corpus.lengths.tolist() == [6, 7, 5]
    assert all(corpus.tokens(i)[-1] == 256 for i in range(3))
    told = reasons(corpus)
    assert told["root/c.txt"] == "not UTF-8"
    assert told["root/d.txt"] == told["root/h.gz"] == "empty"
    assert "cannot be read" in told["root/e.gz"]
    assert "cannot be read" in told["root/f.gz"]
    assert corpus.vocabulary == 257


def test_many_documents_keep_their_order(tmp_path: Path) -> None:
    """Catches groups handed back in the order they finish, and progress that stands or jumps."""
    wanted = [f"document {i} " * (1 + i % 7) for i in range(1500)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in wanted)
    half = lines.index("\n", len(lines) // 2) + 1
    (tmp_path / "a.jsonl").write_text(lines[:half])
    (tmp_path / "b.jsonl").write_text(lines[half:])
    seen: list[tuple[str, int, int]] = []
    source = Source(kind="jsonl", paths=(str(tmp_path),))
    corpus = open_corpus(
        source, BYTES, cache=tmp_path / "cache", progress=lambda *at: seen.append(at)
    )
    assert texts(corpus) == wanted
    done = [at[1] for at in seen]
    assert done == sorted(done)
    assert seen[0][1] == 0
    assert seen[-1][1] == seen[-1][2] == len(lines)
    assert len({at for at in done if at < half}) > 2
    assert len({at for at in done if at > half}) > 2


def test_jsonl(tmp_path: Path) -> None:
    """Catches one bad line that stops the file, or one dropped without a word."""
    lines = [
        '{"text": "one", "id": 1}',
        "",
        "{broken",
        '{"content": "x"}',
        '["text"]',
        '{"text": 7}',
        '{"text": ""}',
        '{"text": "\\ud800"}',
        '{"input_ids": [1, 2.5]}',
        '{"input_ids": [true]}',
        '{"input_ids": [99999999999999999999]}',
        '{"input_ids": [5, 6, 256]}',
    ]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode() + b"\n\xff\n"))
    corpus = opened(tmp_path, "jsonl", "a.jsonl.gz")
    assert texts(corpus)[0] == "one"
    assert corpus.tokens(1).tolist() == [5, 6, 256]
    assert len(corpus) == 2
    told = {int(path.rsplit(":", 1)[1]): reason for path, reason in reasons(corpus).items()}
    assert sorted(told) == [3, 4, 5, 6, 7, 8, 9, 10, 11, 13]
    assert told[3] == told[13] == "not JSON in UTF-8"
    assert told[4] == "has 'content', not 'text' or 'input_ids'"
    assert told[7] == "empty"
    assert told[8] == "not Unicode"


def test_named_field_and_foreign_ids(tmp_path: Path) -> None:
    """Catches a field that is ignored, and ids of another tokenizer let through."""
    (tmp_path / "a.jsonl").write_text('{"text": "no", "code": "yes"}\n')
    assert texts(opened(tmp_path, "jsonl", "a.jsonl", field="code")) == ["yes"]
    (tmp_path / "b.jsonl").write_text('{"input_ids": [1]}\n{"input_ids": [1, 300]}\n')
    with pytest.raises(DataError, match=r"b\.jsonl:2: got token id 300, wanted ids from 0 to 256"):
        opened(tmp_path, "jsonl", "b.jsonl")
    corpus = opened(tmp_path, "jsonl", "b.jsonl", tokenizer=make_tokenizer("ids:301"))
    assert corpus.tokens(1).tolist() == [1, 300]
    assert list((tmp_path / "cache").glob(".*")) == []


def test_labels_of_their_own_are_refused(tmp_path: Path) -> None:
    """Catches a prompt that is masked in the file and trained on all the same."""
    (tmp_path / "a.jsonl").write_text(
        '{"input_ids": [1, 2], "labels": [1, 2]}\n{"text": "x", "labels": [3]}\n'
    )
    assert len(opened(tmp_path, "jsonl", "a.jsonl")) == 2
    (tmp_path / "b.jsonl").write_text('{"input_ids": [1, 2], "labels": [-100, 3]}\n')
    with pytest.raises(DataError, match=r"labels of .*b\.jsonl:1: got labels that differ"):
        opened(tmp_path, "jsonl", "b.jsonl")
    assert len(opened(tmp_path, "jsonl", "b.jsonl", ignore=("labels",))) == 1


def test_labels_in_parquet(tmp_path: Path) -> None:
    """Catches the same in a column."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    same = {"input_ids": [[1, 2]], "labels": [[1, 2]], "other": ["x"]}
    parquet.write_table(pyarrow.table(same), tmp_path / "a.parquet")
    assert opened(tmp_path, "parquet", "a.parquet").tokens(0).tolist() == [1, 2]
    parquet.write_table(pyarrow.table(same | {"labels": [[3, 2]]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"labels of .*b\.parquet:0: got labels that differ"):
        opened(tmp_path, "parquet", "b.parquet")


def masks(corpus: Corpus) -> list[list[bool] | None]:
    found = [corpus.learned(i) for i in range(len(corpus))]
    return [None if mask is None else mask.tolist() for mask in found]


@pytest.mark.parametrize("mask", ["completion_mask", "loss_mask", "assistant_masks", "labels"])
def test_masks_of_the_loss_are_kept(tmp_path: Path, mask: str) -> None:
    """Catches a prompt that is trained on all the same, the mask of another document or part, a
    corpus without masks that is taken for one of the same tokens with some, and rows of which
    nothing is learned."""
    left, right = [0, 0, 1, 1], [1, 1, 1]
    if mask == "labels":
        left, right = [-100, -100, 7, 8], [5, 6, 7]
    rows = [
        {"input_ids": [1, 2]},
        {"input_ids": [5, 6, 7, 8], mask: left},
        {"input_ids": [5, 6, 7], mask: right},
        {"input_ids": [5, 6], mask: [-100, -100] if mask == "labels" else [True, False]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):  # made, and read from the cache
        corpus = opened(tmp_path, "jsonl", "a.jsonl")
        assert corpus.masked
        assert masks(corpus) == [None, [False, False, True, True], None]
        part = corpus.learned(1, 1, 3)
        assert part is not None
        assert part.tolist() == [False, True]
        assert corpus.learned(1, 2) is None
        assert "2 of 9 tokens have no loss: the rows' masks" in corpus.notes
        assert reasons(corpus) == {"a.jsonl:4": "no token with a loss"}
    whole = opened(tmp_path, "jsonl", "a.jsonl", ignore=(mask,))
    assert not whole.masked
    assert len(whole) == 4
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:3]))
    same = opened(tmp_path, "jsonl", "b.jsonl", ignore=(mask,))
    assert same.fingerprint != opened(tmp_path, "jsonl", "b.jsonl").fingerprint


def test_masks_are_multiplied(tmp_path: Path) -> None:
    """Catches a second mask that is not looked at, and one that replaces the first."""
    row = {
        "input_ids": [1, 2, 3, 4],
        "completion_mask": [0, 1, 1, 1],
        "assistant_masks": [1, 1, 0, 1],
        "labels": [1, 2, 3, -100],
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert masks(opened(tmp_path, "jsonl", "a.jsonl")) == [[False, True, False, False]]


@pytest.mark.parametrize("mask", ["completion_mask", "loss_mask", "attention_mask"])
def test_other_masks_are_refused(tmp_path: Path, mask: str) -> None:
    """Catches masks of other tokens, of a text or of padding that are not looked at, and a named
    one that is."""
    cases = {
        "[1]": "got 1 for 2 ids",
        '"all"': "got str for 2 ids",
        "[2, 1]": "got other numbers",
        "[0.5, 1]": "got other numbers",
    }
    if mask == "attention_mask":
        cases["[0, 1]"] = "got padding"
    for number, (values, got) in enumerate(cases.items()):
        name = f"b{number}.jsonl"
        (tmp_path / name).write_text(f'{{"input_ids": [1, 2], "{mask}": {values}}}\n')
        wanted = rf"{mask} of .*{name}:1: {got}.*data\.ignore = \[\"{mask}\"\]"
        with pytest.raises(DataError, match=wanted):
            opened(tmp_path, "jsonl", name)
        assert len(opened(tmp_path, "jsonl", name, ignore=(mask,))) == 1
    (tmp_path / "text.jsonl").write_text(f'{{"text": "ab", "{mask}": [0, 1]}}\n')
    with pytest.raises(DataError, match=rf"{mask} of .*text\.jsonl:1: got a text"):
        opened(tmp_path, "jsonl", "text.jsonl")


def test_masks_in_parquet(tmp_path: Path) -> None:
    """Catches the same in a column, and one of nothing but nulls that makes masks."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {"input_ids": [[1, 2], [3, 4]], "completion_mask": [None, None]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    assert not opened(tmp_path, "parquet", "a.parquet").masked
    rows["completion_mask"] = [[1, 1], [0, 1]]
    parquet.write_table(pyarrow.table(rows), tmp_path / "b.parquet")
    assert masks(opened(tmp_path, "parquet", "b.parquet")) == [None, [False, True]]


def test_fields_that_are_not_read_are_told_once(tmp_path: Path) -> None:
    """Catches a column that is left out without a word, one line for each row, and a word about
    what is named."""
    row = '{"text": "a", "position_ids": [0], "id": 7}\n'
    (tmp_path / "a.jsonl").write_text(2 * row)
    (note,) = opened(tmp_path, "jsonl", "a.jsonl").notes
    assert note.startswith("not read of the rows: 'id', 'position_ids' (data.ignore")
    (note,) = opened(tmp_path, "jsonl", "a.jsonl", ignore=("id",)).notes
    assert "'id'" not in note
    assert not opened(tmp_path, "jsonl", "a.jsonl", ignore=("id", "position_ids")).notes


def test_nothing_left(tmp_path: Path) -> None:
    """Catches an empty corpus, and an error that does not say why it is."""
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    with pytest.raises(DataError, match=r"no documents, 1 skipped.*a\.jsonl:1: has 'content'"):
        opened(tmp_path, "jsonl", "a.jsonl")


def test_many_skips_are_counted(tmp_path: Path) -> None:
    """Catches a meta file that grows with every bad line."""
    (tmp_path / "a.jsonl").write_text("nonsense\n" * 1500 + '{"text": "x"}\n')
    corpus = opened(tmp_path, "jsonl", "a.jsonl")
    assert len(corpus.skipped) == 1001
    assert sum(item.count for item in corpus.skipped) == 1500


def test_fasta(tmp_path: Path) -> None:
    """Catches records joined, broken lines kept, an index written beside the genome."""
    pytest.importorskip("pyfaidx")
    genome = tmp_path / "genome"
    genome.mkdir()
    (genome / "g.fa").write_text(">one first\nACGTAC\nGTNN\n>two\nttt\n")
    (genome / "bad.fa").write_text("no records here\n")
    corpus = opened(tmp_path, "fasta", "genome", tokenizer=make_tokenizer("kmer:3"))
    assert corpus.tokens(0).tolist() == [6, 49, 64, 65]
    assert corpus.tokens(1).tolist() == [63, 65]
    assert sorted(os.listdir(genome)) == ["bad.fa", "g.fa"]
    assert "not a FASTA file" in reasons(corpus)["genome/bad.fa"]
    (stored,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert sorted(os.listdir(stored)) == ["blocks.npy", "documents.npy", "meta.json", "tokens.bin"]


def test_parquet(tmp_path: Path) -> None:
    """Catches a null that becomes text, a column that is not found, a file that is not parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {"text": ["one", None, "three"], "n": [1, 2, 3]}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2], [3]]}), tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"n": [1]}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nonsense")
    names = ("a.parquet", "b.parquet", "c.parquet", "d.parquet")
    corpus = opened(tmp_path, "parquet", *names)
    assert texts(corpus)[:2] == ["one", "three"]
    assert [corpus.tokens(i).tolist() for i in (2, 3)] == [[1, 2], [3]]
    assert sorted(reasons(corpus)) == ["a.parquet:1", "c.parquet", "d.parquet"]


@pytest.mark.parametrize(
    ("kind", "package", "extra"), [("parquet", "pyarrow", "hf"), ("fasta", "pyfaidx", "genomics")]
)
def test_without_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str, extra: str
) -> None:
    """Catches an ImportError where a line should say what to install."""
    (tmp_path / "a").write_text("x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"{package}.*headrace\[{extra}\]"):
        opened(tmp_path, kind, "a")


class Counting:
    """The bytes tokenizer, counting the texts it is asked for."""

    name, vocabulary, end_id = "counting", 257, 256

    def __init__(self, fingerprint: str = "counting") -> None:
        self.fingerprint, self.texts = fingerprint, 0

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        self.texts += len(texts)
        return BYTES.encode_batch(texts)


def test_second_open_tokenizes_nothing(tmp_path: Path) -> None:
    """Catches a cache that is not used, or one that is used after something has changed."""
    root = folder(tmp_path)
    tokenizer = Counting()
    first = opened(tmp_path, "text", "root", tokenizer=tokenizer)
    assert tokenizer.texts == 3
    again = opened(tmp_path, "text", "root", tokenizer=tokenizer)
    assert tokenizer.texts == 3
    assert texts(again) == texts(first)
    assert (again.fingerprint, again.skipped) == (first.fingerprint, first.skipped)
    (root / "g.txt").write_bytes(b"LAST")
    os.utime(root / "g.txt", ns=(1, 1))
    changed = opened(tmp_path, "text", "root", tokenizer=tokenizer)
    assert texts(changed)[-1] == "LAST"
    assert changed.fingerprint != first.fingerprint
    other = Counting("another")
    opened(tmp_path, "text", "root", tokenizer=other)
    assert other.texts == 3


def test_fingerprint_survives_a_copy(tmp_path: Path) -> None:
    """Catches a fingerprint that depends on folders or times, so that no run could move."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("same")
    os.utime(tmp_path / "there" / "a.txt", ns=(5, 5))
    here, there = (opened(tmp_path, "text", name) for name in ("here", "there"))
    assert here.fingerprint == there.fingerprint


def stored_folder(tmp_path: Path) -> Path:
    return next(path for path in (tmp_path / "cache").iterdir() if path.is_dir())


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "emptied", "nonsense"])
def test_damaged_cache_is_rebuilt(tmp_path: Path, name: str, damage: str) -> None:
    """Catches a half-written cache that is trained on, or that stops every later run."""
    folder(tmp_path)
    whole = opened(tmp_path, "text", "root")
    victim = stored_folder(tmp_path) / name
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes({"truncated": content[:-2], "emptied": b""}.get(damage, b"\x80nonsense"))
    again = opened(tmp_path, "text", "root")
    assert texts(again) == ["one\r\n", "zw\u00f6lf", "last"]
    assert "damaged" in again.notes[0]
    assert again.fingerprint == whole.fingerprint
    assert opened(tmp_path, "text", "root").notes == ()


def flip(path: Path, at: int) -> None:
    """Turn one bit over, as a failing disk does."""
    raw = bytearray(path.read_bytes())
    raw[at // 8] ^= 1 << at % 8
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["documents.npy", "blocks.npy", "meta.json"])
def test_every_flipped_bit_of_a_table_is_seen(tmp_path: Path, name: str) -> None:
    """Catches a table that is believed, a parser that fails on it, a rebuilt one that differs."""
    folder(tmp_path)
    whole = opened(tmp_path, "text", "root")
    victim = stored_folder(tmp_path) / name
    bits = len(victim.read_bytes()) * 8
    for at in np.random.default_rng(0).integers(bits, size=40).tolist():
        flip(victim, at)
        again = opened(tmp_path, "text", "root")
        assert texts(again) == texts(whole)
        assert (again.fingerprint, again.skipped) == (whole.fingerprint, whole.skipped)


def test_every_flipped_bit_of_the_tokens_is_seen(tmp_path: Path) -> None:
    """Catches tokens trained on that nobody wrote, in whatever block, and a cache that stays
    damaged."""
    words = "".join(str(i % 10) for i in range(2 * BLOCK_BYTES))
    (tmp_path / "a.txt").write_text(words)
    size = 2 * (len(words) + 1)
    for at in (0, 8 * BLOCK_BYTES - 1, 8 * BLOCK_BYTES, 8 * size - 9):
        corpus = opened(tmp_path, "text", "a.txt")
        assert texts(corpus) == [words]
        flip(stored_folder(tmp_path) / "tokens.bin", at)
        corpus = opened(tmp_path, "text", "a.txt")
        first = max(0, at // 16 - 5)
        with pytest.raises(DataError, match=r"tokens\.bin.*checksum.*start again"):
            corpus.tokens(0, first, first + 20)
    far = opened(tmp_path, "text", "a.txt")
    flip(stored_folder(tmp_path) / "tokens.bin", 8 * size - 9)
    assert far.tokens(0, 0, 3).tolist() == [48, 49, 50]  # a block is checked when it is read


def test_tokens_outlive_their_cache(tmp_path: Path) -> None:
    """Catches a run that ends because somebody clears the cache."""
    folder(tmp_path)
    corpus = opened(tmp_path, "text", "root")
    shutil.rmtree(tmp_path / "cache")
    assert texts(corpus) == ["one\r\n", "zw\u00f6lf", "last"]


def test_two_at_once_tokenize_once(tmp_path: Path) -> None:
    """Catches ranks that all tokenize the same corpus, or write into each other's cache."""
    folder(tmp_path)
    tokenizer, found = Counting(), []
    threads = [
        threading.Thread(
            target=lambda: found.append(opened(tmp_path, "text", "root", tokenizer=tokenizer))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.texts == 3
    assert len({corpus.fingerprint for corpus in found}) == 1
    assert len(found) == 4


def test_leftovers_of_a_killed_run_go(tmp_path: Path) -> None:
    """Catches a disk that fills with half-built folders."""
    folder(tmp_path)
    opened(tmp_path, "text", "root")
    key = stored_folder(tmp_path)
    left = key.parent / f".{key.name}-dead"
    left.mkdir()
    (key / "tokens.bin").unlink()
    opened(tmp_path, "text", "root")
    assert not left.exists()


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """Catches an OSError from the depths where the cache's name is a file."""
    folder(tmp_path)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="cache"):
        opened(tmp_path, "text", "root")


def test_large_vocabularies_are_stored_whole(tmp_path: Path) -> None:
    """Catches ids above 65,535 wrapped into two bytes."""
    (tmp_path / "a.jsonl").write_text('{"input_ids": [70000, 1]}\n')
    corpus = opened(tmp_path, "jsonl", "a.jsonl", tokenizer=make_tokenizer("ids:70001"))
    assert corpus.tokens(0).tolist() == [70000, 1]
