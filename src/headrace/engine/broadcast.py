"""One planner for all ranks: the first rank plans, the others are told.

What is planned, learnt and remembered is the first rank's business alone, so ranks cannot differ,
and a cluster plans once and not as often as it has ranks. Every rank asks in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.comm.collectives import from_first
from headrace.comm.mesh import Groups
from headrace.engine.run_planner import OnlinePlanner
from headrace.errors import InfeasiblePlan
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan
from headrace.spec.step import Exhausted, Planned

__all__ = ["BroadcastPlanner"]

_PLAN, _REFUSED = b"p", b"r"
"""How what the first rank says begins."""


@dataclass(slots=True, kw_only=True)
class BroadcastPlanner:
    """Passes on what the first rank's ``planner`` decides; other ranks have none.

    On those a plan comes without what is expected of it, which only the first rank writes down.
    """

    groups: Groups
    planner: OnlinePlanner | None

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of the next step. Raises InfeasiblePlan on every rank when there is none."""
        return self._shared(lambda planner: planner.plan(lengths))

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A thriftier plan of the same batch, likewise."""
        return self._shared(lambda planner: planner.replan(lengths, failed, exhausted))

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Take a finished step into what the first rank knows."""
        if self.planner is not None:
            self.planner.observe(predicted_s, measured_s)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to plan alike; nothing on other ranks than the first."""
        return {} if self.planner is None else self.planner.state()

    def check(self, longest: int) -> None:
        """Raise InfeasiblePlan on every rank when so long a sequence will fit nowhere."""
        error: InfeasiblePlan | None = None
        if self.planner is not None:
            try:
                self.planner.check(longest)
            except InfeasiblePlan as found:
                error = found
        self._told(_PLAN if error is None else _REFUSED + str(error).encode())

    def _shared(self, decide: Callable[[OnlinePlanner], Planned]) -> Planned:
        planned, payload = None, b""
        if self.planner is not None:
            try:
                planned = decide(self.planner)
                payload = _PLAN + (planned.plan.to_bytes() if self.groups.ranks > 1 else b"")
            except InfeasiblePlan as error:
                payload = _REFUSED + str(error).encode()
        said = self._told(payload)
        if planned is not None:
            return planned
        plan = Plan.from_bytes(said)
        return Planned(plan=plan, predicted=None, peak_bytes=(), planning_s=0.0)

    def _told(self, payload: bytes) -> bytes:
        """What the first rank says, on every rank."""
        said = from_first(payload, self.groups.world if self.groups.ranks > 1 else None)
        kind, rest = said[:1], said[1:]
        if kind == _REFUSED:
            raise InfeasiblePlan(rest.decode())
        return rest
