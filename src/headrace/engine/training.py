"""Training from Python and from the command line: the same run, which ends differently.

From Python a run on one rank stays in this process; on several each is a process of its own, forked
or new, and sends what the listener hears through a pipe, so that callbacks run in the calling
process, and errors come back as exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from headrace.comm.collectives import gather_bytes
from headrace.comm.launch import World
from headrace.comm.processes import stopping, told_first
from headrace.comm.variables import under_torchrun
from headrace.config import Config
from headrace.costs import CostModel
from headrace.engine.listener import Listener, tell
from headrace.engine.measured_costs import measured_costs
from headrace.engine.rank import Rank, launch, open_rank, run_here
from headrace.engine.record import require_trackers
from headrace.engine.run import RankRun
from headrace.engine.setup import native_or_why
from headrace.engine.training_run import TrainingRun, choose_folder, lock_wait_s, locked
from headrace.errors import ConfigError, HeadraceError, LaunchError
from headrace.spec.step import Step

__all__ = ["Factory", "Training", "on_ranks", "profile", "train", "train_rank"]

Found = TypeVar("Found")

Factory = Callable[[], Any]
"""Makes the model of a rank, a torch.nn.Module, the same on every rank."""

_INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


def train(
    config: Config,
    *,
    model: Factory | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_step: Callable[[Step], object] | None = None,
    tell: Callable[[str], object] = tell,
) -> TrainingRun:
    """Train as a configuration says.

    On one rank it runs in this process; on several it starts its own ranks; under torchrun this
    process is one of them. Call it from the main thread; where CUDA was begun, several ranks take
    some seconds more to start.

    Args:
        config: The run. A model that is not native (``model.from`` a folder of another type of
            transformers) is adopted, as ``hr.compile`` does.
        model: Makes the model of every rank, in the place of ``model.from``; a function of a
            module, so that other processes find it.
        out: The run's folder, a new one under ``run.out`` where it is None.
        resume: Whether to go on from the run's last checkpoint, on any number of ranks.
        on_step: Called with each finished step (``step.loss``, ``step.seconds``, ``step.plan``) in
            this process, and of torchrun's ranks on the first.
        tell: Called with lines for people, likewise.

    Returns:
        The run, with its losses, checkpoints and report; ``run.report()`` writes ``report.html``.

    Raises:
        KeyboardInterrupt: On Ctrl-C, with a checkpoint of the step under way where steps had begun.
        SystemExit: With the shell's code on another signal that ends a job (SIGTERM, SIGHUP,
            SIGUSR1), likewise.
        HeadraceError: As a rank raised it.
        LaunchError: When a rank died; then ``resume`` goes on.

    Example:
        >>> run = hr.train(hr.Config.load("my.toml"), on_step=lambda step: print(step.loss))
    """
    folder = choose_folder(config, None if out is None else Path(out), resume=resume)
    require_trackers(tensorboard=config.report.tensorboard, wandb=config.report.wandb)
    body = Training(config=config, folder=folder, resume=resume, model=model)
    return TrainingRun(on_ranks(config, body, Listener(on_step=on_step, tell=tell)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Trains on a rank, a native model or an adopted one; returns the run's folder.

    Attributes:
        config: The run.
        folder: Where it is written.
        resume: Whether to go on from the last checkpoint.
        model: Makes an adopted model, in the place of ``model.from``.
    """

    config: Config
    folder: Path
    resume: bool
    model: Factory | None = None

    def __post_init__(self) -> None:
        """Refuse a factory of models where the configuration describes a model too."""
        if self.model is not None and self.config.model.model_fields_set:
            raise ConfigError(
                "model of the run",
                got="a factory, and keys of [model]",
                wanted="one of them",
                hint="leave the section [model] empty",
            )

    def __call__(self, world: World, listener: Listener) -> Path:
        """Train as one rank. Collective."""
        why_adopted = "made by a factory" if self.model is not None else native_or_why(self.config)
        if not why_adopted:
            rank = open_rank(world, self.config, listener)
            return train_rank(rank, self.folder, resume=self.resume).folder
        from headrace.engine.adopted_run import train_adopted

        if world.rank == 0:
            listener.tell(f"the model is adopted: it is no native one ({why_adopted})")
        train_adopted(
            world, self.config, self.folder, listener, resume=self.resume, factory=self.model
        )
        return self.folder


def train_rank(rank: Rank, folder: Path, *, resume: bool) -> RankRun:
    """Train as one rank, in the first rank's ``folder``. Collective."""
    # Under torchrun each rank named a folder by its own clock.
    agreed = gather_bytes(str(folder).encode(), rank.groups.world)[0].decode()
    run = RankRun(rank=rank, folder=Path(agreed))
    wait_s = lock_wait_s(rank.world.attempt)
    with locked(run.folder, wait_s=wait_s) if rank.first else nullcontext():
        run.train(resume=resume)
    return run


def profile(config: Config, *, fresh: bool = False) -> CostModel:
    """Measure what a layer costs on the ranks of a configuration, or read what was measured before.

    Ranks are started as by :func:`train`.

    Args:
        config: The run whose model, devices and methods are measured.
        fresh: Whether to measure again what is in the cache.

    Returns:
        The costs, to plan and simulate with.

    Raises:
        HeadraceError: As a rank raised it.
        LaunchError: When a rank died.
    """
    return on_ranks(config, _Profiling(config=config, fresh=fresh), Listener())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profiling:
    """Measures costs on a rank when it is called with the rank's world and a listener; ``fresh``
    measures again what is in the cache. An instance can be pickled, as ranks may be new
    processes."""

    config: Config
    fresh: bool

    def __call__(self, world: World, listener: Listener) -> CostModel:
        """Measure as one rank; returns the costs. Collective."""
        return measured_costs(open_rank(world, self.config, listener), fresh=self.fresh)[0]


