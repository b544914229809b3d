"""Kills and freezes: runs end soon and cleanly, and go on to the same bits."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import psutil

from attacks.attack import Attack, Case, Outcome
from jobs import Command
from running.cli.jobs import losses, start, write_job

__all__ = ["KILLS"]

Rng = np.random.Generator

_STEPS = 20
_ENDS_S = 40.0  # hang_s, three times over: the others have work to do on this machine
_WHOLE_S = 120.0
_BLOWS = {
    "kill": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
}
_CHANGES = {  # the time that nothing is learnt from is short
    "every = 4": "every = 3",
    "[profile]": "[profile]\nlongest = 128",
    'memory = "64MiB"': 'memory = "64MiB"\nhang_s = 5',
}
_SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """A run on ``ranks`` ranks that nobody disturbed: its losses, and the seconds it took."""

    config: Path
    ranks: int
    losses: list[float]
    seconds: float


@contextmanager
def _begin(folder: Path) -> Iterator[Case]:
    whole = cache(partial(_undisturbed, folder))
    yield lambda rng: _case(rng, whole, folder / "run")


def _arguments(config: Path, ranks: int, out: Path) -> list[object]:
    return ["train", config, "--out", out, "--ranks", ranks]


def _undisturbed(folder: Path, ranks: int) -> _Whole:
    place = folder / f"ranks{ranks}"
    place.mkdir()
    config = write_job(place, steps=_STEPS, candidates=["megatron_cz"])
    text = config.read_text()
    for old, new in _CHANGES.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text + f'name = "static"\nstatic_size = {ranks}\nrecompute = ["none"]\n')
    for number in range(2):  # the first one profiles, the second one is as all others are
        began = time.monotonic()
        command = start(*_arguments(config, ranks, place / f"whole{number}"))
        _, err = command.communicate(_WHOLE_S)
        assert command.returncode == 0, err
    seconds = time.monotonic() - began
    first, second = (losses(place / f"whole{number}") for number in range(2))
    assert first == second, "two runs that nobody disturbed differ"
    return _Whole(config=config, ranks=ranks, losses=first, seconds=seconds)


def _case(rng: Rng, undisturbed: Callable[[int], _Whole], out: Path) -> Outcome:
    whole = undisturbed(2 + int(rng.integers(2)))
    shutil.rmtree(out, ignore_errors=True)
    told: list[str] = []
    for number in range(int(rng.choice([1, 2, 3], p=[0.6, 0.3, 0.1]))):
        more = ["--resume"] if number else []
        command = start(*_arguments(whole.config, whole.ranks, out), *more)
        problem = _struck(rng, command, whole, told)
        if problem:
            command.clear()
            words = f"{', '.join(told)}: {problem}\n{command.err[-1500:]}"
            return Outcome(verdict="bad end", survived=False, words=words)
    return _goes_on(whole, out, ", ".join(told))


def _struck(rng: Rng, command: Command, whole: _Whole, told: list[str]) -> str:
    """Let a run be struck at some time; what was wrong with its end, if anything."""
    time.sleep(float(rng.uniform(0.0, whole.seconds)))
    name = str(rng.choice(list(_BLOWS)))
    before = _processes(command.pid)
    victim = before[int(rng.integers(len(before)))] if before else None
    if victim is None:
        told.append("it had ended")
    else:
        who = "the launcher" if victim.pid == command.pid else "a rank"
        told.append(f"{name} of {who}")
        with suppress(psutil.Error):
            victim.send_signal(_BLOWS[name])
    try:
        known = _ended(command, before, victim if name == "freeze" else None)
    except AssertionError as error:
        return str(error)
    if "Traceback" in command.err:
        return "a traceback"
    return _left(known)


def _processes(pid: int) -> list[psutil.Process]:
    try:
        launcher = psutil.Process(pid)
        found = [launcher, *launcher.children(recursive=True)]
        return [one for one in found if one.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return []


def _ended(
    command: Command, before: list[psutil.Process], frozen: psutil.Process | None
) -> list[psutil.Process]:
    """Wait for the end of a run; all processes that were its. A launcher that is frozen cannot
    end: it is awakened when its ranks have gone."""
    known = {one.pid: one for one in before}
    end = time.monotonic() + _ENDS_S
    while command.poll() is None:
        assert time.monotonic() < end, f"it goes on {_ENDS_S:g} s later"
        known |= {one.pid: one for one in _processes(command.pid)}
        others = [one for one in known.values() if frozen is None or one.pid != frozen.pid]
        if frozen is not None and not any(_alive(one) for one in others):
            with suppress(psutil.Error):
                frozen.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    return list(known.values())


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _left(known: list[psutil.Process]) -> str:
    """What processes that have ended left behind."""
    end = time.monotonic() + _ENDS_S
    while any(_alive(one) for one in known):
        if time.monotonic() > end:
            return f"processes {[one.pid for one in known if _alive(one)]} are left"
        time.sleep(0.05)
    pids = {str(one.pid) for one in known}
    shared = [
        path.name
        for path in (_SHARED.iterdir() if _SHARED.is_dir() else ())
        if pids & set(path.name.replace("-", "_").split("_"))
    ]
    return f"shared memory {shared} is left" if shared else ""


def _goes_on(whole: _Whole, out: Path, told: str) -> Outcome:
    """Resume a run; its losses are those of one that nobody disturbed, to the bit."""
    more = ["--resume"] if out.exists() else []
    patient = ["--set", "devices.hang_s=60"]
    command = start(*_arguments(whole.config, whole.ranks, out), *patient, *more)
    _, err = command.communicate(_WHOLE_S)
    words = f"{told} on {whole.ranks} ranks\n{err[-1500:]}"
    # What had ended already has nothing left to do and says so.
    if command.returncode not in (0, 2) or "Traceback" in err:
        return Outcome(verdict="no resume", survived=False, words=words)
    found = losses(out)
    if found != whole.losses:
        words = f"{told} on {whole.ranks} ranks: {found}, wanted {whole.losses}\n{err[-1500:]}"
        return Outcome(verdict="other losses", survived=False, words=words)
    parts = sorted(path.name for path in out.rglob("*.part*"))
    if parts:
        return Outcome(verdict="left over", survived=False, words=f"{told}: {parts} are left")
    return Outcome(verdict="same bits", error=0.0, words=told)


KILLS = Attack(
    name="kills",
    about="runs that are killed or frozen end soon and go on to the same bits",
    begin=_begin,
    limit_s=600,
    few=1,
    weight=4.0,
)
