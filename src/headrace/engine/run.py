"""One rank's part of a run: set-up, loop, save, restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.comm.collectives import agree, gather_bytes
from headrace.config import Config
from headrace.costs import CostModel
from headrace.costs.calibration import Calibration
from headrace.costs.drift import Drift
from headrace.data import Reader, summarise
from headrace.engine.checkpoints import SavedState, changed
from headrace.engine.measured_costs import learnt, measured_costs
from headrace.engine.native_recovery import Recovery
from headrace.engine.rank import Rank
from headrace.engine.run_planner import RunPlanner
from headrace.engine.run_record import RunRecord, drawn_steps
from headrace.engine.trainer import Trainer, TrainingBatch
from headrace.errors import CheckpointError, DamagedCheckpoint, HeadraceError
from headrace.models.hf_weights import read_pretrained
from headrace.native import checkpoint
from headrace.native.checkpoint import BackgroundWriter
from headrace.native.executor import Executor
from headrace.native.machine import matmul_flops_per_s
from headrace.native.optimizers import Schedule
from headrace.native.shard_files import StoredShard
from headrace.spec.architecture import parameter_count
from headrace.spec.lengths import Lengths
from headrace.spec.profile import Profile
from headrace.spec.step import Step
from headrace.units import bytes_text, count_text, percent_text

__all__ = ["RankRun"]

_IN_FLIGHT = 1 / 16
"""Of the memory for pulls under way, and for pushes: the margin that plans keep has room for it."""


@dataclass(slots=True, kw_only=True)
class RankRun:
    """One rank's part of the run in ``folder``. ``record`` writes, on the first rank only."""

    rank: Rank
    folder: Path
    record: RunRecord | None = None
    planner: RunPlanner = field(init=False)
    writer: BackgroundWriter = field(init=False, default_factory=BackgroundWriter)

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.rank.config

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    def train(self, *, resume: bool) -> bool:
        """Take the steps that are left, from the last checkpoint with ``resume``; returns whether
        there were any. Collective."""
        rank, steps = self.rank, self.config.run.steps
        path, saved = self._saved() if resume else (None, None)
        if path is None and self.config.model.from_ is not None:
            folder = Path(self.config.model.from_)
            rank.say(f"weights       {folder}")
            rank.storage.fill(read_pretrained(folder, rank.storage.architecture))
        costs, profile, known = self._costs(saved)
        self.planner = self._planner(costs, known)
        first = 0
        if path is not None and saved is not None:
            if profile is not None:  # measuring used the storage and reset its optimizer
                checkpoint.load(path, self._shards())
            first = self._restore(path, saved)
        # Before the first step, and not after the first hours.
        checkpoint.require_json(self._state(first, rank.data.sampler.state()).to_json())
        self._announce(first)
        rank.enters("planning for the longest sequence")
        longest = int(rank.data.corpus.lengths.max())
        self.planner.check(min(longest, self.config.data.context))
        self._tell_margin(costs)
        if first >= steps:
            rank.say(f"the run has taken {first} of {steps} steps: raise run.steps to go on")
            return False
        try:
            if rank.first:
                self.record = RunRecord(rank=rank, folder=self.folder, first=first)
                self.record.begin(costs.fingerprint, profile)
                rank.listener.begin(first, steps)
            self._loop(first, steps)
        finally:
            self._close()
        return True

    def _planner(self, costs: CostModel, known: Calibration) -> RunPlanner:
        return RunPlanner(
            groups=self.rank.groups,
            costs=costs,
            options=self.config.planner,
            seed=self.config.run.seed,
            calibration=known,
            drift=Drift(),
            tell=self.rank.say,
            drawn=drawn_steps(self.config),
        )

    def _costs(self, saved: SavedState | None) -> tuple[CostModel, Profile | None, Calibration]:
        """The costs the run was planned with, so that it goes on with the same plans, and what was
        learnt about them; measured anew on another number of ranks."""
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
        """Say how much memory plans leave free, when that was learnt."""
        margin, peaks = self.planner.margin, self.planner.calibration.peaks
        if self.config.planner.memory_margin is not None or not peaks.usual.count:
            return
        lowered = ", lowered so that the longest sequence fits"
        self.rank.say(
            f"memory        {percent_text(margin)} kept free: peaks of {peaks.usual.count:,} steps "
            f"were up to {peaks.high:.2f} of what was predicted"
            f"{lowered if margin < begun.memory_margin else ''}"
        )

    def _loop(self, first: int, steps: int) -> None:
        rank, config, o = self.rank, self.config, self.config.optimizer
        executor = Executor(
            rank.storage,
            rank.groups,
            seed=config.run.seed,
            device=rank.world.device,
            checked=config.run.check_finite,
            entered=rank.enters,
            in_flight_bytes=_IN_FLIGHT * rank.cluster.memory_bytes,
        )
        trainer = Trainer(
            executor=executor,
            groups=rank.groups,
            planner=self.planner,
            schedule=Schedule(lr=o.lr, steps=steps, warmup_steps=o.warmup_steps, floor=o.floor),
            device=rank.world.device,
            peak_flops_per_s=matmul_flops_per_s(rank.world.device, rank.dtype),
            finished=self._finished,
            tell=rank.say,
            entered=rank.enters,
            drawn=drawn_steps(config),
            recovery=Recovery(rerendezvous=rank.world.rerendezvous, groups=rank.groups),
        )
        if rank.first and config.planner.ahead:
            self.planner.plan_ahead(self._coming(steps - first), depth=config.planner.ahead)
        with Reader(rank.data.corpus, rank.data.sampler, ahead=config.data.read_ahead) as batches:
            trainer.train(iter(batches), first, steps)

    def _coming(self, steps: int) -> Iterator[Lengths]:
        """The lengths of the batches to come, from a sampler of its own."""
        sampler = self.rank.data.sampler.copy()
        return (sampler.next_batch().lengths for _ in range(steps))

    def _finished(self, step: Step, batch: TrainingBatch) -> None:
        done, steps = step.number + 1, self.config.run.steps
        notices = self.planner.learn(step)
        step = self.planner.compared(step)
        if self.record is not None:
            self.record.step(step, notices)
            self.rank.listener.step(step, notices)
        if self.writer.busy:
            self.rank.enters("looking whether all ranks have written the checkpoint")
            self._kept(self.writer.look(self._gather))
        every = self.config.checkpoint.every
        if done == steps or (every and done % every == 0):
            self._save(done, batch.state_after, wait=done == steps)

    def _gather(self, payload: bytes) -> list[bytes]:
        return gather_bytes(payload, self.rank.groups.world)

    def _save(self, done: int, sampler: Mapping[str, Any], *, wait: bool) -> None:
        rank, background = self.rank, self.config.checkpoint.background
        rank.enters(f"writing checkpoint {done}")
        if background is None:
            background = rank.world.device != "cpu"
        self._kept(self.writer.finish(self._gather))
        save = self.writer.begin if background and not wait else checkpoint.save
        self._kept(
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

    def _kept(self, folder: Path | None) -> None:
        """What was learnt stays too where a checkpoint is whole."""
        if folder is not None and self.record is not None:
            self.record.keep(self.planner.calibration)

    def _state(self, done: int, sampler: Mapping[str, Any]) -> SavedState:
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
        storage, me = self.rank.storage, self.rank.world.rank
        shapes = {w.name: w.shape for w in storage.table}
        rows = [(name, name, master) for name, master in storage.masters.items()]
        rows += [(key, key.partition(".")[2], state) for key, state in storage.optimizer_rows()]
        return [
            StoredShard(
                name=key,
                first_row=storage.partitions[name].parts[me].start,
                tensor=tensor,
                shape=shapes[name],
            )
            for key, name, tensor in rows
        ]

    def _saved(self) -> tuple[Path | None, SavedState | None]:
        """The newest whole checkpoint and its state, its tensors loaded; nothing when none was
        saved yet. Those that are damaged are told and passed over. Collective."""
        rank, told = self.rank, list[str]()
        rank.enters("reading the checkpoint")
        found = checkpoint.newest_first(self.checkpoints)
        agree("checkpoints to resume from", str(found), rank.groups.world)
        for path in found:
            state, wrong = self._loaded(path)
            said = [text.decode() for text in gather_bytes(wrong.encode(), rank.groups.world)]
            told += [text for text in said if text][:1]
            if state is not None and not any(said):
                return path, state
            rank.say(f"{path} is damaged ({told[-1]}): going on from the one before")
        if told:
            raise CheckpointError(
                f"checkpoints in {self.checkpoints}",
                got=told[0],
                wanted="one that is whole",
                hint="start anew with another --out (out=...)",
            )
        rank.say(f"no checkpoint in {self.checkpoints} yet: starting from the first step")
        return None, None

    def _loaded(self, path: Path) -> tuple[SavedState | None, str]:
        """The state of a checkpoint, its tensors loaded; or what is wrong on this rank."""
        wanted = self.rank.storage.architecture
        try:
            state = SavedState.read(path)
            if state.architecture != wanted:
                raise CheckpointError(
                    f"model of {path}",
                    got=state.architecture,
                    wanted=wanted,
                    hint="resume with the configuration that began the run",
                )
            checkpoint.load(path, self._shards())
        except DamagedCheckpoint as error:
            return None, str(HeadraceError(error.what, got=error.got, wanted=error.wanted))
        return state, ""

    def _restore(self, path: Path, saved: SavedState) -> int:
        """Restore the order of the data and the planner; returns the step to go on from."""
        rank = self.rank
        rank.storage.updates = saved.updates
        rank.data.sampler.restore(saved.sampler)
        self.planner.restore(saved.planner)
        rank.say(f"continuing from {path}, saved by {saved.ranks} ranks")
        if changes := changed(saved.config, self.config.to_json()):
            rank.say(f"changed since   {', '.join(changes)}")
        return saved.step

    def _announce(self, first: int) -> None:
        rank, architecture = self.rank, self.rank.storage.architecture
        parameters = count_text(parameter_count(architecture))
        if first == 0:
            rank.say(str(summarise(rank.data.corpus)))
        for skipped in rank.data.corpus.skipped[:3]:
            rank.say(f"skipped {skipped}")
        rank.say(
            f"model         {architecture}, {parameters} parameters\n"
            f"devices       {rank.world.ranks} ranks of {rank.cluster.device}, "
            f"{bytes_text(rank.cluster.memory_bytes)} each, in "
            f"{str(rank.dtype).removeprefix('torch.')}\n"
            f"run           {self.folder}"
        )

    def _close(self) -> None:
        self.planner.close()
        if self.record is not None:
            self.record.close()
            self.rank.listener.end()
