"""What a change of method costs, beside what it costs where a change needs a restart.

    look-up       the functions of one layer, found by the names in the plan
    change        all that a change adds to a step: the look-ups of all layers, and the groups that
                  the method needs within its group, which are there from the second time on
    first change  the same when the groups must be made first (gloo connects them at once);
                  composites have such
    step          a whole training step (plan agreed and checked, weights pulled, forward, backward,
                  gradients pushed, AdamW): the first after a change, beside the same step again.
                  All ordered pairs of methods, one after the other; the third step in a row says
                  what differences mean nothing
    restart       the processes end and are started again, up to the moment the first step could
                  start; half of the restarts before the changes, half after them

Bytes are counted in a turn of its own: the changes', which must be none, and those of the first
step after each, which must be those of the same step without a change.

examples:
    python benchmarks/switching.py                                  # 2 and 4 ranks
    python benchmarks/switching.py --ranks 2 --tokens 4096 --rounds 3
    python benchmarks/switching.py --json switching.json
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from measured import Traffic, settled
from rich.console import Console
from switching_tables import PAPER, PARTS, costs_table, restart_table, summary

from headrace.cli.display import tell
from headrace.comm.collectives import gather_floats
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.methods import branch
from headrace.native.executor import Executor
from headrace.native.machine import machine_facts
from headrace.native.storage import Storage
from headrace.spec import Architecture, Lengths, Plan
from headrace.spec.known_methods import FACTS, subgroups
from headrace.spec.layer_plan import BRANCHES, LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline
from headrace.spec.strategy import Scheme

VOCABULARY = 512


def architecture_of(o: argparse.Namespace) -> Architecture:
    return Architecture(
        layers=o.layers,
        hidden=o.hidden,
        heads=o.heads,
        kv_heads=o.heads,
        ffn=4 * o.hidden,
        vocabulary=VOCABULARY,
        kind="gpt",
        positions=o.tokens,
    )


def usable(names: Iterable[str], a: Architecture, ranks: int) -> tuple[str, ...]:
    """The methods of those named that a group can run."""
    return tuple(name for name in names if FACTS[name].supports(a, ranks) is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job on these ranks: ``tokens`` [T] are its one document."""

    executor: Executor
    groups: Groups
    architecture: Architecture
    tokens: np.ndarray
    methods: tuple[str, ...]

    @classmethod
    def of(cls, a: Architecture, tokens: int, names: Iterable[str]) -> Job:
        """A job that changes between those of the methods that so many ranks can run."""
        groups = Groups()
        ids = np.random.default_rng(0).integers(VOCABULARY, size=tokens).astype(np.int32)
        return cls(
            executor=Executor(Storage(a, groups, seed=0), groups, seed=0),
            groups=groups,
            architecture=a,
            tokens=ids,
            methods=usable(names, a, groups.ranks),
        )

    def plan(self, name: str) -> Plan:
        """All layers by one method, the weights sharded."""
        ranks, layers = self.groups.ranks, self.architecture.layers
        micro = MicroBatch(
            pipeline=0,
            sequences=(0,),
            order=FACTS[name].order,
            layers=LayerPlan.uniform(LayerOption.of(name), layers),
        )
        return Plan(
            lengths=Lengths.of([len(self.tokens)]),
            devices=ranks,
            working="sharded",
            pipelines=(Pipeline(scheme=Scheme(context=ranks), ranks=tuple(range(ranks))),),
            micro_batches=(micro,),
            predicted_s=0.0,
            lower_bound_s=0.0,
        )

    def look_up(self, option: LayerOption) -> None:
        """What a layer does to find its functions."""
        for part in BRANCHES:
            name = option.attention if part == "attention" else option.feed_forward
            branch(name, part, self.architecture, self.groups.ranks)

    def change(self, name: str, groups: Groups) -> None:
        """What a change to a method adds to a step."""
        option = LayerOption.of(name)
        groups.prepare(subgroups(option, self.architecture, groups.ranks))
        for _ in range(self.architecture.layers):
            self.look_up(option)

    def step(self, plan: Plan) -> None:
        """One training step."""
        self.executor.run(plan, (self.tokens,), step=0, lr=1e-4)


def seconds(work: Callable[[], Any]) -> float:
    """Of the slowest rank. Collective."""
    gc.collect()
    dist.barrier()
    began = time.perf_counter()
    work()
    spent = time.perf_counter() - began
    return max(row[0] for row in gather_floats([spent], dist.group.WORLD))


def sent(work: Callable[[], Any]) -> float:
    """Bytes, the most of any rank. Collective."""
    with Traffic() as wire:
        work()
    return max(row[0] for row in gather_floats([wire.sent_bytes], dist.group.WORLD))


def tour(names: list[str]) -> list[str]:
    """Every ordered pair of names once, one after the other, back to the first."""
    return [*chain.from_iterable(combinations(names, 2)), names[0]]


def changes(job: Job, name: str, times: int = 5) -> dict[str, Any]:
    """Seconds of a look-up, of a change, and of a first change where it makes groups; bytes that a
    change sends when its groups are there (a new group exchanges a number between its members)."""

    def look_up() -> None:
        for _ in range(100):
            job.look_up(LayerOption.of(name))

    first, later = [], []
    for _ in range(times):
        fresh = Groups()
        first.append(seconds(lambda fresh=fresh: job.change(name, fresh)))
        later.append(seconds(lambda fresh=fresh: job.change(name, fresh)))
    needed = subgroups(LayerOption.of(name), job.architecture, job.groups.ranks)
    made = Groups()
    job.change(name, made)
    return {
        "method": name,
        "groups": len({members for members in needed if len(members) > 1}),
        "look_up_s": [seconds(look_up) / 100 for _ in range(times)],
        "first_s": first,
        "later_s": later,
        "sent_bytes": sent(lambda: job.change(name, made)),
    }


