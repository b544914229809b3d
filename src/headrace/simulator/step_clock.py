"""The predicted clock of a step: with a row for everything that a rank does (:func:`simulate`), or
its seconds alone, which planners ask for many plans (:func:`step_s`).

Weights move in *buckets*: the embedding (bucket 0), each layer, and what follows the last. A
*segment* is the part of a forward or backward that works with one bucket. A *pull* brings the
weights of a bucket before the first use, a *push* sums its gradients.

For the seconds alone, a plan without stages has a closed form. Micro-batches run in the plan's
order, each when all ranks of its group are free. One that starts before all weights are there waits
for them segment by segment, so its forward ends no sooner than the weights of any segment plus the
segments from there on; in the last one of each rank the gradients of a segment are complete when it
ends. Pipelines with stages follow their one-forward-one-backward order
(:mod:`headrace.simulator.staged_clock`). Plans in lockstep run in waves
(:mod:`headrace.simulator.lockstep`).
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
from headrace.simulator.lockstep import wave_timeline
from headrace.simulator.staged_clock import StagedPipeline, run_pipelines
from headrace.spec.measurement import Row, Timeline
from headrace.spec.plan import LayerPlan, MicroBatch, Pipeline, Plan, Working
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
    "staged_pipeline",
    "staged_steps_s",
    "step_s",
]

Segments = tuple[tuple[float, float], ...]
"""(seconds of the forward, seconds of the backward) of each segment of a micro-batch in a stage."""


def check_costs(plan: Plan, costs: CostModel) -> None:
    """Raise CostError for ``costs`` of other devices than those of ``plan``, and when it uses a
    width of a stage, or layers on it, for which they have no answer."""
    if costs.cluster.devices != plan.devices:
        raise CostError(
            "devices of the costs",
            got=costs.cluster.devices,
            wanted=f"the plan's {plan.devices}",
            hint="stored state and exchanges are those of all devices",
        )
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
    """Seconds until the push of each bucket ends. ``issued`` has (bucket, seconds until the last
    rank issued its push) in the order of the pushes, which run one after the other; ``exchange`` is
    what the plan's step pays once."""
    shares, push_s = costs.shape.bucket_shares, exchange.push_s * costs.scale
    ends, end_s = list[float](), 0.0
    for bucket, ready_s in issued:
        end_s = max(end_s, ready_s) + shares[bucket] * push_s
        ends.append(end_s)
    return ends


def exposed_s(costs: CostModel) -> float:
    """Seconds of pull and push that no computation hides where all weights and gradients move,
    without the costs' scale.

    Before the first layer all ranks wait for its weights and the embedding's (the first two
    buckets); the gradients of both are complete when the last rank has nothing left to compute.
    """
    first_share = sum(costs.shape.bucket_shares[:2])
    return first_share * (costs.exchange_s.pull_s + costs.exchange_s.push_s)


Key = tuple[int, int, str, int]
"""(sender, receiver, what it carries, micro-batch) of a message."""


