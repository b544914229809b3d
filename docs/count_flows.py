"""Counts what flows pass (the files whose code runs, the modules that a verb loads) and how often
an idea is written down.

python docs/count_flows.py           write the table of docs/concepts/house.md
python docs/count_flows.py --check   exit 1 when a count is above its limit

What a reader must hold in the head to follow a step is the files that it passes, so they are
counted, and lines are not. A flow is one warm step on one rank, with its planning in the same
process; each is counted in a process of its own. Plans follow from measured costs, so a count may
differ by a file from one time to the next.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "headrace"
PAGE = ROOT / "docs" / "_generated" / "flows.md"

LIMITS = {
    "hr.plan": 25,
    "native step": 77,
    "attached step": 65,
    "hr.adapt forward": 12,
    "hr.attach loads": 224,
}
"""The most files of a flow, or modules of the library that a verb loads."""

IDEAS = {
    "engines of a step (classes that take steps)": 1,
    "protocols of adopted models": 1,
    "planners in a chain (the search, and classes around it)": 3,
    "statements laid out by hand (fmt: skip)": 0,
}
"""How often an idea may be written down."""


@contextmanager
def passed_files() -> Iterator[set[str]]:
    """The files of the library whose functions are called within the block."""
    found = set[str]()
    source = f"{SOURCE}/"

    def on_call(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(source):
            found.add(name.removeprefix(source))

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        yield found
    finally:
        sys.setprofile(before)


def plan_flow() -> set[str]:
    """A warm ``hr.plan`` of a batch on eight devices."""
    import headrace as hr

    costs = hr.costs.roofline(hr.Architecture.preset("llama-8b"), "h100", devices=8)
    first, second = hr.lengths.batches("lognormal:median=2000,sigma=1.4", 2, tokens="256Ki")
    hr.plan(first, costs)
    with passed_files() as found:
        hr.plan(second, costs)
    return found


def native_flow() -> set[str]:
    """A warm step of a native model, from the end of the step before to its own."""
    import headrace as hr

    with tempfile.TemporaryDirectory() as folder, ExitStack() as counting:
        for number in range(40):
            Path(folder, f"{number}.txt").write_text("abcdefg " * (20 + 18 * number))
        config = hr.Config.load(
            ROOT / "examples" / "python-sources.toml",
            f'data.paths=["{folder}"]',
            f'data.cache="{folder}/cache"',
            "data.tokenizer=bytes",
            "data.batch_tokens=2048",
            "run.steps=4",
            "devices.ranks=1",
            "planner.group_sizes=[]",
            "planner.ahead=0",
            "profile.rung_s=0.02",
            "checkpoint.every=0",
        )
        found = list[set[str]]()

        def on_step(step: hr.Step) -> None:
            if step.number == 1:
                found.append(counting.enter_context(passed_files()))
            elif step.number == 2:
                counting.close()

        hr.train(config, out=f"{folder}/run", on_step=on_step)
        return found[0]


def attached_flow() -> set[str]:
    """A warm step of a loop over ``hr.attach``, with its planning."""
    import torch

    import headrace as hr

    torch.manual_seed(0)
    model = _small_model()
    drawn = [torch.randint(0, 256, (n + 1,)) for n in range(20, 400, 10)]
    data = [{"ids": ids[:-1], "labels": ids[1:]} for ids in drawn]
    run = hr.attach(
        model,
        torch.optim.AdamW(model.parameters()),
        data,
        batch_tokens=1024,
        steps=3,
        planner=hr.PlannerConfig(ahead=0),
        say=lambda text: None,
    )
    with ExitStack() as counting:
        found = set[str]()
        for step in run:
            for micro in step:
                micro.backward(micro.loss(model(**micro.inputs)))
            if step.number == 1:
                found = counting.enter_context(passed_files())
            elif step.number == 2:
                counting.close()
    return found


def adapt_flow() -> set[str]:
    """The second forward of a model of several axes, on one rank."""
    import torch

    import headrace as hr

    torch.manual_seed(0)
    stages = [
        hr.AxisStage(modules="0", mixes="s", dims="b t s c"),
        hr.AxisStage(modules="1", mixes="t", dims="b t s c"),
    ]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    run = hr.adapt(model, stages=stages, inputs={"input": "b t s c"}, axis="t", batch="b")
    shard = run.shard({"input": torch.randn(1, 3, 4, 8)})
    run(**shard)
    with passed_files() as found:
        run(**shard)
    return found


def attach_loads() -> set[str]:
    """The modules of the library that ``hr.attach`` loads before it is called."""
    import headrace as hr

    assert hr.attach is not None
    return {name for name in sys.modules if name.split(".")[0] == "headrace"}


FLOWS: dict[str, Callable[[], set[str]]] = {
    "hr.plan": plan_flow,
    "native step": native_flow,
    "attached step": attached_flow,
    "hr.adapt forward": adapt_flow,
    "hr.attach loads": attach_loads,
}


def counted(name: str) -> list[str]:
    """What a flow passes, sorted, counted in a process of its own."""
    command = [sys.executable, __file__, "--flow", name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{name} failed:\n{ended.stderr}")
    found: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _classes(room: str) -> Iterator[tuple[ast.ClassDef, dict[str, str], bool]]:
    """The classes of a room, what their methods return, and whether each is a protocol."""
    for path in sorted((SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                methods = {part.name: ast.unparse(part.returns or part.args) for part in own}
                yield node, methods, any("Protocol" in ast.unparse(b) for b in node.bases)


def ideas() -> dict[str, int]:
    """How often each idea is written down."""
    engine, adopt = list(_classes("engine")), list(_classes("adopt"))
    skips = sum(path.read_text("utf-8").count("fmt: skip") for path in SOURCE.rglob("*.py"))
    return {
        "engines of a step (classes that take steps)": sum(
            "next_step" in methods and not protocol for _, methods, protocol in engine
        ),
        "protocols of adopted models": sum(
            protocol and {"place", "take", "release", "detach"} <= methods.keys()
            for _, methods, protocol in adopt
        ),
        "planners in a chain (the search, and classes around it)": 1
        + sum(methods.get("plan") == "Planned" and not protocol for _, methods, protocol in engine),
        "statements laid out by hand (fmt: skip)": skips,
    }


def page(counts: dict[str, int]) -> str:
    """The table of counts, as Markdown."""
    rows = [f"| {name} | {count} | {LIMITS[name]} |" for name, count in counts.items()]
    table = ["| flow | passes or loads | at most |", "|---|---|---|", *rows]
    written = [f"| {name} | {count} | {IDEAS[name]} |" for name, count in ideas().items()]
    return "\n".join(
        [*table, "", "| idea | written down | at most |", "|---|---|---|", *written, ""]
    )


def _small_model() -> Any:
    """The GPT of ``examples/attach_plain.py``."""
    sys.path.insert(0, str(ROOT / "examples"))
    from attach_plain import Gpt

    return Gpt(features=16, heads=2, layers=2)


def main() -> int:
    """Count all flows, and write or compare the table."""
    if "--flow" in sys.argv:
        print(json.dumps(sorted(FLOWS[sys.argv[-1]]())))
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as side_by_side:
        found = side_by_side.map(counted, FLOWS)
        counts = {name: len(passed) for name, passed in zip(FLOWS, found, strict=True)}
    above = [
        f"{name}: {n}, at most {LIMITS[name]}" for name, n in counts.items() if n > LIMITS[name]
    ]
    above += [
        f"{name}: {n}, at most {IDEAS[name]}" for name, n in ideas().items() if n > IDEAS[name]
    ]
    text = page(counts)
    if "--check" in sys.argv:
        print("\n".join(above), file=sys.stderr)
        return int(bool(above))
    PAGE.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
