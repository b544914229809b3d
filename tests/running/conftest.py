"""The fixture that starts jobs, and profiles that do not take long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.profiling import sweep
from jobs import Job


@pytest.fixture(scope="session", autouse=True)
def _each_pack_is_timed_once() -> Iterator[None]:
    """Nothing here depends on how noisy seconds are; ranks and commands are forked from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "_NOISY_S", 0.0)
        yield


@pytest.fixture
def run_job(tmp_path: Path) -> Iterator[Callable[[Callable[[Job], int]], Job]]:
    """``run_job(body)`` starts a job running ``body(job)``; none outlives its test."""
    jobs: list[Job] = []

    def run(body: Callable[[Job], int]) -> Job:
        jobs.append(Job(tmp_path / f"job{len(jobs)}", body))
        return jobs[-1]

    yield run
    for job in jobs:
        job.clear()