class Walk:
    """Follows all ranks through their programs with predicted seconds.

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
        self._places = dict.fromkeys(self._world, 0)  # index of each rank's next action
        self.clock = dict.fromkeys(self._world, 0.0)
        self.rows: dict[int, list[Row]] = {rank: [] for rank in self._world}
        # By rank, the buckets whose pull it has not waited for, and when it issued each push.
        self._pulls: dict[int, list[int]] = {rank: [] for rank in self._world}
        self._pushes: dict[int, dict[int, float]] = {rank: {} for rank in self._world}
        # By key of an action that ranks do together, those that have come to it.
        self._come: dict[tuple[Any, ...], set[int]] = {}
        self._there: dict[Key, float] = {}  # when each message arrives
        # By rank and neighbour, when the last message to it arrives.
        self._under_way: dict[int, dict[int, float]] = {rank: {} for rank in self._world}
        self._posted: dict[int, float] = {}  # when ranks at an exchange have sent their part
        self._ready = list(reversed(self._world))  # ranks that may go on, a stack

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
        """Do an action of ``rank``, together with the other ranks that take part in it. Returns
        False where the rank must wait."""
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
        """Do an action that all ranks of a group do together, once the last of them has come to it.
        Returns False where ``rank`` has to wait for the others."""
        group = [*meeting(action, rank, self._world)]
        key = meeting_key(action)
        arrived = self._come.setdefault(key, set())
        arrived.add(rank)
        if not arrived.issuperset(group):
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
        if not any(self._pulls[rank] for rank in group):  # all weights are there
            self._done(action, group, start_s, start_s + sum(pair[0] for pair in segments))
            return
        for bucket, (seconds, _) in zip(stage.buckets, segments, strict=True):
            # What follows the last layer may work with a tied embedding, bucket 0, too.
            for needed in (0, bucket) if bucket > stage.stop else (bucket,):
                there_s = self._wait(needed, group, now_s)
                waited_s += there_s - now_s
                now_s = there_s
            now_s += seconds
        self._done(action, group, start_s, now_s, waited_s)

    def _wait(self, bucket: int, ranks: Sequence[int], now_s: float) -> float:
        """The time at which ``ranks``, at ``now_s``, have the weights of a bucket, in seconds; each
        of them for which that is the first use gets a row for its wait."""
        there_s = max(now_s, self._arrivals[bucket])
        for rank in ranks:
            if bucket in self._pulls[rank]:
                self._pulls[rank].remove(bucket)
                self._record(rank, f"P{bucket}", "pull", now_s, there_s)
        return there_s

    def _wait_for_all(self, rank: int) -> None:
        """Move the clock of a rank to the time when no weights are under way to it any more: other
        ranks need it in every pull, also of weights that it does not work with."""
        for bucket in tuple(self._pulls[rank]):
            self.clock[rank] = self._wait(bucket, (rank,), self.clock[rank])

    def _backward(self, action: Backward, group: list[int]) -> None:
        """Do a backward with all ranks of its group, and issue the pushes that it completes."""
        stage, segments = self._work(action)
        for rank in group:
            self._wait_for_all(rank)
        start_s = now_s = max(self.clock[rank] for rank in group)
        # Each rank's own action names the pushes that it issues: its last backward has some.
        pushing = {
            rank: own_action
            for rank in group
            if pushes_of(own_action := self._head(rank) or action)
        }
        if not pushing:
            self._done(action, group, start_s, start_s + sum(pair[1] for pair in segments))
            return
        for bucket, (_, seconds) in zip(reversed(stage.buckets), reversed(segments), strict=True):
            now_s += seconds
            for rank, own_action in pushing.items():
                if bucket in pushes_of(own_action):
                    self._issue(own_action, rank, bucket, now_s)
        self._done(action, group, start_s, now_s)

    def _work(self, action: Forward | Backward) -> tuple[Stage, Segments]:
        """(stage, seconds of its segments) for a forward or backward. Raises ProgramError for a
        micro-batch or stage that does not exist."""
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
        """Record a forward or backward of a group from ``start_s`` to ``end_s``, of which it waited
        ``waited_s`` seconds for weights, and move the clocks of its ranks to the end."""
        tokens, ranks = self._tokens[action.micro_batch], len(action.group)
        for rank in group:
            text = str(self._head(rank))
            self._record(rank, text, action.kind, start_s, end_s, tokens, ranks, waited_s)
            self.clock[rank] = end_s

    def _traffic(self, action: Send | Recv | Exchange, rank: int) -> bool:
        """Post the message that an action sends, when the rank first comes to it, and end the
        action once the message that it receives is there. Returns False where the rank has to wait;
        the action is then tried again."""
        messages = {message.sends: message for message in messages_of(action)}
        # An action has at most one message that it sends and one that it receives.
        outgoing, incoming, start_s = messages.get(True), messages.get(False), self.clock[rank]
        if outgoing is not None and rank not in self._posted:
            self._posted[rank] = self._send(outgoing, rank)
        if incoming is not None and incoming.key(rank) not in self._there:
            return False
        end_s = self._posted.pop(rank, start_s)
        if incoming is not None:
            end_s = max(end_s, self._there.pop(incoming.key(rank)))
        rows = sum(message.rows for message in messages.values())
        self._record(rank, str(action), action.kind, start_s, end_s, rows, 2)
        self.clock[rank] = end_s
        self._places[rank] += 1
        return True

    def _send(self, message: Posted, rank: int) -> float:
        """Post a message of a rank and return when, in seconds: once the rank is here and its
        newest message to that neighbour has arrived, as one is in flight at a time."""
        under_way = self._under_way[rank]
        posted_s = max(self.clock[rank], under_way.get(message.peer, 0.0))
        there_s = posted_s + message_s(self._costs, message.rows)
        under_way[message.peer] = self._there[message.key(rank)] = there_s
        if message.peer in self._actions:  # it may wait for this message
            self._ready.append(message.peer)
        return posted_s

    def _update(self, group: list[int]) -> None:
        """Do the update of all ranks, once all weights, messages and pushes have arrived. Waits for
        pushes have rows of their own."""
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
        """(bucket, seconds until its push ends) in the order of the pushes. Raises ProgramError
        where the ranks of the group do not have the same order."""
        order = list(self._pushes[group[0]])
        for rank in group:
            if list(self._pushes[rank]) != order:
                raise ProgramError(
                    f"pushes of rank {rank}",
                    got=list(self._pushes[rank]),
                    wanted=f"{order} as on rank {group[0]}",
                )
        # A push is a collective: it starts when the last rank has issued it.
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
        CostError: When the costs are of other devices or lack what the plan uses.
    """
    check_costs(plan, costs)
    if plan.semantics == "lockstep":
        return _in_lockstep(plan, costs).seconds
    forward, backward = _segments(plan, costs)
    exchange = exchange_of(costs, plan)
    there_s = np.array(arrivals(costs, exchange))
    # When the last rank issues the push of each bucket, and when all ranks have computed: not
    # before all weights are there.
    issued_s, computed_s = np.zeros(len(there_s)), float(there_s[-1])
    staged = [n for n, pipeline in enumerate(plan.pipelines) if pipeline.scheme.pipeline > 1]
    staged_set = set(staged)
    unstaged = [n for n, micro in enumerate(plan.micro_batches) if micro.pipeline not in staged_set]
    if unstaged:
        begins, ends = _backwards(plan, unstaged, forward, backward.sum(axis=1), there_s)
        computed_s = max(computed_s, *ends.values())
        for n in _last_of_ranks(plan, unstaged):
            # The backward completes the gradients of the buckets from the last to the first.
            complete_s = np.cumsum(backward[n][::-1])[::-1]
            np.maximum(issued_s, begins[n] + complete_s, out=issued_s)
    if staged:
        pipelines = _staged_pipelines(plan, costs, staged, forward, backward, there_s)
        for times in run_pipelines(pipelines):
            np.maximum(issued_s, times.issued, out=issued_s)
            computed_s = max(computed_s, times.end_s)
    pushes = [(bucket, float(issued_s[bucket])) for bucket in reversed(range(len(there_s)))]
    push_ends_s = push_ends(costs, exchange, pushes)
    return max(push_ends_s[-1], computed_s, 0.0) + exchange.update_s * costs.scale


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
    sums = _sums(tokens, [micro.sequences for micro in plan.micro_batches])
    schemes: dict[Scheme, Scheme] = {}  # equal ones as one object
    scheme_of = [
        schemes.setdefault(pipeline.scheme, pipeline.scheme) for pipeline in plan.pipelines
    ]
    kinds = [(scheme_of[micro.pipeline], micro.layers) for micro in plan.micro_batches]
    if plan.semantics == "free":
        return _priced(costs, plan.working, sums, kinds)
    # Every layer's weights are gathered from the whole world, in forward and backward, which takes
    # the place of gathers within a group.
    forward, backward = _priced(costs, "replicated", sums, kinds)
    forward_s, backward_s = costs.gather_s.get(max(costs.working_bytes), (0.0, 0.0))
    forward[:, 1:-1] += forward_s * costs.scale
    backward[:, 1:-1] += backward_s * costs.scale
    return forward, backward


