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
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.comm.collectives import gather_floats
from headrace.comm.mesh import Groups
from headrace.errors import SpecError
from headrace.layouts.layout import group_shards
from headrace.methods.method import BRANCHES, Branch
from headrace.methods.registry import METHODS, methods_for, subgroups
from headrace.methods.weights import Shard, Weight
from headrace.models.transformer import Transformer
from headrace.runtime.executor import Executor
from headrace.runtime.micro_batch import MicroBatchRun, sources
from headrace.runtime.pieces import BranchPiece, EndsPiece, Piece, count, measure
from headrace.runtime.storage import Storage
from headrace.spec.cluster import Cluster
from headrace.spec.lengths import Lengths
from headrace.spec.method import RECOMPUTE, LayerOption, LayerPlan, Recompute
from headrace.spec.plan import MicroBatch, Pipeline, Plan, TokenOrder
from headrace.spec.plan import Working as HowHeld
from headrace.spec.profile import ENDS, Profile, ProfilePoint
from headrace.spec.scheme import Scheme
from headrace.spec.weights import buckets

__all__ = ["ProfileOptions", "Profiler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to measure: group sizes, methods (those that a size supports), recompute levels, the
    longest pack in tokens.

    ``rung_s`` ends a ladder: no rung is climbed that is expected to take longer (seconds of one
    forward and backward of two layers). ``repeats`` timings per point, the least counts.
    """

    sizes: tuple[int, ...]
    longest: int
    methods: tuple[str, ...] = tuple(m.name for m in METHODS.values() if m.automatic)
    levels: tuple[Recompute, ...] = RECOMPUTE
    rung_s: float = 1.0
    repeats: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ladder:
    """One branch of one method and level, or the ends (``part`` None), on groups of p."""

    p: int
    part: Branch | None
    method: str
    level: Recompute

    @property
    def option(self) -> LayerOption:
        """The layer option whose branch is measured."""
        return LayerOption.of(self.method, self.level)

    @property
    def text(self) -> str:
        """The option text of its points."""
        return ENDS if self.part is None else f"{self.part}:{self.option}"


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
        """Run all ladders. Collective: every rank calls it alike.

        Raises SpecError when a group size is supported by none of the methods.
        """
        started = time.perf_counter()
        ladders = [ladder for p in self._options.sizes for ladder in self._ladders(p)]
        self._groups.prepare(
            tuple(ranks[member] for member in members)
            for ladder in ladders for ranks in self._blocks(ladder.p)
            for members in (tuple(range(ladder.p)),
                            *subgroups(ladder.option, self._two, ladder.p))
        )  # fmt: skip
        points: list[ProfilePoint] = []
        self._warm_up()
        for done, ladder in enumerate(ladders):
            self._progress(f"profile cp{ladder.p} {ladder.text}", done, len(ladders))
            points += self._climb(ladder)
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
            element_bytes=torch.empty(0, dtype=self._dtype).element_size(),
            feed_forwards={m.name: m.of for m in METHODS.values() if m.of != m.name},
            measured_in_s=self._slowest([time.perf_counter() - started])[0],
        )

    def _ladders(self, p: int) -> list[_Ladder]:
        """The ends, the attention of every method, and every feed-forward once."""
        wanted = ("local",) if p == 1 else self._options.methods
        a = self._two
        attention = [n for n in methods_for(a, p, "attention") if n in wanted]
        feed = [n for n in methods_for(a, p, "feed_forward") if n in wanted]
        owners = dict.fromkeys(METHODS[name].of for name in feed)
        if not attention or not owners:
            rules = "; ".join(
                rule for name in wanted if (rule := METHODS[name].supports(a, p)) is not None
            )
            raise SpecError(f"methods on groups of {p}", got=", ".join(wanted), wanted=rules)
        levels = [level for level in RECOMPUTE[:-1] if level in {"none", *self._options.levels}]
        parts: tuple[tuple[Branch, list[str]], ...] = (
            ("attention", attention), ("feed_forward", list(owners))
        )  # fmt: skip
        return [_Ladder(p=p, part=None, method=attention[0], level="none")] + [
            _Ladder(p=p, part=part, method=name, level=level)
            for part, names in parts for name in names for level in levels
        ]  # fmt: skip

    def _warm_up(self) -> None:
        """One small pack through everything: first calls load and allocate."""
        lengths = (min(256, self._options.longest),)
        alone = (self._groups.rank,)
        for part in (None, *BRANCHES):
            ladder = _Ladder(p=1, part=part, method="local", level="none")
            measure(self._piece(alone, ladder, lengths), self._clock)

    def _clock(self) -> float:
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _blocks(self, p: int) -> list[tuple[int, ...]]:
        ranks = self._groups.ranks
        return [tuple(range(k * p, (k + 1) * p)) for k in range(ranks // p)]

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

    def _climb(self, ladder: _Ladder) -> list[ProfilePoint]:
        points = list[ProfilePoint]()
        counted, last_s, last_tokens = 0, 0.0, 1
        for lengths, counting in self._packs(ladder.p):
            growth = sum(lengths) / last_tokens
            slow = last_s * growth * max(1.0, growth) > self._options.rung_s
            if counted >= 2 and slow:
                break
            points.append(self._point(ladder, lengths, counting=counting))
            counted += counting
            last_s = 2 * (points[-1].forward_s + points[-1].backward_s)
            last_tokens = sum(lengths)
        return points

    def _tokens(self, lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(sum(lengths))
        vocabulary = self._two.vocabulary
        return tuple(rng.integers(vocabulary, size=n).astype(np.int32) for n in lengths)

    def _point(self, ladder: _Ladder, lengths: tuple[int, ...], *, counting: bool) -> ProfilePoint:
        """Agreed measurements of one ladder's piece."""
        mine = [b for b in self._blocks(ladder.p) if self._groups.rank in b]
        piece = self._piece(mine[0], ladder, lengths) if mine else None
        seconds, counts = [float("inf")] * 2, [float("inf")] * 2
        spent_s, repeat = 0.0, 0
        # Short packs are noisy and cheap: they are timed more often.
        while repeat < self._options.repeats or (repeat < 6 and spent_s < 0.05):
            local = self._slowest(measure(piece, self._clock) if piece else [0.0] * 2)
            seconds = [min(x) for x in zip(seconds, local, strict=True)]
            spent_s, repeat = spent_s + sum(local), repeat + 1
        # A buffer that gloo frees late is counted too: of several counts the least is right.
        for _ in range(0 if not counting else 1 if ladder.p == 1 else 2):
            local = self._slowest(list(map(float, count(piece) if piece else [0, 0])))
            counts = [min(x) for x in zip(counts, local, strict=True)]
        fetched = METHODS[ladder.method].fetched(self._two, ladder.p) if ladder.p > 1 else 1.0
        return ProfilePoint(
            p=ladder.p, option=ladder.text, lengths=lengths,
            forward_s=seconds[0], backward_s=seconds[1],
            kept_bytes=int(counts[0]) if counting else None,
            transient_bytes=int(counts[1]) if counting else None,
            order=self._order(ladder), fetched=fetched,
        )  # fmt: skip

    def _order(self, ladder: _Ladder) -> TokenOrder:
        """How the tokens lie while a ladder is measured: only causal work is uneven otherwise."""
        uneven = ladder.p > 1 and ladder.part == "attention" and self._two.causal
        return METHODS[ladder.method].order if uneven else "natural"

    def _piece(self, ranks: tuple[int, ...], ladder: _Ladder, lengths: tuple[int, ...]) -> Piece:
        layers = LayerPlan.uniform(ladder.option, self._two.layers)
        plan = self._plan(ranks, lengths, layers, self._order(ladder))
        run = MicroBatchRun.of(
            self._model, plan, plan.micro_batches[0], self._tokens(lengths),
            self._sources(plan, ranks), self._groups, seed=0, step=0, dtype=self._dtype,
            device=self._device,
        )  # fmt: skip
        if ladder.part is None:
            return EndsPiece(run)
        return BranchPiece(run, ladder.part, ladder.option, segments=self._two.layers)

    def _plan(
        self, ranks: tuple[int, ...], lengths: tuple[int, ...], layers: LayerPlan,
        order: TokenOrder = "natural",
    ) -> Plan:  # fmt: skip
        sequences = tuple(range(len(lengths)))
        micro = MicroBatch(pipeline=0, sequences=sequences, layers=layers, order=order)
        return Plan(
            lengths=Lengths(tokens=lengths), devices=self._groups.ranks,
            pipelines=(Pipeline(scheme=Scheme(context=len(ranks)), ranks=ranks),),
            micro_batches=(micro,), predicted_s=0.0, lower_bound_s=0.0,
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

    def _exchange(self) -> dict[str, float]:
        """Seconds of pull, push and update of the whole model, from two nearly empty steps."""
        executor = Executor(
            self._storage, self._groups, seed=0, dtype=self._dtype, device=self._device
        )
        plan = self._everyone(self._plan((0,), (1,), LayerPlan.uniform(LayerOption.of("local"), 1)))
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
