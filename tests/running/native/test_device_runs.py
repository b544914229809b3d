"""Whole runs of the executor, played again with the rules of NCCL."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.comm.mesh import Groups
from headrace.native.executor import Executor
from headrace.native.storage import Storage
from headrace.spec import Architecture, Lengths
from headrace.spec.known_methods import FACTS
from headrace.spec.random_plans import random_strategy
from plans import random_documents
from ranks import run_ranks
from references.device_runs import DeviceClock, Event, Posted, played
from spread import whole
from strategies import laid_out

MODEL = Architecture(layers=3, hidden=32, heads=8, kv_heads=4, ffn=48, vocabulary=61, kind="llama")
Runs = list[list[Event]]


def _steps(
    ranks: int, seed: int, steps: int, in_flight_bytes: float, node_sizes: tuple[int, ...] | None
) -> list[Event]:
    """What one rank posts in some steps of random plans, groups made where they are needed."""
    rng = np.random.default_rng((seed, ranks))
    methods = {
        width: [name for name, m in FACTS.items() if m.supports(MODEL, width) is None]
        for width in range(1, ranks + 1)
    }
    groups = Groups(node_sizes=node_sizes)
    executor = None
    with Posted() as posted:
        for step in range(steps):
            documents = random_documents(rng, MODEL.vocabulary, int(rng.integers(1, 9)), 23)
            lengths = Lengths.of(len(d) for d in documents)
            plan = random_strategy(
                lengths, ranks, MODEL.layers, rng, methods=methods, most_tensor=2
            )
            executor = executor or Executor(
                Storage(MODEL, groups, seed=0),
                groups,
                seed=0,
                clock=DeviceClock(posted),
                in_flight_bytes=in_flight_bytes,
            )
            executor.run(plan, documents, step=step, lr=1e-3)
    return posted.events


def _everywhere(rank: int, place: int) -> bool:
    return True


def _nowhere(rank: int, place: int) -> bool:
    return False


def _at_will(seed: int, share: float) -> Callable[[int, int], bool]:
    drawn = np.random.default_rng(seed).random((8, 20_000)) < share
    return lambda rank, place: bool(drawn[rank, place])


@pytest.mark.parametrize(
    ("ranks", "node_sizes"),
    [
        (2, None),
        (3, None),
        whole(4, None),
        whole(6, None),
        whole(8, None),
        (4, (2, 2)),
        whole(6, (3, 3)),
        whole(8, (2, 2, 2, 2)),
        whole(7, (3, 1, 3)),
    ],
)
@pytest.mark.parametrize("seed", [0, whole(1), whole(2), whole(3)])
def test_runs_do_not_hang(ranks: int, node_sizes: tuple[int, ...] | None, seed: int) -> None:
    """Catches communicators that are opened in the middle of a step, posts whose order differs
    between ranks, hosts that meet while others wait for them in kernels, and transfers that wait
    for room until others end theirs."""
    few = float("inf") if seed % 2 else 0.0
    runs = run_ranks(ranks, _steps, ranks, seed, 3, few, node_sizes, timeout_s=120)
    assert all(any(e.kind == "post" for e in events) for events in runs)
    assert all(any(e.kind == "sync" for e in events) for events in runs)
    assert sum(e.name == "send" for events in runs for e in events) == sum(
        e.name == "recv_" for events in runs for e in events
    )
    for synchronises in (_nowhere, _everywhere, _at_will(seed, 0.05), _at_will(seed + 9, 0.5)):
        assert played(runs, synchronises) == []


def _strategy(text: str, ranks: int) -> list[Event]:
    groups = Groups()
    with Posted() as posted:
        executor = Executor(
            Storage(MODEL, groups, seed=0), groups, seed=0, clock=DeviceClock(posted)
        )
        plan = laid_out(text, MODEL, (9, 4, 7, 3), ranks)
        documents = tuple(np.zeros(n, np.int32) for n in plan.lengths.tokens)
        executor.run(plan, documents, step=0, lr=1e-3)
    return posted.events


def test_a_group_that_nobody_opened() -> None:
    """Catches a play in which nothing hangs: without what opens it, the group of messages is first
    used between two stages, for which ranks without stages would have to come."""
    runs = run_ranks(4, _strategy, "1*pp2 + 1*cp2", 4)
    assert played(runs, _nowhere) == []
    (messages,) = {e.group for events in runs for e in events if e.peer is not None}
    without = [_without(events, messages) for events in runs]
    assert any(e.peer is not None for _, e in played(without, _nowhere))


def _without(events: list[Event], group: str) -> list[Event]:
    """The events without the collectives of a group, whose posts are numbered anew."""
    kept, number, numbers = list[Event](), 0, dict[int, int]()
    for event in events:
        if event.kind == "post":
            dropped = event.group == group and event.peer is None
            numbers[len(numbers)] = -1 if dropped else number
            number += not dropped
            kept += [] if dropped else [event]
        elif event.kind == "wait":
            kept += [event._replace(of=numbers[event.of])] if numbers[event.of] >= 0 else []
        else:
            kept.append(event)
    return kept


def test_posts_in_another_order() -> None:
    """Catches a play that overlooks what the checker's rule 6 is for: a rank that posts a sum of
    all ranks before the collectives of a group, where another posts it after them."""
    world, pair = ("w", (0, 1)), ("p", (0, 1))

    def run(*order: tuple[str, tuple[int, ...]]) -> list[Event]:
        posts = [Event("post", *group, batch=i) for i, group in enumerate((world, pair, *order))]
        opened = [posts[0], Event("wait", of=0), posts[1], Event("wait", of=1)]
        return [*opened, *posts[2:], Event("wait", of=2), Event("wait", of=3)]

    runs = [run(world, pair), run(pair, world)]
    assert played(runs, _nowhere) == []
    stands = played(runs, _everywhere)
    assert [(rank, event.group) for rank, event in stands] == [(0, "p"), (1, "w")]
    assert played([runs[0], runs[0]], _everywhere) == []
