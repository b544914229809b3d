"""The seconds of a step without its rows: what planners ask for many plans.

A plan without stages has a closed form. Micro-batches run in the plan's order, each when all ranks
of its group are free. One that starts before all weights are there waits for them segment by
segment, so its forward ends no sooner than the weights of any segment plus the segments from there
on; in the last one of each rank the gradients of a segment are complete when it ends. Pipelines
with stages follow their one-forward-one-backward order (:mod:`headrace.simulator.staged_clock`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.costs.cost_model import (
    CostModel,
    ExchangeCost,
    exchange_of,
    message_s,
    segment_rows,
    segment_seconds,
)
from headrace.errors import CostError, ProgramError
from headrace.simulator.staged_clock import StagedPipeline
from headrace.spec.measurement import Row, Timeline
from headrace.spec.plan import MicroBatch, Plan
from headrace.spec.program import (
    Action,
    Backward,
    Exchange,
    Forward,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    Update,
    meeting,
    meeting_key,
    pushes_of,
    rows_of,
)
from headrace.spec.strategy import Scheme, Stage
from headrace.spec.walk import Posted, messages_of

__all__ = [
    "Walk",
    "arrivals",
    "check_costs",
    "exposed_s",
    "micro_batch_seconds",
    "push_ends",
    "segments_of",
    "simulate",
    "step_s",
]

Segments = tuple[tuple[float, float], ...]


def check_costs(plan: Plan, costs: CostModel) -> None:
    """Raise CostError when ``plan`` uses a width of a stage, or layers on it, for which ``costs``
    have no answer."""
    widths: list[int] = []
    for pipeline in plan.pipelines:
        scheme = pipeline.scheme
        widths.append(scheme.width)
        if widths[-1] not in costs.options:
            known = ", ".join(f"cp{p}" for p in costs.group_sizes)
            raise CostError(f"costs of {scheme}", got="none", hint=f"known are {known}")
    # By identity: hashing all layers of all micro-batches takes longer than the few repetitions.
    used = {(widths[m.pipeline], id(m.layers)): m.layers for m in plan.micro_batches}
    for (width, _), layers in used.items():
        if len(layers.options) != costs.shape.layers:
            raise CostError(
                "layer plan", got=f"{len(layers.options)} layers", wanted=costs.shape.layers
            )
        for option, _ in layers.counts:
            costs.option(width, option)


def segments_of(plan: Plan, micro: MicroBatch, stage: Stage, costs: CostModel) -> Segments:
    """(seconds of the forward, seconds of the backward) of each segment of a micro-batch in a
    stage, in the order of ``stage.buckets``."""
    return segment_seconds(
        costs,
        plan.tokens_of(micro),
        plan.pipelines[micro.pipeline],
        stage,
        micro.layers,
        plan.working,
    )


def arrivals(costs: CostModel, exchange: ExchangeCost) -> tuple[float, ...]:
    """Seconds from the begin of a step until the weights of each bucket are there, with the costs'
    scale; ``exchange`` is what the plan's step pays once."""
    pull_s = exchange.pull_s * costs.scale
    return tuple(accumulate(share * pull_s for share in costs.shape.bucket_shares))


def push_ends(
    costs: CostModel, exchange: ExchangeCost, issued: Iterable[tuple[int, float]]
) -> list[float]:
    """Seconds until the push of each bucket ends, given (bucket, seconds until the last rank issued
    it) in the order of the pushes, and the plan's ``exchange``."""
    shares, push_s = costs.shape.bucket_shares, exchange.push_s * costs.scale
    ends, end_s = list[float](), 0.0
    for bucket, ready_s in issued:
        end_s = max(end_s, ready_s) + shares[bucket] * push_s
        ends.append(end_s)
    return ends


def exposed_s(costs: CostModel) -> float:
    """Seconds of pull and push, without the costs' scale, that no computation hides where all of
    both moves.

    Before the first layer all ranks wait for its weights and the embedding's; the gradients of
    both are complete when the last rank has nothing left to compute.
    """
    first = sum(costs.shape.bucket_shares[:2])
    return first * (costs.exchange_s.pull_s + costs.exchange_s.push_s)


Key = tuple[int, int, str, int]
"""A message by what both of its ranks know of it."""


