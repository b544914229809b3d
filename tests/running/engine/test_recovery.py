"""A rank runs out of memory in the middle of a step: all go on, and nothing is written twice."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.comm import waiting
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.comm.rerendezvous import Rerendezvous
from headrace.comm.sockets import Connections
from headrace.comm.watcher import STOPPED
from headrace.engine.native_runner import NativeRunner
from headrace.engine.recovery import LeaveWorld, Recovery
from headrace.engine.step_engine import Engine
from headrace.errors import InfeasiblePlan
from headrace.models.transformer import Transformer
from headrace.native.executor import Executor
from headrace.native.machine import is_out_of_memory
from headrace.native.optimizers import AdamW, Schedule
from headrace.native.spans import HostClock
from headrace.native.storage import Storage
from headrace.spec import Architecture, Lengths, Plan
from headrace.spec.step import Exhausted, Planned, Step
from jobs import Job
from ranks import run_ranks
from references.aborting import Kernel, Kernels, register
from spread import whole
from strategies import laid_out

RunJob = Callable[[Callable[[Job], int]], Job]
LLAMA = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
LENGTHS = (37, 3, 20, 11, 1, 29, 8, 2, 17)
FIRST, SECOND = "1*pp2 + 1*tp2", "2*cp2"
# What each of the ranks 0 to 3 of the first strategy can be in.
PLANTED = {
    "pull": (2, "P1"),
    "send": (0, "Sa0"),
    "exchange": (1, "X("),
    "receive": (1, "Ra0"),
    "forward": (1, "1F"),
    "tensor forward": (3, "0F"),
    "backward": (0, "0B"),
    "push": (1, "G1"),
    "last backward": (2, "{"),
    "update": (3, "U"),
}


@dataclass
class Batch:
    lengths: Lengths
    tokens: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray | None, ...] = ()
    epoch: int = 0
    state_after: dict[str, Any] = field(default_factory=dict)


@dataclass
class Planner:
    """Plans one strategy, and another one after a failure, up to so many times."""

    most: int
    told: list[str] = field(default_factory=list)
    first: ClassVar[str] = FIRST

    def _planned(self, lengths: Lengths, text: str) -> Planned:
        plan = laid_out(text, LLAMA, lengths.tokens, 4)
        return Planned(plan=plan, predicted=None, peak_bytes=(0,) * 4, planning_s=0.0)

    def plan(self, lengths: Lengths) -> Planned:
        return self._planned(lengths, self.first)

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        self.told.append(str(exhausted))
        if len(self.told) > self.most:
            raise InfeasiblePlan("memory", got="too little")
        return self._planned(lengths, SECOND)

    def observe(self, predicted_s: float, measured_s: float, *, retries: int = 0) -> None:
        pass

    def learn(self, step: Step) -> tuple[str, ...]:
        return ()

    def compared(self, step: Step) -> Step:
        return step


def _batches(count: int) -> Iterator[Batch]:
    for number in range(count):
        rng = np.random.default_rng(number)
        documents = tuple(rng.integers(61, size=n).astype(np.int32) for n in LENGTHS)
        yield Batch(Lengths(tokens=LENGTHS), documents)


def _train(
    world: World,
    faults: dict[int, tuple[int, str]],
    always: bool = False,
    node_sizes: tuple[int, ...] | None = None,
    backend: str = "gloo",
    checked: bool = False,
) -> Any:
    """Steps 0, 1, ...; in step n the rank ``faults[n][0]`` runs out of memory once, where its
    action has ``faults[n][1]`` in it."""
    rerendezvous = world.rerendezvous if backend == "gloo" else _met_over(backend, world)
    groups = Groups(connections=rerendezvous.connections, node_sizes=node_sizes)
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
        storage,
        groups,
        seed=3,
        entered=entered if faults[0][1] else lambda action: None,
        checked=checked,
    )
    seen: list[Any] = []

    engine = _engine(executor, planned, rerendezvous, steps)
    batches = _batches(steps)
    for number in range(steps):
        step = engine.next_step(number, lambda: next(batches))
        step.run()
        at["step"] += 1
        seen.append((step.loss, step.retries, str(step.plan.strategy)))
    weights = {n: m.numpy().tolist() for n, m in storage.masters.items()}
    return {"seen": seen, "told": planned.told, "weights": weights, "updates": storage.updates}


def _engine(executor: Executor, planner: Any, rerendezvous: Rerendezvous, steps: int) -> Engine:
    """An engine whose ranks leave their world when memory runs out."""
    leave = LeaveWorld(
        rerendezvous=rerendezvous,
        groups=executor.groups,
        recoverable=lambda: not executor.written,
        prepared=lambda: executor.prepared,
    )
    return Engine(
        runner=NativeRunner(executor=executor, schedule=Schedule(lr=0.01, steps=steps)),
        planner=planner,
        recovery=Recovery(way=leave, groups=executor.groups),
        groups=executor.groups,
        device="cpu",
    )


def _met_over(backend: str, world: World) -> Rerendezvous:
    """The world anew, over ``kernels``; where they are ``stuck`` rank 1 cannot abort its own."""
    register()
    if backend == "stuck" and world.rank == 1:
        Kernels.abort = lambda group: time.sleep(60)  # type: ignore[method-assign]
    backend = "kernels"
    dist.destroy_process_group()
    found = Rerendezvous(
        store=dist.PrefixStore(backend, world.rerendezvous._store),
        rank=world.rank,
        ranks=world.ranks,
        timeout_s=world.timeout_s,
        watcher=world.watcher,
        backend=backend,
        store_port=world.rerendezvous.connections._spared,
    )
    found.meet()
    return found


def _main(
    folder: Path,
    faults: dict[int, tuple[int, str]],
    always: bool = False,
    node_sizes: tuple[int, ...] | None = None,
    backend: str = "gloo",
    planted: Callable[[World], None] = lambda world: None,
    checked: bool = False,
) -> Callable[[World], int]:
    def main(world: World) -> int:
        planted(world)
        found = _train(world, faults, always, node_sizes, backend, checked)
        (folder / f"rank{world.rank}").write_text(json.dumps(found))
        return 0

    return main


def _found(folder: Path) -> list[Any]:
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(4)]


@pytest.mark.parametrize(
    ("node_sizes", "backend"),
    [whole(None, "gloo"), ((2, 2), "gloo"), whole(None, "kernels"), whole((3, 1), "kernels")],
)
def test_a_step_is_taken_again_wherever_memory_runs_out(
    run_job: RunJob, tmp_path: Path, node_sizes: tuple[int, ...] | None, backend: str
) -> None:
    """Would catch ranks left waiting in a collective or a message of the step that failed, or for
    a device that does; a rank that plans by itself, gradients of the failed try that stay in the
    sums, or what aborted transfers left; an update taken twice or not by all."""
    faults = dict(enumerate(PLANTED.values()))
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    main = _main(tmp_path / "with", faults, node_sizes=node_sizes, backend=backend)
    job = run_job(lambda job: start(main, ranks=4, timeout_s=30))
    assert job.wait(60) == 0, job.err
    none = dict.fromkeys(faults, (0, ""))
    main = _main(tmp_path / "without", none, node_sizes=node_sizes)
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


def _once_out_of_memory(cls: type, name: str, of: Callable[..., bool]) -> None:
    """``cls.name`` runs out of memory the first time that ``of`` its arguments holds."""
    real, done = getattr(cls, name), list[int]()

    def made(self: Any, *args: Any, **named: Any) -> Any:
        if not done and of(*args):
            done.append(1)
            raise torch.OutOfMemoryError("planted")
        return real(self, *args, **named)

    setattr(cls, name, made)


def _while_one_is_late(world: World) -> None:
    """Rank 0 has no memory for working weights; another comes late to the making of its group."""
    Planner.first = "2*tp2"  # nothing else is made by all, for which rank 0 would wait
    _once_out_of_memory(Storage, "working", lambda plan: world.rank == 0)
    real, late = Groups._make, [1.5]

    def make(self: Groups, ranks: Any) -> Any:
        if world.rank == 2 and tuple(ranks) == (2, 3) and late:
            time.sleep(late.pop())
        return real(self, ranks)

    Groups._make = make  # type: ignore[method-assign]


def _with_nan(world: World) -> None:
    """Rank 3 runs out of memory before the last collective of a layer: the others' is aborted."""

    def wait(self: Kernel, timeout: Any = None) -> bool:
        while not self._ended.wait(0.002):
            if self._group.aborted.is_set():
                for x in self._results:
                    x.fill_(float("nan") if x.is_floating_point() else -10)
                break
        return True

    Kernel.wait = wait  # type: ignore[method-assign]
    real, within, posts = Transformer.layer, list[int](), list[str]()

    def layer(self: Transformer, x: Any, index: int, *args: Any, **named: Any) -> Any:
        within[:] = [1] if index == 1 else []
        try:
            return real(self, x, index, *args, **named)
        finally:
            within.clear()

    def last(name: str, args: Any) -> bool:
        posts.extend([name] if within else [])
        return world.rank == 3 and len(posts) == 4 and bool(within)

    Transformer.layer = layer  # type: ignore[method-assign]
    _once_out_of_memory(Kernels, "_post", last)


