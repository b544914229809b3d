"""Runs attacks side by side in time: whoever had the least of its share is next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from attacks.attack import Attack, Outcome
from attacks.tally import Tally
from attacks.worker import Worker

__all__ = ["Runner"]

Told = Callable[[Tally, int, Outcome], None]


class Runner:
    """Some attacks with one seed. ``told`` hears of every case that has ended.

    Cases are numbered from 0; case N of an attack is the same with the same seed, whatever ran
    before it.
    """

    def __init__(
        self, attacks: Sequence[Attack], seed: int, told: Told = lambda tally, number, outcome: None
    ) -> None:
        self.seed, self._told = seed, told
        self.tallies = [Tally(attack=attack) for attack in attacks]
        self._workers = {attack.name: Worker(attack, seed) for attack in attacks}

    def for_seconds(self, seconds: float) -> None:
        """Share the time among the attacks; the last case may take longer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (able := [t for t in self.tallies if t.begins]):
            tally = min(able, key=lambda one: one.seconds / one.attack.weight)
            self._run(tally, tally.cases)

    def for_cases(self, counts: Mapping[str, int]) -> None:
        """The first cases of each attack."""
        for tally in self.tallies:
            for number in range(counts.get(tally.attack.name, 0)):
                self._run(tally, number)

    def one(self, number: int) -> None:
        """One case of each attack."""
        for tally in self.tallies:
            self._run(tally, number)

    def _run(self, tally: Tally, number: int) -> None:
        name, began = tally.attack.name, time.monotonic()
        outcome = self._workers[name].run(number)
        command = f'make attack ARGS="--only {name} --seed {self.seed} --case {number}"'
        tally.add(outcome, time.monotonic() - began, command)
        self._told(tally, number, outcome)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.close()
