"""Units for people: the only place where seconds, bytes and counts become text or come from it."""

from __future__ import annotations

import re

from headrace.errors import SpecError, shortened

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "bytes_text",
    "count_text",
    "counted",
    "parse_bytes",
    "parse_count",
    "percent_text",
    "rate_text",
    "seconds_text",
]

KIB, MIB, GIB = 2**10, 2**20, 2**30

_BYTES = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40}
_BYTES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": KIB, "mi": MIB, "gi": GIB}
_DIGITS = 30  # the most characters of a number
_NUMBER = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")
_THOUSANDS = re.compile(r"[0-9]{1,3}(,[0-9]{3})*(\.[0-9]+)?|[0-9_]+(\.[0-9]+)?")


def _parse(text: str, table: dict[str, int], what: str) -> int:
    """Read a number with a unit of ``table``, which has the factor of each unit in small letters.
    Raises SpecError, naming ``what``, for other text."""
    found = _NUMBER.match(text)
    if not found or found[2].lower() not in table:
        units = ", ".join(unit for unit in table if unit)
        raise SpecError(
            what, got=shortened(repr(text)), wanted=f"a number and one of the units {units}"
        )
    if len(found[1]) > _DIGITS:
        raise SpecError(
            what, got=f"a number of {len(found[1])} digits", wanted=f"{_DIGITS} at most"
        )
    if not _THOUSANDS.fullmatch(found[1]):
        raise SpecError(
            what,
            got=shortened(repr(text)),
            wanted="one number: commas part groups of three digits, as in 1,234,567",
            hint="numbers of a list are parted by '/'",
        )
    number, factor = found[1].replace(",", "").replace("_", ""), table[found[2].lower()]
    if factor == 1 and number.partition(".")[2].strip("0"):
        raise SpecError(what, got=shortened(repr(text)), wanted="a whole number")
    # Whole numbers are never made floats, which hold large ones inexactly.
    return round(float(number) * factor) if "." in number else int(number) * factor


def _three(value: float) -> str:
    """A number with three significant digits, or all digits before the point, and no exponent."""
    # From 999.5 on, three digits would be written 1e+03.
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def parse_bytes(text: str) -> int:
    """Bytes from a text such as ``"1.5GiB"``, ``"80 GB"`` or ``"4096"``."""
    return _parse(text, _BYTES, "size")


def parse_count(text: str) -> int:
    """A count from a text such as ``"4M"`` (4,000,000), ``"32Ki"`` (32,768) or ``"2,048"``."""
    return _parse(text, _COUNTS, "count")


def bytes_text(count: float) -> str:
    """Bytes with three significant digits in the largest fitting binary unit: ``1.5 GiB``."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{_three(value)} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds for people, such as ``12 us``, ``3.4 ms``, ``1.84 s``, ``5 min 12 s``, ``2 h 05
    min``."""
    if seconds < 0:
        return "-" + seconds_text(-seconds)
    # From 0.9995 on three digits of the smaller unit would be 1e+03.
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count_text(count: float) -> str:
    """A count with three significant digits: ``812``, ``4.1k``, ``13.3M``, ``1.2G``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.9995 * size:
            return f"{_three(count / size)}{unit}"
    return _three(count) if count != int(count) else f"{int(count)}"


def rate_text(rate: float) -> str:
    """A rate as a whole number, below a hundred with three significant digits: ``1,234``,
    ``0.0512``."""
    return f"{rate:,.0f}" if abs(rate) >= 99.5 else f"{rate:.3g}"


def percent_text(fraction: float) -> str:
    """A fraction in percent, such as ``2.8 %``; below a thousandth of a percent ``0 %``."""
    if abs(fraction) < 1e-5:
        return "0 %"
    return f"{_three(100 * fraction)} %"


def counted(count: int, thing: str) -> str:
    """A count with its noun: ``1 sequence``, ``2,412 sequences``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
