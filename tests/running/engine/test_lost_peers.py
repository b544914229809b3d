"""A rank of a loop of one's own that fails or dies, as the other ranks hear of it."""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from ranks import run_ranks
from running.adopt import axial
from running.engine.loops import attached, costs, dataset, llama
from spread import whole

pytest.importorskip("transformers")


HELD: list[Any] = []
"""Models that live until their process ends, as in a script that an error ends: a model that is
freed before leaves its loop in peace."""


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raising() -> None:
    raise ValueError("planted here")


def loop(folder: Path, rank: int, ends: Callable[[], None], *, sharing: bool) -> None:
    """Four steps of a loop; the second micro-batch of step 1 ends ``rank``. With ``sharing``, all
    ranks work on every pack together: the others wait within the model."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = torch.distributed.get_world_size()
    more = {"planner": "static", "static_size": ranks} if sharing else {}
    run = attached(
        model, optimizer, dataset(), folder, steps=4, costs=costs(ranks), check_loss=False, **more
    )
    for step in run:
        for at, micro in enumerate(step):
            if run.rank == rank and step.number == 1 and at == 0:
                (folder / "ended").write_text(str(time.time()))
                ends()
            micro.backward(model(**micro.inputs).loss)


def given_loop(folder: Path, rank: int, ends: Callable[[], None], *, where: str) -> None:
    """Five calls of a run of given batches; step 1 ends ``rank`` within it, before it, or never."""
    model, here = llama(), torch.distributed.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attached(model, optimizer, None, folder, longest=80, costs=costs(2), check_loss=False)

    def may_end(number: int, now: str) -> None:
        if (number, now, here) == (1, where, rank):
            (folder / "ended").write_text(str(time.time()))
            ends()

    for number in range(4):
        may_end(number, "before")
        for micro in run.step(dataset()):
            may_end(number, "within")
            micro.backward(model(**micro.inputs).loss)
    run.map(dataset(), lambda outputs, micro: outputs.logits[..., 0])
    HELD.append(run)


def loop_of_a_program(folder: Path, rank: int) -> None:
    """The loop in which ``rank`` raises an error that nobody catches: it ends as the interpreter
    ends a program."""
    atexit._clear()  # what pytest does at its end is not for a rank
    try:
        loop(folder, rank, raising, sharing=True)
    except ValueError as error:
        sys.last_value = error
        atexit._run_exitfuncs()
        raise


class Broken(list[Any]):
    """Items of which one cannot be read."""

    def __getitem__(self, at: Any) -> Any:
        if at == 3:
            raise OSError("planted here")
        return super().__getitem__(at)


def beginning(folder: Path, rank: int, what: str) -> None:
    """A loop whose beginning fails on one ``rank``, which goes on living for a while; writes down
    the threads that are left."""
    model, items, here = llama(), dataset(), torch.distributed.get_rank()

    def stream() -> Iterator[Any]:
        if here == rank:
            raise OSError("planted here")
        yield from items

    def fail(*_: Any) -> None:
        raise OSError("planted here")

    source: Any = {"an item": Broken(items) if here == rank else items, "a stream": stream()}.get(
        what, items
    )
    if what == "measuring" and here == rank:
        model.model.layers[1].register_full_backward_hook(fail)
    given = {} if what == "measuring" else {"costs": costs(2)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "a mode" and here == rank:
        model.eval()
    (folder / "ended").write_text(str(time.time()))
    try:
        attached(model, optimizer, source, folder, **given)
    finally:
        names = [thread.name for thread in threading.enumerate()]
        (folder / f"threads of {here}").write_text(" ".join(names))
        if here == rank:
            (folder / "ended").write_text(str(time.time()))
            time.sleep(3)


def compiled_loop(
    folder: Path, rank: int, ends: Callable[[], None], *, where: str, wrapped: bool = False
) -> None:
    """Four batches of a loop over ``hr.compile``; batch 2 ends ``rank`` before its ``where``."""
    model: torch.nn.Module = llama()
    run = hr.compile(torch.nn.parallel.DistributedDataParallel(model) if wrapped else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))

    def may_end(number: int, now: str) -> None:
        if (number, now, torch.distributed.get_rank()) == (2, where, rank):
            (folder / "ended").write_text(str(time.time()))
            ends()

    for number in range(1, 5):
        may_end(number, "shard")
        part = run.shard({"input_ids": ids, "labels": ids})
        may_end(number, "forward")
        loss = run(**part.inputs).loss
        may_end(number, "backward")
        run.backward(loss)
        may_end(number, "sum")
        run.add_up(loss)
        optimizer.step()
        optimizer.zero_grad()


def adapted_loop(folder: Path, rank: int, ends: Callable[[], None]) -> None:
    """The same over ``hr.adapt``; batch 2 ends ``rank`` before its forward."""
    made = axial.example()
    assert made.adapted is not None
    run, inputs = made.adapted(made.model), made.inputs
    HELD.append(run)
    for number in range(1, 5):
        part = run.shard(inputs)
        if (number, torch.distributed.get_rank()) == (2, rank):
            (folder / "ended").write_text(str(time.time()))
            ends()
        out = run(**part)
        loss = out.square().sum()
        run.backward(loss)
        run.add_up(loss)
        made.model.zero_grad()


def told(
    folder: Path,
    ranks: int,
    *args: object,
    body: Callable[..., None] = loop,
    **options: object,
) -> tuple[str, float]:
    """(What all ranks raised, seconds since one of them ended)."""

    def work() -> None:
        try:
            body(folder, *args, **options)
        finally:
            (folder / f"{os.getpid()}").write_text(str(time.time()))

    with pytest.raises(AssertionError) as caught:
        run_ranks(ranks, work, timeout_s=60)
    times = [float(path.read_text()) for path in folder.iterdir() if path.name.isdigit()]
    return str(caught.value), max(times) - float((folder / "ended").read_text())


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("ends", [killed, raising])
@pytest.mark.parametrize("ranks", [2, whole(4)])
def test_the_others_name_the_rank_and_the_step(
    ranks: int, ends: Callable[[], None], sharing: bool, tmp_path: Path
) -> None:
    """Catches broken connections that say nothing, and ranks that wait for the limit of their
    group."""
    text, seconds = told(tmp_path, ranks, 1, ends, sharing=sharing)
    others = re.findall(r"PeerLost: rank 1: got (.*)", text)
    assert len(others) == ranks - 1, text
    assert all("step 1" in how for how in others)
    assert seconds < 30


@pytest.mark.parametrize("ends", [killed, raising])
@pytest.mark.parametrize("where", ["within", "before"])
def test_a_run_of_given_batches_names_the_rank(
    where: str, ends: Callable[[], None], tmp_path: Path
) -> None:
    """Catches gloo's own error, or one without a name, where samples are given for each step."""
    text, seconds = told(tmp_path, 2, 1, ends, body=given_loop, where=where)
    assert len(re.findall(r"PeerLost: rank 1: got .*step [01]", text)) == 1, text
    assert seconds < 30


