"""A rank's own program of each plan, checked once for each kind of it.

[Note: kinds of programs] Programs are compiled from few facts. Those of a pipeline with stages
follow from its scheme, the shares of its stages and the count of its micro-batches; that of a rank
without stages from the count of its micro-batches. Other ranks, micro-batches and rows are other
names in the same lists, so what was checked for one of a kind holds for all of it. A rank of a
staged pipeline works in it alone, and compiles the programs of its members where their kind is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.spec.checker import check_alone, check_programs
from headrace.spec.compiler import compile_rank
from headrace.spec.plan import Pipeline, Plan
from headrace.spec.program import Backward, Program

__all__ = ["OwnPrograms"]


@dataclass(slots=True, kw_only=True)
class OwnPrograms:
    """The programs of ``rank`` over a model of ``bucket_count`` weight buckets."""

    rank: int
    bucket_count: int
    overlap: bool = True
    _checked: set[tuple[Any, ...]] = field(init=False, default_factory=set)

    def of(self, plan: Plan) -> Program:
        """The program of ``plan``. Raises ProgramError when it, or one of those it depends on,
        breaks a rule; SpecError when a pipeline has more stages than the model has layers."""
        mine = compile_rank(plan, self.rank, self.bucket_count, overlap=self.overlap)
        pipelines = [i for i, p in enumerate(plan.pipelines) if self.rank in p.ranks]
        count = sum(micro.pipeline in pipelines for micro in plan.micro_batches)
        staged = [p for i in pipelines if (p := plan.pipelines[i]).scheme.pipeline > 1 and count]
        within = any(isinstance(action, Backward) and action.pushes for action in mine.actions)
        kind = (count, within, *((p.scheme, p.shares) for p in staged))
        if kind not in self._checked:
            self._check(mine, plan, staged)
            self._checked.add(kind)
        return mine

    def _check(self, mine: Program, plan: Plan, staged: list[Pipeline]) -> None:
        if not staged:
            check_alone(mine, plan, self.bucket_count)
            return
        members = sorted(staged[0].ranks)
        programs = [
            mine
            if rank == self.rank
            else compile_rank(plan, rank, self.bucket_count, overlap=self.overlap)
            for rank in members
        ]
        check_programs(programs, plan, self.bucket_count)
