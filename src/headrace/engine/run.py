"""One rank's part of a run of a native model: set-up, loop, save, restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.comm.collectives import agree, gather_bytes
from headrace.comm.gpus import settings_text
from headrace.config import Config
from headrace.costs import CostModel
from headrace.costs.calibration import Calibration
from headrace.costs.drift import Drift
from headrace.data.length_summary import summarise
from headrace.data.reader import Reader
from headrace.data.sampler import Batch
from headrace.engine.agreement import newest_whole
from headrace.engine.checkpoints import SavedState, changed
from headrace.engine.cost_cache import calibration_path
from headrace.engine.measured_costs import learnt, measured_costs
from headrace.engine.native_runner import NativeRunner, TrainingBatch
from headrace.engine.plans import sizes_left_out
from headrace.engine.rank import Rank, StepActions
from headrace.engine.record import DrawnSteps, RunRecord, make_trackers, run_facts
from headrace.engine.recovery import LeaveWorld, Recovery
from headrace.engine.run_planner import RunPlanner, Stopped
from headrace.engine.setup import PricedSampler
from headrace.engine.step_engine import Engine
from headrace.errors import CheckpointError, CostError
from headrace.models.hf_weights import read_pretrained
from headrace.native import checkpoint
from headrace.native.checkpoint import BackgroundWriter
from headrace.native.executor import Executor
from headrace.native.machine import matmul_flops_per_s
from headrace.native.optimizers import Schedule
from headrace.native.shard_files import StoredShard
from headrace.spec.architecture import Architecture, parameter_count
from headrace.spec.lengths import Lengths
from headrace.spec.profile import Profile
from headrace.spec.step import Step
from headrace.units import bytes_text, count_text, counted, percent_text

__all__ = ["RankRun"]

_IN_FLIGHT = 1 / 16
"""Fraction of a rank's memory that pulls under way (gathers of weights) may take, and as much again
for pushes (sums of gradients over ranks); the memory margin of plans covers both."""


@dataclass(slots=True, kw_only=True)
class RankRun:
    """One rank's part of the run in ``folder``: ``planner`` plans its steps, ``writer`` writes its
    checkpoints in the background, and ``record``, on the first rank only, its other files."""

    rank: Rank
    folder: Path
    record: RunRecord | None = None
    planner: RunPlanner = field(init=False)
    writer: BackgroundWriter = field(init=False, default_factory=BackgroundWriter)
    _saved_step: int = field(init=False, default=0)  # steps done at the last checkpoint

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.rank.config

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    def train(self, *, resume: bool) -> bool:
        """Take the steps that are left. Collective.

        Args:
            resume: Whether to go on from the last checkpoint, where there is one.

        Returns:
            Whether there were any steps to take.
        """
        rank, steps = self.rank, self.config.run.steps
        path, saved = self._newest_state() if resume else (None, None)
        if path is None and self.config.model.from_ is not None:
            folder = Path(self.config.model.from_)
            rank.say(f"weights       {folder}")
            rank.storage.fill(read_pretrained(folder, rank.storage.architecture))
        costs, profile, known = self._costs(saved)
        drawn = DrawnSteps(wanted=self.config.report.timelines, steps=steps)
        self.planner = RunPlanner(
            costs=costs,
            options=self.config.planner,
            groups=rank.groups,
            seed=self.config.run.seed,
            drawn=drawn,
            calibration=known,
            drift=Drift(),
            tell=rank.say,
        )
        first = 0
        if path is not None and saved is not None:
            if profile is not None:  # measuring used the storage and reset its optimizer
                checkpoint.load(path, self._shards())
            first = self._restore(path, saved)
        # What would fail at the first checkpoint fails now, not hours later.
        checkpoint.require_json(self._state(first, rank.data.sampler.state()).to_json())
        self._announce(first)
        self._check_longest()
        self._tell_margin(costs)
        if isinstance(rank.data.sampler, PricedSampler):
            rank.data.sampler.price(self.planner.agreed_problem())
            rank.say(f"iterations    {rank.data.sampler}")
        if first >= steps:
            rank.say(f"the run has taken {first} of {steps} steps: raise run.steps to go on")
            return False
        try:
            if rank.first:
                self._begin_record(first, costs.fingerprint, profile)
                rank.listener.begin(first, steps)
            self._loop(first, steps, drawn)
        finally:
            self._close()
        return True

    def _check_longest(self) -> None:
        """Raise InfeasiblePlan where the longest sequence of the corpus fits nowhere: before the
        first step, not when it comes. Collective."""
        self.rank.enters("planning for the longest sequence")
        longest = int(self.rank.data.corpus.lengths.max())
        self.planner.check(min(longest, self.config.data.context))

    def _costs(self, saved: SavedState | None) -> tuple[CostModel, Profile | None, Calibration]:
        """The costs to begin with, the profile that they are fitted to, and their calibration by
        earlier runs. A run that goes on from a ``saved`` state on as many ranks keeps its costs, so
        that its plans stay the same; then nothing is measured, the profile is None and the
        calibration empty. Else the costs are measured, or read from the cache. Collective."""
        rank, margin = self.rank, self.config.planner.memory_margin
        if saved is not None:
            costs = saved.costs
            if costs.cluster.devices == rank.world.ranks:
                margin = costs.memory_margin if margin is None else margin
                known = Calibration(fingerprint=costs.fingerprint)
                return costs.replace(cluster=rank.cluster, memory_margin=margin), None, known
        costs, profile = measured_costs(rank)
        known = learnt(rank, costs.fingerprint)
        if margin is None:
            costs = costs.replace(memory_margin=known.peaks.margin(costs.memory_margin))
        return costs, profile, known

    def _tell_margin(self, begun: CostModel) -> None:
        """Tell the fraction of memory that plans leave free, where it was learnt from earlier
        steps: not where the configuration gives it. ``begun`` are the costs that the run begins
        with, whose margin may have been lowered since for the longest sequence."""
        margin, peaks = self.planner.margin, self.planner.calibration.peaks
        if self.config.planner.memory_margin is not None or not peaks.usual.count:
            return
        lowered = ", lowered so that the longest sequence fits"
        self.rank.say(
            f"memory        {percent_text(margin)} kept free: peaks of {peaks.usual.count:,} steps "
            f"were up to {peaks.high:.2f} of what was predicted"
            f"{lowered if margin < begun.memory_margin else ''}"
        )

    def _begin_record(self, first: int, fingerprint: str, profile: Profile | None) -> None:
        """Open the files of the run, on the first rank, to go on with step ``first``.
        ``fingerprint`` is that of the costs, ``profile`` what they were fitted to, where it was
        read or measured now."""
        rank, config = self.rank, self.config
        corpus, architecture = rank.data.corpus, rank.storage.architecture
        self.record = RunRecord(
            self.folder,
            trackers=make_trackers(
                self.folder,
                tensorboard=config.report.tensorboard,
                wandb=config.report.wandb,
                name=config.run.name,
                config=config.to_json(),
            ),
            calibrations=(calibration_path(config, fingerprint),),
        )
        facts = run_facts(
            name=config.run.name,
            machine=rank.machine,
            ranks=rank.world.ranks,
            seed=config.run.seed,
            config=config.to_json(),
            parameters=parameter_count(architecture),
            corpus={
                **summarise(corpus).facts(),
                "fingerprint": corpus.fingerprint,
                "context": config.data.context,
            },
            fingerprint=fingerprint,
            profile=profile,
            memory_bytes=rank.cluster.memory_bytes,
        )
        self.record.begin(first, facts | {"architecture": architecture.to_json()})

    def _loop(self, first: int, steps: int, drawn: DrawnSteps) -> None:
        """Take the steps from ``first`` to ``steps - 1``, saving checkpoints between them; a signal
        ends it after the step under way, with a checkpoint."""
        engine, depth = self._engine(drawn), self.config.planner.ahead
        if depth:
            self.planner.plan_ahead(self._coming(steps - first), depth=depth)
        rank, data = self.rank, self.config.data
        watcher, self._saved_step = rank.world.watcher, first
        self.planner.stop_when(watcher.stop_asked)
        done, sampler = first, rank.data.sampler.state()
        reading = Reader(rank.data.corpus, rank.data.sampler, ahead=data.read_ahead)
        with reading as batches, watcher.stoppable():
            try:
                while done < steps:
                    step = engine.next_step(done, lambda: self._agreed(next(batches)))
                    step.run()
                    done, sampler = done + 1, step.batch.state_after
                    self._save_sometimes(done, sampler)
            except Stopped:
                self._save_stopped(done, sampler)

    def _agreed(self, batch: Batch) -> Batch:
        """Return ``batch``, once it is known to be the same on every rank. Ranks compare it, and
        this is collective, only where costs decide what it holds, as processors may round seconds
        differently. Raises PlanMismatch on every rank where it differs."""
        if self.config.data.iterations is not None:
            ids = f"samples {batch.lengths.ids}"
            agree("samples of the iteration", ids, self.rank.groups.world)
        return batch

    def _save_stopped(self, done: int, sampler: Mapping[str, Any]) -> None:
        """Save a checkpoint after ``done`` steps, as no other follows, unless that was done
        already: then wait for one that is still being written. ``sampler`` is the sampler's state.
        Collective."""
        if done > self._saved_step:
            self._save(done, sampler, wait=True)
        else:
            self._keep_calibration(self.writer.finish(self._gather))

    def _engine(self, drawn: DrawnSteps) -> Engine[TrainingBatch, None]:
        """The engine that plans, runs and records the steps of this rank."""
        rank, config, o = self.rank, self.config, self.config.optimizer
        actions = StepActions(rank=rank)
        executor = Executor(
            rank.storage,
            rank.groups,
            seed=config.run.seed,
            device=rank.world.device,
            checked=config.run.check_finite,
            entered=actions.enters,
            in_flight_bytes=_IN_FLIGHT * rank.cluster.memory_bytes,
        )
        leave = LeaveWorld(
            rerendezvous=rank.world.rerendezvous,
            groups=rank.groups,
            recoverable=lambda: not executor.written,
            prepared=lambda: executor.prepared,
        )
        return Engine(
            runner=NativeRunner(
                executor=executor,
                schedule=Schedule(
                    lr=o.lr,
                    steps=config.run.steps,
                    warmup_steps=o.warmup_steps,
                    floor=o.floor,
                ),
                peak_flops_per_s=matmul_flops_per_s(rank.world.device, rank.dtype),
                expect=actions.expect,
            ),
            planner=self.planner,
            recovery=Recovery(way=leave, groups=rank.groups),
            groups=rank.groups,
            device=rank.world.device,
            drawn=drawn,
            record=self.record,
            heard=self._pass_on,
            tell=rank.say,
            entered=rank.enters,
            advice="lower optimizer.lr and continue from the last checkpoint with --resume",
        )

    def _pass_on(self, step: Step, notices: tuple[str, ...]) -> None:
        """Send a finished step and its warnings to the listener."""
        self.rank.listener.step(step, notices)

    def _coming(self, steps: int) -> Iterator[Lengths]:
        """The lengths of the next ``steps`` batches, from a copy of the sampler, which does not
        move."""
        sampler = self.rank.data.sampler.copy()
        return (sampler.next_batch().lengths for _ in range(steps))

    def _save_sometimes(self, done: int, sampler: Mapping[str, Any]) -> None:
        """Complete a checkpoint that all ranks have written by now, and begin one where it is due
        after ``done`` steps: every ``checkpoint.every`` steps and after the last. ``sampler`` is
        the sampler's state. Collective where a checkpoint is being written or due."""
        steps = self.config.run.steps
        if self.writer.busy:
            self.rank.enters("looking whether all ranks have written the checkpoint")
            self._keep_calibration(self.writer.look(self._gather))
        every = self.config.checkpoint.every
        if done == steps or (every and done % every == 0):
            self._save(done, sampler, wait=done == steps)

    def _gather(self, payload: bytes) -> list[bytes]:
        """The payload of every rank, in rank order. Collective."""
        return gather_bytes(payload, self.rank.groups.world)

    def _save(self, done: int, sampler: Mapping[str, Any], *, wait: bool) -> None:
        """Write the checkpoint after ``done`` steps; a write still under way is finished first. It
        is written in the background where ``checkpoint.background`` is true, or is left out on a
        GPU; with ``wait`` it never is. ``sampler`` is the sampler's state. Collective."""
        rank, background = self.rank, self.config.checkpoint.background
        rank.enters(f"writing checkpoint {done}")
        self._saved_step = done
        if background is None:
            background = rank.world.device != "cpu"
        self._keep_calibration(self.writer.finish(self._gather))
        save = self.writer.begin if background and not wait else checkpoint.save
        self._keep_calibration(
            save(
                self.checkpoints,
                done,
                self._shards(),
                self._state(done, sampler).to_json(),
                rank=rank.world.rank,
                keep=self.config.checkpoint.keep,
                gather=self._gather,
            )
        )

    def _keep_calibration(self, folder: Path | None) -> None:
        """Write what was learnt about costs where a checkpoint was completed in ``folder``; nothing
        where it is None. On the first rank."""
        if folder is None or self.record is None:
            return
        try:
            self.record.keep(self.planner.calibration)
        except CostError as error:
            self.rank.say(f"what was learnt about costs is not kept ({error})")

    def _state(self, done: int, sampler: Mapping[str, Any]) -> SavedState:
        """What a checkpoint after ``done`` steps holds besides tensors; ``sampler`` is the state of
        the sampler there."""
        rank = self.rank
        return SavedState(
            step=done,
            updates=rank.storage.updates,
            ranks=rank.world.ranks,
            sampler=dict(sampler),
            planner=self.planner.state(),
            architecture=rank.storage.architecture,
            config=self.config.to_json(),
        )

    def _shards(self) -> list[StoredShard]:
        """This rank's rows of every weight and of every optimizer state, each with the index of its
        first row in the whole tensor."""
        storage, me = self.rank.storage, self.rank.world.rank
        shapes = {w.name: w.shape for w in storage.table}
        # (name in the checkpoint, name of the weight, this rank's rows)
        rows = [(name, name, master) for name, master in storage.masters.items()]
        for key, state in storage.optimizer_rows():
            _, _, weight = key.partition(".")  # ``exp_avg.WEIGHT``
            rows.append((key, weight, state))
        return [
            StoredShard(
                name=key,
                first_row=storage.partitions[weight].parts[me].start,
                tensor=tensor,
                shape=shapes[weight],
            )
            for key, weight, tensor in rows
        ]

    def _newest_state(self) -> tuple[Path | None, SavedState | None]:
        """Load the newest complete checkpoint into the storage; returns its folder and its state,
        (None, None) where none was saved yet. Collective."""
        rank = self.rank
        rank.enters("reading the checkpoint")
        found = newest_whole(
            checkpoint.newest_first(self.checkpoints),
            self._load_state,
            rank.groups,
            rank.say,
            hint="start anew with another --out (out=...)",
        )
        if found is None:
            rank.say(f"no checkpoint in {self.checkpoints} yet: starting from the first step")
            return None, None
        return found

    def _load_state(self, path: Path) -> SavedState:
        """Load the tensors of a checkpoint into the storage and return its state. Raises
        DamagedCheckpoint for one that is damaged, CheckpointError for that of another model."""
        wanted = self.rank.storage.architecture
        state = SavedState.read(path)
        if state.architecture != wanted:
            raise CheckpointError(
                f"model of {path}",
                got=_told_apart(state.architecture, wanted),
                wanted=_told_apart(wanted, state.architecture),
                hint="resume with the configuration that began the run",
            )
        checkpoint.load(path, self._shards())
        return state

    def _restore(self, path: Path, saved: SavedState) -> int:
        """Restore the sampler, the planner and the count of updates from the state of the
        checkpoint ``path``; returns the step to go on from."""
        rank = self.rank
        rank.storage.updates = saved.updates
        rank.data.sampler.restore(saved.sampler)
        self.planner.restore(saved.planner)
        rank.say(f"continuing from {path}, saved by {counted(saved.ranks, 'rank')}")
        if changes := changed(saved.config, self.config.to_json()):
            rank.say(f"changed since   {', '.join(changes)}")
        return saved.step

    def _announce(self, first: int) -> None:
        """Print the data, model, devices and folder of the run, and what of the data was
        skipped."""
        rank, architecture = self.rank, self.rank.storage.architecture
        parameters = count_text(parameter_count(architecture))
        if left_out := sizes_left_out(self.config.planner, rank.world.ranks):
            rank.say(left_out)
        if first == 0:
            rank.say(str(summarise(rank.data.corpus)))
        for skipped in rank.data.corpus.skipped[:3]:
            rank.say(f"skipped {skipped}")
        for note in rank.data.corpus.notes:
            rank.say(note)
        rank.say(
            f"model         {architecture}, {parameters} parameters\n"
            f"devices       {counted(rank.world.ranks, 'rank')} of {rank.cluster.device}, "
            f"{bytes_text(rank.cluster.memory_bytes)} each, in "
            f"{str(rank.dtype).removeprefix('torch.')}\n"
            f"run           {self.folder}"
        )
        if rank.world.device != "cpu":
            rank.say(settings_text())

    def _close(self) -> None:
        """End the processes that plan ahead, close the files, and tell the listener."""
        self.planner.close()
        if self.record is not None:
            self.record.close()
            self.rank.listener.end()


def _told_apart(model: Architecture, other: Architecture) -> str:
    """A model in words, with its options that ``other`` has otherwise, as the words leave out some
    of them."""
    values, others = model.to_json(), other.to_json()
    names = [name for name in values if values[name] != others[name]]
    return f"{model} ({', '.join(f'{name} {values[name]}' for name in names)})"
