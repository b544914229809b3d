"""The profiler: what the branches of a native model's layers cost, from two of them.

For each group size, method and recompute level it runs packs of growing length through one branch
of two layers of the model, as the executor would, and takes the second layer's forward and backward
(the first warms up). Embedding, last norm, head and loss are measured apart as ``ends``. All groups
of a size run at the same time, as they will in training, and the slowest rank counts. Layers are
alike, so one layer's cost times their number plus the ends is the model's (DCP, section 3.5, where
the whole second layer is timed too; the constant part is measured here instead of being
subtracted). A method is measured in the token order that suits it, a feed-forward that several
methods share once. The level ``full`` is not measured: it follows from ``none``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from headrace.comm.mesh import Groups
from headrace.errors import InfeasiblePlan
from headrace.native.spans import Clock
from headrace.native.storage import Storage
from headrace.profiling.branches import BranchTarget, ProfileOptions, targets, with_equal_levels
from headrace.profiling.constants import StepConstants, sharded_share, working_bytes
from headrace.profiling.probe import seconds_of
from headrace.profiling.sweep import Sweeper, first_of_each_node_first, slowest
from headrace.profiling.two_layers import TwoLayers
from headrace.spec.cluster import Cluster
from headrace.spec.known_methods import FACTS, SINGLE_RANK
from headrace.spec.layer_plan import BRANCHES
from headrace.spec.profile import Profile, ProfilePoint
from headrace.units import bytes_text

__all__ = ["ProfileOptions", "Profiler"]


class Profiler:
    """Measures a storage's model on the ranks of ``groups``; every rank gets the same profile.

    Weights are left as they were, the optimizer's state is reset: profile before restoring it.
    """

    def __init__(
        self,
        storage: Storage,
        groups: Groups,
        options: ProfileOptions,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    ) -> None:
        """A profiler of two layers as large as those of the model in ``storage``.
        ``progress(what, done, of)`` is called before each sweep and at the end."""
        self._storage, self._groups, self._options = storage, groups, options
        self._dtype, self._device, self._progress = dtype, device, progress
        self._two = TwoLayers(storage.architecture, dtype=dtype, device=device)

    def profile(self, fingerprint: str, cluster: Cluster) -> Profile:
        """Run all sweeps within ``cluster.memory_bytes`` of each rank. Collective: every rank
        calls it alike.

        Raises SpecError when a group size is supported by none of the methods, InfeasiblePlan when
        what a rank stores leaves no memory to measure in.
        """
        started = time.perf_counter()
        sweeper = Sweeper(
            self._groups,
            self._options.sweep,
            room_bytes=self._room_in(cluster),
            device=self._device,
        )
        all_targets = [
            target
            for p in self._options.sizes
            for target in targets(self._two.two, p, self._options)
        ]
        sweeper.prepare(map(self._two.sweep, all_targets))
        self._warm_up_all(sweeper.clock)
        points: list[ProfilePoint] = []
        for done, target in enumerate(all_targets):
            self._progress(f"profile cp{target.p} {target.text}", done, len(all_targets))
            own_points = sweeper.points(self._two.sweep(target))
            points += with_equal_levels(target, own_points, self._options)
        self._progress("profile", len(all_targets), len(all_targets))
        constants = StepConstants(self._storage, self._two, self._groups, sweeper.clock)
        return Profile(
            fingerprint=fingerprint,
            shape=self._storage.architecture.shape,
            cluster=cluster,
            points=tuple(points),
            not_fitting=tuple(sweeper.not_fitting),
            exchange_s=constants.exchange(cluster.memory_bytes),
            state_bytes=self._agreed_max(self._storage.bytes_held()),
            working_bytes={
                p: working_bytes(self._storage.architecture, self._groups.ranks, p, self._dtype)
                for p in self._options.sizes
            },
            gather_s={p: constants.gather(p) for p in self._options.sizes if p > 1},
            links={p: constants.link(p) for p in self._options.sizes if p > 1},
            element_bytes=self._dtype.itemsize,
            sharded_share=sharded_share(
                self._storage.architecture, self._groups.ranks, self._groups.node_sizes
            ),
            feed_forwards={m.name: m.owner for m in FACTS.values() if m.owner != m.name},
            measured_in_s=slowest(self._groups, [time.perf_counter() - started])[0],
        )

    def _room_in(self, cluster: Cluster) -> float:
        """Bytes left for activations on the fullest rank, beside storage and two layers' weights;
        raises InfeasiblePlan where nothing is left. Collective."""
        held = self._agreed_max(self._storage.bytes_held() + self._two.bytes_held)
        if held >= cluster.memory_bytes:
            raise InfeasiblePlan(
                f"profile on {cluster}",
                got=f"{bytes_text(held)} for stored weights and two layers to measure",
                wanted=f"less than {bytes_text(cluster.memory_bytes)}",
                hint="more ranks, more memory (devices.memory), or a smaller model",
            )
        return cluster.memory_bytes - held

    def _warm_up_all(self, clock: Clock) -> None:
        """Warm up every rank: on a device the first rank of each node before the others, which find
        the kernels that it compiled in the node's caches. Collective."""
        if self._device == "cpu":
            self._warm_up(clock)
        else:
            first_of_each_node_first(self._groups, lambda: self._warm_up(clock))

    def _warm_up(self, clock: Clock) -> None:
        """Run a small pack through ends and branches, forward and backward, on this rank alone:
        first calls load and allocate."""
        lengths = (min(256, self._options.longest),)
        alone = (self._groups.rank,)
        for part in (None, *BRANCHES):
            target = BranchTarget(p=1, part=part, method=SINGLE_RANK, level="none")
            seconds_of(self._two.probe(self._groups, alone, target, lengths), clock)

    def _agreed_max(self, value: int) -> int:
        """The largest ``value`` of all ranks. Collective."""
        return int(slowest(self._groups, [float(value)])[0])
