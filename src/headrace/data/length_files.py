"""Lengths and histograms of lengths in files, as people export them.

What is read::

    512 700 90000                        numbers apart by space, comma or line
    [512, 700, 90000]                    JSON
    {"512": 3, "700": 1}                 JSON, how often each length occurs
    {"lengths": [512, 700], "counts": [3, 1]}
    {"edges": [1, 512, 1024], "counts": [30, 12]}
    length                               a table with a line of names, its columns
    length,count                         apart by comma, semicolon or tab
    edge_low,edge_high,count

Lengths and edges are tokens; in a table ``32Ki`` is 32,768. ``counts[i]`` sequences have lengths in
``[edges[i], edges[i + 1])``. In a table upper edges may be the last lengths of their bins, too:
that is so where every bin begins one token after the one before has ended. Counts may be shares.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from headrace.data.distributions import Bins, Counted, Distribution, Resampled
from headrace.errors import ConfigError, DataError, SpecError, did_you_mean, shortened
from headrace.spec.given import parse_json
from headrace.units import counted, parse_count

__all__ = ["read_lengths"]

_TABLES: tuple[tuple[str, ...], ...] = (
    ("length",),
    ("length", "count"),
    ("edge_low", "edge_high", "count"),
)
"""The columns of each kind of table."""

_WANTED = "a line of names before the numbers: " + "; or ".join(map(",".join, _TABLES))


_WHOLE = re.compile(r"[+-]?\d{1,30}")
"""A whole number that is no longer than any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bin:
    """``count`` sequences of ``low`` to less than ``high`` tokens. ``place`` is the line or entry
    of the file that says so, for errors."""

    place: str
    low: float
    high: float
    count: float


def read_lengths(path: Path) -> Distribution:
    """The lengths of a file, or those that its histogram describes.

    Args:
        path: The file, of one of the forms at the top of this module.

    Returns:
        A distribution from which lengths are drawn.

    Raises:
        DataError: When the file cannot be read or is malformed; of a table it names the line.
    """
    what = f"lengths of {path}"
    try:
        content = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError, RuntimeError) as error:  # such as a NUL, or ~ of nobody
        raise DataError(what, got=str(error), wanted="a text file of lengths")
    if not content.strip():
        raise DataError(what, got="an empty file", wanted="lengths")
    first = content.lstrip()[:1]
    try:
        if first in ("[", "{"):
            return _of_json(what, content)
        if first.isalpha() or first == '"':
            return _of_table(what, content)
        return _of_numbers(what, content, path.suffix.lower())
    except ConfigError as error:  # of a distribution that cannot be
        raise DataError(f"{what}, {error.what}", got=error.got, wanted=error.wanted)


def _of_numbers(what: str, content: str, suffix: str) -> Resampled:
    """The lengths in a text of numbers with spaces, commas or lines between them; ``suffix`` is
    that of the file. Raises DataError for columns without names, whose meaning is not known."""
    rows = [re.split(r"[,;\t]", line.strip()) for line in content.splitlines() if line.strip()]
    if suffix in (".csv", ".tsv") and len(rows) > 1 and all(len(row) > 1 for row in rows):
        got = f"{len(rows[0])} columns without names"
        raise DataError(f"{what}, line 1", got=got, wanted=_WANTED)
    words = re.split(r"[\s,]+", content.strip())
    for word in words:
        if not _WHOLE.fullmatch(word):
            raise DataError(what, got=shortened(word), wanted="a list of whole numbers")
    return Resampled(lengths=tuple(map(int, words)))


def _of_json(what: str, content: str) -> Distribution:
    """The lengths in a JSON list, or the distribution of an object's histogram. Raises DataError,
    about ``what``, for other JSON."""
    try:
        value: Any = parse_json(content)
    except ValueError as error:
        raise DataError(what, got=f"no JSON ({error})", wanted="JSON")
    if isinstance(value, list):
        lengths = [_length(f"{what}, item {i}", each) for i, each in enumerate(value)]
        return Resampled(lengths=tuple(lengths))
    if set(value) == {"edges", "counts"}:
        return _histogram(what, value)
    if set(value) == {"lengths", "counts"}:
        lengths, counts = _list(what, value, "lengths"), _list(what, value, "counts")
        if len(lengths) != len(counts):
            got = f"{len(lengths)} lengths and {len(counts)} counts"
            raise DataError(what, got=got, wanted="a count for each length")
        pairs = enumerate(zip(lengths, counts, strict=True))
        return _counted((f"{what}, item {i}", *pair) for i, pair in pairs)
    if value and all(key.isdecimal() for key in value):
        return _counted((f"{what}, {key!r}", key, count) for key, count in value.items())
    got = f"an object with {', '.join(value) or 'nothing'}"
    wanted = "edges and counts; lengths and counts; or a count for each length"
    raise DataError(what, got=got, wanted=wanted)