def test_a_run_of_given_batches_that_ends_well_is_no_loss(tmp_path: Path) -> None:
    """Catches a rank that ends after its last batch and is taken for a lost one: nobody says that
    no batch follows."""

    def work() -> str:
        given_loop(tmp_path, -1, killed, where="never")
        if torch.distributed.get_rank():
            HELD[-1]._watch._leave()  # what the interpreter calls at its end
            HELD[-1]._watch._lifeline.close()
            return ""
        time.sleep(1.5)
        return str(HELD[-1]._watch.cause() or "")

    assert run_ranks(2, work, timeout_s=60) == ["", ""]


def test_an_error_that_ends_a_program_is_named(tmp_path: Path) -> None:
    """Catches a rank that raised an error and is said to have ended without a word."""
    text, seconds = told(tmp_path, 2, 1, body=loop_of_a_program)
    assert "PeerLost: rank 1: got raised ValueError: planted here (in step 1" in text
    assert seconds < 30


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("an item", "OSError: planted here"),
        ("a stream", "OSError: planted here"),
        ("measuring", "OSError: planted here"),
        ("a mode", "ModelError: model: got evaluation mode"),
    ],
)
def test_an_error_before_the_first_step_is_named(what: str, error: str, tmp_path: Path) -> None:
    """Catches a loop that fails to begin on one rank, while the others wait for it and then hear of
    a broken connection; and a thread that stays on watch for a loop that never was."""
    text, seconds = told(tmp_path, 2, 1, what, body=beginning)
    assert f"PeerLost: rank 1: got raised {error}" in text
    assert "(in the beginning of the l" in text
    assert seconds < 10
    for rank in range(2):
        assert "loop watch" not in (tmp_path / f"threads of {rank}").read_text()


