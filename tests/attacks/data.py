"""Damaged input files: the tokens that a plain reading of them gives, or an error."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attacks.attack import Attack, Case, Outcome, refusal_of
from attacks.damage import damaged
from headrace.cli import main
from headrace.data.corpus import Corpus
from headrace.data.opening import open_corpus
from headrace.data.source import Source
from headrace.data.tokens import make_tokenizer
from headrace.errors import HeadraceError
from megatron_files import write_megatron

__all__ = ["DATA"]

Rng = np.random.Generator
Reading = Callable[[Path], list[list[int]] | None]

_ROOT = Path(__file__).parents[2]
_IDS = 100
_END = 256  # of the tokenizer of bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """A good file, ``names`` of which one may be damaged; ``plain`` reads its documents apart from
    the library, None where it cannot."""

    kind: str
    names: tuple[str, ...]
    tokenizer: str
    plain: Reading


@contextmanager
def _begin(folder: Path) -> Iterator[Case]:
    good = folder / "good"
    good.mkdir()
    _write(good)
    yield lambda rng: _case(rng, good, folder / "case")


def _write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    texts = ["mill race " * int(n) for n in rng.integers(1, 30, size=20)]
    (folder / "a.txt").write_text(texts[0] + "Mühlgraben \u6c34\u8eca")
    (folder / "a.txt.gz").write_bytes(gzip.compress("".join(texts).encode()))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    rows = [rng.integers(_IDS, size=int(n)).tolist() for n in rng.integers(1, 40, size=20)]
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": r}) + "\n" for r in rows))
    flat = rng.integers(_IDS, size=900).astype("<u2")
    (folder / "flat.bin").write_bytes(flat.tobytes())
    write_megatron(folder / "megatron", [[row[:3], row[3:]] for row in rows])
    (folder / "a.fa").write_text("".join(f">r{n}\n{'ACGTTGCA' * n}\n" for n in range(1, 12)))
    _write_parquet(folder, texts, rows)
    shutil.copy(_ROOT / "benchmarks/published/hydraulis-7b.json", folder / "pipelines.json")
    shutil.copy(_ROOT / "benchmarks/published/flexsp-7b-a100.json", folder / "groups.json")
    lengths = [[int(n) for n in rng.integers(1, 9000, size=12)] for _ in range(3)]
    (folder / "lengths.json").write_text(json.dumps({"iterations": lengths}))


def _write_parquet(folder: Path, texts: list[str], rows: list[list[int]]) -> None:
    try:
        from pyarrow import table
        from pyarrow.parquet import write_table
    except ModuleNotFoundError:  # an extra: without it such files are refused, damaged or not
        (folder / "a.parquet").write_bytes(b"PAR1" * 20)
        return
    write_table(table({"text": texts, "input_ids": rows}), folder / "a.parquet")


def _text(path: Path) -> list[list[int]] | None:
    text = path.read_bytes()
    try:
        return [[*text.decode("utf-8-sig").encode(), _END]] if text.strip(b"\xef\xbb\xbf") else []
    except UnicodeDecodeError:
        return []


def _lines(path: Path) -> list[list[int]] | None:
    """Documents of JSON lines of texts; None where some line is odd."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or not isinstance(row.get("text", ""), str):
            return None
        if "input_ids" in row and "text" not in row:
            return None
        try:
            found += [[*row["text"].encode(), _END]] if row.get("text") else []
        except UnicodeEncodeError:
            return None
    return found


def _flat(path: Path) -> list[list[int]] | None:
    raw = path.read_bytes()
    if len(raw) % 2 or not raw:
        return None
    ids, found = np.frombuffer(raw, "<u2"), list[list[int]]()
    for token in ids.tolist():
        if not found or found[-1][-1] == 9:
            found.append([])
        found[-1].append(token)
    return found if ids.max() < _IDS else None


def _unknown(path: Path) -> list[list[int]] | None:
    """Nobody else reads such files here."""
    return None