def _in_lockstep(plan: Plan, costs: CostModel) -> Timeline:
    """The timeline of a plan in lockstep."""
    seconds = np.zeros((2, 0))
    if plan.micro_batches:
        seconds = np.stack([each.sum(axis=1) for each in _segments(plan, costs)])
    forward_s, backward_s = seconds.tolist()
    return wave_timeline(plan, forward_s, backward_s, costs.exchange_s.update_s * costs.scale)


def _priced(
    costs: CostModel,
    working: Working,
    sums: Floats,
    kinds: Sequence[tuple[Scheme, LayerPlan]],
) -> tuple[Floats, Floats]:
    """Seconds of the forward, and of the backward, of each segment of each micro-batch, both
    [micro-batches, buckets]. ``sums`` are those of :func:`_sums`, ``kinds`` the scheme and layer
    plan of each micro-batch; those that are the same objects are priced together."""
    # By identity: hashing all layers of all micro-batches takes longer than the few repetitions.
    alike: dict[tuple[int, int], list[int]] = {}
    for number, (scheme, layers) in enumerate(kinds):
        alike.setdefault((id(scheme), id(layers)), []).append(number)
    forward = np.zeros((len(kinds), costs.shape.bucket_count))
    backward = np.zeros_like(forward)
    for numbers in alike.values():
        forward_rows, backward_rows = segment_rows(costs, *kinds[numbers[0]], working)
        own_sums = sums[:, numbers]
        forward[numbers] = (forward_rows @ own_sums).T
        backward[numbers] = (backward_rows @ own_sums).T
    return forward, backward