def pairs(job: Job, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Steps after a change and without one, for all ordered pairs of methods."""
    plans = {name: job.plan(name) for name in job.methods}
    steps = [*pairwise(tour(list(plans)))]
    rows = [
        {"before": before, "after": after, "changed_s": [], "same_s": [], "again_s": []}
        for before, after in steps
    ]
    job.step(plans[rows[0]["before"]])
    for number in range(rounds + 1):
        for i, row in enumerate(rows):
            if i % 10 == 0:
                turn = f"round {number}/{rounds}" if number else "counting bytes"
                say(f"{turn}, change {i + 1}/{len(rows)}")
            plan = plans[row["after"]]
            if not number:  # and warming up
                row["changed_bytes"] = sent(lambda plan=plan: job.step(plan))
                row["same_bytes"] = sent(lambda plan=plan: job.step(plan))
                continue
            for what in ("changed_s", "same_s", "again_s"):
                row[what].append(seconds(lambda plan=plan: job.step(plan)))
    return rows


def switches(world: World, o: argparse.Namespace) -> dict[str, Any]:
    """All about changes within a job; the same on every rank."""
    job = Job.of(architecture_of(o), o.tokens, o.methods)

    def say(text: str) -> None:
        if world.rank == 0:
            tell(f"{world.ranks} ranks: {text}")

    say("look-ups and groups")
    job.groups.prepare({tuple(range(world.ranks))})
    return {
        "changes": [changes(job, name) for name in job.methods],
        "pairs": pairs(job, o.rounds, say),
    }


def restarted(ranks: int, a: Architecture) -> dict[str, float]:
    """Seconds of the parts of one start and end of a job."""
    command = [sys.executable, str(Path(__file__).with_name("restarting.py")), str(ranks)]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, json.dumps(a.to_json())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = time.monotonic()
        process.stdin.close()
        code = process.wait()
    if code or not line:
        sys.exit(f"a restarted job: got exit code {code}, wanted 0")
    marks = [began, *json.loads(line)]
    spent = [time.monotonic() - ready, *(late - early for early, late in pairwise(marks))]
    return dict(zip(PARTS, spent, strict=True))


def measured(ranks: int, o: argparse.Namespace) -> dict[str, Any]:
    """Changes and restarts on so many ranks."""
    a, half = architecture_of(o), o.restarts // 2
    restarts = []

    def restart(times: int) -> None:
        for _ in range(times):
            tell(f"{ranks} ranks: restart {len(restarts) + 1}/{o.restarts}")
            restarts.append(restarted(ranks, a))

    restart(half)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            with settled():
                found = switches(world, o)
            if world.rank == 0:
                result.write_text(json.dumps(found))
            return 0

        # One long operator may hold Python's lock for longer than a rank may be silent.
        code = start(main, ranks=ranks, threads=1, hang_s=120)
        if code:
            sys.exit(code)
        found = json.loads(result.read_text())
    restart(o.restarts - half)
    return {
        "ranks": ranks,
        "tokens": o.tokens,
        "architecture": a.to_json(),
        **found,
        "restarts": restarts,
    }


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="ranks, each in its turn (2 4)")
    add("--tokens", type=int, default=512, help="tokens of the one document (512)")
    add("--hidden", type=int, default=256, help="features of the model (256)")
    add("--heads", type=int, default=8, help="heads (8)")
    add("--layers", type=int, default=4, help="layers of the model (4)")
    add(
        "--methods",
        nargs="+",
        choices=FACTS,
        default=list(FACTS),
        metavar="METHOD",
        help="methods to change between, where the ranks can run them (all)",
    )
    add("--rounds", type=int, default=1, help="times that each pair of methods is timed (1)")
    add("--restarts", type=int, default=6, help="restarts that are timed (6)")
    add("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    o = parser.parse_args(arguments)
    if min(o.ranks) < 2 or min(o.rounds, o.restarts, o.layers) < 1:
        parser.error("--ranks: at least 2; --rounds, --restarts, --layers: at least 1")
    for ranks in o.ranks:
        if o.tokens < ranks or o.heads < ranks or o.hidden % o.heads:
            parser.error(
                f"wanted --tokens and --heads of at least {ranks}, --hidden a multiple of --heads"
            )
        if len(usable(o.methods, architecture_of(o), ranks)) < 2:
            parser.error(f"--methods: at least two that {ranks} ranks can run")
    return o


def main(arguments: list[str] | None = None) -> int:
    o = options(arguments)
    facts = machine_facts("cpu")
    worlds = [measured(ranks, o) for ranks in o.ranks]
    for found in worlds:
        found["summary"] = summary(found)
        found["changed_bytes"] = max(
            *(row["sent_bytes"] for row in found["changes"]),
            *(abs(row["changed_bytes"] - row["same_bytes"]) for row in found["pairs"]),
        )
        if found["changed_bytes"]:
            tell(
                f"a change of method on {found['ranks']} ranks: got {found['changed_bytes']:,.0f} "
                "bytes moved, wanted none; nothing is reported"
            )
            return 1
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{facts['host_cpu']}, {facts['cores']} cores, torch {facts['torch']}, fp32, one thread "
        "per rank\n",
        highlight=False,
    )
    for found in worlds:
        console.print(costs_table(found))
        console.print(restart_table(found))
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(
            json.dumps(
                {"machine": facts, "rounds": o.rounds, "paper": PAPER, "worlds": worlds}, indent=1
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