class Walk:
    """Ranks on their way through their programs.

    Args:
        programs: The program of every rank.
        plan: The plan that they were compiled from.
        costs: What it costs, of a model.

    Attributes:
        clock: Seconds that each rank has come to.
        rows: What each rank did, in program order.
    """

    def __init__(self, programs: Sequence[Program], plan: Plan, costs: CostModel) -> None:
        check_costs(plan, costs)
        self._plan, self._costs = plan, costs
        self._exchange = exchange_of(costs, plan)
        self._actions = {program.rank: program.actions for program in programs}
        self._world = tuple(self._actions)
        self._arrivals = arrivals(costs, self._exchange)
        self._stages: dict[int, tuple[Stage, ...]] = {}
        self._segments: dict[tuple[int, int], tuple[Stage, Segments]] = {}
        self._tokens = [sum(plan.tokens_of(micro)) for micro in plan.micro_batches]
        self._places = dict.fromkeys(self._world, 0)
        self.clock = dict.fromkeys(self._world, 0.0)
        self.rows: dict[int, list[Row]] = {rank: [] for rank in self._world}
        self._pulls: dict[int, list[int]] = {rank: [] for rank in self._world}
        self._pushes: dict[int, dict[int, float]] = {rank: {} for rank in self._world}
        self._come: dict[tuple[Any, ...], set[int]] = {}
        self._there: dict[Key, float] = {}  # when each message arrives
        # By rank and neighbour, when the last message to it arrives.
        self._under_way: dict[int, dict[int, float]] = {rank: {} for rank in self._world}
        self._posted: dict[int, float] = {}  # when ranks at an exchange have sent their part
        self._ready = list(reversed(self._world))

    def run(self) -> float:
        """Walk to the end, and return the seconds until the last rank is done. Raises ProgramError
        for a deadlock."""
        while self._ready:
            rank = self._ready.pop()
            while (action := self._head(rank)) is not None and self._move(action, rank):
                pass
        for rank in self._world:
            if (action := self._head(rank)) is not None:
                raise ProgramError("programs deadlock", got=f"rank {rank} waits at {action}")
        return max(self.clock.values(), default=0.0)

    def _head(self, rank: int) -> Action | None:
        """The next action of a rank; None at the end of its program."""
        actions, place = self._actions[rank], self._places[rank]
        return actions[place] if place < len(actions) else None

    def _move(self, action: Action, rank: int) -> bool:
        """Do an action of ``rank``, with those who meet in it; False when it must wait."""
        match action:
            case Pull(bucket=bucket):
                self._check_bucket(action, bucket)
                self._pulls[rank].append(bucket)
            case Push(bucket=bucket):
                self._issue(action, rank, bucket, self.clock[rank])
            case Send() | Recv() | Exchange():
                return self._traffic(action, rank)
            case Forward() | Backward() | Update():
                return self._meet(action, rank)
        self._places[rank] += 1
        return True

    def _check_bucket(self, action: Action, bucket: int) -> None:
        """Raise ProgramError for an action with a bucket of weights that does not exist."""
        if bucket >= len(self._arrivals):
            raise ProgramError(f"bucket of {action}", got=bucket, wanted=f"< {len(self._arrivals)}")

    def _issue(self, action: Action, rank: int, bucket: int, now_s: float) -> None:
        """Note that a rank issues the push of a bucket at ``now_s``."""
        self._check_bucket(action, bucket)
        self._pushes[rank][bucket] = now_s

    def _meet(self, action: Forward | Backward | Update, rank: int) -> bool:
        """Wait for the others of the group; the last one to come does the action for all."""
        group = [*meeting(action, rank, self._world)]
        key = meeting_key(action)
        come = self._come.setdefault(key, set())
        come.add(rank)
        if not come.issuperset(group):
            return False
        del self._come[key]
        match action:
            case Forward():
                self._forward(action, group)
            case Backward():
                self._backward(action, group)
            case Update():
                self._update(group)
        for member in group:
            self._places[member] += 1
        self._ready += [member for member in group if member != rank]
        return True

    def _forward(self, action: Forward, group: list[int]) -> None:
        """Do a forward with all ranks of its group, segment by segment as weights arrive."""
        stage, segments = self._work(action)
        start_s = now_s = max(self.clock[rank] for rank in group)
        waited_s = 0.0
        if not any(self._pulls[rank] for rank in group):
            self._done(action, group, start_s, start_s + sum(pair[0] for pair in segments))
            return
        for bucket, (seconds, _) in zip(stage.buckets, segments, strict=True):
            # The end may work with a tied embedding.
            for needed in (0, bucket) if bucket > stage.stop else (bucket,):
                there_s = self._wait(needed, group, now_s)
                waited_s += there_s - now_s
                now_s = there_s
            now_s += seconds
        self._done(action, group, start_s, now_s, waited_s)

    def _wait(self, bucket: int, ranks: Sequence[int], now_s: float) -> float:
        """Seconds until the weights of a bucket are there for ranks that want them at ``now_s``."""
        there_s = max(now_s, self._arrivals[bucket])
        for rank in ranks:
            if bucket in self._pulls[rank]:
                self._pulls[rank].remove(bucket)
                self._record(rank, f"P{bucket}", "pull", now_s, there_s)
        return there_s

    def _wait_for_all(self, rank: int) -> None:
        """Wait for the weights that are still under way: others need them."""
        for bucket in tuple(self._pulls[rank]):
            self.clock[rank] = self._wait(bucket, (rank,), self.clock[rank])

    def _backward(self, action: Backward, group: list[int]) -> None:
        """Do a backward with all ranks of its group, and issue the pushes that it completes."""
        stage, segments = self._work(action)
        for rank in group:
            self._wait_for_all(rank)
        start_s = now_s = max(self.clock[rank] for rank in group)
        pushing = {rank: mine for rank in group if pushes_of(mine := self._head(rank) or action)}
        if not pushing:
            self._done(action, group, start_s, start_s + sum(pair[1] for pair in segments))
            return
        for bucket, (_, seconds) in zip(reversed(stage.buckets), reversed(segments), strict=True):
            now_s += seconds
            for rank, mine in pushing.items():
                if bucket in pushes_of(mine):
                    self._issue(mine, rank, bucket, now_s)
        self._done(action, group, start_s, now_s)

    def _work(self, action: Forward | Backward) -> tuple[Stage, Segments]:
        """The stage of a forward or backward and the seconds of its segments."""
        index, plan = action.micro_batch, self._plan
        key = index, action.stage
        if key not in self._segments:
            if index >= len(plan.micro_batches):
                count = len(plan.micro_batches)
                raise ProgramError(f"micro-batch of {action}", got=index, wanted=f"< {count}")
            micro = plan.micro_batches[index]
            stages = self._stages_of(micro.pipeline)
            if action.stage >= len(stages):
                raise ProgramError(
                    f"stage of {action}", got=action.stage, wanted=f"< {len(stages)}"
                )
            stage = stages[action.stage]
            self._segments[key] = stage, segments_of(plan, micro, stage, self._costs)
        return self._segments[key]

    def _stages_of(self, pipeline: int) -> tuple[Stage, ...]:
        """The stages of a pipeline of the plan, by its number."""
        if pipeline not in self._stages:
            layers = self._costs.shape.layers
            self._stages[pipeline] = self._plan.pipelines[pipeline].stages(layers)
        return self._stages[pipeline]

    def _done(
        self,
        action: Forward | Backward,
        group: list[int],
        start_s: float,
        end_s: float,
        waited_s: float = 0.0,
    ) -> None:
        """Record a forward or backward of a group, which waited ``waited_s`` of its seconds."""
        tokens, ranks = self._tokens[action.micro_batch], len(action.group)
        for rank in group:
            text = str(self._head(rank))
            self._record(rank, text, action.kind, start_s, end_s, tokens, ranks, waited_s)
            self.clock[rank] = end_s

    def _traffic(self, action: Send | Recv | Exchange, rank: int) -> bool:
        """Post the message that an action sends when the rank first comes to it, and end the action
        once the message that it receives is there. Returns False where the rank has to wait, and is
        asked again."""
        posted = {message.sends: message for message in messages_of(action)}
        out, back, start_s = posted.get(True), posted.get(False), self.clock[rank]
        if out is not None and rank not in self._posted:
            self._posted[rank] = self._send(out, rank)
        if back is not None and back.key(rank) not in self._there:
            return False
        end_s = self._posted.pop(rank, start_s)
        if back is not None:
            end_s = max(end_s, self._there.pop(back.key(rank)))
        rows = sum(message.rows for message in posted.values())
        self._record(rank, str(action), action.kind, start_s, end_s, rows, 2)
        self.clock[rank] = end_s
        self._places[rank] += 1
        return True

    def _send(self, message: Posted, rank: int) -> float:
        """Post a message of a rank, and return when: as soon as the rank is here and its last one
        to that neighbour has arrived, as one is in flight at a time."""
        under_way = self._under_way[rank]
        posted_s = max(self.clock[rank], under_way.get(message.peer, 0.0))
        there_s = posted_s + message_s(self._costs, message.rows)
        under_way[message.peer] = self._there[message.key(rank)] = there_s
        if message.peer in self._actions:  # it may wait for this message
            self._ready.append(message.peer)
        return posted_s

    def _update(self, group: list[int]) -> None:
        """Do the update of all ranks, after all pushes."""
        for rank in group:
            self._wait_for_all(rank)
            self.clock[rank] = max(self.clock[rank], *self._under_way[rank].values(), 0.0)
        ends = self._pushed(group)
        for rank in group:
            for bucket, end_s in ends:
                start_s = self.clock[rank]
                self.clock[rank] = max(start_s, end_s)
                self._record(rank, f"G{bucket}", "push", start_s, self.clock[rank])
        start_s = max(self.clock[rank] for rank in group)
        end_s = start_s + self._costs.exchange_s.update_s * self._costs.scale
        for rank in group:
            self._record(rank, "U", "update", start_s, end_s)
            self.clock[rank] = end_s

    def _pushed(self, group: list[int]) -> list[tuple[int, float]]:
        """(bucket, seconds until its push ends) in the order of the pushes, which all ranks of the
        group share."""
        order = list(self._pushes[group[0]])
        for rank in group:
            if list(self._pushes[rank]) != order:
                raise ProgramError(
                    f"pushes of rank {rank}",
                    got=list(self._pushes[rank]),
                    wanted=f"{order} as on rank {group[0]}",
                )
        issued = [(bucket, max(self._pushes[rank][bucket] for rank in group)) for bucket in order]
        return list(zip(order, push_ends(self._costs, self._exchange, issued), strict=True))

    def _record(
        self,
        rank: int,
        action: str,
        kind: str,
        start_s: float,
        end_s: float,
        tokens: int = 0,
        ranks: int = 0,
        waited_s: float = 0.0,
    ) -> None:
        """Add a row of the timeline for what a rank did."""
        row = Row(
            rank=rank,
            action=action,
            kind=kind,
            start_s=start_s,
            end_s=end_s,
            tokens=tokens,
            ranks=ranks or self._plan.devices,
            waited_s=waited_s,
        )
        self.rows[rank].append(row)


