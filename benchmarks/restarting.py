"""The job that ``switching.py`` ends and starts again: all that comes before its first step, timed.

It writes one line of JSON to stdout when the first step could start, then waits for the end of
stdin. The quickest restart there is: ranks forked after one import, files in the system's memory,
fresh weights instead of a checkpoint, no data, no save before the end.

    python benchmarks/restarting.py RANKS ARCHITECTURE   # the architecture as JSON
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.comm.launch import World

RUNNING_S = time.monotonic()
"""When the interpreter runs; the clock is the machine's, the same in all its processes."""


def main(ranks: int, architecture: str) -> int:
    import torch._dynamo  # noqa: F401  once, not in every rank when it makes its optimizer
    import torch.distributed as dist

    torch_s = time.monotonic()
    from headrace.comm.collectives import gather_floats
    from headrace.comm.launch import start
    from headrace.comm.mesh import Groups
    from headrace.native.executor import Executor
    from headrace.native.storage import Storage
    from headrace.spec import Architecture

    headrace_s = time.monotonic()

    def job(world: World) -> int:
        groups = Groups()
        groups.prepare({tuple(range(ranks))})
        here = [time.monotonic()]
        storage = Storage(Architecture.from_json(json.loads(architecture)), groups, seed=0)
        for _ in storage.optimizer_rows():
            pass  # it is made when it is asked for
        Executor(storage, groups, seed=0)
        here.append(time.monotonic())
        rows = gather_floats(here, dist.group.WORLD)
        if world.rank == 0:
            slowest = [max(row[i] for row in rows) for i in range(2)]
            sys.stdout.write(json.dumps([RUNNING_S, torch_s, headrace_s, *slowest]) + "\n")
            sys.stdout.flush()
        sys.stdin.read()
        return 0

    return start(job, ranks=ranks, threads=1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
