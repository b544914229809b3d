"""Static checks of programs: what would hang, repeat or be lost is found before it runs.

Rules, over the programs of all ranks of one plan, or of ranks that no pipeline with work connects
with others: what they check by themselves holds for the world, as the order of rule 1 is one order.

1. every rank issues the world's collectives in one order: pulls from the first bucket to the last,
   pushes from the last to the first, the update;
2. every group meets in the same sequence of actions on all its ranks, and every two ranks send
   and receive the same messages (what, micro-batch, rows) in the same order;
3. local order: a forward after all pulls and after its activations have arrived, a backward after
   its forward and after its gradients have arrived, a send after what it sends, the push of a
   bucket within or after the last backward that works with it, the pushes within a backward in
   the order in which its segments end, the update last;
4. every action exactly once: every bucket pulled and pushed, every micro-batch of the plan forward
   and backward on each rank of its pipeline, with a message wherever two stages meet;
5. the lists run to their end when every meeting waits for all its members, every send for its
   receiver, and every forward until all ranks have issued the pulls before it (the strict mode:
   what runs in it runs with any transport);
6. ranks post what they share with others in one order, pushes too: the lists run to their end when
   every push waits for all ranks, and a backward meets in each bucket that is pushed in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from headrace.errors import ProgramError
from headrace.spec.plan import Pipeline, Plan
from headrace.spec.program import (
    Action,
    Backward,
    Exchange,
    Forward,
    Idle,
    Message,
    Packs,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    Update,
    compile_rank,
    connected,
    is_last,
    last_of_ranks,
    rows_of,
    turns_of,
)
from headrace.spec.strategy import Stage
from headrace.spec.walk import disordered, waiting

__all__ = [
    "OwnPrograms",
    "check_alone",
    "check_programs",
    "check_turns",
    "check_world",
]

Parts = Sequence[tuple[Action, Action]]
"""The parts of all actions of a program, each with the action it stands in."""

ActionOrder = dict[Action, int]
"""Where each part stands in its program, parts of one action one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One micro-batch on one rank, which works in ``stage`` of its pipeline. ``needs`` are pairs
    (action, actions that have to come before it) for all actions of the micro-batch: its forward,
    its ``backward``, its sends and receives."""

    stage: Stage
    backward: Backward
    needs: Sequence[tuple[Action, tuple[Action, ...]]]


def check_programs(programs: Sequence[Program], plan: Plan, bucket_count: int) -> None:
    """Raise ProgramError at the first rule that ``programs`` break for ``plan``, over a model of
    ``bucket_count`` - 2 layers. ``programs`` are those of all ranks, in the order of the ranks, or
    those of some ranks that no pipeline connects with others
    (:func:`~headrace.spec.program.connected`)."""
    ranks = [program.rank for program in programs]
    _check_ranks(ranks, plan)
    jobs = _jobs(plan, ranks, bucket_count - 2)
    parts = {program.rank: _parts(program) for program in programs}
    for rank, rank_parts in parts.items():
        # In this order, as the later checks rely on rule 4: each part is there once.
        _check_once(rank, rank_parts, jobs[rank], bucket_count)
        _check_local_order(rank, rank_parts, jobs[rank])
        _check_world_order(rank, rank_parts, bucket_count)
    _check_messages(parts)
    stuck = waiting(programs)
    if stuck:
        text = "; ".join(f"rank {rank} waits at {action}" for rank, action in stuck[:4])
        raise ProgramError("rule 5, the programs deadlock", got=text)
    if stuck := disordered(programs):
        text = "; ".join(f"rank {rank} at {action}" for rank, action in stuck[:4])
        raise ProgramError("rule 6, collectives in different orders", got=text)


def check_world(programs: Sequence[Program], plan: Plan, bucket_count: int) -> None:
    """Check the programs of all ranks, in the order of the ranks, as :func:`check_programs` does
    but in less time. Ranks of no pipeline with several stages are checked one by one, which is
    enough for them (:func:`check_alone`); the others together with the ranks that they are
    connected with."""
    ranks = [program.rank for program in programs]
    _check_ranks(ranks, plan)
    staged: set[int] = set()
    for index in {micro.pipeline for micro in plan.micro_batches}:
        if plan.pipelines[index].scheme.pipeline > 1:
            staged.update(connected(plan, plan.pipelines[index].ranks[0]))
    plain = [program for program in programs if program.rank not in staged]
    jobs = _jobs(plan, [program.rank for program in plain], bucket_count - 2)
    last = last_of_ranks(plan)
    for program in plain:
        _check_alone(program, jobs[program.rank], bucket_count, last)
    while staged:
        group = connected(plan, min(staged))
        staged -= set(group)
        check_programs([programs[rank] for rank in group], plan, bucket_count)


def check_alone(program: Program, plan: Plan, bucket_count: int) -> None:
    """Raise ProgramError at the first rule that the program of one rank breaks for ``plan``. The
    rank works in no pipeline with several stages.

    One program by itself is enough here. Such a rank meets others in forwards and backwards only,
    and every rank runs its micro-batches in the plan's order. The first unfinished micro-batch of
    the plan is therefore the next one of all its ranks, so it can run: there is no deadlock.
    """
    rank = program.rank
    working = [plan.pipelines[index] for index in {m.pipeline for m in plan.micro_batches}]
    if any(rank in p.ranks and p.scheme.pipeline > 1 for p in working):
        raise ProgramError(f"program of rank {rank}", got="alone", wanted="those of its pipeline")
    jobs = _jobs(plan, (rank,), bucket_count - 2)[rank]
    _check_alone(program, jobs, bucket_count, last_of_ranks(plan))


def _check_alone(
    program: Program, jobs: Sequence[_Job], bucket_count: int, last: Mapping[int, int]
) -> None:
    """Check the program of one rank that works in no pipeline with several stages. ``jobs`` are its
    own, ``last`` is the index of the last micro-batch of each rank."""
    rank, parts = program.rank, _parts(program)
    _check_once(rank, parts, jobs, bucket_count)
    _check_local_order(rank, parts, jobs)
    _check_world_order(rank, parts, bucket_count)
    computed = [part for part, _ in parts if isinstance(part, Forward | Backward)]
    # Without stages a forward is followed by its own backward, in the order of the jobs.
    for job, forward, backward in zip(jobs, computed[::2], computed[1::2], strict=True):
        if backward != job.backward or forward.micro_batch != backward.micro_batch:
            raise ProgramError(
                f"rule 2, rank {rank}, action {forward}",
                wanted=f"the forward and the backward of micro-batch {job.backward.micro_batch}",
            )
    _check_order_alone(program, last)


def check_turns(programs: Sequence[Program], plan: Plan, packs: Packs) -> None:
    """Check programs for a model that is handed micro-batches by a loop.

    What holds for them holds for the world: free groups meet in the order of the plan's
    micro-batches and of their packs, which is one order for all, so the first pack that is not done
    has all its ranks come to it; in lockstep every rank's k-th action is of the same turn and of
    the same pack, so all ranks stand at the same layer of the model.

    Args:
        programs: Those of some ranks, in the order of the ranks. A group is compared where all its
            ranks are there.
        plan: The plan of the step.
        packs: The packs of each micro-batch, the same on all ranks.

    Raises:
        ProgramError: At the first rule that is broken, with the rank and the action.
    """
    places = _packs_of_turns(plan, packs)
    for program in programs:
        _check_turn_packs(program, plan, packs)
        _check_turn_order(program, plan, places)


TurnPack = tuple[int, int]
"""A turn and the number of a pack in it."""


def _packs_of_turns(plan: Plan, packs: Packs) -> list[list[TurnPack]]:
    """For each turn of a plan in lockstep the pairs (turn, pack) at which all ranks meet: as many
    as the most packs that a micro-batch of the turn has."""
    return [
        [(number, pack) for pack in range(max((len(packs[index]) for index in turn), default=0))]
        for number, turn in enumerate(turns_of(plan))
    ]


def _check_turn_packs(program: Program, plan: Plan, packs: Packs) -> None:
    """Raise ProgramError unless every pack that this rank shares runs forward, then backward, once
    (rules 3 and 4), the update comes last, and the group of each pack is some of the ranks of its
    micro-batch."""
    rank = program.rank
    wanted = Counter[Action]({Update(): 1})
    for index, micro in enumerate(plan.micro_batches):
        members = set(plan.pipelines[micro.pipeline].ranks)
        for pack, group in enumerate(packs[index]):
            if not group or not members.issuperset(group):
                raise ProgramError(
                    f"pack {pack} of micro-batch {index}",
                    got=f"ranks {list(group)}",
                    wanted=f"some of {sorted(members)}",
                )
            if rank in group:
                wanted[Forward(stage=0, micro_batch=index, group=group, pack=pack)] += 1
                wanted[Backward(stage=0, micro_batch=index, group=group, pack=pack)] += 1
    got = Counter[Action](a for a in program.actions if not isinstance(a, Idle))
    for action in sorted(wanted.keys() | got.keys(), key=str):
        if got[action] != wanted[action]:
            raise ProgramError(
                f"rule 4, rank {rank}, action {action}",
                got=f"{got[action]} times",
                wanted=f"{wanted[action]}",
            )
    if not isinstance(program.actions[-1], Update):
        raise ProgramError(f"rule 3, rank {rank}, action {program.actions[-1]}", wanted="U last")
    for action, after in pairwise(program.actions):
        # As texts, 0F4[2,3] and 0B4[2,3] are the forward and the backward of the same pack.
        if isinstance(action, Forward) and str(after) != str(action).replace("F", "B", 1):
            raise ProgramError(
                f"rule 3, rank {rank}, action {after}", wanted=f"the backward of {action}"
            )


def _check_turn_order(program: Program, plan: Plan, places: list[list[TurnPack]]) -> None:
    """Raise ProgramError unless this rank runs its packs in the order of all ranks (rule 2). For
    free plans that is the order of micro-batches and packs; in lockstep its k-th forward or idle
    turn is at the k-th of ``places``."""
    turn_of = {index: number for number, turn in enumerate(turns_of(plan)) for index in turn}
    # (turn, pack, micro-batch) of each forward; the last two are -1 for an idle turn.
    came = [
        (turn_of[action.micro_batch], action.pack, action.micro_batch)
        if isinstance(action, Forward)
        else (action.turn, -1, -1)
        for action in program.actions
        if isinstance(action, Forward | Idle)
    ]
    rank = program.rank
    if plan.semantics == "free":
        order = [(index, pack) for _, pack, index in came]
        rising = all(earlier < later for earlier, later in pairwise(order))
        has_idle_turn = any(pack < 0 for _, pack in order)
        if not rising or has_idle_turn:
            raise ProgramError(
                f"rule 2, rank {rank}, order of its packs",
                got=", ".join(f"{index}.{pack}" for index, pack in order),
                wanted="that of the plan's micro-batches, without idle turns",
            )
        return
    wanted = [place for turn in places for place in turn]
    if len(came) != len(wanted):
        raise ProgramError(
            f"rule 2, rank {rank}, actions in lockstep", got=len(came), wanted=len(wanted)
        )
    for (turn, pack, _), place in zip(came, wanted, strict=True):
        if turn != place[0] or pack not in (-1, place[1]):
            raise ProgramError(
                f"rule 2, rank {rank}, order in lockstep",
                got=f"turn {turn}, pack {pack}",
                wanted=f"turn {place[0]}, pack {place[1]}, where the other ranks are",
            )


def _check_order_alone(program: Program, last: Mapping[int, int]) -> None:
    """Raise ProgramError where a backward pushes gradients although a rank of its group has a later
    micro-batch (rule 6). ``last`` is the index of the last micro-batch of each rank. Rule 3 has
    been checked."""
    for action in program.actions:
        if isinstance(action, Backward) and action.pushes and not is_last(last, action):
            raise ProgramError(
                f"rule 6, rank {program.rank}, action {action}",
                got="pushes within it",
                wanted="pushes after it, as one of its ranks has a later micro-batch",
            )


def _check_ranks(ranks: Sequence[int], plan: Plan) -> None:
    """Raise ProgramError unless ``ranks`` rise and can be checked without the others: they are all
    ranks, or no pipeline with work connects one of them with a rank that is missing."""
    world = range(plan.devices)
    if list(ranks) == list(world):
        return
    sound = bool(ranks) and set(ranks) <= set(world) and sorted(set(ranks)) == list(ranks)
    unchecked = set(ranks)
    while sound and unchecked:
        component = set(connected(plan, min(unchecked)))
        sound = component <= unchecked
        unchecked -= component
    if not sound:
        raise ProgramError(
            "ranks of the programs",
            got=list(ranks),
            wanted=f"0 to {world[-1]}, or ranks that no pipeline with work connects with others",
        )


def _parts(program: Program) -> Parts:
    """Pairs (part, action): an exchange is a send and a receive, a backward that pushes is a
    backward and its pushes, any other action is itself."""
    found: list[tuple[Action, Action]] = []
    for action in program.actions:
        match action:
            case Exchange(send=send, recv=recv):
                found += [(send, action), (recv, action)]
            case Backward(stage=stage, micro_batch=index, group=group, pushes=pushes) if pushes:
                found.append((Backward(stage=stage, micro_batch=index, group=group), action))
                found += [(Push(bucket=bucket), action) for bucket in pushes]
            case _:
                found.append((action, action))
    return found


def _jobs(plan: Plan, ranks: Sequence[int], layers: int) -> dict[int, list[_Job]]:
    """By rank the micro-batches that the plan gives it, in the plan's order, with the actions that
    each needs. ``layers`` are those of the model."""
    jobs: dict[int, list[_Job]] = {rank: [] for rank in ranks}
    used = {micro.pipeline for micro in plan.micro_batches}
    stages = {
        index: plan.pipelines[index].stages(layers)
        for index in used
        if not jobs.keys().isdisjoint(plan.pipelines[index].ranks)
    }
    for index, micro in enumerate(plan.micro_batches):
        if micro.pipeline not in stages:
            continue
        tokens = sum(plan.tokens_of(micro))
        for stage in stages[micro.pipeline]:
            forward = Forward(stage=stage.index, micro_batch=index, group=stage.ranks)
            backward = Backward(stage=stage.index, micro_batch=index, group=stage.ranks)
            for member, rank in enumerate(stage.ranks):
                if rank not in jobs:
                    continue
                rows = rows_of(tokens, len(stage.ranks), member)
                neighbours = _neighbours(stage, stages[micro.pipeline], member)
                needs = _needs(forward, backward, neighbours, rows)
                jobs[rank].append(_Job(stage=stage, backward=backward, needs=needs))
    return jobs


def _neighbours(
    stage: Stage, stages: Sequence[Stage], member: int
) -> tuple[int | None, int | None]:
    """The ranks (before, after) that the ``member``-th rank of a stage exchanges messages with:
    those with the same index in the stage before and the stage after, None at an end."""
    before = None if stage.first else stages[stage.index - 1].ranks[member]
    after = None if stage.last else stages[stage.index + 1].ranks[member]
    return before, after


def _needs(
    forward: Forward, backward: Backward, neighbours: tuple[int | None, int | None], rows: int
) -> Sequence[tuple[Action, tuple[Action, ...]]]:
    """All actions of one micro-batch on a rank, as pairs (action, actions that come before it).
    ``neighbours`` are the ranks (before, after) in the adjoining stages; messages have ``rows``."""
    index, (before, after) = forward.micro_batch, neighbours
    arrived: tuple[Action, ...] = ()  # the receive of the activations that the forward waits for
    returned: tuple[Action, ...] = ()  # the receive of the gradients that the backward waits for
    needs: list[tuple[Action, tuple[Action, ...]]] = []
    if before is not None:
        inputs = Message(what="a", micro_batch=index, peer=before, rows=rows)
        gradients = Message(what="g", micro_batch=index, peer=before, rows=rows)
        arrived = (Recv(message=inputs),)
        needs += [(arrived[0], ()), (Send(message=gradients), (backward,))]
    if after is not None:
        outputs = Message(what="a", micro_batch=index, peer=after, rows=rows)
        gradients = Message(what="g", micro_batch=index, peer=after, rows=rows)
        returned = (Recv(message=gradients),)
        needs += [(returned[0], ()), (Send(message=outputs), (forward,))]
    return [(forward, arrived), (backward, (forward, *returned)), *needs]


@lru_cache(maxsize=64)
def _of_every_rank(bucket_count: int) -> frozenset[Action]:
    """The actions that every rank does, whatever its micro-batches."""
    buckets = range(bucket_count)
    pulls, pushes = (Pull(bucket=b) for b in buckets), (Push(bucket=b) for b in buckets)
    return frozenset((*pulls, *pushes, Update()))


def _check_once(rank: int, parts: Parts, jobs: Sequence[_Job], bucket_count: int) -> None:
    """Raise ProgramError for an action that this rank lacks, does twice or should not do
    (rule 4)."""
    wanted = set(_of_every_rank(bucket_count))
    for job in jobs:
        wanted.update(action for action, _ in job.needs)
    got = Counter(part for part, _ in parts)
    if len(parts) == len(wanted) and got.keys() == wanted:
        return
    for action in sorted(wanted | got.keys(), key=str):
        if got[action] != (action in wanted):
            raise ProgramError(
                f"rule 4, rank {rank}, action {action}",
                got=f"{got[action]} times",
                wanted=f"{int(action in wanted)}",
            )


def _check_local_order(rank: int, parts: Parts, jobs: Sequence[_Job]) -> None:
    """Raise ProgramError where a part of this rank's program comes before one that it needs
    (rule 3). Rule 4 has been checked: each part is there once."""
    order = {part: at for at, (part, _) in enumerate(parts)}

    def check(part: Action, needed: Action) -> None:
        """Raise ProgramError where ``part`` comes before ``needed`` on this rank."""
        if order[needed] > order[part]:
            raise ProgramError(
                f"rule 3, rank {rank}, action {parts[order[part]][1]}",
                wanted=f"{needed} before {part}",
            )

    pulls = [part for part, _ in parts if isinstance(part, Pull)]
    for part, _ in parts:
        if isinstance(part, Forward):
            check(part, pulls[-1])
    for job in jobs:
        for part, needed in job.needs:
            for other in needed:
                check(part, other)
    for bucket, backward in _last_users(jobs, order).items():
        check(Push(bucket=bucket), backward)
    check(Update(), parts[-1][0])
    _check_pushes_within(rank, parts, jobs)


def _last_users(jobs: Sequence[_Job], order: ActionOrder) -> dict[int, Backward]:
    """By weight bucket the rank's last backward that computes gradients for it. ``order`` has the
    place of each part in the program. The last stage uses bucket 0 too, for a tied embedding."""
    latest: dict[Stage, Backward] = {}
    for job in sorted(jobs, key=lambda job: order[job.backward]):
        latest[job.stage] = job.backward
    users: dict[int, Backward] = {}
    for stage, backward in sorted(latest.items(), key=lambda item: order[item[1]]):
        users |= dict.fromkeys((0, *stage.buckets) if stage.last else stage.buckets, backward)
    return users


def _check_pushes_within(rank: int, parts: Parts, jobs: Sequence[_Job]) -> None:
    """Raise ProgramError unless the pushes within a backward go from the last bucket of its stage
    to the first (rule 3), the order in which a backward completes gradients."""
    own = {job.backward.micro_batch: job.stage.buckets for job in jobs}
    for _, action in parts:
        if isinstance(action, Backward) and action.pushes:
            buckets = own[action.micro_batch][::-1]
            wanted = buckets
            if action.pushes != buckets:  # some of the buckets only, which is allowed
                wanted = tuple(b for b in buckets if b in action.pushes)
            if action.pushes != wanted:
                raise ProgramError(
                    f"rule 3, rank {rank}, action {action}",
                    got=f"pushes of buckets {action.pushes}",
                    wanted="those of its stage, the last first",
                )


def _check_world_order(rank: int, parts: Parts, bucket_count: int) -> None:
    """Raise ProgramError unless this rank pulls from the first bucket to the last, pushes from the
    last to the first, then updates, as all ranks do (rule 1). Rule 4 has been checked."""
    buckets = range(bucket_count)
    pulls, pushes = (Pull(bucket=b) for b in buckets), (Push(bucket=b) for b in reversed(buckets))
    order = (part for part, _ in parts if isinstance(part, Pull | Push | Update))
    for here, wanted in zip(order, (*pulls, *pushes, Update()), strict=True):
        if here != wanted:
            raise ProgramError(
                f"rule 1, rank {rank}, order of the world's collectives",
                got=str(here),
                wanted=f"{wanted} first, as on all ranks",
            )


def _check_messages(parts: Mapping[int, Parts]) -> None:
    """Raise ProgramError unless every two ranks receive the messages that they send each other, in
    the same order (rule 2). ``parts`` are the parts of the programs by rank."""
    sent: dict[tuple[int, int], list[str]] = {}  # by (sender, receiver)
    received: dict[tuple[int, int], list[str]] = {}
    for rank, rank_parts in parts.items():
        for part, _ in rank_parts:
            if isinstance(part, Send | Recv):
                m = part.message
                sends = isinstance(part, Send)
                side, pair = (sent, (rank, m.peer)) if sends else (received, (m.peer, rank))
                side.setdefault(pair, []).append(f"{m.what}{m.micro_batch}*{m.rows}")
    for (sender, receiver), texts in sorted(sent.items()):
        arrivals = zip(texts, received[sender, receiver], strict=True)
        for place, (text, received_text) in enumerate(arrivals):
            if text != received_text:
                raise ProgramError(
                    f"rule 2, message {place} from rank {sender} to rank {receiver}",
                    got=f"{text} sent, {received_text} received",
                    wanted="the same",
                )


@dataclass(slots=True, kw_only=True)
class OwnPrograms:
    """Compiles and checks the programs of ``rank`` over a model of ``bucket_count`` weight buckets.
    Plans whose programs have the same form are checked once. With ``overlap`` a rank pushes
    gradients within its last backward, else after it."""

    rank: int
    bucket_count: int
    overlap: bool = True
    _checked: set[tuple[Any, ...]] = field(init=False, default_factory=set)

    def of(self, plan: Plan) -> Program:
        """The program of ``plan``. Raises ProgramError when it, or one of those it depends on,
        breaks a rule; SpecError when a pipeline has more stages than the model has layers."""
        program = compile_rank(plan, self.rank, self.bucket_count, overlap=self.overlap)
        own_pipelines = [i for i, p in enumerate(plan.pipelines) if self.rank in p.ranks]
        own_count = sum(micro.pipeline in own_pipelines for micro in plan.micro_batches)
        # At most one: a rank of a pipeline with several stages is in no other.
        staged = [
            pipeline
            for i in own_pipelines
            if (pipeline := plan.pipelines[i]).scheme.pipeline > 1 and own_count
        ]
        pushes_within = any(isinstance(a, Backward) and a.pushes for a in program.actions)
        # The compiler makes programs of the same form for plans that agree in this.
        form = (own_count, pushes_within, *((p.scheme, p.shares) for p in staged))
        if form not in self._checked:
            self._check(program, plan, staged)
            self._checked.add(form)
        return program

    def _check(self, own: Program, plan: Plan, staged: list[Pipeline]) -> None:
        """Check this rank's ``own`` program by itself, or, where ``staged`` has its pipeline of
        several stages, together with the programs of that pipeline's ranks, compiled here."""
        if not staged:
            check_alone(own, plan, self.bucket_count)
            return
        members = sorted(staged[0].ranks)
        programs = [
            own
            if rank == self.rank
            else compile_rank(plan, rank, self.bucket_count, overlap=self.overlap)
            for rank in members
        ]
        check_programs(programs, plan, self.bucket_count)
