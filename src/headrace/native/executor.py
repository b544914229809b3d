"""The executor: runs this rank's program of a plan, action by action, and measures each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch

from headrace.comm.collectives import agree, gather_floats
from headrace.comm.mesh import Groups
from headrace.comm.waiting import check
from headrace.errors import PlanMismatch
from headrace.layouts.transfer import Pending
from headrace.methods.registry import branch
from headrace.methods.weights import Weight
from headrace.models.transformer import Transformer
from headrace.native.micro_batch import MicroBatchRun, sources
from headrace.native.spans import Spans, StepClock, clock_of
from headrace.native.storage import Storage
from headrace.native.storage import Working as WorkingWeights
from headrace.spec.architecture import Architecture, bucket_count
from headrace.spec.checker import OwnPrograms
from headrace.spec.known_methods import subgroups
from headrace.spec.layer_plan import LayerPlan
from headrace.spec.measurement import Row
from headrace.spec.plan import Pipeline, Plan, Working
from headrace.spec.program import (
    Action,
    Backward,
    Exchange,
    Forward,
    Message,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    Update,
)
from headrace.spec.strategy import Scheme
from headrace.spec.walk import messages_of
from headrace.units import counted

__all__ = [
    "Executor",
    "PlanGroups",
    "StepResult",
    "StepState",
]

Ranks = tuple[int, ...]
"""Ranks of the world, ascending."""


class PlanGroups:
    """Finds the groups of ranks, for which process groups are made, that plans of one model need.
    Those of a pipeline with a layer plan are computed once and kept for later plans."""

    def __init__(self, architecture: Architecture) -> None:
        """Start with empty caches, which fill as plans come."""
        self._architecture = architecture
        # Layer plans are numbered from 0, as a number is quicker to hash in the keys below.
        self._layer_numbers: dict[LayerPlan, int] = {}
        self._layer_plans: list[LayerPlan] = []
        # groups of a pipeline as indices of its members, by all they depend on: (scheme, shares of
        # the stages, number of the layer plan, working layout)
        self._member_groups: dict[tuple[Scheme, Ranks, int, Working], frozenset[Ranks]] = {}
        # groups of a pipeline in ranks of the world, by (pipeline, number of the layer plan,
        # working layout)
        self._rank_groups: dict[tuple[Pipeline, int, Working], frozenset[Ranks]] = {}

    def of(self, plan: Plan) -> set[Ranks]:
        """All groups, as ranks of the world, that a plan needs: the stages of its pipelines, their
        tensor blocks, and those that methods need. Raises SpecError for a method that a stage
        cannot run."""
        wanted = set[Ranks]()
        # Layer plans by identity: hashing those of all micro-batches would take longer than looking
        # at equal ones twice.
        used_layers = {
            (micro.pipeline, id(micro.layers)): micro.layers for micro in plan.micro_batches
        }
        distinct_plans = {id(layers): layers for layers in used_layers.values()}
        numbers = {layers_id: self._number(layers) for layers_id, layers in distinct_plans.items()}
        for pipeline_index, layers_id in used_layers:
            pipeline = plan.pipelines[pipeline_index]
            key = pipeline, numbers[layers_id], plan.working
            if key not in self._rank_groups:
                self._rank_groups[key] = self._groups(*key)
            wanted |= self._rank_groups[key]
        return wanted

    def _number(self, layers: LayerPlan) -> int:
        """The number of a layer plan: they are numbered from 0 in the order in which they were
        met."""
        if layers not in self._layer_numbers:
            self._layer_numbers[layers] = len(self._layer_plans)
            self._layer_plans.append(layers)
        return self._layer_numbers[layers]

    def _groups(self, pipeline: Pipeline, layers: int, working: Working) -> frozenset[Ranks]:
        """The groups of a pipeline in ranks of the world, for layer plan number ``layers``. They
        are computed as indices of members, which pipelines that differ in their ranks alone
        share."""
        key = pipeline.scheme, pipeline.shares, layers, working
        if key not in self._member_groups:
            self._member_groups[key] = self._groups_of(pipeline, self._layer_plans[layers], working)
        width = pipeline.scheme.width
        # member i of the pipeline is ranks[i]: stage after stage, ascending within each
        ranks = [
            rank
            for first in range(0, len(pipeline.ranks), width)
            for rank in sorted(pipeline.ranks[first : first + width])
        ]
        return frozenset(
            tuple(ranks[member] for member in members) for members in self._member_groups[key]
        )

    def _groups_of(
        self, pipeline: Pipeline, layers: LayerPlan, working: Working
    ) -> frozenset[Ranks]:
        """The groups of a pipeline, by the indices of its members, stage after stage: each stage,
        the blocks that share sharded weights, the tensor blocks, and what methods need. Raises
        SpecError for a method that a stage cannot run."""
        architecture, wanted = self._architecture, set[Ranks]()
        width = pipeline.scheme.width
        block_ranks = pipeline.scheme.parts(sharded=working == "sharded")
        for stage in pipeline.stages(architecture.layers):
            first = stage.index * width
            wanted.add(tuple(range(first, first + width)))
            for size in {block_ranks, pipeline.scheme.tensor}:
                wanted |= {
                    tuple(range(start, min(start + size, first + width)))
                    for start in range(first, first + width, size)
                }
            for option in set(layers.options[stage.start : stage.stop]):
                # called only for the SpecError of a method that cannot run here
                branch(option.attention, "attention", architecture, width)
                branch(option.feed_forward, "feed_forward", architecture, width)
                for members in subgroups(option, architecture, width, pipeline.scheme.tensor):
                    wanted.add(tuple(first + member for member in members))
        return frozenset(wanted)


@dataclass(slots=True, kw_only=True)
class StepState:
    """The state of one step of a plan on one rank.

    ``number`` is that of the step and ``lr`` its learning rate; ``tokens[i]`` are the ids of the
    batch's sequence i, ``masks[i]`` says which of them have a loss (None: all). ``working`` are the
    weights, ``spans`` the times of the actions.

    By bucket, ``pulls`` and ``pushes`` are the transfers in flight. By number of the micro-batch,
    ``runs`` are those whose forward has run, until nothing more is needed of them; ``arrived`` are
    the activations and ``returned`` the gradients that other stages have sent and no action has
    used yet. By number of the pipeline, ``views`` are the weights of this rank's stage by name.

    ``losses`` are this rank's parts of the loss, on the device: reading one waits for the device.
    The update sets ``loss``, that of the batch, and ``norm``, that of the gradient.
    """

    plan: Plan
    tokens: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray | None, ...]
    number: int
    lr: float
    working: WorkingWeights
    spans: Spans
    pulls: dict[int, Pending] = field(default_factory=dict)
    pushes: dict[int, Pending] = field(default_factory=dict)
    runs: dict[int, MicroBatchRun] = field(default_factory=dict)
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    returned: dict[int, torch.Tensor] = field(default_factory=dict)
    views: dict[int, dict[str, Weight]] = field(default_factory=dict)
    losses: list[torch.Tensor | float] = field(default_factory=list)
    loss: float = 0.0
    norm: float = 0.0

    def leaving(self, message: Message) -> torch.Tensor:
        """The activations or gradients [rows, h] that a message sends. References to what is sent
        are dropped, to free memory: to activations in the micro-batch, and with gradients, the last
        thing that it has, to the micro-batch itself.

        Raises PlanMismatch when there are more or fewer rows than the program says.
        """
        run = self.runs[message.micro_batch]
        if message.what == "a":  # activations
            value, run.leaving = run.leaving, None
        else:
            value = self.runs.pop(message.micro_batch).returning
        assert value is not None, "the checker saw that it is there"
        if len(value) != message.rows:
            raise PlanMismatch(
                f"rows of micro-batch {message.micro_batch} for rank {message.peer}",
                got=len(value),
                wanted=message.rows,
            )
        return value

    def arrive(self, message: Message, value: torch.Tensor) -> None:
        """Store the activations or gradients [rows, h] that a message brought, for the
        micro-batch's next action."""
        waiting = self.arrived if message.what == "a" else self.returned
        waiting[message.micro_batch] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results of one step: the batch's mean loss (the same on all ranks), the gradient's norm
    before clipping, and this rank's measured rows, in seconds from the start of the step."""

    loss: float
    gradient_norm: float
    rows: tuple[Row, ...]


