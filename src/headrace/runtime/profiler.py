"""The profiler: seconds and bytes of a layer's branches from two layers, in seconds.

For each group size, method and recompute level it runs packs of growing length through one branch
of two layers of the model, as the executor would, and takes the second layer's forward and backward
(the first warms up). Embedding, last norm, head and loss are measured apart as ``ends``. All groups
of a size run at the same time, as they will in training, and the slowest rank counts. Layers are
alike, so one layer's cost times their number plus the ends is the model's (DCP, section 3.5, where
the whole second layer is timed too; the constant part is measured here instead of being
subtracted). A method is measured in the token order that suits it, a feed-forward that several
methods share once. The level ``full`` is not measured: it follows from ``none``.

What a rank learns is agreed before the next rung of the ladder, so all ranks climb alike.

[Note: memory runs out] A rung that may take more than half of the memory is first tried by each
rank alone, with partners that are never heard: who runs out of memory there keeps nobody waiting.
Then the ranks agree; when any of them failed, the ladder ends and the pack is kept as one that does
not fit. A rung whose bytes, extrapolated, exceed the memory is not tried at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from headrace.comm.alone import absent
from headrace.comm.mesh import Groups
from headrace.errors import InfeasiblePlan
from headrace.runtime.clocks import Clock, EventClock, HostClock
from headrace.runtime.constants import Constants, block, blocks, slowest, working_bytes
from headrace.runtime.counted import ByteCounter, DeviceBytes
from headrace.runtime.ladders import Ladder, ProfileOptions, climb, ladders, with_twins
from headrace.runtime.machine import is_out_of_memory
from headrace.runtime.pieces import Piece, count, measure
from headrace.runtime.stand import Stand
from headrace.runtime.storage import Storage
from headrace.spec.cluster import Cluster
from headrace.spec.known_methods import FACTS, SINGLE_RANK
from headrace.spec.method import BRANCHES
from headrace.spec.profile import NotFitting, Profile, ProfilePoint
from headrace.units import bytes_text

__all__ = ["ProfileOptions", "Profiler"]

_RISKY = 0.5
"""The part of the memory above which a rung is tried alone first."""


_SETTLE_S = 2e-3


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
        self._storage, self._groups, self._options = storage, groups, options
        self._dtype, self._device, self._progress = dtype, device, progress
        self._stand = Stand(storage.architecture, dtype=dtype, device=device)
        self._absent: Groups | None = None
        self._clock: Clock = HostClock() if device == "cpu" else EventClock()
        self._room = 0.0

    def profile(self, fingerprint: str, cluster: Cluster) -> Profile:
        """Run all ladders within ``cluster.memory_bytes`` of each rank. Collective: every rank
        calls it alike.

        Raises SpecError when a group size is supported by none of the methods, InfeasiblePlan when
        what a rank stores leaves no memory to measure in.
        """
        started = time.perf_counter()
        self._room = self._room_in(cluster)
        found = [
            ladder for p in self._options.sizes
            for ladder in ladders(self._stand.two, p, self._options)
        ]  # fmt: skip
        self._groups.prepare(self._wanted(found))
        self._warm_up()
        points: list[ProfilePoint] = []
        over: list[NotFitting] = []
        for done, ladder in enumerate(found):
            self._progress(f"profile cp{ladder.p} {ladder.text}", done, len(found))
            points += with_twins(ladder, self._climb(ladder, over), self._options)
        self._progress("profile", len(found), len(found))
        constants = Constants(self._storage, self._stand, self._groups, self._clock)
        return Profile(
            fingerprint=fingerprint,
            shape=self._storage.architecture.shape,
            cluster=cluster,
            points=tuple(points),
            not_fitting=tuple(over),
            exchange_s=constants.exchange(cluster.memory_bytes),
            state_bytes=self._agreed_max(self._storage.bytes_held()),
            working_bytes={
                p: working_bytes(self._storage.architecture, self._groups.ranks, p, self._dtype)
                for p in self._options.sizes
            },
            gather_s={p: constants.gather(p) for p in self._options.sizes if p > 1},
            links={p: constants.link(p) for p in self._options.sizes if p > 1},
            element_bytes=self._dtype.itemsize,
            feed_forwards={m.name: m.owner for m in FACTS.values() if m.owner != m.name},
            measured_in_s=slowest(self._groups, [time.perf_counter() - started])[0],
        )

    def _room_in(self, cluster: Cluster) -> float:
        """Bytes for activations beside what is stored and the stand's weights, agreed."""
        held = self._agreed_max(self._storage.bytes_held() + self._stand.bytes_held)
        if held >= cluster.memory_bytes:
            raise InfeasiblePlan(
                f"profile on {cluster}",
                got=f"{bytes_text(held)} for stored weights and two layers to measure",
                wanted=f"less than {bytes_text(cluster.memory_bytes)}",
                hint="more ranks, more memory (devices.memory), or a smaller model",
            )
        return cluster.memory_bytes - held

    def _wanted(self, found: list[Ladder]) -> set[tuple[int, ...]]:
        return {
            group for ladder in found for ranks in blocks(self._groups.ranks, ladder.p)
            for group in self._stand.groups_of(ladder, ranks)
        }  # fmt: skip

    def _warm_up(self) -> None:
        """One small pack through everything: first calls load and allocate."""
        lengths = (min(256, self._options.longest),)
        alone = (self._groups.rank,)
        for part in (None, *BRANCHES):
            ladder = Ladder(p=1, part=part, method=SINGLE_RANK, level="none")
            measure(self._stand.piece(self._groups, alone, ladder, lengths), self._clock)

    def _climb(self, ladder: Ladder, over: list[NotFitting]) -> list[ProfilePoint]:
        counted: list[ProfilePoint] = []

        def measured(lengths: tuple[int, ...], counting: bool) -> ProfilePoint | None:
            needs = _extrapolated(counted, sum(lengths))
            if needs > self._room or (
                needs > _RISKY * self._room and not self._survives(ladder, lengths)
            ):
                text = ladder.text
                over.append(NotFitting(p=ladder.p, option=text, tokens=sum(lengths)))
                return None
            point = self._point(ladder, lengths, counting=counting)
            counted.extend([point] if counting else [])
            return point

        return climb(ladder.p, self._options, measured)

    def _survives(self, ladder: Ladder, lengths: tuple[int, ...]) -> bool:
        """Whether every rank got through a rung alone; the same answer on all of them."""
        mine, failed = block(self._groups, ladder.p), False
        if self._absent is None:
            self._absent = absent()
        self._absent.prepare(
            group for ranks in blocks(self._groups.ranks, ladder.p)
            for group in self._stand.groups_of(ladder, ranks)
        )  # fmt: skip
        try:
            if mine is not None:
                measure(self._stand.piece(self._absent, mine, ladder, lengths), self._clock)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        return not slowest(self._groups, [float(failed)])[0]

    def _point(self, ladder: Ladder, lengths: tuple[int, ...], *, counting: bool) -> ProfilePoint:
        """Agreed measurements of one ladder's piece."""
        mine = block(self._groups, ladder.p)
        piece = self._stand.piece(self._groups, mine, ladder, lengths) if mine else None
        seconds = [float("inf")] * 2
        spent_s, repeat = 0.0, 0
        # Short packs are noisy and cheap: they are timed more often.
        while repeat < self._options.repeats or (repeat < 6 and spent_s < 0.05):
            local = slowest(self._groups, measure(piece, self._clock) if piece else [0.0] * 2)
            seconds = [min(x) for x in zip(seconds, local, strict=True)]
            spent_s, repeat = spent_s + sum(local), repeat + 1
        counts = slowest(self._groups, self._count(piece, ladder.p)) if counting else []
        return ProfilePoint(
            p=ladder.p, option=ladder.text, lengths=lengths,
            forward_s=seconds[0], backward_s=seconds[1],
            kept_bytes=int(counts[0]) if counting else None,
            transient_bytes=int(counts[1]) if counting else None,
            order=ladder.order(self._stand.two), fetched=ladder.fetched(self._stand.two),
        )  # fmt: skip

    def _count(self, piece: Piece | None, p: int) -> list[float]:
        if piece is None:
            return [0.0, 0.0]
        if self._device != "cpu":
            return list(map(float, count(piece, DeviceBytes)))
        settle_s = _SETTLE_S if p > 1 else 0.0
        times = 3 if p > 1 else 1
        return list(map(float, count(piece, lambda: ByteCounter(settle_s=settle_s), times)))

    def _agreed_max(self, value: int) -> int:
        return int(slowest(self._groups, [float(value)])[0])


def _extrapolated(counted: list[ProfilePoint], tokens: int) -> float:
    """Bytes that two layers will need for so many tokens, in proportion to the last count."""
    if not counted:
        return 0.0
    last = counted[-1]
    return (2 * (last.kept_bytes or 0) + (last.transient_bytes or 0)) * tokens / sum(last.lengths)