@pytest.mark.parametrize(
    ("planted", "backend", "checked"),
    [
        (_while_one_is_late, "gloo", False),
        (_while_one_is_late, "kernels", False),
        (_with_nan, "kernels", True),
    ],
)
def test_what_else_happens_meanwhile(
    planted: Callable[[World], None], backend: str, checked: bool, run_job: RunJob, tmp_path: Path
) -> None:
    """Catches ranks that are freed while others still make a group with them, and errors of what
    aborted transfers left that are taken for causes."""
    main = _main(tmp_path, {0: (0, "")}, backend=backend, planted=planted, checked=checked)
    job = run_job(lambda job: start(main, ranks=4, timeout_s=12))
    assert job.wait(10) == 0, job.err
    assert [rank["seen"][0][1] for rank in _found(tmp_path)] == [1] * 4


def _while_groups_are_made(world: World) -> None:
    _once_out_of_memory(
        Groups, "_open", lambda group: world.rank == 2 and dist.get_world_size(group) == 2
    )


@pytest.mark.parametrize("backend", ["gloo", "kernels"])
def test_memory_runs_out_while_groups_are_made(
    backend: str, run_job: RunJob, tmp_path: Path
) -> None:
    """Catches ranks that meet anew while others stand in the making of a group, from which nobody
    frees them."""
    main = _main(tmp_path, {0: (0, "")}, backend=backend, planted=_while_groups_are_made)
    job = run_job(lambda job: start(main, ranks=4, timeout_s=60))
    assert job.wait(10) == 1
    assert any("rank 2| torch.OutOfMemoryError: planted" in line for line in job.err.splitlines())
    assert job.left_over() == []


