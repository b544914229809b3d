"""Why a plan is as it is, in a few short sentences."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.planning.groups.bounds import Bound
from headrace.planning.groups.clock import Job, Semantics, group_sizes, jobs_s
from headrace.planning.groups.plan import sizes_text
from headrace.planning.groups.static import best_static_jobs
from headrace.planning.groups.work import Work
from headrace.units import percent_text, seconds_text

__all__ = ["reasons"]

_DEAR = 1.1  # times the least device-seconds: from here on large groups are what binds
_NEARLY = 0.99
_MUCH = 0.25  # of the device-seconds: from here on constants are what binds


def reasons(
    work: Work, bound: Bound, jobs: Sequence[Job], seconds: float, semantics: Semantics,
    others: Sequence[Sequence[Job]] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """What binds, where the device-seconds go, what the best static degree would cost, and, where
    a planner chose among ``others``, the best of those and of static degrees with groups of other
    sizes."""
    texts = [_binding(work, bound, jobs), _spent(work, jobs, seconds)]
    row, static = best_static_jobs(work, semantics)
    static_s = jobs_s(work, static, semantics)
    ratio = static_s / seconds if seconds > 0 else 1.0
    texts.append(
        f"best static: cp{work.sizes[row]} everywhere, {seconds_text(static_s)} ({ratio:.3g}x)"
    )
    if others is not None:
        beside = [(jobs_s(work, other, semantics), other) for other in (*others, static) if other]
        runner_up = _runner_up(jobs, seconds, beside)
        if runner_up is None:
            _, static = best_static_jobs(work, semantics, without=row)
            if static:
                runner_up = _runner_up(jobs, seconds, [(jobs_s(work, static, semantics), static)])
        texts += [runner_up] if runner_up else []
    return tuple(texts)


def _runner_up(
    jobs: Sequence[Job], seconds: float, others: Sequence[tuple[float, Sequence[Job]]]
) -> str | None:
    """The quickest of some plans (and their seconds) whose launches are of other sizes."""
    here = group_sizes(jobs)
    found = [(took, group_sizes(other)) for took, other in others if group_sizes(other) != here]
    if not found:
        return None
    took, sizes = min(found)
    more = percent_text(max(0.0, took / seconds - 1)) if seconds > 0 else "0 %"
    return f"runner-up: {sizes_text(sizes)}, {seconds_text(took)} (+{more})"


def _constants_s(work: Work, jobs: Sequence[Job]) -> float:
    """Device-seconds of the constants of all launches."""
    return work.c_s * sum(len(ranks) for ranks, _ in jobs)


def _busy_s(work: Work, jobs: Sequence[Job]) -> float:
    return sum(len(ranks) * work.launch_s(len(ranks), held) for ranks, held in jobs)


def _binding(work: Work, bound: Bound, jobs: Sequence[Job]) -> str:
    busy_s = _busy_s(work, jobs)
    if busy_s > 0 and _constants_s(work, jobs) > _MUCH * busy_s:
        share = _constants_s(work, jobs) / busy_s
        return (
            f"bound by what a launch costs whatever it holds: {seconds_text(work.c_s)} each, "
            f"{percent_text(share)} of all device-seconds"
        )
    if bound.longest_s >= bound.seconds * _NEARLY:
        row = int(work.seconds[:, 0].argmin())
        here = next(len(ranks) for ranks, held in jobs if 0 in held)
        return (
            f"bound by the longest sequence: {work.tokens[0]:,} tokens take "
            f"{seconds_text(bound.longest_s)} at best, on cp{work.sizes[row]}, here on cp{here}"
        )
    cheapest_s = float(work.area.min(axis=0).sum()) / work.devices
    if bound.work_s > cheapest_s * _DEAR:
        more = percent_text(bound.work_s / cheapest_s - 1)
        return (
            f"bound by long sequences: to end within {seconds_text(bound.seconds)} they need "
            f"groups so large that all work takes {more} more device-seconds"
        )
    return (
        f"bound by the total work: {seconds_text(bound.work_s)} on each of {work.devices} devices"
    )


def _spent(work: Work, jobs: Sequence[Job], seconds: float) -> str:
    """Shares of work, communication, constants and idle time in N times the seconds."""
    total_s = seconds * work.devices
    if total_s <= 0:
        return "nothing costs anything"
    length = [work.tokens[i] for _, held in jobs for i in held]
    work_s = sum(work.costs.a_s * n * n + work.costs.b_s * n for n in length)
    constants_s = _constants_s(work, jobs)
    kappa_s = max(0.0, _busy_s(work, jobs) - constants_s - work_s)
    shares = {
        "work": work_s, "communication": kappa_s, "constants": constants_s,
        "idle": max(0.0, total_s - work_s - kappa_s - constants_s),
    }  # fmt: skip
    texts = ", ".join(f"{percent_text(part / total_s)} {name}" for name, part in shares.items())
    return f"device-seconds: {texts}"
