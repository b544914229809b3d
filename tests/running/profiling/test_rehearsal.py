"""Rehearsal: the bytes of a real job to the byte, and seconds that follow from the hardware."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.comm.collectives import issue_all_to_all
from headrace.comm.fake_world import fake_world
from headrace.comm.mesh import Groups
from headrace.costs.sources.measured import costs_from_profile
from headrace.errors import SpecError
from headrace.native.counted import ByteCounter, TrafficCounter
from headrace.ops.flops import flop_counter
from headrace.ops.linear import add_product
from headrace.profiling.branches import BranchTarget, ProfileOptions, targets
from headrace.profiling.link_clock import Modelled, Stalls, Timed
from headrace.profiling.probe import bytes_of
from headrace.profiling.rehearsal import Rehearsal
from headrace.profiling.two_layers import TwoLayers
from headrace.spec import Architecture, Cluster
from headrace.spec.architecture import parameter_count
from headrace.spec.hardware import Hardware
from headrace.spec.profile import Profile
from ranks import run_ranks
from spread import whole

MODEL = Architecture(layers=3, hidden=64, heads=4, kv_heads=4, ffn=192, vocabulary=100)
TOKENS = 512
METHODS = ("ulysses_z", "megatron_cz", "megatron_cz_gather", "megatron_ts", "metp")
H100 = Hardware.parse("h100")


def _targets(p: int) -> list[BranchTarget]:
    options = ProfileOptions(sizes=(p,), longest=TOKENS, methods=METHODS)
    return targets(MODEL, p, options)


def _counted(two: TwoLayers, groups: Groups, times: int) -> dict[str, list[int]]:
    everyone = tuple(range(groups.ranks))
    found = _targets(groups.ranks)
    groups.prepare(g for target in found for g in two.groups_of(target, everyone))
    counts = {}
    for target in found:
        probe = two.probe(groups, everyone, target, (TOKENS,))
        counts[target.text] = bytes_of(probe, lambda: ByteCounter(settle_s=0.003), times=times)
    return counts


def _really() -> dict[str, list[int]]:
    # gloo's threads let go of buffers late: on a busy machine often, and seldom all the times.
    return _counted(TwoLayers(MODEL), Groups(), times=8)


def _rehearsed(rank: int, ranks: int) -> dict[str, list[int]]:
    """A rank of its own process plays rank ``rank``."""
    dist.destroy_process_group()
    with fake_world(rank, ranks) as groups:
        return _counted(TwoLayers(MODEL), groups, times=1)


def _profile(**changes: Any) -> dict[str, Any]:
    """A rehearsal in shapes only, in a process of its own."""
    dist.destroy_process_group()
    rehearsal = Rehearsal(
        architecture=MODEL, hardware=H100, ranks=4, sizes=(4,), longest=1024, methods=METHODS
    )
    cluster = Cluster(devices=4, memory_bytes=2**30, device="h100")
    return replace(rehearsal, **changes).profile("rehearsed", cluster).to_json()


@pytest.mark.parametrize("ranks", [2, whole(4)])
def test_bytes_are_those_of_the_real_ranks(ranks: int) -> None:
    """Would catch collectives whose buffers a fake group leaves out, a rank that plays another's
    part, and probes that the profiler and the rehearsal build differently."""
    real = run_ranks(ranks, _really)
    for rank in (0, ranks - 1):
        (played,) = run_ranks(1, _rehearsed, rank, ranks)
        assert played.keys() == real[rank].keys()
        for text, (kept, passing) in played.items():
            assert kept == pytest.approx(real[rank][text][0], rel=0.01), text
            assert passing == pytest.approx(real[rank][text][1], rel=0.03), text


@pytest.fixture(scope="module")
def shapes() -> Profile:
    (found,) = run_ranks(1, _profile, timeout_s=100)
    return Profile.from_json(found)


@pytest.mark.slow
def test_shapes_hold_half_the_bytes_of_twice_the_width(shapes: Profile) -> None:
    """Would catch bytes that do not follow the type, or that grow with anything but the tokens."""
    few = ("megatron_cz", "megatron_ts")
    (wide,) = run_ranks(1, lambda: _profile(dtype=torch.float32, methods=few), timeout_s=100)
    kept = {(p.option, p.lengths): p.kept_bytes for p in Profile.from_json(wide).points}
    for point in shapes.points:
        if point.lengths[0] == 1024 and (point.option, point.lengths) in kept:
            assert kept[point.option, point.lengths] == pytest.approx(
                2 * (point.kept_bytes or 0), rel=0.05
            ), point.option


def test_a_profile_of_shapes_is_a_profile(shapes: Profile) -> None:
    """Would catch a rehearsal that planners cannot read, seconds of zero, and stored bytes that
    are not the optimizer's four fp32 tensors."""
    costs = costs_from_profile(shapes)
    methods = {text.partition("+")[0].partition("/")[0] for text in costs.options[4]}
    assert methods == set(METHODS)
    assert all(p.forward_s > 0 and p.backward_s > 0 for p in shapes.points)
    assert shapes.state_bytes == 16 * -(-parameter_count(MODEL) // 4)
    held = shapes.working_bytes[4]
    assert held["replicated"] == 6 * parameter_count(MODEL)
    assert held["replicated"] > held["sharded"] > held["replicated"] / 4


@pytest.mark.slow
def test_a_device_twice_as_slow_takes_longer(shapes: Profile) -> None:
    """Would catch a clock that does not look at the hardware."""
    device = replace(
        H100.device,
        launch_s=2 * H100.device.launch_s,
        memory_bytes_per_s=H100.device.memory_bytes_per_s / 2,
        flops_per_s={k: v / 2 for k, v in H100.device.flops_per_s.items()},
    )
    link = replace(
        H100.inside, latency_s=2 * H100.inside.latency_s, bytes_per_s=H100.inside.bytes_per_s / 2
    )
    slow = replace(H100, device=device, inside=link)
    few = ("megatron_cz", "ulysses_z")
    (found,) = run_ranks(1, lambda: _profile(hardware=slow, methods=few), timeout_s=100)
    fast = {(point.option, point.lengths): point for point in shapes.points}
    for half in Profile.from_json(found).points:
        once = fast[half.option, half.lengths]
        assert half.forward_s == pytest.approx(2 * once.forward_s, rel=1e-6), half.option
        assert half.backward_s == pytest.approx(2 * once.backward_s, rel=1e-6), half.option


def _clocked() -> dict[str, float]:
    """Hand-made traffic and products under a modelled clock, in seconds."""
    dist.destroy_process_group()
    link = replace(H100.inside, latency_s=1.0, bytes_per_s=1e3, attained=1.0)
    device = replace(
        H100.device,
        launch_s=0.0,
        memory_bytes_per_s=1e30,
        attained_matmul=0.5,
        flops_per_s={"float32": 1e3},
    )
    found = {}
    with fake_world(0, 2) as groups:
        world = groups.world
        x, w = torch.ones(10, 10), torch.ones(10, 10)

        def send() -> Any:
            return issue_all_to_all(x, [5, 5], [5, 5], world)  # 200 bytes: 1.2 s

        with Modelled(replace(H100, device=device, inside=link)) as clock:
            send().wait()
            found["unused"] = clock.now()
            send().wait().view(100)
            found["viewed"] = clock.now()
            y = send().wait() + 1
            found["used"] = clock.now()
            z = send()
            w @ w  # 2000 FLOPs at 500 / s: 4 s
            found["overlapped"] = clock.now()
            z.wait().add_(y)
            found["then used"] = clock.now()
            a, b = send(), send()
            a.wait().add_(1)
            found["first of two"] = clock.now()
            b.wait().add_(1)
            found["second of two"] = clock.now()
            found["comm"], found["stalled"] = clock.comm_s, clock.stalled_s
    return found


def test_what_travels_is_waited_for_where_it_is_used() -> None:
    """Would catch communication that costs nothing, that never overlaps, two messages at once on
    one link, and a look at a buffer that counts as its use."""
    (t,) = run_ranks(1, _clocked)
    assert t["unused"] == t["viewed"] == 0
    assert t["used"] == pytest.approx(3.6), "three messages in turn"
    assert t["overlapped"] == pytest.approx(7.6)
    assert t["then used"] == pytest.approx(7.6), "arrived meanwhile"
    assert t["first of two"] == pytest.approx(8.8)
    assert t["second of two"] == pytest.approx(10.0)
    assert t["comm"] == pytest.approx(6 * 1.2)
    assert t["stalled"] == pytest.approx(3.6 + 2.4)


def _modelled_flops() -> tuple[float, float]:
    """FLOPs of all sweeps by the clock (nothing else takes time) and by torch's counter."""
    dist.destroy_process_group()
    device = replace(
        H100.device,
        launch_s=0.0,
        memory_bytes_per_s=1e30,
        attained_matmul=1.0,
        attained_attention=1.0,
        flops_per_s={"float32": 1.0},
    )
    link = replace(H100.inside, latency_s=0.0, bytes_per_s=1e30)
    with fake_world(1, 2) as groups:
        two, everyone = TwoLayers(MODEL), (0, 1)
        total, counted = 0.0, 0
        for target in _targets(2):
            groups.prepare(two.groups_of(target, everyone))
            probe = two.probe(groups, everyone, target, (TOKENS,))
            clock = Modelled(replace(H100, device=device, inside=link))
            with flop_counter() as counter, clock:
                probe.forward(lambda: None)
                probe.backward(lambda: None)
            total, counted = total + clock.now(), counted + counter.get_total_flops()
    return total, counted


def test_seconds_are_the_flops_of_the_counter() -> None:
    """Would catch products that cost nothing and attention that is counted whole when causal."""
    ((seconds, flops),) = run_ranks(1, _modelled_flops)
    assert seconds == pytest.approx(flops, rel=1e-6)


def _timed() -> tuple[float, float, int]:
    dist.destroy_process_group()
    link = replace(H100.inside, latency_s=0.5, bytes_per_s=1e30)
    with (
        fake_world(0, 2) as groups,
        TrafficCounter() as traffic,
        Timed(replace(H100, inside=link)) as clock,
    ):
        start = clock.now()
        issue_all_to_all(torch.ones(4), [2, 2], [2, 2], groups.world).wait().add_(1)
        return clock.now() - start, clock.stalled_s, traffic.sent_bytes


def test_real_work_and_modelled_messages_add_up() -> None:
    """Would catch a clock that sleeps for messages, or forgets them."""
    ((seconds, stalled, sent),) = run_ranks(1, _timed)
    assert 0.4 < stalled <= 0.5 <= seconds < 0.9
    assert sent == 8


def _no_peak() -> str:
    try:
        _profile(
            dtype=torch.float16,
            hardware=replace(H100, device=replace(H100.device, flops_per_s={"bfloat16": 1e12})),
        )
    except SpecError as error:
        return str(error)
    return ""


def test_a_type_without_a_peak_is_named() -> None:
    """Would catch seconds of another type."""
    assert run_ranks(1, _no_peak) == [
        "products of float16 on h100: got no peak known, wanted one of bfloat16"
    ]


def _kernels(hardware: str) -> set[str]:
    """Operators of a layer that is rehearsed for some hardware."""
    dist.destroy_process_group()
    rehearsal = Rehearsal(
        architecture=MODEL,
        hardware=Hardware.parse(hardware),
        ranks=2,
        sizes=(2,),
        longest=64,
        methods=("ulysses_z",),
        levels=("none",),
    )
    with Operators() as seen:
        rehearsal.profile("rehearsed", Cluster(devices=2, memory_bytes=2**30, device=hardware))
    return seen.names


class Operators(TorchDispatchMode):
    """The names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_gpu_is_rehearsed_with_its_own_kernels() -> None:
    """Catches bytes and seconds of a CPU's kernels where a GPU has others."""
    (gpu,), (cpu,) = run_ranks(1, _kernels, "h100"), run_ranks(1, _kernels, "cpu")
    assert {"_flash_attention_forward", "_flash_attention_backward", "swiglu"} <= gpu
    assert not any("for_cpu" in name for name in gpu)
    assert "swiglu" not in cpu


def _product_s(total: torch.dtype) -> float:
    dist.destroy_process_group()
    left, right = (torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    with fake_world(0, 1), Modelled(H100) as clock:
        add_product(torch.empty(4096, 4096, dtype=total, device="meta"), left, right)
        return clock.now()


def test_a_sum_may_be_wider_than_its_factors() -> None:
    """Catches products of half types that are taken to run at the rate of single precision."""
    ((wide_s,), (half_s,)) = (run_ranks(1, _product_s, d) for d in (torch.float32, torch.bfloat16))
    assert half_s == pytest.approx(wide_s, rel=0.5)


def _waits(slower: float) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a layer's attention on one of two ranks over a link that takes much longer than
    what is computed: as a GPU's would be found, in one run of all, and of waiting alone. What is
    computed counts in CPU time: others on the machine do not count."""
    dist.destroy_process_group()
    slow = replace(H100.inside, latency_s=0.05)
    rehearsal = Rehearsal(
        architecture=MODEL,
        hardware=replace(H100, inside=slow),
        ranks=2,
        sizes=(2,),
        longest=64,
        device="cpu",
    )
    target = BranchTarget(p=2, part="attention", method="ulysses_z", level="none")
    cpu_time = patch("time.perf_counter", time.process_time)
    with fake_world(0, 2) as groups, cpu_time:
        two = TwoLayers(MODEL)
        groups.prepare(two.groups_of(target, (0, 1)))
        probe = two.probe(groups, (0, 1), target, (64,))
        return (
            rehearsal.alone_and_waiting(probe),
            rehearsal._seconds(probe),
            rehearsal._under(Stalls(rehearsal.hardware, "cpu", slower), probe),
        )


def test_links_are_added_to_what_runs_alone() -> None:
    """Catches waits left out, counted twice, or scaled with the time that looking takes."""
    for slower in (1.0, 5.0):
        ((found, together, waits),) = run_ranks(1, _waits, slower)
        assert found == pytest.approx(together, rel=0.15)
        assert waits == pytest.approx([0.1, 0.1], rel=0.15)  # there and back, each way
