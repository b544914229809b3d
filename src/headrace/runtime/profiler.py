"""The profiler: seconds and bytes of one layer from two layers, in seconds.

For each group size and recompute level it runs packs of growing length through two layers of the
model, as the executor would, and takes the second layer's forward and backward (the first warms
up); embedding, last norm, head and loss are taken apart as ``ends``. All groups of a size run at
the same time, as they will in training, and the slowest rank counts. Layers are alike, so one
layer's cost times their number plus the ends is the model's (DCP, section 3.5, where the whole
second layer is timed too; the constant part is measured here instead of being subtracted).

What a rank learns is agreed before the next rung of the ladder, so all ranks climb alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.comm.collectives import gather_floats
from headrace.comm.mesh import Groups
from headrace.layouts.layout import group_shards
from headrace.methods.registry import METHODS
from headrace.methods.weights import Shard, Weight
from headrace.models.transformer import Transformer
from headrace.runtime.counted import ByteCounter
from headrace.runtime.executor import Executor
from headrace.runtime.micro_batch import MicroBatchRun, sources
from headrace.runtime.storage import Storage
from headrace.spec.cluster import Cluster
from headrace.spec.lengths import Lengths
from headrace.spec.method import RECOMPUTE, LayerOption, LayerPlan, Recompute
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.plan import Working as HowHeld
from headrace.spec.profile import ENDS, Profile, ProfilePoint
from headrace.spec.scheme import Scheme
from headrace.spec.weights import buckets

__all__ = ["ProfileOptions", "Profiler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to measure: group sizes, recompute levels, the longest pack in tokens.

    ``rung_s`` ends a ladder: no rung is climbed that is expected to take longer (seconds of one
    forward and backward of two layers). ``repeats`` timings per point, the least counts.
    """

    sizes: tuple[int, ...]
    longest: int
    levels: tuple[Recompute, ...] = RECOMPUTE
    rung_s: float = 1.0
    repeats: int = 2


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
        a = storage.architecture
        self._two = replace(a, layers=min(2, a.layers))
        self._model = Transformer(self._two)

    def profile(self, fingerprint: str, cluster: Cluster) -> Profile:
        """Run all ladders. Collective: every rank calls it alike."""
        started = time.perf_counter()
        self._groups.prepare(ranks for p in self._options.sizes for ranks in self._blocks(p))
        points: list[ProfilePoint] = []
        self._warm_up()
        ladders = [(p, level) for p in self._options.sizes for level in self._options.levels]
        for done, (p, level) in enumerate(ladders):
            self._progress(f"profile cp{p} {level}", done, len(ladders))
            points += self._ladder(p, level)
        self._progress("profile", len(ladders), len(ladders))
        return Profile(
            fingerprint=fingerprint,
            architecture=self._storage.architecture,
            cluster=cluster,
            points=tuple(points),
            exchange_s=self._exchange(),
            state_bytes=self._agreed_max(self._storage.bytes_held()),
            working_bytes={p: self._working_bytes(p) for p in self._options.sizes},
            gather_s={p: self._gather(p) for p in self._options.sizes if p > 1},
            measured_in_s=self._slowest([time.perf_counter() - started])[0],
        )

    def _warm_up(self) -> None:
        """One small pack through everything: first calls load and allocate."""
        lengths = (min(256, self._options.longest),)
        option = self._option(1, "none")
        self._measure((self._groups.rank,), option, lengths, self._tokens(lengths))

    def _blocks(self, p: int) -> list[tuple[int, ...]]:
        ranks = self._groups.ranks
        return [tuple(range(k * p, (k + 1) * p)) for k in range(ranks // p)]

    def _option(self, p: int, level: Recompute) -> LayerOption:
        name = next(
            m.name for m in METHODS.values() if m.supports(self._storage.architecture, p) is None
        )
        return LayerOption.of(name, level)

    def _packs(self, p: int) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Single documents of growing length, the first rungs also as packs of eight short ones;
        and whether to count bytes there."""
        longest = self._options.longest
        length, rung = max(1, min(64 * p, longest // 16)), 0
        while length < longest:
            yield (length,), 2 <= rung < 5
            if 2 <= rung < 6 and length >= 16:
                yield (length // 8,) * 8, False
            length, rung = 2 * length, rung + 1
        yield (longest,), rung < 5

    def _ladder(self, p: int, level: Recompute) -> list[ProfilePoint]:
        option, points = self._option(p, level), list[ProfilePoint]()
        counted, last_s, last_tokens = 0, 0.0, 1
        for lengths, count in self._packs(p):
            growth = sum(lengths) / last_tokens
            slow = last_s * growth * max(1.0, growth) > self._options.rung_s
            if counted >= 2 and slow:
                break
            layer, ends = self._point(p, option, lengths, self._tokens(lengths), count=count)
            counted += count
            last_s = 2 * (layer.forward_s + layer.backward_s) + ends.forward_s + ends.backward_s
            last_tokens = sum(lengths)
            points += [layer, ends] if level == self._options.levels[0] else [layer]
        return points

    def _tokens(self, lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(sum(lengths))
        vocabulary = self._two.vocabulary
        return tuple(rng.integers(vocabulary, size=n).astype(np.int32) for n in lengths)

    def _point(
        self, p: int, option: LayerOption, lengths: tuple[int, ...],
        tokens: tuple[np.ndarray, ...], *, count: bool,
    ) -> tuple[ProfilePoint, ProfilePoint]:  # fmt: skip
        """Agreed measurements of a layer and of the ends."""
        mine = [b for b in self._blocks(p) if self._groups.rank in b]
        seconds, counts = [0.0] * 4, [0] * 4
        spent_s, repeat = 0.0, 0
        # Short packs are noisy and cheap: they are timed more often.
        while repeat < self._options.repeats or (repeat < 6 and spent_s < 0.05):
            local = self._measure(mine[0], option, lengths, tokens) if mine else [0.0] * 4
            local = self._slowest(local)
            seconds = local if repeat == 0 else [min(x) for x in zip(seconds, local, strict=True)]
            spent_s, repeat = spent_s + sum(local), repeat + 1
        if count:
            local_counts = self._count(mine[0], option, lengths, tokens) if mine else counts
            counts = [int(x) for x in self._slowest(list(map(float, local_counts)))]

        def point(name: str, at: int) -> ProfilePoint:
            return ProfilePoint(
                p=p, option=name, lengths=lengths, forward_s=seconds[at],
                backward_s=seconds[at + 1], kept_bytes=counts[at] if count else None,
                transient_bytes=counts[at + 1] if count else None,
            )  # fmt: skip

        return point(str(option), 0), point(ENDS, 2)

    def _run(
        self, ranks: tuple[int, ...], option: LayerOption, lengths: tuple[int, ...],
        tokens: tuple[np.ndarray, ...],
    ) -> MicroBatchRun:  # fmt: skip
        plan = self._plan(ranks, lengths, LayerPlan.uniform(option, self._two.layers))
        weights = self._sources(plan, ranks)
        return MicroBatchRun.of(
            self._model, plan, plan.micro_batches[0], tokens, weights, self._groups,
            seed=0, step=0, dtype=self._dtype, device=self._device,
        )  # fmt: skip

    def _plan(
        self, ranks: tuple[int, ...], lengths: tuple[int, ...], layers: LayerPlan,
        working: HowHeld = "whole",
    ) -> Plan:  # fmt: skip
        micro = MicroBatch(pipeline=0, sequences=tuple(range(len(lengths))), layers=layers)
        return Plan(
            lengths=Lengths(tokens=lengths), devices=self._groups.ranks,
            pipelines=(Pipeline(scheme=Scheme(context=len(ranks)), ranks=ranks),),
            micro_batches=(micro,), predicted_s=0.0, lower_bound_s=0.0, working=working,
        )  # fmt: skip

    def _sources(self, plan: Plan, ranks: tuple[int, ...]) -> dict[str, Weight]:
        """Whole weights that are nobody's: filled with noise, so no pull is needed."""
        plan_all = self._everyone(plan)
        working = self._storage.working(plan_all)
        for weight in self._storage.table:
            value = working.values[weight.name]
            if value.isnan().any():
                value.normal_(std=0.02)
        return sources(self._storage.table, working, plan_all, ranks, self._groups)

    def _everyone(self, plan: Plan) -> Plan:
        """The same plan with every rank holding whole weights, so buffers serve all ladders."""
        ranks = self._groups.ranks
        pipelines = tuple(Pipeline(scheme=Scheme(), ranks=(rank,)) for rank in range(ranks))
        layers = LayerPlan.uniform(LayerOption.of("local"), self._storage.architecture.layers)
        return Plan(
            lengths=Lengths(tokens=(1,) * ranks), devices=ranks, pipelines=pipelines,
            micro_batches=tuple(
                MicroBatch(pipeline=rank, sequences=(rank,), layers=layers)
                for rank in range(ranks)
            ),
            predicted_s=0.0, lower_bound_s=0.0,
        )  # fmt: skip

    def _measure(
        self, ranks: tuple[int, ...], option: LayerOption, lengths: tuple[int, ...],
        tokens: tuple[np.ndarray, ...],
    ) -> list[float]:  # fmt: skip
        """[layer forward, layer backward, ends forward, ends backward] in seconds."""
        marks: list[float] = []

        def mark() -> None:
            if self._device != "cpu":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

        run = self._run(ranks, option, lengths, tokens)
        run.forward(passed=mark)
        run.backward(passed=mark)
        return _split_marks(np.diff(marks).tolist(), self._two.layers)

    def _count(
        self, ranks: tuple[int, ...], option: LayerOption, lengths: tuple[int, ...],
        tokens: tuple[np.ndarray, ...],
    ) -> list[int]:  # fmt: skip
        """[layer kept, layer transient, ends kept, ends transient] in bytes."""
        seen: list[tuple[int, int]] = []
        with ByteCounter() as counter:

            def passed() -> None:
                seen.append((counter.current_bytes, counter.peak_bytes))
                counter.reset_peak()

            run = self._run(ranks, option, lengths, tokens)
            run.forward(passed=passed)
            run.backward(passed=passed)
        return _split_counts(seen, self._two.layers)

    def _exchange(self) -> dict[str, float]:
        """Seconds of pull, push and update of the whole model, from two nearly empty steps."""
        executor = Executor(
            self._storage, self._groups, seed=0, dtype=self._dtype, device=self._device
        )
        plan = self._everyone(self._plan((0,), (1,), LayerPlan.uniform(self._option(1, "none"), 1)))
        tokens = tuple(np.zeros(1, np.int32) for _ in range(self._groups.ranks))
        kinds = ("pull", "push", "update")
        best = [float("inf")] * len(kinds)
        saved = {name: master.clone() for name, master in self._storage.masters.items()}
        for _ in range(2):
            rows = executor.run(plan, tokens, step=0, lr=0.0).rows
            local = [sum(r.seconds for r in rows if r.kind == kind) for kind in kinds]
            best = [min(x) for x in zip(best, self._slowest(local), strict=True)]
        for name, master in self._storage.masters.items():
            master.copy_(saved[name])
        self._storage.reset_optimizer()
        return dict(zip(("pull_s", "push_s", "update_s"), best, strict=True))

    def _gather(self, p: int) -> tuple[float, float]:
        """Seconds that sharded weights add to one layer: a gather forward; a gather and a
        reduce-scatter backward."""
        mine = [b for b in self._blocks(p) if self._groups.rank in b]
        best = [float("inf")] * 2
        for _ in range(2):
            local = self._gather_once(mine[0]) if mine else [0.0, 0.0]
            best = [min(x) for x in zip(best, self._slowest(local), strict=True)]
        return best[0], best[0] + best[1]

    def _gather_once(self, ranks: tuple[int, ...]) -> list[float]:
        group = self._groups.get(ranks)
        assert group is not None
        gather_s = scatter_s = 0.0
        for weight in buckets(self._two)[1]:
            if weight.unit is None:
                continue
            shards = group_shards(weight, len(ranks))
            rows = len(shards[ranks.index(self._groups.rank)])
            value = torch.zeros((rows, *weight.shape[1:]), dtype=self._dtype, device=self._device)
            shard = Shard(value=value, grad=value.clone(), shards=shards, group=group)
            start = time.perf_counter()
            whole = shard.rows()
            gather_s += time.perf_counter() - start
            start = time.perf_counter()
            shard.add(whole)
            scatter_s += time.perf_counter() - start
        return [gather_s, scatter_s]

    def _working_bytes(self, p: int) -> dict[HowHeld, int]:
        """Bytes of working weights and gradients of a rank in a group of p."""
        size = torch.empty(0, dtype=self._dtype).element_size()
        whole = sharded = 0
        for weight in self._storage.table:
            rows = max(len(shard) for shard in group_shards(weight, p))
            whole += 2 * size * weight.elements
            sharded += 2 * size * rows * weight.row_elements
        if self._groups.ranks == 1:
            return {"whole": 0, "sharded": 0}  # working weights are the stored ones
        return {"whole": whole, "sharded": sharded}

    def _slowest(self, values: list[float]) -> list[float]:
        rows = gather_floats(values, self._groups.world)
        return [max(column) for column in zip(*rows, strict=True)]

    def _agreed_max(self, value: int) -> int:
        return int(self._slowest([float(value)])[0])


def _split_marks(parts: list[float], layers: int) -> list[float]:
    """Differences between marks: forward (embedding, layers, end), backward (end, layers,
    embedding); the measured layer is the last, the first to go backward is the same one."""
    forward, backward = parts[: layers + 2], parts[layers + 2 :]
    return [forward[layers], backward[1], forward[0] + forward[-1], backward[0] + backward[-1]]


def _split_counts(seen: list[tuple[int, int]], layers: int) -> list[int]:
    """From (alive, peak since the last mark) at each mark, as in ``_split_marks`` with the first
    mark before the embedding."""
    forward, backward = seen[: layers + 3], seen[layers + 3 :]
    before, after = forward[layers], forward[layers + 1]
    kept = after[0] - before[0]
    layer_back = backward[1]
    transient = max(after[1] - after[0], layer_back[1] - backward[0][0])
    ends_kept = forward[1][0] - forward[0][0] + forward[-1][0] - forward[-2][0]
    ends_transient = max(forward[-1][1] - forward[-1][0], backward[0][1] - forward[-1][0])
    return [max(0, x) for x in (kept, transient, ends_kept, ends_transient)]