@pytest.mark.parametrize("ends", [killed, raising])
@pytest.mark.parametrize(
    ("ranks", "where", "wrapped"),
    [
        (2, "forward", False),
        whole(2, "shard", False),
        whole(2, "backward", False),
        whole(2, "sum", False),
        whole(4, "forward", False),
        whole(2, "forward", True),
        whole(2, "backward", True),
    ],
)
def test_a_loop_over_calls_names_the_rank_and_the_batch(
    ranks: int, where: str, wrapped: bool, ends: Callable[[], None], tmp_path: Path
) -> None:
    """Catches gloo's own error where another rank of a loop over hr.compile is gone, and ranks that
    wait for it for half an hour."""
    text, seconds = told(tmp_path, ranks, 1, ends, body=compiled_loop, where=where, wrapped=wrapped)
    others = re.findall(r"PeerLost: rank 1: got (.*)", text)
    assert len(others) == ranks - 1, text
    assert all("batch 2" in how or "batch 1" in how for how in others)
    assert "this is rank 0, in batch 2" in text
    assert seconds < 30


@pytest.mark.parametrize("ends", [killed, whole(raising)])
def test_a_loop_over_axes_names_the_rank_and_the_batch(
    ends: Callable[[], None], tmp_path: Path
) -> None:
    """Catches the same in a loop over hr.adapt."""
    text, seconds = told(tmp_path, 2, 1, ends, body=adapted_loop)
    assert len(re.findall(r"PeerLost: rank 1: got .*batch 2", text)) == 1, text
    assert seconds < 30


def test_a_loop_that_ended_well_is_no_loss(tmp_path: Path) -> None:
    """Catches a rank that is first at the end and is taken for a lost one."""

    def work() -> int:
        loop(tmp_path, -1, killed, sharing=False)
        if torch.distributed.get_rank():
            time.sleep(1.5)
        return 0

    assert run_ranks(2, work) == [0, 0]


def ended_job(folder: Path, rank: int, how: str) -> list[tuple[int, str]]:
    """(exit code, stderr) of both processes of a job of which ``rank`` ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code = f"""
import sys; sys.path[:0] = {[p for p in sys.path if p]!r}
from pathlib import Path
import torch.distributed as dist
from running.engine.test_lost_peers import {how}, loop
dist.init_process_group("gloo")
loop(Path({str(folder)!r}), {rank}, {how}, sharing=False)
"""
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **addresses, "RANK": str(at)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for at in range(2)
    ]
    told = [job.communicate(timeout=120)[1] for job in jobs]
    return [(job.returncode, text) for job, text in zip(jobs, told, strict=True)]


@pytest.mark.slow
def test_an_exception_of_another_rank_is_named(tmp_path: Path) -> None:
    """Catches a rank that raised an error and is said to have ended without a word."""
    (code, text), _ = ended_job(tmp_path, 1, "raising")
    assert code == 1
    assert "PeerLost: rank 1: got raised ValueError: planted here (in step 1" in text


@pytest.mark.slow
def test_the_rank_that_holds_the_store_is_killed(tmp_path: Path) -> None:
    """Catches ranks that hear nothing when the store dies with the first rank."""
    _, (code, text) = ended_job(tmp_path, 0, "killed")
    assert code == 1
    assert "PeerLost: rank 0" in text
