"""Readers: what kind of file holds documents, and how."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.data.documents import Document, Skips, no_memory, usable
from headrace.data.files import FoundFile
from headrace.data.loss_masks import IGNORED
from headrace.data.source import Source
from headrace.errors import DataError, MissingExtra

__all__ = ["READERS", "Reading", "read_documents"]

_LABELS = "labels"
"""The column of ids to predict, IGNORED for a token without a loss."""

_MASKS = ("completion_mask", "loss_mask", "assistant_masks")
"""Columns that leave tokens out of the loss where they are 0."""

_PADDING = "attention_mask"
"""The column that is 0 for padding."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader needs besides the file: the source's options, the list of what was skipped, and
    a folder for files of its own."""

    source: Source
    skips: Skips
    scratch: Path
    unused: set[str] = field(default_factory=set)
    """Fields of rows that are neither read nor named to be ignored."""

    def pass_over(self, names: Iterable[str], read: str) -> None:
        """Remember which of the fields ``names`` of a row nothing reads: all but the document's own
        field ``read``, labels and masks, and fields that the source names to be ignored."""
        self.unused.update(names)
        self.unused.difference_update((read, _LABELS, *_MASKS, _PADDING, *self.source.ignore))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should be told of the fields of rows."""
        if not self.unused:
            return ()
        names = _some(sorted(self.unused))
        return (f"not read of the rows: {names} (data.ignore names what is left out on purpose)",)


@contextmanager
def _open_text(file: FoundFile) -> Generator[tuple[IO[bytes], IO[bytes]], None, None]:
    """(content, raw): the stream of a file's content, unpacked when its name ends in .gz, and that
    of its bytes, whose position tells how much was read."""
    with open(file.path, "rb") as raw:
        if file.path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(IO[bytes], unpacked), raw
        else:
            yield raw, raw


def _texts(file: FoundFile, reading: Reading) -> Iterator[Document]:
    """The one document of a text file."""
    with _open_text(file) as (stream, _):
        yield Document(file.label, stream.read().decode("utf-8-sig"), file.size)


def _lines(file: FoundFile, reading: Reading) -> Iterator[Document]:
    """The documents of a file of JSON lines; lines without one are noted as skipped."""
    with _open_text(file) as (stream, raw):
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            label = f"{file.label}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                reading.skips.add(label, "not JSON in UTF-8")
                continue
            if not isinstance(row, dict):
                reading.skips.add(label, f"a {type(row).__name__}, not an object")
            elif (name := _field(row, reading.source)) is None:
                reading.skips.add(label, f"has {_some(row)}, not {_wanted_text(reading.source)}")
            else:
                reading.pass_over(row, name)
                learned = _tokens_to_learn(row, name, label, reading.source.ignore)
                yield Document(label, row[name], raw.tell(), learned)


def _tokens_to_learn(
    row: Mapping[str, Any], name: str, label: str, ignored: Iterable[str]
) -> NDArray[np.bool_] | None:
    """A bool for each of a row's n tokens: whether it has a loss, by the row's labels and masks.
    None where all have. ``name`` is the field of the tokens. Raises DataError for labels and masks
    that cannot be followed, such as labels that are not the ids."""
    ids, left_out = row[name], list[NDArray[np.bool_]]()
    given = {k: row[k] for k in (_LABELS, *_MASKS, _PADDING) if row.get(k) is not None}
    for field_name, values in given.items():
        # The labels of a text, such as its class, are not about tokens.
        if field_name in ignored or (field_name == _LABELS and not isinstance(ids, list)):
            continue
        if not isinstance(ids, list):
            # A mask of ones leaves nothing out, so it does not matter for a text.
            if not isinstance(values, list) or any(value != 1 for value in values):
                raise _unfit(label, field_name, "a text", "ids, as a mask is of tokens")
        elif not isinstance(values, list) or len(values) != len(ids):
            count = len(values) if isinstance(values, list) else type(values).__name__
            raise _unfit(label, field_name, f"{count} for {len(ids)} ids", "a value for each id")
        elif field_name == _LABELS:
            # A target is the token itself: it is the model that shifts labels by one.
            if any(value not in (own, IGNORED) for value, own in zip(values, ids, strict=True)):
                raise _unfit(label, field_name, "labels that differ", f"the ids, or {IGNORED}")
            left_out.append(np.array([value == IGNORED for value in values]))
        elif any(value not in (0, 1) for value in values):
            raise _unfit(label, field_name, "other numbers", "0 where there is no loss, else 1")
        elif field_name != _PADDING:
            left_out.append(np.array([value == 0 for value in values]))
        elif not all(values):
            raise _unfit(label, field_name, "padding", "ids without padding")
    without = np.any(left_out, axis=0) if left_out else np.zeros(0, bool)
    return ~without if without.any() else None