Floats = NDArray[np.float64]


def step_s(plan: Plan, costs: CostModel) -> float:
    """Predict the seconds of a whole step: the end of what :func:`simulate` gives for the plan's
    programs, without compiling them.

    Args:
        plan: The plan.
        costs: What it costs, of a model.

    Returns:
        Seconds, with the costs' scale.

    Raises:
        CostError: When the costs lack what the plan uses.
    """
    check_costs(plan, costs)
    forward, backward = _segments(plan, costs)
    exchange = exchange_of(costs, plan)
    there = np.array(arrivals(costs, exchange))
    issued, last_s = np.zeros(len(there)), float(there[-1])
    staged = [n for n, pipeline in enumerate(plan.pipelines) if pipeline.scheme.pipeline > 1]
    deep = set(staged)
    plain = [n for n, micro in enumerate(plan.micro_batches) if micro.pipeline not in deep]
    if plain:
        begins, ends = _runs(plan, plain, forward, backward.sum(axis=1), there)
        last_s = max(last_s, *ends.values())
        for n in _last_of_ranks(plan, plain):
            complete = np.cumsum(backward[n][::-1])[::-1]
            np.maximum(issued, begins[n] + complete, out=issued)
    for number in staged:
        own = [n for n, micro in enumerate(plan.micro_batches) if micro.pipeline == number]
        if own:
            line = _staged_pipeline(plan, costs, number, own, forward, backward, there)
            np.maximum(issued, line.issued, out=issued)
            last_s = max(last_s, line.end_s)
    order = [(bucket, float(issued[bucket])) for bucket in reversed(range(len(there)))]
    pushed = push_ends(costs, exchange, order)
    return max(pushed[-1], last_s, 0.0) + exchange.update_s * costs.scale


