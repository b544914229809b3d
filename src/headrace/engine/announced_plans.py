"""Plans of batches that a loop announces before it takes them; no torch here.

A plan follows from costs, options, lengths and the memory margin alone. So whatever else was asked
for, a plan of the same request is the one that would be made now, and may have been made early, or
for a forward or a step before; one of another request is never given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from headrace.comm.workers import PlanAhead
from headrace.engine.step_planner import StepPlanner
from headrace.errors import InfeasiblePlan
from headrace.spec.lengths import Lengths
from headrace.spec.step import BestStatic, Planned, PlanRequest

__all__ = ["Ahead", "AnnouncedPlans"]

Ahead: TypeAlias = PlanAhead[PlanRequest, Planned, BestStatic | None]
"""Processes that plan coming batches, and after each plan its best static one."""

_KEPT = 8
"""Plans that are kept: of the forwards and steps of some batches. A batch of rollouts is often
trained several times."""

_Key: TypeAlias = tuple[Lengths, float | None, bool, int]


@dataclass(slots=True, kw_only=True, eq=False)
class AnnouncedPlans:
    """Plans made early by a process of their own, and the last ones that were made.

    Attributes:
        steps: Plans single requests.
        tell: Gets a line when a process that plans has died.
    """

    steps: StepPlanner
    tell: Callable[[str], object]
    _maker: Ahead | None = field(default=None, init=False)
    _asked: deque[PlanRequest] = field(default_factory=deque, init=False)
    _kept: dict[_Key, Planned] = field(default_factory=dict, init=False)

    def announce(self, requests: Iterable[PlanRequest]) -> None:
        """Have plans made from now on, but those that are made or asked for already."""
        depth = self.steps.options.ahead
        known = {*self._kept, *map(self._key, self._asked)}
        new = [own for own in requests if self.serves(own) and self._key(own) not in known]
        if not new or not depth:
            return
        self._asked += new
        if self._maker is not None:
            self._maker.extend(new)
            return
        self._maker = PlanAhead(
            self.steps.plan,
            new,
            after=self.steps.best_static if self.steps.options.compare else None,
            depth=2 * depth,  # a batch's forwards and its step
            tell=self.tell,
        )

    def serves(self, request: PlanRequest) -> bool:
        """Whether the plan of a request follows from no plan before it."""
        return request.forward or not self.steps.options.smoothing

    def take(self, request: PlanRequest) -> tuple[Planned, Ahead | None] | None:
        """The plan of a request, if it was made or announced, and the process that has just made
        it. Waits for one that is under way; None where its process failed. Raises InfeasiblePlan
        where nothing fits."""
        key, maker = self._key(request), None
        if key not in self._kept:
            asked = [self._key(own) for own in self._asked]
            if key not in asked:
                if any(own[0] == request.lengths and own[1] != request.margin for own in asked):
                    self.close()  # announced with a margin that has changed: of no use any more
                return None
            for _ in range(asked.index(key) + 1):
                maker = self._maker
                self._take_next(key)
        if key not in self._kept:
            return None
        found = self._kept[key]
        if maker is None:
            found = replace(found, planning_s=0.0)
        if request.drawn != (found.predicted is not None):
            made = replace(found.request or request, drawn=request.drawn)
            found = self.steps.expected(found.plan, made, planning_s=found.planning_s)
        return found, maker

    def _take_next(self, wanted: _Key) -> None:
        """Keep the plan that was asked for first. Raises InfeasiblePlan where nothing fits and it
        is ``wanted``: others may never be taken."""
        assert self._maker is not None, "asked for"
        request = self._asked.popleft()
        try:
            self.keep(request, next(self._maker))
        except InfeasiblePlan:
            if self._key(request) == wanted:
                raise
        except Exception as error:  # it can be made here as well
            self.tell(f"a plan that was to be made ahead is made when it is needed ({error})")

    def keep(self, request: PlanRequest, planned: Planned) -> None:
        """Keep a plan for requests that are alike."""
        if self.serves(request):
            self._kept[self._key(request)] = planned
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]

    def close(self) -> None:
        """End the process that plans; what was announced and not taken is planned when it comes."""
        self._asked.clear()
        if self._maker is not None:
            self._maker.close()
            self._maker = None

    def _key(self, request: PlanRequest) -> _Key:
        """What a plan follows from. The correction of seconds changes no plan."""
        options = self.steps.options
        turn = request.step % len(options.strategies) if options.rotate else 0
        return request.lengths, request.margin, request.forward, turn
