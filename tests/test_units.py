"""Units: texts for people, and numbers from their texts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.units import (
    GIB,
    KIB,
    MIB,
    bytes_text,
    count_text,
    parse_bytes,
    parse_count,
    percent_text,
    rate_text,
    seconds_text,
)

BYTES = {
    "0": 0,
    "4096": 4096,
    "1b": 1,
    "1.5GiB": 3 * GIB // 2,
    "80 GB": 80 * 10**9,
    " 2 kib ": 2 * KIB,
    "1,024 MiB": 1024 * MIB,
    "1_000kB": 10**6,
    "3TB": 3 * 10**12,
    "1TiB": 1024 * GIB,
}
COUNTS = {
    "0": 0,
    "4M": 4_000_000,
    "32Ki": 32_768,
    "2,048": 2048,
    "1.5k": 1500,
    "2g": 2 * 10**9,
    "1Mi": MIB,
    "1GI": GIB,
    "16_384": 16384,
    "1,234,567": 1_234_567,
    "12,345.5k": 12_345_500,
}
BAD = ["", " ", "GiB", "-1", "1..5", "1e9", "4 X", "4MM", "1 2", "four", ".5", "inf", "nan", "k4"]


@pytest.mark.parametrize("text", BYTES)
def test_bytes_from_text(text: str) -> None:
    """Catches binary and decimal units mixed up, and case or blanks that matter."""
    assert parse_bytes(text) == BYTES[text]


@pytest.mark.parametrize("text", COUNTS)
def test_counts_from_text(text: str) -> None:
    """Catches k taken as 1024 or Ki as 1000."""
    assert parse_count(text) == COUNTS[text]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_number_with_a_unit_is_refused(text: str) -> None:
    """Catches a text that is silently read as something, and a message without the units."""
    with pytest.raises(SpecError, match="kib") as of_bytes:
        parse_bytes(text)
    with pytest.raises(SpecError, match="ki") as of_count:
        parse_count(text)
    assert of_bytes.value.got == of_count.value.got == repr(text)


@pytest.mark.parametrize("text", ["1,2,3", "12,34", "1,2345", "1234,567", "1,", "1,234_567"])
def test_commas_part_thousands_only(text: str) -> None:
    """Catches a list that is read as one number."""
    for read in (parse_count, parse_bytes):
        with pytest.raises(SpecError, match=r"one number: commas part groups .* parted by '/'"):
            read(text)


def test_units_of_bytes_are_not_units_of_counts() -> None:
    """Catches one table for both: a count of gibibytes, a memory of 64 mega-nothings."""
    with pytest.raises(SpecError):
        parse_count("1GiB")
    with pytest.raises(SpecError):
        parse_bytes("64M")


@given(st.integers(0, 2**49))
def test_bytes_read_back_to_three_digits(count: int) -> None:
    """Catches a unit that is off by a power of 1024."""
    assert parse_bytes(bytes_text(count)) == pytest.approx(count, rel=5.1e-3, abs=0.5)


@given(st.integers(0, 10**12))
def test_counts_read_back_to_three_digits(count: int) -> None:
    """Catches a unit that is off by a power of 1000."""
    assert parse_count(count_text(count)) == pytest.approx(count, rel=5.1e-3)


@given(st.floats(1e-9, 1e6))
def test_seconds_read_back(seconds: float) -> None:
    """Catches a unit off by 1000 or 60, and 60 seconds in a minute's text."""
    text = seconds_text(seconds)
    size = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
    parts = re.findall(r"([0-9.]+(?:e-[0-9]+)?) ([a-z]+)", text)
    read = sum(float(number) * size[unit] for number, unit in parts)
    shown = 60 if " h " in text else 0.51 if " min " in text else 0.0051 * seconds
    assert read == pytest.approx(seconds, abs=shown)
    assert all(float(number) < 60 for number, unit in parts[1:])
    assert seconds_text(-seconds) == "-" + text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (12e-6, "12 us"),
        (0.0034, "3.4 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.84, "1.84 s"),
        (99.4, "99.4 s"),
        (99.6, "1 min 40 s"),
        (312, "5 min 12 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    """Catches a border between units that rounds to 1000 ms or 60 min."""
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(1.5 * GIB), "1.5 GiB"),
        (bytes_text(-2048), "-2 KiB"),
        (bytes_text(2**40), "1 TiB"),
        (count_text(812), "812"),
        (count_text(4100), "4.1k"),
        (count_text(13.3e6), "13.3M"),
        (count_text(1.2e9), "1.2G"),
        (count_text(0.5), "0.5"),
        (count_text(-4100), "-4.1k"),
        (percent_text(0.028), "2.8 %"),
        (percent_text(0), "0 %"),
        (percent_text(1.5), "150 %"),
        (rate_text(6667.4), "6,667"),
        (rate_text(12.345), "12.3"),
        (rate_text(0.0123), "0.0123"),
    ],
)
def test_examples_of_texts(got: str, text: str) -> None:
    """Catches more digits than people read, and a unit without its blank."""
    assert got == text


@pytest.mark.parametrize(
    ("show", "value"),
    [
        (bytes_text, 999.7 * KIB),
        (bytes_text, 5000 * 2**40),
        (seconds_text, 0.9997e-3),
        (count_text, 999_999),
        (count_text, 3e12),
        (percent_text, 12.34),
    ],
)
def test_no_exponents(show: Callable[[float], str], value: float) -> None:
    """Catches numbers that people cannot read and parsers refuse."""
    assert "e+" not in show(value)


def test_whole_numbers_are_exact() -> None:
    """Catches a count above 2**53 that changes by being read."""
    assert parse_count(str(2**53 + 1)) == 2**53 + 1


def test_the_units_are_powers_of_1024() -> None:
    """Catches a unit defined from another one by a slip."""
    assert [math.log2(unit) for unit in (KIB, MIB, GIB)] == [10, 20, 30]


@pytest.mark.parametrize("text", ["1.5", "0.50", "1.5 b"])
def test_parts_of_a_byte_are_refused(text: str) -> None:
    """Catches 1.5 that is rounded to 2 in silence; 2.0 is whole."""
    with pytest.raises(SpecError, match="wanted a whole number"):
        parse_bytes(text)
    if not text.endswith("b"):
        with pytest.raises(SpecError, match="wanted a whole number"):
            parse_count(text)
    assert parse_count("2.0") == 2
