"""The fixture that starts jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs import Job


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
