"""Ways in which files are damaged: by disks, by people, and by chance."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

__all__ = ["ODD_TEXTS", "damage_file", "damaged", "replaced"]

Rng = np.random.Generator

ODD_TEXTS = (
    "",
    "0",
    "-1",
    "1",
    "1.5",
    "1e308",
    "1e400",
    "-1e400",
    "nan",
    "inf",
    "-inf",
    "true",
    "null",
    "[]",
    "{}",
    '""',
    "''",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "1" * 5000,
    "9223372036854775808",
    "-9223372036854775808",
    "[" * 3000,
    "\x00",
    "\ud800",
    "\u202e",
    "\U0001f600",
    "x" * 70000,
    "../../../../etc/passwd",
    "/dev/zero",
    "/dev/null",
    "~nobodyatall",
    "%s%n",
    "{0}",
    "$(id)",
    "1_000",
    "0x10",
    "1e-320",
    "\r\n",
    "\t",
    "[bold]",
    "[/]",
    "None",
    "True",
    "NaN",
    "Infinity",
)
"""Values that somebody wrote somewhere one day."""


def damaged(raw: bytes, rng: Rng) -> bytes:
    """``raw`` with one to three things about it changed; it may come out as it was."""
    found = bytearray(raw)
    for _ in range(int(rng.choice([1, 2, 3], p=[0.7, 0.2, 0.1]))):
        change = _CHANGES[int(rng.integers(len(_CHANGES)))]
        change(found, rng)
    return bytes(found)


def _flip(raw: bytearray, rng: Rng) -> None:
    if raw:
        raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))


def _flip_many(raw: bytearray, rng: Rng) -> None:
    for _ in range(int(rng.integers(2, 40))):
        _flip(raw, rng)


def _cut(raw: bytearray, rng: Rng) -> None:
    del raw[int(rng.integers(len(raw) + 1)) :]


def _lengthen(raw: bytearray, rng: Rng) -> None:
    raw += rng.bytes(int(rng.integers(1, 64)))


def _blank(raw: bytearray, rng: Rng) -> None:
    start, stop = _range(raw, rng)
    raw[start:stop] = bytes(stop - start)


def _scramble(raw: bytearray, rng: Rng) -> None:
    start, stop = _range(raw, rng)
    raw[start:stop] = rng.bytes(stop - start)


def _take_out(raw: bytearray, rng: Rng) -> None:
    start, stop = _range(raw, rng)
    del raw[start:stop]


def _repeat(raw: bytearray, rng: Rng) -> None:
    start, stop = _range(raw, rng)
    raw[start:start] = raw[start:stop]


def _number(raw: bytearray, rng: Rng) -> None:
    """Eight bytes become a whole number at the edge of what one can be."""
    if len(raw) >= 8:
        at = int(rng.integers(len(raw) - 7))
        value = int(rng.choice([0, 1, 2**31, 2**32, 2**62, 2**63 - 1, -1, -(2**63)]))
        raw[at : at + 8] = (value % 2**64).to_bytes(8, "little")


def _words(raw: bytearray, rng: Rng) -> None:
    """A word of a text becomes another."""
    words = raw.split(b" ")
    odd = ODD_TEXTS[int(rng.integers(len(ODD_TEXTS)))]
    words[int(rng.integers(len(words)))] = odd.encode(errors="surrogatepass")
    raw[:] = b" ".join(words)


def _range(raw: bytearray, rng: Rng) -> tuple[int, int]:
    start = int(rng.integers(len(raw) + 1))
    return start, min(len(raw), start + int(rng.integers(1, 100)))


_CHANGES: tuple[Callable[[bytearray, Rng], None], ...] = (
    _flip,
    _flip,
    _flip,
    _flip_many,
    _flip_many,
    _cut,
    _lengthen,
    _blank,
    _scramble,
    _take_out,
    _repeat,
    _number,
    _words,
)


def damage_file(path: Path, rng: Rng) -> str:
    """Damage a file in place, its size and time too; what was done, in a word."""
    path.write_bytes(damaged(path.read_bytes(), rng))
    return "changed"


def replaced(path: Path, rng: Rng, *, waits: bool = True) -> str:
    """Put something else in the place of a file; what, in a word. ``waits`` has pipes and devices
    among it, of which a reader sees no end."""
    path.unlink()
    endless = ["pipe", "device"] if waits else []
    match str(rng.choice(["gone", "folder", "loop", "other", "nowhere", *endless])):
        case "gone":
            return "gone"
        case "folder":
            path.mkdir()
            return "folder"
        case "pipe":
            os.mkfifo(path)
            return "pipe"
        case "loop":
            path.symlink_to(path.name)
            return "link to itself"
        case "device":
            path.symlink_to("/dev/zero")
            return "link to a device"
        case "other":
            others = [other for other in path.parent.iterdir() if other.is_file()]
            if others:
                shutil.copy(others[int(rng.integers(len(others)))], path)
            return "another's content"
    path.symlink_to(path.with_name("nowhere"))
    return "link to nowhere"
