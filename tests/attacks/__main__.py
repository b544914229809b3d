"""``python -m attacks``: an hour of attacks on the library, or one case again (``make attack``)."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed.tensor  # what torch loads late is loaded before any rank is forked

from attacks.attack import Attack, Outcome
from attacks.registry import ATTACKS
from attacks.runner import Runner
from attacks.tally import Tally, table

_TOLD_EVERY_S = 30.0
_SHOWN = 5  # failures of an attack; the JSON file has more


class _Progress:
    """A line on stderr: rewritten on a terminal, now and then elsewhere."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = time.monotonic(), seconds
        self._cases, self._failed, self._told_s = 0, 0, 0.0
        self._live = sys.stderr.isatty()

    def told(self, tally: Tally, number: int, outcome: Outcome) -> None:
        """Tell of a case that has ended."""
        self._cases += 1
        if not outcome.survived:
            self._failed += 1
            self._say(f"NOT SURVIVED {tally.attack.name} {number}: {outcome.verdict}", last=True)
        passed_s = time.monotonic() - self._began
        if passed_s - self._told_s < (0.2 if self._live else _TOLD_EVERY_S):
            return
        self._told_s = passed_s
        left_s = max(0.0, self._seconds - passed_s)
        self._say(
            f"{self._cases:,} cases, {self._failed:,} not survived, now {tally.attack.name}, "
            f"{passed_s / 60:.1f} min, ETA {left_s / 60:.1f} min"
        )

    def _say(self, line: str, *, last: bool = False) -> None:
        end = "\n" if last or not self._live else ""
        start = "\r\x1b[K" if self._live else ""
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    def done(self) -> None:
        """Leave the line."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run attacks and print their table. The exit code is 1 when something was not survived, else
    130 when interrupted."""
    flags = _flags(arguments)
    torch.set_num_threads(1)
    chosen: list[Attack] = [one for one in ATTACKS if not flags.only or one.name in flags.only]
    progress = _Progress(flags.minutes * 60)
    runner = Runner(chosen, flags.seed, progress.told)
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, too
        signal.signal(number, _interrupt)
    began, interrupted = time.monotonic(), False
    try:
        if flags.case is None:
            runner.for_seconds(flags.minutes * 60)
        else:
            runner.one(flags.case)
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted: this is the table so far", file=sys.stderr)
    finally:
        progress.done()
        runner.close()
    print(table(runner.tallies))
    _print_failures(runner.tallies)
    if flags.json is not None:
        flags.json.write_text(json.dumps(_as_json(runner, time.monotonic() - began), indent=1))
    failed = any(tally.survived < tally.cases for tally in runner.tallies)
    return 1 if failed else 130 * interrupted


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [attack.name for attack in ATTACKS]
    parser = argparse.ArgumentParser(
        prog="python -m attacks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Attack the library with cases drawn at random.",
        epilog="\n".join(f"{attack.name:<15}{attack.about}" for attack in ATTACKS),
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long, all together")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--case", type=int, help="run this case alone, of each attack")
    parser.add_argument("--only", choices=names, action="append", help="this attack")
    parser.add_argument("--json", type=Path, help="also write the table and failures to a file")
    flags = parser.parse_args(arguments)
    if flags.seed < 0 or (flags.case or 0) < 0 or not 0 < flags.minutes <= 1e6:
        parser.error("wanted a seed and a case >= 0, and minutes above 0")
    return flags


def _print_failures(tallies: Sequence[Tally]) -> None:
    for tally in tallies:
        for failure in tally.failures[:_SHOWN]:
            print(f"\n{failure.command}\n  {failure.verdict}")
            print("\n".join(f"  {line}" for line in failure.words.splitlines()))


def _as_json(runner: Runner, seconds: float) -> dict[str, Any]:
    return {
        "seed": runner.seed,
        "seconds": round(seconds, 1),
        "attacks": [tally.to_json() for tally in runner.tallies],
    }


def main_and_exit() -> None:
    """The command."""
    sys.exit(main())


if __name__ == "__main__":
    main_and_exit()
