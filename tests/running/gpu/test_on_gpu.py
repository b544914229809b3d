"""What only a device can show; ``make gpu`` runs it, and nothing of it runs without one.

Each test uses the device in a process of its own, as CUDA does not survive the forks of others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

from headrace.comm.fake_world import fake_world
from headrace.comm.gpus import count_gpus
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.native import checkpoint
from headrace.native.checkpoint import BackgroundWriter
from headrace.native.executor import Executor
from headrace.native.shard_files import StoredShard
from headrace.native.storage import Storage
from headrace.ops.fused import FUSED
from headrace.profiling.branches import BranchTarget
from headrace.profiling.two_layers import TwoLayers
from headrace.spec import Architecture, LayerPlan, Lengths, MicroBatch, Pipeline, Plan, Scheme
from headrace.spec.known_methods import FACTS, automatic_methods
from headrace.spec.layer_plan import BRANCHES
from jobs import Job
from running.ops.test_fused import ARGUMENTS, call

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not count_gpus(), reason="needs a CUDA device")]
MODEL = Architecture(layers=2, hidden=256, heads=8, kv_heads=8, ffn=512, vocabulary=307)
LENGTHS = (130, 1, 67, 300)
LIMIT_S = 100
"""Seconds of a job: it compiles what it runs, which takes ten a function on a slow machine."""

RunJob = Callable[[Callable[[Job], int]], Job]


def _compiled(name: str) -> int:
    from headrace.ops import triton_kernels

    fused = FUSED[name]
    for dtype, room in ((torch.float32, 2e-4), (torch.bfloat16, 0.03)):
        wanted = call(fused.function, name, 37, torch.float64)

        def there(*args: Any) -> Any:
            moved = tree_map_only(torch.Tensor, lambda x: x.cuda(), args)
            made = fused(*moved)
            return moved[0] if made is None else made

        for one, exact in zip(call(there, name, 37, dtype), wanted, strict=True):
            assert one.is_cuda
            scale = float(exact.abs().max())
            assert float((one.double().cpu() - exact).abs().max()) <= room * max(scale, 1.0)
    written = name in triton_kernels.__all__
    assert (fused.written is not None) is written, "another kernel ran"
    assert fused._compiled is not fused.function, "plain operators ran"
    return 0


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_compiled_for_a_device(name: str, run_job: RunJob) -> None:
    """Catches a kernel that gives something else than plain operators, or that is none."""
    job = run_job(lambda job: _compiled(name))
    assert job.wait(LIMIT_S) == 0, job.err


def on_its_device(world: World) -> int:
    """Of a module, as what is sent to new processes has to be."""
    assert world.device == "cuda:0"
    return int(torch.ones(3, device="cuda").sum().item() != 3)


def _after_cuda(asked: Callable[[], object]) -> int:
    asked()
    return start(on_its_device, ranks=1, device="cuda")


def _autograd() -> None:
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.mark.parametrize("asked", [torch.cuda.is_available, torch.cuda.init, _autograd])
def test_ranks_of_a_process_that_has_begun_cuda(
    asked: Callable[[], object], run_job: RunJob
) -> None:
    """Catches ranks that are forked from a process whose CUDA they cannot have."""
    job = run_job(lambda job: _after_cuda(asked))
    assert job.wait(LIMIT_S) == 0, job.err


def anew(world: World) -> int:
    """Communicators of a device that are aborted, and made anew."""
    groups = Groups(connections=world.rerendezvous.connections, device=world.device, backend="nccl")
    for _ in range(3):
        x = torch.full((3,), 2.0, device="cuda")
        torch.distributed.all_reduce(x, group=groups.world)
        torch.cuda._sleep(int(1e9))  # something stands on the device
        world.rerendezvous.meet_anew(groups)
        assert x.tolist() == [2.0] * 3
    return 0


def test_communicators_are_aborted_and_made_anew(run_job: RunJob) -> None:
    """Catches a process that torch's watchdog ends when a communicator is aborted, and worlds that
    cannot be left."""
    job = run_job(lambda job: start(anew, ranks=1, device="cuda", timeout_s=60))
    assert job.wait(LIMIT_S) == 0, job.err


def _plan() -> Plan:
    count = len(LENGTHS)
    return Plan(
        lengths=Lengths.of(LENGTHS),
        devices=1,
        pipelines=(Pipeline(scheme=Scheme(), ranks=(0,)),),
        micro_batches=tuple(
            MicroBatch(pipeline=0, sequences=some, layers=LayerPlan.parse(f"{MODEL.layers}*local"))
            for some in (tuple(range(count - 1)), (count - 1,))
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def _step(device: str, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    documents = tuple(rng.integers(MODEL.vocabulary, size=n).astype(np.int32) for n in LENGTHS)
    groups = Groups(device=device)
    storage = Storage(MODEL, groups, seed=1, device=device, working_dtype=dtype)
    executor = Executor(storage, groups, seed=1, device=device)
    result = executor.run(_plan(), documents, step=0, lr=0.0)
    return result, {name: x.cpu() for name, x in storage.sums.items()}


def _compared(world: World) -> int:
    for dtype, room in ((torch.float32, 2e-4), (torch.bfloat16, 0.05)):
        here, own = _step("cpu", torch.float32)
        there, found = _step(world.device, dtype)
        assert abs(here.loss - there.loss) <= room * here.loss
        assert abs(here.gradient_norm - there.gradient_norm) <= room * here.gradient_norm
        for name, exact in own.items():
            error = (found[name] - exact).norm() / exact.norm().clamp_min(1e-6)
            assert float(error) <= 2 * room, name
        assert all(row.seconds >= 0 for row in there.rows)
        busy = sum(row.seconds for row in there.rows if row.kind in ("forward", "backward"))
        assert busy > 0
    return 0


def test_a_step_is_that_of_a_cpu(run_job: RunJob) -> None:
    """Catches a device that computes another step, and clocks that stand still."""
    job = run_job(lambda job: start(_compared, ranks=1, device="cuda"))
    assert job.wait(LIMIT_S) == 0, job.err


def _repeated(world: World) -> int:
    runs = [_step(world.device, torch.bfloat16) for _ in range(3)]
    for result, sums in runs[1:]:
        assert (result.loss, result.gradient_norm) == (runs[0][0].loss, runs[0][0].gradient_norm)
        assert all(torch.equal(x, runs[0][1][name]) for name, x in sums.items())
    return 0


def test_deterministic_steps_have_the_same_bits(run_job: RunJob) -> None:
    """Catches kernels that add in the order of arrival."""
    job = run_job(lambda job: start(_repeated, ranks=1, device="cuda", deterministic=True))
    assert job.wait(LIMIT_S) == 0, job.err


def _quiet(method: str, ranks: int) -> int:
    with fake_world(0, ranks) as groups:
        everyone = tuple(range(ranks))
        two = TwoLayers(MODEL, dtype=torch.bfloat16, device="cuda")
        for part in BRANCHES:
            target = BranchTarget(p=ranks, part=part, method=method, level="none")
            groups.prepare(two.groups_of(target, everyone))
            probe = two.probe(groups, everyone, target, (512, 300, 212))
            for mode in ("default", "error"):  # what is made once is made the first time
                torch.cuda.set_sync_debug_mode(mode)
                probe.forward(lambda: None)
                probe.backward(lambda: None)
            torch.cuda.set_sync_debug_mode("default")
    return 0


@pytest.mark.parametrize("method", automatic_methods(gpu=True))
def test_a_layer_does_not_wait_for_the_device(method: str, run_job: RunJob) -> None:
    """Catches a host that stands still in a layer: copies of numbers, and looks at values."""
    ranks = 1 if method == "local" else 8
    assert FACTS[method].supports(MODEL, ranks) is None
    job = run_job(lambda job: _quiet(method, ranks))
    assert job.wait(LIMIT_S) == 0, job.err


def _written_behind(folder: str) -> int:
    root, writer = Path(folder), BackgroundWriter()
    tensor = torch.arange(3_000_000, device="cuda").view(1000, 3000).float()
    wanted = tensor.cpu().clone()
    shard = StoredShard(name="w", first_row=0, tensor=tensor, shape=tuple(tensor.shape))
    for step in (1, 2):
        writer.begin(root, step, [shard], {}, rank=0, gather=lambda own: [own], keep=2)
        tensor.mul_(2)  # the next step's update
        assert all(buffer.is_pinned() for buffer in writer._buffers.values())
    writer.finish(lambda own: [own])
    for step in (1, 2):
        found = checkpoint.read_whole(root / f"step-{step:06d}", "w")
        assert torch.equal(found, wanted * step)
    return 0


def test_checkpoints_hold_what_was_when_they_began(run_job: RunJob, tmp_path: Path) -> None:
    """Catches a copy from the device that is not done when the next step changes what it copies,
    and host memory that the device cannot reach."""
    job = run_job(lambda job: _written_behind(str(tmp_path)))
    assert job.wait(LIMIT_S) == 0, job.err
