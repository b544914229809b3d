"""The planner of the free semantics: every sequence on a block of ranks of its own size.

Data        a batch on a world (:mod:`headrace.planning.groups.work`).
Variables   the size of every sequence, its block of ranks, its launch.
Constraint  a launch holds at most its ranks' tokens; a rank does one thing at a time.
Objective   minimise the time at which the last rank is free.

Solve.
1. Drafts (:mod:`headrace.planning.groups.drafts`). For a few target times every sequence takes the
   size of least area that meets the target; or sizes are chosen while scheduling, to meet a
   deadline, which is bisected. Sizes that do not all divide each other are taken chain by chain,
   and all together on groups of any ranks (:mod:`headrace.planning.groups.scattered`).
2. Where the drafts stay away from the bound (few sequences, many ranks), the waves of the lockstep
   planner are one more draft: a free plan may do without their barriers.
3. Local search from the best drafts (:mod:`headrace.planning.groups.tree_search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from headrace.planning.groups.chains import chains
from headrace.planning.groups.clock import Job, group_sizes, jobs_s
from headrace.planning.groups.drafts import Members, by_deadline, by_target
from headrace.planning.groups.filling import Filler
from headrace.planning.groups.packing import packed
from headrace.planning.groups.scattered import scattered
from headrace.planning.groups.tree import Tree
from headrace.planning.groups.tree_search import improve
from headrace.planning.groups.wave import Wave, wave_jobs
from headrace.planning.groups.waves import plan_waves
from headrace.planning.groups.work import Work

__all__ = ["plan_free"]

_TARGETS = (1.0, 1.08, 1.25)
_CLOSE_ENOUGH = 1 + 5e-4  # of the bound: no search beyond it
_DEADLINE_GAP = 1 + 4e-3  # closer to the bound than this, deadlines are not worth their time
_WAVES_GAP = 1.01  # nor are waves
_FEW = 300  # sequences: of fewer, the search is fine
_MANY = 1000  # sequences: of more, fewer drafts are made, as all are close to the bound
_EFFORT = 16_000  # sequences placed in drafts
_STEPS = 25_000  # of the local search, times sequences


@dataclass(slots=True, kw_only=True)
class _Pool:
    """Drafts on the blocks of chains, and the best jobs that are on no chain."""

    work: Work
    drafts: list[tuple[float, int, Sequence[int], Members]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    jobs_s: float = float("inf")

    @property
    def seconds(self) -> float:
        """The best so far."""
        return min(self.jobs_s, min((draft[0] for draft in self.drafts), default=float("inf")))

    def add(self, rows: Sequence[int], members: Members) -> float:
        seconds = Tree(self.work, rows, members).seconds
        self.drafts.append((seconds, len(self.drafts), rows, members))
        return seconds

    def add_jobs(self, jobs: list[Job]) -> None:
        seconds = jobs_s(self.work, jobs, "free")
        if seconds < self.jobs_s:
            self.jobs, self.jobs_s = jobs, seconds


def plan_free(filler: Filler, *, bound_s: float, seed: int) -> tuple[list[Job], list[Job]]:
    """Launches for all sequences of the filler's batch, and the best of the drafts with groups of
    other sizes (none, if there are no such)."""
    work, pool = filler.work, _Pool(work=filler.work)
    some = [
        rows for rows in chains(work.sizes)
        if work.sizes[rows[-1]] * work.costs.cap_tokens >= work.tokens[0]
    ]  # fmt: skip
    few = max(1, _EFFORT // (4 * len(work.tokens)))
    for rows in some[:few]:
        for factor in _TARGETS[: _few(work, 2)]:
            pool.add(rows, by_target(work, rows, bound_s * factor))
    if len(some) > 1:
        for factor in _TARGETS:
            pool.add_jobs(scattered(work, bound_s * factor))
    for rows in some[: max(1, few // 4)]:
        _deadlines(pool, rows, bound_s)
    if pool.seconds > bound_s * (_WAVES_GAP if len(work.tokens) > _FEW else _CLOSE_ENOUGH):
        _add_waves(pool, some, plan_waves(filler, bound_s=bound_s, seed=seed))
    best = _improved(pool, bound_s, Random(seed))
    return best, _other(pool, group_sizes(best))


def _deadlines(pool: _Pool, rows: Sequence[int], bound_s: float) -> None:
    order = range(len(pool.work.tokens))
    low_s, high_s = bound_s, pool.seconds
    for _ in range(2 if len(order) > _MANY else 4 if len(order) > _FEW else 8):
        if high_s <= low_s * _DEADLINE_GAP:
            break
        deadline_s = (low_s + high_s) / 2
        estimate_s, members = by_deadline(pool.work, rows, deadline_s, order)
        seconds = pool.add(rows, members)
        if min(estimate_s, seconds) <= deadline_s * (1 + 1e-4):
            high_s = deadline_s
        else:
            low_s = deadline_s


def _add_waves(pool: _Pool, some: Sequence[Sequence[int]], waves: Sequence[Wave]) -> None:
    """Waves as a draft of a chain that has all their sizes, else as they are."""
    work = pool.work
    jobs = wave_jobs(work, waves)
    pool.add_jobs(jobs)
    used = {len(ranks) for ranks, _ in jobs}
    for rows in some:
        if used <= {work.sizes[row] for row in rows}:
            members = Members()
            for ranks, held in jobs:
                members.setdefault((len(ranks), ranks[0] // len(ranks)), []).extend(held)
            pool.add(rows, {block: sorted(held) for block, held in members.items()})
            return


def _few(work: Work, count: int) -> int:
    """``count`` for many sequences, one more for fewer."""
    return count + (len(work.tokens) <= _MANY)


def _improved(pool: _Pool, bound_s: float, random: Random) -> list[Job]:
    """The best jobs, after local search from the best drafts."""
    work, tries = pool.work, max(8, min(100, _STEPS // len(pool.work.tokens)))
    best_s, best = pool.jobs_s, pool.jobs
    for _, _, rows, draft in sorted(pool.drafts, key=lambda draft: draft[:2])[: _few(work, 1)]:
        seconds, members = improve(
            work, rows, draft, target_s=bound_s * _CLOSE_ENOUGH, tries=tries, random=random
        )
        if seconds < best_s:
            best_s, best = seconds, _jobs(work, members)
        if best_s <= bound_s * _CLOSE_ENOUGH:
            break
    return best


def _other(pool: _Pool, sizes: tuple[int, ...]) -> list[Job]:
    """The quickest draft whose launches are not of these sizes."""
    work = pool.work
    others = sorted(pool.drafts, key=lambda draft: draft[:2])
    found = next((d for d in others if group_sizes(_jobs(work, d[3])) != sizes), None)
    if pool.jobs and group_sizes(pool.jobs) != sizes and (not found or pool.jobs_s < found[0]):
        return pool.jobs
    return _jobs(work, found[3]) if found else []


def _jobs(work: Work, members: Members) -> list[Job]:
    jobs = list[Job]()
    for p, k in sorted(members, key=lambda block: (-block[0], block[1])):
        ranks = tuple(range(k * p, (k + 1) * p))
        for held in packed(work.tokens, members[p, k], work.costs.cap_tokens * p):
            jobs.append((ranks, held))
    return jobs
