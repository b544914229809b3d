"""A rank runs out of memory in the middle of a step: all go on, and nothing is written twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.errors import InfeasiblePlan
from headrace.runtime.executor import Executor
from headrace.runtime.machine import is_out_of_memory
from headrace.runtime.optimizers import AdamW
from headrace.runtime.recovery import Exhausted, Recovery
from headrace.runtime.schedule import Schedule
from headrace.runtime.storage import Storage
from headrace.runtime.trainer import Planned, Trainer
from headrace.spec import Architecture, Lengths, Plan
from jobs import Job
from spread import whole
from strategies import laid_out

RunJob = Callable[[Callable[[Job], int]], Job]
LLAMA = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
LENGTHS = (37, 3, 20, 11, 1, 29, 8, 2, 17)
FIRST, SECOND = "1*pp2 + 1*tp2", "2*cp2"
# What each of the ranks 0 to 3 of the first strategy can be in.
PLANTED = {
    "pull": (2, "P1"), "send": (0, "Sa0"), "exchange": (1, "X("), "receive": (1, "Ra0"),
    "forward": (1, "1F"), "tensor forward": (3, "0F"), "backward": (0, "0B"), "push": (1, "G1"),
    "last backward": (2, "{"), "update": (3, "U"),
}  # fmt: skip


@dataclass
class Batch:
    lengths: Lengths
    tokens: tuple[np.ndarray, ...]
    epoch: int = 0
    state_after: dict[str, Any] = field(default_factory=dict)


@dataclass
class Planner:
    """Plans one strategy, and another one after a failure, up to so many times."""

    most: int
    told: list[str] = field(default_factory=list)

    def _planned(self, lengths: Lengths, text: str) -> Planned:
        plan = laid_out(text, LLAMA, lengths.tokens, 4)
        return Planned(plan=plan, predicted=None, peak_bytes=(0,) * 4, planning_s=0.0)

    def plan(self, lengths: Lengths) -> Planned:
        return self._planned(lengths, FIRST)

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        self.told.append(str(exhausted))
        if len(self.told) > self.most:
            raise InfeasiblePlan("memory", got="too little")
        return self._planned(lengths, SECOND)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}


def _batches(count: int) -> Iterator[Batch]:
    for number in range(count):
        rng = np.random.default_rng(number)
        documents = tuple(rng.integers(61, size=n).astype(np.int32) for n in LENGTHS)
        yield Batch(Lengths(tokens=LENGTHS), documents)


def _train(
    world: World, faults: dict[int, tuple[int, str]], always: bool = False,
    node_ranks: int | None = None,
) -> Any:  # fmt: skip
    """Steps 0, 1, ...; in step n the rank ``faults[n][0]`` runs out of memory once, where its
    action has ``faults[n][1]`` in it."""
    groups = Groups(connections=world.rerendezvous.connections, node_ranks=node_ranks)
    options = AdamW(clip=0.5)
    storage = Storage(LLAMA, groups, seed=3, dtype=torch.float64, options=options)
    steps = len(faults)
    planned = Planner(most=3 if always else steps)
    at = {"step": 0, "failed": set()}

    def entered(action: str) -> None:
        world.watcher.enter(action)
        rank, where = faults[at["step"]]
        if world.rank == rank and where in action and (always or at["step"] not in at["failed"]):
            at["failed"].add(at["step"])
            raise torch.OutOfMemoryError("planted")

    executor = Executor(
        storage, groups, seed=3, entered=entered if faults[0][1] else lambda action: None
    )
    seen: list[Any] = []

    def finished(step: Any, batch: Any) -> None:
        at["step"] += 1
        seen.append((step.metrics["loss"], step.metrics["out_of_memory"], str(step.plan.strategy)))

    trainer = Trainer(
        executor=executor, groups=groups, planner=planned, schedule=Schedule(lr=0.01, steps=steps),
        finished=finished, recovery=Recovery(rerendezvous=world.rerendezvous, groups=groups),
    )  # fmt: skip
    trainer.train(_batches(steps), 0, steps)
    weights = {n: m.numpy().tolist() for n, m in storage.masters.items()}
    return {"seen": seen, "told": planned.told, "weights": weights, "updates": storage.updates}


def _main(
    folder: Path, faults: dict[int, tuple[int, str]], always: bool = False,
    node_ranks: int | None = None,
) -> Callable[[World], int]:  # fmt: skip
    def main(world: World) -> int:
        found = _train(world, faults, always, node_ranks)
        (folder / f"rank{world.rank}").write_text(json.dumps(found))
        return 0

    return main


def _found(folder: Path) -> list[Any]:
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(4)]


@pytest.mark.parametrize("node_ranks", [whole(None), 2])
def test_a_step_is_taken_again_wherever_memory_runs_out(
    run_job: RunJob, tmp_path: Path, node_ranks: int | None
) -> None:
    """Would catch ranks left waiting in a collective or a message of the step that failed, a rank
    that plans by itself, gradients of the failed try that stay in the sums, an update taken twice
    or not by all."""
    faults = dict(enumerate(PLANTED.values()))
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    main = _main(tmp_path / "with", faults, node_ranks=node_ranks)
    job = run_job(lambda job: start(main, ranks=4, timeout_s=30))
    assert job.wait(60) == 0, job.err
    none = dict.fromkeys(faults, (0, ""))
    main = _main(tmp_path / "without", none, node_ranks=node_ranks)
    job = run_job(lambda job: start(main, ranks=4, timeout_s=30))
    assert job.wait(60) == 0, job.err
    got, wanted = _found(tmp_path / "with"), _found(tmp_path / "without")
    for rank in range(4):
        assert got[rank]["told"] == got[0]["told"], "agreed by all"
        assert len(got[rank]["told"]) == len(faults)
        assert got[rank]["updates"] == len(faults)
        for (loss, retries, strategy), (same, _, _) in zip(
            got[rank]["seen"], wanted[rank]["seen"], strict=True
        ):
            assert loss == pytest.approx(same, rel=1e-10)
            assert retries == 1
            assert strategy == SECOND
        for name, rows in wanted[rank]["weights"].items():
            np.testing.assert_allclose(got[rank]["weights"][name], rows, rtol=0, atol=1e-7)
    for (rank, where), told in zip(faults.values(), got[0]["told"], strict=True):
        assert told.startswith(f"rank {rank} ran out of memory in ")
        assert where in told


def test_no_thriftier_plan_ends_the_run_with_its_reason(run_job: RunJob, tmp_path: Path) -> None:
    """Would catch a batch that is tried for ever, and a reason told by every rank or by none."""
    main = _main(tmp_path, {0: (0, "0F")}, always=True)
    job = run_job(lambda job: start(main, ranks=4, timeout_s=30))
    assert job.wait(30) == 2
    assert job.said == ["headrace: memory: got too little"]
    assert job.left_over() == []


def _once(world: World) -> int:
    groups = Groups(connections=world.rerendezvous.connections)
    storage = Storage(LLAMA, groups, seed=3)

    def entered(action: str) -> None:
        if world.rank == 1 and action == "1B0[1]":
            raise ValueError("no memory's fault")

    executor = Executor(storage, groups, seed=3, entered=entered)
    trainer = Trainer(
        executor=executor, groups=groups, planner=Planner(most=1),
        schedule=Schedule(lr=0.01, steps=1),
        recovery=Recovery(rerendezvous=world.rerendezvous, groups=groups),
    )  # fmt: skip
    trainer.train(_batches(1), 0, 1)
    return 0


def test_other_errors_end_the_run(run_job: RunJob) -> None:
    """Would catch a mistake in the code taken for want of memory and tried again."""
    job = run_job(lambda job: start(_once, ranks=4, timeout_s=30))
    assert job.wait(20) == 1
    assert any("rank 1| ValueError: no memory's fault" in line for line in job.err.splitlines())
    assert job.left_over() == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_is_gone(error: Exception, says: bool) -> None:
    """Catches libraries that allocate beside torch's allocator, and errors that are none of it."""
    assert is_out_of_memory(error) == says
