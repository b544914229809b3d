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
"""All of a request that changes its plan: lengths, memory margin, whether it is of forwards alone,
and the number of the strategy where strategies take turns."""


@dataclass(slots=True, kw_only=True, eq=False)
class AnnouncedPlans:
    """Plans made early by another process, and the last ones that were made.

    Attributes:
        steps: Plans single requests.
        tell: Called with a line for people where that process fails.
    """

    steps: StepPlanner
    tell: Callable[[str], object]
    _maker: Ahead | None = field(default=None, init=False)  # that process, once it is started
    _asked: deque[PlanRequest] = field(default_factory=deque, init=False)  # in the maker's order
    _kept: dict[_Key, Planned] = field(default_factory=dict, init=False)  # the oldest first

    def announce(self, requests: Iterable[PlanRequest]) -> None:
        """Have the plans of ``requests`` made by the other process, in this order, except those
        that are kept or under way, and those that follow from a plan before. Returns at once."""
        depth = self.steps.options.ahead
        known = {*self._kept, *map(self._key, self._asked)}
        new = [
            request
            for request in requests
            if self.serves(request) and self._key(request) not in known
        ]
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
            most=depth,
            depth=2 * depth,  # a batch's forwards and its step
            tell=self.tell,
        )

    def serves(self, request: PlanRequest) -> bool:
        """Whether the plan of a request can be made early and kept. Under smoothing that of a step
        cannot, as it depends on the plan of the step before."""
        return request.forward or not self.steps.options.smoothing

    def take(self, request: PlanRequest) -> tuple[Planned, Ahead | None] | None:
        """The plan of a request, if it was made or announced. Waits for one that is under way.

        Returns:
            The plan, and the process that made it just now; None in the place of that process where
            the plan was kept from before, so that it took no time now (``planning_s`` is 0). None
            for a plan that was not announced, or whose process failed.

        Raises:
            InfeasiblePlan: Where nothing fits.
        """
        key, maker = self._key(request), None
        if key not in self._kept:
            asked_keys = [self._key(asked) for asked in self._asked]
            if key not in asked_keys:
                if any(
                    lengths == request.lengths and margin != request.margin
                    for lengths, margin, _, _ in asked_keys
                ):
                    self.close()  # announced with a margin that has changed: of no use any more
                return None
            # The other process gives its plans in the order asked, so take all up to this one.
            for _ in range(asked_keys.index(key) + 1):
                maker = self._maker
                self._keep_next(key)
        if key not in self._kept:  # the other process failed to make it
            return None
        planned = self._kept[key]
        if maker is None:  # kept from before
            planned = replace(planned, planning_s=0.0)
        has_timeline = planned.predicted is not None
        if request.drawn != has_timeline:  # predict again, with or without a timeline as asked for
            made = replace(planned.request or request, drawn=request.drawn)
            planned = self.steps.expected(planned.plan, made, planning_s=planned.planning_s)
        return planned, maker

    def _keep_next(self, wanted: _Key) -> None:
        """Wait for the plan that was announced first, and keep it. Where none fits, raise
        InfeasiblePlan if it is the ``wanted`` one: others may never be taken."""
        assert self._maker is not None, "asked for"
        request = self._asked.popleft()
        try:
            self.keep(request, next(self._maker))
        except InfeasiblePlan:
            if self._key(request) == wanted:
                raise
        except Exception as error:  # the plan is then made by this process when it is needed
            self.tell(f"a plan that was to be made ahead is made when it is needed ({error})")

    def keep(self, request: PlanRequest, planned: Planned) -> None:
        """Keep a plan for requests with the same key, and drop the oldest where there are too many.
        Plans that follow from a plan before are not kept."""
        if self.serves(request):
            self._kept[self._key(request)] = planned
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]

    def close(self) -> None:
        """End the process that plans. Batches that were announced and not taken are planned when
        they come."""
        self._asked.clear()
        if self._maker is not None:
            self._maker.close()
            self._maker = None

    def _key(self, request: PlanRequest) -> _Key:
        """The key by which a request's plan is kept: all that changes the plan. The correction of
        predicted seconds (``request.ratio``) does not change it."""
        options = self.steps.options
        turn = request.step % len(options.strategies) if options.rotate else 0
        return request.lengths, request.margin, request.forward, turn
