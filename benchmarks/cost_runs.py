"""What cost models are compared with: a profile of many lengths, and whole training steps."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cli.display import tell
from headrace.comm.collectives import gather_floats
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.native.counted import ByteCounter
from headrace.native.executor import Executor
from headrace.native.storage import Storage
from headrace.profiling.branches import ProfileOptions
from headrace.profiling.profiler import Profiler
from headrace.spec import Architecture, Cluster, Lengths, Plan
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, TokenOrder
from headrace.spec.profile import Profile
from headrace.spec.strategy import Scheme
from headrace.units import GIB, seconds_text

__all__ = ["ladder_of", "runs_on"]


def ladder_of(shortest: int, longest: int, count: int) -> tuple[int, ...]:
    """At most ``count`` lengths, each by about the same factor above the one before."""
    spaced = np.geomspace(shortest, longest, count)
    return tuple(sorted({round(float(n)) for n in spaced}))


class Peak:
    """The most bytes alive in the forward and backward of a step that were made in it. Pulled rows
    are freed as the forward begins; what comes later (pushes, the update) is left out."""

    def __init__(self, counter: ByteCounter) -> None:
        self._counter, self.bytes = counter, 0

    def entered(self, action: str) -> None:
        """Told every action before it starts."""
        if "F" in action:
            self._counter.reset_peak()
        elif action[0] in "GU" and not self.bytes:
            self.bytes = self._counter.peak_bytes


def profiled(world: World, a: Architecture, o: argparse.Namespace, groups: Groups) -> Profile:
    """A profile of groups of all ranks; the same on every rank."""
    say = tell if world.rank == 0 else lambda text: None
    profiler = Profiler(
        Storage(a, groups, seed=0),
        groups,
        ProfileOptions(
            sizes=(world.ranks,),
            longest=o.longest,
            methods=("local", *o.methods),
            repeats=o.repeats,
            lengths=ladder_of(o.shortest, o.longest, o.lengths),
        ),
        progress=lambda what, done, of: say(f"{world.ranks} ranks: {what}, {done}/{of}"),
    )
    cluster = Cluster(devices=world.ranks, memory_bytes=64 * GIB, device="cpu")
    return profiler.profile(f"ranks={world.ranks}", cluster)


def step_plan(a: Architecture, ranks: int, option: str, order: TokenOrder, tokens: int) -> Plan:
    """One document through all layers by one option, the weights replicated."""
    micro = MicroBatch(
        pipeline=0,
        sequences=(0,),
        order=order,
        layers=LayerPlan.uniform(LayerOption.parse(option), a.layers),
    )
    return Plan(
        lengths=Lengths.of([tokens]),
        devices=ranks,
        working="replicated",
        micro_batches=(micro,),
        pipelines=(Pipeline(scheme=Scheme(context=ranks), ranks=tuple(range(ranks))),),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def steps(
    world: World,
    a: Architecture,
    groups: Groups,
    o: argparse.Namespace,
    options: Iterable[tuple[str, TokenOrder]],
) -> list[dict[str, Any]]:
    """Seconds and bytes of whole steps of the whole model, the most of any rank."""
    say = tell if world.rank == 0 else lambda text: None
    storage, found = Storage(a, groups, seed=0), []
    for option, order in options:
        for tokens in o.step_tokens:
            say(f"{world.ranks} ranks: step of {tokens} tokens, {option}")
            plan = step_plan(a, world.ranks, option, order, tokens)
            found.append({"option": option, "tokens": tokens, **_step(storage, groups, plan, o)})
    return found


def _step(storage: Storage, groups: Groups, plan: Plan, o: argparse.Namespace) -> dict[str, float]:
    vocabulary = storage.architecture.vocabulary
    ids = np.random.default_rng(0).integers(vocabulary, size=plan.lengths.tokens[0])
    documents = (ids.astype(np.int32),)
    executor, best = Executor(storage, groups, seed=0), [float("inf")] * 2
    for number in range(o.steps + 1):
        rows = executor.run(plan, documents, step=0, lr=0.0).rows
        inner = sum(row.seconds for row in rows if row.kind in ("forward", "backward"))
        here = [max(row.end_s for row in rows), inner]
        slowest = [max(c) for c in zip(*gather_floats(here, groups.world), strict=True)]
        if number:  # the first makes buffers and groups
            best = [min(x) for x in zip(best, slowest, strict=True)]
    counts = [float("inf")]
    for _ in range(1 if groups.ranks == 1 else 2):  # gloo's threads may free late
        with ByteCounter() as counter:
            peak = Peak(counter)
            Executor(storage, groups, seed=0, entered=peak.entered).run(
                plan, documents, step=0, lr=0.0
            )
        counts.append(max(row[0] for row in gather_floats([float(peak.bytes)], groups.world)))
    return {"step_s": best[0], "micro_batch_s": best[1], "bytes": min(counts)}


def runs_on(ranks: int, a: Architecture, o: argparse.Namespace) -> dict[str, Any]:
    """The profile of groups of ``ranks``, and steps of the whole model on them."""
    methods = ("local",) if ranks == 1 else o.methods
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            groups = Groups()
            profile = profiled(world, a, o, groups)
            measured = {point.option.partition(":")[2] for point in profile.points}
            orders = {x.option: x.order for x in profile.points}
            options = [
                (f"{name}{level}", orders[f"attention:{name}"])
                for name in methods
                if name in measured
                for level in ("", "+attention", "+full")
            ]
            found = {
                "profile": profile.to_json(),
                "steps": steps(world, a, groups, o, options),
            }
            if world.rank == 0:
                tell(f"{ranks} ranks: profile took {seconds_text(profile.measured_in_s)}")
                result.write_text(json.dumps(found))
            return 0

        # One long operator may hold Python's lock for longer than a rank may be silent.
        code = start(main, ranks=ranks, threads=1, hang_s=120)
        if code:
            sys.exit(code)
        return json.loads(result.read_text())
