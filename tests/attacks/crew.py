"""Ranks that stay alive over many cases: a fork and a meeting of ranks cost more than a step."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attacks.asked import asked
from headrace.comm.mesh import Groups

__all__ = ["Crew", "Crews"]

_LIMIT_S = 60.0
_LATE_S = 3.0  # for the others, when one has failed
_TOLD = 1600  # characters of tracebacks

Work = Callable[..., Any]
"""Called as ``work(groups, *arguments)`` on every rank; ``groups`` are the same for all cases."""


class Crew:
    """So many ranks of a gloo world in forked processes."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._pipes: list[Connection] = []
        context, folder = multiprocessing.get_context("fork"), tempfile.mkdtemp(prefix="crew-")
        self._processes = []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(rank, ranks, folder, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def give(self, work: Work, *arguments: Any) -> None:
        """Have all ranks begin ``work``."""
        for pipe in self._pipes:
            pipe.send((work, arguments))

    def take(self) -> list[Any]:
        """What the ranks return, in their order. Raises RuntimeError, with their tracebacks, when
        some fail: the crew is of no more use then."""
        answers: list[tuple[bool, Any]] = []
        for rank, pipe in enumerate(self._pipes):
            limit_s = _LIMIT_S if all(good for good, _ in answers) else _LATE_S
            try:
                known = pipe.poll(limit_s)
                answers.append(pipe.recv() if known else (False, f"rank {rank} hangs"))
            except EOFError:
                answers.append((False, f"rank {rank} died"))
        failed = [text for good, text in answers if not good]
        if failed:
            raise RuntimeError("\n".join(text[-_TOLD // len(failed) :] for text in failed))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()


class Crews:
    """Crews of several sizes, each started when it is first asked for."""

    def __init__(self) -> None:
        self._crews: dict[int, Crew] = {}

    def run(self, ranks: int, work: Work, *arguments: Any, beside: Callable[[], Any]) -> Any:
        """What ``work`` returns on all ranks, and what ``beside`` returns here in the meantime."""
        crew = self._crews.get(ranks) or Crew(ranks)
        self._crews[ranks] = crew
        crew.give(work, *arguments)
        try:
            return beside(), crew.take()
        except BaseException:
            self._crews.pop(ranks).close()
            raise

    def close(self) -> None:
        """End all ranks."""
        while self._crews:
            self._crews.popitem()[1].close()


def _rank(rank: int, ranks: int, folder: str, pipe: Connection) -> None:
    parent = os.getppid()
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=_LIMIT_S)
        )
        groups = Groups()
        while (given := asked(pipe, parent)) is not None:
            work, arguments = given
            pipe.send((True, work(groups, *arguments)))
    except BaseException:
        pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        os._exit(0)