def micro_batch_seconds(plan: Plan, costs: CostModel) -> tuple[float, ...]:
    """Predicted seconds of the forward and backward of each micro-batch over its stages, without
    waiting. Raises CostError for what the costs do not know."""
    check_costs(plan, costs)
    if not plan.micro_batches:
        return ()
    forward, backward = _segments(plan, costs)  # cut into stages the segments are the same
    return tuple((forward.sum(axis=1) + backward.sum(axis=1)).tolist())


def _segments(plan: Plan, costs: CostModel) -> tuple[Floats, Floats]:
    """Seconds of the forward, and of the backward, of each segment of each micro-batch, both
    [micro-batches, buckets]."""
    tokens = np.array(plan.lengths.tokens, dtype=np.float64)
    counts = [len(micro.sequences) for micro in plan.micro_batches]
    held = tokens[[i for micro in plan.micro_batches for i in micro.sequences]]
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    sums = np.stack(
        [np.add.reduceat(held**2, first), np.add.reduceat(held, first), np.ones(len(counts))]
    )
    schemes: dict[Scheme, int] = {}
    kinds = [schemes.setdefault(pipeline.scheme, len(schemes)) for pipeline in plan.pipelines]
    # By identity: hashing all layers of all micro-batches takes longer than the few repetitions.
    alike: dict[tuple[int, int], list[int]] = {}
    for number, micro in enumerate(plan.micro_batches):
        alike.setdefault((id(micro.layers), kinds[micro.pipeline]), []).append(number)
    forward = np.zeros((len(counts), costs.shape.bucket_count))
    backward = np.zeros_like(forward)
    for numbers in alike.values():
        micro = plan.micro_batches[numbers[0]]
        scheme = plan.pipelines[micro.pipeline].scheme
        rows, own = segment_rows(costs, scheme, micro.layers, plan.working), sums[:, numbers]
        forward[numbers], backward[numbers] = (rows[0] @ own).T, (rows[1] @ own).T
    return forward, backward