def _list(what: str, value: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a key; raises DataError for anything else."""
    listed = value[key]
    if not isinstance(listed, list):
        raise DataError(f"{what}, {key}", got=repr(listed), wanted="a list")
    return listed


def _histogram(what: str, value: Mapping[str, Any]) -> Bins:
    """The distribution of a JSON object with lists of edges and counts. Raises DataError unless
    there is one more edge than counts."""
    edges = [
        _number(f"{what}, edge {i}", each) for i, each in enumerate(_list(what, value, "edges"))
    ]
    counts = _list(what, value, "counts")
    if len(edges) != len(counts) + 1 or not counts:
        got = f"{len(edges)} edges and {len(counts)} counts"
        raise DataError(what, got=got, wanted="counts, and one edge more")
    return _bins(
        [
            _Bin(
                place=f"{what}, bin {i}",
                low=low,
                high=high,
                count=_count(f"{what}, count {i}", counts[i]),
            )
            for i, (low, high) in enumerate(pairwise(edges))
        ]
    )


def _of_table(what: str, content: str) -> Distribution:
    """The distribution in a table whose first line names its columns. Raises DataError, naming the
    line, for other names or cells."""
    lines = content.splitlines()
    head = next(line for line in lines if line.strip())
    delimiter = next((mark for mark in "\t;" if mark in head), ",")
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    try:
        rows = [
            (f"{what}, line {reader.line_num}", [cell.strip() for cell in row])
            for row in reader
            if any(cell.strip() for cell in row)
        ]
    except csv.Error as error:  # such as a cell that is too long
        raise DataError(f"{what}, line {reader.line_num}", got=str(error), wanted=_WANTED)
    (place, head_cells), *rows = rows
    names = tuple(cell.lower() for cell in head_cells)
    if names not in _TABLES:
        known = sorted({name for table in _TABLES for name in table})
        hint = next(filter(None, (did_you_mean(n, known) for n in names if n not in known)), None)
        raise DataError(place, got=",".join(head_cells), wanted=_WANTED, hint=hint)
    if not rows:
        raise DataError(what, got="names alone", wanted="a line of numbers")
    for place, row in rows:
        if len(row) != len(names):
            got, wanted = counted(len(row), "cell"), f"{len(names)}: {','.join(names)}"
            raise DataError(place, got=got, wanted=wanted)
    if names == ("length",):
        return Resampled(lengths=tuple(_length(place, row[0]) for place, row in rows))
    if names == ("length", "count"):
        return _counted((place, length, count) for place, (length, count) in rows)
    return _bins(
        [
            _Bin(
                place=place,
                low=_number(place, low),
                high=_number(place, high),
                count=_count(place, count),
            )
            for place, (low, high, count) in rows
        ]
    )


def _counted(rows: Iterable[tuple[str, Any, Any]]) -> Counted:
    """The distribution of rows (place in the file, length, count), not yet checked. The counts of
    equal lengths are added."""
    counts: dict[int, float] = {}  # by length
    for place, given, count in rows:
        length = _length(place, given)
        counts[length] = counts.get(length, 0.0) + _count(place, count)
    return Counted(lengths=tuple(counts), counts=tuple(counts.values()))


def _bins(rows: Sequence[_Bin]) -> Bins:
    """The distribution of bins with whole edges; a gap between two bins becomes an empty bin.
    Raises DataError for bins that overlap or are not ascending, and for a bin with a count that
    contains no whole length."""
    # Where every bin begins one token after the end of the one before, ends are inclusive.
    if len(rows) > 1 and all(after.low == before.high + 1 for before, after in pairwise(rows)):
        rows = [replace(row, high=row.high + 1) for row in rows]
    edges, shares = list[int](), list[float]()
    for row in rows:
        # The lengths in a bin are whole, so its edges can be rounded up without moving any.
        low, high = max(1, ceil(row.low)), max(1, ceil(row.high))
        if row.high <= row.low or row.low < 0:
            got = f"{row.low:g} to {row.high:g}"
            raise DataError(row.place, got=got, wanted="0 <= lower edge < upper edge")
        if edges and low < edges[-1]:
            wanted = f"a bin from {edges[-1]:,} tokens on, where the one before ends"
            raise DataError(row.place, got=f"one from {row.low:g}", wanted=wanted)
        if low == high:  # no whole length is in the bin
            if row.count:
                got = f"{row.count:g} sequences of {row.low:g} to {row.high:g} tokens"
                raise DataError(row.place, got=got, wanted="a bin that holds a whole length >= 1")
            continue
        if not edges:
            edges.append(low)
        elif low > edges[-1]:  # a gap
            edges.append(low)
            shares.append(0.0)
        edges.append(high)
        shares.append(row.count)
    if not edges:
        raise DataError(rows[0].place, got="no sequences", wanted="a count above 0")
    return Bins(edges=tuple(edges), shares=tuple(shares))


def _number(place: str, given: Any) -> float:
    """A finite number of tokens, of a JSON number or a text; raises DataError for anything else."""
    try:
        number = float("nan") if isinstance(given, bool) else float(given)
    except ValueError:  # perhaps a text such as 32Ki
        try:
            number = float(parse_count(given))
        except SpecError:
            number = float("nan")
    except (TypeError, OverflowError):
        number = float("nan")
    if not isfinite(number):
        raise DataError(place, got=repr(given), wanted="a finite number of tokens")
    return number


def _length(place: str, given: Any) -> int:
    """A whole length >= 1; raises DataError for anything else."""
    number = _number(place, given)
    if number < 1 or number != int(number):
        raise DataError(place, got=repr(given), wanted="a whole length >= 1")
    return int(number)


def _count(place: str, given: Any) -> float:
    """A finite count or share >= 0; raises DataError for anything else."""
    try:
        number = -1.0 if isinstance(given, bool) else float(given)  # -1 is refused below
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise DataError(place, got=repr(given), wanted="a count >= 0")
    return number
