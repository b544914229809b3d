"""Runs a function on several ranks: fork, file store, one thread per rank."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["run_ranks"]


def run_ranks(ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``fn(*args)`` on every rank of a gloo world, its results in rank order.

    Any rank's exception is raised here with its traceback; a rank that dies or hangs fails the
    call after ``timeout_s``.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(rank, ranks, folder, there, fn, args, timeout_s), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        results, errors = [], []
        for rank, pipe in enumerate(pipes):
            try:
                if not pipe.poll(timeout_s):
                    raise EOFError("no answer in time")
                kind, value = pipe.recv()
            except EOFError as error:
                kind, value = "error", f"rank {rank} left no result: {error}"
            (results if kind == "ok" else errors).append(value)
        for process in processes:
            process.join(2 if errors else timeout_s)
            if process.is_alive():
                process.kill()
    if errors:
        raise AssertionError("\n".join(errors))
    return results


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    pipe: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
) -> None:
    gc.freeze()  # a collection would write to, and so copy, every page of what was imported
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(os.path.join(folder, "store"), ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s)
        )
        pipe.send(("ok", fn(*args)))
        dist.barrier()
    except BaseException:
        pipe.send(("error", f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        os._exit(0)