class Executor:
    """Runs plans on this rank: each step by this rank's program, action by action.

    Master weights are not written before the update, so a step that fails leaves them as they were.
    After a failed step, ``action`` is where it failed, ``prepared`` whether its groups were made,
    and ``written`` whether it had begun to change weights.

    ``entered`` is called with each action before it starts, for the watcher to publish, and before
    the update with those that the device has not ended. With ``checked``, values that are not
    finite are looked for after each layer, and the layer is named. Pulls together, and pushes
    together, take at most ``in_flight_bytes`` in flight, or one transfer where that alone takes
    more: the next waits for the oldest. Without ``overlap`` nothing is computed while weights
    arrive or gradients leave, to compare with. ``clock`` is that of ``device`` by default.
    """

    def __init__(
        self,
        storage: Storage,
        groups: Groups,
        *,
        seed: int,
        device: str = "cpu",
        checked: bool = False,
        overlap: bool = True,
        in_flight_bytes: float = float("inf"),
        clock: StepClock | None = None,
        entered: Callable[[str], None] = lambda action: None,
    ) -> None:
        """Make the model of ``storage``; no group is made and nothing is sent."""
        self.storage, self.groups = storage, groups
        self.model = Transformer(storage.architecture)
        self.buckets = bucket_count(storage.architecture)
        self._seed, self._device, self._entered = seed, device, entered
        self._checked, self._overlap = checked, overlap
        self._in_flight_bytes = in_flight_bytes
        self._clock = clock or clock_of(device)
        self._programs = OwnPrograms(rank=groups.rank, bucket_count=self.buckets, overlap=overlap)
        self._plan_groups = PlanGroups(storage.architecture)
        self.action, self.prepared, self.written = "", False, False

    def prepare(self, plan: Plan) -> Program:
        """Make sure that all ranks have the same plan, make its process groups, and return this
        rank's program, which is checked where none of its kind was before. Collective.

        Raises PlanMismatch when ranks hold different plans, or the plan is for other semantics,
        another number of ranks or another number of layers; SpecError when a stage cannot run a
        method of its layers; ProgramError when it would deadlock.
        """
        agree("hash of the plan", plan.hash, self.groups.world)
        if plan.semantics != "free" or plan.devices != self.groups.ranks:
            raise PlanMismatch(
                "plan",
                got=f"{plan.semantics} for {counted(plan.devices, 'rank')}",
                wanted=f"free for {self.groups.ranks}",
            )
        layers = self.storage.architecture.layers
        for number, micro in enumerate(plan.micro_batches):
            if len(micro.layers.options) != layers:
                raise PlanMismatch(
                    f"layers of micro-batch {number}", got=len(micro.layers.options), wanted=layers
                )
        program = self._programs.of(plan)
        self.action = "the making of groups"
        self.groups.prepare(self._plan_groups.of(plan))
        if any(pipeline.scheme.pipeline > 1 for pipeline in plan.pipelines):
            self.groups.prepare_messages(
                {m.peer for action in program.actions for m in messages_of(action)}
            )
        return program

    def run(
        self,
        plan: Plan,
        tokens: tuple[np.ndarray, ...],
        *,
        step: int,
        lr: float,
        masks: tuple[np.ndarray | None, ...] = (),
    ) -> StepResult:
        """One optimizer step of ``plan`` at rate ``lr``; ``tokens[i]`` are sequence i's ids, and
        ``masks[i]`` says which of them have a loss (None, or no masks at all: all).

        Raises what :meth:`prepare` does, and PlanMismatch when the sequences are not as long as
        the plan says: their packs would be cut elsewhere, and the loss divided by another count.
        """
        self.prepared, self.written, self.action = False, False, "the agreement on the plan"
        program = self.prepare(plan)
        self.prepared, self.action = True, "the making of working weights"
        found, planned = map(len, tokens), plan.lengths.tokens
        for i, (got, wanted) in enumerate(zip_longest(found, planned, fillvalue="none")):
            if got != wanted:
                raise PlanMismatch(f"tokens of sequence {i}", got=got, wanted=wanted)
        working = self.storage.working(plan)
        working.begin()
        state = StepState(
            plan=plan,
            tokens=tokens,
            masks=masks,
            number=step,
            lr=lr,
            working=working,
            spans=Spans(self._clock, self.groups.rank),
        )
        for action in program.actions:
            self.action = str(action)
            self._entered(self.action)
            check()
            self._do(action, state)
        self._entered("between steps")
        return StepResult(loss=state.loss, gradient_norm=state.norm, rows=state.spans.rows())

    def _do(self, action: Action, state: StepState) -> None:
        """Run one action of the program, and time it. Of pulls and pushes the action is only that
        they are issued; they are waited for where their weights are needed, and gradients in the
        update."""
        if not self._overlap and not isinstance(action, Pull):
            self._wait_for_pulls(list(state.pulls), state)
        match action:
            case Pull(bucket=bucket):
                self._pull(bucket, state)
            case Forward():
                self._run_timed(action, state, lambda: self._forward(action, state))
            case Backward():
                self._wait_for_pulls(list(state.pulls), state)  # pulls that only other ranks need
                self._run_timed(action, state, lambda: self._backward(action, state))
            case Push(bucket=bucket):
                self._push(bucket, state)
            case Send() | Recv() | Exchange():
                self._run_timed(action, state, lambda: self._traffic(action, state))
            case Update():
                self._wait_for_pulls(list(state.pulls), state)
                if self._has_stages(state.plan):
                    self.groups.messages.settle()  # wait for what stages sent
                self._wait_for("G", list(state.pushes), state.pushes, state)
                state.spans.reach(self._entered)
                check()  # sums may hold the garbage of aborted transfers
                self._run_timed(action, state, lambda: self._update(state))

    @staticmethod
    def _has_stages(plan: Plan) -> bool:
        """Whether some pipeline has more than one stage."""
        return any(pipeline.scheme.pipeline > 1 for pipeline in plan.pipelines)

    def _pull(self, bucket: int, state: StepState) -> None:
        """Issue the pull of a weight bucket, once there is room for it."""
        self._make_room("P", bucket, state.pulls, state)
        with self._issuing("P", bucket, state):
            issued = state.working.pull(bucket)
        if issued is not None:
            state.pulls[bucket] = issued

    def _push(self, bucket: int, state: StepState) -> None:
        """Issue the push of a bucket's gradients, once there is room for it."""
        self._make_room("G", bucket, state.pushes, state)
        with self._issuing("G", bucket, state):
            issued = state.working.push(bucket)
        if issued is not None:
            state.pushes[bucket] = issued

    @contextmanager
    def _issuing(self, letter: str, bucket: int, state: StepState) -> Iterator[None]:
        """Context in which the transfer of a bucket is issued, a pull (``letter`` P) or a push (G).
        Where this may block, as for the first of two steps between nodes, it is timed: as a wait of
        the surrounding action, and as a row of its own."""
        if not state.working.waits:
            yield
            return
        with state.spans.wait(), self._transfer_span(letter, bucket, state):
            yield

    def _make_room(
        self, letter: str, bucket: int, pending: dict[int, Pending], state: StepState
    ) -> None:
        """Before the transfer of ``bucket`` is issued, wait for the oldest of ``pending``, pulls
        (``letter`` P) or pushes (G) by bucket, until all fit into the bytes that may be in flight.
        This cannot deadlock: all ranks issue the transfers that they share in the same order, and
        an issued one ends without anything more of the host."""
        free_bytes = self._in_flight_bytes - state.working.buffer_bytes(bucket)
        while pending and sum(transfer.nbytes for transfer in pending.values()) > free_bytes:
            with state.spans.wait():
                self._wait_for(letter, [next(iter(pending))], pending, state)

    def _wait_for_pulls(self, buckets: Sequence[int], state: StepState) -> None:
        """Wait for those pulls of ``buckets`` that are in flight."""
        in_flight = [bucket for bucket in buckets if bucket in state.pulls]
        if in_flight:
            with state.spans.wait():
                self._wait_for("P", in_flight, state.pulls, state)

    def _wait_for(
        self, letter: str, buckets: Sequence[int], pending: dict[int, Pending], state: StepState
    ) -> None:
        """Wait for the transfers of ``buckets`` out of ``pending``, in the order given. Each gets a
        row, named by ``letter`` (P for pulls, G for pushes) and its bucket."""
        for bucket in buckets:
            with self._transfer_span(letter, bucket, state):
                pending.pop(bucket).wait()

    def _transfer_span(
        self, letter: str, bucket: int, state: StepState
    ) -> AbstractContextManager[None]:
        """The span of one transfer, named as in programs: P3 is the pull of bucket 3, G3 its
        push."""
        kind = "pull" if letter == "P" else "push"
        return state.spans.action(f"{letter}{bucket}", kind, ranks=self.groups.ranks)

    def _run_timed(self, action: Action, state: StepState, work: Callable[[], None]) -> None:
        """Run ``work`` and time it as ``action``; its row has the action's tokens and the number of
        ranks that take part."""
        tokens, ranks = 0, self.groups.ranks
        if isinstance(action, Forward | Backward):
            tokens = sum(state.plan.tokens_of(state.plan.micro_batches[action.micro_batch]))
            ranks = len(action.group)
        elif isinstance(action, Send | Recv | Exchange):
            tokens, ranks = sum(message.rows for message in messages_of(action)), 2
        with state.spans.action(str(action), action.kind, tokens=tokens, ranks=ranks):
            work()

    def _forward(self, action: Forward, state: StepState) -> None:
        """Run the forward of one micro-batch on this stage, from what the stage before sent; each
        bucket is waited for when the model comes to it."""
        index = action.micro_batch
        micro = state.plan.micro_batches[index]
        if micro.pipeline not in state.views:
            pipeline = state.plan.pipelines[micro.pipeline]
            state.views[micro.pipeline] = sources(
                self.storage.table, state.working, state.plan, pipeline, self.groups
            )
        run = MicroBatchRun.of(
            self.model,
            state.plan,
            micro,
            state.tokens,
            state.views[micro.pipeline],
            self.groups,
            masks=state.masks,
            seed=self._seed,
            step=state.number,
            dtype=self.storage.working_dtype,
            device=self._device,
            checked=self._checked,
        )
        run.forward(
            state.arrived.pop(index, None), lambda bucket: self._wait_for_pulls([bucket], state)
        )
        state.losses.append(run.loss)
        state.runs[index] = run

    def _backward(self, action: Backward, state: StepState) -> None:
        """Run the backward of one micro-batch on this stage; the buckets that the action names are
        pushed as soon as their gradients are complete."""
        micro_batch, push_after = action.micro_batch, set(action.pushes)

        def done(bucket: int) -> None:
            """Push a bucket, whose gradients are complete, where the action says so."""
            if bucket in push_after:
                self._push(bucket, state)

        run = state.runs[micro_batch]
        run.backward(state.returned.pop(micro_batch, None), done)
        if run.stage.first:  # it sends no gradients to a stage before, so it is not needed any more
            del state.runs[micro_batch]

    def _traffic(self, action: Send | Recv | Exchange, state: StepState) -> None:
        """Send the activations or gradients that leave a micro-batch, receive others for a next
        action, or both at once."""
        messages, device = self.groups.messages, self._device
        hidden, dtype = self.storage.architecture.hidden, self.storage.working_dtype
        match action:
            case Send(message=sent):
                messages.send(state.leaving(sent), sent.peer)
            case Recv(message=received):
                value = messages.receive((received.rows, hidden), dtype, device, received.peer)
                state.arrive(received, value)
            case Exchange(send=Send(message=sent), recv=Recv(message=received)):
                leaving = state.leaving(sent)
                state.arrive(
                    received, messages.exchange(leaving, (received.rows, hidden), sent.peer)
                )

    def _update(self, state: StepState) -> None:
        """Sum the loss over all ranks, find the norm of the gradient, and update the stored
        weights. Collective."""
        own = sum(map(float, state.losses))
        state.loss = sum(row[0] for row in gather_floats([own], self.groups.world))
        state.norm = self.storage.gradient_norm()
        self.written = True  # no rank can fail any more before its own update
        self.storage.update(state.lr, state.norm)
