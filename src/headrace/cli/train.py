"""``headrace train``: the main job, from a configuration to a checkpoint and a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import headrace
from headrace.cli.desk import Desk
from headrace.cli.display import StepDisplay, tell
from headrace.cli.ranks import Rank, launch, learnt, measured_costs, open_rank
from headrace.cli.run_folder import choose_folder
from headrace.cli.shared import SharedPlanner
from headrace.cli.wiring import calibration_path, read_config, remember_costs
from headrace.comm.collectives import agree, gather_bytes
from headrace.comm.launch import World
from headrace.config import Config
from headrace.costs import CostModel
from headrace.costs.learning.calibration import Calibration
from headrace.costs.learning.drift import Drift
from headrace.costs.sources.profile import fit_parts
from headrace.data import Reader, summarise
from headrace.errors import CheckpointError, CostError
from headrace.runtime import checkpoint
from headrace.runtime.executor import Executor
from headrace.runtime.journal import Journal
from headrace.runtime.machine import matmul_flops_per_s
from headrace.runtime.recovery import Recovery
from headrace.runtime.schedule import Schedule
from headrace.runtime.shards import StoredShard
from headrace.runtime.trackers import Tracker, make_trackers
from headrace.runtime.trainer import Step, Trainer, TrainingBatch
from headrace.spec.architecture import Architecture
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.profile import Profile
from headrace.spec.weights import parameter_count
from headrace.units import bytes_text, count_text, percent_text

__all__ = ["train"]

_SAMPLES = 4  # batches ahead from which strategies are proposed


def train(
    config_path: Path, *, ranks: int | None, steps: int | None, out: Path | None, resume: bool,
    changes: list[str],
) -> int:  # fmt: skip
    """Train; prints the path of the report (or of the run's folder) to stdout."""
    config = read_config(config_path, changes, ranks=ranks, steps=steps)
    folder = choose_folder(config, out, resume=resume)

    def main(world: World) -> int:
        return _Run(rank=open_rank(world, config), folder=_agreed(folder, world)).train(resume)

    code = launch(config, main)
    if code == 130:
        tell(f"interrupted; continue with: headrace train {config_path} --out {folder} --resume")
    return code


def _agreed(folder: Path, world: World) -> Path:
    """The first rank's folder: under torchrun each rank named one by its own clock."""
    if world.ranks == 1:
        return folder
    import torch.distributed as dist

    return Path(gather_bytes(str(folder).encode(), dist.group.WORLD)[0].decode())


@dataclass(slots=True, kw_only=True)
class _Run:
    """One rank's part of a run."""

    rank: Rank
    folder: Path
    journal: Journal | None = None
    display: StepDisplay | None = None
    desk: Desk | None = None
    planner: SharedPlanner = field(init=False)
    trackers: list[Tracker] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return self.rank.config

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def train(self, resume: bool) -> int:
        rank, steps = self.rank, self.config.run.steps
        path, saved = self._saved() if resume else (None, {})
        costs, profile, known = self._costs(saved)
        self.desk = self._make_desk(costs, known) if rank.first else None
        self.planner = SharedPlanner(groups=rank.groups, desk=self.desk)
        first = 0
        if path is not None:
            # After the costs: measuring them uses the storage and resets its optimizer.
            first = self._restore(path, saved)
            if self.desk is not None:
                self.desk.restore(saved["planner"])
        self._announce(first)
        longest = int(rank.data.corpus.lengths.max())
        self.planner.check(min(longest, self.config.data.context))
        self._tell_margin(costs)
        if first >= steps:
            rank.say(f"the run has taken {first} of {steps} steps: raise run.steps to go on")
            return 0
        self._open(first, profile)
        try:
            self._loop(first, steps)
        finally:
            self._close()
        if rank.first:
            self._finish()
        return 0

    def _make_desk(self, costs: CostModel, known: Calibration) -> Desk:
        sampler = self.rank.data.sampler
        return Desk(
            costs=costs, options=self.config.planner, seed=self.config.run.seed,
            calibration=known, drift=Drift(), tell=tell,
            samples=lambda: [batch.lengths.tokens for batch in sampler.peek(_SAMPLES)],
        )  # fmt: skip

    def _costs(self, saved: Mapping[str, Any]) -> tuple[CostModel, Profile | None, Calibration]:
        """The costs the run was planned with, so that it goes on with the same plans, and what was
        learnt about them; measured anew on another number of ranks."""
        rank, margin = self.rank, self.config.planner.memory_margin
        if saved:
            costs = CostModel.from_json(saved["planner"]["costs"])
            if costs.cluster.devices == rank.world.ranks:
                margin = costs.memory_margin if margin is None else margin
                known = Calibration(fingerprint=costs.fingerprint)
                return costs.replace(cluster=rank.cluster, memory_margin=margin), None, known
        costs, profile = measured_costs(rank)
        known = learnt(rank, costs.fingerprint)
        if margin is None:
            costs = costs.replace(memory_margin=known.peaks.margin(costs.memory_margin))
            if rank.first:
                remember_costs(self.config, costs)
        return costs, profile, known

    def _tell_margin(self, begun: CostModel) -> None:
        """Say how much memory plans leave free, when that was learnt."""
        if self.desk is None:
            return
        margin, peaks = self.desk.costs.memory_margin, self.desk.calibration.peaks
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
            rank.storage, rank.groups, seed=config.run.seed,
            device=rank.world.device, checked=config.run.check_finite,
            entered=rank.world.watcher.enter,
        )  # fmt: skip
        trainer = Trainer(
            executor=executor, groups=rank.groups, planner=self.planner,
            schedule=Schedule(lr=o.lr, steps=steps, warmup_steps=o.warmup_steps, floor=o.floor),
            device=rank.world.device,
            peak_flops_per_s=matmul_flops_per_s(rank.world.device, rank.dtype),
            finished=self._finished, tell=rank.say,
            recovery=Recovery(rerendezvous=rank.world.rerendezvous, groups=rank.groups),
        )  # fmt: skip
        if self.desk is not None and config.planner.ahead:
            self.desk.plan_ahead(self._coming(steps - first), depth=config.planner.ahead)
        with Reader(rank.data.corpus, rank.data.sampler, ahead=config.data.read_ahead) as batches:
            trainer.train(iter(batches), first, steps)

    def _coming(self, steps: int) -> Iterator[Lengths]:
        """The lengths of the batches to come, from a sampler of its own."""
        sampler = self.rank.data.sampler.copy()
        return (sampler.next_batch().lengths for _ in range(steps))

    def _finished(self, step: Step, batch: TrainingBatch) -> None:
        done, steps = step.number + 1, self.config.run.steps
        notices = self.desk.learn(step) if self.desk is not None else ()
        if self.journal is not None and self.display is not None:
            told = {"notices": list(notices)} if notices else {}
            self.journal.metrics(dict(step.metrics) | told)
            self.journal.plan({"step": step.number} | step.plan.to_json())
            if self._records(step.number):
                self.journal.timelines(_timelines(step))
            for tracker in self.trackers:
                tracker.log(step.metrics)
            self.display.step(step.metrics)
            for notice in notices:
                self.display.notice(notice)
        every = self.config.checkpoint.every
        if done == steps or (every and done % every == 0):
            self._save(done, batch.state_after)

    def _records(self, number: int) -> bool:
        wanted = self.config.report.timelines
        if not wanted:
            return False
        every = max(1, self.config.run.steps // wanted)
        return number % every == 0 or number == self.config.run.steps - 1

    def _save(self, done: int, sampler: Mapping[str, Any]) -> None:
        rank = self.rank
        rank.world.watcher.enter("checkpoint")
        checkpoint.save(
            self.checkpoints, done, self._shards(),
            {
                "step": done,
                "updates": rank.storage.updates,
                "sampler": dict(sampler),
                "planner": self.planner.state(),
                "architecture": rank.storage.architecture.to_json(),
                "config": self.config.to_json(),
                "ranks": rank.world.ranks,
                "headrace": headrace.__version__,
            },
            rank=rank.world.rank, keep=self.config.checkpoint.keep,
            gather=lambda payload: gather_bytes(payload, rank.groups.world),
        )  # fmt: skip
        self._keep_learnt()

    def _keep_learnt(self) -> None:
        """Write what was learnt, for the report of this run and for those to come."""
        if self.journal is None or self.desk is None:
            return
        known = self.desk.calibration
        try:
            known.save(self.folder / "calibration.json")
            known.save(calibration_path(self.config, known.fingerprint))
        except CostError as error:
            tell(f"what was learnt about costs is not kept ({error})")

    def _shards(self) -> list[StoredShard]:
        storage, me = self.rank.storage, self.rank.world.rank
        shapes = {w.name: w.shape for w in storage.table}
        rows = [(name, name, master) for name, master in storage.masters.items()]
        rows += [(key, key.partition(".")[2], state) for key, state in storage.optimizer_rows()]
        return [
            StoredShard(
                name=key, first_row=storage.partitions[name].parts[me].start, tensor=tensor,
                shape=shapes[name],
            )
            for key, name, tensor in rows
        ]  # fmt: skip

    def _saved(self) -> tuple[Path | None, dict[str, Any]]:
        """The checkpoint to go on from and its state; nothing when none was saved yet."""
        rank = self.rank
        path = checkpoint.latest(self.checkpoints)
        agree("checkpoint to resume from", str(path), rank.groups.world)
        if path is None:
            rank.say(f"no checkpoint in {self.checkpoints} yet: starting from the first step")
            return None, {}
        saved = checkpoint.load(path, [])
        found = Architecture.from_json(saved["architecture"])
        if found != rank.storage.architecture:
            raise CheckpointError(
                f"model of {path}",
                got=found,
                wanted=rank.storage.architecture,
                hint="resume with the configuration that began the run",
            )
        return path, saved

    def _restore(self, path: Path, saved: Mapping[str, Any]) -> int:
        """Load weights, optimizer and the order of the data; returns the step to go on from."""
        rank = self.rank
        checkpoint.load(path, self._shards())
        rank.storage.updates = saved["updates"]
        rank.data.sampler.restore(saved["sampler"])
        rank.say(f"continuing from {path}, saved by {saved['ranks']} ranks")
        return int(saved["step"])

    def _announce(self, first: int) -> None:
        rank = self.rank
        summary = summarise(rank.data.corpus)
        if first == 0:
            rank.say(str(summary))
        for skipped in rank.data.corpus.skipped[:3]:
            rank.say(f"skipped {skipped}")
        parameters = parameter_count(rank.storage.architecture)
        rank.say(
            f"model         {rank.storage.architecture}, {count_text(parameters)} parameters\n"
            f"devices       {rank.world.ranks} ranks of {rank.cluster.device}, "
            f"{bytes_text(rank.cluster.memory_bytes)} each\n"
            f"run           {self.folder}"
        )

    def _open(self, first: int, profile: Profile | None) -> None:
        if not self.rank.first:
            return
        self.journal = Journal(self.folder, first)
        if first == 0 or not (self.folder / "run.json").exists():
            self.journal.facts(self._facts(profile))
        self.trackers = make_trackers(
            self.folder, tensorboard=self.config.report.tensorboard,
            wandb=self.config.report.wandb, name=self.config.run.name,
            config=self.config.to_json(),
        )  # fmt: skip
        self.display = StepDisplay(first, self.config.run.steps)

    def _close(self) -> None:
        if self.desk is not None:
            self.desk.close()
        if self.journal is not None:
            self.journal.close()
        if self.display is not None:
            self.display.close()
        for tracker in self.trackers:
            tracker.close()

    def _facts(self, profile: Profile | None) -> dict[str, Any]:
        assert self.desk is not None, "the first rank writes"
        rank, summary = self.rank, summarise(self.rank.data.corpus)
        fits = fit_parts(profile) if profile else []
        errors: dict[str, dict[str, dict[str, float]]] = {"forward": {}, "backward": {}}
        for fit in fits:
            found = {"median": fit.error.median, "worst": fit.error.worst}
            errors[fit.part][f"p{fit.p} {fit.option}"] = found
        return {
            "format": 1,
            "name": self.config.run.name,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "headrace": headrace.__version__,
            "machine": rank.machine,
            "ranks": rank.world.ranks,
            "seed": self.config.run.seed,
            "config": self.config.to_json(),
            "architecture": rank.storage.architecture.to_json(),
            "parameters": parameter_count(rank.storage.architecture),
            "corpus": {
                "name": summary.name,
                "fingerprint": rank.data.corpus.fingerprint,
                "documents": summary.documents,
                "tokens": summary.tokens,
                "median": summary.median,
                "p90": summary.p90,
                "p99": summary.p99,
                "max": summary.longest,
                "skipped": summary.skipped,
                "context": self.config.data.context,
                "histogram": {"edges": list(summary.edges), "counts": list(summary.counts)},
            },
            "costs": {
                "fingerprint": self.desk.costs.fingerprint,
                "error": errors,
                "points": [point for fit in fits for point in fit.to_json()],
            },
            "memory": {"capacity_bytes": rank.cluster.memory_bytes},
        }

    def _finish(self) -> None:
        last = checkpoint.latest(self.checkpoints)
        tell(f"checkpoint    {last}")
        tell(f"metrics       {self.folder / 'metrics.jsonl'}")
        if self.config.report.html:
            # Pictures need packages that training does not.
            from headrace.report import write_report

            print(write_report(self.folder), flush=True)
        else:
            print(self.folder, flush=True)


def _timelines(step: Step) -> dict[str, Any]:
    static = step.facts.get("static_timeline")
    return {
        "step": step.number,
        "measured": step.measured.to_json(),
        "predicted": step.predicted.to_json(),
        "static": static.to_json() if isinstance(static, Timeline) else None,
    }
