"""What producers are given to do in the tests: each plans an item in a way of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from headrace.errors import InfeasiblePlan

__all__ = [
    "dies",
    "dies_on_even_first",
    "dies_on_two",
    "fails_on_odd",
    "first_of",
    "half_second",
    "hangs",
    "large",
    "marks_slowly",
    "modules",
    "odd_error",
    "sleepy",
    "slow",
    "square",
    "takes",
]


def square(item: int) -> int:
    return item * item


def takes(item: tuple[int, float]) -> tuple[int, int]:
    """(the number of an item, the process that took its seconds)."""
    number, seconds = item
    time.sleep(seconds)
    return number, os.getpid()


def slow(seconds: float) -> float:
    """It takes so long."""
    time.sleep(seconds)
    return seconds


def sleepy(item: int) -> tuple[int, int]:
    """Later items are ready sooner."""
    time.sleep(0.02 * (3 - item % 4))
    return item, os.getpid()


def fails_on_odd(item: int) -> int:
    if item % 2:
        raise InfeasiblePlan(f"item {item}", got="odd", wanted="even", hint="add one")
    return item


class _NotRead(Exception):
    def __init__(self, text: str, *, more: str) -> None:
        super().__init__(text)
        self.more = more


def odd_error(item: int) -> int:
    raise _NotRead(f"no plan of {item}", more="cannot be read back")


def dies_on_even_first(item: tuple[int, str]) -> int:
    """Kills its own process the first time it sees an even number, as a machine might."""
    number, folder = item
    mark = Path(folder) / str(number)
    if number % 2 == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def dies_on_two(item: int) -> int:
    if item == 2:
        os._exit(5)
    return item


def hangs(item: int) -> int:
    time.sleep(600)
    return item


def half_second(item: int) -> int:
    time.sleep(0.5)
    return item


def first_of(item: tuple[int, str]) -> int:
    return item[0]


def marks_slowly(item: tuple[int, str]) -> int:
    """Leaves a file when it is done."""
    number, folder = item
    time.sleep(0.3)
    (Path(folder) / str(number)).touch()
    return number


def dies(item: int) -> int:
    os._exit(6)


def large(item: int) -> bytes:
    return bytes([item]) * 3_000_000


def modules(_: int) -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}
