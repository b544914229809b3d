"""What a planner of groups decides: launches, each a group of ranks with the sequences it packs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from headrace.errors import SpecError
from headrace.planning.groups.clock import Semantics
from headrace.spec import Lengths
from headrace.units import percent_text, seconds_text

__all__ = ["GroupPlan", "Launch", "plans_to_json", "sizes_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One packed launch: the ranks of its group, and indices of sequences of the batch."""

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """A plan for one batch: launches in the order in which they are issued.

    Raises SpecError when a sequence is missing or doubled, or a rank is not of this world.
    """

    lengths: Lengths
    devices: int
    semantics: Semantics
    launches: tuple[Launch, ...]
    predicted_s: float
    lower_bound_s: float
    planner: str
    seed: int = 0
    why: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.semantics not in get_args(Semantics):
            wanted = " or ".join(get_args(Semantics))
            raise SpecError("semantics", got=repr(self.semantics), wanted=wanted)
        world = set(range(self.devices))
        for n, launch in enumerate(self.launches):
            ranks = set(launch.ranks)
            if not launch.sequences:
                raise SpecError(f"launch {n}", got="no sequence", wanted="at least one")
            if len(ranks) < len(launch.ranks) or not ranks <= world:
                raise SpecError(f"ranks of launch {n}", got=list(launch.ranks),
                                wanted=f"different ranks of {self.devices}")  # fmt: skip
        held = Counter(i for launch in self.launches for i in launch.sequences)
        if held != Counter(range(len(self.lengths))):
            wrong = sorted({*range(len(self.lengths)), *held} - {i for i in held if held[i] == 1})
            raise SpecError("plan", got=f"sequences {wrong[:5]} missing or doubled",
                            wanted="every sequence once")  # fmt: skip

    @property
    def gap(self) -> float:
        """How far above the lower bound the prediction is, as a fraction."""
        return self.predicted_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0

    @property
    def strategy(self) -> str:
        """Launches by group size, largest first: ``1*cp8 + 4*cp4``."""
        return sizes_text(len(launch.ranks) for launch in self.launches)

    def explain(self) -> str:
        """Why this plan, in words: one reason per line."""
        return "\n".join(self.why)

    def __str__(self) -> str:
        rows = [
            ("launches", f"{self.strategy}  {self.semantics}, {self.devices} devices"),
            ("sequences", f"{len(self.lengths):,}  tokens {self.lengths.total:,}"
                          f"  longest {self.lengths.longest:,}"),
            ("predicted", f"{seconds_text(self.predicted_s)}  bound "
                          f"{seconds_text(self.lower_bound_s)}  gap {percent_text(self.gap)}"),
        ]  # fmt: skip
        rows += [("why" if i == 0 else "", reason) for i, reason in enumerate(self.why)]
        return "\n".join(f"{name:<14}{text}" for name, text in rows)

    def to_json(self, *, planning_s: float | None = None) -> dict[str, Any]:
        """A plan file of kind ``groups`` with one iteration; see :func:`plans_to_json`."""
        return plans_to_json([self], None if planning_s is None else [planning_s])


def sizes_text(sizes: Iterable[int]) -> str:
    """Launches of these sizes, largest first: ``1*cp8 + 4*cp4``."""
    counts = Counter(sizes)
    return " + ".join(f"{counts[p]}*cp{p}" for p in sorted(counts, reverse=True))


def plans_to_json(
    plans: Sequence[GroupPlan], planning_s: Sequence[float] | None = None
) -> dict[str, Any]:
    """A plan file of kind ``groups``: an iteration for every plan, of one world and semantics.

    ``sequences`` are indices into the iteration's lengths, ``planning_s`` what planning took.
    Raises SpecError for plans of different worlds or semantics, or none.
    """
    worlds = {(plan.devices, plan.semantics) for plan in plans}
    if len(worlds) != 1:
        raise SpecError("plans of a file", got=f"{len(worlds)} worlds", wanted="one world")
    iterations = list[dict[str, Any]]()
    for n, plan in enumerate(plans):
        iteration: dict[str, Any] = {
            "planner": plan.planner,
            "seed": plan.seed,
            "predicted_s": plan.predicted_s,
            "lower_bound_s": plan.lower_bound_s,
            "why": list(plan.why),
            "launches": [
                {"ranks": list(launch.ranks), "sequences": list(launch.sequences)}
                for launch in plan.launches
            ],
        }
        if planning_s is not None:
            iteration["planning_s"] = planning_s[n]
        iterations.append(iteration)
    return {
        "kind": "groups",
        "devices": plans[0].devices,
        "semantics": plans[0].semantics,
        "iterations": iterations,
    }
