"""From the lengths of a batch to launches on groups of ranks, with a lower bound of every plan.

The step semantics make two problems of one. When ranks that are in no common launch need not meet
(whole weights, or sharded ones that are gathered before), a launch starts when its ranks are free:
``free``. When all ranks gather each layer's weights together, the i-th launch of every rank
starts together: ``lockstep``. Each has its planner (:mod:`headrace.planning.groups.free`,
:mod:`headrace.planning.groups.waves`); a plan of the one is poor, though not wrong, for the other.

Planners of others stand beside them under the same name and the same clock. One that could beat
what is found, by a bound that costs little, is run too, and taken if it does; so a plan is never
worse than any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from headrace.costs.group_costs import GroupCosts
from headrace.errors import SpecError, did_you_mean
from headrace.planning.groups.baselines import BASELINES
from headrace.planning.groups.bounds import lower_bound
from headrace.planning.groups.clock import Job, Semantics, jobs_s
from headrace.planning.groups.explain import reasons
from headrace.planning.groups.filling import Filler
from headrace.planning.groups.free import plan_free
from headrace.planning.groups.plan import GroupPlan, Launch
from headrace.planning.groups.wave import wave_jobs
from headrace.planning.groups.waves import search_waves
from headrace.planning.groups.work import Work
from headrace.spec import Lengths

__all__ = ["GROUP_PLANNERS", "plan_groups"]

GROUP_PLANNERS: tuple[str, ...] = ("headrace", *BASELINES)
"""The names that :func:`plan_groups` knows."""


def plan_groups(
    costs: GroupCosts, lengths: Lengths | Sequence[int], devices: int, *,
    semantics: Semantics = "free", planner: str = "headrace", seed: int = 0,
) -> GroupPlan:  # fmt: skip
    """A plan for one batch on ``devices`` ranks.

    ``planner`` is one of :data:`GROUP_PLANNERS`. Deterministic in its arguments. Raises SpecError
    for an empty batch, a length below one (naming the sequence) or an unknown name, InfeasiblePlan
    when a sequence fits no group of the world (naming it, and how many devices would hold it).
    """
    if semantics not in get_args(Semantics):
        wanted = " or ".join(get_args(Semantics))
        raise SpecError("semantics", got=repr(semantics), wanted=wanted,
                        hint=did_you_mean(str(semantics), get_args(Semantics)))  # fmt: skip
    if planner not in GROUP_PLANNERS:
        raise SpecError("planner", got=repr(planner), wanted=f"one of {', '.join(GROUP_PLANNERS)}",
                        hint=did_you_mean(planner, GROUP_PLANNERS))  # fmt: skip
    batch = lengths if isinstance(lengths, Lengths) else Lengths(tokens=tuple(lengths))
    work = Work.of(costs, batch, devices)
    bound = lower_bound(work)
    if planner == "headrace":
        jobs, *others = _planned(work, semantics, bound.seconds, seed)
    else:
        jobs, others = BASELINES[planner].jobs(work, semantics), None
    seconds = jobs_s(work, jobs, semantics)
    assert bound.seconds <= seconds * (1 + 1e-9), "a bound is below every plan"
    return GroupPlan(
        lengths=batch,
        devices=devices,
        semantics=semantics,
        launches=tuple(
            Launch(ranks=ranks, sequences=tuple(work.order[i] for i in held))
            for ranks, held in jobs
        ),
        predicted_s=seconds,
        lower_bound_s=min(bound.seconds, seconds),
        planner=planner,
        seed=seed,
        why=reasons(work, bound, jobs, seconds, semantics, others),
    )


def _planned(work: Work, semantics: Semantics, bound_s: float, seed: int) -> list[list[Job]]:
    """The quickest launches found, by own planners and by those of others that could be quicker;
    then what else was found."""
    filler = Filler.of(work)
    if semantics == "free":
        best, other = plan_free(filler, bound_s=bound_s, seed=seed)
    else:
        waves = search_waves(filler, bound_s=bound_s, seed=seed)
        best, other = (wave_jobs(work, each) for each in waves)
    best_s, found = jobs_s(work, best, semantics), [best, other]
    for baseline in BASELINES.values():
        if baseline.least_s(work) < best_s:
            jobs = baseline.jobs(work, semantics)
            seconds = jobs_s(work, jobs, semantics)
            found.insert(0 if seconds < best_s else 1, jobs)
            best_s = min(best_s, seconds)
    return found