_INPUTS = (
    _Input(kind="text", names=("a.txt",), tokenizer="bytes", plain=_text),
    _Input(kind="text", names=("a.txt.gz",), tokenizer="bytes", plain=_unknown),
    _Input(kind="jsonl", names=("a.jsonl",), tokenizer="bytes", plain=_lines),
    _Input(kind="jsonl", names=("ids.jsonl",), tokenizer=f"ids:{_IDS}", plain=_unknown),
    _Input(kind="parquet", names=("a.parquet",), tokenizer="bytes", plain=_unknown),
    _Input(kind="memmap", names=("flat.bin",), tokenizer=f"ids:{_IDS}:9", plain=_flat),
    _Input(
        kind="memmap",
        names=("megatron.bin", "megatron.idx"),
        tokenizer=f"ids:{_IDS}:9",
        plain=_unknown,
    ),
    _Input(kind="fasta", names=("a.fa",), tokenizer="kmer:3", plain=_unknown),
)


def _case(rng: Rng, good: Path, folder: Path) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    number = int(rng.integers(len(_INPUTS) + 1))
    try:
        if number == len(_INPUTS):
            return _files(rng, good, folder)
        return _corpus(rng, _INPUTS[number], good, folder)
    except HeadraceError as error:
        return refusal_of(error)


def _corpus(rng: Rng, one: _Input, good: Path, folder: Path) -> Outcome:
    """Open a corpus of which one file is damaged, and read all of it."""
    for name in one.names:
        shutil.copy(good / name, folder / name)
    path = folder / one.names[int(rng.integers(len(one.names)))]
    path.write_bytes(damaged(path.read_bytes(), rng))
    tokenizer = make_tokenizer(one.tokenizer)
    source = Source(kind=one.kind, paths=(str(folder / one.names[0]),))
    corpus = open_corpus(source, tokenizer, cache=folder / "cache")
    found = _read(corpus, tokenizer.vocabulary)
    again = _read(open_corpus(source, tokenizer, cache=folder / "cache"), tokenizer.vocabulary)
    wanted = one.plain(folder / one.names[0])
    if found is None or found != again or (wanted is not None and found != wanted):
        words = f"{one.names[0]}: read {str(found)[:300]}, wanted {str(wanted)[:300]}"
        return Outcome(verdict="wrong data", survived=False, words=words)
    return Outcome(verdict="right" if wanted is not None else "read", words=one.names[0])


def _read(corpus: Corpus, vocabulary: int) -> list[list[int]] | None:
    """All documents; None where a length or an id is none."""
    found = [corpus.tokens(number).tolist() for number in range(len(corpus))]
    lengths = [len(document) for document in found]
    in_range = all(0 <= token < vocabulary for document in found for token in document)
    return found if lengths == corpus.lengths.tolist() and min(lengths) > 0 and in_range else None


def _files(rng: Rng, good: Path, folder: Path) -> Outcome:
    """Plan from files of costs and lengths of which one is damaged."""
    costs = str(rng.choice(["pipelines.json", "groups.json"]))
    for name in (costs, "lengths.json"):
        shutil.copy(good / name, folder / name)
    path = folder / str(rng.choice([costs, "lengths.json"]))
    path.write_bytes(damaged(path.read_bytes(), rng))
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(
            [
                "plan",
                "--costs",
                str(folder / costs),
                "--lengths",
                str(folder / "lengths.json"),
                "--devices",
                "32",
                "--json",
            ]
        )
    if code == 0:
        json.loads(out.getvalue())
        return Outcome(verdict="read", words=costs)
    if "error:" not in err.getvalue():
        return Outcome(verdict="no message", survived=False, words=f"{code}: {err.getvalue()}")
    return Outcome(verdict="refused", words=err.getvalue())


DATA = Attack(
    name="data",
    about="damaged input files give what is in them, or an error",
    begin=_begin,
    limit_s=60,
    few=60,
)