def _sums(tokens: Floats, micro_batches: Sequence[Sequence[int]]) -> Floats:
    """The sums by which the segments of micro-batches are priced: squares of tokens, tokens, and
    one [3, micro-batches]. ``micro_batches`` have the indices of their sequences in ``tokens``."""
    sizes = [len(sequences) for sequences in micro_batches]
    tokens_in_order = tokens[[i for sequences in micro_batches for i in sequences]]
    first_of = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    return np.stack(
        [
            np.add.reduceat(tokens_in_order**2, first_of),
            np.add.reduceat(tokens_in_order, first_of),
            np.ones(len(sizes)),
        ]
    )


def _backwards(
    plan: Plan, plain: Sequence[int], forward: Floats, backward_s: Floats, there_s: Floats
) -> tuple[dict[int, float], dict[int, float]]:
    """(start of the backward, end of the backward) of each micro-batch of ``plain``, those without
    stages, in seconds by its number. Each runs when all its ranks are free. ``forward`` has the
    seconds of the forward's segments [micro-batches, buckets], ``backward_s`` of whole backwards
    [micro-batches], ``there_s`` those until each bucket's weights are there [buckets]."""
    # From each segment on, the seconds of the forward that remain. No forward ends before the
    # weights of a segment are there and what remains from it on is computed.
    remaining_s = np.cumsum(forward[plain][:, ::-1], axis=1)[:, ::-1]
    earliest_s = (there_s + remaining_s).max(axis=1).tolist()
    free_at_s, all_there_s = [0.0] * plan.devices, float(there_s[-1])
    begins, ends = dict[int, float](), dict[int, float]()
    for n, forward_s, back_s, first_end_s in zip(
        plain, remaining_s[:, 0].tolist(), backward_s[plain].tolist(), earliest_s, strict=True
    ):
        ranks = plan.pipelines[plan.micro_batches[n].pipeline].ranks
        now_s = max([free_at_s[rank] for rank in ranks])
        forward_end_s = now_s + forward_s
        if now_s < all_there_s:  # it may have to wait for weights
            forward_end_s = max(forward_end_s, first_end_s)
        begins[n], ends[n] = forward_end_s, forward_end_s + back_s
        for rank in ranks:
            free_at_s[rank] = ends[n]
    return begins, ends


def _last_of_ranks(plan: Plan, plain: Sequence[int]) -> list[int]:
    """The micro-batches among ``plain`` that are the last one of some rank, as rising numbers."""
    last_of = {plan.micro_batches[n].pipeline: n for n in plain}  # the last of each pipeline
    last: dict[int, int] = {}
    for pipeline, n in last_of.items():
        for rank in plan.pipelines[pipeline].ranks:
            last[rank] = max(n, last.get(rank, -1))
    return sorted(set(last.values()))


