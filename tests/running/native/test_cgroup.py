"""Limits of control groups, wherever they are set."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.native.machine import memory_left

GIB = 2**30
NONE = 9223372036854771712  # how version 1 says it
V2 = "0::/system.slice/slurmstepd.scope/job_7/step_0\n"
V1 = "12:cpu,cpuacct:/slurm/job_7\n9:memory:/slurm/uid_0/job_7\n1:name=systemd:/x\n"
CASES: dict[str, tuple[str, dict[str, object], int | None]] = {
    "none": (V2, {}, None),
    "no limit": (V2, {"system.slice/memory.max": "max"}, None),
    "above": (
        V2,
        {
            "system.slice/slurmstepd.scope/job_7/step_0/memory.max": "max",
            "system.slice/slurmstepd.scope/job_7/memory.max": 4 * GIB,
            "system.slice/slurmstepd.scope/job_7/memory.current": 3 * GIB,
            "system.slice/slurmstepd.scope/job_7/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "system.slice/memory.max": 64 * GIB,
        },
        2 * GIB,
    ),
    "nearest": (
        V2,
        {
            "system.slice/slurmstepd.scope/memory.max": 9 * GIB,
            "system.slice/memory.max": 8 * GIB,
            "system.slice/memory.current": 6 * GIB,
        },
        2 * GIB,
    ),
    "version 1": (
        V1,
        {
            "memory/memory.limit_in_bytes": NONE,
            "memory/slurm/uid_0/job_7/memory.limit_in_bytes": 4 * GIB,
            "memory/slurm/uid_0/job_7/memory.usage_in_bytes": GIB,
            "memory/slurm/uid_0/job_7/memory.stat": "inactive_file 1\ntotal_inactive_file 0\n",
        },
        3 * GIB,
    ),
    "container, version 1": (V1, {"memory/memory.limit_in_bytes": 5 * GIB}, 5 * GIB),
    "container, version 2": ("0::/\n", {"memory.max": 6 * GIB}, 6 * GIB),
    "of another's name space": ("0::/../other\n", {"memory.max": 6 * GIB}, 6 * GIB),
    "both": (V1 + "0::/a\n", {"unified/a/memory.max": 7 * GIB}, 7 * GIB),
    "full": ("0::/a\n", {"a/memory.max": GIB, "a/memory.current": 2 * GIB}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_nearest_limit_counts(case: str, tmp_path: Path) -> None:
    """Would catch a limit of Slurm, systemd or a container that is looked for in one place only,
    and memory that others of the group have taken already."""
    groups, files, wanted = CASES[case]
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    for name, value in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    left = memory_left(tmp_path)
    assert (None if left is not None and left > 2**60 else left) == wanted


def test_a_machine_without_any(tmp_path: Path) -> None:
    """Would catch an error where there is no such file system."""
    assert memory_left(tmp_path) is None