def _runs(
    plan: Plan, plain: Sequence[int], forward: Floats, backward_s: Floats, there: Floats
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds until the backward of each micro-batch without stages starts, and until it ends, both
    by its number. ``plain`` are these micro-batches, ``forward`` the seconds of their forwards
    [micro-batches, buckets], ``backward_s`` those of their backwards [micro-batches], ``there`` the
    seconds until the weights of each bucket are there [buckets]."""
    rest = np.cumsum(forward[plain][:, ::-1], axis=1)[:, ::-1]
    waited = (there + rest).max(axis=1).tolist()
    free, all_there = [0.0] * plan.devices, float(there[-1])
    begins, ends = dict[int, float](), dict[int, float]()
    for n, forward_s, back_s, least_s in zip(
        plain, rest[:, 0].tolist(), backward_s[plain].tolist(), waited, strict=True
    ):
        ranks = plan.pipelines[plan.micro_batches[n].pipeline].ranks
        now_s = max([free[rank] for rank in ranks])
        now_s = max(now_s + forward_s, least_s) if now_s < all_there else now_s + forward_s
        begins[n], ends[n] = now_s, now_s + back_s
        for rank in ranks:
            free[rank] = ends[n]
    return begins, ends


def _last_of_ranks(plan: Plan, plain: Sequence[int]) -> list[int]:
    """Numbers of those micro-batches of ``plain`` that are the last of some rank, rising."""
    last_of = {plan.micro_batches[n].pipeline: n for n in plain}
    last: dict[int, int] = {}
    for pipeline, n in last_of.items():
        for rank in plan.pipelines[pipeline].ranks:
            last[rank] = max(n, last.get(rank, -1))
    return sorted(set(last.values()))


def _staged_pipeline(
    plan: Plan,
    costs: CostModel,
    number: int,
    micros: Sequence[int],
    forward: Floats,
    backward: Floats,
    there: Floats,
) -> StagedPipeline:
    """The clock of pipeline ``number``, which has stages, at the end of its micro-batches
    ``micros``; the other arguments as for :func:`_runs`."""
    pipeline = plan.pipelines[number]
    tokens = [sum(plan.tokens_of(plan.micro_batches[n])) for n in micros]
    width = pipeline.scheme.width
    # The first rank of a stage has the most rows of every message, so none of the others is later.
    message = [message_s(costs, rows_of(held, width, 0)) for held in tokens]
    line = StagedPipeline(
        stages=pipeline.stages(costs.shape.layers),
        forward=forward[micros],
        backward=backward[micros],
        message_s=message,
        there_s=there,
    )
    line.run()
    return line


def simulate(programs: Sequence[Program], plan: Plan, costs: CostModel) -> Timeline:
    """The predicted timeline of ``programs``, which were compiled from ``plan``.

    Rows stand rank by rank in program order. Raises ProgramError when the programs are not those
    of the plan's ranks, name a bucket, micro-batch or stage that does not exist, or deadlock;
    CostError when ``costs`` lack a stage's width or an option of the plan.
    """
    if [program.rank for program in programs] != list(range(plan.devices)):
        raise ProgramError("programs", got=len(programs), wanted=f"one for each of {plan.devices}")
    walk = Walk(programs, plan, costs)
    walk.run()
    rows = tuple(row for rank in range(plan.devices) for row in walk.rows[rank])
    return Timeline(source="predicted", rows=rows, devices=plan.devices)