def _unfit(label: str, field_name: str, got: str, wanted: str) -> DataError:
    """The error for a mask or label of a row that does not fit its tokens."""
    return DataError(
        f"{field_name} of {label}",
        got=got,
        wanted=wanted,
        hint=f'data.ignore = ["{field_name}"] trains on every token of such rows',
    )


def _field(names: Any, source: Source) -> str | None:
    """The name of the field that holds the document, None when there is none."""
    wanted = (source.field,) if source.field else ("text", "input_ids")
    return next((name for name in wanted if name in names), None)


def _wanted_text(source: Source) -> str:
    """The fields that may hold a document, for a message."""
    return repr(source.field) if source.field else "'text' or 'input_ids'"


def _some(names: Any) -> str:
    """The first six names as a text for a message."""
    listed = [repr(name) for name in names]
    if not listed:
        return "no fields"
    return ", ".join(listed[:6]) + (" ..." if len(listed) > 6 else "")


def _rows(file: FoundFile, reading: Reading) -> Iterator[Document]:
    """The documents of a parquet file, one for each row; a file without the document's field is
    noted as skipped."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise MissingExtra("pyarrow", extra="hf", needed_for="reading parquet files")
    try:
        with ParquetFile(file.path) as table:
            name = _field(table.schema_arrow.names, reading.source)
            if name is None:
                names = _some(table.schema_arrow.names)
                reading.skips.add(file.label, f"has {names}, not {_wanted_text(reading.source)}")
                return
            done, rows = 0, max(1, table.metadata.num_rows)
            reading.pass_over(table.schema_arrow.names, name)
            columns = {name, *table.schema_arrow.names} & {name, _LABELS, *_MASKS, _PADDING}
            for batch in table.iter_batches(batch_size=256, columns=sorted(columns)):
                for row in batch.to_pylist():
                    label, done = f"{file.label}:{done}", done + 1
                    learned = _tokens_to_learn(row, name, label, reading.source.ignore)
                    # The bytes read are estimated by the share of rows.
                    yield Document(label, row[name], file.size * done // rows, learned)
    except ArrowException as error:
        reading.skips.add(file.label, f"not a parquet file: {str(error).partition(chr(10))[0]}")


def _records(file: FoundFile, reading: Reading) -> Iterator[Document]:
    """The sequences of a FASTA file, each one document."""
    try:
        import pyfaidx
    except ModuleNotFoundError:
        raise MissingExtra("pyfaidx", extra="genomics", needed_for="reading FASTA files")
    if file.path.suffix == ".gz":
        reading.skips.add(file.label, "compressed; FASTA must be unpacked first")
        return
    # The index goes to our own folder: that of the genome may be read-only.
    index = str(reading.scratch / "records.fai")
    Path(index).unlink(missing_ok=True)
    try:
        with pyfaidx.Fasta(str(file.path), indexname=index, as_raw=True) as genome:
            names = list(genome.keys())
            for done, name in enumerate(names, 1):
                text = str(genome[name][:])
                yield Document(f"{file.label}:{name}", text, file.size * done // len(names))
    except (pyfaidx.FastaIndexingError, pyfaidx.UnsupportedCompressionFormat, ValueError) as error:
        reading.skips.add(file.label, f"not a FASTA file: {error}")


READERS: dict[str, Callable[[FoundFile, Reading], Iterator[Document]]] = {
    "text": _texts,
    "jsonl": _lines,
    "parquet": _rows,
    "fasta": _records,
}


def read_documents(files: list[FoundFile], reading: Reading) -> Iterator[Document]:
    """The documents of all files in order, with the bytes of all files read so far. What cannot be
    read is left out and noted as skipped."""
    reader = READERS[reading.source.kind]
    before = 0  # bytes of the files before this one
    for file in files:
        try:
            for document in reader(file, reading):
                content = usable(document, reading.skips)
                if content is not None:
                    read_bytes = before + document.read_bytes
                    yield replace(document, content=content, read_bytes=read_bytes)
        except MemoryError:
            raise no_memory(file.label)
        except UnicodeDecodeError:
            reading.skips.add(file.label, "not UTF-8")
        except (OSError, EOFError, zlib.error) as error:
            reading.skips.add(file.label, f"cannot be read: {error}")
        before += file.size
