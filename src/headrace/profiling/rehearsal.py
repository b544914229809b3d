"""Rehearsal: the times and bytes of one rank of a job, found without the other ranks.

This process plays one rank of p in a world of absent partners (:mod:`headrace.comm.fake_world`)
and runs the same two layers of the same methods as the profiler. In one of two ways:

    shapes   tensors have shapes and no contents, on no device and in no memory. Bytes are counted
             exactly; seconds are a roofline of the hardware asked for, operator by operator.
    device   real kernels and real memory on the device at hand; only the collectives are modelled.

Both overlap what the rank issues early with what it computes meanwhile
(:mod:`headrace.profiling.link_clock`). The result is a profile as the profiler measures it, so
everything that reads profiles reads this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headrace.comm.fake_world import fake_world
from headrace.comm.mesh import Groups
from headrace.native.counted import ByteCounter, DeviceBytes
from headrace.native.spans import clock_of
from headrace.profiling.branches import BranchTarget, ProfileOptions, targets, with_equal_levels
from headrace.profiling.constants import sharded_share, working_bytes
from headrace.profiling.link_clock import LinkClock, Modelled, Stalls, Timed
from headrace.profiling.probe import Probe, bytes_of, observe, seconds_of
from headrace.profiling.two_layers import TwoLayers
from headrace.spec.architecture import Architecture, parameter_count
from headrace.spec.cluster import Cluster
from headrace.spec.hardware import Hardware
from headrace.spec.known_methods import FACTS, automatic_methods
from headrace.spec.layer_plan import RECOMPUTE, Recompute
from headrace.spec.plan import Working
from headrace.spec.profile import Profile, ProfilePoint

__all__ = ["Rehearsal"]

_OPTIMIZER_TENSORS = 4
"""Master weight, gradient sum and two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A job of ``ranks`` on ``hardware``, of which this process plays ``rank``.

    ``sizes`` are the group sizes to play, in each of which the rank is the member that it would
    be; ``longest`` the longest pack in tokens. Working weights and activations are of ``dtype``,
    masters, gradient sums and optimizer state of at least fp32. ``device``: where kernels really
    run; None for shapes only.
    """

    architecture: Architecture
    hardware: Hardware
    ranks: int
    rank: int = 0
    sizes: tuple[int, ...]
    longest: int
    methods: tuple[str, ...] = automatic_methods()
    levels: tuple[Recompute, ...] = RECOMPUTE
    dtype: torch.dtype = torch.bfloat16
    device: str | None = None

    def profile(
        self,
        fingerprint: str,
        cluster: Cluster,
        progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    ) -> Profile:
        """Play all sweeps. torch.distributed must not be initialised.

        Raises SpecError when a group size is supported by none of the methods, or the hardware
        has no peak for the type.
        """
        started = time.perf_counter()
        a, options = self.architecture, self._options
        all_targets = [target for p in self.sizes for target in targets(a, p, options)]
        points: list[ProfilePoint] = []
        gathers: dict[int, tuple[float, float]] = {}
        with fake_world(self.rank, self.ranks) as groups, self._kind_of_tensors():
            two = TwoLayers(a, dtype=self.dtype, device=self.device or self._shapes_device)
            groups.prepare(self._wanted_groups(two, all_targets))
            for done, target in enumerate(all_targets):
                progress(f"rehearse cp{target.p} {target.text}", done, len(all_targets))
                lengths = self._lengths(target.p)
                own_points = [self._point(two, groups, target, tokens) for tokens in lengths]
                points += with_equal_levels(target, own_points, options)
            for p in self.sizes:
                if p > 1:
                    gathers[p] = self._gather(two, groups, p)
        progress("rehearse", len(all_targets), len(all_targets))
        return Profile(
            fingerprint=fingerprint,
            shape=a.shape,
            cluster=cluster,
            points=tuple(points),
            exchange_s=self._exchange(),
            state_bytes=self.state_bytes,
            working_bytes={p: self._working(p) for p in self.sizes},
            gather_s=gathers,
            links={p: self._link(p) for p in self.sizes if p > 1},
            element_bytes=self.dtype.itemsize,
            sharded_share=sharded_share(a, self.ranks, self.hardware.node_sizes(self.ranks)),
            feed_forwards={m.name: m.owner for m in FACTS.values() if m.owner != m.name},
            measured_in_s=time.perf_counter() - started,
        )

    @property
    def _options(self) -> ProfileOptions:
        """What to play, in the form that :func:`targets` takes."""
        return ProfileOptions(
            sizes=self.sizes, longest=self.longest, methods=self.methods, levels=self.levels
        )

    @property
    def _stored_element_bytes(self) -> int:
        """Bytes of an element of masters, gradient sums and moments."""
        return max(4, self.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """Bytes that a rank stores: its rows of masters, gradient sums and optimizer state."""
        elements = -(-parameter_count(self.architecture) // self.ranks)
        return _OPTIMIZER_TENSORS * self._stored_element_bytes * elements

    def _working(self, p: int) -> dict[Working, int]:
        """Bytes of working weights and gradients of a rank in groups of p, by how they are held."""
        return working_bytes(self.architecture, self.ranks, p, self.dtype)

    @property
    def _shapes_device(self) -> str:
        """The device of tensors that have shapes only, which decides the operators that run: a
        GPU's on ``meta``, a CPU's on fake tensors of ``cpu``."""
        return "cpu" if self.hardware.device.is_cpu else "meta"

    def _kind_of_tensors(self) -> AbstractContextManager[object]:
        """Within it, tensors on ``cpu`` are fake ones where a CPU is played by shapes; else nothing
        changes."""
        if self.device is not None or self._shapes_device == "meta":
            return nullcontext()
        return FakeTensorMode(allow_non_fake_inputs=True)

    def _clock(self) -> LinkClock:
        """A new clock: of real operators on the device, or of the hardware's roofline."""
        if self.device is not None:
            return Timed(self.hardware, self.device)
        return Modelled(self.hardware)

    def _members(self, p: int) -> tuple[int, ...]:
        """The ranks of this rank's group of p; the last p ranks for a rank that is left over."""
        first = min(self.rank // p * p, self.ranks - p)
        return tuple(range(first, first + p))

    def _wanted_groups(
        self, two: TwoLayers, all_targets: Iterable[BranchTarget]
    ) -> set[tuple[int, ...]]:
        """The sets of ranks within this rank's groups that the targets need."""
        return {
            group
            for target in all_targets
            for group in two.groups_of(target, self._members(target.p))
        }

    def _lengths(self, p: int) -> list[int]:
        """The tokens of three sequences to run on groups of p: enough to fit a square, a line and a
        constant."""
        longest = max(self.longest, 32 * p)
        return [max(2 * p, longest // divisor) for divisor in (16, 4, 1)]

    def _point(
        self, two: TwoLayers, groups: Groups, target: BranchTarget, tokens: int
    ) -> ProfilePoint:
        """The profile point of one target on one sequence of ``tokens`` tokens: measured on the
        device, or by the hardware's roofline where there is none."""
        two_layers = two.two  # the architecture, of two layers
        probe = two.probe(groups, self._members(target.p), target, (tokens,))
        if self.device is None:
            # One run gives both, as a clock that computes seconds is not slowed by counting.
            with self._clock() as clock:
                seconds, (kept, transient) = observe(probe, clock, ByteCounter())
        else:
            seconds = self._seconds(probe)
            # A CPU's allocator tells no peak, so the results of operators are counted there.
            kept, transient = bytes_of(probe, ByteCounter if self.device == "cpu" else DeviceBytes)
        return ProfilePoint(
            p=target.p,
            option=target.text,
            lengths=(tokens,),
            forward_s=seconds[0],
            backward_s=seconds[1],
            kept_bytes=kept,
            transient_bytes=transient,
            order=target.order(two_layers),
            fetched=target.fetched(two_layers),
        )

    def _seconds(self, probe: Probe) -> list[float]:
        """[forward, backward] seconds of a probe, each the least of three runs."""
        if self.device != "cpu":
            return self.alone_and_waiting(probe)
        return _least(lambda: self._under(self._clock(), probe))

    def alone_and_waiting(self, probe: Probe) -> list[float]:
        """[forward, backward] seconds on a device: operators timed without a clock that intercepts
        them (it would slow them down), plus waits for links from runs under such clocks."""
        device = self.device or "cpu"
        alone = _least(lambda: seconds_of(probe, clock_of(device)))
        intercepted = _least(lambda: self._under(Timed(self.hardware, device), probe))
        waits = _least(lambda: self._under(Stalls(self.hardware, device), probe))
        # How much intercepting slows operators down; links are slowed down alike for the waits.
        slower = max(1.0, (sum(intercepted) - sum(waits)) / max(sum(alone), 1e-9))
        waits = _least(lambda: self._under(Stalls(self.hardware, device, slower), probe))
        return [sum(both) for both in zip(alone, waits, strict=True)]

    @staticmethod
    def _under(clock: LinkClock, probe: Probe) -> list[float]:
        """[forward, backward] seconds of a probe by a clock that intercepts its operators."""
        with clock:
            return seconds_of(probe, clock)

    def _gather(self, two: TwoLayers, groups: Groups, p: int) -> tuple[float, float]:
        """Seconds that sharded weights add to one layer's forward (a gather) and backward (a gather
        and a reduce-scatter)."""
        shards = two.shards(groups, self._members(p))
        with self._clock() as clock:
            start_s = clock.now()
            wholes = [shard.rows().add_(0) for shard in shards]  # the sum waits for the gather
            gathered_s = clock.now()
            for shard, whole in zip(shards, wholes, strict=True):
                shard.add(whole)
            scattered_s = clock.now()
        return gathered_s - start_s, scattered_s - start_s

    def _link(self, p: int) -> tuple[float, float]:
        """(seconds to start, bytes per second) of the link that joins this rank's group of p."""
        link = self.hardware.link(self._members(p))
        return link.latency_s, link.bytes_per_s * link.attained

    def _exchange(self) -> dict[str, float]:
        """Seconds of pull and push of all weights, which cross to a node once, and of the update of
        a rank's rows, which reads and writes all that it stores."""
        device, weights = self.hardware.device, parameter_count(self.architecture)
        moved_s = self.hardware.gather_s(self.ranks, weights * self.dtype.itemsize)
        update_s = 2 * self.state_bytes / (device.memory_bytes_per_s * device.attained_memory)
        return {"pull_s": moved_s, "push_s": moved_s, "update_s": update_s}


def _least(measure: Callable[[], list[float]]) -> list[float]:
    """Call ``measure`` three times; of each number that it gives the least."""
    runs = [measure() for _ in range(3)]
    return [min(numbers) for numbers in zip(*runs, strict=True)]