def _staged_pipelines(
    plan: Plan,
    costs: CostModel,
    staged: Iterable[int],
    forward: Floats,
    backward: Floats,
    there_s: Floats,
) -> list[StagedPipeline]:
    """The pipelines of a plan with stages, ``staged`` by their numbers, that have micro-batches.
    ``forward`` and ``backward`` are seconds of segments [micro-batches, buckets], ``there_s`` the
    seconds until each bucket's weights are there [buckets]."""
    micros_of: dict[int, list[int]] = {}
    for n, micro in enumerate(plan.micro_batches):
        micros_of.setdefault(micro.pipeline, []).append(n)
    pipelines = list[StagedPipeline]()
    for number in staged:
        micros, pipeline = micros_of.get(number, []), plan.pipelines[number]
        tokens = [sum(plan.tokens_of(plan.micro_batches[n])) for n in micros]
        if micros:
            made = StagedPipeline(
                stages=pipeline.stages(costs.shape.layers),
                forward=forward[micros],
                backward=backward[micros],
                message_s=_message_seconds(costs, pipeline.scheme.width, tokens),
                there_s=there_s,
            )
            pipelines.append(made)
    return pipelines


def staged_pipeline(
    costs: CostModel,
    pipeline: Pipeline,
    working: Working,
    tokens: Floats,
    micro_batches: Sequence[Sequence[int]],
    layers: Sequence[LayerPlan],
) -> StagedPipeline:
    """What a pipeline with stages has to do, where all weights and gradients move.

    Args:
        costs: What it costs, of a model.
        pipeline: The pipeline.
        working: How its ranks hold weights.
        tokens: Tokens of every sequence [sequences].
        micro_batches: For each micro-batch, in order, the indices of its sequences.
        layers: The layer plan of each micro-batch; those that are the same object are priced
            together.

    Returns:
        The pipeline, to be run by :func:`headrace.simulator.staged_clock.run_pipelines`.
    """
    sums = _sums(tokens, micro_batches)
    kinds = [(pipeline.scheme, plan) for plan in layers]
    forward, backward = _priced(costs, working, sums, kinds)
    return StagedPipeline(
        stages=pipeline.stages(costs.shape.layers),
        forward=forward,
        backward=backward,
        message_s=_message_seconds(costs, pipeline.scheme.width, map(int, sums[1].tolist())),
        there_s=np.array(arrivals(costs, costs.exchange_s)),
    )


def staged_steps_s(pipelines: Sequence[StagedPipeline], costs: CostModel) -> list[float]:
    """Predict the step of each of some pipelines with stages as if it were the only one, with all
    weights and gradients moving.

    Args:
        pipelines: The pipelines, as :func:`staged_pipeline` makes them.
        costs: What they cost, of a model.

    Returns:
        Seconds of each one's step, with the costs' scale.
    """
    exchange, scale = costs.exchange_s, costs.scale
    # A push is followed by those of all earlier buckets.
    pushing_s = exchange.push_s * scale * np.cumsum(costs.shape.bucket_shares)
    return [
        max(float((times.issued + pushing_s).max()), times.end_s, float(pipeline.there_s[-1]))
        + exchange.update_s * scale
        for pipeline, times in zip(pipelines, run_pipelines(pipelines), strict=True)
    ]


def _message_seconds(costs: CostModel, width: int, tokens: Iterable[int]) -> Floats:
    """Seconds of a message between stages of ``width`` ranks of micro-batches of so many
    ``tokens`` [micro-batches]."""
    # The first rank of a stage has the most rows of every message, so none of the others is later.
    return message_s(costs, 1) * np.array([rows_of(count, width, 0) for count in tokens])


def simulate(programs: Sequence[Program], plan: Plan, costs: CostModel) -> Timeline:
    """The predicted timeline of ``programs``, which were compiled from ``plan``.

    Rows stand rank by rank in program order; those of a plan in lockstep are forwards, backwards
    and the update, as pulls and pushes are part of these. Raises ProgramError when the programs are
    not those of the plan's ranks, name a bucket, micro-batch or stage that does not exist, or
    deadlock; CostError when ``costs`` lack a stage's width or an option of the plan.
    """
    if [program.rank for program in programs] != list(range(plan.devices)):
        raise ProgramError("programs", got=len(programs), wanted=f"one for each of {plan.devices}")
    if plan.semantics == "lockstep":
        check_costs(plan, costs)
        return _in_lockstep(plan, costs)
    walk = Walk(programs, plan, costs)
    walk.run()
    rows = tuple(row for rank in range(plan.devices) for row in walk.rows[rank])
    return Timeline(source="predicted", rows=rows, devices=plan.devices)