def test_what_cannot_be_aborted_ends_the_run_by_name(run_job: RunJob, tmp_path: Path) -> None:
    """Catches a run that waits for ever for a communicator that was made anew by nobody."""
    main = _main(tmp_path, {0: (2, "0F")}, backend="stuck")
    job = run_job(lambda job: start(main, ranks=4, timeout_s=4))
    assert job.wait(30) == STOPPED
    (found,) = [line for line in job.said if "no progress" in line]
    # whichever rank's limit came first, as all had published it then: by a beat less
    waited_s = dict(re.findall(r"rank (\d) in meeting anew for ([\d.]+) s", found))
    assert waited_s.keys() >= {"0", "2", "3"}
    assert max(map(float, waited_s.values())) > 3
    assert "rank 1 in " in found
    assert job.left_over() == []


def _once(world: World) -> int:
    groups = Groups(connections=world.rerendezvous.connections)
    storage = Storage(LLAMA, groups, seed=3)

    def entered(action: str) -> None:
        if world.rank == 1 and action == "1B0[1]":
            raise ValueError("no memory's fault")

    executor = Executor(storage, groups, seed=3, entered=entered)
    engine = _engine(executor, Planner(most=1), world.rerendezvous, 1)
    batches = _batches(1)
    engine.next_step(0, lambda: next(batches)).run()
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


class FreedWhileReached(HostClock):
    """A clock on which this rank is freed while it waits for its device."""

    def past(self, mark: float) -> bool:
        return False

    def reach(self, mark: float) -> None:
        waiting.free()


def _freed(where: str) -> tuple[str, bool, int]:
    groups = Groups()
    storage = Storage(LLAMA, groups, seed=3)

    def entered(action: str) -> None:
        if action == where:
            waiting.free()

    clock = HostClock() if where else FreedWhileReached()
    executor = Executor(storage, groups, seed=3, entered=entered, clock=clock)
    batch = next(_batches(1))
    plan = laid_out("1*cp1", LLAMA, LENGTHS, 1)
    try:
        executor.run(plan, batch.tokens, step=0, lr=0.01)
    except waiting.Freed:
        return executor.action, executor.written, storage.updates
    return "", executor.written, storage.updates


@pytest.mark.parametrize("where", ["P0", "0F0[0]", "U", ""])
def test_what_was_freed_writes_nothing(where: str) -> None:
    """Catches an update with what aborted transfers left in the sums: they end without an error."""
    (found,) = run_ranks(1, _freed, where)
    assert found == (where or "U", False, 0)


class Group:
    """A group that is aborted when another is being, as communicators of one device are."""

    def __init__(self, both: threading.Barrier) -> None:
        self.both = both
        self.aborted = 0

    def abort(self) -> None:
        self.both.wait(timeout=10)
        self.aborted += 1
        raise RuntimeError("it had failed by itself")


def test_groups_are_aborted_at_once() -> None:
    """Catches an abort that waits for a device on which kernels of the next group stand, and a
    watcher that does not beat meanwhile."""
    both, connections = threading.Barrier(3), Connections()
    groups = [Group(both), Group(both)]
    for group in groups:
        connections.keep(group)
    assert connections.cut() == 0, "did not wait"
    assert connections.cut() == 0, "each once"
    both.wait(timeout=10)
    connections.settle()
    assert [group.aborted for group in groups] == [1, 1]


class Work:
    """Of a device: its wait has no limit there."""

    def wait(self, *limit: object) -> None:
        assert not limit

    def is_completed(self) -> bool:
        return False


def _unsliced() -> bool:
    waiting.begin()
    waiting.Transfer(Work(), None, torch.empty(1, device="meta")).wait()  # type: ignore[arg-type]
    return True


def test_a_device_is_not_waited_for_in_slices() -> None:
    """Catches a host that waits for a device where it need not, or with a limit that NCCL takes as
    one of its own."""
    assert run_ranks(1, _unsliced) == [True]