def on_ranks(config: Config, body: Callable[[World, Listener], Found], listener: Listener) -> Found:
    """Run ``body(world, listener)`` on all ranks of a configuration; returns what it returns on the
    first. Ranks may be new processes, so ``body`` must be one that can be pickled: a function or an
    instance of a class of a module.

    ``listener`` is called in this process with what the first rank reports. Raises as
    :func:`train` does.
    """
    if under_torchrun() or config.devices.ranks == 1:
        return _in_this_process(config, body, listener)
    pipes = [Pipe(duplex=False) for _ in range(config.devices.ranks)]
    heard = _PipeReader(listener=listener, pipes=[receiver for receiver, _ in pipes])
    write_fds = tuple(sender.fileno() for _, sender in pipes)
    try:
        sending = _Sending(body=body, write_fds=write_fds)
        code = launch(config, sending, each=heard, inherited=write_fds)
    finally:
        for pipe in pipes:
            for end in pipe:
                end.close()
    if heard.error is not None:
        raise heard.error
    _raise_stopped(code)
    if code:
        raise LaunchError(
            "ranks",
            got=f"exit code {code}",
            wanted="exit code 0",
            hint="stderr says which rank failed and where; resume=True goes on from a checkpoint",
        )
    return heard.found[0]


def _raise_stopped(code: int) -> None:
    """Raise KeyboardInterrupt or SystemExit where ``code``, the exit code of ranks, says that a
    signal ended them: it ends the calling program too."""
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    if code - 128 in stopping():
        raise SystemExit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sending:
    """Runs ``body`` on a rank that is a process of its own, and sends what it tells, its errors and
    its result through a pipe. ``write_fds`` are the file descriptors of these pipes, one for each
    rank."""

    body: Callable[[World, Listener], Any]
    write_fds: tuple[int, ...]

    def __call__(self, world: World) -> int:
        """Run the body on this rank with a listener that sends to the parent process; the first
        rank sends the result too. Returns the exit code."""
        sender = Connection(self.write_fds[world.rank], readable=False)
        with _errors_sent(sender):
            found = self.body(world, _Sender(sender))
            if world.rank == 0:
                sender.send(("found", (found,)))
        return 0


def _in_this_process(
    config: Config, body: Callable[[World, Listener], Found], listener: Listener
) -> Found:
    """Run ``body`` in this process, which is the only rank or one that torchrun started; returns
    its result."""
    found: list[Found] = []

    def main(world: World) -> int:
        """Run the body as this rank and keep its result; returns the exit code."""
        found.append(body(world, listener))
        return 0

    if under_torchrun():
        _raise_stopped(launch(config, main))
    else:
        _raise_stopped(run_here(config, partial(_stoppable, main)))
    return found[0]


def _stoppable(main: Callable[[World], int], world: World) -> int:
    """Run ``main`` as the only rank so that a signal that ends a job stops the run after the step
    under way. Returns the exit code of ``main``, or 128 plus the number of the signal."""
    with told_first(world.watcher.stop_lone):
        code = main(world)
    number = world.watcher.stopped_by()
    return 128 + number if number else code


class _Sender(Listener):
    """A listener on a rank that sends every call, as (method name, arguments), to the process that
    started the rank, where :class:`_PipeReader` makes it."""

    def __init__(self, connection: Connection) -> None:
        """Send to ``connection``, the writing end of the rank's pipe."""
        super().__init__()
        self._send = connection.send

    def tell(self, text: str) -> None:
        self._send(("tell", (text,)))

    def progress(self, what: str, done: int, of: int) -> None:
        self._send(("progress", (what, done, of)))

    def begin(self, first: int, steps: int) -> None:
        self._send(("begin", (first, steps)))

    def step(self, step: Step, notices: Sequence[str]) -> None:
        self._send(("step", (step, tuple(notices))))

    def end(self) -> None:
        self._send(("end", ()))


@contextmanager
def _errors_sent(sender: Connection) -> Iterator[None]:
    """Context that sends errors of this library to the parent process, and raises them here too, so
    that the rank fails and the others are told."""
    try:
        yield
    except HeadraceError as error:
        # As texts, since not every value can be pickled.
        texts = {
            "got": None if error.got is None else str(error.got),
            "wanted": None if error.wanted is None else str(error.wanted),
            "hint": error.hint,
        }
        sender.send(("error", (type(error), error.what, texts)))
        raise


class _PipeReader:
    """Makes the calls that ranks send through pipes; called again and again while they run.
    ``found`` gets the first rank's result as its only item, ``error`` the first error."""

    def __init__(self, *, listener: Listener, pipes: list[Connection]) -> None:
        """Call the methods of ``listener`` for messages from ``pipes``, the reading ends of the
        ranks' pipes."""
        self._listener, self._pipes = listener, pipes
        self.found: list[Any] = []
        self.error: HeadraceError | None = None

    def __call__(self) -> None:
        """Pass on all messages that have come, without waiting for more."""
        while ready := wait(self._pipes, timeout=0):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._hear(pipe)

    def _hear(self, pipe: Connection) -> None:
        """Take one message from a pipe: a call of the listener as (method name, arguments), or
        "found" or "error" with a result or an error. Drops the pipe where the rank closed it."""
        try:
            name, arguments = pipe.recv()
        except EOFError:
            self._pipes.remove(pipe)
            return
        if name == "found":
            self.found = list(arguments)
        elif name == "error":
            kind, what, texts = arguments
            error = kind.__new__(kind)  # subclasses may take other arguments
            HeadraceError.__init__(error, what, **texts)
            self.error = self.error or error
        else:
            getattr(self._listener, name)(*arguments)
